"""random_checks.py: made-up problems' plans keep their word, and wrong ones are seen."""

from __future__ import annotations

from dataclasses import replace

import pytest

pytest.importorskip("torch")

from qsync.errors import InfeasibleError
from qsync.experiments.allocation import random_checks
from qsync.experiments.allocation.random_checks import counts, table, try_problem
from qsync.experiments.allocation.random_problems import problem


@pytest.fixture(scope="module", autouse=True)
def in_short():
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(random_checks, "TIME_LIMIT_S", 1.0)
        patch.setattr(random_checks, "MOST_TRIED", 300)
        yield


@pytest.fixture(scope="module")
def rows(in_short):
    return [try_problem(1, number) for number in range(30)]


def test_plans_of_thirty_problems_hold_and_what_is_called_infeasible_is(rows):
    found = counts(rows)
    assert found["violations of plans"] == found["broke"] == 0
    # How near the exact solver comes to the least there is depends on the time it has.
    texts = [text for row in rows for text in row["wrong"] if "above the least" not in text]
    assert not texts
    assert found["infeasible"] > 2 and found["infeasible, and every assignment tried"] > 0
    assert found["of these something lowered"] > 10 and found["every assignment tried"] > 4


def test_a_problem_is_a_function_of_its_number():
    assert problem(0, 3) == problem(0, 3) != problem(0, 4)
    assert len({len(problem(0, number).cluster.classes) for number in range(20)}) == 4


def planned_with(monkeypatch, rows, change):
    """Rows of a few small problems where `allocate` says something else than it found."""
    real = random_checks.allocate

    def changed(*args, **options):
        return change(real(*args, **options))

    monkeypatch.setattr(random_checks, "allocate", changed)
    small = [row["number"] for row in rows if row.get("tried") and "infeasible" not in row["milp"]]
    return [try_problem(1, number) for number in small[:4]]


def test_a_plan_that_breaks_its_word_is_seen(rows, monkeypatch):
    rows = planned_with(monkeypatch, rows, lambda plan: replace(plan, target_s=0.9 * plan.step_s))
    assert rows and all(row["milp"]["violations"] and row["wrong"] for row in rows)
    assert "over the target" in str(counts(rows)["problems with something wrong"])
    assert table(counts(rows)).row_count > len(rows)


def test_a_bound_above_what_there_is_is_seen(rows, monkeypatch):
    rows = planned_with(monkeypatch, rows, lambda plan: replace(plan, bound=2 * plan.added_variance + 1.0))
    assert rows and all(any("bound" in text for text in row["wrong"]) for row in rows)


def test_a_problem_wrongly_called_infeasible_is_seen(rows, monkeypatch):
    def refuse(*args, **options):
        raise InfeasibleError("no plan")

    wrong = [row["number"] for row in rows if row.get("tried") and "infeasible" not in row["milp"]]
    monkeypatch.setattr(random_checks, "allocate", refuse)
    assert wrong
    for number in wrong:
        assert "called infeasible, but an assignment holds" in try_problem(1, number)["wrong"]


def test_what_breaks_a_solver_is_a_row(monkeypatch):
    def stumble(*args, **options):
        raise ZeroDivisionError("oh")

    monkeypatch.setattr(random_checks, "allocate", stumble)
    row = try_problem(1, 0)
    assert counts([row])["broke"] == 2 and "ZeroDivisionError" in row["wrong"][0]
