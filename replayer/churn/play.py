"""Play a trace of leaving and returning cards: goodput, and seconds lost by cause. Simulated.

The batch of a step is the same at every membership. All cards present take each step together:

    kill        the running step is lost; the others wait until the lighthouse drops the card
    stop        the running step is lost; the others wait until the collective times out
    release     the card finishes its step; the others wait until the lighthouse drops it
    join, cont  the card starts (join), receives the state while the others train, and enters between steps
    lighthouse  the running step is finished; the next one waits until the lighthouse answers

Waits for several events overlap. After these waits the remaining cards reconfigure once: a new process group,
buckets and shares. The plan for the new membership is computed during the waits, in milliseconds. The job
pauses while no card is present.

Each event is simulated; the equal steps between two events are counted by one division. A step that an event
allows to finish counts, even if another event follows before its end.
"""

from __future__ import annotations

import heapq
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, fields
from typing import Any

from qsync.errors import FormatError, shortened
from qsync.records.record_json import NOT_IN_FILES, as_json
from qsync.replayer.churn.trace import (
    LEAVING,
    RETURNING,
    ChurnEvent,
    check_events,
    parse_numbers,
    parse_pairs,
)

VERSION = 1
CAUSES = ("lost_step", "detection", "timeout", "release", "reconfiguration", "lighthouse", "no_card")
StepSeconds = Callable[[Mapping[str, int]], float]


@dataclass(frozen=True, slots=True)
class ChurnCosts:
    """Seconds that each cause of lost time costs.

    `detection_s`: from a kill until the lighthouse drops the card. `release_s`: from a release until the
    lighthouse drops the card. `timeout_s`: until a collective with a stopped card fails. `reconfiguration_s`:
    until the remaining cards train again. `lighthouse_s`: until a restarted lighthouse answers. `transfer_s`
    (receiving the state) and `start_s` (starting the process) delay only the joining card.

    The defaults of detection and timeout are settings: the heartbeat timeout of a torchft lighthouse, and the
    timeout of a collective. Transfer is an assumption. The others were measured on a 2-core CPU: four cards
    under torchft 0.2 and gloo, with a model of 42 MB.
    """

    detection_s: float = 1.0
    timeout_s: float = 10.0
    reconfiguration_s: float = 0.1
    lighthouse_s: float = 2.0
    transfer_s: float = 0.5
    start_s: float = 3.7
    release_s: float = 1.0

    @classmethod
    def parse(cls, text: str) -> ChurnCosts:
        """Parse costs from text such as "detection=5,start=12"; keep the defaults of the others."""
        known = [entry.name.removesuffix("_s") for entry in fields(cls)]
        numbers = parse_numbers(parse_pairs(text), known, "cost of churn")
        return cls(**{f"{name}_s": seconds for name, seconds in numbers.items()})


@dataclass(frozen=True, slots=True)
class MembershipTime:
    """The training at one membership: cards by class, seconds (of a step, total), committed steps."""

    ranks: Mapping[str, int]
    step_s: float
    training_s: float
    num_steps: int


@dataclass(frozen=True, slots=True)
class ChurnReport:
    """The simulated result of playing a trace.

    duration_s = training_s + the sum of `lost_s` (seconds by cause). The step running at the end counts as a
    fraction. `ideal_samples_per_s` is the rate of all cards without events, `lossless_samples_per_s` the rate
    of a job that follows every event instantly and at no cost. `progress` lists (seconds, samples so far).
    """

    duration_s: float
    training_s: float
    num_steps: int
    samples_per_s: float
    ideal_samples_per_s: float
    lossless_samples_per_s: float
    num_reconfigurations: int
    lost_s: Mapping[str, float]
    memberships: tuple[MembershipTime, ...]  # memberships with a step, longest first
    progress: tuple[tuple[float, float], ...] = field(metadata=NOT_IN_FILES)

    @property
    def of_ideal(self) -> float:
        """Return the goodput as a fraction of the ideal rate."""
        return self.samples_per_s / self.ideal_samples_per_s

    def to_json(self) -> dict[str, Any]:
        """Return the report as a JSON object, without the progress."""
        body = as_json(self)
        return {"kind": "churn", "version": VERSION, "simulated": True, "of_ideal": self.of_ideal, **body}


def play(
    events: Sequence[ChurnEvent],
    ranks: Mapping[str, int],
    step_s: StepSeconds,
    costs: ChurnCosts | None = None,
    *,
    samples_per_step: int = 1,
) -> ChurnReport:
    """Play a trace over the step times of all memberships.

    Args:
        events: sorted by time. Events at equal times happen in the given order. The last one ends the trace.
        ranks: class -> cards present at the start, at most 10,000 in total.
        step_s: returns the seconds of a step from the cards present (class -> number, at least 1), predicted
            (`MembershipSteps`) or measured. It is called once for every membership.
        costs: seconds that events cost.
        samples_per_step: the global batch.

    Returns:
        The report: samples, seconds lost by cause, and the memberships that trained.

    Raises:
        FormatError: events that these cards cannot have, or a step time that is not positive.

    Example:
        >>> events = [ChurnEvent(10.0, "kill", "infer:1"), ChurnEvent(60.0, "end")]
        >>> play(events, {"train": 1, "infer": 2}, lambda ranks: 1.0 / sum(ranks.values())).lost_s
    """
    check_events(events, ranks)
    job = _Job(ranks, step_s, costs or ChurnCosts())
    for event in events:
        job.take(event)
    return job.report(ranks, samples_per_step)


class _Job:
    """The job at one moment: its cards, and when its next step starts."""

    def __init__(self, ranks: Mapping[str, int], step_s: StepSeconds, costs: ChurnCosts) -> None:
        self.step_s, self.costs = step_s, costs
        self.now = 0.0
        self.begin_s = 0.0  # start of the running step, or of the next one
        # Numbers of cards by class: present in the job; with the training state; in the training group.
        self.present, self.ready, self.members = dict(ranks), dict(ranks), dict(ranks)
        self.arrivals: list[tuple[float, str]] = []  # heap of (time of receiving the state, card)
        self.arriving: dict[str, float] = {}  # present card -> time of receiving the state
        self.is_changed = False  # whether `ready` may differ from `members`
        self.memberships: dict[tuple[tuple[str, int], ...], list[float]] = {}  # [seconds of a step, steps]
        self.lost_s = dict.fromkeys(CAUSES, 0.0)
        self.num_steps = self.lossless_steps = 0.0
        self.progress = [(0.0, 0.0)]
        self.num_reconfigurations = 0

    def take(self, event: ChurnEvent) -> None:
        """Advance the job to an event, then apply the event to cards and waits."""
        while self.arrivals and self.arrivals[0][0] < event.time_s:
            ready_s, card = heapq.heappop(self.arrivals)
            if self.arriving.get(card) == ready_s:
                del self.arriving[card]
                self._go_on(ready_s)
                self._finish_step()
                self.ready[_class_of(card)] += 1
                self.is_changed = True
        self._go_on(event.time_s)
        kind, card = event.kind, event.card
        if kind == "lighthouse":
            self._finish_step()
            self._wait(kind)
        elif kind in RETURNING:
            self.present[_class_of(card)] += 1
            start_s = self.costs.start_s if kind == "join" else 0.0
            self.arriving[card] = self.now + self.costs.transfer_s + start_s
            heapq.heappush(self.arrivals, (self.arriving[card], card))
        elif kind in LEAVING:
            self.present[_class_of(card)] -= 1
            if self.arriving.pop(card, None) is None:
                if kind == "release":
                    self._finish_step()
                self._lose("lost_step", self.now)
                self._wait(LEAVING[kind])
                self.ready[_class_of(card)] -= 1
                self.is_changed = True

    def report(self, ranks: Mapping[str, int], samples_per_step: int) -> ChurnReport:
        """Return the report until now; `ranks` are the cards of the ideal rate."""
        self._go_on(max(self.now, self.begin_s))
        self._train((self.now - self.begin_s) / self._membership(self.members)[0])
        memberships = [
            MembershipTime(dict(key), step_s, num * step_s, int(num))
            for key, (step_s, num) in self.memberships.items()
            if num
        ]
        memberships.sort(key=lambda one: (-one.training_s, tuple(one.ranks.items())))
        return ChurnReport(
            duration_s=self.now,
            training_s=sum(one.training_s for one in memberships),
            num_steps=sum(one.num_steps for one in memberships),
            samples_per_s=self.num_steps * samples_per_step / self.now,
            ideal_samples_per_s=samples_per_step / self._membership(ranks)[0],
            lossless_samples_per_s=self.lossless_steps * samples_per_step / self.now,
            num_reconfigurations=self.num_reconfigurations,
            lost_s=self.lost_s,
            memberships=tuple(memberships),
            progress=tuple((seconds, num * samples_per_step) for seconds, num in self.progress),
        )

    def _go_on(self, until: float) -> None:
        """Advance the job to a time: reconfigure if cards changed, and count the steps that end before."""
        self.lossless_steps += (until - self.now) / self._membership(self.present)[0]
        self.now = until
        if self.is_changed and self.begin_s < until:
            self.members, self.is_changed = dict(self.ready), False
            self.num_reconfigurations += 1
            self._lose("reconfiguration", self.begin_s + self.costs.reconfiguration_s)
        if not any(self.members.values()):
            self._lose("no_card", until)
        elif self.begin_s < until:
            self._train((until - self.begin_s) // self._membership(self.members)[0])

    def _finish_step(self) -> None:
        """Count the running step, if any, as finished."""
        if self.begin_s < self.now:
            self._train(1.0)

    def _train(self, num: float) -> None:
        """Count `num` steps of the present members, and move the start of the next step."""
        if num:
            membership = self._membership(self.members)
            membership[1] += num
            self.progress.append((self.begin_s, self.num_steps))
            self.num_steps += num
            self.begin_s += num * membership[0]
            self.progress.append((self.begin_s, self.num_steps))

    def _wait(self, cause: str) -> None:
        """Delay the next step by the seconds that `cause` costs, counted from now."""
        self._lose(cause, self.now + getattr(self.costs, f"{cause}_s"))

    def _lose(self, cause: str, until: float) -> None:
        """Delay the next step to the time `until`, and count the delay as lost to `cause`."""
        if until > self.begin_s:
            self.lost_s[cause] += until - self.begin_s
            self.begin_s = until

    def _membership(self, ranks: Mapping[str, int]) -> list[float]:
        """Return [seconds of a step, steps so far] of these cards; infinite seconds without a card."""
        key = tuple((name, count) for name, count in ranks.items() if count)
        if key not in self.memberships:
            step_s = float(self.step_s(dict(key))) if key else math.inf
            if key and not 0.0 < step_s < math.inf:
                raise FormatError(
                    f"a step of {shortened(dict(key), quote=False)} takes {step_s} s; give positive seconds"
                )
            self.memberships[key] = [step_s, 0.0]
        return self.memberships[key]


def _class_of(card: str) -> str:
    return card.rpartition(":")[0]
