"""planning_times.py on a small graph: what is run and reported."""

from __future__ import annotations

import pytest
from graphs import encoder, profile_of

from qsync.errors import QSyncError
from qsync.experiments.allocation import planning_times
from qsync.predictor.cost_model.model import CostModel
from qsync.predictor.cost_model.samples import samples_of

GRAPH = encoder(1, width=256, rows=128)


def holds(row):
    return all(one["holds"] for one in planning_times.bars(row))


def test_a_large_model_is_made_up_on_four_simulated_devices_and_solved(tmp_path):
    costs = CostModel(samples_of(GRAPH, profile_of(GRAPH)))
    basis = planning_times.made_up(GRAPH, costs, 5, seed=0)
    assert basis.cluster.num_ranks == 20 and len(basis.cluster.classes) == 4
    assert {profile.origin for profile in basis.profiles.values()} == {"simulated"}
    basis.save(tmp_path / "large")
    found = planning_times.solve(str(tmp_path / "large"))
    assert found["violations"] == [] and found["ranks"] == 20 and found["step_s"] <= found["target_s"]
    row = {"model": "large", "bar_s": 60.0, **found}
    assert holds(row)
    for worse in ({"gap": 0.02}, {"seconds": 61.0}, {"peak_bytes": 5 * 2**30}, {"violations": ["late"]}):
        assert not holds({**row, **worse})


def test_times_need_profiles(tmp_path):
    with pytest.raises(
        QSyncError, match="holds no profile; run python -m qsync.experiments.allocation.compare_methods"
    ):
        planning_times.learned(tmp_path)
