"""Shares of the batch, chosen together with precisions: least step first, then least variance.

A class takes a_c + b_c s seconds for s samples, at its fastest precisions. Equal times make the least step:

    a_c + b_c s_c = T,   sum over classes of n_c s_c = B

The lines are fitted to the shares tried so far, until these give no new shares. Among the shares that reach
the least step within the error of the profiles, those of least variance win.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from typing import Any

from qsync.allocator.explanation.plan_warnings import hidden_by_noise
from qsync.allocator.planner import Options, allocate, fastest_state, kept_base
from qsync.allocator.problem import make_problem
from qsync.allocator.search_state import State
from qsync.allocator.uniform import uniform
from qsync.errors import DoesNotFitError, InfeasibleError
from qsync.records.levers import ACCUMULATE, ClassLevers, Levers, samples_of
from qsync.records.plan_folder import Basis
from qsync.records.plans import Plan
from qsync.records.profiles import Profile
from qsync.replayer.levers.apply import profiles_under_levers
from qsync.replayer.levers.batch_size import Recapture, reach

PASSES = (1, 2, 4, 8)
_MAX_TRIED = 12  # shares replayed in the search for one least step
_ROUNDING = 1e-9  # relative
_EQUAL = 0.01  # relative difference to which training repeats its steps
_LEAST_APART = 0.25  # distance between the samples of two profiles / samples of the first
_HALVINGS = 60  # bisection steps in the search for equal times


@dataclass(frozen=True, slots=True)
class Shared:
    """Samples and passes by class, with their least step and each class's own seconds in it.

    The step is infinite if any class is `crowded`: its samples do not fit in its memory.
    """

    levers: Levers
    step_s: float
    own_s: Mapping[str, float]
    is_lowered: Mapping[str, bool]  # class -> whether it could be lowered
    crowded: Sequence[str] = ()

    @property
    def samples(self) -> dict[str, int]:
        """Return the samples per step of one rank of each class."""
        return {name: entry.samples or 0 for name, entry in self.levers.classes.items()}


class BatchShares:
    """The search for shares of the batch with the least step, and with the least variance at it.

    `options` are those of `allocate`. No rank takes fewer than `least_samples` samples, unless equal shares
    are smaller. With "accumulate" among the levers, a class that does not fit takes several passes.

    >>> shares = BatchShares(basis, other, ["share"], {"base": "bf16"})
    >>> plan = shares.plan()
    """

    def __init__(
        self,
        basis: Basis,
        other: Recapture | None,
        levers: Sequence[str],
        options: Mapping[str, Any],
        least_samples: int = 1,
        known: dict[tuple[str, ClassLevers], Profile] | None = None,
    ) -> None:
        own = {c.name: basis.profiles[c.name] for c in basis.cluster.classes}
        self.basis, self.other, self.options = replace(basis, profiles=own), other, dict(options)
        self.equal = samples_of(basis.graph)
        self._given = Options(**{**options, "target_s": None, "slack": None})
        self._passes = PASSES if ACCUMULATE in levers and other is not None else PASSES[:1]
        self._least = min(least_samples, self.equal)
        self._profiles = {} if known is None else known
        self._best: dict[bool, Shared] = {}
        self._strongest: list[str] | None = None  # classes not lowered in the first trial (equal shares)

    def best(self, lower: bool = True) -> Shared:
        """Return the shares of the least step: with fastest precisions, or none lowered (LB-BSP).

        Raises InfeasibleError if no shares fit in memory.
        """
        if lower not in self._best:
            self._best[lower] = self._search(lower)
        return self._best[lower]

    def guess(self) -> dict[str, int]:
        """Return the samples by class to profile next, near the best shares by one profile.

        They keep a distance from the first profile, for a line through both, and must fit in memory.
        """
        equal = self._timed(dict.fromkeys(self.basis.profiles, self.equal), True)
        ideal = _equal_times(self.basis, [equal], self._ends, {})
        found, apart = {}, max(1, math.ceil(_LEAST_APART * self.equal))
        for name, most in self.room().items():
            samples = round(ideal[name])
            more, fewer = max(samples, self.equal + apart), max(1, min(samples, self.equal - apart))
            found[name] = min(more, most) if samples >= self.equal and most > self.equal else fewer
        return found

    def room(self) -> dict[str, int]:
        """Return the samples by class that fit in one pass even if the peak grows in proportion."""
        basis, budgets = self.basis, self.options.get("budgets") or {}
        plain = uniform(basis.graph, basis.profiles, basis.cluster, {}, base=self.options.get("base"))
        found = {}
        for c in basis.cluster.classes:
            predicted = plain[c.name].predicted
            room = budgets.get(c.name, c.memory_bytes) / (predicted.memory_bytes if predicted else 1)
            found[c.name] = int(self.equal * room)
        return found

    def about(self) -> float:
        """Estimate the samples per second of the best shares from one profile.

        The estimate assumes that every class keeps its rate of equal shares, and that no class waits.
        """
        equal = self._timed(dict.fromkeys(self.basis.profiles, self.equal), True)
        return sum(c.count * self.equal / equal.own_s[c.name] for c in self.basis.cluster.classes)

    def plan(self) -> Plan:
        """Return the plan of least variance at the least step over shares and precisions.

        A given target replaces the least step. Errors of `allocate` pass.
        """
        best, target_s = self.best(), self.options.get("target_s")
        if target_s is None:
            slack = self.options.get("slack")
            target_s = best.step_s * (1 + (self._error(best) if slack is None else slack))
        tried = [best, *self._relieving(best, target_s)]
        with suppress(InfeasibleError):
            tried.append(self.best(lower=False))
        found, refused = list[Plan](), InfeasibleError("no shares were tried")
        for levers in {str(one.levers.classes): one.levers for one in tried}.values():
            try:
                found.append(self.allocate(levers, target_s))
            except InfeasibleError as error:
                refused = error
        if not found:
            raise refused
        return self._unless_hidden(min(found, key=lambda plan: (plan.added_variance, plan.step_s)))

    def _unless_hidden(self, plan: Plan) -> Plan:
        """Return the plan, or one with shares by speed and nothing lowered if noise hides its gain."""
        try:
            plain = self.best(lower=False)
        except InfeasibleError:
            return plan
        if Options(**self.options).is_forced:
            return plan
        basis, profiles = self.basis, self._at(plan.levers or Levers({}))
        budgets = self.options.get("budgets")
        hidden = hidden_by_noise(basis.graph, plan, profiles, basis.cluster, budgets, plain.step_s)
        if not hidden:
            return plan
        found = self.allocate(plain.levers, plain.step_s)
        return replace(found, kept_base=kept_base(hidden, found))

    def allocate(self, levers: Levers, target_s: float) -> Plan:
        """Return the plan of least variance at these shares; pass errors of `allocate`."""
        basis, options = self.basis, {**self.options, "slack": None, "target_s": target_s * (1 + _ROUNDING)}
        plan = allocate(basis.graph, self._at(levers), basis.sensitivity, basis.cluster, **options)
        return replace(plan, target_s=target_s)

    def _error(self, shared: Shared) -> float:
        """Return the relative difference of steps that count as equal; noisy profiles cost no speed."""
        profiles, free = self.basis.profiles, [name for name, is_free in shared.is_lowered.items() if is_free]
        return min(_EQUAL, max((profiles[name].error for name in free), default=0.0))

    def _at(self, levers: Levers) -> dict[str, Profile]:
        basis = self.basis
        return profiles_under_levers(
            basis.graph, basis.profiles, basis.cluster, levers, self.other, self._profiles
        )

    def _search(self, lower: bool) -> Shared:
        """Search for the shares of the least step, by trials.

        A crowded class takes fewer samples in the next trial. Once this finds no new shares, its samples
        become a multiple of 2, 4 or 8, which it takes in as many passes.
        """
        tried: dict[tuple[int, ...], Shared] = {}
        following: dict[str, int] | None = dict.fromkeys(self.basis.profiles, self.equal)
        crowded: dict[str, int] = {}  # class -> fewest samples that did not fit
        units, limit = dict.fromkeys(self.basis.profiles, 1), _MAX_TRIED
        while following is not None and len(tried) < limit:
            one = tried[tuple(following.values())] = self._timed(following, lower)
            for name in one.crowded:
                more = next((k for k in self._passes if k > units[name] > 1), None)
                if more is None:
                    crowded[name] = one.samples[name]
                else:
                    units[name] = more
            following = self._following(list(tried.values()), crowded, units)
            if following is None and crowded and limit == _MAX_TRIED and len(self._passes) > 1:
                units, crowded = {**units, **dict.fromkeys(crowded, self._passes[1])}, {}
                limit = len(tried) + _MAX_TRIED // 2
                following = self._following(list(tried.values()), crowded, units)
        best = min(tried.values(), key=lambda each: each.step_s)
        if math.isinf(best.step_s):
            raise DoesNotFitError(
                f"no share of the batch fits in the memory of {', '.join(best.crowded)}; give a smaller "
                'batch, or levers that save memory ("accumulate", "recompute")'
            )
        return best

    def _following(
        self, tried: Sequence[Shared], crowded: Mapping[str, int], units: Mapping[str, int]
    ) -> dict[str, int] | None:
        """Return the shares to try next; None if no new shares are left."""
        best = min(tried, key=lambda each: each.step_s)
        known = [each.samples for each in tried]
        fitting = {name: self._fitting(name, tried) for name in crowded}
        most = {name: (fitting[name] + own) // 2 for name, own in crowded.items()}
        found = self._exact(_equal_times(self.basis, tried, self._ends, most), most, units=units)
        if found is None or found in known:
            # Samples are whole: take one sample from the slowest class.
            slowest = max(best.own_s, key=lambda name: best.own_s[name])
            ideal = {name: float(own) for name, own in best.samples.items()}
            found = self._exact(ideal, {**most, slowest: best.samples[slowest] - 1}, units=units)
        return None if found in known else found

    def _fitting(self, name: str, tried: Iterable[Shared]) -> int:
        """Return the most samples of a class that fit in a trial; its fewest allowed if none did."""
        return max([self._ends(name)[0], *(one.samples[name] for one in tried if name not in one.crowded)])

    def _relieving(self, best: Shared, target_s: float) -> list[Shared]:
        """Return shares with more samples on unlowered classes: all that the target allows, and half."""
        spare = {
            name: best.samples[name] * (target_s / own_s - 1.0)
            for name, own_s in best.own_s.items()
            if not best.is_lowered[name] and 0.0 < own_s < target_s
        }
        found = []
        for part in (0.5, 1.0):
            ideal = {name: own + part * spare.get(name, 0.0) for name, own in best.samples.items()}
            least = {name: int(ideal[name]) for name in spare}
            samples = self._exact(ideal, least=least)
            if samples is not None and samples != best.samples:
                found.append(self._timed(samples, True))
        return found

    def _timed(self, samples: Mapping[str, int], lower: bool) -> Shared:
        """Return the least step at these shares; infinite if they do not fit in memory."""
        levers = Levers({name: ClassLevers(own) for name, own in samples.items()})
        while True:
            basis, profiles = self.basis, self._at(levers)
            state = State(make_problem(basis.graph, profiles, basis.sensitivity, basis.cluster, self._given))
            tight = [name for name, one in state.classes.items() if one.is_tight]
            more = {name: self._in_more_passes(name, levers.classes[name]) for name in tight}
            if not any(more.values()):
                break
            relieved = {name: entry for name, entry in more.items() if entry is not None}
            levers = Levers({**levers.classes, **relieved})
        is_lowered = dict.fromkeys(state.classes, False)
        try:
            if lower:
                lowerable = fastest_state(state, self._given)
                is_lowered = {name: name in lowerable for name in state.classes}
        except InfeasibleError:
            pass  # some class does not fit, and is added to `crowded` below
        crowded = [name for name, one in state.classes.items() if not one.fits()]
        if lower:
            if self._strongest is None:
                self._strongest = [name for name, is_free in is_lowered.items() if not is_free]
            # A strongest class may be lowered to save memory only if equal shares do not fit either.
            crowded += [name for name in tight if name in self._strongest and name not in crowded]
        own_s = {name: one.work.total_s for name, one in state.classes.items()}
        return Shared(levers, math.inf if crowded else state.step_s(), own_s, is_lowered, crowded)

    def _in_more_passes(self, name: str, entry: ClassLevers) -> ClassLevers | None:
        """Return a class's levers with the next possible number of passes; None without one."""
        samples, least = entry.samples or 0, self._ends(name)[0]
        for passes in self._passes:
            if passes > entry.passes and samples % passes == 0 and samples // passes >= least:
                return replace(entry, passes=passes)
        return None

    def _ends(self, name: str) -> tuple[int, int]:
        """Return the fewest and the most samples that a rank of a class may take."""
        least, most = reach(self.basis.profiles[name], self.basis.graph, self.other)
        return max(least, self._least), most

    def _exact(
        self,
        ideal: Mapping[str, float],
        most: Mapping[str, int] | None = None,
        least: Mapping[str, int] | None = None,
        units: Mapping[str, int] | None = None,
    ) -> dict[str, int] | None:
        """Return integer samples by class nearest to the ideal that add up to the batch, or None.

        minimise    sum over classes c of n_c d_c
        such that   d_c >= |s_c - ideal_c|,  sum over classes of n_c s_c = B,  s_c a multiple of its unit
        """
        from scipy.optimize import Bounds, LinearConstraint, milp

        classes = self.basis.cluster.classes
        num, counts = len(classes), [c.count for c in classes]
        ends, unit = [self._ends(c.name) for c in classes], [(units or {}).get(c.name, 1) for c in classes]
        low = [max(end[0], (least or {}).get(c.name, 0)) for c, end in zip(classes, ends, strict=True)]
        high = [min(end[1], (most or {}).get(c.name, end[1])) for c, end in zip(classes, ends, strict=True)]
        low, high = (
            [-(-a // k) for a, k in zip(low, unit, strict=True)],
            [b // k for b, k in zip(high, unit, strict=True)],
        )
        if any(a > b for a, b in zip(low, high, strict=True)):
            return None
        each = [n * k for n, k in zip(counts, unit, strict=True)]
        rows, limits = [[*each, *[0] * num]], [(float(self._batch), float(self._batch))]
        for i, c in enumerate(classes):
            for sign in (1, -1):
                row = [0] * (2 * num)
                row[i], row[num + i] = sign * unit[i], -1
                rows.append(row)
                limits.append((-math.inf, sign * ideal[c.name]))
        solved = milp(
            [*[0] * num, *counts], integrality=[1] * num + [0] * num,
            bounds=Bounds([*low, *[0] * num], [*high, *[math.inf] * num]),
            constraints=LinearConstraint(rows, *zip(*limits, strict=True)),
        )  # fmt: skip
        if not solved.success:
            return None
        return {c.name: unit[i] * round(solved.x[i]) for i, c in enumerate(classes)}

    @property
    def _batch(self) -> int:
        return self.basis.cluster.num_ranks * self.equal


def _equal_times(
    basis: Basis, tried: Sequence[Shared], ends: Any, most: Mapping[str, int]
) -> dict[str, float]:
    """Return the fractional samples by class at which all classes take equally long."""
    lines = {name: _line(name, tried) for name in basis.profiles}
    bounds = {name: (ends(name)[0], most.get(name, ends(name)[1])) for name in lines}
    batch = basis.cluster.num_ranks * samples_of(basis.graph)

    def at(step_s: float) -> dict[str, float]:
        return {
            name: min(max((step_s - fixed_s) / each_s, bounds[name][0]), bounds[name][1])
            for name, (fixed_s, each_s) in lines.items()
        }

    low, high = 0.0, max(fixed_s + each_s * bounds[name][1] for name, (fixed_s, each_s) in lines.items())
    for _ in range(_HALVINGS):
        middle = (low + high) / 2
        taken = at(middle)
        if sum(c.count * taken[c.name] for c in basis.cluster.classes) < batch:
            low = middle
        else:
            high = middle
    return at(high)


def _line(name: str, tried: Sequence[Shared]) -> tuple[float, float]:
    """Return a class's fixed seconds and seconds per sample, from its last two different trials."""
    last = tried[-1]
    samples, own_s = last.samples[name], last.own_s[name]
    for one in reversed(tried[:-1]):
        apart = samples - one.samples[name]
        if apart and (own_s - one.own_s[name]) / apart > 0.0:
            each_s = (own_s - one.own_s[name]) / apart
            return own_s - samples * each_s, each_s
    return 0.0, own_s / samples
