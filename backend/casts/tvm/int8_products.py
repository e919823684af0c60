"""INT8 products on AMX with fused scaling and activation, while sums are in the cache.

A tile holds 16 rows of 64 bytes. Two tiles of a's rows times two of b's columns add to four tiles of sums:
each tile loaded is used twice. The second operand of AMX's product holds four of b's rows side by side in
every row, so b is packed first, into panels of 32 columns: one pass over b is a call's only overhead. Of
every panel 512 rows at a time stay in the first cache while a's rows pass. Sums reach memory only as results,
in their own type.

The last tiles begin 32 rows or columns before the end: overlapping results are written twice, with equal
values. The inner dimension is a multiple of 64.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from tvm.script import tirx as T

from qsync.backend.casts.tvm.activations import Curve, curves
from qsync.backend.casts.tvm.constants import STRIPS, TILE_ROWS
from qsync.backend.casts.tvm.expressions import narrowed, widened

_SIZE = 2 * TILE_ROWS  # rows and columns of sums at a time
_CHUNK = 8  # tiles of the inner dimension of a panel in the L1 cache


def programs() -> dict[str, Any]:
    """Return the programs by name; LLVM compiles them for processors with AMX alone."""
    found: dict[str, Any] = {"pack_rows": _pack_rows(), "pack_columns": _pack_columns()}
    for dtype in ("float32", "bfloat16"):
        found[f"int8_product_{dtype}"] = _product(dtype, None)
        for name, curve in curves(dtype).items():
            found[f"int8_product_{name}_{dtype}"] = _product(dtype, curve)
    return found


def _product(dtype: str, curve: Curve | None) -> Any:
    """Write f(rows columns (a b) + bias), and for GELU also its argument, for backward."""

    @T.prim_func
    def product(
        a: T.handle,
        packed: T.handle,
        shapes: T.handle,
        sums: T.handle,
        rows: T.handle,
        columns: T.handle,
        bias: T.handle,
        saved: T.handle,
        out: T.handle,
    ):
        T.func_attr({"tirx.noalias": True})
        m, n, k, panels, depth = T.int64(), T.int64(), T.int64(), T.int64(), T.int64()
        A = T.match_buffer(a, (m, k), "int8")
        P = T.match_buffer(packed, (panels, depth, 2, 256), "int32")
        F = T.match_buffer(shapes, (64,), "uint8")
        S = T.match_buffer(sums, (STRIPS, _SIZE, _SIZE), "int32")
        R = T.match_buffer(rows, (m,), "float32")
        C = T.match_buffer(columns, (n,), "float32")
        B = T.match_buffer(bias, (n,), "float32")
        H = T.match_buffer(saved, (m, n), dtype)
        Y = T.match_buffer(out, (m, n), dtype)
        _tile("ldtilecfg", T.address_of(F[0]))
        for block, p, c in T.grid(T.ceildiv(m, _SIZE * STRIPS), panels, T.ceildiv(depth, _CHUNK)):
            for s in T.serial(T.min(T.int64(STRIPS), T.ceildiv(m, _SIZE) - block * STRIPS)):
                row = T.meta_var(_start(block * STRIPS + s, m))
                column = T.meta_var(_start(p, n))
                if c == 0:
                    _each_sum(lambda t, place: _tile("tilezero", t), S, s)
                else:
                    _each_sum(lambda t, place: _tile("tileloadd64", t, place, T.int64(4 * _SIZE)), S, s)
                for q in T.serial(T.min(T.int64(_CHUNK), depth - c * _CHUNK)):
                    _add_tiles(A, P, row, p, c * _CHUNK + q, k)
                _each_sum(lambda t, place: _tile("tilestored64", t, place, T.int64(4 * _SIZE)), S, s)
                if c == T.ceildiv(depth, _CHUNK) - 1:
                    for i, j in T.grid(_SIZE, _SIZE):
                        total = T.meta_var(T.Cast("float32", S[s, i, j]))
                        x = T.meta_var(total * R[row + i] * C[column + j] + B[column + j])
                        _write(x, curve, dtype, H, Y, [row + i, column + j])
        _tile("tilerelease")

    return product


def _start(number: Any, size: Any) -> Any:
    return T.min(number * _SIZE, size - _SIZE)


def _tile(name: str, *arguments: Any) -> None:
    T.evaluate(T.call_llvm_intrin("void", f"llvm.x86.{name}", *arguments))


def _each_sum(run: Callable[[Any, Any], None], S: Any, strip: Any) -> None:
    """Call `run` with each of tiles 0 to 3 and the position of its sums."""
    for t in range(4):
        run(T.int8(t), T.address_of(S[strip, t // 2 * TILE_ROWS, t % 2 * TILE_ROWS]))


def _add_tiles(A: Any, P: Any, row: Any, panel: Any, q: Any, width: Any) -> None:
    """Add a 32x64 by 64x32 product to tiles 0 to 3; tiles 4, 5 hold rows of a, 6, 7 columns of b."""
    for half in range(2):
        _tile("tileloadd64", T.int8(6 + half), T.address_of(P[panel, q, half, 0]), T.int64(64))
    for below in range(2):
        begin = T.address_of(A[row + TILE_ROWS * below, q * 64])
        _tile("tileloadd64", T.int8(4 + below), begin, width)
        for half in range(2):
            _tile("tdpbssd", T.int8(2 * below + half), T.int8(4 + below), T.int8(6 + half))


def _write(x: Any, curve: Curve | None, dtype: str, saved: Any, out: Any, place: list[Any]) -> None:
    def store(buffer: Any, value: Any) -> None:
        T.buffer_store(buffer, narrowed(value, dtype), place)

    if curve is None:
        store(out, x)
    elif curve.name == "relu":
        store(out, curve.of(T.bind(x)))
    else:
        store(saved, x)
        # Activation of the rounded number, as in torch.
        store(out, curve.of(T.bind(widened(saved[place[0], place[1]], dtype))))


def _pack_rows() -> Any:
    """Pack b from its transpose, as words (n, k / 4): four codes of a row are already adjacent."""

    @T.prim_func
    def pack_rows(b: T.handle, packed: T.handle):
        T.func_attr({"tirx.noalias": True})
        n, k, panels, depth = T.int64(), T.int64(), T.int64(), T.int64()
        B = T.match_buffer(b, (n, k), "int32")
        P = T.match_buffer(packed, (panels, depth, 2, 16, 16), "int32")
        for p, q, half, r in T.grid(panels, depth, 2, 16):
            for c in T.vectorized(16):
                P[p, q, half, r, c] = B[_start(p, n) + half * 16 + c, q * 16 + r]

    return pack_rows


def _pack_columns() -> Any:
    """Pack b (k, n) into AMX panels, four rows interleaved."""

    def code(B: Any, row: Any, column: Any, place: int) -> Any:
        return T.shift_left(T.Cast("uint32", B[row + place, column]), T.uint32(8 * place))

    @T.prim_func
    def pack_columns(b: T.handle, packed: T.handle):
        T.func_attr({"tirx.noalias": True})
        n, k, panels, depth = T.int64(), T.int64(), T.int64(), T.int64()
        B = T.match_buffer(b, (k, n), "uint8")
        P = T.match_buffer(packed, (panels, depth, 2, 16, 16), "uint32")
        for q, r, p, half in T.grid(depth, 16, panels, 2):
            for c in T.vectorized(16):
                row = T.meta_var(q * 64 + r * 4)
                column = T.meta_var(_start(p, n) + half * 16 + c)
                P[p, q, half, r, c] = (code(B, row, column, 0) | code(B, row, column, 1)) | (
                    code(B, row, column, 2) | code(B, row, column, 3)
                )

    return pack_columns
