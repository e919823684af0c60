"""A plan to compare with: every rank in FP32, and fewer samples for the slower ones (LB-BSP).

Chen et al., "Semi-Dynamic Load Balancing: Efficient Distributed Learning in Non-Dedicated Environments"
(SoCC 2020), give each worker the samples with which all finish together. No operator is rounded, so with
gradients weighted exactly by samples nothing is added to the gradient's variance; what changes is what a rank
computes from its own samples alone: batch norms, dropout's share, memory.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from qsync.experiments.harness.emulated_profiles import with_batch_share
from qsync.records.cluster import Cluster
from qsync.records.graph import OpGraph
from qsync.records.plans import Plan
from qsync.records.profiles import Profile
from qsync.replayer import replay

_GRADIENT_AND_WEIGHT = 8  # bytes per trained number that no share of the batch changes


@dataclass(frozen=True, slots=True)
class Balanced:
    """The step (seconds, simulated) with these shares of a rank's planned batch per class, 1.0 as planned.

    `weight_error` is by how much the mean over ranks would weigh a sample wrongly if it were not corrected;
    `batch_norms` how many operators take statistics from fewer (or more) samples than planned; `memory_bytes`
    per class, with everything but weights, gradients and optimizer state in proportion to the share.
    """

    step_s: float
    shares: Mapping[str, float]
    weight_error: float
    batch_norms: int
    memory_bytes: Mapping[str, int]


def balanced(graph: OpGraph, plan: Plan, profiles: Mapping[str, Profile], cluster: Cluster) -> Balanced:
    """Share the same total batch so that all ranks compute equally long, and replay that; `plan` is all FP32.

    A class takes fixed + share x the rest, with Python, optimizer and the copies to buckets fixed and
    operators, casts, loss and data loading in proportion to the samples. That is an assumption in favour of
    LB-BSP: smaller batches use a device less well. Shares need not be whole samples.
    """
    timeline = replay(graph, plan, profiles, cluster, bucket_cap_bytes=plan.bucket_cap_bytes)
    trained = sum(value.num_elements for value in graph.parameters if value.requires_grad)
    lead = {
        c.name: profiles[c.name].host_s
        + profiles[c.name].optimizer_s
        + 4 * trained * profiles[c.name].bucket_s_per_byte * (cluster.num_ranks > 1)
        for c in cluster.classes
    }
    rest = {c.name: timeline[c.name].compute_s - lead[c.name] for c in cluster.classes}
    shares = _level(cluster, lead, rest)
    scaled = {name: with_batch_share(profiles[name], share) for name, share in shares.items()}
    again = replay(graph, plan, scaled, cluster, bucket_cap_bytes=plan.bucket_cap_bytes)
    memory = {}
    for name, share in shares.items():
        kept = _GRADIENT_AND_WEIGHT * trained + profiles[name].optimizer_bytes
        moving = max(timeline[name].memory_bytes - kept, 0)
        memory[name] = int(timeline[name].memory_bytes + (share - 1.0) * moving)
    wrong = max(abs(1.0 / share - 1.0) if share > 0.0 else 1.0 for share in shares.values())
    changed = any(abs(share - 1.0) > 1e-9 for share in shares.values())
    norms = sum(op.kind == "batch_norm" for op in graph.ops) if changed else 0
    return Balanced(again.step_s, shares, wrong, norms, memory)


def _level(cluster: Cluster, lead: Mapping[str, float], rest: Mapping[str, float]) -> dict[str, float]:
    """Return shares, as many samples in all as planned, with which all classes take equally long."""
    taking = [c for c in cluster.classes if rest[c.name] > 0.0]
    while True:
        samples = cluster.num_ranks + sum(c.count * lead[c.name] / rest[c.name] for c in taking)
        level = samples / sum(c.count / rest[c.name] for c in taking)
        still = [c for c in taking if lead[c.name] < level]
        if len(still) == len(taking):
            break
        taking = still  # one whose optimizer alone takes longer gets no sample
    found = {c.name: 0.0 for c in cluster.classes}
    return {**found, **{c.name: (level - lead[c.name]) / rest[c.name] for c in taking}}
