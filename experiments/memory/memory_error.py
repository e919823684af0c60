"""How wrong the memory model is: `python -m qsync.experiments.memory.memory_error --out FOLDER` measures it.

Plans of every model run as training runs them: in DDP, gradients in its buckets, AdamW. Autograd's own hooks
count the bytes saved for backward, the allocator's own events the peak; beside them stands the prediction
from the graph alone.

    margin      random plans (precisions and operators that save less drawn at random). The most by which the
                prediction was ever too small, twice, is the margin of every plan
    unseen      random plans of other seeds, judged against the margin that stands
    two ranks   random plans of a seed of its own, different ones on two real ranks, judged alike
    accepted    plans that `qsync.plan` accepts under tight budgets, run on the two ranks

Parts can be measured one by one (`--part`); the figures cover all parts in the folder. `--state` writes the
margin beside the model, and the table into docs/results/memory.md.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Annotated, Any

import torch
import torch.distributed as dist
import typer
from matplotlib.axes import Axes
from matplotlib.lines import Line2D
from rich.table import Table

from qsync import QSyncError
from qsync.experiments.harness import Experiment, Fresh, Out, bar, markdown_table, run_command, table_of, yes
from qsync.experiments.harness.pictures import new_figure
from qsync.experiments.harness.provenance import commit
from qsync.experiments.memory.memory_ranks import SHARES, run_ranks
from qsync.experiments.memory.memory_runs import MODELS, SEED, Trained, drawn, parts_of
from qsync.figures.memory import stack_parts, strip_axes
from qsync.figures.style import FAINT, INK, SERIES_COLOURS, save_png
from qsync.predictor.memory import peak
from qsync.records.json_files import write_json, write_text

Rows = Sequence[Mapping[str, Any]]

MARGIN, UNSEEN, RANKS, ACCEPTED, REFUSED = "margin", "unseen", "two ranks", "accepted", "refused"
# The choices of `--part`, with the parts that their rows bear.
PARTS = {"margin": (MARGIN,), "unseen": (UNSEEN,), "ranks": (RANKS, ACCEPTED, REFUSED)}
PREDICTED = Path(peak.__file__).with_name("memory_error.json")
RESULTS_PAGE = Path(__file__).parents[2] / "docs" / "results" / "memory.md"
SAVED_BAR, PEAK_BAR = 0.01, 0.05
HEADINGS = (
    "", "plans", "saved: median", "95th", "worst", "peak: median", "95th", "worst", "of its budget", "holds",
)  # fmt: skip
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
    found: dict[str, Any] = {}
    with experiment.progress():
        if "margin" in parts:
            found["margin"] = _random_plans(experiment, plans, MARGIN, SEED)
            if state:  # the other parts are judged by it
                _state({"worst_underprediction": {"cpu": worst_underprediction(found["margin"])}})
        if "unseen" in parts:
            found["unseen"] = [row for one in seed for row in _random_plans(experiment, plans, UNSEEN, one)]
        if "ranks" in parts:
            found["ranks"] = experiment.piece(
                "ranks", lambda: run_ranks(MODELS, rank_plans, max(SEED, *seed) + 1),
                plans=rank_plans, seeds=seed, **_stated(),
            )  # fmt: skip
    content = _finished(experiment, found)
    if state:
        text = between_markers(RESULTS_PAGE.read_text(encoding="utf-8"), markdown(content))
        _state({key: value for key, value in content.items() if key not in ("plans", "curve")})
        write_text(RESULTS_PAGE, text)


def _random_plans(experiment: Experiment, num: int, part: str, seed: int) -> list[dict[str, Any]]:
    """Return a row for each random plan of every model; every model and seed is a piece."""
    rows: list[dict[str, Any]] = []
    for name in MODELS:
        rows += experiment.piece(
            f"{part} {seed} {name}",
            partial(random_plans, name, num, part, seed),
            plans=num, **({} if part == MARGIN else _stated()),
        )["rows"]  # fmt: skip
    return rows


def _stated() -> dict[str, float]:
    """Return the margin that stands, by which a piece is judged."""
    return {"stated_margin": peak.stated_error("cpu")}


def random_plans(name: str, num: int, part: str, seed: int) -> dict[str, Any]:
    """Return a row for each of so many random plans of a model on one rank, and the curve of the last one."""
    with _alone():
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
    return Trained(*parts_of(name))


def _finished(experiment: Experiment, found: Mapping[str, Rows]) -> dict[str, Any]:
    """Write the figures of these parts and of those that were measured before."""
    before = experiment.earlier()
    rows = [*(row for row in before.get("plans", []) if _chosen(row["part"]) not in found)]
    rows += [row for part in found.values() for row in part]
    curve = before.get("curve")
    if "margin" in found:
        curve = experiment.piece(f"{MARGIN} {SEED} {MODELS[0]}", dict)["curve"]
    parts = summary(rows)
    margin = peak.SAFETY * worst_underprediction(rows)
    shown = [judged(row, margin) if row["part"] == MARGIN else row for row in rows]
    figures = {
        "commits": {**before.get("commits", {}), **dict.fromkeys(found, commit())}, "threads": 1,
        "parts": parts, "worst_underprediction": {"cpu": worst_underprediction(rows)}, "plans": rows,
        "curve": curve,
    }  # fmt: skip
    bars = [one for part, of in parts.items() for one in _bars(part, of["models"][ALL])]
    return experiment.finish(
        figures, bars=bars, tables=[table(parts)],
        picture=(lambda content, path: draw(shown, curve, path)) if curve else None,
    )  # fmt: skip


def _chosen(part: str) -> str:
    return next(name for name, parts in PARTS.items() if part in parts)


def _bars(part: str, entry: Mapping[str, Any]) -> list[dict[str, Any]]:
    """Return the worst errors of some plans, and how many went over their budget, beside the limits."""
    worst = {what: max(abs(entry[what]["lowest"]), abs(entry[what]["highest"])) for what in ("saved", "peak")}
    return [
        bar(f"{part}: worst error of saved bytes", worst["saved"], SAVED_BAR),
        bar(f"{part}: worst error of peak bytes", worst["peak"], PEAK_BAR),
        bar(f"{part}: plans over their budget", entry["over_budget"], 0),
    ]


def _state(content: Mapping[str, Any]) -> None:
    write_json(PREDICTED, content)
    peak.stated_error.cache_clear()


def summary(rows: Rows) -> dict[str, dict[str, Any]]:
    """Return the errors by part and model, and of all models together; the seeds, how many were refused."""
    margin = peak.SAFETY * worst_underprediction(rows)
    found: dict[str, dict[str, Any]] = {}
    for part in dict.fromkeys(row["part"] for row in rows if row["part"] != REFUSED):
        own = [judged(row, margin) if part == MARGIN else row for row in rows if row["part"] == part]
        entries = {ALL: errors(own)}
        for name in dict.fromkeys(row["model"] for row in own):
            entries[name] = errors([row for row in own if row["model"] == name])
        found[part] = {"seeds": sorted({row["seed"] for row in own}), "models": entries}
    refused = [row["model"] for row in rows if row["part"] == REFUSED and row["rank"] == 0]
    if ACCEPTED in found:
        found[ACCEPTED]["refused"] = {name: refused.count(name) for name in dict.fromkeys(refused)}
    return found


def judged(row: Mapping[str, Any], margin: float) -> dict[str, Any]:
    """Return a row with the budget that its prediction and this margin make."""
    comes_and_goes = row["predicted_peak_bytes"] - row["throughout_bytes"]
    return {**row, "budget_bytes": row["predicted_peak_bytes"] + math.ceil(margin * comes_and_goes)}


def errors(rows: Rows) -> dict[str, Any]:
    """Return the signed errors of saved and peak bytes, and the largest part of a budget that was used.

    An error is predicted / measured - 1.
    """
    found: dict[str, Any] = {"plans": len(rows)}
    for what in ("saved", "peak"):
        errors = [row[f"predicted_{what}_bytes"] / row[f"{what}_bytes"] - 1 for row in rows]
        found[what] = {
            "median": statistics.median(errors),
            "p95": sorted(map(abs, errors))[max(0, -(-95 * len(errors) // 100) - 1)],
            "lowest": min(errors),
            "highest": max(errors),
        }
    found["of_budget"] = max(row["peak_bytes"] / row["budget_bytes"] for row in rows)
    found["over_budget"] = sum(row["peak_bytes"] > row["budget_bytes"] for row in rows)
    return found


def worst_underprediction(rows: Rows) -> float:
    """Return the largest part of a step's temporary bytes that the prediction missed.

    Taken over all plans that the margin is made from.
    """
    missed = [
        (row["peak_bytes"] - row["predicted_peak_bytes"])
        / (row["predicted_peak_bytes"] - row["throughout_bytes"])
        for row in rows
        if row["part"] == MARGIN
    ]
    return max(0.0, *missed) if missed else 0.0


def holds(entry: Mapping[str, Any]) -> bool:
    """Return whether errors are within the bars, and no plan went over its budget."""
    return all(one["holds"] for one in _bars("", entry))


def table(parts: Mapping[str, Mapping[str, Any]]) -> Table:
    """Return the errors of each part and model, in percent."""
    rows = [
        cells_of(f"{part}, {name}", entry)
        for part, found in parts.items()
        for name, entry in found["models"].items()
    ]
    return table_of("Predicted over measured bytes (measured)", HEADINGS, rows)


def cells_of(name: str, entry: Mapping[str, Any]) -> list[str]:
    """Return one row of text: the same for the terminal and for the page of results."""
    cells = [name, str(entry["plans"])]
    for what in ("saved", "peak"):
        errors = entry[what]
        worst = max(errors["lowest"], errors["highest"], key=abs)
        cells += [f"{errors['median']:+.2%}", f"{errors['p95']:.2%}", f"{worst:+.2%}"]
    return [*cells, f"{entry['of_budget']:.2%}", yes(holds(entry))]


def markdown(content: Mapping[str, Any]) -> str:
    """Return the table: plans that the margin is made from by model, all others together."""
    parts = content["parts"]
    if MARGIN not in parts:
        raise QSyncError("the margin was not measured yet; measure that part before --state")
    rows = [(name, entry) for name, entry in parts[MARGIN]["models"].items() if name != ALL]
    named = {
        UNSEEN: "all, plans the margin has not seen",
        RANKS: "all, a different plan on each of two real ranks",
        ACCEPTED: "all, plans accepted under a budget, on two ranks",
    }
    rows += [(text, parts[name]["models"][ALL]) for name, text in named.items() if name in parts]
    refused = parts.get(ACCEPTED, {}).get("refused", {})
    percent = " %, ".join(f"{share * 100:.0f}" for share in sorted({*SHARES}, reverse=True))
    given = (
        f"; for accepted ones what `qsync.plan` was given: {percent} % of FP32's peak "
        f"({sum(refused.values())} such plans were refused{_of(refused)})"
        if ACCEPTED in parts
        else ""
    )
    commits = ", ".join(sorted({*content["commits"].values()}))
    lines = [
        f"Predicted over measured bytes - 1; one thread of an {content['machine']['processor']}, torch "
        f"{content['machine']['torch']}; measured, commit {commits}. *of its budget*: what the plan that "
        f"came closest took of its budget: of random plans, the prediction with its margin{given}.",
        "",
        *markdown_table(HEADINGS, [cells_of(name, entry) for name, entry in rows]),
        "",
        "![Every plan, predicted against measured, and against its budget; one step's memory by part]"
        "(../memory_error.png)",
    ]
    return "\n".join(lines)


def _of(refused: Mapping[str, int]) -> str:
    return f": {', '.join(f'{num} of {name}' for name, num in refused.items())}" if refused else ""


def between_markers(text: str, table: str) -> str:
    """Return a page with this table in the place of its last one."""
    begin, end = (f"<!-- memory:{word} -->" for word in ("begin", "end"))
    head, _, rest = text.partition(begin)
    return f"{head}{begin}\n{table}\n{end}{rest.partition(end)[2]}"


def draw(rows: Sequence[Mapping[str, Any]], curve: Mapping[str, Sequence[int]], path: str | Path) -> Path:
    """Draw the rows of memory_error.json, and the curve of one plan (`StepMemory.curve`)."""
    rows = [row for row in rows if "peak_bytes" in row]  # refused plans have nothing to show
    figure = new_figure(12, 7.6, "Bytes predicted from the graph, and measured")
    (saved, highest), (budget, step) = figure.subplots(2, 2)
    _against(saved, rows, "saved", 0.01)
    _against(highest, rows, "peak", 0.05)
    _within(budget, rows)
    saved.legend(*_keys(rows, "model"), frameon=False, fontsize=8, ncols=3, loc="lower center")
    highest.legend(*_keys(rows, "part"), frameon=False, fontsize=8, ncols=2, loc="lower center")
    stack_parts(step, curve)
    handles, labels = step.get_legend_handles_labels()
    step.legend(handles[::-1], labels[::-1], frameon=False, fontsize=8, ncols=2, loc="upper left")
    step.set_xlabel("operator: forward | backward (a plan of GPT, simulated)")
    return save_png(figure, path)


def _against(axes: Axes, rows: Sequence[Mapping[str, Any]], what: str, bar: float) -> None:
    """Draw predicted over measured, one point for each plan; the bar is the grey band."""
    axes.axhspan(1 - bar, 1 + bar, color="#f0f1f3", zorder=0)
    axes.axhline(1, color=FAINT, linewidth=0.8)
    _points(axes, rows, f"{what}_bytes", lambda row: row[f"predicted_{what}_bytes"] / row[f"{what}_bytes"])
    reach = max(abs(row[f"predicted_{what}_bytes"] / row[f"{what}_bytes"] - 1) for row in rows)
    axes.set_ylim(1 - 1.4 * max(bar, reach), 1 + 1.4 * max(bar, reach))
    axes.set_xlabel(f"{'saved for backward' if what == 'saved' else 'peak'}, measured MB")
    axes.set_ylabel("predicted / measured")
    strip_axes(axes)


def _within(axes: Axes, rows: Sequence[Mapping[str, Any]]) -> None:
    """Draw what each plan takes of its budget; none may take more than all of it."""
    axes.axhline(1, color=INK, linewidth=1)
    _points(axes, rows, "budget_bytes", lambda row: row["peak_bytes"] / row["budget_bytes"])
    axes.set_xlabel("budget, MB")
    axes.set_ylabel("peak, measured / budget")
    strip_axes(axes)


def _points(
    axes: Axes, rows: Sequence[Mapping[str, Any]], along: str, height: Callable[[Mapping[str, Any]], float]
) -> None:
    colours, markers = _styles(rows, "model"), _styles(rows, "part")
    for kind in dict.fromkeys((row["model"], row["part"]) for row in rows):
        own = [row for row in rows if (row["model"], row["part"]) == kind]
        axes.scatter(
            [row[along] / 1e6 for row in own], [height(row) for row in own], s=16,
            facecolor=colours[kind[0]], marker=markers[kind[1]], alpha=0.6, linewidths=0,
        )  # fmt: skip


def _styles(rows: Sequence[Mapping[str, Any]], what: str) -> dict[str, str]:
    """Return the colour of each model, or the marker of each part."""
    return dict(zip(dict.fromkeys(row[what] for row in rows), SERIES_COLOURS if what == "model" else "oDs^"))  # noqa: B905


def _keys(rows: Sequence[Mapping[str, Any]], what: str) -> tuple[list[Line2D], list[str]]:
    """Return handles and labels of a legend of colours (models) or of markers (parts)."""
    found = _styles(rows, what)
    pairs = [(style, "o") if what == "model" else (INK, style) for style in found.values()]
    handles = [Line2D([], [], linewidth=0, markersize=5, color=colour, marker=m) for colour, m in pairs]
    return handles, list(found)


@contextmanager
def _alone() -> Iterator[None]:
    """Form a process group of one: DDP with its buckets, and nobody to wait for."""
    store = dist.HashStore()  # type: ignore[attr-defined]
    dist.init_process_group("gloo", store=store, rank=0, world_size=1)
    try:
        yield
    finally:
        dist.destroy_process_group()


if __name__ == "__main__":
    run_command(main)
