"""Grow many families of models: `python -m qsync.experiments.expansion.families --out FOLDER`.

A recipe is derived from one run of a small random model of transformers, or of timm where it is installed.
The model grows in width and depth.
Outputs of both models are compared in FP64, on the same weights in FP32. Then one training step shows
whether copies of a neuron become different. Every family is a piece.
"""

from __future__ import annotations

import traceback
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any

import torch
import typer
from rich.table import Table
from torch import nn

import qsync
from qsync.errors import QSyncError, shortened
from qsync.expansion.derivation.growth_targets import derive_growth
from qsync.expansion.plan.expansion_plan import ExpansionPlan
from qsync.experiments.expansion.family_list import Family, families, has_timm
from qsync.experiments.harness import Experiment, Fresh, Out, Page, Publish, bar, run_command, table_of

# Factor of the width, and further layers, in the order in which they are tried.
GROWTHS = ((1.5, 1), (2.0, 1), (1.5, 0), (2.0, 0))
TOLERANCE = 2e-6  # largest difference of outputs in FP64, relative to the largest output
LEAST_FAMILIES, LEAST_LOSSLESS = 40, 34
_STEP = 1e-3  # learning rate of the one step, in SGD
_PAGE = Page(Path("docs/results/growing.md"), marker="families", note="Random weights.")


def main(
    out: Out = Path("families"),
    only: Annotated[list[str] | None, typer.Option(help="Only this family; repeat for several.")] = None,
    publish: Publish = False,
    fresh: Fresh = False,
) -> None:
    """Grow every family; an interrupted run continues."""
    known = families()
    for name in only or ():
        if name not in known:
            raise QSyncError(f"unknown family {shortened(name)}; choose from {', '.join(known)}")
    experiment = Experiment("families", out, fresh=fresh, seed=0)
    with experiment.progress():
        found = dict(experiment.pieces({name: name for name in only or known}, grow))
    found = {name: found[name] for name in only or known}
    experiment.finish(
        {"families": found, "tolerance": TOLERANCE}, measured="differences of outputs",
        bars=bars(found), tables=[table(found)], page=_PAGE if publish else None,
    )  # fmt: skip


def grow(name: str) -> dict[str, Any]:
    """Grow a family as far as it can; a refusal is a result, and so is a failure."""
    torch.set_num_threads(1)
    refused = ""
    for times, more in GROWTHS:
        try:
            return {"times": times, "more": more, **_grown(families()[name], times, more)}
        except QSyncError as error:
            refused = str(error)
        except Exception as error:
            traceback.print_exc()  # for the log
            return {"failed": f"{type(error).__name__}: {shortened(error, quote=False)}"}
    return {"refused": refused}


def _grown(family: Family, times: float, more: int) -> dict[str, Any]:
    """Grow a family by one factor; measure the difference of outputs, and copies that become different."""
    small, inputs = family.built(), family.inputs()

    def build(is_grown: bool, sizes: Mapping[str, Any]) -> nn.Module:
        return family.made(family.grown(times, more) if is_grown else family.config, sizes)

    plan = qsync.plan_expansion(small, derive_growth(small, inputs, build))
    big = plan.expand(small)
    verified = qsync.verify_expansion(small, big, inputs, tolerance=TOLERANCE)
    num_apart, num_copied = _apart(plan, big, inputs)
    parameters = [sum(value.numel() for value in model.parameters()) for model in (small, big)]
    return {
        "difference": verified.max_difference, "lossless": verified.passed, "apart": num_apart,
        "copied": num_copied, "parameters": parameters,
    }  # fmt: skip


def _apart(plan: ExpansionPlan, big: nn.Module, inputs: Mapping[str, torch.Tensor]) -> tuple[int, int]:
    """Return how many weights have copies that a training step moves apart, and how many have copies.

    Counted are matrices outside of new blocks whose rows are copied and get a gradient. Two copies of a row
    move apart if their steps differ by over 1 % of the largest.
    """
    returned = big(**inputs)
    outputs = [returned] if isinstance(returned, torch.Tensor) else list(dict(returned).values())
    outputs = [value for value in outputs if isinstance(value, torch.Tensor) and value.requires_grad]
    draws = torch.Generator().manual_seed(2)
    parts = [(torch.randn(one.shape, generator=draws) * one).sum() for one in outputs]
    torch.stack(parts).sum().backward()  # type: ignore[no-untyped-call]
    before = {name: value.detach().clone() for name, value in big.named_parameters()}
    torch.optim.SGD(big.parameters(), lr=_STEP).step()
    num_apart = num_copied = 0
    for name, value in big.named_parameters():
        m = plan.tensors[name]
        written = [dim for dim, one in enumerate(m.axes) if one is not None and not one.is_read]
        axis = m.axes[written[0]] if written and len(m.shape) > 1 else None
        if axis is None or m.is_new or int(axis.growth.num_copies.max()) < 2:
            continue
        moved = (value.detach() - before[name]).movedim(written[0], 0).flatten(1)
        if axis.growth.scale is not None:
            moved = moved * axis.growth.scale[:, None].to(moved)
        first = torch.stack(
            [(axis.growth.index == one).nonzero()[0, 0] for one in range(axis.growth.num_small)]
        )
        copies = axis.growth.is_copy.nonzero()[:, 0]
        if float(moved.abs().max()) > 0:
            num_copied += 1
            apart = (moved[copies] - moved[first[axis.growth.index[copies]]]).abs().max()
            num_apart += float(apart) > 1e-2 * float(moved.abs().max())
    return num_apart, num_copied


def bars(found: Mapping[str, Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Return the bars: families, lossless ones, wrong ones, and those whose copies stay copies."""
    grown = [one for one in found.values() if "lossless" in one]
    wrong = sum("failed" in one for one in found.values()) + sum(not one["lossless"] for one in grown)
    return [
        bar("families", len(found), LEAST_FAMILIES, at_least=True),
        bar("grown without loss", sum(one["lossless"] for one in grown), LEAST_LOSSLESS, at_least=True),
        bar("wrong or failed", wrong, 0),
        bar("grown, but copies stay copies", sum(not one["apart"] for one in grown), 0),
        bar("largest difference", max((one["difference"] for one in grown), default=None), TOLERANCE),
    ]


def table(found: Mapping[str, Mapping[str, Any]]) -> Table:
    """Return one row per family."""
    rows = []
    for name, one in found.items():
        if "lossless" in one:
            deeper = ", deeper" if one["more"] else ""
            before, after = one["parameters"]
            cells = [
                f"{one['times']:g} x as wide{deeper}", f"{after / before:.2f} x", f"{one['difference']:.0e}",
                f"{one['apart']} of {one['copied']}",
            ]  # fmt: skip
        else:
            cells = [f"refused: {one['refused']}" if "refused" in one else f"failed: {one['failed']}", *"---"]
        rows.append([name, *cells])
    headings = ("family", "grows", "parameters", "difference", "matrices whose copies move apart")
    title = (
        "Families (measured)" if has_timm() else "Families (measured; without timm, which is not installed)"
    )
    return table_of(title, headings, rows, left=2)


if __name__ == "__main__":
    run_command(main)
