"""Test users' operations on wrapped models, and unequal ranks with base bf16.

    python -m qsync.experiments.takeover --out FOLDER

`--publish` writes its table into `docs/results/takeover.md`.
"""

from __future__ import annotations

import re
from collections import Counter
from pathlib import Path

import torch

from qsync.experiments.harness import Experiment, Page, bar, run_command
from qsync.experiments.harness.cases import SILENT, cases_table
from qsync.experiments.harness.options import Fresh, Out, Publish
from qsync.experiments.takeover import weak_ranks
from qsync.experiments.takeover.cases import CASES
from qsync.experiments.takeover.outcomes import judge

_PAGE = Page(Path("docs/results/takeover.md"), note="One thread.", marker="cases")


def main(
    out: Out = Path("takeover"),
    publish: Publish = False,
    fresh: Fresh = False,
) -> None:
    """Run every case on a plain and a wrapped model, and plans with base bf16 on two ranks."""
    experiment = Experiment("takeover", out, fresh=fresh)
    torch.set_num_threads(1)
    with experiment.progress():
        tasks = {f"case {re.sub('[^A-Za-z0-9]+', ' ', case.name).strip()}": case for case in CASES}
        cases = [row for _, row in experiment.pieces(tasks, judge)]
        ranks = weak_ranks.measured(experiment)
    counts = Counter(row["verdict"] for row in cases)
    bars = [
        bar("cases that silently run something else", counts[SILENT], 0),
        bar("cases", len(cases), 40, at_least=True),
        *weak_ranks.bars(ranks),
    ]
    figures = {"cases": cases, "counts": dict(counts), "ranks": ranks}
    experiment.finish(
        figures,
        bars=bars,
        tables=[cases_table("What users do to a wrapped model", cases)],
        page=_PAGE if publish else None,
    )


if __name__ == "__main__":
    run_command(main)
