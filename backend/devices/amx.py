"""AMX, the unit of newer Intel processors that multiplies tiles of 8- and 16-bit numbers."""

from __future__ import annotations

from functools import cache

import torch
from torch import Tensor


def has_amx(device: torch.device) -> bool:
    """Return whether a device is a processor that multiplies tiles."""
    return device.type == "cpu" and torch.cpu._is_amx_tile_supported()


@cache
def tile_shapes() -> Tensor | None:
    """Return the 64 bytes that make all 8 tiles 16 rows of 64 bytes; None if the system refuses tiles.

    Linux lets a process use tiles once it has asked.
    """
    if not torch.cpu._init_amx():
        return None
    shapes = torch.zeros(64, dtype=torch.uint8)
    shapes[0] = 1  # the only palette
    shapes[16:32:2] = 64
    shapes[48:56] = 16
    return shapes
