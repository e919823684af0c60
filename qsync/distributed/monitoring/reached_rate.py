"""What a job really reaches: the samples per second of its first steps, said once."""

from __future__ import annotations

import sys
import time
from typing import Any

import torch
from torch.optim.optimizer import register_optimizer_step_post_hook

NUM_STEPS, _NUM_WARM = 20, 3


class ReachedRate:
    """A count of the optimizer steps of a model; after the first 20 a line says how fast they were.

    `samples` are those of a step of the whole job. The steps before, which trace the model, do not count. An
    optimizer counts if it holds the model's first trained parameter.

    >>> ReachedRate(model, samples=256, predicted_s=0.8)
    """

    def __init__(self, model: torch.nn.Module, samples: int, predicted_s: float) -> None:
        self._name, self._first = type(model).__name__, next(p for p in model.parameters() if p.requires_grad)
        self._samples, self._predicted_s = samples, predicted_s
        self._num_steps, self._began_s = 0, 0.0
        register_optimizer_step_post_hook(self._stepped)

    def _stepped(self, optimizer: torch.optim.Optimizer, *_: Any) -> None:
        if self._num_steps == _NUM_WARM + NUM_STEPS:
            return
        if not any(p is self._first for group in optimizer.param_groups for p in group["params"]):
            return
        self._num_steps += 1
        if self._num_steps == _NUM_WARM:
            self._began_s = time.perf_counter()
        if self._num_steps < _NUM_WARM + NUM_STEPS:
            return
        step_s = (time.perf_counter() - self._began_s) / NUM_STEPS
        rate, predicted = self._samples / step_s, self._samples / self._predicted_s
        print(
            f"qsync: {self._name}: {rate:.4g} samples per second in the first {NUM_STEPS} steps, the loop's "
            f"own work included ({rate / predicted - 1.0:+.0%} to the prediction)", file=sys.stderr,
        )  # fmt: skip
