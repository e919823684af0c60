"""The predicted phases of a step on each rank, and the phase to blame if a job is slower. Pure.

A step, as a rank sees it, from one optimizer step to the next:

    loading     the wait for the next batch before a pass, if a torch DataLoader serves it
    compute     forward, loss and backward of every pass, to this rank's own last gradient
    blocked     from this rank's own last gradient to the end of backward (communication, and waiting for
                other ranks), plus, before forward, the time in which DDP broadcasts buffers (running
                statistics)
    optimizer   the optimizer's step, without a closure's passes
    host        all other time (zero_grad, clipping, logs)

`period_s` is the sum of all phases.

A machine may be slower than when it was profiled (heat, other virtual machines on its host). A slowdown that
all ranks share is no rank's fault, and planning again would not remove it. See `slowdown`.
"""

from __future__ import annotations

import statistics
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, fields, replace

from qsync.records.record_json import Record
from qsync.replayer.events import LAUNCHES
from qsync.replayer.timeline import Timeline

TOLERANCE = 0.1  # of the predicted step: a longer excess is a drift
_PHASE_NAMES = {"blocked": "communication", "loading": "data loading"}


@dataclass(frozen=True, slots=True)
class Phases(Record):
    """Seconds of a step on a rank, by phase. `forward_s` is the part of `compute_s` in the model's call.

    `optimizer_cpu_s` are the CPU seconds of the optimizer's step; 0 if it runs on a GPU.
    """

    host_s: float
    compute_s: float
    blocked_s: float
    optimizer_s: float
    loading_s: float = 0.0
    forward_s: float = 0.0
    optimizer_cpu_s: float = 0.0

    @property
    def backward_s(self) -> float:
        """Return the seconds of the loss after the model's call, and of backward."""
        return self.compute_s - self.forward_s

    @property
    def period_s(self) -> float:
        """Return the seconds of the whole step."""
        return self.host_s + self.loading_s + self.compute_s + self.blocked_s + self.optimizer_s


def median(steps: Iterable[Phases]) -> Phases:
    """Return the median of each phase over steps; raise statistics.StatisticsError without any step."""
    taken = list(steps)
    return Phases(*(statistics.median(getattr(step, f.name) for step in taken) for f in fields(Phases)))


def mean(steps: Iterable[Phases]) -> Phases:
    """Return the mean of each phase over steps, which unlike the median includes rare pauses."""
    taken = list(steps)
    return Phases(*(statistics.fmean(getattr(step, f.name) for step in taken) for f in fields(Phases)))


@dataclass(frozen=True, slots=True)
class Drift:
    """A slower job than predicted, and the rank and phase to blame: measured and predicted seconds."""

    step_s: float
    predicted_step_s: float
    rank: int
    device_class: str
    phase: str
    phase_s: float
    predicted_phase_s: float
    slowdown: float = 1.0  # of all machines since profiling; the predicted seconds include it

    def blames_same(self, other: Drift | None) -> bool:
        """Return whether another drift blames the same rank and phase."""
        return other is not None and (self.rank, self.phase) == (other.rank, other.phase)

    def __str__(self) -> str:
        late = self.step_s / self.predicted_step_s - 1.0
        slower = f", on machines {self.slowdown:.2f} times slower than profiled" if self.slowdown > 1 else ""
        return (
            f"a step takes {self.step_s * 1e3:.0f} ms, {late:.0%} longer than the predicted "
            f"{self.predicted_step_s * 1e3:.0f} ms: {self.phase} on rank {self.rank} ({self.device_class}) "
            f"takes {self.phase_s * 1e3:.0f} ms, predicted {self.predicted_phase_s * 1e3:.0f} ms{slower}; "
            "if it stays so, plan again: restart with cache_dir= another folder"
        )


def expected(timeline: Timeline) -> dict[str, Phases]:
    """Return the phases of every class as replay predicts them.

    Waits for kernel launches in forward and backward count as compute, as a rank measures them.
    """
    found = {}
    for name, entry in timeline.classes.items():
        own = [event for event in timeline.events if event.device_class == name]
        host = sum(e.duration_s for e in own if e.kind == "host" and not e.name.startswith(LAUNCHES))
        optimizer = sum(event.duration_s for event in own if event.kind == "optimizer")
        forward = sum(event.duration_s for event in own if event.phase == "forward" or event.name == LAUNCHES)
        compute = entry.compute_s - entry.loading_s - host - optimizer + entry.slowed_s
        blocked = entry.exposed_s + entry.wait_s  # includes DDP's broadcast of buffers
        found[name] = Phases(host, compute, blocked, optimizer, entry.loading_s, forward)
    return found


def as_measurable(predicted: Phases, measured: Phases) -> Phases:
    """Return the predicted phases, with loading as a part of the host's if the rank measured none.

    If no loader was profiled, the predicted loading time is 0 and any measured loading counts as drift.
    """
    if measured.loading_s > 0.0:
        return predicted
    return replace(predicted, host_s=predicted.host_s + predicted.loading_s, loading_s=0.0)


def slowdown(predicted: Mapping[str, Phases], measured: Sequence[tuple[str, Phases]]) -> float:
    """Return the factor by which all ranks' machines became slower since profiling; at least 1.

    An optimizer does the same work in every step, whatever the batch. Other processes do not lengthen its CPU
    seconds, so they show the speed of a rank's machine. The least slowed rank gives the common factor.
    """
    own = [(predicted[name].optimizer_s, phases.optimizer_cpu_s) for name, phases in measured]
    return max(1.0, min(cpu_s / planned_s if planned_s else 1.0 for planned_s, cpu_s in own))


def slowed(
    predicted: Mapping[str, Phases], measured: Sequence[tuple[str, Phases]], most: float
) -> dict[str, Phases]:
    """Scale each predicted phase by the slowdown that all ranks share, limited to 1 to `most`."""
    found = dict(predicted)
    for field in ("host_s", "compute_s", "optimizer_s"):
        both = [(getattr(predicted[name], field), getattr(phases, field)) for name, phases in measured]
        common = min(taken_s / planned_s if planned_s else 1.0 for planned_s, taken_s in both)
        times = min(max(common, 1.0), most)
        found = {
            name: replace(phases, **{field: times * getattr(phases, field)}) for name, phases in found.items()
        }
    return found


def find_drift(
    predicted: Mapping[str, Phases], measured: Sequence[tuple[str, Phases]], tolerance: float = TOLERANCE
) -> Drift | None:
    """Return the rank and phase to blame for a step over prediction by `tolerance`, or None.

    `measured` is (class, median phases) by rank. A rank's own work is blamed before communication: ranks that
    wait for a slow one are blocked, but not to blame. A slowdown that all machines share is no drift.
    """
    slower = slowdown(predicted, measured)
    predicted = slowed(predicted, measured, slower)
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
        planned_phase_s, slower,
    )  # fmt: skip
