"""How long replay itself takes: `python -m qsync.experiments.prediction.replay_speed --out FOLDER`.

Times are measured; the profiles are SYNTHETIC (`large_models.synthetic_profile`), since only their size
matters here. The graph is that of a model of Llama-3-70B's sizes, captured on the meta device.

A replay is whole: casts, prices, step, waits, interval, and the memory peak of every class. Events and the
list of nodes are written out only on demand. Caches between calls depend on the graph, or on a profile and
the graph: numbered neighbourhoods with their lowering, cost and memory, and buckets. No cache depends on a
plan, and every plan timed here is a new one.
"""

from __future__ import annotations

import os
import random
import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from qsync import Cluster, DeviceClass, Link, OpGraph, Plan, Precision, Profile
from qsync.experiments.harness import Experiment, Fresh, Out, bar, milliseconds, run_command, table_of
from qsync.experiments.workloads.large_models import PRECISIONS, able, large_graph, synthetic_profile
from qsync.lowering.incremental import Lowering
from qsync.records.plans import ClassPlan
from qsync.replayer import ClassCosts, replay

CLASSES = ("first", "second", "third", "fourth")
GROWTH = (1, 2, 4)
RANKS = (10, 10_000)
# Limits in seconds.
REPLAY_LIMIT_S, CHANGE_LIMIT_S = 50e-3, 0.2e-3
_FIRST, _LATER = "full replay, first call", "full replay, later calls, new plans"
_CHANGE = "one operator changed: lowered and priced again"

Seconds = tuple[float, float]  # of the clock, of the processor


def main(
    out: Out = Path("replay_speed"), layers: int = 80, plans: int = 20, seed: int = 0, fresh: Fresh = False
) -> None:
    """Time replay, print a table, and write the figures to the folder."""
    settings = {"layers": layers, "plans": plans}
    experiment = Experiment("replay speed", out, seed=seed, settings=settings, fresh=fresh)
    with experiment.progress():
        rows = experiment.piece("times", lambda: measure(layers, plans, seed))
    keys = ("median_s", "worst_s", "processor_s", "bar_s")
    cells = [
        [row["name"], row["size"], str(row["times"]), *(milliseconds(row[k]) if row[k] else "" for k in keys)]
        for row in rows
    ]
    headings = ("what", "size", "times", "median", "worst", "processor", "bar")
    bars = [bar(f"{r['name']}; {r['size']}", r["median_s"], r["bar_s"]) for r in rows if r["bar_s"]]
    shown = table_of("Replay (times measured; profiles SYNTHETIC)", headings, cells, left=2)
    experiment.finish({"profiles": "synthetic", "rows": rows}, bars=bars, tables=[shown])


def measure(layers: int, num_plans: int, seed: int) -> list[dict[str, Any]]:
    """Return every figure: full replays, as the graph and the ranks grow, and one operator's change."""
    rows = []
    for times in GROWTH:
        graph = large_graph(max(1, layers * times // GROWTH[-1]))
        profiles = {
            name: replace(synthetic_profile(graph, name, 1.0 + 0.3 * k), error=0.02, drift=0.01)
            for k, name in enumerate(CLASSES)
        }
        plans = [random_plan(graph, seed + k) for k in range(num_plans + 1)]
        first, *later = replays(graph, plans, profiles, cluster_of(RANKS[0]))
        size = f"{len(graph.ops)} operators, {len(CLASSES)} classes of {RANKS[0]} ranks"
        rows += [_row(_FIRST, [first], None, size), _row(_LATER, later, REPLAY_LIMIT_S, size)]
    more = [random_plan(graph, seed + num_plans + 1 + k) for k in range(num_plans)]
    later = replays(graph, more, profiles, cluster_of(RANKS[1]))
    size = f"{len(graph.ops)} operators, {len(CLASSES)} classes of {RANKS[1]} ranks"
    changes = incremental(graph, profiles[CLASSES[0]], plans[0][CLASSES[0]].assignment, seed)
    load = {"load": os.getloadavg()[0]}
    rows += [_row(_LATER, later, REPLAY_LIMIT_S, size), _row(_CHANGE, changes, CHANGE_LIMIT_S, size)]
    return [{**row, **load} for row in rows]


def replays(
    graph: OpGraph, plans: Sequence[Plan], profiles: Mapping[str, Profile], cluster: Cluster
) -> list[Seconds]:
    """Return the seconds that each of these plans takes to replay, in turn."""
    return [_seconds(lambda plan=plan: replay(graph, plan, profiles, cluster)) for plan in plans]  # type: ignore[misc]


def incremental(
    graph: OpGraph, profile: Profile, assignment: Mapping[str, Precision], seed: int, changes: int = 400
) -> list[Seconds]:
    """Return the seconds that each of some random changes of one operator takes to lower and price again."""
    rng = random.Random(seed)
    lowering = Lowering(graph, assignment)
    costs = ClassCosts(lowering, profile)
    found = []
    for _ in range(changes):
        op = rng.choice(graph.adjustable)
        precision = rng.choice(able(op))
        found.append(_seconds(lambda op=op, p=precision: costs.update(lowering.assign(op.name, p).touched)))  # type: ignore[misc]
    return found


def random_plan(graph: OpGraph, seed: int) -> Plan:
    """Return a plan that gives every operator any of its precisions on every class."""
    rng = random.Random(seed)
    drawn = ({op.name: rng.choice(able(op)) for op in graph.adjustable} for _ in CLASSES)
    classes = {name: ClassPlan(assignment) for name, assignment in zip(CLASSES, drawn, strict=True)}
    return Plan(graph.model, graph.hash, classes)


def cluster_of(count: int) -> Cluster:
    """Return as many ranks of each class, between which the link was measured two at a time."""
    classes = tuple(DeviceClass(name, "cpu", count, 1 << 50, PRECISIONS) for name in CLASSES)
    return Cluster(classes, Link(1e-4, 1e9, 0.6, 2))


def _seconds(work: Callable[[], Any]) -> Seconds:
    """Measure work by the clock, and by the processor, which leaves out what others on the machine take."""
    start, processor = time.perf_counter(), time.process_time()
    work()
    return time.perf_counter() - start, time.process_time() - processor


def _row(name: str, seconds: list[Seconds], bar_s: float | None, size: str) -> dict[str, Any]:
    clock, processor = zip(*seconds, strict=True)
    return {
        "name": name, "median_s": statistics.median(clock), "worst_s": max(clock),
        "processor_s": statistics.median(processor), "bar_s": bar_s, "times": len(seconds), "size": size,
    }  # fmt: skip


if __name__ == "__main__":
    run_command(main)
