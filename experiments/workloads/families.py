"""The suite of unseen models: families of architectures at realistic widths, with random weights.

Models come from Hugging Face configurations (no download), on fixed random batches. One FP32 step takes 0.2
to 1.5 s on one thread. Two randomly chosen families are held out of development, and reported separately.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from qsync.errors import QSyncError
from qsync.experiments.harness.peers import silent
from qsync.experiments.workloads.lstm import LstmLanguageModel
from qsync.experiments.workloads.unet import UNet
from qsync.experiments.workloads.workload import seeded

Batch = dict[str, Any]
TRANSFORMER, CONVOLUTION, RECURRENT = "transformer", "convolution", "recurrent"
HELD_OUT_SEED, NUM_HELD_OUT = 2027, 2
_VOCABULARY, _CLASSES, _SIDE, _BANDS = 8192, 10, 96, 80
_TINY = 8  # divisor of widths, lengths and batches of tiny models
_WHOLE = ("image_size", "hidden_dim")  # EfficientNet has a width that is none of its configuration
_LEAST_WIDTH = 64  # smaller numbers in a configuration are heads, groups, kernels
_DEPTHS = {
    "depths", "num_layers", "num_decoder_layers", "num_hidden_layers", "n_layers", "n_layer",
    "encoder_layers", "decoder_layers",
}  # fmt: skip
_OWN: dict[str, Callable[..., nn.Module]] = {"UNet": UNet, "LstmLanguageModel": LstmLanguageModel}


@dataclass(frozen=True, slots=True)
class Inputs:
    """The contents of one step's batches: rows of texts, images or sound.

    `lengths` are of texts, one batch for each; `labels` are "classes", "pixels" (a class for each), "text"
    (the text itself), "target" (another text, `target` long), "captions" (texts are the images') or "none".
    """

    rows: int
    lengths: tuple[int, ...] = (0,)
    side: int = 0
    frames: int = 0
    samples: int = 0
    target: int = 0
    labels: str = "classes"

    def batches(self, tiny: bool) -> list[Batch]:
        """Draw the batches."""
        return [self._batch(length, _TINY if tiny else 1) for length in self.lengths]

    def _batch(self, length: int, part: int) -> Batch:
        rows, batch = max(2, self.rows // part), {}

        def text(length: int) -> Tensor:  # configurations reserve 0 to 3
            return torch.randint(4, _VOCABULARY // part, (rows, length // part))

        if length:
            batch["input_ids"] = text(length)
        if length and self.labels == "classes":  # padded
            ends = torch.linspace(length, length * 5 / 8, rows)[:, None]
            batch["attention_mask"] = (torch.arange(0, length, part) < ends).long()
        if self.side:
            batch["pixel_values"] = torch.randn(rows, 3, self.side, self.side)
        if self.frames:
            batch["input_features"] = torch.randn(rows, _BANDS // part, self.frames // part)
        if self.samples:
            batch["input_values"] = torch.randn(rows, self.samples // part)
        labels: dict[str, Batch] = {
            "classes": {"labels": torch.arange(rows) % 2},
            "pixels": {"labels": torch.randint(_CLASSES, (rows, self.side, self.side))},
            "text": {"labels": batch.get("input_ids")},
            "target": {"labels": text(self.target)},
            "captions": {"return_loss": True},
            "none": {},
        }
        return {**batch, **labels[self.labels]}


@dataclass(frozen=True, slots=True)
class Family:
    """One architecture: a model class of Hugging Face's (or our own), its sizes and its batches."""

    name: str
    kind: str
    model: str
    sizes: Mapping[str, Any]
    inputs: Inputs

    @property
    def held_out(self) -> bool:
        """Return whether the family is held out."""
        return self.name in HELD_OUT

    def make(self, tiny: bool = False) -> tuple[nn.Module, list[Batch]]:
        """Return the model in training mode, and a step's batches; convolutions run channels-last."""
        model = seeded(lambda: self._model(_shrunk(self.sizes) if tiny else self.sizes), 0).train()
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(0)
            batches = self.inputs.batches(tiny)
        if self.kind == CONVOLUTION:
            model.to(memory_format=torch.channels_last)  # type: ignore[call-overload]
            batches = [{name: _channels_last(value) for name, value in one.items()} for one in batches]
        return model, batches

    def _model(self, sizes: Mapping[str, Any]) -> nn.Module:
        if self.model in _OWN:
            return _OWN[self.model](**sizes)
        with silent():
            import transformers

            kind = getattr(transformers, self.model)
            config = kind.config_class(**sizes)
            config.use_cache = False
            made: Any = kind(config)
        if (
            getattr(made, "loss_type", "") is None
        ):  # transformers would warn, which torch.compile cannot trace
            made.loss_type = "ForCausalLM"
        model: nn.Module = made
        return model


def family_named(name: str) -> Family:
    """Return the family of this name. Raises QSyncError for an unknown one."""
    if name not in FAMILIES | LARGE:
        raise QSyncError(f"unknown family {name!r}; choose from {', '.join(FAMILIES)}")
    return (FAMILIES | LARGE)[name]


def _shrunk(sizes: Mapping[str, Any]) -> dict[str, Any]:
    """Divide widths, and keep one layer of each stack; images keep their size."""

    def small(key: str, value: Any) -> Any:
        if isinstance(value, Mapping):
            return _shrunk(value)
        if key in _DEPTHS:
            return [1] * len(value) if isinstance(value, list) else 1
        if isinstance(value, list) and all(isinstance(one, int) for one in value):
            return [one // _TINY for one in value] if max(value) >= _LEAST_WIDTH else value
        is_width = isinstance(value, int) and value >= _LEAST_WIDTH and key not in _WHOLE
        return value // _TINY if is_width else value

    return {key: small(key, value) for key, value in sizes.items()}


def _channels_last(value: Any) -> Any:
    is_image = isinstance(value, Tensor) and value.ndim == 4
    return value.to(memory_format=torch.channels_last) if is_image else value


_VOCAB = {"vocab_size": _VOCABULARY}
_WIDE = {**_VOCAB, "num_hidden_layers": 4, "hidden_size": 512, "num_attention_heads": 8}
_SMALL = {"num_hidden_layers": 6, "hidden_size": 384, "num_attention_heads": 6}
_LANGUAGE = Inputs(4, (128,), labels="text")
_PAIRS = Inputs(4, (128,), target=64, labels="target")
_IMAGES = Inputs(8, side=_SIDE)
_LABELS = {"num_labels": _CLASSES}
_SPECIAL = {"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2, "decoder_start_token_id": 1}
_STACKS = {
    **_VOCAB, **_SPECIAL, "d_model": 384, "encoder_layers": 4, "decoder_layers": 4, "encoder_ffn_dim": 1536,
    "decoder_ffn_dim": 1536, "encoder_attention_heads": 6, "decoder_attention_heads": 6,
}  # fmt: skip
_TOWER = {
    "num_hidden_layers": 4, "hidden_size": 512, "num_attention_heads": 8, "intermediate_size": 2048,
}  # fmt: skip

FAMILIES: dict[str, Family] = {
    family.name: family
    for family in (
        Family(
            "distilbert", TRANSFORMER, "DistilBertForSequenceClassification",
            {**_VOCAB, "n_layers": 4, "dim": 512, "n_heads": 8, "hidden_dim": 2048}, Inputs(8, (128,)),
        ),
        Family(  # dynamic lengths
            "roberta", TRANSFORMER, "RobertaForSequenceClassification",
            {**_WIDE, "intermediate_size": 2048}, Inputs(4, (128, 96, 64)),
        ),
        Family(
            "electra", TRANSFORMER, "ElectraForSequenceClassification",
            {**_VOCAB, **_SMALL, "embedding_size": 128, "intermediate_size": 1536}, Inputs(8, (128,)),
        ),
        Family(  # content and position attend to each other
            "deberta", TRANSFORMER, "DebertaV2ForSequenceClassification",
            {**_VOCAB, **_SMALL, "num_hidden_layers": 4, "intermediate_size": 1536,
             "relative_attention": True, "pos_att_type": ["c2p", "p2c"], "position_buckets": 32,
             "norm_rel_ebd": "layer_norm", "share_att_key": True}, Inputs(8, (128,)),
        ),
        Family(
            "gpt2", TRANSFORMER, "GPT2LMHeadModel",
            {**_VOCAB, "n_layer": 4, "n_embd": 512, "n_head": 8}, _LANGUAGE,
        ),
        Family(
            "gpt_neox", TRANSFORMER, "GPTNeoXForCausalLM",
            {**_VOCAB, **_SMALL, "intermediate_size": 1536}, _LANGUAGE,
        ),
        Family(
            "llama", TRANSFORMER, "LlamaForCausalLM", {**_WIDE, "intermediate_size": 1408},
            _LANGUAGE,
        ),
        Family(  # grouped queries, attention in windows
            "mistral", TRANSFORMER, "MistralForCausalLM",
            {**_WIDE, "num_key_value_heads": 2, "intermediate_size": 1408, "sliding_window": 48},
            _LANGUAGE,
        ),
        Family(  # all queries share one key
            "gemma", TRANSFORMER, "GemmaForCausalLM",
            {**_WIDE, "num_key_value_heads": 1, "head_dim": 64, "intermediate_size": 2048},
            _LANGUAGE,
        ),
        Family(  # grouped queries, normed by head
            "qwen3", TRANSFORMER, "Qwen3ForCausalLM",
            {**_WIDE, "num_key_value_heads": 2, "head_dim": 64, "intermediate_size": 1408}, _LANGUAGE,
        ),
        Family(
            "opt", TRANSFORMER, "OPTForCausalLM",
            {**_WIDE, "ffn_dim": 2048, "word_embed_proj_dim": 512}, _LANGUAGE,
        ),
        Family(  # two of eight experts
            "qwen2_moe", TRANSFORMER, "Qwen2MoeForCausalLM",
            {**_VOCAB, **_SMALL, "num_hidden_layers": 4, "num_key_value_heads": 2, "num_experts": 8,
             "num_experts_per_tok": 2, "moe_intermediate_size": 512,
             "shared_expert_intermediate_size": 512}, _LANGUAGE,
        ),
        Family(
            "t5", TRANSFORMER, "T5ForConditionalGeneration",
            {**_VOCAB, **_SPECIAL, "num_layers": 4, "num_decoder_layers": 4, "d_model": 384, "d_ff": 1536,
             "d_kv": 64, "num_heads": 6}, _PAIRS,
        ),
        Family(
            "bart", TRANSFORMER, "BartForConditionalGeneration",
            {**_STACKS, "forced_eos_token_id": None}, _PAIRS,
        ),
        Family(
            "whisper", TRANSFORMER, "WhisperForConditionalGeneration",
            {**_STACKS, "num_mel_bins": _BANDS, "max_source_positions": 256, "max_target_positions": 64},
            Inputs(2, frames=512, target=64, labels="target"),
        ),
        Family(
            "vit", TRANSFORMER, "ViTForImageClassification",
            {**_SMALL, **_LABELS, "intermediate_size": 1536, "image_size": _SIDE, "patch_size": 8},
            Inputs(4, side=_SIDE),
        ),
        Family(  # attention in windows of 6 x 6
            "swin", TRANSFORMER, "SwinForImageClassification",
            {**_LABELS, "embed_dim": 96, "depths": [2, 2, 2], "num_heads": [3, 6, 12], "window_size": 6,
             "image_size": _SIDE, "patch_size": 4}, _IMAGES,
        ),
        Family(
            "segformer", TRANSFORMER, "SegformerForSemanticSegmentation",
            {**_LABELS, "depths": [2, 2, 2, 2], "hidden_sizes": [32, 64, 160, 256],
             "decoder_hidden_size": 256, "image_size": 128}, Inputs(4, side=128, labels="pixels"),
        ),
        Family(
            "clip", TRANSFORMER, "CLIPModel",
            {"text_config": {**_TOWER, **_VOCAB, **_SPECIAL},
             "vision_config": {**_TOWER, "image_size": _SIDE, "patch_size": 16}, "projection_dim": 512},
            Inputs(8, (64,), side=_SIDE, labels="captions"),
        ),
        Family(  # bottlenecks
            "resnet50", CONVOLUTION, "ResNetForImageClassification",
            {**_LABELS, "depths": [3, 4, 6, 3], "embedding_size": 64,
             "hidden_sizes": [256, 512, 1024, 2048]}, _IMAGES,
        ),
        Family(  # depthwise
            "convnext", CONVOLUTION, "ConvNextForImageClassification",
            {**_LABELS, "depths": [2, 2, 6, 2], "hidden_sizes": [96, 192, 384, 768]}, _IMAGES,
        ),
        Family(  # depthwise, inverted bottlenecks
            "mobilenet_v2", CONVOLUTION, "MobileNetV2ForImageClassification",
            {**_LABELS, "image_size": _SIDE}, Inputs(24, side=_SIDE),
        ),
        Family(  # depthwise, with gates by channel
            "efficientnet", CONVOLUTION, "EfficientNetForImageClassification",
            {**_LABELS, "image_size": _SIDE, "width_coefficient": 1.0, "depth_coefficient": 1.0,
             "hidden_dim": 1280}, _IMAGES,
        ),
        Family(  # sound, by convolutions of signals
            "wav2vec2", TRANSFORMER, "Wav2Vec2ForSequenceClassification",
            {**_SMALL, "num_hidden_layers": 4, "intermediate_size": 1536, "conv_dim": [256] * 7,
             "mask_time_prob": 0.0, "layerdrop": 0.0, "num_conv_pos_embeddings": 128},
            Inputs(4, samples=16000),
        ),
        Family("unet", CONVOLUTION, "UNet", {"width": 64}, Inputs(8, side=32, labels="none")),
        Family(  # the scan stays FP32
            "mamba2", RECURRENT, "Mamba2ForCausalLM",
            {**_VOCAB, "num_hidden_layers": 4, "hidden_size": 384, "num_heads": 12, "head_dim": 64,
             "state_size": 64, "n_groups": 1, "chunk_size": 64}, _LANGUAGE,
        ),
        Family(
            "lstm", RECURRENT, "LstmLanguageModel", {**_VOCAB, "width": 512, "num_layers": 2},
            Inputs(8, (64,), labels="text"),
        ),
    )
}  # fmt: skip

# Chosen by a hash of each name, so that adding a family rarely changes the choice.
HELD_OUT = tuple(
    sorted(FAMILIES, key=lambda name: hashlib.sha256(f"{HELD_OUT_SEED} {name}".encode()).hexdigest())
)[:NUM_HELD_OUT]
SEEN = tuple(name for name in FAMILIES if name not in HELD_OUT)

# Models for GPUs: published sizes, with random weights.
LARGE: dict[str, Family] = {
    family.name: family
    for family in (
        Family(
            "bert_base", TRANSFORMER, "BertForSequenceClassification",
            {"hidden_size": 768, "num_hidden_layers": 12, "num_attention_heads": 12,
             "intermediate_size": 3072, "vocab_size": 30522}, Inputs(32, (128,)),
        ),
        Family(  # whose steps wait for launches
            "bert_base_8", TRANSFORMER, "BertForSequenceClassification",
            {"hidden_size": 768, "num_hidden_layers": 12, "num_attention_heads": 12,
             "intermediate_size": 3072, "vocab_size": 30522}, Inputs(8, (128,)),
        ),
        Family(
            "gpt2_medium", TRANSFORMER, "GPT2LMHeadModel",
            {"n_layer": 24, "n_embd": 1024, "n_head": 16, "vocab_size": 50257},
            Inputs(8, (512,), labels="text"),
        ),
        Family(
            "llama_1b", TRANSFORMER, "LlamaForCausalLM",
            {"hidden_size": 2048, "num_hidden_layers": 16, "num_attention_heads": 32,
             "num_key_value_heads": 8, "intermediate_size": 8192, "vocab_size": 128256,
             "tie_word_embeddings": True},
            Inputs(4, (1024,), labels="text"),
        ),
        Family(
            "resnet50_224", CONVOLUTION, "ResNetForImageClassification",
            {**_LABELS, "depths": [3, 4, 6, 3], "embedding_size": 64,
             "hidden_sizes": [256, 512, 1024, 2048]}, Inputs(64, side=224),
        ),
        Family(
            "gpt2_small", TRANSFORMER, "GPT2LMHeadModel",
            {"n_layer": 12, "n_embd": 768, "n_head": 12, "vocab_size": 50257},
            Inputs(8, (512,), labels="text"),
        ),
    )
}  # fmt: skip
