"""Run a training job whose cards join and leave; every step trains one global batch.

A step begins with a meeting of the cards at the lighthouse. Its samples are divided among the cards that are
up to date. A card that is behind contributes zeros to the gradients' sum, and meanwhile receives the state at
the start of the step; applying the sum to it brings the card up to date. If an exchange fails, the cards that
saw the failure repeat the step. A card that completed the step is then ahead, and the others are healed from
it.
"""

from __future__ import annotations

import logging
import math
import signal
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import Future
from dataclasses import replace as with_fields
from typing import Any

import torch
import torch.distributed as dist

from qsync.backend.devices.device_detection import device_of
from qsync.distributed.job import backend_for
from qsync.distributed.shares import num_passes, share_out
from qsync.elastic_training.card_plan import CardPlan
from qsync.elastic_training.elastic_ddp import ElasticDDP, MembershipGroup
from qsync.elastic_training.elastic_step import ElasticStep, LoopChecks
from qsync.elastic_training.healing import Server, decode, encode, fetch
from qsync.elastic_training.meeting import Card, Meeting
from qsync.elastic_training.options import ElasticOptions
from qsync.elastic_training.plan_book import PlanBook, membership_of, shown
from qsync.elastic_training.rendezvous import Rendezvous, in_background
from qsync.elastic_training.share_loader import ShareLoader
from qsync.elastic_training.training_state import Hyperparameters, TrainingState
from qsync.elastic_training.waiting import Waiting
from qsync.errors import FormatError, MismatchError, QSyncError, UnsupportedError, shortened
from qsync.records.cluster import Link
from qsync.records.graph import digest
from qsync.records.plans import Plan
from qsync.tracing.forward_writes import BuffersBefore

logger = logging.getLogger("qsync")

_POLL_S = 0.05  # seconds between two meetings while a card waits
_PATIENCE = 3  # timeouts for which the remaining cards wait for a card with a later state
_MANY_FAILURES = 4  # consecutive failures with the same cards
_LINK_BYTES = 4 * 2**20  # bytes of the all-reduce that measures the link


class ElasticJob:
    """A card's part in an elastic job; created by `qsync.elastic`."""

    def __init__(
        self,
        states: Mapping[str, Any],
        dataset: Any,
        card: Card,
        rendezvous: Rendezvous,
        server: Server,
        options: ElasticOptions,
        book: PlanBook | None,
    ) -> None:
        model = states["model"]
        self.card, self.step = card.name, 0
        self._device = device_of(model)
        self._training = TrainingState(states)
        self._options, self._book = options, book
        self._num_samples = len(dataset)
        self._loader = ShareLoader(dataset, options)
        self._rendezvous, self._server = rendezvous, server
        host = server.address.rpartition(":")[0]
        self._store: Any = dist.TCPStore(host, 0, is_master=True, wait_for_workers=False)  # type: ignore[attr-defined]
        self._own = with_fields(card, store=f"{host}:{self._store.port}", server=server.address)
        self._exchange = MembershipGroup(options.timeout_s, backend_for(self._device))
        self.model = ElasticDDP(
            model, self._exchange, options.kinds,
            process_group=self._exchange.form(f"{self._own.store}/alone", 0, 1),
        )  # fmt: skip
        self._plan = CardPlan(card, self.model, book, options)
        self._pending: Future[bytes] | None = None  # the state of another card
        self._next: Future[Meeting | None] | None = None  # the meeting of the next step
        self._num_steps: int | None = None
        self._meeting: Meeting | None = None
        self._before: Hyperparameters = []  # hyperparameters at the start of a healing step
        self._seen_step = 0
        self._waiting = Waiting(self.card, options.join_timeout_s)
        self._num_failures = 0
        self._failing: tuple[str, ...] = ()  # cards of the last failed exchanges, and the number of failures
        self._failures_in_a_row = 0
        self._has_left, self._is_relieved, self._patient_until = False, False, 0.0
        self._buffers = BuffersBefore(model)  # buffers at the start of the step
        encode(self._training.without_weights())  # raises now, while no other card depends on it
        self._released = threading.Event()
        self._loop = LoopChecks(self.model, states["optimizer"])

    # --- The training loop ---

    def steps(self, epochs: float | None = None, num_steps: int | None = None) -> Iterator[ElasticStep]:
        """Yield the job's steps until its end, or until this card is released.

        Every sample of an epoch is in exactly one step, even if cards are lost. A step whose gradients did
        not arrive is yielded again.

        Args:
            epochs: epochs since the start of the job, rounded down to whole steps.
            num_steps: steps since the start of the job. Without both the loop ends when the card is released.

        Raises:
            MismatchError: another job uses this lighthouse.
            FormatError: more cards than samples in a batch, epochs without a whole step, or a loop without
                `step.arrived()`.
            InfeasibleError: no plan fits, found before the first step.
        """
        if self._has_left:
            raise FormatError("this card has left the job; join again with qsync.elastic")
        self._num_steps = num_steps = self._num_steps_of(epochs, num_steps)
        restore = self._listen()
        self._rendezvous.begin(self.card)
        try:
            while num_steps is None or self.step < num_steps:
                step = self._begin()
                if step is None:
                    self._is_relieved = True
                    return
                yield step
                self._loop.end(step)
        finally:
            restore()
            self._leave()

    def _num_steps_of(self, epochs: float | None, num_steps: int | None) -> int | None:
        """Return the number of steps requested of `steps`. Raises FormatError for an invalid one."""
        for name, number in (("epochs", epochs), ("num_steps", num_steps)):
            if number is not None and not (type(number) in (int, float) and 0 <= number < math.inf):
                raise FormatError(f"{name} must be a number from 0 on, found {shortened(number)}; correct it")
        if epochs is not None and num_steps is not None:
            raise FormatError("epochs and num_steps are both given; leave out one of them")
        if num_steps is not None and num_steps != int(num_steps):
            raise FormatError(f"num_steps must be a whole number, found {shortened(num_steps)}; round it")
        if epochs is None:
            return num_steps
        found = int(epochs * self._num_samples) // self._options.batch_size
        if epochs and not found:
            raise FormatError(
                f"{epochs:g} epochs of {self._num_samples} samples do not fill one step of "
                f"{self._options.batch_size}; give more epochs, or a smaller batch_size"
            )
        return found

    def release(self) -> None:
        """Make this card leave after its current step; the loop ends, and its memory is freed.

        The last card holds the job's state: it waits until another card has received it.
        """
        self._released.set()

    @property
    def cards(self) -> tuple[str, ...]:
        """Return the names of the current step's cards, by rank."""
        return tuple(card.name for card in self._meeting.cards) if self._meeting else ()

    @property
    def plan(self) -> Plan | None:
        """Return this card's current plan."""
        return self._plan.plan

    @property
    def is_first(self) -> bool:
        """Return whether this card is the step's first, which writes checkpoints."""
        return self.cards[:1] == (self.card,)

    @property
    def group(self) -> str:
        """Return the unique name of the current process group."""
        return self._own.group

    def state_dict(self) -> dict[str, Any]:
        """Return the job's position: its steps, its seed and its history of commits."""
        return {"step": self.step, "history": self._own.history, **self._order()}

    def _order(self) -> dict[str, int]:
        """Return the facts that determine the order of samples."""
        return {
            "seed": self._options.seed,
            "batch_size": self._options.batch_size,
            "num_samples": self._num_samples,
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue from a position, such as a checkpoint's.

        Raises MismatchError for another order of samples: another seed, batch size or dataset length.
        """
        for name, own in self._order().items():
            saved = state.get(name, own)  # older checkpoints have only the seed
            if saved != own:
                raise MismatchError(
                    f"the checkpoint has {name} {saved}, but this job has {own}; use the same, so that no "
                    "sample is lost or seen twice"
                )
        self.step = int(state["step"])
        self._own = with_fields(self._own, step=self.step, history=str(state["history"]))

    # --- One step ---

    def _begin(self) -> ElasticStep | None:
        """Meet the other cards; return this card's part of the next step, or None to leave."""
        while True:
            pending, self._next = self._next, None
            meeting = pending.result() if pending is not None else self._meet()
            if meeting is None:
                return None
            if self.card in meeting.released:
                self.release()
            if not meeting.has(self.card):
                return None
            if not self._may_step(meeting):
                time.sleep(_POLL_S)
                continue
            gone = [name for name in self.cards if not meeting.has(name)]
            if gone:
                logger.info("qsync: %s continues without %s", self.card, ", ".join(gone))
            self._meeting = meeting
            if meeting.keeps_group or self._form_group(meeting):
                return self._step_of(meeting)

    def _meet(self) -> Meeting | None:
        """Meet the other cards; return None if this card may leave although no lighthouse answers."""

        def may_leave() -> bool:
            if self._meeting is None:
                self._waiting.note(f"a first meeting at {self._rendezvous.address}", is_bounded=True)
            current = self._meeting.current if self._meeting else ()
            return self._released.is_set() and any(card.name != self.card for card in current)

        return self._rendezvous.meet(self._card(), may_leave)

    def _card(self) -> Card:
        """Return the facts about this card that it sends to the others."""
        return with_fields(
            self._own,
            book=self._plan.num_plans,
            rate=self._plan.rate,
            limit=self._plan.limit,
            slowdown=self._plan.slowdown,
            leaves=self._released.is_set(),
        )

    def _may_step(self, meeting: Meeting) -> bool:
        """Return whether the current cards can take the next step."""
        step = meeting.current[0].step
        if step < self._seen_step:
            self._waiting.note(f"a card that has the state of step {self._seen_step}", is_bounded=False)
            self._patient_until = (
                self._patient_until or time.monotonic() + _PATIENCE * self._options.timeout_s
            )
            if time.monotonic() < self._patient_until:
                return False
            logger.warning(
                "qsync: no card has the state of step %d any more; %s continues from step %d",
                self._seen_step, self.card, step,
            )  # fmt: skip
        self._seen_step, self._patient_until = step, 0.0
        if all(card.leaves for card in meeting.cards):
            self._waiting.note(
                "a card to take the job over: this one is the last, and is to leave", is_bounded=False
            )
            return False
        if any(card.has_trained for card in meeting.cards):
            return True
        if len(meeting.cards) < self._options.num_first:
            missing = self._options.num_first - len(meeting.cards)
            here = ", ".join(card.name for card in meeting.cards)
            self._waiting.note(
                f"{missing} more of the {self._options.num_first} cards that it starts with, beside {here}",
                is_bounded=True,
            )
            return False
        is_ready = self._plan.is_ready(meeting.cards)
        if is_ready:
            self._plan.adopt(meeting.cards, step)  # so that the others learn which plan this card has
        self._own = with_fields(self._own, is_ready=is_ready)
        if self._book is None or all(card.is_ready for card in meeting.cards):
            return True
        lacking = ", ".join(card.name for card in meeting.cards if not card.is_ready)
        self._waiting.note(f"the plan of the cards that are there, which {lacking} lacks", is_bounded=True)
        return False

    def _form_group(self, meeting: Meeting) -> bool:
        """Form the process group of these cards; return False if one has gone meanwhile."""
        start_s = time.perf_counter()
        first, cards = meeting.cards[0], meeting.cards
        rank = meeting.rank_of(self.card)
        try:
            group = self._exchange.form(f"{first.store}/{meeting.key}", rank, len(cards))
        except RuntimeError as error:
            self._exchange.fail(error)
            self._go_alone()
            return False
        self.model.reform(group)
        self._own = with_fields(self._own, group=f"{meeting.key}/{len(cards)}")
        if not first.history and not first.step:
            self._begin_alike(meeting)
        if len(cards) > 1 and any(card.link_s is None for card in cards):
            self._measure_link(group, len(cards))
        if rank == 0:
            logger.info(
                "qsync: step %d continues with %s (%.0f ms)", first.step, shown(membership_of(cards)),
                1e3 * (time.perf_counter() - start_s),
            )  # fmt: skip
        if self._exchange.failure is not None:
            self._go_alone()
            return False
        return True

    def _begin_alike(self, meeting: Meeting) -> None:
        """Broadcast rank 0's initial state: weights, buffers, hyperparameters and other states."""
        self.model.broadcast_state()
        name = f"begin/{meeting.key}"
        if meeting.rank_of(self.card) == 0:
            self._server.offer(name, encode(self._training.without_weights()), instead_of="begin/")
            return
        try:
            rest = decode(fetch(meeting.cards[0].server, name, self._options.timeout_s, self._server.token))
        except QSyncError as error:
            self._exchange.fail(error)
            return
        self._training.load(rest)

    def _measure_link(self, group: dist.ProcessGroup, num_ranks: int) -> None:
        """Measure an all-reduce among the cards, because one of them has not done so."""
        seconds = []
        for num_bytes in (4, 4, _LINK_BYTES, _LINK_BYTES):
            tensor = torch.zeros(num_bytes // 4, device=self._device)
            start_s = time.perf_counter()
            self._exchange.all_reduce(tensor, group).wait()
            if self._device.type == "cuda":
                torch.cuda.synchronize(self._device)
            seconds.append(time.perf_counter() - start_s)
        latency_s, bulk_s = seconds[1], seconds[3]
        if self._exchange.failure is not None:
            return
        self._own = with_fields(self._own, link_s=bulk_s)
        if self._book is not None:
            rate = _LINK_BYTES / max(bulk_s - latency_s, 1e-9)
            self._book.note_link(Link(latency_s, rate, num_ranks=num_ranks))

    def _step_of(self, meeting: Meeting) -> ElasticStep:
        """Return this card's part of a step of these cards."""
        current = meeting.current
        self._plan.adopt(meeting.cards, current[0].step)
        shares = share_out(
            self._options.batch_size, [card.rate for card in current], [card.limit for card in current]
        )
        rank = meeting.rank_of(self.card)
        is_behind = rank >= len(current)
        share = shares[rank % len(shares)]
        if is_behind:  # it computes on another card's samples, in passes that fit its memory
            passes = max(share.passes, num_passes(share.samples, self._plan.limit))
            share = with_fields(share, passes=passes)
        hook = self.model.hook
        hook.samples, hook.passes, hook.is_behind = share.samples, share.passes, is_behind
        is_equal = all(one.samples == shares[0].samples and one.passes == 1 for one in shares)
        hook.num_equal = len(shares) if is_equal else 0
        hook.is_complete, hook.num_reduced = False, 0
        self.step = current[0].step
        name = f"state/{meeting.key}"
        if is_behind:
            server = meeting.source_of(self.card).server
            self._pending = in_background(
                lambda: fetch(server, name, self._options.timeout_s, self._server.token)
            )
        elif any(meeting.source_of(card.name).name == self.card for card in meeting.behind):
            try:
                content = encode({**self._training.whole(), "job": self.state_dict()})
            except QSyncError as error:  # this card can continue training; the other card is refused
                content = encode({"refused": str(error)})
            self._server.offer(name, content, instead_of="state/")
        elif self.step:  # all have started, and nobody heals from this card, so it keeps no copy of its state
            self._server.withdraw("state/", "begin/")
        self._before = self._training.marked() if is_behind else []
        self._loader.turn(self.step, share)
        self._buffers = BuffersBefore(self.model)
        return self._loop.begin(ElasticStep(self, self.step, share, is_behind))

    def _finish(self, step: ElasticStep) -> bool:
        """Receive the state if this card is behind; return whether the step counts."""
        if self._exchange.failure is None:
            self._loop.check_whole(step)
        if self._exchange.failure is None and step.is_behind:
            assert self._pending is not None
            try:
                state = decode(self._pending.result())
            except QSyncError as error:
                self._exchange.fail(error)
            else:
                if "refused" in state:
                    raise UnsupportedError(state["refused"])
                self._training.heal(state, self._before)
                self.load_state_dict(state["job"])
        elif self._exchange.failure is None:
            self._plan.note_pace(step.samples, step.began_s)
        if self._exchange.failure is not None:
            # Some gradients are already summed; the repeated step must not add to them.
            for parameter in self.model.parameters():
                parameter.grad = None
            self._buffers.restore()  # nor to counters that forward updates
            self._go_alone()
            return False
        self.step += 1
        self._failures_in_a_row = 0
        self._loop.note_arrival()
        history = digest([self._own.history, self.group])
        self._own = with_fields(
            self._own,
            step=self.step,
            history=history,
            has_trained=True,
            learning_rates=self._training.learning_rates(),
        )
        if self.step != self._num_steps:
            # All cards are here now. They meet again while the optimizer steps, so no card waits before its
            # next forward.
            self._next = self._rendezvous.in_background(self._meet)
        return True

    def _go_alone(self) -> None:
        """Leave a failed group: its connections close, so the other cards' exchanges fail at once."""
        self._own = with_fields(self._own, group="")
        self._num_failures += 1
        self._warn_of_failures()
        self.model.reform(self._exchange.form(f"{self._own.store}/alone/{self._num_failures}", 0, 1))

    def _warn_of_failures(self) -> None:
        """Log once that exchanges of the same cards keep failing, without any card being lost."""
        is_again = self.cards == self._failing
        self._failures_in_a_row = self._failures_in_a_row + 1 if is_again else 1
        self._failing = self.cards
        if self._failures_in_a_row == _MANY_FAILURES and self._meeting is not None:
            places = ", ".join(f"{card.name} at {card.store}" for card in self._meeting.cards)
            logger.warning(
                "qsync: %d exchanges failed in a row (%s); check that all values have types that can be "
                "exchanged, and that the cards can reach each other: %s",
                _MANY_FAILURES, shortened(self._exchange.failure, 200), places,
            )  # fmt: skip

    # --- Leaving ---

    def _listen(self) -> Callable[[], None]:
        """Make SIGTERM release this card, and a second one end it; return a function that undoes this."""
        if threading.current_thread() is not threading.main_thread():
            return lambda: None
        before = signal.getsignal(signal.SIGTERM)

        def restore() -> None:
            signal.signal(signal.SIGTERM, before)

        def leave(*_: Any) -> None:
            self.release()
            restore()

        signal.signal(signal.SIGTERM, leave)
        return restore

    def _leave(self) -> None:
        """Leave the job; if other cards continue it, free all training memory but the weights."""
        self._has_left = True
        self._rendezvous.leave()
        if self._book is not None:
            self._book.close()
        self._server.close()
        self._exchange.close()
        self._store = None  # ends its server
        self._loop.close()
        self._loader.close()
        if self._is_relieved:
            self._training.free()
