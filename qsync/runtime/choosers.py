"""Functions that choose each operator's precision in a graph, and the operators that save less."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping

from qsync import backend
from qsync.operators.precision import Precision
from qsync.operators.registry import PRECISIONS_BY_KIND
from qsync.records.base import base_of, base_on, bases_of, why_kept
from qsync.records.graph import Op, OpGraph
from qsync.records.kernel_support import precisions_up, supported_up, unsupported_by_shape
from qsync.records.levers import is_in_module
from qsync.records.save_less import ops_that_save_less
from qsync.runtime.coverage import listed, warn_once
from qsync.runtime.rewriting import needs_kernel

# Graph (of one segment) -> precision of each adjustable operator.
Chooser = Callable[[OpGraph], Mapping[str, Precision]]
# Graph -> operators that save less for backward.
SavingChooser = Callable[[OpGraph], Collection[str]]


def at_base(base: Precision, kernels: backend.Kernels) -> Chooser:
    """Choose the base for operators that torch.autocast lowers, FP32 elsewhere."""
    own = base_on(base, bases_of(kernels.device.type, kernels.precisions()))

    def choose(graph: OpGraph) -> dict[str, Precision]:
        chosen = {op.name: base_of(op, own) for op in graph.adjustable}
        missing = {precision: unsupported(graph, precision, kernels) for precision in set(chosen.values())}
        return {op: precision for op, precision in chosen.items() if op not in missing[precision]}

    return choose


def uniform(precision: Precision, kernels: backend.Kernels | None = None) -> Chooser:
    """Choose one precision wherever the operator's kind supports it, FP32 elsewhere.

    With the device's `kernels`, an operator without a kernel for it runs in the next higher precision, and so
    does one that computes a weight. A missing kernel gives a warning, once per reason.
    """

    def choose(graph: OpGraph) -> dict[str, Precision]:
        if kernels is None:
            able = (op for op in graph.adjustable if precision in PRECISIONS_BY_KIND[op.kind])
            return {op.name: precision for op in able if not why_kept(op, precision)}
        wanted = dict.fromkeys((op.name for op in graph.adjustable), precision)
        chosen = {op: up[0] for op, up in candidates(graph, wanted, kernels).items()}
        moved: dict[tuple[str, Precision, str], list[str]] = {}
        missing = unsupported(graph, precision, kernels)
        for op in graph.adjustable:
            if op.name in missing:
                moved.setdefault((op.kind, chosen[op.name], missing[op.name]), []).append(op.name)
        for (kind, instead, reason), names in moved.items():
            warn_once(f"{graph.model}: {kind} in {precision}: {reason}; {listed(names)} in {instead}")
        return chosen

    return choose


def candidates(
    graph: OpGraph, wanted: Mapping[str, Precision], kernels: backend.Kernels
) -> dict[str, list[Precision]]:
    """Return each operator's precisions with a kernel on this device, from the wanted one up.

    An operator of a model loaded in BF16 goes no higher than that if it has a kernel.
    """
    half = kernels.sixteen_bit
    up = dict.fromkeys(p for own in set(wanted.values()) for p in precisions_up(own, half))
    missing = {precision: unsupported(graph, precision, kernels) | kept(graph, precision) for precision in up}

    def supported(op: Op) -> list[Precision]:
        excluded = [p for p in up if op.name in missing[p]]
        found = supported_up(op.kind, wanted[op.name], excluded, half)
        if op.dtype != "bf16" or found == [Precision.FP32]:
            return found
        return [p for p in found if p != Precision.FP32]

    return {op.name: supported(op) for op in graph.adjustable if op.name in wanted}


def kept(graph: OpGraph, precision: Precision) -> dict[str, str]:
    """Return operator -> why it keeps its precision unless pinned."""
    return {op.name: why for op in graph.adjustable if (why := why_kept(op, precision))}


def unsupported(graph: OpGraph, precision: Precision, kernels: backend.Kernels) -> dict[str, str]:
    """Return operator -> why this device lacks a kernel for it, in a precision that its kind has.

    The reason is its shape (see qsync.records.kernel_support), or a kernel that is missing or wrong on this
    device.
    """
    by_shape = unsupported_by_shape(graph, kernels.device.type)
    found = {}
    for op in graph.adjustable:
        if precision is Precision.FP32 or precision not in PRECISIONS_BY_KIND[op.kind]:
            continue
        reason = by_shape.get(op.name, {}).get(precision)
        if reason is None and needs_kernel(op, precision, kernels):
            reason = kernels.why_unsupported(op.kind, precision)
        if reason is not None:
            found[op.name] = reason
    return found


def following(assignment: Mapping[str, Precision]) -> Chooser:
    """Choose a plan's precisions.

    Operators that the plan does not name run in FP32; they occur in other graphs (evaluation).
    """
    return lambda graph: {op.name: assignment[op.name] for op in graph.adjustable if op.name in assignment}


def saving(patterns: Iterable[str], recomputed: Iterable[str] = ()) -> SavingChooser:
    """Choose the operators that save less: those that match a pattern and can.

    Operators inside `recomputed` modules (paths) are left out.
    """
    wanted, paths = tuple(patterns), tuple(recomputed)
    return lambda graph: tuple(
        name
        for name in ops_that_save_less(graph, wanted)
        if not any(is_in_module(name, path) for path in paths)
    )
