"""Plain growing, not lossless: blocks stacked a second time, tensors tiled.

Depth as in progressive stacking (Gong et al. 2019): the copy of a block stands on top of the whole stack and
works from the first step on. Width by tiling: an axis starts over until it is long enough. So that a layer
that reads more copies answers no louder, its columns are scaled by how much longer they became; which copies
there are twice, and what norms make of them, is not looked at.
"""

from __future__ import annotations

import re

import torch
from torch import nn

BLOCK = re.compile(r"^blocks\.(\d+)\.")


def stacked(small: nn.Module, large: nn.Module) -> nn.Module:
    """Tile and stack the weights of `small` into `large`, a new model of its class; return `large`."""
    trained = small.state_dict()
    layers = len(small.blocks)  # type: ignore[arg-type]
    modules = dict(large.named_modules())
    with torch.no_grad():
        for name, value in large.state_dict().items():
            found = BLOCK.match(name)
            before = BLOCK.sub(f"blocks.{int(found[1]) % layers}.", name) if found else name
            source, module = trained[before], modules[name.rpartition(".")[0]]
            # Queries, keys and values are stacked in one axis, and start over each for itself.
            parts = 3 if ".qkv." in name else 1
            value.copy_(torch.cat([_tiled(part, value, parts) for part in source.chunk(parts)]))
            if isinstance(module, nn.Linear) and name.endswith("weight"):
                value *= source.shape[1] / value.shape[1]
    return large


def _tiled(source: torch.Tensor, value: torch.Tensor, parts: int) -> torch.Tensor:
    """`source`, each axis started over until it is as long as that of `value`, the first a part of it."""
    lengths = (value.shape[0] // parts, *value.shape[1:])
    for axis, length in enumerate(lengths):
        source = source.index_select(axis, torch.arange(length) % source.shape[axis])
    return source
