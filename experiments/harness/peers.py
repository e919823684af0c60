"""The peers of qsync: torch.autocast, torch.compile (Inductor) and torchao's low-precision training.

torchao is optional (`pip install 'qsync-train[peers]'`). Its INT8 training has two forms. With torch 2.13 and
torchao 0.18 the default, a tensor subclass, trains in FP32 without a word: F.linear runs as `aten::addmm` and
`aten::mm`. So `module_swap=True` is the peer.
"""

from __future__ import annotations

import contextlib
import logging
import warnings
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch

from qsync.errors import UnsupportedError, installing


def under_autocast(run: Callable[..., Any], device: torch.device) -> Callable[..., Any]:
    """Return the call under torch.autocast in BF16; its cache of weight casts lives for one call."""

    def call(*args: Any, **kwargs: Any) -> Any:
        with torch.autocast(device.type, torch.bfloat16):
            return run(*args, **kwargs)

    return call


def compiled(run: Callable[..., Any]) -> Callable[..., Any]:
    """Compile the call with Inductor, for this shape only: symbolic shapes make slower code."""
    import torch._inductor.config

    torch._inductor.config.compile_threads = 1  # no pool of compilers beside what is measured
    return torch.compile(run, dynamic=False)


def torchao_version() -> str | None:
    """Return torchao's version; None if it is not installed or cannot be imported here."""
    try:
        with silent():
            import torchao
            import torchao.prototype.quantized_training
    except Exception:  # a binary package built for another torch may raise anything
        return None
    return str(torchao.__version__)


def torchao(model: torch.nn.Module, form: str = "int8") -> torch.nn.Module:
    """Put linear layers into torchao's training in place: `int8`, or `float8`, rowwise.

    Raises UnsupportedError if there is no torchao.
    """
    if torchao_version() is None:
        raise UnsupportedError(f"torchao is not installed: {installing('peers')}")
    with silent():
        if form == "float8":  # GPUs only
            from torchao import float8

            config = float8.Float8LinearConfig.from_recipe_name("rowwise")
            float8.convert_to_float8_training(model, config=config)
        else:
            from torchao.prototype import quantized_training
            from torchao.quantization import quantize_

            quantize_(model, quantized_training.Int8MixedPrecisionTrainingConfig(module_swap=True))
    return model


@dataclass(frozen=True, slots=True)
class Peer:
    """How others run a layer or a model; `torchao` is the form that linear layers are put into."""

    name: str
    autocast: bool = False
    inductor: bool = False
    torchao: str = ""
    cuda_only: bool = False

    def call(self, run: Callable[..., Any], device: torch.device) -> Callable[..., Any]:
        """Return the call as this peer runs it."""
        run = compiled(run) if self.inductor else run
        return under_autocast(run, device) if self.autocast else run


PEERS = (
    Peer("autocast", autocast=True),
    Peer("inductor fp32", inductor=True),
    Peer("inductor bf16", autocast=True, inductor=True),
    Peer("torchao int8", torchao="int8"),
    Peer("torchao int8, inductor", inductor=True, torchao="int8"),
    Peer("torchao float8, inductor", inductor=True, torchao="float8", cuda_only=True),
)


def peers_on(device: torch.device, inductor: bool, linear: bool) -> list[Peer]:
    """Return the peers on a device; torchao only for what has no other products than linear layers."""
    return [
        peer for peer in PEERS
        if (inductor or not peer.inductor) and (linear or not peer.torchao)
        and (device.type == "cuda" or not peer.cuda_only)
    ]  # fmt: skip


@contextlib.contextmanager
def silent() -> Iterator[None]:
    """Silence warnings of importing torchao: of binaries for other devices, and of names to come."""
    before = logging.root.manager.disable
    logging.disable(logging.WARNING)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
    finally:
        logging.disable(before)
