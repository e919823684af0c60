"""The precisions below FP32 that a comparison on this machine offers."""

from __future__ import annotations

import torch

from qsync.backend.devices.device_detection import detect_class
from qsync.backend.precisions_that_pay import default_precisions, emulated_precisions, sixteen_bits_pay
from qsync.records.precision import Precision


def offered_precisions(device: torch.device) -> tuple[Precision, ...]:
    """Return those that are profiled by default, with `int8_all` where 16 bits are no faster than FP32.

    INT8 in all three products rounds gradients stochastically, so a user has to ask for it. Without fast
    products of 16 bits it is the only lower precision that may be faster than FP32, and a comparison asks for
    it unless the device emulates it.
    """
    able = default_precisions(detect_class(device))
    if sixteen_bits_pay(device) or Precision.INT8_ALL in emulated_precisions(device):
        return able
    return (*able, Precision.INT8_ALL)
