"""A grown model goes on learning: its copies part, and every coordinate that is new takes its share."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from expanding import call, made, recipe, rests, tokens, trained

import qsync
from qsync.expansion.apply.grow import grow
from qsync.experiments.workloads.gpt import Gpt

TO = {"width": 24, "mlp": 128}
TARGETS = torch.randint(0, 50, (2, 8), generator=torch.Generator().manual_seed(1))


def gpt(**options):
    return trained(Gpt(2, 16, 2, 8, 50, **options).double()).train()


def loss_of(model):
    return F.cross_entropy(model(tokens()).flatten(0, 1), TARGETS.flatten())


def gradients(model):
    model.zero_grad()
    loss_of(model).backward()
    return {name: p.grad for name, p in model.named_parameters()}


def train(model, steps):
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    for _ in range(steps):
        optimizer.zero_grad()
        loss_of(model).backward()
        optimizer.step()
    return model


def apart(rows):
    """How far the 64 hidden neurons are from their copies."""
    return float((rows[:64] - rows[64:]).detach().abs().max())


@pytest.mark.parametrize("split", ["random", "scalar", "even"])
def test_the_loss_of_step_0_is_the_small_model_s(split):
    small = gpt()
    big = qsync.expand(small, Gpt.recipe.to(**TO, layers=3), split)
    assert loss_of(big).item() == pytest.approx(loss_of(small).item(), abs=1e-12)


@pytest.mark.parametrize("split", ["random", "scalar"])
def test_gradients_of_copies_differ(split):
    found = gradients(qsync.expand(gpt(), Gpt.recipe.to(**TO), split))["blocks.0.mlp.fc.bias"]
    assert apart(found) > 1e-2 * float(found.abs().max())


@pytest.mark.parametrize("split", ["random", "scalar"])
def test_copies_part_as_they_train(split):
    big = qsync.expand(gpt(), Gpt.recipe.to(**TO), split)
    bias = big.blocks[0].mlp.fc.bias
    assert apart(bias) == 0.0
    optimizer = torch.optim.SGD(big.parameters(), lr=0.01)
    distances = []
    for _ in range(5):
        gradients(big)
        optimizer.step()
        distances.append(apart(bias))
    assert distances[0] > 0.0 and distances[-1] > 2 * distances[0], distances


def test_copies_of_an_even_split_stay_copies():
    big = qsync.expand(gpt(), Gpt.recipe.to(width=32, mlp=128), "even")
    found = gradients(big)["blocks.0.mlp.fc.bias"]
    assert apart(found) <= 1e-12 * float(found.abs().max())
    optimizer = torch.optim.SGD(big.parameters(), lr=0.1)
    for _ in range(5):
        gradients(big)
        optimizer.step()
    assert apart(big.blocks[0].mlp.fc.bias) <= 1e-12


@pytest.mark.parametrize("family", ["Gpt, tied", "Llama", "HF ViT"])
def test_every_new_coordinate_learns_within_three_steps(family):
    small, inputs = made(family)
    plan = qsync.plan_expansion(small, recipe(family, small, width=48))
    big = grow(small, plan)
    assert rests(plan)
    for name, rows in dead_rests(big, inputs, plan).items():
        assert not rows, f"{name} has no gradient at {rows}"


@pytest.mark.parametrize(
    ("family", "tensors"),
    [
        ("Gpt", ["blocks.0.norm1.weight", "blocks.0.norm1.bias", "blocks.1.mlp.fc.weight", "norm.weight"]),
        ("Llama", ["model.embed_tokens.weight", "model.norm.weight", "lm_head.weight"]),
    ],
)
def test_with_nothing_in_the_new_coordinates_they_stay_dead(family, tensors):
    """Norms with zeros for zeta, readers with columns of zeros: each waits for the other. A LayerNorm's mean
    still tells its stream's rest of the others."""
    small, inputs = made(family)
    plan = qsync.plan_expansion(small, recipe(family, small, width=48), split="even")
    dead = dead_rests(grow(small, plan), inputs, plan)
    for name in tensors:
        assert len(dead[name]) == 16, name


def dead_rests(big, inputs, plan):
    """After three steps, the coordinates of every rest that have no gradient."""
    optimizer = torch.optim.SGD(big.parameters(), lr=1e-2)
    output = call(big, inputs)
    goal = torch.randn(output.shape, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    for _ in range(4):
        optimizer.zero_grad()
        (call(big, inputs) - goal).square().mean().backward()
        optimizer.step()
    found = {}
    for name, axes in rests(plan).items():
        gradient = dict(big.named_parameters(remove_duplicate=False))[name].grad
        for dim, is_rest in axes:
            others = [d for d in range(gradient.ndim) if d != dim]
            heard = gradient.abs().amax(others) if others else gradient.abs()
            found.setdefault(name, []).extend((is_rest & (heard == 0)).nonzero().flatten().tolist())
    return found


@pytest.mark.parametrize("sizes", [{"layers": 3}, {"layers": 3, "width": 24}])
def test_what_a_new_block_learns_first(sizes):
    """Zeros let only what adds to the stream learn; what cancels lets all of the block."""
    learns = {}
    for depth in ("zero", "cancel"):
        found = gradients(qsync.expand(gpt(), Gpt.recipe.to(**sizes), depth=depth))
        block = {name: g for name, g in found.items() if name.startswith("blocks.2.")}
        learns[depth] = {name for name, g in block.items() if bool((g != 0).any())}
    assert learns["zero"] == {
        f"blocks.2.{name}" for name in ("attention.proj.weight", "attention.proj.bias", "mlp.proj.weight",
                                        "mlp.proj.bias")
    }  # fmt: skip
    assert learns["cancel"] == set(block)


def test_a_new_residual_block_with_batch_norm_learns_its_last_norm_first():
    small, inputs = made("ResNet")
    big = qsync.expand(small, recipe("ResNet", small, layers=3)).train()
    new = [name for name, p in big.named_parameters() if name.endswith("bn2.weight") and not p.any()]
    assert len(new) == 3
    call(big, inputs).square().sum().backward()
    block = new[0].removesuffix("bn2.weight")
    learns = {n for n, p in big.named_parameters() if n.startswith(block) and bool(p.grad.any())}
    assert learns == {f"{block}bn2.weight", f"{block}bn2.bias"}


def test_heads_that_are_copied_part():
    small = gpt()
    big = qsync.expand(small, Gpt.recipe.to(width=32))
    train(big, 5)
    values = big.blocks[0].attention.qkv.bias.detach()[64:].view(4, 8)
    assert float((values[:2] - values[2:]).abs().max()) > 1e-4


@pytest.mark.parametrize("sizes", [{"width": 32}, {"mlp": 128}], ids=str)
@pytest.mark.parametrize("split", ["scalar", "random"])
def test_copies_in_a_new_block_part(split, sizes):
    """Its output is silent at first: all copies get the same gradient, and only their weights differ."""
    small = gpt()
    plan = qsync.plan_expansion(small, recipe("gpt", small, layers=3, **sizes), split=split, depth="zero")
    big = plan.expand(small)
    assert qsync.verify_expansion(small, big, tokens()).passed
    train(big, 20)
    new = {
        name: dict(big.named_parameters())[name].detach()
        for name, m in plan.tensors.items()
        if m.is_new and len(m.shape) == 2 and m.axes[0] is not None and m.output_init != "zero"
        and m.axes[0].growth.num_large > m.axes[0].growth.num_small
    }  # fmt: skip
    assert new
    for value in new.values():
        half = len(value) // 2
        assert (value[:half] - value[half:]).abs().max() > 1e-2 * value.abs().max()
