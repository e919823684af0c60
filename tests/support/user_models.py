"""Models of one's own with their recipes, for tests of what a recipe can say and what it cannot."""

from __future__ import annotations

from dataclasses import replace

import torch
import torch.nn.functional as F
from expanding import trained
from torch import nn

import qsync
from qsync import Recipe

ROWS = torch.randn(4, 5, generator=torch.Generator().manual_seed(0), dtype=torch.float64)


class Net(nn.Module):
    """One branch with norms of any kind: (B, 5) -> (B, 3)."""

    def __init__(self, width=16, hidden=24, norm=nn.LayerNorm):
        super().__init__()
        self.kind = norm
        self.inp = nn.Linear(5, width)
        self.norm = norm(width)
        self.fc, self.proj = nn.Linear(width, hidden), nn.Linear(hidden, width)
        self.norm2 = norm(width)
        self.head = nn.Linear(width, 3)

    def forward(self, x):
        x = self.inp(x)
        x = x + self.proj(F.gelu(self.fc(self.norm(x))))
        return self.head(self.norm2(x))


NET = Recipe(
    "net",
    """
    inp         _ -> stream
    norm   stream -> normed
    fc     normed -> hidden
    proj   hidden -> stream
    norm2  stream -> final
    head    final -> _
    """,
    build=lambda small, sizes: Net(sizes["width"], sizes["hidden"], small.kind),
    sizes={"stream": "width"},
)  # fmt: skip


class Eps(nn.Module):
    """A norm of somebody's own: `offset` is what its weight is short of, `centred` whether it takes the mean
    away."""

    def __init__(self, width, offset=0.0, centred=False):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(width) - offset)
        self.variance_epsilon = 1e-5
        self.offset, self.centred = offset, centred

    def forward(self, x):
        x = x - x.mean(-1, keepdim=True) if self.centred else x
        scale = torch.rsqrt(x.square().mean(-1, keepdim=True) + self.variance_epsilon)
        return x * scale * (self.weight + self.offset)


class Residual(nn.Module):
    """A residual block whose norms come first (He et al. 2016)."""

    def __init__(self, channels, norm):
        super().__init__()
        self.bn1, self.conv1 = norm(channels), nn.Conv2d(channels, channels, 3, padding=1)
        self.bn2, self.conv2 = norm(channels), nn.Conv2d(channels, channels, 3, padding=1)

    def forward(self, x):
        return x + self.conv2(F.relu(self.bn2(self.conv1(F.relu(self.bn1(x))))))


class Residuals(nn.Module):
    def __init__(self, channels=4, num_blocks=2, norm=nn.BatchNorm2d):
        super().__init__()
        self.kind = norm
        self.stem = nn.Conv2d(1, channels, 3)
        self.blocks = nn.Sequential(*(Residual(channels, norm) for _ in range(num_blocks)))
        self.head = nn.Linear(channels, 3)

    def forward(self, x):
        return self.head(self.blocks(self.stem(x)).mean((2, 3)))


RESIDUALS = Recipe(
    "residuals",
    """
    stem                  _ -> stream
    blocks.*.bn1     stream -> normed
    blocks.*.conv1   normed -> inner
    blocks.*.bn2      inner -> inner
    blocks.*.conv2    inner -> stream
    head             stream -> _
    """,
    build=lambda small, sizes: Residuals(sizes["stream"], sizes["layers"], small.kind),
    sizes={"inner": "stream"}, blocks="blocks.*",
)  # fmt: skip


class Streams(nn.Module):
    """Linears that read the residual stream itself, where no norm stands between: one alone, and one that
    reads two streams side by side, if there is to be one."""

    def __init__(self, width=16, skips=False):
        super().__init__()
        self.inp, self.norm, self.fc = nn.Linear(5, width), nn.LayerNorm(width), nn.Linear(width, width)
        self.skip = nn.Linear(2 * width, width) if skips else None
        self.head = nn.Linear(width, 3)

    def forward(self, x):
        first = self.inp(x)
        second = first + self.fc(self.norm(first))
        if self.skip is not None:
            second = second + self.skip(torch.cat([first, second], -1))
        return self.head(second)


STREAMS = Recipe(
    "streams",
    """
    inp                _ -> stream
    norm          stream -> normed
    fc            normed -> stream
    skip  stream, stream -> stream
    head          stream -> _
    """,
    build=lambda small, sizes: Streams(sizes["stream"], small.skip is not None),
)  # fmt: skip


def with_lines(given, **changes):
    """A recipe with the lines of some modules replaced."""
    rows = [row.strip() for row in given.table.splitlines() if row.strip()]
    table = [changes.pop(row.split()[0], row) for row in rows]
    return replace(given, table="\n".join([*table, *changes.values()]))


def lossless(model, given, inputs, **options):
    """Grow a trained model in FP64; it must compute the same. The grown model."""
    small = trained(model.double())
    big = qsync.expand(small, given, **options)
    assert qsync.verify_expansion(small, big, inputs).max_difference <= 1e-9
    return big
