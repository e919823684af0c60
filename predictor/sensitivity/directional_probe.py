"""How much each rounding would move the gradient, felt by one small step of all parameters at once.

A precision adds small errors e to values (operands, results) and to gradients on their way back. To first
order the gradient of all parameters then moves by A e, where

    for a value v        A = d(dL/dtheta)/dv        (a block of mixed second derivatives)
    for a gradient dL/dv A = (dv/dtheta)'           (backward is linear)

With a random sign r for every parameter E (r'A e)^2 = |A e|^2 (Hutchinson), and both r'A are directional
derivatives along r, which two ordinary steps, at theta and at theta + eps r, show for every value at once:

    for a value v        r'A = [dL/dv (theta + eps r) - dL/dv (theta)] / eps
    for a gradient dL/dv r'A = [v (theta + eps r) - v (theta)] / eps                                 (ours)

So residual streams, norms, batch statistics, attention and depth weigh as they really do, and no weight is
left to fit. e is the error of the very rounding that the kernels do. Its products with r'A are summed over
rows before they are squared, because the errors of rows that resemble each other (the same token, at the same
place in many sentences) add up: in a BERT that has seen 40 batches the head's error in BF16 is five times
what independent errors would make. Columns are squared one by one, which averages the draw of r over them.

Between the two steps the first one's values and gradients are kept, on the device: about as much memory again
as the activations take.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch

from qsync.errors import CalibrationError
from qsync.lowering.incremental import Lowering
from qsync.lowering.lowered_graph import Cast, Run
from qsync.predictor.sensitivity.calibration import Calibration
from qsync.predictor.sensitivity.operand_gradients import MOST_OPERANDS, is_felt, on_gradient, own_edge
from qsync.predictor.sensitivity.rounding import rounded_to, rounding_error, stochastic_errors
from qsync.records.graph import Op, OpGraph, Role
from qsync.records.precision import PRECISIONS_BY_KIND, ROUNDS_WHAT_IT_READS, Precision

# The step of the parameters, of their root mean square: between what BF16 (1e-3) and INT8 (8e-3) do to a
# weight. Where everything is smooth it makes no difference (BERT, ViT: the same omega from 1e-3 to 1e-2).
# Where ReLUs and maxima change sides it does: their share of |A e|^2 / |e|^2 falls with the step, as it falls
# with |e|. Scaling that share to |e| sets INT8 right against BF16 for single operators, yet plans were worse
# for it (VGG: 1.3 times the error): together, errors switch units by the root of their summed squares.
STEP = 3e-3

RESULT = -1  # the place of an operator's result; its operands are 0, 1, ...
STOCHASTIC = "int8_stochastic"

# Following operators whose result is exact in the type of their operand.
_EXACT = (
    "relu", "relu6", "hardtanh", "max_pool2d", "view", "contiguous", "clone", "cat", "stack", "neg", "pad",
    "where", "masked_fill", "roll", "dropout",
)  # fmt: skip
# At least so many squares are averaged.
_LEAST_SQUARES = 64

Effects = Mapping[tuple[str, int, str], float]  # (operator, place, type) -> E|A e|^2


@dataclass(frozen=True, slots=True)
class Felt:
    """One batch: squared movement of the gradient by rounding a value, or the gradient of a value, to a
    type.
    """

    values: Effects
    gradients: Effects


@dataclass(slots=True)
class _Place:
    """An operand or result of one operator in the first step: its value and, after backward, its gradient."""

    op: str
    index: int
    tensor: Any  # with its graph, until its gradient was asked for
    value: torch.Tensor
    is_parameter: bool
    trains: bool
    gradient: Any = None  # a tensor once backward has been there


class Probe:
    """An Observer (see qsync.runtime.rewriting) of both steps on one batch after another: `feel` takes them."""

    def __init__(self, precisions: Sequence[Precision]) -> None:
        self._precisions = [p for p in precisions if p is not Precision.FP32]
        self._visit: Callable[..., None] | None = None
        self._places: list[_Place] = []
        self._next = 0
        self._eps = torch.ones(())
        self._ops: dict[str, Op] = {}
        self._narrow: Collection[str] = ()
        self._first: dict[tuple[str, int], _Place] = {}
        self._felt: tuple[dict[Any, torch.Tensor], dict[Any, torch.Tensor]] = ({}, {})

    def feel(self, calibration: Calibration, batch: int) -> Felt:
        """Two steps on one batch. The parameters are bitwise as before afterwards.

        Raises CalibrationError for NaN or Inf in values or gradients, naming the operator that met it first,
        and for a gradient that is zero everywhere.
        """
        self._places, self._felt = [], ({}, {})
        self._visit = self._keep
        loss = calibration.forward(batch)
        self._visit = None
        self._hook(calibration.runner.graph)
        gradient = calibration.backward(loss, batch)
        self._check(loss, gradient)
        with calibration.aside(batch, STEP) as self._eps:
            self._next, self._visit = 0, self._compare
            loss = calibration.forward(batch)
            self._visit = None
            calibration.backward(loss, batch)
        self._places.clear()
        self._first.clear()
        return self._brought_over()

    def began(self) -> None:
        """Nothing to do: places are counted over the whole step."""

    def taken(self, op: str, index: int, operand: Any) -> Any:
        """Give an operand an edge of its own, so that its gradient is what this operator alone sends back."""
        if self._visit is None or index >= MOST_OPERANDS or not is_felt(operand):
            return operand
        edge = own_edge(operand)
        self._visit(op, index, edge, isinstance(operand, torch.nn.Parameter), operand.requires_grad)
        return edge

    def seen(self, node: Cast | Run, result: Any, operands: tuple[Any, ...]) -> None:
        """Results; what a checkpoint computes again in backward is not looked at."""
        if self._visit is not None and isinstance(node, Run) and is_felt(result) and result.requires_grad:
            self._visit(node.op, RESULT, result)

    def _keep(
        self, op: str, index: int, tensor: torch.Tensor, is_parameter: bool = False, trains: bool = True
    ) -> None:
        self._places.append(_Place(op, index, tensor, tensor.detach(), is_parameter, trains))

    def _hook(self, graph: OpGraph) -> None:
        """After the first forward, when the graph is known: keep what some precision rounds, and ask for its
        gradient.
        """
        if not self._ops:
            self._narrow = {name for names in carried_narrow(graph).values() for name in names}
            self._ops = {op.name: op for op in graph.ops}
        places = []
        for place in self._places:
            op, tensor = self._ops[place.op], place.tensor
            place.tensor = None
            if op.role is Role.FIXED and op.kind in ROUNDS_WHAT_IT_READS:
                continue  # its gradient may be sparse
            if op.kind in PRECISIONS_BY_KIND or place.op in self._narrow:
                on_gradient(tensor, partial(_receive, place))
                places.append(place)
                self._first.setdefault((place.op, place.index), place)
        self._places = places

    def _check(self, loss: torch.Tensor, gradient: Sequence[torch.Tensor]) -> None:
        """One look at the numbers of the whole step: is everything finite, and is there a gradient?"""
        places = [place for place in self._places if place.index == RESULT]
        sums = [place.value.sum() for place in places]
        back = [torch.zeros_like(loss) if p.gradient is None else p.gradient.sum() for p in places]
        norm = torch.stack([g.square().sum() for g in gradient]).sum() if gradient else torch.zeros_like(loss)
        *found, size, value = torch.stack([*sums, *back, norm, loss.detach()]).tolist()
        for place, total in zip(places, found, strict=False):
            if not _is_finite(total):
                raise CalibrationError(
                    f"{place.op} met NaN or Inf in the calibration data; clean the batch or the weights "
                    "before planning"
                )
        if not _is_finite(value):
            raise CalibrationError(f"the loss on the calibration batch is {value}; check the batch")
        for place, total in zip(reversed(places), reversed(found), strict=False):
            if not _is_finite(total):
                raise CalibrationError(
                    f"the gradient that reaches {place.op} is NaN or Inf; check the loss and the batch"
                )
        if size == 0.0:
            name = self._died_at(places)
            raise CalibrationError(
                f"the gradient is zero everywhere, from {name} on; pass batches and a loss that train"
            )

    def _died_at(self, places: Sequence[_Place]) -> str:
        """The operator that backward reaches first with a gradient of zero, or with none."""
        for place in reversed(places):
            if place.gradient is None or not bool(place.gradient.any()):
                return place.op
        return places[0].op if places else "the model"

    def _compare(self, op: str, index: int, tensor: torch.Tensor, *_: bool) -> None:
        """In the second step: how a value moved, and later how its gradient did."""
        if self._next == len(self._places):
            return
        place = self._places[self._next]
        if (place.op, place.index) != (op, index):
            return  # nothing that was kept
        self._next += 1
        if place.gradient is None:
            return
        with torch.no_grad():
            moved = (tensor.detach() - place.value) / self._eps
            self._feel_gradient(place, moved)
        on_gradient(tensor, partial(self._feel_value, place))

    def _feel_gradient(self, place: _Place, moved: torch.Tensor) -> None:
        op = self._ops[place.op]
        for type_name in _gradient_types(op, place.index, self._precisions):
            error = rounding_error(place.gradient, type_name)
            self._add(1, place, type_name, _squares(error * moved, op, place.is_parameter))
        first = 1 if op.kind == "addmm" else 0
        if place.index == first and Precision.INT8_ALL in self._usable(op):
            weight, result = self._first[op.name, first + 1], self._first[op.name, RESULT]
            matrix = weight.value.t() if op.kind == "addmm" else weight.value
            dx, dw = stochastic_errors(result.gradient, place.value, matrix)
            self._add(1, place, STOCHASTIC, (dx * moved.square()).sum())
            if weight.is_parameter and weight.trains:
                self._add(1, weight, STOCHASTIC, dw)

    @torch.no_grad()
    def _feel_value(self, place: _Place, gradient: torch.Tensor) -> None:
        op = self._ops[place.op]
        moved = (gradient - place.gradient) / self._eps
        for type_name in _value_types(op, place.index, self._precisions):
            error = rounding_error(place.value, type_name)
            self._add(0, place, type_name, _squares(error * moved, op, place.is_parameter))

    def _usable(self, op: Op) -> list[Precision]:
        return [p for p in self._precisions if p in PRECISIONS_BY_KIND.get(op.kind, ())]

    def _add(self, which: int, place: _Place, type_name: str, effect: torch.Tensor) -> None:
        key = (place.op, place.index, type_name)
        self._felt[which][key] = self._felt[which].get(key, 0.0) + effect

    def _brought_over(self) -> Felt:
        """Everything to the host at once."""
        keys = [(which, key) for which in (0, 1) for key in self._felt[which]]
        numbers = torch.stack([self._felt[which][key] for which, key in keys]).tolist() if keys else []
        effects: tuple[dict[Any, float], dict[Any, float]] = ({}, {})
        for (which, key), number in zip(keys, numbers, strict=True):
            effects[which][key] = number
        return Felt(*effects)


def carried_narrow(graph: OpGraph) -> dict[str, tuple[str, ...]]:
    """For each adjustable operator, the operators whose result is rounded to BF16 when it alone is in BF16:
    its own, and those of the following operators that then run in BF16.
    """
    lowering = Lowering(graph, {})
    found = {}
    for op in graph.adjustable:
        change = lowering.assign(op.name, Precision.BF16)
        carried = [lowering.run(i) for i in change.touched]
        kinds = {graph.ops[i].name: graph.ops[i].kind for i in change.touched}
        found[op.name] = tuple(
            run.op
            for run in carried
            if run.output == "bf16" and not _is_exact(kinds[run.op], run.op == op.name)
        )
        lowering.undo(change)
    return found


def _is_exact(kind: str, lowered: bool) -> bool:
    """Whether a result in BF16 needs no rounding: an embedding's rows already are rounded."""
    return kind in ROUNDS_WHAT_IT_READS or (kind in _EXACT and not lowered)


def _value_types(op: Op, index: int, precisions: Sequence[Precision]) -> set[str]:
    """The types to which some precision rounds this operand or result."""
    if op.kind not in PRECISIONS_BY_KIND:
        return {"bf16"}
    usable = [p for p in precisions if p in PRECISIONS_BY_KIND[op.kind]]
    if index == RESULT:
        return {"bf16", *(str(p) for p in usable if p is Precision.FP16)}
    return {rounded_to(op.kind, index, p) for p in usable} - {"fp32"}


def _gradient_types(op: Op, index: int, precisions: Sequence[Precision]) -> set[str]:
    """The types to which some precision rounds the gradient of this operand or result.

    Not that of an embedding's table, which is added up in FP32.
    """
    if op.kind in ROUNDS_WHAT_IT_READS and index != RESULT:
        return set()
    found = {"bf16", *(str(p) for p in precisions if p is Precision.FP16)}
    if index == RESULT and op.kind in PRECISIONS_BY_KIND:
        found |= {"tf32" for p in precisions if p is Precision.TF32}
        found |= {"e5m2" for p in precisions if p is Precision.FP8}
    return found


def _squares(product: torch.Tensor, op: Op, is_parameter: bool) -> torch.Tensor:
    """Sum over columns of squared sums over rows; over elements where there is no such likeness."""
    if is_parameter or product.ndim < 2:
        return product.square().sum()
    images = product.ndim == 4 and op.kind not in ("attention", "matmul", "softmax")
    channel = 1 if images else product.ndim - 1
    rest, left = [], product.numel()
    for dim in (0, *reversed(range(1, product.ndim))):
        if dim != channel and left // product.shape[dim] >= _LEAST_SQUARES:
            rest.append(dim)
            left //= product.shape[dim]
    return (product.sum(rest) if rest else product).square().sum()


def _receive(place: _Place, gradient: torch.Tensor) -> None:
    place.gradient = gradient.detach()


def _is_finite(value: float) -> bool:
    return value - value == 0.0
