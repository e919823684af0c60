r"""Train on a job's real ranks in every way there is; nothing is emulated.

    torchrun --nnodes 2 --nproc-per-node 1 --rdzv-backend c10d --rdzv-endpoint HOST:29500 \
        -m qsync.experiments.mixed --model gpt --out FOLDER

Start it equally on every host. Rank 0 prints the table, and writes the folder on its host.
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import Annotated

import torch
import typer

from qsync import QSyncError
from qsync.distributed import job
from qsync.experiments.harness import show
from qsync.experiments.harness.provenance import folder_of
from qsync.experiments.harness.ranks import Place, ending_on_error
from qsync.experiments.mixed.launch import configured
from qsync.experiments.mixed.rank import run
from qsync.experiments.mixed.report import closing_lines, table
from qsync.processes.exit_signals import exit_on_signals


def main(
    model: Annotated[
        str, typer.Option(help="gpt, gpt-small, bert, vit, resnet, vgg, or hf:CONFIG.json.")
    ] = "gpt",
    data: Annotated[Path | None, typer.Option(help="Your own text: a file or a folder.")] = None,
    out: Annotated[Path, typer.Option(help="Folder of figures, plan and pictures.")] = Path("mixed"),
    seeds: Annotated[int, typer.Option(help="How many seeds to train with.")] = 1,
    seed: Annotated[int, typer.Option(min=0, help="The first seed.")] = 0,
    steps: Annotated[int | None, typer.Option(help="Steps of each way.", show_default="its own")] = None,
    rounds: Annotated[int, typer.Option(help="Rounds of the profile before training.")] = 3,
    base: Annotated[str, typer.Option(help="Base of the strong ranks: fp32, bf16, fp16, tf32.")] = "fp32",
    device_class: Annotated[
        str | None, typer.Option(help="The name of this host's class, if equal hardware is not as fast.")
    ] = None,
) -> None:
    """Train one model in every way, in turns, on this job's ranks."""
    if "RANK" not in os.environ:
        raise QSyncError(
            "this command needs the ranks of a job: start it by torchrun on every host, or run qsync demo "
            "to emulate a weak rank on this machine"
        )
    if torch.cuda.is_available():
        device = torch.device("cuda", int(os.environ.get("LOCAL_RANK", "0")))
    else:
        device = torch.device("cpu")
    config = configured(
        workload=model, data=data, out=folder_of(out), seeds=seeds, seed=seed, steps=steps, rounds=rounds,
        base=base,
    )  # fmt: skip
    job.join_job(device)
    content = run(config, Place(device, device_class=device_class))
    if content is not None:
        show(table(content), *closing_lines(content, out))


if __name__ == "__main__":
    exit_on_signals()
    with ending_on_error("qsync"):
        typer.run(main)
