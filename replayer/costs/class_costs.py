"""The costs of each node of the lowered graph on a device class, read off its profile.

Lowering decides which casts exist. This module looks up their prices.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from copy import copy

import numpy as np
import numpy.typing as npt

from qsync.errors import MismatchError
from qsync.lowering.incremental import Lowering
from qsync.lowering.lowered_graph import FUSED, Cast, Run
from qsync.lowering.numbering import Ints, Numbered
from qsync.lowering.table import Table
from qsync.lowering.wiring import wiring
from qsync.operators.declaration import Role
from qsync.operators.precision import Precision
from qsync.operators.registry import EPILOGUES, FORMS, declared
from qsync.records.graph import Op, OpGraph
from qsync.records.identity_cache import IdentityCache
from qsync.records.profiles import Cost, Profile
from qsync.records.variant import CHANNELS_LAST, PLAIN, Variant, variant_of

FloatArray = npt.NDArray[np.float64]
_NO_SWITCH = Cost(0.0)


def node_cost(profile: Profile, node: Cast | Run, ops: Mapping[str, Op]) -> Cost:
    """Return the cost of a cast or of an operator in its mode; `ops` maps names to operators."""
    return cast_cost(profile, node) if isinstance(node, Cast) else run_cost(profile, node, ops[node.op])


def cast_cost(profile: Profile, cast: Cast) -> Cost:
    """Return the cost of a cast: measured for its value, else from the line fitted to its types.

    A cast measured in the other memory order (channels_last or not) also counts as measured. The fitted line
    t = base + slope * num_elements prices casts that no measured step contained. Raises MismatchError if the
    profile has nothing for these types.

    >>> cast_cost(profile, Cast("x", "fp32", "bf16", 1024, False)).forward_s
    """
    for source in measured_as(cast.source, cast.channels_last):
        exact = profile.casts.get((cast.value, source, cast.target))
        if exact is not None:
            return exact
    fit = profile.cast_fit.get((cast.source, cast.target))
    if fit is None:
        raise MismatchError(
            f"the profile of {profile.device_class} has no cast from {cast.source} to {cast.target} (needed "
            f"for {cast.value}); profile this class again with that precision"
        )
    return fitted_cost(*fit, cast.num_elements)


def fitted_cost(base: Cost, slope: Cost, num_elements: int) -> Cost:
    """Return the cost of a cast of `num_elements` elements on a fitted line (`Profile.cast_fit`)."""
    return Cost(
        max(0.0, base.forward_s + slope.forward_s * num_elements),
        max(0.0, base.backward_s + slope.backward_s * num_elements),
    )


def measured_as(source: str, channels_last: bool) -> tuple[str, str]:
    """Return the names of a cast's source type in a profile: in its own memory order, in the other."""
    return (source + CHANNELS_LAST, source) if channels_last else (source, source + CHANNELS_LAST)


def run_cost(profile: Profile, run: Run, op: Op) -> Cost:
    """Return the cost of one operator in its mode.

    An adjustable operator needs a measurement in its mode; memory order and result type may differ. A
    following or fixed operator takes its nearest measured mode, scaled by the bytes of the types, since
    memory bandwidth bounds it. An operator that saves less needs a measurement that saves less; the nearest
    form and type prices it. A product with an activation in its epilogue, if not measured in this form, costs
    as much as product and activation in separate kernels. A product beside one of another precision takes
    `Profile.switch_s` longer. Operators that move no data (views, the graph's output) are free unless
    measured. Raises MismatchError naming the operator if the profile cannot price it.

    >>> run_cost(profile, Run("fc1", "bf16", ("bf16", "bf16"), "bf16"), op).total_s
    """
    measured = profile.ops.get(run.op, {})
    if not measured and declared(op.kind).moves_nothing:
        return Cost(0.0)
    name, ratio = nearest_mode(profile, run, op)
    cost = measured[name]
    if name != run.timed_as:
        cost = Cost(cost.forward_s * ratio, cost.backward_s * ratio)
    switch = profile.switch_s.get(run.mode, _NO_SWITCH)
    forward_s, backward_s = run.after_other * switch.forward_s, run.before_other * switch.backward_s
    return Cost(cost.forward_s + forward_s, cost.backward_s + backward_s, cost.spread_s)


def nearest_mode(profile: Profile, run: Run, op: Op) -> tuple[str, float]:
    """Return the measured mode that prices an operator, and the factor on its measured seconds.

    The result depends on the names of the measured modes, not on their times. Raises MismatchError if no
    measured mode fits.
    """
    wanted, measured = run.variant, profile.ops.get(op.name, {})
    if str(wanted) in measured:
        return str(wanted), 1.0
    every = [variant_of(key) for key in measured]
    candidates = [v for v in every if (v.form == PLAIN) == (run.form == PLAIN)]
    if run.form == FUSED or run.form in EPILOGUES:
        # A step measures product and activation both in this form, or neither. The plain form takes no less.
        candidates = [v for v in every if v.form == run.form] or [v for v in every if v.form == PLAIN]
    elif run.form != PLAIN:
        candidates = [v for v in candidates if v.form != FUSED]
    if op.role is Role.ADJUSTABLE:
        candidates = [v for v in candidates if v.mode == run.mode]
    if not candidates:
        known = ", ".join(measured) or "nothing"
        # An operator that saves less needs a time in that form, and its product one without an epilogue.
        computes = any(v.mode == run.mode and v.form in EPILOGUES for v in every)
        saves = computes if run.form == PLAIN else run.form not in EPILOGUES
        raise MismatchError(
            f"the profile of {profile.device_class} has no time of {op.name} in {wanted} (it has "
            f"{known}); profile this class again{' with save_less=True' if saves else ''}"
        )
    nearest = min(candidates, key=lambda found: _distance(found, wanted))
    return str(nearest), wanted.width / nearest.width


def _distance(found: Variant, wanted: Variant) -> tuple[object, ...]:
    """Return what to compare variants by: form, then width, memory order and result type.

    Ties go to the wider one, then to the first by name, so that no order of a dict decides.
    """
    return (
        found.form != wanted.form,
        abs(found.width - wanted.width),
        found.channels_last != wanted.channels_last,
        found.as_traced != wanted.as_traced,
        found.returns_16bit != wanted.returns_16bit,
        -found.width,
        str(found),
    )


def check_timed(profile: Profile, graph: OpGraph, name: str) -> None:
    """Raise MismatchError unless the profile prices an operator in every form that saves less.

    An operator that saves less does not run in the epilogue of the preceding product, so that product also
    needs a price without epilogue.

    >>> check_timed(profile, graph, "encoder.0.gelu")
    """
    wired = wiring(graph)
    op, product = graph.ops[wired.position[name]], wired.product[wired.position[name]]
    for form in dict.fromkeys(FORMS[op.kind]):
        if form != PLAIN:
            nearest_mode(profile, Run(name, op.dtype, (), op.dtype, form), op)
    for precision in profile.precisions_of(graph.ops[product].name) if product is not None else ():
        maker = graph.ops[product]  # type: ignore[index]
        nearest_mode(profile, Run(maker.name, str(precision), (), maker.dtype), maker)


class Prices:
    """The prices of one profile for one graph's table: forward and backward seconds.

    Operators with equally named measured modes share the results of `nearest_mode`.
    """

    def __init__(self, table: Table, profile: Profile) -> None:
        ops = table.wiring.ops
        names: dict[tuple[str, ...], int] = {}
        modes = [profile.ops.get(op.name, {}) for op in ops]
        self._columns = [tuple(entry) for entry in modes]
        kind = [names.setdefault(columns, len(names)) for columns in self._columns]
        self._names = np.array(kind, dtype=np.int64)
        # The last column is zero: the price of unmeasured operators that move no data.
        self._width = max((len(columns) for columns in self._columns), default=0) + 1
        self._measured = np.zeros((2, len(ops), self._width))
        for columns, number in names.items():
            rows = np.flatnonzero(self._names == number)
            if columns:
                costs = [[(c.forward_s, c.backward_s) for c in modes[i].values()] for i in rows.tolist()]
                self._measured[:, rows, : len(columns)] = np.array(costs).transpose(2, 0, 1)
        switches = [profile.switch_s.get(precision, _NO_SWITCH) for precision in Precision]
        self._switches = np.array([(cost.forward_s, cost.backward_s) for cost in switches]).T
        self._keys = Numbered()
        self._found = np.zeros((0, 2))  # by number of a key: column of the measured mode, and its factor
        self._casts: FloatArray = np.zeros((0, 2, len(table.num_elements)))
        self._measured_casts: dict[tuple[str, str], dict[str, Cost]] = {}
        for (value, source, target), cost in profile.casts.items():
            self._measured_casts.setdefault((source, target), {})[value] = cost

    def of(self, lowering: Lowering, profile: Profile, ops: Ints) -> FloatArray:
        """Return the forward and backward seconds (rows) of some operators with their casts."""
        key, fresh = self._keys(lowering.row[ops] << 32 | self._names[ops])
        if fresh:
            found = [self._look_up(int(ops[k]), lowering, profile) for k in fresh]
            self._found = np.concatenate((self._found, found))
        column, ratio = self._found[key].T
        both: FloatArray = self._measured[:, ops, column.astype(np.intp)] * ratio
        own = lowering.numbers[ops]
        both[0] += lowering.after_other(ops) * self._switches[0, own]
        both[1] += lowering.before_other(ops) * self._switches[1, own]
        values, kinds = lowering.casts_at(ops)
        if len(values):
            table = lowering.table
            for kind in range(len(self._casts), len(table.cast_kinds)):
                self._casts = np.concatenate((self._casts, self._cast_line(kind, table, profile)[None]))
            prices = self._casts[kinds, :, values].T
            missing = values[np.isnan(prices[0])]
            if len(missing):  # not measured: raise the error of the first such cast
                for cast in lowering.casts(int(missing[table.owner[missing].argmin()])):
                    cast_cost(profile, cast)
            place = np.searchsorted(ops, table.owner[values])
            for part, price in zip(both, prices, strict=True):
                part += np.bincount(place, price, len(ops))
        return both

    def _look_up(self, i: int, lowering: Lowering, profile: Profile) -> tuple[int, float]:
        op, columns = lowering.graph.ops[i], self._columns[i]
        if not columns and declared(op.kind).moves_nothing:
            return self._width - 1, 0.0
        name, ratio = nearest_mode(profile, lowering.run(i), op)
        return columns.index(name), ratio

    def _cast_line(self, kind: int, table: Table, profile: Profile) -> FloatArray:
        """Return the seconds of a cast of every value: measured, or fitted (NaN without a fit)."""
        source, target, channels_last = table.cast_kinds[kind]
        fit = profile.cast_fit.get((source, target))
        found = np.full((2, len(table.num_elements)), np.nan)
        if fit is not None:
            base, slope = fit
            for row, at_once, each in (
                (0, base.forward_s, slope.forward_s),
                (1, base.backward_s, slope.backward_s),
            ):
                found[row] = np.maximum(0.0, at_once + each * table.num_elements)
        for name in reversed(measured_as(source, channels_last)):  # the preferred name overwrites the other
            for value, cost in self._measured_casts.get((name, target), {}).items():
                if value in table.wiring.number:
                    found[:, table.wiring.number[value]] = cost.forward_s, cost.backward_s
        return found


_PRICES: IdentityCache[IdentityCache[Prices]] = IdentityCache()


class ClassCosts:
    """Forward and backward seconds of every operator and its casts, on one device class.

    `forward_s[i]` and `backward_s[i]` are sums over the casts of graph inputs just before operator i,
    operator i itself, and the casts of its result. `update` prices positions again after `Lowering.assign`.
    Prices depend on the lowering alone, so an update of the same positions after `Lowering.undo` restores the
    arrays exactly. `launches` has the host's seconds of launching the same kernels, if the profile has them.
    Raises MismatchError if the profile cannot price a node.

    >>> costs = ClassCosts(lowering, profile)
    >>> change = lowering.assign("encoder.0.fc1", Precision.INT8)
    >>> costs.update(change.touched)
    """

    def __init__(self, lowering: Lowering, profile: Profile) -> None:
        self.lowering = lowering
        self.profile = profile
        num_ops = len(lowering.graph.ops)
        self.launches = ClassCosts(lowering, profile.launches) if profile.launches else None
        of_graph = _PRICES.of(lowering.graph, IdentityCache)
        self._prices = of_graph.of(profile, lambda: Prices(lowering.table, profile))
        self.forward_s, self.backward_s = self._prices.of(lowering, profile, np.arange(num_ops))

    def update(self, positions: Sequence[int]) -> None:
        """Price the operators at these positions, in order, again."""
        if self.launches:
            self.launches.update(positions)
        ops = np.array(positions, dtype=np.int64)
        self.forward_s[ops], self.backward_s[ops] = self._prices.of(self.lowering, self.profile, ops)

    @property
    def total_s(self) -> float:
        """Return the seconds of the whole graph, forward and backward, without communication."""
        return float(self.forward_s.sum() + self.backward_s.sum())

    def without_backward(self) -> ClassCosts:
        """Return these costs with a backward that takes no time."""
        other = copy(self)
        other.backward_s = 0.0 * self.backward_s
        other.launches = self.launches.without_backward() if self.launches else None
        return other
