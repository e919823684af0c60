"""A grown model computes what the small one does: every family, any width, any depth, every split."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from expanding import FAMILIES, call, images, made, recipe, tokens, trained, whole_state
from models import gpt2, llama, vit

import qsync
from qsync.expansion.apply.grow import grow
from qsync.expansion.apply.verification import in_float64
from qsync.expansion.maps.tensor_maps import SPLITS
from qsync.experiments.workloads.bert import Bert
from qsync.experiments.workloads.gpt import Gpt
from qsync.experiments.workloads.vit import Vit

BATCH_NORMS = ("ResNet", "HF ResNet, basic", "HF ResNet, bottleneck")


def difference(small, big, inputs):
    verified = qsync.verify_expansion(small, big, inputs)
    assert not verified.is_relative and not verified.not_compared
    return verified.max_difference


@pytest.mark.parametrize("split", SPLITS)
@pytest.mark.parametrize("family", FAMILIES)
def test_every_family_grows_without_loss(family, split):
    small, inputs = made(family)
    big = qsync.expand(small, recipe(family, small), split)
    assert type(big) is type(small)
    assert sum(p.numel() for p in big.parameters()) > sum(p.numel() for p in small.parameters())
    assert difference(small, big, inputs) <= 1e-9


@pytest.mark.parametrize("family", ["Gpt, tied", "Vit", "GPT-2", "HF ViT", "Llama", "Qwen2"])
def test_new_blocks_that_cancel_add_nothing(family):
    small, inputs = made(family)
    assert difference(small, qsync.expand(small, recipe(family, small), depth="cancel"), inputs) <= 1e-9


@pytest.mark.parametrize("split", SPLITS)
@pytest.mark.parametrize("family", FAMILIES)
def test_the_gradient_comes_back_through_the_growth(family, split):
    """Growth is a differentiable map that keeps the function, so that it keeps the function's gradient."""
    small, inputs = made(family)
    plan = qsync.plan_expansion(small, recipe(family, small), split=split)
    big = grow(small, plan)
    parameters = dict(small.named_parameters())
    with in_float64():
        output = call(small, inputs)
        weights = torch.randn(output.shape, generator=torch.Generator().manual_seed(1))
        wanted = torch.autograd.grad((output * weights).sum(), list(parameters.values()), allow_unused=True)
        output = call(big, inputs, plan.grown(whole_state(small)))
        found = torch.autograd.grad((output * weights).sum(), list(parameters.values()), allow_unused=True)
    largest = max(float(g.abs().max()) for g in wanted if g is not None)
    for name, a, b in zip(parameters, wanted, found, strict=True):
        assert (a is None) == (b is None), name
        assert a is None or float((a - b).abs().max()) <= 1e-9 * largest, name


@pytest.mark.parametrize("width", [512, 640, 768, 960])
@pytest.mark.parametrize("family", ["Gpt", "Gpt, tied", "Vit", "GPT-2", "HF ViT", "Llama"])
def test_any_width(family, width):
    torch.manual_seed(0)
    options = {"num_attention_heads": 6, "num_hidden_layers": 1, "hidden_size": 384}
    of_gpt2 = {"n_embd": 384, "n_head": 6, "n_layer": 1, "bos_token_id": 1, "eos_token_id": 2}
    model, inputs = {
        "Gpt": lambda: (Gpt(1, 384, 6, 8, 50, hidden=384), tokens()),
        "Gpt, tied": lambda: (Gpt(1, 384, 6, 8, 50, True, hidden=384), tokens()),
        "Vit": lambda: (Vit(1, 384, 6, 8, hidden=384), images()),
        "GPT-2": lambda: gpt2(**of_gpt2, n_inner=384),
        "HF ViT": lambda: vit(**options, intermediate_size=384),
        "Llama": lambda: llama(**options, num_key_value_heads=3, intermediate_size=384),
    }[family]()
    small = trained(model.double())
    assert difference(small, qsync.expand(small, qsync.recipe_of(small).to(width=width)), inputs) <= 1e-9


@pytest.mark.parametrize("depth", ["zero", "cancel"])
@pytest.mark.parametrize("sizes", [{"layers": 7}, {"layers": 9}, {"layers": 12}, {"layers": 9, "width": 24}])
def test_up_to_twice_the_depth(sizes, depth):
    small = trained(Gpt(6, 16, 2, 8, 50).double())
    big = qsync.expand(small, Gpt.recipe.to(**sizes), depth=depth)
    assert len(big.blocks) == sizes["layers"]
    assert difference(small, big, tokens()) <= 1e-9


@pytest.mark.parametrize(
    ("family", "sizes"),
    [
        ("Gpt", {"mlp": 151}),
        ("Gpt", {"width": 64, "heads": 4}),
        ("Gpt", {"width": 48, "heads": 2}),  # heads of 16 become heads of 24
        ("Gpt, tied", {"width": 120, "heads": 3}),
        ("Bert", {"width": 64, "heads": 2}),
        ("GPT-2", {"width": 48, "heads": 2, "mlp": 300}),
        ("Llama", {"heads": 6, "kv_heads": 3}),  # groups, and heads per group as they were
        ("Llama", {"heads": 6, "kv_heads": 2}),  # heads per group
        ("Llama", {"heads": 10, "kv_heads": 5, "width": 33, "mlp": 70}),
        ("Llama", {"heads": 4, "kv_heads": 4}),  # as many groups as heads: each reads its own from then on
        ("Llama", {"heads": 9, "kv_heads": 3}),
    ],
)
def test_hidden_widths_and_heads_by_themselves(family, sizes):
    small, inputs = made(family)
    big = qsync.expand(small, recipe(family, small, **sizes))
    assert difference(small, big, inputs) <= 1e-9


@pytest.mark.parametrize("family", ["Gpt, tied", "HF ViT", "Llama", "HF BERT", "ResNet", "Vgg"])
def test_in_fp32_the_difference_is_of_its_rounding(family):
    small, inputs = made(family)
    small = small.float()
    big = qsync.expand(small, recipe(family, small))
    assert {p.dtype for p in big.parameters()} == {torch.float32}
    verified = qsync.verify_expansion(small, big, inputs)
    assert verified.is_relative and verified.tolerance == 1e-4 and verified.passed


@pytest.mark.parametrize("family", ["Gpt", "Llama, tied", "HF ViT"])
def test_growing_twice_is_without_loss_too(family):
    small, inputs = made(family)
    middle = qsync.expand(small, recipe(family, small, width=48, layers=3))
    large = qsync.expand(middle, recipe(family, middle, width=80, layers=5), depth="cancel", seed=1)
    assert difference(small, large, inputs) <= 1e-9


@pytest.mark.parametrize("split", SPLITS)
@pytest.mark.parametrize("family", FAMILIES)
def test_to_the_same_sizes_is_the_same_model_to_the_bit(family, split):
    small, _ = made(family)
    sizes = {
        k: v for k, v in qsync.plan_expansion(small, recipe(family, small)).small.items() if k != "layers"
    }
    same = qsync.expand(small, recipe(family, small, **sizes), split)
    before, after = small.state_dict(), same.state_dict()
    assert before.keys() == after.keys()
    assert all(torch.equal(before[name], after[name]) for name in before)
    places = {p.data_ptr() for p in small.parameters()}
    assert not places & {p.data_ptr() for p in same.parameters()}


def altered(plan, change):
    """The plan with some of its maps changed: `change` gives a new map, or None."""
    tensors = {name: change(m) or m for name, m in plan.tensors.items()}
    assert any(a is not b for a, b in zip(tensors.values(), plan.tensors.values(), strict=True))
    return replace(plan, tensors=tensors)


def is_norm(m):
    return "norm" in m.name and m.name.endswith("weight")


CONTROLS = {
    "sqrt(s) missing": lambda m: replace(m, factor=1.0 / 2) if is_norm(m) else None,
    "not divided for the tied head": lambda m: (
        replace(m, factor=2 * m.factor) if "norm.w" in m.name else None
    ),
    "copies that do not share": lambda m: (
        _with_axis(m, shares=torch.ones(192)) if "mlp.proj.w" in m.name else None
    ),
    "a new block's bias": lambda m: (
        replace(m, output_init="") if m.name == "blocks.2.mlp.proj.bias" else None
    ),
    "a bias not divided": lambda m: replace(m, factor=1.0) if m.name == "norm.bias" else None,
    "positions with another rest": lambda m: _with_growth(m, rest="zero") if "positions" in m.name else None,
    "a free rest where it is read": lambda m: _with_growth(m, rest="free") if "tokens" in m.name else None,
}


def _with_axis(m, **changes):
    return replace(m, axes=tuple(a and (replace(a, **changes) if a.is_read else a) for a in m.axes))


def _with_growth(m, **changes):
    noise = {"rest_noise": 0.1} if changes["rest"] == "free" else {}
    axes = tuple(a and replace(a, growth=replace(a.growth, **changes)) for a in m.axes)
    return replace(m, axes=axes, **noise)


@pytest.mark.parametrize("control", CONTROLS)
def test_what_is_left_out_shows(control):
    small, inputs = made("Gpt, tied")
    plan = qsync.plan_expansion(small, Gpt.recipe.to(width=80, layers=3, mlp=192))
    assert qsync.verify_expansion(small, grow(small, plan), inputs).passed
    wrong = grow(small, altered(plan, CONTROLS[control]))
    assert not qsync.verify_expansion(small, wrong, inputs).passed


def test_an_eps_as_it_was_shows():
    small, inputs = made("Gpt")
    big = qsync.expand(small, Gpt.recipe.to(width=80))
    assert {m.eps for m in big.modules() if isinstance(m, torch.nn.LayerNorm)} == {64 / 80 * 1e-5}
    for module in big.modules():
        if isinstance(module, torch.nn.LayerNorm):
            module.eps = 1e-5
    assert not qsync.verify_expansion(small, big, inputs).passed


def test_heads_that_become_wider_unscaled_show():
    small, inputs = made("Gpt")
    plan = qsync.plan_expansion(small, Gpt.recipe.to(width=48, heads=2))
    unscaled = altered(plan, lambda m: _unscaled(m) if "qkv" in m.name else None)
    assert qsync.verify_expansion(small, grow(small, plan), inputs).passed
    assert not qsync.verify_expansion(small, grow(small, unscaled), inputs).passed


def _unscaled(m):
    return replace(m, axes=tuple(a and replace(a, growth=replace(a.growth, scale=None)) for a in m.axes))


def test_what_is_drawn_not_projected_shows():
    """A copy that is a rest by name gets its draw as it is, and not less the mean over the copies."""
    small, inputs = made("Vgg")
    plan = qsync.plan_expansion(small, recipe("Vgg", small))
    state = plan.grown(small.state_dict())
    drawn = torch.randn(state["classifier.2.weight"].shape, generator=torch.Generator().manual_seed(0))
    big = grow(small, plan)
    big.load_state_dict({**state, "classifier.2.weight": state["classifier.2.weight"] + 1e-3 * drawn})
    assert not qsync.verify_expansion(small, big, inputs).passed


def test_statistics_are_carried():
    small, inputs = made("ResNet")
    big = qsync.expand(small, recipe("ResNet", small))
    assert torch.equal(big.bn.running_var, small.bn.running_var[torch.arange(7) % 4])
    big.bn.running_mean.zero_()
    assert not qsync.verify_expansion(small, big, inputs).passed


def test_one_seed_is_one_model_and_another_another():
    small, _ = made("Gpt")
    states = [qsync.expand(small, Gpt.recipe.to(width=48), seed=seed).state_dict() for seed in (3, 3, 4)]
    assert all(torch.equal(states[0][name], states[1][name]) for name in states[0])
    assert not torch.equal(states[0]["head.weight"], states[2]["head.weight"])


def test_nothing_else_is_touched():
    small, _ = made("Gpt")
    small.train()
    small.blocks[0].eval()
    small.positions.weight.requires_grad_(False)
    before = {name: value.clone() for name, value in small.state_dict().items()}
    random = torch.get_rng_state()
    big = qsync.expand(small, Gpt.recipe.to(width=48, layers=4))
    assert torch.equal(random, torch.get_rng_state())
    assert all(torch.equal(before[name], value) for name, value in small.state_dict().items())
    assert small.training and not small.blocks[0].training and small.blocks[1].training
    assert big.training and [block.training for block in big.blocks] == [False, False, True, True]
    assert [n for n, p in big.named_parameters() if not p.requires_grad] == ["positions.weight"]
    assert big.head.weight.grad_fn is None and big.head.weight.is_leaf


def test_a_config_says_the_sizes_and_the_eps():
    small, _ = made("Llama")
    big = qsync.expand(small, recipe("Llama", small, width=48, layers=3))
    found = big.config
    assert (found.hidden_size, found.num_attention_heads, found.num_key_value_heads) == (48, 6, 3)
    assert (found.num_hidden_layers, found.intermediate_size) == (3, 96)
    assert found.rms_norm_eps == pytest.approx(small.config.rms_norm_eps * 32 / 48)
    assert small.config.hidden_size == 32


def test_the_average_of_weights_grows_as_the_weights_do():
    """What is drawn is the same for both, so that the growth of an average is the average of growths."""
    small, _ = made("Gpt")
    other = trained(made("Gpt")[0], seed=5)
    plan = qsync.plan_expansion(small, Gpt.recipe.to(width=48, layers=3), depth="cancel")
    one, two = small.state_dict(), other.state_dict()
    average = plan.grown({name: 0.9 * one[name] + 0.1 * two[name] for name in one})
    grown, grown_two = plan.grown(one), plan.grown(two)
    for name, value in average.items():
        assert torch.allclose(value, 0.9 * grown[name] + 0.1 * grown_two[name], rtol=0, atol=1e-12), name


@pytest.mark.parametrize(
    "model",
    ["BertForPreTraining", "BertForTokenClassification", "GPT2ForTokenClassification",
     "LlamaForQuestionAnswering", "ViTForMaskedImageModeling"],
)  # fmt: skip
def test_other_heads_of_a_family(model):
    """Among them that of BERT's own pre-training, tied to its embeddings, which Post-LN doubles."""
    import transformers

    sizes = {"vocab_size": 50, "num_hidden_layers": 1, "hidden_size": 16, "num_attention_heads": 2}
    options: dict[str, dict[str, object]] = {
        "Bert": {**sizes, "intermediate_size": 24},
        "GPT2": {
            "vocab_size": 50,
            "n_embd": 16,
            "n_layer": 1,
            "n_head": 2,
            "bos_token_id": 1,
            "eos_token_id": 2,
        },
        "Llama": {**sizes, "intermediate_size": 24},
        "ViT": {**sizes, "intermediate_size": 24, "image_size": 16, "patch_size": 4},
    }
    family = model.partition("For")[0]
    config = getattr(transformers, f"{family}Config")(**options[family])
    small = trained(getattr(transformers, model)(config).double())
    inputs = {"pixel_values": images(16, 3)} if family == "ViT" else {"input_ids": tokens()}
    assert difference(small, qsync.expand(small, qsync.recipe_of(small).to(width=32)), inputs) <= 1e-9


def test_a_pooler_grows_with_its_model():
    from transformers import ViTConfig, ViTModel

    config = ViTConfig(
        image_size=16,
        patch_size=4,
        hidden_size=16,
        num_hidden_layers=1,
        num_attention_heads=2,
        intermediate_size=24,
    )
    small = trained(ViTModel(config).double())
    big = qsync.expand(small, qsync.recipe_of(small).to(width=24))
    before, after = (m(images(16, 3)).pooler_output for m in (small, big))
    assert after.shape == (2, 24) and torch.allclose(before, after[:, :16], rtol=0, atol=1e-9)


def test_post_ln_grows_to_its_multiples():
    small = trained(Bert(1, 16, 2, 16, 50).double())
    big = qsync.expand(small, Bert.recipe.to(width=48))
    assert difference(small, big, tokens()) <= 1e-9
