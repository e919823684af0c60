"""What an operator is asked to do, apart from which model asks: its kind, shapes, and what its roofline
bounds.

The roofline of one direction of a call on a device is (Williams et al., CACM 2009; the launch is ours)

    least_s = launch_s + max(operations / peak rate of their type, bytes / bandwidth)

where bytes count every operand and every result once.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Literal

from qsync.records.datasheets import DataSheet
from qsync.records.graph import Input, Op, OpGraph, Role, num_elements
from qsync.records.precision import (
    LARGEST,
    PRECISIONS_BY_KIND,
    Precision,
    is_encoded,
    operand_type,
    type_bytes,
)

Direction = Literal["forward", "backward"]
Shape = tuple[int, ...]

# Kinds that only look at their input in another way: no bytes move.
_MOVE_NOTHING = ("view", "input", "output")
_PRECISIONS = frozenset(map(str, Precision))
# Six products against two: attention computes its probabilities once more in backward (Dao et al. 2022).
_ATTENTION_BACKWARD = 2.5


@dataclass(frozen=True, slots=True)
class Argument:
    """What a call computes on. `parameter`: it lies in memory since the step before, not fresh in a cache.

    `gradient` says whether backward makes a gradient for it, `summed` whether that gradient is added to one
    that a later operator made already.
    """

    shape: Shape
    gradient: bool = True
    parameter: bool = False
    summed: bool = False

    @property
    def num_elements(self) -> int:
        return num_elements(self.shape)


@dataclass(frozen=True, slots=True)
class Call:
    """One operator or cast. `kept` are the shapes of what it reads as it is; `flops` counts a multiply-add as
    two, forward only.
    """

    kind: str
    inputs: tuple[Argument, ...]
    output: Shape
    flops: int = 0
    kept: tuple[Shape, ...] = ()

    @property
    def is_product(self) -> bool:
        return self.kind in PRECISIONS_BY_KIND

    @property
    def num_gradients(self) -> int:
        return sum(argument.gradient for argument in self.inputs)


def cast_call(shape: Shape, gradient: bool, parameter: bool) -> Call:
    """The call that a cast is."""
    return Call("cast", (Argument(shape, gradient, parameter),), shape)


def calls(graph: OpGraph) -> Iterator[tuple[Op, Call]]:
    """Every operator of a graph with the call that it is, in execution order."""
    values: dict[str, Input | Op] = {value.name: value for value in graph.inputs}
    values |= {op.name: op for op in graph.ops}
    last = {name: i for i, op in enumerate(graph.ops) for name in op.inputs}
    for i, op in enumerate(graph.ops):
        inputs = []
        for name in op.inputs:
            value = values[name]
            gradient = op.requires_grad and value.requires_grad and value.dtype in LARGEST
            parameter = isinstance(value, Input) and value.kind in ("parameter", "alias")
            inputs.append(Argument(value.shape, gradient, parameter, gradient and last[name] > i))
        kept = tuple(values[name].shape for name in op.kept)
        yield op, Call(op.kind, tuple(inputs), op.shape, op.flops, kept)


def value_call(graph: OpGraph) -> dict[str, Call]:
    """The call that a cast of each value of a graph is."""
    found: dict[str, Call] = {}
    for value in graph.inputs:
        found[value.name] = cast_call(value.shape, value.requires_grad, value.kind == "parameter")
    for op in graph.ops:
        found[op.name] = cast_call(op.shape, op.requires_grad, False)
    return found


def modes(op: Op, precisions: tuple[Precision, ...]) -> tuple[str, ...]:
    """The modes in which an operator may run on a class that has these precisions."""
    if op.role is Role.ADJUSTABLE:
        return tuple(str(p) for p in PRECISIONS_BY_KIND[op.kind] if p in precisions)
    if op.role is Role.FIXED:
        return (op.dtype,)
    return tuple(dict.fromkeys((op.dtype, "fp32", *(("bf16",) if Precision.BF16 in precisions else ()))))


def operations(call: Call, mode: str, direction: Direction, narrow: str) -> dict[str, float]:
    """Operations by the type that multiplies them. Only products count: the rest is bound by bytes."""
    if not call.is_product or not call.flops:
        return {}
    total = float(call.flops)
    if direction == "backward":
        total *= _ATTENTION_BACKWARD if call.kind == "attention" else call.num_gradients
    if mode == Precision.INT8_ALL:
        return {"int8": total}
    if mode != Precision.INT8:
        return {mode: total}
    if direction == "backward":
        return {narrow: total}
    # Of attention's two products the scores alone are in INT8.
    return {"int8": total / 2, narrow: total / 2} if call.kind == "attention" else {"int8": total}


def moved_bytes(call: Call, mode: str, direction: Direction) -> float:
    """Bytes of every operand and every result, once each. Backward reads gradient and operands, and writes
    gradients; what adding them to others takes stands by itself (`sum_s`).
    """
    if call.kind in _MOVE_NOTHING:
        return 0.0
    if call.kind == "cast":
        source, _, target = mode.partition(" ")
        return type_bytes(source, num_elements(call.output)) + type_bytes(target, num_elements(call.output))
    given = sum(
        type_bytes(_operand(call, i, mode), argument.num_elements) for i, argument in enumerate(call.inputs)
    )
    result = type_bytes("bf16" if mode == "bf16" else "fp32", num_elements(call.output))
    if direction == "forward":
        return given + result
    made = sum(4 * a.num_elements for a in call.inputs if a.gradient)
    return result + given + made


def sum_s(call: Call, direction: Direction, sheet: DataSheet) -> float:
    """Seconds at the device's bandwidth of adding gradients that a call makes to those that others made.

    Two are read and one is written (ours). Autograd adds them, whatever made them: no kind does it worse than
    another.
    """
    if direction == "forward":
        return 0.0
    return sum(3 * 4 * a.num_elements for a in call.inputs if a.gradient and a.summed) / sheet.bytes_per_s


def has_direction(call: Call, mode: str, direction: Direction) -> bool:
    """Whether there is anything to do: an encoding has no gradient, nor has what needs none."""
    if direction == "forward":
        return True
    return call.num_gradients > 0 and not (call.kind == "cast" and is_encoded(mode.partition(" ")[2]))


def parts(call: Call, mode: str, direction: Direction, sheet: DataSheet) -> tuple[float, float, float]:
    """Seconds at full speed of the launch, of the products at their peaks, and of the bytes, all without
    `sum_s`. KeyError for a product in a type that the device does not multiply.
    """
    done = operations(call, mode, direction, sheet.backward_type)
    products = sum(count / sheet.flops_per_s[name] for name, count in done.items())
    return sheet.launch_s, products, moved_bytes(call, mode, direction) / sheet.bytes_per_s


def least_s(call: Call, mode: str, direction: Direction, sheet: DataSheet) -> float:
    """The roofline: seconds that one direction of a call takes at least on a device.

    >>> least_s(call, "bf16", "forward", datasheet("A100"))
    """
    launch, products, memory = parts(call, mode, direction, sheet)
    return launch + max(products, memory) + sum_s(call, direction, sheet)


def _operand(call: Call, index: int, mode: str) -> str:
    """The type of an input: what a product takes in this precision, else the type it runs in."""
    known = call.is_product and mode in _PRECISIONS  # a product that is fixed may run in another type
    return operand_type(call.kind, index, Precision(mode)) if known else mode
