"""Draw dropout masks from torch's CPU generator, the Mersenne twister MT19937.

torch draws one number at a time. The recurrence reaches back 227 words or more, so a block of 624 words
vectorizes (Matsumoto and Nishimura, Mersenne Twister, ACM TOMACS 8, 1998). An element takes two words: the
last 21 bits of the first word and the second word form a number below 2^53; the element is kept if it is
below `limit`.

CPUs only: a GPU's generator is counter-based.
"""

from __future__ import annotations

from typing import Any

from tvm.script import tirx as T

from qsync.backend.casts.tvm.constants import TWISTER_WORDS
from qsync.backend.casts.tvm.expressions import narrowed, widened

_FAR = 397  # MT19937's offset m, in words
_NEAR = TWISTER_WORDS - _FAR  # words from the block's end back to the same word
_PAIRS = TWISTER_WORDS // 2


def programs() -> dict[str, Any]:
    """Return the programs, by name."""
    found = {f"dropout_{dtype}": _dropout(dtype) for dtype in ("float32", "bfloat16")}
    return {**found, "draw_kept": _dropout("uint8")}


def _twisted(far: Any, word: Any, after: Any) -> Any:
    """Return the twister's next state word, one block length after `far`."""
    mixed = T.bitwise_or(
        T.bitwise_and(word, T.uint32(0x80000000)), T.bitwise_and(after, T.uint32(0x7FFFFFFF))
    )
    odd = T.Select(T.bitwise_and(after, T.uint32(1)) == T.uint32(1), T.uint32(0x9908B0DF), T.uint32(0))
    return T.bitwise_xor(T.bitwise_xor(far, T.shift_right(mixed, T.uint32(1))), odd)


def _tempered(y: Any) -> Any:
    """Return the random number of a state word (MT19937's tempering)."""
    y = T.bitwise_xor(y, T.shift_right(y, T.uint32(11)))
    y = T.bitwise_xor(y, T.bitwise_and(T.shift_left(y, T.uint32(7)), T.uint32(0x9D2C5680)))
    y = T.bitwise_xor(y, T.bitwise_and(T.shift_left(y, T.uint32(15)), T.uint32(0xEFC60000)))
    return T.bitwise_xor(y, T.shift_right(y, T.uint32(18)))


def _is_kept(first: Any, second: Any, limit: Any) -> Any:
    high, low = T.bitwise_and(first, T.uint32(0x1FFFFF)), T.Cast("uint32", limit)
    top = T.Cast("uint32", T.shift_right(limit, T.int64(32)))
    return (high < top) | ((high == top) & (second < low))


def _dropout(dtype: str) -> Any:
    """Draw the noise of n elements (`factor` if kept, else 0), and multiply x by it.

    `state` holds the generator's words, unused from `start` on; it is advanced by the draws. Without x, write
    bytes of 1 and 0 only.
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
        # For an odd start the first word comes from the end of the block before.
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
