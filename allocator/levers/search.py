"""Search over levers: few settings of the step as a whole, and the solver's program inside each.

The program chooses precisions and levers of blocks (`qsync.allocator.block_levers`) together. Shares of the
batch are chosen for the least step first (`shares`). Passes, class by class, and the size of buckets are
tried one after the other, until none changes the plan. The best plan adds the least variance at the target
step. A setting that misses the target ranks below all that reach it, by its least step.
"""

from __future__ import annotations

import inspect
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, fields, replace
from types import NoneType
from typing import Any

from qsync.allocator.block_levers import block_levers
from qsync.allocator.levers.bucket_cap import bucket_caps
from qsync.allocator.levers.shares import PASSES, BatchShares
from qsync.allocator.planner import Options, allocate
from qsync.errors import FormatError, InfeasibleError, MismatchError, QSyncError, shortened, unknown_name
from qsync.records.cluster import Cluster
from qsync.records.graph import OpGraph
from qsync.records.json_files import check_kind
from qsync.records.levers import (
    ACCUMULATE,
    BUCKETS,
    LEVERS,
    RECOMPUTE,
    SAVE_LESS,
    SHARE,
    ClassLevers,
    Levers,
    Without,
    samples_of,
)
from qsync.records.plan_folder import Basis
from qsync.records.plans import Plan
from qsync.records.profiles import Profile, Sensitivity
from qsync.replayer.levers.apply import profiles_under_levers
from qsync.replayer.levers.batch_size import Recapture, check_other, reach

DIVIDE_STATE = "divide_state"  # an option of qsync.plan, which divides before it searches
_NOT_TIMED = "no profile has times of operators that save less; profile with save_less=True"


@dataclass(frozen=True, slots=True)
class LeverSetting:
    """One setting: samples and passes by class, DDP's bucket cap, and the levers that blocks may have."""

    levers: Levers
    bucket_cap_bytes: int | None = None
    blocks: tuple[str, ...] = ()

    def without(self, lever: str) -> LeverSetting:
        """Return the setting with one lever off."""
        if lever == BUCKETS:
            return replace(self, bucket_cap_bytes=None)
        if lever in self.blocks:
            return replace(self, blocks=tuple(name for name in self.blocks if name != lever))
        off: dict[str, Any] = {SHARE: {"samples": None}, ACCUMULATE: {"passes": 1}}
        classes = {name: replace(entry, **off[lever]) for name, entry in self.levers.classes.items()}
        return replace(self, levers=Levers(classes))

    def used(self, plan: Plan) -> tuple[str, ...]:
        """Return the levers that are on in this setting and its plan."""
        saves = SAVE_LESS in self.blocks and any(entry.saving_less for entry in plan.classes.values())
        here = [*([BUCKETS] if self.bucket_cap_bytes else []), *([SAVE_LESS] if saves else [])]
        return (*(plan.levers.used if plan.levers else ()), *here)


class Search:
    """A problem, the levers to use, and the settings solved so far.

    `options` are those of `allocate`, without the bucket cap if that is a lever.
    """

    def __init__(
        self,
        basis: Basis,
        levers: Sequence[str],
        other: Recapture | None,
        options: Mapping[str, Any],
        least_samples: int = 1,
    ) -> None:
        _check_levers(basis, levers, other, options)
        self.basis, self.levers, self.other, self.options = basis, tuple(levers), other, dict(options)
        self._profiles: dict[tuple[str, ClassLevers], Profile] = {}
        self._solved: dict[str, tuple[tuple[Any, ...], Plan | None]] = {}
        self.start = LeverSetting(
            Levers({}), blocks=tuple(name for name in (RECOMPUTE, SAVE_LESS) if name in levers)
        )
        self.target_s: float | None = options.get("target_s")
        with suppress(InfeasibleError):
            plan = self.solve(self.start)
            self.target_s = plan.target_s
            self._solved[repr(self.start)] = self._rank(self.start, plan, False), plan
        if SHARE in self.levers and other is not None:
            own = {**options, "block_levers": self.start.blocks}
            with suppress(InfeasibleError):  # e.g. if only smaller buckets reach a given target
                plan = BatchShares(basis, other, levers, own, least_samples, self._profiles).plan()
                shared = plan.levers.classes if plan.levers else {}
                classes = {name: replace(entry, recomputed=()) for name, entry in shared.items()}
                self.target_s, self.start = plan.target_s, replace(self.start, levers=Levers(classes))

    def solve(self, setting: LeverSetting, **changes: Any) -> Plan:
        """Return the best plan at one setting; pass errors of `profiles_under_levers` and `allocate`."""
        basis = self.basis
        profiles = profiles_under_levers(
            basis.graph, basis.profiles, basis.cluster, setting.levers, self.other, known=self._profiles
        )
        options = {**self.options, "block_levers": setting.blocks, **changes}
        if BUCKETS in self.levers:
            options["bucket_cap_bytes"] = setting.bucket_cap_bytes
        return allocate(basis.graph, profiles, basis.sensitivity, basis.cluster, **options)

    def evaluate(self, setting: LeverSetting) -> tuple[tuple[Any, ...], Plan | None]:
        """Return the rank of a setting (least is best) and its plan; None if nothing fits in memory.

        The rank is whether the target is missed, then the variance (or else the step), then the number of
        levers and the step.
        """
        if (key := repr(setting)) not in self._solved:
            self._solved[key] = self._evaluated(setting)
        return self._solved[key]

    def _evaluated(self, setting: LeverSetting) -> tuple[tuple[Any, ...], Plan | None]:
        late = self.target_s is None
        try:
            try:
                plan = self.solve(setting, **({} if late else {"target_s": self.target_s, "slack": None}))
            except InfeasibleError:
                late = True
                plan = self.solve(setting, target_s=None, slack=0.0)
        except (InfeasibleError, FormatError):  # the latter: too far from the profiled numbers of samples
            return (math.inf,), None
        return self._rank(setting, plan, late), plan

    def _rank(self, setting: LeverSetting, plan: Plan, late: bool) -> tuple[Any, ...]:
        first = plan.step_s if late else plan.added_variance
        return late, _rounded(first or 0.0), len(setting.used(plan)), plan.step_s

    def neighbours(self, setting: LeverSetting) -> Iterator[LeverSetting]:
        """Yield the settings with other passes of one class, or another bucket cap."""
        for c in self.basis.cluster.classes if ACCUMULATE in self.levers and SHARE not in self.levers else ():
            for passes in self._passes(c.name):
                other = {**setting.levers.classes, c.name: ClassLevers(passes=passes)}
                yield replace(setting, levers=Levers(other))
        for cap in bucket_caps(self.basis.graph) if BUCKETS in self.levers else ():
            yield replace(setting, bucket_cap_bytes=cap)

    def _passes(self, name: str) -> list[int]:
        """Return the numbers of passes in which a class may take the captured samples."""
        samples = samples_of(self.basis.graph)
        least, most = reach(self.basis.profiles[name], self.basis.graph, self.other)
        return [k for k in PASSES if samples % k == 0 and least <= samples // k <= most]


def check_options(options: Mapping[str, Any], also: Sequence[str] = ()) -> None:
    """Raise FormatError for unknown options of `qsync.plan`, and for options out of their range.

    `also` are further option names of the caller, as suggestions for a misspelt name. Options of the search
    need `levers`.
    """
    own = [p.name for p in inspect.signature(search).parameters.values() if p.kind is p.KEYWORD_ONLY]
    of_planner = [field.name for field in fields(Options)]
    for name in options:
        if name not in (*own, *of_planner, DIVIDE_STATE):
            raise FormatError(unknown_name(name, (*also, *own, *of_planner, DIVIDE_STATE)))
    if type(options.get(DIVIDE_STATE, False)) is not bool:
        raise FormatError(
            f"{DIVIDE_STATE} must be True or False, found {shortened(options[DIVIDE_STATE])}; correct it"
        )
    number = options.get("least_samples", 1)
    if type(number) is not int or not 1 <= number <= 10**9:
        raise FormatError(
            f"least_samples must be a whole number from 1 to {10**9}, found {shortened(number)}"
        )
    _check_names(levers := options.get("levers") or ())
    alone = [name for name in own if name in options and name != "levers" and options[name] is not None]
    if alone and not levers:
        raise FormatError(f"{alone[0]} is an option of a search over levers; name levers, too")
    check_kind(options.get("other"), (Recapture, NoneType), "other", "qsync.replayer.Recapture")
    try:
        Options(**{name: value for name, value in options.items() if name in of_planner}).check()
    except TypeError as error:
        raise FormatError(
            f"an option has a value of another type ({shortened(error, quote=False)}); see qsync.plan"
        ) from error


def search(
    graph: OpGraph,
    profiles: Mapping[str, Profile],
    sensitivity: Sensitivity,
    cluster: Cluster,
    *,
    levers: Sequence[str] | None = None,
    other: Recapture | None = None,
    least_samples: int = 1,
    progress: Callable[[str], None] = lambda text: None,
    **options: Any,
) -> Plan:
    """Return the plan of least variance at the target step over levers and precisions.

    For each lever that the plan uses, `Levers.without` states the figures without this lever, with the other
    levers unchanged, and precisions and levers of blocks chosen again.

    Args:
        graph: The operators of one step of the model.
        profiles: The profile of each device class, by name.
        sensitivity: Added gradient variance (squared gradient norm) by operator and precision.
        cluster: The device classes, their ranks and links.
        levers: Levers to use, of "share", "accumulate", "buckets", "recompute" and "save_less"; others stay
            off. None means all. "save_less" needs profiles measured with `save_less=True`. If these are
            missing and `levers` is None, "save_less" is left out and reported in `Levers.untried`.
        other: The model captured with another number of samples (see `profiles_under_levers`), for
            "share" and "accumulate".
        least_samples: Fewest samples of a pass on any rank, for instance for BatchNorm.
        progress: Called with a line of text before each setting that is solved.
        **options: Those of `allocate`. The default target is the least step that precisions reach together
            with shares and levers of blocks.

    Returns:
        The best plan.

    Raises:
        InfeasibleError: No setting has a plan. The errors of `allocate` pass as well.

    Example:
        >>> plan = search(graph, profiles, sensitivity, cluster, levers=["recompute"])
        >>> plan.levers.without["recompute"]
    """
    basis = Basis(graph, cluster, profiles, sensitivity)
    timed = levers is not None or _saving_is_timed(basis)
    named = levers if levers is not None else LEVERS if timed else [x for x in LEVERS if x != SAVE_LESS]
    problem = Search(basis, named, other, options, least_samples)
    setting, best = problem.start, LeverSetting(Levers({}))
    while setting is not best:
        best = setting
        for number, near in enumerate(problem.neighbours(best), 1):
            progress(f"setting {number}")
            if problem.evaluate(near)[0] < problem.evaluate(setting)[0]:
                setting = near
    (missed, *_), plan = problem.evaluate(setting)
    if plan is None or (missed and problem.target_s is not None):
        # Raises the error that names the violated constraint.
        return problem.solve(setting, target_s=problem.target_s, slack=None)
    plan = _with_lever_gains(problem, setting, plan)
    if timed:
        return plan
    return replace(plan, levers=replace(plan.levers or Levers({}), untried={SAVE_LESS: _NOT_TIMED}))


def _with_lever_gains(problem: Search, setting: LeverSetting, plan: Plan) -> Plan:
    """Add to a plan the figures of the best plan without each of its levers (`Levers.without`)."""
    without = {}
    for lever in setting.used(plan):
        try:
            (late, *_), other = problem.evaluate(setting.without(lever))
        except QSyncError as error:
            without[lever] = Without(reason=str(error))
            continue
        if other is None:
            without[lever] = Without(reason="nothing fits in memory")
        else:
            reason = "no precisions reach the target" if late and problem.target_s is not None else ""
            without[lever] = Without(other.step_s, other.added_variance, reason)
    if not without:
        return plan
    return replace(plan, levers=replace(plan.levers or Levers({}), without=without))


def _rounded(objective: float) -> float:
    """Round an objective to 9 digits, to drop differences due to the order of summation."""
    return float(f"{objective:.9g}")


def _check_levers(
    basis: Basis, levers: Sequence[str], other: Recapture | None, options: Mapping[str, Any]
) -> None:
    """Raise FormatError for unknown levers, MismatchError for levers without their required records."""
    _check_names(levers)
    if not levers:
        raise FormatError(f"no lever to search with: choose from {', '.join(LEVERS)}")
    if other is None and not {SHARE, ACCUMULATE}.isdisjoint(levers):
        raise MismatchError(
            f"shares and passes take other numbers of samples than the {samples_of(basis.graph)} that "
            f"{basis.graph.model} was captured with; capture it (and profile it) once more with another "
            "number, or leave share and accumulate out"
        )
    if other is not None and not {SHARE, ACCUMULATE}.isdisjoint(levers):
        check_other(basis.graph, other.graph)
    if basis.cluster.num_ranks == 1:
        raise FormatError("levers are for several ranks, and this cluster has one; leave them off")
    if BUCKETS in levers and options.get("bucket_cap_bytes") is not None:
        raise FormatError("the bucket cap is given, and to be searched too; leave one of them out")
    if SAVE_LESS in levers:
        if any((options.get("saving_less") or {}).values()):
            raise FormatError("what saves less is given, and to be searched too; leave one of them out")
        if not _saving_is_timed(basis):
            raise MismatchError(f"{_NOT_TIMED}, or leave save_less out")


def _check_names(levers: object) -> None:
    """Raise FormatError unless `levers` is a sequence of known lever names."""
    if isinstance(levers, str) or not isinstance(levers, Sequence):
        raise FormatError(
            f"levers must be a list of names, found {shortened(levers)}; choose from {', '.join(LEVERS)}"
        )
    for lever in levers:
        if lever not in LEVERS:
            raise FormatError(f"unknown lever {shortened(lever)}: choose from {', '.join(LEVERS)}")


def _saving_is_timed(basis: Basis) -> bool:
    """Return whether any class's profile has times of operators that save less."""
    return any(block_levers(basis.graph, basis.profiles[c.name], [SAVE_LESS]) for c in basis.cluster.classes)
