"""Cause random events from a seed in a running job, each after recovery from the last one."""

from __future__ import annotations

import random
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from typing import Any

from qsync.experiments.elastic.cluster import ASK, FAST, GO, KILL, STOP, WEAK, Cards

NAMES = [f"{FAST}-0", f"{WEAK}-1", f"{FAST}-2", f"{WEAK}-3"]
KINDS = {"kill": 4, "stop": 3, "release": 4, "ask": 2, "two": 2, "lighthouse": 1}  # with their weights
_PAUSE_S = 2.5  # seconds for which a card is stopped
_LAST_S = 0.4  # seconds of training between a recovery and the next event


@dataclass(frozen=True)
class Happened:
    """An event: its start, the affected cards, and the time when all others had taken a step."""

    kind: str
    cards: tuple[str, ...]
    at: float
    recovered: float
    stays: tuple[str, ...]
    gone: float | None = None  # when a released card's loop had ended
    away_s: float | None = None  # seconds for which a card was stopped


def run(cards: Cards, num_events: int, seed: int, say: Callable[[str], None]) -> list[dict[str, Any]]:
    """Cause random events in a job of four cards; every lost card returns as another event."""
    draw = random.Random(seed)
    for name in NAMES:
        cards.start(name)
    begun = time.time()
    cards.wait_for_step(NAMES, begun)
    happened: list[Happened] = []
    away: set[str] = set()
    while len(happened) < num_events:
        say(f"event {len(happened) + 1} of {num_events}")
        time.sleep(_LAST_S + 0.6 * draw.random())
        if away and (len(away) > 2 or draw.random() < 0.5):
            event = _join(cards, sorted(away)[draw.randrange(len(away))], away)
        else:
            event = _happen(cards, draw, away)
        happened.append(event)
    return [asdict(event) for event in happened]


def _present(away: set[str]) -> list[str]:
    return [name for name in NAMES if name not in away]


def _join(cards: Cards, name: str, away: set[str]) -> Happened:
    start = time.time()
    cards.start(name)
    away.discard(name)
    recovered = cards.wait_for_step(_present(away), start)
    return Happened("join", (name,), start, recovered, tuple(_present(away)))


def _happen(cards: Cards, draw: random.Random, away: set[str]) -> Happened:
    """Cause one event among the running cards; at least one card stays."""
    present = _present(away)
    kind = draw.choices(list(KINDS), list(KINDS.values()))[0]
    if len(present) < 2 and kind != "lighthouse":
        kind = "lighthouse"
    if kind == "two" and len(present) < 3:
        kind = "kill"
    chosen = draw.sample(present, 2 if kind == "two" else 0 if kind == "lighthouse" else 1)
    stays = [name for name in present if name not in chosen]
    gone = None
    start = time.time()
    if kind == "lighthouse":
        cards.darken()
        time.sleep(0.5)
        cards.light()
    elif kind == "stop":
        cards.signal(chosen[0], STOP)
        recovered = cards.wait_for_step(stays, start)
        time.sleep(max(0.0, _PAUSE_S - (time.time() - start)))
        cards.signal(chosen[0], GO)
        away_s = time.time() - start
        cards.wait_for_step(present, time.time())
        return Happened(kind, tuple(chosen), start, recovered, tuple(present), away_s=away_s)
    elif kind == "two":
        for name in chosen:
            cards.signal(name, KILL)
    elif kind == "kill":
        cards.signal(chosen[0], KILL)
    elif kind == "release":
        cards.signal(chosen[0], ASK)
    else:
        command = [sys.executable, "-m", "qsync", "release", chosen[0], "--lighthouse", cards.address]
        subprocess.run(command, check=True, stdout=subprocess.DEVNULL)
        start = time.time()
    recovered = cards.wait_for_step(stays, time.time() if kind == "lighthouse" else start)
    for name in chosen:
        cards.processes[name].wait(timeout=60)
        away.add(name)
    if kind in ("release", "ask"):
        gone = next(line["at"] for line in reversed(cards.lines(chosen[0])) if line.get("event") == "left")
    return Happened(kind, tuple(chosen), start, recovered, tuple(stays), gone)
