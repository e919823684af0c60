"""Joint search: optuna chooses levers, and the solver chooses the precisions of each trial.

The objective of a trial is the least variance added at the target step. A trial in which no precisions reach
the target has its least step time as objective, and ranks below every trial that reaches the target. A trial
that does not fit in memory ranks last. If there is no target, and no plan without levers that would give one,
the objective of every trial is its least step time.

If shares may change, the target is the least step over shares and precisions together (`shares`), whose plan
is the first candidate. If only shares and passes may change, that plan is the result without any trial.
"""

from __future__ import annotations

import inspect
import math
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import fields, replace
from pathlib import Path
from types import NoneType
from typing import Any

from qsync.allocator.levers.save_less_steps import save_less_steps
from qsync.allocator.levers.search_space import LeverSetting, Space
from qsync.allocator.levers.shares import BatchShares
from qsync.allocator.planner import Options, allocate
from qsync.errors import FormatError, InfeasibleError, MismatchError, QSyncError, shortened, unknown_name
from qsync.records.cluster import Cluster
from qsync.records.graph import OpGraph, digest
from qsync.records.json_files import check_kind
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
from qsync.records.plan_folder import Basis
from qsync.records.plans import Plan
from qsync.records.profiles import Profile, Sensitivity
from qsync.records.record_json import as_json
from qsync.replayer.levers.apply import profiles_under_levers
from qsync.replayer.levers.batch_size import Recapture, check_other

# Objectives of trials too slow, and infeasible: above any relative variance (1 is the plan without levers).
_TOO_SLOW, _INFEASIBLE = 1e6, 1e12
DIVIDE_STATE = "divide_state"  # an option of qsync.plan, which divides before it searches
_NOT_TIMED = "no profile has times of operators that save less; profile with save_less=True"


class Search:
    """A problem, the levers to use, and the profiles computed so far in this process.

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
        self.space = Space(
            basis.graph, basis.profiles, basis.cluster, self.levers, other, options.get("base")
        )
        self._profiles: dict[tuple[str, ClassLevers], Profile] = {}
        self.plain: Plan | None = None
        self.target_s: float | None = options.get("target_s")
        # The setting whose plan gave the target, and an upper bound of its objective.
        self.known, self.known_value = LeverSetting(Levers({})), math.inf
        with suppress(InfeasibleError):
            self.plain = self.solve(self.known)
            self.target_s = self.plain.target_s
            self.known_value = float((self.plain.added_variance or 0.0) > 0.0)
        if SHARE in self.levers and other is not None:
            self._share(other, least_samples)

    def _share(self, other: Recapture, least_samples: int) -> None:
        """Set the target to the step of the best shares, and these shares as the known setting."""
        shares = BatchShares(
            self.basis, other, self.levers, self.options, least_samples, known=self._profiles
        )
        with suppress(InfeasibleError):  # e.g. if only recomputation makes the model fit
            plan = shares.plan()
            self.target_s, self.known_value = plan.target_s, self._relative(plan)
            self.known = LeverSetting(replace(plan.levers or Levers({}), without={}))

    @property
    def is_settled(self) -> bool:
        """Return whether only shares and passes may change, which `BatchShares` solves without trials."""
        return SHARE in self.levers and {SHARE, ACCUMULATE}.issuperset(self.levers)

    def _relative(self, plan: Plan) -> float:
        """Return a plan's added variance relative to that of the plan without levers.

        If that plan adds none, or does not exist, divide by the sum of the largest sensitivities instead.
        """
        omega = self.basis.sensitivity.omega.values()
        most = sum(max(modes.values(), default=0.0) for modes in omega) or 1.0
        return (plan.added_variance or 0.0) / ((self.plain.added_variance if self.plain else None) or most)

    @property
    def key(self) -> str:
        """Return the hash of the problem, which separates trials of different problems in one file."""
        basis = self.basis
        parts: list[Any] = [basis.graph.hash, basis.graph.shapes_hash]
        parts += [basis.sensitivity.to_json(), basis.cluster.to_json()]
        parts += [[name, profile.hash] for name, profile in sorted(basis.profiles.items())]
        if self.other is not None:
            parts += [self.other.graph.shapes_hash, sorted(p.hash for p in self.other.profiles.values())]
        parts += [sorted(self.levers), {k: repr(v) for k, v in sorted(self.options.items())}]
        return digest([*parts, f"{self.target_s or 0.0:.9g}"])

    def solve(self, setting: LeverSetting, **changes: Any) -> Plan:
        """Return the best plan at one setting; pass errors of `profiles_under_levers` and `allocate`."""
        basis = self.basis
        profiles = profiles_under_levers(
            basis.graph, basis.profiles, basis.cluster, setting.levers, self.other, known=self._profiles
        )
        options = {**self.options, **changes}
        if setting.bucket_cap_bytes is not None or BUCKETS in self.levers:
            options["bucket_cap_bytes"] = setting.bucket_cap_bytes
        if SAVE_LESS in self.levers:
            options["saving_less"] = setting.saving_less
        return allocate(basis.graph, profiles, basis.sensitivity, basis.cluster, **options)

    def evaluate(self, setting: LeverSetting) -> tuple[float, Plan | None]:
        """Return the objective of a setting (defined in the module docstring) and its plan."""
        if self.target_s is None:
            try:
                plan = self.solve(setting)
            except InfeasibleError:
                return _INFEASIBLE, None
            return plan.step_s or 0.0, plan
        try:
            plan = self.solve(setting, target_s=self.target_s, slack=None)
        except InfeasibleError:
            return self._late(setting)
        return self._relative(plan), plan

    def _late(self, setting: LeverSetting) -> tuple[float, Plan | None]:
        """Return the objective and fastest plan of a setting that misses the target."""
        try:
            plan = self.solve(setting, target_s=None, slack=0.0)
        except InfeasibleError:
            return _INFEASIBLE, None
        assert self.target_s is not None and plan.step_s is not None
        return _TOO_SLOW * max(1.0, plan.step_s / self.target_s), plan


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
    ranges = {"trials": (1, 10**6), "seed": (0, 2**32 - 1), "least_samples": (1, 10**9)}
    for name, (least, most) in ranges.items():
        number = options.get(name, least)
        if type(number) is not int or not least <= number <= most:
            raise FormatError(
                f"{name} must be a whole number from {least} to {most}, found {shortened(number)}"
            )
    _check_names(levers := options.get("levers") or ())
    alone = [name for name in own if name in options and name != "levers" and options[name] is not None]
    if alone and not levers:
        raise FormatError(f"{alone[0]} is an option of a search over levers; name levers, too")
    storage = options.get("storage")
    if storage is not None and not isinstance(storage, (str, Path)):
        raise FormatError(f"storage must be the path of a file of trials, found {shortened(storage)}")
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
    trials: int = 40,
    storage: str | Path | None = None,
    seed: int = 0,
    least_samples: int = 1,
    progress: Callable[[str], None] = lambda text: None,
    **options: Any,
) -> Plan:
    """Return the plan of least variance at the target step over levers and precisions.

    For each lever that the plan uses, `Levers.without` states the figures without this lever, with the other
    levers unchanged and precisions solved again.

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
        trials: Total number of trials.
        storage: A file of trials. The same search continues from it, and several processes may share it.
        seed: Seed of the sampler.
        least_samples: Fewest samples of a pass on any rank, for instance for BatchNorm.
        progress: Called with a line of text before each trial.
        **options: Those of `allocate`. The default target is that of the plan without levers. With "share" it
            is the least step that shares and precisions reach together.

    Returns:
        The best plan.

    Raises:
        InfeasibleError: No trial has a plan. The errors of `allocate` pass as well.

    Example:
        >>> plan = search(graph, profiles, sensitivity, cluster, levers=["recompute"], storage="trials.log")
        >>> plan.levers.without["recompute"]
    """
    if trials < 1:
        raise FormatError(f"a search has at least 1 trial, found {trials}; 40 is usual")
    basis = Basis(graph, cluster, profiles, sensitivity)
    timed = levers is not None or _saving_is_timed(basis)
    named = levers if levers is not None else LEVERS if timed else [x for x in LEVERS if x != SAVE_LESS]
    problem = Search(basis, named, other, options, least_samples)
    best = None if problem.is_settled else _searched(problem, trials, storage, seed, progress)
    # The setting that gave the target may be as good: its own trial may have been killed.
    setting = problem.known
    if best is not None and _rounded(best.value) <= _rounded(problem.known_value):
        setting = _setting(best.user_attrs)
    value, plan = problem.evaluate(setting)
    if plan is None or value >= _TOO_SLOW:
        return problem.solve(
            setting, target_s=problem.target_s, slack=None
        )  # raises the error that names the violated constraint
    setting, plan = _fewest_saving(problem, setting, value, plan)
    plan = _with_lever_gains(problem, setting, plan)
    if timed:
        return plan
    return replace(plan, levers=replace(plan.levers or Levers({}), untried={SAVE_LESS: _NOT_TIMED}))


def _searched(
    problem: Search, trials: int, storage: str | Path | None, seed: int, progress: Callable[[str], None]
) -> Any | None:
    """Return the best of `trials` trials; None if none fits in memory."""
    with _quiet() as optuna:
        study = _study(optuna, problem.key, Path(storage) if storage is not None else None)
        # The seed differs in another process and in a continued search, so that they draw new settings.
        study.sampler = optuna.samplers.TPESampler(
            seed=seed + len(study.trials), multivariate=True, constant_liar=True
        )
        for start in problem.space.starts(problem.plain is None) if not study.trials else ():
            study.enqueue_trial(start)
        while (num := len(_finished(study))) < trials:
            progress(f"trial {num + 1} of {trials}")
            study.optimize(lambda trial: _trial(problem, trial, study), n_trials=1)
        return _best(_finished(study))


def _fewest_saving(
    problem: Search, setting: LeverSetting, value: float, plan: Plan
) -> tuple[LeverSetting, Plan]:
    """Minimise by bisection, on each class, the operators that save less at the same variance.

    Any further operator that saves less would cost time without a benefit.
    """
    for name, chosen in setting.saving_less.items():
        steps = problem.space.save_less_steps(name)
        low, high = -1, steps.index(chosen)
        while high - low > 1:
            middle = 0 if low < 0 else (low + high) // 2
            fewer = replace(setting, saving_less={**setting.saving_less, name: steps[middle]})
            found, other = problem.evaluate(fewer)
            if other is not None and _rounded(found) <= _rounded(value):
                setting, plan, value, high = fewer, other, found, middle
            else:
                low = middle
    return setting, plan


def _with_lever_gains(problem: Search, setting: LeverSetting, plan: Plan) -> Plan:
    """Add to a plan the figures of the best plan without each of its levers (`Levers.without`)."""
    without = {}
    for lever in setting.used(plan):
        try:
            value, other = problem.evaluate(setting.without(lever))
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
    levers = as_json(setting.levers)["classes"]  # as read back from a file of trials: lists, not tuples
    saving = as_json(setting.saving_less)
    attributes = {"levers": levers, "cap": setting.bucket_cap_bytes, "saving_less": saving}
    for key, value in attributes.items():
        trial.set_user_attr(key, value)
    for known in _finished(study):
        if all(known.user_attrs.get(key, -1) == value for key, value in attributes.items()):
            trial.set_user_attr("num_levers", known.user_attrs["num_levers"])
            trial.set_user_attr("step_s", known.user_attrs["step_s"])
            return float(known.value)
    try:
        value, plan = problem.evaluate(setting)
    except FormatError:  # these levers are too far from the profiled numbers of samples
        value, plan = _INFEASIBLE, None
    trial.set_user_attr("num_levers", len(setting.used(plan)) if plan else 0)
    trial.set_user_attr("step_s", plan.step_s if plan else None)
    return value


def _finished(study: Any) -> list[Any]:
    """Return the completed trials of all processes; a killed process leaves an incomplete one."""
    return [trial for trial in study.get_trials(deepcopy=False) if trial.state.name == "COMPLETE"]


def _best(trials: Sequence[Any]) -> Any | None:
    """Return the trial of least value; ties go to fewer levers, a shorter step, an earlier trial."""
    able = [trial for trial in trials if trial.value is not None and trial.value < _INFEASIBLE]
    return min(
        able,
        key=lambda t: (_rounded(t.value), t.user_attrs["num_levers"], t.user_attrs["step_s"], t.number),
        default=None,
    )


def _rounded(objective: float) -> float:
    """Round an objective to 9 digits, to drop differences due to the order of summation."""
    return float(f"{objective:.9g}")


def _setting(attributes: Mapping[str, Any]) -> LeverSetting:
    saving = {name: tuple(patterns) for name, patterns in attributes.get("saving_less", {}).items()}
    return LeverSetting(Levers.from_json({"classes": attributes["levers"]}), attributes["cap"], saving)


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
    return any(len(save_less_steps(basis.graph, basis.profiles[c.name])) > 1 for c in basis.cluster.classes)


def _study(optuna: Any, key: str, path: Path | None) -> Any:
    """Open the optuna study of one problem, in a file that processes may share, or in memory.

    Raises FormatError if the file is not a log of trials.
    """
    if path is None:
        return optuna.create_study(study_name=key)
    path.parent.resolve(strict=True)  # else optuna waits forever for an impossible lock file
    lock = optuna.storages.journal.JournalFileSymlinkLock(str(path))
    if lock.acquire():
        try:
            _drop_torn_record(path)
        finally:
            lock.release()
    try:
        backend = optuna.storages.journal.JournalFileBackend(str(path))
        journal = optuna.storages.JournalStorage(backend)
        return optuna.create_study(storage=journal, study_name=key, load_if_exists=True)
    except (ValueError, KeyError, TypeError) as error:
        raise FormatError(f"{path} holds no trials of levers ({error}); name another file") from error


def _drop_torn_record(path: Path) -> None:
    """Cut an incomplete last line off a log of trials, which optuna would refuse to read."""
    if not path.is_file():
        return
    with path.open("r+b") as file:
        content = file.read()
        whole = content.rfind(b"\n") + 1
        if 0 < whole < len(content):  # a file without a whole line may not be a log
            file.truncate(whole)


@contextmanager
def _quiet() -> Iterator[Any]:
    """Import optuna and silence its messages on trials and experimental features."""
    import optuna

    before = optuna.logging.get_verbosity()
    optuna.logging.set_verbosity(optuna.logging.ERROR)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", optuna.exceptions.ExperimentalWarning)
            yield optuna
    finally:
        optuna.logging.set_verbosity(before)
