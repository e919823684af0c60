"""Three small models on synthetic batches: a GPT, a residual network, a recurrent language model."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn

Batch = tuple[Tensor, Tensor]
_CLASSES = 1024


class _Residual(nn.Module):
    def __init__(self, shortcut: nn.Module, *body: nn.Module) -> None:
        super().__init__()
        self.shortcut, self.body = shortcut, nn.Sequential(*body)

    def forward(self, x: Tensor) -> Tensor:
        return cast(Tensor, self.shortcut(x) + self.body(x))


class _Attention(nn.Module):
    """Causal attention with four heads."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (part.unflatten(-1, (4, -1)).transpose(1, 2) for part in self.qkv(x).chunk(3, -1))
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        return cast(Tensor, self.out(y.transpose(1, 2).flatten(2)))


class _Recurrence(nn.LSTM):
    def forward(self, x: Tensor) -> Tensor:  # type: ignore[override]
        return super().forward(x)[0]  # without the states


def _gpt(width: int) -> tuple[nn.Module, Batch]:
    def body() -> tuple[nn.Module, ...]:
        hidden = nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width)
        attention = _Residual(nn.Identity(), nn.LayerNorm(width), _Attention(width))
        return attention, _Residual(nn.Identity(), nn.LayerNorm(width), *hidden)

    ends = nn.LayerNorm(width), nn.Linear(width, _CLASSES)
    return nn.Sequential(nn.Embedding(_CLASSES, width), *body(), *body(), *ends), _text(4, width // 3)


def _resnet(width: int) -> tuple[nn.Module, Batch]:
    def conv(inner: int, outer: int, window: int, stride: int = 1) -> nn.Module:
        drawn = nn.Conv2d(inner, outer, window, stride, window // 2, bias=False)
        return nn.Sequential(drawn, nn.BatchNorm2d(outer))

    def block(inner: int, outer: int) -> nn.Module:
        stride = outer // inner
        shortcut = conv(inner, outer, 1, stride) if stride > 1 else nn.Identity()
        body = conv(inner, outer, 3, stride), nn.ReLU(), conv(outer, outer, 3)
        return nn.Sequential(_Residual(shortcut, *body), nn.ReLU())

    w, side = width // 6, width // 12
    blocks = block(w, w), block(w, w), block(w, 2 * w), block(2 * w, 4 * w)
    ends = nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(4 * w, _CLASSES)
    images = torch.randn(8, 3, side, side), torch.randint(_CLASSES, (8,))
    return nn.Sequential(conv(3, w, 3), nn.ReLU(), *blocks, *ends), images


def _lstm(width: int) -> tuple[nn.Module, Batch]:
    recurrence = _Recurrence(width, width, num_layers=2, batch_first=True)
    ends = nn.Embedding(_CLASSES, width), recurrence, nn.Linear(width, _CLASSES)
    return nn.Sequential(*ends), _text(8, width // 6)


def _text(rows: int, length: int) -> Batch:
    drawn = torch.randint(_CLASSES, (rows, length + 1))
    return drawn[:, :-1], drawn[:, 1:]


SMALL_MODELS: Mapping[str, Callable[[int], tuple[nn.Module, Batch]]] = {
    "gpt": _gpt, "resnet": _resnet, "lstm": _lstm,
}  # fmt: skip


def made(name: str, width: int) -> tuple[nn.Module, Batch]:
    """Make a small model in training mode, and its batch of values and targets."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        model, batch = SMALL_MODELS[name](width)
    return model.train(), batch


def loss_of_targets(model: nn.Module, batch: Batch) -> Tensor:
    """Return the mean cross entropy of a small model's batch."""
    values, targets = batch
    return F.cross_entropy(model(values).flatten(0, -2), targets.flatten())
