"""What is of GPUs alone; that their kernels compute what the reference does is in test_backend_parity.py."""

from __future__ import annotations

import pytest
import torch
from torch.nn import functional as F

from qsync.backend import select
from qsync.errors import UnsupportedError

pytestmark = [
    pytest.mark.cuda,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device"),
]


def test_tf32_leaves_the_switches_as_they_were():
    before = torch.backends.cuda.matmul.allow_tf32, torch.backends.cudnn.allow_tf32
    try:
        kernel = select("cuda").kernel("linear", "tf32")
    except UnsupportedError as error:
        pytest.skip(str(error))
    x, w = (torch.randn(8, 8, device="cuda", requires_grad=True) for _ in range(2))
    kernel(F.linear, "fp32", x, w).sum().backward()
    assert before == (torch.backends.cuda.matmul.allow_tf32, torch.backends.cudnn.allow_tf32)


def test_every_choice_on_this_gpu_has_a_reason():
    assert all(row["why"] for row in select("cuda").describe())
