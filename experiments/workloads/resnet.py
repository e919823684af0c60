"""A small ResNet with BatchNorm, and scikit-learn's digits as its training data.

The 8 x 8 digits are resized to 16 x 16: otherwise the last stage has 2 x 2 pixels, and a step is mostly
gradient exchange, which precisions do not change.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache

import torch
import torch.nn.functional as F
from torch import nn

from qsync.expansion.recipe.recipe import Recipe

HELDOUT_IMAGES = 297  # of 1797


def _stage(number: int) -> str:
    """Return a stage's growth (see qsync.Recipe): its first block reads the stage before."""
    own, before = f"c{number}", f"c{max(number - 1, 0)}"
    return f"""
    stages.{number}.0.conv1        {before} -> inner{number}
    stages.{number}.0.shortcut.0   {before} -> {own}
    stages.{number}.*.conv1        {own} -> inner{number}
    stages.{number}.*.bn1          inner{number} -> inner{number}
    stages.{number}.*.conv2        inner{number} -> {own}
    stages.{number}.*              {own} -> {own}
    """


STAGES = "".join(_stage(number) for number in range(3))


class BasicBlock(nn.Module):
    """A residual block of two 3 x 3 convolutions (He et al. 2015, figure 2)."""

    def __init__(self, channels_in: int, channels: int, stride: int) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(channels_in, channels, 3, stride=stride, padding=1, bias=False)
        self.bn1 = nn.BatchNorm2d(channels)
        self.conv2 = nn.Conv2d(channels, channels, 3, padding=1, bias=False)
        self.bn2 = nn.BatchNorm2d(channels)
        self.relu = nn.ReLU(inplace=True)
        self.shortcut: nn.Module = nn.Identity()
        if stride != 1 or channels_in != channels:
            self.shortcut = nn.Sequential(
                nn.Conv2d(channels_in, channels, 1, stride=stride, bias=False), nn.BatchNorm2d(channels)
            )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Compute the block."""
        y = self.relu(self.bn1(self.conv1(x)))
        y = self.bn2(self.conv2(y))
        y += self.shortcut(x)
        result: torch.Tensor = self.relu(y)
        return result


class ResNet(nn.Module):
    """The ResNet: images (B, 1, 16, 16) -> logits (B, 10); three stages of two blocks."""

    def __init__(
        self,
        channels: tuple[int, ...] = (64, 128, 256),
        num_blocks: int | tuple[int, ...] = 2,
        num_classes: int = 10,
    ) -> None:
        super().__init__()
        self.conv = nn.Conv2d(1, channels[0], 3, padding=1, bias=False)
        self.bn = nn.BatchNorm2d(channels[0])
        self.relu = nn.ReLU(inplace=True)
        stages = []
        width = channels[0]
        for stage, wanted in enumerate(channels):
            num = num_blocks[stage] if isinstance(num_blocks, tuple) else num_blocks
            strides = [1 if stage == 0 else 2] + [1] * (num - 1)
            blocks = []
            for stride in strides:
                blocks.append(BasicBlock(width, wanted, stride))
                width = wanted
            stages.append(nn.Sequential(*blocks))
        self.stages = nn.Sequential(*stages)
        self.head = nn.Linear(width, num_classes)

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        """Return the logits."""
        x = self.relu(self.bn(self.conv(images)))
        y: torch.Tensor = self.head(self.stages(x).mean(dim=(2, 3)))
        return y

    # For the default three stages; the first one adds to the stem's output.
    recipe = Recipe(
        "small ResNet",
        f"""
        conv                  _ -> c0
        bn                   c0 -> c0
        {STAGES}
        head                 c2 -> _
        """,
        build=lambda small, sizes: ResNet(
            (sizes["c0"], sizes["c1"], sizes["c2"]), sizes["layers"], small.head.out_features
        ),
        sizes={"inner0": "c0", "inner1": "c1", "inner2": "c2"}, blocks="stages.*.*",
        residual=("c0", "c1", "c2"),
    )  # fmt: skip


@dataclass(frozen=True, slots=True)
class Digits:
    """Train and held-out images (N, 1, 16, 16) of mean 0 and deviation 1, with labels (N,)."""

    train_images: torch.Tensor
    train_labels: torch.Tensor
    heldout_images: torch.Tensor
    heldout_labels: torch.Tensor


@cache
def load_digits() -> Digits:
    """Return scikit-learn's 1797 digits resized to 16 x 16, in the same split for every seed."""
    from sklearn.datasets import load_digits as bundled  # slow to import, and only this workload needs it

    images, labels = bundled(return_X_y=True)
    pixels = torch.from_numpy(images).to(torch.float32).view(-1, 1, 8, 8)
    pixels = F.interpolate(pixels, size=(16, 16), mode="bilinear", align_corners=False)
    order = torch.randperm(len(pixels), generator=torch.Generator().manual_seed(0))
    train, heldout = order[HELDOUT_IMAGES:], order[:HELDOUT_IMAGES]
    pixels = (pixels - pixels[train].mean()) / pixels[train].std()
    classes = torch.from_numpy(labels).to(torch.int64)
    return Digits(pixels[train], classes[train], pixels[heldout], classes[heldout])
