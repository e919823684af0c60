"""How wrong the memory model is: `python -m qsync.experiments.memory.memory_error --out FOLDER` measures it.

Plans of every model run as training runs them: in DDP, gradients in its buckets, AdamW. What autograd keeps
is counted with its own hooks, the peak with the allocator's own events; beside them stands what was predicted
from the graph alone.

    margin      random plans (precisions and operators that save less drawn at random). The most by which the
                prediction was ever too small, twice, is the margin of every plan
    unseen      random plans of other seeds, judged against the margin that stands
    two ranks   random plans of a seed of its own, different ones on two real ranks, judged alike
    accepted    plans that `qsync.plan` accepts under tight budgets, run on the two ranks

What is measured stays in the folder, so that parts can be measured one by one (`--part`). `--state` writes
the margin beside the model, and the table into the README.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated, Any

import torch
import torch.distributed as dist
import typer
from rich import box
from rich.console import Console
from rich.table import Table

import qsync
from qsync.backend.device_detection import machine
from qsync.errors import QSyncError
from qsync.experiments.demo.rank import commit
from qsync.experiments.memory import memory_picture
from qsync.experiments.memory.memory_ranks import SHARES, run_ranks
from qsync.experiments.memory.memory_runs import MODELS, SEED, Trained, drawn, parts_of
from qsync.predictor.memory import peak
from qsync.records.json_files import read_json, write_json, write_text

Rows = Sequence[Mapping[str, Any]]

MARGIN, UNSEEN, RANKS, ACCEPTED, REFUSED = "margin", "unseen", "two ranks", "accepted", "refused"
# What `--part` chooses from, with the parts that rows then bear.
PARTS = {"margin": (MARGIN,), "unseen": (UNSEEN,), "ranks": (RANKS, ACCEPTED, REFUSED)}
PREDICTED = Path(peak.__file__).with_name("memory_error.json")
README = Path(__file__).parents[2] / "README.md"
SAVED_BAR, PEAK_BAR = 0.01, 0.05
HEADINGS = (
    "", "plans", "saved: median", "95th", "worst", "peak: median", "95th", "worst", "of its budget", "holds",
)  # fmt: skip
ALL = "all"


def main(
    out: Annotated[Path, typer.Option(help="Folder for memory_error.json and memory_error.png.")] = Path("."),
    part: Annotated[list[str] | None, typer.Option(help=f"{', '.join(PARTS)}; all if left out.")] = None,
    plans: Annotated[int, typer.Option(help="Random plans of each model and seed.")] = 30,
    seed: Annotated[list[int], typer.Option(help="Of the plans that the margin has not seen.")] = [1, 2],  # noqa: B006
    rank_plans: Annotated[int, typer.Option(help="Random plans of each model on each of two ranks.")] = 6,
    state: Annotated[bool, typer.Option(help="Write the margin beside the memory model.")] = False,
) -> None:
    """Measure the parts, print a table, write figures and a picture, and on demand the margin."""
    torch.set_num_threads(1)
    parts = part or list(PARTS)
    for name in parts:
        if name not in PARTS:
            raise typer.BadParameter(f"there is no part {name!r}; choose from {', '.join(PARTS)}")
    if SEED in seed:
        raise typer.BadParameter(f"the margin comes from the plans of seed {SEED}; give another --seed")
    content = _before(out)
    for name in parts:
        if name == "margin":
            rows, content["curve"] = random_plans(plans, MARGIN, SEED)
            if state:  # what follows is judged by it
                _state({"worst_underprediction": {"cpu": worst_underprediction(rows)}})
        elif name == "unseen":
            rows = [row for one in seed for row in random_plans(plans, UNSEEN, one)[0]]
        else:
            rows = run_ranks(MODELS, rank_plans, max(SEED, *seed) + 1)
        content = _with(content, name, rows)
        write_json(out / "memory_error.json", content)
    if "curve" in content:
        margin = peak.SAFETY * worst_underprediction(content["plans"])
        shown = [judged(row, margin) if row["part"] == MARGIN else row for row in content["plans"]]
        memory_picture.draw(shown, content["curve"], out / "memory_error.png")
    if state:
        text = between_markers(README.read_text(encoding="utf-8"), markdown(content))
        _state({key: value for key, value in content.items() if key not in ("plans", "curve")})
        write_text(README, text)
    Console().print(table(content["parts"]))


def random_plans(num: int, part: str, seed: int) -> tuple[list[dict[str, Any]], dict[str, list[int]]]:
    """A row for each of so many random plans of every model, on one rank; and the last one's step."""
    rows: list[dict[str, Any]] = []
    with _alone(), Console(stderr=True).status("memory") as status:
        for name in MODELS:
            trained = make(name)
            for number in range(num):
                status.update(f"{name}, plan {number + 1} of {num}, seed {seed}")
                found = trained.measure(drawn(trained.graph, number, seed))
                rows.append({"part": part, "model": name, "seed": seed, "plan": number, **found})
            if name == MODELS[0]:
                example = trained.predicted().curve()
    return rows, example


def make(name: str) -> Trained:
    """A model in training."""
    torch._dynamo.reset()
    return Trained(*parts_of(name))


def _before(out: Path) -> dict[str, Any]:
    """What lies in the folder from parts measured before."""
    path = out / "memory_error.json"
    out.mkdir(parents=True, exist_ok=True)
    return read_json(path) if path.is_file() else {"plans": [], "commits": {}}


def _with(content: Mapping[str, Any], part: str, rows: Rows) -> dict[str, Any]:
    """The content with this part measured anew."""
    rows = [*(row for row in content["plans"] if row["part"] not in PARTS[part]), *rows]
    return {
        **content,
        "measured": True,
        "machine": machine(),
        "qsync": qsync.__version__,
        "torch": torch.__version__,
        "commits": {**content["commits"], part: commit()},
        "threads": 1,
        "parts": summary(rows),
        "worst_underprediction": {"cpu": worst_underprediction(rows)},
        "plans": rows,
    }


def _state(content: Mapping[str, Any]) -> None:
    write_json(PREDICTED, content)
    peak.stated_error.cache_clear()


def summary(rows: Rows) -> dict[str, dict[str, Any]]:
    """By part and model, and of all models together, the errors; with the seeds and how many were refused."""
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
    """A row with the budget that its prediction and this margin make."""
    comes_and_goes = row["predicted_peak_bytes"] - row["throughout_bytes"]
    return {**row, "budget_bytes": row["predicted_peak_bytes"] + math.ceil(margin * comes_and_goes)}


def errors(rows: Rows) -> dict[str, Any]:
    """The signed errors (predicted / measured - 1) of saved and peak bytes; and the part of its budget that
    the plan which came closest took.
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
    """The largest part of what comes and goes in a step that the prediction missed, over all plans that the
    margin is made from.
    """
    missed = [
        (row["peak_bytes"] - row["predicted_peak_bytes"])
        / (row["predicted_peak_bytes"] - row["throughout_bytes"])
        for row in rows
        if row["part"] == MARGIN
    ]
    return max(0.0, *missed) if missed else 0.0


def holds(entry: Mapping[str, Any]) -> bool:
    """Whether errors are within the bars, and no plan went over its budget."""
    within = all(
        max(abs(entry[what]["lowest"]), abs(entry[what]["highest"])) <= bar
        for what, bar in (("saved", SAVED_BAR), ("peak", PEAK_BAR))
    )
    return within and not entry["over_budget"]


def table(parts: Mapping[str, Mapping[str, Any]]) -> Table:
    """The errors of each part and model, in percent."""
    shown = Table(title="Predicted over measured bytes (measured)", box=box.SIMPLE_HEAD)
    for heading in HEADINGS:
        shown.add_column(heading, justify="right" if heading else "left")
    for part, found in parts.items():
        for name, entry in found["models"].items():
            shown.add_row(*cells_of(f"{part}, {name}", entry))
    return shown


def cells_of(name: str, entry: Mapping[str, Any]) -> list[str]:
    """One row of text: the same for the terminal and for the README."""
    cells = [name, str(entry["plans"])]
    for what in ("saved", "peak"):
        errors = entry[what]
        worst = max(errors["lowest"], errors["highest"], key=abs)
        cells += [f"{errors['median']:+.2%}", f"{errors['p95']:.2%}", f"{worst:+.2%}"]
    return [*cells, f"{entry['of_budget']:.2%}", "yes" if holds(entry) else "NO"]


def markdown(content: Mapping[str, Any]) -> str:
    """The table as the README has it: plans that the margin is made from by model, all others together."""
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
        f"{content['torch']}; measured, commit {commits}. *of its budget*: what the plan that came closest "
        f"took of its budget: of random plans, the prediction with its margin{given}.",
        "",
        "| " + " | ".join(HEADINGS) + " |",
        "|" + "---|" * len(HEADINGS),
        *("| " + " | ".join(cells_of(name, entry)) + " |" for name, entry in rows),
        "",
        "![Every plan, predicted against measured, and against its budget; one step's memory by part]"
        "(docs/memory_error.png)",
    ]
    return "\n".join(lines)


def _of(refused: Mapping[str, int]) -> str:
    return f": {', '.join(f'{num} of {name}' for name, num in refused.items())}" if refused else ""


def between_markers(text: str, table: str) -> str:
    """A README with this table in the place of its last one."""
    begin, end = (f"<!-- memory:{word} -->" for word in ("begin", "end"))
    head, _, rest = text.partition(begin)
    return f"{head}{begin}\n{table}\n{end}{rest.partition(end)[2]}"


@contextmanager
def _alone() -> Iterator[None]:
    """A process group of one: DDP with its buckets, and nobody to wait for."""
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        yield
    finally:
        dist.destroy_process_group()


if __name__ == "__main__":
    typer.run(main)
