"""When tensors live if blocks compute forward once more in backward (activation checkpointing).

Between forward and backward a block keeps only what enters it. Just before the backward of its last operator
it runs forward again, operator by operator, which takes time slots of its own; then its backward finds what
it would have kept. Times of a step without that are moved to those of a step with it (ours).
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace

from qsync.predictor.memory.spans import Span


class Recomputed:
    """The blocks of one graph, each as its first and last operator; `involved` as in `Layout`.

    >>> list(Recomputed(blocks, num_ops, position, involved).lives("fc1", span))
    """

    def __init__(
        self,
        blocks: Sequence[tuple[int, int]],
        num_ops: int,
        position: Mapping[str, int],
        involved: Mapping[str, Sequence[int]],
    ) -> None:
        self._num_ops, self._position, self._involved = num_ops, position, involved
        self._block: list[tuple[int, int] | None] = [None] * num_ops
        for first, last in blocks:
            self._block[first : last + 1] = [(first, last)] * (last - first + 1)
        # By how many slots the backward of each operator is later, its block's own second forward included.
        self._late = [0] * (num_ops + 1)
        for i in reversed(range(num_ops)):
            block = self._block[i]
            begins = block is not None and block[1] == i
            self._late[i] = self._late[i + 1] + (block[1] - block[0] + 1 if begins and block else 0)
        self.end = 2 * num_ops + self._late[0]

    def moved(self, time: int) -> int:
        """A time of the step without recomputation, in the step with it."""
        if time <= self._num_ops:
            return time
        return time + self._late[max(2 * self._num_ops - time, 0)]

    def again(self, i: int) -> int:
        """When operator `i` of a block runs for the second time."""
        block = self._block[i]
        assert block is not None, "only what stands in a block runs again"
        return self.moved(2 * self._num_ops - block[1]) - (block[1] - i + 1)

    def lives(self, what: str | int, span: Span) -> Iterator[Span]:
        """The lives of a tensor of a value (by name) or operator (by position); `span` is its one without."""
        if span.birth > self._num_ops:
            yield replace(span, birth=self.moved(span.birth), death=self.moved(span.death))
            return
        block, readers = self._home(what)
        if block is None:
            yield from self._from_outside(span, readers)
        elif readers and readers[-1] > block[1]:  # what leaves a block is kept, and made again for a moment
            yield from self._from_outside(span, [i for i in readers if i > block[1]])
            if span.birth >= block[0]:
                last = self.again(block[1])
                yield replace(span, birth=self.again(min(span.birth, block[1])), death=last, part="transient")
        elif span.death <= self._num_ops:
            yield span
            yield replace(span, birth=self.again(span.birth), death=self.again(min(span.death, block[1])))
        else:
            used = max([i for i in readers if i <= block[1]], default=span.birth)
            yield replace(span, death=max(used, span.birth), part="transient", saver="")
            again = self.again(span.birth)
            yield replace(span, birth=again, death=self.moved(span.death), part="transient", saver="")

    def _home(self, what: str | int) -> tuple[tuple[int, int] | None, Sequence[int]]:
        """The block that makes it, and who reads it."""
        if isinstance(what, int):
            return self._block[what], ()
        place = self._position.get(what)
        return (self._block[place] if place is not None else None), self._involved[what]

    def _from_outside(self, span: Span, readers: Sequence[int]) -> Iterator[Span]:
        """What enters a block waits there until the block has run again."""
        death, saver = self.moved(span.death), ""
        for i in readers:
            block = self._block[i]
            if block is not None and block[0] > span.birth:
                until = self.again(block[1])
                if until > death:
                    death, saver = until, saver or self._name(i)
        if saver and span.part == "transient":
            yield replace(span, death=death, part="saved", saver=saver)
        else:
            yield replace(span, death=death)

    def _name(self, i: int) -> str:
        return next(name for name, place in self._position.items() if place == i)
