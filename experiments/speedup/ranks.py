"""Two real unequal ranks that take turns at every way to train. The weak one is emulated."""

from __future__ import annotations

import statistics
from dataclasses import replace
from typing import Any

import torch
import torch.distributed as dist

from qsync.distributed import job
from qsync.distributed.ddp_profiling import ProfileOptions, form_basis
from qsync.experiments.harness.offered_precisions import offered_precisions
from qsync.experiments.harness.planned_steps import PlannedSteps, plans_of_first_rank
from qsync.experiments.harness.ranks import FAST, WEAK, Place
from qsync.experiments.speedup.report import row
from qsync.experiments.speedup.ways import ALONE, first_alike, ways
from qsync.experiments.workloads.subjects import subject
from qsync.experiments.workloads.workload import make_optimizer
from qsync.replayer import Recapture

_WARM = 2  # steps of a turn that are left out


def measure(config: dict[str, Any], place: Place) -> dict[str, Any]:
    """Profile and plan on this rank's share; return a row for each way, which takes turns with the others.

    The fast rank alone has the machine to itself: the weak one waits, at rest. Ways whose plans run alike
    share their turns: between two measurements of one plan there is noise alone.
    """
    rank, share = dist.get_rank(), place.measured_share()
    name, workload = WEAK if rank else FAST, subject(config["model"])
    optimizer = make_optimizer(workload.lr)
    model, batch = workload.make_model(0), workload.batch(0, 0, rank)
    own = job.detect_rank(model, share, name)
    step = job.TrainingStep(model, batch, workload.loss)
    graph = job.form_graph(step)
    options = ProfileOptions(offered_precisions(place.device), optimizer)
    formed = job.form_cluster(own)
    basis = form_basis(step, own, graph, formed, options)
    torch._dynamo.reset()
    # Small batches cost more than in proportion: shares are priced between two profiles.
    half = replace(step, batch=tuple(t[: len(t) // 2] for t in batch))
    smaller = job.form_graph(half)
    other = Recapture(smaller, form_basis(half, own, smaller, formed, options).profiles)
    plans = plans_of_first_rank(lambda: ways(basis, other))
    taken_by = {way: first_alike(way, plans) for way in plans}
    turns: dict[str, list[float]] = {way: [] for way in taken_by.values()}
    for _ in range(config["turns"]):
        for way, plan in ((way, plans[way]) for way in turns):
            if way != ALONE or rank == 0:
                steps = PlannedSteps(model, plan, name, batch, workload.loss, optimizer, way != ALONE)
                taken = [steps.timed() for _ in range(config["steps"] + _WARM)]
                turns[way].append(statistics.median(taken[_WARM:]))
            dist.barrier()
    if rank:
        return {}
    samples = len(batch[0])
    return {way: row(plan, basis.cluster, samples, turns[taken_by[way]]) for way, plan in plans.items()}
