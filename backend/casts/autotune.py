"""Which of the fused casts a GPU takes: each is tried once against plain torch, on its own kind of data.

Plain torch has kernels of its own there, and a pass that the fused ones save is worth less than on a CPU. A
fused cast is used where it returned what the plain one does and was faster; `verdicts` says what was found.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any, NamedTuple, TypeVar

import torch
from torch import Tensor

from qsync.backend.casts import library as compiled

_Function = TypeVar("_Function", bound=Callable[..., Any])
# The share of the plain result's square that the two may differ by. Two stochastic roundings of Gaussian
# values differ by 1e-4, a wrong scale or a missed row by much more.
_MOST_DIFFERENCE = 1e-3


class RegisteredCast(NamedTuple):
    """A cast that has a fused form: the function, and arguments of ordinary size to try it on, by device."""

    function: Callable[..., Any]
    trial: Callable[[torch.device], tuple[Any, ...]]


# Every cast by its name: the modules that define casts register them.
REGISTERED: dict[str, RegisteredCast] = {}
# The library where a cast pays on a device, None where it does not; and the reason, in one sentence.
_found: dict[tuple[str, torch.device], compiled.Library | None] = {}
_verdicts: dict[tuple[str, torch.device], str] = {}


def autotuned(trial: Callable[[torch.device], tuple[Any, ...]]) -> Callable[[_Function], _Function]:
    """Register the decorated cast, with arguments like a model's of ordinary size."""

    def register(function: _Function) -> _Function:
        REGISTERED[function.__name__] = RegisteredCast(function, trial)
        return function

    return register


def library(name: str, device: torch.device) -> compiled.Library | None:
    """The compiled casts if the one of that name pays on that GPU, measured at the first call."""
    key = (name, device)
    if key not in _found:
        if torch.cuda.is_current_stream_capturing():  # nothing can be measured inside a CUDA graph
            return None
        _found[key] = _tried(name, device)
    return _found[key]


def verdicts() -> dict[tuple[str, torch.device], str]:
    """What was found so far: by cast and device, what runs there and why, in one sentence."""
    return dict(_verdicts)


def architecture(device: torch.device) -> str:
    """Of a GPU, as the compiler names it: "75", "90"."""
    major, minor = torch.cuda.get_device_capability(device)
    return f"{major}{minor}"


def _tried(name: str, device: torch.device) -> compiled.Library | None:
    key, fused = (name, device), compiled.library(architecture(device))
    if fused is None:
        _verdicts[key] = compiled.note(architecture(device)) or "there is no fused cast"
        return None
    # Asked for in the middle of someone's run: random numbers and gradient mode stay as they were.
    with torch.random.fork_rng(devices=[device]), torch.no_grad(), torch.cuda.device(device):
        try:
            difference, fused_s, plain_s = _compared(name, device, fused)
        except Exception as error:  # a launch that the GPU refuses
            _verdicts[key] = f"plain torch runs: the fused cast failed ({error})"
            return None
    measured = f"{1e3 * fused_s:.3f} ms fused, {1e3 * plain_s:.3f} in plain torch"
    if difference > _MOST_DIFFERENCE:
        _verdicts[key] = f"plain torch runs: the fused cast is wrong by {difference:.1e} of the square"
    else:
        _verdicts[key] = measured
    return fused if difference <= _MOST_DIFFERENCE and fused_s <= plain_s else None


def _compared(name: str, device: torch.device, fused: compiled.Library) -> tuple[float, float, float]:
    """How far the fused cast is from the plain one, and the seconds that each takes."""
    function, trial = REGISTERED[name]
    results, times = [], []
    try:
        for choice in (fused, None):
            _found[name, device] = choice
            results.append(function(*trial(device)))
            times.append(_least_s(function, trial(device)))
    finally:
        del _found[name, device]
    return _difference(*results), times[0], times[1]


def _least_s(function: Callable[..., Any], arguments: tuple[Any, ...]) -> float:
    """The least time of a call among several, of ten calls each: what the GPU takes, or the queueing."""
    times = []
    for _ in range(5):
        torch.cuda.synchronize()
        start = time.perf_counter()
        for _ in range(10):
            function(*arguments)
        torch.cuda.synchronize()
        times.append((time.perf_counter() - start) / 10)
    return min(times)


def _difference(a: Any, b: Any) -> float:
    """The largest share of the square of b's parts that a's differ by."""
    if isinstance(a, Tensor):
        wanted = b.float()
        return float((a.float() - wanted).square().sum() / wanted.square().sum().clamp_min(1e-30))
    return max(_difference(x, y) for x, y in zip(a, b, strict=True))


def random_values(device: torch.device, *shape: int) -> Tensor:
    return torch.randn(shape, device=device, generator=torch.Generator(device).manual_seed(0))


def random_codes(device: torch.device, *shape: int) -> Tensor:
    return (random_values(device, *shape) * 30).clamp(-127, 127).to(torch.int8)


def random_positive(device: torch.device, size: int) -> Tensor:
    return random_values(device, size).abs() + 0.5


def random_images(device: torch.device) -> Tensor:
    return random_values(device, 32, 64, 28, 28).contiguous(memory_format=torch.channels_last)
