"""Every way to train a task on this machine beside half of it: precisions, samples, seconds. Simulated."""

from __future__ import annotations

from dataclasses import asdict, dataclass, replace
from typing import Any

import torch

from qsync import Plan, Precision, api
from qsync.allocator import allocate
from qsync.allocator.planner import as_plan
from qsync.experiments.accuracy.tasks import task_named
from qsync.experiments.harness.emulated_profiles import here_and_half
from qsync.experiments.harness.freed_memory import keep_freed_memory
from qsync.experiments.harness.ranks import MARGIN
from qsync.experiments.speedup.ways import ALONE, QSYNC_FASTEST, TITLES, samples_of, ways
from qsync.experiments.workloads.workload import make_optimizer
from qsync.records.plan_folder import Basis
from qsync.replayer import Sized

QSYNC_DEPTH, QSYNC_INT8 = "qsync_depth", "qsync_int8"
NAMES = {
    **TITLES,
    QSYNC_DEPTH: "QSync's own rule (depth, greedy)",
    QSYNC_INT8: "qsync, weak cards without 16 bits",
}
METHODS = tuple(name for name in NAMES if name not in (ALONE, QSYNC_FASTEST))
_PRECISIONS, _BASE = ("fp32", "fp32_fast", "bf16", "int8"), Precision.FP32_FAST
_PROFILE_S, _BATCHES = 20.0, 4


@dataclass(frozen=True, slots=True)
class Method:
    """What each class runs in, and on how many samples; a step's seconds and added variance as predicted."""

    assignments: dict[str, dict[str, str]]
    samples: dict[str, int]
    step_s: float
    added_variance: float


def methods_of(task: str, tiny: bool = False) -> dict[str, dict[str, Any]]:
    """Measure one rank's profile and sensitivities on a task; return every method, as JSON."""
    torch.set_num_threads(1)
    keep_freed_memory()
    workload = task_named(task).workload()
    model, batches = workload.make_model(0), [workload.batch(10_000, step, 0) for step in range(_BATCHES)]
    graph = api.trace_step(model, batches[0], workload.loss)
    torch._dynamo.reset()
    half = tuple(part[: len(part) // 2] for part in batches[0])
    other = Sized(api.trace_step(model, half, workload.loss), {})
    profile = api.profile(
        model, batches[0], workload.loss, precisions=_PRECISIONS, seconds=1.0 if tiny else _PROFILE_S,
        make_optimizer=make_optimizer(workload.lr),
    )  # fmt: skip
    by_variance, by_depth = (
        api.sensitivity(model, batches, workload.loss, precisions=_PRECISIONS, indicator=indicator)
        for indicator in ("variance", "depth")
    )
    cluster, profiles = here_and_half(profile)
    plans = ways(Basis(graph, cluster, profiles, by_variance), other, _BASE)
    # QSync's own rule: operators recover in the order of its indicator.
    ordered = allocate(graph, profiles, by_depth, cluster, margin=MARGIN, solver="greedy", base=_BASE)
    chosen = {name: own.assignment for name, own in ordered.classes.items()}
    plans[QSYNC_DEPTH] = as_plan(graph, chosen, profiles, cluster, sensitivity=by_variance)
    # A weak card as processors with VNNI are, which have INT8 and no type of 16 bits.
    fast, weak = cluster.classes
    without = replace(weak, precisions=tuple(p for p in weak.precisions if p is not Precision.BF16))
    plans[QSYNC_INT8] = allocate(
        graph, profiles, by_variance, replace(cluster, classes=(fast, without)), margin=MARGIN, base=_BASE
    )
    return {name: asdict(_of_plan(plans[name], len(batches[0][0]))) for name in METHODS}


def _of_plan(plan: Plan, samples: int) -> Method:
    assignments = {
        name: {op: str(precision) for op, precision in own.assignment.items()}
        for name, own in plan.classes.items()
    }
    assert plan.step_s is not None and plan.added_variance is not None
    return Method(assignments, samples_of(plan, samples), plan.step_s, plan.added_variance)
