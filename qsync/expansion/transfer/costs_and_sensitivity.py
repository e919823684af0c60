"""What is known of the small model as a first guess for the grown one: sensitivities and profiles, carried
over by the maps. Neither is measured, and both say so.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace

from qsync.errors import MismatchError
from qsync.expansion.plan.plan import ExpansionPlan
from qsync.expansion.transfer.scaling import gradient_gain, rounding_gain
from qsync.predictor.cost_model.fill_profile import carry
from qsync.predictor.cost_model.model import CostModel
from qsync.records.graph import Op, OpGraph
from qsync.records.profiles import Profile, Sensitivity

# Of the three products of a step, y = x W, x'g and g W', a silent branch has errors in the second alone.
SILENT = 1.0 / 3.0


@dataclass(frozen=True, slots=True)
class Origin:
    """Where an operator of the grown model comes from: its name in the small one, the name there of its like
    one block further ("" if there is none), and whether its block is new.
    """

    name: str
    next_name: str = ""
    is_new: bool = False


def carry_sensitivity(
    sensitivity: Sensitivity, small_graph: OpGraph, big_graph: OpGraph, plan: ExpansionPlan
) -> Sensitivity:
    """The sensitivity of a grown model, as far as that of the small one and the maps tell it (ours).

    Copies of a value are rounded alike, so that an error v_x M |W|^2 or v_w N |x|^2 moves the function as it
    did; what it does to the gradient grows as the gradient does (`gains`):

        omega*[op, p] = G (1 + r) / 2 omega[op, p]     G = |grad*|^2 / |grad|^2, one number for all operators
                                                       r: of what rounding W adds, for parts of W rounded each
                                                       by itself; x and W are taken to count alike

    A new block is silent: its errors reach no other operator and no gradient comes back, so that of the three
    errors (forward, wgrad, dgrad) wgrad's is left, a third where they are alike; it stands between two blocks
    of the small model, whose geometric mean counts. As it learns it nears the blocks around it: gather the
    sensitivity again after some hundred steps.

    Assumed: weights that are drawn are as peaked as those that were there, the model is as sensitive as when
    `sensitivity` was gathered. `indicator` of what is returned says that it was carried over. Raises
    MismatchError unless graphs, plan and sensitivity are of one growth.

    >>> guess = qsync.carry_sensitivity(sensitivity, small_graph, qsync.capture(big, batch), plan)
    """
    if sensitivity.graph_hash != small_graph.hash:
        raise MismatchError(
            f"the sensitivity was gathered for graph {sensitivity.graph_hash}, and the small model is "
            f"{small_graph.model} with graph {small_graph.hash}; give the graph that it was gathered for"
        )
    origins = _origins(small_graph, big_graph, plan)
    gain = gradient_gain(plan)
    omega = {}
    for op in big_graph.adjustable:
        origin = origins.get(op.name)
        if origin is None or origin.name not in sensitivity.omega:
            raise MismatchError(
                f"{op.name} of the grown model comes from no operator that the sensitivity knows; capture "
                "both models with the same inputs, and gather the small one's sensitivity again"
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
    """The profile of a grown model, from that of the small one on the same device.

    Every operator and cast takes what the one that it comes from took, times what a learned cost model makes
    of its new shape (`predictor.filling.carry`); without a `model` one is learned from the profile itself.
    The optimizer takes as much longer as there are parameters, and the host's part as there are operators
    (assumed). Its `origin` is "carried", which tables, plans and traces show. Raises MismatchError unless
    graphs, plan and profile are of one growth.

    >>> guess = qsync.carry_profile(profile, small_graph, big_graph, plan)
    >>> first = qsync.plan(big_graph, {"train": guess}, carried_sensitivity, cluster)
    >>> big = qsync.hybrid(big, batch, plan=first)      # nothing is measured again
    """
    profile.check_graph(small_graph)
    origins = _origins(small_graph, big_graph, plan)
    values = {
        value.name: source
        for value in big_graph.inputs
        for source, *_ in [_source(value.name, plan)]
        if source in {known.name for known in small_graph.inputs}
    }
    sources = {**values, **{name: origin.name for name, origin in origins.items()}}
    carried = carry(profile, big_graph, small_graph, sources, model)
    parameters = _num_parameters(big_graph) / max(_num_parameters(small_graph), 1)
    return replace(
        carried,
        optimizer_s=profile.optimizer_s * parameters,
        optimizer_bytes=round(profile.optimizer_bytes * parameters),
        host_s=profile.host_s * len(big_graph.ops) / max(len(small_graph.ops), 1),
    )


def _before(sensitivity: Sensitivity, origin: Origin) -> Iterator[tuple[str, float]]:
    """What the small model's operator adds at each precision; for a new block's, what a silent one between
    two would.
    """
    own = sensitivity.omega[origin.name]
    beyond = sensitivity.omega.get(origin.next_name, own)
    for precision, value in own.items():
        between = math.sqrt(value * beyond.get(precision, value))
        yield precision, SILENT * between if origin.is_new else value


def _rounding(op: Op, plan: ExpansionPlan) -> float:
    gains = [rounding_gain(plan.tensors[name]) for name in op.inputs if name in plan.tensors]
    return max(gains, default=1.0)


def _origins(small: OpGraph, big: OpGraph, plan: ExpansionPlan) -> dict[str, Origin]:
    """Where every operator of the grown graph comes from, by module paths; those that come from none are
    left out. Raises MismatchError where a graph is not that of the plan.
    """
    _check(small, {m.source: m.source_shape for m in plan.tensors.values()}, "small")
    _check(big, {name: m.shape for name, m in plan.tensors.items()}, "grown")
    known = {op.name for op in small.ops}
    found = {}
    for op in big.ops:
        source, next_name, is_new = _source(op.name, plan)
        if source in known:
            found[op.name] = Origin(source, next_name, is_new)
    return found


def _source(name: str, plan: ExpansionPlan) -> tuple[str, str, bool]:
    """What an operator or a value of the grown model is called in the small one, what in the block behind it,
    and whether its block is new.
    """
    blocks = list(plan.depth.places)
    for i, block in enumerate(blocks):
        for place in plan.depth.places[block]:
            if name == place.path or name.startswith(f"{place.path}."):
                rest = name[len(place.path) :]
                behind = blocks[i + 1] if i + 1 < len(blocks) else ""
                alike = behind.rpartition(".")[0] == block.rpartition(".")[0]
                return block + rest, behind + rest if alike else "", place.is_new
    return name, "", False


def _check(graph: OpGraph, shapes: Mapping[str, tuple[int, ...]], which: str) -> None:
    """MismatchError unless the parameters of a graph are those that the plan has on this side."""
    for value in graph.parameters:
        wanted = shapes.get(value.name)
        if value.shape != wanted:
            planned = f"shape {wanted}" if wanted else "no such parameter"
            raise MismatchError(
                f"the graph of the {which} model has {value.name} of shape {value.shape}, and the expansion "
                f"plan has {planned}; give the graphs of the model planned for and of what it grew to"
            )


def _num_parameters(graph: OpGraph) -> int:
    return sum(value.num_elements for value in graph.parameters if value.requires_grad)
