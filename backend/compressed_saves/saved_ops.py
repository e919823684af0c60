"""Operators that save smaller tensors for backward than torch's own.

Forward is torch's own, bit for bit. The form "output" of gelu is Tempo's (arXiv 2210.10246).

| form   | saved beside parameters and a number per row                          | gradient         |
|--------|-----------------------------------------------------------------------|------------------|
| output | the result, which the next product saves as well (gelu: and a bit)    | exact; gelu 5e-4 |
| bits   | one bit per element (relu, dropout)                                   | exact            |
| codes  | eight bits per element: gelu', silu', a norm's input, sqrt of softmax | see each         |

Lowering chooses an operator's form (`qsync.operators.registry.FORMS`); this module runs it.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from qsync.backend.autograd import differentiable, once_differentiable
from qsync.backend.compressed_saves.activation_slopes import (
    decode_derivative,
    derivative_codes,
    derivative_from_output,
    minimum,
)
from qsync.backend.compressed_saves.bitmask import as_laid_out, in_memory_order, pack_bits, unpack_bits
from qsync.backend.compressed_saves.deferred_flags import deferred_flag
from qsync.backend.encoding import Encoded, decode, encode
from qsync.backend.kernels.norms import in_type_of, weight_beside
from qsync.errors import UnsupportedError

_aten = torch.ops.aten


def saving(kind: str, form: str) -> Callable[..., Tensor]:
    """Return the operator of this kind that saves its tensors in a compressed form.

    It is called as run(target, *args, **kwargs) -> Tensor. `target` and the arguments are those of the
    original call. Without a backward (no gradient wanted, dropout in evaluation) the original call runs.
    Raises UnsupportedError for a form that the kind does not have.

    >>> saving("gelu", "codes")(F.gelu, x)
    """
    if (kind, form) not in _RUN:
        raise UnsupportedError(f"{kind} cannot save {form!r} for backward: leave out save_less for it")
    run = _RUN[kind, form]

    def call(target: Callable[..., Tensor], *args: Any, **kwargs: Any) -> Tensor:
        tensors = [value for value in (*args, *kwargs.values()) if isinstance(value, Tensor)]
        wanted = torch.is_grad_enabled() and any(tensor.requires_grad for tensor in tensors)
        return run(target, *args, **kwargs) if wanted else target(*args, **kwargs)

    return call


def _gelu_output(target: Callable[..., Tensor], input: Tensor, approximate: str = "none") -> Tensor:
    return differentiable(_GeluOfOutput, input, approximate)


class _GeluOfOutput(torch.autograd.Function):
    """Gelu with dx = g gelu'(x), gelu'(x) from y and the side of gelu's minimum on which x lies."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, approximate: str) -> Tensor:
        y = torch.nn.functional.gelu(x, approximate=approximate)
        ctx.approximate = approximate
        ctx.save_for_backward(y, pack_bits(x >= minimum(approximate)[0]))
        return y

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        y, bits = ctx.saved_tensors
        slope = derivative_from_output(y, unpack_bits(bits, y, torch.float32), ctx.approximate)
        return slope.mul_(gradient).to(gradient.dtype), None


def _gelu_codes(target: Callable[..., Tensor], input: Tensor, approximate: str = "none") -> Tensor:
    return differentiable(_OfSlope, input, approximate)


def _silu(target: Callable[..., Tensor], input: Tensor, inplace: bool = False) -> Tensor:
    return differentiable(_OfSlope, input, "silu")


class _OfSlope(torch.autograd.Function):
    """Gelu or silu f with dx = g f'(x), f'(x) saved in eight bits."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, curve: str) -> Tensor:
        ctx.save_for_backward(derivative_codes(x, curve))
        functional = torch.nn.functional
        return functional.silu(x) if curve == "silu" else functional.gelu(x, approximate=curve)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        return decode_derivative(ctx.saved_tensors[0], gradient), None


def _relu(target: Callable[..., Tensor], input: Tensor, inplace: bool = False) -> Tensor:
    return differentiable(_Relu, input)


class _Relu(torch.autograd.Function):
    """Relu with dx = g where y > 0, saved as one bit per element. NaN passes the gradient, as in torch."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        y = torch.relu(x)
        ctx.like = torch.empty_like(y, device="meta")
        ctx.save_for_backward(pack_bits((y <= 0).logical_not_()))
        return y

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        mask = unpack_bits(ctx.saved_tensors[0], ctx.like, gradient.dtype)
        dx: Tensor = _aten.threshold_backward(gradient, mask, 0)
        return dx


def _dropout(
    target: Callable[..., Tensor],
    input: Tensor,
    p: float = 0.5,
    training: bool = True,
    inplace: bool = False,
    train: bool | None = None,
) -> Tensor:
    if not (training if train is None else train) or p == 0:
        return input
    return differentiable(_Dropout, input, p)


class _Dropout(torch.autograd.Function):
    """Dropout with dx = g m / (1 - p), its mask m saved at one bit per element."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, p: float) -> Tensor:
        if x.is_cuda:
            y, mask = torch.native_dropout(x, p, True)
        else:  # like F.dropout on a CPU: native_dropout rounds 1 / (1 - p) differently
            noise = torch.empty_like(x).bernoulli_(1 - p)
            mask = noise.bool()
            y = x * _divided(noise, p)
        ctx.p, ctx.like = p, torch.empty_like(mask, device="meta")
        ctx.save_for_backward(pack_bits(mask))
        return y

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        mask = unpack_bits(ctx.saved_tensors[0], ctx.like, gradient.dtype)
        if not gradient.is_cuda:
            return _divided(mask, ctx.p).mul_(gradient), None
        return _aten.native_dropout_backward(
            gradient, mask.bool(), 1 / (1 - ctx.p) if ctx.p < 1 else 0.0
        ), None


def _divided(mask: Tensor, p: float) -> Tensor:
    return mask.zero_() if p == 1 else mask.div_(1 - p)


def _softmax(target: Callable[..., Tensor], input: Tensor, *args: Any, **kwargs: Any) -> Tensor:
    dim = kwargs["dim"] if "dim" in kwargs else next(iter(args), None)
    return target(input, *args, **kwargs) if dim is None else differentiable(_Softmax, input, dim)


class _Softmax(torch.autograd.Function):
    """Softmax with dx = y (g - sum g y), sqrt(y) saved in eight bits with a scale per row.

    y is recovered within max(y) / 250. The square root keeps small probabilities accurate: the error is
    sqrt(y max(y)) / 255, so that a peak in an attention row does not erase the rest of the row.
    """

    @staticmethod
    def forward(ctx: Any, x: Tensor, dim: int) -> Tensor:
        y = torch.softmax(x, dim)
        root = y.float().sqrt()
        scale = root.amax(dim, keepdim=True).clamp_(min=1e-30).mul_(1 / 255)
        codes = root.mul_(1 / scale).add_(0.5).to(torch.uint8)
        ctx.dim = dim
        ctx.save_for_backward(codes, scale)
        return y

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        codes, scale = ctx.saved_tensors
        y = codes.float().mul_(scale).square_().to(gradient.dtype)
        return _aten._softmax_backward_data(gradient, y, ctx.dim, gradient.dtype), None


def _layer_norm(form: str) -> Callable[..., Tensor]:
    def run(
        target: Callable[..., Tensor],
        input: Tensor,
        normalized_shape: Any,
        weight: Tensor | None = None,
        bias: Tensor | None = None,
        eps: float = 1e-5,
        cudnn_enable: bool = True,
    ) -> Tensor:
        return differentiable(_LayerNorm, input, tuple(normalized_shape), weight, bias, eps, form)

    return run


class _LayerNorm(torch.autograd.Function):
    """Layer norm whose backward gets x - mean from (y - b) / (w rstd), or from INT8 codes.

    The gradients of x and w depend on x only through x - mean. INT8 has one scale per row: the error of x -
    mean is at most max |x - mean| / 254. It enters dx only through the two row means that LayerNorm subtracts
    from the gradient.
    """

    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        shape: tuple[int, ...],
        weight: Tensor | None,
        bias: Tensor | None,
        eps: float,
        form: str,
    ) -> Tensor:
        y, mean, rstd = torch.native_layer_norm(x, shape, in_type_of(weight, x), in_type_of(bias, x), eps)
        ctx.shape = shape
        ctx.from_output = form == "output" and _recoverable(weight, bias, y.dtype)
        if ctx.from_output:
            ctx.save_for_backward(weight, bias, rstd, y)
        else:
            rows = (x.float() - mean.float()).flatten(x.ndim - len(shape))
            codes = encode(rows, "int8_row")
            ctx.save_for_backward(weight, bias, rstd, codes.data, codes.scale)
        return y

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        weight, bias, rstd, *saved = ctx.saved_tensors
        rounded = in_type_of(weight, gradient), in_type_of(bias, gradient)
        if ctx.from_output:
            centred = _normalized(saved[0], *rounded).div(rstd)
        else:
            centred = _decoded(*saved).view(gradient.shape)
        wanted = [ctx.needs_input_grad[i] for i in (0, 2, 3)]
        dx, dw, db = _aten.native_layer_norm_backward(
            gradient.contiguous(),
            centred.to(gradient.dtype),
            ctx.shape,
            torch.zeros_like(rstd),
            rstd,
            weight_beside(rounded[1], rounded[0], gradient),
            rounded[1],
            wanted,
        )
        dw, db = (d if d is None else d.to(of.dtype) for d, of in ((dw, weight), (db, bias)))
        return dx, None, dw, db, None, None


def _normalized(y: Tensor, weight: Tensor | None, bias: Tensor | None) -> Tensor:
    """Return (x - mean) rstd, recovered from a norm's result."""
    y = y if bias is None else y - bias
    return y if weight is None else y / weight


def _recoverable(weight: Tensor | None, bias: Tensor | None, dtype: torch.dtype) -> bool:
    """Return whether recovering x from a norm's result is more accurate than eight bits.

    The error of (y - b) / w is eps (|x| + |b| / |w|), with x normalized. On a GPU the answer is about the
    parameters of the step before.
    """
    asked = bias if weight is None else weight
    if asked is None:
        return True

    def answer() -> Tensor:
        if weight is None:
            return asked.abs().amax() * torch.finfo(dtype).eps < 1 / 64
        above = weight.abs().amin() > torch.finfo(dtype).tiny
        if bias is None:
            return above
        ratio = (bias.abs() / weight.abs()).amax()
        return above & (ratio * torch.finfo(dtype).eps < 1 / 64)

    with torch.no_grad():
        return deferred_flag(asked, answer) if asked.is_cuda else bool(answer())


# torch.batch_norm orders its arguments differently from F.batch_norm.
_BATCH_NORM = ("input", "running_mean", "running_var", "weight", "bias", "training", "momentum", "eps")
_TORCH_BATCH_NORM = ("input", "weight", "bias", "running_mean", "running_var", "training", "momentum", "eps")


def _batch_norm(target: Callable[..., Tensor], *args: Any, **kwargs: Any) -> Tensor:
    names = _TORCH_BATCH_NORM if target is torch.batch_norm else _BATCH_NORM
    given = dict(zip(names, args, strict=False)) | kwargs
    if not given.get("training", False) or not given["input"].numel():
        return target(*args, **kwargs)
    tensors = [given.get(name) for name in _BATCH_NORM[:5]]
    return differentiable(_BatchNorm, *tensors, given.get("momentum", 0.1), given.get("eps", 1e-5))


class _BatchNorm(torch.autograd.Function):
    """Batch norm with torch's backward on the input saved in INT8, within max |x| / 254.

    There is one scale per sample.
    """

    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        running_mean: Tensor | None,
        running_var: Tensor | None,
        weight: Tensor | None,
        bias: Tensor | None,
        momentum: float,
        eps: float,
    ) -> Tensor:
        cudnn = torch.backends.cudnn.enabled
        y, mean, invstd, *_ = torch._batch_norm_impl_index(
            x, weight, bias, running_mean, running_var, True, momentum, eps, cudnn
        )
        columns = (1, -1, *[1] * (x.ndim - 2))
        normalized = (x.float() - mean.view(columns)).mul_(invstd.view(columns))
        codes = encode(in_memory_order(normalized).reshape(len(x), -1), "int8_row")
        ctx.eps, ctx.columns, ctx.like = eps, columns, torch.empty_like(normalized, device="meta")
        ctx.save_for_backward(weight, invstd, codes.data, codes.scale)
        return y

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        weight, invstd, *codes = ctx.saved_tensors
        normalized = as_laid_out(_decoded(*codes), ctx.like).to(gradient.dtype)
        wanted = [ctx.needs_input_grad[i] for i in (0, 3, 4)]
        none, zero, one = None, torch.zeros_like(invstd), torch.ones_like(invstd)
        dx, dw, db = _aten.native_batch_norm_backward(
            gradient, normalized, weight, none, none, zero, one, True, ctx.eps, wanted
        )
        if dx is not None:
            dx = dx.mul_(invstd.view(ctx.columns).to(dx.dtype))
        return dx, None, None, dw, db, None, None


def _decoded(data: Tensor, scale: Tensor) -> Tensor:
    return decode(Encoded(data, scale, "row"))


_RUN: dict[tuple[str, str], Callable[..., Tensor]] = {
    ("gelu", "output"): _gelu_output,
    ("gelu", "codes"): _gelu_codes,
    ("silu", "codes"): _silu,
    ("layer_norm", "output"): _layer_norm("output"),
    ("layer_norm", "codes"): _layer_norm("codes"),
    ("batch_norm", "codes"): _batch_norm,
    ("softmax", "codes"): _softmax,
    ("relu", "bits"): _relu,
    ("dropout", "bits"): _dropout,
}
