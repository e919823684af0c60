"""Run a rank's part of a plan: wrap its model, weigh its gradients, watch its steps."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from qsync import api
from qsync.backend.devices.device_detection import device_of
from qsync.distributed import job
from qsync.distributed.agreement import agree_locally, from_rank_zero
from qsync.distributed.data_parallel import in_ddp
from qsync.distributed.gradient_weighting import (
    check_passes,
    compress_gradients,
    note_share,
    set_share,
    warn_of_batch_norm,
)
from qsync.distributed.job_options import HybridOptions
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
from qsync.distributed.monitoring.step_log import StepLog
from qsync.distributed.monitoring.step_peak import StepPeak
from qsync.distributed.monitoring.step_phases import PhaseTimer
from qsync.distributed.shares import Share
from qsync.hybrid_training.framework_ddp import FirstCall
from qsync.hybrid_training.saved_plan import plan_and_save, write_report
from qsync.hybrid_training.shared_batches import hand_out_shares, that_can_be
from qsync.records.levers import ClassLevers
from qsync.records.plan_folder import Basis
from qsync.records.plans import Plan
from qsync.replayer import Recapture
from qsync.runtime.program import Program
from qsync.runtime.wrapping import swap_plan

# The timer of each model that a loop calls, for as long as that lives.
_timers: weakref.WeakKeyDictionary[torch.nn.Module, PhaseTimer] = weakref.WeakKeyDictionary()


@dataclass(frozen=True, slots=True)
class PlannedRank:
    """A rank's plan, its options, and where the plan was made.

    `plan` is None where nothing can be lowered or judged. `folder` holds the profiles; None for a given plan.
    """

    options: HybridOptions
    device_class: str
    plan: Plan | None
    folder: Path | None = None

    def wrap(self, model: torch.nn.Module, program: Program | None = None) -> None:
        """Rewrite the model for this rank's class, and let its sampler hand out the planned shares.

        `program` has traced this very model before.
        """
        plan, own = self.plan, self.device_class
        if plan is None:
            return
        is_first = job.is_first_of(own)
        agree_locally(
            "wrapping the model",
            lambda: api.wrap_as(model, plan, own, is_first, program, self.options.bitwise),
        )
        if self.options.sampler is not None:
            hand_out_shares(self.options.sampler, model, plan, own)
        if self.options.report is not None and self.folder is not None:
            from_rank_zero(
                "writing the report", partial(write_report, Path(self.options.report), plan, self.folder)
            )

    def watch(self, model: torch.nn.Module, log: Path | None) -> torch.nn.Module:
        """Return what the loop calls, and watch it: DDP, or the model without a job or with `ddp=False`."""
        prediction = self._prediction(self.plan)
        if prediction is not None:
            self._note(model, prediction)
        attend = partial(self._attend, prediction=prediction, log=log)
        if not dist.is_initialized():
            attend(model, model)
            return model
        if not self.options.ddp:
            if self.share.samples is not None:  # the loop cuts its first batch before its first call
                note_share(model, self.share.samples, self.share.passes)
            FirstCall(model, attend)
            return model
        parallel = self._in_ddp(model)
        attend(parallel, model)
        return parallel

    @property
    def share(self) -> ClassLevers:
        """This rank's share of the batch; without samples where all are equal."""
        share, sampler = self._levers, self.options.sampler
        if sampler is not None and not sampler.is_equal:
            share = replace(share, samples=sampler.share.samples)
        return share

    @property
    def _levers(self) -> ClassLevers:
        return self.plan.levers_of(self.device_class) if self.plan is not None else ClassLevers()

    def _prediction(self, plan: Plan | None) -> Prediction | None:
        """Return the prediction of a plan that was made here; None if it cannot be replayed."""
        return Prediction.of(plan, self.folder) if plan is not None and self.folder is not None else None

    def _note(self, model: torch.nn.Module, prediction: Prediction) -> None:
        """Keep the prediction with its model; on rank 0 print the reached rate after 20 steps."""
        note_prediction(model, prediction, self.device_class)
        if self.plan is not None and self.plan.verdict is not None and job.is_rank_zero():
            step_s = self.plan.step_s or 0.0
            samples = round(self.plan.verdict.ways[-1].samples_per_s * step_s)
            ReachedRate(model, samples, step_s, prediction.num_calls[self.device_class])

    def _in_ddp(self, model: torch.nn.Module) -> torch.nn.Module:
        plan, bucket_cap_mb = self.plan, self.options.bucket_cap_mb
        made: dict[str, Any] = {}
        if plan is not None:
            if bucket_cap_mb is None and plan.bucket_cap_bytes is not None:
                bucket_cap_mb = plan.bucket_cap_bytes / 2**20  # as the prediction assumes
            made = {"base": plan.base, "share": self._levers if plan.levers else None}
        return in_ddp(model, bucket_cap_mb, self.options.ddp_options, **made)

    def _attend(
        self,
        called: torch.nn.Module,
        model: torch.nn.Module,
        prediction: Prediction | None,
        log: Path | None,
    ) -> None:
        """Weigh the gradients of `called` (DDP or the model) as planned; watch, check and log its steps."""
        self._weigh(called)
        in_job = job.world_size() > 1
        check = self.options.check and prediction is not None
        if not (in_job or check or log is not None):
            return
        if in_job and prediction is not None:
            timer = Monitor(called, model, prediction, self.device_class).timer
        else:
            timer = PhaseTimer(called, model, STEPS_PER_COMPARISON)
        _timers[called] = timer
        if in_job:
            liveness.follow(timer.position)
        if check and prediction is not None:
            plan_again = partial(self._plan_again, prediction.phases)
            adopt = partial(self._adopt, weakref.ref(called), weakref.ref(model))
            timer.peak = StepPeak(device_of(model), prediction.memory[self.device_class].held)
            check_first_steps(timer, prediction, self.device_class, plan_again, adopt)
        if log is not None:
            StepLog(log, timer, called, self.device_class)

    def _weigh(self, called: torch.nn.Module) -> None:
        """Weigh gradients by this rank's share, and let them travel as asked or planned."""
        plan, share, sampler = self.plan, self.share, self.options.sampler
        captured = next((shape[0] for shape in plan.batch if shape), None) if plan is not None else None
        if captured is not None:
            note_share(called, sampler.share.samples if sampler is not None else captured)
        if not dist.is_initialized():
            return
        if share.samples is not None:
            if plan is not None and plan.levers is not None:
                check_passes(called, (levers.passes for levers in plan.levers.classes.values()))
            set_share(called, share.samples, share.passes, (captured or 1) * job.world_size())
            if self.folder is None:  # a plan that was made here has said so
                warn_of_batch_norm(called)
        planned = plan.compression if plan is not None else None
        compress_gradients(called, self.options.kinds or planned or None)

    def _plan_again(self, predicted: Measured, measured: Measured, beyond: Mapping[str, int]) -> Plan:
        """Return the plan of profiles corrected by the first steps; it replaces the cached one."""
        assert self.plan is not None and self.folder is not None, "there is something to check"
        basis, other = Basis.load(self.folder), Recapture.load(self.folder)
        if other is not None:
            of_other = corrected(replace(basis, profiles=other.profiles), predicted, measured, beyond)
            other = replace(other, profiles=of_other.profiles)
        basis = corrected(basis, predicted, measured, beyond)
        asked = {**self.options.plan_options, "base": str(self.plan.base)}
        options = that_can_be(asked, basis.cluster.classes)
        options |= {"other": other} if self.options.takes_samples else {}
        return plan_and_save(basis, self.folder, self.plan.bucket_cap_bytes, options)

    def _adopt(
        self,
        called: Callable[[], torch.nn.Module | None],
        model: Callable[[], torch.nn.Module | None],
        plan: Plan,
    ) -> None:
        """Run the model, which is in use, under another plan, and watch it against that plan's prediction.

        Where shares change, it does so as soon as the loop takes the first batch of the new ones.
        """
        trained, parallel, sampler = model(), called(), self.options.sampler
        assert trained is not None and parallel is not None, "its optimizer has just stepped"
        if sampler is None:
            self._switch(called, model, plan, None)
            return
        share, num_steps = hand_out_shares(sampler, trained, plan, self.device_class, later=True)
        has_shares = plan.levers is not None or (self.plan is not None and self.plan.levers is not None)
        weighed = share if has_shares and dist.is_initialized() else None
        _timers[parallel].after(num_steps, partial(self._switch, called, model, plan, weighed))

    def _switch(
        self,
        called: Callable[[], torch.nn.Module | None],
        model: Callable[[], torch.nn.Module | None],
        plan: Plan,
        share: Share | None,
    ) -> None:
        """Swap the plan of the model in use, and weigh its gradients by the new `share`."""
        trained, parallel, sampler = model(), called(), self.options.sampler
        assert trained is not None and parallel is not None
        agree_locally("changing the plan", lambda: swap_plan(trained, plan, self.device_class))
        if share is not None and sampler is not None:
            set_share(parallel, share.samples, share.passes, sampler.global_batch)
        prediction = self._prediction(plan)
        if prediction is not None:
            note_prediction(trained, prediction, self.device_class)
            monitor = monitors.get(parallel)
            if monitor is not None:
                monitor.expect(prediction)
