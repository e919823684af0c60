"""Learned costs against the roofline: predictions of what was held out.

    python -m qsync.experiments.prediction.learned_costs --out FOLDER

Measures a few hundred single operators and five models on this machine, on one thread. Predicts shapes
without any sample of the shape, and models without any sample of the model. Profiles stay in the folder.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from rich.table import Table

from qsync import OpGraph, Precision, Profile, api, cost_learning
from qsync.experiments.harness import Experiment, Fresh, Out, Page, Publish, bar, run_command, table_of
from qsync.experiments.harness.freed_memory import keep_freed_memory
from qsync.experiments.workloads.subjects import NAMES, subject
from qsync.lowering.incremental import Lowering
from qsync.predictor.cost_model.fill_profile import priced_as
from qsync.predictor.cost_model.model import CostModel, Fit, asked, held_out_shapes, spread
from qsync.predictor.cost_model.op_calls import Call, Direction, least_s
from qsync.predictor.cost_model.samples import Sample, samples_of
from qsync.records.datasheets import DataSheet
from qsync.replayer import ClassCosts

_SAMPLES, _ROUNDS = 240, 3  # single operators, and the rounds of every profile
_PAGE = Page(Path("docs/results/prediction.md"), note="One thread.", marker="learned")
PRECISIONS = (Precision.FP32, Precision.BF16, Precision.INT8)
Measured = tuple[OpGraph, Profile]


class Roofline:
    """The least time at the device's peaks: launch + max(operations / peak, bytes / bandwidth)."""

    def __init__(self, samples: Sequence[Sample]) -> None:
        """Ignore the samples: peaks are the device's, there is nothing to fit."""

    def seconds(self, asked: Sequence[tuple[Call, str, Direction, DataSheet]]) -> Any:
        """Return the seconds (N,) of calls."""
        return np.array([least_s(*each) for each in asked])


METHODS: dict[str, Fit] = {"roofline": Roofline, "learned": CostModel}


def main(out: Out = Path("learned_costs"), publish: Publish = False, fresh: Fresh = False) -> None:
    """Measure, hold out, predict, compare."""
    torch.set_num_threads(1)
    keep_freed_memory()
    experiment = Experiment("learned costs", out, seed=0, settings={"samples": _SAMPLES}, fresh=fresh)
    with experiment.progress():
        sheet, measured = measure(experiment)
    content = evaluate({"sheet": sheet}, measured)
    bars = [bar(f"beats the roofline: {name}", beats, True) for name, beats in verdicts(content).items()]
    experiment.finish(content, bars=bars, tables=[_table(content)], page=_PAGE if publish else None)


def measure(experiment: Experiment) -> tuple[dict[str, Any], dict[str, Measured]]:
    """Profile single operators (cells) and every model; return the device's peaks beside.

    Every profile is a piece.
    """
    device = torch.device("cpu")
    sheet = experiment.piece("sheet", lambda: cost_learning.measure_sheet(device).to_json())
    chosen = cost_learning.choose_calls(_SAMPLES, DataSheet.from_json(sheet))
    size = cost_learning.NUM_PER_PROFILE
    jobs: dict[str, Callable[[], Measured]] = {
        f"cells-{i // size}": partial(
            cost_learning.profile_calls, chosen[i : i + size], device, PRECISIONS, _ROUNDS
        )
        for i in range(0, len(chosen), size)
    }
    jobs |= {name: partial(_profiled, name) for name in NAMES}
    found = {name: experiment.piece(name, partial(_as_json, job)) for name, job in jobs.items()}
    return sheet, {
        name: (OpGraph.from_json(graph), Profile.from_json(profile))
        for name, (graph, profile) in found.items()
    }


def _profiled(name: str) -> Measured:
    work = subject(name)
    model, batch = work.make_model(0), work.batch(0, 0, 0)
    graph = api.trace_step(model, batch, work.loss)
    return graph, api.profile(model, batch, work.loss, precisions=PRECISIONS, rounds=_ROUNDS)


def _as_json(job: Callable[[], Measured]) -> list[dict[str, Any]]:
    return [part.to_json() for part in job()]


def evaluate(about: dict[str, Any], measured: Mapping[str, Measured]) -> dict[str, Any]:
    """Return the errors of every method: of shapes and models held out."""
    sheet = DataSheet.from_json(about["sheet"])
    samples = {name: samples_of(*of, sheet) for name, of in measured.items()}
    every = [sample for found in samples.values() for sample in found]
    shapes = {method: _errors(every, held_out_shapes(every, fit)) for method, fit in METHODS.items()}
    held, steps = {}, {}
    for name in (name for name in samples if not name.startswith("cells")):
        others = [s for other, found in samples.items() if other != name for s in found]
        priced = {method: fit(others) for method, fit in METHODS.items()}
        calls = [asked(sample) for sample in samples[name]]
        held[name] = {of: _errors(samples[name], model.seconds(calls)) for of, model in priced.items()}
        steps[name] = {of: _steps(measured[name], model, sheet) for of, model in priced.items()}
    body = {"num_samples": len(every), "held_out_shapes": shapes, "held_out_models": held}
    return {**about, **body, "whole_steps": steps}


def _errors(samples: Sequence[Sample], predicted: Any) -> tuple[float, float]:
    """Return median and 95th percentile of |predicted / measured - 1|."""
    return spread(np.abs(predicted / np.array([s.seconds for s in samples]) - 1))


def _steps(found: Measured, model: Any, sheet: DataSheet) -> dict[str, float]:
    """Return the signed error of all operators and casts of a step in each uniform precision."""
    graph, profile = found
    guess = priced_as(graph, profile, model, sheet)
    return {str(p): total_s(graph, guess, p) / total_s(graph, profile, p) - 1 for p in PRECISIONS}


def total_s(graph: OpGraph, profile: Profile, precision: Precision) -> float:
    """Return the seconds of all operators and casts, with operators in one precision where possible."""
    chosen = {op.name: precision for op in graph.adjustable if precision in profile.precisions_of(op.name)}
    return ClassCosts(Lowering(graph, chosen), profile).total_s


def verdicts(content: Mapping[str, Any]) -> dict[str, bool]:
    """Return whether the learned model beats the roofline: at shapes, of models, of whole steps."""
    learned, roofline = (errors(content, method) for method in ("learned", "roofline"))
    return {
        f"{name}, {what}": bool(one < other)
        for name in learned
        for what, one, other in zip(
            ("median", "95th percentile"), learned[name], roofline[name], strict=True
        )
    }  # fmt: skip


def errors(content: Mapping[str, Any], method: str) -> dict[str, Sequence[float]]:
    """Return the errors of a method by which it is judged; those of models are means over models."""
    models = [entry[method] for entry in content["held_out_models"].values()]
    return {
        "shapes": content["held_out_shapes"][method],
        "models": tuple(map(float, np.mean(models, axis=0))),
        "whole steps": spread(whole_steps(content)[method]),
    }


def whole_steps(content: Mapping[str, Any]) -> dict[str, list[float]]:
    """Return |error| of every held-out model's step in every precision, by method."""
    return {
        method: [abs(e) for entry in content["whole_steps"].values() for e in entry[method].values()]
        for method in METHODS
    }


def _table(content: Mapping[str, Any]) -> Table:
    rows = [
        [f"model: {name}", *(_percent(entry[method]) for method in METHODS)]
        for name, entry in content["held_out_models"].items()
    ]
    found = [errors(content, method) for method in METHODS]
    rows += [[name, *(_percent(of[name]) for of in found)] for name in found[0]]
    title = "|predicted / measured - 1|, median / 95th percentile (measured)"
    return table_of(title, ("held out", *METHODS), rows)


def _percent(found: Sequence[float]) -> str:
    return f"{found[0]:.0%} / {found[1]:.0%}"


if __name__ == "__main__":
    run_command(main)
