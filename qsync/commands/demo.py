"""`qsync demo`: train on two emulated unequal ranks, and compare with other ways to do so."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from qsync.commands.options import MAX_SEED, Json, WeakShare, console, print_json, print_lines
from qsync.records.json_files import check_folder


def demo(
    workload: Annotated[
        str, typer.Option(help="gpt, gpt-small, bert (text), vit, resnet, resnet-small or vgg (digits).")
    ] = "gpt",
    model: Annotated[
        str | None,
        typer.Option(
            help="hf:CONFIG.json: a Hugging Face model, in place of a workload.", show_default="none"
        ),
    ] = None,
    data: Annotated[Path | None, typer.Option(help="Your own text: a file or a folder.")] = None,
    out: Annotated[Path, typer.Option(help="Folder for report, plan, trace and pictures.")] = Path(
        "demo-out"
    ),
    weak_share: WeakShare = 0.5,
    seeds: Annotated[int, typer.Option(help="How many seeds to train with.")] = 1,
    seed: Annotated[int, typer.Option(min=0, max=MAX_SEED, help="The first seed.")] = 0,
    steps: Annotated[
        int | None, typer.Option(help="Training steps of each run.", show_default="the workload's own")
    ] = None,
    base: Annotated[
        str,
        typer.Option(help="What the fast rank runs in: fp32, bf16 (as torch.autocast), fp16, tf32."),
    ] = "fp32",
    as_json: Json = False,
) -> None:
    """Train on two unequal ranks of this machine, in every way there is, and compare them."""
    from qsync.experiments.mixed.launch import run_demo
    from qsync.experiments.mixed.report import closing_lines, table

    check_folder("--out", out)
    content = run_demo(
        workload=model or workload, data=data, out=out, weak_share=weak_share, seeds=seeds, seed=seed,
        steps=steps, base=base,
    )  # fmt: skip
    if as_json:
        print_json(content)
        return
    console.print(table(content))
    print_lines(*closing_lines(content, out))
