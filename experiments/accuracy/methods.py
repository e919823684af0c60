"""Plan every way to train a task on an A100 and a card at 0.6 of its speed. Simulated.

The plans do not depend on the training machine. They assume 16 times as many samples; otherwise launches
would dominate.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass, replace
from typing import Any

import torch

from qsync import OpGraph, Plan, Precision, api
from qsync.allocator.planner import as_plan
from qsync.experiments.accuracy.tasks import task_named
from qsync.experiments.allocation.bases import GPU_BATCH
from qsync.experiments.allocation.methods import two_stages
from qsync.experiments.harness.emulated_profiles import NETWORK, of_share
from qsync.experiments.harness.freed_memory import keep_freed_memory
from qsync.experiments.harness.ranks import FAST, WEAK
from qsync.experiments.mixed.ways import (
    ALL_16,
    ALONE,
    QSYNC,
    QSYNC_ALL,
    TITLES,
    WEAK_INT8_ALL,
    samples_by_class,
    ways,
)
from qsync.experiments.sensitivity.baselines import sensitivity_by
from qsync.experiments.workloads.workload import Batch, Workload, make_optimizer
from qsync.predictor.cost_model.fill_profile import fill, learned_from, simulate
from qsync.predictor.cost_model.model import CostModel
from qsync.records.cluster import Cluster, DeviceClass
from qsync.records.datasheets import datasheet
from qsync.records.plan_folder import Basis
from qsync.records.profiles import Profile
from qsync.replayer import Recapture

QSYNC_DEPTH = "qsync_depth"
NAMES = {**TITLES, QSYNC_DEPTH: "QSync's own rule (depth, greedy)"}
METHODS = tuple(name for name in NAMES if name not in (ALONE, ALL_16, WEAK_INT8_ALL, QSYNC_ALL))
_PRECISIONS = (Precision.FP32, Precision.BF16, Precision.INT8)
_CARD, _SHARE = "A100", 0.6
_PROFILE_S, _BATCHES = 20.0, 4


@dataclass(frozen=True, slots=True)
class Method:
    """One way to train: precisions and samples per class, with the predicted step and added variance."""

    assignments: dict[str, dict[str, str]]
    samples: dict[str, int]
    step_s: float
    added_variance: float


def methods_of(task: str, tiny: bool = False) -> dict[str, dict[str, Any]]:
    """Profile one rank on a task; return every method for two cards, as JSON.

    The cards reach the same fractions of peak as this machine's operators.
    """
    torch.set_num_threads(1)
    keep_freed_memory()
    workload = task_named(task).workload()
    model, batches = workload.make_model(0), [workload.batch(10_000, step, 0) for step in range(_BATCHES)]
    inputs, targets = batches[0]
    many = (torch.cat([inputs] * GPU_BATCH), torch.cat([targets] * GPU_BATCH))
    graph, large = (_graph_of(model, workload, batch) for batch in (batches[0], many))
    profile = api.profile(
        model, batches[0], workload.loss, precisions=_PRECISIONS, seconds=1.0 if tiny else _PROFILE_S,
        make_optimizer=make_optimizer(workload.lr),
    )  # fmt: skip
    by_variance, by_depth = (
        sensitivity_by(indicator, model, batches, workload.loss, precisions=_PRECISIONS)
        for indicator in ("variance", "depth")
    )
    costs = learned_from(graph, profile)
    cluster, profiles = _on_cards(fill(profile, large, costs, measured_on=graph), large, costs)
    plans = ways(Basis(large, cluster, profiles, by_variance), Recapture(graph, {}))
    # QSync's own rule: recovery by its indicator.
    own = plans[QSYNC]
    assert own.target_s is not None
    by_rule, margin = Basis(large, cluster, profiles, by_depth), own.margin or 0.0
    ordered = two_stages(by_rule, own.target_s, margin=margin)
    chosen = {name: own.assignment for name, own in ordered.classes.items()}
    plans[QSYNC_DEPTH] = as_plan(large, chosen, profiles, cluster, sensitivity=by_variance)
    return {name: asdict(_of_plan(plans[name], len(batches[0][0]))) for name in METHODS}


def _graph_of(model: torch.nn.Module, workload: Workload, batch: Batch) -> OpGraph:
    torch._dynamo.reset()  # otherwise a second shape makes sizes symbolic
    return api.trace_step(model, batch, workload.loss)


def _on_cards(profile: Profile, graph: OpGraph, costs: CostModel) -> tuple[Cluster, dict[str, Profile]]:
    """Return the two cards as a cluster, with their profiles."""
    sheet = datasheet(_CARD)
    fast = DeviceClass(FAST, "cuda", 1, sheet.memory_bytes, _PRECISIONS, datasheet=sheet.name)
    own = simulate(profile, graph, sheet, FAST, costs)
    weak = replace(fast, name=WEAK, emulated_share=_SHARE)
    return Cluster((fast, weak), NETWORK), {FAST: own, WEAK: of_share(own, WEAK, _SHARE)}


def _of_plan(plan: Plan, samples: int) -> Method:
    """Return a plan's precisions and samples per class; `samples` per rank for equal shares."""
    assignments = {
        name: {op: str(precision) for op, precision in own.assignment.items()}
        for name, own in plan.classes.items()
    }
    assert plan.step_s is not None and plan.added_variance is not None
    planned = samples_by_class(plan, GPU_BATCH * samples)
    of_weak = round(planned[WEAK] / GPU_BATCH)
    return Method(assignments, {FAST: 2 * samples - of_weak, WEAK: of_weak}, plan.step_s, plan.added_variance)
