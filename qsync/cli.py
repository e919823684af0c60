"""The command line: doctor, demo, learn, plan, explain, replay, validate, diff.

Every command takes --json. Bad input is one sentence on stderr and exit code 2, and nothing is written. Only
doctor, demo, learn and validate import torch.
"""

from __future__ import annotations

import json
import math
import sys
from collections.abc import Iterable, Mapping
from dataclasses import asdict, replace
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.table import Table

import qsync
from qsync import tables
from qsync.errors import QSyncError

app = typer.Typer(
    help="Train one model synchronously over unequal devices, and let nobody wait.",
    add_completion=False,
    pretty_exceptions_enable=False,
)
# Where there is no terminal to ask, rich would assume 80 columns and cut tables to pieces.
console = Console(width=None if sys.stdout.isatty() else 120)

# Newer releases of typer carry their own click, so that click.UsageError would be another class.
_UsageError = typer.BadParameter.__mro__[1]

Json = Annotated[bool, typer.Option("--json", help="Print JSON instead of a table.")]
PlanFile = Annotated[Path, typer.Argument(help="A plan.json.", show_default=False)]
BasisFolder = Annotated[
    Path | None,
    typer.Option("--basis", help="Folder with the graph and profiles.", show_default="the plan's own folder"),
]
ClusterFile = Annotated[
    Path | None,
    typer.Option("--cluster", help="cluster.toml to plan for.", show_default="the folder's cluster.json"),
]
Memory = Annotated[
    list[str] | None, typer.Option(help="Memory budget: CLASS=BYTES, or with K, M, G. Repeatable.")
]
Force = Annotated[
    bool,
    typer.Option("--force", help="Take profiles of other batch shapes, machines or versions, as what-if."),
]


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
        from qsync import doctors

        found = doctors.examine()
    if as_json:
        _print_json(found)
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
    from qsync.graph import OpGraph
    from qsync.whatif import COSTS

    if samples < 1:
        raise QSyncError(f"--samples must be at least 1, found {samples}; 160 is usual")
    graph = OpGraph.load(basis / "graph.json")
    with Console(stderr=True).status("learning costs") as status:
        from qsync import learning
        from qsync.predictor.calls import calls

        model = learning.learn(
            device=device, wanted=[call for _, call in calls(graph)], num=samples, progress=status.update
        )
    model.save(basis / COSTS)
    error = model.error
    if as_json:
        _print_json({"samples": len(model.samples), "error": asdict(error) if error else None})
        return
    table = Table(title="Error of the learned costs, at shapes held out (measured)")
    for heading in ("operator", "median", "95th percentile"):
        table.add_column(heading, justify="left" if heading == "operator" else "right")
    for kind, (median, most) in {**error.by_kind, "all": error.overall}.items() if error else ():
        table.add_row(kind, f"{median:.0%}", f"{most:.0%}")
    console.print(table)
    console.print(f"written to {basis / COSTS}", highlight=False, soft_wrap=True)


@app.command()
def plan(
    context: typer.Context,
    basis: Annotated[
        Path | None,
        typer.Argument(
            metavar="FOLDER", help="Holds graph, cluster, sensitivity and profiles.", show_default=False
        ),
    ] = None,
    out: Annotated[Path, typer.Option("--out", "-o", help="Where to write the plan.")] = Path("plan.json"),
    cluster: ClusterFile = None,
    target_step: Annotated[
        float | None, typer.Option(help="Step time to reach, in seconds.", show_default="the least possible")
    ] = None,
    slack: Annotated[float, typer.Option(help="How much longer than the least step, as a fraction.")] = 0.0,
    memory: Memory = None,
    pin: Annotated[
        list[str] | None, typer.Option(help="Fix operators: 'PATTERN=PRECISION'. Repeatable.")
    ] = None,
    lower_all: Annotated[
        bool, typer.Option("--lower-all", help="Let the strongest class be lowered too.")
    ] = False,
    exclude: Annotated[
        list[str] | None, typer.Option(help="Keep operators that match a pattern in FP32. Repeatable.")
    ] = None,
    together: Annotated[
        list[str] | None,
        typer.Option(help="Operators that run alike: '*.q,*.k,*.v' for those of every layer. Repeatable."),
    ] = None,
    max_variance: Annotated[
        float | None,
        typer.Option(help="The fastest step that adds no more variance than this.", show_default="no limit"),
    ] = None,
    margin: Annotated[
        float, typer.Option(help="Part by which lowered classes may be late and still reach the target.")
    ] = 0.0,
    bucket_cap_mb: Annotated[
        float | None, typer.Option(help="Size of DDP's buckets, in MiB.", show_default="DDP's own")
    ] = None,
    solver: Annotated[str, typer.Option(help="milp (exact) or greedy (QSync's two stages).")] = "milp",
    gap: Annotated[
        float, typer.Option(help="Part by which the plan may add more variance than the least.")
    ] = 1e-3,
    time_limit: Annotated[float, typer.Option(help="Seconds that the exact solver may take.")] = 20.0,
    pareto: Annotated[
        int | None,
        typer.Option(help="Plan for so many step times; --out is then a folder.", show_default="one"),
    ] = None,
    compare: Annotated[
        tuple[Path, Path] | None,
        typer.Option("--diff", help="Plan nothing: what differs between two plans.", show_default=False),
    ] = None,
    levers: Annotated[
        str | None,
        typer.Option(
            help="Search these too, with commas: share, accumulate, buckets, recompute. Others stay off.",
            show_default="none",
        ),
    ] = None,
    trials: Annotated[int, typer.Option(help="Trials of levers, of all processes together.")] = 40,
    storage: Annotated[
        Path | None,
        typer.Option(
            help="Keep trials here: to go on later, and for several processes.", show_default="nowhere"
        ),
    ] = None,
    seed: Annotated[int, typer.Option(help="Seed of the search for levers.")] = 0,
    force: Force = False,
    as_json: Json = False,
) -> None:
    """Choose the precision of every operator on every device class."""
    if compare is not None:
        _check_alone(context, "--diff", but=("compare", "as_json"))
        diff(*compare, as_json)
        return
    if basis is None:
        raise QSyncError(
            "which FOLDER to plan for is missing; name one that qsync demo or qsync.hybrid wrote"
        )

    from qsync.allocator import doubts
    from qsync.whatif import load_basis, load_other

    pins = _pairs(pin, "--pin", "PATTERN=PRECISION")
    for pattern in exclude or []:
        if pins.setdefault(pattern, "fp32") != "fp32":
            raise QSyncError(f"{pattern!r} is both excluded and pinned to {pins[pattern]}; give one of them")
    budgets = _budgets(memory)
    if target_step is not None and not target_step > 0:
        raise QSyncError(f"--target-step must be positive, found {target_step}; give seconds")
    if bucket_cap_mb is not None and not 1 <= bucket_cap_mb * 2**20 < math.inf:
        raise QSyncError(f"--bucket-cap-mb must be positive, found {bucket_cap_mb}; DDP's own is 25")
    found = load_basis(basis, cluster, force=force)
    options: dict[str, Any] = {
        "budgets": budgets, "pins": pins, "lower_all": lower_all, "margin": margin,
        "together": [[one.strip() for one in group.split(",")] for group in together or []],
        "solver": solver, "gap": gap, "time_limit_s": time_limit,
        "bucket_cap_bytes": int(bucket_cap_mb * 2**20) if bucket_cap_mb else None,
    }  # fmt: skip
    if max_variance is not None and (target_step is not None or slack):
        raise QSyncError("--max-variance looks for the least step; leave out --target-step and --slack")
    if pareto is not None:
        if target_step is not None or slack or max_variance is not None:
            raise QSyncError(
                "--pareto plans for every step time; leave out --target-step, --slack and --max-variance"
            )
        if levers is not None:
            raise QSyncError("--pareto plans without levers; leave out --levers")
        _plan_frontier(found, pareto, out, options, as_json)
        return
    options |= {"target_s": target_step, "slack": slack}
    if levers is None:
        chosen = _planned(found, max_variance, options)
    elif max_variance is not None:
        raise QSyncError("--max-variance looks for the least step without levers; leave out --levers")
    else:
        found, chosen = _search(found, levers, load_other(basis), trials, storage, seed, options)
    _check(found, chosen, budgets)
    warnings = doubts(found.graph, chosen, found.profiles, found.cluster, budgets)
    chosen.save(out)
    if as_json:
        _print_json({**chosen.to_json(), **({"warnings": warnings} if warnings else {})})
        return
    console.print(tables.plan_table(chosen))
    for line in tables.lever_lines(chosen):
        console.print(line, highlight=False, soft_wrap=True)
    if chosen.gap is not None:
        all_same = "step, memory and levers" if chosen.levers else "step and memory"
        console.print(
            f"No plan adds less than {chosen.bound:.3g} variance at this {all_same}; this one adds "
            f"{chosen.added_variance:.3g}, {chosen.gap:.1%} of it perhaps needlessly ({chosen.solver})"
            if chosen.gap > 1e-6 else f"No plan adds less variance at this {all_same} (proved)",
            highlight=False, soft_wrap=True,
        )  # fmt: skip
    for warning in warnings:
        console.print(f"[yellow]Warning:[/yellow] {warning}", highlight=False, soft_wrap=True)
    console.print(f"written to {out}; checked by full replay (simulated)", highlight=False, soft_wrap=True)


def _planned(found: Any, max_variance: float | None, options: dict[str, Any]) -> Any:
    from qsync.allocator import allocate, fastest_within

    parts = (found.graph, found.profiles, found.sensitivity, found.cluster)
    if max_variance is None:
        return allocate(*parts, **options)
    with Console(stderr=True).status("planning") as status:
        return fastest_within(*parts, max_variance, progress=status.update, **options)


def _search(
    found: Any, levers: str, other: Any, trials: int, storage: Path | None, seed: int, options: dict[str, Any]
) -> tuple[Any, Any]:
    """The basis under the levers that were found best, and the plan."""
    from qsync.allocator import search
    from qsync.whatif import under_levers

    with Console(stderr=True).status("searching levers") as status:
        chosen = search(
            found.graph, found.profiles, found.sensitivity, found.cluster,
            levers=[name.strip() for name in levers.split(",") if name.strip()], other=other, trials=trials,
            storage=storage, seed=seed, progress=status.update, **options,
        )  # fmt: skip
    return under_levers(found, chosen.levers, other), chosen


def _plan_frontier(found: Any, num: int, out: Path, options: dict[str, Any], as_json: bool) -> None:
    """Plans for several step times into a folder, with a picture of the trade."""
    from qsync.allocator import frontier

    folder = out.with_suffix("") if out.suffix == ".json" else out
    if folder.is_file():
        raise QSyncError(f"--out {folder} is a file; with --pareto name a folder")
    with Console(stderr=True).status("planning") as status:
        plans = frontier(
            found.graph, found.profiles, found.sensitivity, found.cluster, num,
            progress=status.update, **options,
        )  # fmt: skip
    for chosen in plans:
        _check(found, chosen, options["budgets"])
    from qsync.experiments import frontier_picture

    for number, chosen in enumerate(plans, 1):
        chosen.save(folder / f"plan-{number}.json")
    picture = frontier_picture.draw(plans, folder / "frontier.png")
    if as_json:
        _print_json({"simulated": True, "plans": [chosen.to_json() for chosen in plans]})
        return
    console.print(tables.frontier_table(plans))
    console.print(
        f"written to {folder}, with {picture.name}; checked by full replay", highlight=False, soft_wrap=True
    )


def _check(found: Any, chosen: Any, budgets: Mapping[str, int]) -> None:
    """QSyncError unless full replay says of a plan what the plan does."""
    from qsync.allocator import check_plan

    certificate = check_plan(
        found.graph, chosen, found.profiles, found.sensitivity, found.cluster,
        budgets=budgets, bucket_cap_bytes=chosen.bucket_cap_bytes,
    )  # fmt: skip
    if not certificate.ok:
        raise QSyncError(f"the plan does not hold under full replay: {certificate.violations[0]}")


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
    from qsync.profiles import shown
    from qsync.replayer import peaks

    budgets = _budgets(memory)
    chosen, found = _load(plan_file, basis, cluster, force)
    own = {c.name: chosen.budgets[c.name] for c in found.cluster.classes if c.name in chosen.budgets}
    budgets = {**own, **budgets}
    found = replace(found, cluster=found.cluster.with_memory(budgets))
    filled = peaks(found.graph, chosen, found.profiles, found.cluster)
    if picture is not None:
        from qsync.experiments import memory_picture

        memory_picture.steps(
            {shown(name, found.profiles[name].origin): peak for name, peak in filled.items()}, picture
        )
    if allocation is not None:
        from qsync.experiments import pictures

        emulated = {c.name for c in found.cluster.classes if c.emulated_share is not None}
        pictures.allocation(chosen, found.graph, found.sensitivity, allocation, emulated=emulated)
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
        _print_json({
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
    from qsync.profiles import shown
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
        from qsync.experiments import pictures

        pictures.timelines(pictures.lanes_of(timeline), picture, simulated=True)
    varied = None
    if steps is not None:
        varied = vary(
            found.graph, chosen, found.profiles, found.cluster, num_steps=steps, seed=seed,
            bucket_cap_bytes=chosen.bucket_cap_bytes,
        )  # fmt: skip
    if as_json:
        _print_json({**timeline.to_json(), **({"steps_s": list(varied.steps_s)} if varied else {})})
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
    from qsync.experiments.validate import kinds_table, run_validation, table

    found = run_validation(
        model, num_ranks=ranks, num_plans=plans, turns=turns, seed=seed, weak_share=weak_share, out=out
    )
    if as_json:
        _print_json(found.to_json())
        return
    console.print(table(found))
    console.print(kinds_table(found))
    console.print(f"kept in {out}", highlight=False, soft_wrap=True)


@app.command()
def diff(
    before: Annotated[Path, typer.Argument(help="A plan.json.", show_default=False)],
    after: Annotated[Path, typer.Argument(help="Another one.", show_default=False)],
    as_json: Json = False,
) -> None:
    """Which operators have another precision in the second plan, and what is predicted of each plan."""
    from qsync.plans import Plan

    plans = [Plan.load(path) for path in (before, after)]
    lines = plans[0].diff(plans[1]).splitlines()
    steps, added = [plan.step_s for plan in plans], [plan.added_variance for plan in plans]
    if as_json:
        _print_json({"differences": lines, "step_s": steps, "added_variance": added})
        return
    if None not in (*steps, *added):
        a_ms, b_ms = (1e3 * (seconds or 0.0) for seconds in steps)
        lines.append(
            f"step {a_ms:.4g} -> {b_ms:.4g} ms, added variance {added[0]:.3g} -> {added[1]:.3g} (simulated)"
        )
    if plans[0].diff(plans[1]) == "":
        lines.insert(0, "The plans assign the same precisions.")
    console.print("\n".join(lines), highlight=False, soft_wrap=True, markup=False)


def _check_alone(context: typer.Context, option: str, but: tuple[str, ...]) -> None:
    """QSyncError if anything beside `option` was given that it would leave without effect."""
    for parameter in context.command.params:
        source = context.get_parameter_source(parameter.name or "")
        if parameter.name not in but and source is not None and source.name == "COMMANDLINE":
            named = parameter.opts[0] if parameter.param_type_name == "option" else parameter.metavar
            raise QSyncError(f"{option} plans nothing, so {named} has no effect; leave it out")


def _load(plan_file: Path, basis: Path | None, cluster: Path | None, force: bool) -> tuple[Any, Any]:
    """A plan and what it was made from, known to belong together."""
    from qsync.plans import Plan
    from qsync.whatif import load_basis, load_other, under_levers

    chosen = Plan.load(plan_file)
    if basis is None and not (plan_file.parent / "graph.json").is_file():
        raise QSyncError(
            f"there is no graph.json beside {plan_file}; name the folder it was planned from with --basis"
        )
    found = load_basis(basis or plan_file.parent, cluster, force=force)
    chosen.check_graph(found.graph)
    return chosen, under_levers(found, chosen.levers, load_other(basis or plan_file.parent))


def _pairs(texts: list[str] | None, option: str, form: str) -> dict[str, str]:
    """Name -> value from 'name=value' options; the same name twice with another value is a contradiction."""
    pairs: dict[str, str] = {}
    for text in texts or []:
        name, found, value = text.rpartition("=")
        if not found or not name or not value:
            raise QSyncError(f"{option} takes {form}, found {text!r}")
        if pairs.get(name, value) != value:
            raise QSyncError(f"{option} gives {name!r} both {pairs[name]} and {value}; give it once")
        pairs[name] = value
    return pairs


def _budgets(texts: list[str] | None) -> dict[str, int]:
    """Class -> bytes, from --memory options."""
    return {name: _bytes(text) for name, text in _pairs(texts, "--memory", "CLASS=BYTES").items()}


def _bytes(text: str) -> int:
    units = {"k": 2**10, "m": 2**20, "g": 2**30}
    scale = units.get(text[-1:].lower(), 1)
    try:
        number = int(float(text[:-1] if text[-1:].lower() in units else text) * scale)
    except (ValueError, OverflowError):
        raise QSyncError(f"--memory takes bytes, or a number with K, M or G, found {text!r}") from None
    if number < 1:
        raise QSyncError(f"--memory must be positive, found {text!r}; give bytes, or a number with K, M or G")
    return number


def _print_json(value: Any) -> None:
    print(json.dumps(value, indent=1))


if __name__ == "__main__":
    main()
