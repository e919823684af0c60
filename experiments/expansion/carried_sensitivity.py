"""How good a guess a grown model inherits: `python -m qsync.experiments.expansion.carried_sensitivity --out carried.json`.

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
from pathlib import Path
from typing import Annotated, Any

import numpy as np
import torch
import typer
from rich.console import Console
from scipy.stats import spearmanr
from torch import nn

import qsync
from qsync.backend.device_detection import machine
from qsync.expansion.plan.plan import ExpansionPlan
from qsync.experiments.demo.rank import commit
from qsync.experiments.harness.training import make_optimizer
from qsync.experiments.workloads.demo_workloads import Workload, seeded
from qsync.experiments.workloads.gpt import Gpt
from qsync.experiments.workloads.resnet import ResNet
from qsync.experiments.workloads.subjects import CONTEXT, subject
from qsync.experiments.workloads.vit import Vit
from qsync.lowering.rules import Lowering
from qsync.records.graph import OpGraph
from qsync.records.json_files import write_bytes, write_json
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
    out: Path = Path("carried.json"),
    models: list[str] = typer.Option(list(SUBJECTS), "--model", help="Repeat for several."),  # noqa: B008
    seeds: int = 3,
    profiles: Annotated[bool, typer.Option("--profiles", help="Measure times instead.")] = False,
    quick: bool = False,
) -> None:
    """Judge the guess, print the table, and write figures and table."""
    torch.set_num_threads(1)
    rows = []
    with Console(stderr=True).status("carried") as status:
        for name in models:
            for seed in range(1 if profiles or quick else seeds):
                status.update(f"{name}, seed {seed}")
                rows += [timed(name, seed)] if profiles else judged(name, seed, quick)
                write_json(
                    out,
                    {
                        "measured": True, "machine": machine(), "threads": 1, "commit": commit(),
                        "qsync": qsync.__version__, "steps": [BEFORE, AFTER], "rows": rows,
                    },
                )  # fmt: skip
    table = times(rows) if profiles else markdown(rows)
    write_bytes(out.with_suffix(".md"), table.encode())
    print(table)


def judged(name: str, seed: int, quick: bool = False) -> list[Row]:
    """The guess against fresh statistics and against the truth, right after growing and some steps later."""
    chosen, work = SUBJECTS[name], _workload(name)
    batches = [work.batch(seed, 10_000 + i, 0) for i in range(1 if quick else chosen.num_batches)]
    others = [work.batch(seed, 20_000 + i, 0) for i in range(len(batches))]
    small = seeded(chosen.make, seed)
    _train(small, work, seed, 2 if quick else BEFORE)
    before = _gathered(small, batches, work)
    graph, big, target, plan = _grown(small, chosen, batches[0], seed)
    guess = qsync.carry_sensitivity(before, graph, target, plan)
    rows = []
    for steps in (0, 2 if quick else AFTER):
        _train(big, work, seed, steps, start=1_000)
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
    """A profile carried over from the small model against one of the grown model."""
    chosen, work = SUBJECTS[name], _workload(name)
    batch = work.batch(seed, 0, 0)
    small = seeded(chosen.make, seed)
    graph, big, target, plan = _grown(small, chosen, batch, seed)
    before, after = (
        qsync.profile(
            model, batch, _loss_fn(work), precisions=["fp32", *PRECISIONS], seconds=15.0,
            make_optimizer=make_optimizer(1e-3),
        )
        for model in (small, big)
    )  # fmt: skip
    guess = qsync.carry_profile(before, graph, target, plan)
    return {"model": name, "seed": seed, **errors(target, guess, after)}


def errors(graph: OpGraph, guess: Profile, fresh: Profile) -> Row:
    """|guess / fresh - 1| of products that take 20 us and more, and guess / fresh - 1 of compute, by mode."""
    single = [
        abs(guess.ops[op.name][mode].total_s / cost.total_s - 1.0)
        for op in graph.adjustable
        for mode, cost in fresh.ops[op.name].items()
        if cost.total_s >= 20e-6 and mode in guess.ops[op.name]
    ]
    steps = {}
    for mode in ("fp32", *PRECISIONS):
        chosen = {op.name: mode for op in graph.adjustable if mode in fresh.ops[op.name]}
        told, found = (_step_s(graph, chosen, profile) for profile in (guess, fresh))
        steps[mode] = told / found - 1.0
    return {"median": statistics.median(single), "p95": float(np.quantile(single, 0.95)), "steps": steps}


def compare(guess: Sensitivity, other: Sensitivity, precision: str) -> Row:
    """Spearman's correlation over operators, and the 5th, 50th and 95th percentile of guess / other."""
    pairs = np.array(
        [
            (guess.omega[op][precision], modes[precision])
            for op, modes in other.omega.items()
            if modes.get(precision)
        ]
    )
    ratios = np.quantile(pairs[:, 0] / pairs[:, 1], [0.05, 0.5, 0.95])
    return {"spearman": float(spearmanr(pairs)[0]), "ratio": [float(q) for q in ratios]}


def markdown(rows: Sequence[Row]) -> str:
    """README's table: per model and moment, BF16 / INT8, means over seeds; ratios as medians over seeds."""
    columns = ("fresh", "truth", "fresh against fresh", "fresh against truth")
    lines = [
        f"| model, steps after growing | guess ~ {' | guess ~ '.join(columns[:2])} | fresh ~ fresh "
        "| fresh ~ truth | guess / truth: 5 %, median, 95 % (INT8) |",
        "|---|---|---|---|---|---|",
    ]
    for name, steps in dict.fromkeys((row["model"], row["steps"]) for row in rows):
        own = [row for row in rows if (row["model"], row["steps"]) == (name, steps)]
        cells = []
        for column in columns:
            means = [
                statistics.fmean(row[column]["spearman"] for row in own if row["precision"] == precision)
                for precision in PRECISIONS
            ]
            cells.append(" / ".join(f"{mean:.2f}" for mean in means))
        ratios = zip(*(row["truth"]["ratio"] for row in own if row["precision"] == "int8"), strict=True)
        cells.append(", ".join(f"{statistics.median(each):.2f}" for each in ratios))
        lines.append(f"| {name}, {steps} | {' | '.join(cells)} |")
    return "\n".join(lines) + "\n"


def times(rows: Sequence[Row]) -> str:
    """README's second table: single operators, and compute of whole steps."""
    lines = ["| model | operators, median / 95th | FP32 | BF16 | INT8 |", "|---|---|---|---|---|"]
    for row in rows:
        steps = " | ".join(f"{error:+.0%}" for error in row["steps"].values())
        lines.append(f"| {row['model']} | {row['median']:.0%} / {row['p95']:.0%} | {steps} |")
    return "\n".join(lines) + "\n"


def _step_s(graph: OpGraph, assignment: Mapping[str, str], profile: Profile) -> float:
    lowering = Lowering(graph, {op: Precision(mode) for op, mode in assignment.items()})
    return ClassCosts(lowering, profile).total_s


def _workload(name: str) -> Workload:
    return subject(SUBJECTS[name].data, SUBJECTS[name].batch_size)


def _loss_fn(work: Workload) -> Callable[[nn.Module, Any], torch.Tensor]:
    def loss(model: nn.Module, batch: Any) -> torch.Tensor:
        returned = model(batch[0])
        return work.loss_fn(getattr(returned, "logits", returned), batch[1])

    return loss


def _train(model: nn.Module, work: Workload, seed: int, steps: int, start: int = 0) -> None:
    optimizer = torch.optim.AdamW(model.parameters(), lr=work.lr)
    for step in range(start, start + steps):
        optimizer.zero_grad()
        _loss_fn(work)(model, work.batch(seed, step, 0)).backward()
        optimizer.step()


def _gathered(
    model: nn.Module, batches: Sequence[Any], work: Workload, indicator: str = "variance", draw: int = 0
) -> Sensitivity:
    return qsync.sensitivity(
        model, batches, _loss_fn(work), indicator=indicator, precisions=PRECISIONS, seed=draw
    )


def _grown(
    small: nn.Module, chosen: Subject, batch: Any, seed: int
) -> tuple[OpGraph, nn.Module, OpGraph, ExpansionPlan]:
    recipe = qsync.recipe_of(small).to(**chosen.target)
    plan = qsync.plan_expansion(small, recipe, seed=seed)
    big = qsync.expand(small, recipe, seed=seed)
    return qsync.capture(small, batch[0]), big, qsync.capture(copy.deepcopy(big), batch[0]), plan


if __name__ == "__main__":
    typer.run(main)
