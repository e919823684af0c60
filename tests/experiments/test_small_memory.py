"""Plans for little memory: every way fits its budget, the promises are judged, and a tiny run ends."""

from __future__ import annotations

from dataclasses import replace

import pytest
import typer
from graphs import chain, cluster_of, profile_of, sensitivity_of
from typer.testing import CliRunner

from qsync.errors import QSyncError
from qsync.experiments.small_memory import __main__ as command
from qsync.experiments.small_memory import ranks, report
from qsync.records.plan_folder import Basis

GRAPH = chain(4)
STATE = {value.name: 2 * value.num_bytes for value in GRAPH.parameters}
PARTS = [1.0, 0.85]


@pytest.fixture(scope="module")
def found():
    profiles = {
        name: replace(
            profile_of(GRAPH, name, slow=slow, saving=1.3), state_bytes=STATE,
            optimizer_bytes=sum(STATE.values()),
        )
        for name, slow in (("train", 1.0), ("infer", 2.0))
    }  # fmt: skip
    basis = Basis(GRAPH, cluster_of(), profiles, sensitivity_of(GRAPH))
    plans = dict(ranks._planned(basis, PARTS, 1.0))
    of_plans = {title: ranks.figures(plan) for title, plan in plans.items()}
    step_s = max(row["predicted_s"] for row in of_plans.values())
    joint = f"{ranks.JOINT} at 0.85"
    row = of_plans[joint]
    measured = {"step_s": row["predicted_s"] / 1.1, "peak_bytes": row["predicted_bytes"]}
    one = {"step_s": step_s, "parts": PARTS, "plans": of_plans, "measured": {joint: measured}}
    return {"a model": one}


def bars_of(found):
    return {one["name"]: one for one in report.bars(found)}


def changed(found, title, **changes):
    one = found["a model"]
    plans = {**one["plans"], title: {**one["plans"][title], **changes}}
    return {"a model": {**one, "plans": plans}}


def test_every_way_keeps_its_budget_and_the_joint_plan_is_no_slower(found):
    plans = found["a model"]["plans"]
    whole = plans[f"{ranks.RECOMPUTED} at 1"]["predicted_bytes"][0]
    for title, row in plans.items():
        assert row["predicted_bytes"][1] <= float(title.split()[-1]) * whole, title
    assert {f"{way} at 1" for way in ranks.WAYS if way != ranks.SIXTEEN} <= set(plans)
    assert f"{ranks.JOINT} at 0.85" in plans and f"{ranks.DIVIDED} at 0.85" not in plans
    held = bars_of(found)
    assert held[report.UNFITTED]["holds"] and held[report.SLOWER]["holds"] and held[report.OVER]["holds"]
    assert held[report.STEP_ERROR]["measured"] == pytest.approx(0.1)


def test_missed_promises_are_named(found):
    joint = f"{ranks.JOINT} at 0.85"
    row = found["a model"]["plans"][joint]
    slow = bars_of(changed(found, f"{ranks.JOINT} at 1", predicted_s=1.0))
    assert slow[report.SLOWER]["holds"] is False
    small = bars_of(changed(found, joint, budgets={name: 1000 for name in row["budgets"]}))
    assert small[report.OVER]["which"] == ["a model at 85%"] * 2
    wrong = bars_of(changed(found, joint, predicted_bytes=[2 * own for own in row["predicted_bytes"]]))
    assert wrong[report.PEAK_ERROR]["measured"] == pytest.approx(1.0)
    plans = {title: row for title, row in found["a model"]["plans"].items() if title != joint}
    missing = {"a model": {**found["a model"], "plans": plans, "measured": {}}}
    assert bars_of(missing)[report.UNFITTED]["which"] == ["a model at 85%"]


def test_tables_and_the_picture_show_every_way(found, tmp_path):
    rows = list(zip(*(column.cells for column in report.table(found).columns), strict=True))
    assert [row[1] for row in rows] == list(ranks.WAYS)
    cells = dict(zip(ranks.WAYS, (row[2:] for row in rows), strict=True))
    assert cells[ranks.RECOMPUTED][0] == "1.00x" and cells[ranks.DIVIDED][1] == "-"
    trained = report.trained_table("Plans", report.measured(found))
    (row,) = zip(*(column.cells for column in trained.columns), strict=True)
    assert row[0] == "a model at 85%" and "(+10.0%)" in row[2]
    report.draw(found, tmp_path / "figures.png")
    assert (tmp_path / "figures.png").stat().st_size > 10_000


def test_an_unknown_model_is_refused(tmp_path):
    with pytest.raises(QSyncError, match="unknown model 'lenet'"):
        command.main(out=tmp_path, model=["lenet"])


@pytest.mark.deep
@pytest.mark.dist
@pytest.mark.slow
def test_a_tiny_run_keeps_its_budgets(tmp_path):
    app = typer.Typer()
    app.command()(command.main)
    assert CliRunner().invoke(app, ["--tiny", "--out", str(tmp_path)]).exit_code == 0
    assert "two passes on the weak rank" in (tmp_path / "figures.md").read_text()
