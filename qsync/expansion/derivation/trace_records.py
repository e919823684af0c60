"""Records of a trace: known axes and origin of each tensor, and observed operators."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace

import torch

from qsync.expansion.derivation.axis_unification import Axis


@dataclass(frozen=True, slots=True)
class Writer:
    """The matrix that wrote a value; `rows` holds the row behind each element, in the value's shape.

    None stands for unknown rows. They are FP64, so that they can be viewed as complex numbers.
    """

    param: str
    rows: torch.Tensor | None


@dataclass(frozen=True, slots=True)
class Operand:
    """Queries, keys or values: their writer (rows (..., T, D)), batch and heads, and the axis of a head."""

    writer: Writer | None
    batch: Axis
    inner: Axis

    @classmethod
    def of(cls, value: Value, is_transposed: bool = False) -> Operand:
        """Return a value (..., T, D), or (..., D, T) if transposed, as an operand."""
        writer = value.writer
        if writer and is_transposed and writer.rows is not None:
            writer = Writer(writer.param, writer.rows.mT)
        batch = [piece for one in value.axes[:-2] for piece in one]
        return cls(writer, batch, value.axes[-2 if is_transposed else -1])

    @property
    def heads(self) -> list[tuple[int, ...]]:
        """Return the rows of each head in each sample, empty if unknown."""
        if self.writer is None or self.writer.rows is None or not self.writer.rows.numel():
            return []
        rows = self.writer.rows[..., 0, :]
        return [tuple(map(int, row)) for row in rows.reshape(-1, rows.shape[-1]).tolist()]


@dataclass(frozen=True, slots=True)
class Scores:
    """Queries times keys. `is_softmaxed` states that a softmax turned the scores into weights."""

    query: Operand
    key: Operand
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
    writer: Writer | None = None


@dataclass(frozen=True, slots=True)
class Attention:
    """One attention and its operands."""

    path: str
    query: Operand
    key: Operand
    value: Operand


@dataclass(frozen=True, slots=True)
class Event:
    """An operator that copies of neurons, or their means, may not survive, and its axes."""

    kind: str
    path: str
    op: str
    axes: list[Axis]


def combine_values(values: Iterable[Value], is_product: bool = False) -> tuple[bool, Writer | None, bool]:
    """Combine the inputs of an elementwise operator.

    Return whether a matrix wrote the result, the first writer unless there are several matrices, and whether
    two different written values meet, as in a residual sum.
    """
    written = [value for value in values if value.written]
    if is_product and any(value.writer for value in written):  # a lookup may scale what a matrix wrote
        written = [value for value in written if value.writer]
    writers = {value.writer.param if value.writer else None for value in written}
    met = len(written) > 1 and (len(writers) > 1 or None in writers)
    return bool(written), written[0].writer if written and not met else None, met
