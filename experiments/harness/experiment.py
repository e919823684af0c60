"""Run an experiment: a folder of finished pieces, progress, and `figures.json` with its origin.

Each piece of an experiment (a model, a seed, a part) is written to `FOLDER/pieces/` when finished. An
interrupted run continues with missing pieces; a finished run is only judged and drawn again. `--fresh`
measures all pieces again.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import typer
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from qsync import QSyncError
from qsync.errors import FormatError, MismatchError
from qsync.experiments.harness.processes import end_with_parent
from qsync.experiments.harness.provenance import folder_of, provenance, source
from qsync.experiments.harness.tables import as_markdown, table_of, write_between, yes
from qsync.processes.exit_signals import exit_on_signals
from qsync.processes.progress import shown_on_rank_zero
from qsync.records.json_files import read_json, write_json, write_text

Bar = dict[str, Any]


def bar(name: str, measured: Any, limit: Any, *, at_least: bool = False, **more: Any) -> Bar:
    """Return a bar: a measurement with its limit (at most, at least, or a truth value).

    `more` holds further entries, such as `how` it was measured.
    """
    if isinstance(limit, bool):
        holds: bool | None = measured == limit
    elif measured is None:
        holds = None
    else:
        holds = bool(measured >= limit if at_least else measured <= limit)
    return {
        "name": name, "measured": measured, "limit": limit, "at_least": at_least, "holds": holds, **more
    }  # fmt: skip


def bars_table(bars: Sequence[Bar]) -> Table:
    """Return a table of bars: the rows of `bar_rows`, failed ones bold."""
    rows = bar_rows(bars)
    missed = [number for number, row in enumerate(rows) if row[-1].startswith(yes(False))]
    return table_of("Promises", ("", "found", "limit", "holds"), rows, bold=missed)


def bar_rows(bars: Sequence[Bar]) -> list[list[str]]:
    """Return bars as rows of name, measurement, limit and truth, failed ones first.

    Bars `SUBJECT: KIND` of one kind and limit share a row, which shows the worst of them.
    """
    kinds: dict[tuple[str, str], list[Bar]] = {}
    for one in bars:
        kinds.setdefault((one["name"].rpartition(": ")[2], str(one["limit"])), []).append(one)
    return sorted(map(_row, kinds.values()), key=lambda row: not row[-1].startswith(yes(False)))


def _row(kind: Sequence[Bar]) -> list[str]:
    """Return the cells of the worst bar of a kind, and how many hold."""
    worst, failed = max(kind, key=_badness), sum(one["holds"] is False for one in kind)
    name, holds = worst["name"], yes(worst["holds"])
    if len(kind) > 1:
        subject, _, what = name.rpartition(": ")
        name = f"{what}: worst of {len(kind)} ({subject})"
        holds += f", {len(kind) - failed} of {len(kind)}" if failed else ""
    return [name, _shown(worst["measured"]), _shown(worst["limit"]), holds]


def _badness(one: Bar) -> tuple[bool, bool, float]:
    """Order bars of one limit: failed, then unmeasured, then by distance from the limit."""
    measured = one["measured"] or 0.0
    return one["holds"] is False, one["holds"] is None, -measured if one["at_least"] else measured


def _shown(value: Any) -> str:
    return "-" if value is None else f"{value:.4g}" if isinstance(value, float) else str(value)


@dataclass(frozen=True, slots=True)
class Page:
    """A documentation page that a finished run writes into, between two markers.

    `note` is printed below the tables.
    """

    path: Path
    note: str = ""
    marker: str = "results"

    def beside(self) -> Page:
        """Return the page's section for a second kind of processor."""
        return replace(self, marker="beside")


class Experiment:
    """One run of an experiment in its folder.

    >>> experiment = Experiment("replay speed", Path("results"), settings={"layers": 80})
    >>> row = experiment.piece("gpt", lambda: measure("gpt"))
    >>> experiment.finish({"rows": [row]}, bars=[bar("replay, ms", row["median_s"] * 1e3, 50.0)])
    """

    def __init__(
        self,
        name: str,
        out: Path,
        *,
        seed: int | None = None,
        settings: Mapping[str, Any] | None = None,
        fresh: bool = False,
    ) -> None:
        self.name, self.out, self.seed, self.fresh = name, folder_of(out), seed, fresh
        self.settings: dict[str, Any] = json.loads(json.dumps(settings or {}))
        self.say: Callable[[str], None] = lambda text: None
        # The commit of the running code, even if a new commit is made meanwhile.
        self._source = source()
        # Commits of pieces, which may come from earlier runs or other machines.
        self._commits: set[str] = set()
        self._machines: set[str] = set()

    @contextmanager
    def progress(self) -> Iterator[Callable[[str], None]]:
        """Show the current work on stderr; without a terminal only `name ...`."""
        with shown_on_rank_zero(self.name) as self.say:
            yield self.say

    def piece(self, name: str, make: Callable[[], Any], **settings: Any) -> Any:
        """Return a piece's result from the folder, or from `make`, and store it.

        Raises MismatchError for a stored piece with other settings, FormatError for a malformed one.
        """
        kept = self.kept(name, **settings)
        if kept is not None:
            return kept["result"]
        self.say(name)
        return self.keep(name, make(), **settings)

    def kept(self, name: str, **settings: Any) -> dict[str, Any] | None:
        """Return a finished piece with settings and commit; None if it must be measured."""
        path = self._path(name)
        if self.fresh or not path.is_file():
            return None
        found, wanted = read_json(path), self._settings(settings)
        if not (isinstance(found.get("settings"), dict) and "commit" in found and "result" in found):
            raise FormatError(f"{path} is not a piece of an experiment; delete it, or use --fresh")
        for key, value in wanted.items():
            if found["settings"].get(key) != value:
                raise MismatchError(
                    f"{path} was run with {key} = {found['settings'].get(key)}, not {value}; give another "
                    "--out, that run's options, or --fresh"
                )
        self._note_origin(found)
        return found

    def keep(self, name: str, result: Any, **settings: Any) -> Any:
        """Write a finished piece atomically; return its result as JSON gives it back."""
        content = {"settings": self._settings(settings), **self._provenance(), "result": result}
        with _writing(self._path(name)) as path:
            write_json(path, content)
        self._note_origin(content)
        return json.loads(json.dumps(result))

    def pieces(
        self,
        tasks: Mapping[str, Any],
        make: Callable[[Any], Any],
        processes: int = 1,
        settings: Callable[[Any], Mapping[str, Any]] = lambda task: {},
    ) -> Iterator[tuple[str, Any]]:
        """Yield every task's name and result: first stored ones, then others as they finish.

        `make` runs in parallel processes; `settings` returns a task's settings.
        """
        missing = []
        for name, task in tasks.items():
            kept = self.kept(name, **settings(task))
            if kept is None:
                missing.append(name)
            else:
                yield name, kept["result"]
        if processes == 1 or not missing:
            for name in missing:
                task = tasks[name]
                yield name, self.piece(name, partial(make, task), **settings(task))
            return
        context = get_context("spawn")
        with ProcessPoolExecutor(processes, context, initializer=end_with_parent) as pool:
            running = {pool.submit(make, tasks[name]): name for name in missing}
            try:
                for future in as_completed(running):
                    name = running[future]
                    self.say(f"{name}: done")
                    yield name, self.keep(name, future.result(), **settings(tasks[name]))
            finally:  # after a failure or interruption, drop waiting tasks
                pool.shutdown(wait=False, cancel_futures=True)

    def forget(self, name: str) -> None:
        """Measure a piece again, even if it is in the folder."""
        self._path(name).unlink(missing_ok=True)

    def check_measured(self) -> None:
        """Raise QSyncError without any finished piece: a report would be empty."""
        if not self._commits:
            raise QSyncError(f"{self.out} has no finished piece; run at least one, or give another --out")

    def note(
        self, figures: Mapping[str, Any], *, bars: Iterable[Bar] = (), measured: str | bool = True
    ) -> dict[str, Any]:
        """Write figures.json with the results so far; return its content."""
        content: dict[str, Any] = {
            "experiment": self.name, "measured": measured, **self._provenance(), **self.settings,
            "commits_of_pieces": sorted(self._commits),
            "machines_of_pieces": sorted(self._machines), "bars": list(bars), **figures,
        }  # fmt: skip
        with _writing(self.out / "figures.json") as path:
            write_json(path, content)
        return content

    def finish(
        self,
        figures: Mapping[str, Any],
        *,
        bars: Iterable[Bar] = (),
        measured: str | bool = True,
        tables: Sequence[Table] = (),
        page: Page | None = None,
    ) -> dict[str, Any]:
        """Write figures.json, tables and bars; print the tables, and return the content.

        `measured` describes what was measured and what simulated. A `page` gets the same text. Raises
        QSyncError, before writing, for a page without pieces, of a tiny run, or of several trees or machines.
        """
        if page is not None:
            self.check_measured()
            for origins in (self._commits, self._machines):
                if len(origins) > 1:
                    raise QSyncError(
                        f"pieces in {self.out} are of {' and '.join(sorted(origins))}, and a page is of one; "
                        "measure all of them again with --fresh, or leave out --publish"
                    )
            if self.settings.get("tiny"):
                raise QSyncError("a run with --tiny must not be published; leave out --tiny or --publish")
        bars = list(bars)
        content = self.note(figures, bars=bars, measured=measured)
        promises = [bars_table(bars)] if bars else []
        text = "\n".join([*map(as_markdown, [*promises, *tables]), _origin(content, page)])
        with _writing(self.out / "figures.md") as path:
            write_text(path, text)
        if page is not None:
            write_between({page.path: text}, page.marker)
        show(*tables, *promises, f"Written: {self.out / 'figures.json'}")
        return content

    def _path(self, name: str) -> Path:
        return self.out / "pieces" / f"{name.replace(' ', '-')}.json"

    def _note_origin(self, piece: Mapping[str, Any]) -> None:
        self._commits.add(piece["commit"])
        if isinstance(piece.get("machine"), dict):
            self._machines.add(_machine_named(piece["machine"]))

    def _provenance(self) -> dict[str, Any]:
        return {**provenance(self.seed), **self._source}

    def _settings(self, more: Mapping[str, Any]) -> dict[str, Any]:
        found: dict[str, Any] = json.loads(json.dumps({**self.settings, "seed": self.seed, **more}))
        return found


@contextmanager
def _writing(path: Path) -> Iterator[Path]:
    """Turn an error of writing results, such as a full disk, into one sentence."""
    try:
        yield path
    except OSError as error:
        raise QSyncError(
            f"{path} cannot be written ({error.strerror or error}); make space there, or name another --out"
        ) from error


def _origin(content: Mapping[str, Any], page: Page | None) -> str:
    """Describe machine and commits of figures, below a page's note."""
    commits = content["commits_of_pieces"] or [content["commit"]]
    machines = content["machines_of_pieces"] or [_machine_named(content["machine"])]
    said = f"{page.note}\n" if page is not None and page.note else ""
    several = "commits" if len(commits) > 1 else "commit"
    return f"{said}{' and '.join(machines)}; {several} {', '.join(commits)}.\n"


def _machine_named(machine: Mapping[str, Any]) -> str:
    return f"{machine['processor']}, torch {machine['torch']}"


def show(*parts: Table | str) -> None:
    """Print tables and lines; 140 columns wide without a terminal."""
    console = Console(width=None if sys.stdout.isatty() else 140)
    for part in parts:
        text = isinstance(part, str)
        console.print(part, highlight=False, markup=not text, soft_wrap=text)


def run_command(main: Callable[..., Any]) -> None:
    """Run a command line: bad input is one sentence and exit code 2; on SIGTERM end child processes."""
    exit_on_signals()
    try:
        typer.run(main)
    except QSyncError as error:
        Console(stderr=True).print(f"[red]error:[/red] {escape(str(error))}")
        raise SystemExit(2) from None
