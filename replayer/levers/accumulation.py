"""Gradient accumulation: steps of several passes, with gradients exchanged in the last one. Pure.

A step has k passes of f seconds forward and b seconds backward. Buckets fill in the last backward, and
k f + (k - 1) b seconds pass before it. The profile of the step therefore has k f + (k - 1) b as forward and b
as backward. CPUs cast weights in the first pass only, GPUs in every pass (`keeps_weight_casts`).
"""

from __future__ import annotations

from dataclasses import replace

from qsync.records.graph import Input, OpGraph
from qsync.records.profiles import Cost, Profile
from qsync.replayer.communication import gradient_bytes
from qsync.replayer.costs.class_costs import fitted_cost


def in_passes(profile: Profile, graph: OpGraph, passes: int, casts_once: bool = True) -> Profile:
    """Convert the profile of a step of one pass into that of a step of several passes.

    A step waits for the loader once. From the second pass on autograd adds each gradient to the sum of
    earlier passes; an addition costs as much as copying the gradient to a bucket. Unless `casts_once`, every
    pass casts its weights.

    >>> in_passes(profile, graph, 4).host_s == 4 * profile.host_s
    """
    if passes == 1:
        return profile

    def each(cost: Cost) -> Cost:
        forward = passes * cost.forward_s + (passes - 1) * cost.backward_s
        return Cost(forward, cost.backward_s, cost.spread_s)

    def once(cost: Cost) -> Cost:
        return Cost(cost.forward_s + (passes - 1) * cost.backward_s, cost.backward_s, cost.spread_s)

    weights = {value.name: value for value in graph.inputs if value.kind == "parameter"}
    weights = weights if casts_once else {}
    casts = {key: once(cost) if key[0] in weights else each(cost) for key, cost in profile.casts.items()}
    for (source, target), (base, slope) in profile.cast_fit.items():
        for name, value in weights.items():
            if value.dtype == source and (name, source, target) not in casts:
                casts[name, source, target] = once(fitted_cost(base, slope, value.num_elements))
    added_s = (passes - 1) * sum(gradient_bytes(graph).values()) * profile.bucket_s_per_byte
    outside = profile.outside
    return replace(
        profile,
        ops={op: {mode: each(cost) for mode, cost in modes.items()} for op, modes in profile.ops.items()},
        casts=casts,
        cast_fit={key: (each(base), each(slope)) for key, (base, slope) in profile.cast_fit.items()},
        switch_s={mode: each(cost) for mode, cost in profile.switch_s.items()},
        host_s=passes * profile.host_s,
        outside=Cost(passes * outside.forward_s + added_s, passes * outside.backward_s, outside.spread_s),
    )


def with_other_passes(graph: OpGraph, passes: int) -> OpGraph:
    """Add the tensors that other passes keep in memory to a pass's graph, as further inputs.

    These tensors are the batches of other passes, and the gradients of earlier passes, which DDP copies to
    its buckets in the last pass.
    """
    if passes == 1:
        return graph
    rest = tuple(
        Input(f"{value.name} of other passes", "batch", value.dtype, (passes - 1, *value.shape))
        for value in graph.inputs
        if value.kind == "batch" and value.shape
    )
    trained = [value for value in graph.parameters if value.requires_grad]
    gradients = tuple(  # kind "buffer": counted once, however often the model is called
        Input(f"gradients of other passes, {dtype}", "buffer", dtype, (size,))
        for dtype in dict.fromkeys(value.dtype for value in trained)
        if (size := sum(value.num_elements for value in trained if value.dtype == dtype))
    )
    return replace(graph, inputs=(*graph.inputs, *rest, *gradients))
