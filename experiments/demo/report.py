"""The results of the demo: report.json, plan.json with its basis, trace.json, pictures, and one table."""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable, Mapping
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from rich.table import Table

from qsync.experiments.demo.compared_plans import Planned, run_title
from qsync.experiments.harness import table_of
from qsync.figures import memory, page, precision_map, timeline
from qsync.records.graph import digest
from qsync.records.json_files import write_json
from qsync.records.plan_folder import Basis
from qsync.replayer import Timeline, peaks
from qsync.replayer.chrome_trace import write_trace

HEADINGS = (
    "", "samples/s", "step", "x limit", "predicted", "planned", "waiting", "FLOPs lowered", "added variance",
    "held-out loss",
)  # fmt: skip


def assemble(
    basis: Basis,
    planned: Mapping[str, Planned],
    again: Mapping[str, Timeline],
    seeds: list[dict[str, dict[str, Any]]],
    header: dict[str, Any],
) -> dict[str, Any]:
    """Return the content of report.json, from predictions and from what each seed's runs measured."""

    def by_rank(key: str, combine: Callable[..., float], of: list[dict[str, Any]]) -> dict[str, float]:
        return {rank: combine(result[key][rank] for result in of) for rank in of[0][key]}

    runs = {}
    for name, entry in planned.items():
        measured = [results[name] for results in seeds]
        periods = [period for result in measured for period in result["periods_s"]]
        losses = [result["heldout_loss"] for result in measured]
        runs[name] = {
            "title": run_title(name, header["base"]),
            "measured_step_s": statistics.median(periods) if periods else None,
            "measured_step_quartiles_s": statistics.quantiles(periods, n=4) if len(periods) > 1 else None,
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
        "measured_or_simulated": "measured; predicted_* is simulated",
        "plan": digest(planned["qsync"].plan.to_json()),
        "model": basis.graph.model, "cluster": basis.cluster.to_json(),
        "num_parameters": sum(value.num_elements for value in basis.graph.parameters),
        "parameters_identical_across_ranks": identical,
        "heldout_difference": heldout_difference(runs),
        "runs": runs,
    }  # fmt: skip


def heldout_difference(runs: Mapping[str, Mapping[str, Any]]) -> dict[str, float | None]:
    """Return the held-out loss of the plan minus that of FP32 DDP: mean, standard error over seeds."""
    pairs = zip(runs["qsync"]["heldout_losses"], runs["ddp"]["heldout_losses"], strict=True)
    differences = [plan - full for plan, full in pairs]
    error = statistics.stdev(differences) / math.sqrt(len(differences)) if len(differences) > 1 else None
    return {"mean": statistics.fmean(differences), "standard_error": error}


def write(out: Path, content: dict[str, Any], planned: Mapping[str, Planned], basis: Basis) -> None:
    """Write report.json, trace.json, the pictures and the page, each whole or not at all."""
    weak = {c.name for c in basis.cluster.classes if c.emulated_share}
    entry = planned["qsync"]
    write_trace(entry.timeline, out / "trace.json")
    precision_map.allocation(
        entry.plan, basis.graph, basis.sensitivity, out / "allocation.png", emulated=weak
    )
    lanes = timeline.lanes_of(entry.timeline, weak)
    timeline.timelines(
        lanes, out / "timeline.png", simulated=True, emulated=bool(weak), title="One step of the qsync plan"
    )
    full = peaks(basis.graph, entry.plan, basis.profiles, basis.cluster)
    memory.steps(full, out / "memory.png")
    write_json(out / "report.json", content)
    if find_spec("plotly") is not None:  # a machine with a GPU may have no more than torch
        page.write(out / "report.html", entry.plan, basis, page.Measured.of_demo(content))


def table(content: Mapping[str, Any]) -> Table:
    """Return the one table that the demo prints."""
    note = "; the weak rank is emulated" if content["emulated"] else ""
    size = f"{content['num_parameters'] / 1e6:.1f} M parameters, {content['steps']} steps"
    own = [number for number, name in enumerate(content["runs"]) if is_own(name)]
    return table_of(f"{content['workload']}, {size}{note}", HEADINGS, cells(content), bold=own)


def is_own(name: str) -> bool:
    """Return whether a run is under a plan of qsync's."""
    return name.startswith("qsync")


def cells(content: Mapping[str, Any]) -> list[list[str]]:
    """Return the rows of the table: steps as measured, predicted ones by their error."""
    limit = content["runs"]["fast_alone"]["measured_step_s"]
    base = content.get("base", "fp32")
    return [[run_title(name, base), *_row(run, limit)] for name, run in content["runs"].items()]


def samples_to_alone(run: Mapping[str, Any], limit: float | None) -> float | None:
    """Return the samples per second of a run over those of the fast rank alone, at equal batches a rank."""
    step = run["measured_step_s"]
    return len(run["wait_fraction"]) * limit / step if step and limit else None


def _row(run: Mapping[str, Any], limit: float | None) -> list[str]:
    step, samples = run["measured_step_s"], samples_to_alone(run, limit)
    return [
        f"{samples:.2f}x" if samples else "-",
        f"{step * 1e3:.0f} ms" if step else "-",
        f"{step / limit:.2f}" if step and limit else "-",
        *(f"{run[key] / step - 1:+.1%}" if step else "-" for key in ("predicted_step_s", "planned_step_s")),
        " / ".join(f"{fraction:.0%}" for fraction in run["wait_fraction"].values()),
        f"{run['low_precision_flop_fraction']:.0%}",
        f"{run['added_variance']:.1e}",
        f"{run['heldout_loss']:.3f}",
    ]


def closing_lines(content: Mapping[str, Any], out: Path) -> list[str]:
    """Say in words what the table means, and where the files are."""
    runs = content["runs"]
    limit = runs["fast_alone"]["measured_step_s"]
    plain, plan = (runs[name]["measured_step_s"] for name in ("ddp", "qsync"))
    lines = []
    if limit and plain and plan:
        emulated = " (weak rank emulated)" if content["emulated"] else ""
        shown = {
            "ddp": "in plain DDP",
            "qsync": "under the plan",
            "qsync_share": "under the plan with shares",
        }
        rates = [
            f"{samples_to_alone(runs[name], limit):.2f} times {text}"
            for name, text in shown.items()
            if name in runs
        ]
        lines.append(
            f"Samples per second, against the fast rank alone: {', '.join(rates)}{emulated}. "
            f"A step takes {plain / limit:.2f} times as long in plain DDP, {plan / limit:.2f} under the plan."
        )
    weak_s = [run["measured_step_s"] for name, run in runs.items() if name.startswith("weak_")]
    lowers_nothing = plain and runs["qsync"]["low_precision_op_fraction"] == 0.0
    if lowers_nothing and plain > 1.05 * limit and min(weak_s, default=plain) >= plain:
        lines.append(
            "The plan lowers nothing, because that saves no time on this processor: "
            + (
                f"the weak rank's fastest uniform precision takes {min(weak_s) / plain:.2f} times DDP's step "
                "(qsync doctor shows the speed of every kernel)."
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
        f"Written to {out}: report.json, plan.json, trace.json (ui.perfetto.dev), allocation.png, "
        "timeline.png, memory.png",
        f"All of it as a page to click through: {out / 'report.html'}"
        if (out / "report.html").is_file()
        else "No page: plotly is not installed (pip install plotly, then qsync report)",
        f"Why each operator is lowered: qsync explain {out / 'plan.json'}",
    ]
