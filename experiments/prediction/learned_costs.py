"""Learned costs against roofline and linear fits: `python -m qsync.experiments.prediction.learned_costs`.

Measures a few hundred single operators and five models on this machine, on one thread. Predicts shapes
without any sample of the shape, models without any sample of the model, and other batch sizes of a profiled
model. Writes learned_costs.json and learned_costs.png to --out; with --again it reads the measurements there
instead of making new ones.
"""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any

import numpy as np
import torch
import typer
from matplotlib.figure import Figure
from rich import box
from rich.console import Console
from rich.table import Table

from qsync import api, cost_learning
from qsync.backend.device_detection import machine
from qsync.errors import QSyncError
from qsync.experiments.harness.freed_memory import keep_freed_memory
from qsync.experiments.harness.provenance import commit
from qsync.experiments.prediction.cost_baselines import Linear, Roofline
from qsync.experiments.workloads.subjects import NAMES, subject
from qsync.lowering.incremental import Lowering
from qsync.predictor.cost_model.fill_profile import fill, priced_as
from qsync.predictor.cost_model.model import CostModel, Fit, asked, held_out_shapes, spread
from qsync.predictor.cost_model.samples import Sample, samples_of
from qsync.records.datasheets import DataSheet
from qsync.records.graph import OpGraph
from qsync.records.json_files import read_json, write_json
from qsync.records.precision import Precision
from qsync.records.profiles import Profile
from qsync.replayer import ClassCosts

OUT = Path("experiments/results/learned_costs")
PRECISIONS = (Precision.FP32, Precision.BF16, Precision.INT8)
METHODS: dict[str, Fit] = {"roofline": Roofline, "linear": Linear, "learned": CostModel}
# Another batch size of each model than the one that is profiled.
OTHER_BATCH = {"gpt": 3, "bert": 12, "vit": 40, "resnet": 20, "vgg": 12}
# Shorter operators are mostly Python and the clock: a second figure leaves them out.
LONG_S, LONG = 20e-6, "20 us or more"
Measured = tuple[OpGraph, Profile]


def main(
    out: Annotated[Path, typer.Option(help="Folder for measurements, table and picture.")] = OUT,
    num: Annotated[int, typer.Option("--samples", help="How many single operators to measure.")] = 240,
    rounds: Annotated[int, typer.Option(help="Rounds of every profile.")] = 3,
    again: Annotated[bool, typer.Option("--again", help="Read the measurements in --out.")] = False,
) -> None:
    """Measure, hold out, predict, compare."""
    if num < 1 or rounds < 1:
        raise QSyncError(f"--samples and --rounds must be at least 1, found {num} and {rounds}")
    torch.set_num_threads(1)
    keep_freed_memory()
    if not again:
        measure(out, num, rounds)
    content = evaluate(*read(out))
    write_json(out / "learned_costs.json", content)
    draw(content, out / "learned_costs.png")
    report(content, Console())
    print(f"Written: {out / 'learned_costs.json'}, {out / 'learned_costs.png'}")


def measure(out: Path, num: int, rounds: int) -> None:
    """Profile single operators (cells) and every model at two batch sizes, and save each profile."""
    start, device = time.perf_counter(), torch.device("cpu")
    sheet = cost_learning.measure_sheet(device)
    chosen = cost_learning.choose_calls(num, sheet)
    for i in range(0, len(chosen), cost_learning.NUM_PER_PROFILE):
        found = cost_learning.profile_calls(
            chosen[i : i + cost_learning.NUM_PER_PROFILE], device, PRECISIONS, rounds
        )
        _save(out, f"cells-{i // cost_learning.NUM_PER_PROFILE}", found)
    for name in NAMES:
        for size in (None, OTHER_BATCH[name]):
            _save(out, name if size is None else f"{name}-other", _profiled(name, size, rounds))
    about = {"machine": machine(), "commit": commit(), "samples": len(chosen), "rounds": rounds, "seed": 0}
    write_json(
        out / "about.json", {**about, "sheet": sheet.to_json(), "measuring_s": time.perf_counter() - start}
    )


def _profiled(name: str, size: int | None, rounds: int) -> Measured:
    work = subject(name, size)
    model, batch = work.make_model(0), work.batch(0, 0, 0)

    def loss(model: torch.nn.Module, batch: Any) -> torch.Tensor:
        return work.loss_fn(model(batch[0]), batch[1])

    graph = api.trace_step(model, batch, loss)
    return graph, api.profile(model, batch, loss, precisions=PRECISIONS, rounds=rounds)


def _save(out: Path, name: str, found: Measured) -> None:
    found[0].save(out / f"graph-{name}.json")
    found[1].save(out / f"profile-{name}.json")


def read(out: Path) -> tuple[dict[str, Any], dict[str, Measured]]:
    """Read what `measure` wrote. Raises QSyncError if there is nothing."""
    if not (out / "about.json").is_file():
        raise QSyncError(f"{out} holds no measurements; leave out --again")
    names = sorted(path.stem.removeprefix("graph-") for path in out.glob("graph-*.json"))
    found = {
        name: (OpGraph.load(out / f"graph-{name}.json"), Profile.load(out / f"profile-{name}.json"))
        for name in names
    }
    return read_json(out / "about.json"), found


def evaluate(about: dict[str, Any], measured: Mapping[str, Measured]) -> dict[str, Any]:
    """Return the errors of every method: at shapes held out, of models held out, of other batch sizes."""
    sheet = DataSheet.from_json(about["sheet"])
    samples = {name: samples_of(*found, sheet) for name, found in measured.items()}
    cells = [s for name, found in samples.items() if name.startswith("cells") for s in found]
    models = [name for name in measured if not name.startswith("cells") and not name.endswith("-other")]
    all_samples = cells + [s for name in models for s in samples[name]]
    shapes = {
        method: _by_kind(all_samples, held_out_shapes(all_samples, fit)) for method, fit in METHODS.items()
    }
    held, steps, batches = {}, {}, {}
    for name in models:
        others = cells + [s for other in models if other != name for s in samples[other]]
        priced = {method: fit(others) for method, fit in METHODS.items()}
        held[name] = {
            method: _by_kind(samples[name], model.seconds([asked(s) for s in samples[name]]))
            for method, model in priced.items()
        }
        steps[name] = {method: _steps(measured[name], model, sheet) for method, model in priced.items()}
        if f"{name}-other" in measured:
            batches[name] = _batches(measured[name], measured[f"{name}-other"], CostModel(all_samples), sheet)
    body = {"num_samples": len(all_samples), "held_out_shapes": shapes, "held_out_models": held}
    return {**about, **body, "whole_steps": steps, "other_batches": batches, "measured": True}


def _by_kind(samples: Sequence[Sample], predicted: Any) -> dict[str, tuple[float, float]]:
    """Return median and 95th percentile of |predicted / measured - 1|, by kind of operator and of all."""
    errors = np.abs(predicted / np.array([s.seconds for s in samples]) - 1)
    kinds = {
        kind: [e for s, e in zip(samples, errors, strict=True) if s.call.kind == kind]
        for kind in dict.fromkeys(s.call.kind for s in samples)
    }
    long = [error for sample, error in zip(samples, errors, strict=True) if sample.seconds >= LONG_S]
    by_kind = {kind: spread(found) for kind, found in sorted(kinds.items())}
    return {**by_kind, "all": spread(errors), LONG: spread(long)}


def _steps(found: Measured, model: Any, sheet: DataSheet) -> dict[str, float]:
    """Return the signed error of all operators and casts of a step in each uniform precision."""
    graph, profile = found
    guess = priced_as(graph, profile, model, sheet)
    return {str(p): total_s(graph, guess, p) / total_s(graph, profile, p) - 1 for p in PRECISIONS}


def _batches(known: Measured, other: Measured, model: CostModel, sheet: DataSheet) -> dict[str, Any]:
    """Return the signed error of a step at another batch size: filled in, and scaled by the batch."""
    (graph, profile), (larger, truth) = known, other
    guess = fill(profile, larger, model, measured_on=graph, sheet=sheet)
    grown = _batch(larger) / _batch(graph)
    actual = {p: total_s(larger, truth, p) for p in PRECISIONS}
    return {
        "learned": {str(p): total_s(larger, guess, p) / actual[p] - 1 for p in PRECISIONS},
        "scaled by batch": {str(p): grown * total_s(graph, profile, p) / actual[p] - 1 for p in PRECISIONS},
    }


def _batch(graph: OpGraph) -> int:
    return next(value.shape[0] for value in graph.inputs if value.kind == "batch" and value.shape)


def total_s(graph: OpGraph, profile: Profile, precision: Precision) -> float:
    """Return the seconds of all operators and casts, with every operator that can in one precision."""
    chosen = {op.name: precision for op in graph.adjustable if precision in profile.precisions_of(op.name)}
    return ClassCosts(Lowering(graph, chosen), profile).total_s


def verdicts(content: Mapping[str, Any]) -> dict[str, bool]:
    """Return whether the learned model beats both baselines: at shapes, of models, of whole steps."""

    def best(errors: Mapping[str, float]) -> bool:
        return all(errors["learned"] < errors[method] for method in ("roofline", "linear"))

    shapes = {method: content["held_out_shapes"][method]["all"] for method in METHODS}
    models = {
        method: [entry[method]["all"] for entry in content["held_out_models"].values()] for method in METHODS
    }
    steps = whole_steps(content)
    return {
        "shapes, median": best({method: found[0] for method, found in shapes.items()}),
        "shapes, 95th percentile": best({method: found[1] for method, found in shapes.items()}),
        "shapes, 95th percentile, 20 us or more": best(
            {method: content["held_out_shapes"][method][LONG][1] for method in METHODS}
        ),
        "models, median": best(
            {method: float(np.mean([m for m, _ in found])) for method, found in models.items()}
        ),
        "models, 95th percentile": best(
            {method: float(np.mean([m for _, m in found])) for method, found in models.items()}
        ),
        "models, 95th percentile, 20 us or more": best(
            {
                method: float(
                    np.mean([entry[method][LONG][1] for entry in content["held_out_models"].values()])
                )
                for method in METHODS
            }
        ),
        "whole steps, median": best({method: spread(found)[0] for method, found in steps.items()}),
        "whole steps, 95th percentile": best({method: spread(found)[1] for method, found in steps.items()}),
    }


def whole_steps(content: Mapping[str, Any]) -> dict[str, list[float]]:
    """Return |error| of every held-out model's step in every precision, by method."""
    return {
        method: [abs(e) for entry in content["whole_steps"].values() for e in entry[method].values()]
        for method in METHODS
    }


def report(content: Mapping[str, Any], console: Console) -> None:
    """Print the tables and the verdicts."""
    if not console.is_terminal:
        console.width = 120
    table = Table(title="|predicted / measured - 1|, median / 95th percentile (measured)", box=box.SIMPLE)
    for heading in ("held out", *METHODS):
        table.add_column(heading, justify="left" if heading == "held out" else "right")
    shapes = content["held_out_shapes"]
    for kind in shapes["learned"]:
        table.add_row(f"shapes: {kind}", *(_percent(shapes[method][kind]) for method in METHODS))
    for name, entry in content["held_out_models"].items():
        table.add_row(f"model: {name}", *(_percent(entry[method]["all"]) for method in METHODS))
        table.add_row(f"model: {name}, {LONG}", *(_percent(entry[method][LONG]) for method in METHODS))
    for name, entry in content["whole_steps"].items():
        signed = {method: ", ".join(f"{p} {e:+.0%}" for p, e in entry[method].items()) for method in METHODS}
        table.add_row(f"step: {name}", *(signed[method] for method in METHODS))
    table.add_row("steps", *(_percent(spread(found)) for found in whole_steps(content).values()))
    console.print(table)
    for name, entry in content["other_batches"].items():
        words = [
            f"{method}: " + ", ".join(f"{p} {e:+.0%}" for p, e in e_by.items())
            for method, e_by in entry.items()
        ]
        console.print(f"another batch of {name}: " + "; ".join(words), highlight=False)
    for name, holds in verdicts(content).items():
        console.print(f"{'beats both baselines' if holds else 'DOES NOT beat both'}: {name}", highlight=False)


def _percent(found: tuple[float, float]) -> str:
    return f"{found[0]:.0%} / {found[1]:.0%}"


def draw(content: Mapping[str, Any], path: Path) -> None:
    """Draw errors by kind at held-out shapes, and signed errors of held-out models' steps."""
    figure = Figure(figsize=(11, 8.5), layout="constrained")
    top, bottom = figure.subplots(2)
    colors = {"roofline": "0.75", "linear": "tab:orange", "learned": "tab:blue"}
    shapes = content["held_out_shapes"]
    kinds = [kind for kind in shapes["learned"] if kind not in ("output", "input")]
    for w, method in enumerate(METHODS):
        positions = np.arange(len(kinds)) + 0.27 * (w - 1)
        medians, most = (np.array([shapes[method][kind][i] for kind in kinds]) for i in (0, 1))
        top.bar(positions, medians, 0.25, color=colors[method], label=method)
        top.vlines(positions, medians, most, color=colors[method], linewidth=1)
    top.set_xticks(range(len(kinds)), kinds, rotation=40, ha="right")
    top.set_yscale("log")
    top.set_ylim(0.02, 10)
    top.set_ylabel("|predicted / measured - 1|")
    top.set_title("Operators at shapes held out: median, line to the 95th percentile (measured)", loc="left")
    top.legend(frameon=False, ncols=3)
    cells = [(name, p) for name, entry in content["whole_steps"].items() for p in entry["learned"]]
    for w, method in enumerate(METHODS):
        errors = [100 * content["whole_steps"][name][method][p] for name, p in cells]
        bottom.bar(np.arange(len(cells)) + 0.27 * (w - 1), errors, 0.25, color=colors[method], label=method)
    bottom.axhline(0, color="black", linewidth=0.6)
    bottom.set_xticks(range(len(cells)), [f"{name}\n{p}" for name, p in cells])
    bottom.set_ylabel("predicted against measured, %")
    bottom.set_title("All operators and casts of a step, models held out (measured)", loc="left")
    for axes in (top, bottom):
        axes.spines[["top", "right"]].set_visible(False)
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=110)


if __name__ == "__main__":
    typer.run(main)
