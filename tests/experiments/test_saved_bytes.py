"""The table of saved bytes: what is counted is what is predicted, and INT8 keeps a quarter and its scales."""

from __future__ import annotations

import json

import pytest
import torch
from torch import nn

from qsync.experiments.memory import saved_bytes


class Small(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.shift, self.linear = nn.Parameter(torch.zeros(24)), nn.Linear(24, 16)

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        return nn.functional.gelu(self.linear(input + self.shift))


CASE = saved_bytes.Case("small", Small, lambda n: {"input": torch.randn(32 * n, 24)})


def test_what_is_counted_is_what_is_predicted(tmp_path, monkeypatch):
    monkeypatch.setattr(saved_bytes, "cases", lambda: (CASE,))
    threads = torch.get_num_threads()
    try:
        saved_bytes.main(tmp_path, rounds=1)
    finally:
        torch.set_num_threads(threads)
    content = json.loads((tmp_path / "figures.json").read_text())
    assert content["measured"] is True and {"machine", "commit", "seed", "versions"} <= content.keys()
    rows = {row["way"]: row for row in content["saved"]}
    x, y = 4 * 32 * 24, 4 * 32 * 16
    expected = {
        "torch, fp32": x + y,
        "torch.autocast, bf16": (x + y) // 2,
        "fp32": x + y,
        "fp32, saving less": x + y // 4,
        "bf16": (x + y) // 2,
        "int8": x // 4 + 4 * 32 + y,
        "int8, saving less": x // 4 + 4 * 32 + y // 4,
    }
    assert {way: rows[way]["activation_bytes"] for way in expected} == expected
    for row in rows.values():
        assert row["predicted_bytes"] in (None, row["activation_bytes"])
        assert row["to_fp32"] == pytest.approx(row["activation_bytes"] / (x + y))


def test_a_storage_counts_once_and_what_is_there_anyway_not_at_all():
    x = torch.randn(10, 4, requires_grad=True)
    assert saved_bytes.saved_bytes(lambda: x.exp() + x.exp()) == 2 * 160
    y = torch.randn(10, 4, requires_grad=True)
    assert saved_bytes.saved_bytes(lambda: x * y) == 320
    assert saved_bytes.saved_bytes(lambda: x * y, [y]) == 160
    assert saved_bytes.saved_bytes(lambda: x[:5] * x[5:]) == 160
