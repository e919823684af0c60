"""Plan ahead for every likely membership, in the background of training.

Profiles belong to classes and are cached on disk by model, loss, optimizer, hardware and versions, never by
the number of cards. The first card of the job plans the present membership, those that can come next (one
card more or less of each class), and those with a class that has become slower, in a process of its own. The
other cards copy its book. Each card may run another plan, so no card waits for another to change its plan.
"""

from __future__ import annotations

import json
import logging
import math
import subprocess
import sys
import threading
import time
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch

from qsync import api
from qsync.backend.precisions_that_pay import precisions_to_profile
from qsync.distributed.ddp_profiling import profile_seconds
from qsync.distributed.job_options import JobOptions
from qsync.distributed.plan_cache import cache_folder, make_folder, stable_text, step_key
from qsync.elastic_training.healing import Server, fetch
from qsync.elastic_training.meeting import Card
from qsync.errors import InfeasibleError, QSyncError
from qsync.operators.precision import Precision
from qsync.predictor.profiling.made_optimizer import MakeOptimizer
from qsync.processes.child_processes import environment
from qsync.records.base import parse_base
from qsync.records.cluster import Cluster, DeviceClass, Link
from qsync.records.graph import OpGraph, digest
from qsync.records.json_files import read_json, write_json
from qsync.records.levers import samples_of
from qsync.records.plans import Plan
from qsync.records.profiles import Profile, Sensitivity
from qsync.records.record_json import as_json, as_record

logger = logging.getLogger("qsync")

# Class -> (number of its cards, slowdown against its profile).
Membership = tuple[tuple[str, int, float], ...]

_FETCH_S = 30.0
_RETRY_S = 5.0  # seconds after which failed planning is retried


def membership_of(cards: Iterable[Card]) -> Membership:
    """Return the membership of these cards. A class is as slow as its slowest card."""
    cards = list(cards)
    count = Counter(card.device_class for card in cards)
    slowest = {name: max(card.slowdown for card in cards if card.device_class == name) for name in count}
    return tuple((name, count[name], slowest[name]) for name in sorted(count))


def shown(membership: Membership) -> str:
    """Format a membership: "2 infer (1.5 x slower), 2 train"."""
    parts = [
        f"{count} {name}" + (f" ({slowdown:g} x slower)" if slowdown != 1 else "")
        for name, count, slowdown in membership
    ]
    return ", ".join(parts)


def next_memberships(membership: Membership) -> list[Membership]:
    """Return the memberships with one card less, then with one card more, of each class."""
    found = []
    for change in (-1, 1):
        for place, (name, count, slowdown) in enumerate(membership):
            entry = ((name, count + change, slowdown),) if count + change else ()
            found.append(membership[:place] + entry + membership[place + 1 :])
    return [one for one in found if one]


@dataclass(frozen=True, slots=True)
class CardCosts:
    """Costs of one class: its profile on its cards, and the model's sensitivity."""

    device_class: DeviceClass
    graph: OpGraph
    profile: Profile
    sensitivity: Sensitivity

    def to_json(self) -> dict[str, Any]:
        """Return the costs as a JSON object."""
        return {
            "device_class": as_json(self.device_class),
            "graph": self.graph.to_json(), "profile": self.profile.to_json(),
            "sensitivity": self.sensitivity.to_json(),
        }  # fmt: skip

    @classmethod
    def from_json(cls, value: Mapping[str, Any]) -> CardCosts:
        """Read the JSON of `to_json`."""
        return cls(
            as_record(value["device_class"], DeviceClass, "device class"), OpGraph.from_json(value["graph"]),
            Profile.from_json(value["profile"]), Sensitivity.from_json(value["sensitivity"]),
        )  # fmt: skip


def class_costs(
    model: torch.nn.Module, batch: Any, asked: JobOptions, device_class: DeviceClass, maker: MakeOptimizer
) -> CardCosts:
    """Return the costs of this card's class, from the cache or by measuring.

    The cache key covers step, loss, optimizer and hardware, but no number of cards.
    """
    base = parse_base(asked.base) if asked.base is not None else Precision.FP32
    chosen = precisions_to_profile(device_class, model, asked.precisions, base)
    graph = api.trace_step(model, batch, asked.loss_fn)
    own: list[Any] = [device_class.name, device_class.hardware, device_class.emulated_share]
    own += [[str(precision) for precision in each] for each in (device_class.precisions, chosen)]
    own += [stable_text(asked.loss_fn), stable_text(maker), asked.bitwise]
    path = cache_folder(asked.cache_dir) / "classes" / f"{digest([step_key(graph), own])}.json"
    try:
        return CardCosts.from_json(read_json(path))
    except (QSyncError, KeyError, TypeError):
        pass
    make_folder(path.parent)
    profile = api.profile(
        model, batch, asked.loss_fn, device_class=device_class, precisions=chosen, make_optimizer=maker,
        seconds=profile_seconds(), bitwise=asked.bitwise,
    )  # fmt: skip
    costs = CardCosts(device_class, graph, profile, api.sensitivity(model, [batch], asked.loss_fn))
    write_json(path, costs.to_json())
    return costs


class PlanBook:
    """The plans of a job by membership. The first card extends it; the others copy.

    `own` (this card's costs) and the plans are served to other cards. `options` are those of `qsync.plan`.
    """

    def __init__(self, own: CardCosts, server: Server, options: Mapping[str, Any]) -> None:
        self._classes = {own.device_class.name: own}
        self._own, self._options, self._token = own, dict(options), server.token
        self._plans: dict[Membership, Plan | str] = {}  # a text is the reason why there is no plan
        self.link = Link(0.0, 1e12)  # between the cards, by the last measurement
        self._has_link = False
        self.samples = samples_of(own.graph)  # samples of a profiled pass
        self.optimizer_bytes = own.profile.optimizer_bytes
        budgets = self._options.get("budgets") or {}
        self.memory_bytes = budgets.get(own.device_class.name, own.device_class.memory_bytes)
        self._cards: Sequence[Card] = ()
        self._is_first = False
        self._copied = ("", 0)  # the first card and its number of plans, at the last copy
        self._retry_at_s = math.inf  # time of the next try after failed planning
        self._wake, self._ends = threading.Event(), threading.Event()
        server.offer("class", lambda: json.dumps(own.to_json()).encode())
        server.offer("plans", lambda: json.dumps(self._to_json()).encode())
        threading.Thread(target=self._work, name="qsync-plans", daemon=True).start()

    def __len__(self) -> int:
        return len(self._plans)

    def find(self, membership: Membership) -> Plan | None:
        """Return a membership's plan, None if not ready. Raises InfeasibleError if none exists."""
        found = self._plans.get(membership)
        if isinstance(found, str):
            raise InfeasibleError(found)
        return found

    def attend(self, cards: Sequence[Card], own: str) -> None:
        """Plan in the background for these cards if this card is the first, else copy the first's book."""
        was_first, self._is_first = self._is_first, cards[0].name == own
        is_news = membership_of(cards) != membership_of(self._cards) or self._is_first > was_first
        self._cards = cards
        # A leader with fewer plans may still have the one that this card lacks.
        is_behind = not self._is_first and (cards[0].name, cards[0].book) != self._copied
        if is_news or is_behind or time.monotonic() >= self._retry_at_s:
            self._wake.set()

    def note_link(self, link: Link) -> None:
        """Use a measured link from now on; plans made without one are replaced."""
        self.link = link
        if not self._has_link:
            self._has_link, self._plans, self._copied = True, {}, ("", 0)
            self._wake.set()

    def close(self) -> None:
        """Stop planning."""
        self._ends.set()
        self._wake.set()

    def _work(self) -> None:
        while True:
            self._wake.wait()
            self._wake.clear()
            if self._ends.is_set():
                return
            self._retry_at_s = math.inf
            try:
                self._lead() if self._is_first else self._copy()
            except QSyncError as error:  # a card left meanwhile, or did not answer
                logger.info("qsync: planning stopped: %s", error)
                self._retry_at_s = time.monotonic() + _RETRY_S
            except Exception as error:  # only this thread plans, so it must go on
                logger.exception("qsync: planning failed, and is tried again: %s", error)
                self._retry_at_s = time.monotonic() + _RETRY_S

    def _lead(self) -> None:
        """Plan for the current membership and the likely next ones, until it changes."""
        cards = self._cards
        present = membership_of(cards)
        for card in cards:
            if card.device_class not in self._classes:
                content = json.loads(fetch(card.server, "class", _FETCH_S, self._token))
                self._classes[card.device_class] = CardCosts.from_json(content)
        # Cards that wait for their first group have no link: the next memberships use their link.
        ahead = next_memberships(present) if self._has_link or len(cards) == 1 else []
        for membership in [present, *ahead]:
            if self._wake.is_set():
                return
            plans = self._plans  # a newly measured link starts another book
            if membership not in plans and all(name in self._classes for name, _, _ in membership):
                plans[membership] = self._planned(membership)

    def _copy(self) -> None:
        leader = self._cards[0]
        found = json.loads(fetch(leader.server, "plans", _FETCH_S, self._token))
        for entry in found:
            membership = tuple((name, count, slowdown) for name, count, slowdown in entry["membership"])
            self._plans[membership] = entry["why"] or Plan.from_json(entry["plan"])
        self._copied = (leader.name, leader.book)

    def _to_json(self) -> list[dict[str, Any]]:
        return [
            {
                "membership": membership,
                "plan": plan.to_json() if isinstance(plan, Plan) else None,
                "why": "" if isinstance(plan, Plan) else plan,
            }
            for membership, plan in dict(self._plans).items()
        ]

    def _planned(self, membership: Membership) -> Plan | str:
        """Plan in a separate low-priority process; return the plan, or the reason why there is none."""
        classes = tuple(
            replace(self._classes[name].device_class, count=count) for name, count, _ in membership
        )
        content = {
            "graph": self._own.graph.to_json(),
            "profiles": {name: self._classes[name].profile.to_json() for name, _, _ in membership},
            "slowdowns": {name: slowdown for name, _, slowdown in membership},
            "sensitivity": self._own.sensitivity.to_json(),
            "cluster": Cluster(classes, self.link).to_json(), "options": self._options,
        }  # fmt: skip
        done = subprocess.run(
            [sys.executable, "-m", "qsync.elastic_training.planning_process"],
            input=json.dumps(content), capture_output=True, text=True, env=environment(),
        )  # fmt: skip
        if done.returncode == 0:
            # Shares differ between memberships, so the plan is not tied to a batch.
            return replace(Plan.from_json(json.loads(done.stdout)), batch=())
        why = done.stderr.strip().splitlines() or [f"planning ended with exit code {done.returncode}"]
        return f"no plan for {shown(membership)}: {why[-1]}"
