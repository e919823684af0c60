"""Base precision: what the strong class runs in, and against which every class is judged.

In `bf16`, `fp16` or `tf32` the operators that torch.autocast lowers run in that type, by its own list, and
all others in FP32. A plan lowers weak classes below the base, and states variance above the base's own.
"""

from __future__ import annotations

from collections.abc import Collection

from qsync.errors import FormatError, UnsupportedError, shortened
from qsync.records.graph import Op, OpGraph
from qsync.records.precision import PRECISION_ORDER, PRECISIONS_BY_KIND, Precision

BASES = (Precision.FP32, Precision.TF32, Precision.BF16, Precision.FP16)
# Kinds of operators that torch.autocast lowers, on CPUs and GPUs alike (aten/src/ATen/autocast_mode.h).
_AUTOCAST_KINDS = (
    "linear", "addmm", "conv1d", "conv2d", "conv3d", "conv_transpose", "matmul", "baddbmm", "attention",
    "rnn", "einsum",
)  # fmt: skip
# A class without the base takes the first of these that it has: a T4 runs FP16 beside an A100's BF16.
_ALTERNATIVES = {
    Precision.TF32: (Precision.FP32,),
    Precision.BF16: (Precision.FP16, Precision.FP32),
    Precision.FP16: (Precision.BF16, Precision.FP32),
}
_SIXTEEN_BIT = (Precision.BF16, Precision.FP16)


def parse_base(text: str) -> Precision:
    """Return the base called `text`; FormatError gives the known ones if there is none."""
    precision = Precision.parse(text)
    if precision not in BASES:
        raise FormatError(
            f"{shortened(text, quote=False)} is no base precision: choose one of {', '.join(BASES)}; "
            "lower precisions are what a plan chooses"
        )
    return precision


def bases_of(device: str, precisions: Collection[Precision]) -> tuple[Precision, ...]:
    """Return the bases that a kind of device ("cpu", "cuda") with these precisions has in hardware."""
    emulated = (Precision.FP16,) if device == "cpu" else ()
    return tuple(p for p in BASES if p in precisions and p not in emulated)


def check_base(base: Precision, known: Collection[Precision]) -> None:
    """Raise UnsupportedError for a base that no device of a job multiplies in hardware."""
    if base not in known:
        raise UnsupportedError(
            f"no device here multiplies {base} in hardware; choose another base, one of {', '.join(known)}"
        )


def base_on(base: Precision, known: Collection[Precision]) -> Precision:
    """Return the base on a device that has these bases: itself, or the best there.

    >>> base_on(Precision.BF16, (Precision.FP32, Precision.FP16))
    <Precision.FP16: 'fp16'>
    """
    return next((p for p in (base, *_ALTERNATIVES.get(base, ())) if p in known), Precision.FP32)


def why_kept(op: Op, precision: Precision) -> str:
    """Return why an operator has no such precision unless a pin or a plan names it; empty where it may.

    A product of parameters makes a weight: an orthogonal one, a merge of LoRA's, what a hypernetwork returns.
    It stays in the model's type, as weights do. Small steps of what it multiplies would vanish in its
    rounding, where those of a weight add up in FP32.
    """
    if not op.makes_weight or precision in (Precision.FP32, op.dtype):
        return ""
    return "it reads nothing of the batch: it makes a weight"


def base_of(op: Op, base: Precision) -> Precision:
    """Return the precision of an operator under a base: the base where torch.autocast lowers it.

    An operator of a model that was loaded in BF16 has BF16. What makes a weight is kept (`why_kept`).
    """
    if op.dtype == "bf16":
        return Precision.BF16
    if why_kept(op, base):
        return Precision.FP32
    return base if op.kind in _AUTOCAST_KINDS and base in PRECISIONS_BY_KIND[op.kind] else Precision.FP32


def base_of_graph(graph: OpGraph, asked: str | None = None) -> Precision:
    """Return the base that is asked for; without one, that in which the model was loaded."""
    if asked is not None:
        return parse_base(asked)
    traced = {op.dtype for op in graph.adjustable}
    return Precision.BF16 if traced == {"bf16"} else Precision.FP32


def is_below(precision: Precision, base: Precision) -> bool:
    """Return whether a plan may give a precision to an operator that has this one under the base.

    >>> is_below(Precision.INT8, Precision.BF16), is_below(Precision.FP16, Precision.BF16)
    (True, False)
    """
    if precision in _SIXTEEN_BIT and base in _SIXTEEN_BIT:
        return False
    return PRECISION_ORDER[precision] < PRECISION_ORDER[base]
