"""The outer levers by search (optuna), the precisions inside each by the solver: one plan of both.

Objective: the least variance added at the target step. Where no precision reaches the target, the least step
time instead, and any plan that reaches it is better; where nothing fits in memory, nothing is gained. With
neither a target nor a plan without levers, the least step time throughout (ours).
"""

from __future__ import annotations

import math
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

from qsync.allocator.levers.save_less_steps import savings
from qsync.allocator.levers.search_space import Setting, Space
from qsync.allocator.planner import allocate
from qsync.errors import FormatError, InfeasibleError, MismatchError, QSyncError
from qsync.records.cluster import Cluster
from qsync.records.graph import OpGraph, digest
from qsync.records.levers import (
    ACCUMULATE,
    BUCKETS,
    LEVERS,
    SAVE_LESS,
    SHARE,
    ClassLevers,
    Levers,
    Without,
    samples_of,
)
from qsync.records.plans import Plan
from qsync.records.profiles import Profile, Sensitivity
from qsync.replayer.levers.apply import under
from qsync.replayer.levers.batch_size import Sized

# Worse than any variance, which counts as a part of that without levers: too slow, and not there at all.
_TOO_SLOW, _NONE = 1e6, 1e12
_NOT_TIMED = "no profile has times of operators that save less; profile with save_less=True"


class Search:
    """What is searched: a problem, the levers that may be used, and what was solved so far in this process.

    `options` are those of `allocate`, but for the bucket cap where that is a lever.
    """

    def __init__(
        self,
        graph: OpGraph,
        profiles: Mapping[str, Profile],
        sensitivity: Sensitivity,
        cluster: Cluster,
        levers: Sequence[str],
        other: Sized | None = None,
        **options: Any,
    ) -> None:
        _check_levers(levers, graph, profiles, cluster, other, options)
        self.graph, self.profiles, self.sensitivity, self.cluster = graph, profiles, sensitivity, cluster
        self.levers, self.other, self.options = tuple(levers), other, dict(options)
        self.space = Space(graph, profiles, cluster, self.levers, other)
        self._carried: dict[tuple[str, ClassLevers], Profile] = {}
        self.plain: Plan | None = None
        self.target_s: float | None = options.get("target_s")
        try:
            self.plain = self.solve(Setting(Levers({})))
            self.target_s = self.plain.target_s
        except InfeasibleError:
            pass

    @property
    def key(self) -> str:
        """Identity of the problem: trials of another one are not taken for this one's."""
        parts = [self.graph.hash, self.graph.shapes_hash, self.sensitivity.to_json(), self.cluster.to_json()]
        parts += [[name, profile.hash] for name, profile in sorted(self.profiles.items())]
        if self.other is not None:
            parts += [self.other.graph.shapes_hash, sorted(p.hash for p in self.other.profiles.values())]
        return digest([*parts, sorted(self.levers), {k: repr(v) for k, v in sorted(self.options.items())}])

    def solve(self, setting: Setting, **changes: Any) -> Plan:
        """The best plan at one point. Raises InfeasibleError, or what `under` raises of levers."""
        profiles = under(
            self.graph, self.profiles, self.cluster, setting.levers, self.other, known=self._carried
        )
        options = {**self.options, **changes}
        if setting.bucket_cap_bytes is not None or BUCKETS in self.levers:
            options["bucket_cap_bytes"] = setting.bucket_cap_bytes
        if SAVE_LESS in self.levers:
            options["saving_less"] = setting.saving_less
        return allocate(self.graph, profiles, self.sensitivity, self.cluster, **options)

    def judge(self, setting: Setting) -> tuple[float, Plan | None]:
        """What is to be least (see the module's text), and the plan that has it."""
        if self.target_s is None:
            try:
                plan = self.solve(setting)
            except InfeasibleError:
                return _NONE, None
            return plan.step_s or 0.0, plan
        try:
            plan = self.solve(setting, target_s=self.target_s, slack=0.0)
        except InfeasibleError:
            return self._late(setting)
        scale = (self.plain.added_variance if self.plain else None) or 1.0
        return (plan.added_variance or 0.0) / scale, plan

    def _late(self, setting: Setting) -> tuple[float, Plan | None]:
        """As fast as can be, where the target is not reached."""
        try:
            plan = self.solve(setting, target_s=None, slack=0.0, lower_all=True)
        except InfeasibleError:
            return _NONE, None
        assert self.target_s is not None and plan.step_s is not None
        return _TOO_SLOW * plan.step_s / self.target_s, plan


def search(
    graph: OpGraph,
    profiles: Mapping[str, Profile],
    sensitivity: Sensitivity,
    cluster: Cluster,
    *,
    levers: Sequence[str] | None = None,
    other: Sized | None = None,
    trials: int = 40,
    storage: str | Path | None = None,
    seed: int = 0,
    progress: Callable[[str], None] = lambda text: None,
    **options: Any,
) -> Plan:
    """The plan of least variance at the target step over levers and precisions, with what each lever bought.

    `levers` are those that may be used, of "share", "accumulate", "buckets", "recompute" and "save_less"; one
    left out is off. Share and accumulate need `other` (see `under`), save_less profiles that were measured
    with `save_less=True`; without them it is left out where no levers are named, and the plan says so
    (`Levers.untried`). `storage` is a file in which trials are kept: the same search goes on from there,
    until `trials` are done in all, and several processes may work on one file at once. `options` are those of
    `allocate`; without a target, it is that of the plan without levers. The plan's levers say what the plan
    would be without each (`Levers.without`): with that one off, the others as they are, precisions chosen
    anew. Raises what `allocate` raises; InfeasibleError if no trial has a plan.

    >>> plan = search(graph, profiles, sensitivity, cluster, levers=["recompute"], storage="trials.log")
    >>> plan.levers.without["recompute"]
    """
    if trials < 1:
        raise FormatError(f"a search has at least 1 trial, found {trials}; 40 is usual")
    timed = levers is not None or _saving_is_timed(graph, profiles, cluster)
    named = levers if levers is not None else LEVERS if timed else [x for x in LEVERS if x != SAVE_LESS]
    problem = Search(graph, profiles, sensitivity, cluster, named, other, **options)
    with _quiet() as optuna:
        study = _study(optuna, problem.key, Path(storage) if storage is not None else None)
        # Another process, or a search that goes on, draws other points.
        study.sampler = optuna.samplers.TPESampler(
            seed=seed + len(study.trials), multivariate=True, constant_liar=True
        )
        for start in problem.space.starts() if not study.trials else ():
            study.enqueue_trial(start)
        while (num := len(_finished(study))) < trials:
            progress(f"trial {num + 1} of {trials}")
            study.optimize(lambda trial: _trial(problem, trial, study), n_trials=1)
        best = _best(_finished(study))
    # Without levers there may be as good a plan, whose trial was killed.
    plain = math.inf if problem.plain is None else float((problem.plain.added_variance or 0.0) > 0.0)
    is_better = best is not None and float(f"{best.value:.9g}") <= plain
    setting = _setting(best.user_attrs) if best is not None and is_better else Setting(Levers({}))
    value, plan = problem.judge(setting)
    if plan is None or value >= _TOO_SLOW:
        return problem.solve(setting, target_s=problem.target_s, slack=0.0)  # which says what is missing
    setting, plan = _fewest_saving(problem, setting, value, plan)
    plan = _told(problem, setting, plan)
    if timed:
        return plan
    return replace(plan, levers=replace(plan.levers or Levers({}), untried={SAVE_LESS: _NOT_TIMED}))


def _fewest_saving(problem: Search, setting: Setting, value: float, plan: Plan) -> tuple[Setting, Plan]:
    """The same with as few operators that save less on each class as add no more variance: where a trial let
    more of them, they cost time for nothing. By bisection over blocks (ours).
    """
    for name, chosen in setting.saving_less.items():
        steps = problem.space.savings(name)
        low, high = -1, steps.index(chosen)
        while high - low > 1:
            middle = 0 if low < 0 else (low + high) // 2
            fewer = replace(setting, saving_less={**setting.saving_less, name: steps[middle]})
            found, other = problem.judge(fewer)
            if other is not None and float(f"{found:.9g}") <= float(f"{value:.9g}"):
                setting, plan, value, high = fewer, other, found, middle
            else:
                low = middle
    return setting, plan


def _told(problem: Search, setting: Setting, plan: Plan) -> Plan:
    """The plan with what it would be without each of its levers."""
    without = {}
    for lever in setting.used(plan):
        try:
            value, other = problem.judge(setting.without(lever))
        except QSyncError as error:
            without[lever] = Without(reason=str(error))
            continue
        if other is None:
            without[lever] = Without(reason="nothing fits in memory")
        else:
            late = value >= _TOO_SLOW
            reason = "no precisions reach the target" if late else ""
            without[lever] = Without(other.step_s, other.added_variance, reason)
    if not without:
        return plan
    return replace(plan, levers=replace(plan.levers or Levers({}), without=without))


def _trial(problem: Search, trial: Any, study: Any) -> float:
    setting = problem.space.suggest(trial)
    if setting is None:
        return math.inf
    attributes: dict[str, Any] = {
        "levers": {name: asdict(entry) for name, entry in setting.levers.classes.items()},
        "cap": setting.bucket_cap_bytes,
        "saving_less": setting.saving_less,
    }
    for key, value in attributes.items():
        trial.set_user_attr(key, value)
    for known in _finished(study):
        if all(known.user_attrs.get(key, -1) == _plain(value) for key, value in attributes.items()):
            trial.set_user_attr("num_levers", known.user_attrs["num_levers"])
            trial.set_user_attr("step_s", known.user_attrs["step_s"])
            return float(known.value)
    try:
        value, plan = problem.judge(setting)
    except (FormatError, MismatchError):  # levers that cannot be: too far from what was profiled
        value, plan = _NONE, None
    trial.set_user_attr("num_levers", len(setting.used(plan)) if plan else 0)
    trial.set_user_attr("step_s", plan.step_s if plan else None)
    return value


def _plain(value: Any) -> Any:
    """As JSON gives it back: lists where there were tuples."""
    if isinstance(value, dict):
        return {key: _plain(item) for key, item in value.items()}
    return [_plain(item) for item in value] if isinstance(value, (tuple, list)) else value


def _finished(study: Any) -> list[Any]:
    """Trials that were ended, by whichever process; one that was killed leaves its trial behind unended."""
    return [trial for trial in study.get_trials(deepcopy=False) if trial.state.name == "COMPLETE"]


def _best(trials: Sequence[Any]) -> Any | None:
    """The least value; of equal ones with fewer levers, then with the shorter step, then the first."""
    able = [trial for trial in trials if trial.value is not None and trial.value < _NONE]
    return min(
        able,
        key=lambda t: (float(f"{t.value:.9g}"), t.user_attrs["num_levers"], t.user_attrs["step_s"], t.number),
        default=None,
    )


def _setting(attributes: Mapping[str, Any]) -> Setting:
    saving = {name: tuple(patterns) for name, patterns in attributes.get("saving_less", {}).items()}
    return Setting(Levers.from_json({"classes": attributes["levers"]}), attributes["cap"], saving)


def _check_levers(
    levers: Sequence[str], graph: OpGraph, profiles: Mapping[str, Profile], cluster: Cluster,
    other: Sized | None, options: Mapping[str, Any],
) -> None:  # fmt: skip
    """FormatError for levers that are not there, MismatchError for those that lack what they need."""
    for lever in levers:
        if lever not in LEVERS:
            raise FormatError(f"unknown lever {lever!r}: choose from {', '.join(LEVERS)}")
    if not levers:
        raise FormatError(f"no lever to search with: choose from {', '.join(LEVERS)}")
    if other is None and not {SHARE, ACCUMULATE}.isdisjoint(levers):
        raise MismatchError(
            f"shares and passes take other numbers of samples than the {samples_of(graph)} that "
            f"{graph.model} was captured with; capture it (and profile it) once more with another number, or "
            "leave share and accumulate out"
        )
    if cluster.num_ranks == 1:
        raise FormatError("levers are for several ranks, and this cluster has one; leave them off")
    if BUCKETS in levers and options.get("bucket_cap_bytes") is not None:
        raise FormatError("the bucket cap is given, and to be searched too; leave one of them out")
    if SAVE_LESS in levers:
        if any((options.get("saving_less") or {}).values()):
            raise FormatError("what saves less is given, and to be searched too; leave one of them out")
        if not _saving_is_timed(graph, profiles, cluster):
            raise MismatchError(f"{_NOT_TIMED}, or leave save_less out")


def _saving_is_timed(graph: OpGraph, profiles: Mapping[str, Profile], cluster: Cluster) -> bool:
    """Whether some class's profile has times of operators that save less."""
    return any(len(savings(graph, profiles[c.name])) > 1 for c in cluster.classes)


def _study(optuna: Any, key: str, path: Path | None) -> Any:
    """The trials of one problem, in a file that several processes may write to, or in memory.

    Raises FormatError for a file of something else.
    """
    if path is None:
        return optuna.create_study(study_name=key)
    path.parent.resolve(strict=True)  # else optuna waits for a lock that it cannot make
    try:
        backend = optuna.storages.journal.JournalFileBackend(str(path))
        kept = optuna.storages.JournalStorage(backend)
        return optuna.create_study(storage=kept, study_name=key, load_if_exists=True)
    except (ValueError, KeyError, TypeError) as error:
        raise FormatError(f"{path} holds no trials of levers ({error}); name another file") from error


@contextmanager
def _quiet() -> Iterator[Any]:
    """optuna, without its notes on every trial and on which of its parts are new."""
    import optuna

    before = optuna.logging.get_verbosity()
    optuna.logging.set_verbosity(optuna.logging.WARNING)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", optuna.exceptions.ExperimentalWarning)
            yield optuna
    finally:
        optuna.logging.set_verbosity(before)
