"""`qsync validate`: random plans run on this machine's ranks, against what replay predicts of them."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from qsync.commands.options import MAX_SEED, Json, WeakShare, console, print_json, print_lines
from qsync.records.json_files import check_folder


def validate(
    model: Annotated[str, typer.Option(help="gpt, bert, vit, resnet or vgg.")] = "gpt",
    ranks: Annotated[int, typer.Option(help="1, or 2 unequal ones.")] = 2,
    plans: Annotated[int, typer.Option(help="How many random plans to run.")] = 8,
    turns: Annotated[int, typer.Option(help="How often each plan takes its turn.")] = 3,
    seed: Annotated[int, typer.Option(min=0, max=MAX_SEED, help="Seed of the plans.")] = 0,
    weak_share: WeakShare = 0.5,
    out: Annotated[Path, typer.Option(help="Folder for validation.json and the profiles.")] = Path(
        "validation"
    ),
    as_json: Json = False,
) -> None:
    """Run random plans on this machine's ranks; show by how much replay misses each, and why.

    Your own model: call qsync.validate(model, batch, loss_fn) in a torchrun script.
    """
    from qsync.experiments.prediction.validation_ranks import kinds_table, run_validation, table

    check_folder("--out", out)
    found = run_validation(
        model, num_ranks=ranks, num_plans=plans, turns=turns, seed=seed, weak_share=weak_share, out=out
    )
    if as_json:
        print_json(found.to_json())
        return
    console.print(table(found))
    console.print(kinds_table(found))
    print_lines(f"kept in {out}")
