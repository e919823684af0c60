"""Records of a trace: known axes and origin of each tensor, and observed operators."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace

from qsync.expansion.derivation.axis_unification import Axis, UnificationError, leaves, size_of, slice_axis


@dataclass(frozen=True, slots=True)
class Writer:
    """Rows [start, start + length) of a matrix, `axis`, that wrote a value; `whole` is all rows."""

    param: str
    whole: Axis
    start: int
    length: int
    axis: Axis

    @classmethod
    def of(cls, param: str, rows: Axis) -> Writer:
        """Return the writer of all rows of a matrix."""
        return cls(param, rows, 0, size_of(rows), rows)

    def slice(self, axis: Axis, start: int, length: int) -> Writer:
        """Return the rows that wrote elements [start, start + length) of one axis of the value.

        If that axis is not the major one of the rows, the result is all rows: each has a part of the slice.
        """
        mine, cut_axis = leaves(self.axis), leaves(axis)
        if not cut_axis or mine[: len(cut_axis)] != cut_axis:
            return self
        inner = self.length // size_of(cut_axis)
        try:
            rows = slice_axis(self.axis, start * inner, length * inner)
        except UnificationError:
            return self
        return Writer(self.param, self.whole, self.start + start * inner, length * inner, rows)


@dataclass(frozen=True, slots=True)
class Scores:
    """Queries times keys: the writers of both, and the axis that the product sums over.

    `is_softmaxed` states that a softmax turned the scores into weights.
    """

    query: Writer | None
    key: Writer | None
    inner: Axis
    is_softmaxed: bool = False


@dataclass(frozen=True, slots=True)
class Value:
    """A tensor's axes and origin.

    `param` names the parameter that the tensor is, up to its shape. `written` states that a matrix wrote it;
    `writer` is that matrix if there is one alone. `resolve` returns the value once its elements are needed.
    """

    axes: list[Axis]
    param: str | None = None
    written: bool = False
    writer: Writer | None = None
    scores: Scores | None = None
    resolve: Callable[[], Value] | None = None

    def shaped(self, axes: list[Axis]) -> Value:
        """Return the value with other axes."""
        return replace(self, axes=axes)


@dataclass(frozen=True, slots=True)
class ParameterUse:
    """The use of a parameter in the module `path`.

    A `product` reads and writes, a `lookup` writes, a `batch_norm` reads and writes. `at` counts operators
    and orders uses.
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
    """A module that divides by the root of a mean square, `centred` if by a variance."""

    at: int
    path: str
    reads: Axis
    writes: Axis
    centred: bool


@dataclass(frozen=True, slots=True)
class Attention:
    """One attention: the writers of query, key and value, None where no single matrix wrote one.

    `inner` is the axis along which a head's queries and keys are multiplied.
    """

    path: str
    query: Writer | None
    key: Writer | None
    value: Writer | None
    inner: Axis

    @property
    def num_heads(self) -> int:
        """Return the number of query heads, 0 if unknown."""
        return self.query.length // size_of(self.inner) if self.query else 0

    @property
    def num_kv_heads(self) -> int:
        """Return the number of key/value heads, 0 if unknown."""
        return self.key.length // size_of(self.inner) if self.key else 0


@dataclass(frozen=True, slots=True)
class Event:
    """An operator that copies of neurons, or their means, may not survive, and its axes."""

    kind: str
    path: str
    op: str
    axes: list[Axis]


def combine_values(values: Iterable[Value]) -> tuple[bool, Writer | None, bool]:
    """Combine the inputs of an elementwise operator.

    Return whether a matrix wrote the result, the only writer if there is one, and whether two different
    written values meet, as in a residual sum.
    """
    written = [value for value in values if value.written]
    writers = {value.writer.param if value.writer else None for value in written}
    met = len(written) > 1 and (len(writers) > 1 or None in writers)
    if not written or met or written[0].writer is None:
        return bool(written), None, met
    return True, _spanning([value.writer for value in written if value.writer]), met


def _spanning(writers: Sequence[Writer]) -> Writer:
    """Return the rows of one matrix from the first to the last of the writers.

    Halves that a rotation swapped become one range again.
    """
    first = writers[0]
    start = min(writer.start for writer in writers)
    length = max(writer.start + writer.length for writer in writers) - start
    alike = next((writer for writer in writers if (writer.start, writer.length) == (start, length)), None)
    if alike is not None:
        return alike
    try:
        return Writer(first.param, first.whole, start, length, slice_axis(first.whole, start, length))
    except UnificationError:
        return Writer.of(first.param, first.whole)
