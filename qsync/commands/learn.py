"""`qsync learn`: measure a few operators on this device, and learn a cost model of others."""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path
from typing import Annotated

import typer

from qsync.commands.options import Json, console, print_json, print_lines, working
from qsync.commands.tables import learned_costs_table
from qsync.errors import QSyncError


def learn(
    basis: Annotated[
        Path,
        typer.Argument(metavar="FOLDER", help="Holds the graph whose operators matter.", show_default=False),
    ],
    samples: Annotated[int, typer.Option(help="How many operators to measure.")] = 160,
    device: Annotated[str, typer.Option(help="cpu, or cuda.")] = "cpu",
    as_json: Json = False,
) -> None:
    """Measure a few operators and write a cost model, FOLDER/costs.json, for what-if planning."""
    from qsync.commands.loading import COSTS
    from qsync.records.graph import OpGraph

    if samples < 1:
        raise QSyncError(f"--samples must be at least 1, found {samples}; give e.g. 160")
    graph = OpGraph.load(basis / "graph.json")
    with working("learning costs") as progress:
        from qsync.predictor.cost_model.op_calls import calls
        from qsync.what_if import cost_learning

        model = cost_learning.learn(
            device=device, wanted=[call for _, call in calls(graph)], num=samples, progress=progress
        )
    model.save(basis / COSTS)
    if as_json:
        error = asdict(model.error) if model.error else None
        print_json({"samples": len(model.samples), "error": error})
        return
    console.print(learned_costs_table(model.error))
    print_lines(f"written to {basis / COSTS}")
