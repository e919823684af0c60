"""Plans: an assignment of precisions for each device class, with predictions."""

from __future__ import annotations

import fnmatch
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from qsync.errors import FormatError, MismatchError, nearest, shortened
from qsync.operators.precision import Precision
from qsync.operators.registry import PRECISIONS_BY_KIND
from qsync.records.base import is_below, parse_base
from qsync.records.graph import OpGraph
from qsync.records.levers import ClassLevers, Levers
from qsync.records.record_json import Count, FileRecord, Number
from qsync.records.save_less import can_save_less, ops_that_save_less
from qsync.records.verdict import Verdict


@dataclass(frozen=True, slots=True)
class Predicted:
    """Replay's prediction for one class under a plan.

    Variances are in squared gradient norm, weighted n_c / N^2: added by the plan to the base, and by the base
    to FP32. `state_bytes` is the optimizer's state in `memory_bytes`; 0 if unknown.
    """

    ADDED_LATER = "base_variance"

    compute_s: Number
    wait_s: Number
    memory_bytes: Count
    added_variance: Number
    base_variance: Number = 0.0
    state_bytes: Count = 0


@dataclass(frozen=True, slots=True)
class ClassPlan:
    """The assignment of one device class: every adjustable operator, in model order, with its precision.

    `saving_less` are name patterns of following operators that save less for backward.
    """

    ADDED_LATER = "origin"

    assignment: Mapping[str, Precision]
    predicted: Predicted | None = None
    profile_hash: str | None = None
    saving_less: tuple[str, ...] = ()
    origin: str = "measured"  # origin of the underlying costs: Profile.origin
    base: Precision = Precision.FP32  # this class's base: see qsync.records.base
    margin: Number = 0.0  # relative delay of its compute with which the step still reaches the target
    carries_16bit: bool = True  # whether tensors between operators are BF16, if the device has it
    bitwise: bool = True  # FP32 by torch's own kernels, as profiled; False: by the fastest

    @property
    def lowered(self) -> tuple[str, ...]:
        """Return the operators that run below the base."""
        return tuple(op for op, precision in self.assignment.items() if is_below(precision, self.base))


@dataclass(frozen=True, slots=True)
class Plan(FileRecord):
    """A plan: precisions per device class (not per rank), with predictions.

    `pin` and `save_less` drop predictions, warnings and verdict.

    >>> plan = qsync.Plan.load("plan.json").pin("encoder.layer.0.*", "fp32")
    >>> plan.save("pinned.json")
    """

    FILE_KIND = "plan"
    ADDED_LATER = "bound"

    model: str
    graph_hash: str
    classes: Mapping[str, ClassPlan]
    step_s: Number | None = None
    target_s: Number | None = None
    bucket_cap_bytes: Count | None = None  # DDP's bucket size assumed by the prediction; None: DDP's default
    bound: Number | None = None  # lower bound on the added variance of any plan for this problem
    status: str | None = None  # the solver's: "optimal", "time-limited", "unproved" or "unsolved"
    levers: Levers | None = None  # changes beside precisions
    pins: Mapping[str, Precision] = field(default_factory=dict)  # patterns pinned at planning
    # Class -> bytes, where different from the cluster's
    budgets: Mapping[str, Count] = field(default_factory=dict)
    together: tuple[tuple[str, ...], ...] = ()  # patterns of operators that must run alike
    base: Precision = Precision.FP32  # the base that it was planned above: see qsync.records.base
    batch: tuple[tuple[Count, ...], ...] = ()  # shapes of a rank's batch at planning
    kept_base: str = ""  # why nothing is lowered although lowering was predicted to save time
    warnings: tuple[str, ...] = ()  # reasons for doubt, found at planning
    # How gradients travel, by parameter (qsync.records.compression), and the variance that it adds
    compression: Mapping[str, str] = field(default_factory=dict)
    compression_variance: Number = 0.0
    verdict: Verdict | None = None  # comparison with other ways to use the same cards

    def __getitem__(self, device_class: str) -> ClassPlan:
        if device_class not in self.classes:
            known = ", ".join(self.classes)
            raise MismatchError(
                f"the plan has no device class {shortened(device_class)}; name one of "
                f"{shortened(known, most=160, quote=False)}, or plan again"
            )
        return self.classes[device_class]

    def levers_of(self, device_class: str) -> ClassLevers:
        """Return a class's levers; none if the plan has none."""
        return self.levers[device_class] if self.levers is not None else ClassLevers()

    @property
    def added_variance(self) -> float | None:
        """Return the sum of all classes' added variance; None without predictions."""
        found = [entry.predicted.added_variance for entry in self.classes.values() if entry.predicted]
        return sum(found) if len(found) == len(self.classes) else None

    @property
    def margin(self) -> float | None:
        """Return the relative delay with which lowered classes still reach the target, or None."""
        return max((entry.margin for entry in self.classes.values()), default=0.0) or None

    @property
    def gap(self) -> float | None:
        """Return the share of the added variance that a better plan might avoid; None if unknown."""
        added = self.added_variance
        if self.bound is None or added is None:
            return None
        return max(0.0, 1.0 - self.bound / added) if added > 0.0 else 0.0

    def pinned_by(self, op: str, precision: Precision) -> str | None:
        """Return the pattern that pinned an operator to this precision, if one did."""
        matching = (p for p, to in self.pins.items() if to is precision and fnmatch.fnmatchcase(op, p))
        return next(matching, None)

    def check_graph(self, graph: OpGraph, layers: Collection[str] = ()) -> None:
        """Raise MismatchError unless this plan was made for `graph`.

        `layers` lists the model's layers if the data chooses which of them run (experts in untraceable code):
        the graph may then lack some operators.
        """
        names = {op.name: op.kind for op in graph.adjustable}
        planned = {op for each in self.classes.values() for op in each.assignment}
        unreached = {op for op in planned - names.keys() if _layer_of(op) in layers}
        model = shortened(graph.model, quote=False)
        for class_name, class_plan in self.classes.items():
            where = shortened(class_name, quote=False)
            for op, precision in class_plan.assignment.items():
                if op not in names:
                    if op in unreached:
                        continue
                    raise MismatchError(
                        f"the plan for {where} assigns {shortened(op)}, which {model} lacks"
                        f"{nearest(op, names)}; plan again for this model"
                    )
                if precision not in PRECISIONS_BY_KIND[names[op]]:
                    raise FormatError(
                        f"the plan gives {shortened(op, quote=False)} ({names[op]}) {precision}, "
                        "which has no kernel; choose another precision"
                    )
            missing = [op for op in names if op not in class_plan.assignment]
            if missing:
                raise MismatchError(
                    f"the plan for {where} lacks {shortened(missing[0])} and "
                    f"{len(missing) - 1} more operators of {model}; plan again for this model"
                )
            if not unreached:
                check_saving(graph, class_name, class_plan.saving_less)
        if self.graph_hash != graph.hash and not unreached:
            raise MismatchError(
                f"the plan was made for {shortened(self.model, quote=False)} with graph "
                f"{shortened(self.graph_hash, quote=False)}, but this model is {model} with graph "
                f"{graph.hash}; plan again for this model"
            )

    def pin(self, pattern: str, precision: str | Precision) -> Plan:
        """Return a plan with one precision for all operators that match `pattern`, in every class.

        Predictions are dropped; replay the result to predict again.
        """
        chosen = Precision.parse(precision)
        known = next(iter(self.classes.values())).assignment
        if not fnmatch.filter(known, pattern):
            raise MismatchError(
                f"no operator matches {shortened(pattern)}{nearest(pattern, known)}; correct the pattern"
            )
        classes = {
            name: replace(
                class_plan,
                assignment={
                    op: chosen if fnmatch.fnmatchcase(op, pattern) else p
                    for op, p in class_plan.assignment.items()
                },
                predicted=None,
            )
            for name, class_plan in self.classes.items()
        }
        return replace(self, classes=classes, step_s=None, bound=None, warnings=(), verdict=None)

    def save_less(self, pattern: str = "*", device_class: str | None = None) -> Plan:
        """Return a plan in which matching following operators save less for backward.

        It changes one class, or all. Following operators are gelu, layer_norm, dropout and the like. They
        save their result if the next product saves it anyway, else one or eight bits per element
        (`qsync.backend.compressed_saves.saved_ops`). Predictions are dropped.

        >>> plan.save_less("encoder.layer.*", device_class="infer")
        """
        chosen = [device_class] if device_class is not None else list(self.classes)
        changed = {
            name: replace(
                self[name],
                predicted=None,
                saving_less=tuple(dict.fromkeys((*self[name].saving_less, pattern))),
            )
            for name in chosen
        }
        return replace(
            self, classes={**self.classes, **changed}, step_s=None, bound=None, warnings=(), verdict=None
        )

    def diff(self, other: Plan) -> str:
        """Return the differences to another plan, one per line; empty if the plans run equally.

        Buckets come first, then operators with another precision by class, then classes with other saved
        tensors or levers.
        """
        caps = [
            "DDP's own" if plan.bucket_cap_bytes is None else f"{plan.bucket_cap_bytes} bytes"
            for plan in (self, other)
        ]
        lines = [f"every class  buckets: {caps[0]} -> {caps[1]}"] if caps[0] != caps[1] else []
        for name in dict.fromkeys([*self.classes, *other.classes]):
            mine = self.classes[name].assignment if name in self.classes else {}
            theirs = other.classes[name].assignment if name in other.classes else {}
            for op in dict.fromkeys([*mine, *theirs]):
                if mine.get(op) != theirs.get(op):
                    lines.append(f"{name}  {op}: {mine.get(op, 'absent')} -> {theirs.get(op, 'absent')}")
            less, also = (
                ", ".join(plan.classes[name].saving_less) if name in plan.classes else ""
                for plan in (self, other)
            )
            if less != also:
                lines.append(f"{name}  saving less: {less or 'none'} -> {also or 'none'}")
            lever, other_lever = (plan.levers[name] if plan.levers else None for plan in (self, other))
            if lever != other_lever:
                lines.append(f"{name}  levers: {lever or 'none'} -> {other_lever or 'none'}")
        return "\n".join(lines)

    def to_json(self) -> dict[str, Any]:
        """Return the plan as JSON, classes sorted by name, so that equal plans have equal texts."""
        body = FileRecord.to_json(self)
        for holder, name in ((body, "pins"), (body, "budgets"), (body.get("levers", {}), "classes")):
            if name in holder:
                holder[name] = dict(sorted(holder[name].items()))
        classes = dict(sorted(body.pop("classes").items()))
        return {**body, "classes": classes}  # last, because they are long

    def check_content(self) -> None:
        """Raise FormatError for a plan without a class, or with an invalid base."""
        if not self.classes:
            raise FormatError("the plan has no device class; plan again")
        for base in (self.base, *(entry.base for entry in self.classes.values())):
            parse_base(base)


def traded_classes(plans: Sequence[Plan]) -> list[str]:
    """Return the classes whose memory budgets differ between plans."""
    return [name for name in plans[0].classes if len({plan.budgets.get(name) for plan in plans}) > 1]


def check_saving(graph: OpGraph, device_class: str, patterns: Iterable[str]) -> None:
    """Raise MismatchError for a pattern (except "*") that no operator able to save less matches."""
    where, model = (shortened(name, quote=False) for name in (device_class, graph.model))
    for pattern in patterns:
        if pattern != "*" and not ops_that_save_less(graph, [pattern]):
            known = {op.name: op.kind for op in graph.ops if can_save_less(op)}
            raise MismatchError(
                f"the plan for {where} makes {shortened(pattern)} save less, but it matches no operator of "
                f"{model} that can{nearest(pattern, known)}; plan again for this model"
            )


def _layer_of(op: str) -> str:
    """Return the path of an operator's module; a product inside a forward has its own name."""
    path = op.partition("#")[0]
    module, _, last = path.rpartition(".")
    return module if last in PRECISIONS_BY_KIND else path
