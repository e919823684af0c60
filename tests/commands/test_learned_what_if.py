"""Profiles that were measured for or on something else: refused in words, or taken as what-if; and doubts."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest
from graphs import cluster_of, encoder, mlp, profile_of, sensitivity_of

import qsync
from qsync.allocator import allocate, find_warnings
from qsync.commands.loading import load_basis
from qsync.distributed.plan_cache import cache_key
from qsync.errors import FormatError, MismatchError
from qsync.operators.precision import Precision
from qsync.records.cluster import Cluster
from qsync.records.graph import OpGraph
from qsync.records.plan_folder import Basis
from qsync.records.plans import Plan
from qsync.records.profiles import SIMULATED, WHAT_IF, Profile, check_versions, shown
from qsync.replayer import replay

GRAPH = encoder()
PROFILE = replace(
    profile_of(GRAPH),
    model=GRAPH.model,
    batch=GRAPH.batch_shapes,
    machine={
        "hardware": "Xeon",
        "processor": "Xeon",
        "gpus": [],
        "torch": "2.13.0+cpu",
        "qsync": qsync.__version__,
    },
)
CLASS = cluster_of()["infer"]


def test_model_and_batch_shape_are_named_on_both_sides():
    with pytest.raises(MismatchError, match=r"another model \(encoder, graph .*; this one is mlp, graph "):
        PROFILE.check_graph(mlp())
    longer = encoder(rows=48)
    assert (longer.hash, GRAPH.batch_shapes, longer.batch_shapes) == (GRAPH.hash, ((32,),), ((48,),))
    with pytest.raises(MismatchError, match=r"another batch shape \(32, this one is 48\)"):
        PROFILE.check_graph(longer)


@pytest.mark.parametrize(
    ("other", "words"),
    [
        (replace(CLASS, hardware="EPYC"), r"another machine \(Xeon, the class is EPYC\)"),
        (replace(CLASS, device="cuda"), r"without a GPU \(Xeon\), but the class is cuda"),
        (replace(CLASS, hardware="Xeon", device="cuda"), r"without a GPU \(Xeon\), but the class is cuda"),
        (replace(CLASS, emulated_share=0.5), "on a whole one, but the class is an emulated device .*= 0.5"),
    ],
)
def test_the_machine_is_named_on_both_sides(other, words):
    PROFILE.check_class(replace(CLASS, hardware="Xeon"))
    PROFILE.check_class(CLASS)  # a class that does not say what it is takes any
    with pytest.raises(MismatchError, match=words):
        PROFILE.check_class(other)
    cluster = Cluster((other,), cluster_of().link)
    with pytest.raises(MismatchError, match=words):
        replay(GRAPH, {"infer": {}}, {"infer": PROFILE}, cluster)
    PROFILE.what_if(GRAPH).check_class(other)


@pytest.mark.parametrize(
    ("machine", "changes", "words"),
    [
        # Profiled on the processor of a machine that has GPUs, and the other way round.
        ({"device": "cpu", "hardware": "Xeon", "gpus": ["L4"]}, {"device": "cuda"}, "without a GPU"),
        ({"device": "cuda", "hardware": "L4", "gpus": ["L4"]}, {}, r"on a GPU \(L4\), but the class is cpu"),
        # As older files tell it.
        ({"processor": "Xeon", "threads": 1, "gpus": []}, {"hardware": "EPYC"}, r"\(Xeon, 1 thread, the cl"),
    ],
)
def test_what_was_profiled_counts_and_not_what_else_the_machine_has(machine, changes, words):
    with pytest.raises(MismatchError, match=words):
        replace(PROFILE, machine=machine).check_class(replace(CLASS, **changes))


def test_another_share_of_a_core_is_another_device():
    half = replace(PROFILE, emulated_share=0.5)
    half.check_class(replace(CLASS, emulated_share=0.493))  # as a throttled rank measures its own
    with pytest.raises(MismatchError, match=r"emulated_share = 0\.5.* the class is .*emulated_share = 0\.25"):
        half.check_class(replace(CLASS, emulated_share=0.25))


def test_operators_tell_models_of_one_name_apart():
    for profiled, graph, words in (
        (encoder(1), encoder(2), r"which also has 'layer\.1\.query' and \d+ others"),
        (encoder(2), encoder(1), r"which has no 'layer\.1\.query' and \d+ others"),
        (encoder(1, width=32), encoder(1, width=64), "whose parameters have other shapes"),
    ):
        with pytest.raises(MismatchError, match=rf"another model .*{words}\); .*--force"):
            profile_of(profiled).check_graph(graph)


def test_a_profile_of_another_qsync_is_refused_alone():
    with pytest.raises(MismatchError, match=r"infer was measured with qsync 0\.0, but this is qsync 0\."):
        check_versions({"infer": replace(PROFILE, machine={"qsync": "0.0.7"})})


def test_plans_are_kept_apart_by_what_the_ranks_run_on():
    """A class that the user names keeps its name on other hardware: the key of the cache must not."""

    def key(**changes: object) -> str:
        return cache_key(GRAPH, [replace(CLASS, **changes)], {})

    keys = [key(), key(hardware="Xeon, 1 thread"), key(hardware="Xeon, 2 threads")]
    keys += [key(emulated_share=share) for share in (0.25, 0.5)]
    assert len(set(keys)) == 5 and key() == keys[0]


def test_versions_differ_but_for_patches():
    newer, patched = (
        replace(PROFILE, device_class="train", machine={**PROFILE.machine, "torch": version})
        for version in ("2.14.0", "2.13.1")
    )
    check_versions({"infer": PROFILE, "train": patched})
    with pytest.raises(MismatchError, match=r"infer was measured with torch 2\.13, that of train with 2\.14"):
        check_versions({"infer": PROFILE, "train": newer})
    check_versions({"infer": PROFILE, "train": newer.what_if(GRAPH)})


def test_files_from_before_are_read_and_keep_their_hash():
    bare = profile_of(GRAPH)
    assert not {"model", "batch"} & set(bare.to_json())
    assert Profile.from_json(bare.to_json()).hash == bare.hash
    assert "hardware" not in cluster_of().to_json()["classes"][0]
    again = Profile.from_json(json.loads(json.dumps(PROFILE.to_json())))
    assert (again.model, again.batch) == ("encoder", ((32,),)) and again.hash == PROFILE.hash


def test_hardware_in_a_cluster_file_is_a_name():
    entry = cluster_of().to_json()
    entry["classes"][0]["hardware"] = 3
    with pytest.raises(FormatError, match="hardware: expected `str . null`, found 3"):
        Cluster.from_json(json.loads(json.dumps(entry)))
    entry["classes"][0]["hardware"] = "Xeon"
    assert Cluster.from_json(json.loads(json.dumps(entry))).classes[0].hardware == "Xeon"


def pair(noise: float = 0.0) -> dict[str, Profile]:
    return {
        name: profile_of(GRAPH, name, slow=slow, error=noise, latency_s=1e-8, cast_s=1e-11)
        for name, slow in (("train", 1.0), ("infer", 1.2))
    }


def save(folder: Path, graph: OpGraph, noise: float = 0.0) -> None:
    Basis(graph, cluster_of(), pair(noise), sensitivity_of(graph)).save(folder)


@pytest.fixture
def run(monkeypatch, command, tmp_path):
    monkeypatch.chdir(tmp_path)
    return command


def _trace(run) -> object:
    assert run("replay", "plan.json", "--basis", "basis", "--force", "--trace", "trace.json")[0] == 0
    return json.loads(Path("trace.json").read_text())


def test_force_takes_another_batch_shape_as_what_if_and_says_so_everywhere(run, tmp_path):
    save(tmp_path / "basis", encoder(rows=48))
    code, out, err = run("plan", "basis")
    assert (code, out) == (2, "") and "another batch shape" in err and not Path("plan.json").exists()
    code, out, _ = run("plan", "basis", "--force")
    assert code == 0 and "infer (what if)" in out
    assert {entry.origin for entry in Plan.load("plan.json").classes.values()} == {WHAT_IF}
    assert "(what if)" in json.dumps(_trace(run))
    memory = json.loads(run("explain", "plan.json", "--basis", "basis", "--force", "--json")[1])["memory"]
    assert {entry["origin"] for entry in memory.values()} == {WHAT_IF}
    for command in ("replay", "explain"):
        assert run(command, "plan.json", "--basis", "basis")[0] == 2
        code, out, _ = run(command, "plan.json", "--basis", "basis", "--force")
        assert code == 0 and "(what if)" in out
    basis = load_basis("basis", force=True)
    assert {profile.origin for profile in basis.profiles.values()} == {WHAT_IF}


def test_force_reaches_the_profile_that_a_data_sheet_s_device_is_simulated_from(tmp_path):
    save(tmp_path / "basis", encoder(rows=48))
    lines = ("[[classes]]", 'name = "cards"', 'datasheet = "T4"', "count = 2", "[link]")
    toml = tmp_path / "cluster.toml"
    toml.write_text("\n".join([*lines, "latency_s = 1e-5", "bytes_per_s = 1e10"]))
    with pytest.raises(MismatchError, match="another batch shape"):
        load_basis(tmp_path / "basis", toml)
    origin = load_basis(tmp_path / "basis", toml, force=True).profiles["cards"].origin
    assert shown("cards", origin) == "cards (simulated device, what if)"
    save(tmp_path / "basis", GRAPH)
    assert load_basis(tmp_path / "basis", toml, force=True).profiles["cards"].origin == SIMULATED


def test_force_changes_nothing_that_belongs_together(run, tmp_path):
    save(tmp_path / "basis", GRAPH)
    _, plain, _ = run("plan", "basis", "--json")
    _, forced, _ = run("plan", "basis", "--json", "--force")
    assert json.loads(plain) == json.loads(forced) and "warnings" not in json.loads(plain)


def test_force_invents_no_operator(run, tmp_path):
    save(tmp_path / "basis", encoder(3))
    code, _, err = run("plan", "basis", "--force")
    assert code == 2 and "layer.2" in err


def test_a_plan_that_noise_could_have_made_is_doubted(run, tmp_path):
    save(tmp_path / "basis", GRAPH, noise=0.6)
    code, out, _ = run("plan", "basis")
    assert code == 0 and "Warning:" in out and "only known to within" in out
    assert "infer" in Plan.load("plan.json").classes
    assert "profile again" in json.loads(run("plan", "basis", "--json")[1])["warnings"][0]


def test_no_doubt_where_time_is_known_or_memory_decides():
    def judged(noise: float, budget: int | None = None) -> list[str]:
        profiles = pair(noise)
        budgets = {"infer": budget} if budget else None
        plan = allocate(GRAPH, profiles, sensitivity_of(GRAPH), cluster_of(), budgets=budgets)
        return find_warnings(GRAPH, plan, profiles, cluster_of(), budgets)

    assert judged(0.0) == judged(0.01) == []
    assert len(judged(0.6)) == 1
    fp32 = replay(GRAPH, {"train": {}, "infer": {}}, pair(), cluster_of())["infer"]
    assert judged(0.6, fp32.memory_bytes - 1) == []


@pytest.mark.parametrize(
    ("seen", "doubt"),
    [
        ({"drift": 0.08, "noise": 0.01}, "busy machine: its steps differ by 8%"),
        ({"noise": 0.06}, "busy machine: its steps differ by 6%"),
        ({"noise": 0.0, "num_steps": 15}, "saw most of its steps once"),
        ({"noise": 0.01, "held_down": ("heat",)}, "was held down by heat"),
        ({"noise": 0.01, "drift": 0.04, "num_steps": 15}, ""),
    ],
)
def test_a_profile_of_a_busy_machine_or_of_single_steps_is_doubted(seen, doubt):
    profiles = {name: replace(profile, **seen) for name, profile in pair().items()}
    plan = allocate(GRAPH, profiles, sensitivity_of(GRAPH), cluster_of())
    found = find_warnings(GRAPH, plan, profiles, cluster_of())
    assert len(found) == (2 if doubt else 0) and all(doubt in text for text in found)


def test_costs_that_were_learned_on_a_gpu_have_no_launches_and_say_so():
    classes = tuple(replace(one, device="cuda") for one in cluster_of().classes)
    cluster = replace(cluster_of(), classes=classes)
    on_gpu = {"machine": {"device": "cuda", "hardware": "card"}}

    def judged(**seen) -> list[str]:
        profiles = {name: replace(profile, **on_gpu, **seen) for name, profile in pair().items()}
        plan = allocate(GRAPH, profiles, sensitivity_of(GRAPH), cluster)
        return find_warnings(GRAPH, plan, profiles, cluster)

    found = judged(origin="learned")
    assert len(found) == 2 and all("no model prices launches" in text for text in found)
    assert judged(origin="measured") == []


def test_no_doubt_where_fp32_was_never_measured():
    """A plan of pins, from profiles without the precision that its gain would be told from."""

    def without_fp32(profile: Profile) -> Profile:
        op = "layer.0.query"
        modes = {mode: cost for mode, cost in profile.ops[op].items() if mode != Precision.FP32}
        return replace(profile, ops={**profile.ops, op: modes})

    profiles = {name: without_fp32(profile) for name, profile in pair(0.6).items()}
    plan = allocate(GRAPH, profiles, sensitivity_of(GRAPH), cluster_of(), pins={"layer.0.query": "bf16"})
    assert plan["infer"].lowered and find_warnings(GRAPH, plan, profiles, cluster_of()) == []
