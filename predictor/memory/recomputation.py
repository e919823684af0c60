"""Lifetimes with activation recomputation: blocks run forward again in backward.

Between forward and backward a block holds only its inputs. Just before the backward of its last operator it
runs forward again, operator by operator, in time slots of its own. The block's backward then reads tensors
that a plain block would have saved. All times of a step without recomputation are shifted accordingly.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace

from qsync.predictor.memory.spans import Span


class RecomputedBlocks:
    """The recomputed blocks of one graph, each as (first, last operator); `users` as in `Layout`.

    >>> list(RecomputedBlocks(blocks, num_ops, position, users).spans("fc1", span))
    """

    def __init__(
        self,
        blocks: Sequence[tuple[int, int]],
        num_ops: int,
        position: Mapping[str, int],
        users: Mapping[str, Sequence[int]],
    ) -> None:
        self._num_ops, self._position, self._users = num_ops, position, users
        self._block: list[tuple[int, int] | None] = [None] * (num_ops + 1)
        for first, last in blocks:
            self._block[first : last + 1] = [(first, last)] * (last - first + 1)
        # The slots by which recomputation delays each operator's backward.
        self._delay = [0] * (num_ops + 1)
        for i in reversed(range(num_ops)):
            block = self._block[i]
            begins = block is not None and block[1] == i
            self._delay[i] = self._delay[i + 1] + (block[1] - block[0] + 1 if begins and block else 0)
        self.end = 2 * num_ops + self._delay[0]

    def shifted(self, time: int) -> int:
        """Shift a time of the step without recomputation to the step with it."""
        if time <= self._num_ops:
            return time
        return time + self._delay[max(2 * self._num_ops - time, 0)]

    def runs_again(self, i: int) -> bool:
        """Return whether operator `i` belongs to a recomputed block."""
        return self._block[i] is not None

    def second_time(self, i: int) -> int:
        """Return the time at which operator `i` of a block runs forward again."""
        block = self._block[i]
        assert block is not None, "only operators of a block run again"
        return self.shifted(2 * self._num_ops - block[1]) - (block[1] - i + 1)

    def spans(self, what: str | int, span: Span, casts_again: bool = False) -> Iterator[Span]:
        """Yield the lifetimes of a tensor of a value (by name) or operator (by position).

        `span` is its lifetime without recomputation. With `casts_again`, a block casts its weights again.
        """
        if span.birth > self._num_ops:
            yield replace(span, birth=self.shifted(span.birth), death=self.shifted(span.death))
            return
        block, readers = self._maker_and_readers(what)
        if casts_again and isinstance(what, str) and what not in self._position:
            block = self._block[span.birth]  # the first reader's block, where the weight is cast
        if block is None:
            yield from self._across_blocks(span, readers)
        elif readers and readers[-1] > block[1]:  # read after its block: saved, and recomputed
            yield from self._across_blocks(span, [i for i in readers if i > block[1]])
            if span.birth >= block[0]:
                last = self.second_time(block[1])
                yield replace(
                    span, birth=self.second_time(min(span.birth, block[1])), death=last, part="transient"
                )
        elif span.death <= self._num_ops:
            yield span
            yield replace(
                span, birth=self.second_time(span.birth), death=self.second_time(min(span.death, block[1]))
            )
        else:
            used = max([i for i in readers if i <= block[1]], default=span.birth)
            yield replace(span, death=max(used, span.birth), part="transient", saver="")
            again = self.second_time(span.birth)
            yield replace(span, birth=again, death=self.shifted(span.death), part="transient", saver="")

    def _maker_and_readers(self, what: str | int) -> tuple[tuple[int, int] | None, Sequence[int]]:
        """Return the block that computes a tensor (None outside blocks), and the tensor's readers."""
        if isinstance(what, int):
            return self._block[what], ()
        place = self._position.get(what)
        return (self._block[place] if place is not None else None), self._users[what]

    def _across_blocks(self, span: Span, readers: Sequence[int]) -> Iterator[Span]:
        """Yield the lifetime of a tensor extended to the second forward of every block that reads it."""
        death, saver = self.shifted(span.death), ""
        for i in readers:
            block = self._block[i]
            if block is not None and block[0] > span.birth:
                until = self.second_time(block[1])
                if until > death:
                    death, saver = until, saver or self._name(i)
        if saver and span.part == "transient":
            yield replace(span, death=death, part="saved", saver=saver)
        else:
            yield replace(span, death=death)

    def _name(self, i: int) -> str:
        return next(name for name, place in self._position.items() if place == i)
