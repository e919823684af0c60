"""Test what this torch's oneDNN computes exactly on this processor."""

from __future__ import annotations

from functools import cache

import torch

from qsync.backend.devices.kernel_timing import apart


def has_onednn() -> bool:
    """Return whether this build of torch has oneDNN."""
    built = bool(torch.backends.mkldnn.is_available())  # type: ignore[no-untyped-call]
    return built and hasattr(torch.ops.onednn, "qconv_pointwise")


@cache
def sums_int8_exactly() -> bool:
    """Return whether oneDNN's INT8 convolutions are exact, tried outside of any trace.

    On processors without VNNI they saturate sums of two products at 16 bits.
    """
    return has_onednn() and apart(_sums_largest_codes)


def _sums_largest_codes() -> bool:
    images = torch.full((1, 16, 1, 1), 255, dtype=torch.uint8)
    filters = torch.full((16, 16, 1, 1), 127, dtype=torch.int8)
    one, zero, once = torch.ones(1), torch.zeros(1, dtype=torch.int64), ([1, 1], [0, 0], [1, 1], 1)
    packed = torch.ops.onednn.qconv_prepack(filters, one, 1.0, 0, *once, list(images.shape))
    sums = torch.ops.onednn.qconv_pointwise(
        images, 1.0, 0, packed, one, zero, None, *once, 1.0, 0, torch.float32, "none", [], ""
    )
    return bool((sums == 16 * 255 * 127).all())
