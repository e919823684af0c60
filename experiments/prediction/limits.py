"""The limits that qsync promises to keep: `python -m qsync.experiments.prediction.limits --out FOLDER`.

Everything here is measured but for the profiles that replay is timed on: those are SYNTHETIC, since only
their size matters to how long it takes.
"""

from __future__ import annotations

import random
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import qsync
from qsync import Cluster, DeviceClass, Link, Precision
from qsync.experiments.harness import Bar, Experiment, Fresh, Out, Page, Publish, bar, run_command
from qsync.experiments.harness.processes import in_fresh_process, peak_resident_bytes
from qsync.experiments.workloads.large_models import (
    PRECISIONS,
    able,
    large_graph,
    llama_70b,
    synthetic_profile,
)
from qsync.lowering.incremental import Lowering
from qsync.replayer import ClassCosts, replay

SEED = 0
STARTS = 10
_PAGE = Page(Path("docs/results/prediction.md"), marker="limits")
_MEASURED = "all but the profiles of replay: synthetic"
REPLAYS, CHANGES, RANKS = 20, 400, 10
LINK = Link(1e-4, 1e9, 0.6, num_ranks=2)


def main(out: Out = Path("limits"), publish: Publish = False, fresh: Fresh = False) -> None:
    """Measure every limit, print a table, and write the figures to the folder."""
    experiment = Experiment("limits", out, seed=SEED, fresh=fresh)
    with experiment.progress():
        bars = [
            one
            for part in (import_time, large_capture, replay_time)
            for one in experiment.piece(part.__name__, part)
        ]
    experiment.finish({}, bars=bars, measured=_MEASURED, page=_PAGE if publish else None)


def import_time() -> list[Bar]:
    """Measure how long `import qsync` takes in a fresh interpreter."""
    code = "import time; t = time.perf_counter(); import qsync; print(time.perf_counter() - t)"
    command = [sys.executable, "-c", code]
    runs = [subprocess.run(command, capture_output=True, text=True, check=True) for _ in range(STARTS)]
    seconds = statistics.median(float(run.stdout) for run in runs)
    how = f"median of {STARTS} fresh interpreters"
    return [bar("import qsync, ms", seconds * 1e3, 50.0, how=how)]


def large_capture() -> list[Bar]:
    """Measure how long capturing a Llama-3-70B-sized model takes, and how much memory."""
    found = in_fresh_process(capture_llama)
    size = f"{found['num_ops']} operators, {found['num_parameters'] / 1e9:.1f} G parameters"
    how = f"meta device, one fresh process; {size}"
    return [
        bar("capture, Llama-3-70B, s", found["seconds"], 30.0, how=how),
        bar("its peak memory, GiB", found["peak_bytes"] / 2**30, 2.0, how="resident, the whole process"),
    ]


def replay_time(num_layers: int = 80) -> list[Bar]:
    """Measure how long replay of a new plan takes for Llama-3-70B's sizes, and one operator's change.

    Tables of the graph and of profiles are made in the first replay, which is not counted.
    """
    graph, draw = large_graph(num_layers), random.Random(SEED)
    names = ("first", "second", "third", "fourth")
    cluster = Cluster(tuple(DeviceClass(n, "cpu", RANKS, 1 << 50, PRECISIONS) for n in names), LINK)
    profiles = {
        name: replace(synthetic_profile(graph, name, 1.0 + 0.3 * k), error=0.02, drift=0.01)
        for k, name in enumerate(names)
    }

    def drawn() -> dict[str, Precision]:
        return {op.name: draw.choice(able(op)) for op in graph.adjustable}

    plans = [{name: drawn() for name in names} for _ in range(REPLAYS + 1)]
    whole = [_seconds(partial(replay, graph, plan, profiles, cluster)) for plan in plans][1:]
    lowering = Lowering(graph, plans[0][names[0]])
    costs = ClassCosts(lowering, profiles[names[0]])

    def change(op: str, precision: Precision) -> None:
        costs.update(lowering.assign(op, precision).touched)

    ops = draw.choices(graph.adjustable, k=CHANGES)
    changes = [_seconds(partial(change, op.name, draw.choice(able(op)))) for op in ops]
    size = f"{len(graph.ops)} operators, {len(names)} classes of {RANKS} ranks; SYNTHETIC profiles"
    replay_ms, change_ms = (1e3 * statistics.median(seconds) for seconds in (whole, changes))
    return [
        bar("replay, Llama-3-70B, ms", replay_ms, 50.0, how=f"median of {REPLAYS} new plans; {size}"),
        bar("lower and price one change, ms", change_ms, 0.2, how=f"median of {CHANGES}"),
    ]


def _seconds(work: Callable[[], object]) -> float:
    start = time.perf_counter()
    work()
    return time.perf_counter() - start


def capture_llama() -> dict[str, Any]:
    """Capture a model of Llama-3-70B's sizes; for a fresh process, whose peak memory is read."""
    model, batch = llama_70b()
    start = time.perf_counter()
    graph = qsync.capture(model, batch)
    return {
        "seconds": time.perf_counter() - start,
        "peak_bytes": peak_resident_bytes(),
        "num_ops": len(graph.ops),
        "num_parameters": sum(value.num_elements for value in graph.parameters),
    }


if __name__ == "__main__":
    run_command(main)
