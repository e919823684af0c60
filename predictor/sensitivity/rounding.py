"""The error of rounding each element to a type, as the kernels round."""

from __future__ import annotations

import torch

from qsync.backend.encoding import decode, encode
from qsync.backend.reference_kernels import round_mantissa
from qsync.records.precision import MANTISSA_BITS, ROUND_INSIDE, Precision, rounded_type

_BITS = {"e5m2": 2, **MANTISSA_BITS}


def rounded_to(kind: str, index: int, precision: Precision) -> str:
    """Return the type to which a precision rounds this operand; "fp32" if it does not.

    TF32 rounds inside the product, and so does fast FP32. An embedding rounds the rows that it looks up;
    that equals a lookup of rounded rows, so its table counts as the operand.
    """
    return str(precision) if precision in ROUND_INSIDE else rounded_type(kind, index, precision)


def rounding_error(tensor: torch.Tensor, type_name: str) -> torch.Tensor:
    """Return rounded minus exact, element by element, in FP32: a tensor of the same shape.

    `type_name` is an encoding ("int8_row", "fp8_col" ...) or a float ("bf16", "fp16", "tf32", "fp32_fast",
    "e5m2"). FP16 and E5M2 count with their mantissa alone: kernels scale values into their range.

    >>> rounding_error(torch.tensor([1.0, 1.01]), "bf16")
    tensor([ 0.0000, -0.0022])
    """
    x = tensor.detach().float()
    if x.numel() == 0:
        return x
    rounded = round_mantissa(x, _BITS[type_name]) if type_name in _BITS else decode(encode(x, type_name))
    return rounded - x


def stochastic_errors(
    gradient: torch.Tensor, x: torch.Tensor, weight: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the variance that `int8_all` adds to the gradients of y = x W' by rounding g = dL/dy.

        dx = s_h (H W),   H = stochastic INT8 of g s_w, one scale s_h per row
        dW = s_k (K' X),  K = stochastic INT8 of g s_x, one scale s_k per output

    with X, W the INT8 codes of x and W, and s_x, s_w their scales. Rounding is stochastic. A value between
    two codes, at the fraction f, adds f (1 - f) s^2: s^2/6 on average, and nothing at zero, where many
    gradients are. `gradient` (..., N), `x` (..., K), `weight` (N, K). Returns the variance of each element of
    dx, (..., K), distributed over K in proportion to the squared columns of the weight, and the sum of the
    variances of dW.
    """
    g, rows = gradient.reshape(-1, gradient.shape[-1]), x.reshape(-1, x.shape[-1])
    x_scale, w_scale = (t.abs().amax(1, keepdim=True).clamp_min(1e-30) / 127 for t in (rows, weight))
    codes = (weight / w_scale).square()
    per_row = _stochastic_variances(g * w_scale.T, 1) @ codes.sum(1)
    dx = per_row[:, None] * (codes.sum(0) / codes.sum().clamp_min(1e-30))
    dw = (_stochastic_variances(g * x_scale, 0).sum(1) * (rows / x_scale).square().sum(1)).sum()
    return dx.view(x.shape), dw


def _stochastic_variances(values: torch.Tensor, dim: int) -> torch.Tensor:
    """Return f (1 - f) s^2 of each element, s = amax/127 along `dim`."""
    step = values.abs().amax(dim, keepdim=True).clamp_min(1e-30) / 127
    scaled = values / step
    fraction = scaled - scaled.floor()
    return fraction * (1 - fraction) * step.square()
