"""Measure a device's peak rates: large products of each type, with nothing around them.

A type's peak is its best product: which of MKL, oneDNN, matrices and convolutions is fastest depends on the
processor. Rates count 2 operations per multiply-add; FP32's unit is FLOP/s, INT8's is operations/s.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping

import torch
from torch import Tensor

from qsync.backend.devices.kernel_timing import timings
from qsync.backend.devices.onednn import has_onednn
from qsync.backend.kernels.fp16_tf32 import product_tf32
from qsync.backend.selection.kernel_candidates import device_precisions
from qsync.operators.precision import Precision

# Side of the matrices: large enough that every product takes far longer than its call, small enough for FP16,
# which CPUs emulate (0.1 s).
_SQUARE = {"cpu": 1024, "cuda": 4096}
_TIMED_S, _MAX_CALLS = 0.05, 50


def measured_peaks(device: torch.device) -> dict[str, float]:
    """Measure the operations per second of each type that the device multiplies.

    Types are fp32, tf32, bf16, fp16, fp8 and int8. The fastest of the calls that fit into 50 ms counts,
    with as many threads as torch now has.

    >>> measured_peaks(torch.device("cpu"))["int8"]
    3.1e11
    """
    # int8's peak depends on it
    wanted = [str(p) for p in device_precisions(device) if p in p.facts.products]
    runs = products(device, _SQUARE[device.type], wanted)
    return best_by_type({name: flops / _least_s(run) for name, (flops, run) in runs.items()})


def best_by_type(rates: Mapping[str, float]) -> dict[str, float]:
    """Return the best rate of each type, from rates under the names of `products`.

    >>> best_by_type({"fp32 mm": 1.0, "fp32 conv": 2.0})
    {'fp32': 2.0}
    """
    best: dict[str, float] = {}
    for name, rate in rates.items():
        type_name = name.split()[0]
        best[type_name] = max(rate, best.get(type_name, 0.0))
    return best


def peak_of(
    kind: str, precision: Precision | str, sixteen_bit: str, peaks: Mapping[str, float]
) -> float | None:
    """Return the peak of forward and backward in a precision; None if a type was not measured.

    `int8` multiplies once in INT8 and twice in the device's 16-bit float, `sixteen_bit`:

        peak = 3 / (1 / peak(int8) + 2 / peak(sixteen_bit))

    Attention has two products forward and four backward, of which only the scores are in INT8:
    6 / (1 / .. + 5 / ..).

    >>> peak_of("linear", "int8", "bf16", {"int8": 4e11, "bf16": 2e11})
    2.4e11
    """
    forward, backward = Precision(precision).facts.products
    if forward == backward:
        types = [forward]
    else:
        types = [forward] + [sixteen_bit] * (5 if kind == "attention" else 2)
    if not set(types) <= set(peaks):
        return None
    return len(types) / sum(1 / peaks[type_name] for type_name in types)


def products(
    device: torch.device, square: int, types: Iterable[str]
) -> dict[str, tuple[float, Callable[[], object]]]:
    """Map names as "bf16 mm" to (operations, the call): large squares and convolutions."""
    generator = torch.Generator().manual_seed(0)
    a, b = (torch.randn(square, square, generator=generator).to(device) for _ in range(2))
    flops = 2.0 * square**3
    found: dict[str, tuple[float, Callable[[], object]]] = {}
    for type_name in types:
        found[f"{type_name} mm"] = (flops, matrix_product(type_name, a, b))
        if type_name in ("fp32", "bf16"):
            found[f"{type_name} conv"] = _convolution(device, max(square // 8, 8), type_name)
    if device.type == "cpu" and "fp32 mm" in found and has_onednn():
        # torch calls MKL, which does not use AVX-512 on AMD processors: 91 against 175 GFLOP/s (Zen 5).
        one_dnn = torch.ops.mkldnn._linear_pointwise
        found["fp32 onednn"] = (flops, lambda: one_dnn(a, b, None, "none", [], ""))
    return found


def matrix_product(type_name: str, a: Tensor, b: Tensor) -> Callable[[], object]:
    """Return the call that multiplies FP32 squares in a type; codes, scales and copies are prepared."""
    if type_name == "int8":
        codes = a.to(torch.int8), b.to(torch.int8).t().contiguous().t()
        return lambda: torch._int_mm(*codes)
    if type_name == "fp8":
        x, y = a.to(torch.float8_e4m3fn), b.to(torch.float8_e4m3fn).t().contiguous().t()
        one = torch.ones((), device=a.device)
        return lambda: torch._scaled_mm(x, y, scale_a=one, scale_b=one, out_dtype=torch.bfloat16)
    if type_name == "tf32":
        return lambda: product_tf32(torch.matmul, "fp32", a, b)
    dtype = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}[type_name]
    # The second is transposed like a weight: otherwise CPUs emulate FP16 ten times slower (2.4, not 23
    # GFLOP/s, Zen 5).
    left, right = a.to(dtype), b.to(dtype).t()
    return lambda: left @ right


def _convolution(device: torch.device, channels: int, type_name: str) -> tuple[float, Callable[[], object]]:
    dtype = torch.bfloat16 if type_name == "bf16" else torch.float32
    x, w = (
        torch.randn(n, channels, side, side, device=device).to(dtype, memory_format=torch.channels_last)
        for n, side in ((16, 16), (channels, 3))
    )

    def run() -> object:
        with torch.backends.cudnn.flags(enabled=True, allow_tf32=False):
            return torch.conv2d(x, w, padding=1)

    return 2.0 * x.numel() * channels * 9, run


def _least_s(run: Callable[[], object]) -> float:
    run()
    return min(timings(run, _MAX_CALLS, _TIMED_S))
