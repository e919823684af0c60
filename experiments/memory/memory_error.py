"""Measure the memory model's errors: `python -m qsync.experiments.memory.memory_error --out FOLDER`.

Plans of every model run as in training: in DDP with gradients as bucket views, with AdamW. Autograd's hooks
count the bytes saved for backward, and the allocator's events the peak; the prediction uses only the graph.

    margin      random plans (precisions and operators that save less drawn at random). Twice the largest
    underprediction is the margin of every plan two ranks   random plans of another seed, different on two
    real ranks, judged by the margin accepted    plans that `qsync.plan` accepts under tight budgets, run on
    the two ranks

`--state` writes the margin beside the model, and the figures into docs/results/memory.md.
"""

from __future__ import annotations

import math
import statistics
from collections import Counter
from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Annotated, Any

import torch
import typer
from rich.table import Table

from qsync.experiments.harness import Experiment, Page, bar, grouped, run_command, table_of, yes
from qsync.experiments.harness.options import Fresh, Out
from qsync.experiments.harness.ranks import process_group_of_one
from qsync.experiments.memory.memory_runs import MODELS, SEED, Trained, drawn, parts_of, run_ranks
from qsync.predictor.memory import peak
from qsync.records.json_files import write_json

Rows = Sequence[Mapping[str, Any]]

MARGIN, ACCEPTED, REFUSED = "margin", "accepted", "refused"
PREDICTED = Path(peak.__file__).with_name("memory_error.json")
_PAGE = Page(Path("docs/results/memory.md"), note="One thread.", marker="memory")
SAVED_BAR, PEAK_BAR = 0.01, 0.05
PLANS, RANK_PLANS = 30, 6  # random plans of each model, and on each of two ranks
HEADINGS = (
    "", "plans", "saved: median", "95th", "worst", "peak: median", "95th", "worst", "of its budget", "holds",
)  # fmt: skip
# Predicted quantities: bytes saved, and the peak, by the model alone and with a profile's residuals.
_MEASURED = {"saved": "saved_bytes", "peak": "peak_bytes", "profiled": "peak_bytes"}
_PREDICTED = {
    "saved": "predicted_saved_bytes", "peak": "predicted_peak_bytes", "profiled": "profiled_peak_bytes",
}  # fmt: skip
ALL = "all"


def main(
    out: Out = Path("memory_error"),
    state: Annotated[bool, typer.Option(help="Write the margin beside the memory model.")] = False,
    fresh: Fresh = False,
) -> None:
    """Measure, print a table, write figures, and on request the margin."""
    torch.set_num_threads(1)
    experiment = Experiment("memory error", out, seed=SEED, fresh=fresh)
    with experiment.progress():
        pieces = [
            experiment.piece(f"margin {name}", partial(random_plans, name, PLANS), plans=PLANS)
            for name in MODELS
        ]
        rows = judged([row for piece in pieces for row in piece])
        worst = {"worst_underprediction": {"cpu": worst_underprediction(rows)}}
        if state:  # the other plans are judged by it
            _state(worst)
        run = partial(run_ranks, MODELS, RANK_PLANS, SEED + 1)
        rows += experiment.piece("ranks", run, stated_margin=peak.stated_error("cpu"))
    found = summary(rows)
    content = experiment.finish(
        {"threads": 1, "parts": found, **worst, "plans": rows},
        bars=[one for name, of in found.items() for one in _bars(name, of["models"][ALL])],
        tables=[table(found)], page=_PAGE if state else None,
    )  # fmt: skip
    if state:
        _state({key: value for key, value in content.items() if key not in ("plans", "bars")})


def _state(content: Mapping[str, Any]) -> None:
    write_json(PREDICTED, content)
    peak.stated_error.cache_clear()


def random_plans(name: str, num: int) -> list[dict[str, Any]]:
    """Return a row per random plan of a model on one rank."""
    with process_group_of_one():
        trained = make(name)
        return [
            {"part": MARGIN, "model": name, "seed": SEED, "plan": number}
            | trained.measure(drawn(trained.graph, number))
            for number in range(num)
        ]


def make(name: str) -> Trained:
    """Return a model in training."""
    torch._dynamo.reset()
    trained = Trained(*parts_of(name))
    trained.measure_residuals()
    return trained


def _bars(part: str, entry: Mapping[str, Any]) -> list[dict[str, Any]]:
    """Return plans' worst errors and numbers over budget, beside the limits."""
    worst = {
        what: max(abs(entry[what]["lowest"]), abs(entry[what]["highest"]))
        for what in _MEASURED
        if what in entry
    }
    with_profile = f"{part}: worst error of peak bytes, with a profile"
    return [
        bar(f"{part}: worst error of saved bytes", worst["saved"], SAVED_BAR),
        bar(f"{part}: worst error of peak bytes", worst["peak"], PEAK_BAR),
        *([bar(with_profile, worst["profiled"], PEAK_BAR)] if "profiled" in worst else []),
        bar(f"{part}: plans over their budget", entry["over_budget"], 0),
    ]


def summary(rows: Rows) -> dict[str, dict[str, Any]]:
    """Return errors by part and model, and in total; the seeds, and the number of refused plans."""
    by_part = grouped(rows, "part")
    refused = [row["model"] for row in by_part.pop(REFUSED, []) if row["rank"] == 0]
    found: dict[str, dict[str, Any]] = {
        part: {
            "seeds": sorted({row["seed"] for row in own}),
            "models": {name: errors(of) for name, of in {ALL: own, **grouped(own, "model")}.items()},
        }
        for part, own in by_part.items()
    }
    if ACCEPTED in found:
        found[ACCEPTED]["refused"] = dict(Counter(refused))
    return found


def judged(rows: Rows) -> list[dict[str, Any]]:
    """Return the rows with budgets from each prediction and the margin of their worst one."""
    worst, found = worst_underprediction(rows), []
    for row in rows:
        comes_and_goes = row["predicted_peak_bytes"] - row["throughout_bytes"]
        margin = math.ceil(peak.SAFETY * worst * comes_and_goes)
        found.append({**row, "budget_bytes": row["predicted_peak_bytes"] + margin})
    return found


def errors(rows: Rows) -> dict[str, Any]:
    """Return signed relative errors of saved and peak bytes, and the largest used part of a budget.

    An error is predicted / measured - 1.
    """
    found: dict[str, Any] = {"plans": len(rows)}
    for what in (what for what, predicted in _PREDICTED.items() if predicted in rows[0]):
        errors = [row[_PREDICTED[what]] / row[_MEASURED[what]] - 1 for row in rows]
        p95 = sorted(map(abs, errors))[max(0, -(-95 * len(errors) // 100) - 1)]
        found[what] = {
            "median": statistics.median(errors), "p95": p95, "lowest": min(errors), "highest": max(errors),
        }  # fmt: skip
    found["of_budget"] = max(row["peak_bytes"] / row["budget_bytes"] for row in rows)
    found["over_budget"] = sum(row["peak_bytes"] > row["budget_bytes"] for row in rows)
    return found


def worst_underprediction(rows: Rows) -> float:
    """Return the largest underprediction, relative to a step's temporary bytes.

    It covers all plans that determine the margin.
    """
    missed: list[float] = [
        (row["peak_bytes"] - row["predicted_peak_bytes"])
        / (row["predicted_peak_bytes"] - row["throughout_bytes"])
        for row in rows
        if row["part"] == MARGIN
    ]
    return max([0.0, *missed])


def holds(entry: Mapping[str, Any]) -> bool:
    """Return whether errors are within the bars, and no plan exceeded its budget."""
    return all(one["holds"] for one in _bars("", entry))


def table(parts: Mapping[str, Mapping[str, Any]]) -> Table:
    """Return the errors of each part and model, in percent."""
    models = [(part, name, entry) for part, of in parts.items() for name, entry in of["models"].items()]
    rows = [cells_of(f"{part}, {name}", entry) for part, name, entry in models]
    return table_of("Predicted over measured bytes (measured)", HEADINGS, rows)


def cells_of(name: str, entry: Mapping[str, Any]) -> list[str]:
    """Format one row."""
    cells = [name, str(entry["plans"])]
    for what in ("saved", "peak"):
        cells += _cells(entry[what])
    return [*cells, f"{entry['of_budget']:.2%}", yes(holds(entry))]


def _cells(errors: Mapping[str, float]) -> list[str]:
    worst = max(errors["lowest"], errors["highest"], key=abs)
    return [f"{errors['median']:+.2%}", f"{errors['p95']:.2%}", f"{worst:+.2%}"]


if __name__ == "__main__":
    run_command(main)
