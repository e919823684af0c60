"""The main job: real ranks, real data, all that it promises to write, and what it refuses at the start."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from graphs import cluster_of, encoder, mlp, profile_of, sensitivity_of

from qsync.allocator import check_plan, explain
from qsync.backend.precisions_that_pay import emulated_precisions
from qsync.errors import QSyncError
from qsync.experiments.harness.ranks import FAST, WEAK
from qsync.experiments.mixed import publish
from qsync.experiments.mixed.launch import run_demo
from qsync.experiments.mixed.predicted_steps import predicted_ways, replayed
from qsync.experiments.mixed.report import (
    NOISIER,
    SLOWER,
    UNSAID,
    bars,
    closing_lines,
    heldout_difference,
    table,
)
from qsync.experiments.mixed.ways import (
    ALL_16,
    ALL_INT8,
    ALONE,
    DDP,
    LB_BSP,
    QSYNC,
    QSYNC_ALL,
    QSYNC_SHARE,
    TITLES,
    WEAK_16,
    WEAK_INT8,
    WEAK_INT8_ALL,
    first_alike,
    rate,
    samples_by_class,
    ways,
)
from qsync.operators.precision import Precision
from qsync.records.plan_folder import Basis
from qsync.records.plans import Plan
from qsync.replayer import Recapture, profiles_under_levers

WEAK_SHARE = 0.35
BELOW_FP32 = (Precision.FP32, Precision.BF16, Precision.INT8, Precision.INT8_ALL)
OF_A_RUN = (
    "measured_step_s", "predicted_step_s", "wait_fraction", "low_precision_op_fraction",
    "low_precision_flop_fraction", "added_variance", "heldout_loss", "peak_memory_bytes",
)  # fmt: skip


def on_ranks(test):
    return pytest.mark.dist(pytest.mark.slow(pytest.mark.timeout(600)(test)))


@pytest.fixture(scope="module")
def demo(tmp_path_factory) -> tuple[Path, dict]:
    # At this share the weak rank stays slower whatever it lowers, so that noise cannot turn the plan around.
    out = tmp_path_factory.mktemp("demo")
    return out, run_demo(workload="resnet-small", steps=4, weak_share=WEAK_SHARE, out=out, rounds=1)


@on_ranks
def test_the_report_says_of_every_run_what_was_measured_and_predicted(demo):
    out, content = demo
    assert json.loads((out / "figures.json").read_text()) == content
    # INT8 in all products is there where 16 bits are no faster than FP32, and no way in what is emulated.
    emulated = emulated_precisions(torch.device("cpu"))
    about = {
        WEAK_16: Precision.BF16, ALL_16: Precision.BF16, WEAK_INT8: Precision.INT8, ALL_INT8: Precision.INT8
    }  # fmt: skip
    expected = [name for name in TITLES if about.get(name) not in emulated and name != WEAK_INT8_ALL]
    assert [name for name in content["runs"] if name != WEAK_INT8_ALL] == expected
    for run in content["runs"].values():
        assert all(run[name] is not None for name in OF_A_RUN)
        assert run["measured_step_s"] > 0 and run["predicted_step_s"] > 0
    assert content["parameters_identical_across_ranks"] is True
    for name in ("machine", "seed", "commit", "emulated", "measured", "steps", "verdict"):
        assert name in content
    assert all({"name", "measured", "limit", "holds"} <= one.keys() for one in content["bars"])
    assert content["emulated"] is True and content["ranks"] == [FAST, WEAK]
    assert 0 < content["emulated_share"][WEAK] <= 1.3 * WEAK_SHARE  # other processes take from it
    assert set(content["runs"][QSYNC]["wait_fraction"]) == {"0", "1"}
    assert content["runs"][ALONE]["samples_a_step"] == content["runs"][QSYNC_SHARE]["samples_a_step"]
    assert table(content).row_count == len(content["runs"])


@on_ranks
def test_only_the_weak_class_is_lowered_and_the_plan_holds_where_it_was_made(demo):
    out, content = demo
    plan, basis = Plan.load(out / "plan.json"), Basis.load(out)
    plan.check_graph(basis.graph)
    assert plan["train"].lowered == ()
    profiles = profiles_under_levers(
        basis.graph, basis.profiles, basis.cluster, plan.levers, Recapture.load(out)
    )
    reasons = explain(basis.graph, plan, profiles, basis.sensitivity, basis.cluster)
    assert tuple(reason.op for reason in reasons) == plan["infer"].lowered
    certificate = check_plan(basis.graph, plan, profiles, basis.sensitivity, basis.cluster)
    # The basis holds what was learned while training; the plan was made before. What may differ is time.
    assert all("memory" not in violation for violation in certificate.violations)
    runs = content["runs"]
    lowered = {name: run["low_precision_flop_fraction"] for name, run in runs.items()}
    assert max(lowered[QSYNC], lowered[QSYNC_SHARE]) <= max(lowered.values())
    assert all(runs[name]["added_variance"] == 0.0 for name in (ALONE, DDP, LB_BSP))
    if WEAK_INT8 in runs:
        assert lowered[QSYNC] <= lowered[WEAK_16]
        assert runs[ALL_INT8]["added_variance"] > runs[WEAK_INT8]["added_variance"] > 0.0


@on_ranks
def test_memory_is_predicted_as_it_was_measured(demo):
    out, content = demo
    graph = Basis.load(out).graph
    values = {value.name: value for value in graph.inputs}
    # FP32's fastest convolutions keep a filter in the other memory order where that is faster. The prediction
    # counts one for each, at the most (`made_for_backward`); how many there are is up to the processor.
    filters = sum(values[op.inputs[1]].num_bytes for op in graph.ops if op.kind == "conv2d")
    classes = {"0": "train", "1": "infer"}
    for run in content["runs"].values():
        for rank, measured in run["peak_memory_bytes"].items():
            assert 0.9 * measured <= run["predicted_memory_bytes"][classes[rank]] <= 1.1 * measured + filters


@on_ranks
def test_pictures_and_trace_are_there(demo):
    out, _ = demo
    for name in ("allocation.png", "timeline.png", "memory.png"):
        assert (out / name).read_bytes().startswith(b"\x89PNG")
    events = json.loads((out / "trace.json").read_text())["traceEvents"]
    assert {event["ph"] for event in events} == {"M", "X"}
    assert not list(out.glob("*.tmp")) and not list(out.glob(".*"))


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"workload": "lenet"}, "unknown workload 'lenet'; choose one of gpt, gpt-small"),
        ({"workload": "resnet-small", "weak_share": 0.0}, "--weak-share must be in .0, 1., found 0.0"),
        ({"workload": "resnet-small", "weak_share": 1.5}, "--weak-share must be in .0, 1., found 1.5"),
        ({"seeds": 0}, "--seeds must be at least 1, found 0"),
        ({"steps": 0}, "--steps must be at least 2, found 0"),
        ({"steps": 1}, "--steps must be at least 2, found 1"),
        ({"rounds": 0}, "--rounds must be at least 1, found 0"),
        ({"workload": "resnet", "data": Path("x.txt")}, "leave out --data"),
        ({"data": Path("nowhere.txt")}, "nowhere.txt"),
    ],
)
def test_bad_options_are_one_sentence_and_nothing_is_written(options, message, tmp_path):
    out = tmp_path / "out"
    with pytest.raises(QSyncError, match=message):
        run_demo(out=out, **options)
    assert not out.exists()


def test_the_held_out_difference_pairs_seeds():
    runs = {QSYNC: {"heldout_losses": [1.0, 2.0, 3.0]}, DDP: {"heldout_losses": [0.9, 1.8, 2.7]}}
    found = heldout_difference(runs)
    assert found["mean"] == pytest.approx(0.2)
    assert found["standard_error"] == pytest.approx(0.1 / 3**0.5)
    assert heldout_difference({name: {"heldout_losses": [1.0]} for name in runs})["standard_error"] is None


def test_a_plan_that_lowers_nothing_says_why(tmp_path):
    content = json.loads((publish.ROOT / publish.FIGURES).read_text())
    content["heldout_difference"] = {"mean": 0.0, "standard_error": None}
    said = "lowers nothing, because that saves no time"
    assert any(
        line.startswith("Measured, against the strongest") for line in closing_lines(content, tmp_path)
    )
    assert not any(said in line for line in closing_lines(content, tmp_path))
    runs = content["runs"]
    runs[QSYNC_SHARE]["low_precision_op_fraction"] = 0.0
    uniforms = [name for name in runs if name.startswith("weak_")]
    ddp_s = runs[DDP]["measured_step_s"]
    for name in uniforms:
        runs[name]["measured_step_s"] = 1.5 * ddp_s
    runs[uniforms[-1]]["measured_step_s"] = 0.9 * ddp_s
    assert not any(said in line for line in closing_lines(content, tmp_path))  # one would have saved time
    runs[uniforms[-1]]["measured_step_s"] = 1.5 * ddp_s
    assert any(said in line and "takes 1.50 times" in line for line in closing_lines(content, tmp_path))
    for name in uniforms:
        del runs[name]
    assert any(
        said in line and "no precision below FP32" in line for line in closing_lines(content, tmp_path)
    )


def test_readme_and_docs_show_the_figures_that_are_kept():
    kept = json.loads((publish.ROOT / publish.FIGURES).read_text())
    for page, text in ((publish.README, publish.verdict(kept)), (publish.PAGE, publish.markdown(kept))):
        assert text in (publish.ROOT / page).read_text(encoding="utf-8")


def test_the_page_says_how_many_steps_were_in_their_interval():
    kept = json.loads((publish.ROOT / publish.FIGURES).read_text())
    for number, run in enumerate(kept["runs"].values()):
        step = run["measured_step_s"]
        run["planned_interval_s"] = [step * 0.9, step * 1.1] if number else [step * 1.1, step * 1.2]
    text = publish.markdown(kept)
    assert f"{number} of {number + 1} steps lie in the 90 % interval" in text


def test_a_demo_is_published_whole_or_not_at_all(tmp_path, monkeypatch):
    kept = json.loads((publish.ROOT / publish.FIGURES).read_text())
    monkeypatch.setattr(publish, "ROOT", tmp_path)
    (tmp_path / "docs" / "results").mkdir(parents=True)
    (tmp_path / "docs" / "figures").mkdir()
    pages = (publish.README, publish.PAGE)
    for page in pages:
        (tmp_path / page).write_text("before <!-- results:begin -->former<!-- results:end --> after")
    found = tmp_path / "demo-out"
    found.mkdir()
    kept["runs"][QSYNC_SHARE]["measured_step_s"] = 1.234
    kept["runs"][QSYNC_SHARE]["training_losses"] = [[1.0]]
    (found / "figures.json").write_text(json.dumps(kept))
    for name in publish.PICTURES[1:]:
        (found / name).write_bytes(name.encode())
    with pytest.raises(QSyncError, match=r"has no allocation\.png; give the output folder of a finished"):
        publish.main(found)
    assert "former" in (tmp_path / "README.md").read_text()
    (found / "allocation.png").write_bytes(b"map")
    (tmp_path / publish.PAGE).write_text("no markers")
    with pytest.raises(QSyncError, match=r"lacks <!-- results:begin -->; put both markers"):
        publish.main(found)
    assert "former" in (tmp_path / "README.md").read_text()
    (tmp_path / publish.PAGE).write_text((tmp_path / "README.md").read_text())
    publish.main(found)
    for page in pages:
        text = (tmp_path / page).read_text()
        assert text.startswith("before <!--") and text.endswith("--> after") and "former" not in text
    assert f"| **{TITLES[QSYNC_SHARE]}** |" in text and "| 1234 ms |" in text
    rate = kept["runs"][QSYNC_SHARE]["samples_a_step"] / 1.234
    alone = kept["runs"][ALONE]["samples_a_step"] / kept["runs"][ALONE]["measured_step_s"]
    assert f"{rate / alone:.2f}x under qsync's plan" in (tmp_path / publish.README).read_text()
    assert (tmp_path / "docs" / "figures" / "allocation.png").read_bytes() == b"map"
    assert "training_losses" not in (tmp_path / publish.FIGURES).read_text()


ROWS = 16
OTHER = Recapture(mlp(4, width=64, rows=ROWS // 2), {})


def basis_of(slow: float = 2.0, counts: dict[str, int] | None = None, drift: float = 0.0) -> Basis:
    graph = mlp(4, width=64, rows=ROWS)
    profiles = {
        name: replace(profile_of(graph, name, slow=of), drift=drift, seconds=10.0)
        for name, of in ((FAST, 1.0), (WEAK, slow))
    }
    return Basis(graph, cluster_of(counts or {FAST: 1, WEAK: 1}), profiles, sensitivity_of(graph))


@pytest.fixture(scope="module")
def plans():
    return ways(basis_of(), OTHER)


def test_every_way_is_a_plan_of_what_its_name_says(plans):
    assert list(plans) == [way for way in TITLES if way != WEAK_INT8_ALL]
    lowered = {
        way: {name: len(own.lowered) for name, own in plan.classes.items()} for way, plan in plans.items()
    }
    every = lowered[WEAK_INT8][WEAK]
    assert lowered[ALONE] == {FAST: 0}
    assert lowered[DDP] == lowered[LB_BSP] == {FAST: 0, WEAK: 0}
    assert lowered[WEAK_16] == lowered[WEAK_INT8] == {FAST: 0, WEAK: every} and every == 4
    assert lowered[ALL_16] == lowered[ALL_INT8] == {FAST: every, WEAK: every}


def test_the_plan_with_shares_is_no_slower_than_any_way_of_no_more_variance(plans):
    samples = samples_by_class(plans[LB_BSP], ROWS)
    assert sum(samples.values()) == 2 * ROWS and samples[FAST] > samples[WEAK]
    assert plans[LB_BSP].added_variance == 0.0 and plans[LB_BSP].step_s < 0.9 * plans[DDP].step_s
    best = plans[QSYNC_SHARE]
    for way in (LB_BSP, WEAK_16, WEAK_INT8, QSYNC):
        assert best.step_s <= 1.001 * plans[way].step_s
    assert not best[FAST].lowered and plans[QSYNC_ALL][FAST].lowered
    for way in (ALL_16, ALL_INT8, QSYNC_SHARE):
        assert plans[QSYNC_ALL].step_s <= 1.001 * plans[way].step_s


def test_the_strongest_class_may_stand_anywhere_and_be_named():
    graph = mlp(4, width=64, rows=ROWS)
    profiles = {name: profile_of(graph, name, slow=of) for name, of in (("a", 3.0), ("b", 1.0), ("c", 2.0))}
    basis = Basis(graph, cluster_of({"a": 1, "b": 2, "c": 1}), profiles, sensitivity_of(graph))
    found = ways(basis, OTHER)
    assert list(found[ALONE].classes) == ["b"] and set(found[WEAK_16].classes) == {"a", "b", "c"}
    assert not found[WEAK_16]["b"].lowered and found[WEAK_16]["a"].lowered and found[WEAK_16]["c"].lowered
    assert (
        sum(n * samples_by_class(found[LB_BSP], ROWS)[c] for c, n in (("a", 1), ("b", 2), ("c", 1)))
        == 4 * ROWS
    )
    assert list(ways(basis, strong="c")[ALONE].classes) == ["c"]


def test_rates_count_the_samples_of_all_ranks():
    basis = basis_of(counts={FAST: 2, WEAK: 2})
    found = ways(basis, OTHER)
    rates = {way: rate(plan, basis.cluster, ROWS) for way, plan in found.items()}
    assert rates[ALONE] * found[ALONE].step_s == pytest.approx(4 * ROWS)
    assert rates[DDP] * found[DDP].step_s == pytest.approx(4 * ROWS)
    assert rate(found[DDP], basis.cluster, ROWS, step_s=2.0) == pytest.approx(2 * ROWS)


def test_a_class_without_a_precision_takes_the_next_one_up_and_fp16_for_bf16():
    basis = basis_of()
    fast, weak = basis.cluster.classes
    without = replace(fast, precisions=(Precision.FP32, Precision.BF16))
    precisions = (Precision.FP32, Precision.FP16, Precision.INT8)
    classes = (without, replace(weak, precisions=precisions))
    profiles = {**basis.profiles, WEAK: profile_of(basis.graph, WEAK, precisions, slow=2.0)}
    found = ways(replace(basis, cluster=replace(basis.cluster, classes=classes), profiles=profiles), OTHER)
    assert set(found[ALL_INT8][FAST].assignment.values()) == {Precision.BF16}
    assert set(found[ALL_INT8][WEAK].assignment.values()) == {Precision.INT8}
    assert set(found[WEAK_16][WEAK].assignment.values()) == {Precision.FP16}
    assert set(found[ALL_16][FAST].assignment.values()) == {Precision.BF16}


def test_what_no_rank_was_profiled_in_is_not_compared():
    basis = basis_of()
    profiles = {
        name: profile_of(basis.graph, name, (Precision.FP32,), slow=of)
        for name, of in ((FAST, 1.0), (WEAK, 2.0))
    }
    found = ways(replace(basis, profiles=profiles), OTHER)
    assert list(found) == [ALONE, DDP, LB_BSP, QSYNC, QSYNC_SHARE, QSYNC_ALL]
    assert {way: first_alike(way, found) for way in found} == {
        ALONE: ALONE, DDP: DDP, QSYNC: DDP, LB_BSP: LB_BSP, QSYNC_SHARE: LB_BSP,
        QSYNC_ALL: LB_BSP,
    }  # fmt: skip
    assert list(ways(replace(basis, profiles=profiles))) == [ALONE, DDP, QSYNC]  # no second capture


def test_ways_that_run_unlike_are_no_copies_of_each_other(plans):
    unlike = {way: plan for way, plan in plans.items() if way in (DDP, WEAK_16, WEAK_INT8, LB_BSP)}
    assert all(first_alike(way, unlike) == way for way in unlike)


def test_int8_in_all_products_is_one_more_choice_where_it_was_profiled():
    basis = with_int8_all(2.0)
    found = ways(basis)
    assert set(found[WEAK_INT8_ALL][WEAK].lowered) == {op.name for op in basis.graph.adjustable}
    assert Precision.INT8_ALL in found[ALL_INT8][FAST].assignment.values()
    lacking = cluster_of({FAST: 1, WEAK: 1}, precisions=BELOW_FP32[:3])  # though it was profiled
    assert WEAK_INT8_ALL not in ways(replace(basis, cluster=lacking))
    above = ways(with_int8_all(1.4), base=Precision.BF16)
    assert WEAK_16 not in above and ALL_16 not in above and WEAK_INT8_ALL in above
    assert {plan.base for plan in above.values()} == {Precision.BF16}


def with_int8_all(slow: float) -> Basis:
    """A model, profiles and a cluster whose weak class, so many times slower, has every precision."""
    graph = encoder(1)
    profiles = {
        name: profile_of(graph, name, BELOW_FP32, slow=times, latency_s=1e-8, cast_s=1e-11)
        for name, times in ((FAST, 1.0), (WEAK, slow))
    }
    cluster = cluster_of({FAST: 1, WEAK: 1}, precisions=BELOW_FP32)
    return Basis(graph, cluster, profiles, sensitivity_of(graph))


def test_replay_again_from_the_same_profiles_says_the_same_and_alone_has_its_own():
    basis = basis_of(3.0)
    alone = profile_of(basis.graph, FAST, slow=0.5)
    found = predicted_ways(basis, OTHER, alone=alone)
    for entry in found.values():
        assert replayed(entry.plan, basis, OTHER, alone).timeline.step_s == pytest.approx(
            entry.timeline.step_s
        )
    assert (
        found[ALONE].timeline.step_s < 0.6 * replayed(found[ALONE].plan, basis, OTHER, None).timeline.step_s
    )


def test_the_interval_is_of_the_training_and_not_of_the_profile():
    basis = basis_of(drift=0.01)
    plans = predicted_ways(basis)
    steps = round(30.0 / sum(entry.timeline.step_s for entry in plans.values()))  # three times the profile
    short, long = (
        {name: entry.timeline for name, entry in found.items()}
        for found in (plans, predicted_ways(basis, num_steps=steps))
    )
    for name in short:
        assert long[name].step_s == short[name].step_s
        widths = [low_high[1] - low_high[0] for low_high in (short[name].interval_s, long[name].interval_s)]
        assert widths[1] / widths[0] == pytest.approx(2.0, rel=0.05)


def measured(turn_s: float, variance: float = 0.0, samples: int = 32) -> dict:
    turns = [turn_s * (1.0 + 0.001 * k) for k in range(9)]
    return {
        "title": "a way", "turns_s": turns, "samples_a_step": samples, "added_variance": variance,
        "measured_step_s": turn_s, "predicted_step_s": turn_s,
    }  # fmt: skip


def test_bars_hold_where_nothing_is_faster_nor_as_fast_with_less_variance():
    runs = {
        ALONE: measured(1.0, samples=16), DDP: measured(2.0), WEAK_16: measured(1.3, 1e-3),
        QSYNC_SHARE: measured(1.2, 2e-3),
    }  # fmt: skip
    found = {one["name"]: one for one in bars(runs, [])}
    assert all(one["holds"] for one in found.values())

    def broken(*leave_out: str, **changed: dict) -> list[str]:
        return [one["name"] for one in bars({**runs, **changed}, leave_out) if not one["holds"]]

    assert broken(ddp=measured(1.1)) == [SLOWER]
    assert broken(weak_16=measured(1.195, 1e-3)) == [NOISIER]
    assert broken(weak_16=measured(1.195, 3e-3)) == []
    # One quarter of the turns that are as fast is enough: what repeats to a hundredth is no faster.
    assert broken(ddp=measured(1.199)) == []
    # What lowers the strong cards is compared with the plan that may.
    assert broken(all_16=measured(1.0, 3e-3)) == [SLOWER]
    assert broken(all_16=measured(1.0, 3e-3), qsync_all=measured(0.9, 4e-3)) == []
    assert broken(all_16=measured(0.8, 3e-3), qsync_all=measured(0.9, 4e-3)) == [SLOWER, NOISIER]
    assert broken(all_16=measured(1.1, 1e-3), qsync_all=measured(0.9, 4e-3)) == []
    slow = measured(2.2, 2e-3)
    assert UNSAID in broken(qsync_share=slow, ddp=measured(3.0))
    assert UNSAID not in broken(WEAK, qsync_share=slow, ddp=measured(3.0))
    late = {**runs[QSYNC_SHARE], "predicted_step_s": 1.0}
    assert len(broken(qsync_share=late)) == 1
