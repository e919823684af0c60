"""Training loops of other libraries on two ranks: cases keep their verdicts, and refusals their sentences."""

from __future__ import annotations

import pytest

from qsync.experiments.harness.ranks import run_on_ranks
from qsync.experiments.integrations import run_cases

# Every case trains several times: five minutes are not enough beside other work.
pytestmark = [pytest.mark.dist, pytest.mark.slow, pytest.mark.timeout(1200)]


@pytest.mark.parametrize("module", run_cases.MODULES)
def test_cases_keep_their_verdicts(module, tmp_path):
    config = {"module": module, "folder": str(tmp_path), "weak_share": 1.0}
    found = run_on_ranks(run_cases.run, config, command="integrations")
    assert len(found) >= 7
    for row in found:
        assert row["verdict"] == row["expected"] and row["says"] in row["sentence"], row
        assert "\n" not in row["sentence"]
        assert row["verdict"] != "works" or row["norm_error"] <= row["tolerance"], row
