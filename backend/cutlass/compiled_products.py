"""Call the compiled CUTLASS library through ctypes, with numbers and addresses."""

from __future__ import annotations

import ctypes
from collections.abc import Mapping
from functools import cache
from pathlib import Path
from typing import Any

from qsync.backend import cuda_build
from qsync.errors import BuildError, UnsupportedError

# Values of products.cu's enum Product, and the family (library) of each. "nt": A (M, K) times B (N, K)
# transposed; "nn": A (M, K) times B (K, N); "tn": A (K, M) transposed times B (K, N).
PRODUCTS = {
    "int8_nt": (0, "int8_gemm"),
    "fp16_nt": (1, "fp16_gemm"),
    "fp16_nn": (2, "fp16_gemm"),
    "fp16_tn": (3, "fp16_gemm"),
    "int8_fprop": (4, "int8_conv"),
    "fp16_fprop": (5, "fp16_conv"),
    "fp16_dgrad": (6, "fp16_conv"),
    "fp16_wgrad": (7, "fp16_conv"),
}
# Values of scaled_output.h's enum OutType, by torch type.
OUT_TYPES = {"float32": 0, "bfloat16": 1, "float16": 2}

_DONE, _UNSUPPORTED = 0, 1
_INTS, _POINTER = ctypes.c_int, ctypes.c_void_p


def _structure(name: str, fields: str) -> type[ctypes.Structure]:
    """Return a ctypes structure with these fields in order; a star marks a pointer."""
    pairs = [(f.lstrip("*"), _POINTER if f.startswith("*") else _INTS) for f in fields.split()]
    return type(name, (ctypes.Structure,), {"_fields_": pairs})


# Mirrors of gemm.h's QsyncGemm and conv.h's QsyncConv, field by field.
_Gemm = _structure(
    "QsyncGemm",
    "m n k slices *a *b lda ldb *out out_type rows_per_scale *alpha *row_scale *column_scale *bias "
    "device *stream",
)
_Conv = _structure(
    "QsyncConv",
    "n h w c k r s p q pad_h pad_w stride_h stride_w dilation_h dilation_w slices *a *b *out out_type "
    "rows_per_scale *alpha *row_scale *column_scale *bias device *stream",
)


class Library:
    """A loaded CUTLASS library; calls return once the work is queued on the stream.

    >>> Library(cuda_build.library("80", ["int8_gemm"])).tiles("int8_nt")
    ('128x128x64/4', '128x256x64/3', '64x64x64/5')
    """

    def __init__(self, path: Path) -> None:
        try:
            self._c = ctypes.CDLL(str(path))
            self._c.qsync_tiles.restype = self._c.qsync_last_error.restype = ctypes.c_char_p
            self._c.qsync_tiles.argtypes = [_INTS]
            for call, structure in ((self._c.qsync_gemm, _Gemm), (self._c.qsync_conv, _Conv)):
                call.argtypes = [_INTS, _INTS, ctypes.POINTER(structure)]
            self.architecture = str(self._c.qsync_architecture())
            texts = {name: self._c.qsync_tiles(number).decode() for name, (number, _) in PRODUCTS.items()}
        except (OSError, AttributeError) as error:
            raise BuildError(
                f"{path} cannot be loaded ({error}): delete the file, and qsync builds it again"
            ) from error
        self._tiles = {name: tuple(text.split(";")) if text else () for name, text in texts.items()}

    def tiles(self, product: str) -> tuple[str, ...]:
        """Return the names of a product's tiles ("128x128x64/4": block, stages); empty if not compiled."""
        return self._tiles[product]

    def gemm(self, product: str, tile: int, arguments: Mapping[str, Any]) -> None:
        """Compute out = scaled(A B); the arguments are gemm.h's, pointers as integers or None.

        Raises UnsupportedError for shapes that the kernels do not support, RuntimeError for CUDA's errors.
        """
        self._finish(self._c.qsync_gemm(PRODUCTS[product][0], tile, ctypes.byref(_Gemm(**arguments))))

    def conv(self, product: str, tile: int, arguments: Mapping[str, Any]) -> None:
        """Compute a product of a convolution; the arguments are conv.h's, the errors `gemm`'s."""
        self._finish(self._c.qsync_conv(PRODUCTS[product][0], tile, ctypes.byref(_Conv(**arguments))))

    def _finish(self, result: int) -> None:
        if result == _DONE:
            return
        reason = self._c.qsync_last_error().decode(errors="replace")
        raise UnsupportedError(reason) if result == _UNSUPPORTED else RuntimeError(reason)


@cache
def _attempt(architecture: str, family: str) -> Library | BuildError:
    """Build and load a library once per process; failures are cached too."""
    try:
        return Library(cuda_build.library(architecture, [family]))
    except BuildError as error:
        return error


def load(architecture: str, family: str) -> Library:
    """Return the library with a family of products for an architecture. Raises BuildError."""
    found = _attempt(architecture, family)
    if isinstance(found, BuildError):
        raise found
    return found


def unavailable(architecture: str, families: tuple[str, ...]) -> str | None:
    """Return why product families are unavailable here; build them if possible, and return None."""
    for family in families:
        found = _attempt(architecture, family)
        if isinstance(found, BuildError):
            return str(found)
    return None
