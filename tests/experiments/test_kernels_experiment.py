"""compare_kernels.py on tiny shapes: its figures are complete, its ratios paired, its verdicts right."""

from __future__ import annotations

import pytest
import torch

from qsync.errors import QSyncError, UnsupportedError
from qsync.experiments.harness.experiment import Experiment
from qsync.experiments.harness.pairing import Samples, measure, quartiles, ratios
from qsync.experiments.kernels import cases, compare_kernels, host_overhead
from qsync.experiments.kernels.cases import Bar, Bench, Case
from qsync.operators.precision import Precision
from qsync.records.json_files import read_json

CPU = torch.device("cpu")
LINEAR, CONV, ATTENTION = (32, 48, 64), (2, 16, 8, 3), (2, 3, 16, 8)
ROW_FIELDS = {
    "section", "shape", "variant", "against", "bar", "at_most", "why", "value",
    "quartiles", "failed",
}  # fmt: skip


@pytest.fixture
def bench() -> Bench:
    return Bench(CPU, inductor=False)


def samples(*seconds: float) -> Samples:
    return Samples(seconds, 1)


def tiny_cases(bench: Bench, section: str):
    """The real cases of a section on shapes that take no time."""
    if section == "host":
        yield lambda: host_overhead.host_case(bench, blocks=1)
    elif section.startswith("conv"):
        yield lambda: compare_kernels.layer_case(bench, section, "conv", CONV)
    elif section.startswith("attention"):
        yield lambda: compare_kernels.layer_case(bench, section, "attention", ATTENTION)
    else:
        yield lambda: compare_kernels.layer_case(bench, section, "linear", LINEAR)


@pytest.mark.slow
def test_a_run_writes_complete_figures(tmp_path):
    sections = compare_kernels.SECTIONS
    settings = {"device": "cpu", "rounds": 2, "inductor": False}
    experiment = Experiment("kernels", tmp_path, seed=0, settings=settings)
    compare_kernels.run(experiment, sections, cases=tiny_cases)
    content = read_json(tmp_path / "figures.json")
    assert content["measured"] is True
    wanted = {
        "machine", "versions", "commit", "seed", "threads", "rounds",
        "device", "bars",
    }  # fmt: skip
    assert wanted <= set(content)
    assert {case["section"] for case in content["cases"]} == set(sections)
    for case in content["cases"]:
        for entry in case["variants"].values():
            assert entry["median_s"] > 0 and len(entry["speedup_quartiles"]) == 3
        assert case["variants"][case["baseline"]]["speedup"] == 1.0
    assert {row["section"] for row in content["rows"]} == set(sections)
    for found in content["rows"]:
        assert set(found) == ROW_FIELDS
    assert {one["holds"] for one in content["bars"]} <= {True, False, None}


def test_every_variant_of_a_linear_layer_is_measured(bench):
    case = compare_kernels.layer_case(bench, "linear training", "linear", LINEAR)
    expected = {"fp32", "bf16", "int8", "int8 bf16 out", "int8_all", "int8_all bf16 out", "autocast"}
    assert expected <= set(case.runs)
    assert {bar.variant for bar in case.bars} <= set(case.runs)
    for run in case.runs.values():
        gradients = run()
        assert [g.shape for g in gradients] == [(32, 48), (64, 48), (64,)]
        assert all(g.dtype == torch.float32 for g in gradients)


def test_every_variant_of_attention_is_measured(bench):
    case = compare_kernels.layer_case(bench, "attention training", "attention", ATTENTION)
    assert {"fp32", "bf16", "int8", "int8 bf16 out", "autocast"} == set(case.runs)
    for run in case.runs.values():
        assert [(g.shape, g.dtype) for g in run()] == [(ATTENTION, torch.float32)] * 3


@pytest.mark.parametrize("kind", ["linear", "conv2d", "attention"])
def test_a_gpu_measures_every_precision_that_a_layer_has_there(kind):
    assert {p for p, _ in cases.precisions_of(kind, "cuda")} == (
        {Precision.BF16, Precision.INT8, Precision.FP16, Precision.TF32}
        | ({Precision.FP8, Precision.INT8_ALL} if kind == "linear" else set())
    )
    assert {p for p, _ in cases.precisions_of("linear", "cpu")} == {
        Precision.BF16, Precision.INT8, Precision.INT8_ALL,
    }  # fmt: skip


def test_variants_compute_the_same(bench):
    layers = (cases.linear(bench, LINEAR), cases.conv2d(bench, CONV), cases.attention(bench, ATTENTION))
    for layer in layers:
        expected = layer.eager(*layer.operands)
        for precision in (Precision.BF16, Precision.FP16, Precision.INT8):
            got = layer.qsync(precision, "bf16")()
            assert got.dtype == torch.bfloat16
            assert (got - expected).norm() < 0.05 * expected.norm()


def test_a_bar_is_judged_by_ratios_within_rounds():
    """The machine gets three times slower after the first round: every round still says twice as fast."""
    case = Case("x", "s", "fp32", (Bar("ours", "fp32", 2.0), Bar("ours", "fp32", 0.4, at_most=True)))
    found = compare_kernels.bar_rows(case, {"fp32": samples(4.0, 12.0, 12.0), "ours": samples(2.0, 6.0, 6.0)})
    assert [entry["value"] for entry in found] == [2.0, 0.5]
    assert [entry["quartiles"] for entry in found] == [[2.0, 2.0, 2.0], [0.5, 0.5, 0.5]]


def test_what_cannot_run_is_named_with_the_reason():
    def unsupported():
        raise UnsupportedError("no such kernel")

    def broken():
        raise RuntimeError("theirs\nand more")

    case = Case("x", "s", "fp32", (Bar("ours", "fp32", 2.0),))
    case.add("ours", unsupported)
    case.add("peer", broken, theirs=True)
    assert case.unavailable == {"ours": "no such kernel", "peer": "RuntimeError: theirs"}
    (found,) = compare_kernels.bar_rows(case, {"fp32": samples(1.0)})
    assert found["value"] is None and found["why"] == "ours: no such kernel"


def test_a_kernel_that_fails_leaves_the_others_of_its_section(tmp_path, bench):
    def broken():
        raise RuntimeError("illegal\nand more")

    def cases(bench, section):
        case = Case(section, "s", "fp32", (Bar("ours", "fp32", 2.0),))
        case.add("ours", broken)
        case.add("fp32", lambda: lambda: None)
        yield lambda: case

    settings = {"device": "cpu", "rounds": 1, "inductor": False}
    content = compare_kernels.run(Experiment("kernels", tmp_path, settings=settings), ["host"], cases=cases)
    (case,), (one,) = content["cases"], content["bars"]
    assert set(case["variants"]) == {"fp32"} and case["failed"] == {"ours": "RuntimeError: illegal"}
    assert one["holds"] is False and one["why"] == "ours: RuntimeError: illegal"
    assert "Failed: ours, host s: RuntimeError: illegal" in compare_kernels.remarks(content)
    with pytest.raises(RuntimeError, match="illegal"):  # there is nothing to compare with
        Case("x", "s", "fp32").add("fp32", broken)


def test_rounds_are_paired_and_the_order_rotates():
    order: list[str] = []
    variants = {name: lambda name=name: order.append(name) for name in "abc"}
    found = measure(variants, 4, CPU, sample_s=0.0)
    assert all(len(entry.seconds) == 4 for entry in found.values())
    assert [entry.calls for entry in found.values()] == [1, 1, 1]
    rounds = order[-12:]
    assert [rounds[i : i + 3] for i in range(0, 12, 3)] == [
        list("abc"),
        list("acb"),
        list("cab"),
        list("cba"),
    ]


def test_ratios_and_quartiles():
    assert ratios(samples(2.0, 6.0), samples(1.0, 2.0)) == [2.0, 3.0]
    assert quartiles([1.0]) == [1.0, 1.0, 1.0]


def test_an_unknown_section_is_refused_in_a_sentence():
    with pytest.raises(QSyncError, match="choose among quantize"):
        compare_kernels.main(only=["nothing"])
