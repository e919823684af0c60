"""An optimizer's state grows with its model: moments are those of the grown gradients."""

from __future__ import annotations

import pytest
import torch
from torch.nn.functional import cross_entropy

import qsync
from qsync.errors import FormatError, MismatchError, UnsupportedError
from qsync.expansion.apply.optimizer_state import grown_gradient, is_exact
from qsync.expansion.apply.verification import in_float64
from qsync.experiments.workloads.gpt import Gpt
from qsync.experiments.workloads.resnet import ResNet
from qsync.records.state_division import PART

TOKENS = torch.arange(24).view(2, 12) % 11


def perturbed(model):
    torch.manual_seed(1)
    with torch.no_grad():
        for value in model.parameters():
            value.add_(0.1 * torch.randn_like(value))
    return model.double()


def gpt(**changes):
    torch.manual_seed(0)
    return perturbed(
        Gpt(**{"num_layers": 2, "width": 16, "num_heads": 2, "context": 12, "vocab": 11, **changes})
    )


def batch_of(model):
    if isinstance(model, ResNet):
        return torch.linspace(-1, 1, 4 * 256, dtype=torch.float64).view(4, 1, 16, 16).sin(), torch.arange(4)
    return TOKENS, TOKENS


def gradients(model):
    inputs, targets = batch_of(model)
    model.zero_grad()
    made = model(inputs)
    logits = made.logits if hasattr(made, "logits") else made
    cross_entropy(logits.flatten(0, -2), targets.flatten()).backward()
    return {name: value.grad.clone() for name, value in model.named_parameters()}


def is_copy(m):
    found = torch.ones(m.shape, dtype=torch.bool)
    for dim, axis in enumerate(m.axes):
        if axis is not None:
            shape = [1] * len(m.shape)
            shape[dim] = -1
            found &= axis.growth.is_copy.view(shape)
    return found


@pytest.mark.parametrize(
    ("make", "sizes"),
    [
        (gpt, {"width": 40, "layers": 3}),
        (gpt, {"width": 24, "heads": 2, "mlp": 100}),
        (gpt, {"heads": 2, "width": 40, "head_dim": 20}),
        (lambda: perturbed(ResNet((4, 6, 8), 2)), {"c0": 6, "c1": 9, "c2": 20}),
    ],
)
@pytest.mark.parametrize("split", ["scalar", "even"])
def test_what_is_called_exact_is_the_gradient(make, sizes, split):
    model = make()
    plan = qsync.plan_expansion(model, qsync.recipe_of(model).to(**sizes), split=split)
    before, after = gradients(model), gradients(plan.expand(model))
    exact = [name for name in after if is_exact(plan.tensors[name]) and not plan.tensors[name].is_new]
    assert len(exact) > len(after) / 3
    for name in exact:
        m = plan.tensors[name]
        wanted, copied = grown_gradient(m, before[m.source]), is_copy(m)
        difference = (after[name] - wanted)[copied].norm()
        assert difference <= 1e-9 * after[name].norm(), name


def test_a_norm_behind_which_the_head_is_tied():
    """The tied head reads whole copies, so the norm's have the gradient of one each."""
    transformers = pytest.importorskip("transformers")
    config = transformers.GPT2Config(vocab_size=11, n_embd=12, n_head=3, n_layer=1, n_positions=16,
                                     bos_token_id=1, eos_token_id=2, resid_pdrop=0, embd_pdrop=0,
                                     attn_pdrop=0)  # fmt: skip
    model = perturbed(transformers.GPT2LMHeadModel(config))
    plan = qsync.plan_expansion(model, qsync.recipe_of(model).to(width=24), split="scalar")
    before, after = gradients(model), gradients(plan.expand(model))
    for name in ("transformer.ln_f.weight", "transformer.ln_f.bias"):
        assert is_exact(plan.tensors[name])
        torch.testing.assert_close(after[name], grown_gradient(plan.tensors[name], before[name]))


@pytest.mark.parametrize("kv_heads", [2, 4, 8])
def test_grouped_heads_say_which_gradients_are_exact(kv_heads):
    """Where copies of a key/value head serve other query heads each, its gradient falls apart by head."""
    transformers = pytest.importorskip("transformers")
    torch.manual_seed(0)
    config = transformers.LlamaConfig(
        vocab_size=11, hidden_size=16, intermediate_size=24, num_hidden_layers=1, num_attention_heads=4,
        num_key_value_heads=2, head_dim=4, bos_token_id=0, eos_token_id=1,
    )  # fmt: skip
    model = perturbed(transformers.LlamaForCausalLM(config))
    recipe = qsync.recipe_of(model).to(width=32, heads=8, kv_heads=kv_heads)
    plan = qsync.plan_expansion(model, recipe, split="scalar")
    with in_float64():
        before, after = gradients(model), gradients(plan.expand(model))
    for part, is_shared_out in (("q_proj", False), ("k_proj", kv_heads == 8), ("v_proj", kv_heads == 8)):
        name = f"model.layers.0.self_attn.{part}.weight"
        m = plan.tensors[name]
        assert is_exact(m) != is_shared_out
        difference = (after[name] - grown_gradient(m, before[name])).norm() / after[name].norm()
        assert (difference > 1e-3) if is_shared_out else (difference < 1e-9)


def test_what_is_called_approximate_sums_to_the_gradient():
    model = gpt()
    plan = qsync.plan_expansion(model, qsync.recipe_of(model).to(width=40), split="scalar")
    before, after = gradients(model), gradients(plan.expand(model))
    name = "blocks.0.mlp.proj.bias"
    m = plan.tensors[name]
    assert not is_exact(m)
    growth = m.axes[0].growth
    for made in (after[name], grown_gradient(m, before[name])):
        summed = torch.zeros(16, dtype=torch.float64).index_add(
            0, growth.index[growth.is_copy], made[growth.is_copy]
        )
        summed += made[~growth.is_copy].sum() / 16
        assert torch.allclose(summed, before[name], rtol=1e-9, atol=1e-12)


def trained(model, optimizer, steps=3):
    for _ in range(steps):
        optimizer.zero_grad()
        inputs, targets = batch_of(model)
        cross_entropy(model(inputs).flatten(0, -2), targets.flatten()).backward()
        optimizer.step()
    return optimizer


OPTIMIZERS = {
    "adamw": lambda p: torch.optim.AdamW(p, lr=1e-3, amsgrad=True),
    "sgd": lambda p: torch.optim.SGD(p, lr=1e-3, momentum=0.9),
    "rmsprop": lambda p: torch.optim.RMSprop(p, lr=1e-3, momentum=0.5, centered=True),
    "adagrad": lambda p: torch.optim.Adagrad(p, lr=1e-3),
}


@pytest.mark.parametrize("kind", OPTIMIZERS)
def test_training_goes_on_with_the_state(kind):
    model = gpt()
    optimizer = trained(model, OPTIMIZERS[kind](model.parameters()))
    plan = qsync.plan_expansion(model, qsync.recipe_of(model).to(width=24, layers=3), split="scalar")
    big = plan.expand(model)
    grown = qsync.expand_optimizer(plan, optimizer, model, big)
    new = OPTIMIZERS[kind](big.parameters())
    new.load_state_dict(grown.state_dict)
    assert {name for name in grown.fresh} == {n for n, m in plan.tensors.items() if m.is_new}
    trained(big, new, 1)
    assert all(torch.isfinite(value).all() for value in big.parameters())


STILL = {
    "adamw": lambda p: torch.optim.AdamW(p, lr=0.0),
    "adam with decay": lambda p: torch.optim.Adam(p, lr=0.0, weight_decay=0.1),
    "sgd": lambda p: torch.optim.SGD(p, lr=0.0, momentum=0.9),
    "sgd with decay": lambda p: torch.optim.SGD(p, lr=0.0, momentum=0.9, weight_decay=0.1),
    "rmsprop": lambda p: torch.optim.RMSprop(p, lr=0.0, momentum=0.9, eps=1e-30),
    "rmsprop, centred": lambda p: torch.optim.RMSprop(p, lr=0.0, momentum=0.9, centered=True, eps=1e-30),
    "adagrad": lambda p: torch.optim.Adagrad(p, lr=0.0, initial_accumulator_value=0.1),
}


@pytest.mark.parametrize("kind", STILL)
def test_moments_are_those_that_the_grown_model_would_have(kind):
    """Of a model whose gradient stays the same: the moments of its steps, grown, are those of the grown
    steps."""
    model = gpt()
    plan = qsync.plan_expansion(model, qsync.recipe_of(model).to(width=32), split="scalar")
    big = plan.expand(model)
    optimizer, wanted = (trained(net, STILL[kind](net.parameters())) for net in (model, big))
    grown = qsync.expand_optimizer(plan, optimizer, model, big)
    assert grown.approximate and not grown.fresh
    assert bool(grown.exact) != ("decay" in kind)  # no copied weight is the multiple that its gradient is
    for number, (name, value) in enumerate(big.named_parameters()):
        copied = is_copy(plan.tensors[name])
        if "rmsprop" in kind:  # divides rounding by rounding where a gradient is 0: that of the keys' bias
            copied &= wanted.state[value]["square_avg"] > 1e-24
        for key, made in grown.state_dict["state"][number].items():
            if name in grown.exact and made.ndim:
                own = wanted.state[value][key]
                assert torch.allclose(made[copied], own[copied], rtol=1e-7, atol=1e-17), (name, key)


def test_what_stays_as_it_is_is_exact_under_weight_decay_too():
    model = gpt()
    optimizer = trained(model, STILL["sgd with decay"](model.parameters()))
    plan = qsync.plan_expansion(model, qsync.recipe_of(model).to(layers=3), split="scalar")
    grown = qsync.expand_optimizer(plan, optimizer, model, plan.expand(model))
    assert {"head.weight", "norm.weight", "blocks.0.mlp.fc.weight"} <= set(grown.exact)


@pytest.mark.parametrize("other", ["of another size", "of another depth", "the small one"])
def test_another_model_is_refused(other):
    """Its state would load, and the first step fail."""
    model = gpt()
    optimizer = trained(model, torch.optim.AdamW(model.parameters()))
    plan = qsync.plan_expansion(model, qsync.recipe_of(model).to(width=24, layers=3), split="scalar")
    big = {
        "of another size": gpt(width=32, num_layers=3),
        "of another depth": gpt(width=24),
        "the small one": model,
    }
    with pytest.raises(MismatchError, match="the grown model has .*; give what plan.expand"):
        qsync.expand_optimizer(plan, optimizer, model, big[other])
    with pytest.raises(MismatchError, match="the small model has .*; give the model that was planned for"):
        qsync.expand_optimizer(plan, optimizer, gpt(num_layers=1), plan.expand(model))


def test_elements_that_copy_nothing_take_no_leap():
    """At a late step Adam divides by what it has seen: an element with v = 0 would move over 3 times as
    far."""
    model = gpt()
    optimizer = trained(model, torch.optim.AdamW(model.parameters(), lr=1e-3, weight_decay=0.0), 20)
    for state in optimizer.state.values():
        state["step"].fill_(10_000)
    plan = qsync.plan_expansion(model, qsync.recipe_of(model).to(width=24), split="scalar")
    moved = {}
    for kind in ("carried", "emptied"):
        big = plan.expand(model)
        state = qsync.expand_optimizer(plan, optimizer, model, big).state_dict
        new = torch.optim.AdamW(big.parameters(), lr=1e-3, weight_decay=0.0)
        new.load_state_dict(state)
        weight = big.blocks[0].norm1.bias
        rest = ~plan.tensors["blocks.0.norm1.bias"].axes[0].growth.is_copy
        if kind == "emptied":
            new.state[weight]["exp_avg_sq"][rest] = 0.0
        before = weight.detach().clone()
        trained(big, new, 1)
        moved[kind] = float((weight.detach() - before)[rest].abs().max())
    assert moved["emptied"] > 3e-3 > moved["carried"] > 0


def test_groups_keep_their_options():
    model = gpt()
    matrices = [value for value in model.parameters() if value.ndim > 1]
    others = [value for value in model.parameters() if value.ndim == 1]
    groups = [{"params": matrices, "weight_decay": 0.1}, {"params": others, "weight_decay": 0.0}]
    optimizer = trained(model, torch.optim.AdamW(groups, lr=1e-3))
    plan = qsync.plan_expansion(model, qsync.recipe_of(model).to(width=24, layers=3), split="scalar")
    big = plan.expand(model)
    state = qsync.expand_optimizer(plan, optimizer, model, big).state_dict
    new = torch.optim.AdamW(
        [
            {"params": [v for v in big.parameters() if v.ndim > 1]},
            {"params": [v for v in big.parameters() if v.ndim == 1]},
        ]
    )
    new.load_state_dict(state)
    assert [group["weight_decay"] for group in new.param_groups] == [0.1, 0.0]
    for group in new.param_groups:
        for value in group["params"]:
            assert value not in new.state or new.state[value]["exp_avg"].shape == value.shape


def test_a_state_dict_will_do():
    model = gpt()
    optimizer = trained(model, torch.optim.AdamW(model.named_parameters(), lr=1e-3))
    plan = qsync.plan_expansion(model, qsync.recipe_of(model).to(width=24), split="scalar")
    big = plan.expand(model)
    first = qsync.expand_optimizer(plan, optimizer, model, big).state_dict["state"]
    second = qsync.expand_optimizer(plan, optimizer.state_dict(), model, big).state_dict["state"]
    assert first.keys() == second.keys()
    assert all(torch.equal(first[k]["exp_avg"], second[k]["exp_avg"]) for k in first)


def test_what_cannot_come_along():
    model = gpt()
    optimizer = trained(model, torch.optim.AdamW(model.parameters()))
    recipe = qsync.recipe_of(model).to(width=24)
    plan = qsync.plan_expansion(model, recipe, split="random")
    with pytest.raises(UnsupportedError, match='grow with split="scalar"'):
        qsync.expand_optimizer(plan, optimizer, model, plan.expand(model))
    plan = qsync.plan_expansion(model, recipe, split="scalar")
    big = plan.expand(model)
    with pytest.raises(MismatchError, match="that the model lacks"):
        qsync.expand_optimizer(plan, optimizer, gpt(), big)
    with pytest.raises(MismatchError, match="one rank's part .*, and give what rank 0 got"):
        qsync.expand_optimizer(plan, {**optimizer.state_dict(), PART: [0]}, model, big)
    with pytest.raises(MismatchError, match="not an optimizer's state dict"):
        qsync.expand_optimizer(plan, {"model": 1}, model, big)
    for wrong in (None, torch.optim.lr_scheduler.ConstantLR(optimizer)):
        with pytest.raises(FormatError, match="optimizer is a .*; give what torch.optim.AdamW"):
            qsync.expand_optimizer(plan, wrong, model, big)
    with pytest.raises(FormatError, match="plan is a Recipe, .*; give what qsync.plan_expansion returns"):
        qsync.expand_optimizer(recipe, optimizer, model, big)
    halves = [{"params": part} for part in (list(model.parameters())[::2], list(model.parameters())[1::2])]
    with pytest.raises(UnsupportedError, match="the 2 groups .* do not name their parameters"):
        qsync.expand_optimizer(plan, torch.optim.AdamW(halves).state_dict(), model, big)
    few = torch.optim.AdamW(list(model.parameters())[:3])
    with pytest.raises(MismatchError, match="has 3 parameters, but the model"):
        qsync.expand_optimizer(plan, few.state_dict(), model, big)
    state = optimizer.state_dict()
    state["state"][99] = state["state"][0]
    with pytest.raises(MismatchError, match="has an entry 99 that no group lists"):
        qsync.expand_optimizer(plan, state, model, big)
    state = optimizer.state_dict()
    state["state"][0]["curvature"] = torch.ones(11, 16)
    with pytest.raises(UnsupportedError, match="unknown entry 'curvature' for tokens.weight"):
        qsync.expand_optimizer(plan, state, model, big)
    state = optimizer.state_dict()
    state["state"][0]["exp_avg"] = torch.ones(3)
    with pytest.raises(MismatchError, match="exp_avg of tokens.weight has shape"):
        qsync.expand_optimizer(plan, state, model, big)
