"""The precisions that a comparison offers: INT8 in all products only where 16 bits do not pay."""

from __future__ import annotations

import pytest
import torch

from qsync.backend.devices.device_detection import detect_class
from qsync.backend.precisions_that_pay import default_precisions
from qsync.experiments.harness import offered_precisions as module
from qsync.operators.precision import Precision

CPU = torch.device("cpu")


@pytest.mark.parametrize(("pays", "emulated"), [(True, ()), (False, ()), (False, {Precision.INT8_ALL})])
def test_int8_in_all_products_is_offered_where_16_bits_do_not_pay(pays, emulated, monkeypatch):
    monkeypatch.setattr(module, "sixteen_bits_pay", lambda device: pays)
    monkeypatch.setattr(module, "emulated_precisions", lambda device: frozenset(emulated))
    by_default = default_precisions(detect_class(CPU))
    assert Precision.INT8_ALL not in by_default
    more = () if pays or emulated else (Precision.INT8_ALL,)
    assert module.offered_precisions(CPU) == (*by_default, *more)
