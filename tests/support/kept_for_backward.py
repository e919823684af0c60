"""What autograd keeps for backward, counted by torch, and the copies of weights beside it."""

from __future__ import annotations

from qsync.experiments.harness.measured_memory import saved_bytes
from qsync.lowering.lowered_graph import Cast
from qsync.operators.precision import is_encoded, type_bytes


def saved_by_torch(model, batch) -> int:
    """Bytes that autograd keeps for backward; parameters, buffers and the batch left out."""
    return saved_bytes(lambda: model(batch), [batch, *model.parameters(), *model.buffers()])


def bytes_of_copies(lowered) -> int:
    """Bytes of the casts of weights that are kept for backward, with the scales of INT8."""
    return sum(
        type_bytes(cast.target, cast.num_elements) + 4 * rows * cast.target.startswith("int8")
        for cast, rows in _casts_of_weights(lowered)
    )


def _casts_of_weights(lowered):
    """Those that are kept, with the number of their scales: not biases, and no weight of a layer whose input
    has no gradient, but for torch's convolutions."""
    shapes = {value.name: value.shape for value in lowered.graph.parameters}
    grads = {value.name: value.requires_grad for value in (*lowered.graph.inputs, *lowered.graph.ops)}
    for cast in (node for node in lowered.nodes if isinstance(node, Cast) and node.of_parameter):
        users = [op for op in lowered.graph.ops if cast.value in op.inputs and op.kind != "attention"]
        by_torch = [op for op in users if op.kind.startswith("conv") and not is_encoded(cast.target)]
        if len(shapes[cast.value]) > 1 and (by_torch or any(grads[op.inputs[0]] for op in users)):
            yield cast, shapes[cast.value][any(op.kind == "addmm" for op in users)]  # an output has a scale
