"""Choose the precisions below FP32 for comparisons on this machine."""

from __future__ import annotations

import torch

from qsync.backend.devices.device_detection import detect_class
from qsync.backend.precisions_that_pay import default_precisions, emulated_precisions, sixteen_bits_pay
from qsync.operators.precision import Precision


def offered_precisions(device: torch.device) -> tuple[Precision, ...]:
    """Return the default precisions, plus `int8_all` if 16 bits are no faster than FP32.

    `int8_all` rounds gradients stochastically, so users must request it. Without fast 16-bit products it is
    the only precision that may be faster than FP32, so comparisons include it unless emulated.
    """
    able = default_precisions(detect_class(device))
    if sixteen_bits_pay(device) or Precision.INT8_ALL in emulated_precisions(device):
        return able
    return (*able, Precision.INT8_ALL)
