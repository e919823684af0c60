"""Decide from the records of all cards who is in a step, who heals from whom, and in which order. Pure."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from qsync.errors import FormatError, MismatchError, shortened
from qsync.records.graph import digest


@dataclass(frozen=True, slots=True)
class Card:
    """The record that a card sends to the others.

    `history` identifies the commits behind its state, empty before the first. `group` is its working process
    group, or empty. `store` and `server` are the addresses of its rendezvous store and of its state. `limit`
    is its largest number of samples per pass.
    """

    name: str
    device_class: str
    started_s: float
    facts: Mapping[str, str]
    step: int = 0
    history: str = ""
    group: str = ""
    store: str = ""
    server: str = ""
    rate: float = 0.0  # samples per second, for shares; 0: unknown
    limit: int | None = None
    slowdown: float = 1.0
    link_s: float | None = None  # seconds of its link-measuring all-reduce; None: not measured
    book: int = 0  # number of plans in its book
    is_ready: bool = False  # whether it has the plan for the first step
    release: tuple[str, ...] = ()  # cards that it asks to leave
    has_trained: bool = False  # whether it has taken a step of the job
    leaves: bool = False  # whether it leaves once another card has the state
    learning_rates: tuple[float, ...] = ()  # at the end of its last step


@dataclass(frozen=True, slots=True)
class Meeting:
    """The cards of one step: up-to-date ones, then ones to heal, each sorted by name.

    Leaving cards are in neither; if all up-to-date cards leave, the first of them stays. `released` names the
    cards asked to leave.
    """

    key: str
    current: tuple[Card, ...]
    behind: tuple[Card, ...]
    released: tuple[str, ...] = ()

    @property
    def cards(self) -> tuple[Card, ...]:
        """Return all cards, by rank."""
        return self.current + self.behind

    @property
    def keeps_group(self) -> bool:
        """Return whether exactly these cards share one working process group."""
        groups = {card.group for card in self.cards}
        size = next(iter(groups)).rpartition("/")[2]
        return len(groups) == 1 and size == str(len(self.cards))

    def rank_of(self, name: str) -> int:
        """Return the rank of a card."""
        return [card.name for card in self.cards].index(name)

    def has(self, name: str) -> bool:
        """Return whether a card is in this step."""
        return any(card.name == name for card in self.cards)

    def source_of(self, name: str) -> Card:
        """Return the card from which a card that is behind gets its state."""
        place = [card.name for card in self.behind].index(name)
        return self.current[place % len(self.current)]


def _check_learning_rates(own: Card, first: Card) -> None:
    """Raise MismatchError if a card's learning rate differs from the first card's with equal history."""
    if own.history != first.history or not own.learning_rates or not first.learning_rates:
        return
    if own.learning_rates != first.learning_rates:
        job, card = (", ".join(f"{rate:g}" for rate in one.learning_rates) for one in (first, own))
        raise MismatchError(
            f"the job's learning rate is {shortened(job, quote=False)}, but this card's is "
            f"{shortened(card, quote=False)}; pass the scheduler to qsync.elastic in states"
        )


def meeting_of(key: str, cards: Sequence[Card], own: Card) -> Meeting:
    """Return the meeting of the cards of this card's job. Pure.

    The job is chosen from the cards that have trained, else the card with the most steps, else the first
    card. Cards of other jobs, with a taken name, or beyond the batch's samples are ignored. On an ignored
    card it raises: MismatchError for another job, else FormatError.
    """
    workers = _with_own_names([card for card in cards if card.facts], own)
    first = min(workers, key=lambda card: (not card.has_trained, -card.step, card.started_s, card.name))
    for what, value in first.facts.items():
        found = own.facts.get(what, "nothing")
        if found != value:
            is_digest = len(value) == len(found) == len(digest(""))
            raise MismatchError(
                (f"the job at this lighthouse and this card differ in {what}" if is_digest else
                 f"the job at this lighthouse has {value} as {what}, and this card has {found}")
                + "; start this card with the same, or give its job a lighthouse of its own"
            )  # fmt: skip
    _check_learning_rates(own, first)
    mates = _that_find_samples([card for card in workers if card.facts == first.facts], own)
    # A card that only resumed a checkpoint (perhaps another run's) does not replace trained cards.
    trained = [card for card in mates if card.has_trained] or mates
    step = max(card.step for card in trained)
    leading = [card for card in trained if card.step == step]
    # Two parts of a job may have trained the same step separately; the larger part wins.
    count = Counter(card.history for card in leading)
    history = min(count, key=lambda one: (-count[one], one))
    able = [card for card in leading if card.history == history]
    current = tuple(card for card in able if not card.leaves) or tuple(able[:1])
    behind = tuple(card for card in mates if card not in able and not card.leaves)
    return Meeting(key, current, behind, tuple(name for card in cards for name in card.release))


def _by_age(cards: Iterable[Card]) -> list[Card]:
    return sorted(cards, key=lambda card: (not card.has_trained, card.started_s, card.store))


def _with_own_names(workers: Sequence[Card], own: Card) -> list[Card]:
    """Return the oldest card of every name. Raises FormatError on a younger one."""
    oldest = {card.name: card for card in reversed(_by_age(workers))}
    if own.name in oldest and oldest[own.name].store != own.store:
        raise FormatError(
            f"the job already has a card {shortened(own.name)}; give this one another name with card="
        )
    return list(oldest.values())


def _that_find_samples(mates: Sequence[Card], own: Card) -> list[Card]:
    """Return the oldest cards, at most as many as a batch has samples. Raises FormatError on the others."""
    most = int(mates[0].facts.get("batch_size", len(mates)))
    kept = _by_age(mates)[:most]
    if len(kept) < len(mates) and own.name not in {card.name for card in kept}:
        raise FormatError(
            f"{len(mates)} cards cannot share {most} samples a step; give a larger batch_size, or fewer cards"
        )
    return sorted(kept, key=lambda card: card.name)
