"""Lowering as `cast_rules` reads: a whole graph, operator by operator, without tables and without changes."""

from __future__ import annotations

from collections.abc import Collection, Mapping

from qsync.lowering import cast_rules as rule
from qsync.lowering.lowered_graph import Cast, LoweredGraph, Run
from qsync.lowering.wiring import Wiring
from qsync.operators.declaration import Role
from qsync.operators.precision import Precision
from qsync.operators.registry import REPLACED
from qsync.records.graph import OpGraph


def reference_lowering(
    graph: OpGraph,
    assignment: Mapping[str, Precision],
    carried_16bit: str | None = "bf16",
    saving_less: Collection[str] = (),
) -> LoweredGraph:
    """What `lower` must return, by asking the rules about every operator and value in turn."""
    wiring, ops = Wiring(graph), graph.ops
    precision = [assignment.get(op.name, Precision.FP32) for op in ops]
    carried, modes = list(wiring.traced), ["fp32"] * len(ops)
    wanted, order = [False] * wiring.num_values, [False] * wiring.num_values

    def taken(i: int, j: int) -> str | None:
        return rule.taken_type(ops[i], j, wiring.traced[wiring.operands[i][j]], precision[i], modes[i])

    def wants(i: int, value: int) -> bool:
        if ops[i].role is not Role.ADJUSTABLE:
            return wiring.passes_16bit_on[i] and wanted[wiring.offset + i]
        return all(rule.takes_16bit(taken(i, j)) for j, v in enumerate(wiring.operands[i]) if v == value)

    def computes(i: int | None) -> bool:
        follower = None if i is None else wiring.epilogue[i]
        less = follower is not None and ops[follower].name in saving_less
        return follower is not None and rule.computes_follower(ops[i], precision[i], less)

    def casts(value: int) -> list[Cast]:
        entry = wiring.entries[value]
        read = [
            taken(i, j)
            for i in wiring.consumers[value]
            for j, operand in enumerate(wiring.operands[i])
            if operand == value
        ]
        source, is_parameter = carried[value], entry.kind == "parameter"
        return [
            Cast(entry.name, source, target, entry.num_elements, is_parameter, order[value])
            for target in rule.needed_casts(read, source)
        ]

    def is_saved(value: int) -> bool:
        readers = wiring.storage_readers(value)
        return any(rule.saves_operand(ops[i], j) and taken(i, j) == carried[at] for i, j, at in readers)

    for value in reversed(range(wiring.num_values)):
        readers = wiring.consumers[value]
        wanted[value] = bool(readers) and all(wants(i, value) for i in readers)
    for i, op in enumerate(ops):
        result, operands = wiring.offset + i, wiring.operands[i]
        modes[i] = rule.mode_of(op, precision[i], [carried[value] for value in wiring.floats[i]])
        carried[result] = rule.output_of(op, precision[i], modes[i], carried_16bit, wanted[result])
        order[result] = rule.makes_channels_last(op, precision[i], bool(operands) and order[operands[0]])
    nothing = set(precision) <= {Precision.FP32}
    nodes: list[Cast | Run] = []
    for i, op in enumerate(ops):
        result, operands = wiring.offset + i, wiring.operands[i]
        form = rule.run_form_of(
            op, ops[wiring.epilogue[i]].kind if computes(i) else None, computes(wiring.product[i]),
            op.name in saving_less, lambda at=result: is_saved(at),
        )  # fmt: skip
        read = tuple(carried[v] if (t := taken(i, j)) is None else t for j, v in enumerate(operands))
        before, after = (
            other is not None and precision[other] is not precision[i]
            for other in (wiring.before[i], wiring.after[i])
        )
        run = Run(
            op.name, modes[i], read, carried[result], form, any(order[v] for v in operands), before, after,
            nothing and op.kind in REPLACED,
        )  # fmt: skip
        anchored = [cast for value in wiring.anchored[i] for cast in casts(value)]
        nodes += [*anchored, run, *casts(result)]
    return LoweredGraph(graph, tuple(nodes))
