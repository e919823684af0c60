"""The table of levers: what was predicted beside what was measured."""

from __future__ import annotations

import pytest

from qsync import QSyncError
from qsync.experiments.harness.tables import as_markdown
from qsync.experiments.levers import measured_levers


def test_the_table_says_by_how_much_a_prediction_is_off():
    row = {
        "plan": "FP32", "predicted_s": 0.101, "measured_s": 0.1, "added_variance": 2e-4,
        "predicted_bytes": [2**20, 3 * 2**20], "measured_bytes": [2**19, 3 * 2**20],
    }  # fmt: skip
    expected = "| FP32 | 101 ms (+1.0%) | 100 ms | 1.0 / 3.0 | 0.5 / 3.0 | 2.0e-04 |"
    assert as_markdown(measured_levers.table([row])).splitlines()[4:] == [expected]


def test_figures_above_a_base_are_not_published_into_the_table_of_fp32(tmp_path):
    with pytest.raises(QSyncError, match="no table above a base"):
        measured_levers.main(tmp_path, base="bf16", publish=True)
