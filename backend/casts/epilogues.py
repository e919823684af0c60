"""GELU and ReLU in the epilogue of a product: in the pass that dequantizes, and in its gradient's.

As in `qsync.backend.casts.cast_ops`, every function has a plain body, which is the product's pass and then torch's
function, and a compiled one (`qsync.backend.casts.tvm.activations`).
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
    narrow_and_sum,
    sum_columns,
)
from qsync.errors import UnsupportedError

_aten = torch.ops.aten


class Activation(NamedTuple):
    """A function of one value: "gelu", exact or in its tanh form as torch calls it, or "relu".

    >>> Activation("gelu", "tanh")(x)
    """

    kind: str
    approximate: str = "none"

    def __call__(self, x: Tensor) -> Tensor:
        if self.kind == "relu":
            return torch.relu(x)
        return torch.nn.functional.gelu(x, approximate=self.approximate)

    def changed(self, gradient: Tensor, kept: Tensor) -> Tensor:
        """The gradient before the function, from the one after it and what was kept: gelu's x, relu's y."""
        if self.kind == "relu":
            return _aten.threshold_backward(gradient, kept, 0)
        return _aten.gelu_backward(gradient, kept, approximate=self.approximate)

    @property
    def program(self) -> str:
        """What the compiled casts call it."""
        return "gelu_tanh" if self.approximate == "tanh" else self.kind


def activation(kind: str, **arguments: Any) -> Activation:
    """The activation that a call of this kind computes, from its arguments beside the value.

    Raises UnsupportedError for one that has no epilogue.

    >>> activation("gelu", approximate="tanh")
    Activation(kind='gelu', approximate='tanh')
    """
    approximate = arguments.pop("approximate", "none")
    if kind not in ("gelu", "relu") or approximate not in ("none", "tanh") or arguments.keys() - {"inplace"}:
        given = ", ".join(f"{name}={value!r}" for name, value in arguments.items())
        raise UnsupportedError(f"no product computes {kind}({given or approximate}) in its epilogue")
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
    """What backward needs of x = rows * columns * sums + bias, and f(x), both (m, n) in `dtype`.

    Backward needs x itself for gelu, the result for relu. INT32 sums are overwritten. Arguments as in
    `qsync.backend.casts.cast_ops.dequantize`.
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
    kept = sums.view(torch.float32) if in_place else torch.empty_like(sums, dtype=dtype)
    made = () if in_place else (kept,)
    if function.kind == "relu":
        run(sums, rows, columns, offsets, *made)
        return kept, kept
    y = torch.empty_like(kept)
    run(sums, rows, columns, offsets, *made, y)
    return kept, y


@autotuned(
    lambda d: (random_values(d, 4096, 1024), random_values(d, 4096, 1024), Activation("gelu"), torch.bfloat16)
)
def changed_and_summed(
    gradient: Tensor, kept: Tensor, function: Activation, dtype: torch.dtype
) -> tuple[Tensor, Tensor]:
    """The gradient before the function, (m, n) in `dtype`, and the FP32 sums of its columns (n).

    `kept` is what `dequantize_activated` returned first, of the gradient's type; `dtype` that type, or BF16.
    """
    library = None
    if kept.dtype is gradient.dtype and kept.is_contiguous() and dtype in (gradient.dtype, torch.bfloat16):
        library = compiled_for("changed_and_summed", gradient)
    if library is None:
        changed = function.changed(gradient, kept)
        if dtype is torch.bfloat16 and changed.dtype is torch.float32:
            return narrow_and_sum(changed)
        return changed.to(dtype), sum_columns(changed)
    out = torch.empty_like(gradient, dtype=dtype)
    sums = gradient.new_empty(gradient.shape[1], dtype=torch.float32)
    partial = sums.new_empty(library.partial_shape(*gradient.shape))
    names = COMPILED_DTYPES[gradient.dtype], COMPILED_DTYPES[dtype]
    library[f"{function.program}_gradient_{'_'.join(names)}"](gradient, kept, out, sums, partial)
    return out, sums
