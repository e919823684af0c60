"""One comparable line for each pile of cards: what it says, what it keeps, what it refuses."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from qsync.errors import FormatError, QSyncError
from qsync.experiments.mixed import clusters
from qsync.experiments.mixed.ways import ALL_INT8, ALONE, DDP, QSYNC_SHARE, WEAK_16

_DEMO = Path(__file__).parents[2] / "docs" / "results" / "demo.json"


def run(samples: int, step_s: float | None, planned_s: float) -> dict:
    return {"samples_a_step": samples, "measured_step_s": step_s, "planned_step_s": planned_s}


@pytest.fixture
def figures(tmp_path):
    card = {"count": 2, "hardware": "A100", "device": "cuda"}
    weak = {"count": 1, "hardware": None, "device": "cpu"}
    found = {
        "experiment": "mixed", "workload": "gpt", "num_parameters": 7, "base": "bf16", "emulated": False,
        "machine": {"torch": "2.13.0"}, "commit": "abc", "cluster": {"classes": [card, weak, card]},
        "runs": {
            ALONE: run(8, 2.0, 2.2), DDP: run(16, 5.0, 4.0), QSYNC_SHARE: run(16, 2.0, 2.1),
            ALL_INT8: run(16, 3.0, 3.0), WEAK_16: run(16, None, 3.0),
        },
    }  # fmt: skip
    (tmp_path / "figures.json").write_text(json.dumps(found))
    return found


def test_a_run_is_one_line(figures):
    found = clusters.result_of(figures)
    assert found.name == "4 x A100 + 1 x cpu; gpt, base bf16"
    assert found.samples_per_s == {"alone": 4.0, "DDP": 3.2, "plan": 8.0}
    assert found.error == pytest.approx(0.05) and found.worst_error == pytest.approx(0.2)
    assert "alone 4 (1.00x), DDP 3.2 (0.80x), plan 8 (2.00x); plan's step predicted +5.0%" in clusters.line(
        found
    )
    figures["runs"][QSYNC_SHARE]["measured_step_s"] = None
    with pytest.raises(QSyncError, match="plan's steps were not measured"):
        clusters.result_of(figures)


def test_results_are_collected_and_a_newer_one_replaces_its_own(figures, tmp_path, monkeypatch, capsys):
    root = tmp_path / "clone"
    (root / "docs" / "results").mkdir(parents=True)
    page = root / clusters.PAGE
    page.write_text("<!-- clusters:begin -->\n<!-- clusters:end -->\n")
    monkeypatch.setattr(clusters, "ROOT", root)
    demo = tmp_path / "demo"
    demo.mkdir()
    (demo / "figures.json").write_text(_DEMO.read_text())
    clusters.main([tmp_path, demo], publish=True)
    (tmp_path / "figures.json").write_text(json.dumps({**figures, "commit": "def"}))
    clusters.main([tmp_path])
    clusters.main([tmp_path / clusters.FILE], publish=True)  # as it is sent by others
    rows = [line for line in page.read_text().splitlines() if line.startswith("| ")]
    assert len(rows) == 3 and "| def |" in page.read_text() and "| abc |" not in page.read_text()
    assert "(one emulated); gpt, base fp32: samples/s alone" in capsys.readouterr().out


def test_what_is_no_run_is_refused_in_one_sentence(tmp_path):
    with pytest.raises(QSyncError, match="has no figures.json; give the folder"):
        clusters.main([tmp_path])
    (tmp_path / "figures.json").write_text('{"experiment": "links"}')
    with pytest.raises(QSyncError, match="of another experiment"):
        clusters.main([tmp_path])
    with pytest.raises(FormatError, match="expected a qsync-cluster-result file"):
        clusters.main([tmp_path / "figures.json"])
