"""Levers, predicted and measured: what is published."""

from __future__ import annotations

import pytest

from qsync import QSyncError
from qsync.experiments.levers import measured_levers


def test_figures_above_a_base_are_not_published_into_the_table_of_fp32(tmp_path):
    with pytest.raises(QSyncError, match="no table above a base"):
        measured_levers.main(tmp_path, base="bf16", publish=True)
