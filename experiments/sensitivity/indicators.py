"""Compare every indicator with the truth: `python -m qsync.experiments.sensitivity.indicators --out FOLDER`.

For each model and seed: weights after some FP32 steps, the truth by single flips with the real kernels, and
from every indicator (1) its rank correlation with the truth, (2) the plan it leads to at equal step time, by
an exact solver, with that plan's gradient error measured on batches that no indicator saw. It also tests
whether the joint effect of random plans is the sum of single effects.

Gradient errors are measured; step times are simulated: FLOPs over the rates of `RATES`.

The truth takes hours and plans take minutes, so each is a separate piece: delete the pieces `... plans` to
judge a folder's sensitivities again.
"""

from __future__ import annotations

import random
import statistics
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from scipy.optimize import Bounds, LinearConstraint, milp
from scipy.stats import spearmanr

from qsync import OpGraph, Precision, Sensitivity
from qsync.api import calibrating
from qsync.experiments.harness import Experiment, Fresh, Models, Out, Page, Publish, run_command
from qsync.experiments.sensitivity.baselines import INDICATORS, sensitivity_by
from qsync.experiments.sensitivity.indicator_report import summary, table
from qsync.experiments.workloads.subjects import NAMES, subject
from qsync.experiments.workloads.workload import Workload, train
from qsync.operators.registry import PRECISIONS_BY_KIND
from qsync.predictor.sensitivity.empirical import errors_by_batch, gradient_errors

PRECISIONS = (Precision.BF16, Precision.INT8)
_PAGE = Page(Path("docs/results/sensitivity.md"), note="One thread.")
# Speed relative to FP32, forward and backward together, rounded from docs/results/kernels.md.
RATES = {
    "conv2d": {Precision.BF16: 1.8, Precision.INT8: 1.9},
    "other": {Precision.BF16: 3.6, Precision.INT8: 4.4},
}
# Fractions of the time between all FP32 and the fastest assignment that a plan must save.
BUDGETS = (0.3, 0.6)
# Samples per batch, and batches. ReLU networks need more, because in one batch the truth depends on the few
# units that an error flips.
BATCHES = {"gpt": (2, 2), "bert": (2, 2), "vit": (8, 3), "resnet": (32, 4), "vgg": (64, 8)}

Assignment = Mapping[str, Precision]
Row = dict[str, Any]  # the figures of one model and seed
Omega = Mapping[str, Mapping[str, float]]


@dataclass(frozen=True, slots=True)
class Scale:
    """Scale of the experiment: `warm_up` FP32 steps, `random_plans` for joint effects.

    Plans are judged on many `unseen` batches, because errors differ between batches by up to four decades.
    """

    warm_up: int = 40
    unseen: int = 32
    random_plans: int = 3


SCALE = Scale()


def main(
    out: Out = Path("indicators"),
    models: Models = None,
    seeds: int = 5,
    processes: int = 1,
    publish: Publish = False,
    fresh: Fresh = False,
) -> None:
    """Judge every indicator, print a table, and write the figures."""
    subjects = [(name, seed) for seed in range(seeds) for name in models or NAMES]
    experiment = Experiment("indicators", out, settings={"scale": asdict(SCALE)}, fresh=fresh)
    with experiment.progress():
        truths = {f"{name} {seed} sensitivities": (name, seed) for name, seed in subjects}
        found = dict(experiment.pieces(truths, _sensitivities, processes))
        plans = {
            f"{name} {seed} plans": (name, seed, found[f"{name} {seed} sensitivities"]["omega"])
            for name, seed in subjects
        }
        found |= experiment.pieces(plans, _plans, processes)
    rows: list[Row] = [{"model": name, "seed": seed} for name, seed in subjects]
    for row in rows:
        for part in ("sensitivities", "plans"):
            row |= found[f"{row['model']} {row['seed']} {part}"]
    content: dict[str, Any] = {
        "threads": 1, "seeds": list(range(seeds)), "rates": RATES, "summary": summary(rows), "rows": rows,
    }  # fmt: skip
    experiment.finish(
        content, measured="gradient errors; step times are simulated, from FLOPs and rates",
        tables=[table(content["summary"])], page=_PAGE if publish else None,
    )  # fmt: skip


def _workload(name: str) -> Workload:
    """Return the model of one piece, in the current process."""
    torch.set_num_threads(1)
    torch._dynamo.reset()
    return subject(name, BATCHES[name][0])


def _sensitivities(task: tuple[str, int]) -> Row:
    name, seed = task
    return sensitivities(_workload(name), seed, SCALE, BATCHES[name][1])


def _plans(task: tuple[str, int, dict[str, Omega]]) -> Row:
    name, seed, omega = task
    return judge_plans(_workload(name), seed, SCALE, omega)


def warmed_up(workload: Workload, seed: int, scale: Scale) -> torch.nn.Module:
    """Return the model after its FP32 steps."""
    model = workload.make_model(seed)
    train(model, workload, seed, range(scale.warm_up))
    return model


def sensitivities(workload: Workload, seed: int, scale: Scale, num_batches: int) -> Row:
    """Return every indicator's sensitivities, their correlation with the truth, and joint effects."""
    model = warmed_up(workload, seed, scale)
    seen = [workload.batch(seed, step, 1) for step in range(num_batches)]
    found: dict[str, Sensitivity] = {
        name: sensitivity_by(name, model, seen, workload.loss, precisions=PRECISIONS, seed=seed)
        for name in INDICATORS
    }
    truth = found["empirical"]
    with calibrating(model, seen, workload.loss, precisions=PRECISIONS, seed=seed) as calibration:
        calibration.forward(0)
        graph = calibration.runner.graph
        drawn = [_drawn_plan(graph, f"{seed}.{number}") for number in range(scale.random_plans)]
        joint = gradient_errors(calibration, drawn)
    return {
        "omega": {name: sensitivity.omega for name, sensitivity in found.items()},
        "spearman": {
            name: {str(p): correlation(sensitivity, truth, p) for p in PRECISIONS}
            for name, sensitivity in found.items() if name != "empirical"
        },
        "joint": [
            {"joint": error, "sum": sum(truth[op, p] for op, p in plan.items())}
            for error, plan in zip(joint, drawn, strict=True)
        ],
    }  # fmt: skip


def judge_plans(workload: Workload, seed: int, scale: Scale, omega: Mapping[str, Omega]) -> Row:
    """Return the gradient error of each indicator's plans.

    Errors are measured on batches that no indicator saw, relative to their mean |g|^2.
    """
    model = warmed_up(workload, seed, scale)
    unseen = [workload.batch(seed, step, 2) for step in range(scale.unseen)]
    with calibrating(model, unseen, workload.loss, precisions=PRECISIONS, seed=seed) as calibration:
        calibration.assign({})
        gradients = (calibration.gradient(batch) for batch in range(scale.unseen))
        squares = [sum(float(part.square().sum()) for part in gradient) for gradient in gradients]
        graph = calibration.runner.graph
        plans: dict[tuple[str, float], Assignment] = {
            (name, saving): plan_at(graph, Sensitivity(graph.hash, name, found), saving)
            for name, found in omega.items()
            for saving in BUDGETS
        }
        # Indicators with equal plans share a measurement.
        keys = {key: tuple(sorted(plan.items())) for key, plan in plans.items()}
        different = {keys[key]: plan for key, plan in plans.items()}
        found = errors_by_batch(calibration, list(different.values()))
        errors = dict(zip(different, found, strict=True))
    norm = statistics.fmean(squares)
    relative = {key: [error / norm for error in errors[plan]] for key, plan in keys.items()}
    by_plan = {name: {str(part): relative[name, part] for part in BUDGETS} for name in omega}
    return {"squared_gradient": squares, "plan_error": by_plan}


def correlation(found: Sensitivity, truth: Sensitivity, precision: Precision) -> float:
    """Return Spearman's rank correlation over the operators with this precision."""
    ops = [op for op, modes in truth.omega.items() if precision in modes]
    scores = [found.omega[op][precision] for op in ops]
    if len(set(scores)) == 1:
        return 0.0
    return float(spearmanr(scores, [truth.omega[op][precision] for op in ops])[0])


def plan_at(graph: OpGraph, sensitivity: Sensitivity, saving: float) -> dict[str, Precision]:
    """Return the assignment of least added variance that saves a fraction of the possible time.

    minimise sum omega[o, p] x[o, p]  such that  sum time[o, p] x[o, p] <= T,  one p per operator; exact.
    """
    choices = [(op.name, p, op.flops / rate(op.kind, p)) for op in graph.adjustable for p in _able(op.kind)]
    omega = np.array([sensitivity[name, p] for name, p, _ in choices])
    times = np.array([time for _, _, time in choices])
    one_each = np.array([[float(name == op.name) for name, _, _ in choices] for op in graph.adjustable])
    slowest = sum(op.flops for op in graph.adjustable)
    fastest = np.where(one_each > 0, times, np.inf).min(axis=1).sum()
    target = slowest - saving * (slowest - fastest)
    constraints = [
        LinearConstraint(one_each, 1, 1), LinearConstraint(times / slowest, -np.inf, target / slowest)
    ]  # fmt: skip
    # The solver stops within 1e-6 of the largest coefficient, and sensitivities span ten decades: solve again
    # without entries above the found plan's, until nothing improves.
    best, least = None, max(float(omega.max()), 1e-300)
    while True:
        solved = milp(
            np.minimum(omega / least, 1.0), integrality=np.ones(len(choices)),
            bounds=Bounds(0, (omega <= least).astype(float)), constraints=constraints,
            options={"mip_rel_gap": 1e-6},
        )  # fmt: skip
        taken = None if solved.x is None else solved.x > 0.5
        if taken is None or (best is not None and omega[taken].sum() >= least):
            break
        best, least = taken, max(float(omega[taken].sum()), 1e-300)
    assert best is not None  # all FP32 saves nothing, but a plan that saves the share exists
    return {name: p for (name, p, _), chosen in zip(choices, best, strict=True) if chosen}


def rate(kind: str, precision: Precision) -> float:
    """Return a precision's speed relative to FP32."""
    return 1.0 if precision is Precision.FP32 else RATES.get(kind, RATES["other"])[precision]


def _drawn_plan(graph: OpGraph, seed: str) -> dict[str, Precision]:
    draw = random.Random(seed)
    return {op.name: draw.choice(_able(op.kind)) for op in graph.adjustable}


def _able(kind: str) -> list[Precision]:
    return [p for p in (Precision.FP32, *PRECISIONS) if p in PRECISIONS_BY_KIND[kind]]


if __name__ == "__main__":
    run_command(main)
