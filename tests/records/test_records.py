"""Records: what is written reads back the same, and what cannot be read is named with its place."""

from __future__ import annotations

import json
from dataclasses import FrozenInstanceError, replace

import numpy as np
import pytest
from graphs import assignments_for, cluster_of, encoder, graphs, mlp, profile_of, sensitivity_of
from hypothesis import assume, given
from hypothesis import strategies as st

from qsync.errors import FormatError, MismatchError, QSyncError
from qsync.operators.precision import Precision, type_bytes
from qsync.operators.registry import PRECISIONS_BY_KIND, operand_type
from qsync.records.cluster import Cluster
from qsync.records.graph import OpGraph
from qsync.records.json_files import read_json, write_json, write_text
from qsync.records.plans import ClassPlan, Plan, Predicted
from qsync.records.profiles import Cost, Profile, Sensitivity

GRAPH = encoder(1)
FP32, BF16, INT8 = Precision.FP32, Precision.BF16, Precision.INT8


def plan_of(graph: OpGraph = GRAPH, **chosen: Precision) -> Plan:
    assignment = {op.name: chosen.get(op.name, FP32) for op in graph.adjustable}
    predicted = Predicted(0.1, 0.02, 12345, 1e-7)
    return Plan(graph.model, graph.hash, {"infer": ClassPlan(assignment, predicted, "abc")}, 0.12, 0.12)


def through_text(value):
    return json.loads(json.dumps(value))


@given(graphs())
def test_graphs_read_back(graph):
    again = OpGraph.from_json(through_text(graph.to_json()))
    assert again == graph
    assert (again.hash, again.shapes_hash) == (graph.hash, graph.shapes_hash)


@given(graphs(), st.data())
def test_plans_read_back(graph, data):
    assume(graph.adjustable)
    plan = plan_of(graph, **data.draw(assignments_for(graph)))
    assert Plan.from_json(through_text(plan.to_json())) == plan
    plan.check_graph(graph)


def test_profiles_and_sensitivities_read_back(tmp_path):
    casts = {("head", "fp32", "bf16"): Cost(1e-6, 3e-6)}
    profile = profile_of(GRAPH)
    profile = replace(profile, casts=casts, step_s={"fp32": 0.5}, machine={"cpu": "x"}, emulated_share=0.5)
    assert Profile.load(profile.save(tmp_path / "profile.json")) == profile
    assert Profile.load(tmp_path / "profile.json").hash == profile.hash
    older = replace(profile, switch_s={})
    assert "switch_s" not in older.to_json() and Profile.from_json(older.to_json()) == older
    sensitivity = sensitivity_of(GRAPH)
    assert Sensitivity.load(sensitivity.save(tmp_path / "sensitivity.json")) == sensitivity


def test_clusters_read_back():
    cluster = cluster_of({"train": 2, "infer": 3})
    assert Cluster.from_json(through_text(cluster.to_json())) == cluster
    assert cluster.num_ranks == 5


def test_records_cannot_be_changed():
    for record in (GRAPH, GRAPH.ops[0], plan_of(), profile_of(GRAPH), cluster_of(), sensitivity_of(GRAPH)):
        with pytest.raises((FrozenInstanceError, TypeError)):
            record.anything = 1


def test_derived_strings_and_numbers_are_written_as_python_s():
    machine = {"torch": type("Version", (str,), {})("2.13"), "load": np.float64(0.5)}
    profile = replace(profile_of(GRAPH), machine=machine)
    assert through_text(profile.to_json())["machine"] == {"torch": "2.13", "load": 0.5}
    with pytest.raises(TypeError, match="a object cannot be written"):
        replace(profile, machine={"what": object()}).to_json()


def test_a_profile_s_hash_follows_its_content():
    profile = profile_of(GRAPH)
    assert profile.hash == profile_of(GRAPH).hash != replace(profile, host_s=1.0).hash


def test_a_graph_s_hash_is_the_model_s_whatever_the_batch():
    small, large = encoder(1, rows=8), encoder(1, rows=16)
    assert small.hash == large.hash and small.shapes_hash != large.shapes_hash
    assert encoder(1, width=32).hash != encoder(1, width=64).hash


# Files.


def test_malformed_json_is_named_with_its_line(tmp_path):
    path = tmp_path / "plan.json"
    path.write_text('{\n "kind": "plan",\n "version" 1\n}')
    with pytest.raises(FormatError, match=r"plan\.json, line 3: not valid JSON"):
        Plan.load(path)
    path.write_text("[1]")
    with pytest.raises(FormatError, match="holds a JSON list, not an object"):
        Plan.load(path)
    path.write_bytes(b"\xff\xfe\x00")
    with pytest.raises(FormatError, match="not a text file"):
        Plan.load(path)
    for text in ("[" * 100_000, '{"version": ' + "9" * 5000 + "}"):
        path.write_text(text)
        with pytest.raises(FormatError, match=r"plan\.json is not a file of qsync"):
            Plan.load(path)
    with pytest.raises(FormatError, match=r"cannot read .*absent.json: No such file"):
        Plan.load(tmp_path / "absent.json")


def test_a_file_of_another_kind_or_version_is_refused(tmp_path):
    with pytest.raises(FormatError, match="expected a plan file, found 'graph'"):
        Plan.load(GRAPH.save(tmp_path / "graph.json"))
    with pytest.raises(FormatError, match="has version 99, but this qsync reads version 1"):
        Plan.from_json({**plan_of().to_json(), "version": 99})


def test_writing_is_whole_or_not_at_all(tmp_path):
    path = write_text(tmp_path / "deep" / "file.json", "old")
    with pytest.raises(TypeError):
        write_json(path, {"not": object()})
    with pytest.raises(FormatError, match=r"file.json has an invalid character '\\ud800' after"):
        write_text(path, "\ud800")
    assert path.read_text() == "old"
    assert [entry.name for entry in path.parent.iterdir()] == ["file.json"]
    assert read_json(write_json(path, {"a": 1})) == {"a": 1}


# Fields.


def test_half_of_a_character_is_refused_where_it_is_read():
    plan = plan_of().to_json()
    for name, value in (("model", "\ud800"), ("pins", {"\udfff*": "fp32"})):
        with pytest.raises(FormatError, match=rf"plan has an invalid character .* after .*{name}\W+; write"):
            Plan.from_json(through_text({**plan, name: value}))
    whole = {**plan, "model": "\U0001f600"}
    assert Plan.from_json(through_text(whole)).model == "\U0001f600"


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"classes": {}}, "the plan has no device class"),
        ({"classes": {"infer": []}}, "plan, classes, infer: expected `object`, found"),
        ({"classes": {"infer": {}}}, "plan, classes, infer: object missing required field `assignment`"),
        ({"classes": {"infer": {"assignment": {"head": "int7"}}}}, "head: unknown precision 'int7': choose"),
        ({"classes": {"infer": {"assignment": {}, "predicted": {"x": 1}}}}, "predicted has an unknown field"),
        ({"model": 3}, "plan, model: expected `str`, found 3"),
        ({"step_s": "fast"}, r"plan, step_s: expected `int . float . null`, found 'fast'"),
        ({"target_s": float("nan")}, "plan, target_s: expected `float` >= 0.0, found nan"),
        ({"bucket_cap_bytes": 1.5}, "plan, bucket_cap_bytes: expected `int . null`, found 1.5"),
        ({"bucket_cap_bytes": True}, "plan, bucket_cap_bytes: expected `int . null`, found True"),
        ({"classes": {"infer": {"assignment": {}, "profile_hash": 7}}}, "profile_hash: expected"),
        (
            {"classes": {"infer": {"assignment": {}, "predicted": {
                "compute_s": 1.0, "wait_s": -1.0, "memory_bytes": 1, "added_variance": 0.0}}}},
            "infer, predicted, wait_s: expected `float` >= 0.0, found -1.0",
        ),
    ],
)  # fmt: skip
def test_a_hand_edited_plan_is_refused_with_the_place(change, message):
    with pytest.raises(FormatError, match=message):
        Plan.from_json({**plan_of().to_json(), **change})


def test_a_plan_for_another_model_is_refused_with_both_sides():
    with pytest.raises(MismatchError, match=r"assigns 'layer\.0\.query', which mlp lacks .nearest"):
        plan_of().check_graph(mlp())
    missing = replace(plan_of(), classes={"infer": ClassPlan({"head": FP32})})
    with pytest.raises(MismatchError, match=r"lacks 'layer\.0\.query' and 6 more operators"):
        missing.check_graph(GRAPH)
    with pytest.raises(
        MismatchError, match="made for encoder with graph 0123, but this model is encoder with graph"
    ):
        replace(plan_of(), graph_hash="0123").check_graph(GRAPH)
    with pytest.raises(FormatError, match=r"gives layer\.0\.attention .attention. int8_all, which"):
        plan_of(**{"layer.0.attention": Precision.INT8_ALL}).check_graph(GRAPH)
    with pytest.raises(MismatchError, match="no device class 'other'; name one of infer"):
        plan_of()["other"]


def test_plans_that_save_less(tmp_path):
    plan = plan_of()
    less = plan.save_less("layer.0.*").save_less("layer.0.gelu")
    assert less["infer"].saving_less == ("layer.0.*", "layer.0.gelu")
    assert less["infer"].predicted is None and less.step_s is None
    assert less["infer"].assignment == plan["infer"].assignment
    assert Plan.load(less.save(tmp_path / "plan.json")) == less
    assert less.pin("head", "bf16")["infer"].saving_less == less["infer"].saving_less
    less.check_graph(GRAPH)
    assert plan.diff(less) == "infer  saving less: none -> layer.0.*, layer.0.gelu"
    assert plan.save_less(device_class="infer")["infer"].saving_less == ("*",)
    with pytest.raises(MismatchError, match="no device class 'other'"):
        plan.save_less(device_class="other")
    with pytest.raises(MismatchError, match=r"makes 'layer\.0\.gelo' save less.*nearest: 'layer\.0\.gelu'"):
        plan.save_less("layer.0.gelo").check_graph(GRAPH)


def test_plans_from_before_saving_less_are_read():
    body = plan_of().to_json()
    del body["classes"]["infer"]["saving_less"]
    assert Plan.from_json(body) == plan_of()
    body["classes"]["infer"]["saving_less"] = [1]
    with pytest.raises(FormatError, match="saving_less"):
        Plan.from_json(body)


def test_a_plan_keeps_what_it_was_asked_for():
    plan = replace(plan_of(), pins={"layer.1.*": BF16, "head": INT8}, budgets={"infer": 7})
    body = through_text(plan.to_json())
    assert list(body["pins"]) == ["head", "layer.1.*"] and Plan.from_json(body) == plan
    assert plan.pinned_by("layer.1.key", BF16) == "layer.1.*" and plan.pinned_by("layer.1.key", INT8) is None
    assert not {"pins", "budgets"} & set(plan_of().to_json())
    for field, value, words in (
        ("pins", ["head"], "plan, pins: expected `object`"),
        ("pins", {"head": "int7"}, "unknown precision 'int7'"),
        ("budgets", {"infer": -1}, "budgets, infer: expected `int` >= 0, found -1"),
    ):
        with pytest.raises(FormatError, match=words):
            Plan.from_json({**body, field: value})


def test_pins_and_differences():
    plan = plan_of(head=INT8)
    pinned = plan.pin("layer.0.q*", "bf16")
    assert pinned["infer"].lowered == ("layer.0.query", "head")
    assert pinned["infer"].predicted is None and pinned.step_s is None
    assert plan.diff(pinned) == "infer  layer.0.query: fp32 -> bf16"
    assert plan.diff(plan) == ""
    with pytest.raises(MismatchError, match=r"no operator matches 'haed'.*'head'"):
        plan.pin("haed", "bf16")
    with pytest.raises(FormatError, match="unknown precision"):
        plan.pin("head", "float")


TOML = """
[[classes]]
name = "infer"
device = "cpu"
count = 2
memory_bytes = 1000
precisions = ["fp32", "int8"]

[link]
latency_s = 1e-4
bytes_per_s = 1e9
"""


def test_a_cluster_file_reads(tmp_path):
    path = write_text(tmp_path / "cluster.toml", TOML)
    cluster = Cluster.load(path)
    assert cluster["infer"].count == 2 and cluster.link.overlap_rate == 1.0
    assert cluster["infer"].carried_16bit is None
    with pytest.raises(FormatError, match="the cluster has no device class 'train'; choose from infer"):
        cluster["train"]


HOSTS = """
[[hosts]]
name = "a"
ranks = [0]
latency_s = { "*" = 2e-5, b = 4e-5 }
bytes_per_s = { b = 1e9, "*" = 4e9 }

[[hosts]]
name = "b"
ranks = [1]
latency_s = { a = 3e-5 }
bytes_per_s = { a = 5e8 }
"""


def test_hosts_have_legs_in_each_direction_and_the_short_form_makes_them_alike(tmp_path):
    first, second = Cluster.load(write_text(tmp_path / "cluster.toml", TOML + HOSTS)).hosts
    assert first.leg("b") == (4e-5, 1e9) and second.leg("a") == (3e-5, 5e8)
    assert first.leg("a") == (2e-5, 4e9) and second.leg("b") == (3e-5, 5e8)  # one rank: as the nearest
    short = "num_hosts = 2\n" + TOML + "[between]\nlatency_s = 1e-3\nbytes_per_s = 1e8\nnum_ranks = 2\n"
    cluster = Cluster.load(write_text(tmp_path / "short.toml", short))
    assert [host.leg(other.name) for host in cluster.hosts for other in cluster.hosts] == [
        (5e-5, 1e9), (5e-4, 1e8), (5e-4, 1e8), (5e-5, 1e9),
    ]  # fmt: skip
    assert Cluster.from_json(cluster.to_json()) == cluster
    faster = cluster.with_legs(0.5, 2.0, within=False)
    assert faster.hosts[0].leg("host 1") == (2.5e-4, 2e8) and faster.hosts[0].leg("host 0") == (5e-5, 1e9)
    assert faster.link == cluster.link and cluster.with_legs(2.0).link.latency_s == 2e-4
    more = cluster.with_classes((replace(cluster["infer"], count=5),))
    assert [host.ranks for host in more.hosts] == [(0, 1), (2, 3, 4)]
    assert len(cluster.with_classes(cluster.classes, 1).hosts) == 1


@pytest.mark.parametrize(
    ("old", "new", "message"),
    [
        ("ranks = [1]", "ranks = [0]", "hosts.. have the ranks .0, 0.; give each of the ranks 0 to 1 to one"),
        ('name = "b"', 'name = "a"', "and a name of its own"),
        ("{ a = 3e-5 }", "{ b = 3e-5 }", "latency_s of host 'b' lacks 'a'; give one for every host, or"),
        ("{ a = 5e8 }", "{ a = 0 }", "hosts, entry 2, bytes_per_s, a: expected `float` > 0"),
        ("{ a = 5e8 }", "{}", "bytes_per_s of host 'b' lacks 'a'"),
        ("[[hosts]]\nname = \"a\"", "[between]\nlatency_s = 1\nbytes_per_s = 1\n[[hosts]]\nname = \"a\"",
         "num_hosts and a .between. link need each other"),
    ],
)  # fmt: skip
def test_hosts_that_do_not_fit_are_named(tmp_path, old, new, message):
    assert old in HOSTS
    with pytest.raises(FormatError, match=message):
        Cluster.load(write_text(tmp_path / "cluster.toml", TOML + HOSTS.replace(old, new)))
    both = "num_hosts = 2\n" + TOML + "[between]\nlatency_s = 1\nbytes_per_s = 1\n" + HOSTS
    with pytest.raises(FormatError, match="stands for ..hosts..; give one of them"):
        Cluster.load(write_text(tmp_path / "both.toml", both))


@pytest.mark.parametrize(
    ("old", "new", "message"),
    [
        ("count = 2", "count = ", r"not valid TOML .*line 5"),
        ("count = 2", "count = 0", "classes, entry 1, count: expected `int` >= 1, found 0"),
        ("count = 2", 'count = "two"', "classes, entry 1, count: expected `int`, found 'two'"),
        ("count = 2", "count = true", "count: expected `int`, found True"),
        ("count = 2\n", "", "classes, entry 1: object missing required field `count`"),
        ("memory_bytes = 1000", "memory_bytes = -1", "memory_bytes: expected `int` >= 1, found -1"),
        ('"int8"', '"int9"', "unknown precision 'int9'"),
        ('["fp32", "int8"]', '["int8"]', "precisions must include 'fp32'"),
        ('device = "cpu"', 'device = "tpu"', "device: expected `str` matching regex .*, found 'tpu'"),
        ("count = 2", "count = 2\nemulated_share = 2.0", "emulated_share: expected `float` <= 1.0"),
        ("latency_s = 1e-4", "latency_s = -1.0", "latency_s: expected `float` >= 0.0, found -1"),
        ("bytes_per_s = 1e9", "bytes_per_s = 0.0", "bytes_per_s: expected `float` > 0.0, found 0.0"),
        ("[link]\nlatency_s = 1e-4\nbytes_per_s = 1e9\n", "", "object missing required field `link`"),
        ("[[classes]]", "[[other]]", "has an unknown field 'other'"),
        (
            "count = 2",
            "count = 2\nmemroy_bytes = 3",
            "entry 1 has an unknown field 'memroy_bytes' .nearest: 'memory_bytes'",
        ),
        ("latency_s", "bandwidth = 3\nlatency_s", "link has an unknown field 'bandwidth'"),
        ("[link]", "[links]\n[link]", "has an unknown field 'links' .nearest: 'link'"),
        ("count = 2", "count = 2\nemulated_share = true", "expected `float . null`, found True"),
        ("latency_s = 1e-4", "latency_s = inf", "latency_s: expected `float` that is finite, found inf"),
        ("bytes_per_s = 1e9", "bytes_per_s = nan", "bytes_per_s: expected `float` > 0.0, found nan"),
        ("bytes_per_s = 1e9", "bytes_per_s = 1" + "0" * 400, "link, bytes_per_s: .*; correct it"),
        ("bytes_per_s = 1e9", "bytes_per_s = 1e9\noverlap_rate = 2", "overlap_rate: expected `float` <= 1"),
        ("bytes_per_s = 1e9", "bytes_per_s = 1e9\nerror = -1", "error: expected `int` >= 0, found -1"),
        ("\n[link]", TOML.partition("\n[link]")[0] + "\n[link]", "names the device class 'infer' twice"),
    ],
)
def test_a_malformed_cluster_file_is_named_with_the_place(tmp_path, old, new, message):
    assert old in TOML
    path = write_text(tmp_path / "cluster.toml", TOML.replace(old, new))
    with pytest.raises(FormatError, match=message) as error:
        Cluster.load(path)
    assert "cluster.toml" in str(error.value)


def test_a_cluster_file_that_is_no_text_is_refused(tmp_path):
    (tmp_path / "cluster.toml").write_bytes(b"\xff\xfe")
    with pytest.raises(FormatError, match=r"cluster\.toml is not a text file"):
        Cluster.load(tmp_path / "cluster.toml")


@pytest.mark.parametrize(
    "change", [{"ops": [{}]}, {"ops": [{"role": "nobody"}]}, {"inputs": [{"name": "x"}]}, {"ops": 3}]
)
def test_a_graph_that_cannot_be_read_is_refused(change):
    with pytest.raises(FormatError, match="graph"):
        OpGraph.from_json({**GRAPH.to_json(), **change})


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"ops": {"head": {"fp32": [1, 2, 3, 4]}}}, "ops, head, fp32: expected `array` of length 1 to 3"),
        ({"casts": [["x"]]}, "casts, entry 1: expected `array` of length 6"),
        ({"surplus": 1}, "has an unknown field 'surplus'"),
        ({"setting": None}, "has an unknown field 'setting'"),
        ({"outside": None}, "outside: expected `array`, found None"),
    ],
)
def test_a_profile_that_cannot_be_read_is_refused(change, message):
    with pytest.raises(FormatError, match=f"profile of infer.*{message}"):
        Profile.from_json({**profile_of(GRAPH).to_json(), **change})


@pytest.mark.parametrize(
    ("part", "name", "value", "message"),
    [
        ("ops", "shape", None, "graph, ops, entry 2, shape: expected `array`, found None"),
        ("ops", "shape", [2, -1], "shape, entry 2: expected `int` >= 0, found -1"),
        ("ops", "flops", "many", "flops: expected `int`, found 'many'"),
        ("ops", "inputs", ["nothing"], "reads 'nothing', which no earlier operator computes"),
        ("ops", "kind", "convolve", "there is no kernel of kind 'convolve'"),
        ("inputs", "name", 3, "graph, inputs, entry 1, name: expected `str`, found 3"),
    ],
)
def test_a_graph_with_a_field_that_is_no_good_is_refused(part, name, value, message):
    written = json.loads(json.dumps(GRAPH.to_json()))
    adjustable = next(i for i, op in enumerate(GRAPH.ops) if op in GRAPH.adjustable)
    written[part][adjustable if part == "ops" else 0][name] = value
    with pytest.raises(FormatError, match=message):
        OpGraph.from_json(written)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"host_s": "1"}, "profile of infer, host_s: expected `int . float`, found '1'"),
        ({"optimizer_s": None}, "optimizer_s: expected `int . float`, found None"),
        ({"optimizer_bytes": float("inf")}, "optimizer_bytes: expected `int`, found inf"),
        ({"outside": [0.0, float("nan")]}, "outside, backward_s: expected `float` >= 0.0, found nan"),
        ({"ops": {"head": {"fp32": [1.0, -1.0]}}}, "ops, head, fp32, backward_s: expected `float` >= 0.0"),
        (
            {"casts": [["x", "fp32", "bf16", "a", 0.0, 0.0]]},
            "casts, entry 1, entry 4: expected `int . float`",
        ),
        ({"cast_fit": [["fp32", "bf16", 0, 0, True, 0]]}, "cast_fit, entry 1, entry 5: expected"),
        ({"step_s": []}, r"step_s: expected `object`, found \[\]"),
    ],
)
def test_a_profile_with_a_number_that_is_no_good_is_refused(change, message):
    with pytest.raises(FormatError, match=message):
        Profile.from_json({**profile_of(GRAPH, "infer").to_json(), **change})


def test_a_profile_of_an_unknown_precision_names_the_operator():
    profile = Profile.from_json({**profile_of(GRAPH).to_json(), "ops": {"head": {"int9": [1.0, 1.0]}}})
    with pytest.raises(FormatError, match="operator 'head': unknown precision 'int9'"):
        profile.precisions_of("head")


@pytest.mark.parametrize("value", [None, "much", float("nan"), -1.0])
def test_a_sensitivity_that_is_no_number_names_the_operator(value):
    written = sensitivity_of(GRAPH).to_json()
    with pytest.raises(FormatError, match="sensitivity, omega, head, int8: expected"):
        Sensitivity.from_json({**written, "omega": {"head": {"int8": value}}})


def test_a_profile_of_another_model_or_batch_is_refused():
    with pytest.raises(MismatchError, match="belongs to another model"):
        profile_of(mlp()).check_graph(GRAPH)
    with pytest.raises(MismatchError, match="belongs to another batch shape"):
        profile_of(encoder(1, rows=8)).check_graph(encoder(1, rows=16))


def test_sensitivity_is_zero_in_fp32_and_must_be_known_elsewhere():
    sensitivity = sensitivity_of(GRAPH)
    assert sensitivity["head", FP32] == 0.0
    assert sensitivity["head", BF16] > 0.0
    with pytest.raises(MismatchError, match="the sensitivity of nose at int8 is missing"):
        sensitivity["nose", INT8]


# Precisions.


@pytest.mark.parametrize("kind", PRECISIONS_BY_KIND)
def test_every_kernel_s_operands_have_a_type_of_known_size(kind):
    for precision in PRECISIONS_BY_KIND[kind]:
        for index in range(2):
            assert type_bytes(operand_type(kind, index, precision), 10) in (10, 20, 40)


def test_a_walk_drifts_ahead_of_a_profile_as_far_as_it_says():
    """Many walks: by their deviation while profiled the profile says how far their next means lie off."""
    rng, taken, next_s = np.random.default_rng(0), 100, 300
    walks = np.cumsum(rng.normal(size=(4000, taken + next_s)), axis=1)
    now, later = walks[:, :taken], walks[:, taken:]
    drift = float(np.sqrt(now.var(axis=1).mean()))
    off = later.mean(axis=1) - now.mean(axis=1)
    profile = replace(profile_of(GRAPH), drift=drift, seconds=float(taken))
    assert profile.ahead(float(next_s)).drift == pytest.approx(float(off.std()), rel=0.05)
    still = replace(profile_of(GRAPH), drift=0.0, seconds=100.0)
    assert still.ahead(1e6) == still  # a machine that did not drift
    simulated = replace(profile_of(GRAPH), drift=0.01, seconds=0.0)
    assert simulated.ahead(600.0) == simulated


def test_every_error_is_qsync_s():
    for error in (FormatError, MismatchError):
        assert issubclass(error, QSyncError)
