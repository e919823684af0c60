"""Detect AMX, the tile unit of newer Intel processors for 8- and 16-bit products."""

from __future__ import annotations

from functools import cache

import torch
from torch import Tensor


def has_amx(device: torch.device) -> bool:
    """Return whether a device is a processor with usable AMX tiles."""
    return device.type == "cpu" and torch.cpu._is_amx_tile_supported()


@cache
def tile_shapes() -> Tensor | None:
    """Return the 64-byte AMX configuration of 8 tiles, 16 rows of 64 bytes each; None if refused.

    Linux grants tiles to a process only on request.
    """
    if not torch.cpu._init_amx():
        return None
    shapes = torch.zeros(64, dtype=torch.uint8)
    shapes[0] = 1  # palette 1 is the only one
    shapes[16:32:2] = 64
    shapes[48:56] = 16
    return shapes
