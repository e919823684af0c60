"""Run every experiment behind README and docs again, and write its page: `make results`.

    python -m qsync.experiments.results --out results
    python -m qsync.experiments.results --out results --only speedup --only accuracy
    python -m qsync.experiments.results --out results --list

Each experiment has a folder of its own below `--out` and continues there, so hours can be made up of minutes.
One that is finished is not run again. It runs from the root of a clone, whose pages it writes.
"""

from __future__ import annotations

import shutil
from collections.abc import Mapping
from functools import partial
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.markup import escape
from rich.table import Table

from qsync.errors import QSyncError
from qsync.experiments.harness import Experiment, bar, run_command, show, table_of
from qsync.experiments.harness.options import Fresh, Out, Publish
from qsync.experiments.harness.tables import as_markdown, write_between
from qsync.experiments.results.commands import RERUNS, Rerun
from qsync.experiments.results.papers import papers_table, rows_of
from qsync.records.json_files import read_json, write_json

_PAGE = Path("docs/results/index.md")  # has the papers' table; what is finished is for who runs this
_KEPT = Path("docs/results/papers.json")  # the rows of that table


def main(
    out: Out = Path("results"),
    only: Annotated[list[str] | None, typer.Option(help="Only this experiment; repeatable.")] = None,
    listed: Annotated[bool, typer.Option("--list", help="Say what there is; run nothing.")] = False,
    publish: Publish = False,
    fresh: Fresh = False,
) -> None:
    """Run what is not finished, one after the other, and say what there is of each."""
    for name in only or ():
        if name not in RERUNS:
            raise QSyncError(f"there is no experiment {name!r}; choose from {', '.join(RERUNS)}")
    experiment, failed = Experiment("results", out, fresh=fresh), dict[str, str]()
    for name in () if listed else only or RERUNS:
        if fresh:
            shutil.rmtree(_folder(out, name), ignore_errors=True)
        show(f"{name}: about {RERUNS[name].minutes} minutes where nothing is there yet")
        try:
            experiment.piece(name, partial(_run, RERUNS[name], _folder(out, name)))
        except QSyncError as error:
            failed[name] = str(error)
            show(escape(f"{name}: {error}"))
    experiment.fresh = False  # what was run now is what there is
    states = {
        name: {
            "state": failed.get(name) or ("finished" if experiment.kept(name) else "not finished"),
            **_origin(rerun, _folder(out, name)),
        }
        for name, rerun in RERUNS.items()
    }
    commits = sorted({commit for one in states.values() for commit in one["commits"]})
    finished = sum(one["state"] == "finished" for one in states.values())
    # A machine seldom has the hours for all: what was published stays until it is measured again.
    found = rows_of({name: rerun.found(_folder(out, name)) for name, rerun in RERUNS.items()})
    rows = {**(read_json(_KEPT) if _KEPT.is_file() else {}), **found}
    experiment.finish(
        {"experiments": states},
        bars=[
            bar("experiments that are finished", finished, len(RERUNS), at_least=True),
            bar("commits that their figures are of", len(commits), 1),
        ],
        tables=[_table(states), papers_table(rows)],
    )  # fmt: skip
    if publish and not listed:
        write_json(_KEPT, rows)
        write_between([_PAGE], "results", as_markdown(papers_table(rows)))
    if failed:
        raise QSyncError(
            f"{', '.join(failed)} did not finish; the lines above say why, and a further run continues"
        )


def _folder(out: Path, name: str) -> Path:
    return out / name.replace(" ", "-")


def _run(rerun: Rerun, folder: Path) -> Mapping[str, Any]:
    rerun.run(folder)
    return _origin(rerun, folder)


def _origin(rerun: Rerun, folder: Path) -> dict[str, Any]:
    """Return the commits of an experiment's figures, and which of its promises hold."""
    found = rerun.found(folder)
    bars = found.get("bars", [])
    return {
        "commits": found.get("commits_of_pieces") or ([found["commit"]] if "commit" in found else []),
        "promises": len(bars), "held": sum(one["holds"] is True for one in bars),
    }  # fmt: skip


def _table(states: Mapping[str, Mapping[str, Any]]) -> Table:
    rows = [
        [
            name, RERUNS[name].page, one["state"], ", ".join(one["commits"]) or "-",
            f"{one['held']} of {one['promises']}",
        ]
        for name, one in states.items()
    ]  # fmt: skip
    return table_of("Experiments", ("", "page", "state", "commits", "promises held"), rows, left=4)


if __name__ == "__main__":
    run_command(main)
