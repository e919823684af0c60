"""Carry sensitivities and profiles of the small model over to the grown one.

Both are labelled as predictions, not measurements.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from types import NoneType

from qsync.errors import MismatchError
from qsync.expansion.plan.expansion_plan import ExpansionPlan
from qsync.expansion.transfer.scaling import gradient_gain, rounding_gain
from qsync.predictor.cost_model.fill_profile import carry
from qsync.predictor.cost_model.model import CostModel
from qsync.records.graph import Op, OpGraph
from qsync.records.json_files import check_kind
from qsync.records.profiles import Profile, Sensitivity

# Of the errors in y = x W, x'g and g W', only that in x'g remains in a branch that adds nothing.
NEW_BLOCK_ERROR_SHARE = 1.0 / 3.0


@dataclass(frozen=True, slots=True)
class Origin:
    """The small model's operator from which an operator of the grown model comes.

    `name` is its name, `next_name` that of the same operator in the next block ("" if there is none).
    `is_new` states whether the grown operator is in a new block.
    """

    name: str
    next_name: str = ""
    is_new: bool = False


def carry_sensitivity(
    sensitivity: Sensitivity, small_graph: OpGraph, big_graph: OpGraph, plan: ExpansionPlan
) -> Sensitivity:
    """Predict the sensitivity of the grown model from the small one's and the expansion maps.

    All copies of a value are rounded alike, so that an error v_x M |W|^2 or v_w N |x|^2 changes the function
    as before. Its effect on the gradient grows as the gradient does (`scaling`):

        omega*[op, p] = G (1 + r) / 2 omega[op, p]     G = |grad*|^2 / |grad|^2, one number for all operators
                                                       r: the growth of the error from rounding W, whose
                                                       shares are rounded separately; x and W count alike

    A new block adds nothing: its errors reach no other operator, and no gradient flows back through it. Of
    the three errors (forward, wgrad, dgrad) only that of wgrad remains, a third if all are alike. The block
    lies between two blocks of the small model, so the geometric mean of these counts. With training it
    approaches its neighbours: gather the sensitivity again after about forty steps.

    Assumptions: random weights have the peaks of the original ones, and the model is as sensitive as at the
    time of `sensitivity`.

    Args:
        sensitivity: The small model's sensitivity.
        small_graph: The graph of the small model that it was gathered for.
        big_graph: The graph of the grown model, captured with the same inputs.
        plan: The plan that grew the model.

    Returns:
        The predicted sensitivity, in the units of `sensitivity` (variance added to the gradient). Its
        `indicator` ends with "carried over".

    Raises:
        MismatchError: Graphs, plan and sensitivity do not belong together.
        FormatError: An argument is of another kind.

    Example:
        >>> guess = qsync.carry_sensitivity(sensitivity, small_graph, qsync.capture(big, batch), plan)
    """
    check_kind(sensitivity, Sensitivity, "sensitivity", "qsync.sensitivity")
    _check_kinds(small_graph, big_graph, plan)
    if sensitivity.graph_hash != small_graph.hash:
        raise MismatchError(
            f"the sensitivity belongs to graph {sensitivity.graph_hash}, but the small model "
            f"{small_graph.model} has graph {small_graph.hash}; give the sensitivity's own graph"
        )
    origins = _origins(small_graph, big_graph, plan)
    gain = gradient_gain(plan)
    omega = {}
    for op in big_graph.adjustable:
        origin = origins.get(op.name)
        if origin is None or origin.name not in sensitivity.omega:
            raise MismatchError(
                f"{op.name} of the grown model has no counterpart in the sensitivity; capture both models "
                "with the same inputs, and run qsync.sensitivity on the small one again"
            )
        factor = gain * (1.0 + _rounding(op, plan)) / 2.0
        omega[op.name] = {p: factor * value for p, value in _before(sensitivity, origin)}
    return Sensitivity(
        big_graph.hash, f"{sensitivity.indicator}, carried over", omega, sensitivity.num_batches
    )


def carry_profile(
    profile: Profile,
    small_graph: OpGraph,
    big_graph: OpGraph,
    plan: ExpansionPlan,
    model: CostModel | None = None,
) -> Profile:
    """Predict the profile of the grown model from the small one's on the same device.

    A learned cost model scales the time of each operator and cast to the new shape
    (`predictor.cost_model.fill_profile`). The optimizer's time is scaled by the number of parameters, that of
    the host by the number of operators (assumed).

    Args:
        profile: The small model's profile; times in seconds.
        small_graph: The graph of the small model.
        big_graph: The graph of the grown model.
        plan: The plan that grew the model.
        model: A cost model. By default one is learned from the profile.

    Returns:
        The predicted profile. Its `origin` is "carried", which tables, plans and traces show.

    Raises:
        MismatchError: Graphs, plan and profile do not belong together.
        FormatError: An argument is of another kind.

    Example:
        >>> guess = qsync.carry_profile(profile, small_graph, big_graph, plan)
        >>> first = qsync.plan(big_graph, {"train": guess}, carried_sensitivity, cluster)
        >>> big = qsync.hybrid(big, batch, plan=first)      # no second measurement
    """
    check_kind(profile, Profile, "profile", "qsync.profile")
    _check_kinds(small_graph, big_graph, plan)
    check_kind(model, (CostModel, NoneType), "model", "CostModel.learn")
    profile.check_graph(small_graph)
    origins = _origins(small_graph, big_graph, plan)
    known = {value.name for value in small_graph.inputs}
    values = {
        value.name: source
        for value in big_graph.inputs
        if (source := plan.depth.source_of(value.name)) in known
    }
    sources = {**values, **{name: origin.name for name, origin in origins.items()}}
    carried = carry(profile, big_graph, small_graph, sources, model)
    parameters = _num_parameters(big_graph) / max(_num_parameters(small_graph), 1)
    return replace(
        carried,
        optimizer_s=profile.optimizer_s * parameters,
        optimizer_bytes=round(profile.optimizer_bytes * parameters),
        optimizer_workspace_bytes=round(profile.optimizer_workspace_bytes * parameters),
        host_s=profile.host_s * len(big_graph.ops) / max(len(small_graph.ops), 1),
    )


def _check_kinds(small_graph: object, big_graph: object, plan: object) -> None:
    """Raise FormatError unless the arguments are two graphs and a plan."""
    check_kind(small_graph, OpGraph, "small_graph", "qsync.capture")
    check_kind(big_graph, OpGraph, "big_graph", "qsync.capture")
    check_kind(plan, ExpansionPlan, "plan", "qsync.plan_expansion")


def _before(sensitivity: Sensitivity, origin: Origin) -> Iterator[tuple[str, float]]:
    """Yield the small operator's variance at each precision; for a new block its neighbours' mean."""
    own = sensitivity.omega[origin.name]
    beyond = sensitivity.omega.get(origin.next_name, own)
    for precision, value in own.items():
        between = math.sqrt(value * beyond.get(precision, value))
        yield precision, NEW_BLOCK_ERROR_SHARE * between if origin.is_new else value


def _rounding(op: Op, plan: ExpansionPlan) -> float:
    """Return the growth of the rounding error of an operator's weights."""
    gains = [rounding_gain(plan.tensors[name]) for name in op.inputs if name in plan.tensors]
    return max(gains, default=1.0)


def _origins(small: OpGraph, big: OpGraph, plan: ExpansionPlan) -> dict[str, Origin]:
    """Return the known origins of the grown graph's operators.

    Raises:
        MismatchError: A graph does not belong to the plan.
    """
    _check(small, {m.source: m.source_shape for m in plan.tensors.values()}, "small")
    _check(big, {name: m.shape for name, m in plan.tensors.items()}, "grown")
    known = {op.name for op in small.ops}
    found = {op.name: _origin(op.name, plan) for op in big.ops}
    return {name: origin for name, origin in found.items() if origin.name in known}


def _origin(name: str, plan: ExpansionPlan) -> Origin:
    """Return the origin of a name in the grown model, whether or not the small graph has it."""
    blocks = list(plan.depth.grown_blocks)
    for i, block in enumerate(blocks):
        for grown_block in plan.depth.grown_blocks[block]:
            if name == grown_block.path or name.startswith(f"{grown_block.path}."):
                rest = name[len(grown_block.path) :]
                behind = blocks[i + 1] if i + 1 < len(blocks) else ""
                alike = behind.rpartition(".")[0] == block.rpartition(".")[0]
                return Origin(block + rest, behind + rest if alike else "", grown_block.is_new)
    return Origin(name)


def _check(graph: OpGraph, shapes: Mapping[str, tuple[int, ...]], which: str) -> None:
    """Raise MismatchError unless the graph has the parameters of the plan."""
    for value in graph.parameters:
        wanted = shapes.get(value.name)
        if value.shape != wanted:
            planned = f"shape {wanted}" if wanted else "no such parameter"
            raise MismatchError(
                f"the graph of the {which} model has {value.name} of shape {value.shape}, but the expansion "
                f"plan has {planned}; give the graphs of the planned small and grown models"
            )


def _num_parameters(graph: OpGraph) -> int:
    """Return the number of trained parameters."""
    return sum(value.num_elements for value in graph.parameters if value.requires_grad)
