"""Graphs of models of real sizes, with SYNTHETIC costs, to time planning and replay.

Only the profiles' size matters. Nothing in them is measured.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from typing import Any

import torch

from qsync.operators.declaration import Role
from qsync.operators.precision import CARRIED_FLOATS, Precision, type_bytes
from qsync.operators.registry import PRECISIONS_BY_KIND
from qsync.records.graph import Op, OpGraph
from qsync.records.profiles import Cost, Profile, Sensitivity

Meta = tuple[torch.nn.Module, dict[str, torch.Tensor]]  # a model and a batch, without storage

PRECISIONS = (Precision.FP32, Precision.BF16, Precision.INT8)
# Round rates of a server core for synthetic profiles: FLOP/s in FP32, bytes/s, and speed relative to FP32.
_FLOPS_PER_S, _BYTES_PER_S = 1e11, 1e10
_SPEED = {Precision.FP32: 1.0, Precision.BF16: 2.0, Precision.INT8: 3.0}
# Variance relative to BF16.
_OMEGA = {"tf32": 0.02, "bf16": 1.0, "fp16": 0.02, "fp8": 40.0, "int8": 8.0}


def bert(**sizes: Any) -> torch.nn.Module:
    """Return a Hugging Face BERT classifier, by default of BERT-base's size."""
    from transformers import BertConfig, BertForSequenceClassification

    return BertForSequenceClassification(BertConfig(**sizes))


def bert_large() -> Meta:
    """Return BERT-large as a classifier on the meta device, and 8 sequences of 128 tokens."""
    with torch.device("meta"):
        tokens = torch.empty(8, 128, dtype=torch.int64)
        model = bert(
            num_hidden_layers=24, hidden_size=1024, num_attention_heads=16, intermediate_size=4096
        )  # fmt: skip
        return model, {"input_ids": tokens, "attention_mask": tokens, "labels": tokens[:, 0]}


def resnet_101() -> Meta:
    """Return ResNet-101 on the meta device, and 32 images."""
    from transformers import ResNetConfig, ResNetForImageClassification

    sizes: dict[str, Any] = {"depths": [3, 4, 23, 3], "layer_type": "bottleneck", "num_labels": 1000}
    with torch.device("meta"):
        model = ResNetForImageClassification(ResNetConfig(**sizes))
        return model, {"pixel_values": torch.empty(32, 3, 224, 224)}


def llama_70b(num_layers: int = 80) -> Meta:
    """Return a model of Llama-3-70B's sizes on the meta device, with some layers, and a batch."""
    from transformers import LlamaConfig, LlamaForCausalLM

    sizes: dict[str, Any] = {
        "vocab_size": 128256, "hidden_size": 8192, "intermediate_size": 28672,
        "num_hidden_layers": num_layers, "num_attention_heads": 64, "num_key_value_heads": 8,
        "max_position_embeddings": 8192, "rope_theta": 500000.0, "use_cache": False,
    }  # fmt: skip
    with torch.device("meta"):
        ids = torch.zeros(1, 2048, dtype=torch.int64)
        return LlamaForCausalLM(LlamaConfig(**sizes)), {"input_ids": ids, "labels": ids}


def made_up_sensitivity(draw: random.Random, graph: OpGraph, decades: float) -> Sensitivity:
    """Draw a sensitivity: operators differ by up to four decades, and precisions by `DECADES` either way."""
    omega = {}
    for op in graph.adjustable:
        scale = 10 ** draw.uniform(-4, 0)
        omega[op.name] = {
            str(p): scale * _OMEGA[p] * 10 ** draw.uniform(-decades, decades)
            for p in PRECISIONS_BY_KIND[op.kind]
            if p in _OMEGA
        }
    return Sensitivity(graph.hash, "made up", omega)


def synthetic_profile(graph: OpGraph, name: str, slow: float) -> Profile:
    """Compute costs from FLOPs and bytes at round rates, times `slow`. SYNTHETIC."""
    ops = {}
    for op in graph.ops:
        modes: Sequence[str] = able(op)
        if op.role is not Role.ADJUSTABLE:
            modes = tuple(dict.fromkeys((op.dtype, *CARRIED_FLOATS)))
        ops[op.name] = {str(mode): _synthetic_cost(op, mode, slow) for mode in modes}
    sources = ("fp64", "fp32", "bf16", "fp16")
    targets = (*sources, *(f"int8_{layout}" for layout in ("row", "col", "image", "channel")))
    latency, per_element = (Cost(seconds, seconds) for seconds in (slow * 1e-6, slow * 4 / _BYTES_PER_S))
    fit = {(s, t): (latency, per_element) for s in sources for t in targets if s != t}
    return Profile(
        name, graph.hash, graph.shapes_hash, ops, {}, fit, outside=Cost(0.0), host_s=slow * 1e-3,
        optimizer_s=slow * 2e-2, optimizer_bytes=8 * sum(v.num_elements for v in graph.parameters),
        step_s={}, machine={"synthetic": True},
    )  # fmt: skip


def _synthetic_cost(op: Op, mode: str, slow: float) -> Cost:
    if op.role is Role.ADJUSTABLE:
        seconds = slow * op.flops / _FLOPS_PER_S / _SPEED[Precision(mode)]
    else:
        seconds = slow * 2 * type_bytes(mode, op.num_elements) / _BYTES_PER_S
    return Cost(seconds, 2 * seconds if op.requires_grad else 0.0)


def able(op: Op) -> tuple[Precision, ...]:
    """Return an operator's precisions with synthetic costs."""
    return tuple(p for p in PRECISIONS_BY_KIND.get(op.kind, ()) if p in PRECISIONS)
