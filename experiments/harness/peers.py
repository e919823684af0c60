"""The peers of qsync: torch.autocast, and torch.compile (Inductor)."""

from __future__ import annotations

import contextlib
import logging
import warnings
from collections.abc import Callable, Iterator
from typing import Any

import torch

Run = Callable[..., Any]


def under_autocast(run: Run, device: torch.device) -> Run:
    """Return the call under torch.autocast in BF16; weight casts are cached within one call."""

    def call(*args: Any, **kwargs: Any) -> Any:
        with torch.autocast(device.type, torch.bfloat16):
            return run(*args, **kwargs)

    return call


def compiled(run: Run, mode: str | None = None) -> Run:
    """Compile the call with Inductor for fixed shapes: symbolic ones make slower code.

    The mode "reduce-overhead" replays CUDA graphs on a GPU.
    """
    import torch._inductor.config

    torch._inductor.config.compile_threads = 1  # no pool of compilers beside the measurement
    return torch.compile(run, dynamic=False, mode=mode)


def peers(device: torch.device, inductor: bool) -> dict[str, Callable[[Run], Run]]:
    """Return each peer's way to run a call, by name."""
    found: dict[str, Callable[[Run], Run]] = {"autocast": lambda run: under_autocast(run, device)}
    if inductor:
        found["inductor fp32"] = compiled
        found["inductor bf16"] = lambda run: under_autocast(compiled(run), device)
    return found


@contextlib.contextmanager
def silent() -> Iterator[None]:
    """Silence transformers' import warnings about other devices and deprecated names."""
    before = logging.root.manager.disable
    logging.disable(logging.WARNING)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
    finally:
        logging.disable(before)
