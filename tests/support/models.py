"""Small models with random weights, built from configurations: real architectures, no download."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

import qsync
from qsync.records.graph import OpGraph

Made = tuple[nn.Module, dict[str, torch.Tensor]]


def bert(dropout: float = 0.1, batch_size: int = 2, **options: Any) -> Made:
    from transformers import BertConfig, BertForSequenceClassification

    sizes = {"vocab_size": 64, "hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2}
    config = BertConfig(
        **{**sizes, "intermediate_size": 64, "max_position_embeddings": 16, **options},
        hidden_dropout_prob=dropout,
        attention_probs_dropout_prob=dropout,
    )
    batch = {**tokens(batch_size), "attention_mask": torch.ones(batch_size, 8, dtype=torch.int64)}
    batch["attention_mask"][0, 6:] = 0
    return BertForSequenceClassification(config), {**batch, "labels": torch.arange(batch_size) % 2}


def gpt2(dropout: float = 0.1, batch_size: int = 2, **options: Any) -> Made:
    from transformers import GPT2Config, GPT2LMHeadModel

    config = GPT2Config(
        **{"vocab_size": 64, "n_embd": 32, "n_layer": 2, "n_head": 2, "n_positions": 16, **options},
        resid_pdrop=dropout,
        embd_pdrop=dropout,
        attn_pdrop=dropout,
    )
    batch = tokens(batch_size)
    return GPT2LMHeadModel(config), {**batch, "labels": batch["input_ids"]}


def llama(batch_size: int = 2, **options: Any) -> Made:
    from transformers import LlamaConfig, LlamaForCausalLM

    sizes = {"vocab_size": 64, "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2}
    heads = {"num_attention_heads": 2, "num_key_value_heads": 1, "max_position_embeddings": 16}
    batch = tokens(batch_size)
    model = LlamaForCausalLM(LlamaConfig(**{**sizes, **heads, **options}, use_cache=False))
    return model, {**batch, "labels": batch["input_ids"]}


def vit(dropout: float = 0.1, batch_size: int = 2, **options: Any) -> Made:
    from transformers import ViTConfig, ViTForImageClassification

    sizes = {"image_size": 16, "patch_size": 4, "hidden_size": 32, "num_hidden_layers": 2}
    config = ViTConfig(
        **{**sizes, "num_attention_heads": 2, "intermediate_size": 64, "num_labels": 4, **options},
        hidden_dropout_prob=dropout,
        attention_probs_dropout_prob=dropout,
    )
    batch = {"pixel_values": torch.randn(batch_size, 3, 16, 16, generator=generator())}
    return ViTForImageClassification(config), {**batch, "labels": torch.arange(batch_size) % 4}


class Block(nn.Module):
    """Two convolutions with batch norm, in-place ReLU and an in-place residual add, as torchvision writes
    them."""

    def __init__(self, inner: int, outer: int, stride: int) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(inner, outer, 3, stride, 1, bias=False)
        self.bn1 = nn.BatchNorm2d(outer)
        self.relu = nn.ReLU(inplace=True)
        self.conv2 = nn.Conv2d(outer, outer, 3, 1, 1, bias=False)
        self.bn2 = nn.BatchNorm2d(outer)
        self.down = nn.Sequential(nn.Conv2d(inner, outer, 1, stride, bias=False), nn.BatchNorm2d(outer))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.relu(self.bn1(self.conv1(x)))
        y = self.bn2(self.conv2(y))
        y += self.down(x)
        return self.relu(y)


class ResNet(nn.Module):
    def __init__(self, width: int = 8) -> None:
        super().__init__()
        self.stem = nn.Sequential(
            nn.Conv2d(3, width, 3, 1, 1, bias=False), nn.BatchNorm2d(width), nn.ReLU(True)
        )
        self.layer1 = Block(width, width, 1)
        self.layer2 = Block(width, 2 * width, 2)
        self.fc = nn.Linear(2 * width, 4)

    def forward(self, x: torch.Tensor, labels: torch.Tensor | None = None) -> dict[str, torch.Tensor]:
        y = self.layer2(self.layer1(self.stem(x)))
        logits = self.fc(F.adaptive_avg_pool2d(y, 1).flatten(1))
        found = {"logits": logits}
        return found if labels is None else {"loss": F.cross_entropy(logits, labels), **found}


def resnet(batch_size: int = 4) -> Made:
    images = torch.randn(batch_size, 3, 8, 8, generator=generator())
    return ResNet(), {"x": images, "labels": torch.arange(batch_size) % 4}


def mlp(batch_size: int = 8) -> Made:
    """The cheapest model to trace: two products, a norm and dropout."""
    return MLP(), {
        "x": torch.randn(batch_size, 16, generator=generator()),
        "labels": torch.arange(batch_size) % 4,
    }


class MLP(nn.Module):
    def __init__(self, width: int = 16) -> None:
        super().__init__()
        self.fc1 = nn.Linear(width, 32)
        self.norm = nn.LayerNorm(32)
        self.dropout = nn.Dropout(0.1)
        self.fc2 = nn.Linear(32, 4)

    def forward(self, x: torch.Tensor, labels: torch.Tensor | None = None) -> dict[str, torch.Tensor]:
        logits = self.fc2(self.dropout(F.gelu(self.norm(self.fc1(x)))))
        found = {"logits": logits}
        return found if labels is None else {"loss": F.cross_entropy(logits, labels), **found}


FAMILIES: dict[str, Callable[..., Made]] = {
    "bert": bert, "gpt2": gpt2, "llama": llama, "vit": vit, "resnet": resnet,
}  # fmt: skip


def build(family: str, **options: Any) -> Made:
    """A model of this family, the same every time, and a batch with labels."""
    torch.manual_seed(0)
    model, batch = {**FAMILIES, "mlp": mlp}[family](**options)
    return model.train(), batch


@cache
def graph_of(family: str) -> OpGraph:
    """The graph of a model of this family, which is captured once."""
    return qsync.capture(*build(family))


def loss_of(model: nn.Module, batch: dict[str, torch.Tensor], seed: int = 1) -> torch.Tensor:
    """The model's own loss, with the random numbers of `seed` in its dropouts."""
    torch.manual_seed(seed)
    output = model(**batch)
    return output["loss"]


def step(
    model: nn.Module, batch: dict[str, torch.Tensor], seed: int = 1
) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
    """Loss and gradients of one forward and backward."""
    model.zero_grad(set_to_none=True)
    loss = loss_of(model, batch, seed)
    loss.backward()
    return loss.detach(), {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}


def tokens(batch_size: int, length: int = 8) -> dict[str, torch.Tensor]:
    return {"input_ids": torch.randint(0, 64, (batch_size, length), generator=generator())}


def generator() -> torch.Generator:
    return torch.Generator().manual_seed(0)
