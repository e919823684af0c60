"""Memory on two real ranks: random plans, a different one on each, and plans accepted under budgets.

A rank of a job takes memory that a process alone does not: buckets as DDP builds and rebuilds them between
ranks, all-reduces in flight while backward goes on, buffers broadcast before forward.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from itertools import pairwise, product
from typing import Any

import torch
import torch.distributed as dist

import qsync
from qsync import Cluster, Link, Precision, Profile
from qsync.backend.device_detection import detect_class
from qsync.distributed import job
from qsync.distributed.agreement import agree
from qsync.errors import InfeasibleError
from qsync.experiments.harness.ranks import BUCKET_CAP_MB, FAST, WEAK, Place, run_on_ranks
from qsync.experiments.memory.memory_runs import Choice, Trained, drawn, loss_of, parts_of
from qsync.experiments.workloads.workload import make_optimizer
from qsync.lowering.incremental import lower
from qsync.predictor.memory.peak import peak_memory
from qsync.progress import shown_on_rank_zero

# Budgets, as parts of what FP32 needs at its peak.
SHARES = (0.95, 0.85, 0.75, 0.95)
INDICATORS = 4  # the first is the default, the others are random, so that plans differ
# So much longer than the least a step may take: it is memory that shall decide, not time.
SLACK = 2.0
# Where memory binds, the exact solver proves little and would take all the time it is given.
PLANNING_S = 1.0
# No rank waits in vain here, but one may be stopped for long while others measure times.
TIMEOUT_S = 7200.0


def run_ranks(models: Sequence[str], num_plans: int, seed: int) -> list[dict[str, Any]]:
    """Return a row for each plan of each model on each of two ranks, from processes that torchrun starts.

    Rows of random plans have the bytes of `Trained.measure`; of accepted ones also their budget. Raises
    QSyncError when a rank failed.
    """
    config = {"models": list(models), "num_plans": num_plans, "seed": seed}
    rows: list[dict[str, Any]] = run_on_ranks(measured, config, command="memory", timeout_s=TIMEOUT_S)
    return rows


def measured(config: dict[str, Any], place: Place) -> list[dict[str, Any]]:
    """Return the rows of all ranks."""
    rows: list[dict[str, Any]] = []
    with shown_on_rank_zero("qsync: memory of two ranks") as progress:
        for name in config["models"]:
            progress(name)
            found = list(rows_of(name, config["num_plans"], config["seed"]))
            for own in agree("gathering what was measured", lambda found=found: found):  # type: ignore[misc]
                rows += own
    return rows


def rows_of(name: str, num_plans: int, seed: int) -> Iterator[dict[str, Any]]:
    """Yield what this rank measures of one model, in step with the other."""
    rank = dist.get_rank()
    planned = accepted(name, rank)
    torch._dynamo.reset()
    trained = Trained(*parts_of(name, rank), BUCKET_CAP_MB)
    about = {"model": name, "rank": rank, "seed": seed}
    for number in range(num_plans):
        choice = drawn(trained.graph, 2 * number + rank, seed)
        yield {**about, "part": "two ranks", "plan": number, **trained.measure(choice)}
    for number, plan in enumerate(planned):
        if plan is None:
            yield {**about, "part": "refused", "plan": number}
            continue
        budget, assignment = plan[rank]
        found = trained.measure(Choice({op: Precision(p) for op, p in assignment.items()}))
        yield {**about, "part": "accepted", "plan": number, **found, "budget_bytes": budget}


def accepted(name: str, rank: int) -> list[list[Any] | None]:
    """Return plans that `qsync.plan` accepts when each class may have a part of what FP32 takes.

    For each plan the budget and the assignment of every class, in rank order; None where it accepts none. Two
    classes, profiled one on each rank; the plans are rank 0's.
    """
    torch._dynamo.reset()
    model, batch, loss_fn = parts_of(name, rank)
    loss = loss_of(loss_fn)
    own = replace(detect_class(torch.device("cpu")), name=(FAST, WEAK)[rank])
    profile = agree("profiling", lambda: qsync.profile(
        model, batch, loss, device_class=own, rounds=1, make_optimizer=make_optimizer(1e-3)
    ).to_json())  # fmt: skip
    graph = job.form_graph(job.TrainingStep(model, batch, loss))
    profiles = {entry["device_class"]: Profile.from_json(entry) for entry in profile}
    cluster = Cluster(tuple(replace(own, name=name) for name in profiles), Link(1e-4, 1e9))

    def planned() -> Iterator[list[Any] | None]:
        full = {
            name: peak_memory(lower(graph, {}), optimizer_bytes=one.optimizer_bytes, num_ranks=2).peak_bytes
            for name, one in profiles.items()
        }
        for number, shares in product(range(INDICATORS), pairwise(SHARES)):
            options = {"indicator": "random", "seed": number} if number else {}
            sensitivity = qsync.sensitivity(model, [batch], loss, **options)
            budgets = {name: int(share * full[name]) for name, share in zip(full, shares, strict=True)}
            try:
                plan = qsync.plan(
                    graph, profiles, sensitivity, cluster, budgets=budgets, slack=SLACK,
                    time_limit_s=PLANNING_S,
                )  # fmt: skip
            except InfeasibleError:
                yield None
            else:
                yield [[budgets[name], dict(plan[name].assignment)] for name in (FAST, WEAK)]

    return agree("planning", lambda: list(planned()) if rank == 0 else [])[0]
