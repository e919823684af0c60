"""Report of compare_growth.py: a table of each method's savings."""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from itertools import pairwise
from typing import Any

from rich.table import Table

from qsync.experiments.harness import bar, grouped, table_of

Row = Mapping[str, Any]
Rows = Sequence[Row]

BAR = 0.30  # required saving, as a share of the tokens


def reached(curve: Sequence[Mapping[str, float]], loss: float) -> float | None:
    """Return tokens (images) until the held-out loss stays at or below `loss`; None if never.

    The curve is interpolated linearly; a temporary dip does not count.
    """
    if curve[-1]["heldout"] > loss:
        return None
    for before, after in reversed(list(pairwise(curve))):
        if before["heldout"] > loss:
            share = (before["heldout"] - loss) / (before["heldout"] - after["heldout"])
            return before["items"] + share * (after["items"] - before["items"])
    return float(curve[0]["items"])


def summary(rows: Rows) -> dict[str, Any]:
    """Return the seeds that reach their from-scratch loss, and the savings, by workload and method.

    Savings are shares of the from-scratch run's tokens (images) per seed; `with_source` also counts the
    source's.
    """
    by_workload = grouped([{**row, "workload": row["setting"]["workload"]} for row in rows], "workload")
    return {workload: _of(own) for workload, own in by_workload.items()}


def _of(rows: Rows) -> dict[str, Any]:
    runs = {(row["method"], row["seed"]): row for row in rows}
    found: dict[str, Any] = {"methods": {}}
    for name, own in grouped((row for row in rows if row["start"] != "source"), "method").items():
        each = [_saved(row, runs["scratch", row["seed"]], runs["source", row["seed"]]) for row in own]
        found["methods"][name] = {
            "start": own[0]["start"], "ratio": own[0]["ratio"], "seeds": len(own),
            "reached": sum(one["items"] is not None for one in each),
            **{key: _spread([one[key] for one in each]) for key in each[0]},
        }  # fmt: skip
    return found


def _saved(row: Row, scratch: Row, source: Row) -> dict[str, float | None]:
    """Compare a run with its seed's from-scratch run: savings, first and final loss.

    `first` is the held-out loss above the source's, `final` above the target.
    """
    target, whole = (scratch["curve"][-1][key] for key in ("heldout", "items"))
    before = source["curve"][-1]
    # The from-scratch run counts in full, even if it reached its loss earlier.
    needed = whole if row is scratch else reached(row["curve"], target)
    found = {
        "first": row["curve"][0]["heldout"] - before["heldout"],
        "final": row["curve"][-1]["heldout"] - target,
    }
    for key, cost in {"items": 0.0, "with_source": 0.0 if row is scratch else before["items"]}.items():
        found[key] = None if needed is None else 1.0 - (needed + cost) / whole
    return found


def _spread(values: Sequence[float | None]) -> dict[str, float] | None:
    """Return mean, minimum and maximum; None unless every seed has a value."""
    known = [value for value in values if value is not None]
    if len(known) < len(values):
        return None
    return {"mean": statistics.fmean(known), "least": min(known), "most": max(known)}


def says(method: Mapping[str, Any]) -> str:
    """Describe a method in words."""
    share = "" if method["ratio"] == 1.0 else f", {method['ratio']:.0%} of the steps"
    return ("from scratch" if method["start"] == "scratch" else method["start"]) + share


def cells(method: Mapping[str, Any]) -> list[str]:
    """Return a method's table row; savings are means over seeds, with minimum and maximum."""
    losses, savings = [f"{method[key]['mean']:+.3f}" for key in ("first", "final")], []
    for key in ("items", "with_source"):
        found = method[key]
        savings.append(f"{found['mean']:.0%} ({found['least']:.0%} to {found['most']:.0%})" if found else "-")
    if method["start"] == "scratch":
        losses[0], savings = "-", ["-"] * 2
    return [says(method), *losses, f"{method['reached']} of {method['seeds']}", *savings]


def bars(found: Mapping[str, Any]) -> list[dict[str, Any]]:
    """Return the bar: the expanded model's saved tokens or images against the required share."""
    return [
        bar(f"{workload}, {name}: share saved", of["items"] and of["items"]["mean"], BAR, at_least=True)
        for workload, found_of in found.items() for name, of in found_of["methods"].items()
        if of["start"] == "expanded"
    ]  # fmt: skip


def table(found: Mapping[str, Any]) -> Table:
    """Return the table of each method's savings."""
    rows = [[workload, *cells(method)] for workload, of in found.items() for method in of["methods"].values()]
    headings = (
        "workload", "", "loss at step 0, above the source's", "final loss, above from scratch",
        "seeds that reach it", "tokens or images saved", "with the source's",
    )  # fmt: skip
    return table_of("Growing (measured)", headings, rows, left=2)
