"""A running job against its prediction: where steps take longer, which rank and phase is to blame.

Now and then each rank publishes the medians of its phases in the job's store. Rank 0 compares one step
later: that step has gradients of all ranks, so all have published theirs by then. No rank waits for another,
and no collective is added.

Medians do not see a stall in every tenth step. So means are compared as well; a single pause makes them
longer, too, and one rank and phase must be to blame for them twice in a row.

A prediction is of the profiled step. A step that calls the model several times as often (gradient
accumulation) is compared with as many times the profiled passes. Nothing is compared where the loop also
trains something else in the step (a GAN's other network), or calls the model in another pattern.
"""

from __future__ import annotations

import itertools
import json
import logging
import statistics
import weakref
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed import distributed_c10d

from qsync.distributed.agreement import from_rank_zero
from qsync.distributed.step_phases import PhaseTimer
from qsync.errors import QSyncError
from qsync.records.plan_folder import Basis
from qsync.records.plans import Plan
from qsync.replayer import profiles_under_levers, replay
from qsync.replayer.costs.sequence_costs import SequenceCost, sequence_costs
from qsync.replayer.explanation.phases import TOLERANCE, Drift, Phases, expected, find_drift, mean, median
from qsync.runtime.wrapping import wrapped_module

logger = logging.getLogger("qsync")

STEPS_PER_COMPARISON = 50


@dataclass(frozen=True, slots=True)
class Prediction:
    """What replay predicts of a job: by class the phases of a step, and a rank's calls of the model in it.

    `sequence_costs` are by class, too; None where the batch is not of sequences.
    """

    phases: Mapping[str, Phases]
    num_calls: Mapping[str, int]
    sequence_costs: Mapping[str, SequenceCost] | None = None

    @classmethod
    def of(cls, plan: Plan, folder: Path) -> Prediction | None:
        """Return the prediction of a plan whose basis rank 0 has in `folder`; None where it has none."""

        def predict() -> dict[str, Any] | None:
            try:
                basis = Basis.load(folder)
                profiles = profiles_under_levers(basis.graph, basis.profiles, basis.cluster, plan.levers)
                timeline = replay(
                    basis.graph, plan, profiles, basis.cluster, bucket_cap_bytes=plan.bucket_cap_bytes
                )
            except QSyncError:  # a cached plan whose profiles are gone: there is nothing to compare with
                return None
            costs = sequence_costs(basis.graph, timeline, profiles)
            calls = basis.graph.num_calls
            return {
                "phases": {name: phases.to_json() for name, phases in expected(timeline).items()},
                "num_calls": {
                    name: calls * (plan.levers[name].passes if plan.levers else 1) for name in plan.classes
                },
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
        )

    def repeated(self, times: int) -> dict[str, Phases]:
        """Return the phases of a step that takes the profiled passes several times."""
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
    """Return how many times a timed step takes the profiled calls; 0, and why, if it cannot be compared."""
    num_calls, profiled = statistics.median_low(timer.num_calls), prediction.num_calls[device_class]
    if timer.others:
        return 0, f"{', '.join(sorted(timer.others))} trains in the same step"
    if num_calls % profiled:
        return 0, f"a step calls the model {num_calls} times, the profiled one {profiled} times"
    return num_calls // profiled, ""


class Monitor:
    """A watch over the steps of a model: rank 0 logs once when they drift from the prediction.

    `model` is what the loop calls: the model `trained`, or DDP around it.

    >>> monitor = Monitor(ddp, ddp.module, prediction, "infer")
    >>> monitor.drift            # on rank 0: the last drift, None if all is as predicted
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
        self._of_means: Drift | None = None  # the last one
        self._prediction, self._class, self._tolerance = prediction, device_class, tolerance
        self.timer = PhaseTimer(model, trained, num_steps)
        self.timer.when_full = self._publish
        self._rank, self._world_size = dist.get_rank(), dist.get_world_size()
        self._num_published = 0
        store = distributed_c10d._get_default_store()
        key = f"qsync/drift/{next(_numbers)}"  # ranks wrap models in the same order
        self._store: Any = distributed_c10d.PrefixStore(key, store)
        monitors[model] = self

    def stop(self) -> None:
        """Time no more steps."""
        self.timer.stop()

    def _publish(self) -> None:
        own = [of(self.timer.steps).to_json() for of in (median, mean)]
        times, self.incomparable = times_profiled(self.timer, self._prediction, self._class)
        self._num_published += 1
        self._store.set(str(self._rank), json.dumps([self._num_published, times, self._class, *own]))
        if self._rank == 0:
            self.timer.when_resumed = self._compare

    def expect(self, prediction: Prediction) -> None:
        """Compare with another prediction from now on."""
        self._prediction = prediction

    def _compare(self) -> None:
        self.timer.when_resumed = None
        keys = [str(rank) for rank in range(self._world_size)]
        texts = self._store.multi_get(keys) if self._store.check(keys) else []
        entries = [json.loads(text) for text in texts]
        if {number for number, *_ in entries} != {self._num_published}:
            self.incomparable, self.drift = "ranks take different numbers of steps", None
            return
        times = {times for _, times, *_ in entries}
        if times == {0} or len(times) > 1:
            self.incomparable = self.incomparable or "ranks call the model in different patterns"
            self.drift = None
            return
        predicted = self._prediction.repeated(*times)
        medians = [(name, Phases(**seconds)) for *_, name, seconds, _ in entries]
        means = [(name, Phases(**seconds)) for *_, name, _, seconds in entries]
        found = find_drift(predicted, medians, self._tolerance)
        of_means, self._of_means = self._of_means, find_drift(predicted, means, self._tolerance)
        if found is None and _same_blame(of_means, self._of_means):
            found = self._of_means
        if found is not None and not _same_blame(found, self.drift):
            logger.warning("qsync: %s", found)
        self.drift = found


def _same_blame(one: Drift | None, other: Drift | None) -> bool:
    return one is not None and other is not None and (one.rank, one.phase) == (other.rank, other.phase)


_numbers = itertools.count()
_predictions: weakref.WeakKeyDictionary[torch.nn.Module, tuple[Prediction, str]] = weakref.WeakKeyDictionary()


def note_prediction(model: torch.nn.Module, prediction: Prediction, device_class: str) -> None:
    """Remember what is predicted of a planned model, and this rank's class."""
    _predictions[model] = (prediction, device_class)


def prediction_of(model: torch.nn.Module) -> tuple[Prediction, str] | None:
    """Return what is predicted of a planned model, or of the one in DDP, and this rank's class."""
    return _predictions.get(wrapped_module(model))


# The monitor of each model that a loop calls (DDP, or the model), for as long as that lives.
monitors: weakref.WeakKeyDictionary[torch.nn.Module, Monitor] = weakref.WeakKeyDictionary()
