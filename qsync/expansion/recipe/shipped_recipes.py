"""The recipes that ship with qsync, for models of Hugging Face's transformers."""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

import torch

from qsync.errors import UnsupportedError
from qsync.expansion.recipe.recipe import Recipe, Sizes, check_unwrapped


def _read(fields: Mapping[str, str]) -> Callable[[Any], dict[str, int]]:
    """Return a function that reads sizes from a config, skipping missing ones."""

    def read(model: Any) -> dict[str, int]:
        found = {name: getattr(model.config, key, None) for name, key in fields.items()}
        return {name: size for name, size in found.items() if isinstance(size, int)}

    return read


def _build(fields: Mapping[str, str]) -> Callable[[Any, Sizes], torch.nn.Module]:
    """Return a function that builds a new model from a config with other sizes."""

    def build(model: Any, sizes: Sizes) -> torch.nn.Module:
        config = copy.deepcopy(model.config)
        for name, key in fields.items():
            if name in sizes and hasattr(config, key):
                setattr(config, key, sizes[name])
        if types := getattr(config, "layer_types", None):
            config.layer_types = [types[number] for number in sizes["sources"]]
        # A module's own attributes count: they may have been edited.
        is_unscaled = not all(getattr(part, "scale_attn_weights", True) for part in model.modules())
        if is_unscaled and sizes["head_dim"] != model.config.n_embd // model.config.n_head:
            raise UnsupportedError(
                f"attention of this {type(model).__name__} is not scaled by the width of its heads, so "
                "heads cannot become wider; give heads= in proportion to the width"
            )
        if (
            any(getattr(part, "scale_attn_by_inverse_layer_idx", False) for part in model.modules())
            and sizes["layers"] != model.config.n_layer
        ):
            raise UnsupportedError(
                "attention is scaled by its layer's number, so depth cannot grow; grow only the width"
            )
        return _made(model, config)

    return build


def _made(model: Any, config: Any) -> torch.nn.Module:
    """Build a model of the same class from a config."""
    new: torch.nn.Module = type(model)(config)
    if getattr(model, "generation_config", None) is not None:
        new.generation_config = copy.deepcopy(model.generation_config)
    return new


_GPT2 = {"width": "n_embd", "heads": "n_head", "layers": "n_layer", "mlp": "n_inner"}
GPT2 = Recipe(
    "GPT-2",
    """
    *wte                             -> stream
    *wpe                             -> stream
    *.ln_1                    stream -> normed
    *.attn.c_attn             normed -> query, key, value
    *.attn.c_proj              mixed -> stream
    *.ln_2                    stream -> normed
    *.mlp.c_fc                normed -> mlp
    *.mlp.c_proj                 mlp -> stream
    *ln_f                     stream -> final
    lm_head                    final -> _    tied *wte
    score                      final -> _
    classifier                 final -> _
    qa_outputs                 final -> _
    """,
    build=_build(_GPT2), read=_read(_GPT2), sizes={"stream": "width"}, follows={"mlp": "width"}, blocks="h.*",
    eps="layer_norm_epsilon",
)  # fmt: skip

_NAMES = {
    "width": "hidden_size", "heads": "num_attention_heads", "layers": "num_hidden_layers",
    "mlp": "intermediate_size",
}  # fmt: skip
VIT = Recipe(
    "ViT",
    """
    *embeddings.cls_token            -> stream
    *embeddings.mask_token           -> stream
    *embeddings.position_embeddings  -> stream
    *patch_embeddings.projection   _ -> stream
    *.layernorm_before        stream -> normed
    *.attention.q_proj        normed -> query
    *.attention.k_proj        normed -> key
    *.attention.v_proj        normed -> value
    *.attention.o_proj         mixed -> stream
    *.layernorm_after         stream -> normed
    *.mlp.fc1                 normed -> mlp
    *.mlp.fc2                    mlp -> stream
    *layernorm                stream -> final
    *pooler.dense              final -> pooled
    classifier                 final -> _
    decoder.0                  final -> _
    """,
    build=_build({**_NAMES, "pooled": "pooler_output_size"}), read=_read(_NAMES), sizes={"stream": "width"},
    follows={"mlp": "width", "pooled": "width"}, blocks="layers.*", eps="layer_norm_eps",
)  # fmt: skip

_GROUPED = {**_NAMES, "kv_heads": "num_key_value_heads", "head_dim": "head_dim"}
LLAMA = Recipe(
    "Llama",
    """
    *embed_tokens                    -> stream
    *.input_layernorm         stream -> normed
    *.self_attn.q_proj        normed -> query
    *.self_attn.k_proj        normed -> key
    *.self_attn.v_proj        normed -> value
    *.self_attn.o_proj         mixed -> stream
    *.post_attention_layernorm  stream -> normed
    *.mlp.gate_proj           normed -> mlp
    *.mlp.up_proj             normed -> mlp
    *.mlp.down_proj              mlp -> stream
    *norm                     stream -> final
    lm_head                    final -> _    tied *embed_tokens
    score                      final -> _
    qa_outputs                 final -> _
    """,
    build=_build(_GROUPED), read=_read(_GROUPED), sizes={"stream": "width"}, follows={"mlp": "width"},
    blocks="layers.*", rotary=True, eps="rms_norm_eps",
)  # fmt: skip

BERT = Recipe(
    "BERT",
    """
    *embeddings.word_embeddings           -> embedded
    *embeddings.position_embeddings       -> embedded
    *embeddings.token_type_embeddings     -> embedded
    *embeddings.LayerNorm        embedded -> stream
    *.attention.self.query         stream -> query
    *.attention.self.key           stream -> key
    *.attention.self.value         stream -> value
    *.attention.output.dense        mixed -> stream
    *.attention.output.LayerNorm   stream -> stream
    *.intermediate.dense           stream -> mlp
    *.output.dense                    mlp -> stream
    *.output.LayerNorm             stream -> stream
    *pooler.dense                  stream -> pooled
    *predictions.transform.dense   stream -> shaped
    *predictions.transform.LayerNorm  shaped -> final
    *predictions.decoder            final -> _    tied *word_embeddings
    cls.predictions.bias                _ -> _
    *seq_relationship              pooled -> _
    classifier                     pooled -> _
    qa_outputs                     stream -> _
    """,
    build=_build(_NAMES), read=_read(_NAMES),
    sizes={"stream": "width", "embedded": "width", "pooled": "width", "shaped": "width"},
    follows={"mlp": "width"}, blocks="layer.*",
)  # fmt: skip


def resnet(model: Any) -> Recipe:
    """Return the recipe of a ResNet with BatchNorm.

    Each stage has one space of channels: c0, c1 and so on. The first block of stage 0 reads `stem`.
    """
    config = model.config
    num_stages, is_deep = len(config.hidden_sizes), config.layer_type == "bottleneck"
    names = model.state_dict().keys()
    # Without a convolution on its shortcut the first stage adds to the output of the stem.
    stem = "stem" if any("stages.0.layers.0.shortcut.convolution" in name for name in names) else "c0"
    rows = [
        f"*embedder.embedder.convolution  _ -> {stem}",
        f"*embedder.embedder.normalization  {stem} -> {stem}",
    ]
    for s in range(num_stages):
        before, block = (f"c{s - 1}" if s else stem), f"*stages.{s}.layers"
        inner = (f"inner{s}", f"middle{s}", f"c{s}") if is_deep else (f"inner{s}", f"c{s}")
        rows.append(f"{block}.0.shortcut.convolution  {before} -> c{s}")
        rows.append(f"{block}.0.shortcut.normalization  c{s} -> c{s}")
        for k, writes in enumerate(inner):
            reads = f"c{s}" if k == 0 else inner[k - 1]
            if k == 0:
                rows.append(f"{block}.0.layer.0.convolution  {before} -> {writes}")
            rows.append(f"{block}.*.layer.{k}.convolution  {reads} -> {writes}")
            rows.append(f"{block}.*.layer.{k}.normalization  {writes} -> {writes}")
    rows.append(f"classifier.1  c{num_stages - 1} -> _")
    stages = [f"c{s}" for s in range(num_stages)]

    def build(small: Any, sizes: Sizes) -> torch.nn.Module:
        new, layers = copy.deepcopy(small.config), sizes["layers"]
        new.embedding_size = sizes[stem]
        new.hidden_sizes = [sizes[name] for name in stages]
        new.depths = list(layers) if isinstance(layers, tuple) else [layers] * num_stages
        return _made(small, new)

    inside = [f"{kind}{s}" for s in range(num_stages) for kind in ("inner", "middle")]
    return Recipe(
        "ResNet", "\n".join(rows), build=build, blocks="stages.*.layers.*",
        residual=tuple(dict.fromkeys([stem, *stages])),
        sizes={} if is_deep else {f"inner{s}": f"c{s}" for s in range(num_stages)},
        follows={name: f"c{name[-1]}" for name in inside} if is_deep else {},
    )  # fmt: skip


def bert(model: Any) -> Recipe:
    """Return the recipe of a BERT model.

    Without a pooler the classifier reads the stream, as in token classification.
    """
    if any(".pooler." in name for name, _ in model.named_parameters()):
        return BERT
    return replace(
        BERT, table=BERT.table.replace("classifier                     pooled", "classifier  stream")
    )


FAMILIES: dict[str, Recipe | Callable[[Any], Recipe]] = {
    "gpt2": GPT2, "vit": VIT, "llama": LLAMA, "mistral": LLAMA, "qwen2": LLAMA, "bert": bert,
    "resnet": resnet,
}  # fmt: skip


def recipe_of(model: torch.nn.Module) -> Recipe:
    """Return the recipe of a model.

    A class attribute `recipe` takes precedence over the recipes that ship with qsync (GPT-2, ViT, Llama,
    Mistral, Qwen2, BERT and ResNet of transformers).

    Args:
        model: The model to grow, outside of DDP, FSDP and torch.compile.

    Returns:
        The recipe, without target sizes. `Recipe.to` sets these.

    Raises:
        UnsupportedError: No recipe is known for the model, or the model is wrapped.
        FormatError: `model` is not a torch.nn.Module.

    Example:
        >>> recipe = qsync.recipe_of(gpt2).to(width=1024, layers=12)
    """
    check_unwrapped(model)
    own = getattr(type(model), "recipe", None)
    if isinstance(own, Recipe):
        return own
    name = str(getattr(getattr(model, "config", None), "model_type", ""))
    if name in FAMILIES:
        family = FAMILIES[name]
        return family if isinstance(family, Recipe) else family(model)
    raise UnsupportedError(
        f"qsync has no recipe for {type(model).__name__}; only for {', '.join(FAMILIES)}: write one "
        "(qsync.Recipe), let qsync.derive_recipe propose one, or give the class an attribute `recipe`"
    )
