"""Every kernel against its bar and its peers.

    python -m qsync.experiments.kernels.compare_kernels --out FOLDER

Measured on one thread, paired: each round runs every variant once in rotating order, and a ratio is the
median over rounds. It measures the user's path: `backend.select(device).kernel` and `.cast`. Peers are torch
eager, torch.autocast and torch.compile (Inductor). qsync.experiments.unseen measures whole steps.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Annotated, Any

import torch
import typer
from rich.table import Table

from qsync import QSyncError
from qsync.experiments.harness import Experiment, Page, bar, milliseconds, run_command, show, table_of
from qsync.experiments.harness.freed_memory import keep_freed_memory
from qsync.experiments.harness.options import Beside, Fresh, Out, Publish
from qsync.experiments.harness.pairing import Samples, measure, quartiles, ratios
from qsync.experiments.kernels import cases as kernel_cases
from qsync.experiments.kernels import host_overhead
from qsync.experiments.kernels.cases import BF16_OUT, Bar, Bench, Case, Layer

ROUNDS = 15
QUICK_ROUNDS = 3
INT8_BF16 = "int8" + BF16_OUT
# The sections, with their bars.
BARS: dict[str, tuple[Bar, ...]] = {
    "quantize": (Bar("int8", "clone", 2.0, at_most=True),),  # for linear layers' inputs
    "linear training": (
        Bar("bf16", "fp32", 2.0), Bar("bf16", "autocast", 1.0), Bar("int8", "fp32", 2.25),
        Bar(INT8_BF16, "autocast", 1.1), Bar("int8_all", "fp32", 3.0),
    ),
    "conv training": (Bar("bf16", "fp32", 2.0),),
    "attention training": (Bar("bf16", "autocast", 0.99),),
    "host": host_overhead.BARS,
}  # fmt: skip
_PAGE = Page(Path("docs/results/kernels.md"), note="One thread.")
SECTIONS = tuple(BARS)
_SHOWN = ("bf16", "int8", "int8_all", "fp16", "tf32", "fp8", "autocast", "inductor bf16")
_LAYERS: dict[str, tuple[Callable[[Bench, tuple[int, ...]], Layer], tuple[tuple[int, ...], ...]]] = {
    "linear": (kernel_cases.linear, kernel_cases.LINEAR_SHAPES),
    "conv": (kernel_cases.conv2d, kernel_cases.CONV_SHAPES),
    "attention": (kernel_cases.attention, kernel_cases.ATTENTION_SHAPES),
}


def main(
    out: Out = Path("kernels"),
    only: Annotated[
        list[str] | None, typer.Option(help=f"A section: {', '.join(SECTIONS)}. Repeatable.")
    ] = None,
    quick: Annotated[
        bool, typer.Option(help=f"{QUICK_ROUNDS} rounds of one shape of each layer, no Inductor.")
    ] = False,
    device: Annotated[str, typer.Option(help="cpu, or cuda.")] = "cpu",
    beside: Beside = False,
    publish: Publish = False,
    fresh: Fresh = False,
) -> None:
    """Measure every kernel against its bar and its peers."""
    for section in only or ():
        if section not in SECTIONS:
            raise QSyncError(f"unknown section {section!r}; choose among {', '.join(SECTIONS)}")
    torch.set_num_threads(1)
    settings = {
        "device": device, "rounds": QUICK_ROUNDS if quick else ROUNDS, "inductor": not quick,
        "keep_freed_memory": keep_freed_memory(),
    }  # fmt: skip
    experiment = Experiment("kernels", out, seed=0, settings=settings, fresh=fresh)
    page = _PAGE.beside() if beside else _PAGE
    with experiment.progress():
        cases = partial(standard_cases, shapes=1) if quick else standard_cases
        run(experiment, only or SECTIONS, cases=cases, page=page if publish else None)


def run(
    experiment: Experiment,
    sections: Sequence[str],
    *,
    cases: Callable[[Bench, str], Iterator[Callable[[], Case]]] | None = None,
    page: Page | None = None,
) -> dict[str, Any]:
    """Measure the sections, case by case; return the content of figures.json.

    `cases` supplies other cases (smaller ones, for tests).
    """
    settings, seed = experiment.settings, experiment.seed or 0
    device, rounds = torch.device(settings["device"]), settings["rounds"]
    bench = Bench(device, settings["inductor"], seed)
    measured: list[dict[str, Any]] = []
    rows: list[dict[str, Any]] = []
    for section in sections:
        for number, make in enumerate((cases or standard_cases)(bench, section)):
            found = experiment.piece(f"{section} {number}", partial(_measured, make, rounds, device))
            measured.append(found["case"])
            rows += found["rows"]
    figures = {"threads": torch.get_num_threads(), "rows": rows, "cases": measured}
    bars = [
        bar(f"{row['section']} {row['shape']}: {row['variant']} / {row['against']}",
            row["value"], row["bar"], at_least=not row["at_most"], **_broken(row)) for row in rows
    ]  # fmt: skip
    content = experiment.finish(figures, bars=bars, tables=[table(measured)], page=page)
    show(*remarks(content))
    return content


def _broken(row: Mapping[str, Any]) -> dict[str, Any]:
    """Mark the bar of a failed kernel as failed, with the reason; leave other bars."""
    return {"holds": False, "why": row["why"]} if row.get("failed") else {}


def _measured(make: Callable[[], Case], rounds: int, device: torch.device) -> dict[str, Any]:
    """Return the times of one case, and its bars."""
    torch._dynamo.reset()
    case = make()
    samples = measure(case.runs, rounds, device)
    return {"case": case_json(case, samples), "rows": bar_rows(case, samples)}


def standard_cases(bench: Bench, section: str, *, shapes: int | None = None) -> Iterator[Callable[[], Case]]:
    """Yield a section's cases, created on demand, with a number of shapes per layer."""
    if section == "host":
        yield partial(host_overhead.host_case, bench)
        return
    kinds = ("linear", "conv") if section == "quantize" else (section.split()[0],)
    for kind in kinds:
        of_kind = _LAYERS[kind][1][:shapes]
        yield from (partial(layer_case, bench, section, kind, shape) for shape in of_kind)


def layer_case(bench: Bench, section: str, kind: str, shape: tuple[int, ...]) -> Case:
    """Create one layer's case in a section, with its bars; `kind` is linear, conv or attention."""
    layer, bars = _LAYERS[kind][0](bench, shape), BARS[section]
    if section == "quantize":
        return kernel_cases.quantize_case(layer, section, bars if layer.kind == "linear" else ())
    return kernel_cases.training_case(layer, section, bars)


def bar_rows(case: Case, samples: Mapping[str, Samples]) -> list[dict[str, Any]]:
    """Return a row per bar of a case: measured ratio and quartiles."""
    rows = []
    for one in case.bars:
        row: dict[str, Any] = {
            "section": case.section, "shape": case.shape, "variant": one.variant, "against": one.against,
            "bar": one.limit, "at_most": one.at_most, "why": None,
            "value": None, "quartiles": None, "failed": one.variant in case.failed,
        }  # fmt: skip
        missing = [name for name in (one.variant, one.against) if name not in samples]
        if missing:
            reasons = case.unavailable | case.failed
            row["why"] = f"{missing[0]}: {reasons.get(missing[0], 'not measured')}"
        else:
            ours, theirs = samples[one.variant], samples[one.against]
            found = ratios(ours, theirs) if one.at_most else ratios(theirs, ours)
            row |= {"value": statistics.median(found), "quartiles": quartiles(found)}
        rows.append(row)
    return rows


def case_json(case: Case, samples: Mapping[str, Samples]) -> dict[str, Any]:
    """Return all measurements of a case: every variant's time, and speed against the baseline."""
    variants = {}
    for name, found in samples.items():
        speedups = ratios(samples[case.baseline], found)
        variants[name] = {
            "median_s": found.median_s, "quartiles_s": quartiles(list(found.seconds)),
            "speedup": statistics.median(speedups), "speedup_quartiles": quartiles(speedups),
            "calls": found.calls,
        }  # fmt: skip
    return {
        "section": case.section, "shape": case.shape, "baseline": case.baseline, "variants": variants,
        "unavailable": case.unavailable, "failed": case.failed,
    }  # fmt: skip


def table(cases: Sequence[Mapping[str, Any]]) -> Table:
    """Return a table of speeds against FP32 in training, a row per case."""
    trained = [case for case in cases if case["section"].endswith("training")]
    measured = {name for case in trained for name in case["variants"]}
    variants, rows = [name for name in _SHOWN if name in measured], []
    for case in trained:
        own, baseline = case["variants"], case["baseline"]
        speeds = (f"{own[name]['speedup']:.2f}" if name in own else "-" for name in variants)
        first = f"{baseline}, {milliseconds(own[baseline]['median_s'])}"
        rows.append([case["section"], case["shape"], first, *speeds])
    return table_of("Times as fast, forward and backward (measured)", ("", "", "as", *variants), rows, left=3)


def remarks(content: Mapping[str, Any]) -> list[str]:
    """List what was not measured or failed."""
    cases = content["cases"]
    missing = {name: why for case in cases for name, why in case["unavailable"].items()}
    return [
        *(f"Not measured: {name}: {why}" for name, why in missing.items()),
        *(
            f"Failed: {name}, {case['section']} {case['shape']}: {why}"
            for case in cases for name, why in case.get("failed", {}).items()
        ),
    ]  # fmt: skip


if __name__ == "__main__":
    run_command(main)
