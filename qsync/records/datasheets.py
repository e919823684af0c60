"""Data sheets: peak rates, bandwidth and memory of GPUs, to plan without having them.

A data sheet gives a lower bound on an operator's time (roofline), not the achieved fraction. Plans made from
one are labelled simulated.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from qsync.errors import FormatError, nearest, shortened
from qsync.operators.precision import Precision
from qsync.records.kernel_support import why_not_multiplied
from qsync.records.record_json import Count, Number, Record

# Seconds of the shortest GPU kernel. Data sheets do not state it: back-to-back launches of small kernels take
# 2 to 10 microseconds on recent data-centre GPUs (an assumption).
LAUNCH_S = 5e-6


@dataclass(frozen=True, slots=True)
class DataSheet(Record):
    """One device's dense peak rates by type (operations/s, 2 per multiply-add) and memory.

    `flops_per_s` has the types that the device multiplies in hardware, and so its precisions. `launch_s` is
    the time of the smallest operator. `capability` is CUDA's compute capability, None for a CPU. `source`
    cites the numbers.
    """

    name: str
    flops_per_s: Mapping[str, Number]
    bytes_per_s: Number
    memory_bytes: Count
    cache_bytes: Count
    launch_s: Number
    capability: tuple[Count, Count] | None
    source: str

    @property
    def precisions(self) -> tuple[Precision, ...]:
        """Return the precisions that a plan may give this device, those on request included."""
        return tuple(precision for precision in Precision if self._has(precision))

    def _has(self, precision: Precision) -> bool:
        multiplied = precision.facts.products[0]
        borrowed = multiplied != precision  # the rate is another precision's
        able = not borrowed or why_not_multiplied(precision, self.capability) is None
        return able and multiplied in self.flops_per_s

    def rate(self, type_name: str) -> float:
        """Return the operations/s in a type; a CPU that does not multiply it emulates it in FP32.

        Raises KeyError for a type that a GPU does not multiply.
        """
        emulated = self.capability is None and type_name not in self.flops_per_s
        return self.flops_per_s["fp32" if emulated else type_name]

    @property
    def backward_type(self) -> str:
        """Return the type in which 8-bit operators multiply backward: a 16-bit float, else FP32."""
        return next((name for name in ("bf16", "fp16") if name in self.flops_per_s), "fp32")


def _nvidia(
    name: str,
    capability: tuple[int, int],
    gigabytes: int,
    gigabytes_per_s: float,
    cache_megabytes: int,
    source: str,
    **teraflops: float,
) -> DataSheet:
    """Return a data sheet from numbers in the units of NVIDIA's sheets; `source` is the title."""
    rates = {type_name: rate * 1e12 for type_name, rate in teraflops.items()}
    return DataSheet(
        name, rates, gigabytes_per_s * 1e9, gigabytes * 10**9, cache_megabytes * 2**20, LAUNCH_S, capability,
        f"NVIDIA: {source}",
    )  # fmt: skip


# Dense rates: half of rates stated with sparsity. FP32 is that of the ordinary cores. A precision that the
# tensor cores lack is left out (V100's INT8, BF16 and TF32; T4's BF16 and TF32). V100, A100, H100 and H200
# are the SXM boards, V100 the 32 GB and A100 the 80 GB one, B200 one of eight in an HGX (180 GB as it ships;
# the brief says up to 192). T4's 320 GB/s are the product brief's (PB-09256), its data sheet says 300. Cache
# sizes, and compute capabilities, are no data sheet's: they are those of the architectures' white papers and
# of the CUDA C++ Programming Guide; B200's cache is what its driver reports. RTX cards sum products of 16 and
# 8-bit floats in FP32, at half the rate of FP16 sums on GeForce cards: the rates are those of the
# architectures' white papers. A6000 and A40 are in GA102's (appendix C), too. P100 is the 16 GB SXM2 board,
# whose ordinary cores multiply FP16. A10G is Amazon's: 70 TFLOP/s of 16 bits by its data sheet, while tables
# that confuse it with an A10 state 125.
_HOPPER = {"fp32": 67, "tf32": 494.5, "bf16": 989.5, "fp16": 989.5, "fp8": 1979, "int8": 1979}
DATASHEETS: dict[str, DataSheet] = {
    sheet.name: sheet
    for sheet in (
        _nvidia(
            "T4", (7, 5), 16, 320, 4, "T4 Tensor Core GPU data sheet (951643)", fp32=8.1, fp16=65, int8=130
        ),
        _nvidia("P100", (6, 0), 16, 732, 4, "Tesla P100 data sheet (SXM2)", fp32=10.6, fp16=21.2),
        _nvidia("V100", (7, 0), 32, 900, 6, "V100 data sheet (1165301 r5)", fp32=15.7, fp16=125),
        _nvidia(
            "RTX3090", (8, 6), 24, 936, 6, "Ampere GA102 white paper", fp32=35.6, tf32=35.6, bf16=71, fp16=71,
            int8=284,
        ),
        _nvidia(
            "A10G", (8, 6), 24, 600, 6, "A10G data sheet", fp32=35, tf32=35, bf16=70, fp16=70, int8=140
        ),
        _nvidia(
            "A6000", (8, 6), 48, 768, 6, "RTX A6000 data sheet", fp32=38.7, tf32=77.4, bf16=154.8,
            fp16=154.8, int8=309.7,
        ),
        _nvidia(
            "A40", (8, 6), 48, 696, 6, "A40 data sheet", fp32=37.4, tf32=74.8, bf16=149.7, fp16=149.7,
            int8=299.3,
        ),
        _nvidia(
            "RTX4090", (8, 9), 24, 1008, 72, "Ada white paper", fp32=82.6, tf32=82.6, bf16=165.2, fp16=165.2,
            fp8=330.3, int8=660.6,
        ),
        _nvidia(
            "L40S", (8, 9), 48, 864, 96, "L40S data sheet", fp32=91.6, tf32=183, bf16=362, fp16=362, fp8=733,
            int8=733,
        ),
        _nvidia(
            "RTX5090", (12, 0), 32, 1792, 96, "RTX Blackwell white paper", fp32=104.8, tf32=104.8, bf16=209.5,
            fp16=209.5, fp8=419, int8=838,
        ),
        _nvidia(
            "L4", (8, 9), 24, 300, 48, "L4 Tensor Core GPU data sheet", fp32=30.3, tf32=60, bf16=121,
            fp16=121, fp8=242.5, int8=242.5,
        ),
        _nvidia(
            "A10", (8, 6), 24, 600, 6, "A10 Tensor Core GPU data sheet", fp32=31.2, tf32=62.5, bf16=125,
            fp16=125, int8=250,
        ),
        _nvidia(
            "A100", (8, 0), 80, 2039, 40, "A100 Tensor Core GPU data sheet (1758950 r4)", fp32=19.5, tf32=156,
            bf16=312, fp16=312, int8=624,
        ),
        _nvidia("H100", (9, 0), 80, 3350, 50, "H100 Tensor Core GPU data sheet", **_HOPPER),
        _nvidia("H200", (9, 0), 141, 4800, 50, "H200 Tensor Core GPU data sheet", **_HOPPER),
        _nvidia(
            "B200", (10, 0), 180, 7700, 126, "Blackwell Architecture Technical Brief v2.1, table 3", fp32=75,
            tf32=1100, bf16=2250, fp16=2250, fp8=4500, int8=4500,
        ),
    )
}  # fmt: skip


def datasheet(name: str) -> DataSheet:
    """Return a device's data sheet by its case-insensitive name.

    FormatError for an unknown name suggests the nearest.

    >>> datasheet("T4").flops_per_s["int8"]
    130000000000000.0
    """
    known = {entry.lower(): entry for entry in DATASHEETS}
    if name.lower() not in known:
        close = nearest(name.upper(), DATASHEETS)
        raise FormatError(
            f"there is no data sheet {shortened(name)}{close}; choose one of {', '.join(DATASHEETS)}"
        )
    return DATASHEETS[known[name.lower()]]
