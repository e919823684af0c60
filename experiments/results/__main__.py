"""Run every experiment behind README and docs again, and write its page: `make results`.

    python -m qsync.experiments.results --out results
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
from qsync.experiments.results.commands import RERUNS
from qsync.experiments.results.papers import papers_table, rows_of
from qsync.records.json_files import read_json, write_json

# Has the papers' table; the list of finished experiments is only printed
_PAGE = Path("docs/results/index.md")
_KEPT = Path("docs/results/papers.json")  # the rows of that table


def main(
    out: Out = Path("results"),
    only: Annotated[list[str] | None, typer.Option(help="Only this experiment; repeatable.")] = None,
    listed: Annotated[bool, typer.Option("--list", help="Say what there is; run nothing.")] = False,
    publish: Publish = False,
    fresh: Fresh = False,
) -> None:
    """Run unfinished experiments one by one, and list the state of each."""
    for name in only or ():
        if name not in RERUNS:
            raise QSyncError(f"unknown experiment {name!r}; choose from {', '.join(RERUNS)}")
    experiment, failed = Experiment("results", out, fresh=fresh), dict[str, str]()
    folders = {name: out / name.replace(" ", "-") for name in RERUNS}
    for name in () if listed else only or RERUNS:
        if fresh:
            shutil.rmtree(folders[name], ignore_errors=True)
        show(f"{name}: about {RERUNS[name].minutes} minutes where nothing is there yet")
        try:
            experiment.piece(name, partial(RERUNS[name].run, folders[name]))
        except QSyncError as error:
            failed[name] = str(error)
            show(escape(f"{name}: {error}"))
    experiment.fresh = False  # current runs count as finished
    states = {
        name: failed.get(name) or ("finished" if experiment.kept(name) else "not finished") for name in RERUNS
    }
    # A machine seldom has time for all: published rows stay until they are measured again.
    found = rows_of({name: rerun.found(folders[name]) for name, rerun in RERUNS.items()})
    rows = {**(read_json(_KEPT) if _KEPT.is_file() else {}), **found}
    finished = sum(state == "finished" for state in states.values())
    lines = [[name, RERUNS[name].page, state] for name, state in states.items()]
    experiment.finish(
        {"experiments": states},
        bars=[bar("experiments that are finished", finished, len(RERUNS), at_least=True)],
        tables=[table_of("Experiments", ("", "page", "state"), lines, left=3), papers_table(rows)],
    )
    if publish and not listed:
        write_json(_KEPT, rows)
        write_between({_PAGE: as_markdown(papers_table(rows))}, "results")
    if failed:
        raise QSyncError(
            f"{', '.join(failed)} did not finish; see the lines above, and run again to continue"
        )


if __name__ == "__main__":
    run_command(main)
