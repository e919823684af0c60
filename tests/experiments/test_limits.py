"""The figures of experiments/prediction/limits.py: how they are taken, not what they are."""

from __future__ import annotations

from functools import partial

from qsync.experiments.prediction import limits
from qsync.experiments.workloads.large_models import llama_70b


def test_replay_is_timed_on_new_plans_and_on_changes(monkeypatch):
    monkeypatch.setattr(limits, "REPLAYS", 2)
    monkeypatch.setattr(limits, "CHANGES", 3)
    whole, change = limits.replay_time(num_layers=1)
    assert 0 < change["measured"] < whole["measured"] and "4 classes of 10 ranks" in whole["how"]


def test_a_large_model_is_captured_and_planned_for_four_classes(monkeypatch):
    monkeypatch.setattr(limits, "MODELS", {"small": (partial(llama_70b, 1), 5)})
    found = limits.captured_and_planned("small")
    assert found["violations"] == 0 and found["ranks"] == 20 and found["gap"] <= 0.01
    assert 0 < found["capture_bytes"] <= found["plan_bytes"]


def test_peak_memory_is_this_process_s_own():
    before = limits.peak_resident_bytes()
    block = bytearray(64 * 2**20)
    assert limits.peak_resident_bytes() >= before
    assert before > len(block) / 64  # bytes, not kilobytes
