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


def test_a_limit_holds_or_is_said_not_to():
    assert limits._row("time", 1.0, 2.0, "s", "")["holds"]
    assert not limits._row("time", 3.0, 2.0, "s", "")["holds"]
    assert not limits._row("equal", False, True, "", "")["holds"]


def test_peak_memory_is_this_process_s_own():
    before = limits.peak_resident_bytes()
    block = bytearray(64 * 2**20)
    assert limits.peak_resident_bytes() >= before
    assert before > len(block) / 64  # bytes, not kilobytes
