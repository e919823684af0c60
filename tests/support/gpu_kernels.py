"""A GPU's kernels on CPU tensors that say they are a GPU's, and a record of when the host reads a number.

What reads a number from a tensor, or makes a shape that depends on one, makes the host wait on a GPU.
"""

from __future__ import annotations

from contextlib import nullcontext
from types import SimpleNamespace

import torch

from qsync import backend
from qsync.backend.casts import cast_ops
from qsync.backend.compressed_saves import deferred_flags
from qsync.backend.cutlass import products
from qsync.backend.cutlass.tuning import LaunchSetting
from qsync.backend.selection.kernel_candidates import candidates
from qsync.backend.selection.kernel_selection import Kernels
from qsync.errors import UnsupportedError

GPU = torch.device("cuda", 0)
H100 = (9, 0)
_WAITING = {
    f"aten::{name}" for name in ("_local_scalar_dense", "nonzero", "masked_select", "equal", "_unique2")
}


class Waits:
    """Records, in a block, each operator for which the host needs a number of a tensor."""

    def __enter__(self):
        self._profiler = torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU])
        self._profiler.__enter__()
        return self

    def __exit__(self, *error):
        self._profiler.__exit__(*error)
        self.found = [event.name for event in self._profiler.events() if event.name in _WAITING]


class OfAGpu(Kernels):
    """The first kernel of each kind that a GPU has, or the last; none is timed."""

    def __init__(self, which: int) -> None:
        super().__init__(GPU)
        self._which = which

    def _choose(self, kind, precision):
        usable = [one.kernel for one in candidates(kind, precision, GPU) if one.kernel]
        if not usable:
            raise UnsupportedError(f"no {kind} in {precision}")
        return usable[self._which], None


def _on_its_way(answer):
    """What `deferred_flags._sent` returns, without a GPU."""
    return bool(answer.numpy()), SimpleNamespace(synchronize=lambda: None)


class Nothing:
    """A compiled library whose products are what lay in memory."""

    def tiles(self, product):
        return ("128x128x64/4",)

    def gemm(self, product, tile, arguments):
        pass

    conv = gemm


def pretend_gpu(monkeypatch, which):
    """Return an H100's kernels: the first of each kind (0: torch's, if there is one) or the last."""
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda *_: H100)
    monkeypatch.setattr(torch.Tensor, "is_cuda", property(lambda tensor: True), raising=False)
    monkeypatch.setattr(cast_ops, "_seed", lambda: 0)  # of the host's own generator
    monkeypatch.setattr(deferred_flags, "_sent", _on_its_way)
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: False)
    monkeypatch.setattr(products, "load", lambda *_: Nothing())
    monkeypatch.setattr(products, "architecture", lambda device: "90")
    monkeypatch.setattr("qsync.backend.cutlass.compiled_products.unavailable", lambda *_: None)
    monkeypatch.setattr(products, "_on", lambda device: nullcontext())
    monkeypatch.setattr(products, "_stream", lambda device: 0)
    monkeypatch.setattr(products, "_setting", lambda call, inner: LaunchSetting("128x128x64/4", 1))
    kernels = OfAGpu(which)
    monkeypatch.setattr(backend, "select", lambda *_: kernels, raising=False)
    return kernels
