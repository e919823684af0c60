"""planning_times.py and measured_steps.py on small graphs: what is run and reported."""

from __future__ import annotations

from dataclasses import replace

import pytest
import typer
from graphs import cluster_of, encoder, profile_of, sensitivity_of

from qsync.errors import QSyncError
from qsync.experiments.allocation import measured_steps, planning_times
from qsync.experiments.prediction.validation_ranks import assignments
from qsync.predictor.cost_model.model import CostModel
from qsync.predictor.cost_model.samples import samples_of
from qsync.records.basis import Basis
from qsync.records.cluster import Link
from qsync.records.precision import Precision
from qsync.replayer import replay
from qsync.replayer.comparison import Measured, Validation, compare, predicted_by_kind

GRAPH = encoder(1, width=256, rows=128)


def test_a_large_model_is_made_up_on_four_simulated_devices_and_solved(tmp_path):
    costs = CostModel(samples_of(GRAPH, profile_of(GRAPH)))
    basis = planning_times.made_up(GRAPH, costs, 5, seed=0)
    assert basis.cluster.num_ranks == 20 and len(basis.cluster.classes) == 4
    assert {profile.origin for profile in basis.profiles.values()} == {"simulated"}
    basis.save(tmp_path / "large")
    rows = []
    for solver in ("milp", "greedy"):
        found = planning_times.solve(str(tmp_path / "large"), solver, 0.1)
        assert found["violations"] == [] and found["ranks"] == 20 and found["step_s"] <= found["target_s"]
        rows.append({"model": "large", "solver": solver, "bar_s": 60.0, **found})
    assert rows[0]["added_variance"] <= rows[1]["added_variance"] * (1 + 1e-9)
    assert planning_times.holds(rows[0]) and planning_times.table(rows).row_count == 2
    for worse in ({"gap": 0.02}, {"seconds": 61.0}, {"peak_bytes": 5 * 2**30}, {"violations": ["late"]}):
        assert not planning_times.holds({**rows[0], **worse})
    assert planning_times.holds({**rows[1], "gap": 0.2})  # greedy's gap is no bar here


def test_times_need_profiles_and_a_known_model(tmp_path):
    with pytest.raises(
        QSyncError, match="holds no profile; run python -m qsync.experiments.allocation.compare_methods"
    ):
        planning_times.learned(tmp_path)
    with pytest.raises(typer.BadParameter, match="choose from BERT-large"):
        planning_times.main(tmp_path, model=["BERT-huge"], times=1, slack=0.1, seed=0)


def a_basis():
    profiles = {
        name: profile_of(GRAPH, name, slow=slow, cast_s=1e-11)
        for name, slow in (("train", 1.0), ("infer", 2.0))
    }
    return Basis(GRAPH, cluster_of(link=Link(1e-6, 1e10)), profiles, sensitivity_of(GRAPH))


def test_own_plans_are_run_and_compared_with_what_they_said(tmp_path, monkeypatch):
    ran = []

    def validation(name, *, seed, turns, out, num_plans=1, plans=None):
        """Every plan takes 2 % longer than predicted, from a profile that was 10 % slower than before."""
        basis = a_basis()
        replace(basis, sensitivity=replace(basis.sensitivity, omega={})).save(out)
        ran.append((plans, turns))
        cap = measured_steps.BUCKET_CAP_BYTES
        comparisons = []
        for key, plan in (plans or {}).items():
            assert plan.bucket_cap_bytes == cap
            timeline = replay(GRAPH, plan, basis.profiles, basis.cluster, bucket_cap_bytes=cap)
            timeline = replace(timeline, step_s=1.1 * timeline.step_s)
            kinds = {c: predicted_by_kind(GRAPH, basis.profiles[c], timeline, c) for c in basis.profiles}
            runs = {c: Measured(1.02 * timeline.step_s, 0.0, 0.0, kinds[c]) for c in kinds}
            comparisons.append(compare(key, GRAPH, basis.profiles, timeline, assignments_of(plan), runs))
        Validation("m", {}, seed, tuple(comparisons)).save(out / "validation.json")

    def assignments_of(plan):
        return assignments({"it": plan.to_json()})["it"]

    monkeypatch.setattr(measured_steps, "run_validation", validation)
    a_basis().sensitivity.save(tmp_path / "gpt" / "sensitivity.json")
    measured_steps.main(tmp_path, model=["gpt"], turns=4, seed=0)
    assert [plans is None for plans, _ in ran] == [True, False] and ran[1][1] == 4
    rows = measured_steps.judge("gpt", tmp_path / "gpt" / "ranks")
    by_plan = {row["plan"]: row for row in rows}
    full, least = by_plan[measured_steps.FULL], by_plan[measured_steps.FASTEST]
    assert full["added_variance"] == 0.0 < least["added_variance"] and least["lowered"]["infer"] > 0
    assert least["planned_s"] < by_plan[measured_steps.HALFWAY]["planned_s"] < full["planned_s"]
    for row in rows:
        assert row["over_predicted"] == pytest.approx(0.02) and row["over_planned"] == pytest.approx(0.122)
        assert measured_steps.holds(row) and not measured_steps.holds({**row, "over_predicted": 0.04})
    assert (tmp_path / "measured" / "figures.json").is_file()


def test_without_a_sensitivity_nothing_is_planned(tmp_path):
    with pytest.raises(QSyncError, match="run python -m qsync.experiments.allocation.compare_methods first"):
        measured_steps.run("gpt", tmp_path / "sensitivity.json", tmp_path / "ranks", 1, 0)


def test_plans_reach_the_ranks_whole():
    assert assignments(None) is None
    found = measured_steps.plans(a_basis())
    given = assignments({name: one.to_json() for name, one in found.items()})
    assert given == {n: {c: dict(of.assignment) for c, of in p.classes.items()} for n, p in found.items()}
    assert all(isinstance(p, Precision) for p in given["FP32"]["infer"].values())
