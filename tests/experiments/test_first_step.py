"""What a start may take beyond plain DDP's."""

from __future__ import annotations

import pytest

from qsync.experiments.clients.start import ObservedRank
from qsync.experiments.takeover.first_step import bars


def start(first_s: float, step_s: float = 0.1) -> dict[str, float]:
    return {"first_step_s": first_s, "step_s": step_s}


def row(plain_s: float, first_s: float, second_s: float, step_s: float) -> dict[str, object]:
    starts = {"plain": start(plain_s, step_s), "first": start(first_s), "second": start(second_s)}
    return {"lines_changed": 2, **starts}


def test_long_steps_may_plan_for_longer():
    found = {"small": row(8.0, 29.0, 11.5, 0.1), "large": row(8.0, 40.0, 10.0, 1.0)}
    limits = [one["limit"] for one in bars(found)]
    assert limits == [20.0, 3.0, 40.0, 3.0]
    assert [one["holds"] for one in bars(found)] == [False, False, True, True]
    assert bars(found)[1]["measured"] == pytest.approx(3.5)


def test_a_rank_is_timed_by_its_lines():
    steps = [(7.5, "step 0: loss 1.0"), (7.75, "step 1: loss 0.5"), (8.0, "step 2: loss 0.25")]
    rank = ObservedRank(((1.0, "started"), *steps, (9.0, "accuracy 0.5")))
    assert (rank.first_step_s(), rank.step_s()) == (7.5, 0.25)
    assert rank.losses() == [text for _, text in steps]
