"""The figures of experiments/prediction/limits.py: how they are taken, not what they are."""

from __future__ import annotations

from qsync.experiments.prediction import limits


def test_replay_is_timed_on_new_plans_and_on_changes(monkeypatch):
    monkeypatch.setattr(limits, "REPLAYS", 2)
    monkeypatch.setattr(limits, "CHANGES", 3)
    whole, change = limits.replay_time(num_layers=1)
    assert 0 < change["measured"] < whole["measured"] and "4 classes of 10 ranks" in whole["how"]


def test_peak_memory_is_this_process_s_own():
    before = limits.peak_resident_bytes()
    block = bytearray(64 * 2**20)
    assert limits.peak_resident_bytes() >= before
    assert before > len(block) / 64  # bytes, not kilobytes
