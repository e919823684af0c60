"""Every kernel against its bar and its peers.

    python -m qsync.experiments.kernels.compare_kernels --out FOLDER

Measured on one thread, paired: each round runs every variant once in rotating order, and a ratio is the
median of the rounds' own ratios. Users get what is measured: `backend.select(device).kernel` and `.cast`, and
models in `qsync.wrap`. Peers are torch eager, torch.autocast, torch.compile (Inductor) and torchao. Beside
each bar stands the bound by the roofline of this machine, measured in the same run.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Annotated, Any

import torch
import typer
from rich.table import Table

from qsync import QSyncError
from qsync.experiments.harness import (
    Beside,
    Experiment,
    Fresh,
    Out,
    Page,
    Publish,
    bar,
    grouped,
    milliseconds,
    peers,
    run_command,
    show,
    table_of,
)
from qsync.experiments.harness.freed_memory import keep_freed_memory
from qsync.experiments.harness.pairing import Samples, measure, quartiles, ratios
from qsync.experiments.kernels import cases as kernel_cases
from qsync.experiments.kernels import host_overhead, whole_steps
from qsync.experiments.kernels.cases import BF16_OUT, WITH_WEIGHT, Bar, Bench, Case, Layer
from qsync.experiments.kernels.kernel_picture import draw
from qsync.experiments.kernels.roofline import Peaks, measure_peaks
from qsync.experiments.kernels.whole_steps import CONTIGUOUS

ROUNDS, STEP_ROUNDS = 15, 7
QUICK_ROUNDS = 3
INT8_BF16 = "int8" + BF16_OUT
# The sections, with their bars.
BARS: dict[str, tuple[Bar, ...]] = {
    "quantize": (Bar("int8", "clone", 2.0, at_most=True),),  # of linear layers' inputs
    "linear forward": (Bar("int8", "fp32", 3.3), Bar("int8" + WITH_WEIGHT, "fp32", 3.3)),
    "linear training": (
        Bar("bf16", "fp32", 2.0), Bar("bf16", "autocast", 1.0), Bar("int8", "fp32", 2.25),
        Bar(INT8_BF16, "autocast", 1.1), Bar("int8_all", "fp32", 3.0),
    ),
    "conv forward": (Bar("int8", "fp32", 2.3), Bar("int8" + WITH_WEIGHT, "fp32", 2.3)),
    "conv training": (Bar("bf16", "fp32", 2.0),),
    "attention forward": (Bar("bf16", "autocast", 0.99),),
    "attention training": (Bar("bf16", "autocast", 0.99),),
    "bert": (Bar("bf16", "fp32", 2.0), Bar("int8", "fp32", 2.2), Bar("int8_all", "fp32", 2.5)),
    # FP32 eager is judged in both orders of elements: as models come, and in the faster one.
    "resnet": tuple(
        Bar(precision + order, "fp32" + order, 1.8)
        for order in (CONTIGUOUS, "") for precision in ("bf16", "int8")
    ),
    "host": host_overhead.BARS,
}  # fmt: skip
_PAGE = Page(Path("docs/results/kernels.md"), Path("docs/figures/kernels.png"), "One thread.")
SECTIONS, STEPS = tuple(BARS), ("bert", "resnet")
_LAYERS: dict[str, tuple[Callable[[Bench, tuple[int, ...]], Layer], tuple[tuple[int, ...], ...]]] = {
    "linear": (kernel_cases.linear, kernel_cases.LINEAR_SHAPES),
    "conv": (kernel_cases.conv2d, kernel_cases.CONV_SHAPES),
    "attention": (kernel_cases.attention, kernel_cases.ATTENTION_SHAPES),
}
SMALL_LINEAR, SMALL_LINEAR_LIMIT = (512, 768, 768), 2.5  # of INT8's forward pass

TERMS = (
    "linear shapes: rows x inputs x outputs; convolutions: batch x channels x height x width, kernel; "
    "attention without a mask: batch x heads x length x width of a head",
    "one thread; paired rounds; ratios are medians of the rounds' own ratios; short calls are repeated for "
    "20 ms in their turn: caches are warm",
    "a layer's operands and their gradients are FP32 outside; every cast of activation and gradient counts",
    "linear and conv training: forward and backward of one step, the weight's cast included (once per step)",
    "forward: recorded for backward (attention: not); the weight's cast is included only where the variant "
    "says '+ weight': a bar is judged without it, and again with it",
    "against FP32 an INT8 layer hands on FP32; against torch.autocast, which hands on BF16, it hands on BF16",
    "bert, resnet: forward, loss, backward and AdamW; dropout as configured; a fixed random batch",
    "host: forward and backward of operators so small that a step is Python's and autograd's",
    "roofline: products at the measured peak of their type, bytes of perfectly fused kernels at the measured "
    "copy rate; of whole steps Amdahl's bound: products at their peak, the rest as in FP32 eager",
)


def main(
    out: Out = Path("kernels"),
    only: Annotated[
        list[str] | None, typer.Option(help=f"A section: {', '.join(SECTIONS)}. Repeatable.")
    ] = None,
    rounds: Annotated[int | None, typer.Option(help="Rounds of every case.")] = None,
    quick: Annotated[
        bool, typer.Option(help=f"{QUICK_ROUNDS} rounds of one shape of each layer, no Inductor.")
    ] = False,
    device: Annotated[str, typer.Option(help="cpu, or cuda.")] = "cpu",
    seed: Annotated[int, typer.Option(help="Of operands, weights and batches.")] = 0,
    beside: Beside = False,
    publish: Publish = False,
    fresh: Fresh = False,
) -> None:
    """Measure every kernel and whole step against its bar and its peers."""
    for section in only or ():
        if section not in SECTIONS:
            raise QSyncError(f"there is no section {section!r}; choose among {', '.join(SECTIONS)}")
    torch.set_num_threads(1)
    torch._dynamo.config.recompile_limit = 64  # every variant of a model is one more entry for the same code
    settings = {
        "device": device, "rounds": rounds or (QUICK_ROUNDS if quick else None),
        "inductor": not quick,
        "keep_freed_memory": keep_freed_memory(),
    }  # fmt: skip
    experiment = Experiment("kernels", out, seed=seed, settings=settings, fresh=fresh)
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

    `cases` makes other cases (smaller, for tests).
    """
    settings, seed = experiment.settings, experiment.seed or 0
    device, rounds = torch.device(settings["device"]), settings["rounds"]
    torchao = experiment.piece("torchao", lambda: peers.what_torchao_runs(device))
    few = min(rounds or STEP_ROUNDS, STEP_ROUNDS)
    peaks = experiment.piece("peaks", lambda: measure_peaks(device, few).to_json())
    bench = Bench(device, Peaks.from_json(peaks), settings["inductor"], seed)
    measured: list[dict[str, Any]] = []
    rows: list[dict[str, Any]] = []
    for section in sections:
        wanted = rounds or (STEP_ROUNDS if section in STEPS else ROUNDS)
        for number, make in enumerate((cases or standard_cases)(bench, section)):
            found = experiment.piece(f"{section} {number}", partial(_measured, make, wanted, device))
            measured.append(found["case"])
            rows += found["rows"]
    figures = {
        "threads": torch.get_num_threads(), "rounds": rounds or {"layers": ROUNDS, "steps": STEP_ROUNDS},
        "peaks": peaks, "torchao": torchao, "terms": list(TERMS), "rows": rows, "cases": measured,
    }  # fmt: skip
    bars = [
        bar(f"{row['section']} {row['shape']}: {row['variant']} / {row['against']}",
            row["value"], row["bar"], at_least=not row["at_most"], **_broken(row)) for row in rows
    ]  # fmt: skip
    content = experiment.finish(figures, bars=bars, picture=draw, tables=tables(rows, measured), page=page)
    show(*remarks(content))
    return content


def _broken(row: Mapping[str, Any]) -> dict[str, Any]:
    """Return that the bar of a kernel that failed does not hold, with the reason; other bars as they are."""
    return {"holds": False, "why": row["why"]} if row.get("failed") else {}


def _measured(make: Callable[[], Case], rounds: int, device: torch.device) -> dict[str, Any]:
    """Return the times of one case, and its bars."""
    torch._dynamo.reset()
    case = make()
    samples = measure(case.runs, rounds, device)
    return {"case": case_json(case, samples), "rows": bar_rows(case, samples)}


def standard_cases(bench: Bench, section: str, *, shapes: int | None = None) -> Iterator[Callable[[], Case]]:
    """Yield the cases of a section, each to be made when its turn comes; of each layer so many shapes."""
    if section in STEPS:
        yield partial(_step_case, bench, section)
        return
    if section == "host":
        yield partial(host_overhead.host_case, bench)
        return
    kinds = ("linear", "conv") if section == "quantize" else (section.split()[0],)
    for kind in kinds:
        of_kind = _LAYERS[kind][1][:shapes]
        yield from (partial(layer_case, bench, section, kind, shape) for shape in of_kind)


def layer_case(bench: Bench, section: str, kind: str, shape: tuple[int, ...]) -> Case:
    """Make the case of one layer in a section, with its bars; `kind` is linear, conv or attention."""
    layer, bars = _LAYERS[kind][0](bench, shape), BARS[section]
    if section == "quantize":
        return kernel_cases.quantize_case(layer, section, bars if layer.kind == "linear" else ())
    if section.endswith("training"):
        return kernel_cases.training_case(layer, section, bars)
    if shape == SMALL_LINEAR:
        bars = tuple(replace(one, limit=SMALL_LINEAR_LIMIT) for one in bars)
    return kernel_cases.forward_case(layer, section, bars)


def _step_case(bench: Bench, section: str) -> Case:
    if section == "resnet":
        made, shape, precisions = whole_steps.resnet(bench), "ResNet-18, 32x64x64", ("bf16", "int8")
    else:
        on_gpu = ("fp8",) if bench.device.type == "cuda" else ()
        made, shape = whole_steps.bert(bench), "BERT 4x512, 8x128"
        precisions = ("bf16", "int8", "int8_all", *on_gpu)
    return whole_steps.step_case(bench, section, shape, made, precisions, BARS[section])


def bar_rows(case: Case, samples: Mapping[str, Samples]) -> list[dict[str, Any]]:
    """Return a row for each bar of a case: measured ratio, its quartiles, bound by the roofline."""
    rows = []
    for one in case.bars:
        row: dict[str, Any] = {
            "section": case.section, "shape": case.shape, "variant": one.variant, "against": one.against,
            "bar": one.limit, "at_most": one.at_most, "unit": "x", "roofline": None, "why": None,
            "value": None, "quartiles": None, "failed": one.variant in case.failed,
        }  # fmt: skip
        missing = [name for name in (one.variant, one.against) if name not in samples]
        if missing:
            reasons = case.unavailable | case.failed
            row["why"] = f"{missing[0]}: {reasons.get(missing[0], 'not measured')}"
        else:
            ours, theirs, least = samples[one.variant], samples[one.against], case.least_s.get(one.variant)
            found = ratios(ours, theirs) if one.at_most else ratios(theirs, ours)
            if least is not None:
                row["roofline"] = least / theirs.median_s if one.at_most else theirs.median_s / least
            row |= {"value": statistics.median(found), "quartiles": quartiles(found)}
        rows.append(row)
    return rows


def case_json(case: Case, samples: Mapping[str, Samples]) -> dict[str, Any]:
    """Return everything measured of a case: every variant's time, and its speed against the baseline."""
    variants = {}
    for name, found in samples.items():
        speedups = ratios(samples[case.baseline], found)
        variants[name] = {
            "median_s": found.median_s, "quartiles_s": quartiles(list(found.seconds)),
            "speedup": statistics.median(speedups), "speedup_quartiles": quartiles(speedups),
            "least_s": case.least_s.get(name), "calls": found.calls, "cpu_share": found.cpu_share,
        }  # fmt: skip
    return {
        "section": case.section, "shape": case.shape, "baseline": case.baseline, "variants": variants,
        "unavailable": case.unavailable, "failed": case.failed,
    }  # fmt: skip


def tables(rows: Sequence[Mapping[str, Any]], cases: Sequence[Mapping[str, Any]]) -> list[Table]:
    """Return the ratio behind every bar, and the speed of every variant by section."""
    cells = []
    for row in rows:
        low, middle, high = row["quartiles"] or [None] * 3
        numbers = ("-" if value is None else f"{value:.2f}" for value in (middle, low, high, row["roofline"]))
        cells.append([row["section"], row["shape"], f"{row['variant']} / {row['against']}", *numbers])
    headings = ("section", "shape", "variant / against", "measured", "quartiles", "", "roofline")
    ratios = table_of("Ratios of rounds (measured)", headings, cells, left=3)
    return [ratios, *(_speeds(section, own) for section, own in grouped(cases, "section").items())]


def remarks(content: Mapping[str, Any]) -> list[str]:
    """Say which peaks were measured, what could not be measured or failed, and what used several cores."""
    peaks, cases = content["peaks"], content["cases"]
    rates = ", ".join(f"{name} {rate / 1e9:.0f}" for name, rate in peaks["products"].items())
    copies = ", ".join(f"{rate / 1e9:.1f}" for rate in peaks["copy_bytes_per_s"].values())
    missing = {name: why for case in cases for name, why in case["unavailable"].items()}
    return [
        f"Peaks, measured: products, GFLOP/s: {rates}; copies, GB/s: {copies}.",
        f"torchao: {content['torchao']}.",
        *(f"Not measured: {name}: {why}" for name, why in missing.items()),
        *(
            f"Failed: {name}, {case['section']} {case['shape']}: {why}"
            for case in cases for name, why in case.get("failed", {}).items()
        ),
        *(
            f"More than one core: {name}, {case['section']} {case['shape']}"
            for case in cases for name, entry in case["variants"].items() if entry["cpu_share"] > 1.1
        ),
    ]  # fmt: skip


def _speeds(section: str, cases: Sequence[Mapping[str, Any]]) -> Table:
    """Return the speed of every variant against the baseline by shape, below the baseline's own time."""
    baseline = cases[0]["baseline"]
    rows = [[baseline, *(milliseconds(case["variants"][baseline]["median_s"]) for case in cases)]]
    for name in dict.fromkeys(name for case in cases for name in case["variants"] if name != baseline):
        found = [case["variants"].get(name) for case in cases]
        rows.append([name, *("-" if entry is None else f"{entry['speedup']:.2f}" for entry in found)])
    headings = ["variant", *(case["shape"] for case in cases)]
    return table_of(f"{section}: times as fast as {baseline}", headings, rows)


if __name__ == "__main__":
    run_command(main)
