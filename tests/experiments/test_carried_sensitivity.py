"""What the experiment on carried guesses makes of its figures."""

from __future__ import annotations

import pytest

from qsync.experiments.expansion import carried_sensitivity
from qsync.experiments.harness.tables import as_markdown
from qsync.records.profiles import Sensitivity


def gathered(*values: float) -> Sensitivity:
    return Sensitivity("graph", "variance", {f"op{i}": {"int8": v} for i, v in enumerate(values)})


def test_a_guess_is_compared_operator_by_operator_where_there_is_anything_to_compare():
    found = carried_sensitivity.compare(gathered(2.0, 4.0, 6.0, 1.0), gathered(1.0, 2.0, 3.0, 0.0), "int8")
    assert found["spearman"] == pytest.approx(1.0)
    assert found["ratio"] == pytest.approx([2.0, 2.0, 2.0])
    assert (
        carried_sensitivity.compare(gathered(3.0, 2.0, 1.0), gathered(1.0, 2.0, 3.0), "int8")["spearman"]
        == -1.0
    )


def test_the_tables_have_means_over_seeds_and_errors_with_their_sign():
    rows = [
        {"model": "gpt", "seed": seed, "steps": 0, "precision": precision}
        | {
            name: {"spearman": value + 0.1 * seed, "ratio": [0.5, 1.0 + seed, 3.0]}
            for name in ("fresh", "truth", "fresh against fresh", "fresh against truth")
        }
        for seed in (0, 1)
        for precision, value in (("bf16", 0.6), ("int8", 0.8))
    ]
    expected = "| gpt, 0 | 0.65 / 0.85 | 0.65 / 0.85 | 0.65 / 0.85 | 0.65 / 0.85 | 0.50, 1.50, 3.00 |"
    assert as_markdown(carried_sensitivity.correlations(rows)).splitlines()[4:] == [expected]
    row = {"model": "vit", "median": 0.09, "p95": 0.23, "steps": {"fp32": -0.03, "bf16": 0.05, "int8": 0.0}}
    assert as_markdown(carried_sensitivity.times([row])).splitlines()[4:] == [
        "| vit | 9% / 23% | -3% | +5% | +0% |"
    ]
