"""qsync's plans against other ways to choose precisions: `python -m qsync.experiments.allocation.compare_methods`.

GPT, BERT, ViT, ResNet and VGG are profiled on this machine (measured) and planned for this machine beside
half of it (emulated), and, at larger batches, for clusters of T4, V100, L4, A100 and H100 that are SIMULATED
from their data sheets. At several targets between the least step and FP32's every method is given the same
target, its plan is replayed, and the variance it adds is compared with that of qsync's exact solver. Steps
and variances are predictions (simulated).

    qsync, MILP / greedy      `allocate(solver=...)`, with gap, bound and seconds
    uniform                   one precision on all adjustable operators of the weak classes
    random                    precisions raised in random orders until the target binds
    by sensitivity alone      raised in order of variance, whatever time that takes
    by latency alone          lowered in order of seconds saved, whatever variance that adds
    additive program          an integer program of single operators' times, without casts (as ModelOpt
                              searches formats): as solved, and with its target changed until replay agrees
    dynamic batching          LB-BSP: all FP32, samples shared so that all finish together

Profiles stay in the folder, so that `--again` compares without measuring.
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Annotated, Any

import torch
import typer
from rich.console import Console

import qsync
from qsync.backend.device_detection import machine
from qsync.errors import QSyncError
from qsync.experiments.allocation import methods_picture
from qsync.experiments.allocation.bases import GLOO, GPU_BATCH, NETWORK, SHARE, Posed, measure, posed
from qsync.experiments.allocation.methods import compare, targets
from qsync.experiments.allocation.methods_report import markdown, summary, tables
from qsync.experiments.demo.rank import commit
from qsync.experiments.workloads.subjects import NAMES
from qsync.records.json_files import write_json, write_text

OUT = Path("allocation")
# Targets: parts of the way from the least step to that in FP32.
PARTS = (0.05, 0.15, 0.3, 0.5, 0.7, 0.9)
NOTES = (
    "step times and variances are predictions (simulated), from profiles measured on this machine or "
    "simulated from data sheets",
    "dynamic batching rounds nothing, so with gradients weighted exactly by samples it adds no variance: "
    "where its step is within the target and memory holds, no plan that lowers anything can add less; it is "
    "compared by step time, with time taken to be in proportion to samples, which is kind to it, and what it "
    "changes instead is the samples that each rank's batch norms see, and the weight of each sample unless "
    "that is corrected",
    "the additive program is not ModelOpt's code but its kind of search: a score and a time per operator",
)


def main(
    out: Annotated[Path, typer.Option(help="Folder for profiles, figures and a picture.")] = OUT,
    model: Annotated[list[str] | None, typer.Option(help="Only these models.")] = None,
    seconds: Annotated[float, typer.Option(help="How long to profile each model at the most.")] = 30.0,
    seeds: Annotated[int, typer.Option(help="Random assignments per target.")] = 30,
    seed: int = 0,
    again: Annotated[
        bool, typer.Option(help="Compare on the profiles in the folder; measure nothing.")
    ] = False,
) -> None:
    """Profile, compare, print tables, write figures and a picture."""
    if seeds < 1 or not seconds > 0:
        raise typer.BadParameter("--seeds must be at least 1, and --seconds positive")
    torch.set_num_threads(1)
    rows: list[dict[str, Any]] = []
    with Console(stderr=True).status("allocation") as status:
        for name in model or NAMES:
            folder = out / name
            if not again:
                status.update(f"{name}: profiling")
                measure(name, folder, seconds=seconds, seed=seed)
            elif not (folder / "graph-large.json").is_file():
                raise QSyncError(f"{folder} holds no profile; leave out --again")
            for one in posed(name, folder):
                status.update(f"{name} on {one.cluster_name}")
                rows += judge(one, seeds)
    content = {
        "measured": "profiles, and seconds of solvers; steps and variances are simulated",
        "machine": machine(), "qsync": qsync.__version__, "commit": commit(), "seed": seed, "seeds": seeds,
        "parts": PARTS, "emulated_share": SHARE, "batch_of_simulated_devices": GPU_BATCH,
        "links": {"this machine (assumed)": GLOO, "simulated devices (assumed)": NETWORK},
        "notes": NOTES, "summary": summary(rows), "rows": rows,
    }  # fmt: skip
    content["links"] = {name: [link.latency_s, link.bytes_per_s] for name, link in content["links"].items()}
    write_json(out / "allocation.json", content)
    write_text(out / "allocation.md", markdown(content))
    methods_picture.draw(rows, out / "allocation.png")
    for table in tables(content["summary"]):
        Console(width=None if sys.stdout.isatty() else 140).print(table)


def judge(one: Posed, seeds: int, parts: tuple[float, ...] = PARTS) -> list[dict[str, Any]]:
    """Rows of every method at every target of one model on one cluster."""
    return [
        {
            "model": one.model,
            "cluster": one.cluster_name,
            "kind": one.kind,
            "part": part,
            "target_s": target_s,
            **row,
        }
        for part, target_s in targets(one.basis, parts)
        for row in compare(one.basis, target_s, seeds=seeds)
    ]


if __name__ == "__main__":
    typer.run(main)
