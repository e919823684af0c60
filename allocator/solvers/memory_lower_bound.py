"""A lower bound of memory: the bytes saved at the start of backward, as sums over choices.

The functions of the memory model give the tensors that each operator saves, and their types, for every
alternative of running it. A storage saved by several operators counts once. Workspaces and gradients are left
out, so the sum is a lower bound of an assignment's memory. A row of the exact solver that keeps the sum
within the budget therefore excludes no assignment that fits.
"""

from __future__ import annotations

from qsync.allocator.solvers.device_class_model import ClassModel
from qsync.allocator.solvers.milp_expressions import Sum
from qsync.operators.precision import keeps_weight_casts
from qsync.predictor.memory.layout import layout
from qsync.predictor.memory.lifetimes import storage_bytes
from qsync.predictor.memory.saved_tensors import made_for_backward, saved_by_op
from qsync.records.graph import OpGraph


def saved_bytes(linear: ClassModel, graph: OpGraph, device: str) -> Sum:
    """Return a lower bound of the bytes in use only between forward and backward, as a linear sum.

    Bytes in use throughout are excluded. The sum is 0 with recomputed blocks: no saved tensor is certain.

    >>> saved_bytes(linear, graph, "cpu").at(point)
    """
    found = Sum()
    if graph.recomputed:
        return found
    known = layout(graph)
    # By storage (value, type): its bytes; and by operator the variable that is 1 if the operator saves it.
    size: dict[tuple[str, str], int] = {}
    savers: dict[tuple[str, str], dict[int, Sum]] = {}

    def storage(value: str, type_name: str) -> tuple[str, str] | None:
        """Record and return the storage of a value in a type; None if it is in use throughout the step."""
        root, num_bytes = known.root[value], storage_bytes(type_name, known.shape[value])
        is_kept = value in known.parameters and keeps_weight_casts(device)
        if root not in known.position and (is_kept or type_name == known.dtype[value]):
            return None  # a graph input; kept casts of parameters are counted below
        key = (root, type_name)
        size[key] = min(num_bytes, size.get(key, num_bytes))
        return key

    for i, op in enumerate(graph.ops):
        for alternative in linear.alternatives[i] if op.requires_grad else ():
            form, mode = alternative.form, alternative.mode
            for num_bytes in made_for_backward(op, known, form, mode, device):
                found.add(alternative.binary, graph.num_calls * num_bytes)
            saved = saved_by_op(op, known, form, mode, device)
            values = [(op.inputs[j], alternative.taken[j]) for j in saved.inputs]
            values += [(op.name, alternative.output)] if saved.output else []
            for key in dict.fromkeys(storage(value, taken) for value, taken in values if taken is not None):
                if key is not None:
                    savers.setdefault(key, {}).setdefault(i, Sum()).add(alternative.binary)
    for key, by in savers.items():
        found.add(linear.program.at_least_any(list(by.values())), graph.num_calls * size[key])
    for number, value in enumerate(graph.inputs if keeps_weight_casts(device) else ()):
        if value.kind != "parameter":
            continue
        for taken, binaries in linear.takers(number).items():
            if taken != value.dtype:  # cast once per optimizer step, and kept until its end
                copies = graph.num_calls * storage_bytes(taken, value.shape)
                found.add(linear.program.at_least_any(binaries), copies)
    return found
