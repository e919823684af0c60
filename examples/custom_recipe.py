"""Grow a model of your own class, by a recipe written by hand and by one that qsync derives.

A recipe says which spaces each module reads and writes; `_` marks a dimension that does not grow.
Run it with `python examples/custom_recipe.py`: a few seconds on one CPU thread, no download.
"""

import torch
from torch import nn

import qsync


class Block(nn.Module):  # noqa: D101
    def __init__(self, width: int, hidden: int) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.up, self.down = nn.Linear(width, hidden), nn.Linear(hidden, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:  # noqa: D102
        return x + self.down(torch.relu(self.up(self.norm(x))))


class Mlp(nn.Module):  # noqa: D101
    def __init__(self, width: int, hidden: int, num_blocks: int) -> None:
        super().__init__()
        self.embed, self.head = nn.Linear(8, width), nn.Linear(width, 3)
        self.blocks = nn.Sequential(*(Block(width, hidden) for _ in range(num_blocks)))
        self.norm = nn.LayerNorm(width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:  # noqa: D102
        return self.head(self.norm(self.blocks(self.embed(x))))


TABLE = """
embed               _ -> stream   # 8 inputs, whatever the width
blocks.*.norm  stream -> normed
blocks.*.up    normed -> mlp      # hidden units; `follows` below keeps their ratio to the width
blocks.*.down     mlp -> stream
norm           stream -> final
head            final -> _        # 3 classes
"""
torch.manual_seed(0)
small, batch = Mlp(width=16, hidden=32, num_blocks=2), torch.randn(64, 8)


def build(small: nn.Module, sizes: dict[str, int]) -> nn.Module:
    """Return a new model of these sizes; qsync then sets its weights."""
    return Mlp(sizes["width"], sizes["mlp"], sizes["layers"])


options = {"sizes": {"stream": "width"}, "follows": {"mlp": "width"}, "blocks": "blocks.*"}
recipe = qsync.Recipe("Mlp", TABLE, build=build, **options)
big = qsync.expand(small, recipe.to(width=24, layers=3))
print("written by hand:", qsync.verify_expansion(small, big, batch))

# One run of the model proposes the same table. Read it, then confirm it with .recipe(build).
derived = qsync.derive_recipe(small, batch)
print(f"\n{derived}\n")
big = qsync.expand(small, derived.recipe(build).to(width=24, layers=3))
print("derived:", qsync.verify_expansion(small, big, batch))
