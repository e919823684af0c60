"""How far replay's step times are from real ones, over random plans, beside simpler predictions.

    python -m qsync.experiments.prediction.replay_error

Thirty random plans each of five models, on one rank and on two unequal ranks. Every plan is replayed from the
profile that took turns with its steps. The simpler predictions use the same profile:

    no casts     sums the operators of each class and leaves casts out
    no overlap   every all-reduce after all of backward, none beside it
    uniform      scales FP32's step by FLOPs: an operator at precision p counts with the ratio of the uniform
                 steps in p and in FP32
"""

from __future__ import annotations

import statistics
import sys
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Annotated, Any

import matplotlib
import typer
from rich.console import Console
from rich.table import Table

from qsync.backend.device_detection import machine
from qsync.experiments.demo.rank import commit
from qsync.experiments.prediction.validation_ranks import BUCKET_CAP_MB, run_validation
from qsync.experiments.workloads.subjects import NAMES
from qsync.records.cluster import Cluster
from qsync.records.graph import OpGraph
from qsync.records.json_files import read_json, write_json, write_text
from qsync.records.precision import Precision
from qsync.records.profiles import Cost, Profile
from qsync.replayer import replay
from qsync.replayer.comparison import Comparison, Validation, percentile

matplotlib.use("Agg")

Assignments = Mapping[str, Mapping[str, Precision]]
BARS = {1: (0.02, 0.05), 2: (0.03, 0.06)}
METHODS = ("replay", "no casts", "no overlap", "uniform")


def main(
    out: Path = Path("replay_error"),
    model: Annotated[list[str] | None, typer.Option(help="Only these models.")] = None,
    ranks: Annotated[list[int] | None, typer.Option(help="1 or 2; both if left out.")] = None,
    plans: int = 30,
    turns: int = 3,
    seed: int = 0,
    again: Annotated[bool, typer.Option(help="Draw and print what lies in the folder; run nothing.")] = False,
) -> None:
    """Run, print the table and write figures.json, .md and .png to the folder."""
    results = []
    for name in model or NAMES:
        for num_ranks in ranks or (1, 2):
            folder = out / f"{name}-{num_ranks}"
            if not again:
                run_validation(name, num_ranks=num_ranks, num_plans=plans, turns=turns, seed=seed, out=folder)
            if (folder / "validation.json").is_file():
                results.append(judge(name, num_ranks, folder))
    content = {
        "machine": machine(), "commit": commit(), "seed": seed, "plans": plans, "turns": turns,
        "measured": "steps: medians of turns, at the pace of the profile's median round", "results": results,
    }  # fmt: skip
    write_json(out / "figures.json", content)
    draw(results, out / "figures.png")
    write_text(out / "figures.md", markdown(content))
    Console(width=None if sys.stdout.isatty() else 140).print(table(results))


def judge(name: str, num_ranks: int, folder: Path) -> dict[str, Any]:
    """The errors of every method on one model's runs, as parts of the measured step."""
    validation = Validation.load(folder / "validation.json")
    graph = OpGraph.load(folder / "graph.json")
    cluster = Cluster.from_json(read_json(folder / "cluster.json"))
    profiles = {c.name: Profile.load(folder / f"profile-{c.name}.json") for c in cluster.classes}
    errors: dict[str, list[float]] = {method: [] for method in METHODS}
    for one in validation.comparisons:
        predicted = predictions(graph, cluster, profiles, one)
        for method in METHODS:
            errors[method].append(predicted[method] / one.measured_s - 1.0)
    inside = [one.inside for one in validation.comparisons]
    return {
        "model": name,
        "ranks": num_ranks,
        "predicted_s": [one.predicted_s for one in validation.comparisons],
        "measured_s": [one.measured_s for one in validation.comparisons],
        "errors": errors,
        "inside_interval": sum(bool(found) for found in inside) / len(inside),
        "profile": {
            c: {
                "steps": p.num_steps,
                "seconds": p.seconds,
                "noise": p.noise,
                "drift": p.drift,
                "error": p.error,
            }
            for c, p in profiles.items()
        },
    }


def predictions(
    graph: OpGraph, cluster: Cluster, profiles: Mapping[str, Profile], run: Comparison
) -> dict[str, float]:
    """Seconds that each method predicts for a run."""
    plan = {
        c: {op: Precision(p) for op, p in assignment.items()} for c, assignment in run.assignments.items()
    }
    cap = int(BUCKET_CAP_MB * 2**20)
    free = {c: without_casts(profile) for c, profile in profiles.items()}
    exact = replay(graph, plan, profiles, cluster, bucket_cap_bytes=cap)
    bare = replay(graph, plan, free, cluster, bucket_cap_bytes=cap)
    alone = {c: exact[c].compute_s for c in plan}
    flights = {(e.name, e.duration_s) for e in exact.events if e.kind == "communication"}
    return {
        "replay": exact.step_s,
        "no casts": bare.step_s,
        "no overlap": max(alone.values()) + sum(seconds for _, seconds in flights),
        "uniform": max(scaled(graph, profiles[c], plan[c]) for c in plan)
        + sum(seconds for _, seconds in flights),
    }


def without_casts(profile: Profile) -> Profile:
    """The same profile with every cast free."""
    free = (Cost(0.0), Cost(0.0))
    return replace(
        profile,
        casts=dict.fromkeys(profile.casts, Cost(0.0)),
        cast_fit=dict.fromkeys(profile.cast_fit, free),
    )


def scaled(graph: OpGraph, profile: Profile, assignment: Mapping[str, Precision]) -> float:
    """FP32's step, each operator's share by FLOPs taken times the ratio of uniform steps."""
    total = sum(op.flops for op in graph.adjustable)
    fp32 = profile.step_s["fp32"]
    ratio = sum(
        op.flops / total * profile.step_s.get(str(assignment.get(op.name, "fp32")), fp32) / fp32
        for op in graph.adjustable
    )
    return fp32 * ratio + profile.optimizer_s


def table(results: list[dict[str, Any]]) -> Table:
    """Median and 95th percentile of |error| of every method, by model and number of ranks."""
    shown = Table(title="|error| of the step, median / 95th percentile (measured)")
    for heading in ("model", "ranks", *METHODS, "inside interval", "bars"):
        shown.add_column(heading, justify="left" if heading == "model" else "right")
    for entry in results:
        cells = []
        for method in METHODS:
            size = [abs(error) for error in entry["errors"][method]]
            cells.append(f"{statistics.median(size):.1%} / {percentile(size, 0.95):.1%}")
        own = [abs(error) for error in entry["errors"]["replay"]]
        bars = BARS[entry["ranks"]]
        met = statistics.median(own) <= bars[0] and percentile(own, 0.95) <= bars[1]
        shown.add_row(
            entry["model"], str(entry["ranks"]), *cells, f"{entry['inside_interval']:.0%}",
            "met" if met else "missed",
        )  # fmt: skip
    return shown


def markdown(content: Mapping[str, Any]) -> str:
    """The table as it stands in the README."""
    lines = [
        f"Error of the predicted step, median / 95th percentile over {content['plans']} random plans; one "
        f"thread a rank, seed {content['seed']}; steps measured, commit {content['commit']}.",
        "",
        "| | ranks | " + " | ".join(METHODS) + " | inside the interval |",
        "|---|---|" + "---|" * (len(METHODS) + 1),
    ]
    for entry in content["results"]:
        cells = []
        for method in METHODS:
            size = [abs(error) for error in entry["errors"][method]]
            cells.append(f"{statistics.median(size):.1%} / {percentile(size, 0.95):.1%}")
        inside = f"{entry['inside_interval']:.0%}"
        lines.append("| " + " | ".join([entry["model"], str(entry["ranks"]), *cells, inside]) + " |")
    return "\n".join(lines) + "\n"


def draw(results: list[dict[str, Any]], path: Path) -> None:
    """Predicted against measured, and the errors of every method."""
    from matplotlib import pyplot as plt
    from matplotlib.ticker import FormatStrFormatter, LogLocator, NullFormatter

    figure, (left, right) = plt.subplots(1, 2, figsize=(11, 4.4), constrained_layout=True)
    for i, entry in enumerate(results):
        marker = "o" if entry["ranks"] == 1 else "s"
        left.loglog(
            [1e3 * s for s in entry["measured_s"]], [1e3 * s for s in entry["predicted_s"]], marker,
            markersize=3.5, color=f"C{list(NAMES).index(entry['model'])}",
            label=f"{entry['model']}, {entry['ranks']} rank{'s' * (entry['ranks'] > 1)}",
        )  # fmt: skip
        for j, method in enumerate(METHODS):
            size = [100 * abs(error) for error in entry["errors"][method]]
            right.plot(
                [i + 0.18 * (j - 1.5)] * 2, [statistics.median(size), percentile(size, 0.95)], "-",
                color=f"C{j}", linewidth=2, label=method if i == 0 else None,
            )  # fmt: skip
            right.plot(i + 0.18 * (j - 1.5), statistics.median(size), "o", color=f"C{j}", markersize=4)
    low, high = left.get_xlim()
    left.plot([low, high], [low, high], color="0.6", linewidth=0.8, zorder=0)
    left.set(xlabel="measured step, ms", ylabel="predicted step, ms (simulated)")
    left.set_title("Random plans: replay against real steps")
    left.legend(fontsize=7)
    right.set_xticks(range(len(results)), [f"{e['model']}\n{e['ranks']}" for e in results], fontsize=8)
    right.set(ylabel="|error|, %", yscale="log")
    right.set_title("Median to 95th percentile of |error|, by model and ranks")
    right.set_ylim(top=1.6 * right.get_ylim()[1])  # room for the legend
    right.legend(fontsize=7, ncols=len(METHODS), loc="upper center")
    for axis in (left.xaxis, left.yaxis, right.yaxis):
        axis.set_major_locator(LogLocator(subs=(1.0, 2.0, 5.0)))
        axis.set_major_formatter(FormatStrFormatter("%g"))
        axis.set_minor_formatter(NullFormatter())
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=150)
    plt.close(figure)


if __name__ == "__main__":
    typer.run(main)
