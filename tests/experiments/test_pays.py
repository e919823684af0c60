"""Does it pay? A run on a tiny model, and its page."""

from __future__ import annotations

import pytest

from qsync.experiments.pays import __main__ as pays
from qsync.records.json_files import read_json

TINY = {"model_type": "gpt2", "architectures": ["GPT2LMHeadModel"], "n_layer": 1, "n_embd": 64, "n_head": 2,
        "vocab_size": 100, "n_positions": 16}  # fmt: skip
HUGE = {**TINY, "vocab_size": 10**8}


def test_verdicts_and_bars_of_a_run_that_continues(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(pays, "PILES", ("A100:1,T4:1",))
    monkeypatch.setattr(pays, "MODELS", {"tiny": (TINY, 8, 16), "huge": (HUGE, 8, 16)})
    monkeypatch.setattr(pays, "H100_S", {("tiny", "bf16"): 1e-3})
    monkeypatch.setattr(pays, "H100_BATCH", {"tiny": (8, 16)})
    pays.main(out=tmp_path)
    found, text = read_json(tmp_path / "figures.json"), capsys.readouterr().out
    assert [row["base"] for row in found["verdicts"]] == ["fp16", "fp16"]
    assert "leave T4 out" in text and "does not fit" in text
    assert [bar["limit"] for bar in found["bars"]] == [60.0, 0.25]
    monkeypatch.setattr(pays, "judge", lambda *_: pytest.fail("a finished piece is not judged again"))
    pays.main(out=tmp_path)
