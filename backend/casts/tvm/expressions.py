"""Elementwise expressions of the fused casts, shared by CPUs and GPUs.

Scales are integers with the bits of FP32 numbers: as integers, magnitudes have the same order and NaN is the
largest.
"""

from __future__ import annotations

import math
import struct
from typing import Any

from tvm.script import tirx as T

from qsync.backend.casts.tvm.constants import SMALLEST_AMAX

SMALLEST_AMAX_BITS = int.from_bytes(struct.pack("<f", SMALLEST_AMAX), "little")
INFINITY_BITS, NAN_BITS = 0x7F800000, 0x7FC00000
_ONE_127TH = float.fromhex("0x1.020408p-7")  # rounded as in FP32
# log 2 in two parts: the first times a whole number below 2^15 is exact.
_LOG_2 = (0.693359375, math.log(2) - 0.693359375)
# Coefficients of exp(r) for |r| <= log(2) / 2, within 2e-9 and 3e-6: weighted least squares, reweighted until
# the largest relative error was least.
EXP = (1.0, 1.0, 0.49999991059303284, 0.16666419804096222, 0.04166822507977486, 0.008374826982617378,
       0.0013836848083883524)  # fmt: skip
EXP_BF16 = (
    0.9999992847442627,
    0.9999634027481079,
    0.5000436305999756,
    0.16790930926799774,
    0.041458118706941605,
)
# 1.5 * 2^23 + 127: adding it to a small number leaves the nearest whole number, plus an exponent's bias, in
# the last bits.
_ROUNDING = 12583039.0


def magnitude(value: Any) -> Any:
    """Return the bits of |value|, integers in the order of magnitudes with NaN the largest."""
    return T.bitwise_and(T.reinterpret("int32", value), T.int32(0x7FFFFFFF))


def scale(bits: Any) -> Any:
    """Return the bits of the scale max |x| / 127, from those of max |x|; NaN for Inf or NaN."""
    amax = T.reinterpret("float32", bits)
    scale = T.reinterpret("int32", amax * T.float32(_ONE_127TH))
    return T.Select(bits >= T.int32(INFINITY_BITS), T.int32(NAN_BITS), scale)


def inverse(bits: Any) -> Any:
    """Return 127 / max |x|, rounded twice as torch rounds it."""
    return (T.float32(1) / T.reinterpret("float32", bits)) * T.float32(127)


def nearest(value: Any) -> Any:
    """Return the nearest whole number."""
    return T.Cast("int32", T.nearbyint(value))


def stochastic(value: Any, i: Any, j: Any, columns: Any, seed: Any) -> Any:
    """Return floor(value + u), u uniform on 2^24 points of [0, 1), by a hash.

    The result lies in [-127, 127]: 127 + u may round up to 128, which in eight bits is -128, and a row's
    largest quotient may exceed 127 by rounding. The hash of position and seed is the finalizer of MurmurHash3
    (public domain): a few integer operations, which vectorize, unlike a sequential generator.
    """
    h = T.Cast("uint32", i * columns + j) * T.uint32(0x9E3779B1) + seed
    h = T.bitwise_xor(h, T.shift_right(h, T.uint32(16))) * T.uint32(0x85EBCA6B)
    h = T.bitwise_xor(h, T.shift_right(h, T.uint32(13))) * T.uint32(0xC2B2AE35)
    h = T.bitwise_xor(h, T.shift_right(h, T.uint32(16)))
    uniform = T.Cast("float32", T.Cast("int32", T.shift_right(h, T.uint32(8)))) * T.float32(2**-24)
    return T.max(T.min(T.Cast("int32", T.floor(value + uniform)), T.int32(127)), T.int32(-127))


def exp_negative(x: Any, y: Any, powers: tuple[float, ...], multiply_add: Any) -> Any:
    """Return exp(-x y) for 0 <= x y <= 87.3, where it is a normal number.

    2^n p(r), n a whole number: Cody and Waite, Software Manual for the Elementary Functions, chapter 6. x
    y itself is never rounded if `multiply_add` rounds once.
    """
    shifted = multiply_add(x * y, T.float32(-1 / math.log(2)), T.float32(_ROUNDING))
    n = shifted - T.float32(_ROUNDING)
    first = multiply_add(-x, y, n * T.float32(-_LOG_2[0]))
    power = polynomial(multiply_add(n, T.float32(-_LOG_2[1]), first), powers, multiply_add)
    return power * T.reinterpret("float32", T.shift_left(T.reinterpret("int32", shifted), T.int32(23)))


def polynomial(x: Any, coefficients: tuple[float, ...], multiply_add: Any) -> Any:
    """Return c0 + c1 x + c2 x^2 + ..., evaluated by pairs (Estrin's scheme) for parallelism."""
    terms: list[Any] = [T.float32(coefficient) for coefficient in coefficients]
    while len(terms) > 1:
        pairs = [multiply_add(high, x, low) for low, high in zip(terms[::2], terms[1::2], strict=False)]
        terms = pairs + terms[len(pairs) * 2 :]
        x = x * x
    return terms[0]


def widened(value: Any, dtype: str) -> Any:
    """Return a buffer's element in FP32; BF16 through its bits, since TVM would bind it as an integer."""
    if dtype == "float32":
        return value
    bits = T.Cast("uint32", T.reinterpret("uint16", value))
    return T.reinterpret("float32", T.shift_left(bits, T.uint32(16)))


def narrowed(value: Any, dtype: str) -> Any:
    """Return an FP32 number converted to `dtype`, FP32 or BF16."""
    return value if dtype == "float32" else bf16(value)


def bf16(value: Any) -> Any:
    """Return an FP32 number in BF16; NaN becomes 0x7FC00000, since 0x7FFFFFFF would round to -0."""
    # NaN is found by its bits: TVM simplifies `value == value` to true.
    unknown = magnitude(value) > T.int32(INFINITY_BITS)
    bits = T.Select(unknown, T.int32(NAN_BITS), T.reinterpret("int32", value))
    return T.Cast("bfloat16", T.reinterpret("float32", bits))
