"""The main job: real ranks, real data, all that it promises to write, and what it refuses at the start."""

from __future__ import annotations

import json
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from graphs import cluster_of, encoder, mlp, profile_of, sensitivity_of

from qsync.allocator import check_plan, explain
from qsync.backend.precisions_that_pay import emulated_precisions
from qsync.errors import QSyncError
from qsync.experiments.demo import publish
from qsync.experiments.demo.compared_plans import NAMES, planned_runs, replayed, run_title
from qsync.experiments.demo.launch import run_demo
from qsync.experiments.demo.report import closing_lines, heldout_difference, table
from qsync.experiments.harness.ranks import ALONE, FAST, WEAK
from qsync.records.plan_folder import Basis
from qsync.records.plans import Plan
from qsync.records.precision import Precision
from qsync.replayer import Recapture

WEAK_SHARE = 0.35
BELOW_FP32 = (Precision.FP32, Precision.BF16, Precision.INT8, Precision.INT8_ALL)
OF_A_RUN = (
    "measured_step_s", "predicted_step_s", "wait_fraction", "low_precision_op_fraction",
    "low_precision_flop_fraction", "added_variance", "heldout_loss", "peak_memory_bytes",
)  # fmt: skip


@pytest.fixture(scope="module")
def demo(tmp_path_factory) -> tuple[Path, dict]:
    # At this share the weak rank stays slower whatever it lowers, so that noise cannot turn the plan around.
    out = tmp_path_factory.mktemp("demo")
    return out, run_demo(workload="resnet-small", steps=4, weak_share=WEAK_SHARE, out=out, rounds=1)


@pytest.mark.dist
@pytest.mark.slow
@pytest.mark.timeout(600)
def test_the_report_says_of_every_run_what_was_measured_and_predicted(demo):
    out, content = demo
    assert json.loads((out / "report.json").read_text()) == content
    # "weak_int8_all" is there where 16 bits are no faster than FP32, and no run in what is emulated.
    emulated = emulated_precisions(torch.device("cpu"))
    about = {"weak_bf16": Precision.BF16, "weak_int8": Precision.INT8, "all_int8": Precision.INT8}
    expected = tuple(name for name in NAMES if about.get(name) not in emulated)
    assert tuple(name for name in content["runs"] if name != "weak_int8_all") == expected
    for run in content["runs"].values():
        assert all(run[name] is not None for name in OF_A_RUN)
        assert run["measured_step_s"] > 0 and run["predicted_step_s"] > 0
    for name in ("machine", "seed", "commit", "emulated", "measured_or_simulated", "steps"):
        assert name in content
    assert content["emulated"] is True and content["emulated_share"] == {"infer": WEAK_SHARE}
    assert set(content["runs"]["qsync"]["wait_fraction"]) == {"0", "1"}
    assert table(content).row_count == len(content["runs"])


@pytest.mark.dist
@pytest.mark.slow
@pytest.mark.timeout(600)
def test_ranks_end_every_run_with_the_same_parameters(demo):
    assert demo[1]["parameters_identical_across_ranks"] is True


@pytest.mark.dist
@pytest.mark.slow
@pytest.mark.timeout(600)
def test_only_the_weak_class_is_lowered_and_the_plan_holds_where_it_was_made(demo):
    out, content = demo
    plan, basis = Plan.load(out / "plan.json"), Basis.load(out)
    plan.check_graph(basis.graph)
    assert plan["train"].lowered == ()
    planned = {name: run["planned_step_s"] for name, run in content["runs"].items()}
    if not plan["infer"].lowered:  # a processor may have no lower precision that is faster
        others = [step_s for name, step_s in planned.items() if name == "ddp" or name.startswith("weak_")]
        # On a busy machine steps that the profile cannot tell apart count as equal, up to the target.
        assert planned["qsync"] <= max(1.05 * min(others), plan.target_s)
    reasons = explain(basis.graph, plan, basis.profiles, basis.sensitivity, basis.cluster)
    assert tuple(reason.op for reason in reasons) == plan["infer"].lowered
    certificate = check_plan(basis.graph, plan, basis.profiles, basis.sensitivity, basis.cluster)
    # The basis holds what was learned while training; the plan was made before. What may differ is time.
    assert all("memory" not in violation for violation in certificate.violations)
    runs = content["runs"]
    lowered = {name: run["low_precision_flop_fraction"] for name, run in runs.items()}
    assert lowered["qsync"] <= max(part for name, part in lowered.items() if name != "qsync")
    assert all(runs[name]["added_variance"] == 0.0 for name in ("fast_alone", "ddp", "lb_bsp"))
    if "weak_int8" in runs:
        assert lowered["qsync"] <= lowered["weak_bf16"]
        assert runs["all_int8"]["added_variance"] > runs["weak_int8"]["added_variance"] > 0.0


@pytest.mark.dist
@pytest.mark.slow
@pytest.mark.timeout(600)
def test_memory_is_predicted_as_it_was_measured(demo):
    out, content = demo
    graph = Basis.load(out).graph
    values = {value.name: value for value in graph.inputs}
    # FP32's fastest convolutions keep a filter in the other memory order where that is faster. The prediction
    # counts one for each, at the most (`made_for_backward`); how many there are is up to the processor.
    filters = sum(values[op.inputs[1]].num_bytes for op in graph.ops if op.kind == "conv2d")
    classes = {"0": "train", "1": "infer"}
    for name, run in content["runs"].items():
        for rank, measured in run["peak_memory_bytes"].items():
            device_class = "alone" if name == "fast_alone" else classes[rank]
            assert 0.9 * measured <= run["predicted_memory_bytes"][device_class] <= 1.1 * measured + filters


@pytest.mark.dist
@pytest.mark.slow
@pytest.mark.timeout(600)
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
        ({"workload": "vgg"}, "there is no workload 'vgg'; choose one of gpt, resnet"),
        ({"weak_share": 0.0}, "--weak-share must lie in .0, 1., found 0.0"),
        ({"weak_share": 1.5}, "--weak-share must lie in .0, 1., found 1.5"),
        ({"seeds": 0}, "--seeds must be at least 1, found 0"),
        ({"steps": 0}, "--steps must be at least 2, found 0"),
        ({"steps": 1}, "--steps must be at least 2, found 1"),
        ({"workload": "resnet", "data": Path("x.txt")}, "leave out --data"),
        ({"data": Path("nowhere.txt")}, "nowhere.txt"),
    ],
)
def test_bad_options_are_one_sentence_and_nothing_is_written(options, message, tmp_path):
    out = tmp_path / "out"
    with pytest.raises(QSyncError, match=message):
        run_demo(out=out, **options)
    assert not out.exists()


def test_an_output_that_is_a_file_is_refused_and_kept(tmp_path):
    out = tmp_path / "out"
    out.write_text("mine")
    with pytest.raises(QSyncError, match="is a file; name a folder"):
        run_demo(workload="resnet", out=out)
    assert out.read_text() == "mine"


def test_the_command_line_exits_with_2(tmp_path):
    command = [
        sys.executable,
        "-m",
        "qsync.commands.main",
        "demo",
        "--workload",
        "vgg",
        "--out",
        str(tmp_path / "out"),
    ]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 2
    assert done.stderr.strip().count("\n") == 0 and "there is no workload 'vgg'" in done.stderr


def test_the_held_out_difference_pairs_seeds():
    runs = {"qsync": {"heldout_losses": [1.0, 2.0, 3.0]}, "ddp": {"heldout_losses": [0.9, 1.8, 2.7]}}
    found = heldout_difference(runs)
    assert found["mean"] == pytest.approx(0.2)
    assert found["standard_error"] == pytest.approx(0.1 / 3**0.5)
    assert heldout_difference({name: {"heldout_losses": [1.0]} for name in runs})["standard_error"] is None


def test_a_plan_that_lowers_nothing_says_why(tmp_path):
    content = json.loads((publish.ROOT / publish.FIGURES).read_text())
    content["heldout_difference"] = {"mean": 0.0, "standard_error": None}
    said = "lowers nothing, because that saves no time"
    assert not any(said in line for line in closing_lines(content, tmp_path))
    runs = content["runs"]
    runs["qsync"]["low_precision_op_fraction"] = 0.0
    uniforms = [name for name in runs if name.startswith("weak_")]
    ddp_s = runs["ddp"]["measured_step_s"]
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
    text = publish.markdown(json.loads((publish.ROOT / publish.FIGURES).read_text()))
    assert all(text in (publish.ROOT / page).read_text(encoding="utf-8") for page in publish.PAGES)


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
    for page in publish.PAGES:
        (tmp_path / page).write_text("before <!-- results:begin -->old<!-- results:end --> after")
    found = tmp_path / "demo-out"
    found.mkdir()
    kept["runs"]["qsync"]["measured_step_s"] = 2 * kept["runs"]["fast_alone"]["measured_step_s"]
    kept["runs"]["qsync"]["training_losses"] = [[1.0]]
    (found / "report.json").write_text(json.dumps(kept))
    for name in publish.PICTURES[1:]:
        (found / name).write_bytes(name.encode())
    with pytest.raises(QSyncError, match=r"has no allocation\.png; name the folder of a finished"):
        publish.main(found)
    assert "old" in (tmp_path / "README.md").read_text()
    (found / "allocation.png").write_bytes(b"map")
    (tmp_path / publish.PAGES[1]).write_text("no markers")
    with pytest.raises(QSyncError, match=r"lacks <!-- results:begin -->; put both markers"):
        publish.main(found)
    assert "old" in (tmp_path / "README.md").read_text()
    (tmp_path / publish.PAGES[1]).write_text((tmp_path / "README.md").read_text())
    publish.main(found)
    for page in publish.PAGES:
        text = (tmp_path / page).read_text()
        assert text.startswith("before <!--") and text.endswith("--> after") and "old" not in text
        assert "| **qsync plan** |" in text and " | 2.00 | " in text
    assert (tmp_path / "docs" / "figures" / "allocation.png").read_bytes() == b"map"
    assert "training_losses" not in (tmp_path / publish.FIGURES).read_text()


def test_samples_by_speed_round_nothing_and_are_faster_than_equal_ones():
    graph, other = (mlp(4, width=64, rows=rows) for rows in (16, 8))
    speeds = ((ALONE, 1.0), (FAST, 1.0), (WEAK, 3.0))
    profiles = {name: profile_of(graph, name, slow=slow) for name, slow in speeds}
    basis = Basis(graph, cluster_of({FAST: 1, WEAK: 1}), profiles, sensitivity_of(graph))
    planned = planned_runs(basis, other=Recapture(other, {}))
    assert tuple(planned) == NAMES
    plan = planned["lb_bsp"].plan
    samples = [plan.levers[name].samples for name in (FAST, WEAK)]
    assert sum(samples) == 32 and samples[0] > samples[1] and plan.added_variance == 0.0
    assert planned["lb_bsp"].timeline.step_s < 0.9 * planned["ddp"].timeline.step_s
    own, shared = planned["qsync"], planned["qsync_share"]
    assert shared.timeline.step_s <= 1.001 * min(own.timeline.step_s, planned["lb_bsp"].timeline.step_s)
    assert shared.plan.added_variance < own.plan.added_variance
    again = replayed(planned, basis, other=Recapture(other, {}))
    for name in ("lb_bsp", "qsync_share"):
        assert again[name].step_s == pytest.approx(planned[name].timeline.step_s)


def test_the_interval_is_of_the_training_and_not_of_the_profile():
    graph = mlp(4)
    profiles = {
        name: replace(profile_of(graph, name, slow=slow), drift=0.01, seconds=10.0)
        for name, slow in ((ALONE, 1.0), (FAST, 1.0), (WEAK, 2.0))
    }
    basis = Basis(graph, cluster_of({FAST: 1, WEAK: 1}), profiles, sensitivity_of(graph))
    plans = planned_runs(basis)
    steps = round(30.0 / sum(entry.timeline.step_s for entry in plans.values()))  # three times the profile
    short, long = (
        {name: entry.timeline for name, entry in found.items()}
        for found in (plans, planned_runs(basis, num_steps=steps))
    )
    for name in short:
        assert long[name].step_s == short[name].step_s
        widths = [low_high[1] - low_high[0] for low_high in (short[name].interval_s, long[name].interval_s)]
        assert widths[1] / widths[0] == pytest.approx(2.0, rel=0.05)


def with_int8_all(slow: float):
    """A model, profiles and a cluster whose weak class, so many times slower, has every precision."""
    graph = encoder(1)
    profiles = {
        name: profile_of(graph, name, BELOW_FP32, slow=times, latency_s=1e-8, cast_s=1e-11)
        for name, times in ((ALONE, 1.0), (FAST, 1.0), (WEAK, slow))
    }
    return graph, profiles, cluster_of({FAST: 1, WEAK: 1}, precisions=BELOW_FP32)


def test_int8_in_all_products_is_one_more_uniform_choice_where_it_was_profiled():
    graph, profiles, cluster = with_int8_all(2.0)
    planned = planned_runs(Basis(graph, cluster, profiles, sensitivity_of(graph)))
    assert [name for name in planned if name not in NAMES] == ["weak_int8_all"]
    assert set(planned["weak_int8_all"].plan[WEAK].lowered) == {op.name for op in graph.adjustable}


def test_what_no_rank_was_profiled_in_is_not_compared():
    graph = mlp(4)
    profiles = {
        name: profile_of(graph, name, (Precision.FP32,), slow=slow)
        for name, slow in ((ALONE, 1.0), (FAST, 1.0), (WEAK, 2.0))
    }
    planned = planned_runs(Basis(graph, cluster_of({FAST: 1, WEAK: 1}), profiles, sensitivity_of(graph)))
    assert tuple(planned) == ("fast_alone", "ddp", "qsync")
    assert planned["qsync"].timeline.step_s == planned["ddp"].timeline.step_s


def test_above_bf16_the_weak_rank_is_compared_with_all_its_products_in_int8():
    graph, profiles, cluster = with_int8_all(1.4)
    planned = planned_runs(Basis(graph, cluster, profiles, sensitivity_of(graph)), base=Precision.BF16)
    names = [name for name in NAMES if name not in ("lb_bsp", "qsync_share")]  # no second capture
    assert tuple(planned) == tuple("weak_int8_all" if name == "weak_bf16" else name for name in names)
    assert Precision.INT8_ALL in planned["weak_int8_all"].plan[WEAK].assignment.values()
    assert {entry.plan.base for entry in planned.values()} == {Precision.BF16}
    assert all(run_title(name, "bf16") != name for name in planned)
