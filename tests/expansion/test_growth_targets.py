"""Growing to another configuration or another call of a builder, and mixtures in the number of experts."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from expanding import tokens, trained
from models import llama
from torch import nn

import qsync
from qsync.errors import MismatchError, QSyncError, UnsupportedError
from qsync.expansion.derivation.growth_targets import derive_growth, plan_config_growth, with_sources
from qsync.expansion.plan.experts import plan_experts
from qsync.experiments.workloads.gpt import Gpt

BATCH = {"input_ids": tokens()}
OPTIONS = {"split": "random", "depth": "zero", "seed": 0}


def made(**options: Any) -> nn.Module:
    torch.manual_seed(0)
    model, _ = llama(num_attention_heads=4, num_key_value_heads=2, **options)
    return trained(model.double())


# -- a builder --


def test_sizes_are_read_off_what_a_builder_returns():
    small = trained(Gpt(2, 32, 2, 16, 50).double())
    asked = []

    def build(is_grown, sizes):
        asked.append((is_grown, sizes.get("sources")))
        return Gpt(3, 48, 3, 16, 50) if is_grown else Gpt(2, 32, 2, 16, 50)

    recipe = derive_growth(small, tokens(), build, eps="none")
    assert recipe.target == {
        "width": 48,
        "mlp": 192,
        "heads": 3,
        "kv_heads": 3,
        "head_dim": 16,
        "layers": 3,
    } | {name: size for name, size in recipe.target.items() if name in ("stream", "normed", "final")}
    assert recipe.eps == "none"
    big = qsync.expand(small, recipe)
    assert asked == [(True, None), (True, (0, 1, 1)), (False, (0, 1))]
    assert qsync.verify_expansion(small, big, tokens()).max_difference <= 1e-9


# -- a configuration --


def test_fields_of_a_config_grow_by_factors_and_sums():
    small = made()
    fields = {
        "intermediate_size": "1.5x",
        "num_hidden_layers": "+1",
        "num_attention_heads": "8",
        "hidden_size": "2x",
    }
    plan = plan_config_growth(small, BATCH, {**fields, "num_key_value_heads": "4"}, **OPTIONS)
    big = plan.expand(small)
    config = big.config
    assert (config.intermediate_size, config.num_hidden_layers, config.hidden_size) == (96, 3, 64)
    assert plan.recipe.eps == "rms_norm_eps" and small.config.hidden_size == 32
    assert qsync.verify_expansion(small, big, BATCH).max_difference <= 1e-9


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"hidden_sise": "2x"}, "no size 'hidden_sise' .found None.; see config.json"),
        ({"rms_norm_eps": "2x"}, "no size 'rms_norm_eps'"),
        ({"inner.hidden_size": "2x"}, "no size 'inner.hidden_size'"),
        ({"hidden_size": "2y"}, "hidden_size cannot become '2y'; give a number"),
        ({"hidden_size": "-4"}, "hidden_size cannot become '-4'"),
        ({"hidden_size": "48,48"}, "hidden_size cannot become '48,48'; .* or 1 of them"),
        ({"hidden_size": "1.3x"}, "1.3 times hidden_size 32 is not whole"),
        ({"vocab_size": "2x"}, "not sizes that grow without loss .they are .*; change those"),
    ],
)
def test_fields_that_cannot_grow_are_one_sentence(fields, message):
    with pytest.raises(QSyncError, match=message):
        plan_config_growth(made(), BATCH, fields, **OPTIONS).expand(made())


def test_each_block_has_the_kind_of_the_one_that_it_copies():
    class Config:
        layer_types, tensor_types, num_hidden_layers = None, None, 3

        def __init__(self) -> None:
            self.layer_types, self.tensor_types = ["a", "b"], "kept"

    small = Config()
    assert with_sources(small, small, {"sources": (0, 1, 1)}).layer_types == ["a", "b", "b"]
    assert with_sources(small, small, {}).layer_types == ["a", "b", "a"]
    assert with_sources(small, small, {"sources": ((0,), (0, 1))}).layer_types == ["a", "b", "a"]
    assert small.layer_types == ["a", "b"] and with_sources(small, small, {}).tensor_types == "kept"


# -- experts --


def mixture(**options: Any) -> nn.Module:
    from transformers import Qwen3MoeConfig, Qwen3MoeForCausalLM

    torch.manual_seed(0)
    config = Qwen3MoeConfig(
        vocab_size=50, hidden_size=16, num_attention_heads=2, num_key_value_heads=1, head_dim=8,
        num_hidden_layers=1, moe_intermediate_size=8, num_experts=4, num_experts_per_tok=2, bos_token_id=1,
        eos_token_id=2, use_cache=False, **options,
    )  # fmt: skip
    return trained(Qwen3MoeForCausalLM(config))  # grouped products have no kernel in FP64


@pytest.mark.parametrize("norm_topk_prob", [True, False])
def test_copies_of_experts_share_the_weight_of_their_source(norm_topk_prob):
    small = mixture(norm_topk_prob=norm_topk_prob)
    fields = {"num_experts": "3x", "num_experts_per_tok": "3x"}
    plan = plan_config_growth(small, BATCH, fields, **OPTIONS)
    big = plan.expand(small)
    assert (big.config.num_experts, big.config.num_experts_per_tok) == (12, 6)
    assert qsync.verify_expansion(small, big, BATCH).max_difference <= 2e-6
    down = big.model.layers[0].mlp.experts.down_proj
    assert not torch.allclose(down[0], down[4]), "copies would stay copies"
    torch.testing.assert_close(down[[0, 4, 8]].mean(0), small.model.layers[0].mlp.experts.down_proj[0])


class Sigmoid(nn.Module):
    """A mixture that weighs each expert by itself, not divided by the sum of those chosen."""

    def __init__(self, experts: int = 4, chosen: int = 2, hidden: int = 5) -> None:
        super().__init__()
        self.inp, self.norm, self.head = nn.Linear(6, 8), nn.LayerNorm(8), nn.Linear(8, 3)
        self.router = nn.Linear(8, experts, bias=False)
        self.up = nn.Parameter(torch.randn(experts, hidden, 8))
        self.down = nn.Parameter(torch.randn(experts, 8, hidden))
        self.chosen = chosen

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.inp(x)
        y = self.norm(x)
        weights, index = self.router(y).sigmoid().topk(self.chosen, -1)
        for nth in range(self.chosen):
            each = index[:, nth]
            hidden = torch.bmm(self.up[each], y[:, :, None]).relu()
            x = x + weights[:, nth, None] * torch.bmm(self.down[each], hidden)[:, :, 0]
        return self.head(x)


SIGMOID = qsync.Recipe(
    "sigmoid", "inp _ -> stream\nnorm stream -> normed\nrouter normed -> _\nup normed -> hidden\n"
    "down hidden -> stream\nhead stream -> _", build=lambda small, sizes: small,
    inputs=torch.randn(7, 6, dtype=torch.float64, generator=torch.Generator().manual_seed(0)),
)  # fmt: skip


def test_whole_weights_of_copies_are_divided():
    torch.manual_seed(0)
    small = Sigmoid().double()
    plan = plan_experts(small, SIGMOID, lambda is_grown: Sigmoid(*(8, 4) if is_grown else (4, 2)).double())
    big = plan.expand(small)
    assert qsync.verify_expansion(small, big, SIGMOID.inputs).max_difference <= 1e-9
    torch.testing.assert_close(big.down[0] + big.down[4], small.down[0])


@pytest.mark.parametrize(
    ("build", "error", "message"),
    [
        (
            lambda is_grown: Sigmoid(8, 2),
            UnsupportedError,
            "would not keep its choice: with 2 copies .* 2 times",
        ),
        (lambda is_grown: Sigmoid(6, 3), UnsupportedError, "only in whole copies of all of them"),
        (lambda is_grown: Sigmoid(10, 5), UnsupportedError, "only in whole copies of all of them"),
        (lambda is_grown: Sigmoid(8, 4, 10), UnsupportedError, "and alone; give a multiple"),
        (lambda is_grown: Sigmoid(4, 2), UnsupportedError, "only in whole copies of all of them"),
        (
            lambda is_grown: nn.Linear(6, 3),
            MismatchError,
            "without .*; change nothing but the number of experts",
        ),
    ],
)
def test_a_choice_that_is_not_kept_is_refused(build, error, message):
    torch.manual_seed(0)
    small = Sigmoid().double()
    with pytest.raises(error, match=message):
        plan_experts(small, SIGMOID, lambda is_grown: (build(True) if is_grown else Sigmoid()).double())


# -- what timm's families needed of a trace --


class Response(nn.Module):
    """A vector and an eps, as a norm has, but of positions (ConvNeXt V2): its vector is a plain one."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.weight, self.eps = nn.Parameter(torch.randn(width)), 1e-6

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        size = x.norm(dim=1, keepdim=True)
        return x + self.weight * x * size / (size.mean(-1, keepdim=True) + self.eps)


class Joined(nn.Module):
    """Biases of queries, keys and values that lie in a row; those of the keys are a buffer of zeros."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads, self.inp, self.head = heads, nn.Linear(6, width), nn.Linear(width, 3)
        self.norm, self.qkv = nn.LayerNorm(width), nn.Linear(width, 3 * width, bias=False)
        self.q_bias, self.v_bias = (nn.Parameter(torch.randn(width)) for _ in range(2))
        self.register_buffer("k_bias", torch.zeros(width), persistent=False)
        self.proj, self.response = nn.Linear(width, width), Response(width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.inp(x)
        bias = torch.cat([self.q_bias, self.k_bias, self.v_bias])
        qkv = F.linear(self.norm(x), self.qkv.weight, bias).view(*x.shape[:2], 3, self.heads, -1)
        mixed = F.scaled_dot_product_attention(*qkv.permute(2, 0, 3, 1, 4).unbind(0))
        x = x + self.proj(mixed.transpose(1, 2).flatten(2))
        return self.head(self.response(F.hardswish(x, inplace=True)))


def test_biases_in_a_row_grow_with_the_matrix_that_they_are_added_to():
    torch.manual_seed(0)
    small = trained(Joined(12, 3).double())
    x = torch.randn(2, 5, 6, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    recipe = derive_growth(
        small, x, lambda is_grown, sizes: Joined(*(24, 6) if is_grown else (12, 3)).double()
    )
    big = qsync.expand(small, recipe)
    assert qsync.verify_expansion(small, big, x).max_difference <= 1e-9
    lines = [line.split() for line in recipe.table.splitlines()]
    assert ["qkv", "final", "->", "query,", "key,", "value"] in lines and ["v_bias", "->", "mixed"] in lines
