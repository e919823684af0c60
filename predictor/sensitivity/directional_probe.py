"""The movement of the gradient by each rounding, estimated from one small step of all parameters.

A precision adds small errors e to values (operands, results) and to gradients in backward. To first order
the gradient of all parameters then moves by A e, where

    for a value v        A = d(dL/dtheta)/dv        (a block of mixed second derivatives)
    for a gradient dL/dv A = (dv/dtheta)'           (backward is linear)

With a random sign r for every parameter, E (r'A e)^2 = |A e|^2 (Hutchinson's estimator). Both r'A are
directional derivatives along r. Two ordinary steps, at theta and at theta + eps r, give them for every value:

    for a value v        r'A = [dL/dv (theta + eps r) - dL/dv (theta)] / eps
    for a gradient dL/dv r'A = [v (theta + eps r) - v (theta)] / eps

So residual streams, norms, batch statistics, attention and depth get their true weights, and no weight needs
a fit. e is the rounding error of the kernels. Its products with r'A are summed over rows before they are
squared, because the errors of similar rows (the same token at the same position of many sentences) add up: in
a BERT after 40 batches, the head's BF16 error is five times that of independent errors. Columns are squared
one by one, which averages over the draw of r.

The values and gradients of the first step stay on the device until the second step. They take about as much
memory as the activations.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch

from qsync.errors import CalibrationError, NoGradientError, UnsupportedError, shortened
from qsync.lowering.incremental import Lowering
from qsync.lowering.lowered_graph import Cast, Run
from qsync.operators.declaration import Role
from qsync.operators.precision import STOCHASTIC, Precision
from qsync.operators.registry import PRECISIONS_BY_KIND, PRODUCTS, declared, reads_fp32
from qsync.predictor.sensitivity.calibration import Calibration, below_fp32
from qsync.predictor.sensitivity.rounding import (
    alike,
    rounded_to,
    rounding_error,
    stochastic_convolution_errors,
    stochastic_errors,
)
from qsync.records.base import SIXTEEN_BIT
from qsync.records.graph import Op, OpGraph

# Step of the parameters / their root mean square: between the error of a weight in BF16 (1e-3) and in INT8
# (8e-3). Its size is irrelevant for smooth models (BERT, ViT: equal omega from 1e-3 to 1e-2). It matters if
# ReLUs and maxima switch: their share of |A e|^2 / |e|^2 falls with the step, as it falls with |e|. Scaling
# that share to |e| corrects INT8 against BF16 for single operators, yet plans became worse (VGG: 1.3 times
# the error), since joint errors switch units by the root of their summed squares.
STEP = 3e-3

RESULT = -1  # the index of an operator's result; its operands are 0, 1, ...

# The least number of squares in a sum.
_MIN_SQUARES = 64

Effects = Mapping[tuple[str, int, str], float]  # (operator, index, type) -> E|A e|^2


@dataclass(frozen=True, slots=True)
class RoundingEffects:
    """Squared movements of one batch's gradient by rounding values, or their gradients, to types."""

    values: Effects
    gradients: Effects


@dataclass(slots=True)
class _Site:
    """An operand or result in the first step, with its value and (after backward) gradient."""

    op: str
    index: int
    tensor: Any  # tensor with its autograd graph, until a hook is registered; then None
    value: torch.Tensor
    is_parameter: bool
    trains: bool
    call: int = 0  # number of the operator's call in this step
    version: int = 0  # the tensor's version at its reading
    gradient: Any = None  # a tensor after backward
    moved: Any = None  # a weight read by several calls: the summed movement of its gradients

    @property
    def key(self) -> tuple[str, int, int]:
        return self.op, self.index, self.call


class Probe:
    """An Observer (see qsync.runtime.rewriting) of two steps on each batch, which `measure` runs."""

    def __init__(self, precisions: Sequence[Precision]) -> None:
        self._precisions = [p for p in precisions if p is not Precision.FP32]
        self._visit: Callable[..., None] | None = None
        self._sites: list[_Site] = []
        self._next = 0
        self._eps = torch.ones(())
        self.graph: OpGraph | None = None  # the graph traced on the first batch
        self._ops: dict[str, Op] = {}
        self._rounded: Collection[str] = ()
        self._first: dict[tuple[str, int, int], _Site] = {}  # (operator, operand, call) -> site
        self._num_calls: Counter[tuple[str, int]] = Counter()
        self._overwritten: set[tuple[str, int, int]] = set()  # sites that later code writes to in place
        self._effects: tuple[dict[Any, torch.Tensor], dict[Any, torch.Tensor]] = ({}, {})

    def measure(self, calibration: Calibration, batch: int) -> RoundingEffects:
        """Run two steps on one batch and return the effects; leave the parameters bitwise unchanged.

        Raises CalibrationError for NaN or Inf in values or gradients, naming the first operator with it, and
        for a gradient that is zero everywhere. Raises UnsupportedError for an operator that the first batch
        did not reach.
        """
        self._effects = ({}, {})
        loss = self._first_forward(calibration, batch)
        if found := {s.key for s in self._sites if s.tensor is not None and s.tensor._version != s.version}:
            self._overwritten |= found
            loss = self._first_forward(calibration, batch)
        self._hook(calibration.runner.graph)
        gradient = calibration.backward(loss, batch)
        self._check(loss, gradient)
        with calibration.perturbed(batch, STEP) as self._eps:
            self._next, self._visit = 0, self._compare
            loss = calibration.forward(batch)
            self._visit = None
            calibration.backward(loss, batch)
        self._add_weights_of_several_calls()
        self._sites.clear()
        self._first.clear()
        return self._to_host()

    def _first_forward(self, calibration: Calibration, batch: int) -> torch.Tensor:
        """Run the first forward, record all sites, and return the loss."""
        self._sites = []
        self._num_calls.clear()
        self._visit = self._record
        loss = calibration.forward(batch)
        self._visit = None
        return loss

    def began(self) -> None:
        """Do nothing, since sites are counted over the whole step."""

    def taken(self, op: str, index: int, operand: Any) -> Any:
        """Return a view of the operand, whose gradient comes from this operator alone."""
        if not takes_gradient(operand):
            return operand
        view = own_view(operand)  # also in recomputation, which must save the same tensors
        if self._visit is not None:
            self._visit(op, index, view, isinstance(operand, torch.nn.Parameter), operand.requires_grad)
        return view

    def seen(self, node: Cast | Run, result: Any, operands: tuple[Any, ...]) -> None:
        """Observe the results of an operator, except in recomputation during backward (checkpoints)."""
        if self._visit is None or not isinstance(node, Run):
            return
        for one in result if isinstance(result, (tuple, list)) else (result,):
            if takes_gradient(one) and one.requires_grad:
                self._visit(node.op, RESULT, one)

    def _record(
        self, op: str, index: int, tensor: torch.Tensor, is_parameter: bool = False, trains: bool = True
    ) -> None:
        call = self._num_calls[op, index]
        self._num_calls[op, index] += 1
        site = _Site(op, index, tensor, tensor.detach(), is_parameter, trains, call, tensor._version)
        if site.key in self._overwritten:
            self._watch(site, tensor, partial(_receive, site))
            site.tensor, site.value = None, site.value.clone()
        self._sites.append(site)

    def _hook(self, graph: OpGraph) -> None:
        """Register gradient hooks at all sites that some precision rounds; drop the other sites.

        Call it after the first forward, when the graph is known.
        """
        if not self._ops:
            self._rounded = {name for names in rounded_results(graph).values() for name in names}
            self._ops = {op.name: op for op in graph.ops}
            self.graph = graph
        if others := [site.op for site in self._sites if site.op not in self._ops]:
            raise UnsupportedError(
                f"{graph.model} runs {shortened(others[0])} on this batch and not on the first: give a batch "
                "first that reaches every operator"
            )
        sites = []
        for site in self._sites:
            op, tensor = self._ops[site.op], site.tensor
            site.tensor = None
            if op.role is Role.FIXED and reads_fp32(op.kind):
                continue  # its gradient may be sparse
            if op.kind in PRECISIONS_BY_KIND or site.op in self._rounded:
                if tensor is not None:
                    on_gradient(tensor, partial(_receive, site))
                sites.append(site)
                self._first[site.op, site.index, site.call] = site
        self._sites = sites

    def _check(self, loss: torch.Tensor, gradient: Sequence[torch.Tensor]) -> None:
        """Raise CalibrationError unless the step is finite and has a gradient; copy to the host once."""
        sites = [site for site in self._sites if site.index == RESULT]
        sums = [site.value.sum() for site in sites]
        back = [torch.zeros_like(loss) if p.gradient is None else p.gradient.sum() for p in sites]
        norm = torch.stack([g.square().sum() for g in gradient]).sum() if gradient else torch.zeros_like(loss)
        *found, size, value = torch.stack([*sums, *back, norm, loss.detach()]).tolist()
        for site, total in zip(sites, found, strict=False):
            if not math.isfinite(total):
                raise CalibrationError(
                    f"{site.op} met NaN or Inf in the calibration data; clean the batch or the weights "
                    "before planning"
                )
        if not math.isfinite(value):
            raise CalibrationError(f"the loss on the calibration batch is {value}; check the batch")
        for site, total in zip(reversed(sites), reversed(found), strict=False):
            if not math.isfinite(total):
                raise CalibrationError(
                    f"the gradient that reaches {site.op} is NaN or Inf; check the loss and the batch"
                )
        if size == 0.0:
            raise NoGradientError(
                f"the gradient is zero everywhere, from {_died_at(sites)} on; pass batches and a loss that "
                "train"
            )

    def _compare(self, op: str, index: int, tensor: torch.Tensor, *_: bool) -> None:
        """Compare a value of the second step with the first step's, and later also its gradient."""
        if self._next == len(self._sites):
            return
        site = self._sites[self._next]
        if (site.op, site.index) != (op, index):
            return  # not recorded in the first step
        self._next += 1
        if site.gradient is None:
            return
        with torch.no_grad():
            moved = (tensor.detach() - site.value) / self._eps
            self._add_gradient_effects(site, moved)
        self._watch(site, tensor, partial(self._add_value_effects, site))

    def _watch(self, site: _Site, tensor: torch.Tensor, receive: Callable[[torch.Tensor], None]) -> None:
        """Call `receive` with the gradient of the tensor's present value.

        The backward of an in-place write to a view goes to the view's base and bypasses the view's earlier
        hooks, so such a site hooks the base.
        """
        base = tensor._base
        if site.index != RESULT or site.key not in self._overwritten or base is None:
            on_gradient(tensor, receive)
            return
        of_base, of_tensor = (base.size(), base.stride()), (tensor.size(), tensor.stride())
        at = tensor.storage_offset() - base.storage_offset()

        def of_view(gradient: torch.Tensor) -> None:
            laid_out = gradient.new_empty_strided(*of_base).copy_(gradient)
            receive(laid_out.as_strided(*of_tensor, at))

        on_gradient(base, of_view)

    def _add_gradient_effects(self, site: _Site, moved: torch.Tensor) -> None:
        op = self._ops[site.op]
        for types in alike(_gradient_types(op, site.index, self._precisions)):
            error = rounding_error(site.gradient, types[0])
            self._add(1, site, types, _squares(error.mul_(moved), op, site.is_parameter))
        first = PRODUCTS[op.kind].factors[0] if op.kind in PRODUCTS else 0
        usable = below_fp32(op.kind, self._precisions)
        if site.index == first and any(p.facts.gradient == STOCHASTIC for p in usable):
            weight, result = (self._first[op.name, at, site.call] for at in (first + 1, RESULT))
            matrix = weight.value.t() if op.kind == "addmm" else weight.value
            errors = stochastic_convolution_errors if op.kind == "conv2d" else stochastic_errors
            dx, dw = errors(result.gradient, site.value, matrix)
            self._add(1, site, [STOCHASTIC], (dx * moved.square()).sum())
            if weight.is_parameter and weight.trains:
                self._add(1, weight, [STOCHASTIC], dw)

    @torch.no_grad()
    def _add_value_effects(self, site: _Site, gradient: torch.Tensor) -> None:
        moved = (gradient - site.gradient) / self._eps
        if site.is_parameter and self._num_calls[site.op, site.index] > 1:
            first = self._first[site.op, site.index, 0]  # all calls read one rounded weight
            first.moved = moved if first.moved is None else first.moved + moved
            return
        self._add_value_effect(site, moved)

    def _add_value_effect(self, site: _Site, moved: torch.Tensor) -> None:
        op = self._ops[site.op]
        for types in alike(_value_types(op, site.index, self._precisions)):
            error = rounding_error(site.value, types[0])
            self._add(0, site, types, _squares(error.mul_(moved), op, site.is_parameter))

    @torch.no_grad()
    def _add_weights_of_several_calls(self) -> None:
        for site in self._sites:
            if site.moved is not None:
                self._add_value_effect(site, site.moved)

    def _add(self, which: int, site: _Site, types: Iterable[str], effect: torch.Tensor) -> None:
        for type_name in types:
            key = (site.op, site.index, type_name)
            self._effects[which][key] = self._effects[which].get(key, 0.0) + effect

    def _to_host(self) -> RoundingEffects:
        """Copy all effects to the host in one transfer."""
        keys = [(which, key) for which in (0, 1) for key in self._effects[which]]
        numbers = torch.stack([self._effects[which][key] for which, key in keys]).tolist() if keys else []
        effects: tuple[dict[Any, float], dict[Any, float]] = ({}, {})
        for (which, key), number in zip(keys, numbers, strict=True):
            effects[which][key] = number
        return RoundingEffects(*effects)


def rounded_results(graph: OpGraph) -> dict[str, tuple[str, ...]]:
    """Map each adjustable operator to the operators with rounded results if only it runs in BF16.

    These are the operator itself and the following operators that then run in BF16.
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
    """Return whether a BF16 result needs no rounding (as an embedding's already rounded rows)."""
    return reads_fp32(kind) or (declared(kind).is_exact and not lowered)


def _value_types(op: Op, index: int, precisions: Sequence[Precision]) -> set[str]:
    """Return the types to which some precision rounds this operand or result."""
    if op.kind not in PRECISIONS_BY_KIND:
        return {"bf16"}
    usable = below_fp32(op.kind, precisions)
    if index == RESULT:
        return {"bf16", *(str(p) for p in usable if p is Precision.FP16)}
    return {rounded_to(op.kind, index, p) for p in usable} - {"fp32"}


def _gradient_types(op: Op, index: int, precisions: Sequence[Precision]) -> set[str]:
    """Return the types to which some precision rounds the gradient of this operand or result.

    There is none for an embedding's table, whose gradient is summed in FP32.
    """
    if reads_fp32(op.kind) and index != RESULT:
        return set()
    multiplied = index == RESULT and op.kind in PRECISIONS_BY_KIND
    usable = below_fp32(op.kind, precisions) if multiplied else precisions
    types = {"bf16", *(p.facts.gradient for p in usable)} - {STOCHASTIC}
    return types if multiplied else types & set(SIXTEEN_BIT)


def _squares(product: torch.Tensor, op: Op, is_parameter: bool) -> torch.Tensor:
    """Return the sum over columns of squared row sums; for parameters, the sum of squares."""
    if is_parameter or product.ndim < 2:
        return product.square().sum()
    images = op.kind == "conv3d" or (product.ndim == 4 and declared(op.kind).has_channels)
    channel = 1 if images else product.ndim - 1
    rest, left = [], product.numel()
    for dim in (0, *reversed(range(1, product.ndim))):
        if dim != channel and left // product.shape[dim] >= _MIN_SQUARES:
            rest.append(dim)
            left //= product.shape[dim]
    return (product.sum(rest) if rest else product).square().sum()


def _receive(site: _Site, gradient: torch.Tensor) -> None:
    site.gradient = gradient.detach()


def _died_at(sites: Sequence[_Site]) -> str:
    """Return the first operator in backward order whose gradient is zero or missing."""
    for site in reversed(sites):
        if site.gradient is None or not bool(site.gradient.any()):
            return site.op
    return sites[0].op if sites else "the model"


def own_view(operand: torch.Tensor) -> torch.Tensor:
    """Return a view of an operand, whose gradient comes from the view's readers alone."""
    return operand.view_as(operand) if operand.requires_grad else operand.detach().requires_grad_()


def on_gradient(tensor: torch.Tensor, receive: Callable[[torch.Tensor], None]) -> None:
    """Register a hook that calls `receive` with the complete gradient of a tensor."""
    tensor.register_hook(receive)  # type: ignore[no-untyped-call]


def takes_gradient(value: Any) -> bool:
    """Return whether a value is an FP32 tensor and gradients are enabled."""
    return isinstance(value, torch.Tensor) and value.dtype is torch.float32 and torch.is_grad_enabled()
