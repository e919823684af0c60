"""What is said of versions that qsync was not tested with."""

from __future__ import annotations

import warnings

import pytest
import torch

import qsync
from qsync.backend.devices import device_detection


@pytest.mark.parametrize(
    ("version", "is_said"), [("2.14.1+cu130", False), ("2.15.0.dev1", True), ("3.0.0", True)]
)
def test_a_torch_of_tomorrow_is_one_line_and_no_refusal(version, is_said, monkeypatch):
    monkeypatch.setattr(torch, "__version__", version)
    device_detection.warn_of_untested_torch.cache_clear()
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        for _ in range(2):
            graph = qsync.capture(torch.nn.Linear(4, 4), torch.ones(2, 4))
    lines = [str(warning.message) for warning in said if "was not tested" in str(warning.message)]
    assert graph.ops and len(lines) == is_said
    assert not is_said or (version in lines[0] and "2.11 to 2.14" in lines[0] and "\n" not in lines[0])
