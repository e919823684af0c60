"""Load the fused casts of `qsync.backend.casts.tvm`; TVM compiles them once per machine.

Loading needs only `tvm_ffi`, in milliseconds; TVM itself is imported to compile. `note` reports missing
tools: without a linker every process compiles for itself, and without TVM the plain casts run.
"""

from __future__ import annotations

import hashlib
import importlib.metadata
import platform
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache
from pathlib import Path
from typing import Any

from qsync.backend import kernel_cache
from qsync.backend.casts import build_cpu, build_cuda
from qsync.backend.casts.build_process import first_line
from qsync.backend.casts.tvm.constants import ROWS_PER_PART
from qsync.errors import BuildError


class Library(dict[str, Any]):
    """Compiled functions by name, called on torch tensors without a copy.

    `rows_per_part` is the number of rows that a GPU's programs reduce at once where they reduce columns.
    They need memory for the result of every part; a CPU's programs (None) need it for one. On a GPU the
    work is queued on torch's current stream.
    """

    def __init__(self, module: Any, rows_per_part: int | None = None) -> None:
        self._module = module
        self.rows_per_part = rows_per_part

    def __missing__(self, name: str) -> Any:
        self[name] = self._module[name]
        return self[name]

    def partial_shape(self, rows: int, columns: int) -> tuple[int, ...]:
        """Return the shape of the workspace of a reduction of columns."""
        return (columns,) if self.rows_per_part is None else (-(-rows // self.rows_per_part), columns)


def library(architecture: str | None = None) -> Library | None:
    """Return the compiled functions for this processor or a GPU's architecture, if any.

    The first call on a machine compiles them.

    >>> library()["quantize_rows_float32"](x, codes, scales)
    >>> library("80")["quantize_rows_float32"](x.cuda(), codes.cuda(), scales.cuda())
    """
    return _loaded(architecture)[0]


def note(architecture: str | None = None) -> str | None:
    """Return the reason for a missing or recompiled library; None if all is well."""
    return _loaded(architecture)[1]


@cache
def _loaded(architecture: str | None) -> tuple[Library | None, str | None]:
    try:
        with _without_ml_dtypes():
            import tvm_ffi
        facts = _facts()
    except ImportError as error:
        return None, f"casts run in plain torch: TVM is not installed ({error}); pip install apache-tvm"
    if architecture is not None:
        return _loaded_for_gpu(architecture, facts)
    try:
        path = kernel_cache.built("casts", facts | build_cpu.determined_by(), build_cpu.export_once)
        reason = kernel_cache.why_unusable()
        note = f"every process compiles its casts anew: {reason}" if reason else None
        return Library(tvm_ffi.load_module(str(path))), note
    except BuildError as error:
        reason = str(error)
    except Exception as error:  # the loader raises errors of many types
        reason = f"{kernel_cache.folder()} holds casts that cannot be loaded ({first_line(error)}); delete it"
    try:
        return Library(build_cpu.executable().mod), f"every process compiles its casts anew: {reason}"
    except BuildError as error:
        return None, f"casts run in plain torch: {error}"


@contextmanager
def _without_ml_dtypes() -> Iterator[None]:
    """Hide ml_dtypes, whose import takes a second; tvm_ffi reads it only for numpy arrays of its types."""
    if "ml_dtypes" in sys.modules:
        yield
        return
    sys.modules["ml_dtypes"] = None  # type: ignore[assignment]  # so import raises ImportError
    try:
        yield
    finally:
        del sys.modules["ml_dtypes"]


def _loaded_for_gpu(architecture: str, facts: dict[str, str]) -> tuple[Library | None, str | None]:
    try:
        return Library(build_cuda.load(architecture, facts), ROWS_PER_PART), None
    except Exception as error:  # a BuildError, or the loader's
        return None, f"casts run in plain torch on sm_{architecture}: {first_line(error)}"


def _facts() -> dict[str, str]:
    """Return all that determines the compiled code, without importing TVM, which takes seconds."""
    sources = sorted(Path(__file__).parent.glob("tvm/*.py"))
    return {
        "source": hashlib.sha256(b"".join(source.read_bytes() for source in sources)).hexdigest(),
        "tvm": importlib.metadata.version("apache-tvm"),
        "ffi": importlib.metadata.version("apache-tvm-ffi"),
        "machine": platform.machine(),
    }
