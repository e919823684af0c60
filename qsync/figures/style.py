"""Colours, strokes and PNG output shared by all figures.

Figures are drawn without pyplot: no window system, no global state. Colours are Okabe and Ito's,
distinguishable by colour-blind readers. FP32 is grey, so that lowered operators stand out.
"""

from __future__ import annotations

import io
from pathlib import Path

from matplotlib.axes import Axes
from matplotlib.figure import Figure

from qsync.errors import FormatError, shortened
from qsync.operators.precision import Precision
from qsync.records.json_files import write_bytes

INK, FAINT = "#333333", "#8a9099"

PRECISION_COLOURS = {precision: precision.facts.colour for precision in Precision}
# Part of a step's memory (`Peak.curve`) -> label and colour.
MEMORY_PARTS = {
    "throughout": ("parameters, gradients, optimizer, batch", "#d5dae0"),
    "casts": ("copies of weights", "#e69f00"),
    "saved": ("saved for backward", "#0072b2"),
    "transient": ("temporaries, workspaces", "#d55e00"),
}
# Colours of curves of classes or models, in this order.
SERIES_COLOURS = ("#0072b2", "#e69f00", "#009e73", "#cc79a7", "#d55e00", "#56b4e9", "#b8a900", "#4d4d4d")


def remove_frame(axes: Axes) -> None:
    """Remove the upper and right frame of axes."""
    axes.spines[["top", "right"]].set_visible(False)
    axes.tick_params(colors=INK, labelsize=8)


def strip_axes(axes: Axes, grid: str) -> None:
    """Remove the lines of axes that carry no information; keep a grid along `grid` ("x" or "y")."""
    for side in ("top", "right", "left"):
        axes.spines[side].set_visible(False)
    axes.spines["bottom"].set_color(FAINT)
    axes.tick_params(which="both", colors=INK, length=0, labelsize=9)
    axes.grid(axis=grid, color="#e6e9ed", linewidth=0.8)  # type: ignore[arg-type]
    axes.set_axisbelow(True)


def save_png(figure: Figure, path: str | Path, dpi: int = 150) -> Path:
    """Write the figure as a PNG atomically; return its path.

    Raises FormatError unless the name ends in .png.
    """
    if Path(path).suffix.lower() != ".png":
        raise FormatError(f"the picture's name must end in .png, found {shortened(str(path))}; rename it")
    drawn = io.BytesIO()
    figure.savefig(drawn, format="png", dpi=dpi, facecolor="white")
    return write_bytes(path, drawn.getvalue())
