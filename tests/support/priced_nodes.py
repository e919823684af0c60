"""The nodes that the replayer prices for an assignment."""

from __future__ import annotations

from graphs import cluster_of, profile_of

from qsync.lowering.lowered_graph import Cast, Run
from qsync.operators.precision import Precision
from qsync.records.graph import OpGraph
from qsync.replayer import replay

# Precisions that a CPU runs in a test's time.
TRIED = (Precision.FP32, Precision.BF16, Precision.FP16, Precision.INT8, Precision.INT8_ALL)


def priced(graph: OpGraph, assignment: dict[str, Precision]) -> tuple[Cast | Run, ...]:
    """What the replayer prices for this assignment, but for the node that only hands results out."""
    profiles = {name: profile_of(graph, name, TRIED) for name in ("train", "infer")}
    timeline = replay(graph, {"train": {}, "infer": assignment}, profiles, cluster_of(precisions=TRIED))
    outputs = {op.name for op in graph.ops if op.kind == "output"}
    return tuple(n for n in timeline.sequence("infer") if isinstance(n, Cast) or n.op not in outputs)
