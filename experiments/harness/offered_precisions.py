"""The precisions below FP32 that a comparison on this machine offers."""

from __future__ import annotations

import torch

from qsync.backend.devices.device_detection import default_precisions, detect_class
from qsync.backend.measure_peaks import sixteen_bits_pay
from qsync.records.precision import Precision


def offered_precisions(device: torch.device) -> tuple[Precision, ...]:
    """Return those that are profiled by default, with `int8_all` where 16 bits are no faster than FP32.

    INT8 in all three products rounds gradients stochastically, so a user has to ask for it. Without fast
    products of 16 bits it is the only lower precision that is faster than FP32, and a comparison asks for it.
    """
    able = default_precisions(detect_class(device))
    return able if sixteen_bits_pay(device) else (*able, Precision.INT8_ALL)
