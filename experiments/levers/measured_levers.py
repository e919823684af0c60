"""Levers on two real unequal ranks, predicted and measured.

    python -m qsync.experiments.levers.measured_levers --out FOLDER

The weak rank is emulated. Each plan takes its turns in one run: FP32 with one lever at a time, then
precisions without levers and with searched ones, at one target step. With `--tight` the weak rank has little
memory instead: precisions without levers, and with as many blocks saving less as a search finds.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.table import Table

from qsync.experiments.harness.experiment import Experiment, Fresh, Out, run
from qsync.experiments.harness.processes import start_ranks
from qsync.experiments.harness.tables import table as table_of
from qsync.records.json_files import read_json


def main(
    out: Out = Path("levers"),
    model: Annotated[str, typer.Option(help="gpt, bert or vit.")] = "gpt",
    turns: Annotated[int, typer.Option(help="How often each plan takes its turn.")] = 2,
    trials: Annotated[int, typer.Option(help="Trials of the search.")] = 30,
    weak_share: Annotated[float, typer.Option(help="Share of its core that the weak rank gets.")] = 0.5,
    tight: Annotated[bool, typer.Option("--tight", help="Plans for little memory on the weak rank.")] = False,
    fresh: Fresh = False,
) -> None:
    """Run the plans, keep what was measured, and print it as docs/results/levers.md has it."""
    config = {"model": model, "turns": turns, "trials": trials, "weak_share": weak_share, "tight": tight}
    experiment = Experiment("levers", out, settings=config, fresh=fresh)

    def measure() -> list[dict[str, Any]]:
        start_ranks("qsync.experiments.levers.lever_ranks", {**config, "out": str(out.absolute())})
        rows: list[dict[str, Any]] = read_json(out / "rows.json")["rows"]
        return rows

    rows = experiment.piece("tight" if tight else "levers", measure)
    experiment.finish({"emulated": True, "rows": rows}, tables=[table(rows)])


def table(rows: Sequence[Mapping[str, Any]]) -> Table:
    """Return the table: steps and memory peaks, predicted and measured, and the variance each plan adds."""
    cells = []
    for row in rows:
        predicted, measured = (
            " / ".join(f"{num_bytes / 2**20:.1f}" for num_bytes in row[f"{what}_bytes"])
            for what in ("predicted", "measured")
        )
        late = row["predicted_s"] / row["measured_s"] - 1
        cells.append([
            row["plan"], f"{row['predicted_s'] * 1e3:.0f} ms ({late:+.1%})",
            f"{row['measured_s'] * 1e3:.0f} ms", predicted, measured, f"{row['added_variance']:.1e}",
        ])  # fmt: skip
    headings = (
        "", "step, predicted", "measured", "peak of either rank, MiB, predicted", "measured", "added variance"
    )  # fmt: skip
    return table_of("Levers (measured; the weak rank is emulated)", headings, cells)


if __name__ == "__main__":
    run(main)
