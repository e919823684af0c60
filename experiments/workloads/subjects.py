"""The models of the demo and of the experiments: GPT, BERT, ViT, ResNet and VGG with BatchNorm, on real data.

The experiments' models are small, so that hundreds of steps fit into minutes on one core, with realistic
structures: residual streams, batch and layer norms, attention with and without a mask, strided convolutions,
pooling. Text is the source of Python's standard library, images are scikit-learn's digits.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

from torch import nn

from qsync.errors import QSyncError
from qsync.experiments.workloads.bert import Bert, masked
from qsync.experiments.workloads.gpt import Gpt
from qsync.experiments.workloads.hugging_face import hugging_face_workload
from qsync.experiments.workloads.resnet import ResNet
from qsync.experiments.workloads.vgg import Vgg
from qsync.experiments.workloads.vit import Vit
from qsync.experiments.workloads.workload import Workload, digits_workload, text_workload
from qsync.integrations.hugging_face import PREFIX

NAMES = ("gpt", "bert", "vit", "resnet", "vgg")
DEMO_NAMES = ("gpt", "gpt-small", "bert", "vit", "resnet", "resnet-small", "vgg")
CONTEXT, DEMO_CONTEXT = 128, 256
# Image models, with their usual batch sizes.
_IMAGES: dict[str, tuple[Callable[[], nn.Module], int]] = {
    "vit": (Vit, 16),
    "resnet": (lambda: ResNet(channels=(32, 64, 128)), 64),
    "vgg": (Vgg, 32),
}


def subject(name: str, batch_size: int | None = None) -> Workload:
    """Return the experiments' model of this name as a workload. Raises QSyncError for an unknown name."""
    if name in _IMAGES:
        make, usual = _IMAGES[name]
        size = batch_size or usual
        return digits_workload(name, make, size, f"{name}, {size} images of 16 x 16; scikit-learn's digits")
    size = batch_size or 8
    about = f"byte-level {name.upper()}, {size} x {CONTEXT} tokens; text: {{source}}"
    if name == "gpt":
        make = lambda: Gpt(num_layers=4, width=256, num_heads=4, context=CONTEXT)  # noqa: E731
        return text_workload(name, make, size, CONTEXT, about)
    if name == "bert":
        return text_workload(
            name, lambda: Bert(context=CONTEXT), size, CONTEXT, about,
            prepare=lambda inputs, targets, key: masked(inputs, key),
        )  # fmt: skip
    raise QSyncError(f"unknown model {name!r}; choose from {', '.join(NAMES)}")


def demo_workload(name: str, data: str | Path | None = None) -> Workload:
    """Return the demo's workload of this name, with its data read.

    `data` is a file or folder of text instead of the standard library's source, for gpt only. Raises
    QSyncError for an unknown name, and for invalid `data`.
    """
    if name.startswith(PREFIX):
        return hugging_face_workload(Path(name.removeprefix(PREFIX)), data)
    if name == "gpt":
        return text_workload(
            name, lambda: Gpt(context=DEMO_CONTEXT), 4, DEMO_CONTEXT,
            f"byte-level GPT, 10.9 M parameters, 4 x {DEMO_CONTEXT} tokens per rank; text: {{source}}",
            data=data,
        )  # fmt: skip
    if name in DEMO_NAMES and data is not None:
        raise QSyncError(f"the {name} workload has fixed training data; leave out --data, or choose gpt")
    if name in ("gpt-small", "bert", "vit", "vgg"):
        return replace(subject(name.removesuffix("-small")), name=name)
    if name == "resnet":
        return digits_workload(
            name, ResNet, 96,
            "ResNet with BatchNorm, 2.8 M parameters, 96 images per rank; scikit-learn's digits, 16 x 16",
        )  # fmt: skip
    if name == "resnet-small":
        about = "ResNet of two blocks, 32 images per rank; scikit-learn's digits, 16 x 16"
        return digits_workload(name, lambda: ResNet(channels=(32, 64), num_blocks=1), 32, about)
    raise QSyncError(f"unknown workload {name!r}; choose one of {', '.join(DEMO_NAMES)}, or hf:CONFIG.json")
