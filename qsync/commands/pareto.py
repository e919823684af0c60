"""`qsync plan --pareto`: plans for several step times, and a picture of the trade-off."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from qsync.commands import tables
from qsync.commands.options import console, print_json, print_lines, working
from qsync.errors import QSyncError
from qsync.records.plan_folder import Basis
from qsync.records.plans import Plan


def folder_for(out: Path) -> Path:
    """Return the folder of `--out`. Raises QSyncError if it is a file."""
    folder = out.with_suffix("") if out.suffix == ".json" else out
    if folder.is_file():
        raise QSyncError(f"--out {folder} is a file; name a folder for --pareto")
    return folder


def plans_for_several_steps(
    basis: Basis, num: int, levers: Sequence[str], options: Mapping[str, Any]
) -> list[Plan]:
    """Return up to `num` plans for different step times, fastest first; with levers for each of some budgets.

    `options` are those of qsync.allocator.allocate.
    """
    from qsync.allocator import frontier

    with working("planning") as progress:
        return list(frontier(
            basis.graph, basis.profiles, basis.sensitivity, basis.cluster, num, levers=levers,
            progress=progress, **options,
        ))  # fmt: skip


def write(plans: Sequence[Plan], folder: Path, as_json: bool) -> None:
    """Write plans and a picture of the trade-off into a folder, and print their paths."""
    from qsync.figures import pareto

    for number, plan in enumerate(plans, 1):
        plan.save(folder / f"plan-{number}.json")
    picture = pareto.draw(plans, folder / "frontier.png")
    if as_json:
        print_json({"simulated": True, "plans": [plan.to_json() for plan in plans]})
        return
    console.print(tables.frontier_table(plans))
    print_lines(f"written to {folder}, with {picture.name}; checked by full replay")
