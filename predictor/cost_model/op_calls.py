"""An operator as a call of a kind on shapes, with its operations, bytes and roofline.

The roofline of one direction of a call on a device is (Williams et al., CACM 2009; with a launch added)

    least_s = launch_s + max(operations / peak rate of their type, bytes / bandwidth)

where bytes count every operand and every result once.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Literal

from qsync.operators.declaration import Role
from qsync.operators.precision import DEVICE_16BIT, LARGEST, Precision, is_encoded, type_bytes
from qsync.operators.registry import PRECISIONS_BY_KIND, PRODUCTS, declared, operand_type
from qsync.records.datasheets import DataSheet
from qsync.records.graph import Input, Op, OpGraph, num_elements
from qsync.records.record_json import Count

Direction = Literal["forward", "backward"]
Shape = tuple[Count, ...]

CAST = "cast"  # kind of the call that casts a value
_PRECISIONS = frozenset(map(str, Precision))


def family(kind: str) -> str:
    """Return the family of a kind: the name of the kinds that are fitted together."""
    return kind if kind == CAST else declared(kind).family


@dataclass(frozen=True, slots=True)
class Argument:
    """An operand of a call; a `parameter` is read from memory, since no cache holds it.

    `gradient` says whether backward computes its gradient, and `summed` whether autograd adds this gradient
    to that of a later operator.
    """

    shape: Shape
    gradient: bool = True
    parameter: bool = False
    summed: bool = False

    @property
    def num_elements(self) -> int:
        """Return the number of elements."""
        return num_elements(self.shape)


@dataclass(frozen=True, slots=True)
class Call:
    """One operator or cast, by kind and shapes.

    `kept` has the shapes of operands that are never cast. `flops` counts a multiply-add as two, forward only.
    """

    kind: str
    inputs: tuple[Argument, ...]
    output: Shape
    flops: Count = 0
    kept: tuple[Shape, ...] = ()

    @property
    def is_product(self) -> bool:
        """Return whether the call multiplies matrices."""
        return self.kind in PRODUCTS

    @property
    def num_gradients(self) -> int:
        """Return the number of operands that get a gradient."""
        return sum(argument.gradient for argument in self.inputs)


def cast_call(shape: Shape, gradient: bool, parameter: bool) -> Call:
    """Return the call of a cast of a tensor of this shape."""
    return Call(CAST, (Argument(shape, gradient, parameter),), shape)


def calls(graph: OpGraph) -> Iterator[tuple[Op, Call]]:
    """Yield every operator of a graph with its call, in execution order."""
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


def calls_by_name(graph: OpGraph) -> dict[str, Call]:
    """Map each operator of a graph to its call."""
    return {op.name: call for op, call in calls(graph)}


def value_call(graph: OpGraph) -> dict[str, Call]:
    """Map each value of a graph to the call that casts it."""
    found: dict[str, Call] = {}
    for value in graph.inputs:
        found[value.name] = cast_call(value.shape, value.requires_grad, value.kind == "parameter")
    for op in graph.ops:
        found[op.name] = cast_call(op.shape, op.requires_grad, False)
    return found


def modes(op: Op, precisions: tuple[Precision, ...]) -> tuple[str, ...]:
    """List the modes in which an operator may run on a class with these precisions."""
    if op.role is Role.ADJUSTABLE:
        return tuple(str(p) for p in PRECISIONS_BY_KIND[op.kind] if p in precisions)
    if op.role is Role.FIXED:
        return (op.dtype,)
    return tuple(dict.fromkeys((op.dtype, "fp32", *(("bf16",) if Precision.BF16 in precisions else ()))))


def operations(call: Call, mode: str, direction: Direction, float_16bit: str) -> dict[str, float]:
    """Count the operations of a product by the type that multiplies them; {} for other kinds."""
    if not call.is_product or not call.flops:
        return {}
    total = float(call.flops)
    if direction == "backward":
        factor = PRODUCTS[call.kind].backward
        total *= call.num_gradients if factor is None else factor
    if mode not in _PRECISIONS:  # of a product that is fixed
        return {mode: total}
    forward, backward = (float_16bit if t == DEVICE_16BIT else t for t in Precision(mode).facts.products)
    if direction == "backward":
        return {backward: total}
    # Of attention's two products forward only q k' is in INT8.
    both = call.kind == "attention" and forward != backward
    return {forward: total / 2, backward: total / 2} if both else {forward: total}


def moved_bytes(call: Call, mode: str, direction: Direction) -> float:
    """Count the bytes that a call moves: of every operand and every result, once each.

    Backward reads the gradient and the operands and writes gradients. Their addition counts in `sum_s`.
    """
    if declared(call.kind).moves_nothing:
        return 0.0
    if call.kind == CAST:
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
    """Return the seconds in which autograd adds a call's gradients to others, at full bandwidth.

    An addition reads two gradients and writes one, at the same speed for every kind.
    """
    if direction == "forward":
        return 0.0
    return sum(3 * 4 * a.num_elements for a in call.inputs if a.gradient and a.summed) / sheet.bytes_per_s


def has_direction(call: Call, mode: str, direction: Direction) -> bool:
    """Return whether a direction has work; encodings and calls without gradients have no backward."""
    if direction == "forward":
        return True
    return call.num_gradients > 0 and not (call.kind == CAST and is_encoded(mode.partition(" ")[2]))


def parts(call: Call, mode: str, direction: Direction, sheet: DataSheet) -> tuple[float, float, float]:
    """Return the seconds of launch, products and bytes at peak speed, without gradient additions.

    Raises KeyError for a product in a type that a GPU does not multiply.
    """
    done = operations(call, mode, direction, sheet.backward_type)
    products = sum(count / sheet.rate(name) for name, count in done.items())
    return sheet.launch_s, products, moved_bytes(call, mode, direction) / sheet.bytes_per_s


def least_s(call: Call, mode: str, direction: Direction, sheet: DataSheet) -> float:
    """Return the roofline: the least seconds of one direction of a call on a device.

    >>> least_s(call, "bf16", "forward", datasheet("A100"))
    """
    launch, products, memory = parts(call, mode, direction, sheet)
    return launch + max(products, memory) + sum_s(call, direction, sheet)


def _operand(call: Call, index: int, mode: str) -> str:
    """Return the type of an input: a product's by its precision, else the operator's mode."""
    known = call.is_product and mode in _PRECISIONS  # a product that is fixed may run in another type
    return operand_type(call.kind, index, Precision(mode)) if known else mode
