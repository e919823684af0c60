"""Products of tensors, padded to the kernels' alignment, with the fastest measured tile.

    int8_nt, fp16_nt   out = alpha * row_scale * column_scale * (A B') + bias        A (M, K), B (N, K)
    fp16_nn            the same with A (M, K), B (K, N)
    fp16_tn            the same with A (K, M), B (K, N)

The three products of a convolution take channels-last tensors. Nothing here is differentiable.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from functools import cache
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import pad

from qsync.backend.cuda_build import architecture
from qsync.backend.cutlass.compiled_products import OUT_TYPES, PRODUCTS, Library, load
from qsync.backend.cutlass.tuning import LaunchSetting, Tuner
from qsync.backend.int8_products import LONGEST_INT32_SUM
from qsync.backend.kernel_cache import folder

_ALIGNMENT_BYTES = 16  # bytes per read; launch.h's kAlignmentBytes
# Shorter slices of the inner dimension give a block too little work.
_SHORTEST_SLICE = 512
_SLICES = (1, 2, 4, 8, 16, 32)
_WARM_UP_RUNS, _TIMED_RUNS = 2, 5


@dataclass(frozen=True, slots=True)
class Scaling:
    """Scale factors and bias of a product's epilogue, in FP32 on the GPU; None for 1 and 0.

    `alpha` has one element, `rows` one for each row of the result (or for each `rows_per_scale` of them),
    `columns` and `bias` one for each column.
    """

    alpha: Tensor | None = None
    rows: Tensor | None = None
    columns: Tensor | None = None
    bias: Tensor | None = None
    rows_per_scale: int = 1

    def arguments(self, with_bias: bool) -> dict[str, Any]:
        """Return the scaling under the argument names of gemm.h and conv.h."""
        return {
            "alpha": _address(self.alpha),
            "row_scale": _address(self.rows),
            "column_scale": _address(self.columns),
            "bias": _address(self.bias) if with_bias else None,
            "rows_per_scale": self.rows_per_scale,
        }


@dataclass(frozen=True, slots=True)
class Geometry:
    """A convolution's hyperparameters, (height, width)."""

    stride: tuple[int, int]
    padding: tuple[int, int]
    dilation: tuple[int, int]

    def out_size(self, size: tuple[int, int], kernel: tuple[int, int]) -> tuple[int, int]:
        """Return height and width of the result."""
        pairs = zip(size, kernel, self.stride, self.padding, self.dilation, strict=True)
        height, width = ((n + 2 * p - d * (k - 1) - 1) // s + 1 for n, k, s, p, d in pairs)
        return height, width


def gemm(
    product: str, a: Tensor, b: Tensor, scaling: Scaling | None = None, dtype: torch.dtype = torch.float32
) -> Tensor:
    """Multiply matrices and scale the product, as a contiguous (M, N) tensor of `dtype`.

    The operands are INT8 or FP16 matrices on one GPU. Sizes and strides are free: operands that the kernels
    cannot read in place are copied. Raises UnsupportedError for sizes beyond the kernels', BuildError if
    there is no library.

    >>> gemm("int8_nt", x_codes, w_codes, Scaling(rows=x_scale, columns=w_scale, bias=bias))
    """
    scaling = _plain(scaling or Scaling())
    layout = product.partition("_")[2]
    rows, inner = reversed(a.shape) if layout == "tn" else a.shape
    columns = len(b) if layout == "nt" else b.shape[1]
    if 0 in (rows, columns, inner):
        return _without_products((rows, columns), scaling, dtype, a.device)
    # Every stored row is padded with zeros to a multiple of 16 bytes. If that lengthens the inner
    # dimension of one operand, the other must follow: in "nt" both rows grow alike, and in "tn" no row is
    # the inner dimension.
    a, b = _readable(a), _readable(b)
    if layout == "nn" and a.shape[1] > len(b):
        b = pad(b, (0, 0, 0, a.shape[1] - len(b)))
    m, k = reversed(a.shape) if layout == "tn" else a.shape
    n = len(b) if layout == "nt" else b.shape[1]
    scaling = _padded_scaling(scaling, m - rows, n - columns)
    sizes = {"m": m, "n": n, "k": k, "lda": _row_stride(a), "ldb": _row_stride(b)}
    out = _run(product, a, b, (m, n), k, sizes, scaling, dtype)
    return out if (m, n) == (rows, columns) else out[:rows, :columns].contiguous()


def conv(
    product: str,
    a: Tensor,
    b: Tensor,
    sizes: Mapping[str, int],
    scaling: Scaling | None = None,
    dtype: torch.dtype = torch.float32,
) -> Tensor:
    """Compute a product of a convolution, on channels-last tensors with padded channels.

    `product` is one of "int8_fprop", "fp16_fprop" (a: x, b: W), "fp16_dgrad" (a: dy, b: W), "fp16_wgrad"
    (a: dy, b: x). x (n, h, w, c), W (k, r, s, c), dy (n, p, q, k); `sizes` holds these nine and pad_h, pad_w,
    stride_h, stride_w, dilation_h, dilation_w. Returns y, dx or dW in the same layout.

    >>> conv("int8_fprop", x_codes, w_codes, sizes, Scaling(rows=x_scale, rows_per_scale=p * q))
    """
    s = sizes
    shape, inner = {
        "fprop": ((s["n"] * s["p"] * s["q"], s["k"]), s["r"] * s["s"] * s["c"]),
        "dgrad": ((s["n"] * s["h"] * s["w"], s["c"]), s["r"] * s["s"] * s["k"]),
        "wgrad": ((s["k"], s["r"] * s["s"] * s["c"]), s["n"] * s["p"] * s["q"]),
    }[product.partition("_")[2]]
    scaling = _plain(scaling or Scaling())
    if 0 in (*shape, inner):
        out = _without_products(shape, scaling, dtype, a.device)
    else:
        out = _run(product, _aligned(a), _aligned(b), shape, inner, sizes, scaling, dtype)
    names = {"fprop": "npqk", "dgrad": "nhwc", "wgrad": "krsc"}[product.partition("_")[2]]
    return out.view([s[name] for name in names])


def _without_products(
    shape: tuple[int, int], scaling: Scaling, dtype: torch.dtype, device: torch.device
) -> Tensor:
    """Return the result for an empty inner dimension (the bias), or for no rows."""
    out = torch.zeros(shape, device=device)
    return (out if scaling.bias is None else out + scaling.bias).to(dtype)


def pad_channels(images: Tensor) -> Tensor:
    """Pad the channels of channels-last images or filters to a multiple of 16 bytes."""
    return _pad_columns(images)


def _run(
    product: str,
    a: Tensor,
    b: Tensor,
    shape: tuple[int, int],
    inner: int,
    sizes: Mapping[str, int],
    scaling: Scaling,
    dtype: torch.dtype,
) -> Tensor:
    call = _Call(product, a, b, shape, sizes, scaling, dtype)
    with _on(a.device):
        return call.result(_setting(call, inner))


@dataclass(slots=True)
class _Call:
    """One product with its operands, ready to launch with any setting."""

    product: str
    a: Tensor
    b: Tensor
    shape: tuple[int, int]
    sizes: Mapping[str, int]
    scaling: Scaling
    dtype: torch.dtype
    library: Library = field(init=False)

    def __post_init__(self) -> None:
        self.library = load(architecture(self.a.device), PRODUCTS[self.product][1])

    def result(self, setting: LaunchSetting) -> Tensor:
        """Compute the product; partial FP32 results of slices are added in a fixed order, without atomics."""
        slices = setting.slices
        dtype = torch.float32 if slices > 1 else self.dtype
        shape = (slices, *self.shape) if slices > 1 else self.shape
        out = torch.empty(shape, dtype=dtype, device=self.a.device)
        self.launch(setting, out)
        if slices == 1:
            return out
        total = out.sum(0)
        return (total if self.scaling.bias is None else total.add_(self.scaling.bias)).to(self.dtype)

    def launch(self, setting: LaunchSetting, out: Tensor) -> None:
        """Queue the product, or its partial results, into `out`."""
        arguments = {
            **self.sizes,
            **self.scaling.arguments(with_bias=setting.slices == 1),
            "slices": setting.slices,
            "a": self.a.data_ptr(),
            "b": self.b.data_ptr(),
            "out": out.data_ptr(),
            "out_type": OUT_TYPES[str(out.dtype).removeprefix("torch.")],
            "device": self.a.device.index or 0,
            "stream": _stream(self.a.device),
        }
        is_gemm = PRODUCTS[self.product][1].endswith("gemm")
        run = self.library.gemm if is_gemm else self.library.conv
        run(self.product, self.library.tiles(self.product).index(setting.tile), arguments)


def _on(device: torch.device) -> AbstractContextManager[None]:
    return torch.cuda.device(device)


def _stream(device: torch.device) -> int:
    return torch.cuda.current_stream(device).cuda_stream


@cache
def _tuner(device: torch.device) -> Tuner:
    name = re.sub(r"\W+", "-", torch.cuda.get_device_name(device))
    return Tuner(folder() / f"tiles-{name}.jsonl")


def _setting(call: _Call, inner: int) -> LaunchSetting:
    """Return the fastest setting for this shape; the first one during CUDA graph capture."""
    tiles = call.library.tiles(call.product)
    slices = [1]
    if not call.product.endswith(("fprop", "dgrad")):
        # The kernels reject slices whose INT32 sums might overflow.
        slices = [s for s in _SLICES if s == 1 or inner // s >= _SHORTEST_SLICE]
    if torch.cuda.is_current_stream_capturing():
        return LaunchSetting(tiles[0], slices[-1] if inner > LONGEST_INT32_SUM else 1)
    sizes = " ".join(str(size) for size in call.sizes.values())
    key = f"{call.product} {call.dtype} {sizes}"
    return _tuner(call.a.device).best(
        key, tiles, slices, lambda setting: _seconds(lambda: call.result(setting))
    )


def _seconds(run: Callable[[], object]) -> float:
    """Return the median seconds of a run on the GPU, by CUDA events."""
    for _ in range(_WARM_UP_RUNS):
        run()
    times: list[float] = []
    for _ in range(_TIMED_RUNS):
        start, end = (
            torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
            for _ in range(2)
        )
        start.record()
        run()
        end.record()
        end.synchronize()
        times.append(start.elapsed_time(end) / 1e3)
    return sorted(times)[_TIMED_RUNS // 2]


def _address(tensor: Tensor | None) -> int | None:
    return None if tensor is None else tensor.data_ptr()


def _plain(scaling: Scaling) -> Scaling:
    """Return a tensor in contiguous FP32."""

    def flat(tensor: Tensor | None) -> Tensor | None:
        return None if tensor is None else tensor.detach().float().reshape(-1).contiguous()

    return Scaling(
        flat(scaling.alpha),
        flat(scaling.rows),
        flat(scaling.columns),
        flat(scaling.bias),
        scaling.rows_per_scale,
    )


def _padded_scaling(scaling: Scaling, more_rows: int, more_columns: int) -> Scaling:
    def longer(tensor: Tensor | None, more: int) -> Tensor | None:
        return tensor if tensor is None or not more else pad(tensor, (0, more))

    return Scaling(
        scaling.alpha,
        longer(scaling.rows, more_rows),
        longer(scaling.columns, more_columns),
        longer(scaling.bias, more_columns),
        scaling.rows_per_scale,
    )


def _readable(matrix: Tensor) -> Tensor:
    """Return a matrix whose rows are contiguous and 16-byte aligned; a copy where needed."""
    alignment = _ALIGNMENT_BYTES // matrix.itemsize
    if matrix.shape[1] % alignment:
        return _pad_columns(matrix)
    step = matrix.stride(0)
    is_readable = matrix.stride(1) == 1 and step % alignment == 0 and step >= matrix.shape[1]
    return _aligned(matrix if is_readable else matrix.contiguous())


def _row_stride(matrix: Tensor) -> int:
    """Return the elements from row to row; torch leaves the stride of a single row undefined."""
    return matrix.shape[1] if len(matrix) == 1 else matrix.stride(0)


def _aligned(tensor: Tensor) -> Tensor:
    return tensor.clone() if tensor.data_ptr() % _ALIGNMENT_BYTES else tensor


def _pad_columns(tensor: Tensor) -> Tensor:
    more = -tensor.shape[-1] % (_ALIGNMENT_BYTES // tensor.itemsize)
    return pad(tensor, (0, more)) if more else tensor
