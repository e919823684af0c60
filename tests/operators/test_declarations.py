"""Operators are declared once, whole, and nowhere else."""

from __future__ import annotations

import ast
from collections import Counter
from pathlib import Path

import pytest

from qsync.operators import convolution
from qsync.operators.declaration import Role
from qsync.operators.precision import EIGHT_BIT, Precision
from qsync.operators.registry import (
    BY_CALL,
    BY_KIND,
    FORMS,
    PRECISIONS_BY_KIND,
    PRODUCTS,
    declared,
    operand_type,
    why_unwritten,
)
from qsync.predictor.cost_model.op_calls import Argument, Call, operations

ROOT = Path(__file__).parents[2]
# Kinds whose names are words of other things, too: a field, an argument, a type, a phase.
AMBIGUOUS = {
    "add", "sub", "mul", "div", "neg", "pow", "abs", "where", "cat", "stack", "pad", "roll", "exp", "sqrt",
    "mean", "sum", "view", "float", "loss", "input", "output", "function", "other", "clone", "contiguous",
    "linear",
}  # fmt: skip
# Words for kinds elsewhere in the product (the rules of expansion are about ATen's operators). Each is a
# place that knows an operator by name: a new one needs a reason.
MOST_NAMED = 235


def test_a_torch_call_stands_for_one_kind():
    calls = Counter(
        name for operator in BY_KIND.values() for name in (*operator.calls, *operator.fixed_calls)
    )
    assert [name for name, count in calls.items() if count > 1] == []
    assert set(calls) == set(BY_CALL)


@pytest.mark.parametrize("kind", PRODUCTS)
def test_a_product_is_declared_whole(kind):
    product = PRODUCTS[kind]
    assert product.role is Role.ADJUSTABLE
    assert list(product.precisions) == [p for p in Precision if p in product.precisions]
    assert product.precisions[0] is Precision.FP32, "it runs as it was traced"
    lacking = [p for p in Precision if p not in product.precisions]
    assert all(why_unwritten(kind, p).startswith("not written; ") for p in lacking)
    assert set(product.unwritten_in) <= set(lacking)
    if set(EIGHT_BIT) & set(product.precisions):
        named = {len(names) for names in product.calls.values()}
        assert named == {len(product.encodings)}, "each operand has an encoding, or None"
    assert set(product.computes_epilogue) <= set(product.precisions)
    assert all(limit.precision in product.precisions for limit in product.limits)


def test_the_two_factors_are_the_operands_that_are_encoded():
    for kind, product in PRODUCTS.items():
        encoded = [j for j, scales in enumerate(product.encodings) if scales is not None]
        if product.saves_factors and encoded:
            assert tuple(encoded) == product.factors, kind


@pytest.mark.parametrize(
    ("kind", "j", "precision", "expected"),
    [
        ("linear", 0, Precision.INT8, "int8_row"),
        ("linear", 1, Precision.FP8, "fp8_row"),
        ("linear", 2, Precision.INT8, "fp32"),
        ("addmm", 2, Precision.INT8_ALL, "int8_col"),
        ("conv2d", 1, Precision.INT8, "int8_channel"),
        ("matmul", 1, Precision.INT8, "int8_inner"),
        ("embedding", 1, Precision.BF16, "fp32"),
        ("attention", 0, Precision.TF32, "fp32"),
        ("rnn", 5, Precision.BF16, "bf16"),
    ],
)
def test_operands_are_read_in_the_precision_s_type(kind, j, precision, expected):
    assert operand_type(kind, j, precision) == expected


@pytest.mark.parametrize(
    ("kind", "shapes", "result", "flops"),
    [
        ("linear", [(5, 3), (7, 3)], (5, 7), 2 * 5 * 7 * 3),
        ("addmm", [(7,), (5, 3), (3, 7)], (5, 7), 2 * 5 * 7 * 3),
        ("conv2d", [(2, 6, 9, 9), (4, 3, 5, 5)], (2, 4, 5, 5), 2 * (2 * 4 * 25) * (3 * 25)),
        ("conv_transpose", [(2, 6, 9, 9), (6, 4, 2, 2)], (2, 4, 18, 18), 2 * (2 * 6 * 81) * (4 * 4)),
        ("matmul", [(2, 5, 3), (2, 3, 7)], (2, 5, 7), 2 * 2 * 5 * 7 * 3),
        ("attention", [(2, 4, 5, 8), (2, 4, 9, 8), (2, 4, 9, 6)], (2, 4, 5, 6), 2 * 2 * 4 * 5 * 9 * (8 + 6)),
        ("rnn", [(2, 5, 3), (8, 3), (8, 2), (8,), (8,)], (2, 5, 2), 2 * 2 * 5 * (24 + 16)),
        ("embedding", [(9,), (20, 4)], (9, 4), 0),
    ],
)
def test_products_count_their_operations(kind, shapes, result, flops):
    assert PRODUCTS[kind].flops(shapes, result) == flops


@pytest.mark.parametrize(
    ("shapes", "dilated", "reason"),
    [
        ([(2, 8, 9, 9), (8, 8, 3, 3)], False, None),
        ([(2, 8, 9, 9), (8, 4, 3, 3)], False, "CUTLASS has no grouped convolutions"),
        ([(2, 8, 9, 9), (8, 8, 3, 3)], True, "CUTLASS has no input gradient of dilated convolutions"),
        ([(2, 8, 9, 40), (8, 8, 1, 32)], False, None),
        ([(2, 8, 9, 40), (8, 8, 1, 33)], False, "CUTLASS has no filters longer than 32"),
    ],
)
def test_shapes_that_no_kernel_serves_have_a_reason(shapes, dilated, reason):
    assert convolution.why_not_in_cutlass(shapes, dilated) == reason


def test_an_undeclared_call_is_any_other_one():
    assert declared("sinh") is BY_KIND["other"]
    assert declared("sinh").role is Role.FIXED


def test_forms_that_save_less_are_of_following_operators():
    assert FORMS and all(BY_KIND[kind].role is Role.FOLLOWING for kind in FORMS)
    assert PRECISIONS_BY_KIND.keys() == PRODUCTS.keys()


def test_operators_are_known_by_name_in_few_places_beside_their_declarations():
    kinds = set(BY_KIND) - AMBIGUOUS
    named: Counter[str] = Counter()
    for room in ("qsync", "backend", "predictor", "replayer", "allocator"):
        for path in (ROOT / room).rglob("*.py"):
            if "operators" in path.parts or "derivation" in path.parts:
                continue
            words = (n.value for n in ast.walk(ast.parse(path.read_text())) if isinstance(n, ast.Constant))
            named[str(path.relative_to(ROOT))] += sum(isinstance(w, str) and w in kinds for w in words)
    assert named.total() <= MOST_NAMED, named.most_common(12)


@pytest.mark.parametrize(
    ("kind", "times"), [("attention", 2.5), ("rnn", 2.0), ("linear", 2.0), ("conv2d", 2.0), ("bilinear", 2.0)]
)
def test_backward_multiplies_as_often_as_there_are_gradients_or_as_declared(kind, times):
    """Two operands have gradients here. Attention computes its probabilities again (Dao et al. 2022)."""
    call = Call(kind, (Argument((4, 4)), Argument((4, 4))), (4, 4), flops=100)
    assert operations(call, "bf16", "backward", "bf16") == {"bf16": 100 * times}
    assert operations(call, "bf16", "forward", "bf16") == {"bf16": 100}
