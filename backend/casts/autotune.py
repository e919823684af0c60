"""Decide which fused casts run on a GPU, by timing each against plain torch.

Plain torch has kernels of its own on GPUs, and saving a pass gains less there than on a CPU. A fused cast is
used if it returned the plain one's result and was faster; `verdicts` lists the findings.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple, TypeVar

import torch
from torch import Tensor

from qsync.backend.casts import compiled_casts as compiled
from qsync.backend.cuda_build import architecture
from qsync.backend.devices.kernel_timing import least_s

_Function = TypeVar("_Function", bound=Callable[..., Any])
# Largest squared difference of fused and plain results, as a share of the plain result's square. Two
# stochastic roundings of Gaussian values differ by 1e-4, a wrong scale or a missed row by much more.
_MAX_DIFFERENCE = 1e-3


class RegisteredCast(NamedTuple):
    """A cast with a fused form, and arguments of ordinary size for its trial, by device."""

    function: Callable[..., Any]
    trial: Callable[[torch.device], tuple[Any, ...]]


# Every cast by name; the modules that define casts register them.
REGISTERED: dict[str, RegisteredCast] = {}
# The library if a cast is faster on a device, else None; and the reason, in one sentence.
_found: dict[tuple[str, torch.device], compiled.Library | None] = {}
_verdicts: dict[tuple[str, torch.device], str] = {}


def autotuned(trial: Callable[[torch.device], tuple[Any, ...]]) -> Callable[[_Function], _Function]:
    """Register the decorated cast, with trial arguments of ordinary size."""

    def register(function: _Function) -> _Function:
        REGISTERED[function.__name__] = RegisteredCast(function, trial)
        return function

    return register


def library(name: str, device: torch.device) -> compiled.Library | None:
    """Return the compiled casts if the named cast is faster on a GPU; the first call measures."""
    key = (name, device)
    if key not in _found:
        if torch.cuda.is_current_stream_capturing():  # nothing can be measured inside a CUDA graph
            return None
        _found[key] = _tried(name, device)
    return _found[key]


def verdicts() -> dict[tuple[str, torch.device], str]:
    """Return the findings so far: by cast and device, which form runs and why, in one sentence."""
    return dict(_verdicts)


def _tried(name: str, device: torch.device) -> compiled.Library | None:
    key, fused = (name, device), compiled.library(architecture(device))
    if fused is None:
        _verdicts[key] = compiled.note(architecture(device)) or "there is no fused cast"
        return None
    # This may happen in the middle of a run: keep random numbers and gradient mode as they were.
    with torch.random.fork_rng(devices=[device]), torch.no_grad(), torch.cuda.device(device):
        try:
            difference, fused_s, plain_s = _compared(name, device, fused)
        except Exception as error:  # a launch that the GPU refuses
            _verdicts[key] = f"plain torch runs: the fused cast failed ({error})"
            return None
    measured = f"{1e3 * fused_s:.3f} ms fused, {1e3 * plain_s:.3f} in plain torch"
    if difference > _MAX_DIFFERENCE:
        _verdicts[key] = f"plain torch runs: the fused cast is wrong by {difference:.1e} of the square"
    else:
        _verdicts[key] = measured
    return fused if difference <= _MAX_DIFFERENCE and fused_s <= plain_s else None


def _compared(name: str, device: torch.device, fused: compiled.Library) -> tuple[float, float, float]:
    """Return the difference of the fused cast from the plain one, and the seconds of each."""
    function, trial = REGISTERED[name]
    results, times = [], []
    try:
        for choice in (fused, None):
            _found[name, device] = choice
            results.append(function(*trial(device)))
            times.append(_seconds(function, trial(device)))
    finally:
        del _found[name, device]
    return _difference(*results), times[0], times[1]


def _seconds(function: Callable[..., Any], arguments: tuple[Any, ...]) -> float:
    """Return the seconds per call of ten in a row: the GPU's work or the queueing, if longer."""
    return least_s(lambda: function(*arguments), calls=10)


def _difference(a: Any, b: Any) -> float:
    """Return the largest relative squared difference among the parts of two results."""
    if isinstance(a, Tensor):
        wanted = b.float()
        return float((a.float() - wanted).square().sum() / wanted.square().sum().clamp_min(1e-30))
    return max(_difference(x, y) for x, y in zip(a, b, strict=True))


def random_values(device: torch.device, *shape: int) -> Tensor:
    """Return Gaussian values, the same at every call."""
    return torch.randn(shape, device=device, generator=torch.Generator(device).manual_seed(0))


def random_codes(device: torch.device, *shape: int) -> Tensor:
    """Return INT8 codes of Gaussian values."""
    return (random_values(device, *shape) * 30).clamp(-127, 127).to(torch.int8)


def random_positive(device: torch.device, size: int) -> Tensor:
    """Return values of at least 0.5: scales."""
    return random_values(device, size).abs() + 0.5


def random_images(device: torch.device) -> Tensor:
    """Return Gaussian images in channels-last order."""
    return random_values(device, 32, 64, 28, 28).contiguous(memory_format=torch.channels_last)
