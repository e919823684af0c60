"""The fused casts, as loops: one pass over memory where eager torch takes five.

Each function is a program in TVM's script; LLVM vectorizes its inner loop for the processor that it is
compiled for. Sizes are symbolic: one compilation serves every batch. What each computes is what the function
of the same name in `qsync.backend.casts` says in plain torch, and is tested against it.

Scales arrive as the integers with their bits: as integers, magnitudes are ordered alike and NaN is the
largest, and the outputs serve as the accumulators (a local variable in a script would tie the library to
TVM's runtime). Only `qsync.backend.compiled` imports this module, and only to compile: loading needs no TVM.
"""

from __future__ import annotations

from typing import Any

import tvm
from tvm.script import tirx as T

# The magnitude that a row of zeros gets, 1e-35, as the integer with its bits (see encoding.py).
_SMALLEST_AMAX_BITS = 0x0554AD2E
_INFINITY_BITS, _NAN_BITS = 0x7F800000, 0x7FC00000


def module() -> tvm.IRModule:
    """Every program, named as `qsync.backend.casts` looks it up."""
    programs: dict[str, Any] = {}
    for dtype in ("float32", "bfloat16"):
        programs[f"sum_columns_{dtype}"] = _sum_columns(dtype)
        programs[f"quantize_rows_{dtype}"] = _quantize_rows(dtype, "int8", 0)
        programs[f"quantize_rows_unsigned_{dtype}"] = _quantize_rows(dtype, "uint8", 128)
        programs[f"quantize_columns_{dtype}"] = _quantize_columns(dtype)
        programs[f"round_rows_{dtype}"] = _round_rows(dtype)
        programs[f"round_columns_{dtype}"] = _round_columns(dtype)
        programs[f"narrow_and_sum_{dtype}"] = _narrow_and_sum(dtype)
        for biased in (False, True):
            name = "dequantize_biased" if biased else "dequantize"
            programs[f"{name}_{dtype}"] = _dequantize(dtype, biased)
        programs[f"scale_images_{dtype}"] = _scale_images(dtype)
    programs["transpose_narrow"] = _transpose("float32", "bfloat16")
    programs["transpose_widen"] = _transpose("bfloat16", "float32")
    programs["transpose_int8"] = _transpose("int8", "int8")
    programs["unfold_uint8"], programs["unfold_bfloat16"] = _unfold("uint8"), _unfold("bfloat16")
    programs["fold"] = _fold()
    programs["decode_rows"] = _decode("int8", 0, by_row=True)
    programs["decode_columns"] = _decode("int8", 0, by_row=False)
    programs["decode_rows_unsigned"] = _decode("uint8", 128, by_row=True)
    return tvm.IRModule({name: f.with_attr("global_symbol", name) for name, f in programs.items()})


def _magnitude(value: Any) -> Any:
    """The bits of |value|. As integers they are ordered like the magnitudes, and NaN is the largest."""
    return T.bitwise_and(T.reinterpret("int32", value), T.int32(0x7FFFFFFF))


def _scale(bits: Any) -> Any:
    """The bits of max |x| / 127, from those of max |x|; NaN where a row held Inf or NaN."""
    amax = T.reinterpret("float32", bits)
    scale = T.reinterpret("int32", amax * T.float32(1 / 127))
    return T.Select(bits >= T.int32(_INFINITY_BITS), T.int32(_NAN_BITS), scale)


def _inverse(bits: Any) -> Any:
    """127 / max |x|, rounded twice as torch rounds it."""
    return (T.float32(1) / T.reinterpret("float32", bits)) * T.float32(127)


def _nearest(value: Any) -> Any:
    return T.Cast("int32", T.nearbyint(value))


def _stochastic(value: Any, i: Any, j: Any, columns: Any, seed: Any) -> Any:
    """floor(value + u), u uniform in [0, 1) on 2^24 points, from a hash of the place and the seed.

    The hash is the finalizer of MurmurHash3 (public domain): a few integer operations that vectorize, where a
    generator draws one number after the other.
    """
    h = T.Cast("uint32", i * columns + j) * T.uint32(0x9E3779B1) + seed
    h = T.bitwise_xor(h, T.shift_right(h, T.uint32(16))) * T.uint32(0x85EBCA6B)
    h = T.bitwise_xor(h, T.shift_right(h, T.uint32(13))) * T.uint32(0xC2B2AE35)
    h = T.bitwise_xor(h, T.shift_right(h, T.uint32(16)))
    uniform = T.Cast("float32", T.Cast("int32", T.shift_right(h, T.uint32(8)))) * T.float32(2**-24)
    return T.Cast("int32", T.floor(value + uniform))


def _quantize_rows(dtype: str, code_dtype: str, zero_point: int) -> Any:
    @T.prim_func
    def quantize_rows(x: T.handle, codes: T.handle, scales: T.handle):
        T.func_attr({"tirx.noalias": True})
        m, n = T.int64(), T.int64()
        X = T.match_buffer(x, (m, n), dtype)
        Q = T.match_buffer(codes, (m, n), code_dtype)
        S = T.match_buffer(scales, (m,), "int32")
        for i in T.serial(m):
            S[i] = T.int32(_SMALLEST_AMAX_BITS)
            for j in T.serial(n):
                S[i] = T.max(S[i], _magnitude(T.Cast("float32", X[i, j])))
            for j in T.serial(n):
                Q[i, j] = T.Cast(
                    code_dtype, _nearest(T.Cast("float32", X[i, j]) * _inverse(S[i])) + T.int32(zero_point)
                )
            S[i] = _scale(S[i])

    return quantize_rows


def _transpose(dtype: str, out_dtype: str) -> Any:
    """Matrices (m, c, p) transposed (m, p, c), in another type."""

    @T.prim_func
    def transpose(x: T.handle, out: T.handle):
        T.func_attr({"tirx.noalias": True})
        m, c, p = T.int64(), T.int64(), T.int64()
        X = T.match_buffer(x, (m, c, p), dtype)
        Y = T.match_buffer(out, (m, p, c), out_dtype)
        for i in T.serial(m):
            for k in T.serial(p):
                for j in T.serial(c):
                    Y[i, k, j] = T.Cast(out_dtype, X[i, j, k])

    return transpose


def _unfold(dtype: str) -> Any:
    """The windows of images, one row per output pixel; what lies outside is 0.

    UINT8 codes with zero point 128 become INT8 codes.
    """
    out_dtype = "int8" if dtype == "uint8" else dtype

    def taken(value: Any) -> Any:
        return T.reinterpret("int8", T.bitwise_xor(value, T.uint8(128))) if dtype == "uint8" else value

    def zero() -> Any:
        return T.int8(0) if dtype == "uint8" else T.Cast(dtype, T.float32(0))

    @T.prim_func
    def unfold(
        images: T.handle,
        stride_h: T.int64,
        stride_w: T.int64,
        pad_h: T.int64,
        pad_w: T.int64,
        step_h: T.int64,
        step_w: T.int64,
        out: T.handle,
    ):
        T.func_attr({"tirx.noalias": True})
        n, h, w, c = T.int64(), T.int64(), T.int64(), T.int64()
        p, q, kh, kw = T.int64(), T.int64(), T.int64(), T.int64()
        X = T.match_buffer(images, (n, h, w, c), dtype)
        Y = T.match_buffer(out, (n, p, q, kh, kw, c), out_dtype)
        for i, y, x, u, v in T.grid(n, p, q, kh, kw):
            if (
                (y * stride_h + u * step_h - pad_h >= 0)
                & (y * stride_h + u * step_h - pad_h < h)
                & (x * stride_w + v * step_w - pad_w >= 0)
                & (x * stride_w + v * step_w - pad_w < w)
            ):
                for j in T.serial(c):
                    Y[i, y, x, u, v, j] = taken(
                        X[i, y * stride_h + u * step_h - pad_h, x * stride_w + v * step_w - pad_w, j]
                    )
            else:
                for j in T.serial(c):
                    Y[i, y, x, u, v, j] = zero()

    return unfold


def _fold() -> Any:
    """The adjoint of unfolding: BF16 windows added up where they came from, in FP32."""

    @T.prim_func
    def fold(
        windows: T.handle,
        stride_h: T.int64,
        stride_w: T.int64,
        pad_h: T.int64,
        pad_w: T.int64,
        step_h: T.int64,
        step_w: T.int64,
        out: T.handle,
    ):
        T.func_attr({"tirx.noalias": True})
        n, h, w, c = T.int64(), T.int64(), T.int64(), T.int64()
        p, q, kh, kw = T.int64(), T.int64(), T.int64(), T.int64()
        X = T.match_buffer(windows, (n, p, q, kh, kw, c), "bfloat16")
        Y = T.match_buffer(out, (n, h, w, c), "float32")
        for i, y, x, j in T.grid(n, h, w, c):
            Y[i, y, x, j] = T.float32(0)
        for i, y, x, u, v in T.grid(n, p, q, kh, kw):
            if (
                (y * stride_h + u * step_h - pad_h >= 0)
                & (y * stride_h + u * step_h - pad_h < h)
                & (x * stride_w + v * step_w - pad_w >= 0)
                & (x * stride_w + v * step_w - pad_w < w)
            ):
                for j in T.serial(c):
                    Y[i, y * stride_h + u * step_h - pad_h, x * stride_w + v * step_w - pad_w, j] = Y[
                        i, y * stride_h + u * step_h - pad_h, x * stride_w + v * step_w - pad_w, j
                    ] + T.Cast("float32", X[i, y, x, u, v, j])

    return fold


def _quantize_columns(dtype: str) -> Any:
    @T.prim_func
    def quantize_columns(x: T.handle, codes: T.handle, scales: T.handle, inverses: T.handle):
        T.func_attr({"tirx.noalias": True})
        m, n = T.int64(), T.int64()
        X = T.match_buffer(x, (m, n), dtype)
        Q = T.match_buffer(codes, (m, n), "int8")
        S = T.match_buffer(scales, (n,), "int32")
        R = T.match_buffer(inverses, (n,), "int32")
        for j in T.serial(n):
            R[j] = T.int32(_SMALLEST_AMAX_BITS)
        for i in T.serial(m):
            for j in T.serial(n):
                R[j] = T.max(R[j], _magnitude(T.Cast("float32", X[i, j])))
        for j in T.serial(n):
            S[j] = _scale(R[j])
            R[j] = T.reinterpret("int32", _inverse(R[j]))
        for i in T.serial(m):
            for j in T.serial(n):
                Q[i, j] = T.Cast(
                    "int8", _nearest(T.Cast("float32", X[i, j]) * T.reinterpret("float32", R[j]))
                )

    return quantize_columns


def _round_rows(dtype: str) -> Any:
    @T.prim_func
    def round_rows(g: T.handle, factors: T.handle, seed: T.int32, codes: T.handle, scales: T.handle):
        T.func_attr({"tirx.noalias": True})
        m, n = T.int64(), T.int64()
        G = T.match_buffer(g, (m, n), dtype)
        F = T.match_buffer(factors, (n,), "float32")
        Q = T.match_buffer(codes, (m, n), "int8")
        S = T.match_buffer(scales, (m,), "int32")
        for i in T.serial(m):
            S[i] = T.int32(_SMALLEST_AMAX_BITS)
            for j in T.serial(n):
                S[i] = T.max(S[i], _magnitude(T.Cast("float32", G[i, j]) * F[j]))
            for j in T.serial(n):
                Q[i, j] = T.Cast(
                    "int8",
                    _stochastic(
                        T.Cast("float32", G[i, j]) * F[j] * _inverse(S[i]), i, j, n, T.Cast("uint32", seed)
                    ),
                )
            S[i] = _scale(S[i])

    return round_rows


def _round_columns(dtype: str) -> Any:
    @T.prim_func
    def round_columns(
        g: T.handle, factors: T.handle, seed: T.int32, codes: T.handle, scales: T.handle, inverses: T.handle
    ):
        T.func_attr({"tirx.noalias": True})
        m, n = T.int64(), T.int64()
        G = T.match_buffer(g, (m, n), dtype)
        F = T.match_buffer(factors, (m,), "float32")
        Q = T.match_buffer(codes, (m, n), "int8")
        S = T.match_buffer(scales, (n,), "int32")
        R = T.match_buffer(inverses, (n,), "int32")
        for j in T.serial(n):
            R[j] = T.int32(_SMALLEST_AMAX_BITS)
        for i in T.serial(m):
            for j in T.serial(n):
                R[j] = T.max(R[j], _magnitude(T.Cast("float32", G[i, j]) * F[i]))
        for j in T.serial(n):
            S[j] = _scale(R[j])
            R[j] = T.reinterpret("int32", _inverse(R[j]))
        for i in T.serial(m):
            for j in T.serial(n):
                Q[i, j] = T.Cast(
                    "int8",
                    _stochastic(
                        T.Cast("float32", G[i, j]) * F[i] * T.reinterpret("float32", R[j]),
                        i,
                        j,
                        n,
                        T.Cast("uint32", seed),
                    ),
                )

    return round_columns


def _narrow_and_sum(dtype: str) -> Any:
    @T.prim_func
    def narrow_and_sum(g: T.handle, narrow: T.handle, sums: T.handle, partial: T.handle):
        T.func_attr({"tirx.noalias": True})
        m, n = T.int64(), T.int64()
        G = T.match_buffer(g, (m, n), dtype)
        H = T.match_buffer(narrow, (m, n), "bfloat16")
        S = T.match_buffer(sums, (n,), "float32")
        P = T.match_buffer(partial, (n,), "float32")
        # Summed in blocks of 64 rows: one running sum over thousands of rows would lose digits that torch's
        # keeps.
        for j in T.serial(n):
            S[j] = T.float32(0)
        for block in T.serial((m + 63) // 64):
            for j in T.serial(n):
                P[j] = T.float32(0)
            for r in T.serial(T.min(T.int64(64), m - block * 64)):
                for j in T.serial(n):
                    P[j] = P[j] + T.Cast("float32", G[block * 64 + r, j])
                    H[block * 64 + r, j] = T.Cast("bfloat16", G[block * 64 + r, j])
            for j in T.serial(n):
                S[j] = S[j] + P[j]

    return narrow_and_sum


def _sum_columns(dtype: str) -> Any:
    @T.prim_func
    def sum_columns(g: T.handle, sums: T.handle, partial: T.handle):
        T.func_attr({"tirx.noalias": True})
        m, n = T.int64(), T.int64()
        G = T.match_buffer(g, (m, n), dtype)
        S = T.match_buffer(sums, (n,), "float32")
        P = T.match_buffer(partial, (n,), "float32")
        for j in T.serial(n):
            S[j] = T.float32(0)
        for block in T.serial((m + 63) // 64):
            for j in T.serial(n):
                P[j] = T.float32(0)
            for r in T.serial(T.min(T.int64(64), m - block * 64)):
                for j in T.serial(n):
                    P[j] = P[j] + T.Cast("float32", G[block * 64 + r, j])
            for j in T.serial(n):
                S[j] = S[j] + P[j]

    return sum_columns


def _dequantize(dtype: str, biased: bool) -> Any:
    """In FP32 the result takes the place of the sums: fresh memory costs more than the arithmetic."""
    in_place = dtype == "float32"
    out_dtype = "int32" if in_place else dtype

    def value(total: Any, row: Any, column: Any, bias: Any) -> Any:
        scaled = T.Cast("float32", total) * row * column
        result = scaled + bias if biased else scaled
        return T.reinterpret("int32", result) if in_place else T.Cast(dtype, result)

    if in_place:

        @T.prim_func
        def dequantize(sums: T.handle, rows: T.handle, columns: T.handle, bias: T.handle):
            m, n = T.int64(), T.int64()
            A = T.match_buffer(sums, (m, n), "int32")
            R = T.match_buffer(rows, (m,), "float32")
            C = T.match_buffer(columns, (n,), "float32")
            B = T.match_buffer(bias, (n,), "float32")
            T.func_attr({"tirx.noalias": True})
            for i in T.serial(m):
                for j in T.serial(n):
                    A[i, j] = value(A[i, j], R[i], C[j], B[j])

    else:

        @T.prim_func
        def dequantize(sums: T.handle, rows: T.handle, columns: T.handle, bias: T.handle, out: T.handle):
            m, n = T.int64(), T.int64()
            A = T.match_buffer(sums, (m, n), "int32")
            R = T.match_buffer(rows, (m,), "float32")
            C = T.match_buffer(columns, (n,), "float32")
            B = T.match_buffer(bias, (n,), "float32")
            Y = T.match_buffer(out, (m, n), out_dtype)
            T.func_attr({"tirx.noalias": True})
            for i in T.serial(m):
                for j in T.serial(n):
                    Y[i, j] = value(A[i, j], R[i], C[j], B[j])

    return dequantize


def _scale_images(dtype: str) -> Any:
    """Convolution results (images, pixels, channels), scaled by image, biased by channel; FP32 in place."""
    if dtype == "float32":

        @T.prim_func
        def scale_images(y: T.handle, rows: T.handle, bias: T.handle):
            T.func_attr({"tirx.noalias": True})
            m, p, c = T.int64(), T.int64(), T.int64()
            Y = T.match_buffer(y, (m, p, c), "float32")
            R = T.match_buffer(rows, (m,), "float32")
            B = T.match_buffer(bias, (c,), "float32")
            for i in T.serial(m):
                for k in T.serial(p):
                    for j in T.serial(c):
                        Y[i, k, j] = Y[i, k, j] * R[i] + B[j]

    else:

        @T.prim_func
        def scale_images(y: T.handle, rows: T.handle, bias: T.handle, out: T.handle):
            T.func_attr({"tirx.noalias": True})
            m, p, c = T.int64(), T.int64(), T.int64()
            Y = T.match_buffer(y, (m, p, c), "float32")
            R = T.match_buffer(rows, (m,), "float32")
            B = T.match_buffer(bias, (c,), "float32")
            Z = T.match_buffer(out, (m, p, c), dtype)
            for i in T.serial(m):
                for k in T.serial(p):
                    for j in T.serial(c):
                        Z[i, k, j] = T.Cast(dtype, Y[i, k, j] * R[i] + B[j])

    return scale_images


def _decode(dtype: str, zero_point: int, by_row: bool) -> Any:
    @T.prim_func
    def decode(codes: T.handle, scales: T.handle, out: T.handle):
        T.func_attr({"tirx.noalias": True})
        m, n = T.int64(), T.int64()
        Q = T.match_buffer(codes, (m, n), dtype)
        S = T.match_buffer(scales, (m if by_row else n,), "float32")
        Y = T.match_buffer(out, (m, n), "bfloat16")
        for i in T.serial(m):
            for j in T.serial(n):
                Y[i, j] = T.Cast(
                    "bfloat16",
                    T.Cast("float32", T.Cast("int32", Q[i, j]) - T.int32(zero_point))
                    * (S[i] if by_row else S[j]),
                )

    return decode
