"""Every indicator against the truth: `python -m qsync.experiments.indicators --out indicators.json`.

For each model and seed: weights after some FP32 steps, the truth by single flips with the real kernels, and
from every indicator (1) its rank correlation with the truth, (2) the plan it leads to at equal step time, by
an exact solver, with that plan's gradient error measured on batches that no indicator saw, and (3) the
held-out loss after training on under that plan. Beside it: is the joint effect of random plans the sum of the
single effects?

Gradient errors and losses are measured; step times are simulated: FLOPs over the rates of `RATES`.
"""

from __future__ import annotations

import copy
import random
from collections.abc import Mapping
from concurrent.futures import ProcessPoolExecutor
from dataclasses import asdict, dataclass
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import numpy as np
import torch
import typer
from rich.console import Console
from scipy.optimize import Bounds, LinearConstraint, milp
from scipy.stats import spearmanr

import qsync
from qsync import runtime
from qsync.api import calibrating
from qsync.devices import machine
from qsync.experiments.demo_rank import commit
from qsync.experiments.indicator_report import markdown, picture, summary, tables
from qsync.experiments.subjects import NAMES, subject
from qsync.experiments.workloads import Workload, evaluate
from qsync.files import write_bytes, write_json
from qsync.graph import OpGraph
from qsync.precision import PRECISIONS_BY_KIND, Precision
from qsync.predictor.calibration import Calibration
from qsync.predictor.empirical import gradient_errors
from qsync.predictor.registry import INDICATORS
from qsync.profiles import Sensitivity

PRECISIONS = (Precision.BF16, Precision.INT8)
# Times as fast as FP32, forward and backward together: README's table of kernels, rounded.
RATES = {
    "conv2d": {Precision.BF16: 1.8, Precision.INT8: 1.9},
    "other": {Precision.BF16: 3.6, Precision.INT8: 4.4},
}
# Shares of the time between all FP32 and the fastest assignment that a plan has to save.
BUDGETS = (0.3, 0.6)
TRAINED_AT = 0.6
# Images or sequences per batch, and batches: networks of ReLUs need more of them, because there the truth of
# one batch depends on which few units an error brings to the other side.
BATCHES = {"gpt": (2, 2), "bert": (2, 2), "vit": (8, 3), "resnet": (32, 4), "vgg": (64, 8)}

Assignment = Mapping[str, Precision]


@dataclass(frozen=True, slots=True)
class Scale:
    """How much is run: `warm_up` FP32 steps before, `steps` after, `random_plans` for joint effects."""

    seeds: int = 5
    warm_up: int = 40
    steps: int = 10
    num_batches: int | None = None
    random_plans: int = 3


QUICK = Scale(seeds=1, warm_up=4, steps=2, num_batches=1, random_plans=2)


def main(
    out: Path = Path("indicators.json"),
    models: list[str] = typer.Option(list(NAMES), "--model", help="Repeat for several."),  # noqa: B008
    seeds: int = 5,
    quick: bool = False,
    processes: int = 1,
) -> None:
    """Judge every indicator, print tables, write the figures; beside them a picture and README's table."""
    scale, tree = QUICK if quick else Scale(seeds=seeds), commit()
    tasks = [(name, seed, scale) for seed in range(scale.seeds) for name in models]
    with Console(stderr=True).status("indicators") as status:
        if processes == 1:
            rows = []
            for name, seed, _ in tasks:
                status.update(f"{name}, seed {seed}")
                rows.append(_task((name, seed, scale)))
        else:
            with ProcessPoolExecutor(processes, mp_context=get_context("spawn")) as pool:
                rows = []
                for (name, seed, _), row in zip(tasks, pool.map(_task, tasks), strict=True):
                    status.update(f"{name}, seed {seed}: done")
                    rows.append(row)
                    write_json(out.with_suffix(".part.json"), {"rows": rows})
    content = {
        "measured": "gradient errors and losses; step times are simulated, from FLOPs and rates",
        "machine": {**machine(), "threads": 1},
        "qsync": qsync.__version__,
        "commit": tree,
        "seeds": list(range(scale.seeds)),
        "scale": asdict(scale),
        "rates": RATES,
        "summary": summary(rows),
        "rows": rows,
    }
    write_json(out, content)
    picture(rows, out.with_suffix(".png"))
    write_bytes(out.with_suffix(".md"), markdown(content).encode())
    for table in tables(content["summary"]):
        Console().print(table)


def _task(task: tuple[str, int, Scale]) -> dict[str, Any]:
    name, seed, scale = task
    torch.set_num_threads(1)
    torch._dynamo.reset()
    size, num = BATCHES[name]
    return judge(subject(name, size), seed, scale, scale.num_batches or num)


def judge(workload: Workload, seed: int, scale: Scale, num_batches: int) -> dict[str, Any]:
    """All figures of one model and seed."""
    model = workload.make_model(seed)
    train(model, workload, seed, range(scale.warm_up))
    seen = [workload.batch(seed, step, 1) for step in range(num_batches)]
    unseen = [workload.batch(seed, step, 2) for step in range(num_batches)]

    def loss_fn(model: torch.nn.Module, batch: Any) -> torch.Tensor:
        return workload.loss_fn(model(batch[0]), batch[1])

    found: dict[str, Sensitivity] = {
        name: qsync.sensitivity(model, seen, loss_fn, indicator=name, precisions=PRECISIONS, seed=seed)
        for name in INDICATORS
    }
    truth = found["empirical"]
    with calibrating(model, unseen, loss_fn, precisions=PRECISIONS, seed=seed) as calibration:
        calibration.assign({})
        norm = sum(float(part.square().sum()) for part in calibration.gradient(0))
        graph = calibration.runner.graph
        plans = {
            (name, budget): plan_at(graph, sensitivity, budget)
            for name, sensitivity in found.items()
            for budget in BUDGETS
        }
        errors = _once_each(plans, calibration)
    with calibrating(model, seen, loss_fn, precisions=PRECISIONS, seed=seed) as calibration:
        calibration.forward(0)
        drawn = [_drawn_plan(graph, seed, number) for number in range(scale.random_plans)]
        joint = gradient_errors(calibration, drawn)
    return {
        "model": workload.name,
        "seed": seed,
        "omega": {name: sensitivity.omega for name, sensitivity in found.items()},
        "spearman": {
            name: {str(p): correlation(sensitivity, truth, p) for p in PRECISIONS}
            for name, sensitivity in found.items()
            if name != "empirical"
        },
        "squared_gradient": norm,
        "plan_error": {
            name: {str(budget): errors[name, budget] / norm for budget in BUDGETS} for name in found
        },
        "joint": [
            {"joint": error, "sum": sum(truth[op, p] for op, p in plan.items())}
            for error, plan in zip(joint, drawn, strict=True)
        ],
        "heldout": heldout(model, workload, seed, scale, {name: plans[name, TRAINED_AT] for name in found}),
    }


def train(model: torch.nn.Module, workload: Workload, seed: int, steps: range) -> None:
    """AdamW steps, as the model runs now."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=workload.lr)
    for step in steps:
        inputs, targets = workload.batch(seed, step, 0)
        optimizer.zero_grad()
        workload.loss_fn(model(inputs), targets).backward()
        optimizer.step()


def correlation(found: Sensitivity, truth: Sensitivity, precision: Precision) -> float:
    """Spearman's rank correlation over the operators that have this precision."""
    ops = [op for op, modes in truth.omega.items() if precision in modes]
    scores = [found.omega[op][precision] for op in ops]
    if len(set(scores)) == 1:
        return 0.0
    return float(spearmanr(scores, [truth.omega[op][precision] for op in ops])[0])


def plan_at(graph: OpGraph, sensitivity: Sensitivity, saving: float) -> dict[str, Precision]:
    """The assignment of least added variance among those that save this share of the time that can be saved.

    minimise sum omega[o, p] x[o, p]  such that  sum time[o, p] x[o, p] <= T,  one p per operator; exact.
    """
    choices = [
        (op.name, p, op.flops / rate(op.kind, p))
        for op in graph.adjustable
        for p in (Precision.FP32, *PRECISIONS)
        if p in PRECISIONS_BY_KIND[op.kind]
    ]
    omega = np.array([sensitivity[name, p] for name, p, _ in choices])
    times = np.array([time for _, _, time in choices])
    names = [op.name for op in graph.adjustable]
    slowest = sum(op.flops for op in graph.adjustable)
    fastest = sum(min(time for name, _, time in choices if name == op) for op in names)
    target = slowest - saving * (slowest - fastest)
    one_each = np.array([[float(name == op) for name, _, _ in choices] for op in names])
    constraints = [
        LinearConstraint(one_each, 1, 1), LinearConstraint(times / slowest, -np.inf, target / slowest)
    ]  # fmt: skip
    # The solver stops within 1e-6 of the largest coefficient, and sensitivities span ten decades: solve again
    # without what is dearer than the plan that was found, until that finds nothing better.
    best, least = None, max(float(omega.max()), 1e-300)
    while True:
        solved = milp(
            np.minimum(omega / least, 1.0),
            integrality=np.ones(len(choices)),
            bounds=Bounds(0, (omega <= least).astype(float)),
            constraints=constraints,
            options={"mip_rel_gap": 1e-6},
        )
        taken = None if solved.x is None else solved.x > 0.5
        if taken is None or (best is not None and omega[taken].sum() >= least):
            break
        best, least = taken, max(float(omega[taken].sum()), 1e-300)
    return {name: p for (name, p, _), chosen in zip(choices, best, strict=True) if chosen}


def rate(kind: str, precision: Precision) -> float:
    """Times as fast as FP32."""
    return 1.0 if precision is Precision.FP32 else RATES.get(kind, RATES["other"])[precision]


def heldout(
    model: torch.nn.Module, workload: Workload, seed: int, scale: Scale, plans: Mapping[str, Assignment]
) -> dict[str, float]:
    """Held-out loss after training on from here in FP32 and under each plan, on the same batches."""
    steps = range(scale.warm_up, scale.warm_up + scale.steps)
    losses: dict[str, float] = {}
    done: dict[tuple[tuple[str, Precision], ...], float] = {}
    for name, plan in {"fp32": {}, **plans}.items():
        key = tuple(sorted((op, p) for op, p in plan.items() if p is not Precision.FP32))
        if key not in done:
            trained = copy.deepcopy(model)
            runtime.attach(trained, runtime.following(plan))
            train(trained, workload, seed, steps)
            runtime.detach(trained)
            done[key] = evaluate(trained, workload, num_batches=4)
        losses[name] = done[key]
    return losses


def _once_each(
    plans: Mapping[tuple[str, float], Assignment], calibration: Calibration
) -> dict[tuple[str, float], float]:
    """The measured gradient error of each plan; indicators that agree share a measurement."""
    different = {tuple(sorted(plan.items())): plan for plan in plans.values()}
    errors = dict(zip(different, gradient_errors(calibration, list(different.values())), strict=True))
    return {key: errors[tuple(sorted(plan.items()))] for key, plan in plans.items()}


def _drawn_plan(graph: OpGraph, seed: int, number: int) -> dict[str, Precision]:
    draw = random.Random(f"{seed}.{number}")
    plan = {}
    for op in graph.adjustable:
        plan[op.name] = draw.choice(
            [p for p in (Precision.FP32, *PRECISIONS) if p in PRECISIONS_BY_KIND[op.kind]]
        )
    return plan


if __name__ == "__main__":
    typer.run(main)
