"""Reduce the main experiment to one comparable line for a pile of cards, and collect such lines.

    python -m qsync.experiments.mixed.clusters FOLDER ...

FOLDER is what `python -m qsync.experiments.mixed` or `qsync demo` wrote, or a `cluster-result.json` that
somebody sent. `--publish` adds them to the documentation; it needs a checkout of the source.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, ClassVar

import typer
from rich.table import Table

from qsync import QSyncError
from qsync.experiments.harness import as_markdown, run_command, show, table_of, write_between
from qsync.experiments.harness.options import Publish
from qsync.experiments.mixed.publish import PAGE, ROOT
from qsync.experiments.mixed.report import shown
from qsync.experiments.mixed.ways import ALL_16, ALONE, DDP, LB_BSP, QSYNC_ALL, WEAK_16
from qsync.records.json_files import read_json, write_json
from qsync.records.record_json import Count, FileRecord, Number, Positive

FILE = "cluster-result.json"
_KEPT = Path("docs/results/clusters.json")
_PLAN = "plan"
_WAYS = {
    ALONE: "alone", DDP: "DDP", LB_BSP: "by speed", WEAK_16: "weak 16 bits", ALL_16: "all 16 bits",
    QSYNC_ALL: "plan for all",
}  # fmt: skip


@dataclass(frozen=True, slots=True)
class ClusterResult(FileRecord):
    """Samples per second of each way to train one model on a pile of cards.

    `error` is the relative error of the plan's step, predicted before training; `worst_error` that of the
    worst way. `cards` counts ranks by hardware.
    """

    FILE_KIND: ClassVar[str] = "qsync-cluster-result"

    cards: Mapping[str, Positive]
    emulated: bool
    model: str
    num_parameters: Count
    base: str
    samples_per_s: Mapping[str, Number]
    error: float
    worst_error: Number
    torch: str
    commit: str

    @property
    def name(self) -> str:
        """Return the cards and the model: a newer result of the same replaces an older one."""
        cards = " + ".join(f"{count} x {card}" for card, count in sorted(self.cards.items()))
        return f"{cards}{' (one emulated)' if self.emulated else ''}; {self.model}, base {self.base}"


def result_of(figures: Mapping[str, Any]) -> ClusterResult:
    """Return the result of one run's figures.json. Raises QSyncError for figures of something else."""
    if figures.get("experiment") != "mixed":
        raise QSyncError("these figures are of another experiment; give the folder of a finished qsync demo")
    runs, cards = figures["runs"], Counter[str]()
    for each in figures["cluster"]["classes"]:
        cards[each.get("hardware") or each["device"]] += each["count"]
    names = {**_WAYS, shown(runs): _PLAN}
    measured = {name: run for name, run in runs.items() if run["measured_step_s"]}
    errors = {name: run["planned_step_s"] / run["measured_step_s"] - 1 for name, run in measured.items()}
    if shown(runs) not in measured:
        raise QSyncError("the plan's steps were not measured; give --steps 4 or more, and run again")
    return ClusterResult(
        dict(cards), figures["emulated"], figures["workload"], figures["num_parameters"], figures["base"],
        {names[name]: run["samples_a_step"] / run["measured_step_s"]
         for name, run in measured.items() if name in names},
        errors[shown(runs)], max(map(abs, errors.values())), figures["machine"]["torch"], figures["commit"],
    )  # fmt: skip


def _rates(result: ClusterResult) -> dict[str, str]:
    """Return the samples per second of every measured way, and their ratio to the strongest cards alone."""
    alone = result.samples_per_s.get(_WAYS[ALONE])
    return {
        way: f"{rate:.3g}" + (f" ({rate / alone:.2f}x)" if alone else "")
        for way in (*_WAYS.values(), _PLAN)
        if (rate := result.samples_per_s.get(way)) is not None
    }


def line(result: ClusterResult) -> str:
    """Return a result as one line: samples per second of each way, and errors of predicted steps."""
    rates = ", ".join(f"{way} {rate}" for way, rate in _rates(result).items())
    errors = f"plan's step predicted {result.error:+.1%}, worst {result.worst_error:.1%}"
    return f"{result.name}: samples/s {rates}; {errors}; torch {result.torch}, commit {result.commit}"


def table(results: Iterable[ClusterResult]) -> Table:
    """Return a row per result."""
    heads = ("cards; model", *_WAYS.values(), _PLAN, "plan's step predicted", "worst", "torch", "commit")
    rows = []
    for one in results:
        rates = _rates(one)
        cells = (rates.get(way, "-") for way in (*_WAYS.values(), _PLAN))
        rows.append([one.name, *cells, f"{one.error:+.1%}", f"{one.worst_error:.1%}", one.torch, one.commit])
    return table_of("Samples per second, by pile of cards", heads, rows)


def main(
    folders: Annotated[list[Path], typer.Argument(help="Folders of finished runs, or files of results.")],
    publish: Publish = False,
) -> None:
    """Print a line for each run, and write it beside the run as cluster-result.json."""
    found = {}
    for path in folders:
        if path.is_file():
            result = ClusterResult.load(path)
        else:
            if not (path / "figures.json").is_file():
                raise QSyncError(f"{path} has no figures.json; give the folder of a finished qsync demo")
            result = result_of(read_json(path / "figures.json"))
            result.save(path / FILE)
        found[result.name] = result
    show(*map(line, found.values()))
    if publish:
        kept = read_json(ROOT / _KEPT)["results"] if (ROOT / _KEPT).is_file() else []
        known = {one.name: one for one in map(ClusterResult.from_json, kept)} | found
        write_json(ROOT / _KEPT, {"results": [one.to_json() for one in known.values()]})
        write_between({ROOT / PAGE: as_markdown(table(known.values()))}, "clusters")


if __name__ == "__main__":
    run_command(main)
