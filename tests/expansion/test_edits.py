"""What was edited by hand in a model is in the grown one too, or growth is refused with the module's name."""

from __future__ import annotations

import logging
from dataclasses import replace

import pytest
import torch
from expanding import made, recipe, tokens, trained
from models import gpt2, llama
from torch import nn
from user_models import NET, Net

import qsync
from qsync.errors import UnsupportedError


def edited_gpt2():
    small = trained(gpt2()[0].double())
    return small, qsync.recipe_of(small)


def are_alike(small, big):
    return qsync.verify_expansion(small, big, {"input_ids": tokens()}).max_difference <= 1e-9


def test_modules_without_parameters_are_carried_over():
    small, given = edited_gpt2()
    shared = nn.ReLU()
    for block in small.transformer.h:
        block.mlp.act = shared
        block.mlp.dropout.p = 0.5
    small.transformer.h[1].mlp.act = nn.Sequential(nn.Tanh(), nn.LeakyReLU(0.3))
    big = qsync.expand(small.eval(), given.to(width=48, layers=4))
    assert are_alike(small, big)
    blocks = big.transformer.h
    assert [type(block.mlp.act) for block in blocks] == [nn.ReLU] * 2 + [nn.Sequential] * 2
    assert all(block.mlp.dropout.p == 0.5 for block in blocks)
    assert all(not module.training for module in big.modules())
    assert not {id(m) for m in small.modules()} & {id(m) for m in big.modules()}


def test_modules_between_others_are_carried_over():
    small, given = edited_gpt2()
    small.transformer.h[0].mlp.act = nn.Sequential(nn.ReLU(), nn.Tanh())
    big = qsync.expand(small, given.to(width=48))
    del small.transformer.h[0].mlp.act[1]
    assert not are_alike(small, big)
    assert are_alike(small, qsync.expand(small, given.to(width=48)))


def test_attributes_of_modules_with_parameters_are_carried_over():
    small = trained(llama()[0].double())
    for layer in small.model.layers:
        layer.self_attn.scaling *= 3.0
        layer.self_attn.attention_dropout = 0.4
    heads = qsync.plan_expansion(small, qsync.recipe_of(small).to(layers=3)).small["heads"]
    big = qsync.expand(small, qsync.recipe_of(small).to(heads=2 * heads, layers=3))
    assert are_alike(small, big)
    assert {layer.self_attn.attention_dropout for layer in big.model.layers} == {0.4}


def test_tuples_of_a_convolution_are_carried_over():
    small, inputs = made("HF ResNet, basic")
    small.resnet.embedder.embedder.convolution.stride = (1, 1)
    big = qsync.expand(small, recipe("HF ResNet, basic", small))
    assert big.resnet.embedder.embedder.convolution.stride == (1, 1)
    assert qsync.verify_expansion(small, big, inputs).max_difference <= 1e-9


def test_the_sizes_are_those_of_the_grown_model():
    small, given = edited_gpt2()
    big = qsync.expand(small, given.to(width=48, layers=3))
    fresh = type(small)(big.config)
    for one, other in zip(big.modules(), fresh.modules(), strict=True):
        assert {k: v for k, v in vars(one).items() if type(v) is int} == {
            k: v for k, v in vars(other).items() if type(v) is int
        }


def test_an_edit_that_depends_on_the_sizes_is_refused():
    small, given = edited_gpt2()
    heads = small.config.n_head
    small.transformer.h[1].attn.scaling = 1.0
    assert are_alike(small, qsync.expand(small, given.to(width=64, heads=2 * heads)))
    with pytest.raises(UnsupportedError, match=r"transformer\.h\.1\.attn\.scaling is 1\.0"):
        qsync.expand(small, given.to(width=64, heads=heads))


def test_an_edited_flag_of_attention_counts_as_that_of_the_config():
    small, given = edited_gpt2()
    small.transformer.h[1].attn.scale_attn_weights = False
    with pytest.raises(UnsupportedError, match="not scaled by the width of its heads"):
        qsync.expand(small, given.to(width=64, heads=small.config.n_head))
    small, given = edited_gpt2()
    small.transformer.h[1].attn.scale_attn_by_inverse_layer_idx = True
    with pytest.raises(UnsupportedError, match="scaled by its layer's number"):
        qsync.expand(small, given.to(layers=3))


def test_another_class_with_parameters_is_refused():
    class Doubled(nn.Linear):
        def forward(self, x):
            return 2 * super().forward(x)

    class Norm(nn.LayerNorm):
        pass

    small = trained(Net().double())
    small.norm2.__class__ = Norm
    assert type(qsync.expand(small, NET.to(width=32)).norm2) is nn.LayerNorm
    small.fc.__class__ = Doubled
    with pytest.raises(UnsupportedError, match="fc is a Doubled, but `build` of the recipe net"):
        qsync.expand(small, NET.to(width=32))


def test_nan_is_no_edit():
    class Best(Net):
        def __init__(self, *sizes):
            super().__init__(*sizes)
            self.best = float("nan")

    given = replace(NET, build=lambda small, sizes: Best(sizes["width"], sizes["hidden"]))
    assert type(qsync.expand(trained(Best().double()), given.to(width=32))) is Best


def test_recomputation_is_asked_for_anew():
    small, given = edited_gpt2()
    small._set_gradient_checkpointing()
    assert small.transformer.gradient_checkpointing
    big = qsync.expand(small, given.to(width=48)).train()
    assert not big.transformer.gradient_checkpointing
    big(input_ids=tokens(), labels=tokens()).loss.backward()


def test_hooks_are_warned_of_once(caplog):
    small, given = edited_gpt2()
    small(input_ids=tokens(), output_hidden_states=True)  # transformers adds hooks
    with caplog.at_level(logging.WARNING, "qsync"):
        qsync.expand(small, given.to(width=48))
        assert not caplog.records
        for block in small.transformer.h:
            block.register_forward_hook(lambda *_: None)
        big = qsync.expand(small, given.to(width=48))
    (record,) = caplog.records
    assert "transformer.h.0 has forward hooks" in record.getMessage()
    assert not any(module._forward_hooks for module in big.modules())


def test_the_random_state_stays():
    small, given = edited_gpt2()
    before = torch.get_rng_state()
    qsync.expand(small, given.to(width=48))
    assert torch.equal(before, torch.get_rng_state())
