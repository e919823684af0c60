"""List the bars of all experiments, those that fail first."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from rich.table import Table

from qsync.experiments.harness import table_of
from qsync.experiments.harness.experiment import shown_value

Figures = Mapping[str, Any]


def bars_of(found: Mapping[str, Figures]) -> dict[str, Any]:
    """Return each experiment's number of bars, those that fail, and its origin; `found` is by experiment."""
    return {
        name: {
            "bars": sum(one["holds"] is not None for one in figures["bars"]),
            "failed": [
                {key: one[key] for key in ("name", "measured", "limit")}
                for one in figures["bars"] if one["holds"] is False
            ],
            "commits": figures.get("commits_of_pieces") or [figures["commit"]],
            "processor": figures["machine"]["processor"],
        }
        for name, figures in found.items() if figures.get("bars")
    }  # fmt: skip


def all_bars_table(rows: Mapping[str, Any]) -> Table:
    """Return a row per failing bar, then a row per experiment with the number of bars that hold."""
    failed = [
        [name, one["name"], shown_value(one["measured"]), shown_value(one["limit"]), _origin(row)]
        for name, row in sorted(rows.items()) for one in row["failed"]
    ]  # fmt: skip
    whole = [
        [name, "bars that hold", str(row["bars"] - len(row["failed"])), str(row["bars"]), _origin(row)]
        for name, row in sorted(rows.items())
    ]
    heads = ("experiment", "promise", "found", "limit", "machine, commit")
    return table_of("All promises, first those that fail", heads, failed + whole, left=2)


def _origin(row: Mapping[str, Any]) -> str:
    return ", ".join((row["processor"], *row["commits"]))
