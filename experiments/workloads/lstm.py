"""A language model of LSTM layers (Hochreiter and Schmidhuber 1997)."""

from __future__ import annotations

from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import nn


class Predicted(NamedTuple):
    """The model's output: the next tokens' cross entropy, and the logits."""

    loss: torch.Tensor
    logits: torch.Tensor


class LstmLanguageModel(nn.Module):
    """The LSTM language model: tokens (B, T), int64 -> logits (B, T, vocabulary)."""

    def __init__(self, vocab_size: int, width: int, num_layers: int) -> None:
        super().__init__()
        self.tokens = nn.Embedding(vocab_size, width)
        self.lstm = nn.LSTM(width, width, num_layers, batch_first=True)
        self.proj = nn.Linear(width, width)
        self.head = nn.Linear(width, vocab_size)

    def forward(self, input_ids: torch.Tensor, labels: torch.Tensor) -> Predicted:
        """Return the loss of the next tokens, and the logits."""
        x, _ = self.lstm(self.tokens(input_ids))
        logits = self.head(F.gelu(self.proj(x)))
        loss = F.cross_entropy(logits[:, :-1].flatten(0, 1), labels[:, 1:].flatten())
        return Predicted(loss, logits)
