"""Made-up costs that follow a known law."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
from graphs import profile_of

from qsync.predictor.cost_model.model import costs_of
from qsync.predictor.cost_model.op_calls import Call, calls_by_name, parts, value_call
from qsync.records.datasheets import DataSheet
from qsync.records.graph import OpGraph
from qsync.records.profiles import Cost, Profile

HERE = DataSheet(
    "here", {"fp32": 1e11, "bf16": 2e11, "int8": 4e11}, 1e10, 2**33, 2**25, 5e-6, None, "made up"
)


def truth(call: Call, mode: str, direction: str, sheet: DataSheet) -> float:
    """Half of the peak, 0.7 of the bandwidth, four launches; narrow results waste up to half of that."""
    launch, products, memory = parts(call, mode, direction, sheet)
    waste = 1 + 1 / (1 + (call.output or (1,))[-1] / 32)
    return (4 * launch + 2 * products + memory / 0.7) * waste


def lawful(graph: OpGraph, name: str = "infer") -> Profile:
    """A profile whose every cost is the truth."""
    profile, known, values = profile_of(graph, name), calls_by_name(graph), value_call(graph)

    class Truth:
        def seconds(self, asked):  # type: ignore[no-untyped-def]
            return np.array([truth(*each) for each in asked])

    def cost(call: Call, mode: str) -> Cost:
        return costs_of(Truth(), [(call, mode)], HERE)[0]

    ops = {op: {m: cost(known[op], m.partition(" ")[0]) for m in modes} for op, modes in profile.ops.items()}
    casts = {(v, a, b): cost(values[v], f"{a.partition(' ')[0]} {b}") for v, a, b in profile.casts}
    return replace(profile, ops=ops, casts=casts)
