"""Choosing the fastest of several runs: by a clock that the test moves, and by the kernels of a GPU."""

import itertools
import time

import pytest
import torch

from qsync.backend.devices import kernel_timing
from qsync.backend.devices.kernel_timing import fastest, fastest_on_gpu


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


@pytest.mark.parametrize(
    "encoded_launches, with_launches, chosen",
    [(0.5, True, 0), (1.2, True, 1), (1.2, False, 0)],
    ids=["few launches", "many launches", "launches do not count"],
)
def test_on_a_gpu_kernels_decide_and_launches_of_encoded_products(
    monkeypatch, encoded_launches, with_launches, chosen
):
    encoded, narrow, wide = (lambda: None for _ in range(3))
    seconds = {encoded: (0.8, encoded_launches), narrow: (1.0, 5.0), wide: (2.0, 0.1)}
    monkeypatch.setattr(kernel_timing, "kernel_s", lambda run, calls: seconds[run])
    assert fastest_on_gpu([encoded, narrow, wide], [with_launches, False, False], 0.05) == chosen


@pytest.mark.cuda
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")
def test_a_slow_launch_is_no_slow_kernel():
    x = torch.randn(2048, 2048, device="cuda")
    short = x[:256, :256].contiguous()

    def slowly_launched():
        time.sleep(0.01)
        return short @ short

    assert fastest_on_gpu([lambda: x @ x, slowly_launched], [False, False]) == 1
    assert fastest_on_gpu([lambda: x @ x, slowly_launched], [False, True]) == 0
    kernel, launch = kernel_timing.kernel_s(slowly_launched)
    assert kernel < launch / 10
