"""The whole training steps of experiments/kernels/compare_kernels.py: forward, loss, backward and AdamW.

Both models are built from configurations of Hugging Face's, with random weights, in their default training
mode (dropout included) on one fixed random batch. Every variant trains a copy of its own.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

import qsync
from qsync.experiments.harness import peers
from qsync.experiments.kernels.cases import Bar, Bench, Case, Run
from qsync.experiments.workloads import large_models

Batch = dict[str, Tensor]
CONTIGUOUS = " contiguous"


def bert(bench: Bench, rows: int = 8, length: int = 128, **sizes: int) -> tuple[nn.Module, Batch]:
    """Make a BERT, 4 layers, 512 wide, 8 heads, and a batch of token sequences to classify."""
    wanted = {"num_hidden_layers": 4, "hidden_size": 512, "num_attention_heads": 8, "intermediate_size": 2048}
    torch.manual_seed(bench.seed)
    with peers.silent():
        model: Any = large_models.bert(**{**wanted, **sizes})
    tokens = torch.randint(0, model.config.vocab_size, (rows, length))
    batch = {"input_ids": tokens, "attention_mask": torch.ones_like(tokens), "labels": torch.arange(rows) % 2}
    return model.to(bench.device), {key: value.to(bench.device) for key, value in batch.items()}


def resnet(bench: Bench, rows: int = 32, side: int = 64, **sizes: Any) -> tuple[nn.Module, Batch]:
    """Make a ResNet-18, channels_last, and a batch of images to classify."""
    with peers.silent():
        from transformers import ResNetConfig, ResNetForImageClassification

    wanted = {"depths": [2, 2, 2, 2], "hidden_sizes": [64, 128, 256, 512], "embedding_size": 64}
    torch.manual_seed(bench.seed)
    config = ResNetConfig(**{**wanted, "layer_type": "basic", "num_labels": 10, **sizes})
    model: Any = ResNetForImageClassification(config)
    images = torch.randn(rows, 3, side, side, device=bench.device)
    labels = torch.arange(rows, device=bench.device) % 10
    last: dict[str, Any] = {"memory_format": torch.channels_last}
    return model.to(bench.device, **last), {"pixel_values": images.to(**last), "labels": labels}


def step_case(
    bench: Bench,
    section: str,
    shape: str,
    made: tuple[nn.Module, Batch],
    precisions: tuple[str, ...],
    bars: tuple[Bar, ...],
) -> Case:
    """Compare the whole step in FP32 eager, in qsync's precisions and by every peer.

    A model of images runs channels_last, and once more contiguous, as models come (`fp32 contiguous` ...).
    """
    model, batch = made
    case = Case(section, shape, "fp32", bars)
    case.add("fp32", lambda: training_step(copy.deepcopy(model), [batch]))
    for precision in precisions:
        case.add(precision, partial(_wrapped_step, model, precision, batch))
    if any(value.ndim == 4 for value in batch.values()):
        plain = {key: value.contiguous() for key, value in batch.items()}
        whole: Any = copy.deepcopy(model)
        whole.to(memory_format=torch.contiguous_format)
        case.add("fp32" + CONTIGUOUS, lambda: training_step(copy.deepcopy(whole), [plain]))
        for precision in precisions:
            case.add(precision + CONTIGUOUS, partial(_wrapped_step, whole, precision, plain))
    linear = not any(isinstance(module, nn.Conv2d) for module in model.modules())
    for peer in peers.peers_on(bench.device, bench.inductor, linear):
        case.add(peer.name, partial(peer_step, bench, peer, model, [batch]), theirs=True)
    return case


def peer_step(bench: Bench, peer: peers.Peer, model: nn.Module, batches: Sequence[Batch]) -> Run:
    """Return one training step of a copy of the model, as a peer runs it."""
    mine = copy.deepcopy(model)
    if peer.torchao:
        mine = peers.torchao(mine, peer.torchao)
    if peer.torchao == "int8":
        mine = peers.with_contiguous_gradients(mine)
    return training_step(mine, batches, peer.call(mine, bench.device))


def _wrapped_step(model: nn.Module, precision: str, batch: Batch) -> Run:
    return training_step(qsync.wrap(copy.deepcopy(model), precision, strict=True), [batch])


def training_step(model: nn.Module, batches: Sequence[Batch], call: Callable[..., Any] | None = None) -> Run:
    """Return one training step of the model for each batch, called as `call`."""
    optimizer = torch.optim.AdamW(model.train().parameters(), lr=1e-4)
    run = model if call is None else call

    def step() -> None:
        for batch in batches:
            optimizer.zero_grad()
            run(**batch).loss.backward()
            optimizer.step()

    return step
