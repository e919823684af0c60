"""The least time that this machine's own measured peaks allow: what explains a bar that is missed.

least = sum over products of FLOPs / peak rate of their type + bytes / copy rate

The peaks are measured in the same run: large products of each type, and plain copies. Bytes are what
the best conceivable kernels would move: every tensor read or written once by each pass that needs it, casts
fused with whatever may be fused with them, nothing kept in cache between passes. So it is a bound for kernels
that stream their operands, on the machine as it was minutes earlier: a few per cent beyond it are drift.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch

from qsync.backend.measure_peaks import best_by_type, products
from qsync.backend.selection.kernel_candidates import device_precisions
from qsync.experiments.harness.pairing import measure

SQUARE = 2048
MEASURED_TYPES = ("fp32", "bf16", "fp8", "int8")
MEASURED_ON_GPUS = (*MEASURED_TYPES, "fp16", "tf32")
COPIES = (2**20, 2**22, 2**24, 2**26)  # bytes copied: in the caches, up to far beyond them

# Bytes moved per element of (input, weight, result), by variant; forward, and forward with backward. Operands
# are FP32 outside: a BF16 or INT8 variant reads 4 bytes, writes its own type and reads that again.
# Attention reads queries, keys and values as its input, and has no weight.
FORWARD = {
    "fp32": (4, 4, 4),
    "tf32": (4, 4, 4),
    "bf16": (8, 2, 2),
    "fp16": (8, 2, 4),
    "fp8": (6, 1, 4),
    "int8": (6, 1, 4),
}
# A weight's cast, which is due once per optimizer step.
WEIGHT_CAST = {"fp32": 0, "tf32": 0, "bf16": 6, "fp16": 6, "fp8": 5, "int8": 5}
# Backward reads the gradient twice, both operands again (INT8 codes are decoded to BF16: 1 + 2 + 2), and
# writes FP32 gradients. `int8_all` and `fp8` encode the gradient twice, per row and per column.
TRAINING = {
    "fp32": (12, 12, 12),
    "tf32": (12, 12, 12),
    "tf32_bf16": (12, 12, 6),
    "bf16": (14, 14, 6),
    "fp16": (14, 14, 14),
    "fp16_bf16": (14, 14, 6),
    "int8": (15, 15, 14),
    "int8_bf16": (15, 15, 6),
    "int8_all": (11, 11, 12),
    "int8_all_bf16": (11, 11, 8),
    "fp8": (11, 11, 12),
    "fp8_bf16": (11, 11, 8),
}


@dataclass(frozen=True, slots=True)
class Peaks:
    """Measured: FLOP/s by type, the best of `products`, and bytes/s of copies by how many bytes were copied.

    A copy of n bytes moves 2 n. `products` says which product reached what.
    """

    flops_per_s: Mapping[str, float]
    copy_bytes_per_s: Mapping[int, float]
    products: Mapping[str, float] = field(default_factory=dict)

    def bytes_per_s(self, largest_bytes: int) -> float:
        """Return the copy rate for tensors of at most so many bytes: that of the next size below."""
        below = [size for size in self.copy_bytes_per_s if size <= largest_bytes]
        return self.copy_bytes_per_s[max(below, default=min(self.copy_bytes_per_s))]

    def least_s(
        self, flops: Mapping[str, float], num_bytes: float = 0.0, largest_bytes: int = 0
    ) -> float | None:
        """Return the least time for products of these types and so many bytes; None without a peak."""
        if not set(flops) <= set(self.flops_per_s):
            return None
        products = sum(count / self.flops_per_s[kind] for kind, count in flops.items())
        return products + (num_bytes / self.bytes_per_s(largest_bytes) if num_bytes else 0.0)

    @classmethod
    def from_json(cls, value: Mapping[str, Any]) -> Peaks:
        """Return the peaks that `to_json` wrote."""
        copies = {int(size): rate for size, rate in value["copy_bytes_per_s"].items()}
        return cls(value["flops_per_s"], copies, value["products"])

    def to_json(self) -> dict[str, Any]:
        """Return the peaks as JSON."""
        return {
            "flops_per_s": dict(self.flops_per_s),
            "products": dict(self.products),
            "copy_bytes_per_s": {str(size): rate for size, rate in self.copy_bytes_per_s.items()},
            "square": SQUARE,
        }


def measure_peaks(device: torch.device, rounds: int, square: int = SQUARE) -> Peaks:
    """Measure the peaks of a device: the fastest round of each product and copy."""
    wanted = MEASURED_ON_GPUS if device.type == "cuda" else MEASURED_TYPES  # a CPU may emulate FP16
    types = [str(p) for p in device_precisions(device) if str(p) in wanted]
    multiplied = products(device, square, types)
    copies = {str(size): _copy(torch.ones(size // 4, device=device)) for size in COPIES}
    runs = {name: run for name, (_, run) in multiplied.items()} | copies
    found = {name: min(samples.seconds) for name, samples in measure(runs, rounds, device).items()}
    rates = {name: flops / found[name] for name, (flops, _) in multiplied.items()}
    return Peaks(best_by_type(rates), {size: 2 * size / found[str(size)] for size in COPIES}, rates)


def _copy(source: torch.Tensor) -> Callable[[], object]:
    target = torch.empty_like(source)
    return lambda: target.copy_(source)


def forward_bytes(variant: str, sizes: tuple[int, int, int], with_weight: bool) -> int:
    """Return the bytes of a forward pass for (input, weight, result) of so many elements."""
    per_input, per_weight, per_result = FORWARD[variant]
    per_weight += WEIGHT_CAST[variant] if with_weight else 0
    return sizes[0] * per_input + sizes[1] * per_weight + sizes[2] * per_result


def training_bytes(variant: str, sizes: tuple[int, int, int]) -> int:
    """Return the bytes of a forward and backward pass, the weight's cast included."""
    return sum(count * each for count, each in zip(sizes, TRAINING[variant], strict=True))


def forward_flops(kind: str, variant: str, forward: float) -> dict[str, float]:
    """Return FLOPs by the type of the product, of a forward pass; attention's second product is in BF16."""
    if kind == "attention" and variant == "int8":
        return {"int8": forward / 2, "bf16": forward / 2}
    return {variant: forward}


def training_flops(kind: str, variant: str, forward: float) -> dict[str, float]:
    """Return FLOPs by the type of the product, of a forward and backward pass."""
    variant = variant.removesuffix("_bf16")
    if variant == "int8":
        in_int8 = forward_flops(kind, variant, forward)["int8"]
        return {"int8": in_int8, "bf16": 3 * forward - in_int8}
    return {"int8" if variant == "int8_all" else variant: 3 * forward}
