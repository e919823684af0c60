"""Choose and run one card's plan, limit its passes by memory, and watch its speed."""

from __future__ import annotations

import logging
import time
from collections.abc import Sequence

from qsync.elastic_training.elastic_ddp import ElasticDDP
from qsync.elastic_training.meeting import Card
from qsync.elastic_training.options import ElasticOptions
from qsync.elastic_training.pace import Pace
from qsync.elastic_training.plan_book import Membership, PlanBook, membership_of, shown
from qsync.errors import InfeasibleError
from qsync.records.graph import digest
from qsync.records.plans import Plan
from qsync.runtime.wrapping import plan_of, swap_plan

logger = logging.getLogger("qsync")


class CardPlan:
    """This card's current plan, and its share-dependent limits.

    `rate` is in samples per second (0: unknown), `limit` the most samples per pass (None: no limit).
    """

    def __init__(self, card: Card, model: ElasticDDP, book: PlanBook | None, options: ElasticOptions) -> None:
        self._name, self._class = card.name, card.device_class
        self._model, self._book, self._options = model, book, options
        self._membership: Membership = ()
        self._pace = Pace()
        self._assignment = ""  # digest of the running assignment
        self.plan: Plan | None = plan_of(model.module)
        self.rate, self.limit = card.rate, card.limit
        given = self.plan.classes.get(self._class) if self.plan is not None and book is None else None
        if given is not None and given.predicted is not None and options.share:
            self.rate = 1.0 / given.predicted.compute_s

    @property
    def slowdown(self) -> float:
        """Return this card's compute time relative to its first steps."""
        return self._pace.slowdown

    @property
    def num_plans(self) -> int:
        """Return the number of plans in the book."""
        return len(self._book) if self._book is not None else 0

    def is_ready(self, cards: Sequence[Card]) -> bool:
        """Return whether these cards have a plan to start with; otherwise plan in the background."""
        if self._book is None:
            return True
        self._book.attend(cards, self._name)
        return self._book.find(membership_of(cards)) is not None

    def adopt(self, cards: Sequence[Card], step: int) -> None:
        """Run the plan of the current membership, if the book has one and it is not running yet."""
        if self._book is None:
            return
        self._book.attend(cards, self._name)
        membership = membership_of(cards)
        try:
            found = self._book.find(membership)
        except InfeasibleError as error:
            if membership != self._membership:
                logger.warning("qsync: %s; the current plan stays in use", error)
            self._membership = membership
            return
        if found is None or (membership == self._membership and found == self.plan):
            return
        start_s = time.perf_counter()
        own = found[self._class]
        if self.plan is None or own.assignment != self.plan[self._class].assignment:
            swap_plan(self._model.module, found, self._class)
        self.plan, self._membership = found, membership
        self._assignment = digest(sorted(own.assignment.items()))
        if own.predicted is not None:
            self.rate = 1.0 / own.predicted.compute_s if self._options.share else 1.0
            self.limit = self._most_samples(own.predicted.memory_bytes, self._book)
        logger.info(
            "qsync: %s uses the plan for %s from step %d on (%.0f ms)", self._name, shown(membership), step,
            1e3 * (time.perf_counter() - start_s),
        )  # fmt: skip

    def _most_samples(self, planned_bytes: int, book: PlanBook) -> int:
        """Return the largest number of samples per pass that fits; activations grow with samples."""
        # Weights, trained weights' gradients, and optimizer states.
        fixed = book.optimizer_bytes + sum(
            (1 + parameter.requires_grad) * parameter.nbytes for parameter in self._model.parameters()
        )
        per_sample = max(planned_bytes - fixed, 1) / book.samples
        holds = max(1, int((book.memory_bytes - fixed) / per_sample))
        return min(holds, self._options.max_samples or holds)

    def note_pace(self, samples: int, began_s: float) -> None:
        """Record a step's forward and backward time; log if the pace has changed."""
        predicted = self.plan[self._class].predicted if self.plan is not None else None
        if predicted is None:
            return
        planned = next((slowdown for name, _, slowdown in self._membership if name == self._class), 1.0)
        measured_s = self._model.hook.last_s - began_s
        if not self._pace.note(self._assignment, samples, measured_s, predicted.compute_s / planned):
            return
        change = f"computes {self.slowdown:g} times as long as at first"
        logger.warning(
            "qsync: %s %s; the job plans for that", self._name,
            change if self.slowdown > 1 else "is as fast as at first again",
        )  # fmt: skip
