"""A small denoising UNet (Ho et al. 2020): residual blocks with GroupNorm, attention at the bottom."""

from __future__ import annotations

import math
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import nn

_GROUPS, _NUM_TIMES = 8, 64


class Denoised(NamedTuple):
    """The model's output: the mean squared error of the predicted noise, and the noise."""

    loss: torch.Tensor
    noise: torch.Tensor


class Residual(nn.Module):
    """A residual block with time embedding: x + conv(conv(x) + time), GroupNorm and SiLU before each.

    (B, C, H, W) -> (B, C', H, W).
    """

    def __init__(self, inner: int, outer: int, times: int) -> None:
        super().__init__()
        self.norm1, self.norm2 = nn.GroupNorm(_GROUPS, inner), nn.GroupNorm(_GROUPS, outer)
        self.conv1, self.conv2 = nn.Conv2d(inner, outer, 3, padding=1), nn.Conv2d(outer, outer, 3, padding=1)
        self.time = nn.Linear(times, outer)
        self.shortcut = nn.Conv2d(inner, outer, 1) if inner != outer else nn.Identity()

    def forward(self, x: torch.Tensor, times: torch.Tensor) -> torch.Tensor:
        """Compute the block."""
        y = self.conv1(F.silu(self.norm1(x))) + self.time(F.silu(times))[:, :, None, None]
        found: torch.Tensor = self.shortcut(x) + self.conv2(F.silu(self.norm2(y)))
        return found


class Attention(nn.Module):
    """Self-attention over pixels: (B, C, H, W) -> same."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm = nn.GroupNorm(_GROUPS, width)
        self.qkv, self.output = nn.Conv2d(width, 3 * width, 1), nn.Conv2d(width, width, 1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Compute attention."""
        q, k, v = self.qkv(self.norm(x)).flatten(2).transpose(1, 2).chunk(3, dim=-1)
        mixed = F.scaled_dot_product_attention(q, k, v).transpose(1, 2).reshape(x.shape)
        found: torch.Tensor = x + self.output(mixed)
        return found


class UNet(nn.Module):
    """The UNet: images (B, 3, H, W) -> the added noise; two downsamplings and two upsamplings."""

    def __init__(self, width: int = 64) -> None:
        super().__init__()
        times, wide = 4 * width, 2 * width
        self.times = nn.Sequential(nn.Linear(_NUM_TIMES, times), nn.SiLU(), nn.Linear(times, times))
        self.first = nn.Conv2d(3, width, 3, padding=1)
        self.down = nn.ModuleList([Residual(width, width, times), Residual(width, wide, times)])
        self.halve = nn.ModuleList([nn.Conv2d(w, w, 3, stride=2, padding=1) for w in (width, wide)])
        self.middle = nn.ModuleList([Residual(wide, wide, times), Residual(wide, wide, times)])
        self.attention = Attention(wide)
        self.up = nn.ModuleList([Residual(2 * wide, wide, times), Residual(wide + width, width, times)])
        self.norm, self.last = nn.GroupNorm(_GROUPS, width), nn.Conv2d(width, 3, 3, padding=1)

    def forward(self, pixel_values: torch.Tensor) -> Denoised:
        """Draw times and noise; return the loss of the predicted noise, and the prediction."""
        times, noise = torch.rand(len(pixel_values)), torch.randn_like(pixel_values)
        rates = torch.exp(torch.linspace(0.0, -math.log(1e4), _NUM_TIMES // 2))
        angles = 1e3 * times[:, None] * rates
        embedded = self.times(torch.cat([angles.sin(), angles.cos()], dim=-1))
        part = times[:, None, None, None]
        x, skipped = self.first((1 - part).sqrt() * pixel_values + part.sqrt() * noise), []
        for block, halve in zip(self.down, self.halve, strict=True):
            x = block(x, embedded)
            skipped.append(x)
            x = halve(x)
        x = self.middle[1](self.attention(self.middle[0](x, embedded)), embedded)
        for block in self.up:
            x = block(torch.cat([F.interpolate(x, scale_factor=2.0), skipped.pop()], dim=1), embedded)
        found = self.last(F.silu(self.norm(x)))
        return Denoised(F.mse_loss(found, noise), found)
