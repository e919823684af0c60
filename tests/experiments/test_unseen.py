"""The experiment over the suite: what is measured becomes bars and tables, a run continues, some stay out."""

from __future__ import annotations

import pytest
import torch

from qsync.backend.precisions_that_pay import emulation_note
from qsync.errors import FormatError, QSyncError
from qsync.experiments.harness import pairing
from qsync.experiments.unseen import __main__ as command
from qsync.experiments.unseen import family_runs, fingerprints, report
from qsync.experiments.workloads.families import HELD_OUT
from qsync.records.fingerprint import Fingerprint, Gap, SmallModel
from qsync.records.json_files import read_json


def speed(**x_autocast: float) -> dict:
    """What `speeds` returns where FP32 takes a second and autocast half of one."""
    x_autocast = {"fp32": 0.5, "base bf16": 1.0, **x_autocast}
    every = {"eager": 0.5, "autocast": 1.0, **x_autocast}
    variants = {
        name: {"seconds": [0.5 / x, 5.0 / x, 5.0 / x]}  # the machine gets ten times slower
        for name, x in every.items()
    }
    missing = {name: "cannot be traced" for name in family_runs.MODES["cpu"] if name not in x_autocast}
    return {"variants": variants, "unavailable": missing}


def holds(bars: list) -> dict[str, bool]:
    return {one["name"]: one["holds"] for one in bars}


def test_int8_is_promised_of_transformers_and_two_nets_and_bf16_of_all():
    found = {
        "vit": {"speed": speed(bf16=1.0, int8=1.2, int8_all=1.1)},
        "unet": {"speed": speed(bf16=0.9, int8=0.9, int8_all=0.9)},
        "convnext": {"speed": speed(bf16=1.0, int8=0.9, int8_all=1.1)},
    }
    assert holds(report.bars(found)) == {
        **{f"{name}: base bf16, x autocast": True for name in found},
        "vit: bf16, x autocast": True, "vit: int8, x autocast": True, "vit: int8_all, x autocast": False,
        "unet: bf16, x autocast": False,
        "convnext: bf16, x autocast": True, "convnext: int8_all, x autocast": False,
        "families with a failure": True,
    }  # fmt: skip


def test_a_mode_that_fails_misses_its_bar_and_is_named():
    found = {"unet": {"speed": speed(int8=1.0, int8_all=1.0)}}
    of_bars = holds(report.bars(found))
    assert not of_bars["unet: bf16, x autocast"] and not of_bars["families with a failure"]
    assert report.failures(found["unet"]) == {"bf16": "cannot be traced"}


def test_what_is_held_out_is_marked_and_judged_apart():
    seen, apart = ({name: {"speed": speed(bf16=1.0, int8=1.2, int8_all=1.3)}} for name in ("vit", "opt"))
    names = holds(report.all_bars(seen, apart))
    assert {"vit: int8, x autocast", "opt: int8, x autocast (held out)"} <= names.keys()
    assert len(names) == 2 * len(report.bars(seen)) and report.all_bars({}, {}) == []
    families, eager, autocast, *_, int8_all = report.tables(seen, apart)[0].columns
    assert list(families.cells) == ["vit", "opt (held out)"]
    assert (eager.header, list(eager.cells)) == ("eager", ["10000 ms"] * 2)
    assert (autocast.header, list(autocast.cells)) == ("autocast", ["2.00 (2.00-2.00)"] * 2)
    assert (int8_all.header, list(int8_all.cells)) == ("int8_all", ["1.30 (1.30-1.30)"] * 2)


def test_cuda_graphs_are_judged_beside_the_same_steps_without_them():
    variants = {
        name: {"seconds": [seconds] * 3}
        for name, seconds in {"eager": 2.0, "autocast": 1.0, "bf16": 0.9, "bf16 in CUDA graphs": 0.6}.items()
    }
    found = {"bert_base_8": {"compiled": {"variants": variants, "unavailable": {}}}}
    (graphs, _) = report.bars(found)
    assert graphs["name"] == "bert_base_8: bf16 in CUDA graphs, x without"
    assert graphs["measured"] == pytest.approx(1.5) and graphs["holds"]
    (table,) = report.tables(found, {})
    assert [column.header for column in table.columns][1:] == ["eager", "autocast", *list(variants)[2:]]
    found["bert_base_8"]["compiled"] = {"failed": "why"}
    assert not report.bars(found)[0]["holds"] and report.tables(found, {}) == []


@pytest.mark.deep  # the dry run of `make gpu`; what is quick is judged above
@pytest.mark.filterwarnings("ignore:qsync:UserWarning")  # so small a model is faster in FP32
@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # Inductor's own
def test_steps_under_torch_compile_are_timed(monkeypatch, fast_products):
    monkeypatch.setattr(family_runs, "keep_freed_memory", lambda: True)
    monkeypatch.setattr(family_runs, "PLANNED", ("bf16", "bf16 in CUDA graphs"))
    found = family_runs.compiled_steps("vit", 1, tiny=True)
    assert found["unavailable"] == {}
    assert set(found["variants"]) == {"eager", "autocast", "Inductor", "CUDA graphs", *family_runs.PLANNED}


def test_one_rank_and_two_are_judged_apart():
    found = {"vit": {"ranks": {"errors": [0.01, -0.06]}, "prediction": {"errors": [0.01]}}}
    assert holds(report.bars(found)) == {
        "|predicted / measured - 1| of plans, median": True,
        "|predicted / measured - 1| of plans, 95th percentile": True,
        "|predicted / measured - 1| of plans, worst": True,
        "|predicted / measured - 1| of plans on two ranks, median": False,
        "|predicted / measured - 1| of plans on two ranks, 95th percentile": False,
        "|predicted / measured - 1| of plans on two ranks, worst": True, "families with a failure": True,
    }  # fmt: skip
    assert report.failures({"ranks": {"failed": "why"}}) == {"ranks": "why"}


def test_the_peak_that_is_predicted_worst_is_judged():
    peaks = {"fp32": {"peak_bytes": 100, "predicted_peak_bytes": 103}}
    found = {"vit": {"memory": peaks}, "t5": {"memory": {"failed": "why"}}}
    name = "|predicted / measured - 1| of memory peaks, worst"
    assert holds(report.bars(found)) == {name: True, "families with a failure": False}
    peaks["bf16"] = {"peak_bytes": 100, "predicted_peak_bytes": 94}
    (worst, _) = report.bars(found)
    assert worst["measured"] == pytest.approx(0.06) and not worst["holds"]


@pytest.mark.filterwarnings("ignore:qsync:UserWarning")  # so small a model is faster in FP32
def test_where_memory_ends_the_last_variants_are_not_measured(monkeypatch, fast_products):
    """Two copies of the model beside FP32's have room: autocast's comes first."""
    added = []

    def measure(runs, rounds, device):
        added.append(list(runs))
        if len(runs) > 3:
            raise torch.OutOfMemoryError("CUDA out of memory")
        return pairing.measure(runs, rounds, device, sample_s=0.0)

    monkeypatch.setattr(family_runs, "measure", measure)
    monkeypatch.setattr(family_runs, "keep_freed_memory", lambda: True)
    monkeypatch.setitem(family_runs.MODES, "cpu", ("bf16",))
    found = family_runs.speeds("lstm", 1, tiny=True)
    assert added == [["eager", "autocast", "base bf16", "bf16"], ["eager", "autocast", "base bf16"]]
    assert list(found["variants"]) == list(added[1])
    assert "OutOfMemoryError: CUDA out of memory" in found["unavailable"]["bf16"]


@pytest.mark.dist
@pytest.mark.deep
def test_a_family_runs_on_two_ranks():
    found = family_runs.predicted("lstm", 2, 2, 0, tiny=True)
    assert len(found["errors"]) == len(found["inside"]) == 2


@pytest.mark.dist
@pytest.mark.filterwarnings("ignore:qsync:UserWarning")  # so small a model is faster in FP32
def test_the_command_measures_continues_and_keeps_what_is_held_out(tmp_path, monkeypatch):
    ran = []

    def in_this_process(function, *arguments):
        ran.append(function.__name__)
        return function(*arguments)

    monkeypatch.setattr(command, "in_fresh_process", in_this_process)
    monkeypatch.setattr(family_runs, "keep_freed_memory", lambda: True)
    run = {"out": tmp_path, "only": ["lstm"], "tiny": True}
    command.main(**run)
    assert ran == ["speeds", "predicted", "memory"]
    command.main(**run)
    assert len(ran) == 3
    content = read_json(tmp_path / "figures.json")
    parts = content["families"]["lstm"]
    # Where BF16 is emulated torch may have no LSTM under autocast.
    absent = set(parts["speed"]["unavailable"]) if emulation_note(torch.device("cpu")) else set()
    assert absent <= {"autocast", "base bf16"}
    assert (
        set(parts["speed"]["variants"])
        == {"eager", "autocast", "base bf16", *family_runs.MODES["cpu"]} - absent
    )
    assert all(entry["peak_bytes"] > 0 for entry in parts["memory"].values())
    assert content["held_out"] == {}
    assert len(content["bars"]) == 7 and report.failures(parts) == {}
    traces = [read_json(tmp_path / "traces" / "lstm" / f"{of}.json") for of in ("predicted", "measured")]
    assert all(trace["traceEvents"] for trace in traces)
    (tmp_path / "pieces" / "speed-lstm.json").unlink()
    command.main(**{**run, "only": None}, kept=True)
    families = read_json(tmp_path / "figures.json")["families"]
    assert len(ran) == 3 and {name: set(found) for name, found in families.items()} == {
        "lstm": {"prediction", "memory"}
    }
    with pytest.raises(QSyncError, match=f"{HELD_OUT[0]} is held out; add --held-out"):
        command.main(**{**run, "only": [HELD_OUT[0]]})


def test_what_fails_is_a_sentence(monkeypatch):
    monkeypatch.setattr(family_runs, "keep_freed_memory", lambda: True)
    monkeypatch.setitem(family_runs.MODES, "cpu", ("nothing",))
    found = family_runs.memory("lstm", True)
    assert list(found) == ["failed"] and "nothing" in found["failed"]


def fingerprint(processor: str, ratio: float) -> Fingerprint:
    """What `qsync doctor --report` writes where a linear layer takes `ratio` of its time alone in a step."""
    gap = Gap("bf16", "linear of 4x8, 8x8", 2, ratio * 2e-3, 2e-3, {"layout": (ratio - 1.0) * 1e-3})
    model = SmallModel("gpt", {"fp32": 0.1}, (0.01, -0.02), (0.003,), {}, {}, (gap,))
    return Fingerprint(
        processor, ("AVX2",), (), 2, 2**30, {"qsync": "0"}, 0.5, 60.0, {"fp32": 1e11}, 1e10, (), (model,)
    )


def test_fingerprints_are_shown_by_processor_and_only_what_differs_in_a_step(tmp_path, capsys, monkeypatch):
    monkeypatch.chdir(tmp_path)
    folder, page = tmp_path / "reports", tmp_path / "docs" / "results" / "unseen.md"
    for name, processor, ratio in (("a", "Zen", 1.5), ("b", "Zen", 1.19), ("c", "Xeon", 0.7)):
        fingerprint(processor, ratio).save(folder / f"{name}.json")
    page.parent.mkdir(parents=True)
    page.write_text("<!-- fingerprints:begin --><!-- fingerprints:end -->")
    command.main(out=tmp_path / "out", reports=folder, publish=True)
    text = page.read_text()
    assert text.count("Predictions of small models on Zen") == 1
    assert ", on Zen: 1 of 2 (measured)" in text and ", on Xeon: 1 of 1 (measured)" in text
    assert "| linear of 4x8, 8x8 | gpt | bf16 | 2 | 3 ms | 2 ms | 1.50 | +0.50 |" in text
    assert "| 0.70 | -0.30 |" in text and "1.19" not in text and "+1.0%, -2.0%" in text and "50%" in text
    assert read_json(tmp_path / "out" / "figures.json")["fingerprints"]["c"]["processor"] == "Xeon"
    assert "on Zen" in capsys.readouterr().out


def test_a_folder_without_fingerprints_is_one_sentence(tmp_path):
    for folder in (tmp_path, tmp_path / "none"):
        with pytest.raises(QSyncError, match="write one into it with qsync doctor --report"):
            fingerprints.read(folder)
    (tmp_path / "foreign.json").write_text('{"kind": "plan", "version": 1}')
    with pytest.raises(FormatError, match="foreign.json: expected a fingerprint file, found 'plan'"):
        fingerprints.read(tmp_path)
