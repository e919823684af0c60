"""Wrapped models as users treat them, training in the base bf16, and unequal ranks above it.

    python -m qsync.experiments.takeover --out FOLDER

`--publish` writes its table into `docs/results/takeover.md`.
"""

from __future__ import annotations

import re
from collections import Counter
from functools import partial
from pathlib import Path

import torch

from qsync.experiments.harness import Experiment, Page, bar, run_command
from qsync.experiments.harness.cases import SILENT, cases_table
from qsync.experiments.harness.options import Fresh, Out, Publish
from qsync.experiments.takeover import weak_ranks
from qsync.experiments.takeover.base_steps import final_losses, loss_difference, step_ratios
from qsync.experiments.takeover.cases import CASES
from qsync.experiments.takeover.outcomes import judge
from qsync.experiments.workloads.subjects import NAMES

_PAGE = Page(Path("docs/results/takeover.md"), note="One thread.", marker="cases")
_SEEDS = 3
_ROUNDS, _STEPS = 15, 60  # of steps that are timed in turns; whose losses are compared


def main(
    out: Out = Path("takeover"),
    publish: Publish = False,
    fresh: Fresh = False,
) -> None:
    """Run every case on a plain and a wrapped model; time and train the base bf16 alone, and on two ranks."""
    experiment = Experiment("takeover", out, settings={"rounds": _ROUNDS, "steps": _STEPS}, fresh=fresh)
    torch.set_num_threads(1)
    with experiment.progress():
        tasks = {f"case {re.sub('[^A-Za-z0-9]+', ' ', case.name).strip()}": case for case in CASES}
        cases = [row for _, row in experiment.pieces(tasks, judge)]
        timed = [experiment.piece(f"steps {name}", partial(step_ratios, name, _ROUNDS)) for name in NAMES]
        losses = {
            name: [
                experiment.piece(f"losses {name} {seed}", partial(final_losses, name, seed, _STEPS))
                for seed in range(_SEEDS)
            ]
            for name in NAMES
        }
        ranks = weak_ranks.measured(experiment)
    differences = {name: loss_difference(found) for name, found in losses.items()}
    counts = Counter(row["verdict"] for row in cases)
    bars = [
        bar("cases that silently run something else", counts[SILENT], 0),
        bar("cases", len(cases), 40, at_least=True),
        *(
            bar(
                f"{row['model']}: speed of the base bf16 over autocast",
                row["autocast"][1],
                0.99,
                at_least=True,
            )
            for row in timed
        ),
        *(
            bar(f"{name}: loss from autocast's, of {_SEEDS} seeds", abs(found["mean"]), found["noise"])
            for name, found in differences.items()
        ),
    ]
    bars += weak_ranks.bars(ranks)
    figures = {
        "cases": cases, "counts": dict(counts), "steps": timed, "losses": losses, "differences": differences,
        "ranks": ranks,
    }  # fmt: skip
    experiment.finish(
        figures,
        bars=bars,
        tables=[cases_table("What users do to a wrapped model", cases)],
        page=_PAGE if publish else None,
    )


if __name__ == "__main__":
    run_command(main)
