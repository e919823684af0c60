"""Activation recomputation: the cost of blocks that compute forward again in backward. Pure.

In a recomputed block, the price of an operator's backward includes its forward and its casts' forward. The
sum over the block is exact. A real block runs its whole forward again before its first backward, so gradients
in the middle of a block are complete a little later than predicted. The gradients of the block's first
operators are complete exactly as predicted. Casts of weights stay in memory and are not repeated, except on
GPUs (`keeps_weight_casts`).
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace
from itertools import pairwise

from qsync.errors import FormatError
from qsync.lowering.lowered_graph import Cast
from qsync.records.graph import Input, OpGraph
from qsync.records.levers import is_in_module
from qsync.records.profiles import Cost, Profile
from qsync.replayer.costs.class_costs import cast_cost

# Elements of int64 in the CPU's random state (5,056 bytes), which torch's checkpoint saves before a block so
# that dropout repeats.
RANDOM_STATE = 632


def blocks(graph: OpGraph) -> tuple[str, ...]:
    """Return the blocks of a model that can be recomputed: numbered modules (`layers.0`), in order.

    A block with a batch norm cannot be recomputed: the norm's statistics would count every batch twice.

    >>> blocks(graph)
    ('layers.0', 'layers.1')
    """
    able = []
    for path in numbered(graph):
        try:
            span_of(graph, path)
        except FormatError:
            continue
        able.append(path)
    return tuple(able)


def numbered(graph: OpGraph) -> tuple[str, ...]:
    """Return the outermost numbered modules with submodules, such as `layers.0`, in order."""
    found: dict[str, bool] = {}
    for op in graph.ops:
        parts = op.name.split(".")
        number = next((k for k, part in enumerate(parts) if part.isdigit()), None)
        if number is not None and number < len(parts) - 1:
            found[".".join(parts[: number + 1])] = True
    return tuple(found)


def span_of(graph: OpGraph, path: str) -> tuple[int, int]:
    """Return the positions of the first and last operator of a module.

    Raises FormatError if the module has no operator, if operators of other modules run between its own, or if
    it holds a batch norm.
    """
    own = [i for i, op in enumerate(graph.ops) if is_in_module(op.name, path)]
    if not own:
        known = ", ".join(sorted({op.name.partition(".")[0] for op in graph.ops})[:6])
        raise FormatError(
            f"no operator of {graph.model} belongs to {path!r}, which is to be recomputed; name a module, as "
            f"in {known}"
        )
    first, last = own[0], own[-1]
    if len(own) != last - first + 1:
        between = next(graph.ops[i].name for i in range(first, last) if i not in set(own))
        raise FormatError(
            f"{path} cannot be recomputed as one block: {between} runs between its operators; name smaller "
            "modules"
        )
    normed = next((graph.ops[i].name for i in own if graph.ops[i].kind == "batch_norm"), None)
    if normed is not None:
        raise FormatError(
            f"{path} cannot be recomputed: {normed} would count every batch twice in its running statistics; "
            "name modules without batch norms"
        )
    return first, last


def mark_recomputed(graph: OpGraph, paths: Iterable[str]) -> OpGraph:
    """Return the graph with these modules marked as recomputed.

    Raises FormatError if a module cannot be recomputed (`span_of`), or if two modules overlap.
    """
    found = [(*span_of(graph, path), path) for path in dict.fromkeys(paths)]
    spans = sorted(found, key=lambda span: (span[0], -span[1]))
    for (_, last, one), (first, _, other) in pairwise(spans):
        if first <= last:
            raise FormatError(f"{other} lies within {one}, and both are to be recomputed; name one of them")
    if not spans:
        return graph
    state = Input("random states before blocks", "batch", "int64", (len(spans) * RANDOM_STATE,))
    recomputed = tuple((first, last) for first, last, _ in spans)
    return replace(graph, inputs=(*graph.inputs, state), recomputed=recomputed)


def with_recomputation(profile: Profile, graph: OpGraph, keeps_casts: bool = True) -> Profile:
    """Add the cost of the graph's recomputed blocks to a profile without recomputation.

    Unless `keeps_casts`, recomputed blocks also cast their weights again.

    >>> with_recomputation(profile, mark_recomputed(graph, ["layers.0"]))
    """
    twice = {i for first, last in graph.recomputed for i in range(first, last + 1)}
    if not twice:
        return profile

    def again(cost: Cost) -> Cost:
        return Cost(cost.forward_s, cost.backward_s + cost.forward_s, cost.spread_s)

    ops = dict(profile.ops)
    casts = dict(profile.casts)
    elements = {value.name: value.num_elements for value in graph.inputs}
    elements |= {op.name: op.num_elements for op in graph.ops}
    weights = {value.name for value in graph.inputs if keeps_casts and value.kind == "parameter"}
    cast_in_block: set[str] = set()
    for i in twice:
        op = graph.ops[i]
        if op.name in ops:
            ops[op.name] = {mode: again(cost) for mode, cost in ops[op.name].items()}
        cast_in_block |= {value for value in (op.name, *op.inputs) if value not in weights}
    for key, cost in profile.casts.items():
        if key[0] in cast_in_block:
            casts[key] = again(cost)
    for source, target in profile.cast_fit:
        for name in sorted(cast_in_block):
            if (name, source, target) not in casts:
                cast = Cast(name, source, target, elements[name], False)
                casts[name, source, target] = again(cast_cost(profile, cast))
    return replace(profile, ops=ops, casts=casts)
