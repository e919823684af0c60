"""Single operators of given shapes, in the company they have in models: what a cost model is taught with.

Each call stands on values that a thin product made. What works on images stands between two thin
convolutions, so that images and their gradients arrive in the order that convolutions hand on. All of them
are operators of one module, which is profiled as any model is: with the kernels, casts and clocks of a real
step.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from qsync.predictor.cost_model.op_calls import Argument, Call
from qsync.records.graph import num_elements

_THIN = 16
_ON_IMAGES = ("conv2d", "batch_norm", "max_pool2d")

_UNARY: dict[str, Callable[[Tensor], Tensor]] = {
    "relu": F.relu, "gelu": F.gelu, "silu": F.silu, "tanh": torch.tanh, "sigmoid": torch.sigmoid,
    "softmax": lambda x: F.softmax(x, -1), "dropout": lambda x: F.dropout(x, 0.1, True),
    "max_pool2d": lambda x: F.max_pool2d(x, 2), "neg": torch.neg,
}  # fmt: skip
_BINARY: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "add": torch.add, "sub": torch.sub, "mul": torch.mul, "matmul": torch.matmul,
}  # fmt: skip


def can_measure(call: Call) -> bool:
    """Whether a call can stand alone: its arguments follow from its shapes."""
    shapes = [argument.shape for argument in call.inputs]
    if any(0 in shape or not shape for shape in (*shapes, call.output)):
        return False
    fresh = sum(not argument.parameter for argument in call.inputs)
    if call.kind in _UNARY or call.kind in ("layer_norm", "batch_norm"):
        return len(shapes) == fresh == 1
    if call.kind in _BINARY:
        return len(shapes) == fresh == 2
    if call.kind == "conv2d":
        return len(shapes[0]) == 4 and fresh == 1 and shapes[0][1] % shapes[1][1] == 0
    return (call.kind == "linear" and fresh == 1) or (call.kind == "attention" and len(shapes) == fresh == 3)


class Bench(nn.Module):
    """Every one of some calls, each on values of its own. Called with any tensor; returns the results."""

    def __init__(self, calls: Sequence[Call]) -> None:
        super().__init__()
        self.cells = nn.ModuleList(_Cell(call) for call in calls)

    def forward(self, x: Tensor) -> list[Tensor]:
        return [cell() * x for cell in self.cells]

    @property
    def shapes(self) -> list[tuple[int, ...]]:
        """The shapes of its results."""
        return [cell.shape for cell in self.cells]  # type: ignore[misc]


class _Cell(nn.Module):
    """One call on values of its own.

    What needs a gradient is made by a thin product (16 wide), so that it arrives in the type that a product
    hands on; for what works on images, by a convolution, which hands them on in an order of its own. Another
    reads its result, and brings the gradient in that order.
    """

    def __init__(self, call: Call) -> None:
        super().__init__()
        self.call, self.kind = call, call.kind
        self.made, self.given = nn.ModuleList(), nn.ParameterList()
        for argument in call.inputs:
            if argument.parameter:
                scale = num_elements(argument.shape[1:]) ** -0.5
                self.given.append(torch.randn(argument.shape) * scale)
            else:
                self.made.append(_Made(argument, call.kind in _ON_IMAGES and len(argument.shape) == 4))
        if call.kind in ("layer_norm", "batch_norm"):
            shape = call.inputs[0].shape
            flat = {3: nn.BatchNorm1d, 4: nn.BatchNorm2d}.get(len(shape), nn.BatchNorm1d)
            self.norm: nn.Module = nn.LayerNorm(shape[-1]) if call.kind == "layer_norm" else flat(shape[1])

        images = call.kind in _ON_IMAGES and len(call.output) == 4
        self.reads = nn.Parameter(torch.randn(_THIN, call.output[1], 1, 1)) if images else None
        self.shape = (call.output[0], _THIN, *call.output[2:]) if images else call.output

    def forward(self) -> Tensor:
        result = self._run(*(made() for made in self.made), *self.given)
        return result if self.reads is None else F.conv2d(result, self.reads)

    def _run(self, *values: Tensor) -> Tensor:
        if self.kind in _UNARY:
            return _UNARY[self.kind](*values)
        if self.kind in _BINARY:
            return _BINARY[self.kind](*values)
        if self.kind == "linear":
            return F.linear(*values)
        if self.kind == "attention":
            return F.scaled_dot_product_attention(*values[:3])
        if self.kind == "conv2d":
            return F.conv2d(*values, **_geometry(self.call))
        return self.norm(*values)


class _Made(nn.Module):
    """A value that an operator made, or, where nobody asks for its gradient, one that was given."""

    def __init__(self, argument: Argument, image: bool) -> None:
        super().__init__()
        self.shape, self.image = argument.shape, image
        rows, columns = self.shape[0], num_elements(self.shape[1:])
        if argument.gradient and image:
            self.left = nn.Parameter(torch.randn(rows, _THIN, *self.shape[2:]))
            self.right = nn.Parameter(torch.randn(self.shape[1], _THIN, 1, 1) * _THIN**-0.5)
        elif argument.gradient:
            self.left = nn.Parameter(torch.randn(rows, _THIN))
            self.right = nn.Parameter(torch.randn(columns, _THIN) * _THIN**-0.5)
        else:
            self.register_buffer("value", torch.randn(self.shape))

    def forward(self) -> Tensor:
        if not hasattr(self, "left"):
            return self.value
        if self.image:
            return F.conv2d(self.left, self.right)
        return F.linear(self.left, self.right).view(self.shape)


def _geometry(call: Call) -> dict[str, Any]:
    """Stride, padding and groups of a convolution, from its shapes."""
    x, weight, y = call.inputs[0].shape, call.inputs[1].shape, call.output
    stride = max(round(x[2] / y[2]), 1)
    padding = max(-(-((y[2] - 1) * stride + weight[2] - x[2]) // 2), 0)
    return {"stride": stride, "padding": padding, "groups": x[1] // weight[1]}
