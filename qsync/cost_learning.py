"""Teaching a cost model on this device: its measured peaks, and a few operators chosen for what they
teach.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable, Iterable, Sequence

import torch
from torch import Tensor, nn

from qsync import api
from qsync.backend.device_detection import candidates, detect_class, machine
from qsync.backend.device_peaks import measured_peaks
from qsync.cost_sampling import Bench, can_measure
from qsync.predictor.cost_model.model import CostModel
from qsync.predictor.cost_model.op_calls import Call
from qsync.predictor.cost_model.samples import Sample, choose, samples_of
from qsync.predictor.cost_model.shape_pool import pool
from qsync.predictor.profiling.clocks import clock_for
from qsync.records.datasheets import DataSheet
from qsync.records.graph import OpGraph
from qsync.records.precision import Precision
from qsync.records.profiles import Profile

NUM_SAMPLES = 160
# Calls that are measured together: so many fit into memory, and a step of them is short.
PART = 40
# Nothing that takes longer than a few milliseconds is measured: as many small ones teach more.
_MOST_FLOPS = 3e9
_POOL = 1500
_COPIED = 2**26  # bytes: beyond every cache


def learn(
    known: Iterable[tuple[OpGraph, Profile]] = (),
    device: str | torch.device = "cpu",
    *,
    wanted: Iterable[Call] = (),
    num: int = NUM_SAMPLES,
    precisions: Sequence[Precision] | None = None,
    rounds: int = 3,
    progress: Callable[[str], None] = lambda text: None,
) -> CostModel:
    """A cost model of this device: from profiles measured on it, and from `num` single operators measured
    now.

    The operators are those that stand for most (KMeans over features) among the `wanted` ones and those that
    models are usually made of. Its stated error is held out, and saved with it.

    >>> qsync.cost_learning.learn([(graph, profile)]).save("costs.json")
    """
    place = torch.device(device)
    progress("peaks of this device")
    sheet = measure_sheet(place)
    samples = measure(choose_calls(num, sheet, wanted), sheet, place, precisions, rounds, progress)
    for graph, profile in known:
        samples += samples_of(graph, profile, sheet)
    progress("fitting, and holding out")
    return CostModel.learn(samples)


def choose_calls(num: int, sheet: DataSheet, wanted: Iterable[Call] = ()) -> list[Call]:
    """Half of `num` calls stand for the wanted ones, if any; the others for what models are made of."""
    able = [call for call in dict.fromkeys(wanted) if can_measure(call) and call.flops <= _MOST_FLOPS]
    found = choose(able, num // 2, sheet) if able else []
    usual = [call for call in pool(_POOL) if can_measure(call) and call.flops <= _MOST_FLOPS]
    return found + choose(usual, num - len(found), sheet)


def measure(
    calls: Sequence[Call],
    sheet: DataSheet,
    device: torch.device,
    precisions: Sequence[Precision] | None = None,
    rounds: int = 3,
    progress: Callable[[str], None] = lambda text: None,
) -> list[Sample]:
    """The seconds of every call in every precision and direction on this device, of their casts and of the
    operators around them.
    """
    samples: list[Sample] = []
    for start in range(0, len(calls), PART):
        progress(f"measuring operators {start + 1} to {min(start + PART, len(calls))} of {len(calls)}")
        graph, profile = profile_calls(calls[start : start + PART], device, precisions, rounds)
        samples += samples_of(graph, profile, sheet)
    return samples


def profile_calls(
    calls: Sequence[Call],
    device: torch.device,
    precisions: Sequence[Precision] | None = None,
    rounds: int = 3,
) -> tuple[OpGraph, Profile]:
    """Calls as the operators of one graph, and that graph's profile."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        bench = Bench(calls).to(device)
        gradients = [torch.randn(shape, device=device) for shape in bench.shapes]

    def loss(model: nn.Module, x: Tensor) -> Tensor:
        results = model(x)
        return sum((y.float() * g).sum() for y, g in zip(results, gradients, strict=True))  # type: ignore[return-value]

    one = torch.ones((), device=device)
    chosen = precisions or candidates(detect_class(device))
    graph = api.trace_step(bench, one, loss)
    return graph, api.profile(bench, one, loss, precisions=chosen, rounds=rounds)


def measure_sheet(device: torch.device) -> DataSheet:
    """What this device reaches at best: products of each type, copies beyond caches, the least product."""
    found = detect_class(device)
    clock = clock_for(device, None)
    source = torch.ones(_COPIED // 4, device=device)
    target, one = torch.empty_like(source), torch.ones(8, 8, device=device, requires_grad=True)

    def least(run: Callable[[], object], times: int) -> list[float]:
        seconds = []
        for _ in range(times):
            start = clock.now()
            run()
            end = clock.now()
            clock.settle()
            seconds.append(clock.seconds(start, end))
        return seconds[1:]

    copy_s = min(least(lambda: target.copy_(source), 6))
    launch_s = statistics.median(least(lambda: one @ one, 200))
    capability = torch.cuda.get_device_capability(device) if device.type == "cuda" else None
    name = machine()["processor"] if device.type == "cpu" else torch.cuda.get_device_name(device)
    return DataSheet(
        found.name, measured_peaks(device), 2 * _COPIED / copy_s, found.memory_bytes, 2**25, launch_s,
        capability, f"measured on {name}",
    )  # fmt: skip
