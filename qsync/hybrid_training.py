"""hybrid: what stands where DDP(model) stood in a torchrun script over unequal devices."""

from __future__ import annotations

import logging
import os
import weakref
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

from qsync import api
from qsync.allocator import doubts
from qsync.backend.device_detection import device_of
from qsync.distributed import job, liveness
from qsync.distributed.agreement import agree, check_same
from qsync.distributed.drift_monitor import Monitor, expected
from qsync.distributed.gradient_weighting import weigh_gradients
from qsync.distributed.step_phases import Phases
from qsync.errors import QSyncError
from qsync.progress import shown_on_rank_zero
from qsync.records.basis import Basis, save_plan
from qsync.records.graph import digest
from qsync.records.levers import SAVE_LESS
from qsync.records.plans import Plan
from qsync.records.precision import Precision
from qsync.replayer import replay, under

logger = logging.getLogger("qsync")


def hybrid(
    model: torch.nn.Module,
    example_batch: Any = None,
    loss_fn: api.LossFunction | None = None,
    *,
    plan: Plan | None = None,
    device_class: str | None = None,
    emulated_share: float | None = None,
    precisions: Sequence[Precision | str] | None = None,
    make_optimizer: Callable[[Any], torch.optim.Optimizer] = torch.optim.AdamW,
    cache_dir: str | Path | None = None,
    bucket_cap_mb: float | None = None,
    timeout_s: float = 60.0,
    loader: Iterable[Any] | None = None,
    **options: Any,
) -> torch.nn.Module:
    """Lower just enough operators of `model` on just the weak ranks that nobody waits, and wrap it in DDP.

    Called on every rank of a torchrun job, where `DistributedDataParallel(model)` stood. Detects each rank's
    device class, checks that all ranks agree on model and software, profiles every class on `example_batch`,
    plans, and rewrites. The plan is cached on disk, so a restart does not profile again. `loss_fn(model,
    batch)` returns the scalar loss; without it the model's own `.loss` is used. `loader` is what this rank's
    loop takes its batches from: then a step's wait for the next one is profiled and planned with too.
    `options` go to `qsync.plan` (`target_s`, `slack`, `pins`, `budgets`, `saving_less`, `levers`); where
    operators may save less, profiling takes twice as many steps. Under a plan with levers gradients are
    weighed by samples; the loop then takes `plan.levers[CLASS].samples` a step, in `.passes` of
    them (`qsync.micro_batches`).

    Returns the model in DistributedDataParallel; without a job (plain `python script.py`) the wrapped model
    itself. Raises the same error on every rank: MismatchError when ranks differ, CalibrationError for a batch
    that cannot be used, InfeasibleError when no plan fits the memory. If a rank dies or falls silent for
    `timeout_s`, the others stop and name it. When steps take a tenth longer than predicted, rank 0 logs
    (logger "qsync") which rank's phase is to blame.

    >>> model = qsync.hybrid(model, batch, loss_fn=lambda model, batch: loss(model(batch["x"]), batch["y"]))
    """
    device = device_of(model)
    job.join_job(device)
    distributed = job.world_size() > 1
    if distributed:
        _watch_once(timeout_s)
    job.check_models(model, {
        "bucket_cap_mb": bucket_cap_mb, "the plan": digest(plan.to_json()) if plan else "none",
        "a loader": "given" if loader is not None else "none",
    })  # fmt: skip
    own = job.agree_on_class(model, emulated_share, device_class)
    folder = None
    if plan is None:
        with shown_on_rank_zero("qsync: planning") as progress:
            plan, folder = _make_plan(
                model, example_batch, loss_fn, own, progress,
                precisions=precisions, make_optimizer=make_optimizer, cache_dir=cache_dir,
                bucket_cap_mb=bucket_cap_mb, loader=loader, options=options,
            )  # fmt: skip
    if bucket_cap_mb is None and plan.bucket_cap_bytes is not None:
        bucket_cap_mb = plan.bucket_cap_bytes / 2**20  # what the prediction assumes
    chosen = plan
    agree("wrapping the model", lambda: api.wrap(model, chosen, device_class=own.name) and None)
    if not distributed:
        return model
    parallel = job.in_ddp(model, bucket_cap_mb)
    share = plan.levers[own.name] if plan.levers else None
    if share is not None and share.samples is not None:
        weigh_gradients(parallel, share.samples, passes=share.passes)
    if folder is not None:
        _watch_drift(parallel, plan, folder, own.name)
    return parallel


# What watches over the steps of each model, for as long as the model lives.
monitors: weakref.WeakKeyDictionary[DistributedDataParallel, Monitor] = weakref.WeakKeyDictionary()


def _watch_drift(parallel: DistributedDataParallel, plan: Plan, folder: Path, name: str) -> None:
    """Say so when steps take longer than planned. Rank 0 has what the plan was made from."""

    def predict() -> dict[str, Any] | None:
        if dist.get_rank() != 0:
            return None
        try:
            basis = Basis.load(folder)
            profiles = under(basis.graph, basis.profiles, basis.cluster, plan.levers)
            timeline = replay(
                basis.graph, plan, profiles, basis.cluster, bucket_cap_bytes=plan.bucket_cap_bytes
            )
        except QSyncError:  # a cached plan whose profiles are gone: there is nothing to compare with
            return None
        return {c: phases.to_json() for c, phases in expected(timeline).items()}

    predicted = agree("predicting the step", predict)[0]
    if predicted is not None:
        phases = {c: Phases(**seconds) for c, seconds in predicted.items()}
        monitors[parallel] = Monitor(parallel, parallel.module, phases, name)


_watched: list[dist.ProcessGroup] = []


def _watch_once(timeout_s: float) -> None:
    """Watch over the ranks of a job once, however many models of it are wrapped."""
    group = dist.group.WORLD
    if group is not None and not any(group is known for known in _watched):
        _watched.append(group)
        liveness.start(timeout_s)


def _make_plan(
    model: torch.nn.Module, batch: Any, loss_fn: api.LossFunction | None, own: Any,
    progress: job.Progress, *, precisions: Any, make_optimizer: Any, cache_dir: str | Path | None,
    bucket_cap_mb: float | None, loader: Iterable[Any] | None, options: dict[str, Any],
) -> tuple[Plan, Path]:  # fmt: skip
    from qsync.planning import plan as choose

    graph = job.form_graph(model, batch, loss_fn)
    formed = job.form_cluster(own, device_of(model), progress)
    cluster = formed[0]
    cap = int(bucket_cap_mb * 2**20) if bucket_cap_mb else None
    key = job.basis_key(graph, cluster, {
        "precisions": precisions, "optimizer": make_optimizer, "cap": cap,
        **({"loader": "given"} if loader is not None else {}), **options,
    })  # fmt: skip
    folder = _cache(cache_dir) / key
    plan = _cached(folder)
    if plan is None:
        basis = job.form_basis(
            model, batch, loss_fn, own, formed, graph=graph, precisions=precisions,
            make_optimizer=make_optimizer, progress=progress, loader=loader, bucket_cap_mb=bucket_cap_mb,
            save_less=bool(options.get("saving_less")) or SAVE_LESS in (options.get("levers") or ()),
        )  # fmt: skip
        progress("allocation")
        plan = _on_rank_zero("planning", lambda: choose(
            graph, basis.profiles, basis.sensitivity, basis.cluster, bucket_cap_bytes=cap, **options
        ), folder, basis, options.get("budgets"))  # fmt: skip
    plan.check_graph(graph)
    check_same({"the plan": digest(plan.to_json())})
    return plan, folder


def _on_rank_zero(
    step: str, make: Callable[[], Plan], folder: Path, basis: Basis, budgets: Mapping[str, int] | None
) -> Plan:
    """Rank 0 plans, files the plan and says what there is to doubt of it; every rank gets it."""

    def planned() -> dict[str, Any] | None:
        if dist.is_initialized() and dist.get_rank() != 0:
            return None
        plan = make()
        save_plan(folder, plan, basis)
        profiles = under(basis.graph, basis.profiles, basis.cluster, plan.levers)
        for doubt in doubts(basis.graph, plan, profiles, basis.cluster, budgets):
            logger.warning("qsync: %s", doubt)
        return plan.to_json()

    return Plan.from_json(agree(step, planned)[0])


def _cached(folder: Path) -> Plan | None:
    """Rank 0's cached plan for every rank, None if there is none (or it is malformed: then it is made
    anew).
    """

    def look() -> dict[str, Any] | None:
        if dist.is_initialized() and dist.get_rank() != 0:
            return None
        try:
            return Plan.load(folder / "plan.json").to_json()
        except QSyncError:
            return None

    found = agree("reading the plan cache", look)[0]
    return Plan.from_json(found) if found is not None else None


def _cache(cache_dir: str | Path | None) -> Path:
    if cache_dir is not None:
        return Path(cache_dir)
    return Path(os.environ.get("XDG_CACHE_HOME", Path.home() / ".cache")) / "qsync"
