"""Play a trace of leaving and returning cards: goodput, and seconds lost by cause. Simulated.

The batch of a step is the same at every membership. All cards present take each step together:

    kill        the running step is lost; the others wait until the lighthouse drops the card
    stop        the running step is lost; the others wait until the collective times out
    release     the card finishes its step; the others wait until the lighthouse drops it
    join, cont  the card starts (join), receives the state while the others train, and enters between steps
    lighthouse  the running step is finished; the next one waits until the lighthouse answers

Whoever leaves or enters, the others reconfigure once: a new process group, buckets and shares. A plan for a
new membership is made meanwhile, in milliseconds. Without a card the job waits.

Only events are simulated one by one. Equal steps between two events are counted.
"""

from __future__ import annotations

import heapq
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, fields, replace
from pathlib import Path
from typing import Any

from qsync.errors import FormatError, shortened, unknown_name
from qsync.records.json_files import field, read_json
from qsync.replayer.churn.trace import ChurnEvent, check_events

VERSION = 1
CAUSES = ("lost_step", "detection", "timeout", "release", "reconfiguration", "lighthouse", "no_card")
# What the others wait for, and for which of the costs, after a card was lost.
_FAILURES = {"kill": "detection", "stop": "timeout"}


@dataclass(frozen=True, slots=True)
class ChurnCosts:
    """Seconds that events cost.

    `detection_s`: from a kill until the lighthouse drops the card; `release_s`: the same from a release.
    `timeout_s`: of a collective with a stopped card. `reconfiguration_s`: of the cards that go on.
    `lighthouse_s`: until a restarted lighthouse answers. `transfer_s` and `start_s` delay the newcomer alone:
    receiving the state, and starting its process.

    The defaults of detection and timeout are settings: how long a torchft lighthouse waits for a heartbeat,
    and a collective for a card. Transfer is assumed. The others were measured on a 2-core CPU: four cards
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
        """Read "detection=5,start=12", or a JSON file whose `churn_costs` has the fields of this record."""
        if "=" in text and not Path(text).is_file():
            parts = [part.partition("=") for part in text.split(",")]
            return cls.from_json({f"{name.strip()}_s": value for name, _, value in parts})
        return cls.from_json(field(read_json(text), "churn_costs", dict, text))

    @classmethod
    def from_json(cls, value: Mapping[str, Any]) -> ChurnCosts:
        """Read costs; those left out have their defaults. FormatError names what cannot be read."""
        known = [entry.name for entry in fields(cls)]
        found = {}
        for name, number in value.items():
            if name not in known:
                raise FormatError(unknown_name(name, known, "cost of churn"))
            try:
                found[name] = float(number)
            except (TypeError, ValueError, OverflowError):
                found[name] = math.nan
            if not 0.0 <= found[name] < math.inf:
                raise FormatError(
                    f"{name} of the churn costs must be seconds, at least 0, found {shortened(number)}"
                )
        return cls(**found)


@dataclass(frozen=True, slots=True)
class MembershipTime:
    """The training at one membership: cards by class, seconds of a step, seconds in all, committed steps."""

    ranks: Mapping[str, int]
    step_s: float
    training_s: float
    num_steps: int


@dataclass(frozen=True, slots=True)
class ChurnReport:
    """A trace that was played; all is simulated.

    duration_s = training_s + the sum of `lost_s` (seconds by cause). The step that runs at the end counts in
    part. `ideal_samples_per_s` is the rate of all cards without an event, `lossless_samples_per_s` that of a
    job that follows every event at once and at no cost. `progress` has (seconds, samples so far), in order.
    """

    duration_s: float
    training_s: float
    num_steps: int
    samples_per_s: float
    ideal_samples_per_s: float
    lossless_samples_per_s: float
    num_reconfigurations: int
    lost_s: Mapping[str, float]
    memberships: tuple[MembershipTime, ...]  # those that trained, the longest first
    progress: tuple[tuple[float, float], ...]

    @property
    def of_ideal(self) -> float:
        """Return the goodput as a part of the ideal."""
        return self.samples_per_s / self.ideal_samples_per_s

    def to_json(self) -> dict[str, Any]:
        """Return the report as a JSON object, without the progress."""
        body = asdict(replace(self, progress=()))
        del body["progress"]
        return {"kind": "churn", "version": VERSION, "simulated": True, "of_ideal": self.of_ideal, **body}


def play(
    events: Sequence[ChurnEvent],
    ranks: Mapping[str, int],
    step_s: Callable[[Mapping[str, int]], float],
    costs: ChurnCosts | None = None,
    *,
    samples_per_step: int = 1,
) -> ChurnReport:
    """Play a trace over the step times of all memberships.

    Args:
        events: in the order of time; at equal times in the order given. The last one ends the trace.
        ranks: class -> cards present at the start, at most 10,000 together.
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
    job = _Job(ranks, step_s, costs or ChurnCosts(), samples_per_step)
    arrivals: list[tuple[float, int, str]] = []  # a heap: when a card is ready to enter, its order, the card
    for order, event in enumerate(events):
        while arrivals and arrivals[0][0] < event.time_s:
            ready_s, _, card = heapq.heappop(arrivals)
            job.advance(ready_s)
            job.take(ChurnEvent(ready_s, "ready", card))
        job.advance(event.time_s)
        entry_s = job.take(event)
        if entry_s is not None:
            heapq.heappush(arrivals, (entry_s, order, event.card))
    return job.report(ranks)


class _Job:
    """The job at one moment: its cards, the running step, and what it waits for."""

    def __init__(
        self,
        ranks: Mapping[str, int],
        step_s: Callable[[Mapping[str, int]], float],
        costs: ChurnCosts,
        samples_per_step: int,
    ) -> None:
        self.step_s, self.costs, self.samples_per_step = step_s, costs, samples_per_step
        self.now = self.samples = self.lossless = 0.0
        self.begun: float | None = 0.0  # the start of the running step, None while the job pauses
        self.reformed_s = 0.0  # until then the job reconfigures
        self.blocked: dict[str, float] = {}  # cause -> until when
        self.entering: set[str] = set()
        self.leaving: set[str] = set()
        self.stopped: set[str] = set()
        self.arrivals: dict[str, float] = {}  # card -> when it has the state
        self.members, self.available = dict(ranks), dict(ranks)
        self.known: dict[tuple[tuple[str, int], ...], float] = {}
        self.trained: dict[tuple[tuple[str, int], ...], list[float]] = {}  # seconds, steps
        self.lost = dict.fromkeys(CAUSES, 0.0)
        self.progress = [(0.0, 0.0)]
        self.num_reconfigurations = 0

    def take(self, event: ChurnEvent) -> float | None:
        """Begin what an event causes. Return when the card of the event is ready to enter, if it is to."""
        kind, card, costs = event.kind, event.card, self.costs
        if kind == "lighthouse":
            self._block("lighthouse", costs.lighthouse_s)
        elif kind in ("join", "cont"):
            self.stopped.discard(card)
            self._count(self.available, card, 1)
            self.arrivals[card] = self.now + costs.transfer_s + (costs.start_s if kind == "join" else 0.0)
            return self.arrivals[card]
        elif kind == "ready" and self.arrivals.get(card) == event.time_s:
            del self.arrivals[card]
            self.entering.add(card)
        elif kind == "kill" and card in self.stopped:
            self.stopped.discard(card)
        elif kind in ("kill", "stop", "release"):
            self._count(self.available, card, -1)
            if kind == "stop":
                self.stopped.add(card)
            if card in self.arrivals:
                del self.arrivals[card]
            elif card in self.entering:
                self.entering.discard(card)
            else:
                self.leaving.add(card)
                if kind in _FAILURES:
                    self._lose_step()
                    cause = _FAILURES[kind]
                    self._block(cause, getattr(costs, f"{cause}_s"))
                else:
                    self._block("release", costs.release_s)
        return None

    def advance(self, until: float) -> None:
        """Let the job go on until a time: finish what it waits for, and train."""
        if until > self.now and (price := self._price(self.available)):
            self.lossless += (until - self.now) / price * self.samples_per_step
        while self.now < until:
            if self.begun is not None:
                self._train(self.begun, until)
            elif self.blocked:
                cause, end = min(self.blocked.items(), key=lambda item: (item[1], item[0]))
                self._lose(cause, min(end, until))
                if end <= self.now:
                    del self.blocked[cause]
            elif self.entering or self.leaving:
                self._reconfigure()
            elif self.now < self.reformed_s:
                self._lose("reconfiguration", min(self.reformed_s, until))
            elif any(self.members.values()):
                self.begun = self.now
            else:
                self._lose("no_card", until)

    def report(self, ranks: Mapping[str, int]) -> ChurnReport:
        """Return what has happened until now, beside what all these cards would have done."""
        if self.begun is not None:
            self._commit((self.now - self.begun) / self._price(self.members), is_whole=False)
        memberships = [
            MembershipTime(dict(key), self.known[key], seconds, int(num))
            for key, (seconds, num) in self.trained.items()
        ]
        memberships.sort(key=lambda one: (-one.training_s, tuple(one.ranks.items())))
        return ChurnReport(
            duration_s=self.now,
            training_s=sum(one.training_s for one in memberships),
            num_steps=sum(one.num_steps for one in memberships),
            samples_per_s=self.samples / self.now,
            ideal_samples_per_s=self.samples_per_step / self._price(ranks),
            lossless_samples_per_s=self.lossless / self.now,
            num_reconfigurations=self.num_reconfigurations,
            lost_s=self.lost,
            memberships=tuple(memberships),
            progress=tuple(self.progress),
        )

    def _train(self, begun: float, until: float) -> None:
        """Go on with steps; with the running one alone where something waits for its end."""
        price = self._price(self.members)
        if not (self.blocked or self.entering or self.leaving):
            self._commit(float((until - begun) // price))
            self.now = until
        elif self.now > begun and begun + price > until:
            self.now = until
        else:
            if self.now > begun:
                self._commit(1.0)
                self.now = begun + price
            self.begun = None

    def _commit(self, num: float, is_whole: bool = True) -> None:
        if num <= 0.0 or self.begun is None:
            return
        trained = self.trained.setdefault(self._key(self.members), [0.0, 0.0])
        trained[0] += num * self._price(self.members)
        trained[1] += num if is_whole else 0.0
        self.progress.append((self.begun, self.samples))
        self.samples += num * self.samples_per_step
        self.begun += num * self._price(self.members)
        self.progress.append((self.begun, self.samples))

    def _lose_step(self) -> None:
        if self.begun is not None:
            self.lost["lost_step"] += max(0.0, self.now - self.begun)
            self.begun = None

    def _lose(self, cause: str, until: float) -> None:
        self.lost[cause] += max(0.0, until - self.now)
        self.now = max(self.now, until)

    def _block(self, cause: str, seconds: float) -> None:
        self.blocked[cause] = max(self.blocked.get(cause, 0.0), self.now + seconds)

    def _reconfigure(self) -> None:
        for cards, change in ((self.leaving, -1), (self.entering, 1)):
            for card in cards:
                self._count(self.members, card, change)
            cards.clear()
        self.reformed_s = self.now + self.costs.reconfiguration_s
        self.num_reconfigurations += 1

    def _count(self, ranks: dict[str, int], card: str, change: int) -> None:
        ranks[card.rpartition(":")[0]] += change

    def _key(self, ranks: Mapping[str, int]) -> tuple[tuple[str, int], ...]:
        return tuple((name, count) for name, count in ranks.items() if count)

    def _price(self, ranks: Mapping[str, int]) -> float:
        """Return the seconds of a step of these cards, 0 without a card."""
        key = self._key(ranks)
        if key and key not in self.known:
            self.known[key] = float(self.step_s(dict(key)))
            if not 0.0 < self.known[key] < math.inf:
                raise FormatError(
                    f"a step of {shortened(dict(key), quote=False)} takes {self.known[key]} s; give positive "
                    "seconds"
                )
        return self.known[key] if key else 0.0
