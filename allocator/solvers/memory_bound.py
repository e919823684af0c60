"""What waits for backward when backward begins, as sums over choices: no step needs less memory (ours).

What an operator keeps, and in which type, is asked of the memory model's functions, way by way of running it;
one storage that several keep counts once. What lives for a moment only, and gradients, are left out, so that
the sum is a bound: it is on how much memory an assignment needs at the least, where the exact solver needs a
row that cuts off no assignment that fits.
"""

from __future__ import annotations

from qsync.allocator.solvers.class_model import LinearClass
from qsync.allocator.solvers.milp_expressions import Sum
from qsync.predictor.memory.lifetimes import layout, storage_bytes
from qsync.predictor.memory.saved_tensors import made_for_backward, saved_by_op
from qsync.records.graph import OpGraph


def kept_bytes(linear: LinearClass, graph: OpGraph, device: str) -> Sum:
    """Bytes that are certainly in use between forward and backward, beside what is there throughout.

    Nothing is known to be kept where blocks are computed once more in backward.

    >>> kept_bytes(linear, graph, "cpu").at(point)
    """
    found = Sum()
    if graph.recomputed:
        return found
    known = layout(graph)
    # By storage (the value it belongs to, its type): its bytes, and by operator the bit that it keeps it.
    size: dict[tuple[str, str], int] = {}
    keepers: dict[tuple[str, str], dict[int, Sum]] = {}

    def storage(value: str, type_name: str) -> tuple[str, str] | None:
        """What keeps a value in this type, noted with its bytes; None for what is there throughout."""
        root, num_bytes = known.root[value], storage_bytes(type_name, known.shape[value])
        if root not in known.position and (value in known.parameters or type_name == known.dtype[value]):
            return None  # it enters the graph; casts of parameters are counted below
        key = (root, type_name)
        size[key] = min(num_bytes, size.get(key, num_bytes))
        return key

    for i, op in enumerate(graph.ops):
        for way in linear.ways[i] if op.requires_grad else ():
            for num_bytes in made_for_backward(op, way.mode, known.shape, known.dtype, device, way.form):
                found.add(way.bit, num_bytes)
            kept = saved_by_op(op, known.has_gradient, known.dtype, way.form, way.mode, device)
            values = [(op.inputs[j], way.taken[j]) for j in kept.inputs]
            values += [(op.name, way.output)] if kept.output else []
            for key in dict.fromkeys(storage(value, taken) for value, taken in values if taken is not None):
                if key is not None:
                    keepers.setdefault(key, {}).setdefault(i, Sum()).add(way.bit)
    for key, by in keepers.items():
        found.add(linear.program.at_least_any(list(by.values())), size[key])
    for number, value in enumerate(graph.inputs):
        if value.kind != "parameter":
            continue
        for taken, bits in linear.takers(number).items():
            if taken != value.dtype:  # rounded once per optimizer step, and kept until its end
                found.add(linear.program.at_least_any(bits), storage_bytes(taken, value.shape))
    return found
