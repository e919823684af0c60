"""Learn a device's cost model from its measured peaks and a few single operators.

Each operator is measured between neighbours as in a model: its inputs come from a thin product (16 wide), so
that inputs and gradients have the type of a product's result. An operator on images sits between two thin
convolutions, so that images have a convolution's memory order. All operators form one module, which is
profiled like any model: with the kernels, casts and clocks of a real step.
"""

from __future__ import annotations

import re
import statistics
from collections.abc import Callable, Iterable, Sequence
from typing import Any, cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from qsync import api
from qsync.backend.devices.device_detection import detect_class, machine
from qsync.backend.measure_peaks import measured_peaks
from qsync.backend.precisions_that_pay import default_precisions
from qsync.errors import QSyncError, shortened
from qsync.operators.precision import Precision
from qsync.predictor.cost_model.model import CostModel
from qsync.predictor.cost_model.op_calls import Argument, Call
from qsync.predictor.cost_model.samples import Sample, choose, samples_of
from qsync.predictor.cost_model.shape_pool import pool
from qsync.predictor.profiling.clocks import clock_for
from qsync.records.datasheets import DataSheet
from qsync.records.graph import OpGraph, num_elements
from qsync.records.profiles import Profile

NUM_SAMPLES = 160
# Operators per profiled module: they fit into memory, and a step is short.
NUM_PER_PROFILE = 40
# Operators above this many operations are skipped: many small ones teach more than few large ones.
_MAX_FLOPS = 3e9
_POOL_SIZE = 1500
_COPIED_BYTES = 2**26  # larger than any cache
_THIN_WIDTH = 16
_ON_IMAGES = ("conv2d", "batch_norm", "max_pool2d")

UNARY: dict[str, Callable[[Tensor], Tensor]] = {
    "relu": F.relu, "gelu": F.gelu, "silu": F.silu, "tanh": torch.tanh, "sigmoid": torch.sigmoid,
    "softmax": lambda x: F.softmax(x, -1), "dropout": lambda x: F.dropout(x, 0.1),
    "max_pool2d": lambda x: F.max_pool2d(x, 2), "neg": torch.neg,
}  # fmt: skip
_BINARY: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "add": torch.add, "sub": torch.sub, "mul": torch.mul, "matmul": torch.matmul,
}  # fmt: skip


def learn(
    device: str | torch.device = "cpu",
    *,
    wanted: Iterable[Call] = (),
    num: int = NUM_SAMPLES,
    progress: Callable[[str], None] = lambda text: None,
) -> CostModel:
    """Learn a cost model of this device, by measuring `num` single operators.

    The operators represent the `wanted` ones and those of common models: every kind, from small to large. The
    model's stated error is measured on held-out shapes, and saved with it.

    >>> qsync.what_if.cost_learning.learn("cpu").save("costs.json")
    """
    if not re.fullmatch(r"cpu|cuda(:\d+)?", str(device)):
        raise QSyncError(f"costs can be learned on cpu or cuda only, found {shortened(str(device))}")
    target = torch.device(device)
    progress("peaks of this device")
    sheet = measure_sheet(target)
    calls = choose_calls(num, sheet, wanted)
    samples: list[Sample] = []
    for start in range(0, len(calls), NUM_PER_PROFILE):
        some = calls[start : start + NUM_PER_PROFILE]
        progress(f"measuring operators {start + 1} to {start + len(some)} of {len(calls)}")
        samples += samples_of(*profile_calls(some, target), sheet)
    progress("fitting, and holding out")
    return CostModel.learn(samples)


def choose_calls(num: int, sheet: DataSheet, wanted: Iterable[Call] = ()) -> list[Call]:
    """Choose `num` calls: half represent `wanted` (if given), the others common models."""
    able = [call for call in dict.fromkeys(wanted) if can_measure(call) and call.flops <= _MAX_FLOPS]
    found = choose(able, num // 2, sheet) if able else []
    usual = [call for call in pool(_POOL_SIZE) if can_measure(call) and call.flops <= _MAX_FLOPS]
    return found + choose(usual, num - len(found), sheet)


def profile_calls(
    calls: Sequence[Call],
    device: torch.device,
    precisions: Sequence[Precision] | None = None,
    rounds: int = 3,
) -> tuple[OpGraph, Profile]:
    """Profile these calls in one module; return its graph and profile."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        bench = Bench(calls).to(device)
        gradients = [torch.randn(shape, device=device) for shape in bench.shapes]

    def loss(model: nn.Module, x: Tensor) -> Tensor:
        results = model(x)
        total = sum((y.float() * g).sum() for y, g in zip(results, gradients, strict=True))
        return cast(Tensor, total)

    one = torch.ones((), device=device)
    chosen = precisions or default_precisions(detect_class(device))
    graph = api.trace_step(bench, one, loss)
    return graph, api.profile(bench, one, loss, precisions=chosen, rounds=rounds)


def measure_sheet(device: torch.device) -> DataSheet:
    """Measure a device's peaks: products by type, copies beyond caches, and the smallest product."""
    found = detect_class(device)
    clock = clock_for(device, None)
    source = torch.ones(_COPIED_BYTES // 4, device=device)
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
        found.name, measured_peaks(device), 2 * _COPIED_BYTES / copy_s, found.memory_bytes, 2**25, launch_s,
        capability, f"measured on {name}",
    )  # fmt: skip


def can_measure(call: Call) -> bool:
    """Return whether a call can be measured alone: its shapes determine its arguments."""
    shapes = [argument.shape for argument in call.inputs]
    if any(0 in shape or not shape for shape in (*shapes, call.output)):
        return False
    fresh = sum(not argument.parameter for argument in call.inputs)
    if call.kind in UNARY or call.kind in ("layer_norm", "batch_norm"):
        return len(shapes) == fresh == 1
    if call.kind in _BINARY:
        return len(shapes) == fresh == 2
    if call.kind == "conv2d":
        return len(shapes[0]) == 4 and fresh == 1 and shapes[0][1] % shapes[1][1] == 0
    return (call.kind == "linear" and fresh == 1) or (call.kind == "attention" and len(shapes) == fresh == 3)


class Bench(nn.Module):
    """A module of several calls, each on its own values; called with a scalar, returns their results."""

    def __init__(self, calls: Sequence[Call]) -> None:
        super().__init__()
        self.cells = nn.ModuleList(_Cell(call) for call in calls)

    def forward(self, x: Tensor) -> list[Tensor]:
        """Return every call's result times `x`."""
        return [cell() * x for cell in self.cells]

    @property
    def shapes(self) -> list[tuple[int, ...]]:
        """Return the shapes of the results."""
        return [cast(_Cell, cell).shape for cell in self.cells]


class _Cell(nn.Module):
    """One call on its own values; a thin convolution reads a result that is images."""

    def __init__(self, call: Call) -> None:
        super().__init__()
        self.call, self.kind = call, call.kind
        self.values, self.given = nn.ModuleList(), nn.ParameterList()
        for argument in call.inputs:
            if argument.parameter:
                scale = num_elements(argument.shape[1:]) ** -0.5
                self.given.append(torch.randn(argument.shape) * scale)
            else:
                self.values.append(_Value(argument, call.kind in _ON_IMAGES and len(argument.shape) == 4))
        if call.kind in ("layer_norm", "batch_norm"):
            shape = call.inputs[0].shape
            flat = nn.BatchNorm2d if len(shape) == 4 else nn.BatchNorm1d
            self.norm: nn.Module = nn.LayerNorm(shape[-1]) if call.kind == "layer_norm" else flat(shape[1])
        images = call.kind in _ON_IMAGES and len(call.output) == 4
        self.reads = nn.Parameter(torch.randn(_THIN_WIDTH, call.output[1], 1, 1)) if images else None
        self.shape = (call.output[0], _THIN_WIDTH, *call.output[2:]) if images else call.output

    def forward(self) -> Tensor:
        result = self._run(*(value() for value in self.values), *self.given)
        return result if self.reads is None else F.conv2d(result, self.reads)

    def _run(self, *values: Any) -> Tensor:
        result: Tensor
        if self.kind in UNARY:
            result = UNARY[self.kind](*values)
        elif self.kind in _BINARY:
            result = _BINARY[self.kind](*values)
        elif self.kind == "linear":
            result = F.linear(*values)
        elif self.kind == "attention":
            result = F.scaled_dot_product_attention(*values[:3])
        elif self.kind == "conv2d":
            result = F.conv2d(*values, **_geometry(self.call))
        else:
            result = self.norm(*values)
        return result


class _Value(nn.Module):
    """A value from a thin product or convolution; a constant where it needs no gradient."""

    value: Tensor

    def __init__(self, argument: Argument, image: bool) -> None:
        super().__init__()
        self.shape, self.image = argument.shape, image
        rows, columns = self.shape[0], num_elements(self.shape[1:])
        if argument.gradient and image:
            self.left = nn.Parameter(torch.randn(rows, _THIN_WIDTH, *self.shape[2:]))
            self.right = nn.Parameter(torch.randn(self.shape[1], _THIN_WIDTH, 1, 1) * _THIN_WIDTH**-0.5)
        elif argument.gradient:
            self.left = nn.Parameter(torch.randn(rows, _THIN_WIDTH))
            self.right = nn.Parameter(torch.randn(columns, _THIN_WIDTH) * _THIN_WIDTH**-0.5)
        else:
            self.register_buffer("value", torch.randn(self.shape))

    def forward(self) -> Tensor:
        if not hasattr(self, "left"):
            return self.value
        if self.image:
            return F.conv2d(self.left, self.right)
        return F.linear(self.left, self.right).view(self.shape)


def _geometry(call: Call) -> dict[str, Any]:
    """Return stride, padding and groups of a convolution, from its shapes."""
    x, weight, y = call.inputs[0].shape, call.inputs[1].shape, call.output
    stride = max(round(x[2] / y[2]), 1)
    padding = max(-(-((y[2] - 1) * stride + weight[2] - x[2]) // 2), 0)
    return {"stride": stride, "padding": padding, "groups": x[1] // weight[1]}
