"""How good a guess a grown model inherits.

    python -m qsync.experiments.expansion.carried_sensitivity --out FOLDER

For each model and seed: a small one is trained, its sensitivity gathered, and carried over to the one it
grows to (1.5 times as wide, and deeper). That is compared with the grown model's own sensitivity and with the
truth (every operator lowered by itself with the real kernels), right after growing and after some more steps.
`--profiles` compares a carried profile with one measured on the grown model: times, so let nothing else run.
"""

from __future__ import annotations

import copy
import statistics
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Annotated, Any

import numpy as np
import torch
import typer
from rich.table import Table
from scipy.stats import spearmanr
from torch import nn

import qsync
from qsync.expansion.plan.plan import ExpansionPlan
from qsync.experiments.harness.experiment import Experiment, Fresh, Models, Out, run
from qsync.experiments.harness.tables import table
from qsync.experiments.workloads.gpt import Gpt
from qsync.experiments.workloads.resnet import ResNet
from qsync.experiments.workloads.subjects import CONTEXT, subject
from qsync.experiments.workloads.vit import Vit
from qsync.experiments.workloads.workload import Workload, make_optimizer, seeded, train
from qsync.lowering.incremental import Lowering
from qsync.records.graph import OpGraph
from qsync.records.precision import Precision
from qsync.records.profiles import Profile, Sensitivity
from qsync.replayer import ClassCosts

PRECISIONS = ("bf16", "int8")
# Steps of the small model, and of the grown one before it is looked at again.
BEFORE, AFTER = 60, 40
Row = dict[str, Any]


@dataclass(frozen=True, slots=True)
class Subject:
    """A small model, its data, its batch size and how many batches it is judged on, and what it grows to."""

    make: Callable[[], nn.Module]
    data: str
    batch_size: int
    num_batches: int
    target: Mapping[str, int]


def _llama() -> nn.Module:
    from transformers import LlamaConfig, LlamaForCausalLM

    config = LlamaConfig(
        vocab_size=256, hidden_size=64, intermediate_size=160, num_hidden_layers=3, num_attention_heads=8,
        num_key_value_heads=4, max_position_embeddings=CONTEXT, use_cache=False, bos_token_id=None,
        eos_token_id=None,
    )  # fmt: skip
    return LlamaForCausalLM(config)


SUBJECTS = {
    "gpt": Subject(lambda: Gpt(3, 64, 4, CONTEXT), "gpt", 2, 3, {"width": 96, "layers": 5}),
    "vit": Subject(lambda: Vit(3, 64, 8), "vit", 8, 3, {"width": 96, "layers": 5}),
    "resnet": Subject(
        lambda: ResNet((16, 32, 64), 2), "resnet", 32, 3, {"c0": 24, "c1": 48, "c2": 96, "layers": 3}
    ),
    "llama": Subject(_llama, "gpt", 2, 3, {"width": 96, "layers": 5}),
}


def main(
    out: Out = Path("carried"),
    models: Models = None,
    seeds: int = 3,
    profiles: Annotated[bool, typer.Option("--profiles", help="Measure times instead.")] = False,
    fresh: Fresh = False,
) -> None:
    """Judge the guess, print the table, and write figures and table."""
    torch.set_num_threads(1)
    experiment = Experiment("carried", out, settings={"steps": [BEFORE, AFTER]}, fresh=fresh)
    rows: list[Row] = []
    with experiment.progress():
        for name in models or SUBJECTS:
            for seed in range(1 if profiles else seeds):
                if profiles:
                    rows.append(experiment.piece(f"profile {name}", partial(timed, name, 0)))
                else:
                    rows += experiment.piece(f"{name} {seed}", partial(judged, name, seed))
    shown = times(rows) if profiles else correlations(rows)
    experiment.finish({"threads": 1, "rows": rows}, tables=[shown])


def judged(name: str, seed: int) -> list[Row]:
    """Compare the guess with fresh statistics and the truth, right after growing and some steps later."""
    chosen, work = SUBJECTS[name], _workload(name)
    batches = [work.batch(seed, 10_000 + i, 0) for i in range(chosen.num_batches)]
    others = [work.batch(seed, 20_000 + i, 0) for i in range(len(batches))]
    small = seeded(chosen.make, seed)
    train(small, work, seed, range(BEFORE))
    before = _gathered(small, batches, work)
    graph, big, target, plan = _grown(small, chosen, batches[0], seed)
    guess = qsync.carry_sensitivity(before, graph, target, plan)
    rows = []
    for steps in (0, AFTER):
        train(big, work, seed, range(1_000, 1_000 + steps))
        fresh, truth = _gathered(big, batches, work), _gathered(big, batches, work, "empirical")
        again = _gathered(big, others, work, draw=1)
        for precision in PRECISIONS:
            rows.append(
                {"model": name, "seed": seed, "steps": steps, "precision": precision}
                | {"fresh": compare(guess, fresh, precision), "truth": compare(guess, truth, precision)}
                | {"fresh against fresh": compare(again, fresh, precision)}
                | {"fresh against truth": compare(fresh, truth, precision)}
            )
    return rows


def timed(name: str, seed: int) -> Row:
    """Compare a profile carried over from the small model with one of the grown model."""
    chosen, work = SUBJECTS[name], _workload(name)
    batch = work.batch(seed, 0, 0)
    small = seeded(chosen.make, seed)
    graph, big, target, plan = _grown(small, chosen, batch, seed)
    before, after = (
        qsync.profile(
            model, batch, work.loss, precisions=["fp32", *PRECISIONS], seconds=15.0,
            make_optimizer=make_optimizer(1e-3),
        )
        for model in (small, big)
    )  # fmt: skip
    guess = qsync.carry_profile(before, graph, target, plan)
    return {"model": name, "seed": seed, **errors(target, guess, after)}


def errors(graph: OpGraph, guess: Profile, fresh: Profile) -> Row:
    """Return |guess / fresh - 1| of products of 20 us and more, and guess / fresh - 1 of compute, by mode."""
    single = [
        abs(guess.ops[op.name][mode].total_s / cost.total_s - 1.0)
        for op in graph.adjustable
        for mode, cost in fresh.ops[op.name].items()
        if cost.total_s >= 20e-6 and mode in guess.ops[op.name]
    ]
    steps = {}
    for mode in ("fp32", *PRECISIONS):
        chosen = {op.name: mode for op in graph.adjustable if mode in fresh.ops[op.name]}
        guessed, found = (_step_s(graph, chosen, profile) for profile in (guess, fresh))
        steps[mode] = guessed / found - 1.0
    return {"median": statistics.median(single), "p95": float(np.quantile(single, 0.95)), "steps": steps}


def compare(guess: Sensitivity, other: Sensitivity, precision: str) -> Row:
    """Return Spearman's correlation over operators, and percentiles 5, 50 and 95 of guess / other."""
    pairs = np.array(
        [
            (guess.omega[op][precision], modes[precision])
            for op, modes in other.omega.items()
            if modes.get(precision)
        ]
    )
    ratios = np.quantile(pairs[:, 0] / pairs[:, 1], [0.05, 0.5, 0.95])
    return {"spearman": float(spearmanr(pairs)[0]), "ratio": [float(q) for q in ratios]}


def correlations(rows: Sequence[Row]) -> Table:
    """Return the table by model and moment: BF16 / INT8, means over seeds; ratios as medians."""
    columns = ("fresh", "truth", "fresh against fresh", "fresh against truth")
    lines = []
    for name, steps in dict.fromkeys((row["model"], row["steps"]) for row in rows):
        own = [row for row in rows if (row["model"], row["steps"]) == (name, steps)]
        cells = [f"{name}, {steps}"]
        for column in columns:
            means = [
                statistics.fmean(row[column]["spearman"] for row in own if row["precision"] == precision)
                for precision in PRECISIONS
            ]
            cells.append(" / ".join(f"{mean:.2f}" for mean in means))
        ratios = zip(*(row["truth"]["ratio"] for row in own if row["precision"] == "int8"), strict=True)
        lines.append([*cells, ", ".join(f"{statistics.median(each):.2f}" for each in ratios)])
    headings = (
        "model, steps after growing", "guess ~ fresh", "guess ~ truth", "fresh ~ fresh", "fresh ~ truth",
        "guess / truth: 5 %, median, 95 % (INT8)",
    )  # fmt: skip
    return table("Carried and own sensitivity (measured)", headings, lines)


def times(rows: Sequence[Row]) -> Table:
    """Return the second table of docs/results: single operators, and compute of whole steps."""
    cells = [
        [
            row["model"],
            f"{row['median']:.0%} / {row['p95']:.0%}",
            *(f"{e:+.0%}" for e in row["steps"].values()),
        ]
        for row in rows
    ]
    headings = ("model", "operators, median / 95th", "FP32", "BF16", "INT8")
    return table("Carried and own profile (measured)", headings, cells)


def _step_s(graph: OpGraph, assignment: Mapping[str, str], profile: Profile) -> float:
    lowering = Lowering(graph, {op: Precision(mode) for op, mode in assignment.items()})
    return ClassCosts(lowering, profile).total_s


def _workload(name: str) -> Workload:
    return subject(SUBJECTS[name].data, SUBJECTS[name].batch_size)


def _gathered(
    model: nn.Module, batches: Sequence[Any], work: Workload, indicator: str = "variance", draw: int = 0
) -> Sensitivity:
    options: dict[str, Any] = {"indicator": indicator, "precisions": PRECISIONS, "seed": draw}
    found: Sensitivity = qsync.sensitivity(model, batches, work.loss, **options)
    return found


def _grown(
    small: nn.Module, chosen: Subject, batch: Any, seed: int
) -> tuple[OpGraph, nn.Module, OpGraph, ExpansionPlan]:
    recipe = qsync.recipe_of(small).to(**chosen.target)
    plan = qsync.plan_expansion(small, recipe, seed=seed)
    big = qsync.expand(small, recipe, seed=seed)
    return qsync.capture(small, batch[0]), big, qsync.capture(copy.deepcopy(big), batch[0]), plan


if __name__ == "__main__":
    run(main)
