"""Traces: which card leaves or returns when, read from a file or drawn at random."""

from __future__ import annotations

import math
import random
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, fields
from pathlib import Path

from qsync.errors import FormatError, shortened, unknown_name

MAX_RANKS = 10_000
# A month of 10,000 cards has fewer at any failure rate that still trains.
MAX_EVENTS = 1_000_000
HEADER = "time_s,event,card"
# For each event of a card: the states in which a card may have it, and its state afterwards.
_STATES = {
    "kill": (("present", "stopped"), "gone"),
    "stop": (("present",), "stopped"),
    "cont": (("stopped",), "present"),
    "release": (("present",), "gone"),
    "join": (("gone",), "present"),
}
KINDS = (*_STATES, "lighthouse", "end")
_HOUR_S, _DAY_S = 3600.0, 86400.0


@dataclass(frozen=True, slots=True)
class ChurnEvent:
    """One event: kill, stop, cont, release, join, lighthouse (its restart) or end (of the trace).

    `card` is "CLASS:NUMBER", counted from 0, and empty for the last two kinds.

    >>> ChurnEvent(12.5, "kill", "infer:3")
    """

    time_s: float
    kind: str
    card: str = ""


def read_events(path: str | Path) -> tuple[ChurnEvent, ...]:
    """Read a trace: a CSV file whose first line is `time_s,event,card`.

    Raises FormatError for a file that is missing or empty, and for a line that cannot be read.
    """
    try:
        lines = Path(path).read_text(encoding="utf-8-sig").split("\n")
    except OSError as error:
        raise FormatError(f"cannot read {path}: {error.strerror or error}; check the path") from error
    except UnicodeDecodeError as error:
        raise FormatError(f"{path} is not a text file; give a CSV file of events") from error
    if lines[0].strip() != HEADER:
        raise FormatError(f"{path}, line 1 must be {HEADER}, found {shortened(lines[0])}")
    events = []
    for number, line in enumerate(lines[1:], 2):
        if not line.strip():
            continue
        parts = [part.strip() for part in line.split(",")]
        try:
            time_s, kind, card = parts + [""] * (3 - len(parts))
            events.append(ChurnEvent(float(time_s), kind, card))
        except ValueError as error:
            raise FormatError(
                f"{path}, line {number}: expected {HEADER}, such as 12.5,kill,infer:3, "
                f"found {shortened(line.strip())}"
            ) from error
    if not events:
        raise FormatError(f"{path} has no event; add a line such as 12.5,kill,infer:3, or 3600,end,")
    return tuple(events)


def check_events(events: Sequence[ChurnEvent], ranks: Mapping[str, int]) -> None:
    """Raise FormatError unless the cards of a cluster (class -> number) can have these events in order."""
    if not 1 <= sum(ranks.values()) <= MAX_RANKS:
        raise FormatError(f"a trace is played for 1 to {MAX_RANKS} ranks, found {sum(ranks.values())}")
    states = {f"{name}:{number}": "present" for name, count in ranks.items() for number in range(count)}
    before_s = 0.0

    def wrong(position: int, what: str) -> FormatError:
        event = events[position - 1]
        return FormatError(
            f"event {position} ({shortened(event.kind, quote=False)} at {event.time_s} s){what}"
        )

    for position, event in enumerate(events, 1):
        if not (math.isfinite(event.time_s) and event.time_s >= before_s):
            raise wrong(
                position, f" must have a finite time, not before {before_s} s; sort the events by time"
            )
        before_s = event.time_s
        if event.kind not in KINDS:
            raise wrong(position, f": {unknown_name(event.kind, KINDS, 'event')}")
        if event.kind == "end" and position < len(events):
            raise wrong(position, " must be the last event; remove those after it")
        if event.kind not in _STATES:
            continue
        if event.card not in states:
            known = ", ".join(f"{name}:0 to {name}:{count - 1}" for name, count in ranks.items() if count)
            raise wrong(position, f": there is no card {shortened(event.card)}; there are {known}")
        allowed, after = _STATES[event.kind]
        if states[event.card] not in allowed:
            raise wrong(
                position, f": {event.card} is {states[event.card]} then, and must be {' or '.join(allowed)}"
            )
        states[event.card] = after
    if before_s <= 0.0:
        raise FormatError("the trace ends at 0 s; add an event end at the time until which to play it")


@dataclass(frozen=True, slots=True)
class RandomChurn:
    """Failures and returns of every card, drawn independently with exponential times.

    A card fails (kill) after `mtbf` hours on average, and returns (join) after `mttr` minutes. `classes` are
    the classes whose cards do so, by default all. The cards of these classes are released from hour `away[0]`
    to hour `away[1]` of every day. `days` is the length of the trace.

    >>> RandomChurn.parse("mtbf=100,mttr=5,days=30,classes=infer,away=8-20").events({"train": 8, "infer": 32})
    """

    mtbf: float
    mttr: float = 10.0
    days: float = 1.0
    seed: int = 0
    classes: tuple[str, ...] = ()
    away: tuple[float, float] | None = None

    @classmethod
    def parse(cls, text: str) -> RandomChurn:
        """Read "mtbf=HOURS[,mttr=MINUTES][,days=D][,seed=S][,classes=A+B][,away=H-H]"."""
        known = [entry.name for entry in fields(cls)]
        pairs = dict(part.partition("=")[::2] for part in text.split(","))
        for name in pairs:
            if name not in known:
                raise FormatError(unknown_name(name, known, "part of --churn"))
        numbers = {name: _positive(name, pairs[name]) for name in ("mtbf", "mttr", "days") if name in pairs}
        seed, classes, away = pairs.get("seed", "0"), pairs.get("classes", ""), None
        if not (seed.isascii() and seed.isdigit() and len(seed) < 20):
            raise FormatError(f"seed must be a whole number, found {shortened(seed)}")
        if "away" in pairs:
            ends = [_positive("away", part) if part != "0" else 0.0 for part in pairs["away"].split("-")]
            if len(ends) != 2 or not 0 < ends[1] - ends[0] < 24 or ends[1] > 24:
                raise FormatError(f"away takes hours of the day, such as 8-20, found {pairs['away']!r}")
            away = (ends[0], ends[1])
        if "mtbf" not in numbers:
            raise FormatError("random churn needs mtbf=HOURS, the mean time between failures of a card")
        return cls(**numbers, seed=int(seed), classes=tuple(filter(None, classes.split("+"))), away=away)

    def events(self, ranks: Mapping[str, int]) -> tuple[ChurnEvent, ...]:
        """Draw the events of the cards of a cluster (class -> number), in the order of time.

        The same seed gives the same events. Raises FormatError for an unknown class, and for more events than
        can be played.
        """
        for name in self.classes:
            if name not in ranks:
                raise FormatError(unknown_name(name, ranks, "device class"))
        chosen = self.classes or tuple(ranks)
        cycle_days = (self.mtbf + self.mttr / 60) / 24
        expected = sum(ranks[name] for name in chosen) * self.days * 2 * (1 / cycle_days + bool(self.away))
        if expected > MAX_EVENTS:
            raise FormatError(
                f"about {expected:.2g} events are too many to play, at most {MAX_EVENTS}; give a longer mtbf "
                "or fewer days"
            )
        draw = random.Random(self.seed)
        found = [
            event for name in chosen for number in range(ranks[name])
            for event in self._events_of(f"{name}:{number}", draw)
        ]  # fmt: skip
        found.sort(key=lambda event: event.time_s)
        return (*found, ChurnEvent(self.days * _DAY_S, "end"))

    def _events_of(self, card: str, draw: random.Random) -> Iterator[ChurnEvent]:
        for number, (now, end_s) in enumerate(self._windows()):
            if now > 0.0:
                if number == 0:
                    yield ChurnEvent(0.0, "release", card)
                yield ChurnEvent(now, "join", card)
            while (now := now + draw.expovariate(1 / (self.mtbf * _HOUR_S))) < end_s:
                yield ChurnEvent(now, "kill", card)
                now += draw.expovariate(60 / (self.mttr * _HOUR_S))
                if now >= end_s:
                    break
                yield ChurnEvent(now, "join", card)
            else:
                if end_s < self.days * _DAY_S:
                    yield ChurnEvent(end_s, "release", card)

    def _windows(self) -> Iterator[tuple[float, float]]:
        """Yield when the cards are not released: start and end, in seconds."""
        total_s = self.days * _DAY_S
        if self.away is None:
            yield 0.0, total_s
            return
        for day in range(math.ceil(self.days) + 1):
            start_s = max(0.0, (day - 1) * _DAY_S + self.away[1] * _HOUR_S)
            end_s = min(total_s, day * _DAY_S + self.away[0] * _HOUR_S)
            if start_s < end_s:
                yield start_s, end_s


def _positive(name: str, text: str) -> float:
    try:
        number = float(text)
    except ValueError:
        number = math.nan
    if not 0.0 < number < math.inf:
        raise FormatError(f"{name} must be a positive number, found {shortened(text)}")
    return number
