"""Choosing the fastest of several runs, by a clock that the test moves."""

import itertools

import pytest

from qsync.backend import kernel_timing
from qsync.backend.kernel_timing import fastest


@pytest.fixture
def taking(monkeypatch):
    """Make runs that take these seconds, one after the other; the last repeats."""
    now = [0.0]
    monkeypatch.setattr(kernel_timing.time, "perf_counter", lambda: now[0])

    def make(*seconds):
        left = itertools.chain(seconds, itertools.repeat(seconds[-1]))
        counted = []

        def run():
            counted.append(next(left))
            now[0] += counted[-1]

        run.counted = counted
        return run

    return make


def test_long_runs_are_repeated_before_one_is_chosen(taking):
    disturbed, other = taking(9.0, 9.0, 2.0), taking(3.0)
    assert fastest([disturbed, other]) == 0
    assert len(disturbed.counted) == len(other.counted) == 6  # the first is not timed


def test_a_run_that_takes_twice_the_least_is_timed_twice(taking):
    slow, fast = taking(2.1), taking(1.0)
    assert fastest([slow, fast]) == 1
    assert len(slow.counted) == 3 and len(fast.counted) == 6


def test_short_runs_are_repeated_until_the_time_is_over(taking):
    one, two = taking(1.0), taking(0.25)
    assert fastest([one, two], rounds=50, seconds=6) == 1
    assert len(two.counted) == 1 + 17  # two rounds of both take 2.5 s; then one takes 0.25


@pytest.mark.parametrize("tie, chosen", [(0.0, 1), (0.1, 1), (0.11, 0)])
def test_of_a_tie_the_first_is_chosen(taking, tie, chosen):
    assert fastest([taking(1.105), taking(1.0)], tie=tie) == chosen


def test_calls_in_a_row_are_timed_together(taking):
    run = taking(1.0)
    assert fastest([run], seconds=0.0, calls=8) == 0
    assert len(run.counted) == 1 + 8 * 5  # warmed up by one, then at least five rounds
