"""Choose kernels by the device's capability, by correctness and by measured time."""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache, partial
from typing import Any

import torch
from torch import Tensor
from torch.utils.flop_counter import FlopCounterMode

from qsync.backend.casts.cast_ops import to_bf16
from qsync.backend.compressed_saves.saved_ops import saving
from qsync.backend.devices.amx import has_amx
from qsync.backend.devices.kernel_timing import GPU_CALLS, GPU_ROUNDS, apart, kernel_s, synchronize, timings
from qsync.backend.devices.onednn import has_onednn
from qsync.backend.encoding import Encoded, Operand, encode
from qsync.backend.kernels.dropout import dropout
from qsync.backend.kernels.gelu import gelu
from qsync.backend.kernels.interpolate import interpolate
from qsync.backend.kernels.linear import DTYPES
from qsync.backend.kernels.linear_bf16 import addmm_bf16, linear_bf16
from qsync.backend.reference_kernels import reference_kernel
from qsync.backend.selection.kernel_candidates import REPLACED_IN_FP32, Kernel, candidates, device_precisions
from qsync.backend.selection.shape_checks import checked, is_checked
from qsync.errors import QSyncError, UnsupportedError
from qsync.operators.precision import Precision, is_encoded, keeps_weight_casts
from qsync.operators.registry import PRECISIONS_BY_KIND, operand_type

# A kernel further than this from the reference (signal to noise, in decibels) is wrong, not imprecise. Both
# round the operands alike, so they differ by the rounding of the gradient and of the sums only; a wrong scale
# leaves 0 dB. For example, 8-bit products saturate in 16 bits on CPUs without VNNI.
LEAST_AGREEMENT_DB = 25.0
_LEAST_FP32_AGREEMENT_DB = 110.0  # two summation orders in FP32 agree to about 125 dB
_MIN_TIMED_S, _MAX_REPEATS = 0.02, 5
# Sizes of the representative calls: (side of matrices, images, channels, side of images).
_SIZES = {"cpu": (512, 8, 32, 16), "cuda": (4096, 32, 128, 32)}


_OF_LOWERED_GRAPHS: dict[str, Kernel] = {
    "dropout": dropout,
    "gelu": gelu,
    "interpolate": interpolate,
    "linear": linear_bf16,
    "addmm": addmm_bf16,
}


@dataclass(frozen=True, slots=True)
class Choice:
    """The kernel chosen for one kind of product in one precision, and why.

    `measured_s` is the time of a forward and backward pass on one representative shape, encoding
    included. `flops` counts the operations of its products: 2 per multiply-add, 3 times the forward pass.
    `speedup` is relative to FP32 on that shape; below 1 the precision costs time on this device.
    `rejected` names the other candidates, each with the reason.
    """

    kind: str
    precision: Precision
    kernel: str
    measured_s: float
    flops: float
    speedup: float
    rejected: tuple[tuple[str, str], ...]

    def why(self) -> str:
        """Describe the choice in one sentence."""
        verdict = (
            f"{self.speedup:.1f}x FP32" if self.speedup >= 1 else f"slower than FP32 ({self.speedup:.2f}x)"
        )
        return f"{self.kind} in {self.precision}: {self.kernel}, {verdict}"


class Kernels:
    """The kernels of one device; each is timed on its first request.

    `bitwise`: FP32 is computed by torch's own kernels, as always on GPUs.

    >>> kernels = select("cpu")
    >>> y = kernels.kernel("linear", Precision.INT8)(F.linear, "fp32", Operand(x, x8), Operand(w, w8), bias)
    """

    saving = staticmethod(saving)
    in_lowered_graphs = staticmethod(_OF_LOWERED_GRAPHS.__getitem__)

    def __init__(self, device: torch.device, bitwise: bool = False) -> None:
        self.device, self.bitwise = device, bitwise or device.type != "cpu" or not has_onednn()
        self.replaced_in_fp32 = () if self.bitwise else REPLACED_IN_FP32
        self._chosen: dict[tuple[str, Precision], tuple[Kernel, Choice]] = {}
        self._unsupported: dict[tuple[str, Precision], str] = {}

    @property
    def sixteen_bit(self) -> str | None:
        """Return the device's 16-bit float for tensors between operators; None if it multiplies no BF16."""
        return "bf16" if Precision.BF16 in self.precisions() else None

    @property
    def choices(self) -> tuple[Choice, ...]:
        """Return the choices made so far."""
        return tuple(choice for _, choice in self._chosen.values())

    @property
    def keeps_copies(self) -> bool:
        """Return whether a weight's cast is reused by several calls."""
        return keeps_weight_casts(self.device.type)

    @property
    def replaced_in_bf16(self) -> tuple[str, ...]:
        """Return the kinds of operators with a replacement kernel in BF16 on this device."""
        if self.device.type != "cpu":
            return ()
        return ("gelu", "linear", "addmm") if has_amx(self.device) else ("gelu",)

    @property
    def plain_casts(self) -> tuple[str, ...]:
        """Return the types to which `cast` is torch's own conversion."""
        return ("fp32", "bf16") if self.device.type == "cuda" else ("fp32",)

    def precisions(self) -> tuple[Precision, ...]:
        """Return the precisions that this device supports; some may be slower than FP32."""
        return device_precisions(self.device)

    def cast(self, tensor: Tensor, target_type: str) -> Tensor | Encoded:
        """Cast a tensor: differentiably to "fp32" or "bf16", or encoded without a gradient."""
        if is_encoded(target_type):
            return encode(tensor, target_type)
        if target_type not in DTYPES:
            raise UnsupportedError(
                f"there is no cast to {target_type!r}: choose fp32, bf16 or an encoded type"
            )
        if target_type == "bf16" and tensor.dtype is torch.float32:
            return to_bf16(tensor)
        return tensor.to(DTYPES[target_type])

    def kernel(self, kind: str, precision: Precision | str, reference: bool = False) -> Kernel:
        """Return this device's fastest kernel for a kind of product in a precision.

        It is called as kernel(target, out_type, *args, **kwargs) -> Tensor. `target` and the arguments are
        those of the original call, except that encoded operands come as `Operand`s. `out_type` is "fp32" or
        "bf16". Linear layers in INT8 also take an `activation`, which is computed in the epilogue
        (`qsync.backend.casts.epilogues`). `reference` selects the slow plain kernel of `reference_kernel`.
        Raises UnsupportedError, with the reason, if there is no kernel.

        >>> select("cpu").kernel("conv2d", "int8")
        """
        precision = Precision(precision)
        if reference:
            plain = reference_kernel(kind, precision)
            if plain is None:
                raise UnsupportedError(
                    f"{kind} has no kernel in {precision}: choose another precision for it"
                )
            return plain
        return self._choose(kind, precision)[0]

    def why_unsupported(self, kind: str, precision: Precision | str) -> str | None:
        """Return why no kernel exists for a product in a precision, by candidate; None if one does."""
        try:
            self._choose(kind, Precision(precision))
        except UnsupportedError as error:
            return str(error)
        return None

    def choice(self, kind: str, precision: Precision | str) -> Choice:
        """Return the chosen kernel's name, time and reasons. Raises UnsupportedError if there is none."""
        return self._choose(kind, Precision(precision))[1]

    def describe(self) -> list[dict[str, Any]]:
        """List the chosen kernel and its speed, or why there is none, by kind and precision."""
        rows: list[dict[str, Any]] = []
        for kind, precisions in PRECISIONS_BY_KIND.items():
            for precision in precisions:
                row: dict[str, Any] = {"kind": kind, "precision": str(precision), "kernel": None, "why": None}
                try:
                    choice = self.choice(kind, precision)
                except UnsupportedError as error:
                    row["why"] = str(error)
                else:
                    row |= {
                        "kernel": choice.kernel,
                        "measured_s": choice.measured_s,
                        "flops": choice.flops,
                        "speedup": choice.speedup,
                    }
                    row |= {"why": choice.why(), "rejected": dict(choice.rejected)}
                rows.append(row)
        return rows

    def _choose(self, kind: str, precision: Precision) -> tuple[Kernel, Choice]:
        key = (kind, precision)
        if key in self._unsupported:
            raise UnsupportedError(self._unsupported[key])
        if key not in self._chosen:
            try:
                # This may happen in the middle of a run: keep random numbers and gradient mode as they were.
                gpus = [self.device] if torch.cuda.is_available() and self.device.type == "cuda" else []
                with torch.random.fork_rng(devices=gpus), torch.enable_grad():
                    torch.manual_seed(0)
                    self._chosen[key] = apart(partial(self._measure, kind, precision))
            except UnsupportedError as error:
                self._unsupported[key] = str(error)
                raise
        return self._chosen[key]

    def _measure(self, kind: str, precision: Precision) -> tuple[Kernel, Choice]:
        tried: list[tuple[float, str, Kernel]] = []
        rejected: list[tuple[str, str]] = []
        for candidate in candidates(kind, precision, self.device, self.bitwise):
            kernel, reason = candidate.kernel, candidate.reason
            if kernel is not None:
                reason = self._disagreement(kind, precision, kernel)
            if kernel is None or reason:
                rejected.append((candidate.name, reason or "it has no kernel"))
            elif tried and precision is Precision.FP32:
                rejected.append((candidate.name, f"{tried[0][1]} runs it where it is faster"))
            else:
                run = _trial(kind, precision, kernel, self.device)
                seconds = _timed_s(run, self.device.type == "cuda")
                tried.append((seconds, candidate.name, kernel))
        if not tried:
            reasons = "; ".join(f"{name}: {reason}" for name, reason in rejected) or "qsync has none"
            raise UnsupportedError(
                f"no kernel for {kind} in {precision} on {self.device} ({reasons}): "
                "choose another precision for it"
            )
        tried.sort(key=lambda entry: entry[0])
        (seconds, name, best), others = tried[0], tried[1:]
        rejected += [(other, f"takes {s * 1e3:.2f} ms against {seconds * 1e3:.2f}") for s, other, _ in others]
        rejected.append(("reference", "decodes to FP32: saves neither time nor memory"))
        baseline = seconds if precision is Precision.FP32 else self.choice(kind, Precision.FP32).measured_s
        speedup, flops = baseline / seconds, _flops(kind, self.device)
        best = checked(best) if is_checked(kind, precision, self.device) else best
        return best, Choice(kind, precision, name, seconds, flops, speedup, tuple(rejected))

    def _disagreement(self, kind: str, precision: Precision, kernel: Kernel) -> str | None:
        """Return how a kernel's result or gradients differ from the reference's; None if they agree."""
        reference = reference_kernel(kind, precision)
        if reference is None:
            return None
        try:
            got = _trial(kind, precision, kernel, self.device, small=True)()
            expected = _trial(kind, precision, reference, self.device, small=True)()
        except (RuntimeError, NotImplementedError, ValueError, QSyncError) as error:
            return f"fails here: {str(error).strip().splitlines()[0]}"
        # Two stochastic roundings agree only to the rounding itself: 8 bits leave about 35 dB.
        worst = min(_agreement_db(a, b) for a, b in zip(got, expected, strict=True))
        least = _LEAST_FP32_AGREEMENT_DB if precision is Precision.FP32 else LEAST_AGREEMENT_DB
        return None if worst >= least else f"wrong: {worst:.0f} dB from the reference"


def select(device: str | torch.device = "cpu", bitwise: bool = False) -> Kernels:
    """Return the kernels of a device; each process has one `Kernels` per device and `bitwise`.

    Raises UnsupportedError if the device is neither a CPU nor a GPU that torch can use here.

    >>> select("cpu").choice("linear", "int8").kernel
    'int_mm'
    """
    device = torch.device(device)
    if device.type == "meta":
        raise UnsupportedError(
            "the model is on the meta device, without weights: call model.to_empty(device=...) and "
            "initialise its weights first"
        )
    if device.type not in ("cpu", "cuda"):
        raise UnsupportedError(f"qsync has no kernels for {device.type!r}: use cpu or cuda")
    if device.type == "cuda":
        if not torch.cuda.is_available():
            raise UnsupportedError(
                "torch sees no CUDA device here: use cpu, or install a CUDA build of torch"
            )
        device = torch.device("cuda", torch.cuda.current_device() if device.index is None else device.index)
    return _kernels_of(device, bitwise and device.type == "cpu")


@cache
def _kernels_of(device: torch.device, bitwise: bool) -> Kernels:
    return Kernels(device, bitwise)


def _trial(
    kind: str, precision: Precision, kernel: Kernel, device: torch.device, small: bool = False
) -> Callable[[], tuple[Tensor, ...]]:
    """Return a function that runs forward and backward of a product on a representative shape.

    It includes casts, and returns result and gradients.
    """
    generator = torch.Generator().manual_seed(0)
    target, shapes, options = _representative(kind, device, small)
    values = [torch.randn(*shape, generator=generator).to(device).requires_grad_() for shape in shapes]
    gradient = None

    def run() -> tuple[Tensor, ...]:
        nonlocal gradient
        y = kernel(target, "fp32", *(_cast(kind, i, precision, v) for i, v in enumerate(values)), **options)
        if gradient is None:
            gradient = torch.randn(y.shape, generator=generator).to(device)
        return (y, *torch.autograd.grad(y, values, gradient))

    return run


def _cast(kind: str, index: int, precision: Precision, value: Tensor) -> Any:
    type_name = operand_type(kind, index, precision)
    if is_encoded(type_name):
        return Operand(value, encode(value, type_name))
    return value.to(DTYPES[type_name])


def _flops(kind: str, device: torch.device) -> float:
    """Return the operations of a representative forward and backward pass's products.

    Backward counts twice forward; products that attention recomputes in backward do not count.
    """
    target, shapes, options = _representative(kind, device)
    with FlopCounterMode(display=False) as counter:
        target(*(torch.empty(shape, device="meta") for shape in shapes), **options)
    return 3.0 * float(counter.get_total_flops())


def _representative(
    kind: str, device: torch.device, small: bool = False
) -> tuple[Kernel, list[tuple[int, ...]], dict[str, Any]]:
    """Return the call that represents a kind of product, or a small one for a check.

    The call takes a few milliseconds in FP32. GPUs get larger matrices: a product of 512 squared ends before
    the next launch.
    """
    n, images, channels, side = (104, 8, 32, 8) if small else _SIZES[device.type]
    attention = torch.nn.functional.scaled_dot_product_attention
    ends = {"offs": torch.tensor([n // 3, n // 2, n - 1, n])}
    calls: dict[str, tuple[Kernel, list[tuple[int, ...]], dict[str, Any]]] = {
        "linear": (torch.nn.functional.linear, [(n, n), (n, n), (n,)], {}),
        "addmm": (torch.addmm, [(n,), (n, n), (n, n)], {}),
        "conv2d": (
            torch.conv2d,
            [(images, channels, side, side), (channels, channels, 3, 3), (channels,)],
            {"padding": 1},
        ),
        "conv1d": (
            torch.conv1d,
            [(images, channels, side * 8), (channels, channels, 3), (channels,)],
            {"padding": 1},
        ),
        "conv3d": (
            torch.conv3d,
            [(images, channels, side, side, 4), (channels, channels, 3, 3, 1), (channels,)],
            {"padding": (1, 1, 0)},
        ),
        "conv_transpose": (
            torch.conv_transpose2d,
            [(images, channels, side, side), (channels, channels, 2, 2), (channels,)],
            {"stride": 2},
        ),
        "matmul": (torch.matmul, [(2, n, n // 2), (2, n // 2, n)], {}),
        "baddbmm": (torch.baddbmm, [(1, n, n), (2, n, n // 2), (2, n // 2, n)], {}),
        "attention": (attention, [(2, 4, n // 2, 32)] * 3, {}),
        "embedding": (_look_up, [(n, n)], {}),
        "einsum": (_contract, [(2, n, n // 2), (2, n // 2, n)], {}),
        "bilinear": (torch.nn.functional.bilinear, [(n, n // 8), (n, n // 8), (8, n // 8, n // 8), (8,)], {}),
        "grouped_mm": (_multiply_groups, [(n, n // 2), (4, n // 2, n)], ends),
        "rnn": (_recur, [(8, n // 8, n // 2), (2 * n, n // 2), (2 * n, n // 2), (2 * n,), (2 * n,)], {}),
    }
    return calls[kind]


def _look_up(table: Tensor) -> Tensor:
    """Look up as many rows as the table has, some of them repeated."""
    indices = torch.arange(len(table), device=table.device) // 2
    return torch.nn.functional.embedding(indices, table)


def _contract(left: Tensor, right: Tensor) -> Tensor:
    """Multiply matrices by torch.einsum, to time this kind of product."""
    return torch.einsum("bij,bjk->bik", left, right)


def _multiply_groups(rows: Tensor, weights: Tensor, offs: Tensor) -> Tensor:
    """Multiply the rows of each group by the group's weight, to time grouped products."""
    groups = rows.tensor_split(offs[:-1].tolist())
    return torch.cat([group @ weight for group, weight in zip(groups, weights, strict=True)])


def _recur(sequences: Tensor, *weights: Tensor) -> Tensor:
    """Run one LSTM layer from zero states over sequences (rows, steps, width)."""
    state = sequences.new_zeros(1, len(sequences), weights[1].shape[1])
    return torch.lstm(sequences, (state, state), weights, True, 1, 0.0, True, False, True)[0]


def _timed_s(run: Callable[[], Any], on_gpu: bool) -> float:
    """Return the median seconds of up to five runs after a warm-up; fewer for long runs.

    On a GPU, return the least time of the kernels. A run whose warm-up took 20 ms is timed once. The warm-up
    itself does not count: a process's first product also initializes oneDNN.
    """
    start = time.perf_counter()
    run()
    synchronize()
    if on_gpu:
        return min(kernel_s(run, GPU_CALLS)[0] for _ in range(GPU_ROUNDS))
    least = 1 if time.perf_counter() - start > _MIN_TIMED_S else 2
    times = timings(run, _MAX_REPEATS, _MIN_TIMED_S, least)
    return sorted(times)[(len(times) - 1) // 2]


def _agreement_db(got: Tensor, expected: Tensor) -> float:
    """Return the signal to noise ratio of `got` against `expected`, in decibels."""
    noise = (got.double() - expected.double()).square().sum().item()
    signal = expected.double().square().sum().item()
    if math.isnan(noise) or not signal:
        return -math.inf
    return math.inf if noise == 0 else 10 * math.log10(signal / noise)
