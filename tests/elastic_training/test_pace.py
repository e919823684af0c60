"""When a card is told to be slower than planned, and when not."""

from __future__ import annotations

import pytest

from qsync.elastic_training.pace import LEAST_S, WINDOW, Pace

BATCH = 16


def steps(pace, measured_s, number=WINDOW, samples=BATCH, plan="fp32"):
    return sum(pace.note(plan, samples, measured_s, 0.5) for _ in range(number))


def test_a_slowdown_is_told_once_and_taken_back_once():
    pace = Pace()
    assert steps(pace, 1.0) == 0  # the prediction is off by 2, and stays so
    assert steps(pace, 1.1, 3 * WINDOW) == 0 and pace.slowdown == 1.0
    assert steps(pace, 2.0, 3 * WINDOW) == 1 and pace.slowdown == 2.0
    assert steps(pace, 2.2, 2 * WINDOW) == 0  # it is planned for
    assert steps(pace, 1.0, 3 * WINDOW) == 1 and pace.slowdown == 1.0


def test_a_few_slow_steps_are_no_slowdown():
    pace = Pace()
    steps(pace, 1.0)
    for _ in range(10):
        assert steps(pace, 9.0, WINDOW // 2) == 0 and steps(pace, 1.0, WINDOW // 2) == 0


def test_a_slowdown_lasts_where_a_smaller_share_follows_from_it():
    pace = Pace()
    steps(pace, 1.0)
    assert steps(pace, 3.0) == 1 and pace.slowdown == 3.0
    assert steps(pace, 3 * 0.6, 5 * WINDOW, samples=BATCH // 2) == 0 and pace.slowdown == 3.0
    assert steps(pace, 0.6, 2 * WINDOW, samples=BATCH // 2) == 1 and pace.slowdown == 1.0
    assert steps(pace, 1.0, 2 * WINDOW) == 0


@pytest.mark.parametrize("seconds", [0.5, 0.54])
def test_a_slowdown_that_ended_before_the_smaller_share_came_is_taken_back(seconds):
    pace = Pace()
    steps(pace, 1.0)
    steps(pace, 3.0)
    steps(pace, seconds, 2 * WINDOW, samples=BATCH // 2)
    assert pace.slowdown == 1.0


def test_less_than_other_processes_take_is_no_slowdown():
    pace = Pace()
    assert steps(pace, LEAST_S) == 0 and steps(pace, 1.9 * LEAST_S, 2 * WINDOW) == 0
    assert steps(pace, 2.1 * LEAST_S) == 1


def test_steps_of_two_paces_decide_nothing():
    pace = Pace()
    steps(pace, 1.0)
    steps(pace, 1.0, WINDOW // 2)
    assert steps(pace, 3.0) == 1 and pace.slowdown == 3.0
    steps(pace, 3.0, WINDOW // 2)
    assert steps(pace, 1.0) == 1 and pace.slowdown == 1.0


def test_a_plan_that_is_predicted_worse_is_no_other_slowdown():
    pace = Pace()
    steps(pace, 1.0)
    assert steps(pace, 2.0) == 1
    assert steps(pace, 2.4, 3 * WINDOW, plan="int8") == 0 and pace.slowdown == 2.0
    assert steps(pace, 1.2, 2 * WINDOW, plan="int8") == 1 and pace.slowdown == 1.0
    assert steps(pace, 1.0, 3 * WINDOW) == 0
