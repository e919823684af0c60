"""`qsync explain`: explain a plan's precisions and memory. No torch."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Annotated, Any

import typer

from qsync.commands import tables
from qsync.commands.options import (
    BasisFolder,
    ClusterFile,
    Force,
    Json,
    LoggedSteps,
    Memory,
    PlanFile,
    budgets_of,
    check_outputs,
    console,
    print_json,
    print_lines,
)
from qsync.records.plan_folder import Basis
from qsync.records.plans import Plan


def explain(
    plan_file: PlanFile,
    basis: BasisFolder = None,
    cluster: ClusterFile = None,
    memory: Memory = None,
    picture: Annotated[Path | None, typer.Option(help="Draw the memory of a step here (PNG).")] = None,
    allocation: Annotated[
        Path | None, typer.Option(help="Draw the precision of every operator above its sensitivity (PNG).")
    ] = None,
    critical_path: Annotated[
        bool, typer.Option("--critical-path", help="Name the events over all ranks that make the step.")
    ] = False,
    help_most: Annotated[
        int | None, typer.Option(min=1, help="Rank what would shorten the step; print so many changes.")
    ] = None,
    measured: LoggedSteps = None,
    force: Force = False,
    as_json: Json = False,
) -> None:
    """Explain why operators are lowered or not, the critical path of the step, and possible gains."""
    from qsync.allocator import explain as explain_lowering
    from qsync.allocator import shadow_prices, unsupported_precisions
    from qsync.allocator.compression_choice import compression_lines
    from qsync.commands.loading import load_plan
    from qsync.replayer import peaks

    budgets, written = budgets_of(memory), {"--picture": picture, "--allocation": allocation}
    check_outputs(written, basis or plan_file.parent, plan_file, cluster)
    plan, found = load_plan(plan_file, basis, cluster, force=force)
    planned = {c.name: plan.budgets[c.name] for c in found.cluster.classes if c.name in plan.budgets}
    plan = replace(plan, budgets={**planned, **budgets})
    found = replace(found, cluster=found.cluster.with_memory(plan.budgets))
    parts = (found.graph, plan, found.profiles, found.sensitivity, found.cluster)
    filled = peaks(found.graph, plan, found.profiles, found.cluster)
    if picture is not None:
        from qsync.figures import memory as memory_figure

        memory_figure.steps(tables.labelled(filled, found.profiles), picture)
    if allocation is not None:
        from qsync.figures import precision_map

        emulated = {c.name for c in found.cluster.classes if c.emulated_share is not None}
        precision_map.allocation(plan, found.graph, found.sensitivity, allocation, emulated=emulated)
    if critical_path or help_most is not None or measured is not None:
        _explain_step(plan, found, critical_path, help_most, measured, as_json)
        return
    exchanged = compression_lines(found, plan)
    unsupported = unsupported_precisions(found.graph, plan, found.profiles, found.cluster)
    reasons, prices = explain_lowering(*parts), shadow_prices(*parts)
    if as_json:
        print_json({
            "simulated": True,
            "reasons": [reason.to_json() for reason in reasons],
            "shadow_prices": [price.to_json() for price in prices],
            "compression": exchanged,
            "refused": [operator.to_json() for operator in unsupported],
            "memory": {
                name: {"origin": found.profiles[name].origin, **peak.to_json()}
                for name, peak in filled.items()
            },
        })  # fmt: skip
        return
    if reasons:
        console.print(tables.reasons_table(reasons))
    else:
        print_lines(
            f"The plan lowers nothing below {plan.base}: every rank keeps up, or nothing lower is faster "
            "there (qsync doctor)."
        )
    console.print(tables.shadow_prices_table(prices))
    print_lines(*exchanged)
    if unsupported:
        console.print(tables.unsupported_table(unsupported, found.profiles))
    console.print(tables.memory_table(filled, found.profiles))
    print_lines(*tables.loading_lines(found.profiles))


def _explain_step(
    plan: Plan,
    basis: Basis,
    wants_path: bool,
    most: int | None,
    measured: Path | None,
    as_json: bool,
) -> None:
    """Print the critical path, the most helpful changes, and a job's logged steps."""
    from qsync.allocator import what_ifs
    from qsync.commands.loading import measured_beside_predicted
    from qsync.replayer import find_critical_path

    graph, profiles, cluster = basis.graph, basis.profiles, basis.cluster
    path = find_critical_path(graph, plan, profiles, cluster)
    found = what_ifs(graph, plan, profiles, basis.sensitivity, cluster) if most is not None else []
    logged = measured_beside_predicted(plan, basis, measured) if measured is not None else {}
    if as_json:
        body: dict[str, Any] = {"simulated": True}
        body |= {"critical_path": path.to_json()} if wants_path else {}
        body |= {"help_most": [one.to_json() for one in found[:most]]} if most is not None else {}
        print_json(body | ({"measured": logged} if logged else {}))
        return
    if wants_path:
        console.print(tables.path_table(path, profiles, {c.name: c.count for c in cluster.classes}))
    if most is not None:
        console.print(tables.what_ifs_table(found, profiles, path.step_s, most))
    if logged:
        console.print(tables.measured_table(logged))
        print_lines(*tables.drift_lines(logged))
