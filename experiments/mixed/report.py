"""Report the ways to train: figures.json with bars, the plan, a trace, pictures, and one table."""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from rich.table import Table

from qsync.experiments.harness import Bar, bar, table_of
from qsync.experiments.harness.pairing import quartiles
from qsync.experiments.mixed.predicted_steps import Predicted
from qsync.experiments.mixed.ways import (
    ALONE,
    DDP,
    LOWERS_ALL,
    QSYNC,
    QSYNC_ALL,
    QSYNC_SHARE,
    TITLES,
    UNIFORM,
    samples_by_class,
)
from qsync.figures import memory, page, precision_map, timeline
from qsync.records.graph import digest
from qsync.records.json_files import write_json
from qsync.records.plan_folder import Basis
from qsync.replayer import Recapture, Timeline, peaks, profiles_under_levers
from qsync.replayer.chrome_trace import write_trace

HEADINGS = (
    "", "samples/s", "step", "predicted", "planned", "samples", "waiting", "lowered", "variance", "loss",
)  # fmt: skip
_EQUAL = 0.01  # rates within this relative difference are equal: steps on one machine repeat to about that
SLOWER = "ways that are faster than the plan"
NOISIER = "uniform choices as fast as the plan that add less variance"
UNSAID = "plans below the strong cards alone that the verdict did not foresee"
WORST_ERROR = "|predicted / measured - 1| of the step of the plan"


def shown(found: Mapping[str, Any]) -> str:
    """Return qsync's best way: with shares, or with equal batches if there are no shares."""
    return QSYNC_SHARE if QSYNC_SHARE in found else QSYNC


def assemble(
    basis: Basis,
    predicted: Mapping[str, Predicted],
    again: Mapping[str, Timeline],
    seeds: list[dict[str, dict[str, Any]]],
    header: dict[str, Any],
) -> dict[str, Any]:
    """Return the content of figures.json, from predictions and each seed's measurements."""

    def by_rank(key: str, combine: Callable[..., float], of: list[dict[str, Any]]) -> dict[str, float]:
        return {rank: combine(result[key][rank] for result in of) for rank in of[0][key]}

    runs, equal = {}, basis.graph.batch_shapes[0][0]
    for name, entry in predicted.items():
        measured = [results[name] for results in seeds]
        periods = [period for result in measured for period in result["periods_s"]]
        losses = [result["heldout_loss"] for result in measured]
        samples = samples_by_class(entry.plan, equal)
        runs[name] = {
            "title": TITLES[name],
            "samples": samples,
            "samples_a_step": sum(c.count * samples[c.name] for c in entry.cluster.classes),
            "measured_step_s": statistics.median(periods) if periods else None,
            "measured_step_quartiles_s": statistics.quantiles(periods, n=4) if len(periods) > 1 else None,
            "turns_s": [turn_s for result in measured for turn_s in result["turns_s"]],
            **entry.summary(basis.graph, again[name]),
            "wait_fraction": by_rank("wait_fraction", statistics.fmean, measured),
            "peak_memory_bytes": by_rank("peak_memory_bytes", max, measured),
            "heldout_loss": statistics.fmean(losses),
            "heldout_losses": losses,
            "training_losses": [result["losses"] for result in measured],
        }
    identical = all(result["parameters_identical"] for results in seeds for result in results.values())
    return {
        **header,
        "experiment": "mixed",
        "measured": "steps, losses and memory are measured; predicted_* and planned_* are simulated",
        "plan": digest(predicted[shown(runs)].plan.to_json()),
        "model": basis.graph.model, "cluster": basis.cluster.to_json(),
        "num_parameters": sum(value.num_elements for value in basis.graph.parameters),
        "parameters_identical_across_ranks": identical,
        "heldout_difference": heldout_difference(runs),
        "bars": bars(runs, header["leave_out"]),
        "runs": runs,
    }  # fmt: skip


def bars(runs: Mapping[str, Mapping[str, Any]], leave_out: Sequence[str]) -> list[Bar]:
    """Return the bars: no way is faster, no equally fast one adds less variance, steps are as predicted.

    A way that lowers the strong cards, too, is compared with the plan that may do so. A way is faster if
    three turns in four show more than one per cent. `leave_out` lists the classes that the verdict excludes.
    """
    plan = runs[shown(runs)]
    others = {name: run for name, run in runs.items() if run is not plan}
    like = {name: runs.get(QSYNC_ALL, plan) if name in LOWERS_ALL else plan for name in others}
    faster = [run["title"] for name, run in others.items() if _gains(like[name], run)[0] < 1.0 - _EQUAL]
    noisier = [
        run["title"] for name, run in others.items()
        if name in UNIFORM and run["added_variance"] < like[name]["added_variance"]
        and _gains(like[name], run)[1] < 1.0
    ]  # fmt: skip
    gain = _gains(plan, runs[ALONE])[0]
    error = abs(plan["predicted_step_s"] / plan["measured_step_s"] - 1) if plan["measured_step_s"] else None
    return [
        bar(SLOWER, len(faster), 0, which=faster),
        bar(NOISIER, len(noisier), 0, which=noisier),
        bar(UNSAID, int(gain < 1.0 - _EQUAL and not leave_out), 0),
        bar(WORST_ERROR, error, 0.08),
    ]


def _rate(run: Mapping[str, Any], key: str) -> float:
    return float(run["samples_a_step"] / run[key])


def _gains(run: Mapping[str, Any], other: Mapping[str, Any]) -> tuple[float, float]:
    """Return another way's relative samples per second: third quartile over turns, and median."""
    samples = run["samples_a_step"] / other["samples_a_step"]
    found = [samples * b / a for a, b in zip(run["turns_s"], other["turns_s"], strict=True)]
    _, median, high = quartiles(found)
    return high, median


def heldout_difference(runs: Mapping[str, Mapping[str, Any]]) -> dict[str, float | None]:
    """Return the plan's held-out loss minus FP32 DDP's: mean, and standard error over seeds."""
    pairs = zip(runs[shown(runs)]["heldout_losses"], runs[DDP]["heldout_losses"], strict=True)
    differences = [plan - full for plan, full in pairs]
    error = statistics.stdev(differences) / math.sqrt(len(differences)) if len(differences) > 1 else None
    return {"mean": statistics.fmean(differences), "standard_error": error}


def write(
    out: Path,
    content: dict[str, Any],
    predicted: Mapping[str, Predicted],
    basis: Basis,
    other: Recapture | None,
) -> None:
    """Write figures.json, trace.json, the pictures and the page, each atomically."""
    weak = {c.name for c in basis.cluster.classes if c.emulated_share}
    entry = predicted[shown(predicted)]
    profiles = profiles_under_levers(basis.graph, basis.profiles, basis.cluster, entry.plan.levers, other)
    basis = replace(basis, profiles=profiles)
    write_trace(entry.timeline, out / "trace.json")
    precision_map.allocation(
        entry.plan, basis.graph, basis.sensitivity, out / "allocation.png", emulated=weak
    )
    lanes = timeline.lanes_of(entry.timeline, weak)
    timeline.timelines(
        lanes, out / "timeline.png", simulated=True, emulated=bool(weak), title="One step of the qsync plan"
    )
    memory.steps(peaks(basis.graph, entry.plan, profiles, basis.cluster), out / "memory.png")
    write_json(out / "figures.json", content)
    if find_spec("plotly") is not None:  # a GPU machine may have only torch installed
        page.write(out / "report.html", entry.plan, basis, page.Measured.of_demo(content))


def table(content: Mapping[str, Any]) -> Table:
    """Return the table that the demo prints."""
    note = "; weak ranks are emulated" if content["emulated"] else ""
    size = f"{content['num_parameters'] / 1e6:.1f} M parameters, {content['steps']} steps"
    own = [number for number, name in enumerate(content["runs"]) if name == shown(content["runs"])]
    found = table_of(f"{content['workload']}, {size}{note}", HEADINGS, cells(content), bold=own)
    found.columns[0].no_wrap = True  # headings wrap instead
    return found


def cells(content: Mapping[str, Any]) -> list[list[str]]:
    """Return the table's rows: measured steps, and the errors of predicted ones."""
    alone = content["runs"][ALONE]
    return [[run["title"], *_row(run, alone)] for run in content["runs"].values()]


def samples_to_alone(run: Mapping[str, Any], alone: Mapping[str, Any]) -> float | None:
    """Return a way's samples per second relative to the strongest class alone."""
    if not (run["measured_step_s"] and alone["measured_step_s"]):
        return None
    return _rate(run, "measured_step_s") / _rate(alone, "measured_step_s")


def _row(run: Mapping[str, Any], alone: Mapping[str, Any]) -> list[str]:
    step, samples = run["measured_step_s"], samples_to_alone(run, alone)
    return [
        f"{samples:.2f}x" if samples else "-",
        f"{step * 1e3:.0f} ms" if step else "-",
        *(f"{run[key] / step - 1:+.1%}" if step else "-" for key in ("predicted_step_s", "planned_step_s")),
        "/".join(str(samples) for samples in run["samples"].values()),
        "/".join(f"{fraction:.0%}" for fraction in run["wait_fraction"].values()),
        f"{run['low_precision_flop_fraction']:.0%}",
        f"{run['added_variance']:.1e}",
        f"{run['heldout_loss']:.3f}",
    ]


def closing_lines(content: Mapping[str, Any], out: Path) -> list[str]:
    """Describe the table's meaning in words, and list the files."""
    runs = content["runs"]
    alone, ddp, plan = runs[ALONE], runs[DDP], runs[shown(runs)]
    lines = list(content["verdict"])
    rates = [samples_to_alone(run, alone) for run in (ddp, plan)]
    if all(rates):
        emulated = " (weak ranks emulated)" if content["emulated"] else ""
        lines.append(
            f"Measured, against the strongest cards alone{emulated}: {rates[0]:.2f} times the samples per "
            f"second in plain DDP, {rates[1]:.2f} times under the plan."
        )
    step_s, limit_s = ddp["measured_step_s"], alone["measured_step_s"]
    weak_s = [run["measured_step_s"] for name, run in runs.items() if name.startswith("weak_")]
    lowers_nothing = step_s and plan["low_precision_op_fraction"] == 0.0
    if lowers_nothing and step_s > 1.05 * limit_s and min(weak_s, default=step_s) >= step_s:
        lines.append(
            "The plan lowers nothing, because that saves no time on this processor: "
            + (
                f"the weak rank's fastest uniform precision takes {min(weak_s) / step_s:.2f} times DDP's "
                "step (qsync doctor shows the speed of every kernel)."
                if weak_s
                else "it multiplies no precision below FP32 in hardware (qsync doctor)."
            )
            + " Shares of the batch by speed still do."
        )
    difference = content["heldout_difference"]
    if difference["standard_error"] is not None:
        lines.append(
            f"Held-out loss against FP32 DDP: {difference['mean']:+.4f} "
            f"+- {difference['standard_error']:.4f} (mean and standard error over {content['seeds']} seeds)."
        )
    same = "identical" if content["parameters_identical_across_ranks"] else "DIFFERENT"
    return [
        *lines,
        f"Parameters are bitwise {same} on all ranks at the end of every run.",
        f"Written to {out}: figures.json, plan.json, trace.json (ui.perfetto.dev), allocation.png, "
        "timeline.png, memory.png",
        f"All of it as a page to click through: {out / 'report.html'}"
        if (out / "report.html").is_file()
        else "No page: plotly is not installed (pip install plotly, then qsync report)",
        f"Why each operator is lowered: qsync explain {out / 'plan.json'}",
    ]
