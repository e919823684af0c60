"""Traces of leaving and returning cards, read from a file or drawn at random."""

from __future__ import annotations

import math
import random
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from itertools import cycle
from pathlib import Path

from qsync.errors import FormatError, shortened, unknown_name

MAX_RANKS = 10_000
# More than 10,000 cards produce in a month, at any failure rate that still lets a job train.
MAX_EVENTS = 1_000_000
HEADER = "time_s,event,card"
LEAVING = {"kill": "detection", "stop": "timeout", "release": "release"}  # -> what the others wait for
RETURNING = ("join", "cont")
KINDS = (*LEAVING, *RETURNING, "lighthouse", "end")


@dataclass(frozen=True, slots=True)
class ChurnEvent:
    """One event: kill, stop, release, join, cont, lighthouse (its restart) or end (of the trace).

    `card` is "CLASS:NUMBER", counted from 0, and empty for the last two kinds.

    >>> ChurnEvent(12.5, "kill", "infer:3")
    """

    time_s: float
    kind: str
    card: str = ""


def read_events(path: str | Path) -> tuple[ChurnEvent, ...]:
    """Read a trace from a CSV file with the header `time_s,event,card`; else raise FormatError."""
    try:
        lines = Path(path).read_text(encoding="utf-8-sig").splitlines()
    except (OSError, UnicodeDecodeError) as error:
        raise FormatError(f"cannot read {path} ({shortened(error)}); give a CSV file of events") from error
    if lines[:1] != [HEADER]:
        raise FormatError(f"{path}, line 1 must be {HEADER}, found {shortened(''.join(lines[:1]))}")
    events = []
    for number, line in enumerate(lines[1:], 2):
        if not line.strip():
            continue
        try:
            time_s, kind, card = (part.strip() for part in line.split(","))
            events.append(ChurnEvent(float(time_s), kind, card))
        except ValueError as error:
            raise FormatError(
                f"{path}, line {number}: expected {HEADER}, such as 12.5,kill,infer:3 or 3600,end, and found "
                f"{shortened(line)}"
            ) from error
    return tuple(events)


def check_events(events: Sequence[ChurnEvent], ranks: Mapping[str, int]) -> None:
    """Raise FormatError unless these events are possible on these ranks (class -> cards)."""
    if not 1 <= sum(ranks.values()) <= MAX_RANKS:
        raise FormatError(f"a trace is played for 1 to {MAX_RANKS} ranks, found {sum(ranks.values())}")
    is_present = {f"{name}:{number}": True for name, count in ranks.items() for number in range(count)}
    before_s = 0.0
    for position, event in enumerate(events, 1):
        wrong = ""
        if not before_s <= event.time_s < math.inf:
            wrong = f"its time must be finite, and not before {before_s} s; sort the events by time"
        elif event.kind not in KINDS:
            wrong = unknown_name(event.kind, KINDS, "event")
        elif event.kind == "end" and position < len(events):
            wrong = "it must be the last event; remove those after it"
        elif event.kind in (*LEAVING, *RETURNING):
            if event.card not in is_present:
                known = ", ".join(f"{name}:0 to {name}:{count - 1}" for name, count in ranks.items() if count)
                wrong = f"there is no card {shortened(event.card)}; there are {known}"
            elif is_present[event.card] != (event.kind in LEAVING):
                wrong = (
                    f"{event.card} has {'joined' if is_present[event.card] else 'left'} before; remove one"
                )
            is_present[event.card] = event.kind in RETURNING
        if wrong:
            kind = shortened(event.kind, quote=False)
            raise FormatError(f"event {position} ({kind} at {event.time_s} s): {wrong}")
        before_s = event.time_s
    if before_s <= 0.0:
        raise FormatError("the trace ends at 0 s; add an event end at the time until which to play it")


def parse_numbers(pairs: Mapping[str, str], known: Collection[str], what: str) -> dict[str, float]:
    """Convert name -> text pairs to numbers; raise FormatError unless known and non-negative."""
    found = {}
    for name, text in pairs.items():
        if name not in known:
            raise FormatError(unknown_name(name, known, what))
        try:
            found[name] = float(text)
        except ValueError:
            found[name] = math.nan
        if not 0.0 <= found[name] < math.inf:
            raise FormatError(f"{name} must be a number, at least 0, found {shortened(text)}")
    return found


def parse_pairs(text: str) -> dict[str, str]:
    """Parse text of the form "name=value,name=value"."""
    return {name.strip(): value for name, _, value in (part.partition("=") for part in text.split(","))}


@dataclass(frozen=True, slots=True)
class RandomChurn:
    """Failures and returns of every card, drawn independently with exponential times.

    A card fails (kill) after `mtbf` hours on average, and returns (join) after `mttr` minutes. `classes` are
    the classes whose cards fail, by default all. `days` is the length of the trace.

    >>> RandomChurn.parse("mtbf=100,mttr=5,days=30,classes=infer").events({"train": 8, "infer": 32})
    """

    mtbf: float
    mttr: float = 10.0
    days: float = 1.0
    seed: float = 0
    classes: tuple[str, ...] = ()

    @classmethod
    def parse(cls, text: str) -> RandomChurn:
        """Parse text of the form "mtbf=HOURS[,mttr=MINUTES][,days=D][,seed=S][,classes=A+B]"."""
        pairs = parse_pairs(text)
        classes = tuple(filter(None, pairs.pop("classes", "").split("+")))
        numbers = parse_numbers(pairs, ("mtbf", "mttr", "days", "seed"), "part of --churn")
        if not numbers.get("mtbf"):
            raise FormatError(
                "random churn needs mtbf=HOURS, above 0: the mean time between failures of a card"
            )
        return cls(**numbers, classes=classes)

    def events(self, ranks: Mapping[str, int]) -> tuple[ChurnEvent, ...]:
        """Draw the events of a cluster's cards (class -> number of cards), sorted by time.

        The same seed gives the same events. Raises FormatError for an unknown class, and for more than
        MAX_EVENTS expected events.
        """
        for name in self.classes:
            if name not in ranks:
                raise FormatError(unknown_name(name, ranks, "device class"))
        cards = [f"{name}:{number}" for name in self.classes or ranks for number in range(ranks[name])]
        mtbf_s, mttr_s, end_s = 3600 * self.mtbf, 60 * self.mttr, 86400 * self.days
        if (expected := 2 * len(cards) * end_s / (mtbf_s + mttr_s)) > MAX_EVENTS:
            raise FormatError(
                f"about {expected:.2g} events are too many to play, at most {MAX_EVENTS}; give a longer mtbf "
                "or fewer days"
            )
        draw, found = random.Random(self.seed), []
        for card in cards:
            now = 0.0
            for kind, mean_s in cycle((("kill", mtbf_s), ("join", mttr_s))):
                now += draw.expovariate(1.0) * mean_s
                if now >= end_s:
                    break
                found.append(ChurnEvent(now, kind, card))
        found.sort(key=lambda event: event.time_s)
        return (*found, ChurnEvent(end_s, "end"))
