"""Whether a grown model fits is known before it is built, and a model far larger than memory can be asked
about."""

from __future__ import annotations

import pytest
import torch

import qsync
from qsync.errors import CalibrationError, FormatError, InfeasibleError, MismatchError, UnsupportedError
from qsync.experiments.workloads.gpt import Gpt
from qsync.lowering.incremental import lower
from qsync.operators.precision import Precision
from qsync.predictor.memory.peak import peak_memory
from qsync.records.cluster import Cluster, DeviceClass, Link

TOKENS = torch.zeros(4, 64, dtype=torch.int64)


def small() -> Gpt:
    torch.manual_seed(0)
    return Gpt(2, 64, 4, 64, 50)


def planned(model: torch.nn.Module, **sizes: int):
    return qsync.plan_expansion(model, qsync.recipe_of(model).to(**sizes))


def test_what_is_predicted_is_the_peak_of_the_model_that_is_then_built():
    """With the state that the optimizer then has."""
    model = small()
    model.blocks[0].requires_grad_(False)
    plan = planned(model, width=128, layers=3)
    (fit,) = qsync.check_growth(model, plan, {"here": 2**40}, TOKENS)
    big = qsync.expand(model, plan.recipe)
    optimizer = torch.optim.AdamW([p for p in big.parameters() if p.requires_grad])
    big(TOKENS).sum().backward()
    optimizer.step()
    state = sum(v.numel() * v.element_size() for s in optimizer.state.values() for v in s.values())
    wanted = peak_memory(lower(qsync.capture(big, TOKENS), {}), optimizer_bytes=state).peak_bytes
    assert fit.fp32_bytes == wanted and not fit.is_lowered
    assert "here: " in str(fit)


def test_what_fits_in_no_precision_is_refused_and_what_fits_in_one_is_not():
    model = small()
    plan = planned(model, width=128, layers=3)
    batch = TOKENS.repeat(8, 1)
    (whole,) = qsync.check_growth(model, plan, {"t4": 2**40}, batch)
    classes = tuple(
        DeviceClass(name, "cpu", 2, num, (Precision.FP32, Precision.BF16, Precision.INT8))
        for name, num in (("a100", 2**40), ("t4", whole.fp32_bytes - 1))
    )
    strong, weak = qsync.check_growth(model, plan, Cluster(classes, Link(0.0, 1e9)), batch)
    assert not strong.is_lowered and weak.is_lowered
    assert weak.least_bytes < weak.budget_bytes < weak.fp32_bytes and weak.least_in in ("bf16", "int8")
    with pytest.raises(InfeasibleError, match=r"t4: a step of the grown Gpt \(.*\) needs .* MiB in FP32"):
        qsync.check_growth(model, plan, {"t4": weak.least_bytes // 2}, batch)


def test_billions_are_asked_about_on_the_meta_device():
    """A Llama of billions of parameters from one of 0.2, with the cache that it fills: no weight of either
    exists."""
    from transformers import LlamaConfig, LlamaForCausalLM

    config = LlamaConfig(
        vocab_size=32000, hidden_size=2048, intermediate_size=8192, num_hidden_layers=2,
        num_attention_heads=32, num_key_value_heads=8,
    )  # fmt: skip
    with torch.device("meta"):
        model = LlamaForCausalLM(config)
    plan = planned(model, width=16384, layers=3)
    tokens = torch.zeros(1, 128, dtype=torch.int64)
    num = sum(torch.Size(m.shape).numel() for m in plan.tensors.values())
    assert num > 4e9
    with pytest.raises(
        InfeasibleError, match=rf"l4: a step of the grown LlamaForCausalLM \({num:,} "
    ) as told:
        qsync.check_growth(model, plan, {"l4": 24 * 2**30}, {"input_ids": tokens})
    needed = float(str(told.value).partition("needs ")[2].split()[0]) * 2**30
    assert needed > 16 * num  # weights, gradients and two moments


def test_an_optimizer_that_reads_values_takes_its_step():
    """Adafactor scales by the norms of weights and updates: its state is smaller than the weights."""
    model = small()
    plan = planned(model, width=128)
    found = {}
    for make in (torch.optim.SGD, torch.optim.Adafactor, torch.optim.AdamW):
        (fit,) = qsync.check_growth(model, plan, {"here": 2**40}, TOKENS, make_optimizer=make)
        found[make] = fit.fp32_bytes
    big = plan.expand(model)
    optimizer = torch.optim.Adafactor(big.parameters())
    big(TOKENS).sum().backward()
    optimizer.step()
    state = sum(v.numel() * v.element_size() for s in optimizer.state.values() for v in s.values())
    wanted = peak_memory(lower(qsync.capture(big, TOKENS), {}), optimizer_bytes=state).peak_bytes
    assert found[torch.optim.Adafactor] == wanted
    assert found[torch.optim.SGD] < wanted < found[torch.optim.AdamW]


BUDGETS = {
    "a number": 16 * 2**30, "text": {"t4": "16G"}, "less than nothing": {"t4": -1}, "a name": {3: 2**30},
    "no number": {"t4": float("nan")}, "no end": {"t4": float("inf")}, "a flag": {"t4": True},
}  # fmt: skip


@pytest.mark.parametrize("budgets", BUDGETS)
def test_budgets_are_bytes_by_class(budgets):
    model = small()
    with pytest.raises(FormatError, match='budget.* found .*; give ."t4": 16'):
        qsync.check_growth(model, planned(model, width=128), BUDGETS[budgets], TOKENS)


def test_other_things_than_a_model_and_its_plan_are_refused():
    model = small()
    plan = planned(model, width=128)
    for wrong in (None, plan.recipe):
        with pytest.raises(FormatError, match="plan is a .*; give what qsync.plan_expansion returns"):
            qsync.check_growth(model, wrong, {"here": 2**40}, TOKENS)
    with pytest.raises(MismatchError, match="the small model has no blocks.1.*; give the model that was"):
        qsync.check_growth(Gpt(1, 64, 4, 64, 50), plan, {"here": 2**40}, TOKENS)
    with pytest.raises(CalibrationError, match="make_optimizer made 3; give a function"):
        qsync.check_growth(model, plan, {"here": 2**40}, TOKENS, make_optimizer=lambda parameters: 3)


def test_an_optimizer_that_cannot_step_there_and_no_budgets_are_refused():
    model = small()
    plan = planned(model, width=128)
    with pytest.raises(FormatError, match="budgets is empty"):
        qsync.check_growth(model, plan, {}, TOKENS)

    class Own(torch.optim.SGD):
        def step(self, closure=None):
            return [value.grad.numpy() for group in self.param_groups for value in group["params"]]

    with pytest.raises(UnsupportedError, match="cannot take a step on the meta device"):
        qsync.check_growth(model, plan, {"here": 2**40}, TOKENS, make_optimizer=lambda p: Own(p, lr=0.1))
