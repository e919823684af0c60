"""`qsync plan`: choose the precision of every operator on every device class. No torch."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.text import Text

from qsync.commands import pareto as pareto_plans
from qsync.commands import tables
from qsync.commands.cards import judge_cards
from qsync.commands.options import (
    Cards,
    CardsLength,
    CardsModel,
    ClusterFile,
    Folder,
    Force,
    Json,
    Memory,
    budgets_of,
    check_outputs,
    console,
    pairs_of,
    patterns_of,
    print_json,
    print_lines,
    working,
)
from qsync.errors import QSyncError
from qsync.records.plan_folder import Basis
from qsync.records.plans import Plan


@dataclass(frozen=True, slots=True)
class _Goal:
    """The goal of planning: a target or a slack, several step times, or the least under a variance."""

    target_s: float | None
    slack: float | None
    max_variance: float | None
    num_points: int | None


def plan(
    folder: Folder = None,
    out: Annotated[Path, typer.Option("--out", "-o", help="Where to write the plan.")] = Path("plan.json"),
    cluster: ClusterFile = None,
    target_step: Annotated[
        float | None, typer.Option(help="Step time to reach, in seconds.", show_default="the least possible")
    ] = None,
    slack: Annotated[
        float | None,
        typer.Option(
            help="How much longer than the least step, as a fraction.", show_default="the profiles' error"
        ),
    ] = None,
    memory: Memory = None,
    pin: Annotated[
        list[str] | None, typer.Option(help="Fix operators: 'PATTERN=PRECISION'. Repeatable.")
    ] = None,
    lower_all: Annotated[
        bool, typer.Option("--lower-all", help="Let the strongest class be lowered too.")
    ] = False,
    base: Annotated[
        str,
        typer.Option(help="What the strong class runs in: fp32, or as torch.autocast: tf32, bf16, fp16."),
    ] = "fp32",
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
    gap: Annotated[
        float, typer.Option(help="Part by which the plan may add more variance than the least.")
    ] = 1e-3,
    time_limit: Annotated[float, typer.Option(help="Seconds that the solver may take.")] = 20.0,
    pareto: Annotated[
        int | None,
        typer.Option(
            help="Plan for so many step times, with levers of blocks for each of several memories; --out is "
            "then a folder.",
            show_default="one",
        ),
    ] = None,
    levers: Annotated[
        str | None,
        typer.Option(
            help="Search these too, with commas: share, accumulate, buckets, recompute, save_less. Others "
            "stay off.",
            show_default="none",
        ),
    ] = None,
    cards: Cards = None,
    link: Annotated[str, typer.Option(help="With --cards: the bandwidth between hosts.")] = "25Gb",
    model: CardsModel = None,
    batch: Annotated[
        int, typer.Option(min=1, help="With --cards: samples of a step, on all cards together.")
    ] = 256,
    length: CardsLength = None,
    force: Force = False,
    as_json: Json = False,
) -> None:
    """Choose the precision of every operator on every device class, or judge cards from data sheets."""
    if cards is not None or model is not None:
        if cards is None or model is None or folder is not None:
            raise QSyncError("--cards needs --model and no folder; give both, or see qsync plan --help")
        judge_cards(cards, link, model, batch, length, base, as_json)
        return
    if folder is None:
        raise QSyncError("give a FOLDER of qsync.hybrid or qsync demo, or --cards with --model")
    from qsync.allocator import find_verdict, find_warnings
    from qsync.allocator.compression_choice import compression_lines, with_compression
    from qsync.commands.loading import load_basis
    from qsync.replayer import Recapture, under_levers

    goal = _Goal(target_step, slack, max_variance, pareto)
    options: dict[str, Any] = {
        "budgets": budgets_of(memory), "pins": pairs_of(pin, "--pin", "PATTERN=PRECISION"),
        "lower_all": lower_all, "margin": margin, "base": base,
        "together": [[one.strip() for one in group.split(",")] for group in together or []],
        "gap": gap, "time_limit_s": time_limit,
        "bucket_cap_bytes": _bucket_cap_bytes(bucket_cap_mb), "saving_less": patterns_of(save_less),
    }  # fmt: skip
    _check_goal(goal, levers)
    check_outputs({"--out": out if pareto is None else None}, folder, cluster)
    basis = load_basis(folder, cluster, force=force)
    if goal.num_points is not None:
        into = pareto_plans.folder_for(out)
        plans = pareto_plans.plans_for_several_steps(basis, goal.num_points, _named(levers), options)
        for one in plans:
            _check_by_replay(under_levers(basis, one.levers, None), one)
        pareto_plans.write(plans, into, as_json)
        return
    measured = basis
    basis, chosen = _choose(basis, goal, levers, folder, options)
    if basis.sensitivity.exchange and goal.max_variance is None:
        chosen = with_compression(basis, chosen, goal.target_s)
    verdict = find_verdict(measured, chosen, Recapture.load(folder), options)
    _check_by_replay(basis, chosen)
    found = find_warnings(basis.graph, chosen, basis.profiles, basis.cluster, options["budgets"])
    chosen = replace(chosen, warnings=tuple(found), verdict=verdict)
    chosen.save(out)
    if as_json:
        print_json(chosen.to_json())
        return
    console.print(tables.plan_table(chosen))
    print_lines(*tables.lever_lines(chosen), *tables.base_lines(chosen), *tables.gap_lines(chosen))
    print_lines(*compression_lines(basis, chosen))
    print_lines(*(chosen.verdict.lines() if chosen.verdict is not None else ()))
    for warning in chosen.warnings:
        console.print(Text.assemble(("Warning:", "yellow"), f" {warning}"), soft_wrap=True)
    print_lines(f"written to {out}; checked by full replay (simulated)")


def _bucket_cap_bytes(megabytes: float | None) -> int | None:
    if megabytes is None:
        return None
    if not 1 <= megabytes * 2**20 < 2**63:
        raise QSyncError(f"--bucket-cap-mb must be positive, found {megabytes}; give e.g. 25, DDP's default")
    return int(megabytes * 2**20)


def _check_goal(goal: _Goal, levers: str | None) -> None:
    """Raise QSyncError for an impossible target, and for options that contradict each other."""
    if goal.target_s is not None and not goal.target_s > 0:
        raise QSyncError(f"--target-step must be positive, found {goal.target_s}; give seconds")
    if goal.target_s is not None and goal.slack is not None:
        raise QSyncError("--target-step and --slack both set the step time; leave out one of them")
    one_step = goal.target_s is not None or goal.slack is not None
    if goal.max_variance is not None and one_step:
        raise QSyncError("--max-variance minimizes the step time; leave out --target-step and --slack")
    if goal.num_points is not None and (one_step or goal.max_variance is not None):
        raise QSyncError(
            "--pareto plans for several step times; leave out --target-step, --slack and --max-variance"
        )
    if goal.max_variance is not None and levers is not None:
        raise QSyncError("--max-variance does not work with levers; leave out --levers")


def _choose(
    basis: Basis, goal: _Goal, levers: str | None, folder: Path, options: Mapping[str, Any]
) -> tuple[Basis, Plan]:
    """Return the plan that reaches the goal, and its basis under the plan's levers."""
    from qsync.allocator import allocate, fastest_within

    parts = (basis.graph, basis.profiles, basis.sensitivity, basis.cluster)
    if levers is not None:
        return _search_levers(basis, goal, levers, folder, options)
    if goal.max_variance is None:
        return basis, allocate(*parts, target_s=goal.target_s, slack=goal.slack, **options)
    with working("planning") as progress:
        return basis, fastest_within(*parts, goal.max_variance, progress=progress, **options)


def _named(levers: str | None) -> list[str]:
    """Return the levers that an option names, separated by commas."""
    return [name.strip() for name in (levers or "").split(",") if name.strip()]


def _search_levers(
    basis: Basis, goal: _Goal, levers: str, folder: Path, options: Mapping[str, Any]
) -> tuple[Basis, Plan]:
    from qsync.allocator import search as search_levers
    from qsync.replayer import Recapture, under_levers

    other = Recapture.load(folder)
    with working("searching levers") as progress:
        chosen = search_levers(
            basis.graph, basis.profiles, basis.sensitivity, basis.cluster, levers=_named(levers), other=other,
            progress=progress, target_s=goal.target_s, slack=goal.slack, **options,
        )  # fmt: skip
    return under_levers(basis, chosen.levers, other), chosen


def _check_by_replay(basis: Basis, chosen: Plan) -> None:
    """Raise QSyncError unless a full replay of the plan gives what the plan predicts."""
    from qsync.allocator import check_plan

    certificate = check_plan(basis.graph, chosen, basis.profiles, basis.sensitivity, basis.cluster)
    if not certificate.ok:
        raise QSyncError(
            f"a full replay contradicts the plan ({certificate.violations[0]}); report this as a bug of qsync"
        )
