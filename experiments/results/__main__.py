"""Run every experiment behind README and docs again, and write its page: `make results`.

    python -m qsync.experiments.results --out results
    python -m qsync.experiments.results --out results --size quick
    python -m qsync.experiments.results --out results --only speedup --only accuracy
    python -m qsync.experiments.results --out results --list

Each experiment has its own folder below `--out` and continues there after an interruption. Finished ones are
not run again. Run it from the root of a clone, whose pages it writes.
"""

from __future__ import annotations

import shutil
from functools import partial
from pathlib import Path
from typing import Annotated

import typer
from rich.markup import escape

from qsync.errors import QSyncError
from qsync.experiments.harness import Experiment, bar, run_command, show, table_of
from qsync.experiments.harness.options import Fresh, Out, Publish
from qsync.experiments.harness.tables import as_markdown, write_between
from qsync.experiments.results.all_bars import all_bars_table, bars_of
from qsync.experiments.results.commands import RERUNS, Size, figures_in, runs_of
from qsync.experiments.results.papers import papers_table, rows_of
from qsync.records.json_files import read_json, write_json

_PAGE = Path("docs/results/index.md")  # has all bars and the papers' table
_KEPT = Path("docs/results/index.json")  # the rows of both


def main(
    out: Out = Path("results"),
    size: Annotated[Size, typer.Option(help="45 minutes, nine hours, or everything.")] = Size.NIGHT,
    only: Annotated[list[str] | None, typer.Option(help="Only this experiment, whole; repeatable.")] = None,
    listed: Annotated[bool, typer.Option("--list", help="Say what there is; run nothing.")] = False,
    publish: Publish = False,
    fresh: Fresh = False,
) -> None:
    """Run unfinished experiments one by one, and list the state of each."""
    for name in only or ():
        if name not in RERUNS:
            raise QSyncError(f"unknown experiment {name!r}; choose from {', '.join(RERUNS)}")
    runs = {name: RERUNS[name].whole for name in only} if only else runs_of(size)
    experiment, failed = Experiment("results", out, fresh=fresh), dict[str, str]()
    # A part is no beginning of the whole: it has other settings.
    inner = out / size if size is Size.QUICK and not only else out
    folders = {name: inner / name.replace(" ", "-") for name in RERUNS}
    pieces = {name: name if inner is out else f"{name} {size}" for name in RERUNS}
    show(f"{len(runs)} experiments, about {sum(run.minutes for run in runs.values())} minutes in all")
    for name, run in () if listed else runs.items():
        if fresh:
            shutil.rmtree(folders[name], ignore_errors=True)
        show(f"{name}: about {run.minutes} minutes where nothing is there yet")
        try:
            experiment.piece(pieces[name], partial(run.run, folders[name]))
        except QSyncError as error:
            failed[name] = str(error)
            show(escape(f"{name}: {error}"))
    experiment.fresh = False  # current runs count as finished
    states = {
        name: failed.get(name) or ("finished" if experiment.kept(pieces[name]) else "not finished")
        for name in (RERUNS if listed else runs)
    }
    figures = {name: figures_in(folder) for name, folder in folders.items()}
    # A machine seldom has time for all: published rows stay until they are measured again.
    kept = read_json(_KEPT) if _KEPT.is_file() else {"papers": {}, "bars": {}}
    papers, bars = kept["papers"] | rows_of(figures), kept["bars"] | bars_of(figures)
    finished = sum(state == "finished" for state in states.values())
    lines = [[name, RERUNS[name].page, state] for name, state in states.items()]
    tables = [all_bars_table(bars), papers_table(papers)]
    experiment.finish(
        {"experiments": states},
        bars=[bar("experiments that are finished", finished, len(states), at_least=True)],
        tables=[table_of("Experiments", ("", "page", "state"), lines, left=3), *tables],
    )
    if publish and inner is out and not listed:
        write_json(_KEPT, {"papers": papers, "bars": bars})
        write_between({_PAGE: "\n".join(map(as_markdown, tables))}, "results")
    if failed:
        raise QSyncError(
            f"{', '.join(failed)} did not finish; see the lines above, and run again to continue"
        )


if __name__ == "__main__":
    run_command(main)
