"""Run any product in FP16 or TF32, by recording the target's own autograd graph inside."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor
from torch.autograd.graph import get_gradient_edge

from qsync.backend.autograd import differentiable, is_replayed, once_differentiable
from qsync.backend.encoding import Encoded, Operand
from qsync.backend.kernels.convolution.image_order import find_channels_last, with_own_strides
from qsync.backend.kernels.linear import DTYPES
from qsync.backend.sixteen_bit_operands import power_of_two


def product_fp16(target: Callable[..., Tensor], out_type: str, *args: Any, **kwargs: Any) -> Tensor:
    """Run the target on FP16 operands; every gradient leaves in true scale.

        y = target(fp16(x), ...),   dx = 2^-k J'(fp16(2^k g)),   k: 1/2 <= max |2^k g| < 1

    J is the target's Jacobian at the FP16 operands. k is computed from the gradient itself, on the device, so
    a gradient of 1e-7 survives, and ranks need no common loss scale (pytorch#136009). Operands are
    `Operand`s; other FP32 tensors (a bias, a mask) are converted here. The target is any function that is
    differentiable in FP16.

    >>> product_fp16(torch.matmul, "fp32", Operand(a, encode(a, "fp16")), Operand(b, encode(b, "fp16")))
    """
    return _apply(target, out_type, args, kwargs, True)


def conv2d_fp16(
    target: Callable[..., Tensor], out_type: str, input: Operand, weight: Operand, *args: Any, **kwargs: Any
) -> Tensor:
    """Run a convolution in FP16 as `product_fp16`, with images and result in channels-last order.

    >>> conv2d_fp16(torch.conv2d, "fp32", Operand(x, encode(x, "fp16")), Operand(w, encode(w, "fp16")))
    """
    value, data = find_channels_last(input.value, input.encoded.data)
    images = Operand(value, Encoded(data, input.encoded.scale, input.encoded.layout))
    filters = Operand(with_own_strides(weight.value), weight.encoded)
    return product_fp16(target, out_type, images, filters, *args, **kwargs)


def product_tf32(target: Callable[..., Tensor], out_type: str, *args: Any, **kwargs: Any) -> Tensor:
    """Run the target on FP32 operands with TF32 products, forward and backward.

    torch's global TF32 switches have no effect.

    >>> product_tf32(F.linear, "fp32", x, weight, bias)
    """
    return _apply(target, out_type, args, kwargs, False)


def _apply(target: Callable[..., Tensor], out_type: str, args: Any, kwargs: Any, half: bool) -> Tensor:
    leaves = (*args, *kwargs.values())
    values = [leaf.value if isinstance(leaf, Operand) else leaf for leaf in leaves]
    data = [_data(leaf, half) for leaf in leaves]

    def run(*inner: Any) -> Tensor:
        return target(*inner[: len(args)], **dict(zip(kwargs, inner[len(args) :], strict=True)))

    return differentiable(_Nested, run, data, DTYPES[out_type], half, *values)


def _data(leaf: Any, half: bool) -> Any:
    """Return the target's argument: the operand's FP16 data, or the argument itself."""
    if isinstance(leaf, Operand):
        return leaf.encoded.data
    if half and isinstance(leaf, Tensor) and leaf.is_floating_point():
        return leaf.detach().to(torch.float16)
    return leaf.detach() if isinstance(leaf, Tensor) else leaf


class _Nested(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, run: Callable[..., Tensor], data: list[Any], dtype: torch.dtype, half: bool, *values: Any
    ) -> Tensor:
        wanted = [i for i, need in enumerate(ctx.needs_input_grad[4:]) if need]
        inner = list(data)
        for i in wanted:
            inner[i] = data[i].detach().requires_grad_()
        with torch.set_grad_enabled(bool(wanted)), allow_tf32(not half):
            out = run(*inner)
        # Keep the graph's edge, not the result: backward needs only what its graph has saved.
        ctx.nested = (get_gradient_edge(out), out.dtype, [inner[i] for i in wanted]) if wanted else None
        ctx.wanted, ctx.half, ctx.is_replayed = wanted, half, is_replayed.get()
        ctx.dtypes = [values[i].dtype for i in wanted]
        ctx.num_values = len(values)
        return out.detach().to(dtype)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        if ctx.nested is None:
            raise RuntimeError(
                "backward ran a second time through an FP16 or TF32 operator, whose data is already freed: "
                "run forward again"
            )
        # Released before backward runs, so that autograd frees each buffer after its use.
        out, dtype, inputs = ctx.nested
        is_kept = ctx.is_replayed or torch._C._autograd._get_current_graph_task_keep_graph()
        ctx.nested = ctx.nested if is_kept else None
        gradient, back = scaled(gradient) if ctx.half else (gradient.to(dtype), None)
        with allow_tf32(not ctx.half):
            inner = torch.autograd.grad(out, inputs, gradient, retain_graph=is_kept, allow_unused=True)
        result: list[Tensor | None] = [None] * ctx.num_values
        for i, g, dtype in zip(ctx.wanted, inner, ctx.dtypes, strict=True):
            if g is not None:
                result[i] = unscaled(g, back, dtype)
        return (None, None, None, None, *result)


def scaled(gradient: Tensor) -> tuple[Tensor, Tensor]:
    """Return a gradient in FP16 times a power of two, and the inverse power (1 element, FP32)."""
    if not gradient.numel():
        return gradient.to(torch.float16), gradient.new_ones(1, dtype=torch.float32)
    factor, back = (power.view(1) for power in power_of_two(gradient, 1.0))
    # A one-element FP32 tensor makes the product FP32 in one pass; a number would leave it in BF16.
    return (gradient * factor).view(gradient.shape).to(torch.float16), back


def unscaled(gradient: Tensor, back: Tensor | None, dtype: torch.dtype) -> Tensor:
    """Return a gradient multiplied by `back`, the inverse of its scale; None leaves it unscaled."""
    return (gradient if back is None else (gradient * back).view(gradient.shape)).to(dtype)


@contextmanager
def allow_tf32(wanted: bool) -> Iterator[None]:
    """Allow TF32 in cuBLAS and cuDNN inside the context if wanted, then restore the settings."""
    if not wanted:
        yield
        return
    matmul, cudnn = torch.backends.cuda.matmul.allow_tf32, torch.backends.cudnn.allow_tf32
    torch.backends.cuda.matmul.allow_tf32 = torch.backends.cudnn.allow_tf32 = True
    try:
        yield
    finally:
        torch.backends.cuda.matmul.allow_tf32, torch.backends.cudnn.allow_tf32 = matmul, cudnn
