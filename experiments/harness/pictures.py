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


def axes_of(axes: Axes, title: str = "", x: str = "", y: str = "", **more: Any) -> None:
    """Title and label axes; remove their upper and right line. `more` is what `Axes.set` takes."""
    axes.set(**more)
    axes.set_title(title, fontsize=8, loc="left", color=INK)
    axes.set_xlabel(x, fontsize=9, color=INK)
    axes.set_ylabel(y, fontsize=9, color=INK)
    axes.spines[["top", "right"]].set_visible(False)
    axes.tick_params(which="both", labelsize=8, colors=INK)


def legend_below(figure: Figure, panels: Iterable[Axes] | Sequence[Any], ncols: int = 6) -> None:
    """Put one legend below all panels: each label once; or handles that are given."""
    entries: dict[str, Any] = {}
    for one in panels:
        handles = one.get_legend_handles_labels()[0] if isinstance(one, Axes) else [one]
        entries |= {str(handle.get_label()): handle for handle in handles}
    figure.legend(
        list(entries.values()), list(entries), loc="outside lower center", fontsize=8, frameon=False,
        ncols=min(len(entries), ncols) or 1,
    )  # fmt: skip
