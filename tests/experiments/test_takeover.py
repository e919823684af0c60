"""What users do to a wrapped model: every case keeps its verdict, and none is silent."""

from __future__ import annotations

import pytest

from qsync.experiments.harness.cases import SILENT, Case
from qsync.experiments.takeover import weak_ranks
from qsync.experiments.takeover.cases import CASES, data, net
from qsync.experiments.takeover.outcomes import judge


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_a_case_works_or_is_refused_in_one_sentence(case):
    found = judge(case)
    assert found["verdict"] == case.verdict and case.says in found["sentence"], found
    assert "\n" not in found["sentence"]


def test_every_case_has_a_name_of_its_own():
    assert len({case.name for case in CASES}) == len(CASES) >= 40


def test_plain_numbers_and_wrong_gradients_are_silent_failures():
    plain = Case("", "plain", lambda make: net()(data()))
    wrong = Case("", "wrong", lambda make: make(net())(data()) * (2.0 if hasattr(make, "keywords") else 1.0))
    assert judge(plain)["verdict"] == judge(wrong)["verdict"] == SILENT


def test_unequal_ranks_are_judged_by_their_steps_and_their_variance():
    def run(ms: float, variance: float = 0.0) -> dict[str, object]:
        return {"measured_step_s": ms / 1e3, "added_variance": variance}

    found = {
        "0.85": {"alone": run(100), "weak_int8_all": run(112, 4e-2), "qsync": run(109, 1e-2)},
        "0.5": {"lb_bsp": run(160), "qsync_share": run(128)},
    }
    slow, variance, faster = weak_ranks.bars(found)
    assert (slow["measured"], slow["holds"]) == (pytest.approx(1.09), False)
    assert (variance["measured"], variance["holds"]) == (pytest.approx(0.25), True)
    assert (faster["measured"], faster["holds"]) == (pytest.approx(1.25), True)
