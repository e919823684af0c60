"""Baselines of the learned cost model: the roofline, and a line fitted to each kind of operator."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence

import numpy as np
from scipy.optimize import nnls

from qsync.predictor.cost_model.op_calls import Call, Direction, least_s, parts, sum_s
from qsync.predictor.cost_model.roofline_law import Array
from qsync.predictor.cost_model.samples import Sample, without_sums
from qsync.records.datasheets import DataSheet

Asked = Sequence[tuple[Call, str, Direction, DataSheet]]


class Roofline:
    """The least time at the device's peaks: launch + max(operations / peak, bytes / bandwidth)."""

    def __init__(self, samples: Sequence[Sample]) -> None:
        """Ignore the samples: peaks are the device's, there is nothing to fit."""

    def seconds(self, asked: Asked) -> Array:
        """Return the seconds (N,) of calls."""
        return np.array([least_s(*each) for each in asked])


class Linear:
    """A line t = a + b operations + c bytes per kind, mode and direction, by relative least squares.

    No coefficient is negative. Calls never sampled are priced by the roofline.
    """

    def __init__(self, samples: Sequence[Sample]) -> None:
        by_key: dict[tuple[str, str, str], list[Sample]] = defaultdict(list)
        for sample in samples:
            by_key[sample.call.kind, sample.mode, sample.direction].append(sample)
        self._weights: dict[tuple[str, str, str], Array] = {}
        for key, members in by_key.items():
            at_best = np.array([parts(s.call, s.mode, s.direction, s.sheet) for s in members])
            seconds = np.array([without_sums(s) for s in members])
            self._weights[key] = nnls(at_best / seconds[:, None], np.ones(len(members)))[0]

    def seconds(self, asked: Asked) -> Array:
        """Return the seconds (N,) of calls."""
        found = []
        for call, mode, direction, sheet in asked:
            weights = self._weights.get((call.kind, mode, direction))
            if weights is None:
                found.append(least_s(call, mode, direction, sheet))
            else:
                own_s = float(np.dot(weights, parts(call, mode, direction, sheet)))
                found.append(own_s + sum_s(call, direction, sheet))
        return np.array(found)
