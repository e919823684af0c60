"""A byte-level Pre-LN GPT, as GPT-2: without a tokenizer, any file is training data."""

from __future__ import annotations

import math

import torch
import torch.nn.functional as F
from torch import nn

from qsync.expansion.recipe.recipe import Recipe

# A block's growth (see qsync.Recipe): the spaces that its modules read and write.
BLOCK = """
blocks.*.norm1           stream -> normed
blocks.*.attention.qkv   normed -> query, key, value
blocks.*.attention.proj   mixed -> stream
blocks.*.norm2           stream -> normed
blocks.*.mlp.fc          normed -> mlp
blocks.*.mlp.proj           mlp -> stream
"""


class Attention(nn.Module):
    """Multi-head self-attention, causal or full: (B, T, width) -> (B, T, width)."""

    def __init__(self, width: int, num_heads: int, causal: bool = True) -> None:
        super().__init__()
        self.num_heads = num_heads
        self.causal = causal
        self.qkv = nn.Linear(width, 3 * width)
        self.proj = nn.Linear(width, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Compute attention."""
        batch, length, width = x.shape
        heads = (batch, length, self.num_heads, width // self.num_heads)
        q, k, v = (part.view(heads).transpose(1, 2) for part in self.qkv(x).split(width, dim=-1))
        mixed = F.scaled_dot_product_attention(q, k, v, is_causal=self.causal)
        y: torch.Tensor = self.proj(mixed.transpose(1, 2).reshape(batch, length, width))
        return y


class Mlp(nn.Module):
    """Two linears with `hidden` units in between, by default four times the width."""

    def __init__(self, width: int, hidden: int | None = None) -> None:
        super().__init__()
        hidden = hidden or 4 * width
        self.fc = nn.Linear(width, hidden)
        self.gelu = nn.GELU()
        self.proj = nn.Linear(hidden, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Compute the MLP."""
        y: torch.Tensor = self.proj(self.gelu(self.fc(x)))
        return y


class Block(nn.Module):
    """A Pre-LN transformer block: x + attention(norm(x)), then x + mlp(norm(x))."""

    def __init__(self, width: int, num_heads: int, causal: bool = True, hidden: int | None = None) -> None:
        super().__init__()
        self.norm1 = nn.LayerNorm(width)
        self.attention = Attention(width, num_heads, causal)
        self.norm2 = nn.LayerNorm(width)
        self.mlp = Mlp(width, hidden)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Compute the block."""
        x = x + self.attention(self.norm1(x))
        y: torch.Tensor = x + self.mlp(self.norm2(x))
        return y


class Gpt(nn.Module):
    """The GPT model: tokens (B, T), int64 -> logits (B, T, vocab). 10.9 M parameters by default."""

    def __init__(
        self,
        num_layers: int = 6,
        width: int = 384,
        num_heads: int = 6,
        context: int = 256,
        vocab: int = 256,
        tied: bool = False,
        hidden: int | None = None,
    ) -> None:
        super().__init__()
        self.tokens = nn.Embedding(vocab, width)
        self.positions = nn.Embedding(context, width)
        self.blocks = nn.ModuleList(Block(width, num_heads, hidden=hidden) for _ in range(num_layers))
        self.norm = nn.LayerNorm(width)
        self.head = nn.Linear(width, vocab, bias=False)
        self._initialise(num_layers)
        if tied:
            self.head.weight = self.tokens.weight

    def _initialise(self, num_layers: int) -> None:
        """Initialise as GPT-2: deviation 0.02, divided by sqrt(2 layers) for residual writers."""
        for name, module in self.named_modules():
            if isinstance(module, (nn.Linear, nn.Embedding)):
                deviation = 0.02 / math.sqrt(2 * num_layers) if name.endswith("proj") else 0.02
                nn.init.normal_(module.weight, std=deviation)
            if isinstance(module, nn.Linear) and module.bias is not None:
                nn.init.zeros_(module.bias)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        """Return the logits."""
        positions = torch.arange(tokens.shape[1], device=tokens.device)
        x = self.tokens(tokens) + self.positions(positions)
        for block in self.blocks:
            x = block(x)
        y: torch.Tensor = self.head(self.norm(x))
        return y

    recipe = Recipe(
        "byte-level GPT",
        f"""
        tokens            -> stream
        positions         -> stream
        {BLOCK}
        norm       stream -> final
        head        final -> _    tied tokens
        """,
        read=lambda small: {"heads": small.blocks[0].attention.num_heads},
        build=lambda small, sizes: Gpt(
            sizes["layers"], sizes["width"], sizes["heads"], small.positions.num_embeddings,
            small.tokens.num_embeddings, small.head.weight is small.tokens.weight, sizes["mlp"],
        ),
        sizes={"stream": "width"}, follows={"mlp": "width"}, blocks="blocks.*",
    )  # fmt: skip
