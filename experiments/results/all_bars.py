"""List the bars of all experiments, those that fail first."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from rich.table import Table

from qsync.experiments.harness import table_of
from qsync.experiments.harness.experiment import bar_rows
from qsync.experiments.harness.tables import yes

Figures = Mapping[str, Any]


def bars_of(found: Mapping[str, Figures]) -> dict[str, Any]:
    """Return the rows of each experiment's bars, and its origin; `found` is by experiment."""
    return {
        name: {
            "rows": bar_rows([one for one in figures["bars"] if one["holds"] is not None]),
            "commits": figures.get("commits_of_pieces") or [figures["commit"]],
            "processor": figures["machine"]["processor"],
        }
        for name, figures in found.items()
        if figures.get("bars")
    }


def all_bars_table(kept: Mapping[str, Any]) -> Table:
    """Return a row per kind of bar that fails, then a row per experiment with the number that hold."""
    failed, whole = [], []
    for name, own in sorted(kept.items()):
        missed = [row for row in own["rows"] if row[-1].startswith(yes(False))]
        failed += [[name, *row, _origin(own)] for row in missed]
        held = len(own["rows"]) - len(missed)
        whole.append([name, "promises that hold", str(held), str(len(own["rows"])), "", _origin(own)])
    heads = ("experiment", "promise", "found", "limit", "holds", "machine, commit")
    return table_of("All promises, first those that fail", heads, failed + whole, left=2)


def _origin(row: Mapping[str, Any]) -> str:
    return ", ".join((row["processor"], *row["commits"]))
