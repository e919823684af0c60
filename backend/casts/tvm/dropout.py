"""Dropout by the random numbers of torch's generator on CPUs, the Mersenne twister MT19937.

torch draws one number after the other. The recurrence reaches back 227 words or more, so a block of 624 words
vectorizes (Matsumoto and Nishimura, Mersenne Twister, ACM TOMACS 8, 1998). An element takes two words: the
first one's last 21 bits and the second are a number below 2^53, and below `limit` the element is kept.

Only CPUs run these programs: a GPU's generator counts.
"""

from __future__ import annotations

from typing import Any

from tvm.script import tirx as T

from qsync.backend.casts.tvm.constants import TWISTER_WORDS
from qsync.backend.casts.tvm.expressions import narrowed, widened

_FAR = 397  # words ahead
_NEAR = TWISTER_WORDS - _FAR  # words back
_PAIRS = TWISTER_WORDS // 2


def programs() -> dict[str, Any]:
    """Return the programs, by name."""
    found = {f"dropout_{dtype}": _dropout(dtype) for dtype in ("float32", "bfloat16")}
    return {**found, "draw_kept": _dropout("uint8")}


def _twisted(far: Any, word: Any, after: Any) -> Any:
    """Return the word that follows `far` by a block's length."""
    mixed = T.bitwise_or(
        T.bitwise_and(word, T.uint32(0x80000000)), T.bitwise_and(after, T.uint32(0x7FFFFFFF))
    )
    odd = T.Select(T.bitwise_and(after, T.uint32(1)) == T.uint32(1), T.uint32(0x9908B0DF), T.uint32(0))
    return T.bitwise_xor(T.bitwise_xor(far, T.shift_right(mixed, T.uint32(1))), odd)


def _tempered(y: Any) -> Any:
    """Return the random word that a word of the state stands for."""
    y = T.bitwise_xor(y, T.shift_right(y, T.uint32(11)))
    y = T.bitwise_xor(y, T.bitwise_and(T.shift_left(y, T.uint32(7)), T.uint32(0x9D2C5680)))
    y = T.bitwise_xor(y, T.bitwise_and(T.shift_left(y, T.uint32(15)), T.uint32(0xEFC60000)))
    return T.bitwise_xor(y, T.shift_right(y, T.uint32(18)))


def _is_kept(first: Any, second: Any, limit: Any) -> Any:
    high, low = T.bitwise_and(first, T.uint32(0x1FFFFF)), T.Cast("uint32", limit)
    top = T.Cast("uint32", T.shift_right(limit, T.int64(32)))
    return (high < top) | ((high == top) & (second < low))


def _dropout(dtype: str) -> Any:
    """Draw the noise of n elements, `factor` where one is kept and 0 elsewhere, and multiply x by it.

    `state` holds the words of the generator's state, of which those from `start` on are unused. It becomes
    what it is after the draws. Bytes are noise alone, 1 and 0.
    """

    def noise_of(kept: Any, factor: Any) -> Any:
        if dtype == "uint8":
            return T.Cast("uint8", kept)
        value = T.Select(kept, factor, T.float32(0))
        return narrowed(value, dtype)

    def product(x: Any, kept: Any, factor: Any) -> Any:
        if dtype == "uint8":
            return noise_of(kept, factor)
        value = widened(x, dtype) * T.Select(kept, factor, T.float32(0))  # NaN times 0 is NaN
        return narrowed(value, dtype)

    @T.prim_func
    def dropout(
        state: T.handle,
        start: T.int64,
        limit: T.int64,
        factor: T.float32,
        words: T.handle,
        tempered: T.handle,
        x: T.handle,
        noise: T.handle,
        out: T.handle,
    ):
        T.func_attr({"tirx.noalias": True})
        n = T.int64()
        G = T.match_buffer(state, (TWISTER_WORDS,), "int64")
        S = T.match_buffer(words, (TWISTER_WORDS,), "uint32")
        # Of an odd start the first word stands before the block: the last of the block before.
        W = T.match_buffer(tempered, (TWISTER_WORDS + 2,), "uint32")
        X = T.match_buffer(x, (n,), dtype)
        N = T.match_buffer(noise, (n,), dtype)
        Y = T.match_buffer(out, (n,), dtype)
        for i in T.serial(TWISTER_WORDS):
            S[i] = T.Cast("uint32", G[i])
        W[TWISTER_WORDS] = T.uint32(0)
        for b in T.serial(((start + 1) // 2 + n + (_PAIRS - 1)) // _PAIRS):
            if b > 0:
                for i in T.serial(_NEAR):
                    S[i] = _twisted(S[i + _FAR], S[i], S[i + 1])
                for i in T.serial(_FAR - 1):
                    S[i + _NEAR] = _twisted(S[i], S[i + _NEAR], S[i + (_NEAR + 1)])
                S[TWISTER_WORDS - 1] = _twisted(S[_FAR - 1], S[TWISTER_WORDS - 1], S[0])
            W[0] = W[TWISTER_WORDS]
            for i in T.serial(TWISTER_WORDS):
                W[start % 2 + i] = _tempered(S[i])
            for k in T.serial(
                T.max(
                    T.int64(0),
                    T.min(T.int64(_PAIRS), (start + 1) // 2 + n - b * _PAIRS)
                    - T.max(T.int64(0), (start + 1) // 2 - b * _PAIRS),
                )
            ):
                N[T.max(T.int64(0), b * _PAIRS - (start + 1) // 2) + k] = noise_of(
                    _is_kept(
                        W[2 * (T.max(T.int64(0), (start + 1) // 2 - b * _PAIRS) + k)],
                        W[2 * (T.max(T.int64(0), (start + 1) // 2 - b * _PAIRS) + k) + 1],
                        limit,
                    ),
                    factor,
                )
                Y[T.max(T.int64(0), b * _PAIRS - (start + 1) // 2) + k] = product(
                    X[T.max(T.int64(0), b * _PAIRS - (start + 1) // 2) + k],
                    _is_kept(
                        W[2 * (T.max(T.int64(0), (start + 1) // 2 - b * _PAIRS) + k)],
                        W[2 * (T.max(T.int64(0), (start + 1) // 2 - b * _PAIRS) + k) + 1],
                        limit,
                    ),
                    factor,
                )
        for i in T.serial(TWISTER_WORDS):
            G[i] = T.Cast("int64", S[i])

    return dropout
