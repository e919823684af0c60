"""A small vision transformer, Pre-LN (Dosovitskiy et al. 2020), for 16 x 16 images."""

from __future__ import annotations

import torch
from torch import nn

from qsync.expansion.recipe.recipe import Recipe
from qsync.experiments.workloads.gpt import BLOCK, Block


class Vit(nn.Module):
    """The ViT: images (B, 1, 16, 16) -> logits (B, 10); strided-convolution patches, class token, blocks."""

    def __init__(
        self,
        num_layers: int = 4,
        width: int = 192,
        num_heads: int = 3,
        patch: int = 2,
        num_classes: int = 10,
        hidden: int | None = None,
    ) -> None:
        super().__init__()
        self.patches = nn.Conv2d(1, width, patch, stride=patch)
        self.class_token = nn.Parameter(torch.zeros(1, 1, width))
        self.positions = nn.Parameter(0.02 * torch.randn(1, (16 // patch) ** 2 + 1, width))
        self.blocks = nn.ModuleList(
            Block(width, num_heads, causal=False, hidden=hidden) for _ in range(num_layers)
        )
        self.norm = nn.LayerNorm(width)
        self.head = nn.Linear(width, num_classes)

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        """Return the logits."""
        x = self.patches(images).flatten(2).transpose(1, 2)
        x = torch.cat([self.class_token.expand(len(x), -1, -1), x], dim=1) + self.positions
        for block in self.blocks:
            x = block(x)
        y: torch.Tensor = self.head(self.norm(x)[:, 0])
        return y

    recipe = Recipe(
        "small ViT",
        f"""
        patches         _ -> stream
        class_token       -> stream
        positions         -> stream
        {BLOCK}
        norm       stream -> final
        head        final -> _
        """,
        read=lambda small: {"heads": small.blocks[0].attention.num_heads},
        build=lambda small, sizes: Vit(
            sizes["layers"], sizes["width"], sizes["heads"], small.patches.stride[0], small.head.out_features,
            sizes["mlp"],
        ),
        sizes={"stream": "width"}, follows={"mlp": "width"}, blocks="blocks.*",
    )  # fmt: skip
