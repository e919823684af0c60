"""Learned costs: they find a law that was put in, beat both baselines, state their error, and are marked."""

from __future__ import annotations

import random
from dataclasses import replace

import numpy as np
import pytest
from graphs import cluster_of, encoder, sensitivity_of
from roofline_costs import HERE, lawful, truth

from qsync.errors import CalibrationError, FormatError, MismatchError
from qsync.lowering.incremental import lower
from qsync.lowering.lowered_graph import Cast
from qsync.operators.precision import Precision
from qsync.planning import plan, replay
from qsync.predictor.cost_model.fill_profile import carry, fill, simulate
from qsync.predictor.cost_model.model import CostModel, asked, held_out_shapes
from qsync.predictor.cost_model.op_calls import (
    Argument,
    Call,
    has_direction,
    least_s,
    moved_bytes,
    operations,
    parts,
    sum_s,
    value_call,
)
from qsync.predictor.cost_model.roofline_law import Law
from qsync.predictor.cost_model.samples import DIRECTIONS, Sample, choose, samples_of
from qsync.predictor.cost_model.shape_pool import pool
from qsync.records.datasheets import DATASHEETS, datasheet
from qsync.records.graph import OpGraph
from qsync.records.plans import Plan
from qsync.records.profiles import Cost, Profile, shown
from qsync.replayer import cast_cost, run_cost

MODES = ("fp32", "bf16", "int8")
LINEAR = Call("linear", (Argument((64, 32)), Argument((16, 32), parameter=True)), (64, 16), 2 * 64 * 32 * 16)


def linear_samples(num: int, seed: int = 0, noise: float = 0.03) -> list[Sample]:
    draw = random.Random(seed)
    products = [call for call in pool(6 * num, seed) if call.kind == "linear"][:num]
    return [
        Sample(c, m, d, truth(c, m, d, HERE) * draw.gauss(1, noise), HERE, f"model {i % 3}")
        for i, c in enumerate(products)
        for m in MODES
        for d in DIRECTIONS
    ]


@pytest.fixture(scope="module")
def learned() -> CostModel:
    return CostModel.learn(linear_samples(40))


def test_a_known_law_is_found_also_for_a_kind_that_only_its_family_has():
    """No roofline knows the shares of the peaks."""

    def followed(samples: list[Sample], noise: float = 0.0) -> list[Sample]:
        draw, found = random.Random(1), []
        for s in samples:
            launch, products, memory = parts(*asked(s))
            found.append(
                replace(s, seconds=(4 * launch + 2 * products + memory / 0.7) * draw.gauss(1, noise))
            )
        return found

    known, new = followed(linear_samples(40), 0.03), followed(linear_samples(30, seed=9))
    model = CostModel(known)
    bias = [Argument((s.call.output[-1],), parameter=True) for s in new]
    added = [
        replace(s, call=replace(s.call, kind="addmm", inputs=(b, *s.call.inputs[:2])))
        for s, b in zip(new, bias, strict=True)
    ]
    for samples in (new, followed(added)):
        seconds = np.array([s.seconds for s in samples])
        calls = [asked(s) for s in samples]
        own = np.abs(model.seconds(calls) / seconds - 1)
        assert np.median(own) < 0.03
        assert np.median(own) < 0.2 * np.median(
            np.abs(np.array([least_s(*call) for call in calls]) / seconds - 1)
        )


def test_the_stated_error_is_that_of_shapes_not_seen(learned):
    assert 0.01 < learned.error.of("linear") < 0.08
    assert learned.error.of("no such kind") == learned.error.overall[0]
    assert learned.error.step is not None and learned.error.step < 0.1
    predicted = held_out_shapes(learned.samples, CostModel)
    fitted = learned.seconds([asked(s) for s in learned.samples])
    seconds = np.array([s.seconds for s in learned.samples])
    assert np.abs(fitted / seconds - 1).mean() < np.abs(predicted / seconds - 1).mean()


def test_a_model_survives_json_and_prices_alike(learned, tmp_path):
    again = CostModel.load(learned.save(tmp_path / "costs.json"))
    new = [asked(sample) for sample in linear_samples(5, seed=3)]
    assert again.error == learned.error
    np.testing.assert_allclose(again.seconds(new), learned.seconds(new), rtol=1e-9)
    with pytest.raises(FormatError, match="cost model, samples, entry 1, entry 1: expected `object`"):
        CostModel.from_json({**learned.to_json(), "samples": [[1]]})
    with pytest.raises(FormatError, match="samples of a cost model do not fit .IndexError"):
        CostModel.from_json({**learned.to_json(), "sheets": []})


def test_another_device_is_priced_at_the_same_shares_of_its_peaks(learned):
    """Twice the device, twice as fast: nothing else of the model knows which device it is."""
    rates = {name: 2 * rate for name, rate in HERE.flops_per_s.items()}
    twice = replace(HERE, flops_per_s=rates, bytes_per_s=2 * HERE.bytes_per_s, launch_s=HERE.launch_s / 2)
    for sample in linear_samples(4, seed=5):
        slow, fast = learned.seconds([asked(sample), (*asked(sample)[:3], twice)])
        assert slow == pytest.approx(2 * fast, rel=1e-6)


def test_no_samples_are_refused():
    with pytest.raises(CalibrationError, match="no samples to learn costs from"):
        CostModel([])


def test_a_law_keeps_its_familys_where_samples_are_few():
    law = Law.fit(np.array([[1.0, 0.0, 0.0]]), np.array([3.0]), Law((1.0, 5.0, 7.0)))
    assert law.parts[1:] == pytest.approx((5.0, 7.0), rel=1e-3)
    assert 1.5 < law.parts[0] < 3.0


def test_a_law_finds_a_fixed_cost_of_hundreds_of_launches():
    """As kernels have it that prepare for long, though the law starts from a launch or two."""
    draw = np.random.default_rng(0)
    parts_s = np.stack([np.full(30, 2e-6), *np.exp(draw.uniform(-12, -7, (2, 30)))], 1)
    law = Law.fit(parts_s, parts_s @ np.array([400.0, 2.0, 3.0]))
    assert law.parts == pytest.approx((400, 2, 3), rel=0.1)


def test_the_roofline_counts_operations_and_bytes():
    assert operations(LINEAR, "fp32", "forward", "bf16") == {"fp32": LINEAR.flops}
    assert operations(LINEAR, "int8", "backward", "bf16") == {"bf16": 2 * LINEAR.flops}
    assert moved_bytes(LINEAR, "fp32", "forward") == 4 * (64 * 32 + 16 * 32 + 64 * 16)
    assert moved_bytes(LINEAR, "int8", "forward") == 64 * 32 + 16 * 32 + 4 * 64 * 16
    bound = least_s(LINEAR, "fp32", "forward", HERE)
    assert bound == HERE.launch_s + max(LINEAR.flops / 1e11, 4 * (64 * 32 + 16 * 32 + 64 * 16) / 1e10)
    fixed = replace(LINEAR, inputs=(Argument((64, 32), gradient=False), LINEAR.inputs[1]))
    assert operations(fixed, "fp32", "backward", "bf16") == {"fp32": LINEAR.flops}


def test_a_sum_of_gradients_costs_its_bytes_whatever_kind_made_them(learned):
    """Also of a kind that moves bytes badly, and was never seen adding any."""
    x, weight = LINEAR.inputs
    summed = replace(LINEAR, inputs=(replace(x, summed=True), weight))
    bytes_s = 3 * 4 * 64 * 32 / HERE.bytes_per_s
    for direction, more in (("forward", 0.0), ("backward", bytes_s)):
        alone, both = learned.seconds([(call, "bf16", direction, HERE) for call in (LINEAR, summed)])
        assert both - alone == pytest.approx(more)
    seen = [
        replace(s, call=replace(s.call, inputs=(replace(s.call.inputs[0], summed=True), *s.call.inputs[1:])))
        for s in learned.samples
    ]
    seen = [replace(s, seconds=s.seconds + sum_s(s.call, s.direction, HERE)) for s in seen]
    taught = CostModel(seen).seconds([(LINEAR, "bf16", "backward", HERE)])
    np.testing.assert_allclose(taught, learned.seconds([(LINEAR, "bf16", "backward", HERE)]), rtol=0.02)


def test_encodings_have_no_backward():
    cast = Call("cast", (Argument((8, 8)),), (8, 8))
    assert has_direction(cast, "fp32 bf16", "backward") and not has_direction(
        cast, "fp32 int8_row", "backward"
    )


def test_few_samples_are_chosen_where_the_calls_lie():
    wanted = pool(400, seed=1)
    chosen = choose(wanted, 40, HERE)
    assert 30 <= len(chosen) <= 50 and set(chosen) <= set(wanted)
    assert {call.kind for call in chosen} >= {"linear", "conv2d", "matmul", "attention"}
    assert chosen == choose(wanted, 40, HERE)
    # From the smallest calls of a kind to the largest.
    sizes = sorted(call.flops for call in wanted if call.kind == "linear")
    mine = [call.flops for call in chosen if call.kind == "linear"]
    assert min(mine) <= sizes[len(sizes) // 4] and max(mine) >= sizes[3 * len(sizes) // 4]


def graph_of(rows: int) -> OpGraph:
    return encoder(num_layers=2, rows=rows)


def test_an_unprofiled_precision_is_filled_in_and_marked():
    graph = graph_of(32)
    profile = lawful(graph)
    op = graph.adjustable[0].name
    ops = {**profile.ops, op: {"fp32": profile.ops[op]["fp32"]}}
    filled = fill(replace(profile, ops=ops), graph, sheet=HERE)
    assert filled.origin == "learned" and set(filled.filled) == {op}
    assert filled.ops[op]["fp32"] == profile.ops[op]["fp32"]
    assert filled.ops[op]["int8"].total_s == pytest.approx(profile.ops[op]["int8"].total_s, rel=0.3)
    assert filled.hash != profile.hash
    assert (
        not fill(profile, graph, sheet=HERE).filled and fill(profile, graph, sheet=HERE).origin == "measured"
    )


def test_another_batch_shape_is_filled_from_the_one_that_was_profiled(tmp_path):
    graph, larger = graph_of(32), graph_of(64)
    profile, actual = lawful(graph), lawful(larger)
    filled = fill(profile, larger, measured_on=graph, sheet=HERE)
    filled.check_graph(larger)
    for op in larger.adjustable:
        got, wanted = filled.ops[op.name]["bf16"].total_s, actual.ops[op.name]["bf16"].total_s
        assert got == pytest.approx(wanted, rel=0.2)
    assert set(filled.filled) >= {op.name for op in larger.adjustable}
    assert all(0 <= error < 1 for error in filled.filled.values())
    assert filled.error > profile.error  # so that predictions carry a wider interval
    assert Profile.load(filled.save(tmp_path / "profile.json")) == filled
    with pytest.raises(MismatchError, match="give the graph that it was measured on as measured_on="):
        fill(profile, larger)
    with pytest.raises(MismatchError, match="measured for another model"):
        fill(profile, encoder(num_layers=1))


def test_a_filled_profile_is_not_learned_from():
    graph, larger = graph_of(32), graph_of(64)
    filled = fill(lawful(graph), larger, measured_on=graph, sheet=HERE)
    learned_calls = {sample.call.kind for sample in samples_of(larger, filled, HERE)}
    assert "linear" not in learned_calls
    with pytest.raises(MismatchError, match="is simulated; learn from a measured one"):
        samples_of(graph, simulate(lawful(graph), graph, datasheet("T4"), "infer"))
    with pytest.raises(CalibrationError, match="no product of the profile of .* was measured at this shape"):
        simulate(filled, larger, datasheet("T4"), "infer")
    with pytest.raises(CalibrationError, match="no product of the profile of .* was measured at this shape"):
        fill(filled, graph_of(128), measured_on=larger)
    model = CostModel(samples_of(graph, lawful(graph), HERE))
    assert simulate(filled, larger, datasheet("T4"), "infer", model).origin == "simulated"


def test_what_is_filled_in_for_an_absent_device_stays_simulated():
    graph, larger = graph_of(32), graph_of(64)
    model = CostModel(samples_of(graph, lawful(graph), HERE))
    card = simulate(lawful(graph), graph, datasheet("T4"), "infer", model)
    assert fill(card, larger, model, measured_on=graph).origin == "simulated"
    names = {op.name: op.name for op in graph.ops}
    assert carry(card, graph, graph, names, model).origin == "simulated"
    assert carry(lawful(graph), graph, graph, names, model).origin == "carried"


def test_a_type_that_ran_in_nothing_long_enough_to_measure_has_a_rate():
    graph = graph_of(32)
    whole = lawful(graph)
    ops = {
        name: {mode: Cost(1e-7, 1e-7) if mode == "int8" else cost for mode, cost in costs.items()}
        for name, costs in whole.ops.items()
    }
    card = simulate(replace(whole, ops=ops), graph, datasheet("T4"), "infer")
    assert card.ops[graph.adjustable[0].name]["int8"].total_s > 0


def test_casts_that_were_not_measured_take_as_long_as_other_passes_over_memory():
    """A processor that emulates low precisions profiles FP32 alone, without a cast."""
    graph, sheet = graph_of(512), datasheet("T4")
    whole = lawful(graph)
    ops = {name: {"fp32": costs["fp32"]} for name, costs in whole.ops.items() if "fp32" in costs}
    alone = simulate(replace(whole, ops=whole.ops | ops, casts={}, cast_fit={}), graph, sheet, "infer")
    casts = {
        (value, "fp32", "bf16"): Cost(*(truth(call, "fp32 bf16", d, HERE) for d in ("forward", "backward")))
        for value, call in value_call(graph).items()
    }
    cards = {"with": simulate(replace(whole, casts=casts), graph, sheet, "infer"), "without": alone}
    assert "not measured" in alone.machine["casts"] and "casts" not in cards["with"].machine
    lines = [cards[name].cast_fit["fp32", "fp16"] for name in ("without", "with")]
    taken_s, expected_s = (start.forward_s + 2**22 * rise.forward_s for start, rise in lines)
    assert taken_s == pytest.approx(expected_s, rel=0.3)


@pytest.fixture(scope="module")
def simulated() -> dict[str, Profile]:
    graph = graph_of(512)
    profile = lawful(graph, "train")
    model = CostModel(samples_of(graph, profile))
    return {name: simulate(profile, graph, sheet, name, model) for name, sheet in DATASHEETS.items()}


def test_a_simulated_device_has_its_own_precisions_and_prices_every_lowering(simulated):
    graph = graph_of(512)
    ops = {op.name: op for op in graph.ops}
    for name, profile in simulated.items():
        precisions = datasheet(name).precisions
        assert profile.origin == "simulated" and profile.machine["data sheet"] == name
        op = graph.adjustable[0]
        assert set(profile.precisions_of(op.name)) == set(precisions)
        narrow = "bf16" if Precision.BF16 in precisions else None
        for precision in precisions:
            chosen = {
                o.name: precision for o in graph.adjustable if precision in profile.precisions_of(o.name)
            }
            for node in lower(graph, chosen, narrow).nodes:
                price = (
                    cast_cost(profile, node)
                    if isinstance(node, Cast)
                    else run_cost(profile, node, ops[node.op])
                )
                assert 0 <= price.total_s < 1


def test_a_faster_device_is_simulated_as_faster(simulated):
    def products(name: str) -> float:
        ops = graph_of(512).adjustable
        return sum(simulated[name].ops[op.name]["fp32"].total_s for op in ops)

    assert products("B200") < products("A100") < products("T4")


def test_what_is_simulated_is_labelled_wherever_it_is_shown(simulated, tmp_path):
    graph = graph_of(512)
    profiles = {"train": lawful(graph, "train"), "infer": replace(simulated["L4"], device_class="infer")}
    cluster = cluster_of(precisions=(Precision.FP32, Precision.BF16, Precision.INT8))
    chosen = plan(graph, profiles, sensitivity_of(graph), cluster)
    assert chosen["infer"].origin == "simulated" and chosen["train"].origin == "measured"
    saved = chosen.save(tmp_path / "plan.json")
    assert '"origin": "simulated"' in saved.read_text()
    assert Plan.load(saved) == chosen
    timeline = replay(graph, chosen, profiles, cluster)
    assert (
        timeline["infer"].origin == "simulated"
        and timeline.to_json()["classes"]["infer"]["origin"] == "simulated"
    )
    assert shown("infer", "simulated") == "infer (simulated device)" and shown("train", "measured") == "train"


def test_torch_s_own_dropout_is_no_sample_of_the_one_in_lowered_graphs():
    graph = encoder(1)
    profile = lawful(graph)
    drops = [op.name for op in graph.ops if op.kind == "dropout"]
    ops = {
        op: {**modes, "fp32 as traced": Cost(1.0, 1.0)} if op in drops else modes
        for op, modes in profile.ops.items()
    }
    assert drops and samples_of(graph, replace(profile, ops=ops), HERE) == samples_of(graph, profile, HERE)
