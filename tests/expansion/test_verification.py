"""Whether two models are the same function is found by running both; what cannot be told is said."""

from __future__ import annotations

import pytest
import torch
from expanding import made, recipe, tokens
from torch import nn
from user_models import NET, ROWS, Net

import qsync
from qsync.errors import CalibrationError, FormatError, UnsupportedError


def grown(family="Gpt"):
    small, inputs = made(family)
    return small, qsync.expand(small, recipe(family, small)), inputs


def test_one_element_off_by_a_millionth_is_found():
    small, big, inputs = grown()
    assert qsync.verify_expansion(small, big, inputs).passed
    with torch.no_grad():
        big.blocks[1].mlp.proj.weight[3, 5] += 1e-6
    verified = qsync.verify_expansion(small, big, inputs)
    assert not verified.passed and 1e-9 < verified.max_difference < 1e-4
    assert str(verified).startswith("NOT the same function: difference ")


def test_it_says_what_it_tolerates():
    small, big, inputs = grown()
    assert str(qsync.verify_expansion(small, big, inputs)).endswith(", tolerance 1e-09")
    assert str(qsync.verify_expansion(small.float(), big, inputs)).endswith(", tolerance 1e-04")
    assert not qsync.verify_expansion(small, big, inputs, tolerance=0.0).passed


def test_both_models_stay_as_they_are():
    small, big, inputs = grown("Llama")
    small, big = small.float().train(), big.float().train()
    default, random = torch.get_default_dtype(), torch.get_rng_state()
    before = small.state_dict()["lm_head.weight"].clone()
    qsync.verify_expansion(small, big, inputs)
    assert small.training and big.training and torch.get_default_dtype() == default
    assert torch.equal(random, torch.get_rng_state())
    assert torch.equal(before, small.lm_head.weight) and small.lm_head.weight.dtype == torch.float32


def test_dropout_is_off():
    model = nn.Sequential(nn.Linear(5, 3), nn.Dropout(0.5)).train()
    assert qsync.verify_expansion(model, model, ROWS).max_difference == 0.0


def test_a_model_s_own_fp32_is_fp64():
    """Llama norms in FP32 whatever its weights are, which would leave 1e-7."""
    small, big, inputs = grown("Llama")
    assert qsync.verify_expansion(small, big, inputs).max_difference < 1e-12


@pytest.mark.parametrize(
    "ask", [lambda x: x.float(), lambda x: x.to(torch.float32), lambda x: x.type(torch.float32)]
)
def test_fp32_asked_for_in_any_way_is_fp64(ask):
    class Asking(nn.Linear):
        def forward(self, x):
            return ask(super().forward(x))

    asking, plain = Asking(5, 3).double(), nn.Linear(5, 3).double()
    plain.load_state_dict(asking.state_dict())
    assert qsync.verify_expansion(asking, plain, ROWS).max_difference == 0.0


class Outputs(nn.Module):
    def __init__(self, outputs):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(1, dtype=torch.float64))
        self.outputs = outputs

    def forward(self, x):
        return {name: self.weight * value for name, value in self.outputs.items()}


def outputs(**values):
    return Outputs({name: torch.tensor(value, dtype=torch.float64) for name, value in values.items()})


def test_every_output_counts_and_those_that_grew_are_named():
    small = outputs(logits=[1.0, 2.0], loss=[3.0], hidden=[1.0])
    verified = qsync.verify_expansion(small, outputs(logits=[1.0, 2.0], loss=[4.0], hidden=[1.0, 1.0]), ROWS)
    assert verified.max_difference == 1.0 and verified.num_compared == 2
    assert verified.not_compared == ("['hidden']",)


@pytest.mark.parametrize("wrong", [float("nan"), float("inf")])
@pytest.mark.parametrize("name", ["first", "second"])
def test_what_is_not_finite_is_no_agreement(name, wrong):
    small, big = (
        outputs(first=[1.0], second=[1.0]),
        outputs(**{"first": [1.0], "second": [1.0], name: [wrong]}),
    )
    for pair in ((small, big), (big, small), (big, big)):
        with pytest.raises(CalibrationError, match="NaN or Inf on these inputs; give a batch"):
            qsync.verify_expansion(*pair, ROWS)


def test_nothing_that_can_be_compared():
    with pytest.raises(
        UnsupportedError, match="no outputs of the same shape; compare them with their training heads"
    ):
        qsync.verify_expansion(outputs(hidden=[1.0]), outputs(hidden=[1.0, 1.0]), ROWS)


def test_an_empty_batch():
    small = Net()
    with pytest.raises(CalibrationError):
        qsync.verify_expansion(small, qsync.expand(small, NET.to(width=32)), ROWS[:0])


def test_inputs_are_a_tensor_a_tuple_or_named():
    small, big, inputs = grown()
    assert torch.equal(inputs, tokens())
    for given in (inputs, (inputs,), {"tokens": inputs}):
        assert qsync.verify_expansion(small, big, given).passed


def test_inputs_that_the_model_does_not_take():
    small, big, inputs = grown()
    for wrong in ({"nope": inputs}, inputs.double(), inputs + 10**6):
        with pytest.raises(CalibrationError, match="Gpt cannot run on these inputs .*; give a batch"):
            qsync.verify_expansion(small, big, wrong)


@pytest.mark.parametrize("tolerance", [-1.0, float("nan"), float("inf"), "x", True], ids=str)
def test_what_is_no_tolerance(tolerance):
    small, big, inputs = grown()
    with pytest.raises(FormatError, match="tolerance must be a number from 0 on"):
        qsync.verify_expansion(small, big, inputs, tolerance=tolerance)
    with pytest.raises(FormatError, match="big must be a torch.nn.Module, found None"):
        qsync.verify_expansion(small, None, inputs)
