"""The figures of experiments/prediction/limits.py: how they are taken, not what they are."""

from __future__ import annotations

from graphs import encoder

from qsync.allocator import allocate, check_plan
from qsync.experiments.prediction import limits


def test_a_synthetic_basis_is_complete_and_says_so():
    """Every operator, cast and precision has a cost: a plan can be made, and its weak class is lowered."""
    basis = limits.synthetic_basis(encoder())
    plan = allocate(basis.graph, basis.profiles, basis.sensitivity, basis.cluster)
    assert check_plan(basis.graph, plan, basis.profiles, basis.sensitivity, basis.cluster).ok
    assert plan["infer"].lowered and not plan["train"].lowered
    assert all(profile.machine["synthetic"] for profile in basis.profiles.values())


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
