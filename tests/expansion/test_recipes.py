"""A recipe of one's own is some lines of data, for any model of which its lines tell the truth."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
import torch.nn.functional as F
from expanding import images, made, recipe, tokens
from torch import nn
from user_models import NET, RESIDUALS, ROWS, STREAMS, Eps, Net, Residuals, Streams, lossless, with_lines

import qsync
from qsync import Recipe
from qsync.experiments.workloads.gpt import Gpt


class Encoder(nn.Module):
    """A model of torch's own modules, whose attention keeps queries, keys and values in one parameter."""

    def __init__(self, num_layers=2, width=16, num_heads=2, hidden=24):
        super().__init__()
        self.tokens = nn.Embedding(50, width)
        self.positions = nn.Parameter(torch.zeros(8, width))
        self.layers = nn.ModuleList(
            nn.TransformerEncoderLayer(width, num_heads, hidden, batch_first=True, norm_first=True)
            for _ in range(num_layers)
        )
        self.norm = nn.LayerNorm(width)
        self.head = nn.Linear(width, 50)

    def forward(self, tokens):
        x = self.tokens(tokens) + self.positions
        for layer in self.layers:
            x = layer(x)
        return self.head(self.norm(x))


ENCODER = Recipe(
    "encoder",
    """
    tokens                                -> stream
    positions                             -> stream
    layers.*.norm1                 stream -> normed
    layers.*.self_attn.in_proj_*   normed -> query, key, value
    layers.*.self_attn.out_proj     mixed -> stream
    layers.*.norm2                 stream -> normed
    layers.*.linear1               normed -> hidden
    layers.*.linear2               hidden -> stream
    norm                           stream -> final
    head                            final -> _
    """,
    build=lambda small, sizes: Encoder(sizes["layers"], sizes["width"], sizes["heads"], sizes["hidden"]),
    read=lambda small: {"heads": small.layers[0].self_attn.num_heads}, sizes={"stream": "width"},
    blocks="layers.*",
)  # fmt: skip


@pytest.mark.parametrize("depth", ["zero", "cancel"])
def test_a_recipe_of_one_s_own_is_about_15_lines(depth):
    lossless(Encoder(), ENCODER.to(width=24, layers=3, hidden=50), tokens(), depth=depth)


class ChannelsFirst(nn.LayerNorm):
    """A subclass that computes something else: rows are (B, C), images (B, C, H, W), weights count from 1."""

    def forward(self, x):
        moved = x.movedim(1, -1)
        return F.layer_norm(moved, self.normalized_shape, self.weight + 1, self.bias, self.eps).movedim(-1, 1)


NORMS = {
    "without bias": lambda width: nn.LayerNorm(width, bias=False),
    "RMS": nn.RMSNorm,
    "RMS, eps of the type": lambda width: nn.RMSNorm(width, eps=None),
    "an RMS of somebody's own": Eps,
    "a layer norm of somebody's own": lambda width: Eps(width, centred=True),
    "one that multiplies by 1 + weight": lambda width: Eps(width, offset=1.0),
    "one of channels in dimension 1": ChannelsFirst,
    "batch": nn.BatchNorm1d,
    "batch, without weight": lambda width: nn.BatchNorm1d(width, affine=False),
}


@pytest.mark.parametrize("norm", NORMS)
def test_every_norm_whose_formula_is_known(norm):
    lossless(Net(norm=NORMS[norm]), NET.to(width=27, hidden=31), ROWS)


def test_a_norm_of_what_does_not_grow_may_be_any():
    class Grouped(Net):
        def __init__(self, hidden=24):
            super().__init__(16, hidden, lambda width: nn.GroupNorm(4, width))

    fixed = {name: f"{name} _ -> _" for name in ("inp", "norm", "norm2", "head")}
    given = with_lines(NET, **fixed, fc="fc _ -> hidden", proj="proj hidden -> _")
    given = replace(given, build=lambda small, sizes: Grouped(sizes["hidden"]))
    lossless(Grouped(), given.to(hidden=31), ROWS)


CHANNELS = {
    "batch": nn.BatchNorm2d,
    "batch, synchronous": nn.SyncBatchNorm,
    "instance": lambda channels: nn.InstanceNorm2d(channels, affine=True, track_running_stats=True),
}


@pytest.mark.parametrize("norm", CHANNELS)
@pytest.mark.parametrize("depth", ["zero", "cancel"])
def test_norms_of_single_channels_before_their_branch(depth, norm):
    lossless(Residuals(norm=CHANNELS[norm]), RESIDUALS.to(stream=6, layers=4), images(), depth=depth)


def test_a_linear_may_read_means():
    """What it does to the rest sums to nothing, since all of the rest are one mean."""
    lossless(Streams(), STREAMS.to(stream=27), ROWS)
    lossless(Streams(skips=True), STREAMS.to(stream=32), ROWS)


def test_gates_of_an_lstm_are_stacked():
    class Reader(nn.Module):
        def __init__(self, width=6):
            super().__init__()
            self.tokens, self.lstm = nn.Embedding(50, width), nn.LSTM(width, 2 * width, batch_first=True)
            self.head = nn.Linear(2 * width, 5)

        def forward(self, tokens):
            return self.head(self.lstm(self.tokens(tokens))[0])

    given = Recipe(
        "reader",
        """
        tokens                     -> width
        lstm.weight_ih_l0    width -> state, state, state, state
        lstm.weight_hh_l0    state -> state, state, state, state
        lstm.bias_*                -> state, state, state, state
        head                 state -> _
        """,
        build=lambda small, sizes: Reader(sizes["width"]), follows={"state": "width"},
    )  # fmt: skip
    lossless(Reader(), given.to(width=10), tokens())


def test_embeddings_that_two_modules_share():
    class Both(nn.Module):
        def __init__(self, width=16):
            super().__init__()
            self.one, self.two = nn.Embedding(50, width), nn.Embedding(50, width)
            self.two.weight = self.one.weight
            self.norm, self.head = nn.LayerNorm(width), nn.Linear(width, 3)

        def forward(self, tokens):
            return self.head(self.norm(self.one(tokens) + self.two(tokens.flip(1))))

    table = "one -> stream\ntwo -> stream tied one\nnorm stream -> final\nhead final -> _"
    given = Recipe("both", table, build=lambda small, sizes: Both(sizes["stream"]))
    big = lossless(Both(), given.to(stream=40), tokens())
    assert big.one.weight is big.two.weight


class TwoHeads(nn.Module):
    """One head with the embeddings' weight, and one with its own, which read the same."""

    def __init__(self, width=16):
        super().__init__()
        self.tokens, self.norm = nn.Embedding(50, width), nn.LayerNorm(width)
        self.head, self.value = nn.Linear(width, 50, bias=False), nn.Linear(width, 1)
        self.head.weight = self.tokens.weight

    def forward(self, tokens):
        x = self.norm(self.tokens(tokens))
        return self.head(x), self.value(x)


@pytest.mark.parametrize("split", ["random", "scalar", "even"])
def test_who_reads_beside_a_tied_head_makes_up_for_its_division(split):
    table = "tokens -> stream\nnorm stream -> final\nhead final -> _ tied tokens\nvalue final -> _"
    given = Recipe("two heads", table, build=lambda small, sizes: TwoHeads(sizes["stream"]))
    lossless(TwoHeads(), given.to(stream=50), tokens(), split=split)


def test_a_grown_model_grows_on_with_its_own_eps():
    """Neither by depth nor to a multiple does the eps change, which then is not what `build` gives either."""
    small, inputs = made("Gpt")
    middle = qsync.expand(small, Gpt.recipe.to(width=48))
    for sizes in ({"layers": 3}, {"width": 96}):
        assert qsync.verify_expansion(small, qsync.expand(middle, Gpt.recipe.to(**sizes)), inputs).passed


def test_a_model_under_a_plan_grows_as_it_is_without():
    model = Gpt(1, 16, 2, 8, 50, tied=True)
    wrapped = qsync.wrap(model, "bf16", strict=True)
    big = qsync.expand(wrapped, qsync.recipe_of(wrapped).to(width=24))
    assert type(big) is type(model) and qsync.verify_expansion(wrapped, big, tokens()).passed


@pytest.mark.parametrize(("kind", "tolerance"), [(torch.bfloat16, 5e-2), (torch.float16, 1e-2)])
def test_sixteen_bits(kind, tolerance):
    small, inputs = made("Llama")
    small = small.to(kind)
    big = qsync.expand(small, recipe("Llama", small))
    assert {p.dtype for p in big.parameters()} == {kind}
    verified = qsync.verify_expansion(small, big, inputs)
    assert verified.tolerance == tolerance and verified.passed


def test_a_plan_needs_no_weights():
    with torch.device("meta"):
        model = Gpt(2, 16, 2, 8, 50)
    plan = qsync.plan_expansion(model, Gpt.recipe.to(width=24, layers=3))
    assert plan.tensors["blocks.2.mlp.fc.weight"].shape == (96, 24)


def test_a_classifier_of_tokens_reads_what_bert_has_no_pooler_for():
    from transformers import BertConfig, BertForTokenClassification

    config = BertConfig(
        vocab_size=50, hidden_size=16, num_hidden_layers=1, num_attention_heads=2, intermediate_size=24
    )
    small = BertForTokenClassification(config)
    lossless(small, qsync.recipe_of(small).to(width=32), {"input_ids": tokens()})
