"""Levers on two real unequal ranks, predicted and measured: `python -m qsync.experiments.levers.measured_levers`.

The weak rank is emulated. Each plan takes its turns in one run: FP32 with one lever at a time, then
precisions without levers and with those that were searched, at one target step. With `--tight` the weak rank
has little memory instead: precisions without levers, and with as many blocks saving less as a search finds.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console

from qsync.errors import QSyncError
from qsync.records.json_files import read_json


def main(
    out: Annotated[Path, typer.Option(help="Folder for levers.json.")] = Path("."),
    model: Annotated[str, typer.Option(help="gpt, bert or vit.")] = "gpt",
    turns: Annotated[int, typer.Option(help="How often each plan takes its turn.")] = 2,
    trials: Annotated[int, typer.Option(help="Trials of the search.")] = 30,
    weak_share: Annotated[float, typer.Option(help="Share of its core that the weak rank gets.")] = 0.5,
    tight: Annotated[bool, typer.Option("--tight", help="Plans for little memory on the weak rank.")] = False,
) -> None:
    """Run the plans, keep what was measured, and print it as the README has it."""
    out.mkdir(parents=True, exist_ok=True)
    config = {
        "model": model,
        "turns": turns,
        "trials": trials,
        "weak_share": weak_share,
        "tight": tight,
        "out": str(out.absolute()),
    }
    command = [
        sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2",
        "--no-python", sys.executable, "-m", "qsync.experiments.levers.lever_ranks", json.dumps(config),
    ]  # fmt: skip
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "KINETO_LOG_LEVEL": "5"}
    if subprocess.run(command, env=environment, check=False).returncode != 0:
        raise QSyncError("the ranks stopped; the first message above says why")
    Console().print(markdown(read_json(out / "levers.json")["rows"]), highlight=False, soft_wrap=True)


def markdown(rows: Sequence[Mapping[str, Any]]) -> str:
    """The table: steps and memory peaks, predicted and measured, and the variance that each plan adds."""
    lines = [
        "| | step, predicted | measured | peak of either rank, MiB, predicted | measured | added variance |",
        "|---|---|---|---|---|---|",
    ]
    for row in rows:
        predicted, measured = (
            " / ".join(f"{num_bytes / 2**20:.1f}" for num_bytes in row[f"{what}_bytes"])
            for what in ("predicted", "measured")
        )
        late = row["predicted_s"] / row["measured_s"] - 1
        lines.append(
            f"| {row['plan']} | {row['predicted_s'] * 1e3:.0f} ms ({late:+.1%}) "
            f"| {row['measured_s'] * 1e3:.0f} ms | {predicted} | {measured} | {row['added_variance']:.1e} |"
        )
    return "\n".join(lines)


if __name__ == "__main__":
    typer.run(main)
