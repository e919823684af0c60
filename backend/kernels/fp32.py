"""FP32 products on CPUs by the faster kernel, torch's or oneDNN's; images in either memory order.

torch multiplies FP32 matrices by MKL, and convolves images in their own memory order. Kernels sum the same
terms in different orders: results differ by rounding alone. Each shape is timed once per machine, and the
choice is kept on disk. Of two equally fast kernels, another machine may choose the other.

GFLOP/s of 1024x768x3072 by MKL and by oneDNN, one thread of a Zen 4: forward 88 and 107, gradient of x
103 and 105, of W 99 and 92.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial, wraps
from typing import Any

import torch
from torch import Tensor

from qsync.backend import shape_choices
from qsync.backend.autograd import differentiable, is_recorded, owned, untraced
from qsync.backend.casts.cast_ops import sum_columns
from qsync.backend.devices.kernel_timing import fastest
from qsync.backend.kernel_cache import rounded_up
from qsync.backend.kernels.convolution.conv_geometry import Geometry, geometry_of
from qsync.backend.kernels.convolution.image_order import (
    ORDERS,
    laid_out,
    ordered,
    own_order,
    with_own_strides,
)
from qsync.backend.kernels.linear import DTYPES

# Below this many multiply-adds, forward and backward take less time (60 us) than the overhead of these
# kernels (70 us).
_MIN_MULTIPLIES = 2**20


def _on_fp32(product: Callable[..., Tensor]) -> Callable[..., Tensor]:
    """Wrap a product kernel: convert its arguments to FP32, and its result to `out_type`."""

    @wraps(product)
    def kernel(target: Callable[..., Tensor], out_type: str, *args: Any, **kwargs: Any) -> Tensor:
        args = tuple(arg.float() if isinstance(arg, Tensor) else arg for arg in args)
        kwargs = {name: arg.float() if isinstance(arg, Tensor) else arg for name, arg in kwargs.items()}
        result = product(target, *args, **kwargs)
        return result if out_type == "fp32" else result.to(DTYPES[out_type])

    return kernel


@_on_fp32
def linear_fp32(
    target: Callable[..., Tensor], input: Tensor, weight: Tensor, bias: Tensor | None = None
) -> Tensor:
    """Compute a linear layer, y = x W' + b, dx = g W, dW = g' x, each product by its faster kernel.

    b has shape (N,); for other shapes torch's kernel runs.

    >>> linear_fp32(F.linear, "fp32", x, weight, bias)
    """
    is_other = bias is not None and bias.shape != weight.shape[:1]
    if is_other or input.numel() * len(weight) < _MIN_MULTIPLIES:
        return target(input, weight, bias)
    rows = input.reshape(-1, input.shape[-1])
    return differentiable(_Product, rows, weight, bias, True).view(*input.shape[:-1], len(weight))


@_on_fp32
def addmm_fp32(
    target: Callable[..., Tensor],
    input: Tensor,
    mat1: Tensor,
    mat2: Tensor,
    *,
    beta: float = 1,
    alpha: float = 1,
) -> Tensor:
    """Compute addmm(b, x, W) with W stored (K, N) as `linear_fp32`; torch's if alpha or beta is not 1.

    >>> addmm_fp32(torch.addmm, "fp32", b, x, weight)
    """
    if alpha != 1 or beta != 1 or mat1.numel() * mat2.shape[1] < _MIN_MULTIPLIES:
        return target(input, mat1, mat2, beta=beta, alpha=alpha)
    if input.shape == (mat2.shape[1],):
        return differentiable(_Product, mat1, mat2, input, False)
    return differentiable(_Product, mat1, mat2, None, False) + input


@_on_fp32
def matmul_fp32(target: Callable[..., Tensor], input: Tensor, other: Tensor) -> Tensor:
    """Multiply matrices, or batches of equal size, in FP32; torch's kernel for broadcast ones.

    >>> matmul_fp32(torch.matmul, "fp32", q, k.mT)
    """
    if input.ndim < 2 or other.ndim < 2 or input.numel() * other.shape[-1] < _MIN_MULTIPLIES:
        return target(input, other)
    shape = (*input.shape[:-1], other.shape[-1])
    if other.ndim == 2:
        rows = input.reshape(-1, input.shape[-1])
        return differentiable(_Product, rows, other, None, False).view(shape)
    if input.shape[:-2] != other.shape[:-2]:
        return target(input, other)
    return differentiable(_BatchProduct, input.flatten(0, -3), other.flatten(0, -3)).view(shape)


@_on_fp32
def conv2d_fp32(
    target: Callable[..., Tensor],
    input: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    stride: int | tuple[int, ...] = 1,
    padding: int | str | tuple[int, ...] = 0,
    dilation: int | tuple[int, ...] = 1,
    groups: int = 1,
) -> Tensor:
    """Convolve images in the faster memory order; return the result in torch's order.

    The timing includes reordering.

    >>> conv2d_fp32(torch.conv2d, "fp32", x, weight, padding=1)
    """
    if input.ndim != 4 or not (input.numel() and weight.numel()):
        return target(input, weight, bias, stride, padding, dilation, groups)
    geometry = geometry_of(weight, stride, padding, dilation, groups)
    is_last = any(t.stride(1) == 1 and t.stride(3) >= t.shape[1] for t in (input, weight))  # torch's own test
    own, other = ORDERS if is_last else reversed(ORDERS)

    def by_torch(x: Tensor, w: Tensor, b: Tensor | None) -> Tensor:
        w = with_own_strides(w) if is_last and 1 in w.shape else w
        return target(x, w, b, stride, padding, dilation, groups)

    def in_other_order(x: Tensor, w: Tensor, b: Tensor | None) -> Tensor:
        if any(geometry.extra):
            x = torch.nn.functional.pad(x, (0, geometry.extra[0], 0, geometry.extra[1]))
        return differentiable(_Convolution, x, w, b, own, other, geometry)

    values, runs = (input, weight, bias), (by_torch, in_other_order)
    lies = [t.is_contiguous(memory_format=order) for t in (input, weight) for order in ORDERS]
    needs = [t is not None and t.requires_grad for t in values] + [torch.is_grad_enabled()]
    key = ("order of images", rounded_up(input.shape), weight.shape, *map(str, geometry[:4]), *lies, *needs)
    return runs[shape_choices.choose(key, [partial(_train, run, values) for run in runs])](*values)


def _train(run: Callable[..., Tensor], values: tuple[Tensor | None, ...]) -> None:
    """Compute a product's result and gradients, for timing."""
    leaves = [None if t is None else t.detach().requires_grad_(t.requires_grad) for t in values]
    y = run(*leaves)
    if y.requires_grad:
        torch.autograd.grad(y, [t for t in leaves if t is not None and t.requires_grad], y.detach())


class _Product(torch.autograd.Function):
    """y = x W + b of matrices; with `is_transposed` W is stored (N, K)."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, bias: Tensor | None, is_transposed: bool) -> Tensor:
        need_x, need_w = ctx.needs_input_grad[:2]
        ctx.save_for_backward(x if need_w else None, weight if need_x else None)
        ctx.is_transposed = is_transposed
        return multiply(x, weight.t() if is_transposed else weight, bias)

    @staticmethod
    @untraced
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        x, weight = ctx.saved_tensors
        product = torch.mm if is_recorded(gradient) else multiply
        sums = partial(torch.sum, dim=0) if is_recorded(gradient) else sum_columns
        g = gradient.contiguous()
        dx = dw = None
        if weight is not None:
            dx = product(g, weight if ctx.is_transposed else weight.t())
        if x is not None:
            dw = product(g.t(), x) if ctx.is_transposed else product(x.t(), g)
        return dx, dw, sums(g) if ctx.needs_input_grad[2] else None, None


class _BatchProduct(torch.autograd.Function):
    """y = a b of equally many matrices."""

    @staticmethod
    def forward(ctx: Any, a: Tensor, b: Tensor) -> Tensor:
        need_a, need_b = ctx.needs_input_grad
        ctx.save_for_backward(a if need_b else None, b if need_a else None)
        return multiply(a, b)

    @staticmethod
    @untraced
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        a, b = ctx.saved_tensors
        product = torch.bmm if is_recorded(gradient) else multiply
        da = None if b is None else product(gradient, b.mT)
        return da, None if a is None else product(a.mT, gradient)


class _Convolution(torch.autograd.Function):
    """y = conv(x, W) + b, computed in another memory order than its own.

    Gradients have the strides of x and W: DDP requires that of a weight, even where a dimension of size 1
    leaves strides open.
    """

    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        own: torch.memory_format,
        order: torch.memory_format,
        geometry: Geometry,
    ) -> Tensor:
        ctx.save_for_backward(x, weight)
        ctx.order, ctx.geometry, ctx.bias = order, geometry, None if bias is None else [len(bias)]
        filters = weight.contiguous(memory_format=order)
        y = torch.conv2d(ordered(x, order), filters, bias, *geometry[:4])
        strides = torch.empty(y.shape, device="meta", memory_format=own).stride()
        return owned(laid_out(y, y.shape, strides, own))

    @staticmethod
    @untraced
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        x, weight = ctx.saved_tensors
        needs, order = ctx.needs_input_grad[:3], ctx.order
        rest = (ctx.bias, *ctx.geometry[:3], False, [0, 0], ctx.geometry.groups, needs)
        gradients = torch.ops.aten.convolution_backward
        if is_recorded(gradient):
            return *gradients(gradient, x, weight, *rest), None, None, None
        filters = weight.contiguous(memory_format=order)
        *found, db = gradients(ordered(gradient, order), ordered(x, order), filters, *rest)
        dx, dw = (
            laid_out(g, t.shape, t.stride(), own_order(t)) if need else None
            for g, t, need in zip(found, (x, weight), needs, strict=False)
        )
        return dx, dw, db, None, None, None


def multiply(a: Tensor, b: Tensor, bias: Tensor | None = None) -> Tensor:
    """Multiply FP32 matrices (a b + bias), or batches of them, by the faster kernel for the shape.

    a (M, K), b (K, N), bias (N); or a (B, M, K), b (B, K, N) without a bias. Strides are free.

    >>> multiply(x, weight.t(), bias)
    """
    rest = (a.stride(-1) == 1, b.stride(-1) == 1, bias is None, torch.get_num_threads())
    exact = (a.shape, b.shape, *rest)  # an unrounded key, quicker to look up
    known, kernels = shape_choices.choices(), (_by_torch, _by_onednn)
    number = known.get(exact, len(kernels))
    if number is None:
        runs = [partial(kernel, a, b, bias) for kernel in kernels]
        key = (rounded_up(a.shape), rounded_up(b.shape), *rest)
        decide = partial(fastest, runs, tie=shape_choices.TIE)
        number = known.alias(exact, known.decided(key, len(runs), decide))
    return kernels[number](a, b, bias)


def _by_torch(a: Tensor, b: Tensor, bias: Tensor | None) -> Tensor:
    return a @ b if bias is None else torch.addmm(bias, a, b)


def _by_onednn(a: Tensor, b: Tensor, bias: Tensor | None) -> Tensor:
    if a.ndim == 3:
        return torch.stack([_by_onednn(x, y, None) for x, y in zip(a, b, strict=True)])
    # oneDNN ignores the bias's stride, unchecked (torch 2.13)
    bias = None if bias is None else bias.contiguous()
    product: Tensor = torch.ops.mkldnn._linear_pointwise(a, b.t(), bias, "none", [], "")
    return product
