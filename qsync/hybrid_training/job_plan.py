"""Find the plan of a job: the given one, the cached one, or one that is made from profiles."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import torch

from qsync import api
from qsync.backend.devices.device_detection import device_of
from qsync.distributed import ddp_profiling, job
from qsync.distributed.agreement import agree_locally, check_same, from_rank_zero
from qsync.distributed.ddp_profiling import ProfileOptions
from qsync.distributed.job_options import HybridOptions
from qsync.distributed.plan_cache import cache_folder, cache_key, cached_plan, make_folder
from qsync.errors import NoGradientError, NothingToLowerError
from qsync.hybrid_training.planned_rank import PlannedRank
from qsync.hybrid_training.saved_plan import log_warnings, plan_and_save
from qsync.hybrid_training.shared_batches import Batches, batch_of_share, that_can_be
from qsync.processes.progress import shown_on_rank_zero
from qsync.records.base import base_of_graph, parse_base
from qsync.records.cluster import DeviceClass
from qsync.records.graph import OpGraph, digest
from qsync.records.plans import Plan
from qsync.replayer import Recapture
from qsync.runtime.coverage import say_once
from qsync.runtime.program import Program
from qsync.runtime.wrapping import check_plan_base, wrapping_of
from qsync.tracing.held_state import undisturbed
from qsync.tracing.tracer import without_autocast

logger = logging.getLogger("qsync")

# Options by which a plan goes by times also where all ranks are of one class.
_TIMES_DECIDE = {"target_s", "slack", "budgets", "saving_less", "levers"}


def find_plan(
    model: torch.nn.Module, example_batch: Any, asked: HybridOptions, rank: job.Rank
) -> tuple[PlannedRank, Program | None]:
    """Return this rank's part of the job's plan, and the program that traced the model to make it.

    There is no plan where nothing can be lowered or judged; rank 0 logs why.
    """
    own = rank.device_class.name
    if isinstance(asked.plan, Plan):
        agree_locally("checking the plan", partial(_check_base, asked.plan, asked.base))
        log_warnings(asked.plan)
        return PlannedRank(asked, own, asked.plan), None
    _warn_of_wrapping(model)
    batches = Batches(model, example_batch, asked.loader, asked.sampler)
    batch = agree_locally("making the example batch", batches.first)
    step = job.TrainingStep(model, batch, asked.loss_fn)
    with ExitStack() as stack, without_autocast(device_of(model)):
        progress = stack.enter_context(shown_on_rank_zero("qsync: planning"))
        profiling = ProfileOptions(asked, asked.may_save_less, progress)
        stack.enter_context(_in_training_mode(model))
        loss = agree_locally("reading the example batch", step.loss)
        # One trace serves all that is measured, and training after it.
        measuring = api.running(model, loss, dynamic=False, bitwise=asked.bitwise)
        program = agree_locally("running the model", lambda: stack.enter_context(measuring))
        try:
            plan, folder = _cached_or_made(step, batches, rank, profiling)
        except (NothingToLowerError, NoGradientError) as error:  # the same one on every rank
            if job.is_rank_zero():
                logger.warning("qsync: nothing is planned, and the model trains as it is: %s", error)
            return PlannedRank(asked, own, None), program
    return PlannedRank(asked, own, plan, folder), program


def _cached_or_made(
    step: job.TrainingStep, batches: Batches, rank: job.Rank, profiling: ProfileOptions
) -> tuple[Plan, Path]:
    """Return the plan of this job, the same on every rank, and its folder on rank 0."""
    cache_dir = profiling.asked.cache_dir
    plans = Path(from_rank_zero("a folder for the plan", lambda: str(cache_folder(cache_dir))))
    graph = job.form_graph(step)
    agree_locally("reading the batch", lambda: batches.check(graph))
    classes = job.form_classes(rank)
    options = that_can_be(profiling.asked.for_plan, classes)
    profiling = replace(profiling, asked=replace(profiling.asked, plan_options=options))
    folder = plans / _key(graph, classes, profiling.asked)
    plan = cached_plan(folder)
    if plan is not None:
        log_warnings(plan)
    else:
        from_rank_zero("a folder for the plan", lambda: make_folder(folder))
        is_equal = len(classes) == 1 and not _TIMES_DECIDE.intersection(options)
        profiling = replace(profiling, base=base_of_graph(graph, options.get("base")), briefly=is_equal)
        plan = _made(graph, step, rank, profiling, folder)
    plan.check_graph(graph)
    check_same({"the plan": digest(plan.to_json())})
    if job.is_rank_zero() and (folder / "plan.json").is_file():
        say_once(f"{graph.model}: the plan and its profiles are in {folder}", True)
    if job.is_rank_zero() and plan.verdict is not None:
        say_once("\n".join(f"{graph.model}: {line}" for line in plan.verdict.lines()), True)
    return plan, folder


def _key(graph: OpGraph, classes: tuple[DeviceClass, ...], asked: HybridOptions) -> str:
    """Return the name of the plan's folder."""
    other = asked.plan_options.get("other")
    return cache_key(graph, classes, {
        "precisions": asked.precisions, "optimizer": asked.make_optimizer, "loss": asked.loss_fn,
        "cap": asked.bucket_cap_bytes, "bitwise": asked.bitwise,
        **({"loader": "given"} if asked.loader is not None else {}),
        **({"compression": asked.compression} if asked.compression is not None else {}),
        **{name: value for name, value in (asked.ddp_options or {}).items() if isinstance(value, bool)},
        **asked.plan_options,
        **({"other": other.graph.shapes_hash} if isinstance(other, Recapture) else {}),
    })  # fmt: skip


def _made(
    graph: OpGraph, step: job.TrainingStep, rank: job.Rank, profiling: ProfileOptions, folder: Path
) -> Plan:
    """Profile the classes in steps of the job, and return rank 0's plan on every rank."""
    options = dict(profiling.asked.plan_options)
    formed = job.form_cluster(rank, profiling.progress)
    takes_others = profiling.asked.takes_samples and options.get("other") is None
    second = partial(batch_of_share, step, rank, options) if takes_others else None
    basis, other = ddp_profiling.form_basis(step, rank, graph, formed, profiling, second)
    if takes_others:
        options["other"] = other
    profiling.progress("allocation")
    asked = profiling.asked
    make = partial(plan_and_save, basis, folder, asked.bucket_cap_bytes, options, asked.chooses_buckets)
    return Plan.from_json(from_rank_zero("planning", lambda: make().to_json()))


def _check_base(plan: Plan, base: str | None) -> None:
    if base is not None:
        check_plan_base(plan, parse_base(base))


def _warn_of_wrapping(model: torch.nn.Module) -> None:
    """Log, on rank 0, that one precision for all operators makes way for a plan."""
    wrapping = wrapping_of(model)
    if wrapping is not None and wrapping.precision is not None and job.is_rank_zero():
        logger.warning("qsync: the model was wrapped in %s; a plan takes its place", wrapping.precision)


@contextmanager
def _in_training_mode(model: torch.nn.Module) -> Iterator[None]:
    """Put a model that is in evaluation mode, as from_pretrained returns it, in training mode meanwhile."""
    if model.training:
        yield
        return
    with undisturbed(model):
        if job.is_rank_zero():
            logger.warning("qsync: the model is in evaluation mode, and is planned as after model.train()")
        model.train()
        yield
