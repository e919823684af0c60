"""The rounding error of each element in a type, by the rounding of the kernels."""

from __future__ import annotations

from collections.abc import Iterable

import torch

from qsync.backend.encoding import decode, encode
from qsync.backend.kernels.convolution.conv_strategy import int8_gradient_unfolds
from qsync.backend.reference_kernels import round_mantissa
from qsync.operators.precision import MANTISSA_BITS, Precision
from qsync.operators.registry import rounded_type


def rounded_to(kind: str, index: int, precision: Precision) -> str:
    """Return the type to which a precision rounds an operand (by index); "fp32" without rounding.

    TF32 rounds inside the product. An embedding rounds the rows after the lookup. This equals a lookup in a
    rounded table, so the table counts as the operand.
    """
    return "tf32" if precision is Precision.TF32 else rounded_type(kind, index, precision)


def rounding_error(tensor: torch.Tensor, type_name: str) -> torch.Tensor:
    """Return the rounding error (rounded minus exact) of each element: FP32, of the same shape.

    `type_name` is an encoding ("int8_row", "fp8_col" ...) or a float ("bf16", "fp16", "tf32", "e5m2"). FP16
    and E5M2 round the mantissa only, since kernels scale values into their range.

    >>> rounding_error(torch.tensor([1.0, 1.01]), "bf16")
    tensor([ 0.0000, -0.0022])
    """
    x = tensor.detach().float()
    if x.numel() == 0:
        return x
    if type_name == "bf16":
        rounded = x.bfloat16().float()  # equals round_mantissa, in a third of the time
    else:
        bits = MANTISSA_BITS.get(type_name)
        rounded = decode(encode(x, type_name)) if bits is None else round_mantissa(x, bits)
    return rounded.sub_(x)


def alike(type_names: Iterable[str]) -> Iterable[list[str]]:
    """Group types with equal rounding, such as FP16 and TF32 (equally many mantissa bits)."""
    groups: dict[int | str, list[str]] = {}
    for type_name in sorted(type_names):
        groups.setdefault(MANTISSA_BITS.get(type_name, type_name), []).append(type_name)
    return groups.values()


def stochastic_errors(
    gradient: torch.Tensor, x: torch.Tensor, weight: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the variance that `int8_all` adds to the gradients of y = x W' by rounding g = dL/dy.

        dx = s_h (H W),   H = stochastic INT8 of g s_w, one scale s_h per row
        dW = s_k (K' X),  K = stochastic INT8 of g s_x, one scale s_k per output

    with X, W the INT8 codes of x and W, and s_x, s_w their scales. Stochastic rounding of a value at the
    fraction f between two codes adds the variance f (1 - f) s^2. This is s^2/6 on average, and 0 for the many
    gradients that are 0. `gradient` is (..., N), `x` (..., K), `weight` (N, K). Returns the variance of each
    element of dx, (..., K), distributed over K in proportion to the squared columns of the weight, and the
    sum of the variances of dW.
    """
    g, rows = gradient.reshape(-1, gradient.shape[-1]), x.reshape(-1, x.shape[-1])
    x_scale, w_scale = _step(rows, (1,)), _step(weight, (1,))
    codes = (weight / w_scale).square()
    per_row = _stochastic_variances(g * w_scale.T, (1,)) @ codes.sum(1)
    dx = per_row[:, None] * (codes.sum(0) / codes.sum().clamp_min(1e-30))
    dw = (_stochastic_variances(g * x_scale, (0,)).sum(1) * (rows / x_scale).square().sum(1)).sum()
    return dx.view(x.shape), dw


def stochastic_convolution_errors(
    gradient: torch.Tensor, x: torch.Tensor, weight: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the variance that `int8_all` adds to a convolution's dx (by element) and dW (sum).

    A product adds up independent errors, so its variances are a convolution of squared codes. Stride and
    padding follow from the shapes: `gradient` (n, c, p, q), `x` (n, C, h, w), `weight` (c, C, kh, kw). A
    dilated window is treated as an undilated one, which has as many pixels.
    """
    g, images = (t.reshape(-1, *t.shape[-3:]) for t in (gradient, x))
    by_image = int8_gradient_unfolds(images.shape, weight.shape, g.shape)
    x_scale, w_scale = _step(images, (1, 2, 3)), _step(weight, (1, 2, 3))
    h = _stochastic_variances(g * w_scale.view(-1, 1, 1), (1, 2, 3) if by_image else (1,))
    k = _stochastic_variances(g * x_scale, (0, 2, 3))
    stride: list[int] = []
    around: list[int] = []
    for size, window, out in zip(images.shape[2:], weight.shape[2:], g.shape[2:], strict=True):
        stride.append(max(1, round(size / out)))
        missing = (out - 1) * stride[-1] + window - size  # pixels of padding
        around = [(missing + 1) // 2, missing // 2, *around]
    with torch.enable_grad():
        codes = [t.detach().square().requires_grad_() for t in (images / x_scale, weight / w_scale)]
        groups = images.shape[1] // weight.shape[1]
        padded = torch.nn.functional.pad(codes[0], around)
        y = torch.conv2d(padded, codes[1], stride=stride, groups=groups)
    (dx,) = torch.autograd.grad(y, codes[:1], h, retain_graph=True)
    (dw,) = torch.autograd.grad(y, codes[1:], k)
    return dx.view(x.shape), dw.sum()


def _step(values: torch.Tensor, dims: tuple[int, ...]) -> torch.Tensor:
    """Return the step between two INT8 codes: amax/127 over `dims`."""
    return values.abs().amax(dims, keepdim=True).clamp_min(1e-30) / 127


def _stochastic_variances(values: torch.Tensor, dims: tuple[int, ...]) -> torch.Tensor:
    """Return the variance f (1 - f) s^2 of stochastically rounding each element, s = amax/127."""
    step = _step(values, dims)
    scaled = values / step
    fraction = scaled - scaled.floor()
    return fraction * (1 - fraction) * step.square()
