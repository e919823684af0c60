"""Print the samples per second of a job's first steps, once."""

from __future__ import annotations

import sys
import time
from typing import Any

import torch
from torch.optim.optimizer import register_optimizer_step_post_hook

from qsync.distributed.monitoring.step_phases import CallHook

NUM_STEPS, _NUM_WARM = 20, 3


class ReachedRate:
    """Counts a model's optimizer steps, and prints their speed after the first 20.

    `samples` is the job's samples per `num_calls` model calls on this rank; gradient accumulation repeats
    them within a step. Earlier steps, which trace the model, do not count. Only an optimizer of the model's
    first trained parameter counts.

    >>> ReachedRate(model, samples=256, predicted_s=0.8, num_calls=1)
    """

    def __init__(self, model: torch.nn.Module, samples: int, predicted_s: float, num_calls: int) -> None:
        self._name, self._first = type(model).__name__, next(p for p in model.parameters() if p.requires_grad)
        self._samples, self._predicted_s = samples / num_calls, predicted_s / num_calls
        self._num_called, self._calls = 0, CallHook(model, self._called)
        self._num_steps, self._began_s = 0, 0.0
        register_optimizer_step_post_hook(self._stepped)

    def _called(self) -> None:
        self._num_called += torch.is_grad_enabled()

    def _stepped(self, optimizer: torch.optim.Optimizer, *_: Any) -> None:
        if self._num_steps == _NUM_WARM + NUM_STEPS:
            return
        if not any(p is self._first for group in optimizer.param_groups for p in group["params"]):
            return
        self._num_steps += 1
        if self._num_steps == _NUM_WARM:
            self._began_s, self._num_called = time.perf_counter(), 0
        if self._num_steps < _NUM_WARM + NUM_STEPS:
            return
        self._calls.remove()
        rate = self._samples * self._num_called / (time.perf_counter() - self._began_s)
        predicted = self._samples / self._predicted_s
        print(
            f"qsync: {self._name}: {rate:.4g} samples per second in the first {NUM_STEPS} steps, including "
            f"the loop's own work ({rate / predicted - 1.0:+.0%} against the prediction)", file=sys.stderr,
        )  # fmt: skip
