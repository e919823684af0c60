"""`hybrid`: stands where DDP(model) stood in a torchrun script over unequal devices."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from qsync.api import LossFunction
from qsync.backend.devices.device_detection import device_of
from qsync.distributed import accelerate_state, job
from qsync.distributed.agreement import agree_locally
from qsync.distributed.ddp_profiling import PROFILE_S_VARIABLE, profile_seconds
from qsync.distributed.job_options import HybridOptions
from qsync.distributed.monitoring import liveness
from qsync.distributed.monitoring.step_log import new_log
from qsync.hybrid_training.job_plan import find_plan
from qsync.operators.precision import Precision
from qsync.records.plans import Plan
from qsync.tracing.tracer import autocast_type


def hybrid(
    model: torch.nn.Module,
    example_batch: Any = None,
    loss_fn: LossFunction | None = None,
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
        bucket_cap_mb: the size of DDP's buckets in MiB. Without it the plan takes DDP's own, or one that
            makes the step at least 2 % shorter.
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
            Weights, optimizer and operators stay as planned. FSDP2 takes "int8" alone.
        log_steps: a folder in which every rank logs the phases of its steps, a line of JSON each, for
            `qsync explain --measured`. The same on every rank, or None.
        report: rank 0 writes the page of `qsync report` about the plan here (.html), or warns that it cannot.
            Not with a `plan`.
        check: compare the first 20 steps of training with the prediction; where a class computes more than
            3 % longer or shorter, correct the profiles and plan again, once, shares of a `qsync.ShareSampler`
            included: these change at the first step that no loader has drawn. Every rank must take the same
            number of optimizer steps. Not with a `plan`, and with `levers` only in qsync's DDP with such a
            loader.
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
    asked = HybridOptions(
        plan=plan, device_class=device_class, emulated_share=emulated_share, precisions=precisions,
        make_optimizer=make_optimizer, cache_dir=cache_dir, bucket_cap_mb=bucket_cap_mb, timeout_s=timeout_s,
        join_timeout_s=join_timeout_s, loader=loader, base=base, bitwise=bitwise, ddp=ddp,
        ddp_options=ddp_options, compression=compression, log_steps=log_steps, report=report, check=check,
        loss_fn=loss_fn, plan_options=options,
    )  # fmt: skip
    _join(model, asked)
    asked = _checked(model, asked)
    rank = job.detect_rank(model, asked.emulated_share, asked.device_class)
    log = new_log(asked.log_steps)
    planned, program = find_plan(model, example_batch, asked, rank)
    planned.wrap(model, program)
    return planned.watch(model, log)


def _join(model: torch.nn.Module, asked: HybridOptions) -> None:
    """Join the job of torchrun's environment, and watch its ranks from then on."""
    job.join_job(device_of(model), silence_s=asked.timeout_s, join_timeout_s=asked.join_timeout_s)
    if job.world_size() > 1:
        liveness.watch_once(asked.timeout_s, asked.join_timeout_s)


def _checked(model: torch.nn.Module, asked: HybridOptions) -> HybridOptions:
    """Return the options settled. Raises the same error on every rank if one's are invalid or differ."""
    base = asked.base or autocast_type(device_of(model)) or accelerate_state.mixed_precision()
    asked = agree_locally("checking options", lambda: replace(asked, base=base).settled(model))
    job.check_models(model, {
        **asked.facts(), "the training mode": model.training,
        PROFILE_S_VARIABLE: os.environ.get(PROFILE_S_VARIABLE, ""),
    })  # fmt: skip
    agree_locally("checking options", profile_seconds)
    return asked
