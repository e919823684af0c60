"""Small models of every family that grows, as if trained: in FP64, every weight and statistic moved."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from models import bert, generator, gpt2, llama, vit
from torch import nn

import qsync
from qsync.expansion.plan.expansion_plan import ExpansionPlan
from qsync.experiments.workloads.bert import Bert
from qsync.experiments.workloads.gpt import Gpt
from qsync.experiments.workloads.resnet import ResNet
from qsync.experiments.workloads.vgg import Vgg
from qsync.experiments.workloads.vit import Vit

Made = tuple[nn.Module, Any]


def trained(model: nn.Module, seed: int = 0) -> nn.Module:
    """The model with nothing left of how it began: zero biases and norms of one hide what is wrong with
    them."""
    draws = torch.Generator().manual_seed(seed)

    def drawn(like: torch.Tensor) -> torch.Tensor:
        return torch.randn(like.shape, generator=draws, dtype=torch.float64).to(like)

    with torch.no_grad():
        for value in model.parameters():
            value.add_(0.1 * drawn(value))
        for name, value in model.named_buffers():
            if name.endswith("running_mean"):
                value.add_(0.3 * drawn(value))
            if name.endswith("running_var"):
                value.mul_(drawn(value).abs() + 0.5)
    return model.eval()


def tokens(length: int = 8, vocab: int = 50) -> torch.Tensor:
    return torch.randint(0, vocab, (2, length), generator=generator())


def images(side: int = 16, channels: int = 1) -> torch.Tensor:
    return torch.randn(2, channels, side, side, generator=generator(), dtype=torch.float64)


def _named(made: Callable[..., Any], **options: Any) -> Callable[[], Made]:
    """One of models.py's, with its batch without labels."""

    def make() -> Made:
        model, batch = made(**options)
        return model, {name: value for name, value in batch.items() if name != "labels"}

    return make


def _like_llama(kind: str) -> Callable[[], Made]:
    def make() -> Made:
        import transformers

        config = getattr(transformers, f"{kind}Config")(
            vocab_size=50, hidden_size=32, intermediate_size=40, num_hidden_layers=2,
            num_attention_heads=4, num_key_value_heads=2, max_position_embeddings=16, use_cache=False,
            bos_token_id=1, eos_token_id=2,
        )  # fmt: skip
        return getattr(transformers, f"{kind}ForCausalLM")(config), {"input_ids": tokens()}

    return make


def _resnet(kind: str) -> Callable[[], Made]:
    def make() -> Made:
        from transformers import ResNetConfig, ResNetForImageClassification

        stem = {"basic": 8, "bottleneck": 6}[kind]  # the second has a convolution on its first shortcut
        config = ResNetConfig(
            embedding_size=stem, hidden_sizes=[8, 16], depths=[2, 2], layer_type=kind, num_labels=4
        )
        return ResNetForImageClassification(config), {"pixel_values": images(32, 3)}

    return make


FAMILIES: dict[str, Callable[[], Made]] = {
    "Gpt": lambda: (Gpt(2, 32, 2, 16, 50), tokens()),
    "Gpt, tied": lambda: (Gpt(2, 32, 2, 16, 50, tied=True), tokens()),
    "Vit": lambda: (Vit(2, 32, 2, 4), images()),
    "Bert": lambda: (Bert(2, 32, 2, 16, 50), tokens()),
    "ResNet": lambda: (ResNet((4, 8, 8), 2), images()),
    "Vgg": lambda: (Vgg(((4,), (6,), (6, 6), (6, 6)), 12), images()),
    "GPT-2": _named(gpt2, bos_token_id=1, eos_token_id=2),
    "GPT-2, untied": _named(gpt2, bos_token_id=1, eos_token_id=2, tie_word_embeddings=False),
    "HF ViT": _named(vit),
    "HF BERT": _named(bert),
    "HF ResNet, basic": _resnet("basic"),
    "HF ResNet, bottleneck": _resnet("bottleneck"),
    "Llama": _named(llama, num_attention_heads=4, num_key_value_heads=2),
    "Llama, tied": _named(
        llama, num_attention_heads=4, num_key_value_heads=2, tie_word_embeddings=True, attention_bias=True
    ),
    "Mistral": _like_llama("Mistral"),
    "Qwen2": _like_llama("Qwen2"),
}

# What each family grows to here: no multiple of its width, where it can, and deeper.
TARGETS: dict[str, dict[str, Any]] = {
    "Bert": {"width": 64, "mlp": 200},
    "HF BERT": {"width": 96},
    "ResNet": {"c0": 7, "c1": 19, "c2": 8, "layers": 3},
    "Vgg": {"c0": 7, "c3": 13, "c5": 8, "hidden": 31},
    "HF ResNet, basic": {"c0": 11, "c1": 40, "layers": (3, 4)},
    "HF ResNet, bottleneck": {"stem": 9, "c0": 12, "c1": 40, "layers": 3},
}
USUAL: dict[str, Any] = {"width": 80, "layers": 3}


def made(family: str) -> Made:
    """A model of this family, the same every time, trained, in FP64, and inputs for it."""
    torch.manual_seed(0)
    model, inputs = FAMILIES[family]()
    return trained(model.double()), inputs


def recipe(family: str, model: nn.Module, **sizes: Any) -> qsync.Recipe:
    """The family's recipe, with a larger size for each of its sizes."""
    return qsync.recipe_of(model).to(**(sizes or TARGETS.get(family, USUAL)))


def call(model: nn.Module, inputs: Any, state: Mapping[str, torch.Tensor] | None = None) -> torch.Tensor:
    """What the model returns first, with its own weights or others."""
    args, kwargs = ((), inputs) if isinstance(inputs, dict) else ((inputs,), {})
    if state is None:
        returned = model(*args, **kwargs)
    else:
        returned = torch.func.functional_call(model, dict(state), args, kwargs, tie_weights=False)
    return returned if isinstance(returned, torch.Tensor) else returned.logits


def whole_state(model: nn.Module) -> dict[str, torch.Tensor]:
    """Parameters and buffers by all their names, the parameters themselves and not copies."""
    return {**model.state_dict(keep_vars=True), **dict(model.named_parameters(remove_duplicate=False))}


def rests(plan: ExpansionPlan) -> dict[str, list[tuple[int, torch.Tensor]]]:
    """Of every grown tensor, the axes with coordinates that copy none, and a Bool of which they are."""
    found: dict[str, list[tuple[int, torch.Tensor]]] = {}
    for name, m in plan.tensors.items():
        for dim, axis in enumerate(m.axes):
            if axis is not None and not bool(axis.growth.is_copy.all()):
                found.setdefault(name, []).append((dim, ~axis.growth.is_copy))
    return found
