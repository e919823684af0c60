"""A small VGG with BatchNorm (Simonyan and Zisserman 2014, configuration A without its last stage)."""

from __future__ import annotations

import torch
from torch import nn

from qsync.expansion.recipe.recipe import Recipe


class Vgg(nn.Module):
    """The VGG: images (B, 1, 16, 16) -> logits (B, 10); stages of 3 x 3 convolutions with max-pooling."""

    def __init__(
        self,
        stages: tuple[tuple[int, ...], ...] = ((64,), (128,), (256, 256), (256, 256)),
        hidden: int = 512,
        num_classes: int = 10,
    ) -> None:
        super().__init__()
        layers: list[nn.Module] = []
        width = 1
        for stage in stages:
            for channels in stage:
                layers += [
                    nn.Conv2d(width, channels, 3, padding=1, bias=False), nn.BatchNorm2d(channels),
                    nn.ReLU(inplace=True),
                ]  # fmt: skip
                width = channels
            layers.append(nn.MaxPool2d(2))
        self.features = nn.Sequential(*layers)
        side = 16 // 2 ** len(stages)
        self.classifier = nn.Sequential(
            nn.Linear(width * side * side, hidden), nn.ReLU(inplace=True), nn.Linear(hidden, num_classes)
        )

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        """Return the logits."""
        y: torch.Tensor = self.classifier(self.features(images).flatten(1))
        return y

    # For the default six convolutions, each with its own channels, c0 to c5.
    recipe = Recipe(
        "small VGG",
        """
        features.0       _ -> c0
        features.1      c0 -> c0
        features.4      c0 -> c1
        features.5      c1 -> c1
        features.8      c1 -> c2
        features.9      c2 -> c2
        features.11     c2 -> c3
        features.12     c3 -> c3
        features.15     c3 -> c4
        features.16     c4 -> c4
        features.18     c4 -> c5
        features.19     c5 -> c5
        classifier.0    c5 -> hidden
        classifier.2    hidden -> _
        """,
        build=lambda small, sizes: Vgg(
            ((sizes["c0"],), (sizes["c1"],), (sizes["c2"], sizes["c3"]), (sizes["c4"], sizes["c5"])),
            sizes["hidden"], small.classifier[2].out_features,
        ),
    )  # fmt: skip
