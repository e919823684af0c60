"""The rules of lowering: pure functions of one operator or value and its neighbours.

The FX pass executes the lowered graph, the replayer prices it and the memory model reads it, node for node.
The rules in full:

- Every operator takes each of its inputs in one type: an adjustable operator in its precision's operand
  type, a following operator in the widest type among its inputs, a fixed operator in the type that was
  traced (FP32).
- A product of a model in BF16 runs as traced at every precision of 16 bits or more, and returns BF16 at
  every precision.
- A value is cast to every type that consumers take and that is not the type carrying the value: once per
  type, however many consumers take the type.
- A cast of an operator's result stands right after the operator. A cast of a graph input (a weight) stands
  right before the first adjustable consumer that may take a cast: the input's gradient is then ready as early
  as the consumer's. (An embedding is no such consumer: it takes its table in FP32 and rounds the rows that it
  looks up.)
- An 8-bit operator returns the device's 16-bit float if every consumer would cast the value to 16 bits or
  fewer anyway, else FP32. A following operator passes this want on to its float inputs if all of them can be
  carried in 16 bits.
- Images that a lowered convolution made are in channels-last order, and stay so through every operator that
  computes images from images. A node that reads such images has another cost (`Run.channels_last`) and the
  same result.
- An 8-bit linear layer computes a GELU or ReLU in its epilogue if that operator is the only reader of the
  layer's result and is not to save less. The node of the computed operator then runs nothing.
- A following operator that is to save less saves its result for backward if an adjustable consumer saves this
  same tensor anyway; else it saves bits or 8-bit codes (`qsync.operators.registry.FORMS`).

`table` applies these functions to the neighbourhoods of a graph; all other modules read its rows.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence

from qsync.lowering.lowered_graph import FUSED
from qsync.operators.declaration import Role
from qsync.operators.precision import CARRIED_FLOATS, EIGHT_BIT, LARGEST, Precision, is_encoded
from qsync.operators.registry import FORMS, PRECISIONS_BY_KIND, PRODUCTS, declared, operand_type
from qsync.records.graph import Op

_WIDTH = {name: -position for position, name in enumerate(CARRIED_FLOATS)}


def may_be_cast_for(op: Op) -> bool:
    """Return whether an operator's inputs may be cast; not for an embedding, which reads an FP32 table."""
    return op.role is Role.ADJUSTABLE and not PRODUCTS[op.kind].reads_fp32


def runs_as_traced(op: Op, precision: Precision) -> bool:
    """Return whether an adjustable operator in a precision runs exactly the traced call."""
    return precision is Precision.FP32 or (op.dtype == "bf16" and precision not in EIGHT_BIT)


def taken_type(op: Op, j: int, traced: str, precision: Precision, mode: str) -> str | None:
    """Return the operand type of an operator's `j`-th input; None if `traced` is not a float."""
    if traced not in LARGEST:
        return None
    if op.role is Role.ADJUSTABLE:
        as_traced = op.dtype == "bf16" and runs_as_traced(op, precision)
        return traced if as_traced else operand_type(op.kind, j, precision)
    return mode if op.role is Role.FOLLOWING else traced


def mode_of(op: Op, precision: Precision, floats: Iterable[str]) -> str:
    """Return the precision or type in which an operator runs, given its float inputs' types."""
    if op.role is Role.ADJUSTABLE:
        return str(precision)
    if op.role is Role.FIXED:
        return op.dtype
    widest = max(floats, key=_WIDTH.__getitem__, default=op.dtype)
    return "fp32" if op.magnitude > LARGEST.get(widest, float("inf")) else widest


def output_of(op: Op, precision: Precision, mode: str, carried_16bit: str | None, wanted_16bit: bool) -> str:
    """Return the type of an operator's result; `carried_16bit` is the device's 16-bit float."""
    if op.role is Role.ADJUSTABLE:
        if precision is Precision.BF16 or op.dtype == "bf16":
            return "bf16"
        return carried_16bit if precision in EIGHT_BIT and carried_16bit and wanted_16bit else "fp32"
    return mode if op.role is Role.FOLLOWING and op.dtype == "fp32" else op.dtype


def takes_16bit(taken: str | None) -> bool:
    """Return whether an adjustable operator with this operand type needs at most 16 bits of a value."""
    return taken is not None and (taken == "bf16" or is_encoded(taken))


def may_be_16bit(op: Op, floats_may: Sequence[bool]) -> bool:
    """Return whether some assignment carries an operator's result in 16 bits, given its float inputs."""
    if op.role is Role.ADJUSTABLE:
        return not {Precision.BF16, *EIGHT_BIT}.isdisjoint(PRECISIONS_BY_KIND[op.kind])
    if op.dtype != "fp32" or op.role is Role.FIXED:
        return op.dtype == "bf16"
    return op.magnitude <= LARGEST["bf16"] and bool(floats_may) and all(floats_may)


def passes_16bit_on(op: Op, floats_may: Sequence[bool]) -> bool:
    """Return whether a following operator whose result is wanted in 16 bits needs 16-bit inputs.

    `floats_may` tells for each float input whether some assignment carries it in 16 bits. If one stays FP32,
    the others would be cast back.
    """
    able = len(floats_may) == 1 or (len(floats_may) > 1 and all(floats_may))
    return op.role is Role.FOLLOWING and able and op.magnitude <= LARGEST["bf16"]


def makes_channels_last(op: Op, precision: Precision, first_channels_last: bool) -> bool:
    """Return whether an operator's result is images that lowering makes channels-last."""
    if len(op.shape) != 4 or not declared(op.kind).keeps_order:
        return False
    if op.kind == "conv2d" and precision is not Precision.TF32 and not runs_as_traced(op, precision):
        return True
    return first_channels_last


def needed_casts(taken: Iterable[str | None], carried: str) -> tuple[str, ...]:
    """Return the types to which a value is cast, from its own type and its readers' operand types."""
    return tuple(sorted({t for t in taken if t is not None and t != carried}))


def has_epilogue(op: Op, readers: Sequence[Op]) -> bool:
    """Return whether an operator can compute its only reader in its epilogue, at some precision."""
    able = op.role is Role.ADJUSTABLE and PRODUCTS[op.kind].computes_epilogue
    if not able or op.exposed or len(readers) != 1:
        return False
    follower = readers[0]
    # The follower reads and returns the product's result type.
    same = follower.dtype == op.dtype == "fp32" and follower.magnitude <= LARGEST["bf16"]
    # If gradients were switched off in between, only one of the two has a backward.
    same &= follower.requires_grad == op.requires_grad and follower.shape == op.shape
    alone = follower.inputs == (op.name,) and not follower.kept
    return follower.role is Role.FOLLOWING and declared(follower.kind).is_epilogue and same and alone


def computes_follower(op: Op, precision: Precision, follower_saves_less: bool) -> bool:
    """Return whether an operator computes its follower in its epilogue under these precisions."""
    return not follower_saves_less and precision in PRODUCTS[op.kind].computes_epilogue


def run_form_of(
    op: Op, computed: str | None, is_computed: bool, saves_less: bool, is_saved: Callable[[], bool]
) -> str:
    """Return the form in which an operator runs (see `Run.form`).

    `computed` is the kind of the follower computed in its epilogue, if any. `is_computed`: a product computes
    this operator. `is_saved` returns whether an adjustable consumer saves its result.
    """
    if computed is not None:
        return computed
    if is_computed:
        return FUSED
    if not saves_less:
        return "plain"
    beside_saved, alone = FORMS[op.kind]
    return beside_saved if is_saved() else alone


def saves_operand(op: Op, j: int) -> bool:
    """Return whether an operator saves its `j`-th input for backward, in the type in which it takes it."""
    if op.role is not Role.ADJUSTABLE or not op.requires_grad:
        return False
    saved = PRODUCTS[op.kind].saved
    return saved is None or j in saved
