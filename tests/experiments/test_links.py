"""Weak links: what is judged and drawn, and a tiny run between two paced namespaces."""

from __future__ import annotations

import json

import pytest
from typer.testing import CliRunner

from qsync.errors import QSyncError
from qsync.experiments.links import __main__ as command
from qsync.experiments.links import report
from qsync.experiments.links.hosts import two_hosts
from qsync.experiments.links.rank import FP32, OURS, WAYS


def found(auto_s: float, auto_error: float) -> dict:
    """What a rank measured where int8 is the fastest other way, and the machine drifts."""
    steps = {way: 1.0 for way in WAYS} | {"int8": 0.5, "int8+feedback": 0.505, "auto": auto_s}
    errors = dict.fromkeys(WAYS, 1e-2) | {FP32: 0.0, "int8": 1e-3, "int8+feedback": 1e-4, "auto": auto_error}
    return {
        "seconds": {way: [s, 4 * s, 2 * s] for way, s in steps.items()}, "errors": errors,
        "sent_bytes": {way: [105, 105] for way in WAYS},
        "formula_bytes": {way: 100.0 for way in (FP32, *OURS)},
        "squared_norm": 1.0, "chosen": {"int8": 3}, "predicted_s": 0.9, "load": 1.0,
    }  # fmt: skip


def test_auto_is_to_be_as_fast_as_the_fastest_at_no_more_error(tmp_path):
    measured = {"10": found(0.5, 1e-4), "1": found(0.52, 1e-4), "0.1": found(0.5, 2e-4)}
    held = {one["name"]: one["holds"] for one in report.bars(measured)}
    step, error = "step of auto / of the fastest other (int8)", "error of auto no more than of those as fast"
    assert [held[f"{rate} Gb/s: {step}"] for rate in measured] == [True, False, True]
    assert [held[f"{rate} Gb/s: {error}"] for rate in measured] == [True, True, False]
    assert all(held[f"{rate} Gb/s: bytes on the interface / formula, worst kind"] for rate in measured)
    assert report.draw(measured, tmp_path / "links.png").stat().st_size > 10_000
    assert report.table(measured).row_count == len(WAYS) and report.choices(measured).row_count == 3


@pytest.mark.dist
@pytest.mark.deep
@pytest.mark.timeout(900)
def test_every_way_trains_between_paced_hosts(tmp_path):
    try:
        with two_hosts():
            pass
    except QSyncError as error:
        pytest.skip(f"no namespaces can be made here: {error}")
    import typer

    app = typer.Typer()
    app.command()(command.main)
    assert CliRunner().invoke(app, ["--tiny", "--out", str(tmp_path)]).exit_code == 0
    content = json.loads((tmp_path / "figures.json").read_text())
    assert list(content["rates"]) == ["10", "1", "0.1"] and (tmp_path / "links.png").is_file()
    for one in content["rates"].values():
        assert list(one["seconds"]) == list(WAYS) and one["errors"][FP32] == 0.0
