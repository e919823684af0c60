"""How gradients travel between ranks: kinds of compression, their messages and bytes. No torch."""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

from qsync.errors import FormatError, shortened

BLOCK = 256  # elements that share one FP32 scale in int8
AUTO = "auto"  # a kind chosen for each bucket by the plan
DEFAULT_RANK = 4  # of powersgd
_LEAST_SAVING = 2  # a matrix is sent as factors of low rank if these are more than so many times smaller
_TEXT = re.compile(r"(fp32|bf16|int8|powersgd)(?::([1-9][0-9]{0,3}))?(\+feedback)?")
_HOW = (
    "choose 'bf16', 'int8', 'powersgd' (with a rank: 'powersgd:4') or 'auto', with '+feedback' behind it to "
    "carry what rounding loses to the next step; leave it out for FP32"
)
Shapes = Sequence[tuple[int, ...]]


class CodecCost(NamedTuple):
    """Seconds of a bucket's exchange in one kind, by its bytes in FP32."""

    s_per_call: float
    s_per_byte: float

    def seconds(self, num_bytes: int) -> float:
        """Return the seconds of a bucket of so many bytes in FP32."""
        return self.s_per_call + self.s_per_byte * num_bytes


class Message(NamedTuple):
    """One collective: its name in torch.distributed, and the bytes that each rank passes to it."""

    collective: str
    num_bytes: int

    @property
    def is_within_hosts(self) -> bool:
        """Return whether it connects the ranks of each host alone."""
        return self.collective in ("reduce", "broadcast")

    def sent_bytes(self, num_ranks: int) -> float:
        """Return the bytes that each rank sends, by ring or directly: those of its own part excluded."""
        others = num_ranks - 1
        factor = {"all_reduce": 2 * others / num_ranks, "all_to_all": others / num_ranks}
        return factor.get(self.collective, others) * self.num_bytes

    def as_all_reduce(self, num_ranks: int) -> float:
        """Return the bytes of an all-reduce of which each rank sends as much."""
        if self.collective == "all_reduce":
            return self.num_bytes
        return self.sent_bytes(num_ranks) * num_ranks / (2 * max(1, num_ranks - 1))


@dataclass(frozen=True, slots=True)
class Compression:
    """One way in which a bucket of FP32 gradients travels.

    `fp32` and `bf16` are all-reduced. `int8` goes two ways: blocks of `BLOCK` codes with an FP32 scale are
    exchanged, each rank adds up its part in FP32, and the codes of the parts are gathered. `powersgd` sends
    matrices as factors of a low `rank` (Vogels et al. 2019), with error feedback, without which it would not
    converge. Error feedback adds what a step's encoding lost to the next step's gradients.
    """

    kind: str = "fp32"
    rank: int = 0
    has_feedback: bool = False

    @classmethod
    def parse(cls, text: object) -> Compression:
        """Read a kind. Raises FormatError for one that does not exist.

        >>> Compression.parse("powersgd:2").rank
        2
        """
        found = _TEXT.fullmatch(text) if isinstance(text, str) else None
        if found is None or (found[2] and found[1] != "powersgd") or text == "fp32+feedback":
            raise FormatError(f"compression {shortened(text)} does not exist; {_HOW}")
        is_low_rank = found[1] == "powersgd"
        rank = int(found[2] or DEFAULT_RANK) if is_low_rank else 0
        return cls(found[1], rank, is_low_rank or found[3] is not None)

    def __str__(self) -> str:
        if self.kind == "powersgd":
            return f"powersgd:{self.rank}"
        return self.kind + ("+feedback" if self.has_feedback else "")

    def on(self, shapes: Shapes, num_ranks: int) -> Compression:
        """Return how a bucket of these shapes travels: in FP32 if it has less than a block for each rank."""
        is_small = self.kind == "int8" and _num_elements(shapes) < num_ranks * BLOCK
        return replace(self, kind="fp32", has_feedback=False) if is_small else self

    def is_factored(self, shape: tuple[int, ...]) -> bool:
        """Return whether `powersgd` sends a gradient of this shape as factors.

        Its first dimension counts as the rows, all others as the columns.
        """
        if len(shape) < 2:
            return False
        rows, columns = shape[0], math.prod(shape[1:])
        return _LEAST_SAVING * self.rank * (rows + columns) < rows * columns

    def messages(self, shapes: Shapes, num_ranks: int) -> list[Message]:
        """Return the collectives that sum a bucket of gradients of these shapes over the ranks."""
        kind, size = self.on(shapes, num_ranks).kind, _num_elements(shapes)
        if kind == "int8":
            row_bytes = message_bytes(part_elements(size, num_ranks))
            return [Message("all_to_all", num_ranks * row_bytes), Message("all_gather", row_bytes)]
        factored = [shape for shape in shapes if kind == "powersgd" and self.is_factored(shape)]
        if factored:
            rows = self.rank * sum(shape[0] for shape in factored)
            columns = self.rank * sum(math.prod(shape[1:]) for shape in factored)
            whole = size - _num_elements(factored)
            return [Message("all_reduce", 4 * (rows + whole)), Message("all_reduce", 4 * columns)]
        return [Message("all_reduce", (2 if kind == "bf16" else 4) * size)]


def check_compression(compression: object) -> None:
    """Raise FormatError for a `compression` of `qsync.hybrid` that does not exist."""
    if compression is not None and compression != AUTO:
        Compression.parse(compression)


def kinds_for(is_alike: bool) -> tuple[str, ...]:
    """Return the kinds that `auto` chooses from beside FP32; `powersgd` on ranks of one hardware alone."""
    return ("bf16", "int8", "int8+feedback", *((f"powersgd:{DEFAULT_RANK}",) if is_alike else ()))


def asked_kinds(compression: str | None) -> dict[str, str] | None:
    """Return the kinds by parameter that a `compression` asks for; None for none, or for the plan's."""
    return {"*": compression} if compression is not None and compression != AUTO else None


_BY_LOSS = ("fp32", "bf16", "int8", "powersgd")  # from the least


def kind_of(kinds: Mapping[str, str], parameters: Iterable[str]) -> Compression:
    """Return how a bucket of parameters travels: where their kinds differ, in the one that loses least.

    `kinds` maps parameters to kinds; "*" stands for all others, which travel in FP32 without it.

    >>> kind_of({"*": "int8", "head.weight": "fp32"}, ["head.bias", "inner.weight"])
    Compression(kind='int8', rank=0, has_feedback=False)
    """
    found = {kinds.get(name, kinds.get("*", "fp32")) for name in parameters}
    each = map(Compression.parse, found)
    return min(
        each,
        key=lambda own: (_BY_LOSS.index(own.kind), not own.has_feedback, -own.rank),
        default=Compression(),
    )


def part_elements(size: int, num_ranks: int) -> int:
    """Return the elements of a bucket that each rank adds up in int8: whole blocks."""
    return -(-size // (num_ranks * BLOCK)) * BLOCK


def message_bytes(elements: int) -> int:
    """Return the bytes of whole blocks in int8: a byte for each element, 4 for each block's scale."""
    return elements + 4 * (elements // BLOCK)


def _num_elements(shapes: Shapes) -> int:
    return sum(map(math.prod, shapes))
