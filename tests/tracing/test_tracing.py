"""Capture: what torch models become as an OpGraph, and that the models do not notice."""

from __future__ import annotations

import functools
import json
import logging
import subprocess
import sys

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from models import ResNet, build, graph_of, step
from torch import nn
from torch._dynamo.variables.tensor import TensorVariable
from traced_models import Applied, Checkpointed, X

import qsync
from qsync import api
from qsync.errors import CalibrationError, TracingError
from qsync.operators.declaration import Role
from qsync.records.graph import Op, OpGraph
from qsync.runtime.planned_forward import program_of
from qsync.tracing.inplace_calls import make_out_of_place


def ops_of(graph: OpGraph) -> dict[str, Op]:
    return {op.name: op for op in graph.ops}


def inputs_of(graph: OpGraph) -> dict[str, object]:
    return {value.name: value for value in graph.inputs}


def captured(body) -> dict[str, Op]:
    return ops_of(qsync.capture(Applied(body), X))


def assert_as_in_eager(body, train: bool = True) -> None:
    """In FP32 loss, gradients and buffer are bitwise those of the plain model, in BF16 they are near."""
    found = {}
    for precision in (None, "fp32", "bf16"):
        model = Applied(body).train(train)
        if precision is not None:
            qsync.wrap(model, precision, strict=True, bitwise=True)
        torch.manual_seed(1)
        loss = model(X)
        loss.backward()
        assert all(parameter.grad is not None for parameter in model.parameters())
        gradients = [parameter.grad for parameter in model.parameters()]
        found[precision] = [loss.detach(), *gradients, model.buffer]
    assert all(map(torch.equal, found[None], found["fp32"]))
    for got, expected in zip(found["bf16"], found[None], strict=True):
        assert (got - expected).norm() <= 0.05 * expected.norm()


# --- Real architectures ---


def test_bert_is_one_segment_with_operators_named_by_module_path():
    graph = graph_of("bert")
    ops = ops_of(graph)
    assert graph.num_segments == 1
    for layer in (0, 1):
        at = f"bert.encoder.layer.{layer}."
        for name in ("attention.self.query", "attention.self.key", "attention.self.value"):
            op = ops[at + name]
            assert (op.kind, op.role, op.dtype, op.shape) == ("linear", Role.ADJUSTABLE, "fp32", (2, 8, 32))
            assert op.inputs[1:] == (f"{at}{name}.weight", f"{at}{name}.bias")
            assert layer or op.inputs[0] == "bert.embeddings.dropout"
            assert op.flops == 2 * (2 * 8) * 32 * 32
        assert ops[at + "intermediate.dense"].flops == 2 * (2 * 8) * 32 * 64
        assert ops[at + "attention.self.attention"].role is Role.ADJUSTABLE
        # Two products of (8 x 16) (16 x 8) and (8 x 8) (8 x 16), for each of 2 x 2 heads.
        assert ops[at + "attention.self.attention"].flops == 4 * 2 * (2 * 8 * 8 * 16)
        assert ops[at + "output.LayerNorm.layer_norm"].role is Role.FOLLOWING
    embedding = ops["bert.embeddings.word_embeddings.embedding"]
    assert (embedding.role, embedding.depth, embedding.flops) == (Role.ADJUSTABLE, 0, 0)
    assert ops["cross_entropy"].role is Role.FIXED


def test_all_parameters_are_inputs_with_their_shapes():
    for family in ("bert", "llama", "vit", "resnet"):
        found = {value.name: value.shape for value in graph_of(family).parameters}
        expected = {name: tuple(p.shape) for name, p in build(family)[0].named_parameters()}
        assert found.items() <= expected.items()
        assert set(expected) - set(found) <= {"bert.pooler.dense.weight", "bert.pooler.dense.bias"}


def test_a_graph_break_gives_segments_joined_in_order():
    """Hugging Face's GPT-2 breaks once, before the loss."""
    graph = graph_of("gpt2")
    names = [op.name for op in graph.ops]
    assert graph.num_segments == 2
    assert len(set(names)) == len(names)
    assert names.index("transformer.h.0.attn.c_attn") < names.index("transformer.h.1.mlp.c_proj")
    assert names.index("lm_head") < names.index("cross_entropy")
    assert ops_of(graph)["transformer.h.0.attn.c_attn"].kind == "addmm"
    assert ops_of(graph)["transformer.h.0.attn.c_attn"].flops == 2 * 16 * 32 * 96


class _ChangesItself(nn.Module):
    """Breaks its graph in its first call alone, as models of transformers do that install hooks there."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second, self.ready = nn.Linear(8, 8), nn.Linear(8, 1), False

    def forward(self, x):
        x = self.first(x)
        if not self.ready:
            torch._dynamo.graph_break()
            self.ready = True
        return self.second(x).mean()


def test_a_graph_that_breaks_in_the_first_call_alone_is_one():
    x = torch.randn(4, 8)
    assert qsync.capture(_ChangesItself(), x).num_segments == 1
    assert api.trace_step(_ChangesItself(), x, lambda model, batch: model(batch)).num_segments == 1


def test_a_model_that_records_hidden_states_is_one_segment_at_its_first_call():
    from transformers import SegformerConfig, SegformerForSemanticSegmentation

    sizes = {"depths": [1] * 2, "hidden_sizes": [8] * 2, "num_attention_heads": [1] * 2}
    config = SegformerConfig(**sizes, num_encoder_blocks=2, decoder_hidden_size=8)
    model = SegformerForSemanticSegmentation(config)
    batch = {"pixel_values": torch.randn(1, 3, 32, 32), "labels": torch.zeros(1, 32, 32, dtype=torch.long)}
    for _ in range(2):
        assert qsync.capture(model, batch).num_segments == 1
    assert len(model(**batch, output_hidden_states=True).hidden_states) == 2  # one hook a layer
    called = SegformerForSemanticSegmentation(model.config)
    called(**batch)  # a part of it has hooks
    assert qsync.capture(called, batch).num_segments == 1
    assert len(called(**batch, output_hidden_states=True).hidden_states) == 2


def test_a_tied_weight_feeds_two_operators_under_one_name():
    graph = graph_of("gpt2")
    ops = ops_of(graph)
    assert "transformer.wte.weight" in ops["transformer.wte.embedding"].inputs
    assert ops["lm_head"].inputs[1] == "transformer.wte.weight"
    assert "lm_head.weight" not in inputs_of(graph)


def test_llama_norms_keep_their_authors_fp32():
    """RMSNorm says `.to(torch.float32)`: an FP32 request, though it does nothing in an FP32 model."""
    graph = graph_of("llama")
    ops = ops_of(graph)
    assert ops["model.layers.0.input_layernorm.float"].role is Role.FIXED
    assert {op.kind for op in graph.adjustable} == {"embedding", "linear", "attention"}
    assert ops["model.layers.0.mlp.gate_proj"].flops == 2 * 16 * 32 * 64


def test_a_decorated_forward_keeps_the_names_of_its_modules():
    """A decorator that takes `*args` calls the model by no name of its own (Hugging Face's do)."""

    def decorated(forward):
        @functools.wraps(forward)
        def wrapper(*args, **kwargs):
            return forward(*args, **kwargs)

        return wrapper

    class Decorated(nn.Module):
        def __init__(self):
            super().__init__()
            self.inner = nn.ModuleList([nn.Linear(4, 4), nn.ReLU()])
            self.head = nn.Linear(4, 2)

        @decorated
        def forward(self, x):
            for layer in self.inner:
                x = layer(x)
            return self.head(x)

    whole = nn.Sequential(nn.Linear(4, 4), Decorated())
    assert {"inner.0", "inner.1.relu", "head"} <= ops_of(qsync.capture(Decorated(), X[:, :4])).keys()
    assert {"0", "1.inner.0", "1.inner.1.relu", "1.head"} <= ops_of(qsync.capture(whole, X[:, :4])).keys()


def test_resnet_convolutions_are_adjustable_and_norms_keep_their_statistics():
    model, batch = build("resnet")
    graph = qsync.capture(model, batch)
    ops = ops_of(graph)
    assert [op.name for op in graph.adjustable if op.kind == "conv2d"] == [
        "stem.0", "layer1.conv1", "layer1.conv2", "layer1.down.0", "layer2.conv1", "layer2.conv2",
        "layer2.down.0",
    ]  # fmt: skip
    assert ops["layer2.conv1"].flops == 2 * (4 * 16 * 4 * 4) * (8 * 3 * 3)
    norm = ops["layer1.bn1.batch_norm"]
    assert norm.role is Role.FOLLOWING and norm.inputs == ("layer1.conv1",)
    assert {"layer1.bn1.running_mean", "layer1.bn1.running_var", "layer1.bn1.weight"} <= set(norm.kept)


def test_depth_counts_products_on_the_longest_path():
    ops = ops_of(graph_of("resnet"))
    assert ops["stem.0"].depth == 1 and ops["layer1.conv2"].depth == 3 and ops["layer1.down.0"].depth == 2
    assert ops["fc"].depth == 6


def test_grouped_convolutions_count_only_their_own_channels():
    class Grouped(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.conv = nn.Conv2d(8, 16, 3, padding=1, groups=4)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.conv(x).mean()

    ops = ops_of(qsync.capture(Grouped(), torch.randn(2, 8, 5, 5)))
    assert ops["conv"].flops == 2 * (2 * 16 * 5 * 5) * (2 * 3 * 3)


def test_products_of_activations_are_counted():
    graph = qsync.capture(Products(), (torch.randn(2, 3, 4), torch.randn(2, 4, 5)))
    assert [(op.kind, op.flops) for op in graph.adjustable] == [("matmul", 2 * 2 * 3 * 5 * 4)] * 4
    graph = qsync.capture(OneProduct(), (torch.randn(3, 4), torch.randn(4, 5)))
    assert [(op.kind, op.flops) for op in graph.adjustable] == [("matmul", 2 * 3 * 5 * 4)]


class OneProduct(nn.Module):
    """The spelling for two matrices."""

    def forward(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        return torch.mm(x, y)


class Unwritten(nn.Module):
    """Products that qsync has no kernel for, and one that it has."""

    def __init__(self) -> None:
        super().__init__()
        self.fc, self.weight = nn.Linear(4, 4), nn.Parameter(torch.randn(4, 6))
        self.up, self.volume, self.pair = (
            nn.ConvTranspose2d(2, 3, 2),
            nn.Conv3d(1, 2, 3),
            nn.Bilinear(4, 4, 5),
        )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = torch.einsum("b i j, jk -> b i k", self.fc(x), self.weight)
        y = y + torch.einsum("bij->bi", x)[..., None]
        total = y.sum() + torch.baddbmm(y, x, self.weight.expand(2, 4, 6)).sum()
        total = total + self.up(x.view(2, 2, 3, 2)).sum() + self.pair(x, x).sum()
        total = total + torch.addbmm(y[0], x, self.weight.expand(2, 4, 6)).sum()
        return total + self.volume(torch.ones(1, 1, 3, 4, 5)).sum()


def test_products_without_a_kernel_are_named_and_counted():
    graph = qsync.capture(Unwritten(), torch.randn(2, 3, 4))
    found = {op.name: (op.flops, op.fixed_because) for op in graph.ops if op.role is Role.FIXED and op.flops}
    assert {name: flops for name, (flops, _) in found.items()} == {
        "addbmm": 2 * 2 * 3 * 6 * 4,
    }
    (single,) = (op for op in graph.ops if op.name == "einsum#2")
    assert single.fixed_because == "it multiplies no two values"
    assert found["addbmm"][1] == "qsync has no kernel for addbmm in low precision"
    assert {op.name: op.flops for op in graph.adjustable} == {
        "fc": 2 * 2 * 3 * 4 * 4,
        "einsum": 2 * 2 * 3 * 4 * 6,
        "baddbmm": 2 * 2 * 3 * 6 * 4,
        "up": 2 * (2 * 2 * 3 * 2) * (3 * 2 * 2),
        "volume": 2 * (2 * 1 * 2 * 3) * 27,
        "pair": 2 * (2 * 3 * 5) * 4 * 4,
    }


class Sums(nn.Module):
    """The same product of heads, written in every way that einsum takes."""

    def forward(self, y: torch.Tensor) -> torch.Tensor:
        found = torch.einsum("bhqd,bhkd->bhqk", y, y) + torch.einsum("...qd,...kd->...qk", y, y)
        found = found + torch.einsum(y, [0, 1, 2, 3], y, [0, 1, 4, 3], [0, 1, 2, 4])
        return found + torch.einsum(y, [..., 2, 3], y, [..., 4, 3], [..., 2, 4])


def test_einsum_is_counted_however_it_is_written():
    graph = qsync.capture(nn.Sequential(nn.Linear(6, 6), Sums()), torch.randn(2, 3, 5, 6))
    found = [(op.role, op.flops) for op in graph.ops if op.kind == "einsum"]
    assert found == [(Role.ADJUSTABLE, 2 * 2 * 3 * 5 * 5 * 6)] * 4


WHOLE = {
    "mul": lambda mask: mask * -(10**9),
    "add": lambda mask: mask + 100_000,
    "where": lambda mask: torch.where(mask > 0, -(10**9), 0.0),
    "masked_fill": lambda mask: mask.masked_fill(mask > 0, -(10**9)),
    "full_like": lambda mask: torch.full_like(mask, -(10**9)),
    "full": lambda mask: torch.full((70_000, 1), 0.0)[: mask.shape[0]] + torch.full((1,), -(10**9)),
}


@pytest.mark.parametrize("how", list(WHOLE))
def test_whole_constants_that_16_bits_may_not_hold_keep_what_reads_them(how):
    class Masked(nn.Linear):
        def forward(self, x: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
            return torch.matmul(super().forward(x) + WHOLE[how](mask), x.transpose(0, 1))

    graph = qsync.capture(Masked(8, 8), (torch.randn(8, 8), torch.ones(8, 8)))
    (product,) = (op for op in graph.ops if op.kind == "matmul")
    assert product.magnitude >= 100_000 and "which 16 bits may not hold" in product.fixed_because


def test_large_sizes_are_no_constants():
    class Long(nn.Linear):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return torch.matmul(super().forward(x).expand(70_000, 8), torch.full((8, 1), 0.5))

    (product,) = (op for op in qsync.capture(Long(8, 8), torch.randn(1, 8)).ops if op.kind == "matmul")
    assert product.shape == (70_000, 1) and not product.magnitude and not product.fixed_because


class Counted(nn.Module):
    """Calls that multiply inside."""

    def __init__(self) -> None:
        super().__init__()
        self.fc, self.cell = nn.Linear(4, 4), nn.LSTMCell(4, 6)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.fc(x)
        chained = torch.linalg.multi_dot([x, self.fc.weight, self.fc.weight])
        spelt = torch.ops.aten.mm.default(torch.linalg.matmul(x, self.fc.weight), self.fc.weight)
        return (
            self.cell(x)[0].sum()
            + torch.tensordot(x, self.fc.weight, 1).sum()
            + torch.inner(x, chained).sum()
            + spelt.sum()
        )


def test_products_inside_of_calls_are_counted_and_named():
    graph = qsync.capture(Counted(), torch.randn(3, 4))
    found = {op.name: op.flops for op in graph.ops if op.role is Role.FIXED and op.flops}
    assert found == {
        "cell.lstm_cell": 2 * 3 * (4 + 6) * 24,
        "linalg_multi_dot": 2 * (3 * 4 * 4) * 2,
        "tensordot": 2 * 3 * 4 * 4,
        "inner": 2 * 3 * 4 * 3,
    }
    assert all("no kernel for" in op.fixed_because for op in graph.ops if op.name in found)
    assert [op.kind for op in graph.adjustable] == ["linear", "matmul", "matmul"]


class Products(nn.Module):
    """Four spellings of one product."""

    def forward(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        return (x @ y + torch.bmm(x, y) + torch.matmul(input=x, other=y) + x.matmul(y)).sum()


# --- Identity ---


def test_the_hash_is_of_the_model_and_not_of_the_batch_or_mode():
    hashes = set()
    for family in ("mlp", "resnet"):
        model, batch = build(family)
        _, larger = build(family, batch_size=5)
        graphs = [
            qsync.capture(model, batch),
            qsync.capture(model, larger),
            qsync.capture(model.eval(), batch),
        ]
        assert len({graph.hash for graph in graphs}) == 1
        assert graphs[0].shapes_hash != graphs[1].shapes_hash
        hashes.add(graphs[0].hash)
    hashes.add(qsync.capture(ResNet(width=4), build("resnet")[1]).hash)
    assert len(hashes) == 3


@pytest.mark.parametrize(("family", "fills_a_cache"), [("bert", False), ("llama", True)])
def test_the_meta_device_gives_the_same_graph(family, fills_a_cache):
    """Hugging Face models fill a cache by default: a fresh one begins with `torch.tensor([], device=...)`."""
    model, batch = build(family)
    model.config.use_cache = fills_a_cache
    on_cpu = qsync.capture(model, batch)
    on_meta = qsync.capture(model.to("meta"), {name: tensor.to("meta") for name, tensor in batch.items()})
    assert any(op.kind == "cat" for op in on_cpu.ops) or not fills_a_cache
    assert on_meta.hash == on_cpu.hash and on_meta.shapes_hash == on_cpu.shapes_hash


LARGE = """
import json, sys, time, torch, qsync
from qsync.experiments.harness.processes import peak_resident_bytes
from transformers import LlamaConfig, LlamaForCausalLM
config = LlamaConfig(
    vocab_size=128256, hidden_size=8192, intermediate_size=28672, num_hidden_layers=int(sys.argv[1]),
    num_attention_heads=64, num_key_value_heads=8, max_position_embeddings=8192,
)
with torch.device("meta"):
    model, tokens = LlamaForCausalLM(config), torch.zeros(1, 128, dtype=torch.int64)
start = time.perf_counter()
graph = qsync.capture(model, {"input_ids": tokens, "labels": tokens})
seconds = time.perf_counter() - start
num_parameters = sum(p.numel() for p in model.parameters())
print(json.dumps([len(graph.adjustable), num_parameters, graph.num_segments, seconds, peak_resident_bytes()]))
"""


@pytest.mark.slow
@pytest.mark.parametrize("num_layers", [1, pytest.param(80, marks=pytest.mark.deep)])
def test_a_model_that_is_larger_than_memory_is_captured_within_2_gib(num_layers):
    """Llama of 70 billion parameters, and its first layer, of 12 GB."""
    command = [sys.executable, "-c", LARGE, str(num_layers)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=240)
    assert done.returncode == 0, done.stderr
    num_ops, num_parameters, num_segments, seconds, peak_bytes = json.loads(done.stdout.splitlines()[-1])
    print(f"measured: {seconds:.1f} s, peak {peak_bytes / 2**30:.2f} GiB, {num_ops} adjustable operators")
    assert num_parameters > (70e9 if num_layers == 80 else 2.9e9)
    assert num_ops == num_layers * 8 + 2 and num_segments == 1
    assert peak_bytes < 2 * 2**30


# --- In-place calls ---


def test_an_inplace_add_follows_even_when_more_inplace_calls_come():
    """`y += shortcut; relu_(y)`, as ResNets do, leaves everything adjustable or following."""

    def body(m, x):
        y = m.fc2(x)
        y += x
        return F.relu(F.relu_(y) * 2, inplace=True)

    ops = captured(body)
    assert ops["add"].role is Role.FOLLOWING and ops["fc1"].role is ops["fc2"].role is Role.ADJUSTABLE
    assert_as_in_eager(body)


def test_readers_of_the_old_name_see_the_write():
    def body(m, x):
        y = x * 2
        y.add_(1)
        return y * y

    ops = captured(body)
    assert ops["add"].role is Role.FOLLOWING and ops["mul#2"].inputs == ("add", "add")
    assert_as_in_eager(body)


def through_a_view(m, x):
    y = x * 2
    y.view(-1)[:8].mul_(3)
    return y


def through_a_detached_name(m, x):
    """detach is no view to the eye, but shares storage."""
    y = x * 2
    y.detach().add_(1)
    return y


def by_setitem(m, x):
    y = x * 2
    y[:, 0] = 0.5
    return y


@pytest.mark.parametrize("body", [through_a_view, through_a_detached_name, by_setitem])
def test_a_write_that_has_no_other_form_stays_and_pins_what_shares_its_storage(body):
    ops = captured(body)
    assert ops["mul"].role is Role.FIXED
    # What reads the storage after the write is fixed as well: a cast made before the write would miss it.
    assert ops["fc2"].role is Role.FIXED and ops["fc1"].role is Role.ADJUSTABLE
    assert_as_in_eager(body)


@pytest.mark.parametrize(
    "body",
    [
        lambda m, x: m.buffer.add_(1) + x,
        lambda m, x: m.buffer.view(-1).mul_(0.5).add_(1) + x,
        lambda m, x: m.buffer[2:4].fill_(7).sum() + x,
        lambda m, x: m.buffer.copy_(x[0].detach()) + x,
    ],
)
def test_buffers_that_the_model_writes_are_written(body):
    assert_as_in_eager(body)
    model = qsync.wrap(Applied(body), "bf16", strict=True)
    model(X)
    assert model.buffer.any()


@pytest.mark.parametrize(
    "body",
    [
        lambda m, x: F.dropout2d(x[None, ..., None], inplace=True)[0, ..., 0],
        lambda m, x: F.threshold(x, 0.1, 0.2, inplace=True),
        lambda m, x: F.alpha_dropout(x, 0.5, True, inplace=True),
        lambda m, x: torch.mul(x, 2, out=torch.empty_like(x).detach()) if not x.requires_grad else x * 2,
    ],
)
def test_inplace_calls_nobody_listed_keep_their_meaning(body):
    def reads_the_old_name(m, x):
        y = x * 2
        body(m, y)
        return y

    assert_as_in_eager(reads_the_old_name)


def test_a_write_that_keeps_a_narrower_type_stays():
    """FP32 += FP64 is FP32 in place and would be FP64 out of place."""

    def body(m, x):
        y = x * 2
        y += torch.ones(8, dtype=torch.float64)
        return y

    assert_as_in_eager(body)
    model = Applied(body)
    assert qsync.wrap(model, "bf16", strict=True)(X).dtype is torch.float32


def test_out_of_place_rewriting_drops_no_node():
    graph = torch.fx.Graph()
    x = graph.placeholder("x")
    x.meta["example_value"] = torch.zeros(2)
    y = graph.call_function(torch.add, (x, 1))
    y.meta["example_value"] = torch.zeros(2)
    z = graph.call_method("mul_", (y, 2))
    z.meta["example_value"] = y.meta["example_value"]
    graph.output((y,))
    assert make_out_of_place(graph) == set()
    assert z.target == "mul" and graph.output_node().args == ((z,),)


def clamp(h):
    h.clamp_(-0.5, 0.5)


def double(h):
    h *= 2


@pytest.mark.parametrize("without", [torch.no_grad, torch.inference_mode])
@pytest.mark.parametrize("write", [clamp, double, lambda h: F.relu(h, inplace=True)])
def test_a_write_without_gradients_keeps_the_gradients_of_its_target(write, without):
    def body(m, x):
        h = x * 2
        with without():
            write(h)
        return h

    assert captured(body)["mul"].role is Role.FIXED
    assert_as_in_eager(body)


def test_a_write_to_a_value_without_gradients_is_made_out_of_place():
    def body(m, x):
        with torch.no_grad():
            scale = x * 2
            scale += 1
        return x * scale

    ops = captured(body)
    assert ops["mul"].role is ops["add"].role is Role.FOLLOWING and ops["mul#2"].inputs == ("fc1", "add")
    assert_as_in_eager(body)


def square(h):
    h **= 2


def remainder(h):
    h %= 0.3


def product(h):
    h @= 2 * torch.eye(8)  # another tensor: tensors have no `__imatmul__`


@pytest.mark.parametrize(
    "write",
    [
        square,
        remainder,
        product,
        lambda h: h.__imul__(2),
        lambda h: torch.relu_(input=h),
        lambda h: torch._foreach_mul_([h], 3.0),
        lambda h: torch.ops.aten.mul_.Tensor(h, torch.tensor(3.0)),
    ],
)
def test_a_cast_hides_no_spelling_of_a_write(write):
    def body(m, x):
        h = x * 2
        before = m.fc1(h.detach().clone())
        write(h)
        return m.fc2(h) + h + before

    assert_as_in_eager(body)


def test_a_registered_operator_writes_to_what_its_schema_names():
    @torch.library.custom_op("qsync_tests::scale_second", mutates_args=("y",))
    def scale_second(x: torch.Tensor, y: torch.Tensor) -> None:
        y.mul_(x)

    def body(m, x):
        h = x * 2
        inner = h.detach()
        scale_second(x.detach(), inner)
        return m.fc2(inner) + h

    assert captured(body)["mul"].role is Role.FIXED
    assert_as_in_eager(body)


@pytest.mark.parametrize(
    "drop, train",
    [
        (lambda h, train: F.dropout(h, 0.5, train), False),
        (lambda h, train: F.dropout(h, 0.0, train), True),
        (lambda h, train: torch.dropout(h, 0.5, train), False),
        (lambda h, train: F.alpha_dropout(h, 0.5, train), False),
        (lambda h, train: F.alpha_dropout(h), True),  # `training` is False by default
        (lambda h, train: torch.feature_alpha_dropout(h, 0.0, train), True),
    ],
)
def test_a_write_to_what_a_dropout_without_drops_returns_is_one_to_its_input(drop, train):
    def body(m, x):
        h = x * 2
        y = drop(h, m.training)
        y += 1
        return y * h

    assert_as_in_eager(body, train)


# --- Checkpointing ---


def test_operators_inside_a_checkpoint_are_listed():
    inside = qsync.capture(Checkpointed(), X)
    outside = qsync.capture(Checkpointed(enabled=False), X)
    assert [op.name for op in inside.adjustable] == [op.name for op in outside.adjustable]
    assert inside.hash == outside.hash
    assert inside.adjustable[0].name == "layers.0.0"


# --- What stays in the type its author chose ---


@pytest.mark.parametrize(
    ("body", "name"),
    [
        (lambda m, x: x.float() * 2, "float"),
        (lambda m, x: x.to(torch.float32) * 2, "float"),
        (lambda m, x: F.softmax(x, dim=-1, dtype=torch.float32), "softmax"),
        (lambda m, x: x.double().float(), "float"),
        (lambda m, x: torch.fft.rfft(x).abs().mean(-1, keepdim=True) + x, "fft_rfft"),
        (lambda m, x: torch.linalg.vector_norm(x) + x, "linalg_vector_norm"),
    ],
)
def test_types_an_author_asked_for_and_unknown_operators_are_fixed(body, name):
    assert captured(body)[name].role is Role.FIXED
    assert_as_in_eager(body)


def test_products_traced_in_another_type_are_left_alone():
    ops = captured(lambda m, x: (x.double() @ torch.eye(8, dtype=torch.float64)).float())
    assert ops["matmul"].role is Role.FIXED and ops["matmul"].dtype == "fp64"


def test_a_users_operator_may_bear_a_known_name():
    library = torch.library.Library("qsync_tests", "FRAGMENT")
    library.define("linear(Tensor x, Tensor weight) -> Tensor")
    library.impl("linear", lambda x, weight: x * 2, "CompositeImplicitAutograd")
    ops = captured(lambda m, x: torch.ops.qsync_tests.linear(x, m.fc1.weight))
    assert [op.name for op in ops.values() if op.role is Role.ADJUSTABLE] == ["fc1", "fc2"]


@pytest.mark.parametrize(
    "passed_on",
    [
        lambda mask: mask, lambda mask: mask.view(1, 8), lambda mask: mask.expand(2, 8).contiguous()[0],
        lambda mask: torch.cat([mask[:4], mask[4:]]), lambda mask: F.pad(mask[1:], (1, 0)),
        lambda mask: torch.where(mask < 0, mask, 0.0), lambda mask: mask.repeat(2)[:8],
    ],
)  # fmt: skip
def test_a_mask_of_the_least_number_keeps_its_addition_in_fp32(passed_on):
    """finfo(float32).min is -inf in BF16, and a row of -inf has no softmax."""

    def body(m, x):
        mask = (torch.arange(8) > 3).float() * torch.finfo(torch.float32).min
        return F.softmax(x + passed_on(mask), -1)

    ops = captured(body)
    assert ops["add"].magnitude == pytest.approx(3.4028e38, rel=1e-3)
    fully_masked = qsync.wrap(
        Applied(lambda m, x: F.softmax(x + torch.finfo(torch.float32).min, -1)), "bf16", strict=True
    )
    assert fully_masked(X).isfinite()


class Masked(nn.Module):
    """Attention under a mask of floats that comes with the batch."""

    def __init__(self) -> None:
        super().__init__()
        self.fc = nn.Linear(8, 8)

    def forward(self, x: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
        y = self.fc(x)[None]
        return F.scaled_dot_product_attention(y, y, y, attn_mask=mask[None].expand(1, 4, 4)).square().mean()


def test_attention_under_a_mask_from_the_batch_stays_in_fp32():
    """Nobody knows what numbers it will hold; the least one would make a row without softmax in BF16."""
    least = torch.full((4, 4), torch.finfo(torch.float32).min)
    assert ops_of(qsync.capture(Masked(), (X, least)))["attention"].role is Role.FIXED
    assert ops_of(qsync.capture(Masked(), (X, least == 0)))["attention"].role is Role.ADJUSTABLE
    assert qsync.wrap(Masked(), "bf16", strict=True)(X, least).isfinite()


# --- Sharing and breaks ---


def test_a_shared_module_is_counted():
    graph = qsync.capture(Applied(lambda m, x: m.fc1(x)), X)
    assert [op.name for op in graph.adjustable] == ["fc1", "fc1#2", "fc2"]
    assert ops_of(graph)["fc1#2"].inputs[1] == "fc1.weight"


def test_a_module_shared_across_a_graph_break_is_counted():
    def body(m, x):
        torch._dynamo.graph_break()
        return m.fc1(x)

    graph = qsync.capture(Applied(body), X)
    assert graph.num_segments > 1
    assert [op.name for op in graph.adjustable] == ["fc1", "fc1#2", "fc2"]
    # Each segment casts the weight for itself.
    assert ops_of(graph)["fc1#2"].inputs[1].startswith("fc1.weight@segment")
    assert_as_in_eager(body)


@pytest.mark.parametrize("body", [lambda m, x: x * x.detach().sum().item(), lambda m, x: print(x.shape) or x])
def test_reading_a_number_in_forward_breaks_the_graph_and_loses_nothing(body, capsys):
    graph = qsync.capture(Applied(body), X)
    assert graph.num_segments > 1
    assert [op.name for op in graph.adjustable] == ["fc1", "fc2"]
    assert_as_in_eager(body)


# --- Models that cannot be traced, batches that cannot be used ---


class Untraceable(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.fc = nn.Linear(8, 8)

    @torch.compiler.disable
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.fc(x).mean()


def test_a_model_that_cannot_be_traced_is_named_with_the_reason():
    with pytest.raises(TracingError) as error:
        qsync.capture(Untraceable(), X)
    assert "Untraceable" in str(error.value) and "\n" not in str(error.value)
    assert "forward" in str(error.value) or "disable" in str(error.value)


def test_a_wrapped_model_that_cannot_be_traced_says_so_instead_of_training_in_fp32():
    model = qsync.wrap(Untraceable(), "bf16", strict=True)
    for _ in range(2):
        with pytest.raises(TracingError, match="Untraceable"):
            model(X)


def test_a_model_without_products_has_nothing_to_lower():
    with pytest.raises(TracingError, match="nothing to lower in ReLU"):
        qsync.capture(nn.ReLU(), X)


def test_a_model_of_other_types_or_products_says_that_its_operators_were_traced():
    with pytest.raises(
        TracingError,
        match="linear stays as it is because the model has it in fp64; convert it with model.float",
    ):
        qsync.capture(nn.Linear(8, 8).double(), X.double())


class BreaksInALoop(nn.Module):
    """Torch does not resume in the middle of a loop: it skips the frame."""

    def __init__(self, has_layer: bool = False) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(8, 8))
        self.fc = nn.Linear(8, 8) if has_layer else None

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for _ in range(2):
            if x.sum() > 0:
                x = self.fc(x) if self.fc is not None else x
            x = x.abs() @ self.weight.abs()
        return x


class CallsItBySuper(BreaksInALoop):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(x)


class ComputesOtherwise(BreaksInALoop):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.fc(x) @ self.weight


def test_layers_of_a_frame_that_is_skipped_are_lowered_and_the_rest_is_told(capsys):
    torch._dynamo.reset()
    graph = qsync.capture(BreaksInALoop(has_layer=True), X.abs())
    assert {op.kind for op in graph.ops if op.flops} == {"linear"}
    model = BreaksInALoop(has_layer=True)
    expected = model(X.abs())
    assert not torch.equal(qsync.wrap(model, "bf16", strict=True)(X.abs()), expected)
    assert "BreaksInALoop: " in capsys.readouterr().err
    said = str(qsync.coverage(model))
    assert "of code that torch.compile gives up only layers are lowered: Data-dependent branching" in said


def test_a_frame_that_was_skipped_is_told_of_the_models_that_run_it_alone():
    def why(model: nn.Module) -> str:
        qsync.wrap(model, "fp32")(X.abs())
        return program_of(model).skipped

    torch._dynamo.reset()
    assert why(BreaksInALoop(has_layer=True)).startswith("Data-dependent branching")
    assert why(BreaksInALoop(has_layer=True)).startswith("Data-dependent branching")
    assert why(CallsItBySuper(has_layer=True)).startswith("Data-dependent branching")
    assert why(CallsItBySuper(has_layer=True)).startswith("Data-dependent branching")
    assert not why(ComputesOtherwise(has_layer=True))
    inside = nn.Sequential(nn.Linear(8, 8), BreaksInALoop(has_layer=True))
    assert why(inside).startswith("Data-dependent branching")
    assert not why(nn.Sequential(nn.Linear(8, 8), nn.ReLU()))
    given_up = nn.Sequential(nn.Linear(8, 8), nn.BatchNorm1d(8, momentum=None), nn.Linear(8, 8))
    assert why(given_up).startswith("Unsupported Tensor.item")
    assert not why(nn.Sequential(nn.Linear(8, 8), nn.GELU()))
    torch._dynamo.reset()
    assert not why(nn.Sequential(nn.Linear(8, 8), nn.Tanh()))


def test_a_frame_that_is_skipped_names_what_the_tracer_met_in_it():
    for call in (
        lambda: qsync.capture(BreaksInALoop(), X),
        lambda: qsync.wrap(BreaksInALoop(), "bf16", strict=True)(X),
    ):
        torch._dynamo.reset()
        with pytest.raises(TracingError, match=r"Data-dependent branching \(.*test_tracing\.py, line \d+\)"):
            call()


def test_a_batch_that_the_model_cannot_take_says_what_torch_said():
    with pytest.raises(CalibrationError, match=r"Linear fails on the example batch .*4x9 and 8x8"):
        qsync.capture(nn.Linear(8, 8), torch.randn(4, 9))


class Mapped(nn.Module):
    """One product under torch.vmap, where a tensor has a dimension that it does not show, and one outside."""

    def __init__(self) -> None:
        super().__init__()
        self.inner, self.fc = nn.Linear(8, 8), nn.Linear(8, 8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.fc(torch.vmap(self.inner)(x))


class MappedBeside(nn.Module):
    """A layer under torch.vmap that does not depend on what is mapped."""

    def __init__(self) -> None:
        super().__init__()
        self.inner, self.fc = nn.Linear(8, 8), nn.Linear(8, 8)
        self.weights = nn.Parameter(torch.randn(3, 8, 8) / 8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.fc(torch.vmap(lambda weight: self.inner(x).relu() @ weight)(self.weights))


class Unbatched(nn.Module):
    """A convolution without a batch dimension has no samples to scale one by one."""

    def __init__(self) -> None:
        super().__init__()
        self.conv, self.fc = nn.Conv2d(1, 2, 3, padding=1), nn.Linear(8, 8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.fc(self.conv(x[None]))


@pytest.mark.filterwarnings("ignore:qsync. .* of . products in int8")
@pytest.mark.parametrize("make", [Mapped, MappedBeside, Unbatched])
@pytest.mark.parametrize("precision", ["fp32", "int8"])
def test_what_kernels_cannot_take_stays_in_fp32_beside_what_they_can(make, precision):
    torch.manual_seed(0)
    model = make()
    expected = model(X)
    assert [op.name for op in qsync.capture(model, X).adjustable] == ["fc"]
    found = qsync.wrap(model, precision, save_less=True, strict=True)(X)
    found.sum().backward()
    assert all(parameter.grad is not None for parameter in model.parameters())
    if precision == "fp32":
        assert torch.equal(found, expected)
    else:
        assert not torch.equal(found, expected)
        assert torch.allclose(found, expected, atol=0.1)


def test_a_batch_may_be_nested():
    class Nested(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.fc = nn.Linear(8, 8)

        def forward(self, batch: dict[str, list[torch.Tensor]]) -> torch.Tensor:
            return self.fc(batch["x"][0])

    assert [op.name for op in qsync.capture(Nested(), ({"x": [X]},)).adjustable] == ["fc"]
    for empty, words in (({"x": [X[:0]]}, "not empty"), ({"x": [X[:, :0]]}, "not empty"), (3, "no tensor")):
        with pytest.raises(CalibrationError, match=words):
            qsync.capture(Nested(), (empty,))


# --- The model does not notice ---


def test_capture_leaves_buffers_gradients_and_random_state():
    model, batch = build("resnet")
    _, gradients = step(model, batch)
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    random_state = torch.get_rng_state()
    qsync.capture(model, batch)
    assert torch.equal(torch.get_rng_state(), random_state)
    assert all(torch.equal(tensor, before[name]) for name, tensor in model.state_dict().items())
    assert all(torch.equal(p.grad, gradients[name]) for name, p in model.named_parameters())
    assert "forward" not in vars(model) and model.training


class OwnLoss(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.fc = nn.Linear(4, 4)

    def forward(self, prompt: torch.Tensor) -> dict[str, torch.Tensor]:
        return {"loss": self.fc(prompt).square().mean()}


def test_a_model_s_own_loss_leaves_no_gradient_outside_of_it():
    prompt = torch.randn(3, 4, requires_grad=True)
    qsync.sensitivity(OwnLoss(), [{"prompt": prompt}], precisions=["bf16"])
    assert prompt.grad is None


def test_a_wrapped_model_is_captured_as_it_was():
    model, batch = build("mlp")
    graph = qsync.capture(model, batch)
    qsync.wrap(model, "bf16", strict=True)
    loss, _ = step(model, batch)
    assert qsync.capture(model, batch) == graph
    assert torch.equal(step(model, batch)[0], loss)


def test_example_inputs_may_be_a_tensor_a_tuple_or_a_dict():
    model, batch = build("mlp")
    graphs = [qsync.capture(model, given) for given in (batch["x"], (batch["x"],), {"x": batch["x"]})]
    assert len({graph.hash for graph in graphs}) == 1


class Drawn(nn.Module):
    """A layer whose result is masked by NumPy's draws, as SpecAugment's, before dropout by torch's."""

    def __init__(self, seed: int | None) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layer, self.seed = nn.Linear(8, 16), seed

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        hidden = self.layer(x)
        if self.seed is not None:
            np.random.seed(self.seed)
        mask = torch.from_numpy(np.random.rand(16).astype(np.float32))
        return F.dropout(hidden * mask, 0.5)


@pytest.mark.parametrize("seed", [None, 3])
def test_draws_of_numpy_stay_numpy_s(seed):
    models = (Drawn(seed), qsync.wrap(Drawn(seed), "fp32", bitwise=True))
    found, before = [], np.random.get_state()
    try:
        for model in models:
            torch.manual_seed(1)
            np.random.seed(1)
            found.append([value for _ in range(3) for value in (model(torch.ones(2, 8)), torch.rand(2))])
    finally:
        np.random.set_state(before)
    assert all(map(torch.equal, *found))
    assert not torch.equal(found[0][1], found[0][3])


def test_two_batch_tensors_never_share_a_name():
    class Two(nn.Module):
        def forward(self, X: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
            return X @ x

    graph = qsync.capture(Two(), (torch.randn(2, 3), torch.randn(3, 4)))
    assert sorted(value.shape for value in graph.inputs) == [(2, 3), (3, 4)]


class NamedAsOperators(nn.Module):
    """A model whose buffers and parameters have the names that operators at its root would have."""

    def __init__(self):
        super().__init__()
        self.fc, self.linear = nn.Linear(16, 16), nn.Parameter(torch.randn(4, 16))
        self.register_buffer("mean", torch.randn(16))

    def forward(self, x):
        y = F.linear(self.fc(x) - self.mean, self.linear)
        return y + y.mean(0)


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_operators_have_other_names_than_buffers_and_parameters(precision):
    torch.manual_seed(0)
    model, x = NamedAsOperators(), torch.randn(8, 16)
    graph = qsync.capture(model, x)
    names = [value.name for value in (*graph.inputs, *graph.ops)]
    assert len(set(names)) == len(names) and {"mean", "linear"} <= {value.name for value in graph.inputs}
    expected = model(x)
    found = qsync.wrap(model, precision, strict=True)(x)
    assert torch.equal(found, expected) if precision == "fp32" else (found - expected).norm() < 0.1


def test_hints_for_who_calls_torch_compile_are_not_shown():
    class Asks(nn.Module):
        def __init__(self):
            super().__init__()
            self.layer = nn.Linear(8, 8)

        def forward(self, x):
            return self.layer(x) * x.sum().item()

    said = []
    logger = logging.getLogger("torch._dynamo.variables.tensor")
    handler = logging.Handler()
    handler.emit = lambda record: said.append(record.getMessage())
    logger.addHandler(handler)
    once = TensorVariable._warn_capture_scalar_outputs  # a process
    try:
        once.cache_clear()
        qsync.capture(Asks(), torch.randn(4, 8))
        assert not said
        once.cache_clear()
        torch.compile(Asks(), backend="eager")(torch.randn(4, 8))  # the user's own still are
        assert len(said) == 1 and "Graph break" in said[0]
    finally:
        logger.removeHandler(handler)
