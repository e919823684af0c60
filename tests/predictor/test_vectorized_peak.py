"""Memory looked up by number: byte for byte, at every time of the step, what following every tensor gives."""

from __future__ import annotations

import random
from dataclasses import replace

import numpy as np
import pytest
from graphs import Builder, assignments_for, encoder, graphs, images, mlp
from hypothesis import assume, given
from hypothesis import strategies as st

from qsync.lowering.incremental import Lowering, lower
from qsync.operators.declaration import Role
from qsync.operators.precision import Precision
from qsync.operators.registry import PRECISIONS_BY_KIND
from qsync.predictor.memory import lifetimes
from qsync.predictor.memory.peak import StepMemory, margin_bytes
from qsync.predictor.memory.vectorized_peak import VectorizedPeak, vectorized_bytes
from qsync.records.graph import Derivative, OpGraph
from qsync.records.memory_residuals import MemoryResiduals, Residual
from qsync.records.save_less import can_save_less, ops_that_save_less
from qsync.replayer.levers.recomputation import mark_recomputed

DEVICES = ("cpu", "cuda", "other")


def check(graph: OpGraph, assignment, less=(), device="cpu", num_ranks=2, residuals=None) -> None:
    """The same bytes at every time, and the same peak."""
    lowered = Lowering(graph, assignment, "bf16", less)
    options = {
        "optimizer_bytes": 1000, "num_ranks": num_ranks, "device": device, "residuals": residuals,
    }  # fmt: skip
    memory = StepMemory(lower(graph, assignment, "bf16", less), **options)
    assert vectorized_bytes(lowered, **options).max() == memory.peak_bytes
    curve = memory.curve()
    expected = np.sum([curve[part] for part in ("casts", "saved", "transient")], axis=0)
    found = VectorizedPeak(graph, device, num_ranks > 1).in_use(lowered, residuals)
    assert np.array_equal(found[: len(expected)], expected)


def drawn(graph: OpGraph, seed: int) -> dict[str, Precision]:
    rng = random.Random(seed)
    return {op.name: rng.choice(PRECISIONS_BY_KIND[op.kind]) for op in graph.adjustable}


@given(graphs(), st.sampled_from(DEVICES), st.sampled_from([1, 2]), st.booleans(), st.data())
def test_random_graphs_take_the_same_memory_either_way(graph, device, num_ranks, ends, data):
    assume(graph.adjustable)
    if ends:  # what a loss outside reads
        names = data.draw(st.lists(st.sampled_from([op.name for op in graph.ops]), min_size=1, max_size=3))
        output = replace(
            graph.ops[-1], name="output", kind="output", role=Role.FIXED, inputs=tuple(names), kept=(),
            dtype="none", shape=(0,), requires_grad=False,
        )  # fmt: skip
        graph = replace(graph, ops=(*graph.ops, output))
    able = [op.name for op in graph.ops if can_save_less(op)]
    for _ in range(3):
        less = data.draw(st.sets(st.sampled_from(able))) if able else set()
        check(graph, data.draw(assignments_for(graph)), less, device, num_ranks)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("graph", [mlp(3), encoder(4), images(4)], ids=["mlp", "encoder", "images"])
def test_blocks_take_the_same_memory_either_way(graph, device):
    for seed in range(12):
        less = ops_that_save_less(graph, ["*"]) if seed % 3 == 0 else ()
        check(graph, drawn(graph, seed), less, device)


def drawn_residuals(graph: OpGraph, seed: int) -> MemoryResiduals:
    """Bytes of either sign for some of the operators, each in some precisions, and for the loss."""
    rng = random.Random(seed)

    def residual() -> Residual:
        return Residual(*(rng.randint(-500, 2000) for _ in range(3)))

    ops = {
        op.name: {str(p): residual() for p in Precision if rng.random() < 0.7}
        for op in graph.ops
        if rng.random() < 0.7
    }
    return MemoryResiduals(ops, Residual(forward=rng.randint(-500, 2000)))


@pytest.mark.parametrize("graph", [mlp(3), encoder(4), images(4)], ids=["mlp", "encoder", "images"])
def test_residuals_are_added_either_way(graph):
    for seed in range(12):
        less = ops_that_save_less(graph, ["*"]) if seed % 3 == 0 else ()
        check(graph, drawn(graph, seed), less, residuals=drawn_residuals(graph, seed))


@pytest.mark.parametrize("device", ["cpu", "cuda"])
def test_every_time_has_the_margin_of_the_device(device):
    """On GPUs the margin has a constant part: the segments of which one may be nearly empty."""
    graph = encoder()
    lowered, peak = Lowering(graph, {}), VectorizedPeak(graph, device, False)
    expected = [
        peak.throughout + num_bytes + margin_bytes(device, num_bytes)
        for num_bytes in peak.in_use(lowered).tolist()
    ]
    assert vectorized_bytes(lowered, device=device).tolist() == expected


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("with_residuals", [False, True])
def test_recomputed_blocks_take_the_same_memory_either_way(device, with_residuals):
    graph = mark_recomputed(encoder(3), ["layer.0", "layer.2"])
    for seed in range(12):
        less = ops_that_save_less(graph, ["*"]) if seed % 3 == 0 else ()
        residuals = drawn_residuals(graph, seed) if with_residuals else None
        check(graph, drawn(graph, seed), less, device, residuals=residuals)


def test_residuals_of_another_profile_are_not_those_of_the_first():
    """Of one recomputed graph, in turns."""
    graph = mark_recomputed(encoder(2), ["layer.1"])
    found = [drawn_residuals(graph, seed) for seed in range(2)]
    for residuals in (*found, *found):
        check(graph, drawn(graph, 0), residuals=residuals)


def views_and_sums(num_blocks: int) -> OpGraph:
    """Blocks of views, parts, sums of several residuals, a mask that all of them read, and an output."""
    builder = Builder("views")
    x = builder.enter("x", (4, 2, 8, 8))
    mask = builder.enter("mask", (8, 8), dtype="fp32")
    for block in range(num_blocks):
        at = f"{block}."
        y = builder.linear(at + "fc", x, 8)
        part = builder.op(at + "part", "view", Role.FOLLOWING, [y], (4, 1, 8, 8))
        z = builder.matmul(at + "product", part, part)
        y = builder.follow(at + "add", "add", builder.follow(at + "scaled", "mul", y, mask), x)
        x = builder.follow(at + "sum", "add", builder.follow(at + "sub", "sub", y, x), z)
        x = builder.follow(at + "relu", "relu", builder.linear(at + "fc2", x, 8))
    builder.output(x, y)
    return builder.build()


def test_views_sums_and_what_all_blocks_read_take_the_same_memory_either_way():
    graph = views_and_sums(5)
    for seed in range(30):
        check(graph, drawn(graph, seed), num_ranks=1 + seed % 2)


def test_calls_whose_derivatives_need_unlike_memory_are_told_apart():
    graph = mlp(5)
    needs = {
        "act1": Derivative(saved=(0,), workspace_bytes=1 << 12),
        "act3": Derivative(workspace_bytes=1 << 16),
    }
    ops = tuple(replace(op, derivative=needs.get(op.name)) for op in graph.ops)
    graph = replace(graph, ops=ops)
    for precision in (Precision.FP32, Precision.BF16):
        check(graph, {op.name: precision for op in graph.adjustable})


def test_what_is_made_at_the_very_start_is_no_example_for_what_is_made_later():
    """Its last moment is the end of the step, which is nobody else's."""
    builder = Builder()
    x = builder.enter("x", (4, 8))
    for j in range(3):
        builder.follow(f"relu{j}", "relu", x)
    builder.loss("loss", builder.linear("fc", x, 8))
    check(builder.build(), {})


def test_of_two_operands_of_a_sum_the_one_made_first_goes_on():
    """In the second block the operands are made in the other order, at the same distances from the sum."""
    builder = Builder()
    p = builder.linear("p", builder.enter("x", (4, 8)), 8)
    first = (
        builder.follow("a1", "relu", p),
        builder.follow("b1", "gelu", p),
        builder.follow("c1", "tanh", p),
    )
    builder.loss("loss1", builder.follow("sum1", "add", *first[:2]))
    second = [builder.follow("b2", "gelu", p), builder.follow("a2", "relu", p)]
    builder.follow("c2", "tanh", p)
    builder.follow("d2", "tanh", p)
    builder.loss("loss2", builder.follow("sum2", "add", *second[::-1]))
    check(builder.build(), {})


def test_an_activation_runs_with_its_product_however_far_that_is():
    builder = Builder()
    x = builder.enter("x", (4, 8))
    for block, num_between in enumerate((0, 3, 1)):
        y = builder.linear(f"fc{block}", x, 8)
        for j in range(num_between):
            builder.loss(f"between{block}.{j}", x)
        builder.loss(f"loss{block}", builder.follow(f"relu{block}", "relu", y))
    check(builder.build(), {f"fc{block}": Precision.INT8 for block in range(3)})


def test_an_activation_of_the_first_product_lives_until_the_end_of_backward():
    graph = mlp(3)
    check(graph, {op.name: Precision.INT8 for op in graph.adjustable})


def test_images_are_put_in_order_only_where_the_first_operand_was_not():
    """Two sums of the same two results, of which a lowered convolution turned one."""
    builder = Builder()
    shape = (4, 8, 8, 8)
    x = builder.enter("x", shape)

    def conv(name: str, x: str) -> str:
        return builder.op(
            name,
            "conv2d",
            Role.ADJUSTABLE,
            [x, builder.enter(f"{name}.weight", (8, 8, 3, 3), "parameter")],
            shape,
        )

    plain, turned = conv("plain", x), conv("turned", x)
    for block, operands in enumerate(((plain, turned), (turned, plain))):
        summed = builder.follow(f"sum{block}", "add", *operands)
        builder.loss(f"loss{block}", conv(f"reads{block}", summed))
    lowered = ("turned", "reads0", "reads1")
    check(builder.build(), dict.fromkeys(lowered, Precision.INT8), device="other")


def test_a_weight_is_cast_where_its_first_product_stands():
    """An embedding reads the table before the product does, and at different distances."""
    builder = Builder()
    for block in range(2):
        tokens = builder.enter(f"tokens{block}", (4,), dtype="int64")
        table = builder.enter(f"table{block}", (8, 8), "parameter")
        x = builder.op(f"rows{block}", "embedding", Role.ADJUSTABLE, [table], (4, 8), kept=[tokens])
        ends = [f"between{block}", f"head{block}"][:: 1 if block else -1]
        for name in ends:
            x = (
                builder.linear(name, x, 8, weight=table)
                if name.startswith("head")
                else builder.follow(name, "gelu", x)
            )
        builder.loss(f"loss{block}", x)
    graph = builder.build()
    for seed in range(8):
        check(graph, drawn(graph, seed))


@pytest.fixture
def followed(monkeypatch) -> list[str | int]:
    """The values and operators whose tensors are followed."""
    found, real = [], lifetimes.Lifetimes.spans_of
    monkeypatch.setattr(
        lifetimes.Lifetimes, "spans_of", lambda self, what: (found.append(what), real(self, what))[1]
    )
    return found


def test_a_value_is_followed_again_only_if_it_is_itself_read_in_another_type(followed):
    builder = Builder()
    x = builder.enter("x", (8, 8))
    a, b = builder.linear("a", x, 8), builder.linear("b", x, 8)
    builder.loss("loss", builder.matmul("product", a, b))
    graph = builder.build()
    vectorized_bytes(Lowering(graph, {}))
    followed.clear()
    vectorized_bytes(Lowering(graph, {"a": Precision.BF16}))
    assert "a" in followed and "b" not in followed


def test_tensors_are_followed_once_for_every_distinct_case(followed):
    counts = []
    for num_layers in (3, 6, 12):
        graph = encoder(num_layers)
        assignment = {op.name: Precision.INT8 for op in graph.adjustable}
        followed.clear()
        first = vectorized_bytes(Lowering(graph, assignment)).tolist()
        counts.append(len(followed))
        followed.clear()
        assert vectorized_bytes(Lowering(graph, assignment)).tolist() == first and not followed
        # A changed plan asks about what is new in it only.
        vectorized_bytes(Lowering(graph, {**assignment, "layer.1.fc1": Precision.FP32}))
        assert 0 < len(followed) < 20
    assert counts[0] == counts[1] == counts[2] > 0


def traced_apart(channels_last: bool) -> OpGraph:
    """Two traced graphs that share a weight, with attention's result copied, and a convolution."""
    builder = Builder("apart")
    x = builder.enter("x", (2, 8, 4, 8))
    weight = builder.enter("shared.weight", (8, 8), "parameter")
    y = builder.linear("fc", builder.follow("scaled", "mul", builder.linear("fc0", x, 8, weight)), 8, weight)
    y = builder.op("attention", "attention", Role.ADJUSTABLE, [y, y, y], (2, 8, 4, 8))
    y = builder.op("turned", "view", Role.FOLLOWING, [y], (2, 4, 8, 8))
    y = builder.op("ordered", "contiguous", Role.FOLLOWING, [y], (2, 4, 8, 8))
    builder.output(builder.follow("squared", "mul", y, y))
    z = builder.enter("segment2:input:y", (2, 4, 8, 8), grad=True)
    kernel = builder.enter("conv.weight", (8, 4, 3, 3), "parameter")
    z = builder.op("conv", "conv2d", Role.ADJUSTABLE, [z, kernel], (2, 8, 8, 8))
    builder.op("loss", "cross_entropy", Role.FIXED, [builder.follow("tanh", "tanh", z)], ())
    graph = builder.build()
    ops = [replace(op, copies=True if op.kind == "contiguous" else None) for op in graph.ops]
    ops = [replace(op, channels_last=channels_last and op.kind == "conv2d") for op in ops]
    return replace(graph, ops=tuple(ops), num_segments=2)


@pytest.mark.parametrize("channels_last", [False, True])
@pytest.mark.parametrize("num_ranks", [1, 2])
def test_graphs_traced_apart_take_the_same_memory_either_way(num_ranks, channels_last):
    graph = traced_apart(channels_last)
    for seed in range(24):
        check(graph, drawn(graph, seed), num_ranks=num_ranks)
