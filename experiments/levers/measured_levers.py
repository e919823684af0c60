"""Measure levers on two real unequal ranks against their predictions.

    python -m qsync.experiments.levers.measured_levers --out FOLDER

The weak rank is emulated. Plans take turns in one run: FP32 with one lever at a time, then precisions without
levers and with searched ones, at one target step. `--tight` gives the weak rank little memory instead:
precisions without levers, and with a searched number of blocks saving less.
"""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any

import torch
import torch.distributed as dist
import typer
from rich.table import Table

from qsync import Plan
from qsync.allocator import allocate, search
from qsync.allocator.block_levers import block_levers
from qsync.distributed import job
from qsync.distributed.agreement import agree
from qsync.distributed.ddp_profiling import ProfileOptions, form_basis
from qsync.distributed.job_options import HybridOptions
from qsync.experiments.harness import Experiment, Fresh, Out, Page, Publish, run_command, table_of
from qsync.experiments.harness.planned_steps import PlannedSteps, plans_of_first_rank
from qsync.experiments.harness.ranks import FAST, WEAK, Place, run_on_ranks
from qsync.experiments.memory.memory_runs import loss_of, parts_of
from qsync.experiments.workloads.workload import make_optimizer
from qsync.records.levers import ClassLevers, Levers
from qsync.records.plan_folder import Basis
from qsync.replayer import Recapture, profiles_under_levers
from qsync.replayer.levers.recomputation import blocks

PRECISIONS = ("fp32", "bf16", "int8")
# Steps of each plan per turn, and the first ones that are not counted.
STEPS, WARM = 9, 3
# Slack over the least step, relative, where variance is compared.
SLACK = 0.15
# With little memory: fraction of FP32's minimum, and slack of the step.
TIGHT, TIGHT_SLACK = 0.95, 0.1


def main(
    out: Out = Path("levers"),
    tight: Annotated[bool, typer.Option("--tight", help="Plans for little memory on the weak rank.")] = False,
    publish: Publish = False,
    fresh: Fresh = False,
) -> None:
    """Run the plans, store the measurements, and print the table of docs/results/levers.md."""
    config = {"model": "gpt", "turns": 2, "weak_share": 0.5, "tight": tight}
    experiment = Experiment("levers", out, settings=config, fresh=fresh)
    name = "tight" if tight else "levers"
    rows = experiment.piece(name, lambda: run_on_ranks(measure, config, command="levers", timeout_s=600.0))
    page = Page(Path("docs/results/levers.md"), note="gloo, one thread a rank.", marker=name)
    experiment.finish({"emulated": True, "rows": rows}, tables=[table(rows)], page=page if publish else None)


def table(rows: Sequence[Mapping[str, Any]]) -> Table:
    """Return the table: steps and memory peaks, predicted and measured, and each plan's variance."""

    def mebibytes(row: Mapping[str, Any], what: str) -> str:
        return " / ".join(f"{num_bytes / 2**20:.1f}" for num_bytes in row[f"{what}_bytes"])

    return table_of("Levers (measured; the weak rank is emulated)", (
        "", "step, predicted", "measured", "peak of either rank, MiB, predicted", "measured", "added variance"
    ), ([
        row["plan"],
        f"{row['predicted_s'] * 1e3:.0f} ms ({row['predicted_s'] / row['measured_s'] - 1:+.1%})",
        f"{row['measured_s'] * 1e3:.0f} ms", mebibytes(row, "predicted"), mebibytes(row, "measured"),
        f"{row['added_variance']:.1e}",
    ] for row in rows))  # fmt: skip


def measure(config: dict[str, Any], place: Place) -> list[dict[str, Any]]:
    """Return a row per plan: seconds of a step and peak bytes, predicted and measured."""
    share, rank = place.measured_share(), dist.get_rank()
    name = WEAK if rank else FAST
    model, batch, loss_fn = parts_of(config["model"], rank)
    loss = loss_of(loss_fn)
    own = job.detect_rank(model, share, name)
    whole = _basis(job.TrainingStep(model, batch, loss), own, save_less=config["tight"])
    if config["tight"]:
        plans = plans_of_first_rank(lambda: _tight_plans(whole))
    else:
        smaller = tuple(t[: len(t) // 2] for t in batch)
        half = _basis(job.TrainingStep(model, smaller, loss), own)
        other = Recapture(half.graph, half.profiles)
        plans = plans_of_first_rank(lambda: _plans(whole, other))
    times: dict[str, list[float]] = {title: [] for title in plans}
    peaks: dict[str, list[int]] = {}
    for _ in range(config["turns"]):
        for title, plan in plans.items():
            steps = PlannedSteps(model, plan, name, batch, loss, make_optimizer(1e-3))
            times[title].append(statistics.median([steps.timed() for _ in range(STEPS)][WARM:]))
            peaks[title] = agree("memory", steps.peak_bytes)
    return [
        {
            "plan": title,
            "levers": {c: str(entry) for c, entry in plan.levers.classes.items()} if plan.levers else {},
            "added_variance": plan.added_variance, "predicted_s": plan.step_s,
            "measured_s": statistics.median(times[title]), "turns_s": times[title],
            "predicted_bytes": [predicted_bytes(plan, c) for c in (FAST, WEAK)],
            "measured_bytes": peaks[title],
        }
        for title, plan in plans.items()
    ]  # fmt: skip


def _basis(step: job.TrainingStep, rank: job.Rank, save_less: bool = False) -> Basis:
    torch._dynamo.reset()
    graph = job.form_graph(step)
    asked = HybridOptions(precisions=PRECISIONS, make_optimizer=make_optimizer(1e-3))
    options = ProfileOptions(asked, save_less)
    return form_basis(step, rank, graph, job.form_cluster(rank), options)[0]


def _plans(basis: Basis, other: Recapture) -> dict[str, Plan]:
    """Return plans in FP32 with one lever each, then plans of precisions without and with levers."""
    parts = (basis.graph, basis.profiles, basis.sensitivity, basis.cluster)
    captured, slow = basis.graph.batch_shapes[0][0], 1e3  # a target this long is always reached

    def fp32(levers: Mapping[str, ClassLevers]) -> Plan:
        profiles = profiles_under_levers(basis.graph, basis.profiles, basis.cluster, Levers(levers), other)
        return allocate(basis.graph, profiles, *parts[2:], pins={"*": "fp32"}, target_s=slow)

    some = blocks(basis.graph)[:2]
    quarter = captured // 4
    shares = {FAST: ClassLevers(captured + quarter), WEAK: ClassLevers(captured - quarter)}
    target_s = (allocate(*parts, slack=0.0).target_s or 0.0) * (1 + SLACK)
    return {
        "FP32": fp32({}),
        "FP32, a quarter less on the weak rank": fp32(shares),
        "FP32, two passes on the weak rank": fp32({WEAK: ClassLevers(passes=2)}),
        "FP32, two blocks recomputed on the weak rank": fp32({WEAK: ClassLevers(recomputed=some)}),
        "precisions alone": allocate(*parts, target_s=target_s),
        "searched levers and precisions": search(
            *parts, levers=["share", "buckets"], other=other, target_s=target_s
        ),
    }  # fmt: skip


def _tight_plans(basis: Basis) -> dict[str, Plan]:
    """Return plans for a weak rank with little memory.

    Two are in FP32: as torch saves, and with two blocks saving less. Two have less memory than FP32 can do
    with, and a tenth more time: only precisions, and searched levers.
    """
    parts = (basis.graph, basis.profiles, basis.sensitivity, basis.cluster)

    def fp32(num_blocks: int) -> Plan:
        patterns = [pattern for block in able[:num_blocks] for pattern in block.patterns]
        return allocate(*parts, pins={"*": "fp32"}, target_s=1e3, saving_less={WEAK: patterns})

    able = block_levers(basis.graph, basis.profiles[WEAK], ["save_less"])
    every = [fp32(num_blocks) for num_blocks in range(len(able) + 1)]
    needed, whole = min(predicted_bytes(plan, WEAK) for plan in every), every[0]
    options: dict[str, Any] = {
        "target_s": (1 + TIGHT_SLACK) * (whole.step_s or 0.0), "budgets": {WEAK: int(TIGHT * needed)},
    }  # fmt: skip
    return {
        "FP32": whole,
        "FP32, two blocks saving less on the weak rank": every[2],
        "precisions alone": allocate(*parts, **options),
        "precisions, saving less searched": search(*parts, levers=["save_less"], **options),
    }


def predicted_bytes(plan: Plan, device_class: str) -> int:
    """Return the predicted memory peak of a class under a plan of `allocate`."""
    predicted = plan[device_class].predicted
    assert predicted is not None
    return predicted.memory_bytes


if __name__ == "__main__":
    run_command(main)
