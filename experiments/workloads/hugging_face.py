"""Any Hugging Face configuration as a workload: language models on text, image classifiers on digits."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

from qsync.errors import QSyncError
from qsync.experiments.workloads.bert import masked
from qsync.experiments.workloads.workload import Workload, digits_workload, text_workload
from qsync.integrations.hugging_face import IMAGE, MASKED, read_config

_BYTES, _CONTEXT = 256, 128
# What one rank takes; a GPU more, or it would wait for its launches.
_SEQUENCES, _IMAGES = (32, 128) if torch.cuda.is_available() else (4, 16)


class Logits(nn.Module):
    """A Hugging Face model that gets one tensor and returns its logits."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        """Return the logits."""
        return self.model(inputs).logits  # type: ignore[no-any-return]


class ImageLogits(Logits):
    """An image classifier on grey images, resized to its own size and channels."""

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
    """Return a workload of a `config.json`'s model, with random weights.

    Raises QSyncError for an invalid file, and for a model that neither models language nor classifies images.
    """
    config, kind, task = read_config(path)
    if task is None:
        raise QSyncError(
            f"the demo cannot train {kind.__name__}; give a causal or masked language model, or an image "
            "classifier"
        )
    name = f"{config.model_type} of {path.name}"
    if task == IMAGE:
        if data is not None:
            raise QSyncError(
                f"{name} classifies images and always trains on scikit-learn's digits; leave out --data"
            )
        config.num_labels = 10
        about = f"{name}, {_IMAGES} images per rank; scikit-learn's digits"
        return digits_workload(name, lambda: ImageLogits(kind(config)), _IMAGES, about)
    if config.vocab_size < _BYTES:
        raise QSyncError(
            f"{path} has a vocabulary of {config.vocab_size}; but text is read as bytes; give it {_BYTES} "
            "or more"
        )
    context = min(_CONTEXT, getattr(config, "max_position_embeddings", _CONTEXT) or _CONTEXT)
    about = f"{name}, {_SEQUENCES} x {context} tokens per rank; text: {{source}}"
    prepare = {"prepare": lambda inputs, targets, key: masked(inputs, key)} if task == MASKED else {}
    return text_workload(
        name, lambda: Logits(kind(config)), _SEQUENCES, context, about, data=data, **prepare
    )  # fmt: skip
