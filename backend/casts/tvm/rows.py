"""The fused casts as TVM loops: one pass over memory where eager torch takes five.

Each function is a program in TVM's script. On a CPU its loops are plain ones, and LLVM vectorizes the
inner one for the processor. On a GPU the same text runs as blocks of threads
(`qsync.backend.casts.tvm.schedules`). Sizes are symbolic: one compilation serves every batch. Each
program computes the same as the function of the same name in `qsync.backend.casts.cast_ops`, and is
tested against it.

Scales are passed as the integers with the same bits: as integers, magnitudes have the same order and NaN
is the largest. The outputs serve as the accumulators, because a local variable in a script would tie the
library to TVM's runtime. This module is imported only to compile: loading needs no TVM.
"""

from __future__ import annotations

from functools import partial
from typing import Any

import tvm
from tvm.script import tirx as T

from qsync.backend.casts.tvm import activations, attention, dropout, int8_products
from qsync.backend.casts.tvm import columns as fused_columns
from qsync.backend.casts.tvm.expressions import (
    SMALLEST_AMAX_BITS,
    bf16,
    inverse,
    magnitude,
    nearest,
    scale,
    stochastic,
)
from qsync.backend.casts.tvm.schedules import Serial, Threads

_BLOCK = 32  # rows and columns of a block: in BF16 each spans one cache line


def module(device_type: str = "cpu", has_amx: bool = False) -> tvm.IRModule:
    """Return every program for a type of device, by the names that the casts use."""
    loops = Threads if device_type == "cuda" else Serial
    programs: dict[str, Any] = {}
    for dtype in ("float32", "bfloat16"):
        programs[f"quantize_rows_{dtype}"] = _quantize_rows(loops, dtype, "int8", 0)
        programs[f"quantize_rows_unsigned_{dtype}"] = _quantize_rows(loops, dtype, "uint8", 128)
        programs[f"round_rows_{dtype}"] = _round_rows(loops, dtype)
        for biased in (False, True):
            name = "dequantize_biased" if biased else "dequantize"
            programs[f"{name}_{dtype}"] = _dequantize(loops, dtype, biased)
        programs[f"scale_images_{dtype}"] = _scale_images(loops, dtype)
    transpose = _transpose_in_blocks if loops is Serial else partial(_transpose, loops)
    programs["transpose_to_fp32"] = transpose("bfloat16", "float32")
    for dtype in ("int8", "float32", "bfloat16"):
        programs[f"transpose_{dtype}"] = transpose(dtype, dtype)
    for dtype in ("uint8", "int8", "bfloat16"):
        programs[f"unfold_{dtype}"] = _unfold(loops, dtype)
    programs["fold"] = _fold_on_gpu() if loops is Threads else _fold()
    programs["decode_rows"] = _decode(loops, "int8", 0, by_row=True)
    programs["decode_columns"] = _decode(loops, "int8", 0, by_row=False)
    programs["decode_rows_unsigned"] = _decode(loops, "uint8", 128, by_row=True)
    programs |= fused_columns.programs(loops)
    programs |= activations.programs(loops)
    if loops is Serial:
        programs["to_bf16"] = _to_bf16()
        programs["depthwise_weight_gradient"] = _depthwise_weight_gradient()
        programs |= attention.programs()
        programs |= dropout.programs()
    if has_amx:
        programs |= int8_products.programs()
    return tvm.IRModule({name: f.with_attr("global_symbol", name) for name, f in programs.items()})


def _quantize_rows(loops: Any, dtype: str, code_dtype: str, zero_point: int) -> Any:
    @T.prim_func
    def quantize_rows(x: T.handle, codes: T.handle, scales: T.handle):
        T.func_attr({"tirx.noalias": True})
        m, n = T.int64(), T.int64()
        X = T.match_buffer(x, (m, n), dtype)
        Q = T.match_buffer(codes, (m, n), code_dtype)
        out = T.match_buffer(scales, (m,), "int32")
        for i in loops.rows(m):
            for t in loops.threads():
                S = loops.accumulators(out)
                S[loops.index(i, t)] = T.int32(SMALLEST_AMAX_BITS)
                for j in loops.columns(t, n):
                    S[loops.index(i, t)] = T.max(S[loops.index(i, t)], magnitude(T.Cast("float32", X[i, j])))
                loops.maximum(S, t)
                for j in loops.columns(t, n):
                    Q[i, j] = T.Cast(
                        code_dtype,
                        nearest(T.Cast("float32", X[i, j]) * inverse(S[loops.result_index(i)]))
                        + T.int32(zero_point),
                    )
                out[i] = scale(S[loops.result_index(i)])

    return quantize_rows


def _round_rows(loops: Any, dtype: str) -> Any:
    @T.prim_func
    def round_rows(g: T.handle, factors: T.handle, seed: T.int32, codes: T.handle, scales: T.handle):
        T.func_attr({"tirx.noalias": True})
        m, n = T.int64(), T.int64()
        G = T.match_buffer(g, (m, n), dtype)
        F = T.match_buffer(factors, (n,), "float32")
        Q = T.match_buffer(codes, (m, n), "int8")
        out = T.match_buffer(scales, (m,), "int32")
        for i in loops.rows(m):
            for t in loops.threads():
                S = loops.accumulators(out)
                S[loops.index(i, t)] = T.int32(SMALLEST_AMAX_BITS)
                for j in loops.columns(t, n):
                    S[loops.index(i, t)] = T.max(
                        S[loops.index(i, t)], magnitude(T.Cast("float32", G[i, j]) * F[j])
                    )
                loops.maximum(S, t)
                for j in loops.columns(t, n):
                    Q[i, j] = T.Cast(
                        "int8",
                        stochastic(
                            T.Cast("float32", G[i, j]) * F[j] * inverse(S[loops.result_index(i)]),
                            i,
                            j,
                            n,
                            T.Cast("uint32", seed),
                        ),
                    )
                out[i] = scale(S[loops.result_index(i)])

    return round_rows


def _to_bf16() -> Any:
    """Convert to BF16, on a CPU."""

    @T.prim_func
    def to_bf16(x: T.handle, out: T.handle):
        T.func_attr({"tirx.noalias": True})
        m, n = T.int64(), T.int64()
        X = T.match_buffer(x, (m, n), "float32")
        Y = T.match_buffer(out, (m, n), "bfloat16")
        for i, j in T.grid(m, n):
            Y[i, j] = bf16(X[i, j])

    return to_bf16


def _transpose(loops: Any, dtype: str, out_dtype: str) -> Any:
    """Transpose matrices (m, c, p) to (m, p, c), in another type."""

    @T.prim_func
    def transpose(x: T.handle, out: T.handle):
        T.func_attr({"tirx.noalias": True})
        m, c, p = T.int64(), T.int64(), T.int64()
        X = T.match_buffer(x, (m, c, p), dtype)
        Y = T.match_buffer(out, (m, p, c), out_dtype)
        for i in loops.planes(m):
            for k in loops.rows(p):
                for t in loops.threads():
                    for j in loops.columns(t, c):
                        Y[i, k, j] = T.Cast(out_dtype, X[i, j, k])

    return transpose


def _transpose_in_blocks(dtype: str, out_dtype: str) -> Any:
    """Transpose matrices (m, c, p) block by block, so that each cache line is read and written once.

    ms for (1, 4096, 1280) in BF16: 1.9, and 4.1 by torch (one thread of a Xeon 6).
    """
    block = T.int64(_BLOCK)

    @T.prim_func
    def transpose(x: T.handle, out: T.handle):
        T.func_attr({"tirx.noalias": True})
        m, c, p = T.int64(), T.int64(), T.int64()
        X = T.match_buffer(x, (m, c, p), dtype)
        Y = T.match_buffer(out, (m, p, c), out_dtype)
        for i in T.serial(m):
            for above in T.serial(T.floordiv(c, block)):
                for left in T.serial(T.floordiv(p, block)):
                    for k in T.serial(block):
                        for j in T.unroll(block):
                            Y[i, left * block + k, above * block + j] = T.Cast(
                                out_dtype, X[i, above * block + j, left * block + k]
                            )
                for k in T.serial(T.floormod(p, block)):
                    for j in T.unroll(block):
                        Y[i, p - 1 - k, above * block + j] = T.Cast(
                            out_dtype, X[i, above * block + j, p - 1 - k]
                        )
            for k in T.serial(p):
                for j in T.serial(T.floormod(c, block)):
                    Y[i, k, c - 1 - j] = T.Cast(out_dtype, X[i, c - 1 - j, k])

    return transpose


def _unfold(loops: Any, dtype: str) -> Any:
    """Copy windows of images, one row per output pixel; pixels outside are 0.

    UINT8 codes with zero point 128 become INT8 codes.
    """
    out_dtype = "int8" if dtype == "uint8" else dtype

    def taken(value: Any) -> Any:
        return T.reinterpret("int8", T.bitwise_xor(value, T.uint8(128))) if dtype == "uint8" else value

    def zero() -> Any:
        return T.reinterpret(dtype, T.uint16(0)) if dtype == "bfloat16" else T.int8(0)

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
        for i in loops.planes(n):
            for y in loops.rows(p):
                for t in loops.threads():
                    for x, u, v in T.grid(q, kh, kw):
                        if (
                            (y * stride_h + u * step_h - pad_h >= 0)
                            & (y * stride_h + u * step_h - pad_h < h)
                            & (x * stride_w + v * step_w - pad_w >= 0)
                            & (x * stride_w + v * step_w - pad_w < w)
                        ):
                            for j in loops.columns(t, c):
                                Y[i, y, x, u, v, j] = taken(
                                    X[
                                        i,
                                        y * stride_h + u * step_h - pad_h,
                                        x * stride_w + v * step_w - pad_w,
                                        j,
                                    ]
                                )
                        else:
                            for j in loops.columns(t, c):
                                Y[i, y, x, u, v, j] = zero()

    return unfold


def _fold() -> Any:
    """Sum BF16 windows into FP32 images, on a CPU: the adjoint of unfolding."""

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


def _fold_on_gpu() -> Any:
    """Sum windows into images on a GPU: every pixel collects its windows, so no threads share a sum."""

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
        for i in Threads.planes(n):
            for y in Threads.rows(h):
                for t in Threads.threads():
                    for x in T.serial(w):
                        for j in Threads.columns(t, c):
                            Y[i, y, x, j] = T.float32(0)
                            for u, v in T.grid(kh, kw):
                                # The window at (row, column) reaches this pixel if both are whole numbers.
                                if (
                                    (y + pad_h - u * step_h >= 0)
                                    & (y + pad_h - u * step_h < p * stride_h)
                                    & (T.truncmod(y + pad_h - u * step_h, stride_h) == 0)
                                    & (x + pad_w - v * step_w >= 0)
                                    & (x + pad_w - v * step_w < q * stride_w)
                                    & (T.truncmod(x + pad_w - v * step_w, stride_w) == 0)
                                ):
                                    Y[i, y, x, j] = Y[i, y, x, j] + T.Cast(
                                        "float32",
                                        X[
                                            i,
                                            T.truncdiv(y + pad_h - u * step_h, stride_h),
                                            T.truncdiv(x + pad_w - v * step_w, stride_w),
                                            u,
                                            v,
                                            j,
                                        ],
                                    )

    return fold


def _depthwise_weight_gradient() -> Any:
    """Sum gradient times image for every tap of a depthwise convolution, on a CPU."""

    @T.prim_func
    def depthwise_weight_gradient(
        images: T.handle,
        gradient: T.handle,
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
        X = T.match_buffer(images, (n, h, w, c), "bfloat16")
        G = T.match_buffer(gradient, (n, p, q, c), "bfloat16")
        Y = T.match_buffer(out, (kh, kw, c), "float32")
        for u, v, j in T.grid(kh, kw, c):
            Y[u, v, j] = T.float32(0)
        for i, y, u in T.grid(n, p, kh):
            if (y * stride_h + u * step_h - pad_h >= 0) & (y * stride_h + u * step_h - pad_h < h):
                for x, v in T.grid(q, kw):
                    if (x * stride_w + v * step_w - pad_w >= 0) & (x * stride_w + v * step_w - pad_w < w):
                        for j in T.serial(c):
                            Y[u, v, j] = Y[u, v, j] + T.Cast("float32", G[i, y, x, j]) * T.Cast(
                                "float32",
                                X[
                                    i,
                                    y * stride_h + u * step_h - pad_h,
                                    x * stride_w + v * step_w - pad_w,
                                    j,
                                ],
                            )

    return depthwise_weight_gradient


def _dequantize(loops: Any, dtype: str, biased: bool) -> Any:
    """Dequantize in place for FP32: fresh memory costs more than the arithmetic."""
    in_place = dtype == "float32"
    out_dtype = "int32" if in_place else dtype

    def value(total: Any, row: Any, column: Any, bias: Any) -> Any:
        scaled = T.Cast("float32", total) * row * column
        result = scaled + bias if biased else scaled
        return T.reinterpret("int32", result) if in_place else bf16(result)

    if in_place:

        @T.prim_func
        def dequantize(sums: T.handle, rows: T.handle, columns: T.handle, bias: T.handle):
            m, n = T.int64(), T.int64()
            A = T.match_buffer(sums, (m, n), "int32")
            R = T.match_buffer(rows, (m,), "float32")
            C = T.match_buffer(columns, (n,), "float32")
            B = T.match_buffer(bias, (n,), "float32")
            T.func_attr({"tirx.noalias": True})
            for i in loops.rows(m):
                for t in loops.threads():
                    for j in loops.columns(t, n):
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
            for i in loops.rows(m):
                for t in loops.threads():
                    for j in loops.columns(t, n):
                        Y[i, j] = value(A[i, j], R[i], C[j], B[j])

    return dequantize


def _scale_images(loops: Any, dtype: str) -> Any:
    """Scale results (images, pixels, channels) per image and add a bias; FP32 in place."""
    if dtype == "float32":

        @T.prim_func
        def scale_images(y: T.handle, rows: T.handle, bias: T.handle):
            T.func_attr({"tirx.noalias": True})
            m, p, c = T.int64(), T.int64(), T.int64()
            Y = T.match_buffer(y, (m, p, c), "float32")
            R = T.match_buffer(rows, (m,), "float32")
            B = T.match_buffer(bias, (c,), "float32")
            for i in loops.planes(m):
                for k in loops.rows(p):
                    for t in loops.threads():
                        for j in loops.columns(t, c):
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
            for i in loops.planes(m):
                for k in loops.rows(p):
                    for t in loops.threads():
                        for j in loops.columns(t, c):
                            Z[i, k, j] = bf16(Y[i, k, j] * R[i] + B[j])

    return scale_images


def _decode(loops: Any, dtype: str, zero_point: int, by_row: bool) -> Any:
    @T.prim_func
    def decode(codes: T.handle, scales: T.handle, out: T.handle):
        T.func_attr({"tirx.noalias": True})
        m, n = T.int64(), T.int64()
        Q = T.match_buffer(codes, (m, n), dtype)
        S = T.match_buffer(scales, (m if by_row else n,), "float32")
        Y = T.match_buffer(out, (m, n), "bfloat16")
        for i in loops.rows(m):
            for t in loops.threads():
                for j in loops.columns(t, n):
                    Y[i, j] = bf16(
                        T.Cast("float32", T.Cast("int32", Q[i, j]) - T.int32(zero_point))
                        * (S[i] if by_row else S[j])
                    )

    return decode
