"""In which order images lie in memory, channels first or last, and their gradients: what differs is copied.

On CPUs, by the kernels that make them (`qsync.backend.convolution`, torch's own).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from qsync.graph import OpGraph
from qsync.lowering import Run
from qsync.precision import Precision

# Kinds whose gradient lies as their input does; those of others lie as the gradient of their result.
_AS_INPUT = ("relu", "batch_norm", "group_norm", "max_pool2d", "avg_pool2d", "adaptive_avg_pool2d")


@dataclass(frozen=True, slots=True)
class Orders:
    """By operator, whether channels are last: of its result, its first input, and its result's gradient."""

    result: tuple[bool, ...]
    taken: tuple[bool, ...]
    gradient: tuple[bool, ...]


def orders(graph: OpGraph, runs: Sequence[Run]) -> Orders:
    """The orders under these runs; "last" is said of images only.

    A convolution in BF16 or INT8 makes images with channels last, one in FP32 leaves them as they come, and
    what follows keeps to its first operand. With one channel the two orders are the same, and torch says
    "first".
    """
    if not any(op.kind == "conv2d" for op in graph.ops):
        nothing = (False,) * len(graph.ops)
        return Orders(nothing, nothing, nothing)
    shape = {value.name: value.shape for value in graph.inputs} | {op.name: op.shape for op in graph.ops}
    last: dict[str, bool] = {}
    taken = []
    for op, run in zip(graph.ops, runs, strict=True):
        first = bool(op.inputs) and last.get(op.inputs[0], False)
        taken.append(first)
        image = len(op.shape) == 4 and op.kind != "view"
        if op.kind == "conv2d":
            ambiguous = shape[op.inputs[1]][1] == 1 and run.mode != Precision.INT8
            first = (first or run.mode in (Precision.BF16, Precision.INT8)) and not ambiguous
        last[op.name] = image and first
    comes: dict[str, bool] = {}  # by value: the order of its gradient, as the last of its readers brings it
    gradient = []
    for op, run, first in zip(reversed(graph.ops), reversed(runs), reversed(taken), strict=True):
        own = comes.get(op.name, False)
        gradient.append(own)
        if op.kind == "conv2d":
            own = first or run.mode in (Precision.BF16, Precision.INT8)
        elif op.kind in _AS_INPUT:
            own = first
        for value in op.inputs:
            if len(shape[value]) == 4:
                comes.setdefault(value, own and op.kind != "view")
    return Orders(tuple(last[op.name] for op in graph.ops), tuple(taken), tuple(reversed(gradient)))
