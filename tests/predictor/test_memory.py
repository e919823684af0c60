"""The memory model: the tensors saved for backward, once each, and the largest sum over a step."""

from __future__ import annotations

from dataclasses import asdict, replace

import pytest
from graphs import Builder, assignments_for, encoder, graphs
from hypothesis import assume, given
from hypothesis import strategies as st

from qsync.backend.kernels.convolution.conv_strategy import windows_bytes
from qsync.lowering.incremental import Lowering, lower
from qsync.lowering.lowered_graph import Run
from qsync.operators.declaration import Role
from qsync.operators.precision import Precision
from qsync.predictor.memory.peak import Memory, StepMemory, peak_memory
from qsync.predictor.memory.vectorized_peak import vectorized_bytes
from qsync.predictor.memory.workspaces.op_context import OpContext
from qsync.predictor.memory.workspaces.op_workspaces import backward_workspace, forward_workspace
from qsync.records.graph import Op

BF16, INT8 = Precision.BF16, Precision.INT8
ROWS, WIDTH = 1024, 16
VALUE = 4 * ROWS * WIDTH  # one activation in FP32


def peak(builder: Builder, assignment=None, **options) -> Memory:
    return peak_memory(lower(builder.build(), assignment or {}), **options)


def chain(*kinds: str) -> Builder:
    """A product and then these followers, one after the other, with a loss."""
    builder = Builder()
    x = builder.linear("fc", builder.enter("x", (ROWS, WIDTH)), WIDTH)
    for number, kind in enumerate(kinds):
        x = builder.follow(f"{kind}{number}", kind, x)
    builder.loss("loss", x)
    return builder


def test_what_a_step_always_holds():
    memory = peak(chain(), optimizer_bytes=1000)
    weight = 4 * WIDTH * WIDTH
    assert (memory.parameters, memory.gradients, memory.inputs) == (weight, weight, VALUE)
    assert memory.optimizer == 1000


def test_frozen_parameters_have_no_gradient_and_whole_buffers_count():
    builder = Builder()
    x = builder.enter("x", (ROWS, WIDTH))
    weight = builder.enter("w", (WIDTH, WIDTH), "parameter", grad=False)
    builder.enter("running", (100,), "buffer")
    builder.op("fc", "linear", Role.ADJUSTABLE, [x, weight], requires_grad=False)
    memory = peak(builder)
    assert (memory.gradients, memory.inputs, memory.saved) == (0, VALUE + 400, 0)


def test_a_call_that_nobody_knows_keeps_its_operand():
    """What others keep is counted beside torch in test_saved_tensors.py."""
    assert peak(chain("some_unknown_kind")).saved == 2 * VALUE


def test_dropout_keeps_a_mask_of_its_device():
    byte, four = (peak(chain("dropout"), device=device).saved for device in ("cuda", "cpu"))
    assert four - byte == 3 * ROWS * WIDTH


def test_a_loss_outside_the_graph_keeps_as_much_as_it_reads():
    builder = Builder()
    x = builder.linear("fc", builder.enter("x", (ROWS, WIDTH)), WIDTH)
    builder.output(x)
    memory = peak(builder)
    assert memory.transient == 3 * VALUE  # the output, its gradient, and the loss's own


def test_a_sum_hands_its_gradient_on():
    """One tensor for the sum and both of its operands; the third is what the product makes, for a moment."""
    builder = Builder()
    x = builder.linear("a", builder.enter("x", (ROWS, WIDTH)), WIDTH)
    y = builder.linear("b", x, WIDTH)
    builder.loss("loss", builder.follow("sum", "add", x, y))
    memory = StepMemory(lower(builder.build(), {}), num_ranks=2)
    end, (a, b, total) = memory.end, range(3)
    gradients = {
        value: [
            (s.birth, s.death) for s in memory._spans[value] if s.num_bytes == VALUE and s.birth >= end // 2
        ]
        for value in ("a", "b", "sum")
    }
    assert gradients["sum"] == [(end - 3, end - total)]
    assert gradients["b"] == []  # it is that of the sum, which a goes on with
    assert sorted(gradients["a"]) == [(end - b, end - b), (end - total + 1, end - a)]


def test_a_part_of_a_value_brings_the_gradient_of_the_whole():
    builder = Builder()
    x = builder.linear("a", builder.enter("x", (ROWS, WIDTH)), 2 * WIDTH)
    part = builder.op("part", "view", Role.FOLLOWING, [x], (ROWS, WIDTH))
    builder.loss("loss", part)
    memory = StepMemory(lower(builder.build(), {}))
    gradients = {(s.num_bytes, s.birth, s.death) for s in memory._spans["a"] if s.birth > 2}
    end = memory.end
    assert gradients == {(VALUE, end - 2, end - 1), (2 * VALUE, end - 1, end)}


@pytest.mark.parametrize("splits", [True, False])
def test_parts_of_a_split_wait_for_one_another_and_slices_do_not(splits):
    """`a, b = x.chunk(2)` has one backward, which makes the gradient of x; two slices have one each."""
    builder = Builder()
    x = builder.linear("a", builder.enter("x", (ROWS, WIDTH)), 2 * WIDTH)
    whole = builder.op("split", "view", Role.FOLLOWING, [x], (ROWS, WIDTH)) if splits else x
    left, right = (builder.op(part, "view", Role.FOLLOWING, [whole], (ROWS, WIDTH)) for part in "lr")
    builder.loss("loss", builder.follow("gate", "gate", builder.follow("gelu", "gelu", left), right))
    graph = builder.build()
    graph = replace(graph, ops=tuple(replace(op, splits=op.name == "split") for op in graph.ops))
    memory = StepMemory(lower(graph, {}))
    at = {op.name: memory.end - i for i, op in enumerate(graph.ops)}
    gradients = sorted(
        (s.num_bytes, s.birth, s.death) for s in memory._spans["a"] if s.birth > len(graph.ops)
    )
    if splits:
        parts = [(VALUE, at["gate"], at["split"]), (VALUE, at["gelu"], at["split"])]
        assert gradients == [*parts, (2 * VALUE, at["split"], memory.end)]
    else:
        parts = [(VALUE, at["gate"], at["r"]), (VALUE, at["gelu"], at["l"])]
        wholes = [(2 * VALUE, at["r"], memory.end), (2 * VALUE, at["l"], at["l"])]
        assert gradients == sorted([*parts, *wholes])


def test_an_8_bit_product_is_handed_the_value_beside_its_codes():
    builder = Builder()
    x = builder.linear("a", builder.enter("x", (ROWS, WIDTH)), WIDTH)
    builder.op("loss", "cross_entropy", Role.FIXED, [builder.linear("b", x, WIDTH)], ())
    for precision, death in ((BF16, 0), (INT8, 1)):
        memory = StepMemory(lower(builder.build(), {"b": precision}))
        (value,) = (s for s in memory._spans["a"] if s.num_bytes == VALUE and s.birth == 0)
        assert value.death == death


def test_the_curve_s_parts_sum_to_what_is_in_use():
    memory = StepMemory(lower(encoder(2), {}), optimizer_bytes=1000)
    totals = [sum(parts) for parts in zip(*memory.curve().values(), strict=True)]
    assert max(totals) == memory.at_peak().estimate_bytes and len(totals) == memory.end + 1


@pytest.mark.parametrize("workspace", [1, 10**4, 10**8])
def test_the_optimizer_s_step_follows_backward(workspace):
    graph = encoder(2)
    plain = StepMemory(lower(graph, {}), optimizer_bytes=1000)
    memory = StepMemory(lower(graph, {}), optimizer_bytes=1000, optimizer_workspace=workspace)
    in_use = plain.come_and_go()
    expected = max(int(in_use.max()), int(in_use[-1]) + workspace)
    assert int(memory.come_and_go().max()) == expected
    options = {"optimizer_bytes": 1000, "optimizer_workspace": workspace}
    in_use = vectorized_bytes(Lowering(graph, {}), **options)
    assert in_use.max() == memory.peak_bytes
    assert (in_use.argmax() == memory.end) == (workspace == 10**8)
    assert peak_memory(lower(graph, {}), **options).peak_bytes == memory.peak_bytes


def test_the_operator_that_holds_most_is_named():
    builder = chain("gelu")
    wide = builder.linear("wide", "gelu0", 64 * WIDTH)
    builder.loss("loss2", builder.follow("wide_gelu", "gelu", wide))
    memory = peak(builder)
    assert (memory.largest, memory.saved_by["wide_gelu"]) == ("wide_gelu", 64 * VALUE)


def test_a_copy_of_a_weight_is_kept_until_the_optimizer_changes_it():
    builder = Builder()
    x = builder.linear("a", builder.enter("x", (ROWS, WIDTH)), WIDTH)
    builder.loss("loss", builder.linear("b", x, WIDTH))
    for precision in (BF16, INT8):
        memory = StepMemory(lower(builder.build(), {"b": precision}))
        assert [(span.part, span.death) for span in memory._spans["b.weight"]] == [("casts", memory.end)]
        on_gpu = StepMemory(lower(builder.build(), {"b": precision}), device="cuda")
        assert [(span.part, span.death) for span in on_gpu._spans["b.weight"]] == [("saved", memory.end - 1)]


@pytest.mark.parametrize(
    ("precision", "num_ranks", "more"),
    [
        (Precision.FP32, 2, [4 * WIDTH * WIDTH]),  # the weight's gradient, before it is copied to its bucket
        # The gradients of the result, narrowed, of the input, before it is widened, and of the weight.
        (BF16, 1, [2 * ROWS * WIDTH, 2 * ROWS * WIDTH, 2 * WIDTH * WIDTH]),
        (INT8, 1, [2 * WIDTH * WIDTH + 2 * 2 * ROWS * WIDTH]),  # of all three
    ],
)
def test_what_backward_of_a_product_needs_for_a_while(precision, num_ranks, more):
    builder = Builder()
    builder.output(builder.linear("b", builder.enter("x", (ROWS, WIDTH), grad=True), WIDTH))
    graph = builder.build()
    memory = StepMemory(lower(graph, {"b": precision}), num_ranks=num_ranks, device="other")  # no oneDNN
    backward = [span.num_bytes for span in memory.spans() if span.birth == span.death == 2 * len(graph.ops)]
    assert sorted(backward, reverse=True) == more


def test_the_gradient_of_a_cast_waits_in_its_own_type_until_the_value_s_turn_comes():
    builder = Builder()
    early = builder.linear("early", builder.enter("x", (ROWS, WIDTH)), WIDTH)
    late = builder.linear("late", builder.linear("between", early, WIDTH), WIDTH)
    builder.loss("loss", builder.follow("add", "add", late, early))
    graph = builder.build()
    memory = StepMemory(lower(graph, {"early": BF16, "between": BF16}))
    times = {op.name: 2 * len(graph.ops) - i for i, op in enumerate(graph.ops)}
    found = [(s.num_bytes, s.birth, s.death) for s in memory._spans["early"] if s.birth > len(graph.ops)]
    # What the sum brings in FP32 is there until `early`, and only then rounded to its 16 bits; by then the
    # other reader's gradient has come in BF16.
    assert (4 * ROWS * WIDTH, times["add"] + 1, times["early"]) in found
    assert (2 * ROWS * WIDTH, times["between"], times["early"]) in found


@pytest.mark.parametrize(("side", "packed"), [(32, 9 * 32 * 32 + 12 * 32), (4, 0)])
def test_what_onednn_packs_of_an_int8_weight_stays_with_its_copy(side, packed):
    """Small images are multiplied as windows, and nothing is packed."""
    builder = Builder()
    x = builder.enter("x", (8, 32, side, side))
    weight = builder.enter("w", (32, 32, 3, 3), "parameter")
    builder.loss("loss", builder.op("conv", "conv2d", Role.ADJUSTABLE, [x, weight], (8, 32, side, side)))
    on_cpu, on_gpu = (
        StepMemory(lower(builder.build(), {"conv": INT8}), device=device)._spans["w"][0].num_bytes
        for device in ("cpu", "other")
    )
    assert on_cpu - on_gpu == packed


@pytest.mark.parametrize(
    ("precision", "forward", "backward"),
    [
        (Precision.FP32, [], []),
        (BF16, [VALUE], [VALUE]),  # the rows before they are rounded; their gradient once it is widened
        (INT8, [VALUE + VALUE // 4], []),  # beside the codes; what is handed on is FP32 here
    ],
)
def test_what_an_embedding_needs_for_a_while(precision, forward, backward):
    builder = Builder()
    places = builder.enter("places", (ROWS,), dtype="int64")
    table = builder.enter("table", (100, WIDTH), "parameter")
    builder.output(
        builder.op("embedding", "embedding", Role.ADJUSTABLE, [table], (ROWS, WIDTH), kept=[places])
    )
    graph = builder.build()
    memory = StepMemory(lower(graph, {"embedding": precision}))
    spans = [span for span in memory._spans[0] if span.birth == span.death]
    assert [span.num_bytes for span in spans if span.birth == 0] == forward
    assert [span.num_bytes for span in spans if span.birth == 2 * len(graph.ops)] == backward
    assert not memory.at_peak().saved_by and not memory.at_peak().casts


@pytest.mark.parametrize("kind", ["gelu", "relu"])
def test_a_product_keeps_for_the_activation_in_its_epilogue_what_torch_would(kind):
    """gelu's input or relu's result, both from the product's time (0) to its backward's (6)."""
    memory = StepMemory(lower(chain(kind).build(), {"fc": INT8}))
    lives = {
        name: [(span.part, span.birth, span.death) for span in memory._spans[name]]
        for name in ("fc", f"{kind}0")
    }
    before = [("saved", 0, 6)] if kind == "gelu" else []  # relu's result takes the place of the product's
    assert lives["fc"] == [*before, ("transient", 6, 6)]
    loss_or_relu = 4 if kind == "gelu" else 6
    assert lives[f"{kind}0"] == [("saved", 0, loss_or_relu), ("transient", 4, 6)]
    assert memory.at_peak().saved_by[f"{kind}0" if kind == "relu" else "gelu0"] == VALUE


@pytest.mark.parametrize(
    ("channels", "side", "copies"),
    [(8, (1, 2), True), (8, (2, 1), True), (8, (1, 1), False), (1, (2, 2), False)],
)
def test_rows_of_an_image_in_channels_last_order_are_copied(channels, side, copies):
    """Where there is one pixel, or one channel, both orders are the same."""
    builder = Builder()
    x = builder.enter("x", (4, channels, *side))
    weight = builder.enter("w", (channels, channels, 1, 1), "parameter")
    y = builder.op("conv", "conv2d", Role.ADJUSTABLE, [x, weight], (4, channels, *side))
    rows = channels * side[0] * side[1]
    builder.output(builder.op("rows", "view", Role.FOLLOWING, [y], (4, rows)))
    for precision, expected in ((BF16, copies), (Precision.FP32, False)):
        lives = StepMemory(lower(builder.build(), {"conv": precision}))._lives
        assert lives.must_copy(1) is expected


@pytest.mark.parametrize(("carried", "workspace"), [("fp32", 0), ("bf16", 0)])
def test_a_product_of_a_frozen_bf16_weight_makes_nothing_but_its_input_s_gradient(carried, workspace):
    op = Op("b", "linear", Role.ADJUSTABLE, ("x", "w"), (), "fp32", (8, 16))
    context = OpContext(
        shapes=((8, 32), (16, 32)), carried=(carried, "fp32"), has_gradient=(True, False),
        is_parameter=(False, True), gradient="bf16", in_buckets=True, device="cpu",
    )  # fmt: skip
    assert backward_workspace(op, Run("b", "bf16", ("bf16", "bf16"), "bf16"), context) == workspace


@pytest.mark.parametrize(
    ("carried", "has_dx", "in_buckets", "peak"),
    [
        ("fp32", False, False, 2 * 8 * 16),  # codes of the gradient, by rows and by columns
        ("fp32", True, False, 2 * 8 * 16),  # the sums become what is passed on
        ("bf16", True, False, 8 * 16 + 4 * 8 * 32),  # sums beside the rounded result
        ("fp32", True, True, 8 * 16 + 4 * 16 * 32),  # the weight's gradient, before it is copied
    ],
)
def test_what_backward_of_a_product_in_int8_all_needs_for_a_while(carried, has_dx, in_buckets, peak):
    op = Op("b", "linear", Role.ADJUSTABLE, ("x", "w"), (), "fp32", (8, 16))
    context = OpContext(
        shapes=((8, 32), (16, 32)), carried=(carried, "fp32"), has_gradient=(has_dx, True),
        is_parameter=(False, True), gradient="fp32", in_buckets=in_buckets, device="other",
    )  # fmt: skip
    scales = 4 * (2 * (8 + 16) + 32)  # of both codes, their seeds, and of the input
    run = Run("b", "int8_all", ("int8_row", "int8_row"), "fp32")
    assert backward_workspace(op, run, context) == scales + peak


@pytest.mark.parametrize(("dtype", "width"), [("bool", 1), ("fp32", 4)])
def test_int8_attention_spreads_a_mask_that_differs_by_sample_over_all_scores(dtype, width):
    def workspace(*mask_shape: int) -> int:
        builder = Builder()
        inputs = [builder.enter(name, (2, 3, 72, 16), grad=True) for name in "qkv"]
        if mask_shape:
            inputs.append(builder.enter("mask", mask_shape, dtype=dtype))
        builder.output(builder.op("a", "attention", Role.ADJUSTABLE, inputs))
        memory = StepMemory(lower(builder.build(), {"a": INT8}))
        return sum(span.num_bytes for span in memory._spans[0] if span.birth == span.death == 0)

    assert workspace(2, 1, 72, 72) - workspace() == 2 * 3 * 72 * 72 * width
    assert workspace(72, 72) == workspace()


def test_bf16_attention_takes_a_block_of_queries_at_a_time():
    queries, key = (1, 1, 2**17, 1), (1, 1, 128, 1)
    op = Op("a", "attention", Role.ADJUSTABLE, ("q", "k", "v"), (), "fp32", queries)
    context = OpContext((queries, key, key), ("fp32",) * 3, (True,) * 3, (False,) * 3, "bf16", False, "cpu")
    operands_and_result = 2 * (2**17 + 128 + 128 + 2**17)
    scores = 4 * 2 * 2**17 - 2 * 2**17  # in two numbers, weights, and those before; less what is passed on
    assert (
        forward_workspace(op, Run("a", "bf16", ("bf16",) * 3, "bf16"), context)
        == operands_and_result + scores
    )


@given(graphs(), st.data())
def test_the_parts_sum_to_the_peak_and_adding_ranks_or_state_never_lowers_it(graph, data):
    assume(graph.adjustable)
    lowered = lower(graph, data.draw(assignments_for(graph)))
    memory = peak_memory(lowered, optimizer_bytes=100)
    parts = {key: value for key, value in asdict(memory).items() if key != "saved_by"}
    assert sum(parts.values()) == memory.peak_bytes
    assert min(parts.values()) >= 0
    assert peak_memory(lowered).peak_bytes == memory.peak_bytes - 100
    assert peak_memory(lowered, optimizer_bytes=100, num_ranks=2).peak_bytes >= memory.peak_bytes


@pytest.mark.parametrize(
    ("precision", "side", "channels", "channels_last", "workspace"),
    [
        # Small images are multiplied as windows: these, and oneDNN's scratch.
        (BF16, 1, 256, False, 2 * 96 * 2304 + 197_632),
        (BF16, 1, 256, True, 2 * 96 * 2304 + 197_632),
        # Larger ones go through oneDNN: the images in its order, and the weight twice.
        (BF16, 16, 256, False, 2 * 96 * 256 * 256 + 2 * 2 * 2304 * 256),
        (BF16, 16, 256, True, 2 * 2 * 2304 * 256),
        # In INT8 sums in FP32 beside codes of windows.
        (INT8, 4, 256, False, 1536 * 2304 + 4 * 1536 * 256),
        (INT8, 16, 256, False, 4 * 96 * 256 * 256),
        # torch in FP32 reorders images and weight, or the weight: in their order, then in blocks.
        (Precision.FP32, 16, 256, False, 4 * (96 * 256 * 256 + 2304 * 256)),
        (Precision.FP32, 16, 256, True, 2 * 4 * 2304 * 256),
        # Depthwise alike, in BF16 the weight alone.
        (Precision.FP32, 16, 1, False, 4 * (96 * 256 * 256 + 9 * 256)),
        (BF16, 16, 1, False, 2 * 2 * 9 * 256),
    ],
)
def test_what_forward_of_a_convolution_needs_for_a_while(precision, side, channels, channels_last, workspace):
    images, weight = (96, 256, side, side), (256, channels, 3, 3)
    op = Op("conv", "conv2d", Role.ADJUSTABLE, ("x", "w"), (), "fp32", images)
    context = OpContext((images, weight), ("fp32",) * 2, (True,) * 2, (False, True), "fp32", False, "cpu")
    run = Run("conv", str(precision), (str(precision),) * 2, "bf16", channels_last=channels_last)
    assert forward_workspace(op, run, context) == workspace
    if precision is Precision.FP32 and channels_last:  # a weight that lies so by itself is copied once
        assert forward_workspace(op, run, replace(context, in_order=(1,))) == workspace // 2


def test_windows_of_convolutions_are_counted_where_they_are_made():
    """128 result pixels of 3x3x256 BF16 windows, forward and backward; none through oneDNN.

    INT8 multiplies windows of more pixels, and of these BF16 is backward's; a stride makes them pay longer.
    """
    heavy = ((8, 256, 4, 4), (256, 256, 3, 3), (8, 256, 4, 4))
    assert windows_bytes("bf16", *heavy) == (2 * 128 * 2304, 2 * 128 * 2304)
    assert windows_bytes("int8", *heavy) == (128 * 2304, 2 * 128 * 2304)
    more = ((9, 256, 4, 4), (256, 256, 3, 3), (9, 256, 4, 4))
    assert windows_bytes("bf16", *more) == (0, 0) and windows_bytes("int8", *more) == (144 * 2304, 0)
    strided = ((64, 256, 8, 8), (256, 256, 3, 3), (64, 256, 4, 4))
    assert windows_bytes("bf16", *strided)[0] == 2 * 1024 * 2304
    assert windows_bytes("bf16", (65, *strided[0][1:]), strided[1], (65, 256, 4, 4)) == (0, 0)
    light = ((96, 64, 16, 16), (64, 64, 3, 3), (96, 64, 16, 16))
    assert windows_bytes("bf16", *light) == windows_bytes("int8", *light) == (0, 0)
    grouped = ((96, 256, 4, 4), (256, 64, 3, 3), (96, 256, 4, 4))
    assert windows_bytes("bf16", *grouped) == windows_bytes("int8", *grouped) == (0, 0)
