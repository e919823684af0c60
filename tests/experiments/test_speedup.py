"""What the report says of the ways to use a weak card, and its picture."""

from __future__ import annotations

import pytest
from graphs import cluster_of, mlp, profile_of, sensitivity_of

from qsync.experiments.mixed.report import NOISIER, SLOWER, UNSAID
from qsync.experiments.mixed.ways import ALL_INT8, ALONE, QSYNC_SHARE, TITLES, WEAK_INT8, ways
from qsync.experiments.speedup import report
from qsync.records.plan_folder import Basis
from qsync.replayer import Recapture


def problem(**rates: float) -> dict:
    found = {
        way: {"samples_per_s": 10.0 * rates.get(way, 1.9), "added_variance": 1e-3 if "8" in way else 0.0,
              "predicted_s": 1.1, "step_s": 1.0, "samples": {"train": 12, "infer": 4}}
        for way in TITLES
    }  # fmt: skip
    found[ALONE] |= {"samples_per_s": 10.0, "samples": {"train": 8}}
    kept = [{"name": name, "measured": 0, "which": []} for name in (SLOWER, NOISIER, UNSAID)]
    return {"model": "gpt-small", "share": 0.5, "ways": found, "bars": kept}


def test_promises_of_all_points_are_added_up():
    first, second = problem(), {**problem(), "model": "bert", "share": 0.7}
    second["bars"] = [{"name": SLOWER, "measured": 1, "which": ["plain DDP"]}, *second["bars"][1:]]
    second["ways"][QSYNC_SHARE] |= {"predicted_s": 1.01}
    found = {one["name"]: one for one in report.bars([first, second, {"model": "gpt", "pair": "A + B"}])}
    assert found[SLOWER]["measured"] == 1 and found[SLOWER]["which"] == ["bert at 0.7: plain DDP"]
    assert found[NOISIER]["holds"] and not found[SLOWER]["holds"]
    assert found[report.STEP_ERROR]["measured"] == pytest.approx(0.1)
    worst = next(one for name, one in found.items() if name.endswith("with shares, worst"))
    assert worst["measured"] == pytest.approx(0.1) and worst["limit"] == 0.08
    equal = problem()
    for row in equal["ways"].values():
        row["samples"] = {"train": 8, "infer": 8}
    assert not any("shares" in one["name"] for one in report.bars([equal]))
    assert report.bars([{"model": "gpt", "pair": "A + B"}]) == []
    assert "bert at 0.7: plain DDP" in report.note(list(found.values()))


def test_rates_are_against_the_fast_card_alone_and_missing_ways_are_dashes():
    one = problem(lb_bsp=2.5)
    del one["ways"][ALL_INT8]
    pair = {"model": "gpt", "pair": "A100 + T4", "ways": problem()["ways"]}
    found = report.table([one, pair])
    cells = {column.header: list(column.cells) for column in found.columns[2:]}
    assert list(found.columns[0].cells) == ["gpt-small", "gpt"]
    assert list(found.columns[1].cells) == ["0.5, measured", "A100 + T4"]
    assert cells[TITLES["lb_bsp"]][0] == "2.50x" and cells[TITLES[ALL_INT8]][0] == "-"
    assert cells[TITLES[WEAK_INT8]][1] == "1.90x (1e-03)"


def test_a_simulated_row_counts_the_samples_of_the_plan():
    graph = mlp(4, width=64, rows=16)
    profiles = {name: profile_of(graph, name, slow=of) for name, of in (("train", 1.0), ("infer", 2.0))}
    basis = Basis(graph, cluster_of(), profiles, sensitivity_of(graph))
    plan = ways(basis, Recapture(mlp(4, width=64, rows=8), {}))[QSYNC_SHARE]
    row = report.simulated_row(plan, basis.cluster, 16)
    assert sum(row["samples"].values()) == 32
    assert row["samples_per_s"] * row["predicted_s"] == pytest.approx(32)


def test_the_picture_has_every_panel(tmp_path):
    pair = {"model": "gpt", "pair": "A100 + T4", "ways": problem()["ways"]}
    report.draw([problem(), {**problem(lb_bsp=1.5), "share": 0.7}, pair], tmp_path / "figures.png")
    assert (tmp_path / "figures.png").stat().st_size > 10_000
