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
from qsync.records.cluster import Cluster
from qsync.records.graph import OpGraph
from qsync.records.json_files import read_json, write_json, write_text
from qsync.records.plans import ClassPlan, Plan, Predicted
from qsync.records.precision import PRECISIONS_BY_KIND, Precision, operand_type, type_bytes
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
        with pytest.raises(FormatError, match=r"plan\.json is no file that qsync wrote"):
            Plan.load(path)
    with pytest.raises(FormatError, match=r"cannot read .*absent.json: No such file"):
        Plan.load(tmp_path / "absent.json")


def test_a_file_of_another_kind_or_version_is_refused(tmp_path):
    with pytest.raises(FormatError, match="expected a plan file, found 'graph'"):
        Plan.load(GRAPH.save(tmp_path / "graph.json"))
    with pytest.raises(FormatError, match="has version 99, this qsync reads version 1"):
        Plan.from_json({**plan_of().to_json(), "version": 99})


def test_writing_is_whole_or_not_at_all(tmp_path):
    path = write_text(tmp_path / "deep" / "file.json", "old")
    with pytest.raises(TypeError):
        write_json(path, {"not": object()})
    with pytest.raises(FormatError, match=r"file.json has half of a character, '\\ud800'; write the file"):
        write_text(path, "\ud800")
    assert path.read_text() == "old"
    assert [entry.name for entry in path.parent.iterdir()] == ["file.json"]
    assert read_json(write_json(path, {"a": 1})) == {"a": 1}


# Fields.


def test_half_of_a_character_is_refused_where_it_is_read():
    plan = plan_of().to_json()
    for changed in ({**plan, "model": "\ud800"}, {**plan, "pins": {"\udfff*": "fp32"}}):
        with pytest.raises(FormatError, match=r"plan: field '\w+' has half of a character"):
            Plan.from_json(through_text(changed))
    whole = {**plan, "model": "\U0001f600"}
    assert Plan.from_json(through_text(whole)).model == "\U0001f600"


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"classes": {}}, "the plan has no device class"),
        ({"classes": {"infer": []}}, "plan, class 'infer' must be an object"),
        ({"classes": {"infer": {}}}, "plan, class 'infer' lacks the field 'assignment'"),
        ({"classes": {"infer": {"assignment": {"head": "int7"}}}}, "'head': unknown precision 'int7'"),
        ({"classes": {"infer": {"assignment": {}, "predicted": {"x": 1}}}}, "the prediction cannot be read"),
        ({"model": 3}, "field 'model' must be str, found 3"),
        ({"step_s": "fast"}, "plan: field 'step_s' must be float, found 'fast'"),
        ({"target_s": float("nan")}, "plan: field 'target_s' must be finite and not negative, found nan"),
        ({"bucket_cap_bytes": 1.5}, "plan: field 'bucket_cap_bytes' must be int, found 1.5"),
        ({"bucket_cap_bytes": True}, "plan: field 'bucket_cap_bytes' must be int, found True"),
        ({"classes": {"infer": {"assignment": {}, "profile_hash": 7}}}, "infer: field 'profile_hash'"),
        (
            {"classes": {"infer": {"assignment": {}, "predicted": {
                "compute_s": 1.0, "wait_s": -1.0, "memory_bytes": 1, "added_variance": 0.0}}}},
            "infer: field 'predicted': field 'wait_s' must be finite and not negative",
        ),
    ],
)  # fmt: skip
def test_a_hand_edited_plan_is_refused_with_the_place(change, message):
    with pytest.raises(FormatError, match=message):
        Plan.from_json({**plan_of().to_json(), **change})


def test_a_plan_for_another_model_is_refused_with_both_sides():
    with pytest.raises(MismatchError, match=r"assigns 'layer\.0\.query', which mlp does not have .nearest"):
        plan_of().check_graph(mlp())
    missing = replace(plan_of(), classes={"infer": ClassPlan({"head": FP32})})
    with pytest.raises(MismatchError, match=r"says nothing of 'layer\.0\.query' and 6 more operators"):
        missing.check_graph(GRAPH)
    with pytest.raises(
        MismatchError, match="made for encoder with graph 0123, this model is encoder with graph"
    ):
        replace(plan_of(), graph_hash="0123").check_graph(GRAPH)
    with pytest.raises(FormatError, match=r"gives layer\.0\.attention .attention. int8_all, which"):
        plan_of(**{"layer.0.attention": Precision.INT8_ALL}).check_graph(GRAPH)
    with pytest.raises(MismatchError, match="no device class 'other', it was made for infer"):
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
    with pytest.raises(MismatchError, match=r"lets 'layer\.0\.gelo' save less.*nearest: 'layer\.0\.gelu'"):
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
        ("pins", ["head"], "'pins' must be dict"),
        ("pins", {"head": "int7"}, "unknown precision 'int7'"),
        ("budgets", {"infer": -1}, "'budgets', infer must be finite and not negative"),
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
    with pytest.raises(FormatError, match="no device class 'train' in this cluster; it has infer"):
        cluster["train"]


@pytest.mark.parametrize(
    ("old", "new", "message"),
    [
        ("count = 2", "count = ", r"not valid TOML, .*line 5"),
        ("count = 2", "count = 0", "class 1: count must be at least 1, found 0"),
        ("count = 2", 'count = "two"', "class 1: field 'count' must be int, found 'two'"),
        ("count = 2", "count = true", "field 'count' must be int, found True"),
        ("count = 2\n", "", "class 1 lacks the field 'count'"),
        ("memory_bytes = 1000", "memory_bytes = -1", "memory_bytes must be positive"),
        ('"int8"', '"int9"', "unknown precision 'int9'"),
        ('["fp32", "int8"]', '["int8"]', "precisions must include 'fp32'"),
        ('device = "cpu"', 'device = "tpu"', "device must be 'cpu' or 'cuda', found 'tpu'"),
        ("count = 2", "count = 2\nemulated_share = 2.0", r"emulated_share must lie in \(0, 1\]"),
        ("latency_s = 1e-4", "latency_s = -1.0", "latency_s must be finite and not negative, found -1"),
        ("bytes_per_s = 1e9", "bytes_per_s = 0.0", "bytes_per_s must be positive"),
        ("[link]\nlatency_s = 1e-4\nbytes_per_s = 1e9\n", "", "lacks the field 'link'"),
        ("[[classes]]", "[[other]]", "lacks the field 'classes'"),
        (
            "count = 2",
            "count = 2\nmemroy_bytes = 3",
            "class 1 has an unknown field 'memroy_bytes'; the fields",
        ),
        ("latency_s", "bandwidth = 3\nlatency_s", "link has an unknown field 'bandwidth'"),
        ("[link]", "[links]\n[link]", "has an unknown field 'links'"),
        ("count = 2", "count = 2\nemulated_share = true", r"emulated_share must lie in \(0, 1\], found True"),
        ("latency_s = 1e-4", "latency_s = inf", "latency_s must be finite and not negative, found inf"),
        ("bytes_per_s = 1e9", "bytes_per_s = nan", "bytes_per_s must be positive and finite, found nan"),
        ("bytes_per_s = 1e9", "bytes_per_s = 1" + "0" * 400, "field 'bytes_per_s' must be finite"),
        ("bytes_per_s = 1e9", "bytes_per_s = 1e9\noverlap_rate = 2", r"overlap_rate must lie in \(0, 1\]"),
        ("bytes_per_s = 1e9", "bytes_per_s = 1e9\nerror = -1", "error must be finite and not negative"),
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
    "change", [{"ops": {"head": {"fp32": [1, 2, 3, 4]}}}, {"casts": [[1]]}, {"surplus": 1}, {"outside": None}]
)
def test_a_profile_that_cannot_be_read_is_refused(change):
    with pytest.raises(FormatError, match=r"the profile file cannot be read .*; measure it again"):
        Profile.from_json({**profile_of(GRAPH).to_json(), **change})


@pytest.mark.parametrize(
    ("part", "name", "value", "message"),
    [
        ("ops", "shape", None, "field 'shape' must be a list, found None"),
        ("ops", "shape", [2, -1], "field 'shape' must be finite and not negative, found -1"),
        ("ops", "flops", "many", "field 'flops' must be int, found 'many'"),
        ("ops", "inputs", ["nothing"], "reads 'nothing', which nothing before it makes"),
        ("ops", "kind", "convolve", "there is no kernel of kind 'convolve'"),
        ("inputs", "name", 3, "field 'name' must be str, found 3"),
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
        ({"host_s": "1"}, "profile of infer: field 'host_s' must be float, found '1'"),
        ({"optimizer_s": None}, "field 'optimizer_s' must be float, found None"),
        ({"optimizer_bytes": float("inf")}, "field 'optimizer_bytes' must be int, found inf"),
        ({"outside": [0.0, float("nan")]}, "field 'outside': field 'backward_s' must be finite"),
        ({"ops": {"head": {"fp32": [1.0, -1.0]}}}, "'ops', head, fp32: field 'backward_s' must be finite"),
        ({"casts": [["x", "fp32", "bf16", "a", 0.0]]}, "'casts', x fp32 bf16: field 'forward_s' must be"),
        ({"cast_fit": [["fp32", "bf16", 0, 0, True, 0]]}, "'cast_fit', fp32 bf16: field 'forward_s' must"),
        ({"step_s": []}, r"field 'step_s' must be an object, found \[\]"),
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
    with pytest.raises(FormatError, match="sensitivity: field 'omega', head, int8 must be"):
        Sensitivity.from_json({**written, "omega": {"head": {"int8": value}}})


def test_a_profile_of_another_model_or_batch_is_refused():
    with pytest.raises(MismatchError, match="measured for another model"):
        profile_of(mlp()).check_graph(GRAPH)
    with pytest.raises(MismatchError, match="measured for another batch shape"):
        profile_of(encoder(1, rows=8)).check_graph(encoder(1, rows=16))


def test_sensitivity_is_zero_in_fp32_and_must_be_known_elsewhere():
    sensitivity = sensitivity_of(GRAPH)
    assert sensitivity["head", FP32] == 0.0
    assert sensitivity["head", BF16] > 0.0
    with pytest.raises(MismatchError, match="no sensitivity of nose at int8"):
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
