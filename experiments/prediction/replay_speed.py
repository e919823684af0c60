"""How long replay itself takes: `python -m qsync.experiments.prediction.replay_speed [OUT.json]`.

Times are measured; the profiles are SYNTHETIC (`limits.synthetic_profile`), since only their size matters
here. The graph is that of a model of Llama-3-70B's sizes, captured on the meta device, or without
transformers a stack of blocks of about as many operators.

A replay is whole: casts, prices, step, waits, interval, and the memory peak of every class; events and the
list of nodes are written out only when somebody looks. What is remembered between calls follows from the
graph, or from a profile and the graph: numbered neighbourhoods with what the rule, the profile and the memory
model say of each, and buckets. Of a plan nothing is remembered, and every plan timed here is a new one.
"""

from __future__ import annotations

import importlib.util
import os
import random
import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import typer
from rich import box
from rich.console import Console
from rich.table import Table

import qsync
from qsync.backend.device_detection import machine
from qsync.experiments.demo.rank import commit
from qsync.experiments.prediction.limits import PRECISIONS, synthetic_profile
from qsync.lowering.rules import Lowering
from qsync.records.cluster import Cluster, DeviceClass, Link
from qsync.records.graph import Input, Op, OpGraph, Role, num_elements
from qsync.records.json_files import write_json
from qsync.records.plans import ClassPlan, Plan
from qsync.records.precision import PRECISIONS_BY_KIND, Precision
from qsync.records.profiles import Profile
from qsync.replayer import ClassCosts, replay

LAYERS = 80
NAMES = ("first", "second", "third", "fourth")
GROWTH = (1, 2, 4)
RANKS = (10, 10_000)

Seconds = tuple[float, float]


def main(out: Path = Path("replay_speed.json"), layers: int = LAYERS, plans: int = 20, seed: int = 0) -> None:
    """Time replay, print a table, and write the figures to a JSON file."""
    rows = measure(layers, plans, seed)
    content = {
        "measured": True,
        "profiles": "synthetic",
        "machine": machine(),
        "qsync": qsync.__version__,
        "commit": commit(),
        "seed": seed,
        "load": os.getloadavg()[0],
        "rows": rows,
    }
    write_json(out, content)
    Console().print(_table(rows))


def measure(layers: int, num_plans: int, seed: int) -> list[dict[str, Any]]:
    """Every figure: full replays, as the graph grows and as ranks grow, and one operator's change."""
    rows = []
    for times in GROWTH:
        graph = large_graph(max(1, layers * times // GROWTH[-1]))
        profiles = {
            name: replace(synthetic_profile(graph, name, 1.0 + 0.3 * k), error=0.02, drift=0.01)
            for k, name in enumerate(NAMES)
        }
        plans = [random_plan(graph, seed + k) for k in range(num_plans + 1)]
        first, *later = replays(graph, plans, profiles, cluster_of(RANKS[0]))
        size = f"{len(graph.ops)} operators, {len(NAMES)} classes of {RANKS[0]} ranks"
        rows.append(_row("full replay, first call", [first], None, size))
        rows.append(_row("full replay, later calls, new plans", later, 50e-3, size))
    more = [random_plan(graph, seed + num_plans + 1 + k) for k in range(num_plans)]
    later = replays(graph, more, profiles, cluster_of(RANKS[1]))
    size = f"{len(graph.ops)} operators, {len(NAMES)} classes of {RANKS[1]} ranks"
    rows.append(_row("full replay, later calls, new plans", later, 50e-3, size))
    changes = incremental(graph, profiles[NAMES[0]], plans[0][NAMES[0]].assignment, seed)
    rows.append(_row("one operator changed: lowered and priced again", changes, 0.2e-3, size))
    return rows


def replays(
    graph: OpGraph, plans: Sequence[Plan], profiles: Mapping[str, Profile], cluster: Cluster
) -> list[Seconds]:
    """Seconds that each of these plans takes to replay, in turn."""
    return [_seconds(lambda plan=plan: replay(graph, plan, profiles, cluster)) for plan in plans]  # type: ignore[misc]


def incremental(
    graph: OpGraph, profile: Profile, assignment: Mapping[str, Precision], seed: int, changes: int = 400
) -> list[Seconds]:
    """Seconds that each of some random changes of one operator takes to lower and to price again."""
    rng = random.Random(seed)
    lowering = Lowering(graph, assignment)
    costs = ClassCosts(lowering, profile)
    found = []
    for _ in range(changes):
        op = rng.choice(graph.adjustable)
        precision = rng.choice(_choices(op))
        found.append(_seconds(lambda op=op, p=precision: costs.update(lowering.assign(op.name, p).touched)))  # type: ignore[misc]
    return found


def random_plan(graph: OpGraph, seed: int) -> Plan:
    """A plan that gives every operator any of its precisions on every class."""
    rng = random.Random(seed)
    drawn = ({op.name: rng.choice(_choices(op)) for op in graph.adjustable} for _ in NAMES)
    classes = {name: ClassPlan(assignment) for name, assignment in zip(NAMES, drawn, strict=True)}
    return Plan(graph.model, graph.hash, classes)


def cluster_of(count: int) -> Cluster:
    """As many ranks of each class, between which the link was measured two at a time."""
    classes = tuple(DeviceClass(name, "cpu", count, 1 << 50, PRECISIONS) for name in NAMES)
    return Cluster(classes, Link(1e-4, 1e9, 0.6, 2))


def large_graph(num_layers: int) -> OpGraph:
    """The graph of Llama-3-70B with so many layers, or without transformers a stack of as many blocks."""
    return _llama(num_layers) if importlib.util.find_spec("transformers") else stack(num_layers)


def _llama(num_layers: int) -> OpGraph:
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM

    config = LlamaConfig(
        vocab_size=128256, hidden_size=8192, intermediate_size=28672, num_hidden_layers=num_layers,
        num_attention_heads=64, num_key_value_heads=8, max_position_embeddings=8192, rope_theta=500000.0,
        use_cache=False,
    )  # fmt: skip
    with torch.device("meta"):
        model = LlamaForCausalLM(config)
        tokens = torch.zeros(1, 2048, dtype=torch.int64)
    return qsync.capture(model, {"input_ids": tokens, "labels": tokens})


def stack(num_layers: int, width: int = 8192, rows: int = 2048) -> OpGraph:
    """Blocks of 61 operators, 8 of them products, with residuals around them: a Llama's in size only."""
    inputs = [Input("x", "batch", "fp32", (rows, width))]
    ops: list[Op] = []
    shape = (rows, width)

    def op(name: str, kind: str, role: Role, *taken: str) -> str:
        flops = 2 * num_elements(shape) * width if kind == "linear" else 0
        ops.append(Op(name, kind, role, taken, (), "fp32", shape, flops))
        return name

    def linear(name: str, x: str) -> str:
        inputs.append(Input(f"{name}.weight", "parameter", "fp32", (width, width), requires_grad=True))
        return op(name, "linear", Role.ADJUSTABLE, x, f"{name}.weight")

    x = "x"
    for layer in range(num_layers):
        for part in range(4):
            at = f"{layer}.{part}."
            y = op(at + "norm", "rms_norm", Role.FOLLOWING, x)
            left, right = linear(at + "left", y), linear(at + "right", y)
            for j in range(10):
                left = op(f"{at}view{j}", "view", Role.FOLLOWING, left)
            y = op(at + "mul", "mul", Role.FOLLOWING, left, right)
            x = op(at + "add", "add", Role.FOLLOWING, y, x)
        x = op(f"{layer}.silu", "silu", Role.FOLLOWING, x)
    op("loss", "loss", Role.FIXED, x)
    return OpGraph("stack", tuple(inputs), tuple(ops))


def _choices(op: Op) -> tuple[Precision, ...]:
    return tuple(p for p in PRECISIONS_BY_KIND[op.kind] if p in PRECISIONS)


def _seconds(work: Callable[[], Any]) -> Seconds:
    """By the clock, and of the processor: what others on the machine take is in the first alone."""
    start, processor = time.perf_counter(), time.process_time()
    work()
    return time.perf_counter() - start, time.process_time() - processor


def _row(name: str, seconds: list[Seconds], bar_s: float | None, size: str) -> dict[str, Any]:
    clock, processor = zip(*seconds, strict=True)
    return {
        "name": name, "median_s": statistics.median(clock), "worst_s": max(clock),
        "processor_s": statistics.median(processor), "bar_s": bar_s, "times": len(seconds), "size": size,
    }  # fmt: skip


def _table(rows: list[dict[str, Any]]) -> Table:
    table = Table(title="Replay (times measured; profiles SYNTHETIC)", box=box.SIMPLE_HEAD)
    for heading in ("what", "size", "times", "median", "worst", "processor", "bar"):
        table.add_column(heading, justify="left" if heading in ("what", "size") else "right")
    for row in rows:
        keys = ("median_s", "worst_s", "processor_s", "bar_s")
        shown = (f"{row[key] * 1e3:.3g} ms" if row[key] else "" for key in keys)
        table.add_row(row["name"], row["size"], str(row["times"]), *shown)
    return table


if __name__ == "__main__":
    typer.run(main)
