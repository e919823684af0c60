"""Measure qsync's promised limits: `python -m qsync.experiments.prediction.limits --out FOLDER`.

Times are measured; the inputs of replay and planning are not: profiles are SYNTHETIC, cards are SIMULATED
from data sheets, and sensitivities are made up. Replay's time depends only on their size, and planning's on
the differences between cards and operators.
"""

from __future__ import annotations

import random
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import qsync
from qsync import Cluster, DeviceClass, Link, OpGraph, Precision, Profile
from qsync.allocator import allocate, check_plan
from qsync.experiments.allocation.bases import card
from qsync.experiments.harness import Bar, Experiment, Fresh, Out, Page, Publish, bar, run_command
from qsync.experiments.harness.processes import in_fresh_process, peak_resident_bytes
from qsync.experiments.workloads.large_models import (
    PRECISIONS,
    Meta,
    able,
    bert_large,
    llama_70b,
    made_up_sensitivity,
    resnet_101,
    synthetic_profile,
)
from qsync.lowering.incremental import Lowering
from qsync.predictor.cost_model.fill_profile import simulate
from qsync.predictor.cost_model.model import CostModel
from qsync.predictor.cost_model.samples import samples_of
from qsync.records.datasheets import datasheet
from qsync.replayer import ClassCosts, replay

SEED = 0
STARTS = 10
_PAGE = Page(Path("docs/results/prediction.md"), marker="limits")
_MEASURED = "all but the profiles of replay (synthetic) and of planning (simulated)"
REPLAYS, CHANGES, RANKS = 20, 400, 10
CLASSES = ("first", "second", "third", "fourth")
LINK = Link(1e-4, 1e9, 0.6, num_ranks=2)
SHEETS = ("T4", "V100", "L4", "A100")
SLACK, DECADES = 0.1, 0.3  # slack of plans, and decades of made-up sensitivities
LLAMA = "Llama-3-70B"
# The planned models, with the ranks of each of four cards.
MODELS: Mapping[str, tuple[Callable[[], Meta], int]] = {
    "BERT-large": (bert_large, 1), "ResNet-101": (resnet_101, 1), LLAMA: (llama_70b, 2500),
}  # fmt: skip


def main(out: Out = Path("limits"), publish: Publish = False, fresh: Fresh = False) -> None:
    """Measure every limit, print a table, and write the figures to the folder."""
    experiment = Experiment("limits", out, seed=SEED, fresh=fresh)
    with experiment.progress():
        bars = [
            one
            for part in (import_time, large_models, replay_time)
            for one in experiment.piece(part.__name__, part)
        ]
    experiment.finish({}, bars=bars, measured=_MEASURED, page=_PAGE if publish else None)


def import_time() -> list[Bar]:
    """Measure the time of `import qsync` in a fresh interpreter."""
    code = "import time; t = time.perf_counter(); import qsync; print(time.perf_counter() - t)"
    command = [sys.executable, "-c", code]
    runs = [subprocess.run(command, capture_output=True, text=True, check=True) for _ in range(STARTS)]
    seconds = statistics.median(float(run.stdout) for run in runs)
    how = f"median of {STARTS} fresh interpreters"
    return [bar("import qsync, ms", seconds * 1e3, 50.0, how=how)]


def large_models() -> list[Bar]:
    """Measure time and memory of capturing and planning large models, each in a process."""
    found = {name: in_fresh_process(captured_and_planned, name) for name in MODELS}
    bars = [
        bar(f"capture, {LLAMA}, s", found[LLAMA]["capture_s"], 30.0, how="meta device, one fresh process"),
        bar("its peak memory, GiB", found[LLAMA]["capture_bytes"] / 2**30, 2.0, how="of the whole process"),
    ]
    for name, one in found.items():
        how = f"{one['operators']} operators, {one['ranks']} ranks; SIMULATED cards"
        bars += [
            bar(f"plan, {name}, s", one["plan_s"], 2.0, how=how),
            bar(f"plan, {name}: gap", one["gap"], 0.01),
            bar(f"plan, {name}: peak memory, GiB", one["plan_bytes"] / 2**30, 4.0, how="with capture"),
            bar(f"plan, {name}: violations", one["violations"], 0),
        ]
    return bars


def captured_and_planned(name: str) -> dict[str, Any]:
    """Capture and plan one of `MODELS`, with checks; for a fresh process, whose peak memory is read."""
    import scipy.optimize  # noqa: F401  half a second that is not planning's

    make, count = MODELS[name]
    model, batch = make()
    begun = time.perf_counter()
    graph = qsync.capture(model, batch)
    captured, capture_bytes = time.perf_counter(), peak_resident_bytes()
    cluster, profiles = simulated_cards(graph, count)
    sensitivity = made_up_sensitivity(random.Random(SEED), graph, DECADES)
    planning = time.perf_counter()
    plan = allocate(graph, profiles, sensitivity, cluster, slack=SLACK)
    planned, plan_bytes = time.perf_counter(), peak_resident_bytes()
    return {
        "capture_s": captured - begun, "capture_bytes": capture_bytes,
        "plan_s": planned - planning, "plan_bytes": plan_bytes, "gap": plan.gap,
        "operators": len(graph.ops), "ranks": cluster.num_ranks,
        "violations": len(check_plan(graph, plan, profiles, sensitivity, cluster).violations),
    }  # fmt: skip


def simulated_cards(graph: OpGraph, count: int) -> tuple[Cluster, dict[str, Profile]]:
    """Return simulated cards of each data sheet, at the synthetic costs' fraction of peak.

    Memory is ignored, because Llama-3-70B fits on none of them.
    """
    base = synthetic_profile(graph, "base", 1.0)
    costs = CostModel(samples_of(graph, base))
    cluster = Cluster(tuple(card(sheet, count, 1 << 50) for sheet in SHEETS), Link(30e-6, 10e9, num_ranks=2))
    profiles = {
        c.name: simulate(base, graph, datasheet(sheet), c.name, costs)
        for sheet, c in zip(SHEETS, cluster.classes, strict=True)
    }
    return cluster, profiles


def replay_time(num_layers: int = 80) -> list[Bar]:
    """Measure replay's time for a new plan of Llama-3-70B's size, and for one operator's change.

    The first replay builds tables of graph and profiles, and is not counted.
    """
    graph, draw = qsync.capture(*llama_70b(num_layers)), random.Random(SEED)
    cluster = Cluster(tuple(DeviceClass(n, "cpu", RANKS, 1 << 50, PRECISIONS) for n in CLASSES), LINK)
    profiles = {
        name: replace(synthetic_profile(graph, name, 1.0 + 0.3 * k), error=0.02, drift=0.01)
        for k, name in enumerate(CLASSES)
    }

    def drawn() -> dict[str, Precision]:
        return {op.name: draw.choice(able(op)) for op in graph.adjustable}

    plans = [{name: drawn() for name in CLASSES} for _ in range(REPLAYS + 1)]
    whole = [_seconds(partial(replay, graph, plan, profiles, cluster)) for plan in plans][1:]
    lowering = Lowering(graph, plans[0][CLASSES[0]])
    costs = ClassCosts(lowering, profiles[CLASSES[0]])

    def change(op: str, precision: Precision) -> None:
        costs.update(lowering.assign(op, precision).touched)

    ops = draw.choices(graph.adjustable, k=CHANGES)
    changes = [_seconds(partial(change, op.name, draw.choice(able(op)))) for op in ops]
    size = f"{len(graph.ops)} operators, {len(CLASSES)} classes of {RANKS} ranks; SYNTHETIC profiles"
    replay_ms, change_ms = (1e3 * statistics.median(seconds) for seconds in (whole, changes))
    return [
        bar(f"replay, {LLAMA}, ms", replay_ms, 50.0, how=f"median of {REPLAYS} new plans; {size}"),
        bar("lower and price one change, ms", change_ms, 0.2, how=f"median of {CHANGES}"),
    ]


def _seconds(work: Callable[[], object]) -> float:
    start = time.perf_counter()
    work()
    return time.perf_counter() - start


if __name__ == "__main__":
    run_command(main)
