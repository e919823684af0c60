"""A running job against its prediction: where steps take longer, which rank and phase is to blame.

Now and then each rank publishes the medians of its phases in the job's store, and rank 0 compares. No rank
waits for another, and no collective is added.
"""

from __future__ import annotations

import json
import logging
import statistics
import weakref
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch.distributed as dist
from torch.distributed import distributed_c10d
from torch.nn.parallel import DistributedDataParallel

from qsync.distributed import step_phases
from qsync.distributed.agreement import from_rank_zero
from qsync.distributed.step_phases import Phases
from qsync.errors import QSyncError
from qsync.records.plan_folder import Basis
from qsync.records.plans import Plan
from qsync.replayer import Timeline, profiles_under_levers, replay

logger = logging.getLogger("qsync")

STEPS_PER_COMPARISON = 50
TOLERANCE = 0.1  # relative
_PHASE_NAMES = {"blocked": "communication", "loading": "data loading"}


@dataclass(frozen=True, slots=True)
class Drift:
    """A job that is slower than predicted, and the rank's phase to blame, measured and predicted."""

    step_s: float
    predicted_step_s: float
    rank: int
    device_class: str
    phase: str
    phase_s: float
    predicted_phase_s: float

    def __str__(self) -> str:
        late = self.step_s / self.predicted_step_s - 1.0
        return (
            f"a step takes {self.step_s * 1e3:.0f} ms, {late:.0%} longer than the predicted "
            f"{self.predicted_step_s * 1e3:.0f} ms: {self.phase} on rank {self.rank} ({self.device_class}) "
            f"takes {self.phase_s * 1e3:.0f} ms, predicted {self.predicted_phase_s * 1e3:.0f} ms; plan again "
            "if it stays so"
        )


def expected(timeline: Timeline) -> dict[str, Phases]:
    """Return the phases of every class as replay predicts them."""
    found = {}
    for name, entry in timeline.classes.items():
        own = [event for event in timeline.events if event.device_class == name]
        host = sum(event.duration_s for event in own if event.kind == "host")
        optimizer = sum(event.duration_s for event in own if event.kind == "optimizer")
        compute = entry.compute_s - entry.loading_s - host - optimizer + entry.slowed_s
        blocked = entry.exposed_s + entry.wait_s  # for buffers that DDP hands out, too
        found[name] = Phases(host, compute, blocked, optimizer, entry.loading_s)
    return found


def as_measurable(predicted: Phases, measured: Phases) -> Phases:
    """Return the predicted phases, split as the rank could measure them.

    If the rank measured no loading, the predicted loading time is added to the host's. If no loader was
    profiled, the predicted loading time is 0 and any measured loading counts as drift.
    """
    if measured.loading_s > 0.0:
        return predicted
    return replace(predicted, host_s=predicted.host_s + predicted.loading_s, loading_s=0.0)


def find_drift(
    predicted: Mapping[str, Phases],
    measured: Sequence[tuple[str, Phases]],
    tolerance: float = TOLERANCE,
) -> Drift | None:
    """Return which rank makes the step longer than predicted by more than `tolerance`, or None.

    `measured` is (class, median phases) by rank. A rank's own work is blamed before communication: ranks that
    wait for a slow one are blocked, but not to blame.
    """
    step_s = statistics.median(phases.period_s for _, phases in measured)
    planned_s = max(phases.period_s for phases in predicted.values())
    if step_s <= (1.0 + tolerance) * planned_s:
        return None
    planned_of = [as_measurable(predicted[name], phases) for name, phases in measured]
    excess = [
        (getattr(phases, f"{phase}_s") - getattr(planned_of[rank], f"{phase}_s"), rank, name, phase)
        for rank, (name, phases) in enumerate(measured)
        for phase in ("loading", "host", "compute", "optimizer")
    ]
    largest = max(excess)
    if largest[0] < 0.5 * (step_s - planned_s):
        # No rank's own work is to blame: report the rank whose blocked time exceeds its prediction least.
        largest = min(
            (phases.blocked_s - predicted[name].blocked_s, rank, name, "blocked")
            for rank, (name, phases) in enumerate(measured)
        )
    over_s, rank, name, phase = largest
    planned_phase_s = getattr(planned_of[rank], f"{phase}_s")
    return Drift(
        step_s, planned_s, rank, name, _PHASE_NAMES.get(phase, phase), planned_phase_s + over_s,
        planned_phase_s,
    )  # fmt: skip


class Monitor:
    """A watch over the steps of a model in DDP: rank 0 logs once when they drift from the prediction.

    >>> monitor = Monitor(ddp, expected(timeline), "infer")
    >>> monitor.drift            # on rank 0: the last drift, None if all is as predicted
    """

    def __init__(
        self,
        parallel: DistributedDataParallel,
        predicted: Mapping[str, Phases],
        device_class: str,
        num_steps: int = STEPS_PER_COMPARISON,
        tolerance: float = TOLERANCE,
    ) -> None:
        self.drift: Drift | None = None
        self._predicted, self._class, self._tolerance = dict(predicted), device_class, tolerance
        self._timer = step_phases.PhaseTimer(parallel, parallel.module, num_steps)
        self._timer.when_full = self._publish
        self._rank, self._world_size = dist.get_rank(), dist.get_world_size()
        store = distributed_c10d._get_default_store()
        self._store: Any = distributed_c10d.PrefixStore("qsync/drift", store)

    def stop(self) -> None:
        """Time no more steps."""
        self._timer.stop()

    def _publish(self) -> None:
        own = step_phases.median(self._timer.steps)
        self._timer.steps.clear()
        self._store.set(str(self._rank), json.dumps([self._class, own.to_json()]))
        if self._rank == 0:
            self._compare()

    def _compare(self) -> None:
        keys = [str(rank) for rank in range(self._world_size)]
        if not self._store.check(keys):  # some rank has not got so far yet: compare next time
            return
        entries = [json.loads(text) for text in self._store.multi_get(keys)]
        measured = [(name, Phases(**seconds)) for name, seconds in entries]
        found = find_drift(self._predicted, measured, self._tolerance)
        if found is not None and (
            self.drift is None or (found.rank, found.phase) != (self.drift.rank, self.drift.phase)
        ):
            logger.warning("qsync: %s", found)
        self.drift = found


# The monitor of each model, for as long as the model lives.
monitors: weakref.WeakKeyDictionary[DistributedDataParallel, Monitor] = weakref.WeakKeyDictionary()


def watch(parallel: DistributedDataParallel, plan: Plan, folder: Path, device_class: str) -> None:
    """Start a monitor of a model in DDP against its plan, whose basis rank 0 has in `folder`."""

    def predict() -> dict[str, dict[str, float]] | None:
        try:
            basis = Basis.load(folder)
            profiles = profiles_under_levers(basis.graph, basis.profiles, basis.cluster, plan.levers)
            timeline = replay(
                basis.graph, plan, profiles, basis.cluster, bucket_cap_bytes=plan.bucket_cap_bytes
            )
        except QSyncError:  # a cached plan whose profiles are gone: there is nothing to compare with
            return None
        return {name: phases.to_json() for name, phases in expected(timeline).items()}

    predicted = from_rank_zero("predicting the step", predict)
    if predicted is not None:
        phases = {name: Phases(**seconds) for name, seconds in predicted.items()}
        monitors[parallel] = Monitor(parallel, phases, device_class)
