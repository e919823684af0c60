"""Lowering: every cast is necessary, every need is met, and changing one operator equals starting anew."""

from __future__ import annotations

from copy import deepcopy
from dataclasses import fields

import numpy as np
import pytest
from graphs import Builder, assignments_for, encoder, graphs, images, mlp, precisions_for
from hypothesis import assume, given
from hypothesis import strategies as st
from reference_lowering import reference_lowering

from qsync.errors import FormatError, MismatchError
from qsync.lowering.incremental import Lowering, lower
from qsync.lowering.lowered_graph import Cast, LoweredGraph, Run
from qsync.operators.declaration import Role
from qsync.operators.precision import LARGEST, Precision
from qsync.records.graph import OpGraph
from qsync.records.save_less import ops_that_save_less

NARROW = st.sampled_from(["bf16", None])
BF16, FP16, INT8 = Precision.BF16, Precision.FP16, Precision.INT8


def state(lowering: Lowering) -> list[object]:
    """Everything a Lowering holds, copied."""
    held = (
        value for name, value in sorted(vars(lowering).items()) if name not in ("graph", "table", "wiring")
    )
    return [value.tolist() if isinstance(value, np.ndarray) else deepcopy(value) for value in held]


def nodes(lowered: LoweredGraph) -> list[tuple[object, ...]]:
    """All fields of all nodes, with those that only prices read."""
    return [tuple(getattr(node, field.name) for field in fields(node)) for node in lowered.nodes]


def casts(lowered: LoweredGraph) -> list[Cast]:
    return [node for node in lowered.nodes if isinstance(node, Cast)]


def runs(lowered: LoweredGraph) -> dict[str, Run]:
    return {node.op: node for node in lowered.nodes if isinstance(node, Run)}


def drawn_assignment(data: st.DataObject, graph: OpGraph) -> dict[str, Precision]:
    assume(graph.adjustable)
    return data.draw(assignments_for(graph))


def drawn_saving(data: st.DataObject, graph: OpGraph) -> list[str]:
    """Some of the operators that can save less."""
    able = ops_that_save_less(graph, ["*"])
    return data.draw(st.lists(st.sampled_from(able), unique=True)) if able else []


@given(graphs(), NARROW, st.data())
def test_changing_one_operator_at_a_time_equals_lowering_from_scratch(graph, narrow, data):
    assignment, less = drawn_assignment(data, graph), drawn_saving(data, graph)
    lowering = Lowering(graph, assignment, narrow, less)
    for name, to in data.draw(st.lists(precisions_for(graph), max_size=6)):
        lowering.assign(name, to)
        now = lowering.assignment(), narrow, less
        assert state(lowering) == state(Lowering(graph, *now))
        assert nodes(lowering.lowered()) == nodes(reference_lowering(graph, *now))


@given(graphs(), NARROW, st.data())
def test_changing_operators_together_equals_lowering_from_scratch_and_is_undone_whole(graph, narrow, data):
    first, less = drawn_assignment(data, graph), drawn_saving(data, graph)
    lowering = Lowering(graph, first, narrow, less)
    then = dict(data.draw(st.lists(precisions_for(graph), max_size=6)))
    before, numbers = state(lowering), range(len(graph.ops))

    def around(i):
        return lowering.run(i), lowering.anchored_casts(i), lowering.output_casts(i)

    were = [around(i) for i in numbers]
    change = lowering.assign_all(then)
    assert state(lowering) == state(Lowering(graph, first | then, narrow, less))
    assert {i for i in numbers if around(i) != were[i]} <= set(change.touched)
    lowering.undo(change)
    assert state(lowering) == before


@given(graphs(), NARROW, st.data())
def test_undo_restores_everything(graph, narrow, data):
    lowering = Lowering(graph, drawn_assignment(data, graph), narrow, drawn_saving(data, graph))
    states, changes = [], []
    for name, to in data.draw(st.lists(precisions_for(graph), max_size=6)):
        states.append((state(lowering), lowering.lowered()))
        changes.append(lowering.assign(name, to))
    for made, (before, lowered) in zip(reversed(changes), reversed(states), strict=True):
        lowering.undo(made)
        assert (state(lowering), lowering.lowered()) == (before, lowered)


@given(graphs(), NARROW, st.data())
def test_touched_covers_every_operator_whose_nodes_changed(graph, narrow, data):
    lowering = Lowering(graph, drawn_assignment(data, graph), narrow, drawn_saving(data, graph))
    assert_touched(lowering, *data.draw(precisions_for(graph)))


@pytest.mark.parametrize(
    "standing", [{}, {"0.conv1": Precision.BF16}, {"0.conv2": Precision.INT8, "1.conv1": Precision.INT8}]
)
def test_touched_covers_images_whose_memory_format_changed(standing):
    graph = images(2)
    for op in graph.adjustable:
        for to in (Precision.FP32, Precision.BF16, Precision.INT8):
            assert_touched(Lowering(graph, standing), op.name, to)


def assert_touched(lowering: Lowering, name: str, to: Precision) -> None:
    """Make one change, and compare all nodes."""
    numbers = range(len(lowering.graph.ops))

    def around(i):
        return lowering.run(i), lowering.anchored_casts(i), lowering.output_casts(i)

    before = [around(i) for i in numbers]
    touched = lowering.assign(name, to).touched
    assert {i for i in numbers if around(i) != before[i]} <= set(touched)


@given(graphs(), NARROW, st.data())
def test_every_operand_is_there_when_it_is_taken_and_no_cast_is_for_nothing(graph, narrow, data):
    lowered = lower(graph, drawn_assignment(data, graph), narrow)
    provided = {value.name: {value.dtype} for value in graph.inputs}
    needed: set[tuple[str, str]] = set()
    ops = {op.name: op for op in graph.ops}
    for node in lowered.nodes:
        if isinstance(node, Cast):
            assert node.source in provided[node.value]
            assert node.target not in provided[node.value], "cast twice, or to the type it has"
            provided[node.value].add(node.target)
        else:
            for value, taken in zip(ops[node.op].inputs, node.operands, strict=True):
                assert taken in provided[value], f"{node.op} takes {value} in {taken}"
                needed.add((value, taken))
            provided[node.op] = {node.output}
    assert {(cast.value, cast.target) for cast in casts(lowered)} <= needed


@given(graphs(), NARROW, st.data())
def test_operators_take_the_types_of_their_role(graph, narrow, data):
    assignment = drawn_assignment(data, graph)
    dtype = {entry.name: entry.dtype for entry in (*graph.inputs, *graph.ops)}
    for op, run in zip(graph.ops, runs(lower(graph, assignment, narrow)).values(), strict=True):
        floats = [t for v, t in zip(op.inputs, run.operands, strict=True) if dtype[v] in LARGEST]
        if op.role is Role.ADJUSTABLE:
            assert run.mode == assignment[op.name]
        elif op.role is Role.FOLLOWING:
            assert set(floats) <= {run.mode}
            assert op.magnitude <= LARGEST[run.mode]
        else:
            assert floats == [dtype[v] for v in op.inputs if dtype[v] in LARGEST]


@given(graphs(), st.data())
def test_lowering_is_deterministic_and_leaves_the_graph_alone(graph, data):
    assignment = drawn_assignment(data, graph)
    text = graph.to_json()
    backwards = dict(reversed(list(assignment.items())))
    assert lower(graph, assignment).nodes == lower(graph, backwards).nodes
    assert graph.to_json() == text


@given(graphs(), NARROW)
def test_all_fp32_needs_no_cast_unless_types_were_mixed_when_traced(graph, narrow):
    assume(all(value.dtype in ("fp32", "bool") for value in graph.inputs))
    lowered = lower(graph, {}, narrow)
    assert not casts(lowered)
    assert [run.mode for run in runs(lowered).values()] == ["fp32"] * len(graph.ops)


def test_one_value_is_cast_once_for_three_consumers():
    graph = encoder(1)
    lowered = lower(graph, {f"layer.0.{name}": INT8 for name in ("query", "key", "value")})
    quantized = [cast for cast in casts(lowered) if not cast.of_parameter]
    assert [(cast.value, cast.target) for cast in quantized] == [("embedding", "int8_row")]
    assert [cast.value for cast in casts(lowered) if cast.of_parameter] == [
        "layer.0.query.weight", "layer.0.key.weight", "layer.0.value.weight",
    ]  # fmt: skip


def test_a_weight_is_cast_right_before_the_operator_that_needs_it():
    lowered = lower(mlp(2), {"fc1": BF16})
    names = [node.value if isinstance(node, Cast) else node.op for node in lowered.nodes]
    assert names == ["fc0", "act0", "act0", "fc1.weight", "fc1.bias", "fc1", "act1", "act1", "loss"]


def test_a_residual_add_runs_in_the_widest_type():
    builder = Builder()
    x = builder.enter("x", (4, 4))
    y = builder.linear("fc", x, 4)
    builder.follow("sum", "add", x, y)
    builder.follow("twice", "add", y, y)
    modes = {op: run.mode for op, run in runs(lower(builder.build(), {"fc": BF16})).items()}
    assert modes == {"fc": "bf16", "sum": "fp32", "twice": "bf16"}


@pytest.mark.parametrize(
    ("second", "narrow", "output"),
    [(BF16, "bf16", "bf16"), (BF16, None, "fp32"), (INT8, "bf16", "bf16"), (Precision.FP32, "bf16", "fp32")],
)
def test_int8_hands_on_16_bits_only_if_every_consumer_narrows(second, narrow, output):
    graph = mlp(2)
    lowered = lower(graph, {"fc0": INT8, "fc1": second}, narrow)
    assert runs(lowered)["fc0"].output == output
    assert runs(lowered)["act0"].mode == output


@pytest.mark.parametrize("kind", ["cat", "add"])
@pytest.mark.parametrize(
    ("first", "second", "output"),
    [("fc", "fc2", "bf16"), ("fc", "x", "fp32"), ("x", "x", "fp32"), ("fc", "fixed", "fp32")],
)
def test_int8_hands_on_16_bits_past_a_follower_of_several_values_that_can_all_be_in_16_bits(
    kind, first, second, output
):
    builder = Builder()
    x = builder.enter("x", (4, 4))
    made = {"x": x, "fc": builder.linear("fc", x, 4), "fc2": builder.linear("fc2", x, 4)}
    made["fixed"] = builder.op("fixed", "other", Role.FIXED, [x])
    joined = builder.follow("joined", kind, made[first], made[second])
    builder.linear("last", builder.follow("gelu", "gelu", joined), 4)
    graph = builder.build()
    found = runs(lower(graph, dict.fromkeys(("fc", "fc2", "last"), INT8)))
    if first != "x":
        assert found["fc"].output == output
    assert found["joined"].mode == found["gelu"].output == output
    assert runs(lower(graph, {"fc": INT8, "fc2": INT8}))["fc"].output == "fp32"


def test_fp16_is_never_carried():
    lowered = lower(mlp(2), {"fc0": FP16, "fc1": FP16})
    assert {run.output for run in runs(lowered).values()} == {"fp32"}
    assert [c.target for c in casts(lowered) if c.value == "act0"] == ["fp16"]


def test_names_and_precisions_that_do_not_exist_are_refused():
    with pytest.raises(MismatchError, match="no adjustable operator 'act0'"):
        lower(mlp(), {"act0": BF16})
    with pytest.raises(FormatError, match=r"layer\.0\.attention \(attention\) has no int8_all kernel"):
        lower(encoder(1), {"layer.0.attention": Precision.INT8_ALL})


# --- What a product computes in its epilogue ---


@pytest.mark.parametrize("precision", Precision)
@pytest.mark.parametrize("kind", ["gelu", "relu"])
def test_an_8_bit_layer_computes_the_activation_that_reads_it(kind, precision):
    builder = Builder()
    x = builder.linear("fc", builder.enter("x", (4, 4)), 4)
    builder.loss("loss", builder.follow("act", kind, x))
    lowering = Lowering(builder.build(), {"fc": precision})
    found = runs(lowering.lowered())
    if precision in (INT8, Precision.INT8_ALL):
        assert (found["fc"].form, found["fc"].timed_as) == (kind, f"{precision} {kind}")
        assert (found["act"].form, lowering.computed_by(0)) == ("fused", "act")
        assert found["act"].operands == (found["fc"].output,) == (found["act"].output,)
    else:
        assert found["fc"].form == found["act"].form == "plain" and lowering.computed_by(0) is None


def test_a_change_to_8_bits_and_back_touches_what_is_computed_in_the_epilogue():
    lowering = Lowering(mlp(2), {})  # whose products hand on FP32 whatever they run in
    for precision, found in ((INT8, {"fc0": "gelu", "act0": "fused"}), (Precision.FP32, {})):
        made = lowering.assign("fc0", precision)
        assert forms(lowering.lowered()) == found and {0, 1} <= set(made.touched)
    lowering.undo(made)
    assert forms(lowering.lowered()) == {"fc0": "gelu", "act0": "fused"}


def test_only_activations_of_one_value_that_nobody_else_reads_are_computed_with_it():
    def form(kind: str = "linear", then: str = "gelu", again: bool = False, **options: object) -> str:
        builder = Builder()
        taken = [builder.enter("x", (4, 4)), builder.enter("w", (4, 4), "parameter")]
        exposed = bool(options.pop("exposed", False))
        y = builder.op("fc", kind, Role.ADJUSTABLE, taken, exposed=exposed)
        builder.op("act", then, Role.FOLLOWING, [y], **options)
        builder.output("act", *(["fc"] if again else []))
        return runs(lower(builder.build(), {"fc": INT8}))["fc"].form

    assert form() == "gelu"
    assert {form("conv2d"), form("matmul"), form(then="silu"), form(then="view"), form(again=True)} == {
        "plain"
    }
    assert form(exposed=True) == "plain"  # setitem, or an RNN, reads it
    assert form(requires_grad=False) == "plain"  # under no_grad, after a product that is trained
    assert form(dtype="fp64") == form(shape=(16,)) == form(magnitude=3.4028234663852886e38) == "plain"
    assert form(kept=["w"]) == "plain"


def test_what_saves_less_is_not_computed_with_its_product():
    graph, assignment = mlp(2), {"fc0": INT8, "fc1": INT8}
    for less, found in {
        ("act0",): {"act0": "codes", "fc1": "gelu", "act1": "fused"},
        ("act1",): {"fc0": "gelu", "act0": "fused", "act1": "codes"},
        ("act0", "act1"): {"act0": "codes", "act1": "codes"},
    }.items():
        assert forms(lower(graph, assignment, saving_less=less)) == found


# --- Saving less ---


def forms(lowered: LoweredGraph) -> dict[str, str]:
    return {op: run.form for op, run in runs(lowered).items() if run.form != "plain"}


def test_every_operator_is_plain_unless_it_is_told_to_save_less():
    graph = encoder(1)
    assert not forms(lower(graph, {}))
    able = ops_that_save_less(graph, ["*"])
    assert able == tuple("layer.0." + name for name in ("drop1", "norm1", "gelu", "drop2", "norm2"))
    assert ops_that_save_less(graph, ["*.gelu", "layer.0.norm?"]) == able[1:3] + able[4:]


@pytest.mark.parametrize(
    ("precision", "gelu", "norm1", "norm2"),
    [
        (Precision.FP32, "output", "output", "output"),
        (Precision.TF32, "output", "output", "output"),
        (BF16, "output", "codes", "output"),  # fc1 keeps norm1's result in BF16, norm1 runs in FP32
        (FP16, "codes", "codes", "output"),
        (INT8, "codes", "codes", "output"),  # the head, in FP32, keeps norm2's result
    ],
)
def test_a_result_is_kept_if_the_next_product_keeps_that_very_tensor(precision, gelu, norm1, norm2):
    graph = encoder(1)
    assignment = {"layer.0.fc1": precision, "layer.0.fc2": precision}
    found = forms(lower(graph, assignment, saving_less=ops_that_save_less(graph, ["*"])))
    assert found == {
        "layer.0.drop1": "bits", "layer.0.norm1": norm1, "layer.0.gelu": gelu,
        "layer.0.drop2": "bits", "layer.0.norm2": norm2,
    }  # fmt: skip


@pytest.mark.parametrize(("operand", "kept"), [(0, "codes"), (1, "output"), (2, "codes")])
def test_a_sum_of_products_keeps_the_rows_that_it_multiplies(operand, kept):
    """torch.addmm(bias, x, w) keeps x, and not the bias; w is a weight, whose copy is counted elsewhere."""
    builder = Builder()
    result = builder.follow("gelu", "gelu", builder.linear("a", builder.enter("x", (4, 4)), 4))
    inputs = [builder.enter(name, (4, 4), "parameter") for name in ("bias", "left", "right")]
    inputs[operand] = result
    builder.output(builder.op("sum", "addmm", Role.ADJUSTABLE, inputs, (4, 4), flops=128))
    graph = builder.build()
    assert forms(lower(graph, {}, saving_less=["gelu"]))["gelu"] == kept


def test_the_first_operator_follows_what_its_reader_takes():
    builder = Builder()
    builder.output(builder.linear("b", builder.linear("a", builder.enter("x", (8, 8)), 8), 8))
    graph = builder.build()
    for first, then in ((Precision.FP32, INT8), (INT8, Precision.FP32), (INT8, BF16)):
        lowering = Lowering(graph, {"a": INT8, "b": first})
        lowering.assign("b", then)
        assert lowering.lowered() == lower(graph, {"a": INT8, "b": then})


def test_a_result_is_kept_through_views_and_not_through_copies():
    def form(kind: str) -> str:
        builder = Builder()
        x = builder.follow("gelu", "gelu", builder.linear("a", builder.enter("x", (4, 4)), 4))
        builder.linear("b", builder.follow("between", kind, x), 4)
        return forms(lower(builder.build(), {}, saving_less=["gelu"]))["gelu"]

    assert (form("view"), form("add")) == ("output", "codes")


def test_a_result_is_kept_by_a_product_that_reads_it_after_a_view_of_it():
    builder = Builder()
    x = builder.follow("gelu", "gelu", builder.linear("a", builder.enter("x", (4, 4)), 4))
    builder.output(builder.follow("between", "view", x), builder.linear("b", x, 4))
    assert forms(lower(builder.build(), {}, saving_less=["gelu"])) == {"gelu": "output"}


def test_what_torch_saves_anyway_is_left_to_torch():
    """relu and softmax keep their results, which cost nothing where the next product keeps them too."""
    builder = Builder()
    x = builder.linear("a", builder.enter("x", (4, 4)), 4)
    for name, kind in (("r", "relu"), ("s", "softmax")):
        x = builder.linear(f"after {name}", builder.follow(name, kind, x), 4)
    graph = builder.build()
    assert forms(lower(graph, {}, saving_less=["r", "s"])) == {}
    assert forms(lower(graph, {"after r": INT8, "after s": INT8}, saving_less=["r", "s"])) == {
        "r": "bits", "s": "codes"
    }  # fmt: skip


@pytest.mark.parametrize("name", ["layer.0.fc1", "layer.0.add1", "nobody"])
def test_only_following_operators_of_some_kinds_can_save_less(name):
    with pytest.raises(MismatchError, match=f"no operator '{name}' that can save less"):
        lower(encoder(1), {}, saving_less=[name])
    with pytest.raises(MismatchError, match="following operators of the kinds .*gelu"):
        Lowering(encoder(1), {}, saving_less=[name])


def turned(graph: OpGraph, assignment: dict[str, Precision]) -> list[str]:
    return [name for name, run in runs(lower(graph, assignment)).items() if run.channels_last]


def test_images_stay_in_channels_last_order_from_a_lowered_convolution_to_the_view():
    graph = images(2)
    assert turned(graph, {"head": Precision.INT8}) == []
    low = lower(graph, {"0.conv2": Precision.BF16})
    after = ["0.conv2.norm", "0.add", "1.conv1", "1.conv1.norm", "1.relu", "1.conv2", "1.conv2.norm", "1.add"]
    assert [name for name, run in runs(low).items() if run.channels_last] == [*after, "view"]
    assert runs(low)["1.conv1"].timed_as == "fp32 channels_last" and runs(low)["0.conv1"].timed_as == "fp32"
    low = lower(graph, {"0.conv2": Precision.BF16, "1.conv1": Precision.INT8})
    assert [c.taken_as for c in casts(low) if c.value == "0.add"] == ["fp32 channels_last"]


def test_what_an_8_bit_operator_hands_on_is_part_of_how_it_is_timed():
    graph = images(1)
    both = runs(lower(graph, {"0.conv1": Precision.INT8, "0.conv2": Precision.INT8}))
    alone = runs(lower(graph, {"0.conv1": Precision.INT8}))
    assert both["0.conv1"].timed_as == "int8 narrowing" and alone["0.conv1"].timed_as == "int8"
    assert runs(lower(graph, {"0.conv1": Precision.INT8}, carried_16bit=None))["0.conv1"].timed_as == "int8"


def test_a_product_knows_whether_those_beside_it_run_in_another_precision():
    found = runs(lower(mlp(4), {"fc1": BF16, "fc2": BF16}))
    assert [found[f"fc{i}"].after_other for i in range(4)] == [False, True, False, True]
    assert [found[f"fc{i}"].before_other for i in range(4)] == [True, False, True, False]
    assert not any(run.after_other or run.before_other for name, run in found.items() if "fc" not in name)


def test_dropout_is_torch_s_own_as_long_as_no_product_is_lowered():
    graph = encoder(1)
    lowering = Lowering(graph, {})

    def kinds_as_traced() -> list[str]:
        named = runs(lowering.lowered())
        return [op.kind for op in graph.ops if named[op.name].as_traced]

    dropouts = [op.kind for op in graph.ops if op.kind == "dropout"]
    assert kinds_as_traced() == dropouts != []
    made = lowering.assign("layer.0.query", BF16)
    assert kinds_as_traced() == []
    lowering.undo(made)
    assert kinds_as_traced() == dropouts
    lowering.assign("layer.0.query", BF16)
    lowering.assign("layer.0.query", Precision.FP32)
    assert kinds_as_traced() == dropouts
