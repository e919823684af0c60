"""The fused casts with GELU or ReLU: dequantize and apply it, and compute the gradient.

GELU is max(x, 0) - |x| Phi(-|x|), and Phi(-z) is exp(-z^2 / 2) times a smooth function of z that a
polynomial follows (for the tanh form 1 / (1 + exp(2 u(z)))). No two nearly equal numbers are subtracted: an
FP32 result is within 8 units in the last place of the exact one (in the tanh form 16 down to x = -4, 80 down
to -8). torch's x (1 + erf(x)) / 2 loses every digit below x = -5.5. Below x = -12.5 it stays constant at
-5e-35 (tanh: -9.75, -4e-35). A BF16 result is the nearest except for ties. No library is called: additions,
multiplications and a division vectorize.
"""

from __future__ import annotations

import math
from typing import Any, NamedTuple

from tvm.script import tirx as T

from qsync.backend.casts.tvm.columns import add_parts
from qsync.backend.casts.tvm.constants import ROWS_PER_PART, THREADS_PER_BLOCK
from qsync.backend.casts.tvm.expressions import (
    EXP,
    EXP_BF16,
    bf16,
    exp_negative,
    magnitude,
    narrowed,
    polynomial,
    widened,
)
from qsync.backend.casts.tvm.schedules import Serial, Threads, column

ACTIVATIONS = ("gelu", "gelu_tanh", "relu")

# |x| is clipped here: soon beyond, Phi(-|x|) is a subnormal number, which is slow.
_END = {"gelu": 12.5, "gelu_tanh": 9.75}
# coefficients of 2 u(z) = z (a + b z^2) in GELU's tanh form
_TANH_A = 2 * math.sqrt(2 / math.pi)
_TANH_B = 0.044715 * _TANH_A
_DENSITY = 1 / math.sqrt(2 * math.pi)


class _Digits(NamedTuple):
    """Polynomial coefficients for one accuracy: exp, and Phi(-z) exp(z^2 / 2) = t (c0 + c1 t + ...).

    t is 1 / (1 + s z). On [0, 13.2], fitted like EXP.
    """

    powers: tuple[float, ...]
    spread: float
    tail: tuple[float, ...]


_DIGITS = {
    "float32": _Digits(
        EXP,
        0.27,
        (0.1077190563082695, 0.10756845772266388, 0.10163920372724533, 0.07268193364143372,
         0.10641787201166153, -0.06726907938718796, 0.16816182434558868, -0.12573055922985077,
         0.028811296448111534),
    ),  # relative error within 2.3e-8
    "bfloat16": _Digits(
        EXP_BF16,
        0.3,
        (0.12010368704795837, 0.11342976242303848, 0.14542968571186066, -0.019231406971812248,
         0.2180320918560028, -0.0777602568268776),
    ),  # relative error within 7.1e-6
}  # fmt: skip


def programs(loops: Any) -> dict[str, Any]:
    """Return the programs with an activation, by name."""
    found: dict[str, Any] = {}
    gradient = _gradient_in_parts if loops is Threads else _gradient
    for name in ACTIVATIONS:
        exact, rounded = (curves(dtype, loops)[name] for dtype in _DIGITS)
        for dtype, curve in (("float32", exact), ("bfloat16", rounded)):
            program = _relu(loops, dtype, curve) if name == "relu" else _gelu(loops, dtype, curve)
            found[f"dequantize_{name}_{dtype}"] = program
            found[f"{name}_gradient_{dtype}_bfloat16"] = gradient(curve, dtype, "bfloat16")
        found[f"{name}_gradient_float32_float32"] = gradient(exact, "float32", "float32")
    if loops is Serial:
        found["gelu_tanh_bfloat16"] = _activation(curves("bfloat16")["gelu_tanh"])
    return found


def curves(dtype: str, loops: Any = Serial) -> dict[str, Curve]:
    """Return the activations by name, as accurate as results in `dtype` can be."""
    return {name: Curve(name, _DIGITS[dtype], loops.multiply_add) for name in ACTIVATIONS}


class Curve(NamedTuple):
    """An activation to compute: its name, its accuracy, and the multiply-add."""

    name: str
    digits: _Digits
    multiply_add: Any

    def parts(self, x: Any) -> tuple[Any, Any, Any]:
        """Return clipped |x|, Phi(-|x|), and |x| times the density there. NaN stays NaN."""
        size, end = T.reinterpret("float32", magnitude(x)), T.float32(_END[self.name])
        z = T.Select(size > end, end, size)
        add = self.multiply_add
        if self.name == "gelu":
            t = T.float32(1) / add(T.float32(self.digits.spread), z, T.float32(1))
            e = exp_negative(T.float32(0.5) * z, z, self.digits.powers, add)
            return z, e * (t * polynomial(t, self.digits.tail, add)), e * (T.float32(_DENSITY) * z)
        e = exp_negative(z, add(T.float32(_TANH_B) * z, z, T.float32(_TANH_A)), self.digits.powers, add)
        tail = e / (T.float32(1) + e)
        rising = add(T.float32(3 * _TANH_B) * z, z, T.float32(_TANH_A))
        return z, tail, tail * (T.float32(1) - tail) * (rising * z)

    def of(self, x: Any) -> Any:
        """Return the activation of x."""
        positive = T.Select(x < T.float32(0), T.float32(0), x)  # NaN stays
        if self.name == "relu":
            return positive
        z, tail, _ = self.parts(x)
        return positive - z * tail

    def gradient(self, g: Any, saved: Any) -> Any:
        """Return the gradient of x from that of f(x) and the saved x (gelu) or f(x) (relu).

        gelu' is Phi(-|x|) - |x| phi(x) left of 0, and 1 minus that right of it.
        """
        if self.name == "relu":
            # Mask by bits: a select between loads becomes a branch, mispredicted half of the time.
            mask = T.Select(saved <= T.float32(0), T.int32(0), T.int32(-1))
            return T.reinterpret("float32", T.bitwise_and(T.reinterpret("int32", g), mask))
        _, tail, rising = self.parts(saved)
        left = tail - rising
        return g * T.Select(saved > T.float32(0), T.float32(1) - left, left)


def _scaled(total: Any, row: Any, column: Any, bias: Any) -> Any:
    return T.bind(T.Cast("float32", total) * row * column + bias)


def _gelu(loops: Any, dtype: str, curve: Curve) -> Any:
    """Write GELU's result, and x for backward. In FP32 x overwrites the sums."""
    if dtype == "float32":

        @T.prim_func
        def dequantize_gelu(sums: T.handle, rows: T.handle, columns: T.handle, bias: T.handle, out: T.handle):
            m, n = T.int64(), T.int64()
            A = T.match_buffer(sums, (m, n), "int32")
            R = T.match_buffer(rows, (m,), "float32")
            C = T.match_buffer(columns, (n,), "float32")
            B = T.match_buffer(bias, (n,), "float32")
            Y = T.match_buffer(out, (m, n), dtype)
            T.func_attr({"tirx.noalias": True})
            for i in loops.rows(m):
                for t in loops.threads():
                    for j in loops.columns(t, n):
                        x = T.meta_var(_scaled(A[i, j], R[i], C[j], B[j]))
                        A[i, j] = T.reinterpret("int32", x)
                        Y[i, j] = curve.of(x)

    else:

        @T.prim_func
        def dequantize_gelu(
            sums: T.handle,
            rows: T.handle,
            columns: T.handle,
            bias: T.handle,
            saved: T.handle,
            out: T.handle,
        ):
            m, n = T.int64(), T.int64()
            A = T.match_buffer(sums, (m, n), "int32")
            R = T.match_buffer(rows, (m,), "float32")
            C = T.match_buffer(columns, (n,), "float32")
            B = T.match_buffer(bias, (n,), "float32")
            H = T.match_buffer(saved, (m, n), dtype)
            Y = T.match_buffer(out, (m, n), dtype)
            T.func_attr({"tirx.noalias": True})
            for i in loops.rows(m):
                for t in loops.threads():
                    for j in loops.columns(t, n):
                        H[i, j] = bf16(_scaled(A[i, j], R[i], C[j], B[j]))
                        # GELU of the rounded x, as in torch.
                        x = T.meta_var(T.bind(widened(H[i, j], dtype)))
                        Y[i, j] = bf16(curve.of(x))

    return dequantize_gelu


def _relu(loops: Any, dtype: str, curve: Curve) -> Any:
    """Write ReLU's result; in FP32 it overwrites the sums."""
    if dtype == "float32":

        @T.prim_func
        def dequantize_relu(sums: T.handle, rows: T.handle, columns: T.handle, bias: T.handle):
            m, n = T.int64(), T.int64()
            A = T.match_buffer(sums, (m, n), "int32")
            R = T.match_buffer(rows, (m,), "float32")
            C = T.match_buffer(columns, (n,), "float32")
            B = T.match_buffer(bias, (n,), "float32")
            T.func_attr({"tirx.noalias": True})
            for i in loops.rows(m):
                for t in loops.threads():
                    for j in loops.columns(t, n):
                        A[i, j] = T.reinterpret("int32", curve.of(_scaled(A[i, j], R[i], C[j], B[j])))

    else:

        @T.prim_func
        def dequantize_relu(sums: T.handle, rows: T.handle, columns: T.handle, bias: T.handle, out: T.handle):
            m, n = T.int64(), T.int64()
            A = T.match_buffer(sums, (m, n), "int32")
            R = T.match_buffer(rows, (m,), "float32")
            C = T.match_buffer(columns, (n,), "float32")
            B = T.match_buffer(bias, (n,), "float32")
            Y = T.match_buffer(out, (m, n), dtype)
            T.func_attr({"tirx.noalias": True})
            for i in loops.rows(m):
                for t in loops.threads():
                    for j in loops.columns(t, n):
                        Y[i, j] = bf16(curve.of(_scaled(A[i, j], R[i], C[j], B[j])))

    return dequantize_relu


def _activation(curve: Curve) -> Any:
    """Apply an activation to BF16 values, on a CPU."""

    @T.prim_func
    def activation(x: T.handle, out: T.handle):
        T.func_attr({"tirx.noalias": True})
        m, n = T.int64(), T.int64()
        X = T.match_buffer(x, (m, n), "bfloat16")
        Y = T.match_buffer(out, (m, n), "bfloat16")
        for i, j in T.grid(m, n):
            Y[i, j] = bf16(curve.of(T.bind(widened(X[i, j], "bfloat16"))))

    return activation


def _gradient(curve: Curve, dtype: str, out_dtype: str) -> Any:
    """Write an activation's gradient in another type, and its column sums, in blocks of rows (CPU)."""

    @T.prim_func
    def gradient(g: T.handle, saved: T.handle, out: T.handle, sums: T.handle, partial: T.handle):
        T.func_attr({"tirx.noalias": True})
        m, n = T.int64(), T.int64()
        G = T.match_buffer(g, (m, n), dtype)
        K = T.match_buffer(saved, (m, n), dtype)
        H = T.match_buffer(out, (m, n), out_dtype)
        S = T.match_buffer(sums, (n,), "float32")
        P = T.match_buffer(partial, (n,), "float32")
        for j in T.serial(n):
            S[j] = T.float32(0)
        for block in T.serial((m + (ROWS_PER_PART - 1)) // ROWS_PER_PART):
            for j in T.serial(n):
                P[j] = T.float32(0)
            for r in T.serial(T.min(T.int64(ROWS_PER_PART), m - block * ROWS_PER_PART)):
                for j in T.serial(n):
                    k = T.meta_var(T.bind(widened(K[block * ROWS_PER_PART + r, j], dtype)))
                    h = T.meta_var(
                        T.bind(curve.gradient(T.bind(widened(G[block * ROWS_PER_PART + r, j], dtype)), k))
                    )
                    P[j] = P[j] + h
                    H[block * ROWS_PER_PART + r, j] = narrowed(h, out_dtype)
            for j in T.serial(n):
                S[j] = S[j] + P[j]

    return gradient


def _gradient_in_parts(curve: Curve, dtype: str, out_dtype: str) -> Any:
    """Write an activation's gradient and column sums on a GPU.

    A thread sums 64 rows of a column; a second round adds the parts.
    """

    @T.prim_func
    def gradient(g: T.handle, saved: T.handle, out: T.handle, sums: T.handle, partial: T.handle):
        T.func_attr({"tirx.noalias": True})
        m, n, parts = T.int64(), T.int64(), T.int64()
        G = T.match_buffer(g, (m, n), dtype)
        K = T.match_buffer(saved, (m, n), dtype)
        H = T.match_buffer(out, (m, n), out_dtype)
        S = T.match_buffer(sums, (n,), "float32")
        P = T.match_buffer(partial, (parts, n), "float32")
        for c in Threads.planes((n + (THREADS_PER_BLOCK - 1)) // THREADS_PER_BLOCK):
            for b in Threads.rows(parts):
                for t in Threads.threads():
                    if column(c, t) < n:
                        P[b, column(c, t)] = T.float32(0)
                        for r in T.serial(T.min(T.int64(ROWS_PER_PART), m - b * ROWS_PER_PART)):
                            k = T.meta_var(T.bind(widened(K[b * ROWS_PER_PART + r, column(c, t)], dtype)))
                            h = T.meta_var(
                                T.bind(
                                    curve.gradient(
                                        T.bind(widened(G[b * ROWS_PER_PART + r, column(c, t)], dtype)), k
                                    )
                                )
                            )
                            P[b, column(c, t)] = P[b, column(c, t)] + h
                            H[b * ROWS_PER_PART + r, column(c, t)] = narrowed(h, out_dtype)
        add_parts(S, P, parts, n)

    return gradient
