"""What users do to a wrapped model: a page of cases, each of which works or is refused in one sentence.

    python -m qsync.experiments.takeover --out FOLDER

The page is `docs/results/takeover.md`; `--publish` writes it.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import asdict
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.table import Table

from qsync.errors import shortened
from qsync.experiments.harness import Experiment, Fresh, Out, bar, run_command, table_of
from qsync.experiments.harness.tables import as_markdown, write_between
from qsync.experiments.takeover.cases import CASES
from qsync.experiments.takeover.outcomes import SILENT, judge

_PAGE = Path("docs/results/takeover.md")
_SHOWN = 200  # characters of a sentence


def main(
    out: Out = Path("takeover"),
    precision: Annotated[str, typer.Option(help="The precision that every model is wrapped in.")] = "int8",
    publish: Annotated[bool, typer.Option("--publish", help=f"Write the table into {_PAGE}.")] = False,
    fresh: Fresh = False,
) -> None:
    """Run every case on a plain and on a wrapped model, and print what became of it."""
    experiment = Experiment("takeover", out, settings={"precision": precision}, fresh=fresh)
    with experiment.progress():
        tasks = {f"case {number:02}": case for number, case in enumerate(CASES)}
        found = [row for _, row in experiment.pieces(tasks, lambda case: asdict(judge(case, precision)))]
    counts = Counter(row["verdict"] for row in found)
    bars = [
        bar("cases that silently run something else", counts[SILENT], 0),
        bar("cases", len(found), 40, at_least=True),
    ]
    shown = _table(found)
    experiment.finish({"cases": found, "counts": dict(counts)}, bars=bars, tables=[shown])
    if publish:
        write_between([_PAGE], "cases", as_markdown(shown))


def _table(found: list[dict[str, Any]]) -> Table:
    rows = [
        (row["group"], row["name"], row["verdict"], shortened(row["sentence"], _SHOWN, quote=False))
        for row in found
    ]
    return table_of("What users do to a wrapped model", ("", "case", "", "sentence"), rows, left=4)


if __name__ == "__main__":
    run_command(main)
