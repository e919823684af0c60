"""Base precision: the strong class's precision, against which added variance is stated.

Under `bf16`, `fp16` or `tf32` the operators on torch.autocast's list run in that type, and all others in
FP32. A plan lowers weak classes below the base, and states variance in excess of the base's own.
"""

from __future__ import annotations

from collections.abc import Collection

from qsync.errors import FormatError, UnsupportedError, shortened
from qsync.operators.precision import FLOATS, PRECISION_ORDER, Precision, type_bytes
from qsync.operators.registry import PRODUCTS
from qsync.records.graph import Op, OpGraph

SIXTEEN_BIT = tuple(precision for precision in FLOATS if type_bytes(precision.facts.operand, 1) == 2)


def parse_base(text: str) -> Precision:
    """Return the base called `text`; FormatError lists the known ones."""
    precision = Precision.parse(text)
    if precision not in FLOATS:
        raise FormatError(
            f"{shortened(text, quote=False)} is not a base precision: choose one of {', '.join(FLOATS)}; the "
            "plan chooses lower precisions itself"
        )
    return precision


def bases_of(device: str, precisions: Collection[Precision]) -> tuple[Precision, ...]:
    """Return the bases that a kind of device ("cpu", "cuda") with these precisions has in hardware."""
    return tuple(p for p in FLOATS if p in precisions and device not in p.facts.emulated_on)


def check_base(base: Precision, known: Collection[Precision]) -> None:
    """Raise UnsupportedError for a base that no device of a job has in hardware."""
    if base not in known:
        raise UnsupportedError(
            f"no device here has {base} in hardware; choose one of {', '.join(known)} as base"
        )


def base_on(base: Precision, known: Collection[Precision]) -> Precision:
    """Return a device's base: the given one, or its best substitute there.

    That is the other 16-bit float (a T4 runs FP16 beside an A100's BF16), else FP32.

    >>> base_on(Precision.BF16, (Precision.FP32, Precision.FP16))
    <Precision.FP16: 'fp16'>
    """
    others = SIXTEEN_BIT if base in SIXTEEN_BIT else ()
    return next((p for p in (base, *others) if p in known), Precision.FP32)


def why_kept(op: Op, precision: Precision) -> str:
    """Return why an operator keeps its precision unless pinned; empty if it may be lowered.

    A product of parameters computes a weight (orthogonal parametrization, merged LoRA, hypernetwork). It
    stays in the model's type, because rounding would swallow small updates of its factors.
    """
    if not op.makes_weight or precision in (Precision.FP32, op.dtype):
        return ""
    return "it reads nothing of the batch: it makes a weight"


def base_of(op: Op, base: Precision) -> Precision:
    """Return an operator's precision under a base: the base if torch.autocast lowers it.

    Operators of a model loaded in BF16 have BF16; products that compute a weight keep theirs (`why_kept`).
    """
    if op.dtype == "bf16":
        return Precision.BF16
    if why_kept(op, base):
        return Precision.FP32
    product = PRODUCTS[op.kind]
    return base if product.in_autocast and base in product.precisions else Precision.FP32


def base_of_graph(graph: OpGraph, asked: str | None = None) -> Precision:
    """Return the requested base; by default the type in which the model was loaded."""
    if asked is not None:
        return parse_base(asked)
    traced = {op.dtype for op in graph.adjustable}
    return Precision.BF16 if traced == {"bf16"} else Precision.FP32


def is_below(precision: Precision, base: Precision) -> bool:
    """Return whether a precision is lower than an operator's precision under the base.

    >>> is_below(Precision.INT8, Precision.BF16), is_below(Precision.FP16, Precision.BF16)
    (True, False)
    """
    if precision in SIXTEEN_BIT and base in SIXTEEN_BIT:
        return False
    return PRECISION_ORDER[precision] < PRECISION_ORDER[base]
