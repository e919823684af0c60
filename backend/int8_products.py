"""INT8 products: exact sums, and sums scaled to results, with or without an activation.

A scaled product is `int8_sums` and then `dequantize`. With AMX one compiled program does both: sums stay in
the cache (`qsync.backend.casts.tvm.int8_products`). ms of y = s_x s_w (x w') + b in BF16, one thread of a
Xeon 6, by oneDNN's sums and by the program; torch's product in BF16 beside them: 3.5, 1.7 and 2.8 for
1024x512x2048; 6.5, 3.6 and 6.3 for 1024x768x3072; 19.1, 11.0 and 23.4 for 2048x2048x2048.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn.functional import pad

from qsync.backend.casts import compiled_casts
from qsync.backend.casts.cast_ops import COMPILED_DTYPES, dequantize, transpose_last
from qsync.backend.casts.epilogues import Activation, dequantize_activated
from qsync.backend.casts.tvm.constants import STRIPS, TILE_ROWS
from qsync.backend.devices.amx import has_amx, tile_shapes

# 127 * 127 * 133144 < 2^31: a longer inner dimension could overflow the INT32 sum, so it is summed in pieces.
LONGEST_INT32_SUM = (2**31 - 1) // 127**2
_SIZE = 2 * TILE_ROWS  # rows and columns of the sums that the compiled product computes at a time
_DEPTH = 64  # INT8 codes in a row of an AMX tile


def int8_sums(a: Tensor, b: Tensor, out: Tensor | None = None) -> Tensor:
    """Multiply INT8 matrices a (M, K) and b (K, N) exactly, as INT32 (M, N).

    Strides are free. On CPUs `out`, dense rows in INT32, receives the result unless the returned tensor is
    FP32. An inner dimension so long that INT32 might overflow is summed in pieces, in FP32. On CUDA the
    operands are padded to the sizes that cuBLASLt accepts (M > 16, K and N multiples of 8).
    """
    inner = a.shape[1]
    if inner > LONGEST_INT32_SUM:
        half = inner // 2
        return int8_sums(a[:, :half], b[:half]).float().add_(int8_sums(a[:, half:], b[half:]))
    if a.is_cuda:
        return _int_mm_cuda(a, b)
    a, b = _with_plain_strides(a), _with_plain_strides(b)
    return torch._int_mm(a, b) if out is None else torch._int_mm(a, b, out=out)


def scaled_product(
    a: Tensor,
    b: Tensor,
    rows: Tensor,
    columns: Tensor,
    bias: Tensor | None,
    dtype: torch.dtype,
    out: Tensor | None = None,
) -> Tensor:
    """Return rows (m) * columns (n) * (a b) + bias (n), as (m, n) in `dtype`; in `out` if it is given.

    INT8 a (m, k) and b (k, n), in any strides; rows, columns and bias in FP32.

    >>> scaled_product(x_codes, w_codes.t(), x_scale, w_scale, None, torch.float32)
    """
    if _uses_tiles(a, b, bias, dtype):
        y = torch.empty(a.shape[0], b.shape[1], dtype=dtype) if out is None else out
        return _product_in_tiles(a, b, rows, columns, bias, y, y)
    in_place = None if out is None or dtype is not torch.float32 else out.view(torch.int32)
    y = dequantize(int8_sums(a, b, in_place), rows, columns, bias, dtype)
    return y if out is None or y.data_ptr() == out.data_ptr() else out.copy_(y)


def activated_product(
    a: Tensor,
    b: Tensor,
    rows: Tensor,
    columns: Tensor,
    bias: Tensor | None,
    dtype: torch.dtype,
    function: Activation,
) -> tuple[Tensor, Tensor]:
    """Compute x = `scaled_product(...)`; return the tensor that backward needs, and f(x).

    Both are in `dtype`. Backward needs x itself for gelu, f(x) for relu.
    """
    if not _uses_tiles(a, b, bias, dtype):
        return dequantize_activated(int8_sums(a, b), rows, columns, bias, dtype, function)
    y = torch.empty(a.shape[0], b.shape[1], dtype=dtype)
    saved = y if function.kind == "relu" else torch.empty_like(y)
    return saved, _product_in_tiles(a, b, rows, columns, bias, y, saved, function.program)


def _uses_tiles(a: Tensor, b: Tensor, bias: Tensor | None, dtype: torch.dtype) -> bool:
    """Return whether the compiled AMX program computes a product (one thread), not oneDNN."""
    (m, k), n = a.shape, b.shape[1]
    fits = min(m, n) >= _SIZE and 0 < k <= LONGEST_INT32_SUM and dtype in COMPILED_DTYPES
    if not (fits and has_amx(a.device) and torch.get_num_threads() == 1):
        return False
    is_plain = bias is None or bias.dtype is torch.float32
    return is_plain and tile_shapes() is not None and compiled_casts.library() is not None


def _product_in_tiles(
    a: Tensor,
    b: Tensor,
    rows: Tensor,
    columns: Tensor,
    bias: Tensor | None,
    out: Tensor,
    saved: Tensor,
    function: str = "",
) -> Tensor:
    """Write a scaled product to `out`, through the activation of the program `function`."""
    library = compiled_casts.library()
    assert library is not None
    offsets = columns.new_zeros(len(columns)) if bias is None else bias.detach().contiguous()
    sums = torch.empty(STRIPS, _SIZE, _SIZE, dtype=torch.int32)
    run = library["_".join(filter(None, ("int8_product", function, COMPILED_DTYPES[out.dtype])))]
    run(_in_rows(a), _packed(library, b), tile_shapes(), sums, rows, columns, offsets, saved, out)
    return out


def _in_rows(a: Tensor) -> Tensor:
    """Return a (m, k) with dense rows, padded with zeros to whole tiles."""
    if not a.is_contiguous():
        a = transpose_last(a.t().unsqueeze(0))[0] if a.t().is_contiguous() else a.contiguous()
    beyond = -a.shape[1] % _DEPTH
    return pad(a, (0, beyond)) if beyond else a


def _packed(library: compiled_casts.Library, b: Tensor) -> Tensor:
    """Return b (k, n) packed for AMX's second operand: words in panels of 32 columns."""
    k, n = b.shape
    panels = torch.empty(-(-n // _SIZE), -(-k // _DEPTH), 2, TILE_ROWS**2, dtype=torch.int32)
    words = panels.view(*panels.shape[:3], TILE_ROWS, TILE_ROWS)
    if b.t().is_contiguous():
        rows = _in_rows(b.t())
        # 32-bit words must start at a multiple of 4 bytes
        rows = rows.clone() if rows.storage_offset() % 4 else rows
        library["pack_rows"](rows.view(torch.int32), words)
    else:
        whole = pad(b, (0, 0, 0, -k % _DEPTH)) if k % _DEPTH else b.contiguous()
        library["pack_columns"](whole.view(torch.uint8), words.view(torch.uint32))
    return panels


def _with_plain_strides(matrix: Tensor) -> Tensor:
    """Return the matrix with strides that oneDNN accepts.

    `torch._int_mm` passes a stride to oneDNN as the leading dimension, unchecked. If it is too small
    (expanded matrices; the arbitrary stride of a dimension of size 1), the sums are never written, and no
    error is raised (pytorch#195066, seen in torch 2.13).
    """
    (rows, columns), (down, right) = matrix.shape, matrix.stride()
    plain = (right == 1 and down >= columns) or (down == 1 and right >= rows)
    return matrix if plain and 1 not in matrix.shape else matrix.reshape(-1).contiguous().view(matrix.shape)


def _int_mm_cuda(a: Tensor, b: Tensor) -> Tensor:
    """Call `torch._int_mm` within cuBLASLt's limits: row-major times column-major, padded."""
    rows, inner, columns = a.shape[0], a.shape[1], b.shape[1]
    if 0 in (rows, inner, columns):
        return a.new_zeros(rows, columns, dtype=torch.int32)
    pad_rows = max(0, 24 - rows) if rows <= 16 else 0
    pad_inner, pad_columns = -inner % 8, -columns % 8
    b = b.t()
    if pad_rows or pad_inner:
        a = torch.nn.functional.pad(a, (0, pad_inner, 0, pad_rows))
    if pad_inner or pad_columns:
        b = torch.nn.functional.pad(b, (0, pad_inner, 0, pad_columns))
    return torch._int_mm(a.contiguous(), b.contiguous().t())[:rows, :columns].contiguous()
