"""The command line: what each command prints and writes, and what it says of bad input."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path

import pytest
from graphs import chain, cluster_of, encoder, profile_of, sensitivity_of

from qsync.allocator import allocate
from qsync.commands.tables import new_table
from qsync.records.cluster import Cluster, Link
from qsync.records.json_files import write_json
from qsync.records.levers import ClassLevers, Levers
from qsync.records.plan_folder import Basis
from qsync.records.plans import Plan
from qsync.records.profiles import Profile
from qsync.replayer import Recapture, under_levers

CLUSTER_TOML = """
[[classes]]
name = "train"
device = "cpu"
count = 1
memory_bytes = 1_000_000_000
precisions = ["fp32", "bf16", "int8"]

[[classes]]
name = "infer"
device = "cpu"
count = 3
memory_bytes = 1_000_000_000
precisions = ["fp32", "bf16", "int8"]

[link]
latency_s = 1e-5
bytes_per_s = 1e10
"""


HOSTS = """
[[hosts]]
name = "here"
ranks = [0, 2]
latency_s = { "*" = 1e-5 }
bytes_per_s = { here = 5e9, "*" = 1.25e8 }

[[hosts]]
name = "there"
ranks = [1, 3]
latency_s = { "*" = 4e-5 }
bytes_per_s = { "*" = 2.5e8 }
"""


def test_links_prints_a_table_of_legs_and_a_faster_order(command, folder):
    path = Path("cluster.toml")
    path.write_text(CLUSTER_TOML + HOSTS)
    code, out, _ = command("links", path)
    assert code == 0 and "40 Gb/s, 10 us" in out and "1 Gb/s, 10 us" in out and "2 Gb/s, 40 us" in out
    assert "in another order of ranks, 0, 2, 1, 3, an all-reduce of 25 MiB takes" in out
    found = json.loads(command("links", path, "--json")[1])
    assert found["hosts"][1]["latency_s"] == {"*": 4e-5} and found["order"]
    path.unlink()
    code, out, _ = command("links", folder)
    assert code == 0 and "all ranks" in out and "another order" not in out
    assert "give a plan's folder or a cluster.toml, or start it in each rank" in command("links")[2]


@pytest.fixture(autouse=True)
def here(tmp_path, monkeypatch) -> None:
    """An empty current directory, where what should not be written would show."""
    (tmp_path / "here").mkdir()
    monkeypatch.chdir(tmp_path / "here")


@pytest.fixture
def folder(tmp_path) -> Path:
    """A folder with a basis: `infer` is half as fast as `train`."""
    graph = encoder()
    profiles = {"train": profile_of(graph, "train"), "infer": profile_of(graph, "infer", slow=2.0)}
    Basis(graph, cluster_of(), profiles, sensitivity_of(graph)).save(tmp_path / "basis")
    return tmp_path / "basis"


@pytest.fixture
def qsync(command):
    return command


@pytest.fixture
def refused(qsync):
    """Run a command that must fail: its one sentence. Nothing may be written to the current directory."""

    def run(*arguments: object) -> str:
        code, out, err = qsync(*arguments)
        assert code == 2, err
        assert out == ""
        assert err.startswith("qsync: ")
        assert err.count("\n") == 1
        assert list(Path.cwd().iterdir()) == []
        return err

    return run


def test_plan_writes_what_it_shows(qsync, folder):
    code, out, err = qsync("plan", folder)
    assert (code, err) == (0, "")
    assert "infer" in out and "simulated" in out
    plan = Plan.load("plan.json")
    assert plan["infer"].lowered and not plan["train"].lowered


@pytest.mark.parametrize("name", ["run[a].json", "run[/a].json", "run:100:.json"])
def test_plan_shows_names_as_they_are(qsync, folder, name):
    code, out, err = qsync("plan", folder, "--out", name)
    assert (code, err) == (0, "")
    assert Path(name).is_file() and f"written to {name};" in out


def test_plan_prints_its_file_with_json(qsync, folder):
    code, out, _ = qsync("plan", folder, "--out", "a.json", "--json")
    assert code == 0
    assert json.loads(out) == json.loads(Path("a.json").read_text())


def test_plan_takes_pins_slack_and_a_cluster(qsync, folder):
    Path("cluster.toml").write_text(CLUSTER_TOML)
    (folder / "cluster.json").unlink()
    options = ("--pin", "layer.0.*=fp32", "--pin", "head=bf16", "--slack", "0.5", "--bucket-cap-mb", "1")
    code, _, err = qsync("plan", folder, "--cluster", "cluster.toml", *options)
    assert (code, err) == (0, "")
    plan = Plan.load("plan.json")
    assert plan.bucket_cap_bytes == 2**20
    assert all(p == "fp32" for op, p in plan["infer"].assignment.items() if op.startswith("layer.0."))
    assert plan["infer"].assignment["head"] == "bf16"
    assert plan.pins == {"layer.0.*": "fp32", "head": "bf16"} and plan.budgets == {}


def test_explain_gives_one_reason_for_each_lowered_operator(qsync, folder):
    qsync("plan", folder, "--out", folder / "plan.json")
    lowered = Plan.load(folder / "plan.json")["infer"].lowered
    code, out, _ = qsync("explain", folder / "plan.json", "--json")
    assert code == 0
    found = json.loads(out)
    assert found["simulated"] is True
    assert [reason["op"] for reason in found["reasons"]] == list(lowered)
    code, out, _ = qsync("explain", folder / "plan.json")
    assert code == 0
    assert f"Why {len(lowered)} operators are lowered" in out


def test_explain_of_a_plan_that_lowers_nothing(qsync, folder):
    qsync("plan", folder, "--pin", "*=fp32")
    code, out, _ = qsync("explain", "plan.json", "--basis", folder)
    assert code == 0
    assert "lowers nothing" in out


def test_explain_says_what_more_time_or_memory_would_buy(qsync, refused, folder):
    plan = folder / "plan.json"
    qsync("plan", folder, "--out", plan, "--slack", "0.1")
    train, infer = json.loads(qsync("explain", plan, "--json")[1])["shadow_prices"]
    assert train["variance_per_s"] is None and train["next_raise"] is None
    assert infer["variance_per_s"] > 0 and infer["variance_per_byte"] is None
    out = qsync("explain", plan)[1]
    assert "per ms more" in out and f"{infer['variance_per_s'] / 1e3:.2e}" in out
    assert "ms over the target" in out and f"{infer['next_raise']['variance']:.2e}" in out
    qsync("plan", folder, "--out", plan, "--target-step", "1", "--memory", "infer=1200K")
    found = json.loads(qsync("explain", plan, "--json")[1])
    _, infer = found["shadow_prices"]
    assert infer["variance_per_byte"] > 0 and infer["next_raise"]["beyond_bytes"] > 0
    assert found["memory"]["infer"]["budget_bytes"] == 1200 * 2**10
    roomy = json.loads(qsync("explain", plan, "--json", "--memory", "infer=1G")[1])
    assert roomy["shadow_prices"][1]["variance_per_byte"] is None
    assert roomy["memory"]["infer"]["budget_bytes"] == 2**30
    out = qsync("explain", plan)[1]
    assert "MiB over the budget" in out and f"{infer['variance_per_byte'] * 2**20:.2e}" in out
    assert "more than its memory budget" in " ".join(out.replace("│", " ").split())
    assert "no device class 'nobody'" in refused("explain", plan, "--memory", "nobody=1G")


def test_explain_shows_what_fills_the_memory(qsync, folder):
    plan = folder / "plan.json"
    qsync("plan", folder, "--out", plan)
    code, out, _ = qsync("explain", plan, "--picture", "memory.png")
    assert code == 0
    assert "Memory of a rank at its fullest" in out and "saved by int8 operators" in out and "budget" in out
    assert Path("memory.png").read_bytes().startswith(b"\x89PNG")
    assert qsync("explain", plan, "--allocation", "allocation.png")[0] == 0
    assert Path("allocation.png").read_bytes().startswith(b"\x89PNG")
    memory = json.loads(qsync("explain", plan, "--json")[1])["memory"]
    for name, entry in Plan.load(plan).classes.items():
        assert memory[name]["peak_bytes"] == entry.predicted.memory_bytes
        assert sum(memory[name]["parts"].values()) == memory[name]["peak_bytes"]


def test_replay_predicts_what_the_plan_says(qsync, folder):
    qsync("plan", folder, "--bucket-cap-mb", "0.05")
    code, out, _ = qsync("replay", "plan.json", "--basis", folder, "--trace", "trace.json", "--json")
    assert code == 0
    timeline = json.loads(out)
    assert timeline["simulated"] is True
    assert timeline["step_s"] == Plan.load("plan.json").step_s
    assert json.loads(Path("trace.json").read_text())["traceEvents"]
    code, out, _ = qsync("replay", "plan.json", "--basis", folder)
    assert code == 0
    assert "waiting" in out and "simulated" in out


def test_explain_names_the_critical_path_and_what_would_help(qsync, refused, folder):
    plan = folder / "plan.json"
    qsync("plan", folder, "--out", plan)
    code, out, _ = qsync("explain", plan, "--critical-path", "--help-most", "3")
    assert code == 0 and "The critical path" in out
    assert "What would shorten the step" in out and "Why" not in out and "over the budget" not in out
    assert "[bf16]" in out or "[int8]" in out or "[fp32]" in out
    found = json.loads(qsync("explain", plan, "--critical-path", "--help-most", "3", "--json")[1])
    path, step_s = found["critical_path"], Plan.load(plan).step_s
    assert found["simulated"] and path["step_s"] == pytest.approx(step_s)
    assert sum(event["duration_s"] for event in path["events"]) == pytest.approx(step_s)
    won = [one["won_s"] for one in found["help_most"]]
    assert len(won) == 3 and won == sorted(won, reverse=True)
    pictures = [folder / name for name in ("memory.png", "allocation.png")]
    flags = ("--critical-path", "--picture", pictures[0], "--allocation", pictures[1])
    assert qsync("explain", plan, *flags)[0] == 0
    assert all(picture.is_file() for picture in pictures)
    assert set(json.loads(qsync("explain", plan, "--critical-path", "--json")[1])) == {
        "simulated", "critical_path"
    }  # fmt: skip
    assert "help-most" in refused("explain", plan, "--help-most", "0")


def test_replay_and_explain_say_what_a_step_waits_for_batches_or_that_nobody_measured_it(qsync, folder):
    assert qsync("plan", folder, "--out", folder / "plan.json")[0] == 0
    for command in ("replay", "explain"):
        out = qsync(command, folder / "plan.json")[1]
        assert "Data loading is no part of the steps of train, infer: no loader was profiled" in out
    for name in ("train", "infer"):
        path = folder / f"profile-{name}.json"
        replace(Profile.load(path), loading_s=0.0123).save(path)
    out = qsync("replay", folder / "plan.json")[1]
    assert "12.3 ms" in out and "Data loading is no part" not in out


def test_a_plan_with_levers_is_replayed_and_explained_under_them(qsync, refused, folder):
    other = encoder(2, rows=16)
    other.save(folder / "other" / "graph.json")
    basis = Basis.load(folder)
    levers = Levers({"train": ClassLevers(44), "infer": ClassLevers(20, passes=2)})
    under = under_levers(basis, levers, Recapture.load(folder))
    plan = allocate(under.graph, under.profiles, under.sensitivity, under.cluster)
    plan.save(folder / "plan.json")
    code, out, _ = qsync("replay", folder / "plan.json", "--json")
    assert code == 0 and json.loads(out)["step_s"] == pytest.approx(plan.step_s)
    code, out, _ = qsync("explain", folder / "plan.json")
    assert code == 0 and "infer (proportional)" in out
    (folder / "other" / "graph.json").unlink()
    assert "was captured with 32 alone" in refused("replay", folder / "plan.json")


def test_plan_lets_operators_save_less_as_told_or_as_a_search_finds_best(qsync, refused, folder):
    graph = encoder(width=16, rows=512)
    profiles = {
        name: profile_of(graph, name, slow=slow, saving=1.3)
        for name, slow in (("train", 1.0), ("infer", 1.2))
    }
    Basis(graph, cluster_of(), profiles, sensitivity_of(graph)).save(folder)
    told = ("--save-less", "infer=layer.0.*", "--save-less", "infer=layer.1.gelu")
    code, out, _ = qsync("plan", folder, *told, "--out", folder / "plan.json")
    assert code == 0 and "infer saves less for backward: layer.0.*, layer.1.gelu" in out
    plan = Plan.load(folder / "plan.json")
    assert plan["infer"].saving_less == ("layer.0.*", "layer.1.gelu") and not plan["train"].saving_less
    assert json.loads(qsync("replay", folder / "plan.json", "--json")[1])["step_s"] == plan.step_s
    assert qsync("explain", folder / "plan.json")[0] == 0
    needed = allocate(graph, profiles, sensitivity_of(graph), cluster_of(), target_s=1.0)["infer"]
    options = ("--memory", f"infer={int(0.9 * needed.predicted.memory_bytes)}", "--target-step", 1)
    found = ("--levers", "save_less", "--out", folder / "found.json")
    code, out, _ = qsync("plan", folder, *options, *found)
    assert code == 0 and "without save_less it would take" in out
    assert Plan.load(folder / "found.json")["infer"].saving_less == ("layer.0.*",)
    for text, said in (
        ("infer=layr.0.gelu", "nearest: 'layer.0.gelu'"),
        ("infer=layer.0.query", "it matches no operator of encoder that can"),
        ("weak=*", "no device class 'weak'"),
        ("layer.0.*", "--save-less must have the form CLASS=PATTERN, found 'layer.0.*'"),
    ):
        assert said in refused("plan", folder, "--save-less", text)
    both = ("--levers", "save_less", "--save-less", "infer=*")
    assert "what saves less is given, and to be searched too" in refused("plan", folder, *both)
    Basis(graph, cluster_of(), {n: profile_of(graph, n) for n in profiles}, sensitivity_of(graph)).save(
        folder
    )
    assert "profile with save_less=True" in refused("plan", folder, "--levers", "save_less")
    assert "with save_less=True" in refused("plan", folder, "--save-less", "infer=*")


def test_plan_searches_levers_and_says_what_each_bought(qsync, refused, folder):
    encoder(2, rows=16).save(folder / "other" / "graph.json")
    options = ("--slack", 0.3)
    code, out, err = qsync(
        "plan", folder, "--levers", "share, buckets", *options, "--out", folder / "plan.json"
    )
    assert code == 0, err
    assert "train takes" in out and "infer (proportional)" in out and "without share it would take" in out
    plan = Plan.load(folder / "plan.json")
    assert "share" in plan.levers.without and "recompute" not in plan.levers.used
    assert qsync("replay", folder / "plan.json")[0] == qsync("explain", folder / "plan.json")[0] == 0
    assert "unknown lever 'shares'" in refused("plan", folder, "--levers", "shares")
    assert "found 'share'; leave it out" in refused("plan", folder, "--levers", "share", "--pareto", 3)
    (folder / "other" / "graph.json").unlink()
    assert "capture it (and profile it) once more" in refused("plan", folder, "--levers", "share")


def test_diff_names_what_changed(qsync, folder):
    qsync("plan", folder, "--out", "a.json")
    Plan.load("a.json").pin("head", "int8").save("b.json")
    code, out, _ = qsync("diff", "a.json", "b.json")
    assert code == 0
    assert "infer  head:" in out and out.count("\n") == 2
    code, out, _ = qsync("diff", "a.json", "a.json", "--json")
    assert code == 0 and json.loads(out)["differences"] == []
    assert "The plans assign the same precisions." in qsync("diff", "a.json", "a.json")[1]


def test_diff_says_what_each_plan_is_predicted_to_take_and_to_add(qsync, folder):
    plans = []
    for name, *options in (("a.json",), ("b.json", "--slack", "0.2", "--bucket-cap-mb", "0.01")):
        qsync("plan", folder, "--out", name, *options)
        plans.append(Plan.load(name))
    a, b = plans
    lines = qsync("diff", "a.json", "b.json")[1].splitlines()
    assert lines[0] == "every class  buckets: DDP's own -> 10485 bytes"
    assert lines[-1] == (
        f"step {1e3 * a.step_s:.4g} -> {1e3 * b.step_s:.4g} ms, added variance {a.added_variance:.3g} -> "
        f"{b.added_variance:.3g} (simulated)"
    )
    found = json.loads(qsync("diff", "a.json", "b.json", "--json")[1])
    assert found["step_s"] == [a.step_s, b.step_s]
    assert found["added_variance"] == [a.added_variance, b.added_variance]


def test_a_diff_takes_two_plans_and_nothing_else(qsync, refused, folder, tmp_path):
    path = tmp_path / "plan.json"
    qsync("plan", folder, "--out", path)
    for also, named in (
        ((folder,), "unexpected extra argument"),
        (("--slack", "0.1"), "--slack"),
        (("--out", "b.json"), "--out"),
    ):
        assert named in refused("diff", *also, path, path)
    assert "Missing argument" in refused("diff", path)


def test_a_plan_is_written_alike_twice_and_one_operator_a_line(qsync, folder):
    texts = []
    for name in ("a.json", "b.json"):
        qsync("plan", folder, "--out", name)
        texts.append(Path(name).read_text())
    assert texts[0] == texts[1]
    lines = [line.strip().rstrip(",") for line in texts[0].splitlines()]
    plan = Plan.load("a.json")
    assert list(json.loads(texts[0])["classes"]) == sorted(plan.classes)
    for name, entry in plan.classes.items():
        assert list(entry.assignment) == [op.name for op in encoder().adjustable]
        first = lines.index(f'"{name}": {{')
        written = [f'"{op}": "{precision}"' for op, precision in entry.assignment.items()]
        start = lines.index(written[0], first)
        assert lines[start : start + len(written)] == written


def test_help_and_version_name_every_command(qsync):
    code, out, _ = qsync()
    assert code == 0
    assert all(name in out for name in ("doctor", "demo", "plan", "explain", "replay", "diff", "--version"))
    assert qsync("--version")[:2] == (0, "qsync 0.2.0\n")


def test_usage_errors_are_one_sentence(refused, folder):
    assert "give a FOLDER of qsync.hybrid or qsync demo, or --cards" in refused("plan")
    assert "'bogus'" in refused("bogus")
    assert "--bogus" in refused("plan", folder, "--bogus")
    assert "--slack" in refused("plan", folder, "--slack", "much")


def test_missing_files_are_named(refused, folder):
    assert "nowhere has no graph.json" in refused("plan", "nowhere")
    assert "cannot read nowhere.json" in refused("explain", "nowhere.json")
    assert "cannot read nowhere.toml" in refused("plan", folder, "--cluster", "nowhere.toml")
    (folder / "profile-infer.json").unlink()
    assert "profile-infer.json" in refused("plan", folder)


def test_malformed_files_are_named_with_their_line(refused, folder):
    (folder / "sensitivity.json").write_text('{\n "kind": "sensitivity",\n "version": 1,,\n}')
    assert "sensitivity.json, line 3" in refused("plan", folder)
    toml = folder / "cluster.toml"
    toml.write_text("[[classes]]\nname = train\n")
    message = refused("plan", folder, "--cluster", toml)
    assert "cluster.toml" in message and "line 2" in message


def test_a_plan_without_its_basis_says_how_to_name_it(refused, qsync, folder, tmp_path):
    qsync("plan", folder, "--out", tmp_path / "plan.json")
    assert "--basis" in refused("replay", tmp_path / "plan.json")


def test_a_plan_of_another_model_is_refused(refused, qsync, folder, tmp_path):
    graph = encoder(num_layers=1)
    profiles = {name: profile_of(graph, name) for name in ("train", "infer")}
    Basis(graph, cluster_of(), profiles, sensitivity_of(graph)).save(tmp_path / "other")
    qsync("plan", folder, "--out", folder / "plan.json")
    assert "layer.1.query" in refused("explain", folder / "plan.json", "--basis", tmp_path / "other")


def test_a_hand_edited_plan_names_the_operator(refused, qsync, folder):
    qsync("plan", folder, "--out", folder / "plan.json")
    edited = json.loads((folder / "plan.json").read_text())
    edited["classes"]["infer"]["assignment"]["head"] = "int7"
    (folder / "plan.json").write_text(json.dumps(edited))
    message = refused("replay", folder / "plan.json")
    assert "assignment, head: unknown precision 'int7': choose one of fp32" in message and "bf16" in message


def test_memory_that_nothing_meets_says_what_is_missing(refused, folder):
    message = refused("plan", folder, "--memory", "infer=1M")
    assert "infer" in message and "bytes" in message
    assert any(op.name in message for op in encoder().ops)


def test_a_class_without_a_profile_is_named(refused, folder):
    Path(folder / "cluster.toml").write_text(CLUSTER_TOML.replace('"infer"', '"edge"'))
    assert "edge" in refused("plan", folder, "--cluster", folder / "cluster.toml")


@pytest.mark.parametrize(
    ("option", "value", "said"),
    [
        ("--pin", "haed=fp32", "nearest: 'head'"),
        ("--pin", "layer.0.gelu=fp32", "layer.0.gelu (gelu) is a following one"),
        ("--pin", "layr.0.query=fp32", "nearest: 'layer.0.query'"),
        ("--pin", "head", "PATTERN=PRECISION"),
        ("--pin", "head=int7", "unknown precision 'int7'"),
        ("--pin", "layer.0.attention=int8_all", "no kernel"),
        ("--memory", "infer", "CLASS=BYTES"),
        ("--memory", "infer=lots", "bytes"),
        ("--memory", "infer=-1G", "positive"),
        ("--memory", "infer=0", "positive, found '0'; give bytes"),
        ("--memory", "infer=nan", "bytes"),
        ("--memory", "nobody=1G", "'nobody'"),
        ("--slack", "-0.1", "slack must not be negative"),
        ("--slack", "inf", "slack must not be negative or infinite"),
        ("--slack", "nan", "slack must not be negative or infinite, found nan"),
        ("--margin", "nan", "margin must be at least 0"),
        ("--target-step", "0", "must be positive"),
        ("--target-step", "-1", "must be positive, found -1.0"),
        ("--target-step", "nan", "must be positive, found nan"),
        ("--target-step", "inf", "must be positive and finite"),
        ("--target-step", "1e-9", "too long"),
        ("--bucket-cap-mb", "-1", "must be positive"),
        ("--bucket-cap-mb", "1e-9", "must be positive"),
        ("--bucket-cap-mb", "inf", "must be positive"),
        ("--bucket-cap-mb", "1e300", "must be positive"),
        ("--seed", "-1", "--seed"),
        ("--cluster", "x" * 5000, "characters)"),
    ],
)
def test_bad_options_say_what_to_do(refused, folder, option, value, said):
    assert said in refused("plan", folder, option, value)


@pytest.mark.parametrize(
    ("verb", "option", "name"),
    [
        ("plan", "--out", "graph.json"), ("plan", "--out", "profile-infer.json"),
        ("plan", "--out", "profile-new.json"), ("plan", "--out", "here.toml"), ("plan", "--out", "link.json"),
        ("replay", "--trace", "plan.json"), ("replay", "--trace", "sensitivity.json"),
        ("replay", "--picture", "plan.json"),
        ("explain", "--picture", "plan.json"), ("explain", "--allocation", "graph.json"),
    ],
)  # fmt: skip
def test_what_a_plan_is_made_from_is_not_overwritten(qsync, refused, folder, verb, option, name):
    assert qsync("plan", folder, "--out", folder / "plan.json")[0] == 0
    (folder / "here.toml").write_text(CLUSTER_TOML)
    (folder / "link.json").symlink_to(folder / "graph.json")
    before = {path: path.read_bytes() for path in folder.iterdir()}
    of = folder if verb == "plan" else folder / "plan.json"
    sentence = refused(verb, of, "--cluster", folder / "here.toml", option, folder / name)
    assert "would overwrite a file that the plan is made from; name another file" in sentence
    assert {path: path.read_bytes() for path in folder.iterdir()} == before


def test_contradictory_options_are_refused(refused, folder):
    assert "leave out one of them" in refused("plan", folder, "--target-step", "1", "--slack", "0.1")
    assert "leave out one of them" in refused("plan", folder, "--target-step", "1", "--slack", "0")
    for other in (("--max-variance", "1"), ("--pareto", "4")):
        assert "leave out --target-step" in refused("plan", folder, *other, "--slack", "0")
    assert "give it once" in refused("plan", folder, "--memory", "infer=1G", "--memory", "infer=2G")
    assert "give it once" in refused("plan", folder, "--pin", "head=fp32", "--pin", "head=bf16")
    overlapping = ("--pin", "layer.0.*=fp32", "--pin", "layer.0.fc1=int8")
    said = "layer.0.fc1 is given fp32 by 'layer.0.*' and int8 by 'layer.0.fc1'; leave one of these"
    assert said in refused("plan", folder, *overlapping)
    said = "head is given fp32 by 'h*' and bf16 by 'head'; leave one of these"
    assert said in refused("plan", folder, "--pin", "h*=fp32", "--pin", "head=bf16")


@pytest.mark.parametrize("op", ["layer.0.query", "layer.0.gelu", "loss"])
def test_a_profile_that_lacks_an_operator_names_both(refused, folder, op):
    profile = Profile.load(folder / "profile-infer.json")
    ops = {name: modes for name, modes in profile.ops.items() if name != op}
    replace(profile, ops=ops).save(folder / "profile-infer.json")
    said = f"the profile of infer has no time of {op} in fp32 (it has nothing); profile this class again"
    assert said in refused("plan", folder)


def test_a_failed_plan_leaves_the_old_one(qsync, folder):
    Path("plan.json").write_text("mine")
    assert qsync("plan", folder, "--memory", "infer=1K")[0] == 2
    assert Path("plan.json").read_text() == "mine"
    assert list(Path.cwd().iterdir()) == [Path.cwd() / "plan.json"]


def test_a_path_that_cannot_be_written_is_named(refused, folder):
    assert str(folder) in refused("plan", folder, "--out", folder)


def test_a_folder_that_cannot_be_made_is_refused_before_ranks_start(refused, folder):
    assert "graph.json is a file; name a folder" in refused("demo", "--out", folder / "graph.json" / "out")
    assert "--out /proc/out is not writable" in refused("demo", "--out", "/proc/out")


def test_long_values_are_shortened_in_what_is_said(refused, folder):
    for command in (("plan", "x" * 5000), ("x" * 5000,), ("plan", folder, "--slack", "x" * 5000)):
        assert len(refused(*command)) < 600


def test_pareto_plans_for_several_steps_and_draws_them(qsync, folder):
    code, out, err = qsync("plan", folder, "--pareto", "4", "--out", "trade")
    assert code == 0 and "plan-1.json" in out and "Traceback" not in err
    plans = [Plan.load(path) for path in sorted(Path("trade").glob("plan-*.json"))]
    assert 2 <= len(plans) <= 4 and plans[0]["infer"].lowered and not plans[-1]["infer"].lowered
    assert Path("trade/frontier.png").read_bytes().startswith(b"\x89PNG")
    _, out, _ = qsync("plan", folder, "--pareto", "4", "--out", "again", "--json")
    assert [plan["step_s"] for plan in json.loads(out)["plans"]] == [plan.step_s for plan in plans]


def test_pareto_with_levers_plans_for_several_memories_too(qsync, tmp_path):
    graph = chain()
    profiles = {name: profile_of(graph, name, slow=slow) for name, slow in (("train", 1.0), ("infer", 2.0))}
    Basis(graph, cluster_of(), profiles, sensitivity_of(graph)).save(tmp_path / "chain")
    options = ("--pareto", "2", "--levers", "recompute", "--out", "memory")
    code, out, _ = qsync("plan", tmp_path / "chain", *options)
    assert code == 0 and "peak of infer" in out
    budgets = {Plan.load(path).budgets.get("infer") for path in Path("memory").glob("plan-*.json")}
    assert None in budgets and len(budgets) > 1


def test_a_pareto_that_makes_no_sense_writes_nothing(refused, folder):
    assert "at least 2 points" in refused("plan", folder, "--pareto", "1")
    assert "at most 1000, found 100000" in refused("plan", folder, "--pareto", "100000")
    assert "leave out" in refused("plan", folder, "--pareto", "4", "--slack", "0.1")


def test_interrupting_is_no_traceback(qsync, folder, monkeypatch):
    def interrupted(*_: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(Basis, "load", interrupted)
    code, _, err = qsync("plan", folder)
    assert code == 130
    assert err == "qsync: interrupted\n"


def test_a_plan_of_another_basis_is_said_to_be_one(qsync, folder, tmp_path):
    """More cards over a slower link: the folder's own cluster is another."""
    cluster = replace(cluster_of({"train": 1, "infer": 8}), link=Link(1e-4, 1e6))
    write_json(tmp_path / "cluster.json", cluster.to_json())
    plan = folder / "plan.json"
    assert qsync("plan", folder, "--out", plan)[0] == 0
    for command in ("replay", "explain"):
        assert qsync(command, plan)[2] == ""
    Plan.load(plan).save(folder / "mine.json")
    basis = Basis.load(folder)
    Basis(basis.graph, cluster, basis.profiles, basis.sensitivity).save(tmp_path / "large")
    assert qsync("plan", tmp_path / "large", "--out", plan)[0] == 0
    for command in ("replay", "explain"):
        said = qsync(command, plan)[2]
        assert "the plan was made for a step of" in said and "give others with --basis and --cluster" in said
        assert qsync(command, plan, "--basis", tmp_path / "large")[2] == ""
    assert qsync("report", folder)[0] == 0
    assert "the plan was made for a step of" in (folder / "report.html").read_text()
    assert qsync("report", folder, "--basis", tmp_path / "large")[0] == 0
    assert "the plan was made for a step of" not in (folder / "report.html").read_text()


def test_the_profile_of_another_class_and_records_of_other_kinds_are_named_with_their_file(refused, folder):
    kept = (folder / "profile-infer.json").read_text()
    (folder / "profile-infer.json").write_text((folder / "profile-train.json").read_text())
    said = refused("plan", folder)
    assert "profile-infer.json is the profile of 'train', not of infer" in said
    (folder / "profile-infer.json").write_text((folder / "sensitivity.json").read_text())
    assert "profile-infer.json: expected a profile file, found 'sensitivity'" in refused("plan", folder)
    (folder / "profile-infer.json").write_text(kept)
    (folder / "graph.json").write_text("{}")
    assert "graph.json: expected a graph file, found 'no kind'" in refused("plan", folder)


def test_what_is_no_file_is_written_to_and_a_link_stays_one(qsync, folder, tmp_path):
    pipe, link, target = (tmp_path / name for name in ("pipe", "link.json", "target.json"))
    os.mkfifo(pipe)
    reader = subprocess.Popen(["cat", str(pipe)], stdout=subprocess.PIPE, text=True)
    assert qsync("plan", folder, "--out", pipe)[0] == 0
    read = json.loads(reader.communicate(timeout=60)[0])
    assert pipe.is_fifo() and read["kind"] == "plan"
    link.symlink_to(target)
    assert qsync("plan", folder, "--out", link)[0] == 0
    assert link.is_symlink() and json.loads(target.read_text()) == read
    assert qsync("plan", folder, "--out", "/dev/null")[0] == 0 and Path("/dev/null").is_char_device()


@pytest.mark.dist
@pytest.mark.timeout(600)
def test_a_demo_that_is_told_to_end_leaves_no_temporary_folder(tmp_path):
    temporary = tmp_path / "temporary"
    temporary.mkdir()
    process = subprocess.Popen(
        [sys.executable, "-m", "qsync.commands.main", "demo", "--out", str(tmp_path / "out")],
        env=os.environ | {"TMPDIR": str(temporary)}, stderr=subprocess.PIPE, text=True,
    )  # fmt: skip
    try:
        deadline = time.monotonic() + 240
        while not any(temporary.glob("tmp*/*/attempt_0")):  # torchrun has started the ranks
            assert time.monotonic() < deadline and process.poll() is None
            time.sleep(0.05)
    finally:
        process.terminate()
    said = process.communicate(timeout=120)[1]
    assert process.returncode == 128 + signal.SIGTERM, said
    assert not list(temporary.glob("tmp*"))


CAUGHT = """
try:
    os.kill(os.getpid(), signal.SIGTERM)
    time.sleep(60)
except BaseException:
    pass
time.sleep(60)
"""
SLOW = """
class Slow:
    def __del__(self, sleep=time.sleep):
        sleep(0.6)
slow = Slow()
os.kill(os.getpid(), signal.SIGTERM)
"""


@pytest.mark.parametrize("code", [CAUGHT, SLOW], ids=["a library catches its exit", "it is slow to end"])
def test_a_program_that_is_told_to_end_has_the_code_of_its_signal(code):
    begin = "import os, signal, time\nfrom qsync.processes import exit_signals\nexit_signals._AGAIN_S = 0.2\n"
    done = subprocess.run(
        [sys.executable, "-c", f"{begin}exit_signals.exit_on_signals()\n{code}"], timeout=50, check=False
    )
    assert done.returncode == 128 + signal.SIGTERM


def test_planning_imports_no_torch(folder):
    """A laptop without a GPU plans in a moment: torch alone would take seconds to import.

    Only the solver needs scipy, which takes half a second.
    """
    written = str(folder / "plan.json")
    for command in (["plan", str(folder), "--out", written], ["explain", written], ["replay", written]):
        unwanted = {"torch", "matplotlib"} | ({"scipy"} if command[0] != "plan" else set())
        code = (
            f"import sys; sys.argv = ['qsync', *{command!r}]\n"
            "from qsync.commands import main\n"
            "try:\n    main.main()\n"
            f"finally:\n    assert not {unwanted!r} & set(sys.modules)\n"
        )
        done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
        assert done.returncode == 0, done.stderr


def test_operators_can_be_told_to_run_alike_and_variance_can_be_limited(qsync, refused, folder):
    assert "leave out" in refused("plan", folder, "--max-variance", "1", "--slack", "0.1")
    assert "negative" in refused("plan", folder, "--max-variance", "-1")
    assert "no adjustable operator" in refused("plan", folder, "--together", "*.query,*.kee")
    _, out, _ = qsync("plan", folder, "--json", "--together", "*.query, *.key,*.value")
    chosen = json.loads(out)
    assignment = chosen["classes"]["infer"]["assignment"]
    assert len({assignment[f"layer.0.{one}"] for one in ("query", "key", "value")}) == 1
    variance = sum(entry["predicted"]["added_variance"] for entry in chosen["classes"].values())
    code, out, _ = qsync("plan", folder, "--json", "--max-variance", str(variance / 2))
    limited = json.loads(out)
    added = sum(entry["predicted"]["added_variance"] for entry in limited["classes"].values())
    assert code == 0 and added <= variance / 2 and limited["step_s"] > chosen["step_s"]


@pytest.fixture
def planned(qsync, folder) -> Path:
    """A plan of one `train` and three `infer`, beside its basis."""
    Path("cluster.toml").write_text(CLUSTER_TOML)
    qsync("plan", folder, "--cluster", "cluster.toml", "--out", folder / "plan.json")
    cluster = Cluster.load("cluster.toml")
    Path("cluster.toml").unlink()
    (folder / "cluster.json").write_text(json.dumps(cluster.to_json()))
    return folder / "plan.json"


def test_replay_plays_cards_that_leave_and_return(qsync, planned, tmp_path):
    (tmp_path / "trace.csv").write_text(
        "time_s,event,card\n0.5,kill,infer:1\n2,join,infer:1\n4,lighthouse,\n9,stop,train:0\n60,end,\n"
    )
    options = ("--churn", tmp_path / "trace.csv", "--churn-costs", "detection=1,timeout=20")
    code, out, err = qsync("replay", planned, *options, "--picture", "churn.png")
    assert (code, err) == (0, "")
    assert all(text in out for text in ("simulated", "detection", "timeout", "train 1, infer 2", "samples/s"))
    assert Path("churn.png").read_bytes().startswith(b"\x89PNG")
    report = json.loads(qsync("replay", planned, *options, "--json")[1])
    assert report["simulated"] is True and report["lost_s"]["timeout"] == pytest.approx(20.0)
    assert report["lost_s"]["detection"] == pytest.approx(1.0) and len(report["memberships"]) == 3
    assert report["ideal_samples_per_s"] == pytest.approx(4 * 32 / Plan.load(planned).step_s)


def test_replay_plays_random_failures_by_their_seed(qsync, planned):
    one, again, other = (
        qsync("replay", planned, "--churn", f"mtbf=2,days=3,seed={seed}", "--json")[1] for seed in (1, 1, 2)
    )
    assert one == again != other
    code, out, _ = qsync("replay", planned, "--churn", "mtbf=2,days=3,classes=infer")
    assert code == 0 and "train 1" in out and "no card" not in out
    code, out, _ = qsync("replay", planned, "--churn", "mtbf=1e9", "--picture", "quiet.png")
    assert code == 0 and "100.0% of all cards" in out and Path("quiet.png").is_file()


def test_churn_that_cannot_be_played_is_one_sentence(refused, planned, tmp_path):
    trace = tmp_path / "trace.csv"
    trace.write_text("time_s,event,card\n1,kill,infer:3\n")
    for churn, message in (
        (trace, "no card 'infer:3'"), (tmp_path / "none.csv", "give a CSV file"), ("mtbf=0", "above 0"),
        ("mtbf=1,classes=gpu", "device class 'gpu'"), (tmp_path, "cannot read"),
    ):  # fmt: skip
        assert message in refused("replay", planned, "--churn", churn)
    assert "did you mean start?" in refused("replay", planned, "--churn", "mtbf=1", "--churn-costs", "stat=1")
    assert "add --churn with a trace" in refused("replay", planned, "--churn-costs", "start=1")
    assert "leave out" in refused("replay", planned, "--churn", "mtbf=1", "--steps", "3")


def test_columns_of_numbers_stand_at_the_right():
    columns = new_table("Steps", "class", ">step").columns
    assert [(each.header, each.justify) for each in columns] == [("class", "left"), ("step", "right")]
