"""The fused casts that reduce columns.

A CPU goes through the rows with a running result per column. A GPU has more threads than a matrix has
columns: its threads first reduce 64 rows of a column each, and a second round combines these partial results
in order, so that the same input gives the same sums.
"""

from __future__ import annotations

from typing import Any

from tvm.script import tirx as T

from qsync.backend.casts.tvm.constants import ROWS_PER_PART, THREADS_PER_BLOCK
from qsync.backend.casts.tvm.expressions import (
    SMALLEST_AMAX_BITS,
    bf16,
    inverse,
    magnitude,
    nearest,
    scale,
    stochastic,
)
from qsync.backend.casts.tvm.schedules import Threads, column


def programs(loops: Any) -> dict[str, Any]:
    """Return the programs over columns, by name."""
    found: dict[str, Any] = {}
    for dtype in ("float32", "bfloat16"):
        if loops is Threads:
            found[f"quantize_columns_{dtype}"] = _quantize_columns_in_parts(dtype)
            found[f"round_columns_{dtype}"] = _round_columns_in_parts(dtype)
            found[f"to_bf16_and_sum_{dtype}"] = _to_bf16_and_sum_in_parts(dtype)
            found[f"sum_columns_{dtype}"] = _sum_columns_in_parts(dtype)
        else:
            found[f"quantize_columns_{dtype}"] = _quantize_columns(dtype)
            found[f"round_columns_{dtype}"] = _round_columns(dtype)
            found[f"to_bf16_and_sum_{dtype}"] = _to_bf16_and_sum(dtype)
            found[f"sum_columns_{dtype}"] = _sum_columns(dtype)
    return found


def _in_bf16(value: Any, dtype: str) -> Any:
    """Return a buffer's element in BF16."""
    return value if dtype == "bfloat16" else bf16(value)


@T.inline
def _find_scales(S: Any, R: Any, value: Any, m: Any, n: Any) -> None:
    """Find the scale of each column of `value(i, j)`, and the inverse scale (CPU)."""
    for j in T.serial(n):
        R[j] = T.int32(SMALLEST_AMAX_BITS)
    for i in T.serial(m):
        for j in T.serial(n):
            R[j] = T.max(R[j], magnitude(value(i, j)))
    for j in T.serial(n):
        S[j] = scale(R[j])
        R[j] = T.reinterpret("int32", inverse(R[j]))


def _quantize_columns(dtype: str) -> Any:
    @T.prim_func
    def quantize_columns(x: T.handle, codes: T.handle, scales: T.handle, inverses: T.handle):
        T.func_attr({"tirx.noalias": True})
        m, n = T.int64(), T.int64()
        X = T.match_buffer(x, (m, n), dtype)
        Q = T.match_buffer(codes, (m, n), "int8")
        S = T.match_buffer(scales, (n,), "int32")
        R = T.match_buffer(inverses, (n,), "int32")
        _find_scales(S, R, lambda i, j: T.Cast("float32", X[i, j]), m, n)
        for i in T.serial(m):
            for j in T.serial(n):
                Q[i, j] = T.Cast("int8", nearest(T.Cast("float32", X[i, j]) * T.reinterpret("float32", R[j])))

    return quantize_columns


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
        _find_scales(S, R, lambda i, j: T.Cast("float32", G[i, j]) * F[i], m, n)
        for i in T.serial(m):
            for j in T.serial(n):
                Q[i, j] = T.Cast(
                    "int8",
                    stochastic(
                        T.Cast("float32", G[i, j]) * F[i] * T.reinterpret("float32", R[j]),
                        i,
                        j,
                        n,
                        T.Cast("uint32", seed),
                    ),
                )

    return round_columns


def _to_bf16_and_sum(dtype: str) -> Any:
    @T.prim_func
    def to_bf16_and_sum(g: T.handle, out: T.handle, sums: T.handle, partial: T.handle):
        T.func_attr({"tirx.noalias": True})
        m, n = T.int64(), T.int64()
        G = T.match_buffer(g, (m, n), dtype)
        H = T.match_buffer(out, (m, n), "bfloat16")
        S = T.match_buffer(sums, (n,), "float32")
        P = T.match_buffer(partial, (n,), "float32")
        # Summed in blocks of rows: one running sum over thousands of rows is less accurate than torch's.
        for j in T.serial(n):
            S[j] = T.float32(0)
        for block in T.serial((m + (ROWS_PER_PART - 1)) // ROWS_PER_PART):
            for j in T.serial(n):
                P[j] = T.float32(0)
            for r in T.serial(T.min(T.int64(ROWS_PER_PART), m - block * ROWS_PER_PART)):
                for j in T.serial(n):
                    P[j] = P[j] + T.Cast("float32", G[block * ROWS_PER_PART + r, j])
                    H[block * ROWS_PER_PART + r, j] = _in_bf16(G[block * ROWS_PER_PART + r, j], dtype)
            for j in T.serial(n):
                S[j] = S[j] + P[j]

    return to_bf16_and_sum


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
        for block in T.serial((m + (ROWS_PER_PART - 1)) // ROWS_PER_PART):
            for j in T.serial(n):
                P[j] = T.float32(0)
            for r in T.serial(T.min(T.int64(ROWS_PER_PART), m - block * ROWS_PER_PART)):
                for j in T.serial(n):
                    P[j] = P[j] + T.Cast("float32", G[block * ROWS_PER_PART + r, j])
            for j in T.serial(n):
                S[j] = S[j] + P[j]

    return sum_columns


@T.inline
def add_parts(S: Any, P: Any, parts: Any, n: Any) -> None:
    """Add the partial sums of all parts in order, one thread per column: the second round on a GPU."""
    for c in Threads.rows((n + (THREADS_PER_BLOCK - 1)) // THREADS_PER_BLOCK):
        for t in Threads.threads():
            if column(c, t) < n:
                S[column(c, t)] = T.float32(0)
                for b in T.serial(parts):
                    S[column(c, t)] = S[column(c, t)] + P[b, column(c, t)]


@T.inline
def _find_scales_in_parts(S: Any, R: Any, value: Any, m: Any, n: Any, parts: Any) -> None:
    """Find the scale of each column on a GPU; the inverse scales lie in the first part."""
    for c in Threads.planes((n + (THREADS_PER_BLOCK - 1)) // THREADS_PER_BLOCK):
        for b in Threads.rows(parts):
            for t in Threads.threads():
                if column(c, t) < n:
                    R[b, column(c, t)] = T.int32(SMALLEST_AMAX_BITS)
                    for r in T.serial(T.min(T.int64(ROWS_PER_PART), m - b * ROWS_PER_PART)):
                        R[b, column(c, t)] = T.max(
                            R[b, column(c, t)],
                            magnitude(value(b * ROWS_PER_PART + r, column(c, t))),
                        )
    for c in Threads.rows((n + (THREADS_PER_BLOCK - 1)) // THREADS_PER_BLOCK):
        for t in Threads.threads():
            if column(c, t) < n:
                for b in T.serial(1, parts):
                    R[0, column(c, t)] = T.max(R[0, column(c, t)], R[b, column(c, t)])
                S[column(c, t)] = scale(R[0, column(c, t)])
                R[0, column(c, t)] = T.reinterpret("int32", inverse(R[0, column(c, t)]))


def _quantize_columns_in_parts(dtype: str) -> Any:
    @T.prim_func
    def quantize_columns(x: T.handle, codes: T.handle, scales: T.handle, inverses: T.handle):
        T.func_attr({"tirx.noalias": True})
        m, n, parts = T.int64(), T.int64(), T.int64()
        X = T.match_buffer(x, (m, n), dtype)
        Q = T.match_buffer(codes, (m, n), "int8")
        S = T.match_buffer(scales, (n,), "int32")
        R = T.match_buffer(inverses, (parts, n), "int32")
        _find_scales_in_parts(S, R, lambda i, j: T.Cast("float32", X[i, j]), m, n, parts)
        for i in Threads.rows(m):
            for t in Threads.threads():
                for j in Threads.columns(t, n):
                    Q[i, j] = T.Cast(
                        "int8", nearest(T.Cast("float32", X[i, j]) * T.reinterpret("float32", R[0, j]))
                    )

    return quantize_columns


def _round_columns_in_parts(dtype: str) -> Any:
    @T.prim_func
    def round_columns(
        g: T.handle, factors: T.handle, seed: T.int32, codes: T.handle, scales: T.handle, inverses: T.handle
    ):
        T.func_attr({"tirx.noalias": True})
        m, n, parts = T.int64(), T.int64(), T.int64()
        G = T.match_buffer(g, (m, n), dtype)
        F = T.match_buffer(factors, (m,), "float32")
        Q = T.match_buffer(codes, (m, n), "int8")
        S = T.match_buffer(scales, (n,), "int32")
        R = T.match_buffer(inverses, (parts, n), "int32")
        _find_scales_in_parts(S, R, lambda i, j: T.Cast("float32", G[i, j]) * F[i], m, n, parts)
        for i in Threads.rows(m):
            for t in Threads.threads():
                for j in Threads.columns(t, n):
                    Q[i, j] = T.Cast(
                        "int8",
                        stochastic(
                            T.Cast("float32", G[i, j]) * F[i] * T.reinterpret("float32", R[0, j]),
                            i,
                            j,
                            n,
                            T.Cast("uint32", seed),
                        ),
                    )

    return round_columns


def _to_bf16_and_sum_in_parts(dtype: str) -> Any:
    @T.prim_func
    def to_bf16_and_sum(g: T.handle, out: T.handle, sums: T.handle, partial: T.handle):
        T.func_attr({"tirx.noalias": True})
        m, n, parts = T.int64(), T.int64(), T.int64()
        G = T.match_buffer(g, (m, n), dtype)
        H = T.match_buffer(out, (m, n), "bfloat16")
        S = T.match_buffer(sums, (n,), "float32")
        P = T.match_buffer(partial, (parts, n), "float32")
        for c in Threads.planes((n + (THREADS_PER_BLOCK - 1)) // THREADS_PER_BLOCK):
            for b in Threads.rows(parts):
                for t in Threads.threads():
                    if column(c, t) < n:
                        P[b, column(c, t)] = T.float32(0)
                        for r in T.serial(T.min(T.int64(ROWS_PER_PART), m - b * ROWS_PER_PART)):
                            P[b, column(c, t)] = P[b, column(c, t)] + T.Cast(
                                "float32", G[b * ROWS_PER_PART + r, column(c, t)]
                            )
                            H[b * ROWS_PER_PART + r, column(c, t)] = _in_bf16(
                                G[b * ROWS_PER_PART + r, column(c, t)], dtype
                            )
        add_parts(S, P, parts, n)

    return to_bf16_and_sum


def _sum_columns_in_parts(dtype: str) -> Any:
    @T.prim_func
    def sum_columns(g: T.handle, sums: T.handle, partial: T.handle):
        T.func_attr({"tirx.noalias": True})
        m, n, parts = T.int64(), T.int64(), T.int64()
        G = T.match_buffer(g, (m, n), dtype)
        S = T.match_buffer(sums, (n,), "float32")
        P = T.match_buffer(partial, (parts, n), "float32")
        for c in Threads.planes((n + (THREADS_PER_BLOCK - 1)) // THREADS_PER_BLOCK):
            for b in Threads.rows(parts):
                for t in Threads.threads():
                    if column(c, t) < n:
                        P[b, column(c, t)] = T.float32(0)
                        for r in T.serial(T.min(T.int64(ROWS_PER_PART), m - b * ROWS_PER_PART)):
                            P[b, column(c, t)] = P[b, column(c, t)] + T.Cast(
                                "float32", G[b * ROWS_PER_PART + r, column(c, t)]
                            )
        add_parts(S, P, parts, n)

    return sum_columns
