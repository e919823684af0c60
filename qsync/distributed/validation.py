"""`validate`: random plans on the real ranks, predicted against measured.

Measurements take turns, so that a drift of the machine falls on all of them alike. A turn measures the link
and then, in a new random order, every step of the profile's round and a few steps of every plan. The drift of
each rank is estimated from all its times together (qsync.predictor.profiling.machine_drift) and divided out
of every time.
"""

from __future__ import annotations

import random
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

from qsync import api
from qsync.backend.devices.device_detection import device_of, machine
from qsync.distributed import job
from qsync.distributed.agreement import agree
from qsync.distributed.ddp_profiling import ProfileOptions
from qsync.distributed.validation_runs import Assignment, PlanRunner
from qsync.errors import CalibrationError, shortened
from qsync.predictor.profiling.loader_wait import endless
from qsync.predictor.profiling.made_optimizer import MakeOptimizer
from qsync.records.cluster import Cluster
from qsync.records.graph import OpGraph, digest
from qsync.records.kernel_support import unsupported_by_shape
from qsync.records.plan_folder import Basis
from qsync.records.precision import PRECISIONS_BY_KIND, Precision
from qsync.replayer import replay
from qsync.replayer.explanation.comparison import Comparison, Measured, Validation, compare

Plans = Mapping[str, Mapping[str, Assignment]]  # name -> class -> assignment


def validate(
    model: torch.nn.Module,
    example_batch: Any,
    loss_fn: api.LossFunction | None = None,
    *,
    num_plans: int = 8,
    turns: int = 3,
    steps: int = 3,
    seed: int = 0,
    device_class: str | None = None,
    emulated_share: float | None = None,
    precisions: Sequence[Precision | str] | None = None,
    make_optimizer: MakeOptimizer = torch.optim.AdamW,
    bucket_cap_mb: float | None = None,
    folder: str | Path | None = None,
    progress: job.Progress = job.silent,
    loader: Iterable[Any] | None = None,
    plans: Plans | None = None,
) -> tuple[Validation, Basis]:
    """Run random plans on every rank of this job; return by how much replay misses each, and why.

    Called on every rank of a torchrun job, or alone. It trains `model`: pass a copy, or load a checkpoint
    afterwards.

    Args:
        model: the same on every rank, with equal parameters.
        example_batch: a real batch of this rank, as for `qsync.hybrid`.
        loss_fn: `loss_fn(model, batch)` returns the scalar loss. Without it the model's own `.loss` counts.
        num_plans: how many random plans to run.
        turns: how often each plan takes its turn.
        steps: how many steps of a plan count in each turn.
        seed: of the plans and of the order in a turn; the same on every rank.
        device_class: the name of this rank's class, instead of the detected one.
        emulated_share: the share of its core, in (0, 1], that this process gets: as in `qsync.hybrid`.
        precisions: those to draw from, instead of all that this rank multiplies in hardware.
        make_optimizer: the training loop's optimizer from parameters, or a list of several.
        bucket_cap_mb: the size of DDP's buckets in MiB, instead of DDP's own.
        folder: where rank 0 writes validation.json beside the profiles; nothing is written without it.
        progress: is called with what is being done now.
        loader: what this rank's loop takes its batches from: one before every step, which is only timed.
        plans: name -> class -> assignment, the same on every rank; run in place of random ones.

    Returns:
        The comparison of every plan, and the basis (graph, cluster, profiles) that was measured between
        them; both the same on every rank.

    Raises:
        CalibrationError: numbers, a batch or a loader that cannot be used.
        MismatchError: ranks differ in software, model, seed or plans.
        UnsupportedError: a device lacks a precision.
        Every rank raises the same error.

    Example:
        >>> validation, basis = qsync.validate(model, batch, loss_fn, num_plans=8)
        >>> validation.median_error, validation.comparisons[0].cause
    """
    for name, value in (("num_plans", num_plans), ("turns", turns), ("steps", steps)):
        if type(value) is not int or value < 1:
            raise CalibrationError(
                f"{name} must be at least 1, found {shortened(value)}; give a whole number"
            )
    if plans is not None and not plans:
        raise CalibrationError("plans names no plan; leave it out for random ones")
    job.join_job(device_of(model))
    facts = {"the validation's seed": seed, "its number of plans": num_plans, "its plans": _digest(plans)}
    job.check_models(model, facts)
    job.check_options(emulated_share, device_class, bucket_cap_mb)
    rank = job.detect_rank(model, emulated_share, device_class)
    step = job.TrainingStep(model, example_batch, loss_fn)
    graph = job.form_graph(step)
    batches = endless(loader) if loader is not None else None
    options = ProfileOptions(precisions, make_optimizer, batches, bucket_cap_mb, progress=progress)
    runner = PlanRunner(step, rank, options)
    cluster = job.form_cluster(rank, progress, rounds=1)[0]
    own = rank.device_class.name
    everyone: list[Any] = agree("gathering precisions", lambda: [own, [str(p) for p in runner.precisions]])
    if plans is None:
        usable = {name: [Precision(p) for p in texts] for name, texts in reversed(everyone)}
        drawn = random_plans(graph, cluster, usable, num_plans, seed)
        plans = {f"random {k + 1}": plan for k, plan in enumerate(drawn)}
    for turn in range(turns):
        title, order = f"turn {turn + 1} of {turns}", random.Random(f"{seed} {turn}")
        runner.take_turn([plan[own] for plan in plans.values()], steps, title, order)
    basis, measured = runner.results(graph, cluster)
    classes = [name for name, _ in everyone]
    comparisons = _compare(plans, basis, classes, measured, options.bucket_cap_bytes)
    validation = Validation(graph.model, machine(), seed, comparisons)
    if folder is not None and job.is_rank_zero():
        basis.save(folder)
        validation.save(Path(folder) / "validation.json")
    return validation, basis


def _digest(plans: Plans | None) -> str:
    return digest({name: {c: dict(of) for c, of in plan.items()} for name, plan in (plans or {}).items()})


def _compare(
    plans: Plans,
    basis: Basis,
    classes: Sequence[str],
    measured: Sequence[Sequence[Mapping[str, Any]]],
    bucket_cap_bytes: int | None,
) -> tuple[Comparison, ...]:
    """Compare every plan's replay with its runs on the first rank of each class.

    `classes` and `measured` (runs of all plans, as fields of `Measured`) are by rank.
    """
    of_class: dict[str, Sequence[Mapping[str, Any]]] = {}
    for name, runs in zip(classes, measured, strict=True):
        of_class.setdefault(name, runs)
    return tuple(
        compare(
            name, basis.graph, basis.profiles,
            replay(basis.graph, plan, basis.profiles, basis.cluster, bucket_cap_bytes=bucket_cap_bytes), plan,
            {device_class: Measured(**runs[k]) for device_class, runs in of_class.items()},
        )
        for k, (name, plan) in enumerate(plans.items())
    )  # fmt: skip


def random_plans(
    graph: OpGraph,
    cluster: Cluster,
    usable: Mapping[str, Sequence[Precision]],
    num_plans: int,
    seed: int = 0,
) -> list[dict[str, Assignment]]:
    """Draw assignments for every class, operator by operator; the same on every rank. Pure.

    `usable` are the precisions of each class. They are drawn with weights that differ from plan to plan and
    class to class, so that some plans lower little and some nearly everything.
    """
    draw = random.Random(seed)
    plans = []
    for _ in range(num_plans):
        plan: dict[str, Assignment] = {}
        for device_class in cluster.classes:
            weights = {p: draw.random() for p in usable[device_class.name]}
            assignment: dict[str, Precision] = {}
            unsupported = unsupported_by_shape(graph, device_class.device)
            for op in graph.adjustable:
                without = unsupported.get(op.name, {})
                able = [p for p in weights if p in PRECISIONS_BY_KIND[op.kind] and p not in without]
                if able:
                    assignment[op.name] = draw.choices(able, [weights[p] for p in able])[0]
            plan[device_class.name] = assignment
        plans.append(plan)
    return plans
