"""The allocation problem: possible precisions of each operator, and their added variance."""

from __future__ import annotations

import fnmatch
import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace

from qsync.allocator.block_levers import LESS, RECOMPUTED, Block, Treatment, block_levers, blocks_with
from qsync.allocator.constraints import Constraints
from qsync.allocator.op_groups import check_pins, matched_groups, unmatched
from qsync.errors import CalibrationError, FormatError, MismatchError, UnsupportedError
from qsync.operators.precision import LARGEST, PRECISION_ORDER, Precision
from qsync.operators.registry import PRECISIONS_BY_KIND
from qsync.records.base import base_of, base_of_graph, base_on, bases_of, is_below, why_kept
from qsync.records.cluster import Cluster, DeviceClass
from qsync.records.graph import Op, OpGraph
from qsync.records.kernel_support import unsupported_by_shape
from qsync.records.plans import check_saving
from qsync.records.profiles import Profile, Sensitivity
from qsync.records.save_less import ops_that_save_less
from qsync.replayer import GradientExchange
from qsync.replayer.check_records import check_profiles
from qsync.replayer.costs.class_costs import check_timed
from qsync.replayer.levers.apply import recomputing


@dataclass(frozen=True, slots=True)
class ClassProblem:
    """One class's problem: `choices[op]` from lowest to highest, `variance[op][p]` weighted n_c / N^2.

    `graph` is the graph of one pass under the class's levers. In a group of operators with equal precisions,
    the first has the common choices and the summed variance, and `partners` names the others. `base[op]` is
    the precision of an operator that is not lowered. The following operators in `saving_less` save less for
    backward under every assignment. `blocks` have levers, which `under` sets.
    """

    device_class: DeviceClass
    profile: Profile
    budget_bytes: int
    choices: Mapping[str, tuple[Precision, ...]]
    variance: Mapping[str, Mapping[Precision, float]]
    graph: OpGraph
    partners: Mapping[str, tuple[str, ...]]
    base: Mapping[str, Precision]
    saving_less: frozenset[str] = frozenset()
    blocks: tuple[Block, ...] = ()

    def under(self, graph: OpGraph, treatment: Treatment) -> ClassProblem:
        """Return the class's problem with these levers of its blocks; `graph` is the captured one.

        Both this problem's graph and its profile are without recomputed blocks.
        """
        paths = [block.path for block in blocks_with(self.blocks, treatment, RECOMPUTED)]
        less = self.saving_less.union(*(block.less for block in blocks_with(self.blocks, treatment, LESS)))
        device = self.device_class.device
        profile = recomputing(graph, self.profile, paths, device) if paths else self.profile
        at = profile.graph_of(graph)
        less = less.intersection(ops_that_save_less(at, ["*"]))
        return replace(self, profile=profile, graph=at, saving_less=less)

    @property
    def highest(self) -> dict[str, Precision]:
        """Return the assignment of least variance: the base except for pinned operators."""
        return self.with_partners({op: options[-1] for op, options in self.choices.items()})

    def first_of(self, op: str) -> str:
        """Return the first operator of an operator's group, or the operator itself without a group."""
        return next((first for first, others in self.partners.items() if op in others), op)

    def with_partners(self, assignment: Mapping[str, Precision]) -> dict[str, Precision]:
        """Extend an assignment to the partners (`partners`) of its operators."""
        found = dict(assignment)
        for op, partners in self.partners.items():
            if op in assignment:
                found |= dict.fromkeys(partners, assignment[op])
        return found


@dataclass(frozen=True, slots=True)
class Problem:
    """The allocation problem of one graph on one cluster, in the order of the cluster's classes."""

    graph: OpGraph
    cluster: Cluster
    exchange: GradientExchange
    classes: Mapping[str, ClassProblem]


def make_problem(
    graph: OpGraph,
    profiles: Mapping[str, Profile],
    sensitivity: Sensitivity,
    cluster: Cluster,
    given: Constraints | None = None,
) -> Problem:
    """Check that all records match, and list the possible precisions of every operator.

    An operator may have a precision if its kind, the class and the class's profile support it, if a kernel of
    the device supports its shapes, and if it computes no weight (pins override this last condition). Every
    operator that saves less needs a measured time of saving less. Raises MismatchError, UnsupportedError,
    FormatError or CalibrationError naming the class or operator at fault.
    """
    given = given or Constraints()
    check_profiles(graph, profiles, cluster)
    check_sensitivity(graph, sensitivity)
    for name, budget in (given.budgets or {}).items():
        cluster[name]  # raises FormatError for an unknown class
        if not budget >= 1:
            raise FormatError(f"the memory budget of {name} must be positive, found {budget}; give bytes")
    for name in given.saving_less or {}:
        cluster[name]
    pinned, groups = _pinned(graph, given.pins or {}), matched_groups(graph, given.together)
    check_pins(groups, pinned)
    classes = {}
    for device_class in cluster.classes:
        weight = gradient_weight(device_class, profiles, cluster)
        classes[device_class.name] = _class_problem(
            graph, device_class, profiles[device_class.name], weight, sensitivity, pinned, groups, given
        )
    return Problem(graph, cluster, GradientExchange(graph, cluster, given.bucket_cap_bytes), classes)


def with_chosen(
    problem: Problem,
    assignments: Mapping[str, Mapping[str, Precision]],
    profiles: Mapping[str, Profile],
    sensitivity: Sensitivity,
    base: Precision,
) -> Problem:
    """Return the problem with the assigned precisions added to the choices, even above the base."""
    classes, ops = {}, {op.name: op for op in problem.graph.adjustable}
    for name, part in problem.classes.items():
        weight = gradient_weight(part.device_class, profiles, problem.cluster)
        part_base = base_on(base, bases_of(part.device_class.device, part.device_class.precisions))
        choices, variance = dict(part.choices), dict(part.variance)
        for op, options in part.choices.items():
            own = assignments[name][op]
            if own not in options:
                added = [
                    added_variance(sensitivity, ops[one], own, part_base)
                    for one in (op, *part.partners.get(op, ()))
                ]
                variance[op] = {**variance[op], own: weight * sum(added)}
                choices[op] = _from_lowest((*options, own), variance[op])
        classes[name] = replace(part, choices=choices, variance=variance)
    return replace(problem, classes=classes)


def _class_problem(
    graph: OpGraph,
    device_class: DeviceClass,
    profile: Profile,
    weight: float,
    sensitivity: Sensitivity,
    pinned: Mapping[str, Precision],
    groups: Sequence[Sequence[str]],
    given: Constraints,
) -> ClassProblem:
    name, at = device_class.name, profile.graph_of(graph)
    choices, variance, bases = {}, {}, {}
    without_kernel = unsupported_by_shape(at, device_class.device)
    base = base_on(base_of_graph(graph, given.base), bases_of(device_class.device, device_class.precisions))
    for op in graph.adjustable:
        unsupported = {**profile.refused.get(op.name, {}), **without_kernel.get(op.name, {})}
        options = _choices(op, device_class, profile, pinned.get(op.name), unsupported)
        own_base = base_of(op, base)
        bases[op.name] = own_base if own_base in options else Precision.FP32
        if op.name not in pinned:
            options = tuple(p for p in options if p == bases[op.name] or is_below(p, bases[op.name]))
        variance[op.name] = {p: weight * added_variance(sensitivity, op, p, base) for p in options}
        choices[op.name] = _from_lowest(options, variance[op.name])
    _check_base_measured(name, base, graph, profile)
    for group in groups:
        _merge_group(name, group, choices, variance)
    patterns = tuple((given.saving_less or {}).get(name, ()))
    check_saving(graph, name, patterns)
    less = ops_that_save_less(at, patterns)
    for op_name in less:
        check_timed(profile, at, op_name)
    budget = (given.budgets or {}).get(name, device_class.memory_bytes)
    partners = {group[0]: tuple(group[1:]) for group in groups}
    blocks = block_levers(at, profile, given.block_levers) if given.block_levers else ()
    return ClassProblem(
        device_class, profile, budget, choices, variance, at, partners, bases, frozenset(less), blocks
    )  # fmt: skip


def _check_base_measured(name: str, base: Precision, graph: OpGraph, profile: Profile) -> None:
    """Raise MismatchError if the profile measured none of the base's operators in the base."""
    wanted = [op.name for op in graph.adjustable if base_of(op, base) is base]
    lacking = [op for op in wanted if base not in profile.precisions_of(op)]
    if base is not Precision.FP32 and wanted and lacking == wanted:
        raise MismatchError(
            f"the profile of {name} has no time of {lacking[0]} in {base}, the base; profile this class again"
        )


def _merge_group(
    name: str,
    group: Sequence[str],
    choices: dict[str, tuple[Precision, ...]],
    variance: dict[str, dict[Precision, float]],
) -> None:
    """Give a group's first operator the common choices and summed variance of the group."""
    shared = [p for p in choices[group[0]] if all(p in choices[op] for op in group)]
    if not shared:
        has = "; ".join(f"{op} can run in {', '.join(choices[op])}" for op in group)
        raise UnsupportedError(
            f"{', '.join(group)} are to run alike on {name}, which no precision allows ({has}); do not put "
            "them together, or pin them otherwise"
        )
    variance[group[0]] = {p: sum(variance[op][p] for op in group) for p in shared}
    choices[group[0]] = _from_lowest(shared, variance[group[0]])
    for op in group[1:]:
        variance[op] = dict.fromkeys(shared, 0.0)
        del choices[op]


def gradient_weight(device_class: DeviceClass, profiles: Mapping[str, Profile], cluster: Cluster) -> float:
    """Return the weight of a class's added variance in the average gradient of all ranks.

    The weight is n_c / N^2, or under unequal shares of the batch

        n_c (b_c / B)^2 max(1, s / b_c)

    where a rank of the class takes b_c of a step's B samples, and the sensitivities were gathered with s
    samples. The variance from rounding single samples averages out as 1 / b_c. The variance from rounding
    weights, which samples share, does not. For any mix of the two, the variance with b_c samples is at most
    max(1, s / b_c) times the variance with s samples.

    >>> gradient_weight(cluster["infer"], profiles, cluster)
    """
    setting = profiles[device_class.name].setting
    if setting is None:
        return device_class.count / cluster.num_ranks**2
    total = cluster.num_ranks * setting.captured_samples  # shares keep the global batch
    share = setting.samples / total
    return device_class.count * share**2 * max(1.0, setting.captured_samples / setting.samples)


def check_sensitivity(graph: OpGraph, sensitivity: Sensitivity) -> None:
    """Raise MismatchError unless this sensitivity was gathered on `graph`."""
    if sensitivity.graph_hash != graph.hash:
        raise MismatchError(
            f"the sensitivity was gathered on graph {sensitivity.graph_hash}, {graph.model} is graph "
            f"{graph.hash}; gather it again with qsync.sensitivity"
        )


def _pinned(graph: OpGraph, pins: Mapping[str, str | Precision]) -> dict[str, Precision]:
    """Map operators to their pinned precisions; overlapping patterns must agree."""
    names = {op.name: op.kind for op in graph.adjustable}
    pinned: dict[str, Precision] = {}
    pinned_by: dict[str, str] = {}
    for pattern, text in pins.items():
        precision = Precision.parse(text)
        matched = [name for name in names if fnmatch.fnmatchcase(name, pattern)]
        if not matched:
            raise MismatchError(unmatched(graph, pattern))
        for name in matched:
            if precision not in PRECISIONS_BY_KIND[names[name]]:
                known = ", ".join(PRECISIONS_BY_KIND[names[name]])
                raise FormatError(
                    f"the pin {pattern!r} gives {name} ({names[name]}) {precision}, which has no kernel; "
                    f"choose one of {known}"
                )
            if pinned.setdefault(name, precision) is not precision:
                raise FormatError(
                    f"{name} is given {pinned[name]} by {pinned_by[name]!r} and {precision} by {pattern!r}; "
                    "leave one of these patterns out, or narrow it (to exclude is to pin to fp32)"
                )
            pinned_by.setdefault(name, pattern)
    return pinned


def _choices(
    op: Op,
    device_class: DeviceClass,
    profile: Profile,
    pinned: Precision | None,
    unsupported: Mapping[str, str],
) -> tuple[Precision, ...]:
    measured = profile.precisions_of(op.name)
    wanted = pinned or Precision.FP32
    if wanted not in device_class.precisions:
        known = ", ".join(device_class.precisions)
        raise UnsupportedError(
            f"{op.name} is pinned to {wanted}, which {device_class.name} lacks; it has {known}"
        )
    if wanted in unsupported:
        raise UnsupportedError(
            f"{op.name} is pinned to {wanted}, in which {device_class.name} does not serve it: "
            f"{unsupported[wanted]}; pin it to another precision"
        )
    if wanted not in measured:
        known = ", ".join(measured) or "nothing"
        raise MismatchError(
            f"the profile of {device_class.name} has no time of {op.name} in {wanted} (it has {known}); "
            "profile this class again"
        )
    if pinned is not None:
        return (pinned,)
    # The last condition: a constant beyond a type's range would become infinite.
    return tuple(
        p
        for p in PRECISIONS_BY_KIND[op.kind]
        if p in device_class.precisions
        and p in measured
        and p not in unsupported
        and not why_kept(op, p)
        and op.magnitude <= LARGEST.get(p, math.inf)
    )


def added_variance(sensitivity: Sensitivity, op: Op, precision: Precision, base: Precision) -> float:
    """Return the gradient variance that an operator adds in a precision, above its class's base."""
    own_base = base_of(op, base)
    if own_base is Precision.FP32:
        return _omega(sensitivity, op.name, precision)
    above = _omega(sensitivity, op.name, precision) - _omega(sensitivity, op.name, own_base)
    return max(0.0, above)


def _from_lowest(options: Iterable[Precision], variance: Mapping[Precision, float]) -> tuple[Precision, ...]:
    return tuple(sorted(options, key=lambda p: (-variance[p], PRECISION_ORDER[p])))


def _omega(sensitivity: Sensitivity, op: str, precision: Precision) -> float:
    omega = sensitivity[op, precision]
    if not math.isfinite(omega) or omega < 0:
        raise CalibrationError(
            f"the sensitivity of {op} at {precision} is {omega}; gather it again with qsync.sensitivity"
        )
    return omega
