"""The limits that qsync promises to keep: `python -m qsync.experiments.prediction.limits --out FOLDER`.

Everything here is measured but for the profiles that `qsync plan` is timed on: those are SYNTHETIC, since
only their size matters to how long planning takes.
"""

from __future__ import annotations

import copy
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import torch

import qsync
from qsync import Plan, Precision
from qsync.experiments.harness import Experiment, Fresh, Out, bar, run_command, table_of, yes
from qsync.experiments.harness.processes import in_fresh_process, peak_resident_bytes
from qsync.experiments.workloads.large_models import bert, bert_graph, llama_70b, synthetic_basis, tokens
from qsync.records.plans import ClassPlan

STARTS, PLANS = 10, 5
PAIRED_STEPS, WARM_UPS = 30, 3


def main(out: Out = Path("limits"), fresh: Fresh = False) -> None:
    """Measure every limit, print a table, and write the figures to the folder."""
    experiment = Experiment("limits", out, fresh=fresh)
    with experiment.progress():
        rows = [
            row
            for measure in (import_time, plan_time, large_capture, wrapped_step)
            for row in experiment.piece(measure.__name__, measure)
        ]
    cells = [
        [
            row["name"],
            *(_shown(row[key], row["unit"]) for key in ("measured", "limit")),
            yes(row["holds"]),
            row["how"],
        ]
        for row in rows
    ]
    shown = table_of("Limits (measured)", ("what", "measured", "limit", "holds", "how"), cells)
    experiment.finish({"limits": rows}, bars=rows, tables=[shown])


def import_time() -> list[dict[str, Any]]:
    """Measure how long `import qsync` takes in a fresh interpreter."""
    code = "import time; t = time.perf_counter(); import qsync; print(time.perf_counter() - t)"
    command = [sys.executable, "-c", code]
    runs = [subprocess.run(command, capture_output=True, text=True, check=True) for _ in range(STARTS)]
    seconds = statistics.median(float(run.stdout) for run in runs)
    how = f"median of {STARTS} fresh interpreters"
    return [_row("import qsync", seconds * 1e3, 50.0, "ms", how)]


def plan_time() -> list[dict[str, Any]]:
    """Measure how long `qsync plan` takes for BERT-base."""
    with tempfile.TemporaryDirectory() as folder:
        basis = synthetic_basis(bert_graph())
        basis.save(folder)
        command = ["-m", "qsync.commands.main", "plan", folder, "--out", f"{folder}/plan.json"]
        times = []
        for _ in range(PLANS):
            start = time.perf_counter()
            subprocess.run([sys.executable, *command], stdout=subprocess.DEVNULL, check=True)
            times.append(time.perf_counter() - start)
        lowered = sum(len(entry.lowered) for entry in Plan.load(f"{folder}/plan.json").classes.values())
    size = f"{len(basis.graph.adjustable)} operators, {lowered} lowered"
    how = f"wall time of the command, median of {PLANS}; {size}; SYNTHETIC profiles"
    return [_row("qsync plan, BERT-base", statistics.median(times), 2.0, "s", how)]


def large_capture() -> list[dict[str, Any]]:
    """Measure how long capturing a Llama-3-70B-sized model takes, and how much memory."""
    found = in_fresh_process(capture_llama)
    size = f"{found['num_ops']} operators, {found['num_parameters'] / 1e9:.1f} G parameters"
    how = f"meta device, one fresh process; {size}"
    return [
        _row("capture, Llama-3-70B", found["seconds"], 30.0, "s", how),
        _row("its peak memory", found["peak_bytes"] / 2**30, 2.0, "GiB", "resident, the whole process"),
    ]


def wrapped_step() -> list[dict[str, Any]]:
    """Measure what a step costs under a plan that lowers nothing."""
    found = in_fresh_process(compare_steps)
    plain = f"plain step {found['plain_s'] * 1e3:.0f} ms"
    how = f"median of pairs; BERT 4x512, {PAIRED_STEPS} training steps in turn, one thread; {plain}"
    when = "every step, dropout on; parameters at the end"
    return [
        _row("step, all-FP32 plan / unwrapped", found["ratio"], 1.02, "x", how),
        _row("loss, gradients bitwise equal", found["bitwise"], True, "", when),
    ]


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


def compare_steps() -> dict[str, Any]:
    """Train a BERT of 4 layers, 512 wide, and its twin under an all-FP32 plan, in turn on equal batches."""
    torch.set_num_threads(1)
    torch.manual_seed(0)
    plain = bert(num_hidden_layers=4, hidden_size=512, num_attention_heads=8, intermediate_size=2048)
    wrapped = copy.deepcopy(plain)
    batches = [tokens(4, 128, seed) for seed in range(4)]
    graph = qsync.capture(wrapped, batches[0])
    assignment = {op.name: Precision.FP32 for op in graph.adjustable}
    qsync.wrap(wrapped, Plan(graph.model, graph.hash, {"here": ClassPlan(assignment)}))
    both = list(zip(plain.parameters(), wrapped.parameters(), strict=True))
    models = {"plain": plain, "wrapped": wrapped}
    optimizers = {name: torch.optim.AdamW(model.parameters(), lr=1e-4) for name, model in models.items()}
    times: dict[str, list[float]] = {"plain": [], "wrapped": []}
    same = True
    for step in range(PAIRED_STEPS + WARM_UPS):  # to warm up: tracing, caches
        losses = {}
        # Who goes first alternates, since the second finds the caches of the first.
        for name in ("plain", "wrapped") if step % 2 else ("wrapped", "plain"):
            torch.manual_seed(step)
            start = time.perf_counter()
            optimizers[name].zero_grad()
            losses[name] = models[name](**batches[step % len(batches)]).loss
            losses[name].backward()
            optimizers[name].step()
            times[name].append(time.perf_counter() - start)
        same = same and torch.equal(losses["plain"], losses["wrapped"])
        same = same and all(_equal(ours.grad, theirs.grad) for ours, theirs in both)
    same = same and all(torch.equal(ours, theirs) for ours, theirs in both)
    pairs = list(zip(times["wrapped"][WARM_UPS:], times["plain"][WARM_UPS:], strict=True))
    return {
        "ratio": statistics.median(a / b for a, b in pairs),
        "plain_s": statistics.median(b for _, b in pairs),
        "bitwise": same,
    }


def _equal(ours: torch.Tensor | None, theirs: torch.Tensor | None) -> bool:
    return ours is theirs is None or (ours is not None and theirs is not None and torch.equal(ours, theirs))


def _shown(value: Any, unit: str) -> str:
    return f"{value:.3g} {unit}" if unit else str(value)


def _row(name: str, measured: Any, limit: Any, unit: str, how: str) -> dict[str, Any]:
    return {**bar(name, measured, limit), "unit": unit, "how": how}


if __name__ == "__main__":
    run_command(main)
