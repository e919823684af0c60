"""Indicators from the literature, as baselines, for products in BF16 and INT8.

    fisher   sum over operands x of  sum (dL/dx)^2 e^2, e the rounding error of x: the squared first-order
             change of the loss, as NVIDIA's ModelOpt scores layers
    hessian  |tr(H_w)| / n  |Q(w) - w|^2, w of n elements: curvature of the loss (HAWQ-V2, arXiv:1911.03852),
             tr(H_w) = E r' [dL/dw (theta + eps r) - dL/dw (theta)] / eps with random signs r (Hutchinson)
    random   random numbers, the control
    depth    QSync's (arXiv:2407.02327, section 4): rounding variances weighted by depth

For y = x W (x: M x K, W: K x N, g = dL/dy) with rounding variances v_x, v_w, v_g per element, the errors are

    forward   E|dy|^2      = v_x M |W|^2 + v_w N |x|^2
    wgrad     E|d(x'g)|^2  = v_x K |g|^2 + v_g N |x|^2
    dgrad     E|d(gW')|^2  = v_g M |W|^2 + v_w K |g|^2

and with G the squared norm of the whole gradient, L the depth of the model and d that of the operator

    depth = wgrad + G [ (L - d)/L  forward / |y|^2  +  d/L  dgrad / |gW'|^2 ],    |gW'|^2 = |g|^2 |W|^2 / N

For a product of activations the operands' relative variances add. An embedding rounds the looked-up rows, and
the gradients of all lookups.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

import qsync
from qsync import Precision, Sensitivity
from qsync.api import LossFunction, calibrating
from qsync.lowering.lowered_graph import Cast, Run
from qsync.predictor.sensitivity.calibration import Calibration, mean_over_batches
from qsync.predictor.sensitivity.directional_probe import RESULT, on_gradient, own_view, takes_gradient
from qsync.predictor.sensitivity.rounding import rounded_to, rounding_error
from qsync.records.graph import Op

Omega = dict[str, dict[str, float]]
Score = Callable[[Calibration, int], Omega]  # for one batch

STEP = 3e-3  # step of `hessian`, relative to the root mean square of all parameters
_STEPS = {Precision.BF16: 2.0**-7, Precision.INT8: 1 / 127}  # spacing of each precision's numbers at 1
# Both precisions round the gradient to BF16.
_GRADIENT = "bf16"


@dataclass(slots=True)
class Seen:
    """Values and gradients of one operator in one step, by place (`RESULT`, or operand index)."""

    values: dict[int, torch.Tensor] = field(default_factory=dict)
    gradients: dict[int, torch.Tensor] = field(default_factory=dict)
    parameters: list[int] = field(default_factory=list)


class Watch:
    """Observer (see qsync.runtime.rewriting) of all products in one step at a time."""

    def __init__(self) -> None:
        self._found: dict[str, Seen] = {}
        self._open = False

    def step(self, calibration: Calibration, batch: int) -> tuple[list[tuple[Op, Seen]], float]:
        """Run one FP32 step; return every product's values, and the squared gradient norm."""
        self._found, self._open = {}, True
        calibration.assign({}, self)
        loss = calibration.forward(batch)
        self._open = False  # ignore recomputation in backward (checkpoints)
        gradient = calibration.backward(loss, batch)
        ops = calibration.runner.graph.adjustable
        norm = sum(float(part.square().sum()) for part in gradient)
        return [(op, self._found[op.name]) for op in ops if op.name in self._found], norm

    def began(self) -> None:
        """Do nothing, because order does not matter."""

    def taken(self, op: str, index: int, operand: Any) -> Any:
        """Return a view of the operand with a gradient of its own."""
        if not takes_gradient(operand):
            return operand
        view = own_view(operand)  # also in recomputation, which must save the same tensors as forward
        if self._open and isinstance(operand, torch.nn.Parameter):
            self._found.setdefault(op, Seen()).parameters.append(index)
        self._note(op, index, view)
        return view

    def seen(self, node: Cast | Run, result: Any, operands: tuple[Any, ...]) -> None:
        """Record an operator's result."""
        if isinstance(node, Run) and takes_gradient(result) and result.requires_grad:
            self._note(node.op, RESULT, result)

    def _note(self, op: str, place: int, tensor: torch.Tensor) -> None:
        if self._open:
            seen = self._found.setdefault(op, Seen())
            seen.values[place] = tensor.detach().clone()  # a later step may overwrite it
            on_gradient(tensor, lambda gradient: seen.gradients.update({place: gradient.detach()}))


def fisher(calibration: Calibration, batch: int) -> Omega:
    """Score the squared first-order change of the loss."""
    omega = calibration.zeros(calibration.runner.graph)
    for op, seen in Watch().step(calibration, batch)[0]:
        for place, precision, error in _errors(op, seen, omega):
            if place in seen.gradients:
                omega[op.name][precision] += float((seen.gradients[place] * error).square().sum())
    return omega


def hessian(calibration: Calibration, batch: int) -> Omega:
    """Score curvature times squared error of parameters; take its magnitude after the mean."""
    omega = calibration.zeros(calibration.runner.graph)
    here, _ = Watch().step(calibration, batch)
    with calibration.perturbed(batch, STEP) as eps:
        there, _ = Watch().step(calibration, batch)
    for (op, seen), (_, moved) in zip(here, there, strict=True):
        for place, precision, error in _errors(op, seen, omega):
            if place in seen.parameters and place in seen.gradients:
                value, gradient = (
                    getattr(moved, part)[place] - getattr(seen, part)[place]
                    for part in ("values", "gradients")
                )
                trace = (value * gradient).sum() / eps.square()
                omega[op.name][precision] += float(trace * error.square().mean())
    return omega


def random_scores(calibration: Calibration, batch: int) -> Omega:
    """Draw u s^2/12 per operator: u uniform in (0, 1) by the seed, s the precision's spacing at 1."""
    omega, draw = calibration.zeros(calibration.runner.graph), random.Random(calibration.seed)
    for modes in omega.values():
        factor = 1 - draw.random()
        modes.update({mode: factor * _STEPS[Precision(mode)] ** 2 / 12 for mode in modes})
    return omega


def depth(calibration: Calibration, batch: int) -> Omega:
    """Score rounding variances by depth."""
    omega = calibration.zeros(calibration.runner.graph)
    found, norm = Watch().step(calibration, batch)
    deepest = max((op.depth for op, _ in found), default=1)
    for op, seen in found:
        for precision in omega[op.name] if RESULT in seen.gradients else ():
            forward, wgrad, dgrad = _terms(op, seen, Precision(precision))
            weighted = ((deepest - op.depth) * forward + op.depth * dgrad) / deepest
            omega[op.name][precision] = wgrad + norm * weighted
    return omega


def _terms(op: Op, seen: Seen, precision: Precision) -> tuple[float, float, float]:
    """Return forward (over |y|^2), wgrad and dgrad (over |gW'|^2) of the module's equations."""
    y, g = seen.values[RESULT], seen.gradients[RESULT]
    y2, g2, v_g = _square(y), _square(g), _variance(g, _GRADIENT)
    if op.kind == "embedding":
        trains = bool(seen.parameters)
        return _variance(y, str(precision)) * y.numel() / y2, v_g * y.numel() * trains, 0.0
    if not seen.parameters:
        relative = sum(
            _variance(x, rounded_to(op.kind, place, precision)) * x.numel() / max(_square(x), 1e-300)
            for place, x in seen.values.items() if place != RESULT
        )  # fmt: skip
        return relative, 0.0, relative + v_g * g.numel() / g2
    at_x, at_w = (1, 2) if op.kind == "addmm" else (0, 1)
    x, w = seen.values[at_x], seen.values[at_w]
    v_x, v_w = (_variance(t, rounded_to(op.kind, j, precision)) for j, t in ((at_x, x), (at_w, w)))
    n = w.shape[1] if op.kind == "addmm" else w.shape[0]
    m, k = y.numel() // n, w.numel() // n
    x2, w2 = _square(x) * m * k / x.numel(), _square(w)  # windows of a convolution read a pixel several times
    forward = (v_x * m * w2 + v_w * n * x2) / y2
    wgrad = (v_x * k * g2 + v_g * n * x2) * (at_w in seen.gradients)
    return forward, wgrad, v_g * m * n / g2 + v_w * k * n / w2


def _square(tensor: torch.Tensor) -> float:
    return float(tensor.double().square().sum())


def _variance(tensor: torch.Tensor, type_name: str) -> float:
    """Return the mean squared error of rounding to a type."""
    return 0.0 if type_name == "fp32" else float(rounding_error(tensor, type_name).square().mean())


def _errors(op: Op, seen: Seen, omega: Omega) -> Iterator[tuple[int, str, torch.Tensor]]:
    """Yield place, precision and rounding error of every rounded operand."""
    for place, value in seen.values.items():
        for precision in omega[op.name] if place != RESULT else ():
            if (type_name := rounded_to(op.kind, place, Precision(precision))) != "fp32":
                yield place, precision, rounding_error(value, type_name)


BASELINES: Mapping[str, Score] = {
    "depth": depth, "fisher": fisher, "hessian": hessian, "random": random_scores
}  # fmt: skip
INDICATORS = ("variance", "empirical", *BASELINES)


def sensitivity_by(
    name: str,
    model: torch.nn.Module,
    batches: Sequence[Any],
    loss_fn: LossFunction,
    *,
    precisions: Sequence[Precision],
    seed: int = 0,
) -> Sensitivity:
    """Return the sensitivity by an indicator of `INDICATORS`, averaged over batches.

    >>> sensitivity_by("depth", model, batches, loss_fn, precisions=[Precision.BF16])
    """
    if name not in BASELINES:
        return qsync.sensitivity(model, batches, loss_fn, indicator=name, precisions=precisions, seed=seed)
    with calibrating(model, batches, loss_fn, precisions=precisions, seed=seed) as calibration:
        calibration.assign({})
        calibration.forward(0)  # makes the graph known
        found = [BASELINES[name](calibration, batch) for batch in range(len(batches))]
        graph = calibration.runner.graph
    omega = {
        op: {mode: abs(score) for mode, score in modes.items()}
        for op, modes in mean_over_batches(found).items()
    }
    return Sensitivity(graph.hash, name, omega, len(batches))
