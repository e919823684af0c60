"""Fuse GELU and ReLU into the epilogue of a product, and into the pass over its gradient.

As in `qsync.backend.casts.cast_ops`, every function has a plain body (the product's pass, then torch's
function) and a compiled one (`qsync.backend.casts.tvm.activations`).
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor

from qsync.backend.casts.autotune import autotuned, random_values
from qsync.backend.casts.cast_ops import (
    COMPILED_DTYPES,
    compiled_for,
    dequantize,
    dequantize_trial,
    sum_columns,
    to_bf16_and_sum,
)
from qsync.errors import UnsupportedError

_aten = torch.ops.aten


class Activation(NamedTuple):
    """An elementwise activation: "gelu" (exact or approximate="tanh", as in torch) or "relu".

    >>> Activation("gelu", "tanh")(x)
    """

    kind: str
    approximate: str = "none"

    def __call__(self, x: Tensor) -> Tensor:
        """Apply the activation to x."""
        if self.kind == "relu":
            return torch.relu(x)
        return torch.nn.functional.gelu(x, approximate=self.approximate)

    def gradient(self, gradient: Tensor, saved: Tensor) -> Tensor:
        """Return the gradient of x, from the gradient of f(x) and the saved x (gelu) or f(x) (relu)."""
        found: Tensor
        if self.kind == "relu":
            found = _aten.threshold_backward(gradient, saved, 0)
        else:
            found = _aten.gelu_backward(gradient, saved, approximate=self.approximate)
        return found

    @property
    def program(self) -> str:
        """Return the activation's name in compiled casts."""
        return "gelu_tanh" if self.approximate == "tanh" else self.kind


def activation(kind: str, **arguments: Any) -> Activation:
    """Return the activation of this kind, from the call's arguments other than the input.

    Raises UnsupportedError for an activation without an epilogue.

    >>> activation("gelu", approximate="tanh")
    Activation(kind='gelu', approximate='tanh')
    """
    approximate = arguments.pop("approximate", "none")
    if kind not in ("gelu", "relu") or approximate not in ("none", "tanh") or arguments.keys() - {"inplace"}:
        given = ", ".join(f"{name}={value!r}" for name, value in arguments.items())
        raise UnsupportedError(
            f"no product can fuse {kind}({given or approximate}): use gelu, "
            "approximate='none' or 'tanh', or relu"
        )
    return Activation(kind, approximate)


@autotuned(lambda d: (*dequantize_trial(d), Activation("gelu")))
def dequantize_activated(
    sums: Tensor,
    rows: Tensor,
    columns: Tensor,
    bias: Tensor | None,
    dtype: torch.dtype,
    function: Activation,
) -> tuple[Tensor, Tensor]:
    """Compute x = rows columns sums + bias; return the tensor that backward needs, and f(x).

    Both are (m, n), in `dtype`. Backward needs x itself for gelu, the result for relu. INT32 sums are
    overwritten. Arguments as in `qsync.backend.casts.cast_ops.dequantize`.
    """
    compiled = dtype in COMPILED_DTYPES and (bias is None or bias.dtype is torch.float32)
    library = compiled_for("dequantize_activated", sums, (torch.int32,)) if compiled else None
    if library is None:
        x = dequantize(sums, rows, columns, bias, dtype)
        y = function(x)
        return (y if function.kind == "relu" else x), y
    offsets = columns.new_zeros(len(columns)) if bias is None else bias.detach().contiguous()
    run = library[f"dequantize_{function.program}_{COMPILED_DTYPES[dtype]}"]
    in_place = dtype is torch.float32
    saved = sums.view(torch.float32) if in_place else torch.empty_like(sums, dtype=dtype)
    outputs = () if in_place else (saved,)
    if function.kind == "relu":
        run(sums, rows, columns, offsets, *outputs)
        return saved, saved
    y = torch.empty_like(saved)
    run(sums, rows, columns, offsets, *outputs, y)
    return saved, y


@autotuned(
    lambda d: (random_values(d, 4096, 1024), random_values(d, 4096, 1024), Activation("gelu"), torch.bfloat16)
)
def activation_gradient_and_sum(
    gradient: Tensor, saved: Tensor, function: Activation, dtype: torch.dtype
) -> tuple[Tensor, Tensor]:
    """Return the gradient before the activation, in `dtype`, and the FP32 sums of its columns.

    `saved` is the first result of `dequantize_activated`, in the gradient's type; `dtype` is that type or
    BF16.
    """
    library = None
    if saved.dtype is gradient.dtype and saved.is_contiguous() and dtype in (gradient.dtype, torch.bfloat16):
        library = compiled_for("activation_gradient_and_sum", gradient)
    if library is None:
        before = function.gradient(gradient, saved)
        if dtype is torch.bfloat16 and before.dtype is torch.float32:
            return to_bf16_and_sum(before)
        return before.to(dtype), sum_columns(before)
    out = torch.empty_like(gradient, dtype=dtype)
    sums = gradient.new_empty(gradient.shape[1], dtype=torch.float32)
    partial = sums.new_empty(library.partial_shape(*gradient.shape))
    names = COMPILED_DTYPES[gradient.dtype], COMPILED_DTYPES[dtype]
    library[f"{function.program}_gradient_{'_'.join(names)}"](gradient, saved, out, sums, partial)
    return out, sums
