"""The single layers of compare_kernels.py: every alternative for a call, bars, least times.

A layer stands in FP32 surroundings: its input, weight and bias are FP32, casts of them are part of the call,
and so are casts of their gradients back to FP32. Its result is FP32, but for the variants whose result is
BF16 (`bf16`, torch.autocast, and those called `... bf16 out`): their gradient then arrives in BF16 as well. A
bar against FP32 is judged on FP32 results where the variant has them, a bar against torch.autocast on BF16
results: equal terms. Forward passes save what backward will need, as in training.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from qsync import Precision
from qsync.backend import Kernels, Operand, select
from qsync.errors import UnsupportedError
from qsync.experiments.harness import peers
from qsync.experiments.kernels.roofline import Peaks, forward_bytes, training_bytes, training_flops
from qsync.records.precision import is_encoded, operand_type

LINEAR_SHAPES = ((512, 768, 768), (1024, 768, 3072), (2048, 1024, 4096), (4096, 256, 256))  # M x K x N
# batch, channels in and out, side, kernel
CONV_SHAPES = ((16, 64, 32, 3), (16, 256, 16, 3), (16, 256, 16, 1))
WITH_WEIGHT = " + weight"  # the weight's cast, once per optimizer step, is part of the call
BF16_OUT = " bf16 out"
Run = Callable[[], Any]


@dataclass(frozen=True, slots=True)
class Bar:
    """A promise: `variant` is `limit` times as fast as `against`, or (`at_most`) at most as slow."""

    variant: str
    against: str
    limit: float
    at_most: bool = False


@dataclass(slots=True)
class Case:
    """One call and every alternative to run it.

    `least_s` is the roofline's bound, `unavailable` says why an alternative is missing.
    """

    section: str
    shape: str
    baseline: str
    bars: tuple[Bar, ...] = ()
    runs: dict[str, Run] = field(default_factory=dict)
    least_s: dict[str, float | None] = field(default_factory=dict)
    unavailable: dict[str, str] = field(default_factory=dict)

    def add(
        self, name: str, make: Callable[[], Run], *, theirs: bool = False, least_s: float | None = None
    ) -> None:
        """Add a variant that runs here; one that does not is named with the reason.

        A precision that the device lacks is a reason, and of a peer (`theirs`) any failure is.
        """
        try:
            run = make()
            run()
        except UnsupportedError as error:
            self.unavailable[name] = str(error)
        except Exception as error:
            if not theirs:
                raise
            self.unavailable[name] = f"{type(error).__name__}: {(str(error).strip().splitlines() or [''])[0]}"
        else:
            self.runs[name], self.least_s[name] = run, least_s


@dataclass(frozen=True, slots=True)
class Bench:
    """Device, peaks and options of all cases."""

    device: torch.device
    peaks: Peaks
    inductor: bool = True
    seed: int = 0

    @property
    def kernels(self) -> Kernels:
        """Return the kernels of the device."""
        return select(self.device)

    def random(self, *shape: int) -> Tensor:
        """Return normal numbers that depend on the shape and the seed only."""
        generator = torch.Generator().manual_seed(self.seed + math.prod(shape))
        return torch.randn(*shape, generator=generator).to(self.device)


class Layer:
    """One product of a model on FP32 operands, and every alternative to compute it."""

    def __init__(
        self,
        bench: Bench,
        kind: str,
        target: Callable[..., Tensor],
        operands: list[Tensor],
        options: dict[str, Any],
    ) -> None:
        self.bench, self.kind, self.target, self.options = bench, kind, target, options
        self.operands = [operand.requires_grad_() for operand in operands]
        with torch.no_grad():
            y = target(*operands, **options)
        gradient = torch.empty_like(y).copy_(bench.random(*y.shape))  # in the memory format of the result
        self.gradients = {torch.float32: gradient, torch.bfloat16: gradient.bfloat16()}
        taps = math.prod(operands[1].shape[1:])  # multiply-adds per element of the result
        self.flops = 2.0 * y.numel() * taps
        self.sizes = (operands[0].numel(), operands[1].numel(), y.numel())

    def eager(self, *operands: Tensor) -> Tensor:
        """Run the call as it stands in a model."""
        return self.target(*operands, **self.options)

    def cast(self, index: int, precision: Precision) -> Any:
        """Cast an operand as a wrapped model does."""
        value, kernels = self.operands[index], self.bench.kernels
        type_name = operand_type(self.kind, index, precision)
        encoded = kernels.cast(value, type_name)
        return Operand(value, encoded) if is_encoded(type_name) else encoded

    def qsync(
        self, precision: Precision, out_type: str, once: Mapping[int, Any] | None = None
    ) -> Callable[[], Tensor]:
        """Return the call in a precision of qsync, casts included but for operands cast `once` (by index)."""
        kernel = self.bench.kernels.kernel(self.kind, precision)
        ready = once or {}

        def call() -> Tensor:
            operands = [
                ready[i] if i in ready else self.cast(i, precision) for i in range(len(self.operands))
            ]
            y: Tensor = kernel(self.target, out_type, *operands, **self.options)
            return y

        return call

    def training(self, call: Callable[[], Tensor], leaves: list[Tensor] | None = None) -> Run:
        """Return the call and its backward pass: gradients of all operands."""
        return lambda: torch.autograd.grad(
            y := call(), self.operands if leaves is None else leaves, self.gradients[y.dtype]
        )

    def least_s(self, flops: Mapping[str, float], num_bytes: int) -> float | None:
        """Return the roofline's bound for this layer."""
        return self.bench.peaks.least_s(flops, num_bytes, 4 * max(self.sizes))


def linear(bench: Bench, shape: tuple[int, int, int]) -> Layer:
    """Make a linear layer: X (M, K), W (N, K), b (N)."""
    rows, inputs, outputs = shape
    operands = [
        bench.random(rows, inputs),
        bench.random(outputs, inputs) * inputs**-0.5,
        bench.random(outputs),
    ]
    return Layer(bench, "linear", F.linear, operands, {})


def conv2d(bench: Bench, shape: tuple[int, int, int, int]) -> Layer:
    """Make a convolution: as many channels out as in, the same size, no bias, channels_last."""
    batch, channels, side, kernel = shape
    operands = [bench.random(batch, channels, side, side), bench.random(channels, channels, kernel, kernel)]
    operands[1] *= (channels * kernel * kernel) ** -0.5
    last = [operand.to(memory_format=torch.channels_last) for operand in operands]
    return Layer(bench, "conv2d", torch.conv2d, last, {"padding": kernel // 2})


def conv_name(shape: tuple[int, int, int, int]) -> str:
    """Return the sizes of a convolution as text."""
    batch, channels, side, kernel = shape
    return f"{batch}x{channels}x{side}x{side}, {kernel}x{kernel}"


def quantize_case(layer: Layer, shape: str, bars: tuple[Bar, ...]) -> Case:
    """Compare a layer's FP32 input -> INT8 codes and scales with a copy of the same tensor."""
    case, bench = Case("quantize", shape, "clone", bars), layer.bench
    x, type_name = layer.operands[0].detach(), operand_type(layer.kind, 0, Precision.INT8)
    size, kernels = x.numel(), bench.kernels
    case.add("clone", lambda: x.clone, least_s=bench.peaks.least_s({}, 8 * size, 4 * size))
    least_s = bench.peaks.least_s({}, 5 * size, 4 * size)
    case.add("int8", lambda: lambda: kernels.cast(x, type_name), least_s=least_s)
    return case


def forward_case(layer: Layer, section: str, shape: str, bars: tuple[Bar, ...]) -> Case:
    """Compare forward passes, the activation's cast included; the weight's where the name says so."""
    case = Case(section, shape, "fp32", bars)

    def least(variant: str, with_weight: bool = False) -> float | None:
        return layer.least_s({variant: layer.flops}, forward_bytes(variant, layer.sizes, with_weight))

    case.add("fp32", lambda: lambda: layer.eager(*layer.operands), least_s=least("fp32"))
    for precision, out_type in _precisions(layer, forward=True):
        name = str(precision)

        case.add(name, partial(_weight_cast_once, layer, precision, out_type), least_s=least(name))
        least_s = least(name, True)
        case.add(name + WITH_WEIGHT, partial(layer.qsync, precision, out_type), least_s=least_s)
    for name, make in _peers(layer).items():
        case.add(name, partial(lambda make: make()[0], make), theirs=True)
    return case


def _weight_cast_once(layer: Layer, precision: Precision, out_type: str) -> Run:
    with torch.no_grad():
        once = {1: layer.cast(1, precision)}
    return layer.qsync(precision, out_type, once)


def training_case(layer: Layer, section: str, shape: str, bars: tuple[Bar, ...]) -> Case:
    """Compare forward and backward, every cast included: the weight's as well."""
    case = Case(section, shape, "fp32", bars)
    case.add(
        "fp32",
        lambda: layer.training(lambda: layer.eager(*layer.operands)),
        least_s=layer.least_s({"fp32": 3 * layer.flops}, training_bytes("fp32", layer.sizes)),
    )
    for precision, out_type in _precisions(layer, forward=False):
        bf16_out = out_type == "bf16" and precision is not Precision.BF16
        traffic = f"{precision}_bf16" if bf16_out else str(precision)
        least_s = layer.least_s(training_flops(traffic, layer.flops), training_bytes(traffic, layer.sizes))
        made = partial(lambda p, o: layer.training(layer.qsync(p, o)), precision, out_type)
        case.add(f"{precision}{BF16_OUT if bf16_out else ''}", made, least_s=least_s)
    for name, make in _peers(layer).items():
        case.add(name, partial(lambda make: layer.training(*make()), make), theirs=True)
    return case


def _precisions(layer: Layer, forward: bool) -> list[tuple[Precision, str]]:
    """Return the precisions to measure, with the type of the result.

    int8_all differs from int8 in backward only.
    """
    found = [(Precision.BF16, "bf16"), (Precision.INT8, "fp32")]
    if not forward:
        found += [(Precision.INT8, "bf16")]
        if layer.kind == "linear":
            found += [(Precision.INT8_ALL, "fp32"), (Precision.INT8_ALL, "bf16")]
    if layer.kind == "linear" and layer.bench.device.type == "cuda":
        found += [(Precision.FP8, "fp32")] + ([] if forward else [(Precision.FP8, "bf16")])
    return found


def _peers(layer: Layer) -> dict[str, Callable[[], tuple[Callable[[], Tensor], list[Tensor]]]]:
    """Return name -> maker of (the call, the leaves of its gradients). A maker may fail."""
    device, operands = layer.bench.device, layer.operands

    def of(run: Callable[..., Tensor]) -> tuple[Callable[[], Tensor], list[Tensor]]:
        return lambda: run(*operands), operands

    def module(
        change: Callable[[torch.nn.Module], torch.nn.Module], compiled: bool
    ) -> tuple[Any, list[Tensor]]:
        x, weight, bias = operands
        inner = torch.nn.Linear(weight.shape[1], weight.shape[0], device=device)
        with torch.no_grad():
            inner.weight.copy_(weight)
            inner.bias.copy_(bias)
        model = change(torch.nn.Sequential(inner))  # changed are children
        run = peers.compiled(model) if compiled else model
        return lambda: run(x), [x, *model.parameters()]

    found: dict[str, Any] = {"autocast": lambda: of(peers.under_autocast(layer.eager, device))}
    if layer.bench.inductor:
        found["inductor fp32"] = lambda: of(peers.compiled(layer.eager))
        found["inductor bf16"] = lambda: of(peers.under_autocast(peers.compiled(layer.eager), device))
    if layer.kind != "linear":
        return found
    if device.type == "cpu":
        found["fp32 onednn"] = lambda: of(peers.linear_one_dnn)
    found["torchao int8"] = lambda: module(peers.torchao_int8, False)
    if layer.bench.inductor:
        found["torchao int8, inductor"] = lambda: module(peers.torchao_int8, True)
    if device.type == "cuda":
        found["torchao float8, inductor"] = lambda: module(peers.torchao_float8, True)
    return found
