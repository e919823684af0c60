"""What is known of a tensor while a model is watched, and what is noted about its operators."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace

from qsync.expansion.derivation.axis_unification import Axis, Untied, cut, leaves, size_of


@dataclass(frozen=True, slots=True)
class Writer:
    """Rows [start, start + length) of a matrix, `axis`: those that wrote a value; `whole` is all of its
    rows.
    """

    param: str
    whole: Axis
    start: int
    length: int
    axis: Axis

    @classmethod
    def of(cls, param: str, rows: Axis) -> Writer:
        return cls(param, rows, 0, size_of(rows), rows)

    def narrowed(self, axis: Axis, start: int, length: int) -> Writer:
        """When elements [start, start + length) of one axis of the value are taken: the rows that wrote them,
        if that axis is the major one of the rows (else all of these: a part of each head, say).
        """
        mine, cut_axis = leaves(self.axis), leaves(axis)
        if not cut_axis or mine[: len(cut_axis)] != cut_axis:
            return self
        inner = self.length // size_of(cut_axis)
        try:
            rows = cut(self.axis, start * inner, length * inner)
        except Untied:
            return self
        return Writer(self.param, self.whole, self.start + start * inner, length * inner, rows)


@dataclass(frozen=True, slots=True)
class Scores:
    """Queries times keys: what wrote the two, and the axis that the product sums over. `weighed`: a softmax
    made weights of them.
    """

    query: Writer | None
    key: Writer | None
    inner: Axis
    weighed: bool = False


@dataclass(frozen=True, slots=True)
class Value:
    """A tensor: its axes, and where it comes from. `param`: it is this parameter, up to its shape. `written`:
    a matrix wrote it, `writer` if it was one alone. `used` says what it is once its values are needed.
    """

    axes: list[Axis]
    param: str | None = None
    written: bool = False
    writer: Writer | None = None
    scores: Scores | None = None
    used: Callable[[], Value] | None = None

    def shaped(self, axes: list[Axis]) -> Value:
        return replace(self, axes=axes)


@dataclass(frozen=True, slots=True)
class Use:
    """A parameter at work in the module `path`: `product` reads and writes, `lookup` writes, `batch_norm`
    reads and writes. `at` counts operators, so that uses have an order.
    """

    at: int
    path: str
    param: str
    kind: str
    reads: Axis
    writes: Axis
    has_rows_first: bool = True


@dataclass(frozen=True, slots=True)
class Norm:
    """A module that divides by the root of its mean square; `centred`: and subtracts the mean."""

    at: int
    path: str
    reads: Axis
    writes: Axis
    centred: bool


@dataclass(frozen=True, slots=True)
class Attention:
    """Queries met keys, and values were mixed: what wrote each, if that was one matrix, and `inner`, the axis
    that a head's queries and keys are multiplied along.
    """

    path: str
    query: Writer | None
    key: Writer | None
    value: Writer | None
    inner: Axis

    @property
    def num_heads(self) -> int:
        return self.query.length // size_of(self.inner) if self.query else 0

    @property
    def num_kv_heads(self) -> int:
        return self.key.length // size_of(self.inner) if self.key else 0


@dataclass(frozen=True, slots=True)
class Event:
    """An operator that copies of neurons, or their means, may not survive, and the axes that it works
    along.
    """

    kind: str
    path: str
    op: str
    axes: list[Axis]


def combined(values: Iterable[Value]) -> tuple[bool, Writer | None, bool]:
    """Of an elementwise operator's inputs: whether a matrix wrote the result, which one alone, and whether
    two different written values met (as in a residual sum).
    """
    written = [value for value in values if value.written]
    writers = {value.writer.param if value.writer else None for value in written}
    met = len(written) > 1 and (len(writers) > 1 or None in writers)
    if not written or met or written[0].writer is None:
        return bool(written), None, met
    return True, _spanning([value.writer for value in written if value.writer]), met


def _spanning(writers: Sequence[Writer]) -> Writer:
    """The rows of one matrix from the first to the last of the writers': halves that a rotation swapped are
    one again.
    """
    first = writers[0]
    start = min(writer.start for writer in writers)
    length = max(writer.start + writer.length for writer in writers) - start
    alike = next((writer for writer in writers if (writer.start, writer.length) == (start, length)), None)
    if alike is not None:
        return alike
    try:
        return Writer(first.param, first.whole, start, length, cut(first.whole, start, length))
    except Untied:
        return Writer.of(first.param, first.whole)
