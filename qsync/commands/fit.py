"""`qsync fit`: does a model fit on a card, and by which ways can it be made to fit?"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.table import Table

from qsync.commands.options import (
    Cards,
    CardsLength,
    CardsModel,
    ClusterFile,
    Folder,
    Force,
    Json,
    Memory,
    budgets_of,
    console,
    print_json,
    print_lines,
    working,
)
from qsync.commands.tables import new_table
from qsync.errors import QSyncError
from qsync.records.plan_folder import Basis

if TYPE_CHECKING:
    from qsync.allocator.fit import Fit, Way  # import numpy
    from qsync.replayer import Recapture

_SHOWN = 6  # ways of a class
_GB = 1e9


def fit(
    folder: Folder = None,
    cluster: ClusterFile = None,
    memory: Memory = None,
    base: Annotated[
        str, typer.Option(help="What cards run in: fp32, or as torch.autocast: tf32, bf16, fp16.")
    ] = "fp32",
    cards: Cards = None,
    model: CardsModel = None,
    batch: Annotated[int, typer.Option(min=2, help="With --cards: samples of a step on one card.")] = 32,
    length: CardsLength = None,
    force: Force = False,
    as_json: Json = False,
) -> None:
    """Say what fills each card's memory, the largest batch that fits, and the ways to fit this one."""
    from qsync.allocator import find_fit

    if (cards is None) == (folder is None) or (model is None) != (cards is None):
        raise QSyncError("give a FOLDER of qsync.hybrid or qsync demo, or --cards with --model")
    basis, other = _of_cards(cards, model or "", batch, length) if cards is not None else _of(
        folder or Path(), cluster, force)  # fmt: skip
    found = basis.cluster.with_memory(budgets_of(memory))
    basis = Basis(basis.graph, found, basis.profiles, basis.sensitivity)
    with working("looking for what fits"):
        fits = [find_fit(basis, one.name, other, base) for one in basis.cluster.classes]
    if as_json:
        print_json({"model": basis.graph.model, "base": base, "classes": {
            one.device_class: _as_json(one) for one in fits}})  # fmt: skip
        return
    for one in fits:
        print_lines(*lines(one))
        if one.ways and not one.fits:
            console.print(_table(one))
    if cards is not None:
        print_lines(
            "simulated from data sheets: no card was measured, and precisions are judged without data"
        )


def _of_cards(cards: str, model: str, batch: int, length: int | None) -> tuple[Basis, Recapture]:
    from qsync.what_if.card_verdicts import basis_of, cards_of, graphs_of, link_of

    pile = cards_of(cards)
    with working("capturing the model"):
        return basis_of(pile, link_of("25Gb"), graphs_of(model, batch, length))


def _of(folder: Path, cluster: Path | None, force: bool) -> tuple[Basis, Recapture | None]:
    from qsync.commands.loading import load_basis
    from qsync.replayer import Recapture

    return load_basis(folder, cluster, force=force), Recapture.load(folder)


def lines(found: Fit) -> list[str]:
    """Return what a class needs, what fills it and what fits, in sentences."""
    peak, needed = found.peak, found.base.peak_bytes
    parts = sorted(peak.parts.items(), key=lambda part: -part[1])
    over = needed - peak.budget_bytes
    head = f"{found.device_class} ({peak.budget_bytes / _GB:.3g} GB), {found.samples} samples: "
    said = [
        head + ("fits" if found.fits else f"does not fit, by {over / _GB:.3g} GB"),
        f"  {needed / _GB:.3g} GB at the fullest: "
        + ", ".join(
            f"{name} {num_bytes / _GB:.2g}" for name, num_bytes in parts if num_bytes >= needed / 100
        ),
    ]
    if found.largest is not None:
        fewer = found.largest < found.trusted_from
        largest = f"less than {found.trusted_from}" if fewer else f"{found.largest}"
        said.append(f"  the largest batch of one pass that fits: {largest} samples")
    if not found.ways:
        nearest = found.nearest
        said.append(
            f"  nothing that was tried fits; least takes {nearest.peak_bytes / _GB:.3g} GB: "
            f"{described(nearest, found)}"
        )
    return said


def described(way: Way, found: Fit) -> str:
    """Describe a way to fit in words: "2 passes of 16, 4 of 12 blocks recomputed"."""
    passes, recomputed = way.levers.passes, len(way.levers.recomputed)
    parts = [f"{passes} passes of {found.samples // passes}"] if passes > 1 else []
    parts += [f"{recomputed} of {found.num_blocks} blocks recomputed"] if recomputed else []
    parts += [f"{', '.join(way.saving_less)} saving less"] if way.saving_less else []
    parts += [f"{way.num_lowered} products below the base"] if way.num_lowered else []
    return ", ".join(parts) or "one pass in the base"


def _table(found: Fit) -> Table:
    title = f"Ways to fit on {found.device_class}, least step first (simulated)"
    table = new_table(title, "way", ">peak", ">step", ">adds variance")
    for way in found.ways[:_SHOWN]:
        longer = way.step_s / found.base.step_s - 1
        variance = f"{way.added_variance:.1e}" if way.added_variance else "-"
        step = f"{1e3 * way.step_s:.4g} ms ({longer:+.0%})"
        table.add_row(described(way, found), f"{way.peak_bytes / _GB:.3g} GB", step, variance)
    return table


def _as_json(found: Fit) -> dict[str, Any]:
    def of(way: Way) -> dict[str, Any]:
        return {
            "passes": way.levers.passes, "recomputed": list(way.levers.recomputed),
            "saving_less": list(way.saving_less),
            "lowered": way.num_lowered, "peak_bytes": way.peak_bytes, "step_s": way.step_s,
            "added_variance": way.added_variance,
        }  # fmt: skip

    return {
        "samples": found.samples, "fits": found.fits, "largest": found.largest, "base": of(found.base),
        "budget_bytes": found.peak.budget_bytes, "parts": dict(found.peak.parts),
        "ways": [of(way) for way in found.ways], "nearest": of(found.nearest),
    }  # fmt: skip
