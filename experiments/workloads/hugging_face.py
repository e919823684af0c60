"""Any Hugging Face configuration as a workload: language models on text, image classifiers on digits."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

from qsync.errors import QSyncError, shortened
from qsync.experiments.workloads.bert import masked
from qsync.experiments.workloads.workload import Workload, digits_workload, text_workload

PREFIX = "hf:"
_BYTES, _CONTEXT, _SEQUENCES, _IMAGES = 256, 128, 4, 16
# The first that a model type has is trained.
_CAUSAL, _MASKED, _IMAGE = "CAUSAL_LM", "MASKED_LM", "IMAGE_CLASSIFICATION"


class Logits(nn.Module):
    """A Hugging Face model that takes one tensor and returns its logits."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        """Return the logits."""
        return self.model(inputs).logits  # type: ignore[no-any-return]


class ImageLogits(Logits):
    """An image classifier: grey images are brought to the size and the channels that it takes."""

    def __init__(self, model: Any) -> None:
        super().__init__(model)
        size = getattr(model.config, "image_size", None) or 64
        self._size = (size, size) if isinstance(size, int) else tuple(size)
        self._channels = getattr(model.config, "num_channels", 3)

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        """Return the logits."""
        images = F.interpolate(inputs, self._size).expand(-1, self._channels, -1, -1)
        return self.model(images).logits  # type: ignore[no-any-return]


def hugging_face_workload(path: Path, data: str | Path | None = None) -> Workload:
    """Return the model of a `config.json` as a workload, with random weights.

    Raises QSyncError for a file that is no configuration, and for a model that neither models language nor
    classifies images.
    """
    config, kind = _config(path)
    name = f"{config.model_type} of {path.name}"
    make = _maker(config, kind)
    if kind == _IMAGE:
        if data is not None:
            raise QSyncError(
                f"{name} classifies images, and trains on scikit-learn's digits; leave out --data"
            )
        about = f"{name}, {_IMAGES} images per rank; scikit-learn's digits"
        return digits_workload(name, lambda: ImageLogits(make()), _IMAGES, about)
    if config.vocab_size < _BYTES:
        raise QSyncError(
            f"{path} has a vocabulary of {config.vocab_size}; text is read as bytes, so give it {_BYTES} "
            "or more"
        )
    context = min(_CONTEXT, getattr(config, "max_position_embeddings", _CONTEXT) or _CONTEXT)
    about = f"{name}, {_SEQUENCES} x {context} tokens per rank; text: {{source}}"
    prepare = {"prepare": lambda inputs, targets, key: masked(inputs, key)} if kind == _MASKED else {}
    return text_workload(
        name, lambda: Logits(make()), _SEQUENCES, context, about, data=data, **prepare
    )  # fmt: skip


def _config(path: Path) -> tuple[Any, str]:
    """Read a configuration, and find out what its model does."""
    from transformers import AutoConfig
    from transformers.models.auto import modeling_auto

    try:
        values = json.loads(path.read_text(encoding="utf-8"))
        config: Any = AutoConfig.for_model(**values)
    except (OSError, ValueError, TypeError, KeyError) as error:
        raise QSyncError(
            f"{shortened(str(path), quote=False)} is no Hugging Face config.json with a model_type: "
            f"{shortened(error)}"
        ) from None
    config.use_cache = False
    for kind in (_CAUSAL, _MASKED, _IMAGE):
        named = getattr(modeling_auto, f"MODEL_FOR_{kind}_MAPPING_NAMES").get(config.model_type)
        wanted = config.architectures
        if named is not None and (not wanted or named in wanted):
            return config, kind
    raise QSyncError(
        f"the demo trains causal and masked language models and image classifiers, and {config.model_type} "
        f"as {', '.join(config.architectures or ['it is'])} is none of these"
    )


def _maker(config: Any, kind: str) -> Callable[[], nn.Module]:
    import transformers

    auto = {_CAUSAL: "CausalLM", _MASKED: "MaskedLM", _IMAGE: "ImageClassification"}[kind]
    if kind == _IMAGE:
        config.num_labels = 10
    return lambda: getattr(transformers, f"AutoModelFor{auto}").from_config(config)
