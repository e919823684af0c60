"""Products in FP32 by the fastest kernel of a CPU: MKL or oneDNN, images in either memory order.

torch multiplies FP32 matrices by MKL, and convolves images in the order in which they lie. All kernels sum
the same terms, each in another order: results differ by rounding alone. Processor and shape decide which is
faster, so each shape is timed once on a machine, and the choice is kept on disk. Where two kernels take about
as long, another machine may choose the other one.

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
from qsync.backend.autograd import differentiable, once_differentiable, owned
from qsync.backend.casts.cast_ops import sum_columns
from qsync.backend.devices.kernel_timing import fastest
from qsync.backend.kernel_cache import rounded_up
from qsync.backend.kernels.convolution.conv_geometry import Geometry, geometry_of
from qsync.backend.kernels.convolution.image_order import ORDERS, channels_last, laid_out, ordered, own_order
from qsync.backend.kernels.linear import DTYPES

# Of fewer multiply-adds, forward and backward take less time (60 us) than what calls these kernels (70 us).
_MIN_MULTIPLIES = 2**20


def _on_fp32(product: Callable[..., Tensor]) -> Callable[..., Tensor]:
    """Make a kernel of a product: its arguments come in FP32, and its result leaves in `out_type`."""

    @wraps(product)
    def kernel(target: Callable[..., Tensor], out_type: str, *args: Any, **kwargs: Any) -> Tensor:
        args = tuple(arg.float() if isinstance(arg, Tensor) else arg for arg in args)
        kwargs = {name: arg.float() if isinstance(arg, Tensor) else arg for name, arg in kwargs.items()}
        result = product(target, *args, **kwargs)
        return result if out_type == "fp32" else result.to(DTYPES[out_type])

    return kernel


@_on_fp32
def linear_fp32_fast(
    target: Callable[..., Tensor], input: Tensor, weight: Tensor, bias: Tensor | None = None
) -> Tensor:
    """Compute y = x W' + b, dx = g W and dW = g' x, each product by its faster kernel.

    b is of shape (N,); torch computes what has another.

    >>> linear_fp32_fast(F.linear, "fp32", x, weight, bias)
    """
    is_other = bias is not None and bias.shape != weight.shape[:1]
    if is_other or input.numel() * len(weight) < _MIN_MULTIPLIES:
        return target(input, weight, bias)
    rows = input.reshape(-1, input.shape[-1])
    return differentiable(_Product, rows, weight, bias, True).view(*input.shape[:-1], len(weight))


@_on_fp32
def addmm_fp32_fast(
    target: Callable[..., Tensor],
    input: Tensor,
    mat1: Tensor,
    mat2: Tensor,
    *,
    beta: float = 1,
    alpha: float = 1,
) -> Tensor:
    """Compute `linear_fp32_fast` for addmm(b, x, W) with W stored (K, N); torch's where it scales.

    >>> addmm_fp32_fast(torch.addmm, "fp32", b, x, weight)
    """
    if alpha != 1 or beta != 1 or mat1.numel() * mat2.shape[1] < _MIN_MULTIPLIES:
        return target(input, mat1, mat2, beta=beta, alpha=alpha)
    if input.shape == (mat2.shape[1],):
        return differentiable(_Product, mat1, mat2, input, False)
    return differentiable(_Product, mat1, mat2, None, False) + input


@_on_fp32
def matmul_fp32_fast(target: Callable[..., Tensor], input: Tensor, other: Tensor) -> Tensor:
    """Multiply matrices, or batches of as many matrices; torch's where they are broadcast.

    >>> matmul_fp32_fast(torch.matmul, "fp32", q, k.mT)
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
def conv2d_fp32_fast(
    target: Callable[..., Tensor],
    input: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    stride: int | tuple[int, ...] = 1,
    padding: int | str | tuple[int, ...] = 0,
    dilation: int | tuple[int, ...] = 1,
    groups: int = 1,
) -> Tensor:
    """Convolve images in the faster memory order; the result lies channels-last whichever that is.

    Reordering is part of what is timed. The operators after it find images in the order that lowering says
    (`Run.channels_last`); they would else be several times slower where orders meet. The input's gradient
    returns in the input's own order, the weight's in the weight's.

    >>> conv2d_fp32_fast(torch.conv2d, "fp32", x, weight, padding=1)
    """
    if input.ndim != 4 or not (input.numel() and weight.numel()):
        return target(input, weight, bias, stride, padding, dilation, groups)
    geometry = geometry_of(weight, stride, padding, dilation, groups)
    if any(geometry.extra):
        input = torch.nn.functional.pad(input, (0, geometry.extra[0], 0, geometry.extra[1]))
    lies = [t.is_contiguous(memory_format=order) for t in (input, weight) for order in ORDERS]
    needs = [t is not None and t.requires_grad for t in (input, weight, bias)] + [torch.is_grad_enabled()]
    key = ("to channels last", rounded_up(input.shape), weight.shape, *map(str, geometry[:4]), *lies, *needs)

    def timed(order: torch.memory_format) -> Callable[[], object]:
        values = [
            None if t is None else t.detach().requires_grad_(t.requires_grad) for t in (input, weight, bias)
        ]

        def run() -> None:
            y = differentiable(_Convolution, *values, order, geometry)
            if y.requires_grad:
                torch.autograd.grad(y, [t for t in values if t is not None and t.requires_grad], y.detach())

        return run

    order = ORDERS[shape_choices.choose(key, [timed(order) for order in ORDERS])]
    return differentiable(_Convolution, input, weight, bias, order, geometry)


class _Product(torch.autograd.Function):
    """y = x W + b of matrices; with `is_transposed` W is stored (N, K)."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, bias: Tensor | None, is_transposed: bool) -> Tensor:
        need_x, need_w = ctx.needs_input_grad[:2]
        ctx.save_for_backward(x if need_w else None, weight if need_x else None)
        ctx.is_transposed = is_transposed
        return multiply(x, weight.t() if is_transposed else weight, bias)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        x, weight = ctx.saved_tensors
        g = gradient.contiguous()
        dx = dw = None
        if weight is not None:
            dx = multiply(g, weight if ctx.is_transposed else weight.t())
        if x is not None:
            dw = multiply(g.t(), x) if ctx.is_transposed else multiply(x.t(), g)
        return dx, dw, sum_columns(g) if ctx.needs_input_grad[2] else None, None


class _BatchProduct(torch.autograd.Function):
    """y = a b of equally many matrices."""

    @staticmethod
    def forward(ctx: Any, a: Tensor, b: Tensor) -> Tensor:
        need_a, need_b = ctx.needs_input_grad
        ctx.save_for_backward(a if need_b else None, b if need_a else None)
        return multiply(a, b)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        a, b = ctx.saved_tensors
        da = None if b is None else multiply(gradient, b.mT)
        return da, None if a is None else multiply(a.mT, gradient)


class _Convolution(torch.autograd.Function):
    """y = conv(x, W) + b, computed in a memory order; y lies channels-last.

    x is saved as it came, which the operator before it may save as well; W as it was multiplied. Gradients
    have the strides of x and W: DDP requires that of a weight, even where a dimension of size 1 leaves
    strides open.
    """

    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        order: torch.memory_format,
        geometry: Geometry,
    ) -> Tensor:
        filters = weight.contiguous(memory_format=order)
        need_x, need_w = ctx.needs_input_grad[:2]
        ctx.save_for_backward(x if need_w else None, filters if need_x else None)
        ctx.order, ctx.geometry, ctx.bias = order, geometry, None if bias is None else [len(bias)]
        ctx.like = [(t.shape, t.stride(), own_order(t)) for t in (x, weight)]
        return owned(channels_last(torch.conv2d(ordered(x, order), filters, bias, *geometry[:4])))

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        x, filters = ctx.saved_tensors
        needs = ctx.needs_input_grad[:3]
        absent = gradient.new_zeros(())  # of an operand that is not needed torch reads the shape alone
        found = torch.ops.aten.convolution_backward(
            ordered(gradient, ctx.order),
            absent.expand(ctx.like[0][0]) if x is None else ordered(x, ctx.order),
            absent.expand(ctx.like[1][0]) if filters is None else filters,
            ctx.bias, *ctx.geometry[:3], False, [0, 0], ctx.geometry.groups, needs,
        )  # fmt: skip
        dx, dw = (
            laid_out(t, *like) if need else None
            for t, like, need in zip(found[:2], ctx.like, needs[:2], strict=True)
        )
        return dx, dw, found[2] if needs[2] else None, None, None


def multiply(a: Tensor, b: Tensor, bias: Tensor | None = None) -> Tensor:
    """Compute a b (+ bias) of FP32 matrices, or of batches of them, by the faster kernel for the shape.

    a (M, K), b (K, N), bias (N); or a (B, M, K), b (B, K, N) without a bias. Strides are free.

    >>> multiply(x, weight.t(), bias)
    """
    rest = (a.stride(-1) == 1, b.stride(-1) == 1, bias is None, torch.get_num_threads())
    exact = (a.shape, b.shape, *rest)  # quicker to look up
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
    bias = None if bias is None else bias.contiguous()  # its stride is not read, unchecked (torch 2.13)
    product: Tensor = torch.ops.mkldnn._linear_pointwise(a, b.t(), bias, "none", [], "")
    return product
