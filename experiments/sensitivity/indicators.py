"""Every indicator against the truth: `python -m qsync.experiments.sensitivity.indicators --out FOLDER`.

For each model and seed: weights after some FP32 steps, the truth by single flips with the real kernels, and
from every indicator (1) its rank correlation with the truth, (2) the plan it leads to at equal step time, by
an exact solver, with that plan's gradient error measured on batches that no indicator saw, and (3) the
held-out loss after training on under that plan. Beside it: is the joint effect of random plans the sum of the
single effects?

Gradient errors and losses are measured; step times are simulated: FLOPs over the rates of `RATES`.

The truth takes hours, plans take minutes: `--sensitivities FOLDER` takes the sensitivities of an earlier run
there and measures only the gradient errors of the plans anew.
"""

from __future__ import annotations

import copy
import math
import random
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Annotated, Any

import numpy as np
import torch
import typer
from scipy.optimize import Bounds, LinearConstraint, milp
from scipy.stats import spearmanr

import qsync
from qsync import OpGraph, Precision, Sensitivity
from qsync.api import calibrating
from qsync.errors import MismatchError
from qsync.experiments.harness import Experiment, Fresh, Models, Out, run_command
from qsync.experiments.harness.provenance import commit
from qsync.experiments.sensitivity.indicator_report import picture, summary, table
from qsync.experiments.workloads.subjects import NAMES, subject
from qsync.experiments.workloads.workload import Workload, evaluate, train
from qsync.predictor.sensitivity.empirical import errors_by_batch, gradient_errors
from qsync.predictor.sensitivity.registry import INDICATORS
from qsync.records.json_files import read_json
from qsync.records.precision import PRECISIONS_BY_KIND
from qsync.runtime import program

PRECISIONS = (Precision.BF16, Precision.INT8)
# Times as fast as FP32, forward and backward together: the table of docs/results/kernels.md, rounded.
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
Row = dict[str, Any]  # the figures of one model and seed
Omega = Mapping[str, Mapping[str, float]]


@dataclass(frozen=True, slots=True)
class Scale:
    """How much is run: `warm_up` FP32 steps before, `steps` after, `random_plans` for joint effects.

    Plans are judged on `unseen` batches: errors differ between batches by up to four decades, so few say
    little.
    """

    seeds: int = 5
    warm_up: int = 40
    steps: int = 10
    unseen: int = 32
    random_plans: int = 3


def main(
    out: Out = Path("indicators"),
    models: Models = None,
    seeds: int = 5,
    processes: int = 1,
    sensitivities: Annotated[
        Path | None,
        typer.Option("--sensitivities", "--again", help="Folder of an earlier run: its sensitivities."),
    ] = None,
    fresh: Fresh = False,
) -> None:
    """Judge every indicator, print tables, write the figures; beside them a picture and a table."""
    scale = Scale(seeds=seeds)
    earlier = {} if sensitivities is None else read_json(sensitivities / "figures.json")
    tasks = {
        f"{name} {seed}": (name, seed, scale, _row_of(earlier, name, seed, sensitivities))
        for seed in range(scale.seeds)
        for name in models or NAMES
    }
    settings = {"scale": {key: value for key, value in asdict(scale).items() if key != "seeds"}}
    experiment = Experiment("indicators", out, settings=settings, fresh=fresh)
    with experiment.progress():
        found = dict(experiment.pieces(tasks, _task, processes))
    rows = [found[name] for name in tasks]
    content = {
        "threads": 1, "seeds": list(range(scale.seeds)), "rates": RATES, "summary": summary(rows),
        "sensitivities": earlier.get("commit", commit()),  # the commit that measured them
        "rows": rows,
    }  # fmt: skip
    experiment.finish(
        content, measured="gradient errors and losses; step times are simulated, from FLOPs and rates",
        tables=[table(content["summary"])],
        picture=lambda content, path: picture(content["rows"], path),
    )  # fmt: skip


def _row_of(earlier: Mapping[str, Any], name: str, seed: int, folder: Path | None) -> Row | None:
    """Return an earlier run's row; None if there is no earlier run."""
    for row in earlier.get("rows", ()):
        if (row["model"], row["seed"]) == (name, seed):
            return dict(row)
    if folder is None:
        return None
    raise MismatchError(
        f"{folder} has no sensitivities of {name}, seed {seed}; choose among its models and seeds, or "
        "measure them by leaving out --sensitivities"
    )


def _task(task: tuple[str, int, Scale, Row | None]) -> Row:
    name, seed, scale, earlier = task
    torch.set_num_threads(1)
    torch._dynamo.reset()
    size, num = BATCHES[name]
    workload = subject(name, size)
    return judge_again(workload, scale, earlier) if earlier else judge(workload, seed, scale, num)


def judge(workload: Workload, seed: int, scale: Scale, num_batches: int) -> Row:
    """Return all figures of one model and seed."""
    model = workload.make_model(seed)
    train(model, workload, seed, range(scale.warm_up))
    seen = [workload.batch(seed, step, 1) for step in range(num_batches)]
    loss_fn = workload.loss
    found: dict[str, Sensitivity] = {
        name: qsync.sensitivity(model, seen, loss_fn, indicator=name, precisions=PRECISIONS, seed=seed)
        for name in INDICATORS
    }
    truth = found["empirical"]
    omega = {name: sensitivity.omega for name, sensitivity in found.items()}
    judged, plans = judge_plans(model, workload, seed, scale, omega)
    with calibrating(model, seen, loss_fn, precisions=PRECISIONS, seed=seed) as calibration:
        calibration.forward(0)
        graph = calibration.runner.graph
        drawn = [_drawn_plan(graph, f"{seed}.{number}") for number in range(scale.random_plans)]
        joint = gradient_errors(calibration, drawn)
    return {
        "model": workload.name,
        "seed": seed,
        "omega": omega,
        "spearman": {
            name: {str(p): correlation(sensitivity, truth, p) for p in PRECISIONS}
            for name, sensitivity in found.items() if name != "empirical"
        },
        **judged,
        "joint": [
            {"joint": error, "sum": sum(truth[op, p] for op, p in plan.items())}
            for error, plan in zip(joint, drawn, strict=True)
        ],
        "heldout": heldout(model, workload, seed, scale, {name: plans[name, TRAINED_AT] for name in found}),
    }  # fmt: skip


def judge_again(workload: Workload, scale: Scale, earlier: Row) -> Row:
    """Measure the gradient errors of an earlier run's plans anew, on `scale.unseen` batches; return its row.

    The plans, and with them the losses of training under them, are those of its sensitivities. Raises
    MismatchError where these are of other weights: where |g|^2 of the first unseen batch is another.
    """
    model = workload.make_model(earlier["seed"])
    train(model, workload, earlier["seed"], range(scale.warm_up))
    judged, _ = judge_plans(model, workload, earlier["seed"], scale, earlier["omega"])
    before, now = (row["squared_gradient"][0] for row in (earlier, judged))
    if not math.isclose(before, now, rel_tol=1e-6):
        raise MismatchError(
            f"the earlier sensitivities of {workload.name}, seed {earlier['seed']}, are of other weights: "
            f"|g|^2 of one batch was {before:.6g} and is {now:.6g}; measure them anew by leaving out "
            "--sensitivities"
        )
    return {**earlier, **judged}


def judge_plans(
    model: torch.nn.Module, workload: Workload, seed: int, scale: Scale, omega: Mapping[str, Omega]
) -> tuple[Row, dict[tuple[str, float], Assignment]]:
    """Return the gradient error of each indicator's plan, and these plans by (indicator, saving).

    Measured on batches that no indicator saw. Relative to their mean |g|^2: the mean over them, its standard
    error, and every batch.
    """
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
        # Indicators that agree share a measurement.
        keys = {key: tuple(sorted(plan.items())) for key, plan in plans.items()}
        different = {keys[key]: plan for key, plan in plans.items()}
        found = errors_by_batch(calibration, list(different.values()))
        errors = dict(zip(different, found, strict=True))
    norm = statistics.fmean(squares)
    relative = {key: [error / norm for error in errors[plan]] for key, plan in keys.items()}
    by_plan = {name: {str(part): spread(relative[name, part]) for part in BUDGETS} for name in omega}
    return {"squared_gradient": squares, "plan_error": by_plan}, plans


def spread(values: Sequence[float]) -> dict[str, Any]:
    """Return the mean of these batches, its standard error, and the batches themselves."""
    error = statistics.stdev(values) / math.sqrt(len(values))
    return {"mean": statistics.fmean(values), "standard_error": error, "by_batch": list(values)}


def correlation(found: Sensitivity, truth: Sensitivity, precision: Precision) -> float:
    """Return Spearman's rank correlation over the operators that have this precision."""
    ops = [op for op, modes in truth.omega.items() if precision in modes]
    scores = [found.omega[op][precision] for op in ops]
    if len(set(scores)) == 1:
        return 0.0
    return float(spearmanr(scores, [truth.omega[op][precision] for op in ops])[0])


def plan_at(graph: OpGraph, sensitivity: Sensitivity, saving: float) -> dict[str, Precision]:
    """Return the assignment of least added variance that saves this share of the time that can be saved.

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
    # without what is dearer than the plan that was found, until that finds nothing better.
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
    assert best is not None  # all FP32 saves nothing, and a plan that saves the share exists
    return {name: p for (name, p, _), chosen in zip(choices, best, strict=True) if chosen}


def rate(kind: str, precision: Precision) -> float:
    """Return how many times as fast as FP32 a precision is."""
    return 1.0 if precision is Precision.FP32 else RATES.get(kind, RATES["other"])[precision]


def heldout(
    model: torch.nn.Module, workload: Workload, seed: int, scale: Scale, plans: Mapping[str, Assignment]
) -> dict[str, float]:
    """Return the held-out loss after more training in FP32 and under each plan, on the same batches."""
    steps = range(scale.warm_up, scale.warm_up + scale.steps)
    losses: dict[str, float] = {}
    done: dict[tuple[tuple[str, Precision], ...], float] = {}
    for name, plan in {"fp32": {}, **plans}.items():
        key = tuple(sorted((op, p) for op, p in plan.items() if p is not Precision.FP32))
        if key not in done:
            trained = copy.deepcopy(model)
            program.attach(trained, program.following(plan))
            train(trained, workload, seed, steps)
            program.detach(trained)
            done[key] = evaluate(trained, workload, num_batches=4)
        losses[name] = done[key]
    return losses


def _drawn_plan(graph: OpGraph, seed: str) -> dict[str, Precision]:
    draw = random.Random(seed)
    return {op.name: draw.choice(_able(op.kind)) for op in graph.adjustable}


def _able(kind: str) -> list[Precision]:
    return [p for p in (Precision.FP32, *PRECISIONS) if p in PRECISIONS_BY_KIND[kind]]


if __name__ == "__main__":
    run_command(main)
