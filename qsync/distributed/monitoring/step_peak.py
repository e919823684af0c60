"""Measure the peak memory of a job's real steps, to compare with the plan's prediction.

A prediction covers the profiled step. A loop may hold more (metrics, a second model, longer batches), and a
GPU's allocator loses bytes to fragments.
"""

from __future__ import annotations

import atexit
from collections.abc import Mapping
from contextlib import ExitStack
from dataclasses import dataclass
from itertools import accumulate

import torch

from qsync.predictor.profiling.allocator_events import allocator_events

_NEAR = 0.05  # a peak within this fraction of the budget may not fit: batches and fragments differ


@dataclass(frozen=True, slots=True)
class PredictedMemory:
    """Bytes of a class: the predicted peak with its margin, what steps leave in use, and the budget."""

    peak: int
    held: int
    budget: int

    def beyond(self, measured: int) -> int:
        """Return by how many bytes a measured peak exceeds the prediction, if it may not fit; else 0."""
        return max(0, measured - self.peak) if measured > (1 - _NEAR) * self.budget else 0

    def told(self, name: str, measured: int) -> str:
        """Return the sentence about a peak that was predicted too small."""
        taken, predicted, budget = (f"{n / 2**20:,.0f} MiB" for n in (measured, self.peak, self.budget))
        return f"a step of {name} takes {taken} where at most {predicted} were predicted, of {budget}"


class StepPeak:
    """Measures the most bytes in use within a step, from the third one on.

    The first steps allocate the optimizer's state and DDP's buckets. On a GPU all later steps count, with the
    fragments of torch's allocator; its cache is emptied and its peak statistics are reset once. On a CPU one
    step counts, by the allocator's events beyond `held` bytes. Nothing is measured inside a profiler of the
    user.

    >>> timer.peak = StepPeak(device, held=memory.held)    # of a PhaseTimer
    >>> ...                                                # train
    >>> timer.peak.num_bytes                               # None before the third step
    """

    def __init__(self, device: torch.device, held: int) -> None:
        self._device, self._held = device, held
        self._num_steps, self._most = 0, 0
        self._tracing = ExitStack()
        self._events: list[tuple[str, int]] = []

    @property
    def num_bytes(self) -> int | None:
        """Return the peak in bytes; None if none was measured."""
        if self._device.type == "cuda" and self._num_steps > 2:
            return torch.cuda.max_memory_reserved(self._device)
        return self._most or None

    def step_ended(self) -> None:
        """Begin measuring at the end of the second step; on a CPU end it with the third."""
        self._num_steps += 1
        if self._num_steps == 2:
            self._begin()
        elif self._num_steps == 3:
            self._end()

    def _begin(self) -> None:
        if self._device.type == "cuda":
            torch.cuda.empty_cache()
            torch.cuda.reset_peak_memory_stats(self._device)
        elif not torch._C._autograd._profiler_enabled():
            self._events = self._tracing.enter_context(allocator_events())
            atexit.register(self._tracing.close)  # stderr is held meanwhile: an error in this step is shown

    def _end(self) -> None:
        self._tracing.close()
        atexit.unregister(self._tracing.close)
        if self._events:
            self._most = self._held + max(accumulate((n for _, n in self._events), initial=0))


def largest(peaks: list[tuple[str, int | None]]) -> Mapping[str, int]:
    """Return the largest peak of each class's ranks, where one was measured."""
    found: dict[str, int] = {}
    for name, num_bytes in peaks:
        if num_bytes is not None:
            found[name] = max(num_bytes, found.get(name, 0))
    return found
