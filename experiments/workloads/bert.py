"""A byte-level Post-LN BERT (Devlin et al. 2018): bidirectional attention, trained on masked bytes."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import nn

from qsync.expansion.recipe.recipe import Recipe
from qsync.experiments.workloads.gpt import Mlp

MASK = 0  # a byte that text does not contain
NOT_SCORED = -100  # cross_entropy's ignored index
MASKED_EVERY = 6


class Attention(nn.Module):
    """Multi-head self-attention with separate linears for queries, keys and values: (B, T, width) -> same."""

    def __init__(self, width: int, num_heads: int) -> None:
        super().__init__()
        self.num_heads = num_heads
        self.query, self.key, self.value = (nn.Linear(width, width) for _ in range(3))
        self.output = nn.Linear(width, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Compute attention."""
        batch, length, width = x.shape
        heads = (batch, length, self.num_heads, width // self.num_heads)
        q, k, v = (part(x).view(heads).transpose(1, 2) for part in (self.query, self.key, self.value))
        mixed = F.scaled_dot_product_attention(q, k, v)
        y: torch.Tensor = self.output(mixed.transpose(1, 2).reshape(batch, length, width))
        return y


class Layer(nn.Module):
    """A Post-LN transformer layer: norm(x + attention(x)), then norm(x + mlp(x))."""

    def __init__(self, width: int, num_heads: int, dropout: float, hidden: int | None = None) -> None:
        super().__init__()
        self.attention = Attention(width, num_heads)
        self.norm1 = nn.LayerNorm(width)
        self.mlp = Mlp(width, hidden)
        self.norm2 = nn.LayerNorm(width)
        self.dropout = nn.Dropout(dropout)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Compute the layer."""
        x = self.norm1(x + self.dropout(self.attention(x)))
        y: torch.Tensor = self.norm2(x + self.dropout(self.mlp(x)))
        return y


class Bert(nn.Module):
    """The BERT model: tokens (B, T), int64 -> logits (B, T, vocab)."""

    def __init__(
        self,
        num_layers: int = 4,
        width: int = 256,
        num_heads: int = 4,
        context: int = 128,
        vocab: int = 256,
        dropout: float = 0.0,
        hidden: int | None = None,
    ) -> None:
        super().__init__()
        self.tokens = nn.Embedding(vocab, width)
        self.positions = nn.Embedding(context, width)
        self.norm = nn.LayerNorm(width)
        self.layers = nn.ModuleList(Layer(width, num_heads, dropout, hidden) for _ in range(num_layers))
        self.transform = nn.Linear(width, width)
        self.gelu = nn.GELU()
        self.head_norm = nn.LayerNorm(width)
        self.head = nn.Linear(width, vocab)
        for module in self.modules():
            if isinstance(module, (nn.Linear, nn.Embedding)):
                nn.init.normal_(module.weight, std=0.02)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        """Return the logits."""
        positions = torch.arange(tokens.shape[1], device=tokens.device)
        x = self.norm(self.tokens(tokens) + self.positions(positions))
        for layer in self.layers:
            x = layer(x)
        y: torch.Tensor = self.head(self.head_norm(self.gelu(self.transform(x))))
        return y

    # Post-LN grows only to multiples of the width, and not in depth.
    recipe = Recipe(
        "byte-level BERT",
        """
        tokens                     -> embedded
        positions                  -> embedded
        norm              embedded -> stream
        *.attention.query   stream -> query
        *.attention.key     stream -> key
        *.attention.value   stream -> value
        *.attention.output   mixed -> stream
        layers.*.norm?      stream -> stream
        *.mlp.fc            stream -> mlp
        *.mlp.proj             mlp -> stream
        transform           stream -> shaped
        head_norm           shaped -> final
        head                 final -> _
        """,
        read=lambda small: {"heads": small.layers[0].attention.num_heads},
        build=lambda small, sizes: Bert(
            len(small.layers), sizes["width"], sizes["heads"], small.positions.num_embeddings,
            small.tokens.num_embeddings, small.layers[0].dropout.p, sizes["mlp"],
        ),
        sizes={"stream": "width", "embedded": "width", "shaped": "width"}, follows={"mlp": "width"},
        blocks="layers.*",
    )  # fmt: skip


def masked(tokens: torch.Tensor, seed: tuple[int, ...]) -> tuple[torch.Tensor, torch.Tensor]:
    """Mask one token in `MASKED_EVERY`; return tokens and targets, with other positions ignored."""
    generator = torch.Generator().manual_seed(hash(seed) % 2**63)
    chosen = torch.rand(tokens.shape, generator=generator) < 1 / MASKED_EVERY
    return tokens.masked_fill(chosen, MASK), tokens.masked_fill(~chosen, NOT_SCORED)
