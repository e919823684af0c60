"""Judge a case's outcome: worked, refused, warned, or silently wrong."""

from __future__ import annotations

import re
import warnings
from functools import partial
from typing import Any

import torch

import qsync
from qsync.experiments.harness.cases import REFUSED, SILENT, WARNS, WORKS, Case
from qsync.experiments.takeover.cases import Outcome
from qsync.runtime import coverage

# Largest relative difference from plain FP32, in norm, that rounding to INT8 explains.
_LARGEST_DIFFERENCE = 0.2


def judge(case: Case, precision: str = "int8") -> dict[str, Any]:
    """Run a case with a plain and a wrapped model, and compare.

    It works if the numbers differ from FP32's only by rounding. Bitwise FP32 numbers and wrong gradients are
    silent failures, unless a warning reports them.
    """
    coverage.say_once.cache_clear()
    torch._dynamo.reset()
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        expected = _flat(case.do(lambda model: model))
        torch._dynamo.reset()
        try:
            found = _flat(case.do(partial(qsync.wrap, plan=precision, strict=True)))
        except Exception as error:
            return case.became(REFUSED, sentence_of(error), difference=None)
    difference = float((found - expected).norm() / expected.norm())
    texts = [str(warning.message) for warning in said if str(warning.message).startswith("qsync:")]
    if 0.0 < difference < _LARGEST_DIFFERENCE and not texts:
        return case.became(WORKS, difference=difference)
    return case.became(WARNS if texts else SILENT, "; ".join(texts), difference=difference)


def sentence_of(error: Exception) -> str:
    """Return the part of an error that a user reads: qsync's in full, torch's with the remedy."""
    text = str(error)
    named = re.search(r"it runs qsync's kernels; call qsync\.unwrap\(model\) first", text)
    return named[0] if named and not isinstance(error, qsync.QSyncError) else text


def _flat(outcome: Outcome) -> torch.Tensor:
    tensors = [outcome] if isinstance(outcome, torch.Tensor) else outcome
    return torch.cat([tensor.detach().flatten().double() for tensor in tensors])
