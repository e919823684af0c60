"""A running job against its prediction: if steps take longer, which rank and phase is to blame.

Ranks say now and then, through the job's store, how long their phases take; rank 0 compares. Nothing waits
for anybody, and no collective is added.
"""

from __future__ import annotations

import json
import logging
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed import distributed_c10d

from qsync.distributed import step_phases
from qsync.distributed.step_phases import Phases
from qsync.replayer import Timeline

logger = logging.getLogger("qsync")

EVERY = 50
TOLERANCE = 0.1
_SHOWN = {"blocked": "communication", "loading": "data loading"}


@dataclass(frozen=True, slots=True)
class Drift:
    """A job that is slower than predicted, and where: a rank's phase, measured and predicted seconds."""

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
    """The phases of every class as replay predicts them."""
    found = {}
    for name, entry in timeline.classes.items():
        own = [event for event in timeline.events if event.device_class == name]
        host = sum(event.duration_s for event in own if event.kind == "host")
        optimizer = sum(event.duration_s for event in own if event.kind == "optimizer")
        compute = entry.compute_s - entry.loading_s - host - optimizer + entry.slowed_s
        blocked = entry.exposed_s + entry.wait_s  # for buffers that DDP hands out, too
        found[name] = Phases(host, compute, blocked, optimizer, entry.loading_s)
    return found


def as_seen(predicted: Phases, measured: Phases) -> Phases:
    """What was predicted, by the phases that a rank can tell apart: where nobody saw its loader, what was
    predicted of it is to be looked for in the host's part; and where no loader was profiled, what is seen of
    one is all new.
    """
    if measured.loading_s > 0.0:
        return predicted
    return replace(predicted, host_s=predicted.host_s + predicted.loading_s, loading_s=0.0)


def judge(
    predicted: Mapping[str, Phases],
    measured: Sequence[tuple[str, Phases]],
    tolerance: float = TOLERANCE,
) -> Drift | None:
    """Who makes the step longer than predicted by more than `tolerance`; None if it is not. Pure.

    `measured` is (class, median phases) by rank. Work of a rank's own is blamed before communication: ranks
    that wait for a slow one are blocked, but not to blame.
    """
    step = statistics.median(steps.period_s for _, steps in measured)
    planned = max(steps.period_s for steps in predicted.values())
    if step <= (1.0 + tolerance) * planned:
        return None
    planned_of = [as_seen(predicted[name], steps) for name, steps in measured]
    excess = [
        (getattr(steps, f"{phase}_s") - getattr(planned_of[rank], f"{phase}_s"), rank, name, phase)
        for rank, (name, steps) in enumerate(measured)
        for phase in ("loading", "host", "compute", "optimizer")
    ]
    most = max(excess)
    if most[0] < 0.5 * (step - planned):  # nobody's own work: what is left is the least blocked rank's wait
        most = min(
            (steps.blocked_s - predicted[name].blocked_s, rank, name, "blocked")
            for rank, (name, steps) in enumerate(measured)
        )
    over, rank, name, phase = most
    own = getattr(planned_of[rank], f"{phase}_s")
    return Drift(step, planned, rank, name, _SHOWN.get(phase, phase), own + over, own)


class Monitor:
    """Watches the steps of a model in DDP and, on rank 0, says once when they drift from the prediction.

    >>> monitor = Monitor(ddp, ddp.module, expected(timeline), "infer")
    >>> monitor.drift            # on rank 0: what was last seen, None if all is as predicted
    """

    def __init__(
        self,
        model: torch.nn.Module,
        trained: torch.nn.Module,
        predicted: Mapping[str, Phases],
        device_class: str,
        every: int = EVERY,
        tolerance: float = TOLERANCE,
    ) -> None:
        self.drift: Drift | None = None
        self._predicted, self._class, self._tolerance = dict(predicted), device_class, tolerance
        self._timer = step_phases.PhaseTimer(model, trained, kept=every)
        self._timer.when_full = self._publish
        self._rank, self._world_size = dist.get_rank(), dist.get_world_size()
        self._store: Any = dist.PrefixStore("qsync/drift", distributed_c10d._get_default_store())

    def stop(self) -> None:
        """Watch no more."""
        self._timer.stop()

    def _publish(self) -> None:
        own = step_phases.median(self._timer.steps)
        self._timer.steps.clear()
        self._store.set(str(self._rank), json.dumps([self._class, own.to_json()]))
        if self._rank == 0:
            self._compare()

    def _compare(self) -> None:
        keys = [str(rank) for rank in range(self._world_size)]
        if not self._store.check(keys):  # somebody has not got so far yet: next time
            return
        entries = [json.loads(text) for text in self._store.multi_get(keys)]
        found = judge(self._predicted, [(name, Phases(**steps)) for name, steps in entries], self._tolerance)
        if found is not None and (
            self.drift is None or (found.rank, found.phase) != (self.drift.rank, self.drift.phase)
        ):
            logger.warning("qsync: %s", found)
        self.drift = found
