"""Test other libraries' training loops on planned models, and waiting with LengthSampler.

    python -m qsync.experiments.integrations --out FOLDER

`--publish` writes its table into `docs/results/integrations.md`.
"""

from __future__ import annotations

from collections import Counter
from functools import partial
from pathlib import Path
from typing import Any

from qsync.experiments.harness import Experiment, Fresh, Out, Page, Publish, bar, run_command
from qsync.experiments.harness.cases import SILENT, cases_table
from qsync.experiments.harness.ranks import run_on_ranks
from qsync.experiments.integrations import run_cases, sampler_waiting
from qsync.experiments.integrations.cases import BF16_TOLERANCE, NORM_TOLERANCE

_PAGE = Page(Path("docs/results/integrations.md"), note="Two ranks, gloo.", marker="cases")
_WEAK_SHARE, _ROUNDS = 0.5, 3  # for the sampler


def main(
    out: Out = Path("integrations"),
    publish: Publish = False,
    fresh: Fresh = False,
) -> None:
    """Run every case in plain DDP and by qsync on two ranks; time the length sampler."""
    experiment = Experiment("integrations", out, settings={"rounds": _ROUNDS}, fresh=fresh, seed=0)
    on_ranks = partial(run_on_ranks, command="integrations", timeout_s=600.0)
    folder = {"folder": str((out / "work").absolute())}
    with experiment.progress():
        cases = [row for module in run_cases.MODULES for row in experiment.piece(
            module, partial(on_ranks, run_cases.run, {"modules": [module], "weak_share": 1.0, **folder})
        )]  # fmt: skip
        weak = {"weak_share": _WEAK_SHARE, "rounds": _ROUNDS, **folder}
        waits = experiment.piece(
            "sampler waiting", lambda: on_ranks(sampler_waiting.measure, {"sequences": 512, **weak})
        )
    counts = Counter(row["verdict"] for row in cases)
    compared = [row for row in cases if row["norm_error"] is not None]
    exact = [row for row in compared if row["tolerance"] == NORM_TOLERANCE]
    in_bf16 = [row for row in compared if row["tolerance"] == BF16_TOLERANCE]
    waiting = {arm: sum(of["blocked"]) / len(of["blocked"]) for arm, of in waits["arms"].items()}
    step_s = {arm: of["step_s"] for arm, of in waits["arms"].items()}
    before, after = sampler_waiting.ARMS
    bars = [
        bar("cases_silent", counts[SILENT], 0),
        bar("cases", len(cases), 40, at_least=True),
        *_norm_bars(exact),
        bar("gradient norms in the base bf16: from torch.autocast's", _largest(in_bf16), BF16_TOLERANCE),
        bar("replicas bitwise equal", waits["replicas_agree"], True),
        bar("waiting with the length sampler over waiting without", waiting[after] / waiting[before], 1.0),
        bar("steps/s with the length sampler over those without", step_s[before] / step_s[after], 1.0,
            at_least=True),
    ]  # fmt: skip
    experiment.finish(
        {"cases": cases, "counts": dict(counts), "waiting": waits},
        bars=bars, tables=[cases_table("Training loops around planned models", cases)],
        page=_PAGE if publish else None,
    )  # fmt: skip


def _norm_bars(exact: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Return a bar per group of cases: the largest difference of a gradient norm from plain DDP's."""
    groups = dict.fromkeys(row["group"] for row in exact)
    return [
        bar(f"gradient norms, {group}: from plain DDP's", _largest([r for r in exact if r["group"] == group]),
            NORM_TOLERANCE)
        for group in groups
    ]  # fmt: skip


def _largest(rows: list[dict[str, Any]]) -> float:
    return max((row["norm_error"] for row in rows if row["verdict"] == "works"), default=0.0)


if __name__ == "__main__":
    run_command(main)
