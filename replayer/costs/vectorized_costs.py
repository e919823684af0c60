"""The costs of `ClassCosts` for a whole lowered graph at once, by array lookups.

The prices are those of `class_costs`, which is called once for every distinct pair of an operator's
neighbourhood and measured modes. The arrays depend on graph and profile, never on an assignment.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from qsync.lowering.numbering import Numbered
from qsync.lowering.vectorized import Tables, Tabulated
from qsync.operators.precision import Precision
from qsync.operators.registry import declared
from qsync.records.identity_cache import IdentityCache
from qsync.records.profiles import Cost, Profile
from qsync.replayer.costs.class_costs import FloatArray, cast_cost, measured_as, nearest_mode

Ints = npt.NDArray[np.int64]


class VectorizedPrices:
    """The prices of one profile for one graph: forward and backward seconds.

    Operators with equally named measured modes share the results of `nearest_mode`.
    """

    def __init__(self, tables: Tables, profile: Profile) -> None:
        ops = tables.wiring.ops
        names: dict[tuple[str, ...], int] = {}
        modes = [profile.ops.get(op.name, {}) for op in ops]
        self._columns = [tuple(entry) for entry in modes]
        kind = [names.setdefault(columns, len(names)) for columns in self._columns]
        self._names = np.array(kind, dtype=np.int64)
        # The last column is zero: the price of unmeasured operators that move no data.
        self._width = max((len(columns) for columns in self._columns), default=0) + 1
        measured = np.zeros((2, len(ops), self._width))
        for columns, number in names.items():
            rows = np.flatnonzero(self._names == number)
            if columns:
                costs = [[(c.forward_s, c.backward_s) for c in modes[i].values()] for i in rows.tolist()]
                measured[:, rows, : len(columns)] = np.array(costs).transpose(2, 0, 1)
        self._forward, self._backward = measured
        switches = [profile.switch_s.get(precision, Cost(0.0)) for precision in Precision]
        self._switches = np.array([(cost.forward_s, cost.backward_s) for cost in switches]).T
        self._keys = Numbered()
        self._column: list[int] = []
        self._ratio: list[float] = []
        self._casts: dict[int, FloatArray] = {}
        self._measured_casts: dict[tuple[str, str], dict[str, Cost]] = {}
        for (value, source, target), cost in profile.casts.items():
            self._measured_casts.setdefault((source, target), {})[value] = cost

    def of(self, lowered: Tabulated, profile: Profile) -> tuple[FloatArray, FloatArray]:
        """Return the forward and backward seconds of every operator with its casts, as `ClassCosts` does."""
        key, fresh = self._keys(lowered.neighbourhood << 32 | self._names)
        for i in fresh:
            self._look_up(i, lowered, profile)
        column, ratio = np.array(self._column)[key], np.array(self._ratio)[key]
        every = np.arange(len(key))
        forward = self._forward[every, column] * ratio
        backward = self._backward[every, column] * ratio
        forward += lowered.after_other * self._switches[0, lowered.precision]
        backward += lowered.before_other * self._switches[1, lowered.precision]
        values, kinds = lowered.casts_made()
        if len(values):
            both = self._cast_prices(lowered, profile, values, kinds)
            owner = lowered.tables.owner[values]
            forward += np.bincount(owner, both[0], len(key))
            backward += np.bincount(owner, both[1], len(key))
        return forward, backward

    def _look_up(self, i: int, lowered: Tabulated, profile: Profile) -> None:
        op = lowered.graph.ops[i]
        columns = self._columns[i]
        if not columns and declared(op.kind).moves_nothing:
            self._column.append(self._width - 1)
            self._ratio.append(0.0)
            return
        name, ratio = nearest_mode(profile, lowered.run(i), op)
        self._column.append(columns.index(name))
        self._ratio.append(ratio)

    def _cast_prices(self, lowered: Tabulated, profile: Profile, values: Ints, kinds: Ints) -> FloatArray:
        both = np.zeros((2, len(values)))
        for kind in np.unique(kinds).tolist():
            of_kind = np.flatnonzero(kinds == kind)
            if kind not in self._casts:
                self._casts[kind] = self._cast_line(kind, lowered.tables, profile)
            both[:, of_kind] = self._casts[kind][:, values[of_kind]]
        missing = values[np.isnan(both[0])]
        if len(missing):  # not measured: raise the error of the first such cast
            for cast in lowered.casts(int(missing[lowered.tables.owner[missing].argmin()])):
                cast_cost(profile, cast)
        return both

    def _cast_line(self, kind: int, tables: Tables, profile: Profile) -> FloatArray:
        """Return the seconds of a cast of every value: measured, or fitted (NaN without a fit)."""
        source, target, channels_last = tables.cast_kinds[kind]
        fit = profile.cast_fit.get((source, target))
        found = np.full((2, len(tables.num_elements)), np.nan)
        if fit is not None:
            base, slope = fit
            for row, at_once, each in (
                (0, base.forward_s, slope.forward_s),
                (1, base.backward_s, slope.backward_s),
            ):
                found[row] = np.maximum(0.0, at_once + each * tables.num_elements)
        for name in reversed(measured_as(source, channels_last)):  # the preferred name overwrites the other
            for value, cost in self._measured_casts.get((name, target), {}).items():
                if value in tables.wiring.number:
                    found[:, tables.wiring.number[value]] = cost.forward_s, cost.backward_s
        return found


_PRICES: IdentityCache[IdentityCache[VectorizedPrices]] = IdentityCache()


@dataclass(frozen=True, slots=True)
class VectorizedCosts:
    """Seconds of every operator with its casts, under one assignment on one device class.

    `launches` has the host's seconds of launching kernels, if the profile has them.
    """

    lowered: Tabulated
    profile: Profile
    forward_s: FloatArray
    backward_s: FloatArray
    launches: VectorizedCosts | None = None


def vectorized_costs_of(lowered: Tabulated, profile: Profile) -> VectorizedCosts:
    """Return the costs of a lowered graph on a device class.

    >>> vectorized_costs_of(Tabulated(graph, assignment), profile).forward_s.sum()
    """
    of_graph = _PRICES.of(lowered.graph, IdentityCache)
    prices = of_graph.of(profile, lambda: VectorizedPrices(lowered.tables, profile))
    launches = vectorized_costs_of(lowered, profile.launches) if profile.launches else None
    return VectorizedCosts(lowered, profile, *prices.of(lowered, profile), launches)
