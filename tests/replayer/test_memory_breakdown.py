"""What fills the memory at its fullest: the parts make up the very peak that replay predicts."""

from __future__ import annotations

from dataclasses import replace

from graphs import CPU_PRECISIONS, assignments_for, cluster_of, encoder, profile_of
from hypothesis import given, settings
from hypothesis import strategies as st

from qsync.operators.precision import Precision
from qsync.replayer import peaks, replay

GRAPH = encoder()
PROFILES = {name: profile_of(GRAPH, name, optimizer_bytes=12345) for name in ("train", "infer")}


@settings(max_examples=15)
@given(st.sampled_from([1, 3]), st.sampled_from(["cpu", "cuda"]), st.data())
def test_the_parts_are_the_peak_that_replay_predicts(count, device, data):
    plan = {name: data.draw(assignments_for(GRAPH, CPU_PRECISIONS)) for name in PROFILES}
    cluster = cluster_of({"train": count, "infer": count})
    cluster = replace(cluster, classes=tuple(replace(c, device=device) for c in cluster.classes))
    timeline = replay(GRAPH, plan, PROFILES, cluster)
    for name, peak in peaks(GRAPH, plan, PROFILES, cluster).items():
        assert peak.peak_bytes == timeline[name].memory_bytes
        assert peak.parts["optimizer"] == 12345 and all(peak.parts.values())
        fullest = max(sum(parts) for parts in zip(*peak.curve.values(), strict=True))
        assert fullest + peak.parts.get("margin", 0) == peak.peak_bytes


def test_what_is_saved_is_told_by_the_precision_that_saves_it():
    low = {op.name: Precision.INT8 for op in GRAPH.adjustable if op.kind == "linear"}
    found = peaks(GRAPH, {"train": {}, "infer": low}, PROFILES, cluster_of(memory_bytes=10**6))
    train, infer = found["train"].parts, found["infer"].parts
    assert "saved by int8 operators" not in train
    assert infer["saved by int8 operators"] > 0
    assert infer["saved by fp32 operators"] < train["saved by fp32 operators"]
    assert "gradients, in DDP's buckets" in train and "gradients" not in train
    assert {peak.budget_bytes for peak in found.values()} == {10**6}
    alone = peaks(GRAPH, {"train": {}}, PROFILES, cluster_of({"train": 1}))["train"]
    assert "gradients" in alone.parts
