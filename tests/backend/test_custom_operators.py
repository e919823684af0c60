"""Lowered operators as custom operators: torch's own checks, and the numbers of the kernels themselves."""

from __future__ import annotations

import ast
import operator

import pytest
import torch
import torch.nn.functional as F
from torch.testing._internal.optests import opcheck
from torch.utils._python_dispatch import TorchDispatchMode

from qsync.backend import select
from qsync.backend.casts.epilogues import activation
from qsync.backend.custom_operators import OpaqueKernels
from qsync.backend.encoding import Operand
from qsync.errors import UnsupportedError
from qsync.operators.precision import Precision, is_encoded
from qsync.operators.registry import operand_type

KERNELS = select("cpu")
GENERATOR = torch.Generator().manual_seed(0)


def randn(*shape: int) -> torch.Tensor:
    return torch.randn(*shape, generator=GENERATOR)


TOKENS = torch.arange(12).view(3, 4) % 5
GELU = activation("gelu")
MASK = torch.ones(6, 6, dtype=torch.bool).tril_()
# Target, operands, further arguments.
CALLS = {
    "linear": (F.linear, [randn(2, 6, 16), randn(24, 16), randn(24)], {}),
    "linear gelu": (F.linear, [randn(2, 6, 16), randn(24, 16), randn(24)], {"activation": GELU}),
    "addmm": (torch.addmm, [randn(24), randn(6, 16), randn(16, 24)], {}),
    "conv2d": (torch.conv2d, [randn(2, 8, 6, 6), randn(16, 8, 3, 3), randn(16)], {"padding": "same"}),
    "conv2d last": (
        torch.conv2d,
        [randn(2, 8, 6, 6).to(memory_format=torch.channels_last), randn(16, 8, 3, 3), None],
        {"padding": (1, 1), "stride": 2},
    ),
    "conv1d": (torch.conv1d, [randn(2, 8, 10), randn(16, 8, 3), randn(16)], {"padding": 1}),
    "matmul": (operator.matmul, [randn(2, 6, 16), randn(2, 5, 16).mT], {}),
    "attention": (F.scaled_dot_product_attention, [randn(2, 3, 6, 8) for _ in range(3)], {"is_causal": True}),
    "attention masked": (
        F.scaled_dot_product_attention, [*(randn(2, 3, 6, 8) for _ in range(3)), MASK.expand(2, 3, 6, 6)], {},
    ),
    "embedding": (lambda: None, [TOKENS, randn(5, 16)], {}),
}  # fmt: skip
PRECISIONS = {
    "linear": ("fp32", "fp16", "mxfp8", "int8", "int8_all"), "linear gelu": ("int8", "int8_all"),
    "addmm": ("int8",), "conv2d": ("fp32", "bf16", "int8", "int8_all"), "conv2d last": ("bf16", "int8"),
    "conv1d": ("int8",), "matmul": ("fp16", "int8"), "attention": ("bf16", "int8"),
    "attention masked": ("bf16", "int8"), "embedding": ("bf16", "int8"),
}  # fmt: skip
CASES = [(name, precision) for name, precisions in PRECISIONS.items() for precision in precisions]


def run(kernels, name: str, precision: str) -> list[torch.Tensor]:
    """Return the result of a call and its gradients, casts included."""
    target, values, options = CALLS[name]
    target, kind = F.embedding if name == "embedding" else target, name.split()[0]
    leaves = [v.detach().requires_grad_() if v is not None and v.is_floating_point() else v for v in values]

    def operand(k: int, value):
        if value is None or not value.is_floating_point() or precision == "fp32":
            return value
        type_name = operand_type(kind, k, Precision(precision))
        cast = kernels.cast(value, type_name)
        return Operand(value, cast) if is_encoded(type_name) else cast

    operands = leaves if kind == "embedding" else [operand(k, value) for k, value in enumerate(leaves)]
    torch.manual_seed(0)
    y = kernels.kernel(kind, precision)(target, "fp32", *operands, **options)
    wanted = [leaf for leaf in leaves if leaf is not None and leaf.requires_grad]
    return [y.detach(), *torch.autograd.grad(y.square().sum(), wanted)]


class Calls(TorchDispatchMode):
    """The calls of custom operators inside."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: list[tuple] = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if func.namespace == "qsync":
            self.seen.append((func, ([tensor.clone() for tensor in args[0]], args[1])))
        return func(*args, **(kwargs or {}))


def calls_of(function) -> list[tuple]:
    with Calls() as calls:
        function()
    return calls.seen


@pytest.mark.parametrize(("name", "precision"), CASES)
def test_a_custom_operator_gives_the_numbers_of_its_kernel(name, precision):
    expected, found = run(KERNELS, name, precision), run(OpaqueKernels(KERNELS), name, precision)
    for mine, its in zip(found, expected, strict=True):
        assert torch.equal(mine, its) and mine.stride() == its.stride()


# torch's check multiplies all tensors, and it multiplies none in FP8.
@pytest.mark.parametrize(("name", "precision"), [case for case in CASES if case[1] != "mxfp8"])
def test_torch_finds_nothing_wrong_with_a_custom_operator(name, precision):
    seen = calls_of(lambda: run(OpaqueKernels(KERNELS), name, precision))
    assert {"cast", name.split()[0]} & {func._schema.name.removeprefix("qsync::") for func, _ in seen}
    for func, (tensors, text) in seen:
        layouts = ast.literal_eval(text)[-1]  # the last entry: whether a gradient is wanted
        is_forward = "_backward" not in str(func) and "cast" not in str(func)
        needed = [is_forward and layouts[k][-1] for k in range(len(tensors))]
        wanted = [t.requires_grad_(need) for t, need in zip(tensors, needed, strict=True)]
        random = precision == "int8_all"  # its gradients are rounded at random
        tests = ("test_schema", "test_autograd_registration", "test_faketensor")
        opcheck(func, (wanted, text), test_utils=tests if random else (*tests, "test_aot_dispatch_static"))


def test_interpolation_gives_its_numbers():
    images, whole = (
        randn(2, 24, *size).contiguous(memory_format=torch.channels_last) for size in ((4, 4), (8, 6))
    )
    results = []
    for kernels in (KERNELS, OpaqueKernels(KERNELS)):
        x = images.clone().requires_grad_()
        y = kernels.in_lowered_graphs("interpolate")(F.interpolate, x[:, :8], size=(8, 6), mode="bilinear")
        results.append((y, *torch.autograd.grad(y, x, whole[:, :8])))
    assert all(map(torch.equal, *results))


def test_what_saves_less_and_dropout_give_their_numbers():
    opaque, x = OpaqueKernels(KERNELS), randn(64, 256)
    calls = {
        ("gelu", "output"): (F.gelu, {}), ("gelu", "codes"): (F.gelu, {}), ("relu", "bits"): (F.relu, {}),
        ("softmax", "codes"): (F.softmax, {"dim": -1}), ("dropout", "bits"): (F.dropout, {"p": 0.3}),
        ("layer_norm", "output"): (F.layer_norm, {"normalized_shape": (256,)}),
    }  # fmt: skip
    for (kind, form), (target, options) in calls.items():
        results = []
        for kernels in (KERNELS, opaque):
            faster = [kernels.in_lowered_graphs(kind)] if kind == "dropout" else []
            for run_one in (kernels.saving(kind, form), *faster):
                leaf = x.clone().requires_grad_()
                torch.manual_seed(0)
                y = run_one(target, leaf, **options)
                results.append(torch.stack([y.detach(), *torch.autograd.grad(y.square().sum(), leaf)]))
        half = len(results) // 2
        assert all(torch.equal(a, b) for a, b in zip(results[:half], results[half:], strict=True)), (
            kind,
            form,
        )


def test_what_backward_needs_is_saved_once_and_no_larger():
    """The codes that forward got are not copied: backward reads those."""
    seen = calls_of(lambda: run(OpaqueKernels(KERNELS), "linear", "int8"))
    (tensors,) = (args[0] for func, args in seen if func._schema.name == "qsync::linear")
    (backward,) = (args[0] for func, args in seen if func._schema.name == "qsync::linear_backward")
    text = next(args[1] for func, args in seen if func._schema.name == "qsync::linear")
    assert len(torch.ops.qsync.linear(tensors, text)) == 1
    assert sorted(t.nbytes for t in backward[1:]) == sorted(tensors[k].nbytes for k in (1, 2, 4, 5))


def test_other_shapes_are_refused():
    (*_, (func, (tensors, text))) = [
        call for call in calls_of(lambda: run(OpaqueKernels(KERNELS), "linear", "int8"))
        if call[0]._schema.name == "qsync::linear"
    ]  # fmt: skip
    with pytest.raises(UnsupportedError, match="traced for torch.float32 .* trace the model again"):
        func([tensors[0][:1], *tensors[1:]], text)


def test_gradients_of_what_was_traced_without_them_are_refused():
    with torch.no_grad():
        seen = calls_of(lambda: OpaqueKernels(KERNELS).kernel("embedding", "int8")(
            F.embedding, "fp32", TOKENS, randn(5, 16)
        ))  # fmt: skip
    ((func, (tensors, text)),) = seen
    y = func([tensors[0], tensors[1].requires_grad_()], text)[0]
    with pytest.raises(UnsupportedError, match="traced without the gradients that this call needs"):
        y.sum().backward()


def test_a_second_derivative_is_refused():
    x, weight = randn(4, 8).requires_grad_(), randn(8, 8)
    kernels = OpaqueKernels(KERNELS)
    operands = [Operand(t, kernels.cast(t, "int8_row")) for t in (x, weight)]
    y = kernels.kernel("linear", "int8")(F.linear, "fp32", *operands)
    with pytest.raises(UnsupportedError, match="differentiated twice"):  # though the gradient is a constant
        torch.autograd.grad(y.sum(), x, create_graph=True)


def test_arguments_that_no_text_holds_are_refused():
    kernels = OpaqueKernels(KERNELS)
    with pytest.raises(UnsupportedError, match="a call with a object argument"):
        kernels.in_lowered_graphs("dropout")(F.dropout, randn(4), p=object())
    with pytest.raises(UnsupportedError, match="cannot become a custom operator"):
        kernels.in_lowered_graphs("dropout")(lambda x: x, randn(4))
