"""Shared parts of the experiments' pictures: panels, titles, and one legend below them."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

from matplotlib.axes import Axes
from matplotlib.figure import Figure

from qsync.figures.style import INK

# A bar over the background, and a limit that is drawn across bars.
DASHED: dict[str, Any] = {"color": INK, "linewidth": 1.0, "linestyle": (0, (4, 3))}


def new_figure(width: float, height: float, title: str) -> Figure:
    """Return a figure of so many inches with its title at the left."""
    figure = Figure(figsize=(width, height), layout="constrained")
    figure.suptitle(title, x=0.01, ha="left", fontsize=12, color=INK)
    return figure


def legend_below(figure: Figure, panels: Iterable[Axes] | Sequence[Any], ncols: int = 6) -> None:
    """Put one legend below all panels: each label once; or handles that are given."""
    entries: dict[str, Any] = {}
    for one in panels:
        found = (
            zip(*one.get_legend_handles_labels(), strict=True)
            if isinstance(one, Axes)
            else [(one, one.get_label())]
        )
        entries |= {label: handle for handle, label in found}
    columns = min(len(entries), ncols) or 1
    figure.legend(
        list(entries.values()),
        list(entries),
        loc="outside lower center",
        ncols=columns,
        frameon=False,
        fontsize=8,
    )


def open_axes(*panels: Axes) -> None:
    """Remove the upper and the right line of axes."""
    for axes in panels:
        axes.spines[["top", "right"]].set_visible(False)
        axes.tick_params(labelsize=8, colors=INK)
