"""How slow the machine was: a walk over time is told from what differs between labels, and from noise."""

from __future__ import annotations

import numpy as np
import pytest

from qsync.predictor.profiling.machine_drift import drift_factors, label_error, walk_rate

DRAW = np.random.default_rng(0)
NUM, TURNS = 24, 5
LABELS = [int(k) for _ in range(TURNS) for k in DRAW.permutation(NUM)]
AT_S = [0.5 * i for i in range(NUM * TURNS)]
OWN = DRAW.normal(0.0, 0.3, NUM)  # logarithms of what each label takes


def typical(log: np.ndarray) -> np.ndarray:
    """Error of each label's median, up to a common factor."""
    found = np.array([np.median(log[np.array(LABELS) == k]) for k in range(NUM)]) - OWN
    return found - found.mean()


def test_a_wandering_machine_is_followed():
    walk = np.cumsum(DRAW.normal(0.0, 0.02, len(LABELS)))
    log = OWN[LABELS] + walk + DRAW.normal(0.0, 0.01, len(LABELS))
    drift = np.log(drift_factors(LABELS, np.exp(log), AT_S))
    assert drift.mean() == pytest.approx(0.0, abs=1e-9)
    assert np.std(drift - (walk - walk.mean())) < 0.02 < 0.5 * np.std(walk)
    assert np.std(typical(log - drift)) < 0.5 * np.std(typical(log))


def test_a_steady_machine_is_left_alone_and_a_hiccup_is_not_followed():
    log = OWN[LABELS] + DRAW.normal(0.0, 0.01, len(LABELS))
    assert np.std(np.log(drift_factors(LABELS, np.exp(log), AT_S))) < 0.004
    log[50] += 1.0
    drift = np.log(drift_factors(LABELS, np.exp(log), AT_S))
    assert abs(drift[50]) < 0.05


def test_the_order_in_which_samples_are_given_does_not_matter():
    log = OWN[LABELS] + np.linspace(0.0, 0.3, len(LABELS))
    forward = drift_factors(LABELS, np.exp(log), AT_S)
    backward = drift_factors(LABELS[::-1], np.exp(log)[::-1], AT_S[::-1])
    assert backward[::-1] == pytest.approx(forward, rel=1e-6)
    assert forward[-1] / forward[0] == pytest.approx(np.exp(0.3), rel=0.05)


def test_where_nothing_was_timed_twice_nothing_is_said():
    assert drift_factors(["a", "b"], [1.0, 5.0], [0.0, 1.0]) == [1.0, 1.0]
    assert label_error(["a", "b"], [1.0, 5.0], [0.0, 1.0]) == np.inf
    assert walk_rate(["a", "b"], [1.0, 5.0], [0.0, 1.0]) == 0.0


@pytest.mark.parametrize(("noise", "gain"), [(0.01, 0.0), (0.02, 0.3), (0.01, 1.0)])
@pytest.mark.parametrize("turns", [3, 8])
def test_the_error_of_what_labels_take_is_known(noise, gain, turns):
    """Three turns say it as well as eight, for the walk may not follow the noise."""
    draw, num = np.random.default_rng(1), 15
    labels, at_s = list(range(num)) * turns, np.arange(num * turns)
    stated, squared = [], []
    for _ in range(20):
        own = draw.normal(0.0, 0.3, num)
        walk = np.cumsum(draw.normal(0.0, noise * np.sqrt(gain), len(labels)))
        log = own[labels] + walk + draw.normal(0.0, noise, len(labels))
        stated.append(label_error(labels, np.exp(log), at_s))
        rest = log - np.log(drift_factors(labels, np.exp(log), at_s))
        found = np.array([rest[np.array(labels) == k].mean() for k in range(num)]) - own
        squared.append(np.var(found))
    assert np.median(stated) == pytest.approx(np.sqrt(np.mean(squared)), rel=0.3)


def test_a_walk_does_not_follow_the_noise_itself():
    """Of a machine that wanders as much as it is noisy, three turns left no noise in four cases of ten."""
    draw, labels = np.random.default_rng(2), list(range(15)) * 3
    for _ in range(20):
        log = np.cumsum(draw.normal(0.0, 0.01, 45)) + draw.normal(0.0, 0.003, 45)
        rest = log - np.log(drift_factors(labels, np.exp(log), np.arange(45)))
        left = rest.reshape(3, 15) - rest.reshape(3, 15).mean(0)
        assert np.std(left) > 0.0005


@pytest.mark.parametrize(("rate", "noise"), [(1e-5, 0.01), (4e-5, 0.01), (1e-4, 0.02)])
def test_eight_runs_in_ten_or_more_lie_where_the_rate_of_the_walk_puts_them(rate, noise):
    """A minute of ten labels says how far the mean of the next five lies off, to 1.645 deviations."""
    draw, num, later, spacing_s = np.random.default_rng(2), 60, 300, 1.0
    labels, at_s = list(range(10)) * 6, spacing_s * np.arange(num)
    rates, hits = [], []
    for _ in range(100):
        walk = np.cumsum(draw.normal(0.0, (rate * spacing_s) ** 0.5, num + later))
        log = draw.normal(0.0, 0.3, 10)[labels] + walk[:num] + draw.normal(0.0, noise, num)
        rates.append(walk_rate(labels, np.exp(log), at_s))
        deviation = (rates[-1] * (num + later) * spacing_s / 3.0) ** 0.5
        hits.append(abs(walk[num:].mean() - walk[:num].mean()) < 1.645 * deviation)
    assert np.mean(rates) == pytest.approx(rate, rel=0.5)
    assert np.mean(hits) > 0.8
