"""A picture of the trade between step time and added variance: every point a plan."""

from __future__ import annotations

import io
from collections.abc import Sequence
from pathlib import Path

from matplotlib.figure import Figure

from qsync.experiments.pictures import FAINT, INK
from qsync.files import write_bytes
from qsync.plans import Plan


def draw(plans: Sequence[Plan], path: str | Path) -> Path:
    """Step time against added variance (both simulated), with how many operators each class lowers.

    Variance is logarithmic; a plan that adds none stands on the lower edge.
    """
    figure = Figure(figsize=(8, 4.6), layout="constrained")
    axes = figure.subplots()
    steps = [1e3 * (plan.step_s or 0.0) for plan in plans]
    added = [plan.added_variance or 0.0 for plan in plans]
    positive = [value for value in added if value > 0.0]
    floor = min(positive) / 3 if positive else 1.0
    shown = [max(value, floor) for value in added]
    axes.step(steps, shown, where="post", color=FAINT, linewidth=1, zorder=1)
    axes.scatter(steps, shown, color="#0072b2", zorder=2)
    for plan, x, y in zip(plans, steps, shown, strict=True):
        lowered = ", ".join(
            f"{len(entry.lowered)} {name}" for name, entry in plan.classes.items() if entry.lowered
        )
        axes.annotate(
            lowered or "none lowered",
            (x, y),
            xytext=(6, 5),
            textcoords="offset points",
            fontsize=7,
            color=INK,
        )
    axes.set_yscale("log")
    axes.set_xlabel("step, ms (simulated)")
    axes.set_ylabel("added variance, squared gradient norm")
    axes.set_title(
        f"{plans[0].model}: what a shorter step costs; operators lowered, by class", loc="left", fontsize=10
    )
    axes.margins(x=0.12, y=0.12)
    axes.spines[["top", "right"]].set_visible(False)
    buffer = io.BytesIO()
    figure.savefig(buffer, format="png", dpi=120)
    return write_bytes(path, buffer.getvalue())
