"""A recipe's table, derived from one run, is what a person would write, and says where it is not whole."""

from __future__ import annotations

from dataclasses import replace
from functools import cache
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from expanding import FAMILIES, TARGETS, USUAL, images, made, tokens, trained
from models import gpt2, llama
from torch import nn

import qsync
from qsync.errors import CalibrationError, FormatError, TracingError, UnsupportedError
from qsync.expansion.derivation.axis_unification import (
    UnificationError,
    axis,
    concatenate,
    leaves,
    regroup,
    size_of,
    slice_axis,
    stacked,
    unify,
)
from qsync.experiments.workloads.bert import Bert
from qsync.experiments.workloads.gpt import Gpt
from qsync.experiments.workloads.vgg import Vgg

WIDTH, HEADS, EACH = 24, 3, 8


# -- the table of models that have one by hand --


@cache
def derived(family):
    model, inputs = made(family)
    return model, inputs, qsync.derive_recipe(model, inputs)


def renamed(model, mine, hand):
    """Names of spaces by hand -> mine; None where the tables are not the same up to names."""
    names: dict[str, str] = {}
    for name, _ in model.named_parameters(remove_duplicate=False):
        a, b = mine.line_of(name), hand.line_of(name)
        assert a is not None, f"{name} has no line"
        assert (len(a.reads), len(a.writes)) == (len(b.reads), len(b.writes)), f"{a} | {b}"
        for one, other in zip((*a.reads, *a.writes), (*b.reads, *b.writes), strict=True):
            assert names.setdefault(other, one) == one, f"{a} | {b}"
    assert len(set(names.values())) == len(names), names
    return names


@pytest.mark.parametrize("family", FAMILIES)
def test_the_table_is_the_one_written_by_hand(family):
    model, _, found = derived(family)
    assert not found.open
    mine, hand = found.recipe(build=lambda small, sizes: small), qsync.recipe_of(model)
    names = renamed(model, mine, hand)
    assert {names[space] for space in hand.residual if space in names} == set(mine.residual)
    assert mine.rotary == hand.rotary
    sizes = hand.read(model)
    heads = found.attentions[0][:2] if found.attentions else (0, 0)
    assert heads[0] == sizes.get("heads", 0)
    assert heads[1] == sizes.get("kv_heads", heads[0])
    assert bool(mine.blocks) == bool(hand.blocks)


@pytest.mark.parametrize("family", FAMILIES)
def test_what_is_derived_grows_without_loss(family):
    model, inputs, found = derived(family)
    hand = qsync.recipe_of(model)
    names = renamed(model, found.recipe(build=hand.build), hand)

    def build(small, sizes):
        return hand.build(small, {**sizes, **{b: sizes[a] for b, a in names.items() if a in sizes}})

    target = {names.get(name, name): size for name, size in TARGETS.get(family, USUAL).items()}
    big = qsync.expand(model, found.recipe(build).to(**target))
    assert sum(p.numel() for p in big.parameters()) > sum(p.numel() for p in model.parameters())
    assert qsync.verify_expansion(model, big, inputs).max_difference <= 1e-9


def test_the_table_reads_as_one_by_hand():
    _, _, found = derived("Gpt, tied")
    assert [line.split() for line in found.table.splitlines()] == [
        line.split()
        for line in """
        tokens                          -> stream
        positions                       -> stream
        blocks.*.norm1           stream -> normed
        blocks.*.attention.qkv   normed -> query, key, value
        blocks.*.attention.proj   mixed -> stream
        blocks.*.norm2           stream -> normed
        blocks.*.mlp.fc          normed -> mlp
        blocks.*.mlp.proj           mlp -> stream
        norm                     stream -> final
        head                      final -> _  tied tokens
        """.strip().splitlines()
    ]
    assert str(found).splitlines()[0] == (
        "Gpt: blocks blocks.*; residual stream; 2 heads, 16 each; mlp keeps its ratio to width"
    )
    assert found.sizes == {"stream": "width"} and found.follows == {"mlp": "width"}


def test_blocks_of_which_the_first_differs_have_lines_of_their_own():
    _, _, found = derived("ResNet")
    lines = [line.split() for line in found.table.splitlines()]
    assert found.blocks == "stages.*.*"
    first = lines.index(["stages.1.0.conv1", "stream0", "->", "inner1"])
    assert lines.index(["stages.1.*.conv1", "stream1", "->", "inner1"]) > first
    assert ["stages.1.0.shortcut.0", "stream0", "->", "stream1"] in lines
    assert found.sizes == {"inner0": "stream0", "inner1": "stream1", "inner2": "stream2"}


# -- attention, however it is written --


class Attention(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.qkv = nn.Linear(WIDTH, 3 * WIDTH)
        self.out = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        q, k, v = self.qkv(x).view(*x.shape[:2], 3, HEADS, EACH).permute(2, 0, 3, 1, 4).unbind(0)
        return self.out(F.scaled_dot_product_attention(q, k, v).transpose(1, 2).flatten(2))


class Interleaved(Attention):
    """Query, key and value of one head, then of the next."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        q, k, v = self.qkv(x).view(*x.shape[:2], HEADS, 3, EACH).permute(3, 0, 2, 1, 4).unbind(0)
        return self.out(F.scaled_dot_product_attention(q, k, v).transpose(1, 2).flatten(2))


class Apart(nn.Module):
    """A linear each, named so that a name says nothing."""

    def __init__(self, kv_heads: int = HEADS) -> None:
        super().__init__()
        self.kv_heads = kv_heads
        self.a = nn.Linear(WIDTH, WIDTH)
        self.b, self.c = (nn.Linear(WIDTH, kv_heads * EACH) for _ in range(2))
        self.d = nn.Linear(WIDTH, WIDTH)

    def heads(self, x: torch.Tensor) -> list[torch.Tensor]:
        return [
            part(x).unflatten(-1, (num, EACH)).transpose(1, 2)
            for part, num in ((self.a, HEADS), (self.b, self.kv_heads), (self.c, self.kv_heads))
        ]

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        q, k, v = self.heads(x)
        weights = torch.einsum("bhqd,bhkd->bhqk", q, k).div(EACH**0.5).softmax(-1)
        return self.d(torch.einsum("bhqk,bhkd->bqhd", weights, v).flatten(2))


class KeysFirst(Apart):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        q, k, v = self.heads(x)
        weights = (k @ q.mT).div(EACH**0.5).softmax(2)
        return self.d((v.mT @ weights).mT.transpose(1, 2).flatten(2))


class Grouped(Apart):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        q, k, v = self.heads(x)
        mixed = F.scaled_dot_product_attention(q, k, v, enable_gqa=True)
        return self.d(mixed.transpose(1, 2).flatten(2))


class Tilted(Apart):
    """Scores get a constant per head (ALiBi)."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        q, k, v = self.heads(x)
        slopes = torch.arange(HEADS).view(HEADS, 1, 1) * torch.arange(x.shape[1])
        mixed = F.scaled_dot_product_attention(q, k, v, attn_mask=slopes.to(q)[None])
        return self.d(mixed.transpose(1, 2).flatten(2))


class Biased(Apart):
    """Scores get a learnt number per head."""

    def __init__(self) -> None:
        super().__init__()
        self.tilt = nn.Parameter(torch.zeros(HEADS, 1, 1))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        q, k, v = self.heads(x)
        return self.d(((q @ k.mT + self.tilt).softmax(-1) @ v).transpose(1, 2).flatten(2))


class NormedTogether(Apart):
    """Queries and keys are normed over all heads (OLMo 2)."""

    def __init__(self) -> None:
        super().__init__()
        self.a = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.LayerNorm(WIDTH))
        self.b = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.LayerNorm(WIDTH))


class NormedHeads(Apart):
    """Queries and keys are normed within each head, and rotated."""

    def __init__(self) -> None:
        super().__init__()
        self.of_q, self.of_k = nn.RMSNorm(EACH), nn.RMSNorm(EACH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        q, k, v = self.heads(x)
        angles = torch.arange(x.shape[1])[:, None] / 10 ** torch.arange(EACH // 2)
        angles = torch.cat([angles, angles], -1)

        def rotated(y: torch.Tensor) -> torch.Tensor:
            first, second = y.chunk(2, -1)
            return y * angles.cos() + torch.cat([-second, first], -1) * angles.sin()

        mixed = F.scaled_dot_product_attention(rotated(self.of_q(q)), rotated(self.of_k(k)), v)
        return self.d(mixed.transpose(1, 2).flatten(2))


class Torchs(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inside = nn.MultiheadAttention(WIDTH, HEADS, batch_first=True)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.inside(x, x, x)[0]


class Block(nn.Module):
    def __init__(self, attention: nn.Module, between: nn.Module | None = None) -> None:
        super().__init__()
        self.norm1, self.norm2 = nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH)
        self.attention = attention
        self.up, self.down = nn.Linear(WIDTH, 40), nn.Linear(40, WIDTH)
        self.between = between or nn.Identity()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = x + self.attention(self.norm1(x))
        return x + self.between(self.down(F.gelu(self.up(self.norm2(x)))))


class Model(nn.Module):
    """Blocks with whatever is to be tried in them."""

    def __init__(self, attention=Apart, between=nn.Identity, last: Any = None, num_layers: int = 2) -> None:
        super().__init__()
        self.embed = nn.Embedding(50, WIDTH)
        self.blocks = nn.ModuleList(Block(attention(), between()) for _ in range(num_layers))
        self.last = last or nn.LayerNorm(WIDTH)
        self.head = nn.Linear(WIDTH, 50)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.embed(x)
        for block in self.blocks:
            x = block(x)
        return self.head(self.last(x))


def lines(found: qsync.Recipe, inside: str) -> dict[str, tuple[str, str]]:
    """What the lines about a module say, by the rest of their paths: reads, writes."""
    mine = found.recipe(lambda small, sizes: small, table=found.table)
    return {
        line.pattern.partition(inside)[2]: (" ".join(line.reads), " ".join(line.writes))
        for line in mine.lines
        if inside in line.pattern
    }


APART = {
    "a": ("normed", "query"), "b": ("normed", "key"), "c": ("normed", "value"), "d": ("mixed", "stream")
}  # fmt: skip


NORMED = {"a.0": ("normed", "query"), "a.1": ("query", "query"), "b.0": ("normed", "key"),
    "b.1": ("key", "key"), "c": ("normed", "value"), "d": ("mixed", "stream")}  # fmt: skip


@pytest.mark.parametrize(
    ("attention", "wanted"),
    [
        (Attention, {"qkv": ("normed", "query key value"), "out": ("mixed", "stream")}),
        (Apart, APART),
        (KeysFirst, APART),
        (lambda: Grouped(1), APART),
        (NormedHeads, {**APART, "of_q": ("_", "_"), "of_k": ("_", "_")}),
        (Interleaved, {"qkv": ("normed", "query key value"), "out": ("mixed", "stream")}),
        (Tilted, APART),
        (Biased, {**APART, "tilt": ("", "heads _ _")}),
        (NormedTogether, NORMED),
        (Torchs, {
            "inside.in_proj_weight": ("normed", "query key value"),
            "inside.in_proj_bias": ("", "query key value"), "inside.out_proj": ("mixed", "stream"),
        }),
    ],
    ids=[
        "one linear", "einsum", "keys first", "one key head", "normed heads, rotated", "head by head",
        "a constant per head", "a weight per head", "heads normed together", "torch's",
    ],
)  # fmt: skip
def test_attention_is_known_by_what_it_computes(attention, wanted):
    found = qsync.derive_recipe(Model(attention), tokens())
    assert lines(found, "attention.") == wanted
    assert not found.open
    assert found.attentions[0][::2] == (HEADS, EACH)
    assert found.rotary == (attention is NormedHeads)


def test_torchs_encoder_layers_are_watched_inside():
    """In evaluation they would be one operator each."""

    class Encoder(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.embed, self.head = nn.Embedding(50, WIDTH), nn.Linear(WIDTH, 50)
            layer = nn.TransformerEncoderLayer(WIDTH, 2, 40, batch_first=True, norm_first=True)
            self.inside = nn.TransformerEncoder(layer, 2, nn.LayerNorm(WIDTH), enable_nested_tensor=False)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.head(self.inside(self.embed(x)))

    found = qsync.derive_recipe(Encoder(), tokens())
    assert not found.open and found.blocks == "inside.layers.*" and found.attentions[0][0] == 2
    assert lines(found, "self_attn.out_proj") == {"": ("mixed", "stream")}
    assert torch.backends.mha.get_fastpath_enabled()


def test_halves_that_gate_each_other_stand_in_a_row():
    class Gated(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.up, self.down = nn.Linear(WIDTH, 80), nn.Linear(40, WIDTH)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.down(F.glu(self.up(x)))

    said = lines(qsync.derive_recipe(Model(Gated), tokens()), "attention.")
    hidden = said["down"][0]
    assert said == {"up": ("normed", f"{hidden} {hidden}"), "down": (hidden, "stream")}


@pytest.mark.parametrize("kind", ["eager", "sdpa"])
def test_heads_that_share_keys_are_seen(kind):
    model, batch = llama(num_attention_heads=4, num_key_value_heads=2, attn_implementation=kind)
    found = qsync.derive_recipe(model, {"input_ids": batch["input_ids"]})
    assert (found.attentions, found.rotary) == (((4, 2, 8),), True)
    assert not found.open


class HeadsLast(Attention):
    """Coordinates before heads: no layout that tables know."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        q, k, v = self.qkv(x).view(*x.shape[:2], 3, EACH, HEADS).permute(2, 0, 4, 1, 3).unbind(0)
        return self.out(F.scaled_dot_product_attention(q, k, v).permute(0, 2, 3, 1).flatten(2))


def test_attention_that_no_table_describes_is_not_guessed():
    found = qsync.derive_recipe(Model(HeadsLast), tokens())
    assert any("lie neither one after the other" in one for one in found.open), found.open


def test_heads_with_a_constant_each_stay_and_become_wider():
    small = trained(Model(Tilted).double())
    found = qsync.derive_recipe(small, tokens())
    assert found.fixed == ("heads",)

    def build(small, sizes):
        class Wider(Tilted):
            def __init__(self):
                nn.Module.__init__(self)
                self.kv_heads, width, inner = HEADS, sizes["width"], HEADS * sizes["head_dim"]
                self.a, self.b, self.c = (nn.Linear(width, inner) for _ in range(3))
                self.d = nn.Linear(inner, width)

            def heads(self, x):
                return [
                    part(x).unflatten(-1, (HEADS, -1)).transpose(1, 2) for part in (self.a, self.b, self.c)
                ]

        new = Model(Wider, last=nn.LayerNorm(sizes["width"]))
        width, up = sizes["width"], sizes["mlp"]
        new.embed, new.head = nn.Embedding(50, width), nn.Linear(width, 50)
        for block in new.blocks:
            block.norm1, block.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
            block.up, block.down = nn.Linear(width, up), nn.Linear(up, width)
        return new.double()

    recipe = found.recipe(build)
    big = qsync.expand(small, recipe.to(width=36, mlp=60))
    assert big.blocks[0].attention.a.weight.shape == (36, 36)
    with pytest.raises(UnsupportedError, match="heads of Model cannot grow losslessly from 3 to 4"):
        qsync.expand(small, recipe.to(width=32, heads=4, mlp=40))


def test_heads_of_another_model_are_read_by_running_it():
    found = qsync.derive_recipe(Model(), tokens())

    class More(Apart):
        def heads(self, x: torch.Tensor) -> list[torch.Tensor]:
            return [part(x).unflatten(-1, (-1, 4)).transpose(1, 2) for part in (self.a, self.b, self.c)]

    read = found.recipe(lambda small, sizes: small).read
    assert dict(read(Model())) == {"heads": 3, "kv_heads": 3}
    assert dict(read(Model(More))) == {"heads": 6, "kv_heads": 6}


# -- what is not understood --


class Does(nn.Module):
    """A function as a module of its own."""

    def __init__(self, function) -> None:
        super().__init__()
        self.function = function

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.function(x)


@pytest.mark.parametrize(
    ("function", "said"),
    [
        (lambda x: x.sort(-1).values, "aten.sort in blocks.*.between is not understood"),
        (lambda x: x * x.sort(-1).values[..., :1], "aten.sort in blocks.*.between is not understood"),
        (lambda x: x.cumsum(-1), "aten.cumsum in blocks.*.between is not understood"),
        (lambda x: x * x.softmax(-1), "aten._softmax in blocks.*.between sums over stream"),
        (lambda x: x / x.norm(dim=-1, keepdim=True), "sums over stream"),
        (lambda x: x @ x.mT @ x, "aten.matmul in blocks.*.between multiplies two values along stream"),
        (lambda x: x + torch.arange(WIDTH), "it meets a constant (aten.arange) in blocks.*.between"),
        (lambda x: x.view(*x.shape[:2], 4, 6).transpose(-1, -2).flatten(2), "in another order"),
    ],
)
def test_what_copies_would_not_survive_is_said(function, said):
    model = Model(between=lambda: Does(function))
    found = qsync.derive_recipe(model, tokens())
    assert any(said in one for one in found.open), found.open
    with pytest.raises(UnsupportedError, match=r"the table of Model is incomplete: .*; complete the lines"):
        found.recipe(lambda small, sizes: small)
    by_hand = found.recipe(lambda small, sizes: small, table="embed -> stream")
    assert [str(line) for line in by_hand.lines] == ["embed  -> stream"]


@pytest.mark.parametrize(
    "function", [lambda x: F.layer_norm(x, (WIDTH,)), lambda x: x / (x.square().mean(-1, keepdim=True) + 1)]
)
def test_statistics_stay_where_copies_are_whole(function):
    found = qsync.derive_recipe(Model(between=lambda: Does(function)), tokens())
    assert not found.open and "stream" in found.multiples


def test_a_norm_without_a_module_of_its_own_is_said():
    class Normed(nn.Linear):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return F.layer_norm(super().forward(x), (WIDTH,))

    found = qsync.derive_recipe(Model(between=lambda: Normed(WIDTH, WIDTH)), tokens())
    said = "aten.native_layer_norm in blocks.*.between normalises stream without a module of its own"
    assert len(found.open) == 1 and found.open[0].startswith(said)


def test_shapes_that_are_asked_for_tie_nothing():
    """Looking at one coordinate's shape is not using it (BART does)."""
    model = Model(between=lambda: Does(lambda x: x + x[:, :, -1].shape[1]))
    assert not qsync.derive_recipe(model, tokens()).open
    model = Model(between=lambda: Does(lambda x: x + x[:, :, -1:]))
    assert "stream" not in qsync.derive_recipe(model, tokens()).residual


def test_no_space_has_a_name_that_means_something_else():
    class Judged(Model):
        def __init__(self) -> None:
            super().__init__()
            self.value, self.width = nn.Linear(WIDTH, 7), nn.Linear(7, 9)
            self.score = nn.Linear(9, 1)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            y = self.last(self.blocks[1](self.blocks[0](self.embed(x))))
            return self.head(y) + self.score(self.width(self.value(y)))

    found = qsync.derive_recipe(Judged(), tokens())
    assert not found.open
    assert lines(found, "value") == {"": ("final", "value_2")}
    assert lines(found, "width") == {"": ("value_2", "width_2")}


def test_what_has_nothing_to_do_is_named():
    model = Model()
    model.spare = nn.Linear(3, 3)
    found = qsync.derive_recipe(model, tokens())
    assert found.open == ("spare.weight, spare.bias had nothing to do on these inputs",)


def test_elementwise_work_on_what_a_layer_norm_reads_is_noted():
    class Scale(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.by = nn.Parameter(torch.ones(WIDTH))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.by * x

    found = qsync.derive_recipe(Model(between=Scale), tokens())
    assert lines(found, "between.") == {"by": ("", "stream")}
    assert len(found.notes) == 1
    assert found.notes[0].startswith("aten.mul in blocks.*.between acts on stream, which a LayerNorm reads")
    assert found.multiples == ("stream",)
    assert not qsync.derive_recipe(Model(), tokens()).notes


def test_what_is_lossless_to_multiples_alone_is_refused_elsewhere():
    class Scaled(Gpt):
        def __init__(self, width: int = 24, num_heads: int = 3, hidden: int = 40) -> None:
            super().__init__(2, width, num_heads, 16, 50, hidden=hidden)
            self.by = nn.Parameter(torch.ones(width))

        def forward(self, tokens: torch.Tensor) -> torch.Tensor:
            x = self.tokens(tokens) * self.by
            for block in self.blocks:
                x = block(x)
            return self.head(self.norm(x))

    model = trained(Scaled().double())
    model.positions.weight.requires_grad_(False)
    found = qsync.derive_recipe(model, tokens())
    assert found.multiples == ("stream",)
    recipe = found.recipe(
        lambda small, sizes: Scaled(sizes["width"], sizes["heads"], sizes["mlp"]),
        table=found.table + "\npositions -> stream",
    )
    big = qsync.expand(model, recipe.to(width=48))
    assert qsync.verify_expansion(model, big, tokens()).max_difference <= 1e-9
    with pytest.raises(
        UnsupportedError, match="allows stream to grow from 24 only to multiples; give 24 or 48"
    ):
        qsync.expand(model, recipe.to(width=40, mlp=40))
    with pytest.raises(FormatError, match="lists nothing in `multiples`, but no line has it"):
        qsync.expand(model, replace(recipe, multiples=("nothing",)).to(width=48))


def test_what_makes_something_of_zero_is_noted():
    """A norm leaves zeros beside its copies."""
    found = qsync.derive_recipe(Model(last=nn.Sequential(nn.LayerNorm(WIDTH), nn.Sigmoid())), tokens())
    assert len(found.notes) == 1 and found.notes[0].startswith("aten.sigmoid in last.1 makes something else")
    assert not qsync.derive_recipe(Model(last=nn.Sequential(nn.LayerNorm(WIDTH), nn.ReLU())), tokens()).notes
    plus_one = nn.Sequential(nn.LayerNorm(WIDTH), Does(lambda x: x + 1))
    assert qsync.derive_recipe(Model(last=plus_one), tokens()).notes


def test_a_model_without_a_head_returns_its_stream():
    found = qsync.derive_recipe(gpt2(bos_token_id=1, eos_token_id=2)[0].transformer, {"input_ids": tokens()})
    assert not found.open and found.residual == ()
    model = Model(last=nn.Identity())
    model.head = nn.Identity()
    found = qsync.derive_recipe(model, tokens())
    assert found.residual == ()
    assert found.notes == (
        "what the blocks add to cannot grow: the model returns it; derive and grow it with the head that it "
        "trains with",
    )


def test_a_norm_that_is_written_out_is_a_norm():
    class Rms(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.gain = nn.Parameter(torch.ones(WIDTH))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.gain * (x * (x.square().mean(-1, keepdim=True) + 1e-6).rsqrt())

    found = qsync.derive_recipe(Model(last=Rms()), tokens())
    assert not found.open
    assert lines(found, "last") == {"": ("stream", "final")}


def test_blocks_that_run_twice_are_not_for_depth():
    class Twice(Model):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            x = self.embed(x)
            for block in [*self.blocks, *self.blocks]:
                x = block(x)
            return self.head(self.last(x))

    found = qsync.derive_recipe(Twice(), tokens())
    assert found.blocks == "" and "run more than once" in found.notes[0]
    assert found.residual == ("stream",)


def test_a_linear_that_works_twice_ties_what_it_reads():
    class Twice(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.one, self.other, self.both = nn.Linear(WIDTH, 40), nn.Linear(WIDTH, 40), nn.Linear(40, WIDTH)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.both(self.one(x)) + self.both(self.other(x))

    found = qsync.derive_recipe(Model(Twice), tokens())
    assert not found.open
    said = lines(found, "attention.")
    assert said["one"] == said["other"] == ("normed", said["both"][0])


def test_weights_that_are_shared_have_all_their_names():
    model = Model()
    model.spare = nn.Embedding(50, WIDTH)
    model.spare.weight = model.head.weight = model.embed.weight
    found = qsync.derive_recipe(model, tokens())
    assert not found.open
    rows = [line.split() for line in found.table.splitlines()]
    assert ["head", "final", "->", "_", "tied", "embed"] in rows
    assert ["spare", "->", "stream", "tied", "embed"] in rows


def test_a_head_is_tied_to_embeddings_wherever_it_stands():
    class HeadFirst(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.head = nn.Linear(WIDTH, 50, bias=False)
            self.embed = nn.Embedding(50, WIDTH)
            self.embed.weight = self.head.weight
            self.norm = nn.LayerNorm(WIDTH)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.head(self.norm(self.embed(x)))

    found = qsync.derive_recipe(HeadFirst(), tokens())
    assert not found.open
    assert [" ".join(line.split()) for line in found.table.splitlines()] == [
        "embed -> embedded", "norm embedded -> final", "head final -> _ tied embed"
    ]  # fmt: skip


@pytest.mark.parametrize("num_layers", [1, 2])
def test_norms_after_the_sum_keep_the_stream_one(num_layers):
    found = qsync.derive_recipe(Bert(num_layers, WIDTH, HEADS, 16, 50), tokens())
    assert found.residual == ("stream",)
    assert lines(found, "norm1") == lines(found, "norm2") == {"": ("stream", "stream")}


def test_a_tied_head_that_reads_a_normed_stream_itself_is_refused():
    """What it reads would have to be divided, and is what the next block adds to."""
    from transformers import BartConfig, BartForConditionalGeneration

    sizes = {"encoder_layers": 1, "decoder_layers": 1, "encoder_attention_heads": 2, "encoder_ffn_dim": 24}
    sizes |= {"decoder_attention_heads": 2, "decoder_ffn_dim": 40, "d_model": 16, "vocab_size": 50}
    config = BartConfig(**sizes, max_position_embeddings=16, dropout=0.0)
    model = trained(BartForConditionalGeneration(config).double())
    found = qsync.derive_recipe(model, {"input_ids": tokens(), "decoder_input_ids": tokens()})
    assert not found.open and found.residual == ("stream0", "stream1")
    recipe = found.recipe(lambda small, sizes: small)
    with pytest.raises(
        UnsupportedError, match="lm_head.weight has .* reads stream1, which cannot be divided"
    ):
        qsync.plan_expansion(model, recipe.to(width=32))
    assert qsync.plan_expansion(model, recipe.to(mlp0=30)).sizes["mlp0"] == 30


def test_an_encoder_and_a_decoder_are_as_wide():
    from transformers import WhisperConfig, WhisperForConditionalGeneration

    sizes = {"encoder_layers": 1, "decoder_layers": 1, "encoder_attention_heads": 2, "encoder_ffn_dim": 24}
    sizes |= {"decoder_attention_heads": 2, "decoder_ffn_dim": 40, "d_model": 16, "vocab_size": 50}
    sizes |= {"max_source_positions": 16, "max_target_positions": 16, "num_mel_bins": 4, "pad_token_id": 0}

    def make(**options):
        special = {"bos_token_id": 1, "eos_token_id": 2, "decoder_start_token_id": 1}
        return WhisperForConditionalGeneration(WhisperConfig(**{**sizes, **special, **options})).double()

    def build(small, sizes):
        heads = {f"{part}_attention_heads": sizes["heads"] for part in ("encoder", "decoder")}
        return make(
            d_model=sizes["width"], encoder_ffn_dim=sizes["mlp0"], decoder_ffn_dim=sizes["mlp2"], **heads
        )

    model = trained(make())
    features = torch.randn(2, 4, 32, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    inputs = {"input_features": features, "decoder_input_ids": tokens()}
    found = qsync.derive_recipe(model, inputs)
    assert not found.open and found.blocks == "model.*.layers.*"
    assert found.sizes["stream0"] == found.sizes["stream2"] == found.sizes["conv1"] == "width"
    assert found.multiples == ("stream0",)  # a convolution and a gelu write it
    big = qsync.expand(model, found.recipe(build).to(width=32))
    assert qsync.verify_expansion(model, big, inputs).max_difference <= 1e-9


def test_a_loss_may_be_all_that_is_returned():
    class Loss(Model):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            logits = super().forward(x)
            return (logits.logsumexp(-1) - logits.gather(-1, x[..., None])[..., 0]).mean()

    model = Loss()
    model.head.weight = model.embed.weight
    assert not qsync.derive_recipe(model, tokens()).open


def test_a_batch_norm_that_works_twice_ties_its_channels():
    class Twice(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.one, self.other, self.last = nn.Conv2d(1, 4, 3), nn.Conv2d(1, 4, 3), nn.Conv2d(4, 2, 3)
            self.norm = nn.BatchNorm2d(4)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.last(self.norm(self.one(x))) + self.norm(self.other(x)).mean()

    found = qsync.derive_recipe(Twice(), images().float())
    assert lines(found, "one") == lines(found, "other") == {"": ("_", "one")}


def test_a_norm_that_works_twice_writes_one_space():
    class Twice(Model):
        def __init__(self) -> None:
            super().__init__()
            self.second = nn.Linear(WIDTH, 50)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            y = self.blocks[0](self.embed(x))
            return self.head(self.last(y)) + self.second(self.last(self.blocks[1](y)))

    found = qsync.derive_recipe(Twice(), tokens())
    assert not found.open
    assert lines(found, "head") == lines(found, "second") == {"": ("final", "_")}


@pytest.mark.parametrize("device", ["cpu", "meta"])
def test_a_linear_may_read_what_does_not_lie_in_a_row(device):
    with torch.device(device):
        across = Does(lambda x: x.mT.contiguous().mT)
        model = Model(between=lambda: nn.Sequential(across, nn.Linear(WIDTH, WIDTH)))
    assert not qsync.derive_recipe(model, tokens()).open


def test_a_head_without_a_module_of_its_own_is_said():
    class Bare(Model):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            y = self.embed(x)
            for block in self.blocks:
                y = block(y)
            return self.last(y) @ self.embed.weight.T

    model = Bare()
    del model.head
    found = qsync.derive_recipe(model, tokens())
    assert found.open == ("embed.weight is at work in the model too, where no module has it",)


def test_matrices_may_have_their_inputs_first():
    class Across(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight = nn.Parameter(torch.ones(WIDTH, WIDTH))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return x @ self.weight

    found = qsync.derive_recipe(Model(between=Across), tokens())
    assert not found.open
    assert "blocks.*.between down -> stream transposed" in " ".join(found.table.split())


def test_channels_stand_for_their_pixels():
    """What flattens channels and pixels is read by a linear that has one input for each."""
    model = Vgg(((4,), (6,), (5,)), 12).double()
    inputs = images()
    found = qsync.derive_recipe(trained(model), inputs)
    assert not found.open and lines(found, "classifier.0") == {"": ("features8", "classifier0")}

    def build(small, sizes):
        features = (sizes["features0"],), (sizes["features4"],), (sizes["features8"],)
        return Vgg(features, sizes["classifier0"])

    big = qsync.expand(model, found.recipe(build).to(features8=7))
    assert qsync.verify_expansion(model, big, inputs).max_difference <= 1e-9


def test_pixels_of_channels_are_not_channels_of_pixels():
    class Flat(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.conv, self.head = nn.Conv2d(1, 4, 3), nn.Linear(4 * 14 * 14, 3)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.head(self.conv(x).permute(0, 2, 3, 1).flatten(1))

    assert qsync.derive_recipe(Flat(), images().float()).open == ("head has what grows inside what does not",)


def test_norms_of_what_does_not_grow_are_left_alone():
    from transformers import Qwen3Config, Qwen3ForCausalLM

    config = Qwen3Config(
        vocab_size=50, hidden_size=32, intermediate_size=40, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, head_dim=8, max_position_embeddings=16, use_cache=False,
    )  # fmt: skip
    model, inputs = trained(Qwen3ForCausalLM(config).double()), {"input_ids": tokens()}
    found = qsync.derive_recipe(model, inputs)
    assert lines(found, "q_norm") == {"": ("_", "_")}

    def build(small, sizes):
        new = Qwen3Config(**{**config.to_dict(), "hidden_size": sizes["width"]})
        new.num_attention_heads, new.num_key_value_heads = sizes["heads"], sizes["kv_heads"]
        new.intermediate_size, new.num_hidden_layers = sizes["mlp"], sizes["layers"]
        new.layer_types = ["full_attention"] * sizes["layers"]
        return Qwen3ForCausalLM(new)

    big = qsync.expand(model, found.recipe(build).to(width=48, layers=3))
    assert qsync.verify_expansion(model, big, inputs).max_difference <= 1e-9


@pytest.mark.parametrize(
    ("size", "places"),
    [
        ((1, 16, WIDTH), lambda table, length: table[:, :length]),
        ((16, WIDTH), lambda table, length: table[torch.arange(2 * length).view(2, -1)]),
    ],
    ids=["sliced", "indexed"],
)
def test_a_table_of_more_positions_than_came_is_one(size, places):
    class Placed(Model):
        def __init__(self) -> None:
            super().__init__()
            self.places = nn.Parameter(torch.zeros(size))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            y = self.embed(x) + places(self.places, x.shape[1])
            for block in self.blocks:
                y = block(y)
            return self.head(self.last(y))

    found = qsync.derive_recipe(Placed(), tokens())
    assert not found.open and lines(found, "places") == {"": ("", "stream")}


def test_spaces_of_numbered_modules_have_names_that_a_table_may_hold():
    inner = nn.Sequential(nn.ReLU(), nn.Linear(16, 12))
    small = nn.Sequential(nn.Linear(8, 16), inner, nn.Sequential(nn.ReLU(), nn.Linear(12, 3))).double()
    inputs = torch.randn(2, 8, dtype=torch.float64)
    found = qsync.derive_recipe(small, inputs)
    assert not found.open and lines(found, "0") == {"": ("_", "space0")}

    def build(small, sizes):
        big = nn.Sequential(nn.Linear(8, sizes["space0"]), nn.Sequential(nn.ReLU()), nn.Sequential(nn.ReLU()))
        big[1].append(nn.Linear(sizes["space0"], sizes["space11"]))
        big[2].append(nn.Linear(sizes["space11"], 3))
        return big.double()

    big = qsync.expand(small, found.recipe(build).to(space0=20, space11=31))
    assert qsync.verify_expansion(small, big, inputs).max_difference <= 1e-9


# -- the run --


def test_nothing_is_computed_on_the_meta_device():
    with torch.device("meta"):
        model = Model()
    found = qsync.derive_recipe(model, tokens())
    assert found.table == qsync.derive_recipe(Model(), tokens()).table and not found.open
    with torch.device("meta"):
        model = llama(num_attention_heads=4, num_key_value_heads=2)[0]
    found = qsync.derive_recipe(model, {"input_ids": tokens()})
    assert found.table == derived("Llama")[2].table and found.attentions[0][1] == 2


def test_a_model_that_looks_at_values_runs_on_a_real_device():
    class Looks(Model):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return super().forward(x if x.sum() > 0 else x + 1)

    assert not qsync.derive_recipe(Looks(), tokens()).open
    with torch.device("meta"):
        model = Looks()
    with pytest.raises(
        TracingError, match="Looks cannot be run on the meta device, .*build it on a real device"
    ):
        qsync.derive_recipe(model, tokens())


def test_inputs_that_do_not_fit_are_named():
    with pytest.raises(TracingError, match="Model cannot be run on these inputs .*; pass one real batch"):
        qsync.derive_recipe(Model(), torch.zeros(2, 5))
    with pytest.raises(CalibrationError, match="holds no tensor"):
        qsync.derive_recipe(Model(), ())


def test_the_model_is_left_as_it_was():
    model, inputs = made("ResNet")
    model.train()
    model.stages[0].eval()
    modes = [module.training for module in model.modules()]
    before = {name: value.clone() for name, value in model.state_dict().items()}
    random = torch.random.get_rng_state()
    qsync.derive_recipe(model, inputs)
    assert [module.training for module in model.modules()] == modes
    assert all(bool((value == before[name]).all()) for name, value in model.state_dict().items())
    assert bool((torch.random.get_rng_state() == random).all())
    hooks = torch.nn.modules.module
    assert not hooks._global_forward_hooks and not hooks._global_forward_pre_hooks


# -- pieces of axes --


def test_a_view_splits_and_merges():
    batch, length, width = axis(2), axis(5), axis(24)
    *_, heads, inner = regroup([batch, length, width], (2, 5, 4, 6))
    assert leaves(width) == heads + inner
    assert regroup([heads, inner], (24,)) == [heads + inner]
    with pytest.raises(UnificationError):
        regroup([width], (9, 3))


def test_what_is_joined_is_split_together():
    one, other = axis(24), axis(24)
    unify(one, other)
    regroup([one], (3, 8))
    assert [piece.size for piece in leaves(other)] == [3, 8]
    third = axis(24)
    regroup([third], (6, 4))
    unify(third, one)
    assert leaves(third) == leaves(one) and [piece.size for piece in leaves(one)] == [3, 2, 4]


def test_halves_that_change_places_are_one():
    whole = axis(8)
    first, second = slice_axis(whole, 0, 4), slice_axis(whole, 4, 4)
    assert [size_of(one) for one in stacked(whole)] == [4, 4]
    assert leaves(first) != leaves(second)
    unify(whole, concatenate([second, first]))
    assert leaves(first) == leaves(second)


def test_trained_models_are_what_is_derived():
    """The values of weights are no part of it."""
    model = Model()
    before = qsync.derive_recipe(model, tokens()).table
    assert qsync.derive_recipe(trained(model), tokens()).table == before
