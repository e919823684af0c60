"""The command line: doctor, demo, learn, plan, expand, explain, replay, validate, diff.

Every command takes --json. Bad input is one sentence on stderr and exit code 2, and nothing is written. Only
doctor, demo, learn, expand and validate import torch.
"""

from __future__ import annotations

import sys
from collections.abc import Iterable
from dataclasses import asdict, replace
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.table import Table

import qsync
from qsync.commands import expand, plan, tables
from qsync.commands.options import (
    BasisFolder,
    ClusterFile,
    Force,
    Json,
    Memory,
    PlanFile,
    budgets_of,
    console,
    print_json,
)
from qsync.errors import QSyncError

app = typer.Typer(
    help="Train one model synchronously over unequal devices, and let nobody wait.",
    add_completion=False,
    pretty_exceptions_enable=False,
)
# Newer releases of typer carry their own click, so that click.UsageError would be another class.
_UsageError = typer.BadParameter.__mro__[1]


def main() -> None:
    """Entry point of `qsync`."""
    try:
        code = app(sys.argv[1:] or ["--help"], prog_name="qsync", standalone_mode=False)
    except (QSyncError, _UsageError) as error:
        message = str(error) if isinstance(error, QSyncError) else error.format_message()  # type: ignore[attr-defined]
        _fail(message, 2)
    except (KeyboardInterrupt, typer.Abort):
        _fail("interrupted", 130)
    except BrokenPipeError:
        sys.stderr.close()  # else Python complains once more on its way out
        sys.exit(1)
    except OSError as error:
        path = error.filename2 or error.filename  # the second is where a finished file should have gone
        if path is None:
            raise
        _fail(f"cannot write or read {path}: {error.strerror}; name another path", 2)
    sys.exit(code if isinstance(code, int) else 0)


def _fail(message: str, code: int) -> None:
    print("qsync: " + " ".join(message.split()), file=sys.stderr)
    sys.exit(code)


def _version(wanted: bool) -> None:
    if wanted:
        print(f"qsync {qsync.__version__}")
        raise typer.Exit


@app.callback()
def _options(
    version: Annotated[
        bool, typer.Option("--version", callback=_version, is_eager=True, help="Print the version and stop.")
    ] = False,
) -> None:
    """Train one model synchronously over unequal devices, and let nobody wait."""


@app.command()
def doctor(as_json: Json = False) -> None:
    """What this machine has: devices, precisions, kernels chosen, and why any is missing."""
    with Console(stderr=True).status("timing the kernels of this machine"):
        from qsync.commands import doctor as doctors

        found = doctors.examine()
    if as_json:
        print_json(found)
        return
    for line in doctors.summary(found):
        console.print(line, highlight=False)
    for device in found["devices"]:
        for shown in (doctors.table(device), *doctors.remarks(device), doctors.reasons(device)):
            console.print(shown, highlight=False)


@app.command()
def demo(
    workload: Annotated[str, typer.Option(help="gpt (source text) or resnet (digits).")] = "gpt",
    data: Annotated[Path | None, typer.Option(help="Your own text: a file or a folder.")] = None,
    out: Annotated[Path, typer.Option(help="Folder for report, plan, trace and pictures.")] = Path(
        "demo-out"
    ),
    weak_share: Annotated[
        float, typer.Option(help="Share of its core that the emulated weak rank gets.")
    ] = 0.5,
    seeds: Annotated[int, typer.Option(help="How many seeds to train with.")] = 1,
    seed: Annotated[int, typer.Option(help="The first seed.")] = 0,
    steps: Annotated[
        int | None, typer.Option(help="Training steps of each run.", show_default="the workload's own")
    ] = None,
    as_json: Json = False,
) -> None:
    """The main job on this machine: two unequal ranks train, against every other way to run them."""
    from qsync.experiments.demo.launch import run_demo
    from qsync.experiments.demo.report import closing_lines, table

    content = run_demo(
        workload=workload, data=data, out=out, weak_share=weak_share, seeds=seeds, seed=seed, steps=steps
    )
    if as_json:
        print_json(content)
        return
    console.print(table(content))
    for line in closing_lines(content, out):
        console.print(line, highlight=False, soft_wrap=True)


@app.command()
def learn(
    basis: Annotated[
        Path,
        typer.Argument(metavar="FOLDER", help="Holds the graph whose operators matter.", show_default=False),
    ],
    samples: Annotated[int, typer.Option(help="How many operators to measure.")] = 160,
    device: Annotated[str, typer.Option(help="cpu, or cuda.")] = "cpu",
    as_json: Json = False,
) -> None:
    """Measure a few operators here and learn what others cost: FOLDER/costs.json, for what-if planning."""
    from qsync.commands.what_if import COSTS
    from qsync.records.graph import OpGraph

    if samples < 1:
        raise QSyncError(f"--samples must be at least 1, found {samples}; 160 is usual")
    graph = OpGraph.load(basis / "graph.json")
    with Console(stderr=True).status("learning costs") as status:
        from qsync import cost_learning
        from qsync.predictor.cost_model.op_calls import calls

        model = cost_learning.learn(
            device=device, wanted=[call for _, call in calls(graph)], num=samples, progress=status.update
        )
    model.save(basis / COSTS)
    error = model.error
    if as_json:
        print_json({"samples": len(model.samples), "error": asdict(error) if error else None})
        return
    table = Table(title="Error of the learned costs, at shapes held out (measured)")
    for heading in ("operator", "median", "95th percentile"):
        table.add_column(heading, justify="left" if heading == "operator" else "right")
    for kind, (median, most) in {**error.by_kind, "all": error.overall}.items() if error else ():
        table.add_row(kind, f"{median:.0%}", f"{most:.0%}")
    console.print(table)
    console.print(f"written to {basis / COSTS}", highlight=False, soft_wrap=True)


app.command()(plan.plan)
app.command()(expand.expand)


@app.command()
def explain(
    plan_file: PlanFile,
    basis: BasisFolder = None,
    cluster: ClusterFile = None,
    memory: Memory = None,
    picture: Annotated[Path | None, typer.Option(help="Draw the memory of a step here (PNG).")] = None,
    allocation: Annotated[
        Path | None, typer.Option(help="Draw the precision of every operator above its sensitivity (PNG).")
    ] = None,
    force: Force = False,
    as_json: Json = False,
) -> None:
    """Why operators are lowered or cannot be, what more time or memory would buy, what fills the memory."""
    from qsync.allocator import explain as reasons_for
    from qsync.allocator import refusals, shadow_prices
    from qsync.records.profiles import shown
    from qsync.replayer import memory_breakdown

    budgets = budgets_of(memory)
    chosen, found = _load(plan_file, basis, cluster, force)
    own = {c.name: chosen.budgets[c.name] for c in found.cluster.classes if c.name in chosen.budgets}
    budgets = {**own, **budgets}
    found = replace(found, cluster=found.cluster.with_memory(budgets))
    filled = memory_breakdown(found.graph, chosen, found.profiles, found.cluster)
    if picture is not None:
        from qsync.figures import memory as memory_figure

        memory_figure.steps(
            {shown(name, found.profiles[name].origin): peak for name, peak in filled.items()}, picture
        )
    if allocation is not None:
        from qsync.figures import precision_map

        emulated = {c.name for c in found.cluster.classes if c.emulated_share is not None}
        precision_map.allocation(chosen, found.graph, found.sensitivity, allocation, emulated=emulated)
    refused = refusals(found.graph, chosen, found.profiles, found.cluster)
    reasons = reasons_for(
        found.graph, chosen, found.profiles, found.sensitivity, found.cluster,
        budgets=budgets, bucket_cap_bytes=chosen.bucket_cap_bytes,
    )  # fmt: skip
    prices = shadow_prices(
        found.graph, chosen, found.profiles, found.sensitivity, found.cluster,
        budgets=budgets, bucket_cap_bytes=chosen.bucket_cap_bytes,
    )  # fmt: skip
    if as_json:
        print_json({
            "simulated": True,
            "reasons": [reason.to_json() for reason in reasons],
            "shadow_prices": [price.to_json() for price in prices],
            "refused": [refusal.to_json() for refusal in refused],
            "memory": {
                name: {"origin": found.profiles[name].origin, **peak.to_json()}
                for name, peak in filled.items()
            },
        })  # fmt: skip
        return
    if reasons:
        console.print(tables.reasons_table(reasons))
    else:
        console.print("The plan lowers nothing: every rank keeps up in FP32.")
    console.print(tables.shadow_table(prices))
    if refused:
        console.print(tables.refusals_table(refused, found.profiles))
    console.print(tables.memory_table(filled, found.profiles))
    _say_what_is_missing(found.profiles.values())


def _say_what_is_missing(profiles: Iterable[Any]) -> None:
    """Which classes' steps are predicted as if batches were always there."""
    without = [profile.device_class for profile in profiles if not profile.loading_s]
    if without:
        console.print(
            f"Data loading is no part of the steps of {', '.join(without)}: no loader was profiled (pass "
            "loader= to qsync.hybrid or qsync.profile)",
            highlight=False, soft_wrap=True,
        )  # fmt: skip


@app.command()
def replay(
    plan_file: PlanFile,
    basis: BasisFolder = None,
    cluster: ClusterFile = None,
    trace: Annotated[Path | None, typer.Option(help="Write a Perfetto trace here.")] = None,
    picture: Annotated[Path | None, typer.Option(help="Draw the step of every class here (PNG).")] = None,
    steps: Annotated[
        int | None, typer.Option(help="Also simulate so many steps that vary as the profiles did.")
    ] = None,
    seed: Annotated[int, typer.Option(help="Seed of these steps.")] = 0,
    force: Force = False,
    as_json: Json = False,
) -> None:
    """What a step under a plan takes on every rank, and where each waits (simulated)."""
    from qsync.records.profiles import shown
    from qsync.replayer import replay as simulate
    from qsync.replayer import vary
    from qsync.replayer.trace import write_trace

    chosen, found = _load(plan_file, basis, cluster, force)
    timeline = simulate(
        found.graph, chosen, found.profiles, found.cluster, bucket_cap_bytes=chosen.bucket_cap_bytes
    )
    if trace is not None:
        write_trace(timeline, trace)
    if picture is not None:
        from qsync.figures import timeline as timeline_figure

        timeline_figure.timelines(timeline_figure.lanes_of(timeline), picture, simulated=True)
    varied = None
    if steps is not None:
        varied = vary(
            found.graph, chosen, found.profiles, found.cluster, num_steps=steps, seed=seed,
            bucket_cap_bytes=chosen.bucket_cap_bytes,
        )  # fmt: skip
    if as_json:
        print_json({**timeline.to_json(), **({"steps_s": list(varied.steps_s)} if varied else {})})
        return
    interval = (
        f", {timeline.interval_s[0] * 1e3:.1f} to {timeline.interval_s[1] * 1e3:.1f} in nine runs of ten"
        if timeline.interval_s else ""
    )  # fmt: skip
    table = Table(title=f"One step of {chosen.model}: {timeline.step_s * 1e3:.1f} ms{interval} (simulated)")
    for heading in ("class", "ranks", "loading", "compute", "communication", "waiting", "memory peak"):
        table.add_column(heading, justify="left" if heading == "class" else "right")
    for name, entry in timeline.classes.items():
        communication = (entry.slowed_s + entry.exposed_s) * 1e3
        table.add_row(
            shown(name, entry.origin), str(entry.num_ranks),
            f"{entry.loading_s * 1e3:.1f} ms" if entry.loading_s else "-",
            f"{(entry.compute_s - entry.loading_s) * 1e3:.1f} ms", f"{communication:.1f} ms",
            f"{entry.wait_s * 1e3:.1f} ms", f"{entry.memory_bytes / 2**20:.0f} MiB",
        )  # fmt: skip
    console.print(table)
    _say_what_is_missing(found.profiles.values())
    if varied is not None:
        low, high = (1e3 * seconds for seconds in varied.range_s)
        console.print(
            f"{steps} steps that vary as the profiles did (simulated, seed {seed}): nine in ten take "
            f"{low:.1f} to {high:.1f} ms; waiting for whoever is late costs {varied.lost:.1%}",
            highlight=False, soft_wrap=True,
        )  # fmt: skip


@app.command()
def validate(
    model: Annotated[str, typer.Option(help="gpt, bert, vit, resnet or vgg.")] = "gpt",
    ranks: Annotated[int, typer.Option(help="1, or 2 unequal ones.")] = 2,
    plans: Annotated[int, typer.Option(help="How many random plans to run.")] = 8,
    turns: Annotated[int, typer.Option(help="How often each plan takes its turn.")] = 3,
    seed: Annotated[int, typer.Option(help="Seed of the plans.")] = 0,
    weak_share: Annotated[
        float, typer.Option(help="Share of its core that the emulated weak rank gets.")
    ] = 0.5,
    out: Annotated[Path, typer.Option(help="Folder for validation.json and the profiles.")] = Path(
        "validation"
    ),
    as_json: Json = False,
) -> None:
    """Run random plans on this machine's ranks: by how much replay misses each, and why.

    Your own model: call qsync.validate(model, batch, loss_fn) in a torchrun script.
    """
    from qsync.experiments.prediction.validation_ranks import kinds_table, run_validation, table

    found = run_validation(
        model, num_ranks=ranks, num_plans=plans, turns=turns, seed=seed, weak_share=weak_share, out=out
    )
    if as_json:
        print_json(found.to_json())
        return
    console.print(table(found))
    console.print(kinds_table(found))
    console.print(f"kept in {out}", highlight=False, soft_wrap=True)


app.command()(plan.diff)


def _load(plan_file: Path, basis: Path | None, cluster: Path | None, force: bool) -> tuple[Any, Any]:
    """A plan and what it was made from, known to belong together."""
    from qsync.commands.what_if import load_basis, load_other, under_levers
    from qsync.records.plans import Plan

    chosen = Plan.load(plan_file)
    if basis is None and not (plan_file.parent / "graph.json").is_file():
        raise QSyncError(
            f"there is no graph.json beside {plan_file}; name the folder it was planned from with --basis"
        )
    found = load_basis(basis or plan_file.parent, cluster, force=force)
    chosen.check_graph(found.graph)
    return chosen, under_levers(found, chosen.levers, load_other(basis or plan_file.parent))


if __name__ == "__main__":
    main()
