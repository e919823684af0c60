"""Memory on two real ranks: random plans, a different one on each, and plans accepted under budgets.

A rank of a job takes memory that a process alone does not: buckets as DDP builds and rebuilds them between
ranks, all-reduces in flight while backward goes on, buffers broadcast before forward.
"""

from __future__ import annotations

import json
import os
import sys
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

import qsync
from qsync.backend.device_detection import detect_class
from qsync.distributed import job
from qsync.distributed.agreement import agree
from qsync.errors import InfeasibleError, QSyncError
from qsync.experiments.harness.processes import start_ranks
from qsync.experiments.harness.ranks import BUCKET_CAP_MB, FAST, WEAK, leave
from qsync.experiments.memory.memory_runs import Choice, Trained, drawn, parts_of
from qsync.experiments.workloads.workload import make_optimizer
from qsync.lowering.incremental import lower
from qsync.predictor.memory.peak import peak_memory
from qsync.progress import shown_on_rank_zero
from qsync.records.cluster import Cluster, Link
from qsync.records.json_files import read_json, write_json
from qsync.records.precision import Precision
from qsync.records.profiles import Profile, Sensitivity

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
    with tempfile.TemporaryDirectory() as folder:
        config = {"models": list(models), "num_plans": num_plans, "seed": seed, "out": folder}
        start_ranks("qsync.experiments.memory.memory_ranks", config)
        rows: list[dict[str, Any]] = read_json(Path(folder) / "rows.json")["rows"]
    return rows


def main() -> None:
    """Run one rank, with the configuration as JSON in argv."""
    config: dict[str, Any] = json.loads(sys.argv[1])
    os.environ["QSYNC_BACKEND"] = "gloo"
    torch.set_num_threads(1)
    rows: list[dict[str, Any]] = []
    try:
        job.join_job(torch.device("cpu"), TIMEOUT_S)
        with shown_on_rank_zero("qsync: memory of two ranks") as progress:
            for name in config["models"]:
                progress(name)
                found = list(rows_of(name, config["num_plans"], config["seed"]))
                for own in agree("gathering what was measured", lambda found=found: found):  # type: ignore[misc]
                    rows += own
    except QSyncError as error:
        leave("memory", error)
    if dist.get_rank() == 0:
        write_json(Path(config["out"]) / "rows.json", {"rows": rows})


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
    own = replace(detect_class(torch.device("cpu")), name=(FAST, WEAK)[rank])

    def loss(model: torch.nn.Module, batch: Any) -> torch.Tensor:
        return loss_fn(model(batch[0]), batch[1])

    profile = agree("profiling", lambda: qsync.profile(
        model, batch, loss, device_class=own, rounds=1, make_optimizer=make_optimizer(1e-3)
    ).to_json())  # fmt: skip
    graph = job.form_graph(job.TrainingStep(model, batch, loss))
    profiles = {entry["device_class"]: Profile.from_json(entry) for entry in profile}
    cluster = Cluster(tuple(replace(own, name=name) for name in profiles), Link(1e-4, 1e9))

    def sensed(number: int) -> Sensitivity:
        options: dict[str, Any] = {"indicator": "random", "seed": number} if number else {}
        found: Sensitivity = qsync.sensitivity(model, [batch], loss, **options)
        return found

    def planned() -> list[list[Any] | None]:
        if rank != 0:
            return []
        full = {
            name: peak_memory(lower(graph, {}), optimizer_bytes=one.optimizer_bytes, num_ranks=2).peak_bytes
            for name, one in profiles.items()
        }
        return [
            _plan(graph, profiles, sensed(number), cluster, {
                name: int(share * full[name]) for name, share in zip(full, shares, strict=True)
            })
            for number in range(INDICATORS) for shares in pairwise(SHARES)
        ]  # fmt: skip

    return agree("planning", planned)[0]


def _plan(
    graph: qsync.OpGraph,
    profiles: Mapping[str, Profile],
    sensitivity: Sensitivity,
    cluster: Cluster,
    budgets: Mapping[str, int],
) -> list[Any] | None:
    try:
        plan = qsync.plan(
            graph, profiles, sensitivity, cluster, budgets=budgets, slack=SLACK, time_limit_s=PLANNING_S
        )
    except InfeasibleError:
        return None
    return [[budgets[name], dict(plan[name].assignment)] for name in (FAST, WEAK)]


if __name__ == "__main__":
    main()
