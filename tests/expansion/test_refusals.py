"""What cannot grow without loss, or is not what it claims to be, is refused in one sentence, by name."""

from __future__ import annotations

import warnings
from dataclasses import replace

import pytest
import torch
import torch.nn.functional as F
from expanding import made, recipe, tokens, trained
from peft import LoraConfig, get_peft_model
from torch import nn
from user_models import NET, RESIDUALS, STREAMS, Eps, Net, Residuals, Streams, lossless, with_lines

import qsync
from qsync import Recipe
from qsync.errors import FormatError, MismatchError, UnsupportedError
from qsync.experiments.workloads.gpt import Gpt
from qsync.experiments.workloads.resnet import ResNet


def refused(model, given, kind, said, **options):
    """Growth must end in one sentence that matches, and leave the model as it is."""
    before = {
        k: v.clone() for k, v in model.state_dict().items() if isinstance(v, torch.Tensor) and not v.is_meta
    }
    with pytest.raises(kind, match=said) as raised:
        qsync.expand(model, given, **options)
    assert "\n" not in str(raised.value) and not str(raised.value).endswith(".")
    after = model.state_dict()
    assert all(torch.equal(before[name], after[name]) for name in before)


class Fixed(nn.Module):
    """A layer norm whose eps is in its code."""

    def __init__(self, width):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(width))

    def forward(self, x):
        return F.layer_norm(x, self.weight.shape, self.weight, None, 1e-5)


class Squared(Eps):
    def forward(self, x):
        return super().forward(x) * self.weight


OTHER_NORMS = {
    "GroupNorm": (lambda width: nn.GroupNorm(4, width), "norm is a GroupNorm"),
    "a weight that is squared": (Squared, "affine function of its weight"),
    "no weight": (
        lambda width: nn.LayerNorm(width, elementwise_affine=False),
        "norm .*elementwise_affine=True",
    ),
    "no weight, RMS": (
        lambda width: nn.RMSNorm(width, elementwise_affine=False),
        "norm .*elementwise_affine",
    ),
    "no weight, groups": (lambda width: nn.GroupNorm(4, width, affine=False), "norm .* `norm  _ -> _`"),
    "eps in its code": (Fixed, "norm.weight of Fixed .* eps in an attribute `eps`"),
}


@pytest.mark.parametrize("norm", OTHER_NORMS)
def test_other_norms_are_refused(norm):
    kind, said = OTHER_NORMS[norm]
    refused(Net(norm=kind), NET.to(width=32), UnsupportedError, said)


def test_a_norm_over_two_axes_is_refused():
    refused(
        Net(norm=lambda width: nn.LayerNorm((2, width))),
        NET.to(width=32),
        UnsupportedError,
        "norm normalizes over 2",
    )


LINES = {
    "no arrow": ("inp stream", "'inp stream'; write MODULE"),
    "no target": ("inp _ ->", "'inp _ ->'"),
    "no module": ("-> stream", "'-> stream'"),
    "two arrows": ("inp _ -> a -> stream", "'inp _ -> a -> stream'"),
    "no name": ("inp _ -> the-stream", "the-stream"),
    "tied to nothing": ("inp _ -> stream tied", "'inp _ -> stream tied'"),
    "tied to two": ("inp _ -> stream tied head fc", "tied head fc"),
    "tied too soon": ("inp _ tied head -> stream", "_ tied head -> stream"),
    "partly fixed": ("inp _ -> stream, _", "`_` for a fixed space"),
}


@pytest.mark.parametrize("line", LINES)
def test_a_line_that_is_none(line):
    row, said = LINES[line]
    refused(Net(), with_lines(NET, inp=row).to(width=32), FormatError, said)


TABLES = {
    "a module with no line": ({"norm2": ""}, UnsupportedError, "no line for norm2.weight, norm2.bias; add"),
    "a space that nothing writes": ({"norm2": "norm2 steam -> final"}, MismatchError, "norm2 reads steam"),
    "a space that nothing writes, by a linear": (
        {"head": "head fnial -> _"}, MismatchError, "head reads fnial",
    ),
    "a space that nothing reads": (
        {"proj": "proj hidden -> steam"}, MismatchError, "line `proj  hidden -> steam`",
    ),
    "a norm that reads nothing": (
        {"norm": "norm -> normed"}, MismatchError, "norm is a layer norm, .* one space",
    ),
    "a norm that writes nothing": ({"norm": "norm stream -> _"}, MismatchError, "norm is a layer norm"),
    "twice": (
        {"fc": "fc normed, normed -> hidden"}, MismatchError, "fc.weight has an axis of 16, .*width 16 x 2",
    ),
    "tied to what is not there": ({"head": "head final -> _ tied imp"}, MismatchError, "ties head to imp"),
    "attention without an output": ({"inp": "inp _ -> query"}, MismatchError, "no line reads `mixed`"),
    "an output without attention": ({"proj": "proj mixed -> stream"}, MismatchError, "proj reads mixed"),
}  # fmt: skip


@pytest.mark.parametrize("table", TABLES)
def test_a_table_that_does_not_fit_the_model(table):
    lines, kind, said = TABLES[table]
    refused(Net(), with_lines(NET, **lines).to(width=32), kind, said)


PARTS = {
    "another class": (
        {"build": lambda small, sizes: nn.Linear(1, 1)}, MismatchError, "builds a Linear for a Net",
    ),
    "nothing": ({"build": lambda small, sizes: None}, MismatchError, "builds a NoneType"),
    "the same size": (
        {"build": lambda small, sizes: Net()}, MismatchError, "has inp.weight of shape \\(16, 5\\)",
    ),
    "the small model": (
        {"build": lambda small, sizes: small}, MismatchError, "parameters of the small model",
    ),
    "an error": (
        {"build": lambda small, sizes: Net(sizes["depth"])}, MismatchError, "`build`.*KeyError: 'depth'",
    ),
    "read nothing": ({"read": lambda small: None}, FormatError, "`read` of the recipe net returned None"),
    "read words": ({"read": lambda small: {"hidden": "24"}}, FormatError, "returned {'hidden': '24'}"),
    "read another size": (
        {"read": lambda small: {"hidden": 23}}, MismatchError, "fc.weight has an axis of 24",
    ),
    "blocks of no path": ({"blocks": "layers"}, UnsupportedError, "blocks must be a pattern such as PATH"),
}  # fmt: skip


@pytest.mark.parametrize("part", PARTS)
def test_parts_of_a_recipe_that_do_not_fit(part):
    changes, kind, said = PARTS[part]
    refused(Net(), replace(NET, **changes).to(width=32), kind, said)


SIZES = {
    "Gpt, shrinking": ("Gpt", {"width": 24}, "width would shrink from 32 to 24"),
    "Gpt, shallower": ("Gpt", {"layers": 1}, "blocks.\\* would shrink from 2 blocks to 1"),
    "Gpt, too deep": ("Gpt", {"layers": 5}, "to at most 4 blocks, found 5; grow in two steps"),
    "Gpt, unknown": ("Gpt", {"depth": 3}, "no size 'depth'; choose from .*layers"),
    "Gpt, no whole heads": ("Gpt", {"width": 40}, "width 40 is not a multiple of the head width 16"),
    "Gpt, heads that do not fit": ("Gpt", {"width": 48, "heads": 5}, "5 heads of at least 16"),
    "Gpt, heads that are too narrow": ("Gpt", {"width": 48, "heads": 6}, "6 heads of at least 16"),
    "Gpt, two depths": ("Gpt", {"layers": (3, 3)}, "1 groups of blocks, found 2"),
    "Gpt, two widths": ("Gpt", {"width": (48, 64)}, "width must be a single size"),
    "GPT-2, heads alone": ("GPT-2", {"heads": 4}, "4 heads of at least 16 do not add up to width 32"),
    "Llama, heads rotated by place": ("Llama", {"head_dim": 16}, "grow heads= instead"),
    "Llama, uneven groups": ("Llama", {"heads": 6, "kv_heads": 4}, "6 heads cannot share 4"),
    "Llama, heads without room": ("Llama", {"heads": 3 * 3, "kv_heads": 9}, None),
    "BERT, no multiple": (
        "HF BERT",
        {"width": 48},
        "attention.output.LayerNorm need different .* give 32 or 64",
    ),
    "BERT, deeper": ("HF BERT", {"layers": 3}, "output.LayerNorm normalizes the residual stream"),
    "ResNet, shrinking": ("ResNet", {"c1": 7}, "c1 would shrink"),
    "ResNet, too deep": ("HF ResNet, basic", {"layers": (2, 5)}, "to at most 4 blocks, found 5"),
    "Vgg, deeper": ("Vgg", {"layers": 3}, "names no blocks"),
}


@pytest.mark.parametrize("sizes", SIZES)
def test_sizes_that_cannot_be(sizes):
    family, asked, said = SIZES[sizes]
    small, inputs = made(family)
    if said is None:
        assert qsync.verify_expansion(
            small, qsync.expand(small, recipe(family, small, **asked)), inputs
        ).passed
    else:
        refused(small, recipe(family, small, **asked), UnsupportedError, said)


def test_query_heads_that_new_groups_leave_no_room_for():
    """Eight heads in two groups of four, to nine in three groups of three: copies of the first group can
    share its four out, and the second, with one copy, has room for three."""
    from transformers import LlamaConfig, LlamaForCausalLM

    config = LlamaConfig(
        vocab_size=50, hidden_size=32, intermediate_size=32, num_hidden_layers=1, num_attention_heads=8,
        num_key_value_heads=2,
    )  # fmt: skip
    small = LlamaForCausalLM(config).double()
    refused(
        small,
        qsync.recipe_of(small).to(heads=9, kv_heads=3),
        UnsupportedError,
        "8 heads with 4 .* do not fit into 9",
    )


def test_batch_norm_lets_nothing_cancel():
    small, _ = made("ResNet")
    refused(
        small,
        recipe("ResNet", small, layers=3),
        UnsupportedError,
        'bn2 is .* use depth="zero"',
        depth="cancel",
    )


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"split": "rnd"}, "random, scalar, even"),
        ({"depth": "0"}, "zero, c"),
        ({"seed": "x"}, "seed must be a whole number, found 'x'"),
        ({"seed": None}, "seed must be a whole number"),
    ],
)
def test_unknown_options(options, said):
    refused(Net(), NET.to(width=32), FormatError, said, **options)


@pytest.mark.parametrize("size", [0, -1, 2.0, "3", None, True])
def test_a_size_is_a_whole_number(size):
    with pytest.raises(FormatError, match="width must be a whole number"):
        NET.to(width=size)


def test_what_is_no_recipe_or_says_nothing():
    refused(Net(), NET, FormatError, "has no target sizes")
    refused(Net(), {"width": 32}, FormatError, "recipe must be a qsync.Recipe, found dict")
    refused(
        Net(), replace(NET, table=3).to(width=32), FormatError, "the table of the recipe net must be text"
    )
    with pytest.raises(FormatError, match=r"torch.nn.Module, found int"):
        qsync.expand(3, NET.to(width=32))
    with pytest.raises(UnsupportedError, match="no recipe for Net; only for gpt2"):
        qsync.recipe_of(Net())


def parametrised(kind):
    model = Net()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", FutureWarning)
        kind(model.fc)
    return model


MODELS = {
    "compiled": (lambda: torch.compile(Net(), backend="eager"), "pass model._orig_mod"),
    "data parallel": (lambda: nn.DataParallel(Net()), "pass model.module"),
    "weight norm": (lambda: parametrised(nn.utils.parametrizations.weight_norm), "remove_parametrizations"),
    "weight norm, as it was": (
        lambda: parametrised(nn.utils.weight_norm),
        "fc.weight_. belongs to a reparametrized weight",
    ),
    "spectral norm": (
        lambda: parametrised(nn.utils.spectral_norm),
        "fc.weight_orig belongs to a reparametrized weight",
    ),
    "without shapes": (lambda: lazy(), "fc.weight has no shape yet"),
    "INT8": (
        lambda: of_type(torch.int8),
        "fc.weight is quantized .*torch.int8.*; grow the model unsharded in floating point",
    ),
    "FP8": (lambda: of_type(torch.float8_e4m3fn), "fc.weight is quantized .*float8_e4m3fn"),
    "no weights": (lambda: Net().to("meta"), "on the meta device"),
    "an embedding that is cut": (lambda: cut(), "has max_norm"),
}


def lazy():
    model = Net()
    model.fc = nn.LazyLinear(24)
    return model


def of_type(kind):
    model = Net()
    model.fc.weight = nn.Parameter(model.fc.weight.detach().to(kind), requires_grad=False)
    return model


def cut():
    model = Net()
    model.inp = nn.Embedding(5, 16, max_norm=1.0)
    return model


@pytest.mark.parametrize("model", MODELS)
def test_models_that_are_not_grown_as_they_are(model):
    make, said = MODELS[model]
    with pytest.raises(UnsupportedError, match=said):
        qsync.expand(make(), (with_lines(NET, inp="inp -> stream") if "cut" in model else NET).to(width=32))


def test_a_grouped_convolution_is_refused():
    class Grouped(nn.Module):
        recipe = Recipe("grouped", "first _ -> a\nsecond a -> b", build=lambda small, sizes: Grouped())

        def __init__(self):
            super().__init__()
            self.first, self.second = nn.Conv2d(1, 4, 1), nn.Conv2d(4, 8, 1, groups=4)

    refused(
        Grouped(), Grouped.recipe.to(a=8), UnsupportedError, "second.weight is a grouped or transposed conv"
    )


TIED = {
    "unsaid": ("head final -> _", "end one's line with `tied`.*head ... tied tokens"),
    "to another": (
        "head final -> _ tied positions",
        "head.weight is tied to tokens.weight, .* does not declare",
    ),
}


@pytest.mark.parametrize("tied", TIED)
def test_tied_weights_that_the_recipe_does_not_mention(tied):
    line, said = TIED[tied]
    refused(
        Gpt(1, 16, 2, 8, 50, tied=True), with_lines(Gpt.recipe, head=line).to(width=32), MismatchError, said
    )


class Tied(nn.Module):
    recipe = Recipe("tied", "", build=lambda small, sizes: Tied(sizes["stream"]), sizes={"final": "stream"})

    def __init__(self, width=16, norm=nn.LayerNorm):
        super().__init__()
        self.tokens, self.fc = nn.Embedding(50, width), nn.Linear(width, width)
        self.norm, self.head = norm(width), nn.Linear(width, 50, bias=False)
        self.head.weight = self.tokens.weight


HEADS = {
    "a stream that others write": "norm stream -> stream\nfc stream -> stream\nhead stream -> _ tied tokens",
    "what no norm writes": "norm stream -> normed\nfc normed -> final\nhead final -> _ tied tokens",
}


@pytest.mark.parametrize("head", HEADS)
def test_a_tied_head_reads_what_a_norm_writes_that_can_be_divided(head):
    """Only what a norm alone writes can be divided by the number of copies."""
    given = replace(Tied.recipe, table=f"tokens -> stream\n{HEADS[head]}")
    refused(Tied(), given.to(stream=32), UnsupportedError, "head.weight has the embeddings' weight .* untie")


def test_what_a_batch_norm_writes_has_no_one_number_of_copies():
    table = "tokens -> stream\nfc stream -> inner\nnorm inner -> final\nhead final -> _ tied tokens"
    given = replace(Tied.recipe, table=table, sizes={"final": "stream", "inner": "stream"})
    refused(Tied(norm=nn.BatchNorm1d), given.to(stream=40), UnsupportedError, "but no norm writes .* untie")


@pytest.mark.parametrize("tied", [True, False])
def test_what_is_tied_stays_tied_and_nothing_else(tied):
    def build(small, sizes):
        return Gpt(1, sizes["width"], sizes["heads"], 8, 50, not tied, sizes["mlp"])

    given = replace(Gpt.recipe, build=build).to(width=32)
    refused(
        Gpt(1, 16, 2, 8, 50, tied=tied),
        given,
        MismatchError,
        "head.weight is tied .* in only one of the two models",
    )


def test_batch_norm_before_its_branch_is_not_what_silences_it():
    table = RESIDUALS.table.replace("-> normed", "-> stream").replace("normed", "stream")
    refused(
        Residuals(),
        replace(RESIDUALS, table=table).to(layers=3),
        UnsupportedError,
        "blocks.1.bn1 .*another space",
    )


class Blocks(nn.Module):
    """Blocks that add to x, and after them a norm, if they are to have one."""

    def __init__(self, num_blocks=2, width=16, normed=False):
        super().__init__()
        self.inp, self.norm, self.head = nn.Linear(5, width), nn.LayerNorm(width), nn.Linear(width, 3)
        self.blocks = nn.ModuleList(
            nn.ModuleDict({"fc": nn.Linear(width, width), "proj": nn.Linear(width, width),
                           **({"norm": nn.LayerNorm(width)} if normed else {})})
            for _ in range(num_blocks)
        )  # fmt: skip


BLOCKS = Recipe(
    "blocks", "", build=lambda small, sizes: Blocks(sizes["layers"], sizes["x"]), blocks="blocks.*"
)
DEPTHS = {
    "a stream unsaid": (
        "inp _ -> x\nnorm x -> final\nhead final -> _\nblocks.*.fc x -> h\nblocks.*.proj h -> x",
        False,
        MismatchError,
        "blocks.0.proj is in a block and writes x, .*: give residual=\\('x',\\)",
    ),
    "no stream": (
        "inp _ -> x\nnorm x -> final\nhead final -> _\nblocks.*.fc x -> h\nblocks.*.proj h -> y",
        False,
        MismatchError,
        "nothing in blocks.1 writes stream",
    ),
    "a norm after the sum": (
        "inp _ -> stream\nnorm stream -> final\nhead final -> _\nblocks.*.fc stream -> h\n"
        "blocks.*.proj h -> stream\nblocks.*.norm stream -> stream",
        True,
        UnsupportedError,
        "blocks.0.norm normalizes the residual stream itself",
    ),
}


def test_a_block_of_another_kind_than_those_that_would_follow_it():
    small = trained(ResNet((4, 8, 8), 1))
    refused(small, ResNet.recipe.to(layers=2), UnsupportedError, "stages.1.0 adds to c1 but reads another")


@pytest.mark.parametrize("depth", DEPTHS)
def test_blocks_that_do_not_just_add_are_not_copied(depth):
    table, normed, kind, said = DEPTHS[depth]
    refused(Blocks(normed=normed), replace(BLOCKS, table=table).to(layers=3), kind, said)


def test_a_buffer_that_is_kept_needs_its_line():
    class Counting(Net):
        def __init__(self, *sizes):
            super().__init__(*sizes)
            self.register_buffer("seen", torch.ones(self.inp.out_features))

    given = replace(NET, build=lambda small, sizes: Counting(sizes["width"], sizes["hidden"]))
    refused(Counting(), given.to(width=32), MismatchError, "seen is a buffer that would grow")
    big = qsync.expand(Counting(), with_lines(given, seen="seen -> stream").to(width=32))
    assert big.seen.shape == (32,)


def test_attention_that_is_not_scaled_by_its_width_cannot_have_wider_heads():
    from transformers import GPT2Config, GPT2LMHeadModel

    sizes = {"n_embd": 16, "n_layer": 1, "n_head": 2, "n_positions": 8, "vocab_size": 50, "bos_token_id": 1,
             "eos_token_id": 2}  # fmt: skip
    small = GPT2LMHeadModel(GPT2Config(**sizes, scale_attn_weights=False))
    lossless(small, qsync.recipe_of(small).to(width=24), {"input_ids": tokens()})
    refused(
        small,
        qsync.recipe_of(small).to(width=24, heads=2),
        UnsupportedError,
        "not scaled by the width of its heads",
    )


def test_two_streams_of_means_may_not_stand_side_by_side():
    refused(
        Streams(skips=True), STREAMS.to(stream=27), UnsupportedError, "skip.weight, .* filled up with means"
    )


def test_a_model_in_ddp_is_grown_without_it():
    torch.distributed.init_process_group("gloo", store=torch.distributed.HashStore(), rank=0, world_size=1)
    try:
        model = nn.parallel.DistributedDataParallel(Gpt(1, 16, 2, 8, 50))
        with pytest.raises(
            UnsupportedError, match="in DistributedDataParallel cannot be grown; pass model.module"
        ):
            qsync.recipe_of(model)
        refused(model, Gpt.recipe.to(width=32), UnsupportedError, "pass model.module")
        check_wrapped(model, "DistributedDataParallel")
    finally:
        torch.distributed.destroy_process_group()


def check_wrapped(wrapped, kind):
    """Whatever takes a model must refuse this one in one sentence."""
    small, batch = wrapped.module, torch.zeros(1, 8, dtype=torch.int64)
    plan = qsync.plan_expansion(small, Gpt.recipe.to(width=32), split="scalar")
    big, optimizer = plan.expand(small), torch.optim.AdamW(small.parameters())
    for call in (
        lambda: qsync.recipe_of(wrapped),
        lambda: plan.expand(wrapped),
        lambda: qsync.plan_expansion(wrapped, plan.recipe),
        lambda: qsync.derive_recipe(wrapped, batch),
        lambda: qsync.check_growth(wrapped, plan, {"t4": 2**30}, batch),
        lambda: qsync.expand_optimizer(plan, optimizer, wrapped, big),
        lambda: qsync.expand_optimizer(plan, optimizer, small, wrapped),
        lambda: qsync.save_expanded(wrapped, "nowhere", plan, {}),
    ):
        with pytest.raises(UnsupportedError, match=f"in {kind} cannot be grown; pass model.module"):
            call()


def test_an_average_and_kinds_of_ddp_of_ones_own_are_grown_without_it():
    """`qsync.hybrid` returns a DDP of its own."""

    class Own(nn.DataParallel):
        pass

    check_wrapped(torch.optim.swa_utils.AveragedModel(Gpt(1, 16, 2, 8, 50)), "AveragedModel")
    check_wrapped(Own(Gpt(1, 16, 2, 8, 50)), "Own")


def test_a_plan_grows_the_model_that_it_was_made_for():
    plan = qsync.plan_expansion(Gpt(2, 16, 2, 8, 50), Gpt.recipe.to(width=32))
    for layers, said in (
        (1, "has no blocks.1.norm1.weight, .* has shape"),
        (3, "has blocks.2.* no such parameter"),
    ):
        with pytest.raises(MismatchError, match=said):
            plan.expand(Gpt(layers, 16, 2, 8, 50))
    with pytest.raises(FormatError, match="torch.nn.Module, found NoneType"):
        plan.expand(None)
    with pytest.raises(FormatError, match="torch.nn.Module, found NoneType"):
        qsync.derive_recipe(None, tokens())


def test_the_state_of_another_model_does_not_grow_by_a_plan():
    plan = qsync.plan_expansion(Net(), NET.to(width=32))
    with pytest.raises(
        MismatchError, match="lacks inp.weight, inp.bias, norm.weight and 9 more; give the state of"
    ):
        plan.grown({})
    with pytest.raises(
        MismatchError, match=r"fc.weight has shape \(25, 16\), but \(24, 16\) in the planned model"
    ):
        plan.grown(Net(16, 25).state_dict())
    for wrong in (None, Net()):
        with pytest.raises(FormatError, match="state is a .*; give what model.state_dict"):
            plan.grown(wrong)
    with pytest.raises(FormatError, match="inp.weight is a int, 1; give what model.state_dict"):
        plan.grown(dict.fromkeys(Net().state_dict(), 1))


def test_adapters_are_refused_by_their_package():
    adapted = get_peft_model(Net(), LoraConfig(r=2, target_modules=["fc"]))
    refused(adapted, NET.to(width=27, hidden=31), UnsupportedError, "adapters of peft, .*merge_and_unload")
    lossless(adapted.merge_and_unload(), NET.to(width=27, hidden=31), torch.randn(4, 5, dtype=torch.float64))
