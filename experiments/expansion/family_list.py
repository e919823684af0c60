"""The families that families.py grows: small random configurations of transformers' model classes."""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import cache
from importlib.util import find_spec
from typing import Any

import torch
from torch import nn

from qsync.expansion.derivation.growth_targets import with_sources

Inputs = dict[str, torch.Tensor]


@dataclass(frozen=True, slots=True)
class Family:
    """A model class of transformers and a configuration, or a function or class of timm and its arguments.

    `wide` and `deep` name the fields that grow, with dots for nested configurations. `inputs` makes a batch.
    """

    model: str
    config: Mapping[str, Any]
    wide: tuple[str, ...]
    deep: tuple[str, ...]
    inputs: Callable[[], Inputs]
    library: str = "transformers"

    def grown(self, times: float, more: int) -> dict[str, Any]:
        """Return the configuration with `times` the width and `more` layers in every stack."""
        found = copy.deepcopy(dict(self.config))
        for field in self.wide:
            _change(found, field, lambda value: round(value * times))
        for field in self.deep:
            _change(found, field, lambda value: value + more)
        return found

    def made(self, fields: Mapping[str, Any], sizes: Mapping[str, Any]) -> nn.Module:
        """Build a model with these fields; each block has the kind of the one that it copies."""
        if self.library == "timm":
            import timm

            make = getattr(timm.models, self.model)
            return make(**copy.deepcopy(dict(fields)))  # type: ignore[no-any-return]
        import transformers

        kind = getattr(transformers, self.model)
        small, config = (kind.config_class(**copy.deepcopy(dict(one))) for one in (self.config, fields))
        return kind(with_sources(small, config, sizes))  # type: ignore[no-any-return]

    def built(self, seed: int = 0) -> nn.Module:
        """Build the small model as if trained: every parameter is moved from where it began."""
        torch.manual_seed(seed)
        made = self.made(self.config, {}).eval()
        draws = torch.Generator().manual_seed(seed)
        with torch.no_grad():
            for value in made.parameters():
                scale = 0.5 / value.shape[-1] ** 0.5 if value.ndim > 1 else 0.2
                value.add_(scale * torch.randn(value.shape, generator=draws))
        return made


def _change(config: dict[str, Any], field: str, change: Callable[[Any], Any]) -> None:
    """Change one field of a nested configuration; every number of a list."""
    *above, last = field.split(".")
    for name in above:
        config = config[name]
    value = config[last]
    config[last] = [change(one) for one in value] if isinstance(value, list) else change(value)


def _randn(*shape: int) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(1))


def _tokens() -> Inputs:
    return {"input_ids": torch.randint(3, 60, (2, 9), generator=torch.Generator().manual_seed(1))}


def _pairs() -> Inputs:
    ids = _tokens()["input_ids"]
    return {"input_ids": ids, "decoder_input_ids": ids[:, :6]}


def _sound() -> Inputs:
    return {"input_features": _randn(2, 8, 32), "decoder_input_ids": _tokens()["input_ids"][:, :6]}


def _images(side: int = 32) -> Callable[[], Inputs]:
    return lambda: {"pixel_values": _randn(2, 3, side, side)}


_VOCABULARY = {
    "vocab_size": 64, "max_position_embeddings": 64, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2
}  # fmt: skip
_USUAL = {"hidden_size": 32, "num_attention_heads": 4, "num_hidden_layers": 2, "intermediate_size": 48}
_WIDE, _DEEP = ("hidden_size", "num_attention_heads", "intermediate_size"), ("num_hidden_layers",)
_KV = {"num_key_value_heads": 2}
_EACH = {**_KV, "head_dim": 8}


def _text(model: str, *wide: str, **config: Any) -> Family:
    """Return a family with the usual names of fields."""
    keys = ("num_key_value_heads",) if "num_key_value_heads" in config else ()
    return Family(model, {**_VOCABULARY, **_USUAL, **config}, (*_WIDE, *keys, *wide), _DEEP, _tokens)


def _gpt(model: str, *wide: str, **config: Any) -> Family:
    """Return a family with the names of GPT-2's fields."""
    own = {"n_embd": 32, "n_head": 4, "n_layer": 2, "n_positions": 64}
    return Family(model, {**_VOCABULARY, **own, **config}, ("n_embd", "n_head", *wide), ("n_layer",), _tokens)


def _t5(model: str, **config: Any) -> Family:
    own = {"d_model": 32, "d_ff": 48, "d_kv": 8, "num_heads": 4, "num_layers": 2, "num_decoder_layers": 2}
    return Family(
        model, {**_VOCABULARY, **own, "decoder_start_token_id": 0, **config},
        ("d_model", "d_ff", "num_heads"), ("num_layers", "num_decoder_layers"), _pairs,
    )  # fmt: skip


def _two_stacks(model: str, inputs: Callable[[], Inputs] = _pairs, **config: Any) -> Family:
    """Return a family with the names of BART's fields."""
    each = {"layers": 2, "attention_heads": 4, "ffn_dim": 48}
    own = {f"{stack}_{name}": size for stack in ("encoder", "decoder") for name, size in each.items()}
    wide = [name for name in own if not name.endswith("layers")]
    return Family(
        model, {**_VOCABULARY, "d_model": 32, **own, "decoder_start_token_id": 2, **config},
        ("d_model", *wide), ("encoder_layers", "decoder_layers"), inputs,
    )  # fmt: skip


def _vision(model: str, *wide: str, **config: Any) -> Family:
    fields = {**_USUAL, "image_size": 32, "patch_size": 8, "num_labels": 5, **config}
    return Family(model, fields, (*_WIDE, *wide), _DEEP, _images())


def _towers(model: str, *towers: str, inputs: Callable[[], Inputs], **config: Any) -> Family:
    """Return a family with a configuration inside its own for each tower."""
    each = {
        "vision_config": {**_USUAL, "image_size": 32, "patch_size": 8},
        "text_config": {**_USUAL, **_VOCABULARY},
    }
    return Family(
        model, {**each, **config}, tuple(f"{tower}.{name}" for tower in towers for name in _WIDE),
        tuple(f"{tower}.{name}" for tower in towers for name in _DEEP), inputs,
    )  # fmt: skip


def _stages(model: str, side: int, *wide: str, **config: Any) -> Family:
    return Family(model, {"num_labels": 5, **config}, wide, ("depths",), _images(side))


_EXPERTS = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 24}
_LOCAL = {**_KV, "num_local_experts": 4}
_FOUR = {"depths": [1, 1, 2, 1], "hidden_sizes": [8, 16, 24, 32]}


@cache
def families() -> dict[str, Family]:
    """Return all families by name."""
    own = {**_decoders(), **_mixtures(), **_encoders(), **_pairs_of_stacks(), **_of_images()}
    return {**own, **_of_timm()} if has_timm() else own


def has_timm() -> bool:
    """Return whether timm is installed, which this project does not require."""
    return find_spec("timm") is not None


def _decoders() -> dict[str, Family]:
    return {
        "GPT-2": _gpt("GPT2LMHeadModel"),
        "GPT-J": _gpt("GPTJForCausalLM", rotary_dim=4),
        "CodeGen": _gpt("CodeGenForCausalLM", rotary_dim=4, n_embd=64, n_head=8),
        "GPT-BigCode": _gpt("GPTBigCodeForCausalLM", "n_inner", n_inner=64),
        "GPT-NeoX, Pythia": _text("GPTNeoXForCausalLM"),
        "OPT": _text("OPTForCausalLM", "word_embed_proj_dim", "ffn_dim", word_embed_proj_dim=32, ffn_dim=48),
        "Falcon": _text("FalconForCausalLM", "ffn_hidden_size", ffn_hidden_size=64),
        "Falcon, grouped": _text(
            "FalconForCausalLM", "ffn_hidden_size", "num_kv_heads", ffn_hidden_size=64, num_kv_heads=2,
            new_decoder_architecture=True,
        ),
        "BLOOM": Family(
            "BloomForCausalLM", {**_VOCABULARY, "hidden_size": 32, "n_head": 4, "n_layer": 2},
            ("hidden_size",), ("n_layer",), _tokens,
        ),
        "MPT": Family(
            "MptForCausalLM", {**_VOCABULARY, "d_model": 32, "n_heads": 4, "n_layers": 2, "max_seq_len": 64},
            ("d_model",), ("n_layers",), _tokens,
        ),
        "Llama": _text("LlamaForCausalLM", **_KV),
        "Mistral": _text("MistralForCausalLM", **_KV),
        "Qwen2": _text("Qwen2ForCausalLM", **_KV),
        "Qwen3": _text("Qwen3ForCausalLM", **_EACH),
        "Gemma": _text("GemmaForCausalLM", **_EACH),
        "Gemma 2": _text("Gemma2ForCausalLM", **_EACH, query_pre_attn_scalar=8, sliding_window=4),
        "Gemma 3": _text("Gemma3ForCausalLM", **_EACH, query_pre_attn_scalar=8),
        "OLMo": _text("OlmoForCausalLM", **_KV),
        "OLMo 2": _text("Olmo2ForCausalLM", **_KV),
        "Phi": _text("PhiForCausalLM", **_KV),
        "Phi-3": _text("Phi3ForCausalLM", **_KV),
        "StableLM": _text("StableLmForCausalLM", **_KV),
        "StarCoder2": _text("Starcoder2ForCausalLM", **_KV),
        "Granite": _text("GraniteForCausalLM", **_KV),
        "Cohere": _text("CohereForCausalLM", **_KV),
        "Nemotron": _text("NemotronForCausalLM", **_KV),
        "Persimmon": _text("PersimmonForCausalLM"),
        "GLM-4": _text("Glm4ForCausalLM", **_EACH),
        "Helium": _text("HeliumForCausalLM", **_EACH),
        "EXAONE 4": _text("Exaone4ForCausalLM", **_KV),
        "BioGPT": _text("BioGptForCausalLM"),
    }  # fmt: skip


def _mixtures() -> dict[str, Family]:
    wide = "moe_intermediate_size"
    return {
        "Mixtral": _text("MixtralForCausalLM", **_LOCAL),
        "Phi-3.5 MoE": _text("PhimoeForCausalLM", **_LOCAL),
        "Granite MoE": _text("GraniteMoeForCausalLM", **_LOCAL),
        "gpt-oss": _text("GptOssForCausalLM", **_LOCAL, head_dim=8, num_experts_per_tok=2, sliding_window=4),
        "Qwen2-MoE": _text(
            "Qwen2MoeForCausalLM", wide, "shared_expert_intermediate_size", **_KV, **_EXPERTS,
            shared_expert_intermediate_size=16,
        ),
        "Qwen3-MoE": _text("Qwen3MoeForCausalLM", wide, **_EACH, **_EXPERTS),
        "OLMoE": _text("OlmoeForCausalLM", **_KV, num_experts=4, num_experts_per_tok=2),
        "DeepSeek-V3": _text(
            "DeepseekV3ForCausalLM", num_key_value_heads=4, n_routed_experts=4, n_group=2, topk_group=1,
            num_experts_per_tok=2, moe_intermediate_size=16, q_lora_rank=16, kv_lora_rank=16,
            qk_rope_head_dim=8, qk_nope_head_dim=8, v_head_dim=8, first_k_dense_replace=1,
        ),
    }  # fmt: skip


def _encoders() -> dict[str, Family]:
    distil = {"dim": 32, "n_heads": 4, "n_layers": 2, "hidden_dim": 48}
    return {
        "BERT": _text("BertForMaskedLM"),
        "RoBERTa": _text("RobertaForMaskedLM"),
        "ELECTRA": _text("ElectraForMaskedLM", "embedding_size", embedding_size=32),
        "ALBERT": _text("AlbertForMaskedLM", embedding_size=16),
        "MPNet": _text("MPNetForMaskedLM"),
        "ModernBERT": _text("ModernBertForMaskedLM"),
        "RoFormer": _text("RoFormerForMaskedLM", "embedding_size", embedding_size=32),
        "XLM-RoBERTa XL": _text("XLMRobertaXLForMaskedLM"),
        "DeBERTa-v2": _text("DebertaV2ForMaskedLM", relative_attention=True, pos_att_type=["c2p", "p2c"]),
        "DistilBERT": Family(
            "DistilBertForMaskedLM", {**_VOCABULARY, **distil}, ("dim", "n_heads", "hidden_dim"),
            ("n_layers",), _tokens,
        ),
    }  # fmt: skip


def _pairs_of_stacks() -> dict[str, Family]:
    untied = {"feed_forward_proj": "gated-gelu", "tie_word_embeddings": False}
    return {
        "T5": _t5("T5ForConditionalGeneration"),
        "T5 v1.1, untied": _t5("T5ForConditionalGeneration", **untied),
        "mT5": _t5("MT5ForConditionalGeneration"),
        "BART": _two_stacks("BartForConditionalGeneration"),
        "mBART": _two_stacks("MBartForConditionalGeneration"),
        "Pegasus": _two_stacks("PegasusForConditionalGeneration"),
        "Whisper": _two_stacks(
            "WhisperForConditionalGeneration", _sound, num_mel_bins=8, max_source_positions=16,
            max_target_positions=32,
        ),
    }  # fmt: skip


def _of_images() -> dict[str, Family]:
    both = ("vision_config", "text_config")
    return {
        "ViT": _vision("ViTForImageClassification"),
        "DeiT": _vision("DeiTForImageClassification"),
        "BEiT": _vision("BeitForImageClassification", use_relative_position_bias=True),
        "DINOv2": _vision("Dinov2ForImageClassification", mlp_ratio=2),
        "DINOv2, registers": _vision("Dinov2WithRegistersForImageClassification", mlp_ratio=2),
        "SigLIP": _towers("SiglipForImageClassification", both[0], inputs=_images(), num_labels=5),
        "CLIP": _towers(
            "CLIPModel", *both, inputs=lambda: {**_tokens(), **_images()()}, projection_dim=16
        ),
        "ConvNeXt": _stages("ConvNextForImageClassification", 64, "hidden_sizes", **_FOUR),
        "ConvNeXt V2": _stages("ConvNextV2ForImageClassification", 64, "hidden_sizes", **_FOUR),
        "PoolFormer": _stages("PoolFormerForImageClassification", 64, "hidden_sizes", **_FOUR),
        "ResNet": _stages(
            "ResNetForImageClassification", 32, "hidden_sizes", "embedding_size", embedding_size=8,
            hidden_sizes=[8, 16], depths=[1, 2], layer_type="basic",
        ),
        "Swin": _stages(
            "SwinForImageClassification", 32, "embed_dim", "num_heads", image_size=32, patch_size=4,
            window_size=4, embed_dim=16, depths=[2, 2], num_heads=[2, 4], mlp_ratio=2.0,
        ),
        "SegFormer": _stages(
            "SegformerForImageClassification", 32, "hidden_sizes", "num_attention_heads",
            num_encoder_blocks=2, depths=[1, 2], sr_ratios=[2, 1], hidden_sizes=[16, 32],
            num_attention_heads=[2, 4], patch_sizes=[7, 3], strides=[4, 2], mlp_ratios=[2, 2],
        ),
        "PVT": _stages(
            "PvtForImageClassification", 32, "hidden_sizes", "num_attention_heads", image_size=32,
            num_encoder_blocks=2, depths=[1, 2], sequence_reduction_ratios=[2, 1], hidden_sizes=[16, 32],
            num_attention_heads=[2, 4], patch_sizes=[4, 2], strides=[4, 2], mlp_ratios=[2, 2],
        ),
    }  # fmt: skip


def _timm(model: str, side: int, *wide: str, deep: str = "", **arguments: Any) -> Family:
    """Return a family that a function of timm builds, not a configuration."""
    config, stacks = {"num_classes": 5, **arguments}, (deep,) if deep else ()
    return Family(model, config, wide, stacks, lambda: {"x": _randn(2, 3, side, side)}, "timm")


def _of_timm() -> dict[str, Family]:
    patches = {"img_size": 32, "patch_size": 8, "embed_dim": 32, "depth": 2}
    heads = {**patches, "num_heads": 4}
    mixer = {"img_size": 32, "patch_size": 8, "embed_dim": 32, "num_blocks": 2}
    stages = {"depths": [1, 1, 2, 1], "dims": [8, 16, 24, 32]}
    windows: dict[str, Any] = {
        "img_size": 32,
        "patch_size": 4,
        "window_size": 4,
        "embed_dim": 16,
        "depths": [1, 1],
    }
    each = ("embed_dim", "num_heads")
    found = {
        "ViT": _timm("vit_tiny_patch16_224", 32, *each, deep="depth", **heads),
        "DeiT, distilled": _timm("deit_tiny_distilled_patch16_224", 32, *each, deep="depth", **heads),
        "BEiT": _timm("beit_base_patch16_224", 32, *each, deep="depth", **heads),
        "EVA-02": _timm("eva02_tiny_patch14_224", 32, *each, deep="depth", **heads),
        "CaiT": _timm("cait_xxs24_224", 32, *each, deep="depth", **heads),
        "XCiT": _timm("xcit_nano_12_p8_224", 32, *each, deep="depth", **heads),
        "Swin": _timm("swin_tiny_patch4_window7_224", 32, *each, num_heads=[2, 4], **windows),
        "ConvNeXt": _timm("convnext_atto", 64, "dims", deep="depths", **stages),
        "ConvNeXt V2": _timm("convnextv2_atto", 64, "dims", deep="depths", **stages),
        "MLP-Mixer": _timm("MlpMixer", 32, "embed_dim", deep="num_blocks", **mixer),
        "ResNet": _timm(
            "resnet18", 64, "channels", deep="layers", layers=[1, 1, 2, 1], channels=[8, 16, 24, 32]
        ),
        "PoolFormer": _timm("MetaFormer", 64, "dims", deep="depths", **stages),
        "PVT v2": _timm(
            "pvt_v2_b0", 64, "embed_dims", "num_heads", deep="depths", depths=[1, 1, 2, 1],
            embed_dims=[8, 16, 24, 32], num_heads=[1, 2, 4, 8],
        ),
        "EfficientViT": _timm(
            "efficientvit_b0", 64, "widths", depths=[1, 1, 2, 2, 2], widths=[8, 16, 16, 32, 32], head_dim=8
        ),
    }  # fmt: skip
    return {f"timm: {name}": family for name, family in found.items()}
