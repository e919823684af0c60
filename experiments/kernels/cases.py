"""Single-layer cases of compare_kernels.py: every way to run a call, with bars.

A layer has FP32 input, weight and bias; the call includes their casts, and casts of their gradients back to
FP32. Results are FP32, except in the variants `bf16`, torch.autocast and `... bf16 out`, whose gradients
arrive in BF16 as well. For equal terms, bars against FP32 use FP32 results if the variant has them, and bars
against torch.autocast use BF16 results.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from qsync import Precision
from qsync.backend import Kernels, Operand, select
from qsync.errors import UnsupportedError
from qsync.experiments.harness.peers import peers
from qsync.operators.precision import is_encoded
from qsync.operators.registry import PRECISIONS_BY_KIND, operand_type

LINEAR_SHAPES = ((512, 768, 768), (1024, 768, 3072), (2048, 1024, 4096), (4096, 256, 256))  # M x K x N
# batch, channels in and out, side, kernel
CONV_SHAPES = ((16, 64, 32, 3), (16, 256, 16, 3), (16, 256, 16, 1))
ATTENTION_SHAPES = ((8, 12, 128, 64), (4, 12, 512, 64), (1, 16, 1024, 64))  # batch, heads, length, width
BF16_OUT = " bf16 out"
Run = Callable[[], Any]


@dataclass(frozen=True, slots=True)
class Bar:
    """A bar: `variant` is at least `limit` times as fast as `against`, or (`at_most`) at most as slow."""

    variant: str
    against: str
    limit: float
    at_most: bool = False


@dataclass(slots=True)
class Case:
    """One call and every way to run it.

    `unavailable` gives reasons for missing variants, `failed` for failures of qsync's own.
    """

    section: str
    shape: str
    baseline: str
    bars: tuple[Bar, ...] = ()
    runs: dict[str, Run] = field(default_factory=dict)
    unavailable: dict[str, str] = field(default_factory=dict)
    failed: dict[str, str] = field(default_factory=dict)

    def add(self, name: str, make: Callable[[], Run], *, theirs: bool = False) -> None:
        """Add a variant, or the reason why it does not run here.

        Reasons are a missing precision, or any failure of a peer (`theirs`). A failure of qsync's is recorded
        as such. A failure of the baseline is raised.
        """
        try:
            run = make()
            run()
        except UnsupportedError as error:
            self.unavailable[name] = str(error)
        except Exception as error:
            if name == self.baseline:
                raise
            why = f"{type(error).__name__}: {(str(error).strip().splitlines() or [''])[0]}"
            (self.unavailable if theirs else self.failed)[name] = why
        else:
            self.runs[name] = run


@dataclass(frozen=True, slots=True)
class Bench:
    """Device and options of all cases."""

    device: torch.device
    inductor: bool = True
    seed: int = 0

    @property
    def kernels(self) -> Kernels:
        """Return the kernels of the device."""
        return select(self.device)

    def random(self, *shape: int) -> Tensor:
        """Return normal random numbers that depend only on shape and seed."""
        generator = torch.Generator().manual_seed(self.seed + math.prod(shape))
        return torch.randn(*shape, generator=generator).to(self.device)


class Layer:
    """One operator of a model on FP32 operands, and every way to compute it."""

    def __init__(
        self,
        bench: Bench,
        kind: str,
        shape: str,
        target: Callable[..., Tensor],
        operands: list[Tensor],
        **options: Any,
    ) -> None:
        self.bench, self.kind, self.shape, self.target, self.options = bench, kind, shape, target, options
        self.operands = [operand.requires_grad_() for operand in operands]
        with torch.no_grad():
            y = target(*operands, **options)
        gradient = torch.empty_like(y).copy_(bench.random(*y.shape))  # in the result's memory format
        self.gradients = {torch.float32: gradient, torch.bfloat16: gradient.bfloat16()}

    def eager(self, *operands: Tensor) -> Tensor:
        """Run the call in eager torch."""
        return self.target(*operands, **self.options)

    def cast(self, index: int, precision: Precision) -> Any:
        """Cast an operand as a wrapped model does."""
        value, kernels = self.operands[index], self.bench.kernels
        type_name = operand_type(self.kind, index, precision)
        encoded = kernels.cast(value, type_name)
        return Operand(value, encoded) if is_encoded(type_name) else encoded

    def qsync(self, precision: Precision, out_type: str) -> Callable[[], Tensor]:
        """Return the call in a precision of qsync, casts included."""
        kernel = self.bench.kernels.kernel(self.kind, precision)

        def call() -> Tensor:
            operands = [self.cast(i, precision) for i in range(len(self.operands))]
            y: Tensor = kernel(self.target, out_type, *operands, **self.options)
            return y

        return call

    def training(self, call: Callable[[], Tensor]) -> Run:
        """Return the call with its backward pass: gradients of all operands."""
        return lambda: torch.autograd.grad(y := call(), self.operands, self.gradients[y.dtype])


def linear(bench: Bench, shape: tuple[int, ...]) -> Layer:
    """Create a linear layer: X (M, K), W (N, K), b (N)."""
    rows, inputs, outputs = shape
    weight = bench.random(outputs, inputs) * inputs**-0.5
    operands = [bench.random(rows, inputs), weight, bench.random(outputs)]
    return Layer(bench, "linear", "x".join(map(str, shape)), F.linear, operands)


def conv2d(bench: Bench, shape: tuple[int, ...]) -> Layer:
    """Create a convolution with equal channels and sizes, no bias, channels-last."""
    batch, channels, side, kernel = shape
    weight = bench.random(channels, channels, kernel, kernel) * (channels * kernel * kernel) ** -0.5
    operands = [bench.random(batch, channels, side, side), weight]
    last = [operand.to(memory_format=torch.channels_last) for operand in operands]
    name = f"{batch}x{channels}x{side}x{side}, {kernel}x{kernel}"
    return Layer(bench, "conv2d", name, torch.conv2d, last, padding=kernel // 2)


def attention(bench: Bench, shape: tuple[int, ...]) -> Layer:
    """Create attention without a mask: queries, keys and values (batch, heads, length, width)."""
    operands = list(bench.random(3, *shape).unbind())
    return Layer(bench, "attention", "x".join(map(str, shape)), F.scaled_dot_product_attention, operands)


def quantize_case(layer: Layer, section: str, bars: tuple[Bar, ...]) -> Case:
    """Compare quantizing a layer's FP32 input (codes and scales) with copying the tensor."""
    x, type_name, bench = layer.operands[0].detach(), operand_type(layer.kind, 0, Precision.INT8), layer.bench
    sides = "x".join(map(str, x.shape))
    case = Case(section, f"{sides}, rows" if layer.kind == "linear" else sides, "clone", bars)
    case.add("clone", lambda: x.clone)
    case.add("int8", lambda: lambda: bench.kernels.cast(x, type_name))
    return case


def training_case(layer: Layer, section: str, bars: tuple[Bar, ...]) -> Case:
    """Compare forward and backward including every cast, also of the weight."""
    case = Case(section, layer.shape, "fp32", bars)
    eager = layer.training(lambda: layer.eager(*layer.operands))
    case.add("fp32", lambda: eager)
    for precision, out_type in precisions_of(layer.kind, layer.bench.device.type):
        bf16_out = out_type == "bf16" and precision is not Precision.BF16
        made = partial(lambda p, o: layer.training(layer.qsync(p, o)), precision, out_type)
        case.add(f"{precision}{BF16_OUT}" if bf16_out else str(precision), made)
    _add_peers(case, layer)
    return case


def precisions_of(kind: str, device: str) -> list[tuple[Precision, str]]:
    """Return an operator's precisions to measure, with the type of the result.

    A CPU may emulate FP16, and has neither TF32 nor FP8.
    """
    wanted = [Precision.INT8, *([Precision.INT8_ALL] if kind == "linear" else [])]
    wanted += [Precision.FP8, Precision.FP16, Precision.TF32] if device == "cuda" else []
    able = [precision for precision in wanted if precision in PRECISIONS_BY_KIND[kind]]
    return [(Precision.BF16, "bf16"), *itertools.product(able, ("fp32", "bf16"))]


def _add_peers(case: Case, layer: Layer) -> None:
    """Add the peers of a layer; any may fail."""

    def made(of_peer: Callable[[Callable[..., Tensor]], Callable[..., Tensor]]) -> Run:
        return layer.training(partial(of_peer(layer.eager), *layer.operands))

    for name, of_peer in peers(layer.bench.device, layer.bench.inductor).items():
        case.add(name, partial(made, of_peer), theirs=True)
