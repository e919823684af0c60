"""Launch a cast on tensors of a GPU that is not there: a program of its own, which never imports TVM."""

from __future__ import annotations

import ctypes
import math

import tvm_ffi

from qsync.backend.casts import compiled_casts


class DlTensor(ctypes.Structure):
    _fields_ = (
        ("data", ctypes.c_void_p), ("device_type", ctypes.c_int32), ("device_id", ctypes.c_int32),
        ("ndim", ctypes.c_int32), ("code", ctypes.c_uint8), ("bits", ctypes.c_uint8),
        ("lanes", ctypes.c_uint16),
        ("shape", ctypes.POINTER(ctypes.c_int64)), ("strides", ctypes.POINTER(ctypes.c_int64)),
        ("byte_offset", ctypes.c_uint64),
    )  # fmt: skip


class Managed(ctypes.Structure):
    _fields_ = (("tensor", DlTensor), ("context", ctypes.c_void_p), ("deleter", ctypes.c_void_p))


class OnAGpu:
    """What tvm_ffi takes for a tensor on GPU 0, by DLPack; there is no memory behind it."""

    def __init__(self, shape, code, bits):
        strides = [math.prod(shape[i + 1 :]) for i in range(len(shape))]
        sizes = ctypes.c_int64 * len(shape)
        self._kept = sizes(*shape), sizes(*strides)
        tensor = DlTensor(1 << 20, 2, 0, len(shape), code, bits, 1, *self._kept, 0)
        self._managed = Managed(tensor, None, None)

    def __dlpack_device__(self):
        return 2, 0

    def __dlpack__(self, *args, **options):
        capsule = ctypes.pythonapi.PyCapsule_New
        capsule.restype, capsule.argtypes = (
            ctypes.py_object,
            [ctypes.c_void_p, ctypes.c_char_p, ctypes.c_void_p],
        )
        return capsule(ctypes.addressof(self._managed), b"dltensor", None)


if __name__ == "__main__":
    library = compiled_casts.library("80")
    assert library is not None, compiled_casts.note("80")
    given = [OnAGpu((64, 32), 2, 32), OnAGpu((64, 32), 0, 8), OnAGpu((64,), 0, 32)]
    library["quantize_rows_float32"](*map(tvm_ffi.from_dlpack, given))
