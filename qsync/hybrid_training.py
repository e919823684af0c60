"""`hybrid`: stands where DDP(model) stood in a torchrun script over unequal devices."""

from __future__ import annotations

import inspect
import logging
import os
import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from qsync import api
from qsync.allocator import check_options, find_verdict, find_warnings
from qsync.allocator.compression_choice import compression_lines, with_compression
from qsync.backend.devices.device_detection import device_of
from qsync.distributed import accelerate_state, ddp_profiling, job
from qsync.distributed.agreement import agree_locally, check_same, from_rank_zero
from qsync.distributed.data_parallel import check_ddp_options, check_not_parallel, in_ddp, settled_options
from qsync.distributed.ddp_profiling import ProfileOptions
from qsync.distributed.framework_ddp import FirstCall
from qsync.distributed.gradient_weighting import (
    check_passes,
    compress_gradients,
    note_share,
    set_share,
    warn_of_batch_norm,
)
from qsync.distributed.monitoring import liveness
from qsync.distributed.monitoring.drift_monitor import (
    STEPS_PER_COMPARISON,
    Monitor,
    Prediction,
    monitors,
    note_prediction,
)
from qsync.distributed.monitoring.first_steps import Measured, check_first_steps, corrected
from qsync.distributed.monitoring.reached_rate import ReachedRate
from qsync.distributed.monitoring.step_log import StepLog, new_log
from qsync.distributed.monitoring.step_phases import PhaseTimer
from qsync.distributed.plan_cache import cache_folder, cache_key, cached_plan, make_folder
from qsync.distributed.share_sampler import ShareSampler, sampler_of
from qsync.distributed.shared_batches import (
    Batches,
    batch_of_share,
    hand_out_shares,
    takes_samples,
    that_can_be,
    with_shares,
)
from qsync.errors import (
    DoesNotFitError,
    FormatError,
    NoGradientError,
    NothingToLowerError,
    QSyncError,
    shortened,
)
from qsync.operators.precision import Precision
from qsync.planning import plan as choose_plan
from qsync.progress import shown_on_rank_zero
from qsync.records.base import base_of_graph, parse_base
from qsync.records.compression import asked_kinds, check_compression
from qsync.records.graph import digest
from qsync.records.json_files import check_kind
from qsync.records.levers import SAVE_LESS, ClassLevers
from qsync.records.plan_folder import Basis, save_plan
from qsync.records.plans import Plan
from qsync.replayer import Recapture, profiles_under_levers
from qsync.runtime.coverage import say_once
from qsync.runtime.program import Program
from qsync.runtime.wrapping import check_plan_base, swap_plan, wrapping_of
from qsync.tracing.held_state import undisturbed
from qsync.tracing.tracer import autocast_type, without_autocast

logger = logging.getLogger("qsync")

# Options by which a plan goes by times also where all ranks are of one class.
_TIMES_DECIDE = {"target_s", "slack", "budgets", "saving_less", "levers"}
# The timer of each model that a loop calls, for as long as that lives.
_timers: weakref.WeakKeyDictionary[torch.nn.Module, PhaseTimer] = weakref.WeakKeyDictionary()


def hybrid(
    model: torch.nn.Module,
    example_batch: Any = None,
    loss_fn: api.LossFunction | None = None,
    *,
    plan: Plan | None = None,
    device_class: str | None = None,
    emulated_share: float | None = None,
    precisions: Sequence[Precision | str] | None = None,
    make_optimizer: Callable[[Any], Any] = torch.optim.AdamW,
    cache_dir: str | Path | None = None,
    bucket_cap_mb: float | None = None,
    timeout_s: float = 60.0,
    join_timeout_s: float = 600.0,
    loader: Iterable[Any] | None = None,
    base: str | None = None,
    bitwise: bool = False,
    ddp: bool = True,
    ddp_options: Mapping[str, Any] | None = None,
    compression: str | None = None,
    log_steps: str | Path | None = None,
    report: str | Path | None = None,
    check: bool = False,
    **options: Any,
) -> torch.nn.Module:
    """Lower just enough operators of `model` on just the weak ranks that nobody waits, and wrap it in DDP.

    Called on every rank of a torchrun job, where `DistributedDataParallel(model)` stood. It checks
    that all ranks agree on model and software, detects each rank's device class, profiles every class on
    `example_batch`, plans, and rewrites the model. The plan is cached on disk, so a restart does not profile
    again. If a rank dies or falls silent, the others stop and name it; a rank that lives but does not move is
    named by one that waits for it. If steps of a job of several ranks stay a tenth longer than predicted for
    30 seconds, rank 0 logs (logger "qsync") which rank and phase is to blame.

    With a `loader` of a `qsync.ShareSampler` the plan also says which part of each global batch a rank takes,
    and in how many passes where memory asks for several. The sampler hands out the samples, the loop cuts
    them into passes by `qsync.micro_batches(model, batch)`, and gradients are weighed by samples.

    Args:
        model: the same on every rank; DDP gives all ranks the values of the first.
        example_batch: a real batch of this rank: a tensor, a tuple (positional) or a dict (keywords), or
            whatever `loss_fn` takes. Without it the first of the `loader`, on the model's device; random
            states and the loader's generators are afterwards as before. Not needed with a `plan`.
        loss_fn: `loss_fn(model, batch)` returns the scalar loss. Without it the model's own `.loss` counts.
        plan: run this plan; nothing is profiled then.
        device_class: the name of this rank's class, instead of the detected one.
        emulated_share: emulate a weaker device: this process gets that share of its core, in (0, 1], until it
            ends. It is paused and resumed every few milliseconds, unless something slows it so already
            (Linux, and a model on the CPU; a loader's workers are not paused).
        precisions: those to choose from, instead of all that this rank multiplies in hardware; with the base
            and FP32 in any case.
        make_optimizer: the training loop's optimizer from parameters, or a list of several: their time and
            memory are part of a step.
        cache_dir: the folder of cached plans on rank 0, instead of `~/.cache/qsync`. A plan that finds no
            room there is one warning.
        bucket_cap_mb: the size of DDP's buckets in MiB, instead of the plan's or DDP's own.
        timeout_s: seconds of silence after which a rank counts as dead; at least 1.
        join_timeout_s: seconds to wait for a rank that has not come yet. From the tenth on a line names it.
        loader: what this rank's loop takes its batches from. The wait for the next batch is then profiled
            and planned with. Of a `qsync.ShareSampler`: a batch is profiled with two numbers of samples.
        base: "fp32", "tf32", "bf16" or "fp16": what the strong class runs in, as torch.autocast would, and
            what the others are lowered from. Without it the type of the torch.autocast that is on here, or of
            Accelerate's mixed precision, else "fp32". The training loop may keep its torch.autocast of that
            type.
        bitwise: compute FP32 by torch's own kernels, to the bit, not by the fastest of the CPU.
        ddp: False leaves wrapping to a framework that does it itself: its DDP, or fully_shard. At the first
            training call that DDP is found, its steps are watched, and its gradients weighed.
        ddp_options: DDP's arguments: `find_unused_parameters`, `static_graph`, `gradient_as_bucket_view`,
            `broadcast_buffers` (in torch 2.13 `forward_sync_buffers`), `init_sync`, `bucket_cap_mb`,
            `process_group` (of all ranks). Profiling uses them too; with `ddp=False` they are those that the
            framework gives its DDP.
        compression: how gradients travel between ranks, for slow links: "bf16" (half the bytes), "int8" (a
            quarter; blocks of 256 with a scale, added up in FP32), "powersgd" or "powersgd:RANK" (factors of
            low rank, 4 by default). "+feedback" behind the first two adds what rounding lost to the next
            step's gradients; powersgd does so in any case. "auto" chooses for each bucket: least error at a
            step within 2 % of the least. Without it a plan that chose so is followed; "fp32" is plain.
            Weights, optimizer and operators stay as planned. Not under FSDP2.
        log_steps: a folder in which every rank logs the phases of its steps, a line of JSON each, for
            `qsync explain --measured`. The same on every rank, or None.
        report: rank 0 writes the page of `qsync report` about the plan here (.html), or warns that it cannot.
            Not with a `plan`.
        check: compare the first 20 steps of training with the prediction; where a class computes more than
            3 % longer or shorter, correct the profiles and plan again, once. Every rank must take the same
            number of optimizer steps. Not with a `plan` or `levers`.
        **options: options of `qsync.plan` (`target_s`, `slack`, `pins`, `budgets`, `saving_less`,
            `divide_state`, `levers` and their `other`). With a `qsync.ShareSampler` the levers are "share"
            and "accumulate" unless others are given, and "share" alone under Accelerate and with `ddp=False`;
            `levers=()` keeps equal batches. Where ranks take other numbers of samples, and no `other` is
            given, the batch is profiled with another one, too. With BatchNorm a share keeps 16 samples a
            pass, unless `least_samples` says otherwise. Where operators may save less, profiling takes twice
            as many steps.

    Returns:
        The model in DistributedDataParallel. With `ddp=False`, and without a job (plain `python script.py`),
        the model itself.

    Raises:
        MismatchError: ranks differ in software, model, plan, batch shapes or options.
        CalibrationError: the batch cannot be used: missing, empty, with NaN or Inf, or without a scalar loss.
        TracingError: the model cannot be traced.
        UnsupportedError: a device lacks a precision, or the model is in DDP already.
        FormatError: an option that does not exist or cannot be used, found before anything is profiled.
        InfeasibleError: no plan fits the memory or reaches the target.
        Every rank raises the same error.

    Example:
        >>> model = qsync.hybrid(model, batch, lambda model, batch: loss(model(batch["x"]), batch["y"]))
    """
    device, sampler = device_of(model), None
    loader = getattr(loader, "base_dataloader", loader)  # Accelerate's counts who iterates it
    base = base or autocast_type(device) or accelerate_state.mixed_precision()
    job.join_job(device, silence_s=timeout_s, join_timeout_s=join_timeout_s)
    if job.world_size() > 1:
        liveness.watch_once(timeout_s, join_timeout_s)
    ddp_options = ddp_options if ddp_options is not None else {}

    def check_arguments() -> None:
        nonlocal sampler, options
        sampler = sampler_of(loader)
        options = with_shares(options, sampler, model, ddp)
        _check_options(model, options, ddp, ddp_options, bucket_cap_mb)
        check_compression(compression)
        _check_first_steps_option(check, plan, options)
        _check_report_option(report, plan)
        if plan is not None:
            check_kind(plan, Plan, "plan", "qsync.plan or qsync.Plan.load")

    agree_locally("checking options", check_arguments)
    ddp_options = settled_options(ddp_options, by_qsync=ddp)
    bucket_cap_mb = ddp_options.get("bucket_cap_mb") if bucket_cap_mb is None else bucket_cap_mb
    job.check_models(model, {
        "bucket_cap_mb": bucket_cap_mb, "the plan": digest(plan.to_json()) if plan else "none",
        "a loader": "given" if loader is not None else "none", "the base": base,
        "the global batch of the loader": sampler.global_batch if sampler is not None else 0,
        ddp_profiling.PROFILE_S_VARIABLE: os.environ.get(ddp_profiling.PROFILE_S_VARIABLE, ""),
        "bitwise": bitwise, "the training mode": model.training, "ddp": ddp, "check": check,
        "compression": compression or "none",
        "a report": report is not None,
        **_accelerate_facts(plan, options), **_option_facts(options),
        **{f"DDP's {name}": value for name, value in ddp_options.items() if isinstance(value, bool)},
    })  # fmt: skip
    job.check_options(emulated_share, device_class, bucket_cap_mb)
    agree_locally("checking options", ddp_profiling.profile_seconds)
    rank = job.detect_rank(model, emulated_share, device_class)
    log = new_log(log_steps)
    folder = program = None
    if plan is None:
        _warn_of_wrapping(model)
        batches = Batches(model, example_batch, loader, sampler)
        step = job.TrainingStep(model, agree_locally("making the example batch", batches.first), loss_fn)
        options |= {"base": str(parse_base(base))} if base is not None else {}
        profiling = ProfileOptions(
            precisions, make_optimizer, loader, bucket_cap_mb, ddp_options, _may_save_less(options),
            bitwise=bitwise, compression=compression,
        )  # fmt: skip
        plan, folder, program = _plan_here(step, rank, batches, profiling, cache_dir, options)
    else:
        if base is not None:
            agree_locally("checking the plan", lambda: check_plan_base(plan, parse_base(base)))
        _log_warnings(plan)
    own = rank.device_class.name
    if plan is not None:
        is_first = job.is_first_of(own)
        agree_locally("wrapping the model", lambda: api.wrap_as(model, plan, own, is_first, program, bitwise))
    if sampler is not None and plan is not None:
        hand_out_shares(sampler, model, plan, own)
    if report is not None and plan is not None and folder is not None:
        from_rank_zero("writing the report", partial(_write_report, Path(report), plan, folder))
    prediction = Prediction.of(plan, folder) if plan is not None and folder is not None else None
    planned = _PlannedRank(plan, own, prediction, folder, options, sampler, compression)
    _note_prediction(model, planned)
    return _parallel(
        model,
        planned,
        partial(_attend, planned=planned, check=check, log=log),
        ddp,
        bucket_cap_mb,
        ddp_options,
    )


def _plan_here(
    step: job.TrainingStep,
    rank: job.Rank,
    batches: Batches,
    profiling: ProfileOptions,
    cache_dir: str | Path | None,
    options: Mapping[str, Any],
) -> tuple[Plan | None, Path | None, Program]:
    """Trace the model, and return its plan, the plan's folder and the traced program.

    There is no plan where nothing can be lowered or judged; rank 0 logs why.
    """
    with ExitStack() as stack, without_autocast(device_of(step.model)):
        profiling = replace(profiling, progress=stack.enter_context(shown_on_rank_zero("qsync: planning")))
        stack.enter_context(_in_training_mode(step.model))
        loss = agree_locally("reading the example batch", step.loss)
        # One trace serves all that is measured, and training after it.
        measuring = api.running(step.model, loss, dynamic=False, bitwise=profiling.bitwise)
        program = agree_locally("running the model", lambda: stack.enter_context(measuring))
        try:
            return *_profile_and_plan(step, rank, batches, profiling, cache_dir, options), program
        except (NothingToLowerError, NoGradientError) as error:  # the same one on every rank
            _warn_of_no_plan(error)
            return None, None, program


def _note_prediction(model: torch.nn.Module, planned: _PlannedRank) -> None:
    """Keep a plan's prediction with its model; on rank 0 say after 20 steps what rate was reached."""
    plan, prediction = planned.plan, planned.prediction
    if plan is None or prediction is None:
        return
    note_prediction(model, prediction, planned.device_class)
    if plan.verdict is not None and job.is_rank_zero():
        step_s = plan.step_s or 0.0
        samples = round(plan.verdict.ways[-1].samples_per_s * step_s)
        ReachedRate(model, samples, step_s, prediction.num_calls[planned.device_class])


def _parallel(
    model: torch.nn.Module,
    planned: _PlannedRank,
    attend: Callable[[torch.nn.Module, torch.nn.Module], None],
    ddp: bool,
    bucket_cap_mb: float | None,
    ddp_options: Mapping[str, Any],
) -> torch.nn.Module:
    """Return what the loop calls, attended: the model in DDP, or itself without a job or with `ddp=False`."""
    plan = planned.plan
    if not dist.is_initialized():
        attend(model, model)
        return model
    if not ddp:
        if planned.share.samples is not None:  # the loop cuts its first batch before its first call
            note_share(model, planned.share.samples, planned.share.passes)
        FirstCall(model, attend)
        return model
    made: dict[str, Any] = {}
    if plan is not None:
        if bucket_cap_mb is None and plan.bucket_cap_bytes is not None:
            bucket_cap_mb = plan.bucket_cap_bytes / 2**20  # as the prediction assumes
        share = plan.levers[planned.device_class] if plan.levers else None
        made = {"base": plan.base, "share": share}
    parallel = in_ddp(model, bucket_cap_mb, ddp_options, **made)
    attend(parallel, model)
    return parallel


def _accelerate_facts(plan: Plan | None, options: Mapping[str, Any]) -> dict[str, object]:
    """Return what ranks must have asked Accelerate for alike: without shares the number of passes."""
    has_shares = bool(options.get("levers")) or (plan is not None and plan.levers is not None)
    passes = "Accelerate's gradient_accumulation_steps"
    return {} if has_shares else {passes: accelerate_state.num_passes()}


def _option_facts(options: Mapping[str, Any]) -> dict[str, object]:
    """Return options of `qsync.plan` by name, but for each rank's own objects."""
    own = ("other", "progress")
    return {name: value for name, value in options.items() if value is not None and name not in own}


def _check_options(
    model: object, options: Mapping[str, Any], ddp: object, ddp_options: object, bucket_cap_mb: float | None
) -> None:
    """Raise an error for arguments that do not exist, unusable DDP options, or a model in DDP."""
    check_options(options, also=list(inspect.signature(hybrid).parameters)[1:-1])
    if "bucket_cap_bytes" in options:
        raise FormatError("bucket_cap_bytes is of qsync.plan; give bucket_cap_mb, for the plan and DDP")
    if not isinstance(ddp, bool):
        raise FormatError(
            f"ddp must be True or False, found {shortened(ddp)}; leave it out for qsync's own DDP"
        )
    check_ddp_options(ddp_options, bucket_cap_mb)
    check_not_parallel(model)
    _check_trained(model)
    if isinstance(model, torch._dynamo.OptimizedModule):
        raise FormatError("the model is compiled; give the plain one, and compile what qsync.hybrid returns")


def _check_trained(model: object) -> None:
    """Raise an error for a model without trained parameters, or whose first batch makes parameters."""
    if isinstance(model, torch.nn.Module):  # others are refused for what they are
        if any(map(torch.nn.parameter.is_lazy, (*model.parameters(), *model.buffers()))):
            raise FormatError(
                f"{type(model).__name__} has parameters that its first batch makes (LazyLinear and others); "
                "call it on a batch once, before qsync.hybrid"
            )
        api.trained_parameters(model)


@dataclass(frozen=True)
class _PlannedRank:
    """Hold what a rank runs, and what its plan was made from: the folder of its profiles, and the options."""

    plan: Plan | None  # None where nothing could be planned
    device_class: str
    prediction: Prediction | None  # of plans that were made here and can be replayed
    folder: Path | None  # None for a plan that was given
    options: Mapping[str, Any]
    sampler: ShareSampler | None = None
    compression: str | None = None

    @property
    def kinds(self) -> Mapping[str, str] | None:
        """Return the kinds in which gradients travel, as asked for, else as planned; None: as they are."""
        planned = self.plan.compression if self.plan is not None else None
        return asked_kinds(self.compression) or planned or None

    @property
    def share(self) -> ClassLevers:
        """This rank's share of the batch; without samples where all are equal."""
        share = self.plan.levers_of(self.device_class) if self.plan is not None else ClassLevers()
        if self.sampler is not None and not self.sampler.is_equal:
            share = replace(share, samples=self.sampler.share.samples)
        return share

    def plan_again(self, measured: Measured) -> Plan:
        """Return the plan of profiles corrected by the first steps; it replaces the cached one."""
        assert self.plan and self.prediction and self.folder, "there is something to check"
        basis = corrected(Basis.load(self.folder), self.prediction.phases, measured)
        options = {**self.options, "base": str(self.plan.base)}
        return _plan_and_save(basis, self.folder, self.plan.bucket_cap_bytes, options)

    def adopt(
        self,
        called: Callable[[], torch.nn.Module | None],
        model: Callable[[], torch.nn.Module | None],
        plan: Plan,
    ) -> None:
        """Run the model, which is in use, under another plan, and watch it against that plan's prediction."""
        trained = model()
        assert trained is not None and self.folder is not None, "its optimizer has just stepped"
        agree_locally("changing the plan", lambda: swap_plan(trained, plan, self.device_class))
        prediction = Prediction.of(plan, self.folder)
        if prediction is not None:
            note_prediction(trained, prediction, self.device_class)
            monitor = monitors.get(called())  # type: ignore[arg-type]
            if monitor is not None:
                monitor.expect(prediction)


def _attend(
    called: torch.nn.Module, model: torch.nn.Module, planned: _PlannedRank, check: bool, log: Path | None
) -> None:
    """Weigh the gradients of a planned model as its plan says, watch its steps, check the first, log them.

    `called` is what the loop calls: DDP, or the model itself.
    """
    plan, device_class, prediction = planned.plan, planned.device_class, planned.prediction
    share = planned.share
    captured = next((shape[0] for shape in plan.batch if shape), None) if plan is not None else None
    if captured is not None:
        note_share(called, planned.sampler.share.samples if planned.sampler is not None else captured)
    if share.samples is not None and dist.is_initialized():
        if plan is not None and plan.levers is not None:
            check_passes(called, (levers.passes for levers in plan.levers.classes.values()))
        set_share(called, share.samples, share.passes, (captured or 1) * job.world_size())
        if planned.folder is None:  # a plan that was made here has said so
            warn_of_batch_norm(called)
    if dist.is_initialized():
        compress_gradients(called, planned.kinds)
    in_job = job.world_size() > 1
    check = check and prediction is not None
    if not (in_job or check or log is not None):
        return
    if in_job and prediction is not None:
        timer = Monitor(called, model, prediction, device_class).timer
    else:
        timer = PhaseTimer(called, model, STEPS_PER_COMPARISON)
    _timers[called] = timer
    if in_job:
        liveness.follow(timer.position)
    if check and prediction is not None:
        adopt = partial(planned.adopt, weakref.ref(called), weakref.ref(model))
        check_first_steps(timer, prediction, device_class, planned.plan_again, adopt)
    if log is not None:
        StepLog(log, timer, called, device_class)


def _check_first_steps_option(check: object, plan: Plan | None, options: Mapping[str, Any]) -> None:
    """Raise FormatError for a `check` that cannot be made."""
    if not isinstance(check, bool):
        raise FormatError(f"check must be True or False, found {shortened(check)}; leave it out for False")
    if check and plan is not None:
        raise FormatError(
            "check=True corrects profiles, and a given plan has none here; leave one of them out"
        )
    if check and options.get("levers"):
        raise FormatError(
            "check=True would change shares under a running loop; leave it out, or give levers=() (a "
            "ShareSampler brings levers with it)"
        )


def _check_report_option(report: object, plan: Plan | None) -> None:
    """Raise FormatError for a `report` that cannot be written."""
    if report is None:
        return
    from qsync.figures import page  # imports matplotlib

    page.check_path(report, "report")
    if plan is not None:
        raise FormatError("a given plan has no profiles here; leave report out, or use qsync report FOLDER")
    page.check_available()


def _write_report(file: Path, plan: Plan, folder: Path) -> None:
    from qsync.figures import page  # imports matplotlib

    try:
        basis = Basis.load(folder)
        profiles = profiles_under_levers(
            basis.graph, basis.profiles, basis.cluster, plan.levers, Recapture.load(folder)
        )
        page.write(file, plan, replace(basis, profiles=profiles))
    except (OSError, QSyncError) as error:  # as where a full disk took neither profiles nor page
        logger.warning("qsync: the report is not written: %s; training goes on", shortened(error, 400))


def _warn_of_no_plan(error: QSyncError) -> None:
    """Log, on rank 0, why a model comes back as it is."""
    if job.is_rank_zero():
        logger.warning("qsync: nothing is planned, and the model trains as it is: %s", error)


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


def _may_save_less(options: Mapping[str, Any]) -> bool:
    return bool(options.get("saving_less")) or SAVE_LESS in (options.get("levers") or ())


def _profile_and_plan(
    step: job.TrainingStep,
    rank: job.Rank,
    batches: Batches,
    profiling: ProfileOptions,
    cache_dir: str | Path | None,
    options: Mapping[str, Any],
) -> tuple[Plan, Path]:
    """Return the plan of this job, the same on every rank, and its folder: cached, or made now."""
    # Rank 0 alone reads and writes plans.
    plans = Path(from_rank_zero("a folder for the plan", lambda: str(cache_folder(cache_dir))))
    graph = job.form_graph(step)
    agree_locally("reading the batch", lambda: batches.check(graph))
    classes = job.form_classes(rank)
    options = that_can_be(options, classes)
    other = options.get("other")
    named = {**options, "other": other.graph.shapes_hash} if isinstance(other, Recapture) else options
    folder = plans / cache_key(graph, classes, {
        "precisions": profiling.precisions, "optimizer": profiling.make_optimizer, "loss": step.loss_fn,
        "cap": profiling.bucket_cap_bytes, "bitwise": profiling.bitwise,
        **({"loader": "given"} if profiling.loader is not None else {}),
        **({"compression": profiling.compression} if profiling.compression is not None else {}),
        **{name: value for name, value in (profiling.ddp_options or {}).items() if isinstance(value, bool)},
        **named,
    })  # fmt: skip
    plan = cached_plan(folder)
    if plan is None:
        from_rank_zero("a folder for the plan", lambda: make_folder(folder))
        is_equal = len(classes) == 1 and not _TIMES_DECIDE.intersection(options)
        base = base_of_graph(graph, options.get("base"))
        profiling = replace(profiling, base=base, briefly=is_equal)
        formed = job.form_cluster(rank, profiling.progress)
        takes_others = takes_samples(options) and options.get("other") is None
        second = partial(batch_of_share, step, rank, options) if takes_others else None
        basis, other = ddp_profiling.form_basis(step, rank, graph, formed, profiling, second)
        options = {**options, "other": other} if takes_others else options
        profiling.progress("allocation")
        plan = Plan.from_json(from_rank_zero(
            "planning", lambda: _plan_and_save(basis, folder, profiling.bucket_cap_bytes, options).to_json()
        ))  # fmt: skip
    else:
        _log_warnings(plan)
    plan.check_graph(graph)
    check_same({"the plan": digest(plan.to_json())})
    if job.is_rank_zero() and (folder / "plan.json").is_file():
        say_once(f"{graph.model}: the plan and its profiles are in {folder}", True)
    if job.is_rank_zero() and plan.verdict is not None:
        say_once("\n".join(f"{graph.model}: {line}" for line in plan.verdict.lines()), True)
    return plan, folder


def _plan_and_save(
    basis: Basis, folder: Path, bucket_cap_bytes: int | None, options: Mapping[str, Any]
) -> Plan:
    try:
        plan = choose_plan(
            basis.graph, basis.profiles, basis.sensitivity, basis.cluster,
            bucket_cap_bytes=bucket_cap_bytes, **options,
        )  # fmt: skip
    except DoesNotFitError as error:
        _save_basis(folder, basis, options.get("other"))
        raise DoesNotFitError(f"{error}; qsync fit {folder} says what would fit") from error
    if basis.sensitivity.exchange:
        profiles = profiles_under_levers(
            basis.graph, basis.profiles, basis.cluster, plan.levers, options.get("other")
        )
        under = replace(basis, profiles=profiles)
        plan = with_compression(under, plan, options.get("target_s"))
        lines = compression_lines(under, plan)
        say_once("\n".join(f"{basis.graph.model}: {line}" for line in lines), bool(lines))
    plan = replace(plan, verdict=find_verdict(basis, plan, options.get("other"), options))
    return save_with_warnings(folder, plan, basis, options.get("budgets"), options.get("other"))


def _save_basis(folder: Path, basis: Basis, other: Recapture | None) -> None:
    """Keep what was measured, where no plan comes of it; a full disk costs nothing more."""
    with suppress(OSError):
        basis.save(folder)
        if other is not None:
            other.save(folder)


def save_with_warnings(
    folder: Path,
    plan: Plan,
    basis: Basis,
    budgets: Mapping[str, int] | None,
    other: Recapture | None = None,
) -> Plan:
    """Write a plan beside its basis, and log the reasons to doubt it, or why it is not kept.

    Returns the plan with these reasons, which whoever uses it later reads again.
    """
    profiles = profiles_under_levers(basis.graph, basis.profiles, basis.cluster, plan.levers, other)
    found = find_warnings(basis.graph, plan, profiles, basis.cluster, budgets)
    plan = replace(plan, warnings=tuple(found))
    try:
        if other is not None:
            other.save(folder)
        save_plan(folder, plan, basis)
    except OSError as error:  # a full disk is found after the profiles were measured
        logger.warning(
            "qsync: the plan is not kept in %s (%s), so the next start profiles again; make space there, or "
            "give cache_dir another folder", folder, error.strerror or error,
        )  # fmt: skip
    _log_warnings(plan)
    return plan


def _log_warnings(plan: Plan) -> None:
    for warning in plan.warnings if job.is_rank_zero() else ():
        logger.warning("qsync: %s", warning)
