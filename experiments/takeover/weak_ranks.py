"""Measure plans of two unequal ranks with base bf16 against the fast rank alone and shares by speed."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any

from qsync.experiments.harness import Bar, Experiment, bar
from qsync.experiments.mixed.launch import run_demo

# Shares of a core of the weak rank: INT8 compensates for the first, but not for the second.
NEARLY_EQUAL, HALF = 0.85, 0.5
_STEPS = 40


def measured(experiment: Experiment) -> dict[str, Any]:
    """Return the demo's runs at both shares."""
    return {
        str(share): experiment.piece(f"weak share {share}", partial(_runs, experiment.out / "demo", share))
        for share in (NEARLY_EQUAL, HALF)
    }


def _runs(out: Path, share: float) -> dict[str, dict[str, float]]:
    content = run_demo(out=out / str(share), weak_share=share, steps=_STEPS, base="bf16")
    return {
        name: {key: run[key] for key in ("measured_step_s", "added_variance")}
        for name, run in content["runs"].items()
    }


def bars(found: dict[str, Any]) -> list[Bar]:
    """Return the bars of plans at both shares."""
    nearly, half = found[str(NEARLY_EQUAL)], found[str(HALF)]
    plan, alone = nearly["qsync"], nearly["alone"]
    return [
        bar(
            f"weak share {NEARLY_EQUAL}: step of the plan over the fast rank's alone",
            plan["measured_step_s"] / alone["measured_step_s"], 1.08,
        ),
        bar(
            f"weak share {NEARLY_EQUAL}: variance of the plan over that of int8_all",
            plan["added_variance"] / nearly["weak_int8_all"]["added_variance"], 1.0,
        ),
        bar(
            f"weak share {HALF}: samples/s of shares and precisions over those of shares by speed",
            half["lb_bsp"]["measured_step_s"] / half["qsync_share"]["measured_step_s"], 1.0, at_least=True,
        ),
    ]  # fmt: skip
