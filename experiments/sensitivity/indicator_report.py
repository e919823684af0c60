"""Report of indicators.py: means with intervals, and a table."""

from __future__ import annotations

import math
import statistics
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from rich.table import Table

from qsync.experiments.harness import grouped, table_of
from qsync.experiments.harness.intervals import half_width

Rows = Sequence[Mapping[str, Any]]

# docs/results/sensitivity.md shows these indicators' plans at every saving, and others only at the largest.
NEAREST = ("empirical", "fisher", "hessian")


def summary(rows: Rows) -> dict[str, Any]:
    """Return the figures of every indicator by model: means over seeds, half-widths of 95 % intervals.

    spearman[indicator][precision]       rank correlation with the truth
    plan_error[indicator][budget]        gradient error of the indicator's plan over |g|^2: arithmetic mean
                                         over batches, geometric mean over seeds
    to_default[indicator][budget]        error of the indicator's plan over the error of the default's plan on
                                         the same batch: geometric mean over batches and seeds
    joint_to_sum                         error of a random plan over the sum of its operators' single errors

    Geometric means come with the factor of their interval. `to_default` compares on each batch because a
    single batch can decide a mean over batches: a sequence with a chaotic gradient has thousands of times the
    error of other sequences, and weights that differ by a thousandth decide which plan has less error on it.
    """
    return {model: _summary_of(own) for model, own in grouped(rows, "model").items()}


def _summary_of(rows: Rows) -> dict[str, Any]:
    indicators = list(rows[0]["plan_error"])
    budgets = list(rows[0]["plan_error"]["variance"])
    precisions = list(rows[0]["spearman"]["variance"])

    return {
        "spearman": {
            name: {p: mean(row["spearman"][name][p] for row in rows) for p in precisions}
            for name in indicators if name != "empirical"
        },
        "plan_error": {
            name: {b: geometric(statistics.fmean(row["plan_error"][name][b]) for row in rows)
                   for b in budgets}
            for name in indicators
        },
        "to_default": {
            name: {b: geometric(to_default(row, name, b) for row in rows) for b in budgets}
            for name in indicators
        },
        "joint_to_sum": geometric(entry["joint"] / entry["sum"] for row in rows for entry in row["joint"]),
    }  # fmt: skip


def to_default(row: Mapping[str, Any], name: str, budget: str) -> float:
    """Return this indicator's plan error over the default's plan error: geometric mean over batches."""
    errors, default = (row["plan_error"][who][budget] for who in (name, "variance"))
    found = geometric(error / other for error, other in zip(errors, default, strict=True))["mean"]
    assert found is not None
    return found


def mean(values: Iterable[float]) -> dict[str, float | None]:
    """Return the mean and its 95 % interval's half width (Student's t); None for a single value."""
    found = list(values)
    return {"mean": statistics.fmean(found), "half": half_width(found) if len(found) > 1 else None}


def geometric(values: Iterable[float]) -> dict[str, float | None]:
    """Return the geometric mean, and the factor of its 95 % interval."""
    found = mean(math.log(value) for value in values)
    centre, half = found["mean"], found["half"]
    assert centre is not None
    return {"mean": math.exp(centre), "factor": None if half is None else math.exp(half)}


def table(found: Mapping[str, Any]) -> Table:
    """Return, by model, rank correlation, gradient errors of plans and joint effects.

    The first rows are Spearman's correlations with the truth, in BF16 / INT8. A plan saves a share of the
    time that can be saved; its gradient error is given as a multiple of the default plan's error on the same
    batch. Intervals in brackets are 95 % over seeds.
    """
    first = next(iter(found.values()))
    budgets = list(first["to_default"]["variance"])
    rows: dict[str, list[str]] = {}
    for name, by_precision in first["spearman"].items():
        by_mode = ([f"{cell['mean']:.2f}" for cell in _of(found, "spearman", name, p)] for p in by_precision)
        rows[_shown(name)] = [" / ".join(each) for each in zip(*by_mode, strict=True)]
    for budget in budgets:
        plan = f"{float(budget):.0%}, plan by "
        for name in first["to_default"]:
            if name in NEAREST or (name != "variance" and budget == budgets[-1]):
                rows[plan + _shown(name)] = list(map(_range, _of(found, "to_default", name, budget)))
        own = _of(found, "plan_error", "variance", budget)
        rows[f"{plan}{_shown('variance')}, of |g|²"] = [f"{cell['mean']:.1e}" for cell in own]
    rows["joint effect of random plans, of the sum"] = list(map(_range, _of(found, "joint_to_sum")))
    title = "Correlation with the truth; plans' gradient errors (measured; times simulated)"
    return table_of(title, ["", *found], [[name, *cells] for name, cells in rows.items()])


def _of(found: Mapping[str, Any], *keys: str) -> list[Any]:
    """Return the entry under these keys for every model."""
    cells = list(found.values())
    for key in keys:
        cells = [cell[key] for cell in cells]
    return cells


def _shown(name: str) -> str:
    return {"variance": "**`variance`**", "empirical": "the truth itself"}.get(name, f"`{name}`")


def _range(cell: Mapping[str, Any]) -> str:
    centre, factor = cell["mean"], cell["factor"]
    if factor is None:
        return _ratio(centre)
    return f"{_ratio(centre)} ({_ratio(centre / factor)}-{_ratio(centre * factor)})"


def _ratio(value: float) -> str:
    return f"{value:.2f}" if value < 100 else f"{value:.0e}"
