"""How long planning takes for large models.

    python -m qsync.experiments.allocation.planning_times --out FOLDER

BERT-large, ResNet-101 and Llama-3-70B, captured on the meta device, on four classes: T4, V100, L4 and A100,
SIMULATED from their data sheets at the shares of peak that this machine reaches (from the profiles that
compare_methods left in FOLDER). Sensitivities are made up, four decades of them; only their spread matters to
how long solving takes. Each plan is made in a fresh process: the wall seconds of `allocate` and the peak of
resident memory are measured; importing and capturing are not counted.
"""

from __future__ import annotations

import os
import random
import time
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import Any

import torch

import qsync
from qsync import Cluster, Link, OpGraph, Profile, QSyncError, Sensitivity
from qsync.allocator import allocate, check_plan
from qsync.experiments.allocation.bases import card
from qsync.experiments.allocation.compare_methods import OUT
from qsync.experiments.harness import Experiment, Fresh, Out, Page, Publish, bar, run_command
from qsync.experiments.harness.emulated_profiles import HERE
from qsync.experiments.harness.processes import in_fresh_process, peak_resident_bytes
from qsync.experiments.workloads import large_models
from qsync.predictor.cost_model.fill_profile import simulate
from qsync.predictor.cost_model.model import CostModel
from qsync.predictor.cost_model.samples import samples_of
from qsync.records.datasheets import datasheet
from qsync.records.json_files import read_json
from qsync.records.plan_folder import Basis

SHEETS = ("T4", "V100", "L4", "A100")
SEED, SLACK, TIMES = 0, 0.1, 3
_PAGE = Page(Path("docs/results/allocation.md"), note="One thread.", marker="planning")
# Memory is no part of this: Llama-3-70B fits on none of these devices.
MEMORY_BYTES = 1 << 50
LINK = Link(30e-6, 10e9, num_ranks=2)
GAP_BAR, MEMORY_BAR = 0.01, 4 * 2**30


BERT_LARGE = {
    "num_hidden_layers": 24, "hidden_size": 1024, "num_attention_heads": 16, "intermediate_size": 4096,
}  # fmt: skip


def _resnet_101() -> OpGraph:
    from transformers import ResNetConfig, ResNetForImageClassification

    sizes: dict[str, Any] = {"depths": [3, 4, 23, 3], "layer_type": "bottleneck", "num_labels": 1000}
    with torch.device("meta"):
        model = ResNetForImageClassification(ResNetConfig(**sizes))
        return qsync.capture(model, {"pixel_values": torch.empty(32, 3, 224, 224)})


# (graph, ranks of each class, seconds that planning may take)
MODELS: dict[str, tuple[Callable[[], OpGraph], int, float]] = {
    "BERT-large": (lambda: large_models.bert_graph(**BERT_LARGE), 1, 2.0),
    "ResNet-101": (_resnet_101, 1, 2.0),
    "Llama-3-70B": (lambda: large_models.large_graph(80), 2500, 2.0),
}


def main(out: Out = OUT, publish: Publish = False, fresh: Fresh = False) -> None:
    """Capture what is not in the folder yet, time planning, write FOLDER/times."""
    settings = {"slack": SLACK, "times": TIMES}
    experiment = Experiment("planning times", out / "times", seed=SEED, settings=settings, fresh=fresh)
    rows = []
    with experiment.progress():
        for name, (graph, count, bar_s) in MODELS.items():
            if not (out / name / "cluster.json").is_file():
                made_up(graph(), learned(out), count, SEED).save(out / name)
            row = experiment.piece(name, partial(timed, out / name))
            rows.append({"model": name, "bar_s": bar_s, **row})
    experiment.finish(
        {"rows": rows}, bars=[one for row in rows for one in bars(row)],
        measured="seconds and memory; devices are simulated, sensitivities made up",
        page=_PAGE if publish else None,
    )  # fmt: skip


def timed(folder: Path) -> dict[str, Any]:
    """Return the run of median seconds."""
    found = [in_fresh_process(solve, str(folder)) for _ in range(TIMES)]
    middle: dict[str, Any] = sorted(found, key=lambda entry: float(entry["seconds"]))[TIMES // 2]
    return {**middle, "load": os.getloadavg()[0]}


def learned(folder: Path) -> CostModel:
    """Return a cost model of the profiles measured on this machine. QSyncError if there are none."""
    samples = []
    for path in sorted(folder.glob(f"*/profile-{HERE}.json")):
        samples += samples_of(OpGraph.load(path.with_name("graph.json")), Profile.load(path))
    if not samples:
        raise QSyncError(
            f"{folder} holds no profile; run python -m qsync.experiments.allocation.compare_methods first"
        )
    return CostModel(samples)


def made_up(graph: OpGraph, costs: CostModel, count: int, seed: int) -> Basis:
    """Make a basis of `count` ranks of each device of `SHEETS`, with a sensitivity drawn from `seed`."""
    base = large_models.synthetic_profile(graph, "base", 1.0)  # only what is outside of operators counts
    cluster = Cluster(tuple(card(sheet, count, MEMORY_BYTES) for sheet in SHEETS), LINK)
    profiles = {
        c.name: simulate(base, graph, datasheet(sheet), c.name, costs)
        for sheet, c in zip(SHEETS, cluster.classes, strict=True)
    }
    sensitivity = large_models.made_up_sensitivity(random.Random(seed), graph, 0.3)
    return Basis(graph, cluster, profiles, sensitivity)


def solve(folder: str) -> dict[str, Any]:
    """Plan what lies in a folder, checked. For a fresh process, whose peak memory is read."""
    import scipy.optimize  # noqa: F401  half a second that is not planning's

    where = Path(folder)  # Basis.load leaves out the profiles of simulated devices
    cluster = Cluster.from_json(read_json(where / "cluster.json"))
    profiles = {c.name: Profile.load(where / f"profile-{c.name}.json") for c in cluster.classes}
    graph, sensitivity = OpGraph.load(where / "graph.json"), Sensitivity.load(where / "sensitivity.json")
    begun = time.perf_counter()
    plan = allocate(graph, profiles, sensitivity, cluster, slack=SLACK)
    seconds, peak = time.perf_counter() - begun, peak_resident_bytes()
    found = check_plan(graph, plan, profiles, sensitivity, cluster)
    return {
        "seconds": seconds, "peak_bytes": peak, "gap": plan.gap, "added_variance": plan.added_variance,
        "step_s": plan.step_s, "target_s": plan.target_s, "operators": len(graph.ops),
        "adjustable": len(graph.adjustable), "lowered": sum(len(c.lowered) for c in plan.classes.values()),
        "ranks": cluster.num_ranks, "violations": list(found.violations),
    }  # fmt: skip


def bars(row: Mapping[str, Any]) -> list[dict[str, Any]]:
    """Return seconds, gap, memory and violations of a row beside their limits."""
    name = f"{row['model']}: "
    return [
        bar(name + "seconds", row["seconds"], row["bar_s"]),
        bar(name + "gap", row["gap"], GAP_BAR),
        bar(name + "peak bytes", row["peak_bytes"], MEMORY_BAR),
        bar(name + "violations", len(row["violations"]), 0),
    ]


if __name__ == "__main__":
    run_command(main)
