"""Format rows of text as tables for the terminal and in Markdown."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from rich import box
from rich.table import Table

from qsync import QSyncError
from qsync.records.json_files import write_text

Row = Sequence[str]


def table_of(
    title: str, headings: Row, rows: Iterable[Row], *, left: int = 1, bold: Sequence[int] = ()
) -> Table:
    """Return a terminal table with its first `left` columns left-aligned.

    `bold` lists the indices of emphasized rows.
    """
    shown = Table(title=title, box=box.SIMPLE_HEAD, show_header=any(headings))
    for number, heading in enumerate(headings):
        shown.add_column(heading, justify="left" if number < left else "right")
    for number, row in enumerate(rows):
        shown.add_row(*row, style="bold" if number in bold else None)
    return shown


def as_markdown(table: Table) -> str:
    """Return a terminal table in Markdown, below its title."""
    rows = zip(
        *([str(cell).replace("|", "\\|") for cell in column.cells] for column in table.columns), strict=True
    )
    lines = markdown_table([str(column.header) for column in table.columns], rows)
    return "\n".join([f"{table.title}", "", *lines]) + "\n"


def markdown_table(headings: Row, rows: Iterable[Row]) -> list[str]:
    """Return a table's lines in Markdown."""
    return [
        f"| {' | '.join(headings)} |",
        "|---" * len(headings) + "|",
        *(f"| {' | '.join(row)} |" for row in rows),
    ]


def write_between(texts: Mapping[Path, str], name: str) -> None:
    """Replace the text between two markers of each page, `<!-- NAME:begin -->` and `<!-- NAME:end -->`.

    Raises QSyncError, before any page is written, for a page without the markers.
    """
    written = {page: _between(page, name, text) for page, text in texts.items()}
    for page, content in written.items():
        write_text(page, content)


def _between(page: Path, name: str, text: str) -> str:
    begin, end = f"<!-- {name}:begin -->", f"<!-- {name}:end -->"
    if not page.is_file():
        raise QSyncError(
            f"page {page} does not exist; create it with {begin} and {end}, and run from the root of a clone"
        )
    head, found, rest = page.read_text(encoding="utf-8").partition(begin)
    _, ended, tail = rest.partition(end)
    if not found or not ended:
        raise QSyncError(f"{page} lacks {end if found else begin}; put both markers where the text belongs")
    return f"{head}{begin}\n{text}\n{end}{tail}"


def grouped(rows: Iterable[Mapping[str, Any]], *keys: str) -> dict[Any, list[Any]]:
    """Group rows by the values of these keys, in order of occurrence; a single key's value is unwrapped."""
    found: dict[Any, list[Any]] = {}
    for row in rows:
        values = tuple(row[key] for key in keys)
        found.setdefault(values if len(keys) > 1 else values[0], []).append(row)
    return found


def yes(holds: bool | None) -> str:
    """Format a truth value as a word, a failure in capitals."""
    return "-" if holds is None else "yes" if holds else "NO"


def milliseconds(seconds: float) -> str:
    """Format seconds as milliseconds with three digits."""
    value = 1e3 * seconds
    return f"{value:.0f} ms" if value >= 100 else f"{value:.3g} ms"
