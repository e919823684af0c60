"""How wrong the memory model is: `python -m qsync.experiments.memory.memory_error --out FOLDER` measures it.

Plans of every model run as training runs them: in DDP, gradients in its buckets, AdamW. Autograd's own hooks
count the bytes saved for backward, the allocator's own events the peak; beside them stands the prediction
from the graph alone.

    margin      random plans (precisions and operators that save less drawn at random). The most by which the
                prediction was ever too small, twice, is the margin of every plan
    unseen      random plans of other seeds, judged against the margin that stands
    two ranks   random plans of a seed of its own, different ones on two real ranks, judged alike
    accepted    plans that `qsync.plan` accepts under tight budgets, run on the two ranks

Parts can be measured one by one (`--part`); a last run without it puts all of them into the figures.
`--state` writes the margin beside the model, and the table into docs/results/memory.md.
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
from matplotlib.axes import Axes
from matplotlib.lines import Line2D
from rich.table import Table

from qsync import QSyncError
from qsync.experiments.harness import (
    Experiment,
    Fresh,
    Out,
    bar,
    grouped,
    markdown_table,
    run_command,
    table_of,
    write_between,
    yes,
)
from qsync.experiments.harness.pictures import new_figure
from qsync.experiments.harness.ranks import process_group_of_one
from qsync.experiments.memory.memory_runs import MODELS, SEED, SHARES, Trained, drawn, parts_of, run_ranks
from qsync.figures.memory import stack_parts
from qsync.figures.style import INK, SERIES_COLOURS, remove_frame, save_png
from qsync.predictor.memory import peak
from qsync.records.json_files import write_json

Rows = Sequence[Mapping[str, Any]]

MARGIN, UNSEEN, RANKS, ACCEPTED, REFUSED = "margin", "unseen", "two ranks", "accepted", "refused"
# The choices of `--part`, with the parts that their rows bear.
PARTS = {"margin": (MARGIN,), "unseen": (UNSEEN,), "ranks": (RANKS, ACCEPTED, REFUSED)}
PREDICTED = Path(peak.__file__).with_name("memory_error.json")
RESULTS_PAGE = Path(__file__).resolve().parents[2] / "docs" / "results" / "memory.md"
SAVED_BAR, PEAK_BAR = 0.01, 0.05
HEADINGS = (
    "", "plans", "saved: median", "95th", "worst", "peak: median", "95th", "worst", "of its budget", "holds",
)  # fmt: skip
PROFILED_HEADINGS = ("peak, with a profile", "plans", "median", "95th", "worst")
# What is predicted of each: bytes saved, and the peak, by the model alone and with a profile's residuals.
_MEASURED = {"saved": "saved_bytes", "peak": "peak_bytes", "profiled": "peak_bytes"}
_PREDICTED = {
    "saved": "predicted_saved_bytes", "peak": "predicted_peak_bytes", "profiled": "profiled_peak_bytes",
}  # fmt: skip
ALL = "all"


def main(
    out: Out = Path("memory_error"),
    part: Annotated[list[str] | None, typer.Option(help=f"{', '.join(PARTS)}; all if left out.")] = None,
    plans: Annotated[int, typer.Option(help="Random plans of each model and seed.")] = 30,
    seed: Annotated[list[int], typer.Option(help="Of the plans that the margin has not seen.")] = [1, 2],  # noqa: B006
    rank_plans: Annotated[int, typer.Option(help="Random plans of each model on each of two ranks.")] = 6,
    state: Annotated[bool, typer.Option(help="Write the margin beside the memory model.")] = False,
    fresh: Fresh = False,
) -> None:
    """Measure the parts, print a table, write figures and a picture, and on demand the margin."""
    torch.set_num_threads(1)
    parts = part or list(PARTS)
    for name in parts:
        if name not in PARTS:
            raise typer.BadParameter(f"there is no part {name!r}; choose from {', '.join(PARTS)}")
    if SEED in seed:
        raise typer.BadParameter(f"the margin comes from the plans of seed {SEED}; give another --seed")
    experiment = Experiment("memory error", out, seed=SEED, fresh=fresh)
    rows: list[dict[str, Any]] = []
    curve: dict[str, Any] | None = None
    with experiment.progress():
        if "margin" in parts:
            pieces = _random_plans(experiment, plans, MARGIN, SEED)
            rows, curve = judged(_rows(pieces)), pieces[0]["curve"]
            if state:  # the other parts are judged by it
                _state({"worst_underprediction": {"cpu": worst_underprediction(rows)}})
        if "unseen" in parts:
            rows += [row for one in seed for row in _rows(_random_plans(experiment, plans, UNSEEN, one))]
        if "ranks" in parts:
            rows += experiment.piece(
                "ranks", lambda: run_ranks(MODELS, rank_plans, max(SEED, *seed) + 1),
                plans=rank_plans, seeds=seed, **_stated(),
            )  # fmt: skip
    found = summary(rows)
    figures = {
        "threads": 1, "parts": found, "worst_underprediction": {"cpu": worst_underprediction(rows)},
        "plans": rows, "curve": curve,
    }  # fmt: skip
    content = experiment.finish(
        figures, bars=[one for name, of in found.items() for one in _bars(name, of["models"][ALL])],
        tables=[table(found), profiled_table(found)], picture=partial(draw, rows, curve) if curve else None,
    )  # fmt: skip
    if state:
        _state({key: value for key, value in content.items() if key not in ("plans", "curve", "bars")})
        write_between([RESULTS_PAGE], "memory", markdown(content))


def _random_plans(experiment: Experiment, num: int, part: str, seed: int) -> list[dict[str, Any]]:
    """Return what random plans of every model take; every model and seed is a piece."""
    stated = {} if part == MARGIN else _stated()
    return [
        experiment.piece(
            f"{part} {seed} {name}", partial(random_plans, name, num, part, seed), plans=num, **stated
        )
        for name in MODELS
    ]


def _rows(pieces: Rows) -> list[dict[str, Any]]:
    return [row for piece in pieces for row in piece["rows"]]


def _stated() -> dict[str, float]:
    """Return the margin that stands, by which a piece is judged."""
    return {"stated_margin": peak.stated_error("cpu")}


def _state(content: Mapping[str, Any]) -> None:
    write_json(PREDICTED, content)
    peak.stated_error.cache_clear()


def random_plans(name: str, num: int, part: str, seed: int) -> dict[str, Any]:
    """Return a row for each of so many random plans of a model on one rank, and the curve of the last one."""
    with process_group_of_one():
        trained = make(name)
        rows = [
            {"part": part, "model": name, "seed": seed, "plan": number}
            | trained.measure(drawn(trained.graph, number, seed))
            for number in range(num)
        ]
        return {"rows": rows, "curve": trained.predicted().curve()}


def make(name: str) -> Trained:
    """Return a model in training."""
    torch._dynamo.reset()
    trained = Trained(*parts_of(name))
    trained.measure_residuals()
    return trained


def _bars(part: str, entry: Mapping[str, Any]) -> list[dict[str, Any]]:
    """Return the worst errors of some plans, and how many went over their budget, beside the limits."""
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
    """Return the errors by part and model, and of all models together; the seeds, how many were refused."""
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
    """Return the rows with the budget that each prediction and the margin of their worst one make."""
    worst, found = worst_underprediction(rows), []
    for row in rows:
        comes_and_goes = row["predicted_peak_bytes"] - row["throughout_bytes"]
        margin = math.ceil(peak.SAFETY * worst * comes_and_goes)
        found.append({**row, "budget_bytes": row["predicted_peak_bytes"] + margin})
    return found


def errors(rows: Rows) -> dict[str, Any]:
    """Return the signed errors of saved and peak bytes, and the largest part of a budget that was used.

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
    """Return the largest part of a step's temporary bytes that the prediction missed.

    Taken over all plans that the margin is made from.
    """
    missed: list[float] = [
        (row["peak_bytes"] - row["predicted_peak_bytes"])
        / (row["predicted_peak_bytes"] - row["throughout_bytes"])
        for row in rows
        if row["part"] == MARGIN
    ]
    return max([0.0, *missed])


def holds(entry: Mapping[str, Any]) -> bool:
    """Return whether errors are within the bars, and no plan went over its budget."""
    return all(one["holds"] for one in _bars("", entry))


def table(parts: Mapping[str, Mapping[str, Any]]) -> Table:
    """Return the errors of each part and model, in percent."""
    models = [(part, name, entry) for part, of in parts.items() for name, entry in of["models"].items()]
    rows = [cells_of(f"{part}, {name}", entry) for part, name, entry in models]
    return table_of("Predicted over measured bytes (measured)", HEADINGS, rows)


def profiled_table(parts: Mapping[str, Mapping[str, Any]]) -> Table:
    """Return the errors of peaks that a profile corrects, in percent."""
    rows = [
        row
        for part, of in parts.items()
        for name, entry in of["models"].items()
        for row in _profiled_cells(f"{part}, {name}", entry)
    ]
    return table_of("Predicted over measured peaks, with a profile (measured)", PROFILED_HEADINGS, rows)


def cells_of(name: str, entry: Mapping[str, Any]) -> list[str]:
    """Return one row of text: the same for the terminal and for the page of results."""
    cells = [name, str(entry["plans"])]
    for what in ("saved", "peak"):
        cells += _cells(entry[what])
    return [*cells, f"{entry['of_budget']:.2%}", yes(holds(entry))]


def _cells(errors: Mapping[str, float]) -> list[str]:
    worst = max(errors["lowest"], errors["highest"], key=abs)
    return [f"{errors['median']:+.2%}", f"{errors['p95']:.2%}", f"{worst:+.2%}"]


def _profiled_cells(name: str, entry: Mapping[str, Any]) -> list[list[str]]:
    """Return a row of the errors of peaks that a profile corrects; none in results from before."""
    return [[name, str(entry["plans"]), *_cells(entry["profiled"])]] if "profiled" in entry else []


def markdown(content: Mapping[str, Any]) -> str:
    """Return the table: plans that the margin is made from by model, all others together."""
    parts, machine = content["parts"], content["machine"] if content["parts"] else {}
    if MARGIN not in parts:
        raise QSyncError("the margin was not measured yet; measure that part before --state")
    rows = [(name, entry) for name, entry in parts[MARGIN]["models"].items() if name != ALL]
    named = {
        UNSEEN: "all, plans the margin has not seen",
        RANKS: "all, a different plan on each of two real ranks",
        ACCEPTED: "all, plans accepted under a budget, on two ranks",
    }
    rows += [(text, parts[name]["models"][ALL]) for name, text in named.items() if name in parts]
    given, refused = "", parts.get(ACCEPTED, {}).get("refused", {})
    if ACCEPTED in parts:
        percent = " %, ".join(f"{share * 100:.0f}" for share in sorted({*SHARES}, reverse=True))
        which = ", ".join(f"{num} of {name}" for name, num in refused.items())
        given = (
            f"; for accepted ones what `qsync.plan` was given: {percent} % of FP32's peak "
            f"({sum(refused.values())} such plans were refused{which and ': ' + which})"
        )
    cells = [row for name, entry in rows for row in _profiled_cells(name, entry)]
    profiled = [*markdown_table(PROFILED_HEADINGS, cells), ""] if cells else []
    return "\n".join([
        f"Predicted over measured bytes - 1; one thread of an {machine['processor']}, torch "
        f"{machine['torch']}; measured, commit {', '.join(content['commits_of_pieces'])}. *of its "
        "budget*: what the plan that came closest took of its budget: of random plans, the prediction with "
        f"its margin{given}.",
        "",
        *markdown_table(HEADINGS, [cells_of(name, entry) for name, entry in rows]),
        "",
        *profiled,
        "![Every plan, predicted against measured, and against its budget; one step's memory by part]"
        "(../figures/memory_error.png)",
    ])  # fmt: skip


def draw(rows: Rows, curve: Mapping[str, Sequence[int]], content: object, path: str | Path) -> Path:
    """Draw all rows, and the curve of one plan (`StepMemory.curve`)."""
    rows = [row for row in rows if "peak_bytes" in row]  # refused plans have nothing to show
    figure = new_figure(12, 7.6, "Bytes predicted from the graph, and measured")
    (saved, highest), (budget, step) = figure.subplots(2, 2)
    for axes, what, within in ((saved, "saved", SAVED_BAR), (highest, "peak", PEAK_BAR)):
        errors = [row[f"predicted_{what}_bytes"] / row[f"{what}_bytes"] for row in rows]
        reach = 1.4 * max(within, *(abs(error - 1) for error in errors))
        axes.axhspan(1 - within, 1 + within, color="#f0f1f3", zorder=0)  # the bar
        axes.set(ylim=(1 - reach, 1 + reach), xlabel=f"{what}, measured MB", ylabel="predicted / measured")
        _points(axes, rows, f"{what}_bytes", errors)
    # No plan may take more than all of its budget.
    budget.set(xlabel="budget, MB", ylabel="peak, measured / budget")
    _points(budget, rows, "budget_bytes", [row["peak_bytes"] / row["budget_bytes"] for row in rows])
    colours, markers = _styles(rows)
    looks = [(c, "o", of) for of, c in colours.items()], [(INK, m, of) for of, m in markers.items()]
    for axes, found in zip((saved, highest), looks, strict=True):
        handles = [Line2D([], [], linewidth=0, color=c, marker=m, label=of) for c, m, of in found]
        axes.legend(handles=handles, markerscale=0.8, frameon=False, fontsize=8, ncols=3, loc="lower center")
    stack_parts(step, curve)
    step.legend(reverse=True, frameon=False, fontsize=8, ncols=2, loc="upper left")
    step.set_xlabel("operator: forward | backward (a plan of GPT, simulated)")
    return save_png(figure, path)


def _points(axes: Axes, rows: Rows, along: str, heights: Sequence[float]) -> None:
    """Draw one point for each plan, and a line at 1."""
    colours, markers = _styles(rows)
    axes.axhline(1, color=INK, linewidth=0.8)
    for row, height in zip(rows, heights, strict=True):
        axes.scatter(
            row[along] / 1e6, height, s=16, alpha=0.6, linewidths=0, facecolor=colours[row["model"]],
            marker=markers[row["part"]],
        )  # fmt: skip
    remove_frame(axes)


def _styles(rows: Rows) -> tuple[dict[str, str], dict[str, str]]:
    """Return the colour of each model, and the marker of each part."""
    models, parts = (dict.fromkeys(row[what] for row in rows) for what in ("model", "part"))
    return dict(zip(models, SERIES_COLOURS, strict=False)), dict(zip(parts, "oDs^", strict=False))


if __name__ == "__main__":
    run_command(main)
