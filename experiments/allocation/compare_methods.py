"""qsync's plans against other methods that choose precisions.

    python -m qsync.experiments.allocation.compare_methods --out FOLDER

GPT, BERT, ViT, ResNet and VGG are profiled on this machine (measured) and planned for this machine beside
half of it (emulated), and, at larger batches, for clusters of T4, V100, L4, A100 and H100 that are SIMULATED
from their data sheets. At several targets between the least step and FP32's step, each method's plan is
replayed, and its added variance is compared with qsync's. Steps and variances are predictions (simulated).

    qsync                     `allocate`, with gap, bound and seconds
    QSync's two stages        the fastest start, then recovery, without the exact solver
    uniform                   one precision on all adjustable operators of the weak classes
    casts left out            the exact solver on profiles in which casts are free, replayed with their times

Profiles are separate pieces: delete the other pieces to compare a folder's profiles again.
"""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any

import torch

from qsync.experiments.allocation.bases import GPU_BATCH, ModelOnCluster, measure, problems
from qsync.experiments.allocation.methods import compare, targets
from qsync.experiments.allocation.methods_report import bars, summary, tables
from qsync.experiments.harness import Experiment, Fresh, Models, Out, Page, Publish, run_command
from qsync.experiments.harness.emulated_profiles import GLOO, NETWORK, SHARE
from qsync.experiments.workloads.subjects import NAMES

_PAGE = Page(Path("docs/results/allocation.md"), marker="methods")
_SEED = 0
# Targets: fractions of the way from the least step to FP32's step.
PARTS = (0.05, 0.15, 0.3, 0.5, 0.7, 0.9)


def main(
    out: Out = Path("allocation"),
    model: Models = None,
    publish: Publish = False,
    fresh: Fresh = False,
) -> None:
    """Profile, compare, print tables, and write figures."""
    torch.set_num_threads(1)
    experiment = Experiment("allocation", out, seed=_SEED, fresh=fresh)
    rows = []
    with experiment.progress() as say:
        for name in model or NAMES:
            profiled = partial(measure, name, out / name)
            experiment.piece(f"profile {name}", profiled)
            for one in problems(name, out / name):
                say(f"{name} on {one.cluster_name}")
                piece = f"{name} on {one.cluster_name}".replace(" + ", "-")
                rows += experiment.piece(piece, partial(judge, one))
    found = summary(rows)
    figures = {
        "parts": PARTS, "emulated_share": SHARE, "batch_of_simulated_devices": GPU_BATCH,
        "links": {
            f"{where} (assumed)": [link.latency_s, link.bytes_per_s]
            for where, link in (("this machine", GLOO), ("simulated devices", NETWORK))
        },
        "summary": found, "rows": rows,
    }  # fmt: skip
    experiment.finish(
        figures, measured="profiles, and seconds of solvers; steps and variances are simulated",
        tables=tables(found), bars=bars(found["verdicts"]), page=_PAGE if publish else None,
    )  # fmt: skip


def judge(one: ModelOnCluster, parts: tuple[float, ...] = PARTS) -> list[dict[str, Any]]:
    """Return rows of every method at every target, for one model on one cluster."""
    about = {"model": one.model, "cluster": one.cluster_name, "kind": one.kind}
    return [
        {**about, "part": part, "target_s": target_s, **row}
        for part, target_s in targets(one.basis, parts)
        for row in compare(one.basis, target_s)
    ]


if __name__ == "__main__":
    run_command(main)
