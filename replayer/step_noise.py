"""Noise: synchronous steps in which the work of every rank varies. Simulated."""

from __future__ import annotations

import math
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from qsync.errors import FormatError
from qsync.operators.precision import Precision
from qsync.records.cluster import Cluster
from qsync.records.graph import OpGraph
from qsync.records.plans import Plan
from qsync.records.profiles import Profile
from qsync.replayer.simulate import simulate_step
from qsync.replayer.synchronous_step import step_time

_MOST_STEPS = 1_000_000


@dataclass(frozen=True, slots=True)
class Variation:
    """Seconds of many simulated steps, in the order drawn, and of the step without noise."""

    steps_s: tuple[float, ...]
    steady_s: float

    @property
    def mean_s(self) -> float:
        """Return the mean seconds of a step."""
        return statistics.fmean(self.steps_s)

    @property
    def range_s(self) -> tuple[float, float]:
        """Return the 5th and 95th percentile of the seconds of a step."""
        return percentile(self.steps_s, 0.05), percentile(self.steps_s, 0.95)

    @property
    def lost(self) -> float:
        """Return the mean loss to noise as a fraction of the step, which waits for its latest rank."""
        return self.mean_s / self.steady_s - 1.0


def vary(
    graph: OpGraph,
    plan: Plan | Mapping[str, Mapping[str, Precision]],
    profiles: Mapping[str, Profile],
    cluster: Cluster,
    *,
    num_steps: int = 1000,
    seed: int = 0,
    bucket_cap_bytes: int | None = None,
) -> Variation:
    """Simulate `num_steps` steps in which every rank has the noise of its class's profile.

    The work of a rank takes exp(noise z) times its usual time, with z standard normal. Of the n ranks of a
    class only the latest counts. Its z is drawn as the largest of n, Phi^-1(u^(1/n)), so thousands of ranks
    cost no more than one. The same seed gives the same steps. `bucket_cap_bytes` defaults to the plan's own
    cap, else to DDP's.

    >>> vary(graph, plan, profiles, cluster, num_steps=1000, seed=0).lost
    """
    if not 1 <= num_steps <= _MOST_STEPS:
        raise FormatError(f"the number of steps must be 1 to {_MOST_STEPS}, found {num_steps}")
    found = simulate_step(graph, plan, profiles, cluster, bucket_cap_bytes)
    exchange, works = found.exchange, found.works
    uniform = 1.0 - np.random.default_rng(seed).random((num_steps, len(works)))  # in (0, 1]
    latest = [
        [_latest(float(u), cluster[name].count) for u, name in zip(row, found.costs, strict=True)]
        for row in uniform
    ]
    noise = [profiles[name].noise for name in found.costs]
    steps = tuple(
        step_time(
            [work.slower(math.exp(s * z)) for work, s, z in zip(works, noise, row, strict=True)], exchange
        )
        for row in latest
    )
    return Variation(steps, step_time(works, exchange))


def _latest(u: float, count: int) -> float:
    """Return the largest of `count` standard normal values, from a uniform value in (0, 1]."""
    return statistics.NormalDist().inv_cdf(min(u ** (1.0 / count), 1.0 - 2.0**-53))


def percentile(values: Sequence[float], part: float) -> float:
    """Return the `part` quantile of values (0 to 1, nearest rank)."""
    ordered = sorted(values)
    return ordered[max(0, min(len(ordered) - 1, -(-int(1000 * part * len(ordered)) // 1000) - 1))]
