"""Faults in real jobs: those whose verdict does not depend on load are named, and verdicts are fair."""

from __future__ import annotations

import pytest

from qsync.errors import QSyncError
from qsync.experiments.diagnosis import __main__ as command
from qsync.experiments.diagnosis import runs
from qsync.experiments.diagnosis.faults import FAULTS
from qsync.records.json_files import read_json


def comparison(rank: int | None = None, phase: str = "", others: float = 0.0) -> dict:
    drift = None if rank is None else {"rank": rank, "phase": phase, "sentence": f"{phase} on rank {rank}"}
    return {"drift": drift, "others": others}


def test_the_rank_and_the_phase_must_be_right():
    fault = FAULTS["loading-1"]
    for last, named in (
        (comparison(1, "data loading"), True), (comparison(0, "data loading"), False),
        (comparison(1, "compute"), False), (comparison(), False),
    ):  # fmt: skip
        assert runs.verdict(fault, {"comparisons": [comparison(), last]})["named"] is named
    assert runs.verdict(FAULTS["link"], {"comparisons": [comparison(), comparison(0, "communication")]})[
        "named"
    ]
    assert not runs.verdict(fault, {})["named"]


def test_an_alarm_is_false_unless_other_processes_took_time():
    early, disturbed = comparison(0, "compute"), comparison(0, "compute", others=0.5)
    found = runs.verdict(FAULTS["loading-1"], {"comparisons": [early, comparison(1, "data loading")]})
    assert found["named"] and found["early"] == [early]
    assert runs.alarms([comparison(), early, disturbed]) == [early]


def test_a_sentence_counts_if_another_rank_says_it_of_the_faulty_one():
    fault, sentence = FAULTS["killed-1"], "rank 1 (host, pid 7) stopped responding 3.0 s ago"
    assert runs.said(fault, [f"before\n{sentence}\nafter", ""]) == sentence
    assert runs.said(fault, ["", sentence]) == ""
    assert runs.said(FAULTS["killed-0"], ["", sentence]) == ""


@pytest.mark.dist
@pytest.mark.deep
def test_faults_are_planted_named_and_kept(tmp_path):
    """Other work may be named first beside steps of 8 ms: a fault is planted up to three times."""
    run = {"out": tmp_path, "only": ["loading-1", "hang-loading", "killed-1"], "tiny": True}
    for _ in range(3):
        command.main(**run, clean_minutes=0.01)
        content = read_json(tmp_path / "figures.json")
        missed = [name for name, one in content["faults"].items() if not one["named"]]
        if not missed:
            break
        for name in missed:
            (tmp_path / "pieces" / f"fault-{name}.json").unlink()
    assert {name: one["named"] for name, one in content["faults"].items()} == dict.fromkeys(run["only"], True)
    assert content["clean_minutes"] >= 0.01 and content["comparisons"] >= 1
    before = (tmp_path / "pieces" / "fault-hang-loading.json").stat().st_mtime_ns
    command.main(**run)
    assert (tmp_path / "pieces" / "fault-hang-loading.json").stat().st_mtime_ns == before


def test_unknown_faults_are_refused(tmp_path):
    with pytest.raises(QSyncError, match="unknown fault 'flood'; choose from loading-1"):
        command.main(out=tmp_path, only=["flood"])
