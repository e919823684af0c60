"""One step of an elastic job on this card, and the checks that a training loop uses it whole."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import nullcontext
from typing import Any, Protocol

import torch

from qsync.distributed.shares import Share
from qsync.elastic_training.elastic_ddp import ElasticDDP
from qsync.elastic_training.share_loader import ShareLoader
from qsync.errors import FormatError


class Job(Protocol):
    """The job of a step: its model and loader, and the end of a step's exchange."""

    model: ElasticDDP
    _loader: ShareLoader

    def _finish(self, step: ElasticStep) -> bool: ...


class ElasticStep:
    """One step on this card: iterate over its micro-batches, then check `arrived`."""

    def __init__(self, job: Job, number: int, share: Share, is_behind: bool) -> None:
        self._job, self._share = job, share
        self.number = number
        self.is_behind = is_behind
        self.samples = share.samples
        self.began_s = time.perf_counter()
        self.outcome: bool | None = None
        self.num_taken = 0  # micro-batches so far

    def __iter__(self) -> Iterator[Any]:
        """Yield this card's micro-batches; run forward and backward of each before the next."""
        if self.num_taken:
            raise FormatError("the training loop iterates over a step twice; use each micro-batch once")
        for k in range(self.num_passes):
            batch = self._job._loader.next_batch()
            self.num_taken += 1
            with nullcontext() if k == self.num_passes - 1 else self._job.model.no_sync():
                yield batch

    @property
    def num_passes(self) -> int:
        """Return the number of micro-batches."""
        return self._share.passes

    def arrived(self) -> bool:
        """Return whether the gradients are the mean over all samples; call it after backward.

        If a card was lost, they are not: skip the optimizer, and the step is repeated.
        """
        if self.outcome is None:
            self.outcome = self._job._finish(self)
        return self.outcome


class LoopChecks:
    """Raise FormatError where a training loop skips a part of a step, or steps on incomplete gradients."""

    def __init__(self, model: ElasticDDP, optimizer: torch.optim.Optimizer) -> None:
        self._model = model
        self._present: ElasticStep | None = None
        self._has_stepped = True  # whether the optimizer has stepped since gradients arrived
        self._hook = optimizer.register_step_pre_hook(self._check_order)

    def begin(self, step: ElasticStep) -> ElasticStep:
        """Check this step from now on, and return it."""
        self._present = step
        return step

    def note_arrival(self) -> None:
        """Expect a step of the optimizer: gradients have arrived."""
        self._has_stepped = False

    def check_whole(self, step: ElasticStep) -> None:
        """Raise FormatError if the loop skipped a part of the step."""
        hook = self._model.hook
        if step.num_taken < step.num_passes:
            raise FormatError(
                f"the training loop used {step.num_taken} of {step.num_passes} micro-batches of the step; "
                "write `for batch in step:` without break"
            )
        if not hook.is_complete:
            raise FormatError(
                "backward did not reach all parameters; call job.model in the loss, run backward of every "
                "micro-batch, and freeze unused parameters (requires_grad_(False)) before qsync.elastic"
            )
        if step.num_passes > 1 and hook.num_reduced > 1:
            raise FormatError(
                f"gradients were exchanged {hook.num_reduced} times in a step of {step.num_passes} "
                "micro-batches; run forward and backward of each once, before the next"
            )

    def end(self, step: ElasticStep) -> None:
        """Raise FormatError if the loop ends the step unchecked, or left its gradients unused."""
        if step.outcome is None:
            raise FormatError(
                "the training loop did not check step.arrived(); write `if step.arrived(): optimizer.step()`"
            )
        self._present = None
        if not self._has_stepped and self._holds_gradients():
            raise FormatError(
                "the optimizer did not step although gradients arrived, and the next step would add to "
                "them; call optimizer.step() and zero_grad() in every step, and accumulate by batch_size "
                "and max_samples instead"
            )
        self._has_stepped = True

    def close(self) -> None:
        """End the checks, so that the optimizer holds no reference to a finished job."""
        self._present = None
        self._hook.remove()

    def _holds_gradients(self) -> bool:
        """Return whether finite gradients remain; a GradScaler skips only non-finite ones."""
        found = [parameter.grad for parameter in self._model.parameters() if parameter.grad is not None]
        return any(bool(each.any()) for each in found) and all(bool(each.isfinite().all()) for each in found)

    def _check_order(self, *_: Any) -> None:
        """Raise FormatError for an optimizer step on gradients that did not arrive."""
        if self._present is not None and not self._present.outcome:
            raise FormatError(
                "the optimizer would step on incomplete gradients; write `if step.arrived(): "
                "optimizer.step()`"
            )
        self._has_stepped = True
