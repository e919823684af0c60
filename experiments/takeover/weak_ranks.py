"""Two unequal ranks in the base bf16: plans beside the fast rank alone, and beside shares by speed."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any

from qsync.experiments.demo.launch import run_demo
from qsync.experiments.harness import Experiment, bar
from qsync.experiments.harness.experiment import Bar
from qsync.experiments.harness.ranks import run_on_ranks
from qsync.experiments.levers.measured_levers import BOTH, SHARES, measure

# The share of a core that the weak rank has: INT8 makes up for the first, and cannot for the second.
NEARLY_EQUAL, HALF = 0.85, 0.5
_STEPS = 40
_RUNS = ("fast_alone", "ddp", "weak_int8_all", "qsync")


def measured(experiment: Experiment) -> dict[str, Any]:
    """Return the runs at both shares: those of the demo, and those of the share lever."""
    runs = experiment.piece(f"weak share {NEARLY_EQUAL}", partial(_demo_runs, experiment.out / "demo"))
    config = {"model": "gpt", "turns": 3, "trials": 30, "weak_share": HALF, "tight": False, "base": "bf16"}
    rows = experiment.piece(
        f"weak share {HALF}", lambda: run_on_ranks(measure, config, command="takeover", timeout_s=600.0)
    )
    return {"nearly_equal": runs, "half": {row["plan"]: row for row in rows}}


def _demo_runs(out: Path) -> dict[str, dict[str, float]]:
    content = run_demo(out=out, weak_share=NEARLY_EQUAL, steps=_STEPS, base="bf16")
    return {
        name: {key: content["runs"][name][key] for key in ("measured_step_s", "added_variance", "cpu_s")}
        for name in _RUNS
    }


def bars(found: dict[str, Any]) -> list[Bar]:
    """Return what the plans promise at both shares."""
    runs, half = found["nearly_equal"], found["half"]
    plan, alone = runs["qsync"], runs["fast_alone"]
    return [
        bar(
            f"weak share {NEARLY_EQUAL}: step of the plan over the fast rank's alone",
            plan["measured_step_s"] / alone["measured_step_s"], 1.08,
        ),
        bar(
            f"weak share {NEARLY_EQUAL}: variance of the plan over that of int8_all",
            plan["added_variance"] / runs["weak_int8_all"]["added_variance"], 1.0,
        ),
        bar(
            f"weak share {HALF}: samples/s of shares and precisions over those of shares by speed",
            half[SHARES]["measured_s"] / half[BOTH]["measured_s"], 1.0, at_least=True,
        ),
    ]  # fmt: skip
