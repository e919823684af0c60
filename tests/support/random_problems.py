"""Random allocation problems: graphs, costs, sensitivities, clusters, budgets and targets. All made up.

A problem is a function of (seed, number) and of nothing else, so one that breaks something can be made again.
Lower precisions are usually faster and add more variance, but not always; casts cost from nothing to more
than they save; operators share values and weights.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

from qsync import Cluster, DeviceClass, Link, OpGraph, Precision, Profile, Sensitivity
from qsync.allocator.constraints import Constraints
from qsync.allocator.problem import make_problem
from qsync.allocator.search_state import State
from qsync.experiments.workloads.large_models import made_up_sensitivity
from qsync.lowering.lowered_graph import FUSED
from qsync.operators.declaration import Role
from qsync.operators.precision import CARRIED_FLOATS
from qsync.operators.registry import EPILOGUES, PRECISIONS_BY_KIND
from qsync.records.graph import Input, Op, num_elements
from qsync.records.profiles import Cost

NAMES = ("first", "second", "third", "fourth")
CPU = (Precision.FP32, Precision.BF16, Precision.INT8)
GPU = (*CPU, Precision.TF32, Precision.FP16, Precision.FP8)
# Usual speed against FP32, and variance against BF16.
_SPEED = {"fp32": 1.0, "tf32": 0.7, "bf16": 0.5, "fp16": 0.5, "fp8": 0.3, "int8": 0.3}
_LAYOUTS = ("row", "col", "inner", "image", "channel")


@dataclass(frozen=True, slots=True)
class Drawn:
    """One problem: what `allocate` is given. `options` are its keywords, but for the solver."""

    graph: OpGraph
    profiles: dict[str, Profile]
    sensitivity: Sensitivity
    cluster: Cluster
    options: dict[str, Any]

    def state(self) -> State:
        """Return the problem with nothing lowered."""
        names = ("budgets", "pins", "bucket_cap_bytes")
        kept = Constraints(**{name: self.options[name] for name in names if name in self.options})
        return State(make_problem(self.graph, self.profiles, self.sensitivity, self.cluster, kept))


def problem(seed: int, number: int) -> Drawn:
    """Make the problem of this number."""
    draw = random.Random(f"{seed} {number}")
    graph = _graph(draw, draw.randint(2, 6) if draw.random() < 0.7 else draw.randint(7, 24))
    count = draw.choice((1, 2, 2, 2, 3, 3, 4))
    classes, profiles = [], {}
    for name in NAMES[:count]:
        device = draw.choice(("cpu", "cuda"))
        among = CPU if device == "cpu" else GPU
        extra = [p for p in among if p is not Precision.FP32 and draw.random() < 0.8]
        precisions = (Precision.FP32, *extra)
        classes.append(DeviceClass(name, device, draw.choice((1, 1, 2, 7)), 1 << 50, precisions))
        profiles[name] = _profile(draw, graph, name, precisions)
    rate = draw.choice((0.3, 0.7, 1.0))
    link = Link(10 ** draw.uniform(-7, -5), 10 ** draw.uniform(8, 10.5), rate)
    options: dict[str, Any] = {"slack": draw.choice((0.0, 0.01, 0.05, 0.2, 0.6))}
    if draw.random() < 0.2:
        options["margin"] = 0.03
    if draw.random() < 0.2:
        options["lower_all"] = True
    if draw.random() < 0.3:
        options["bucket_cap_bytes"] = draw.choice((64, 4096, 1 << 20))
    if draw.random() < 0.15 and graph.adjustable:
        options["pins"] = {draw.choice(graph.adjustable).name: "fp32"}
    chance = random.Random(f"launches {seed} {number}")
    for one in classes:
        if one.device == "cuda" and chance.random() < 0.5:
            profiles[one.name] = _launched(chance, profiles[one.name])
    sensitivity = made_up_sensitivity(draw, graph, 0.5)
    drawn = Drawn(graph, profiles, sensitivity, Cluster(tuple(classes), link), options)
    return _bounded(drawn, random.Random(f"budgets {seed} {number}"))


def _launched(draw: random.Random, profile: Profile) -> Profile:
    """Return a profile whose kernels the host launches, in times of their own."""
    slow = 10 ** draw.uniform(-1, 0.7)

    def drawn(cost: Cost) -> Cost:
        return Cost(*(2 * slow * draw.random() * s for s in (cost.forward_s, cost.backward_s)))

    launches = replace(
        profile,
        ops={op: {mode: drawn(cost) for mode, cost in modes.items()} for op, modes in profile.ops.items()},
        casts={key: drawn(cost) for key, cost in profile.casts.items()},
        outside=drawn(profile.outside), optimizer_s=2 * slow * draw.random() * profile.optimizer_s,
        loading_s=0.0, bucket_s_per_byte=0.0,
    )  # fmt: skip
    return replace(profile, launches=launches)


def _bounded(drawn: Drawn, draw: random.Random) -> Drawn:
    """Add budgets, or a target, to the problem in half of all cases: some that cannot be kept."""
    state, options = drawn.state(), dict(drawn.options)
    step_s, peaks = state.step_s(), {name: one.peak_bytes for name, one in state.classes.items()}
    for name, one in state.classes.items():
        state.move(name, {op: choices[0] for op, choices in one.part.choices.items()})
    if draw.random() < 0.5:
        options["budgets"] = {}
        for name, one in state.classes.items():
            low, high = sorted((one.peak_bytes, peaks[name]))
            if draw.random() < 0.7:
                options["budgets"][name] = max(1, int(low + draw.uniform(-0.2, 1.2) * (high - low)))
    if draw.random() < 0.4:
        options.pop("slack")
        options["target_s"] = state.step_s() + draw.uniform(-0.2, 1.0) * (step_s - state.step_s())
    return replace(drawn, options=options)


def _graph(draw: random.Random, num_products: int) -> OpGraph:
    """Products with followers between them: values are read again, weights shared, some results exposed."""
    side = draw.choice((4, 8, 16))
    images = draw.random() < 0.25
    shape = (2, side, side, side) if images else (2, side, side)
    inputs = [Input("x", "batch", "fp32", shape)]
    weight = (side, side, 3, 3) if images else (side, side)
    ops: list[Op] = []
    values = ["x"]

    def add(name: str, kind: str, role: Role, taken: Sequence[str], flops: int = 0, **more: Any) -> None:
        kept, exposed = more.get("kept", ()), draw.random() < 0.05
        ops.append(Op(name, kind, role, tuple(taken), kept, "fp32", shape, flops, exposed=exposed))
        values.append(name)

    products = 0
    while products < num_products:
        at, recent = f"op{len(ops)}", values[-3:]
        kind = draw.choices(
            ("product", "matmul", "act", "add", "norm", "fixed"), (5, 0 if images else 1, 2, 2, 1, 0.3)
        )[0]
        x = draw.choice(recent)
        if kind == "product":
            used = f"w{draw.randint(0, products)}" if draw.random() < 0.1 else f"w{products}"
            if all(value.name != used for value in inputs):
                inputs.append(Input(used, "parameter", "fp32", weight, requires_grad=True))
            flops = 2 * num_elements(shape) * side * (9 if images else 1) * draw.choice((1, 1, 4))
            add(at, "conv2d" if images else "linear", Role.ADJUSTABLE, (x, used), flops)
            products += 1
        elif kind == "matmul":
            add(at, "matmul", Role.ADJUSTABLE, (x, draw.choice(recent)), 2 * num_elements(shape) * side)
            products += 1
        elif kind == "act":
            add(at, draw.choice(("gelu", "relu")), Role.FOLLOWING, (values[-1],))
        elif kind == "add":
            add(at, "add", Role.FOLLOWING, (x, draw.choice(values)))
        elif kind == "norm":
            scale = Input(f"{at}.weight", "parameter", "fp32", (side,), requires_grad=True)
            inputs.append(scale)
            add(at, "layer_norm", Role.FOLLOWING, (x,), kept=(scale.name,))
        else:
            add(at, "cumsum", Role.FIXED, (x,))
    ops.append(Op("loss", "loss", Role.FIXED, (values[-1],), (), "fp32", ()))
    return OpGraph("drawn", tuple(inputs), tuple(ops))


def _profile(draw: random.Random, graph: OpGraph, name: str, precisions: Sequence[Precision]) -> Profile:
    """Seconds by FLOPs and elements, each operator and precision with a factor of its own."""
    slow, moves = 10 ** draw.uniform(0, 0.6), 10 ** draw.uniform(-11, -9)
    ops: dict[str, dict[str, Cost]] = {}
    for op in graph.ops:
        if op.role is Role.ADJUSTABLE:
            base = slow * max(op.flops, 1) * 1e-10 * draw.uniform(0.5, 2)
            modes = [p for p in PRECISIONS_BY_KIND[op.kind] if p in precisions]
            times = {str(p): base * _SPEED[p] * (1 if p == "fp32" else draw.uniform(0.7, 1.6)) for p in modes}
            times |= {
                f"int8 {kind}": times["int8"] + slow * op.num_elements * moves
                for kind in EPILOGUES
                if "int8" in times
            }
        else:
            times = {
                mode: slow * max(op.num_elements, 1) * moves * (0.6 if mode == "bf16" else 1.0)
                for mode in dict.fromkeys((op.dtype, *CARRIED_FLOATS))
            }
            if op.kind in EPILOGUES:
                times |= dict.fromkeys((f"{mode} {FUSED}" for mode in CARRIED_FLOATS), 0.0)
        ops[op.name] = {mode: Cost(t, draw.uniform(1, 2) * t) for mode, t in times.items()}
    sources = ("fp64", "fp32", "bf16", "fp16")
    targets = (*sources, *(f"{t}_{layout}" for t in ("int8", "fp8") for layout in _LAYOUTS))
    cast = slow * moves * draw.choice((0.0, 0.3, 1.0, 4.0))
    fit = {
        (s, t): (Cost(1e-9), Cost(cast, cast if "_" not in t else 0.0))
        for s in sources for t in targets if s != t
    }  # fmt: skip
    return Profile(
        name, graph.hash, graph.shapes_hash, ops, {}, fit, Cost(1e-7, 1e-7), host_s=slow * 1e-6,
        optimizer_s=slow * draw.choice((1e-8, 1e-6)), optimizer_bytes=1000, step_s={}, machine={},
        bucket_s_per_byte=draw.choice((0.0, 1e-11)), reduce_s_per_call=1e-8,
        reduce_s_per_byte=draw.choice((0.0, 1e-10)),
    )  # fmt: skip
