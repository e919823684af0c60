"""Compare a running job with its prediction; name the rank and phase of slow steps.

Periodically each rank publishes the medians of its phases in the job's store. Rank 0 compares one step later:
that step needed all gradients, so all ranks have published. No rank waits for another, and no collective is
added.

Medians miss a stall in every tenth step. So means are compared as well; a single pause raises them, too, so
they must be higher in two comparisons in a row.

Machines have slow seconds (a neighbouring virtual machine, heat). A job drifts only if it stays slower for
`LASTING_S` seconds: no comparison is below half of the tolerance, and the phases of all of them together,
which show the rank to blame, exceed the tolerance. If the machines of all ranks are slower than when
profiled, no rank is to blame: see `slowdown`.

A prediction covers the profiled step. A step with several times as many model calls (gradient accumulation)
is compared with a multiple of the profiled passes. Nothing is compared if the loop also trains something else
in the step (a GAN's other network), or calls the model in another pattern.
"""

from __future__ import annotations

import json
import logging
import statistics
import weakref
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import count, islice
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed import distributed_c10d

from qsync.backend.devices.device_detection import device_of
from qsync.distributed.agreement import from_rank_zero
from qsync.distributed.monitoring.step_peak import PredictedMemory, StepPeak
from qsync.distributed.monitoring.step_phases import PhaseTimer
from qsync.errors import QSyncError
from qsync.predictor.memory.peak import bytes_throughout
from qsync.records.plan_folder import Basis
from qsync.records.plans import Plan
from qsync.replayer import Recapture, replay, under_levers
from qsync.replayer.costs.sequence_costs import SequenceCost, sequence_costs
from qsync.replayer.explanation.phases import (
    TOLERANCE,
    Drift,
    Phases,
    expected,
    find_drift,
    mean,
    median,
    slowdown,
)
from qsync.runtime.wrapping import wrapped_module

logger = logging.getLogger("qsync")

STEPS_PER_COMPARISON = 50
LASTING_S = 30.0


@dataclass(frozen=True, slots=True)
class Prediction:
    """Predictions of replay for a job, by class: phases of a step, a rank's model calls per step, memory.

    `sequence_costs` is None if the batch is not of sequences.
    """

    phases: Mapping[str, Phases]
    num_calls: Mapping[str, int]
    sequence_costs: Mapping[str, SequenceCost] | None = None
    memory: Mapping[str, PredictedMemory] = field(default_factory=dict)

    @classmethod
    def of(cls, plan: Plan, folder: Path) -> Prediction | None:
        """Return the prediction of a plan from the basis in rank 0's `folder`; None without one."""

        def predict() -> dict[str, Any] | None:
            try:
                basis = under_levers(Basis.load(folder), plan.levers, Recapture.load(folder))
                timeline = replay(
                    basis.graph, plan, basis.profiles, basis.cluster, bucket_cap_bytes=plan.bucket_cap_bytes
                )
            except QSyncError as error:  # e.g. the profiles of a cached plan are gone
                logger.warning("steps are not compared with a prediction: %s", error)
                return None
            costs = sequence_costs(basis.graph, timeline, basis.profiles)
            calls = basis.graph.num_calls
            held = bytes_throughout(basis.graph)
            return {
                "memory": {
                    c.name: [
                        timeline[c.name].memory_bytes,
                        held + basis.profiles[c.name].optimizer_bytes,
                        plan.budgets.get(c.name, c.memory_bytes),
                    ]
                    for c in basis.cluster.classes
                },
                "phases": {name: phases.to_json() for name, phases in expected(timeline).items()},
                "num_calls": {name: calls * plan.levers_of(name).passes for name in plan.classes},
                "sequence_costs": costs and {name: cost.to_json() for name, cost in costs.items()},
            }

        found = from_rank_zero("predicting the step", predict)
        if found is None:
            return None
        costs = found["sequence_costs"]
        return cls(
            {name: Phases(**seconds) for name, seconds in found["phases"].items()},
            found["num_calls"],
            costs and {name: SequenceCost(**fields) for name, fields in costs.items()},
            {name: PredictedMemory(*each) for name, each in found["memory"].items()},
        )

    def repeated(self, times: int) -> dict[str, Phases]:
        """Return the phases of a step that repeats the profiled passes several times."""
        return {
            name: replace(
                one,
                host_s=one.host_s * times,
                compute_s=one.compute_s * times,
                forward_s=one.forward_s * times,
                loading_s=one.loading_s * times,
            )
            for name, one in self.phases.items()
        }


def times_profiled(timer: PhaseTimer, prediction: Prediction, device_class: str) -> tuple[int, str]:
    """Return how often a step repeats the profiled calls; 0 and the reason if not comparable."""
    num_calls, profiled = statistics.median_low(timer.num_calls), prediction.num_calls[device_class]
    if timer.others:
        return 0, f"{', '.join(sorted(timer.others))} trains in the same step"
    if num_calls % profiled:
        return 0, f"a step calls the model {num_calls} times, the profiled one {profiled} times"
    return num_calls // profiled, ""


ByRank = Sequence[tuple[str, Phases]]


class SlowStretch:
    """Consecutive comparisons that found a job slower than predicted, over `seconds` in total.

    A stretch begins with a comparison beyond the tolerance, and ends with one within half of it. `combine`
    merges the phases of several comparisons; a drift needs at least `least` of them.
    """

    def __init__(self, combine: Callable[[Sequence[Phases]], Phases], least: int) -> None:
        self.seconds = 0.0
        self._combine, self._least = combine, least
        self._found: deque[tuple[ByRank, float]] = deque()

    def add(
        self,
        predicted: Mapping[str, Phases],
        measured: ByRank,
        seconds: float,
        lasting_s: float,
        tolerance: float,
    ) -> Drift | None:
        """Add a comparison over `seconds`; return a drift if the stretch is long enough.

        The last `lasting_s` seconds decide which rank is to blame.
        """
        if find_drift(predicted, measured, tolerance / 2 if self._found else tolerance) is None:
            self.end()
            return None
        self.seconds += seconds
        self._found.append((measured, seconds))
        while (
            len(self._found) > self._least
            and sum(took for _, took in islice(self._found, 1, None)) >= lasting_s
        ):
            self._found.popleft()
        if len(self._found) < self._least or self.seconds < lasting_s:
            return None
        by_rank = zip(*(one for one, _ in self._found), strict=True)
        together = [(entries[0][0], self._combine([phases for _, phases in entries])) for entries in by_rank]
        return find_drift(predicted, together, tolerance)

    def end(self) -> None:
        """Reset the stretch."""
        self.seconds = 0.0
        self._found.clear()


class Monitor:
    """Watches a model's steps; rank 0 logs once when they drift from the prediction.

    The loop calls `model`: the module `trained`, or DDP around it. A drift lasts at least `lasting_s`.

    >>> monitor = Monitor(ddp, ddp.module, prediction, "infer")
    >>> monitor.drift            # on rank 0: the last drift, None if all is as predicted
    >>> monitor.slowdown         # on rank 0: how many times slower all machines are than when profiled
    >>> monitor.incomparable     # why nothing is compared, empty if it is
    """

    def __init__(
        self,
        model: torch.nn.Module,
        trained: torch.nn.Module,
        prediction: Prediction,
        device_class: str,
        num_steps: int = STEPS_PER_COMPARISON,
        tolerance: float = TOLERANCE,
    ) -> None:
        self.drift: Drift | None = None
        self.incomparable = ""
        self.slowdown = 1.0
        self.lasting_s = LASTING_S
        self._stretches = (SlowStretch(median, 1), SlowStretch(mean, 2))
        self._prediction, self._class, self._tolerance = prediction, device_class, tolerance
        self.timer = PhaseTimer(model, trained, num_steps)
        if device_of(trained).type == "cuda":  # on a CPU it would trace a step
            self.timer.peak = StepPeak(device_of(trained), 0)
        self.timer.when_full = self._publish
        self._rank, self._world_size = dist.get_rank(), dist.get_world_size()
        self._num_published = 0
        store = distributed_c10d._get_default_store()
        key = f"qsync/drift/{next(_numbers)}"  # equal on all ranks, which wrap models in the same order
        self._store: Any = distributed_c10d.PrefixStore(key, store)
        monitors[model] = self

    def stop(self) -> None:
        """Stop timing steps."""
        self.timer.stop()

    @property
    def slow_s(self) -> float:
        """Return the seconds for which every comparison has found the job slower than predicted."""
        return max(stretch.seconds for stretch in self._stretches)

    def expect(self, prediction: Prediction) -> None:
        """Replace the prediction to compare with."""
        self._prediction = prediction
        self._forget("")

    def _publish(self) -> None:
        self._warn_of_peak()
        own = [of(self.timer.steps).to_json() for of in (median, mean)]
        times, self.incomparable = times_profiled(self.timer, self._prediction, self._class)
        seconds = sum(phases.period_s for phases in self.timer.steps)
        self._num_published += 1
        self._store.set(str(self._rank), json.dumps([self._num_published, times, self._class, seconds, *own]))
        if self._rank == 0:
            self.timer.when_resumed = self._compare

    def _warn_of_peak(self) -> None:
        """Log once on this rank if its peak was predicted too small and may not fit."""
        memory = self._prediction.memory.get(self._class)
        peak, self.timer.peak = self.timer.peak, None
        num_bytes = peak.num_bytes if peak is not None else None
        if memory is None or num_bytes is None:
            return
        if memory.beyond(num_bytes):
            logger.warning(
                "qsync: %s; hybrid(check=True) plans again by that, or give budgets={%r: %d}",
                memory.told(self._class, num_bytes), self._class, memory.budget - memory.beyond(num_bytes),
            )  # fmt: skip

    def _compare(self) -> None:
        self.timer.when_resumed = None
        keys = [str(rank) for rank in range(self._world_size)]
        texts = self._store.multi_get(keys) if self._store.check(keys) else []
        entries = [json.loads(text) for text in texts]
        if {number for number, *_ in entries} != {self._num_published}:
            self._forget("ranks take different numbers of steps")
            return
        times = {times for _, times, *_ in entries}
        if times == {0} or len(times) > 1:
            self._forget(self.incomparable or "ranks call the model in different patterns")
            return
        predicted = self._prediction.repeated(*times)
        seconds = max(seconds for _, _, _, seconds, _, _ in entries)
        medians = [(name, Phases(**one)) for _, _, name, _, one, _ in entries]
        means = [(name, Phases(**one)) for _, _, name, _, _, one in entries]
        self.slowdown = slowdown(predicted, medians)
        drifts = [
            stretch.add(predicted, measured, seconds, self.lasting_s, self._tolerance)
            for stretch, measured in zip(self._stretches, (medians, means), strict=True)
        ]
        found = next(filter(None, drifts), None)
        if found is not None and not found.blames_same(self.drift):
            logger.warning("qsync: %s", found)
        self.drift = found

    def _forget(self, incomparable: str) -> None:
        self.drift, self.incomparable, self.slowdown = None, incomparable, 1.0
        for stretch in self._stretches:
            stretch.end()


_numbers = count()
_predictions: weakref.WeakKeyDictionary[torch.nn.Module, tuple[Prediction, str]] = weakref.WeakKeyDictionary()


def note_prediction(model: torch.nn.Module, prediction: Prediction, device_class: str) -> None:
    """Remember a planned model's prediction, and this rank's class."""
    _predictions[model] = (prediction, device_class)


def prediction_of(model: torch.nn.Module) -> tuple[Prediction, str] | None:
    """Return the prediction of a planned model (or of the model in DDP), and this rank's class."""
    return _predictions.get(wrapped_module(model))


# The monitor of each called model (DDP, or the plain model), as long as it lives.
monitors: weakref.WeakKeyDictionary[torch.nn.Module, Monitor] = weakref.WeakKeyDictionary()
