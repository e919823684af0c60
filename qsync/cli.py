"""The command line: doctor, demo, plan, explain, replay. Every command takes --json; bad input is one sentence, exit code 2."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.table import Table

from qsync.errors import QSyncError

app = typer.Typer(
    help="Train one model synchronously over unequal devices, and let nobody wait.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
)
console = Console()

Json = Annotated[bool, typer.Option("--json", help="Print JSON instead of a table.")]
PlanFile = Annotated[Path, typer.Argument(help="A plan.json.")]
BasisFolder = Annotated[
    Path | None, typer.Option("--basis", help="Folder with the graph and profiles; default: the plan's own folder.")
]


def main() -> None:
    """Entry point of `qsync`."""
    try:
        app()
    except QSyncError as error:
        print(f"qsync: {error}", file=sys.stderr)
        sys.exit(2)
    except BrokenPipeError:
        sys.exit(1)


@app.command()
def doctor(as_json: Json = False) -> None:
    """What this machine has: devices, precisions, the kernel chosen for each product, and why any is missing."""
    from qsync import doctors

    found = doctors.examine()
    if as_json:
        _print_json(found)
        return
    for line in doctors.summary(found):
        console.print(line, highlight=False)
    for device in found["devices"]:
        console.print(doctors.table(device))


@app.command()
def demo(
    workload: Annotated[str, typer.Option(help="gpt (source text) or resnet (digits).")] = "gpt",
    data: Annotated[Path | None, typer.Option(help="Your own text: a file or a folder.")] = None,
    out: Annotated[Path, typer.Option(help="Folder for the report, the plan, the trace and the pictures.")] = Path("demo-out"),
    weak_share: Annotated[float, typer.Option(help="Share of its core that the emulated weak rank gets.")] = 0.5,
    seeds: Annotated[int, typer.Option(help="How many seeds to train with.")] = 1,
    seed: Annotated[int, typer.Option(help="The first seed.")] = 0,
    steps: Annotated[int | None, typer.Option(help="Training steps of each run.")] = None,
    as_json: Json = False,
) -> None:
    """The main job on this machine: two unequal ranks, real training, measured against everything one could do instead."""
    from qsync.experiments.demo import run_demo
    from qsync.experiments.report import closing_lines, table

    content = run_demo(
        workload=workload, data=data, out=out, weak_share=weak_share, seeds=seeds, seed=seed, steps=steps
    )
    if as_json:
        _print_json(content)
        return
    console.print(table(content))
    for line in closing_lines(content, out):
        console.print(line, highlight=False, soft_wrap=True)


@app.command()
def plan(
    basis: Annotated[Path, typer.Argument(help="Folder with graph.json, cluster.json, sensitivity.json and profiles.")],
    out: Annotated[Path, typer.Option("--out", "-o", help="Where to write the plan.")] = Path("plan.json"),
    cluster: Annotated[Path | None, typer.Option(help="cluster.toml to plan for, instead of the measured one.")] = None,
    target_step: Annotated[float | None, typer.Option(help="Step time to reach, in seconds.")] = None,
    slack: Annotated[float, typer.Option(help="How much slower than the fastest step may be, as a fraction.")] = 0.0,
    memory: Annotated[list[str] | None, typer.Option(help="Memory budget of a class: CLASS=BYTES. Repeatable.")] = None,
    pin: Annotated[list[str] | None, typer.Option(help="Fix operators: 'PATTERN=PRECISION'. Repeatable.")] = None,
    as_json: Json = False,
) -> None:
    """Choose the precision of every operator on every device class."""
    from dataclasses import replace

    from qsync.allocator import allocate, check_plan
    from qsync.cluster import Cluster
    from qsync.folders import Basis

    found = Basis.load(basis)
    if cluster is not None:
        found = replace(found, cluster=Cluster.load(cluster))
    pins = dict(_pair(text, "--pin", "PATTERN=PRECISION") for text in pin or [])
    budgets = {name: _bytes(text) for name, text in (_pair(t, "--memory", "CLASS=BYTES") for t in memory or [])}
    chosen = allocate(
        found.graph, found.profiles, found.sensitivity, found.cluster,
        target_s=target_step, slack=slack, budgets=budgets or None, pins=pins or None,
    )  # fmt: skip
    certificate = check_plan(found.graph, chosen, found.profiles, found.sensitivity, found.cluster, budgets=budgets or None)
    if not certificate.ok:
        raise QSyncError(f"the plan does not hold under full replay: {certificate.violations[0]}")
    chosen.save(out)
    if as_json:
        _print_json(chosen.to_json())
        return
    console.print(_plan_table(chosen))
    console.print(f"written to {out}; checked by full replay (simulated)", highlight=False)


@app.command()
def explain(plan_file: PlanFile, basis: BasisFolder = None, as_json: Json = False) -> None:
    """Why each lowered operator is lowered: time saved, variance added, and what would happen if it were raised."""
    from qsync.allocator import explain as reasons_for

    chosen, found = _load(plan_file, basis)
    reasons = reasons_for(found.graph, chosen, found.profiles, found.sensitivity, found.cluster)
    if as_json:
        _print_json({"simulated": True, "reasons": [reason.to_json() for reason in reasons]})
        return
    table = Table(title=f"Why {len(reasons)} operators are lowered (simulated)")
    for heading in ("operator", "class", "runs in", "saves", "adds variance", "if raised to", "step", "why not"):
        table.add_column(heading, justify="right" if heading in ("saves", "adds variance", "step") else "left")
    for reason in reasons:
        table.add_row(
            reason.op, reason.device_class, str(reason.precision), f"{reason.time_saved_s * 1e3:.2f} ms",
            f"{reason.added_variance:.2e}", str(reason.raised_to), f"{reason.step_if_raised_s * 1e3:.1f} ms", reason.verdict,
        )  # fmt: skip
    console.print(table)
    if not reasons:
        console.print("The plan lowers nothing: every rank keeps up in FP32.")


@app.command()
def replay(
    plan_file: PlanFile,
    basis: BasisFolder = None,
    trace: Annotated[Path | None, typer.Option(help="Write a Perfetto trace here.")] = None,
    picture: Annotated[Path | None, typer.Option(help="Draw the step of every class here (PNG).")] = None,
    as_json: Json = False,
) -> None:
    """What a step under a plan takes on every rank, and where each waits (simulated)."""
    from qsync.replayer import replay as simulate
    from qsync.replayer.trace import write_trace

    chosen, found = _load(plan_file, basis)
    timeline = simulate(found.graph, chosen, found.profiles, found.cluster, bucket_cap_bytes=chosen.bucket_cap_bytes)
    if trace is not None:
        write_trace(timeline, trace)
    if picture is not None:
        from qsync.experiments import pictures

        pictures.timelines(pictures.lanes_of(timeline), picture, simulated=True)
    if as_json:
        _print_json(timeline.to_json())
        return
    table = Table(title=f"One step: {timeline.step_s * 1e3:.1f} ms (simulated)")
    for heading in ("class", "ranks", "compute", "communication", "waiting", "memory peak"):
        table.add_column(heading, justify="left" if heading == "class" else "right")
    for name, entry in timeline.classes.items():
        communication = (entry.slowed_s + entry.exposed_s) * 1e3
        table.add_row(
            name, str(entry.num_ranks), f"{entry.compute_s * 1e3:.1f} ms", f"{communication:.1f} ms",
            f"{entry.wait_s * 1e3:.1f} ms", f"{entry.memory_bytes / 2**20:.0f} MiB",
        )  # fmt: skip
    console.print(table)


def _load(plan_file: Path, basis: Path | None) -> tuple[Any, Any]:
    """A plan and what it was made from, known to belong together."""
    from qsync.folders import Basis
    from qsync.plans import Plan

    chosen = Plan.load(plan_file)
    found = Basis.load(basis or plan_file.parent)
    chosen.check_graph(found.graph)
    return chosen, found


def _plan_table(chosen: Any) -> Table:
    table = Table(title=f"Plan for {chosen.model}: {chosen.step_s * 1e3:.1f} ms a step (simulated)")
    for heading in ("class", "lowered operators", "precisions", "waiting", "memory peak", "added variance"):
        table.add_column(heading, justify="left" if heading in ("class", "precisions") else "right")
    for name, entry in chosen.classes.items():
        counts: dict[str, int] = {}
        for precision in entry.assignment.values():
            counts[str(precision)] = counts.get(str(precision), 0) + 1
        table.add_row(
            name, f"{len(entry.lowered)} of {len(entry.assignment)}", ", ".join(f"{n} {p}" for p, n in counts.items()),
            f"{entry.predicted.wait_s * 1e3:.1f} ms", f"{entry.predicted.memory_bytes / 2**20:.0f} MiB",
            f"{entry.predicted.added_variance:.2e}",
        )  # fmt: skip
    return table


def _pair(text: str, option: str, form: str) -> tuple[str, str]:
    name, found, value = text.rpartition("=")
    if not found or not name or not value:
        raise QSyncError(f"{option} takes {form}, found {text!r}")
    return name, value


def _bytes(text: str) -> int:
    units = {"k": 2**10, "m": 2**20, "g": 2**30}
    scale = units.get(text[-1:].lower(), 1)
    try:
        number = float(text[:-1] if text[-1:].lower() in units else text)
    except ValueError:
        raise QSyncError(f"--memory takes bytes, or a number with K, M or G, found {text!r}") from None
    return int(number * scale)


def _print_json(value: Any) -> None:
    print(json.dumps(value, indent=1))


if __name__ == "__main__":
    main()
