"""`qsync diff`: show the differences between two plans."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from qsync.commands.options import Json, print_json, print_lines


def diff(
    before: Annotated[Path, typer.Argument(help="A plan.json.", show_default=False)],
    after: Annotated[Path, typer.Argument(help="Another one.", show_default=False)],
    as_json: Json = False,
) -> None:
    """Show the operators whose precision differs between two plans, and both predictions."""
    from qsync.records.plans import Plan

    one, two = Plan.load(before), Plan.load(after)
    differences = one.diff(two).splitlines()
    steps, added = (one.step_s, two.step_s), (one.added_variance, two.added_variance)
    if as_json:
        print_json({"differences": differences, "step_s": steps, "added_variance": added})
        return
    lines = differences or ["The plans assign the same precisions."]
    if None not in (*steps, *added):
        one_ms, two_ms = (1e3 * (seconds or 0.0) for seconds in steps)
        lines.append(
            f"step {one_ms:.4g} -> {two_ms:.4g} ms, added variance {added[0]:.3g} -> {added[1]:.3g} "
            "(simulated)"
        )
    print_lines(*lines)
