"""The commands that make plans and compare them: plan, diff. They import no torch."""

from __future__ import annotations

import math
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console

from qsync.commands import tables
from qsync.commands.options import (
    ClusterFile,
    Force,
    Json,
    Memory,
    budgets_of,
    console,
    pairs_of,
    patterns_of,
    print_json,
)
from qsync.errors import QSyncError

# Why a plan is not proved to be the best.
_WHY = {
    "optimal": "within the gap that was asked for",
    "time-limited": "time was up; --time-limit gives more",
    "unproved": "the bound may be loose where memory is short or classes wait for each other",
    "unsolved": "the program ran into numerical trouble",
}


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
    save_less: Annotated[
        list[str] | None,
        typer.Option(help="What keeps less for backward, at some time: CLASS=PATTERN. Repeatable."),
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
            help="Search these too, with commas: share, accumulate, buckets, recompute, save_less. Others "
            "stay off.",
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

    from qsync.allocator.explanation import plan_warnings
    from qsync.commands.what_if import load_basis, load_other

    pins = pairs_of(pin, "--pin", "PATTERN=PRECISION")
    for pattern in exclude or []:
        if pins.setdefault(pattern, "fp32") != "fp32":
            raise QSyncError(f"{pattern!r} is both excluded and pinned to {pins[pattern]}; give one of them")
    budgets = budgets_of(memory)
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
        "saving_less": patterns_of(save_less),
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
    warnings = plan_warnings(found.graph, chosen, found.profiles, found.cluster, budgets)
    chosen.save(out)
    if as_json:
        print_json({**chosen.to_json(), **({"warnings": warnings} if warnings else {})})
        return
    console.print(tables.plan_table(chosen))
    for line in tables.lever_lines(chosen):
        console.print(line, highlight=False, soft_wrap=True)
    if chosen.gap is not None:
        all_same = "step, memory and levers" if chosen.levers else "step and memory"
        console.print(
            f"No plan adds less than {chosen.bound:.3g} variance at this {all_same}; this one adds "
            f"{chosen.added_variance:.3g}, {chosen.gap:.1%} of it perhaps needlessly ({chosen.solver}: "
            f"{_WHY.get(chosen.status, chosen.status)})"
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
    from qsync.allocator.levers import search
    from qsync.commands.what_if import under_levers

    with Console(stderr=True).status("searching levers") as status:
        chosen = search(
            found.graph, found.profiles, found.sensitivity, found.cluster,
            levers=[name.strip() for name in levers.split(",") if name.strip()], other=other, trials=trials,
            storage=storage, seed=seed, progress=status.update, **options,
        )  # fmt: skip
    return under_levers(found, chosen.levers, other), chosen


def _plan_frontier(found: Any, num: int, out: Path, options: dict[str, Any], as_json: bool) -> None:
    """Plans for several step times into a folder, with a picture of the trade."""
    from qsync.allocator import tradeoff

    folder = out.with_suffix("") if out.suffix == ".json" else out
    if folder.is_file():
        raise QSyncError(f"--out {folder} is a file; with --pareto name a folder")
    with Console(stderr=True).status("planning") as status:
        plans = tradeoff(
            found.graph, found.profiles, found.sensitivity, found.cluster, num,
            progress=status.update, **options,
        )  # fmt: skip
    for chosen in plans:
        _check(found, chosen, options["budgets"])
    from qsync.figures import pareto

    for number, chosen in enumerate(plans, 1):
        chosen.save(folder / f"plan-{number}.json")
    picture = pareto.draw(plans, folder / "frontier.png")
    if as_json:
        print_json({"simulated": True, "plans": [chosen.to_json() for chosen in plans]})
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


def diff(
    before: Annotated[Path, typer.Argument(help="A plan.json.", show_default=False)],
    after: Annotated[Path, typer.Argument(help="Another one.", show_default=False)],
    as_json: Json = False,
) -> None:
    """Which operators have another precision in the second plan, and what is predicted of each plan."""
    from qsync.records.plans import Plan

    plans = [Plan.load(path) for path in (before, after)]
    lines = plans[0].diff(plans[1]).splitlines()
    steps, added = [plan.step_s for plan in plans], [plan.added_variance for plan in plans]
    if as_json:
        print_json({"differences": lines, "step_s": steps, "added_variance": added})
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
