"""What users do to a wrapped model: every case keeps its verdict, and none is silent."""

from __future__ import annotations

import pytest

from qsync.experiments.harness.tables import as_markdown
from qsync.experiments.levers.measured_levers import BOTH, NOTHING, PRECISIONS_ALONE, SHARES
from qsync.experiments.takeover import weak_ranks
from qsync.experiments.takeover.cases import CASES, Case, data, net
from qsync.experiments.takeover.outcomes import REFUSED, SILENT, WARNS, WORKS, judge

# Part of the sentence that a user reads; every other case works.
SENTENCES = {
    "`torch.func.grad` of a functional call": "torch.func.grad is around it",
    "`torch.func.vmap` over samples": "torch.func.vmap is around it",
    "inside `torch.autocast`": "call the model outside of autocast",
    '`torch.compiler.set_stance("force_eager")` after the first call': "torch.compile is switched off",
    "`torch.utils.flop_counter.FlopCounterMode` around a call": "ran without its kernels: _FlopCounterMode",
    "`torch.jit.trace`": "call qsync.unwrap(model) first",
    "`torch.jit.script`": "call qsync.unwrap(model) first",
    "`parallelize_module` (tensor parallelism)": "wrap the modules that are not parallelized",
    "wrap of `DataParallel(model)`": "use DistributedDataParallel",
    "wrap of a TorchScript model": "wrap the module it was made from",
    "double backward (a gradient penalty)": "cannot be differentiated twice",
}
WARNINGS = {
    "`model.half()` after the first call": "0 of 5 products in int8 (5 fp16)",
    "`model.double()` after the first call": "0 of 5 products in int8 (5 fp64)",
}


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_a_case_works_or_is_refused_in_one_sentence(case):
    found = judge(case)
    if case.name in SENTENCES:
        assert found.verdict == REFUSED and SENTENCES[case.name] in found.sentence
        assert "\n" not in found.sentence
    elif case.name in WARNINGS:
        assert found.verdict == WARNS
        assert WARNINGS[case.name] in found.sentence
    else:
        assert found.verdict == WORKS, found


def test_every_listed_case_exists_once():
    names = [case.name for case in CASES]
    assert len(set(names)) == len(names) >= 40 and {*SENTENCES, *WARNINGS} <= set(names)


def test_plain_numbers_and_wrong_gradients_are_silent_failures():
    plain = Case("", "plain", lambda make: net()(data()))
    wrong = Case("", "wrong", lambda make: make(net())(data()) * (2.0 if hasattr(make, "keywords") else 1.0))
    assert judge(plain).verdict == judge(wrong).verdict == SILENT


def test_unequal_ranks_are_judged_by_their_steps_and_their_variance():
    def run(ms: float, variance: float) -> dict[str, object]:
        return {"measured_step_s": ms / 1e3, "added_variance": variance, "cpu_s": {"0": ms / 1e3, "1": 0.0}}

    def row(ms: float, levers: dict[str, str] | None = None) -> dict[str, object]:
        return {"measured_s": ms / 1e3, "levers": levers or {}, "added_variance": None}

    found = {
        "nearly_equal": {
            "fast_alone": run(100, 0.0), "ddp": run(130, 0.0), "weak_int8_all": run(112, 4e-2),
            "qsync": run(109, 1e-2),
        },
        "half": {
            NOTHING: row(200), SHARES: row(160, {"train": "12 samples", "infer": "4 samples"}),
            PRECISIONS_ALONE: row(150), BOTH: row(128, {"train": "10 samples", "infer": "6 samples"}),
        },
    }  # fmt: skip
    slow, variance, faster = weak_ranks.bars(found)
    assert (slow["measured"], slow["holds"]) == (pytest.approx(1.09), False)
    assert (variance["measured"], variance["holds"]) == (pytest.approx(0.25), True)
    assert (faster["measured"], faster["holds"]) == (pytest.approx(1.25), True)
    first, second = map(as_markdown, weak_ranks.tables(found))
    assert "| the plan | 109 ms | 1.09 | 1.09 | 1.0e-02 |" in first
    assert "| shares and precisions | 10 samples / 6 samples | 128 ms | 1.56x | 0.0e+00 |" in second
    assert "1.56 times the samples" in weak_ranks.parts(found) and "1.25 by shares" in weak_ranks.parts(found)
