"""The declaration of an operator: all that qsync knows of one kind, beside its kernels."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from enum import StrEnum

from qsync.operators.precision import Precision

Shape = tuple[int, ...]
Shapes = Sequence[Shape]
Flops = Callable[[Shapes, Shape], int]


class Role(StrEnum):
    """What determines an operator's precision."""

    ADJUSTABLE = "adjustable"  # by the plan
    FOLLOWING = "following"  # by its inputs: the widest type among them
    FIXED = "fixed"  # by the trace: the traced type


@dataclass(frozen=True, slots=True, kw_only=True)
class Limit:
    """Shapes that the kernels of one device ("cpu", "cuda") do not serve in a precision, and the reason.

    `applies` takes the shapes of the operands, and whether the operator is dilated. None: it has no kernel
    there at all.
    """

    device: str
    precision: Precision
    reason: str
    applies: Callable[[Shapes, bool], bool] | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Operator:
    """One kind of operator.

    `calls` maps each torch call that it stands for to the names of its operands, in the order of `Op.inputs`;
    without names all tensors of the call are operands. All other facts have a default, and most kinds need
    none of them: what torch's derivative saves and allocates is counted by a dry run of the traced call.
    """

    kind: str
    role: Role
    calls: Mapping[str, tuple[str, ...]]
    fixed_calls: tuple[str, ...] = ()  # calls of this kind that run in their traced type
    # -- values --
    family: str = "rest"  # kinds of one algorithm, whose costs follow one law
    moves_nothing: bool = False  # it runs no kernel
    may_alias: bool = False  # its result may share its input's memory
    has_channels: bool = True  # dimension 1 of a result of four dimensions is channels
    keeps_order: bool = True  # its result lies in memory as its input does
    is_exact: bool = False  # its result is exact in its operand's type
    is_elementwise: bool = False
    passes_magnitude: bool = False  # a large constant of its input may stand in its result
    is_loss: bool = False
    is_norm: bool = False  # its parameters and statistics are read in FP32
    saves_statistics: bool = False  # a mean or deviation, by a rule of the memory model
    counts_repeats: bool = False  # a tensor given twice is two operands: a square has two factors
    # -- backward --
    saves_nothing: bool = False
    saves_by_rule: bool = False  # the memory model has a rule for what it saves; others are counted
    works_by_rule: bool = False  # and for the workspace of its backward
    passes_gradient: int = 0  # number of its first inputs whose gradient is its result's, unchanged
    gradient_by_rows: bool = False  # its gradient is row-major whatever it reads
    # -- kernels --
    saves_less: tuple[str, str] | None = None  # its forms: if a consumer saves its result anyway, and else
    is_epilogue: bool = False  # a product can compute it while its sums are in the cache
    is_replaced: bool = False  # lowered graphs run a kernel of qsync's, graphs in FP32 torch's


@dataclass(frozen=True, slots=True, kw_only=True)
class Product(Operator):
    """An adjustable operator: the plan chooses its precision.

    `precisions` are those with kernels, from highest to lowest; a device class may have fewer. `unwritten`
    says why the others have none, `unwritten_in` why one of them has.

    `encodings` names the scales of each operand in 8 bits: one per row of the last dimension, per column (of
    a weight stored transposed: "col"; of batched matrices: "inner"), per image, or per output channel. None:
    the operand stays in FP32 and is added in the epilogue.

    `factors` are the two operands that are multiplied: each is saved if the other has a gradient. `backward`
    is the operations of backward / those of forward, where that is not the number of gradients.
    """

    role: Role = Role.ADJUSTABLE
    flops: Flops = lambda shapes, result: 0  # of forward, with a multiply-add counted as two
    backward: float | None = None
    precisions: tuple[Precision, ...]
    unwritten: str = "not written"
    unwritten_in: Mapping[Precision, str] = field(default_factory=dict)
    limits: tuple[Limit, ...] = ()
    encodings: tuple[str | None, ...] = ()
    encodings_differ: bool = False  # one value as both factors would need two encodings
    factors: tuple[int, int] = (0, 1)
    # Call of torch.ops.aten -> its axes, a letter each, as in "mk, kn -> mn"; "*": any number in front
    axes: Mapping[str, str] = field(default_factory=dict)
    saves_factors: bool = False  # the memory model has no closer rule than `factors`
    saved: tuple[int, ...] | None = None  # operands saved in the type that they are read in; None: all
    saves_by_rule: bool = True
    saves_both: bool = False  # torch saves both factors, whatever needs a gradient
    # Number of an input's dimensions without a batch, where scales are per image
    batch_dims: int | None = None
    has_bf16_kernel: bool = False  # without one, BF16 is the traced call on BF16 operands
    reorders: bool = False  # a kernel may return another memory order than the traced call
    in_autocast: bool = True  # torch.autocast lowers it
    reads_fp32: bool = False  # it rounds what it looks up; a cast would round the whole table
    computes_epilogue: tuple[Precision, ...] = ()  # precisions in which it can compute a following activation
    is_convolution: bool = False
    has_module: bool = False  # torch has a module class of this kind


def following(kind: str, *calls: str, **facts: object) -> Operator:
    """Declare an operator that runs in its inputs' type; without `calls` it is the call of its own name."""
    return Operator(kind=kind, role=Role.FOLLOWING, calls=_unnamed(kind, calls), **facts)  # type: ignore[arg-type]


def fixed(kind: str, *calls: str, **facts: object) -> Operator:
    """Declare an operator that runs in its traced type; without `calls` it is the call of its own name."""
    return Operator(kind=kind, role=Role.FIXED, calls=_unnamed(kind, calls), **facts)  # type: ignore[arg-type]


def _unnamed(kind: str, calls: Sequence[str]) -> dict[str, tuple[str, ...]]:
    return dict.fromkeys(calls or (kind,), ())


def elements(shape: Shape) -> int:
    """Return the number of elements of a tensor of this shape."""
    return math.prod(shape)
