"""How the loops of a fused cast run: one after the other on a CPU, as blocks of threads on a GPU.

A program asks for its loops by what they run over, and its text serves both. On a GPU every plane (the outer
index of three) and every row is a block, the threads of a block take the columns in turn, and what a row
reduces to passes through the memory that a block shares: nothing that compute capability 7.0 lacks.

Both kinds are plain loops to a CPU: `threads` runs once and leaves nothing behind in what is compiled.
"""

from __future__ import annotations

from typing import Any

from tvm.script import tirx as T

THREADS = 256  # of a block: a power of two
ROWS = 64  # that one thread reduces, in programs over columns


def column(tile: Any, thread: Any) -> Any:
    """The column of a thread where every block has as many as threads."""
    return tile * THREADS + T.Cast("int64", thread)


class Serial:
    """A CPU: rows in order, and columns as one loop that vectorizes."""

    @staticmethod
    def planes(size: Any) -> Any:
        return T.serial(size)

    @staticmethod
    def rows(size: Any) -> Any:
        return T.serial(size)

    @staticmethod
    def threads() -> Any:
        return T.serial(1)

    @staticmethod
    def columns(thread: Any, size: Any) -> Any:
        return T.serial(size)

    @staticmethod
    def multiply_add(x: Any, y: Any, z: Any) -> Any:
        """X y + z, rounded once where the processor can, under a name.

        A call of unknown effect: TVM writes out again, wherever it is used, what it knows to be pure.
        """
        return T.bind(T.call_llvm_intrin("float32", "llvm.fmuladd", x, y, z))

    @staticmethod
    def room(results: Any) -> Any:
        """Where the threads of a row reduce: in the results themselves."""
        return results

    @staticmethod
    def own(row: Any, thread: Any) -> Any:
        """A thread's place in the room."""
        return row

    @staticmethod
    def top(row: Any) -> Any:
        """The place of what `maximum` found."""
        return row

    @staticmethod
    def maximum(room: Any, thread: Any) -> None:
        """Brings the threads' maxima together: there is one."""


class Threads:
    """A GPU: blockIdx.y over planes (65,535 at most), blockIdx.x over rows, threadIdx.x over columns."""

    @staticmethod
    def planes(size: Any) -> Any:
        return T.thread_binding(size, thread="blockIdx.y")

    @staticmethod
    def rows(size: Any) -> Any:
        return T.thread_binding(size, thread="blockIdx.x")

    @staticmethod
    def threads() -> Any:
        return T.thread_binding(THREADS, thread="threadIdx.x")

    @staticmethod
    def columns(thread: Any, size: Any) -> Any:
        return T.serial(T.Cast("int64", thread), size, step=T.int64(THREADS))

    @staticmethod
    def multiply_add(x: Any, y: Any, z: Any) -> Any:
        return T.bind(T.call_extern("float32", "fmaf", x, y, z))

    @staticmethod
    def room(results: Any) -> Any:
        return T.alloc_buffer((THREADS,), results.dtype, scope="shared")

    @staticmethod
    def own(row: Any, thread: Any) -> Any:
        return thread

    @staticmethod
    def top(row: Any) -> Any:
        return 0

    @staticmethod
    def maximum(room: Any, thread: Any) -> None:
        """Halves the threads until one holds the maximum; every thread may read it afterwards."""
        half = THREADS // 2
        while half:
            T.evaluate(T.tvm_storage_sync("shared"))
            with T.If(thread < half), T.Then():
                T.buffer_store(room, T.max(room[thread], room[thread + half]), [thread])
            half //= 2
        T.evaluate(T.tvm_storage_sync("shared"))
