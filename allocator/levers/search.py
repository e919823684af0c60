"""Search over levers by optuna, with the precisions of each trial by the solver: one plan of both.

The objective of a trial is the least variance added at the target step. A trial in which no precisions reach
the target has its least step time as objective, and counts as worse than every trial that reaches the target.
A trial that does not fit in memory is worst. If there is no target, and no plan without levers to take one
from, the objective of every trial is its least step time.

If shares may change, the target is the least step of shares and precisions together (`shares`), and that plan
is the first one known. If nothing else may change but passes, it is the plan: nothing is left to try.
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

# Objectives beyond any variance (given as a multiple of the plan's without levers): too slow, and infeasible.
_TOO_SLOW, _INFEASIBLE = 1e6, 1e12
_NOT_TIMED = "no profile has times of operators that save less; profile with save_less=True"


class Search:
    """A problem, the levers to use, and the profiles computed so far in this process.

    `options` are those of `allocate`, without the bucket cap where that is a lever.
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
        # The setting that the target is from, and the most that its objective can be.
        self.known, self.known_value = LeverSetting(Levers({})), math.inf
        with suppress(InfeasibleError):
            self.plain = self.solve(self.known)
            self.target_s = self.plain.target_s
            self.known_value = float((self.plain.added_variance or 0.0) > 0.0)
        if SHARE in self.levers and other is not None:
            self._share(other, least_samples)

    def _share(self, other: Recapture, least_samples: int) -> None:
        """Take the target from the best shares, and these as the first setting known."""
        shares = BatchShares(
            self.basis, other, self.levers, self.options, least_samples, known=self._profiles
        )
        with suppress(InfeasibleError):  # as where recomputation alone makes the model fit
            plan = shares.plan()
            self.target_s, self.known_value = plan.target_s, self._relative(plan)
            self.known = LeverSetting(replace(plan.levers or Levers({}), without={}))

    @property
    def is_settled(self) -> bool:
        """Return whether shares, chosen at once, are all that may change beside passes for memory."""
        return SHARE in self.levers and {SHARE, ACCUMULATE}.issuperset(self.levers)

    def _relative(self, plan: Plan) -> float:
        """Return the added variance of a plan, as a multiple of that of the plan without levers.

        If that plan adds none, or does not exist, it is a part of the most that precisions can add.
        """
        omega = self.basis.sensitivity.omega.values()
        most = sum(max(modes.values(), default=0.0) for modes in omega) or 1.0
        return (plan.added_variance or 0.0) / ((self.plain.added_variance if self.plain else None) or most)

    @property
    def key(self) -> str:
        """Identity of the problem, which keeps trials of different problems apart."""
        basis = self.basis
        parts: list[Any] = [basis.graph.hash, basis.graph.shapes_hash]
        parts += [basis.sensitivity.to_json(), basis.cluster.to_json()]
        parts += [[name, profile.hash] for name, profile in sorted(basis.profiles.items())]
        if self.other is not None:
            parts += [self.other.graph.shapes_hash, sorted(p.hash for p in self.other.profiles.values())]
        parts += [sorted(self.levers), {k: repr(v) for k, v in sorted(self.options.items())}]
        return digest([*parts, f"{self.target_s or 0.0:.9g}"])

    def solve(self, setting: LeverSetting, **changes: Any) -> Plan:
        """Return the best plan at one setting. Raises as `profiles_under_levers` and `allocate` do."""
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
        """Return the objective of a setting (see the module docstring) and its plan."""
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
        """Return the objective and plan of the least step, for a setting that misses the target."""
        try:
            plan = self.solve(setting, target_s=None, slack=0.0)
        except InfeasibleError:
            return _INFEASIBLE, None
        assert self.target_s is not None and plan.step_s is not None
        return _TOO_SLOW * max(1.0, plan.step_s / self.target_s), plan


def check_options(options: Mapping[str, Any], also: Sequence[str] = ()) -> None:
    """Raise FormatError for options of `qsync.plan` that do not exist or are out of their range.

    `also` are more names that the caller has, to suggest for a misspelt one. Without `levers` there is no
    search to have options.
    """
    own = [p.name for p in inspect.signature(search).parameters.values() if p.kind is p.KEYWORD_ONLY]
    of_planner = [field.name for field in fields(Options)]
    for name in options:
        if name not in (*own, *of_planner):
            raise FormatError(unknown_name(name, (*also, *own, *of_planner)))
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

    For each lever that the plan uses, `Levers.without` states the figures without this lever: the other
    levers as they are, precisions chosen anew.

    Args:
        graph: The operators of one step of the model.
        profiles: The profile of each device class, by name.
        sensitivity: Added gradient variance (squared gradient norm) by operator and precision.
        cluster: The device classes, their ranks and links.
        levers: Levers to use, of "share", "accumulate", "buckets", "recompute" and "save_less"; others stay
            off. None means all. "save_less" needs profiles measured with `save_less=True`; without them it is
            left out if `levers` is None, and the plan says so (`Levers.untried`).
        other: The model captured with another number of samples (see `profiles_under_levers`), for
            "share" and "accumulate".
        trials: Number of trials in all.
        storage: A file of trials. The same search continues from it, and several processes may share it.
        seed: Seed of the sampler.
        least_samples: Fewest samples of a pass that a share leaves a rank, as BatchNorm wants them.
        progress: Called with a line of text before each trial.
        **options: Those of `allocate`. The default target is that of the plan without levers, or with "share"
            the least step that shares and precisions reach together.

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
    # What the target is from may be as good, though its trial was killed.
    setting = problem.known
    if best is not None and _rounded(best.value) <= _rounded(problem.known_value):
        setting = _setting(best.user_attrs)
    value, plan = problem.evaluate(setting)
    if plan is None or value >= _TOO_SLOW:
        return problem.solve(
            setting, target_s=problem.target_s, slack=None
        )  # raises the error that says what is missing
    setting, plan = _fewest_saving(problem, setting, value, plan)
    plan = _with_lever_gains(problem, setting, plan)
    if timed:
        return plan
    return replace(plan, levers=replace(plan.levers or Levers({}), untried={SAVE_LESS: _NOT_TIMED}))


def _searched(
    problem: Search, trials: int, storage: str | Path | None, seed: int, progress: Callable[[str], None]
) -> Any | None:
    """Return the best of so many trials; None if none fits in memory."""
    with _quiet() as optuna:
        study = _study(optuna, problem.key, Path(storage) if storage is not None else None)
        # Another process, or a continued search, draws other settings.
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
    """Find by bisection, on each class, the fewest operators that save less at the same variance.

    If more operators saved less, they would cost time for nothing.
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
    """Add to a plan its figures without each of its levers."""
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
    levers = as_json(setting.levers)["classes"]  # as a file of trials returns them: tuples become lists
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
    """Return the trials that any process completed; a killed process leaves an incomplete one."""
    return [trial for trial in study.get_trials(deepcopy=False) if trial.state.name == "COMPLETE"]


def _best(trials: Sequence[Any]) -> Any | None:
    """Return the trial of least value, then of fewest levers, then of the shortest step, then the first."""
    able = [trial for trial in trials if trial.value is not None and trial.value < _INFEASIBLE]
    return min(
        able,
        key=lambda t: (_rounded(t.value), t.user_attrs["num_levers"], t.user_attrs["step_s"], t.number),
        default=None,
    )


def _rounded(objective: float) -> float:
    """Return an objective without the digits that the order of a sum decides."""
    return float(f"{objective:.9g}")


def _setting(attributes: Mapping[str, Any]) -> LeverSetting:
    saving = {name: tuple(patterns) for name, patterns in attributes.get("saving_less", {}).items()}
    return LeverSetting(Levers.from_json({"classes": attributes["levers"]}), attributes["cap"], saving)


def _check_levers(
    basis: Basis, levers: Sequence[str], other: Recapture | None, options: Mapping[str, Any]
) -> None:
    """Raise FormatError for unknown levers, MismatchError for levers that lack what they need."""
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
    """Raise FormatError for what is no list of levers."""
    if isinstance(levers, str) or not isinstance(levers, Sequence):
        raise FormatError(
            f"levers must be a list of names, found {shortened(levers)}; choose from {', '.join(LEVERS)}"
        )
    for lever in levers:
        if lever not in LEVERS:
            raise FormatError(f"unknown lever {shortened(lever)}: choose from {', '.join(LEVERS)}")


def _saving_is_timed(basis: Basis) -> bool:
    """Return whether some class's profile has times of operators that save less."""
    return any(len(save_less_steps(basis.graph, basis.profiles[c.name])) > 1 for c in basis.cluster.classes)


def _study(optuna: Any, key: str, path: Path | None) -> Any:
    """Return the trials of one problem, in a file that several processes may write to, or in memory.

    Raises FormatError if the file holds something else.
    """
    if path is None:
        return optuna.create_study(study_name=key)
    path.parent.resolve(strict=True)  # else optuna waits for a lock that it cannot make
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
    """Cut the last line of a log of trials if it was not written to its end: optuna would refuse the log."""
    if not path.is_file():
        return
    with path.open("r+b") as file:
        content = file.read()
        whole = content.rfind(b"\n") + 1
        if 0 < whole < len(content):  # of one line it may be no log
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
