"""What experiments/sensitivity/indicators.py says in the end: means with intervals, tables, and a picture."""

from __future__ import annotations

import io
import math
import statistics
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from matplotlib.figure import Figure
from rich import box
from rich.table import Table
from scipy.stats import t as student

from qsync.figures.style import INK, PRECISION_COLOURS
from qsync.records.json_files import write_bytes
from qsync.records.precision import Precision

Rows = Sequence[Mapping[str, Any]]

# README shows plans by these at every saving, those by the others at the largest alone.
NEAREST = ("empirical", "fisher", "hessian")


def summary(rows: Rows) -> dict[str, Any]:
    """Per model: figures of every indicator, each a mean over seeds with the half-width of its 95 % interval.

    `spearman[indicator][precision]`; `plan_error[indicator][budget]` is relative to |g|^2, a mean over
    batches and a geometric one over seeds; `to_default[indicator][budget]` how many times the default's plan,
    batch by batch, a geometric mean with a factor for the interval over seeds, and `means_to_default` the
    same of the means over batches; `heldout[indicator]` minus that of FP32; `joint_to_sum` the ratio of joint
    effects to sums.

    Batch by batch, because a mean over batches can be that of one: where a sequence's gradient is chaotic,
    its error is thousands of times that of others, and weights that differ by a thousandth decide which plan
    has less of it.
    """
    models = dict.fromkeys(row["model"] for row in rows)
    return {model: _of_model([row for row in rows if row["model"] == model]) for model in models}


def _of_model(rows: Rows) -> dict[str, Any]:
    indicators = list(rows[0]["plan_error"])
    budgets = list(rows[0]["plan_error"]["variance"])
    precisions = list(rows[0]["spearman"]["variance"])

    def means_ratio(name: str, budget: str) -> dict[str, float | None]:
        pairs = [(row["plan_error"][who][budget]["mean"] for who in (name, "variance")) for row in rows]
        return geometric(error / default for error, default in pairs)

    return {
        "spearman": {
            name: {p: {**mean(row["spearman"][name][p] for row in rows),
                       "least": min(row["spearman"][name][p] for row in rows)} for p in precisions}
            for name in indicators if name != "empirical"
        },
        "plan_error": {
            name: {b: geometric(row["plan_error"][name][b]["mean"] for row in rows) for b in budgets}
            for name in indicators
        },
        "to_default": {
            name: {b: geometric(to_default(row, name, b) for row in rows) for b in budgets}
            for name in indicators
        },
        "means_to_default": {name: {b: means_ratio(name, b) for b in budgets} for name in indicators},
        "heldout": {
            name: mean(row["heldout"][name] - row["heldout"]["fp32"] for row in rows) for name in indicators
        },
        "joint_to_sum": geometric(entry["joint"] / entry["sum"] for row in rows for entry in row["joint"]),
        "predicted_to_truth": {
            p: geometric(
                row["omega"]["variance"][op][p] / modes[p]
                for row in rows for op, modes in row["omega"]["empirical"].items() if p in modes
            ) for p in precisions
        },
    }  # fmt: skip


def to_default(row: Mapping[str, Any], name: str, budget: str) -> float:
    """How many times the default's the error of this indicator's plan is: geometric mean over batches."""
    errors, default = (row["plan_error"][who][budget]["by_batch"] for who in (name, "variance"))
    found = geometric(error / other for error, other in zip(errors, default, strict=True))["mean"]
    assert found is not None
    return found


def mean(values: Iterable[float]) -> dict[str, float | None]:
    """Mean and half-width of its 95 % interval (Student's t); None for a single value."""
    found = list(values)
    half = None
    if len(found) > 1:
        error = statistics.stdev(found) / math.sqrt(len(found))
        half = float(student.ppf(0.975, len(found) - 1)) * error
    return {"mean": statistics.fmean(found), "half": half}


def geometric(values: Iterable[float]) -> dict[str, float | None]:
    """Geometric mean, and the factor that its 95 % interval reaches up and down."""
    found = mean(math.log(value) for value in values)
    centre, half = found["mean"], found["half"]
    assert centre is not None
    return {"mean": math.exp(centre), "factor": None if half is None else math.exp(half)}


def tables(found: Mapping[str, Any]) -> list[Table]:
    """Rank correlation, plans' gradient errors, held-out losses, and joint effects; a column per model."""
    models = list(found)
    first = found[models[0]]
    shown = []
    for precision in first["spearman"]["variance"]:
        table = _table(f"Spearman with the truth, {precision}: mean over seeds (least)", models)
        for name in first["spearman"]:
            cells = [found[model]["spearman"][name][precision] for model in models]
            table.add_row(name, *(f"{cell['mean']:.2f} ({cell['least']:.2f})" for cell in cells))
        shown.append(table)
    for budget in first["to_default"]["variance"]:
        title = f"Gradient error of the plan that saves {float(budget):.0%}, of the default's, batch by batch"
        table = _table(title, models)
        for name in first["to_default"]:
            cells = [found[model]["to_default"][name][budget] for model in models]
            table.add_row(name, *(_times(cell) for cell in cells))
        table.add_row(
            "default: of |g|^2",
            *(f"{found[m]['plan_error']['variance'][budget]['mean']:.1e}" for m in models),
        )
        shown.append(table)
    table = _table("Held-out loss of the plan that saves 60 %, minus that of FP32", models)
    for name in first["heldout"]:
        table.add_row(name, *(_plus_minus(found[model]["heldout"][name]) for model in models))
    shown.append(table)
    table = _table("Joint effect of random plans, of the sum of single effects", models)
    table.add_row("measured", *(_times(found[model]["joint_to_sum"]) for model in models))
    return [*shown, table]


def markdown(content: Mapping[str, Any]) -> str:
    """README's table: rank correlation, and the gradient error of plans against the default's, per model."""
    found, machine = content["summary"], content["machine"]
    models, seeds, scale = list(found), content["seeds"], content["scale"]
    first = found[models[0]]
    budgets = list(first["to_default"]["variance"])
    several, saved = len(seeds) > 1, " and ".join(f"{float(budget):.0%}" for budget in budgets)
    means = f"means over {len(seeds)} seeds" if several else "one seed"
    measured = (
        f"commit {content['commit']}"
        if content["sensitivities"] == content["commit"]
        else f"commit {content['commit']}, sensitivities {content['sensitivities']}"
    )
    lines = [
        f"Spearman's correlation with the truth in BF16 / INT8, {means}. Below, the gradient "
        f"error of plans that save {saved}",
        f"of the time that can be saved, as a multiple of the default's on each of {scale['unseen']} unseen "
        "batches",
        f"(geometric mean{' over batches and seeds, 95 % interval over seeds' if several else ''}). "
        f"Last, the held-out loss after {scale['steps']} more",
        f"steps of training under those that save {float(budgets[-1]):.0%}, minus that after as many in "
        f"FP32{' (mean and 95 % interval)' if several else ''}.",
        f"One thread of an {machine['processor']}, torch {machine['torch']}; measured, {measured};",
        "step times of plans are simulated.",
        "",
        f"| | {' | '.join(models)} |",
        "|---" * (len(models) + 1) + "|",
    ]
    for name, by_precision in first["spearman"].items():
        cells = [
            " / ".join(f"{found[model]['spearman'][name][p]['mean']:.2f}" for p in by_precision)
            for model in models
        ]
        lines.append(f"| {_shown(name)} | {' | '.join(cells)} |")
    for budget in budgets:
        for name in first["to_default"]:
            if name in NEAREST or (name != "variance" and budget == budgets[-1]):
                cells = [_range(found[model]["to_default"][name][budget]) for model in models]
                lines.append(f"| {float(budget):.0%}, plan by {_shown(name)} | {' | '.join(cells)} |")
        cells = [f"{found[model]['plan_error']['variance'][budget]['mean']:.1e}" for model in models]
        lines.append(
            f"| {float(budget):.0%}, plan by {_shown('variance')}, of \\|g\\|² | {' | '.join(cells)} |"
        )
    for name in first["heldout"]:
        if name != "fp32":
            cells = [_small(found[model]["heldout"][name]) for model in models]
            lines.append(f"| held-out loss, plan by {_shown(name)} | {' | '.join(cells)} |")
    cells = [_range(found[model]["joint_to_sum"]) for model in models]
    lines.append(f"| joint effect of random plans, of the sum | {' | '.join(cells)} |")
    return "\n".join(lines) + "\n"


def _shown(name: str) -> str:
    return {"variance": "**`variance`**", "empirical": "the truth itself"}.get(name, f"`{name}`")


def _range(cell: Mapping[str, float | None]) -> str:
    centre, factor = cell["mean"], cell["factor"]
    if factor is None:
        return _ratio(centre)
    return f"{_ratio(centre)} ({_ratio(centre / factor)}-{_ratio(centre * factor)})"


def _ratio(value: float) -> str:
    return f"{value:.2f}" if value < 100 else f"{value:.0e}"


def _table(title: str, models: Sequence[str]) -> Table:
    table = Table(title=f"{title} (measured)", box=box.SIMPLE_HEAD)
    table.add_column("")
    for model in models:
        table.add_column(model, justify="right")
    return table


def _times(cell: Mapping[str, float | None]) -> str:
    factor = cell["factor"]
    return f"{cell['mean']:.2f}" + ("" if factor is None else f" */ {factor:.2f}")


def _plus_minus(cell: Mapping[str, float | None]) -> str:
    half = cell["half"]
    return f"{cell['mean']:+.4f}" + ("" if half is None else f" +- {half:.4f}")


def _small(cell: Mapping[str, float | None]) -> str:
    half = cell["half"]
    return f"{cell['mean']:+.0e}" + ("" if half is None else f" ± {half:.0e}")


def picture(rows: Rows, path: str | Path) -> Path:
    """Predicted against measured added variance, one panel per model: every operator, precision and seed."""
    models = list(dict.fromkeys(row["model"] for row in rows))
    figure = Figure(figsize=(3.1 * len(models), 3.4), layout="constrained")
    for number, model in enumerate(models):
        axes = figure.add_subplot(1, len(models), number + 1)
        extremes: list[float] = []
        for precision in (Precision.BF16, Precision.INT8):
            pairs = [
                (truth[precision], row["omega"]["variance"][op][precision])
                for row in rows if row["model"] == model
                for op, truth in row["omega"]["empirical"].items() if precision in truth
            ]  # fmt: skip
            pairs = [pair for pair in pairs if min(pair) > 0]
            if not pairs:
                continue
            x, y = zip(*pairs, strict=True)
            axes.scatter(
                x, y, s=9, alpha=0.6, lw=0, color=PRECISION_COLOURS[precision], label=precision.upper()
            )
            extremes += [*x, *y]
        if extremes:
            ends = (min(extremes), max(extremes))
            axes.plot(ends, ends, color=INK, lw=0.8, zorder=0)
        axes.set(xscale="log", yscale="log", title=model, xlabel="measured")
        if number == 0:
            axes.set_ylabel("predicted by two steps")
            axes.legend(frameon=False)
        axes.spines[["top", "right"]].set_visible(False)
    figure.suptitle("Squared gradient error by lowering one operator: every operator and seed", color=INK)
    drawn = io.BytesIO()
    figure.savefig(drawn, format="png", dpi=150, facecolor="white")
    return write_bytes(path, drawn.getvalue())
