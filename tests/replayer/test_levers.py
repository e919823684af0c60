"""Shares of the batch and passes: priced from what was measured, refused where it was not."""

from __future__ import annotations

import itertools
from dataclasses import replace

import pytest
import torch
from graphs import Builder, cluster_of, encoder, images, mlp, profile_of, sensitivity_of

import qsync
from qsync.allocator import allocate, check_plan, find_warnings
from qsync.allocator.problem import make_problem
from qsync.errors import FormatError, MismatchError
from qsync.lowering.incremental import Lowering
from qsync.operators.precision import Precision
from qsync.predictor.memory.peak import bytes_throughout
from qsync.records.levers import ClassLevers, Levers, Without, samples_of
from qsync.records.plans import Plan
from qsync.records.profiles import Cost
from qsync.replayer import GradientExchange, Recapture, profiles_under_levers, replay
from qsync.replayer.costs.class_costs import ClassCosts
from qsync.replayer.levers.accumulation import with_other_passes
from qsync.replayer.levers.batch_size import at_samples, resized, times

BF16, INT8 = Precision.BF16, Precision.INT8
SLOW = {"train": 1.0, "infer": 3.0}


def profiles_of(graph, **changes):
    return {
        name: profile_of(graph, name, slow=slow, latency_s=1e-8, cast_s=1e-11, **changes)
        for name, slow in SLOW.items()
    }


GRAPH, SMALLER = mlp(3, rows=16), mlp(3, rows=8)
PROFILES, OTHER = profiles_of(GRAPH), Recapture(SMALLER, profiles_of(SMALLER))
ALONE = Recapture(SMALLER, {})
CLUSTER, SENSITIVITY = cluster_of(), sensitivity_of(GRAPH)


def levered(other=OTHER, profiles=PROFILES, cluster=CLUSTER, **classes):
    return profiles_under_levers(GRAPH, profiles, cluster, Levers(classes), other)


def test_a_graph_between_two_captures_is_the_one_that_would_be_captured():
    for make in (mlp, encoder):
        expected = make(2, rows=12)
        found = resized(make(2, rows=16), make(2, rows=8), 12)
        assert found.shapes_hash == expected.shapes_hash and found.hash == expected.hash
        assert [value.shape for value in found.inputs] == [value.shape for value in expected.inputs]
    assert resized(GRAPH, SMALLER, 12) == mlp(3, rows=12)
    assert resized(GRAPH, SMALLER, 16) is GRAPH


class Counted(torch.nn.Module):
    """A model in which torch's derivatives save indices, log-probabilities and more."""

    def __init__(self) -> None:
        super().__init__()
        self.conv, self.head = torch.nn.Conv2d(3, 8, 3, padding=1), torch.nn.Linear(8 * 16, 50)

    def forward(self, x, y):
        x = torch.nn.functional.max_pool2d(torch.nn.functional.elu(self.conv(x)) ** 3, 2)
        return torch.nn.functional.cross_entropy(self.head(x.flatten(1)), y)


def test_what_derivatives_save_follows_the_samples():
    few, some, many = (
        qsync.capture(Counted(), (torch.randn(n, 3, 8, 8), torch.arange(n))) for n in (4, 6, 8)
    )
    found = resized(many, few, 6)
    assert [op.derivative for op in found.ops] == [op.derivative for op in some.ops]
    assert len({op.derivative for graph in (few, some) for op in graph.ops if op.kind == "max_pool2d"}) == 2


def test_gradients_of_other_passes_are_there_once_however_often_the_model_is_called():
    called = replace(GRAPH, num_calls=3)
    added = bytes_throughout(with_other_passes(called, 2)) - bytes_throughout(called)
    batch = sum(value.num_bytes for value in GRAPH.inputs if value.kind == "batch")
    assert added == 3 * batch + sum(value.num_bytes for value in GRAPH.parameters)


def test_a_step_of_several_whole_passes_waits_for_all_its_samples():
    cluster = cluster_of({"train": 1, "infer": 2})
    profiles = {name: replace(profile, loading_s=1e-3) for name, profile in PROFILES.items()}
    found = levered(profiles=profiles, cluster=cluster, train=ClassLevers(32, passes=2), infer=ClassLevers(8))
    assert found["train"].loading_s == pytest.approx(2e-3)


def test_below_both_profiles_the_smaller_one_is_the_nearer():
    other = Recapture(mlp(3, rows=20), profiles_of(mlp(3, rows=20)))
    fits = {name: replace(p, cast_fit=dict(list(p.cast_fit.items())[:1])) for name, p in PROFILES.items()}
    at = resized(GRAPH, other.graph, 12)
    found = at_samples(fits["infer"], GRAPH, other, 12, at)
    assert found.cast_fit == fits["infer"].cast_fit


def test_between_two_profiles_costs_lie_on_the_line_through_them():
    at = resized(GRAPH, SMALLER, 12)
    found, expected = (
        at_samples(PROFILES["infer"], GRAPH, OTHER, 12, at),
        profile_of(mlp(3, rows=12), slow=3.0),
    )
    assert found.origin == "interpolated" and found.shapes_hash == at.shapes_hash
    for op, modes in expected.ops.items():
        for mode, cost in modes.items():
            assert found.ops[op][mode].total_s == pytest.approx(cost.total_s)
    casts = {("x", "fp32", "bf16"): Cost(1.0)}, {("x", "fp32", "bf16"): Cost(0.5)}
    one = replace(PROFILES["infer"], host_s=3e-5, outside=Cost(2e-6, 4e-6), casts=casts[0])
    two = replace(OTHER.profiles["infer"], host_s=1e-5, outside=Cost(1e-6, 2e-6), casts=casts[1])
    found = at_samples(one, GRAPH, Recapture(SMALLER, {"infer": two}), 12, at)
    assert (found.host_s, found.outside.total_s) == pytest.approx((2e-5, 4.5e-6))
    assert found.casts["x", "fp32", "bf16"].forward_s == pytest.approx(0.75)


def test_a_mode_that_only_the_first_profile_has_grows_as_the_others_do():
    """A second profile takes uniform steps alone, and some forms are only in mixtures."""
    profile = PROFILES["infer"]
    op, modes = next((op, modes) for op, modes in profile.ops.items() if len(modes) > 2)
    gone = next(reversed(modes))
    theirs, at = OTHER.profiles["infer"], resized(GRAPH, SMALLER, 12)

    def found(of_op):
        other = Recapture(SMALLER, {"infer": replace(theirs, ops={**theirs.ops, op: of_op})})
        return at_samples(profile, GRAPH, other, 12, at).ops[op][gone]

    half = {mode: Cost(cost.forward_s / 2, cost.backward_s / 2) for mode, cost in modes.items()}
    exact, without = found(half), found({mode: cost for mode, cost in half.items() if mode != gone})
    assert without.forward_s == pytest.approx(exact.forward_s) == pytest.approx(0.75 * modes[gone].forward_s)
    assert without.backward_s == pytest.approx(exact.backward_s)


def test_with_one_profile_what_has_samples_costs_in_proportion_and_it_says_so():
    casts = {("x", "fp32", "bf16"): Cost(1.0), ("fc0.weight", "fp32", "bf16"): Cost(1.0)}
    measured = replace(PROFILES["infer"], loading_s=1.0, casts=casts)
    found = at_samples(measured, GRAPH, ALONE, 8, SMALLER, loaded=16)
    assert found.origin == "proportional"
    assert found.ops["fc1"]["bf16"].total_s == pytest.approx(measured.ops["fc1"]["bf16"].total_s / 2)
    assert found.ops["loss"]["fp32"].total_s == pytest.approx(measured.ops["loss"]["fp32"].total_s / 2)
    assert [cost.forward_s for cost in found.casts.values()] == [0.5, 1.0]
    assert (found.host_s, found.optimizer_s, found.loading_s) == (measured.host_s, measured.optimizer_s, 1.0)


@pytest.mark.parametrize("rows", [8, 24])
def test_profiles_in_which_more_samples_take_no_longer_say_nothing_and_costs_are_in_proportion(rows):
    graph, more = mlp(3, rows=rows), rows > 16
    profile = replace(PROFILES["infer"], outside=Cost(PROFILES["infer"].ops["fc1"]["bf16"].forward_s))
    theirs, at = profiles_of(graph)["infer"], resized(GRAPH, graph, 12)

    def found(of_ops, of_outside=1.0):
        ops = {op: {mode: times(c, of_ops) for mode, c in modes.items()} for op, modes in profile.ops.items()}
        other = replace(theirs, ops=ops, outside=times(profile.outside, of_outside))
        return at_samples(profile, GRAPH, Recapture(graph, {"infer": other}), 12, at)

    longer = 1.01 if more else 0.99
    for one in (found(longer), found(1.0, longer), found(longer, longer)):
        assert one.origin == "interpolated"
    for one in (found(1.0), found(1 / longer), found(1.0, 1 / longer)):
        assert one.origin == "proportional"
        expected = profile.ops["fc1"]["bf16"].total_s * 12 / 16
        assert one.ops["fc1"]["bf16"].total_s == pytest.approx(expected)


def test_costs_too_far_from_what_was_profiled_are_refused():
    with pytest.raises(
        FormatError, match="30 samples in one pass are too far from the 16 and 8 .* choose 6 to 24"
    ):
        levered(infer=ClassLevers(2), train=ClassLevers(30))
    with pytest.raises(FormatError, match="2 samples in one pass are too far from the 16 .* choose 4 to 64"):
        levered(ALONE, train=ClassLevers(30), infer=ClassLevers(2))
    assert levered(train=ClassLevers(24), infer=ClassLevers(8))["train"].origin == "interpolated"
    assert levered(ALONE, train=ClassLevers(28), infer=ClassLevers(4))["infer"].origin == "proportional"


@pytest.mark.parametrize("device", ["cpu", "cuda"])
def test_passes_cost_their_sum_but_for_weights_that_are_cast_once(device):
    costs = {"slow": 3.0, "latency_s": 1e-8, "cast_s": 1e-11, "bucket_s_per_byte": 1e-12}
    half = replace(profile_of(SMALLER, "infer", **costs), machine={"device": device})
    of_device = replace(PROFILES["infer"], machine={"device": device}, bucket_s_per_byte=1e-12)
    whole, cluster = {**PROFILES, "infer": of_device}, cluster_of(device=device)
    twice = levered(Recapture(SMALLER, {"infer": half}), whole, cluster, infer=ClassLevers(passes=2))["infer"]

    def work(profile, graph):
        costs = ClassCosts(Lowering(graph, {"fc1": BF16}, "bf16"), profile)
        return GradientExchange(GRAPH, CLUSTER).work(costs)

    one, both = work(half, SMALLER), work(twice, twice.graph_of(GRAPH))
    base, slope = half.cast_fit["fp32", "bf16"]
    cast_s = sum(base.forward_s + n * slope.forward_s for n in (32 * 32, 32))  # fc1's weight and bias
    cast_s *= device == "cpu"  # a GPU casts them in every pass
    added_s = 4 * 3 * (32 * 32 + 32) * 1e-12  # gradients of the first pass, to which the second adds its own
    copied_s = added_s  # and which are copied into buckets in the last pass alone
    first_s = one.lead_s + one.backward_s - copied_s
    assert both.lead_s == pytest.approx(first_s + added_s + one.lead_s - cast_s, rel=1e-12)
    assert (both.ready_s, both.backward_s) == (one.ready_s, one.backward_s)
    assert both.optimizer_s == one.optimizer_s


def test_passes_save_what_waits_for_backward_and_pay_with_a_second_gradient():
    wide, narrow = mlp(3, width=16, rows=1024), mlp(3, width=16, rows=512)
    cluster = cluster_of()

    def memory(graph, profiles):
        return replay(graph, {"train": {}, "infer": {}}, profiles, cluster)["infer"].memory_bytes

    profiles = profiles_of(wide)
    whole, half = memory(wide, profiles), memory(narrow, profiles_of(narrow))
    found = profiles_under_levers(
        wide, profiles, cluster, Levers({"infer": ClassLevers(passes=2)}), Recapture(narrow, {})
    )
    gradients, rest = 4 * 3 * (16 * 16 + 16), 4 * 512 * 16
    assert memory(wide, found) == half + gradients + rest < whole


def test_an_absent_gpu_casts_its_weights_in_every_pass():
    """Its profile is simulated and names no machine: the class says what the device is."""
    graph, smaller = mlp(3, width=16, rows=16), mlp(3, width=16, rows=8)
    plan = {"train": {}, "infer": {op.name: BF16 for op in graph.adjustable}}
    levers = Levers({"infer": ClassLevers(passes=2)})

    def compute_s(device: str) -> float:
        cluster = cluster_of()
        classes = tuple(replace(c, device=device) for c in cluster.classes)
        cluster = replace(cluster, classes=classes)
        absent = {
            name: replace(profile, machine={}, origin="simulated")
            for name, profile in profiles_of(graph).items()
        }
        found = profiles_under_levers(graph, absent, cluster, levers, Recapture(smaller, {}))
        return replay(graph, plan, found, cluster)["infer"].compute_s

    assert compute_s("cuda") > compute_s("cpu")


def test_unequal_shares_are_faster_and_weigh_by_samples():
    plain = allocate(GRAPH, PROFILES, SENSITIVITY, CLUSTER, slack=0.3)
    profiles = levered(train=ClassLevers(22), infer=ClassLevers(10))
    assert profiles["infer"].origin == "interpolated"
    shared = allocate(GRAPH, profiles, SENSITIVITY, CLUSTER, target_s=plain.target_s)
    assert shared.added_variance < plain.added_variance
    assert check_plan(GRAPH, shared, profiles, SENSITIVITY, CLUSTER).ok
    assert shared.levers == Levers({"train": ClassLevers(22), "infer": ClassLevers(10)})
    assert shared.levers.used == ("share",)
    # What 10 of 32 samples add, which 16 were measured to: their own rounding averages out less.
    weight = (10 / 32) ** 2 * 16 / 10
    problem = make_problem(GRAPH, profiles, SENSITIVITY, CLUSTER)
    assert problem.classes["infer"].variance["fc2"][INT8] == pytest.approx(weight * SENSITIVITY["fc2", INT8])
    assert problem.classes["train"].variance["fc2"][INT8] == pytest.approx(
        (22 / 32) ** 2 * SENSITIVITY["fc2", INT8]
    )


def test_under_levers_the_exact_solver_is_exact():
    graph, smaller = mlp(3, rows=16), mlp(3, rows=8)
    profiles = profiles_under_levers(
        graph, profiles_of(graph), CLUSTER,
        Levers({"train": ClassLevers(20, passes=2), "infer": ClassLevers(12, passes=2)}),
        Recapture(smaller, {}),
    )  # fmt: skip
    plan = allocate(graph, profiles, SENSITIVITY, CLUSTER, slack=0.1, gap=0.0)
    names, problem = [op.name for op in graph.adjustable], make_problem(graph, profiles, SENSITIVITY, CLUSTER)
    least = min(
        sum(problem.classes["infer"].variance[op][p] for op, p in zip(names, chosen, strict=True))
        for chosen in itertools.product((Precision.FP32, BF16, INT8), repeat=len(names))
        if replay(
            graph, {"train": {}, "infer": dict(zip(names, chosen, strict=True))}, profiles, CLUSTER
        ).step_s
        <= plan.target_s * (1 + 1e-9)
    )
    assert 0.0 < plan.added_variance == pytest.approx(least) and plan.gap == pytest.approx(0.0, abs=1e-6)


def test_a_plan_with_levers_is_not_priced_without_them():
    profiles = levered(train=ClassLevers(20), infer=ClassLevers(12))
    plan = allocate(GRAPH, profiles, SENSITIVITY, CLUSTER)
    with pytest.raises(
        MismatchError, match=r"the plan gives train 20 samples, its profile .* carry the profiles over"
    ):
        replay(GRAPH, plan, PROFILES, CLUSTER)
    with pytest.raises(MismatchError, match="its profile is for"):
        replay(GRAPH, replace(plan, levers=None), profiles, CLUSTER)
    assert not check_plan(GRAPH, plan, PROFILES, SENSITIVITY, CLUSTER).ok
    assert replay(GRAPH, plan, profiles, CLUSTER).step_s == plan.step_s


def test_levers_come_through_files_and_plans_without_them_stay_as_they_were(tmp_path):
    profiles = levered(train=ClassLevers(20), infer=ClassLevers(12, passes=2))
    plan = allocate(GRAPH, profiles, SENSITIVITY, CLUSTER)
    plan = replace(plan, levers=replace(plan.levers, without={"share": Without(0.1, 2.0)}))
    assert Plan.load(plan.save(tmp_path / "plan.json")) == plan
    assert plan.levers.used == ("share", "accumulate")
    assert "infer  levers: 12 samples in 2 passes -> none" in plan.diff(replace(plan, levers=None))
    assert "levers" not in allocate(GRAPH, PROFILES, SENSITIVITY, CLUSTER).to_json()
    broken = plan.to_json()
    broken["levers"]["classes"]["infer"]["passes"] = 0
    with pytest.raises(FormatError, match="levers, classes, infer, passes: expected `int` >= 1, found 0"):
        Plan.from_json(broken)


def test_levers_that_cannot_be_are_refused_with_what_to_do():
    with pytest.raises(FormatError, match="the shares 1 x 20 . 1 x 16 make 36 samples a step, not the 32"):
        levered(train=ClassLevers(20))
    with pytest.raises(FormatError, match="the 16 samples of infer cannot be taken in 3 passes"):
        levered(infer=ClassLevers(passes=3))
    with pytest.raises(FormatError, match="no device class 'other'"):
        profiles_under_levers(GRAPH, PROFILES, CLUSTER, Levers({"other": ClassLevers(8)}), OTHER)
    with pytest.raises(MismatchError, match="was captured with 16 alone; capture it"):
        levered(None, infer=ClassLevers(passes=2))
    with pytest.raises(MismatchError, match="both captures of mlp have 16 samples"):
        resized(GRAPH, mlp(3, rows=16), 8)
    with pytest.raises(MismatchError, match="not of the same operators of mlp, they first differ in"):
        resized(GRAPH, mlp(2, rows=8), 8)
    with pytest.raises(MismatchError, match="operators of mlp; capture both alike"):
        resized(GRAPH, replace(SMALLER, ops=SMALLER.ops[:-1]), 8)
    ops = [replace(op, kind="relu") if op.kind == "gelu" else op for op in SMALLER.ops]
    first = next(op.name for op in SMALLER.ops if op.kind == "gelu")
    with pytest.raises(MismatchError, match=f"they first differ in {first}; capture both alike"):
        resized(GRAPH, replace(SMALLER, ops=tuple(ops)), 8)
    builder = Builder("odd")
    builder.op("loss", "loss", "fixed", [builder.enter("w", (4,), "parameter")], ())
    with pytest.raises(FormatError, match="odd has no batch tensor as input"):
        samples_of(builder.build())


def test_batch_norm_under_unequal_shares_is_doubted():
    graph, smaller = images(2, rows=16), images(2, rows=8)
    for levers, expected in (({"infer": ClassLevers(passes=2)}, 1), ({}, 0)):
        profiles = profiles_under_levers(
            graph, profiles_of(graph), CLUSTER, Levers(levers), Recapture(smaller, {})
        )
        plan = allocate(graph, profiles, sensitivity_of(graph), CLUSTER)
        found = [text for text in find_warnings(graph, plan, profiles, CLUSTER) if "batch norms" in text]
        assert len(found) == expected and all("(accumulate)" in text for text in found)


def test_gradients_of_other_passes_have_the_types_of_their_parameters():
    graph = mlp(2, 16, 32)
    typed = tuple(replace(v, dtype="bf16") if v.kind == "parameter" else v for v in graph.inputs)
    for each, size in ((graph, 4), (replace(graph, inputs=typed), 2)):
        added = [v for v in with_other_passes(each, 2).inputs if v.name.startswith("gradients of other")]
        trained = sum(v.num_elements for v in graph.parameters if v.requires_grad)
        assert sum(v.num_bytes for v in added) == size * trained
