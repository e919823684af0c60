"""Run the loops of a fused cast: in order on a CPU, as blocks of threads on a GPU.

One program text serves both: its loops name planes, rows and columns. On a GPU every plane (the outer index
of three) and every row is a block, and the threads of a block take the columns in turn. A row is reduced in
the memory that a block shares. Compute capability 7.0 suffices.

A CPU's `threads` runs once and leaves no trace in the compiled code.
"""

from __future__ import annotations

from typing import Any

from tvm.script import tirx as T

from qsync.backend.casts.tvm.constants import THREADS_PER_BLOCK


def column(tile: Any, thread: Any) -> Any:
    """Return the column of a thread in a program whose blocks have one column per thread."""
    return tile * THREADS_PER_BLOCK + T.Cast("int64", thread)


class Serial:
    """Loops on a CPU: rows in order, and columns as one loop that vectorizes."""

    @staticmethod
    def planes(size: Any) -> Any:
        """Loop over the first of three dimensions."""
        return T.serial(size)

    @staticmethod
    def rows(size: Any) -> Any:
        """Loop over rows."""
        return T.serial(size)

    @staticmethod
    def threads() -> Any:
        """Loop over the threads of a row."""
        return T.serial(1)

    @staticmethod
    def columns(thread: Any, size: Any) -> Any:
        """Loop over a thread's columns."""
        return T.serial(size)

    @staticmethod
    def multiply_add(x: Any, y: Any, z: Any) -> Any:
        """Return x y + z under a name, rounded once if the processor has fused multiply-add.

        Its effect is declared unknown, because TVM repeats pure expressions wherever they are used.
        """
        return T.bind(T.call_llvm_intrin("float32", "llvm.fmuladd", x, y, z))

    @staticmethod
    def accumulators(results: Any) -> Any:
        """Return the buffer in which the threads of a row reduce: on a CPU the result itself."""
        return results

    @staticmethod
    def index(row: Any, thread: Any) -> Any:
        """Return the index of a thread's accumulator."""
        return row

    @staticmethod
    def result_index(row: Any) -> Any:
        """Return the index at which `maximum` leaves its result."""
        return row

    @staticmethod
    def maximum(accumulators: Any, thread: Any) -> None:
        """Combine the threads' maxima: nothing to do on a CPU."""


class Threads:
    """Loops on a GPU: blockIdx.y over planes (at most 65,535), blockIdx.x over rows.

    threadIdx.x runs over columns.
    """

    @staticmethod
    def planes(size: Any) -> Any:
        """Loop over the first of three dimensions."""
        return T.thread_binding(size, thread="blockIdx.y")

    @staticmethod
    def rows(size: Any) -> Any:
        """Loop over rows."""
        return T.thread_binding(size, thread="blockIdx.x")

    @staticmethod
    def threads() -> Any:
        """Loop over the threads of a row."""
        return T.thread_binding(THREADS_PER_BLOCK, thread="threadIdx.x")

    @staticmethod
    def columns(thread: Any, size: Any) -> Any:
        """Loop over a thread's columns."""
        return T.serial(T.Cast("int64", thread), size, step=T.int64(THREADS_PER_BLOCK))

    @staticmethod
    def multiply_add(x: Any, y: Any, z: Any) -> Any:
        """Return x y + z with one rounding."""
        return T.bind(T.call_extern("float32", "fmaf", x, y, z))

    @staticmethod
    def accumulators(results: Any) -> Any:
        """Return the buffer in which the threads of a row reduce: shared memory."""
        return T.alloc_buffer((THREADS_PER_BLOCK,), results.dtype, scope="shared")

    @staticmethod
    def index(row: Any, thread: Any) -> Any:
        """Return the index of a thread's accumulator."""
        return thread

    @staticmethod
    def result_index(row: Any) -> Any:
        """Return the index at which `maximum` leaves its result."""
        return 0

    @staticmethod
    def maximum(accumulators: Any, thread: Any) -> None:
        """Reduce the threads' maxima by halving; every thread may read the result afterwards."""
        half = THREADS_PER_BLOCK // 2
        while half:
            T.evaluate(T.tvm_storage_sync("shared"))
            with T.If(thread < half), T.Then():
                T.buffer_store(
                    accumulators, T.max(accumulators[thread], accumulators[thread + half]), [thread]
                )
            half //= 2
        T.evaluate(T.tvm_storage_sync("shared"))
