"""Fused passes over attention scores: softmax with scaling and rounding, and its gradient.

A softmax by rows needs the sum of a row, and a sum of floats does not vectorize, because its order would
change. The terms lie between 0 and 1, so they are added up as integers in units of 2^-30: exact, and in
any order. The exponential is a polynomial, because LLVM has no vectorized one.

Only CPUs run these programs: GPUs have attention in one kernel.
"""

from __future__ import annotations

from typing import Any

from tvm.script import tirx as T

from qsync.backend.casts.tvm.constants import SOFTMAX_UNITS
from qsync.backend.casts.tvm.expressions import INFINITY_BITS, NAN_BITS, bf16, magnitude

_LOG2_E = 1.4426950408889634
# Taylor coefficients of 2^f for |f| <= 1/2, within 2e-7.
_POWERS = (
    1.5403530393381608e-4, 1.3333558146428443e-3, 9.6181291076284772e-3, 5.5504108664821580e-2,
    2.4022650695910071e-1, 6.9314718055994531e-1, 1.0,
)  # fmt: skip


def programs() -> dict[str, Any]:
    """Return attention's programs, by name."""
    found = {}
    for masked in (False, True):
        name = "_masked" if masked else ""
        found[f"softmax{name}"] = _softmax(masked)
        found[f"softmax_gradient{name}"] = _softmax_gradient(masked)
    return found


def _score(high: Any, low: Any, mask: Any, factor: Any, masked: bool) -> Any:
    """Return an attention score: (high + low) factor + mask."""
    value = (T.Cast("float32", high) + T.Cast("float32", low)) * factor
    return value + T.Cast("float32", mask) if masked else value


def _ordered(value: Any) -> Any:
    """Return an integer that orders like its FP32 number, with NaN above all."""
    bits = T.reinterpret("int32", value)
    flipped = T.bitwise_xor(bits, T.bitwise_and(T.shift_right(bits, T.int32(31)), T.int32(0x7FFFFFFF)))
    return T.Select(magnitude(value) > T.int32(INFINITY_BITS), T.int32(NAN_BITS), flipped)


def _largest(ordered: Any, masked: bool) -> Any:
    """Return the number to subtract from a row of scores with this maximum; NaN for Inf.

    For -Inf it is 0 under a mask, which may hide a whole row (weights 0), and NaN without a mask.
    """
    back = T.bitwise_xor(ordered, T.bitwise_and(T.shift_right(ordered, T.int32(31)), T.int32(0x7FFFFFFF)))
    if masked:
        back = T.Select(ordered <= T.int32(-INFINITY_BITS - 1), T.int32(0), back)
    return T.reinterpret("float32", T.Select(ordered >= T.int32(INFINITY_BITS), T.int32(NAN_BITS), back))


def _hidden(unknown: Any) -> Any:
    """Return the weight of a masked key: 0, but NaN in a row that holds NaN or Inf."""
    return bf16(T.Select(unknown, T.reinterpret("float32", T.int32(NAN_BITS)), T.float32(0)))


def _exponential(x: Any) -> Any:
    """Return exp(x) for x <= 0 (or slightly above) within 1e-5; 0 below 2^-125."""
    power = x * T.float32(_LOG2_E)
    held = T.max(power, T.float32(-126))
    whole = T.nearbyint(held)
    fraction = held - whole
    series = T.float32(_POWERS[0])
    for factor in _POWERS[1:]:
        series = series * fraction + T.float32(factor)
    bits = T.reinterpret("int32", series) + T.shift_left(T.Cast("int32", whole), T.int32(23))
    value = T.Select(power > T.float32(-125), T.reinterpret("float32", bits), T.float32(0))
    unknown = magnitude(x) > T.int32(INFINITY_BITS)
    return T.Select(unknown, T.reinterpret("float32", T.int32(NAN_BITS)), value)


def _softmax(masked: bool) -> Any:
    """Compute softmax weights times `keep_factor` in BF16, each row's maximum and sum of exponentials.

    Row i sees the keys up to first + i. Sums are in units of 2^-30.
    """

    @T.prim_func
    def softmax(
        high: T.handle,
        low: T.handle,
        mask: T.handle,
        factor: T.float32,
        first: T.int64,
        keep_factor: T.float32,
        workspace: T.handle,
        weights: T.handle,
        largest: T.handle,
        sums: T.handle,
    ):
        T.func_attr({"tirx.noalias": True})
        b, m, n = T.int64(), T.int64(), T.int64()
        H = T.match_buffer(high, (b, m, n), "bfloat16")
        L = T.match_buffer(low, (b, m, n), "bfloat16")
        M = T.match_buffer(mask, (b, m, n), "bfloat16")
        E = T.match_buffer(workspace, (n,), "float32")
        W = T.match_buffer(weights, (b, m, n), "bfloat16")
        top = T.match_buffer(largest, (b, m), "int32")
        S = T.match_buffer(sums, (b, m), "int64")
        for h, i in T.grid(b, m):
            top[h, i] = T.int32(-2147483648)
            S[h, i] = T.int64(0)
            for j in T.serial(T.min(n, first + i + 1)):
                E[j] = _score(H[h, i, j], L[h, i, j], M[h, i, j], factor, masked)
                top[h, i] = T.max(top[h, i], _ordered(E[j]))
            for j in T.serial(T.min(n, first + i + 1)):
                E[j] = _exponential(E[j] - _largest(top[h, i], masked))
                S[h, i] = S[h, i] + T.Cast("int64", T.Cast("int32", E[j] * T.float32(SOFTMAX_UNITS)))
            for j in T.serial(T.min(n, first + i + 1)):
                W[h, i, j] = bf16(
                    E[j]
                    * (keep_factor * T.float32(SOFTMAX_UNITS) / T.Cast("float32", T.max(S[h, i], T.int64(1))))
                )
            for j in T.serial(n - T.min(n, first + i + 1)):
                W[h, i, T.min(n, first + i + 1) + j] = _hidden(
                    magnitude(_largest(top[h, i], masked)) >= T.int32(INFINITY_BITS)
                )
            top[h, i] = T.reinterpret("int32", _largest(top[h, i], masked))

    return softmax


def _softmax_gradient(masked: bool) -> Any:
    """Recompute the weights; overwrite their gradient dW with the scores' gradient dS in BF16.

    dS = P (keep_factor dW - means)
    """

    @T.prim_func
    def softmax_gradient(
        high: T.handle,
        low: T.handle,
        mask: T.handle,
        factor: T.float32,
        first: T.int64,
        keep_factor: T.float32,
        workspace: T.handle,
        sums: T.handle,
        means: T.handle,
        weights: T.handle,
        gradient: T.handle,
    ):
        T.func_attr({"tirx.noalias": True})
        b, m, n = T.int64(), T.int64(), T.int64()
        H = T.match_buffer(high, (b, m, n), "bfloat16")
        L = T.match_buffer(low, (b, m, n), "bfloat16")
        M = T.match_buffer(mask, (b, m, n), "bfloat16")
        E = T.match_buffer(workspace, (n,), "float32")
        S = T.match_buffer(sums, (b, m), "float32")
        A = T.match_buffer(means, (b, m), "float32")
        W = T.match_buffer(weights, (b, m, n), "bfloat16")
        G = T.match_buffer(gradient, (b, m, n), "bfloat16")
        for h, i in T.grid(b, m):
            for j in T.serial(T.min(n, first + i + 1)):
                E[j] = _exponential(_score(H[h, i, j], L[h, i, j], M[h, i, j], factor, masked) - S[h, i])
                W[h, i, j] = bf16(E[j] * keep_factor)
                G[h, i, j] = bf16(E[j] * (T.Cast("float32", G[h, i, j]) * keep_factor - A[h, i]))
            for j in T.serial(n - T.min(n, first + i + 1)):
                W[h, i, T.min(n, first + i + 1) + j] = _hidden(magnitude(S[h, i]) > T.int32(INFINITY_BITS))
                G[h, i, T.min(n, first + i + 1) + j] = _hidden(
                    (magnitude(S[h, i]) > T.int32(INFINITY_BITS))
                    | (magnitude(A[h, i]) >= T.int32(INFINITY_BITS))
                )

    return softmax_gradient
