"""GELU and ReLU in the epilogue of a linear layer: as exact as is said, and what the two calls would give."""

from __future__ import annotations

import math

import pytest
import torch
from compiled_and_plain import DTYPES, SHAPES
from kernel_calls import agreement_db, arguments_of, sample
from torch.nn import functional as F

from qsync.backend import reference_kernel, select
from qsync.backend.casts.epilogues import (
    Activation,
    activation,
    activation_gradient_and_sum,
    dequantize_activated,
)
from qsync.errors import UnsupportedError
from qsync.operators.precision import Precision

pytestmark = pytest.mark.xdist_group("casts")  # one process compiles the programs of GPUs for all of them

GELU, TANH, RELU = Activation("gelu"), Activation("gelu", "tanh"), Activation("relu")
ALL = [GELU, TANH, RELU]
SPECIAL = [math.nan, math.inf, -math.inf, 1e38, -1e38, 3e4, -3e4, 1e-40, -1e-40, 0.0, -0.0]


def exact(x, function):
    """In FP64, through erfc and the logistic function, which lose no digits left of 0."""
    x = x.double()
    if function is RELU:
        return torch.where(x > 0, x, x * 0)
    if function is GELU:
        return x * torch.special.erfc(-x * math.sqrt(0.5)) / 2
    return x * torch.sigmoid(math.sqrt(8 / math.pi) * (x + 0.044715 * x**3))


def slope(x, function):
    leaf = x.double().requires_grad_()
    return torch.autograd.grad(exact(leaf, function).sum(), leaf)[0]


def as_sums(x):
    """Arguments of `dequantize_activated` whose dequantized sums are these values, (1, n)."""
    return torch.ones(x.shape, dtype=torch.int32), torch.ones(1), x[0].contiguous(), None


def units(got, expected, digits):
    """The error in units in the last place of a float with this many digits after the first."""
    _, exponent = torch.frexp(expected)
    return ((got.double() - expected).abs() * torch.exp2((digits + 1 - exponent).double())).max()


@pytest.mark.parametrize(
    ("function", "least", "bound"),
    [(GELU, -12.4, 8), (GELU, -1.0, 8), (TANH, -4.0, 16), (TANH, -8.0, 80), (RELU, -100, 0)],
)
def test_fp32_results_are_exact_to_a_few_digits_in_the_tail_too(both, function, least, bound):
    x = torch.linspace(least, 100, 30001).view(1, -1)
    x = torch.cat([x, torch.linspace(max(least, -4), 4, 30001).view(1, -1)], 1)
    ((kept, fast), (_, plain)) = both(dequantize_activated, *as_sums(x), torch.float32, function)
    assert units(fast, exact(x, function), 23) <= bound
    assert torch.equal(kept, fast if function is RELU else x)
    # torch's own is as far from it as its difference of nearly equal numbers.
    assert ((fast - plain).abs() <= 2**-21 * x.abs()).all()


@pytest.mark.parametrize("function", ALL)
def test_bf16_results_are_the_nearest_but_for_ties(both, function):
    x = torch.linspace(-9, 9, 20001).bfloat16().unique().float().view(1, -1)
    ((kept, fast), _) = both(dequantize_activated, *as_sums(x), torch.bfloat16, function)
    nearest = exact(x, function).bfloat16()
    assert (fast == nearest).float().mean() >= 0.999
    assert units(fast, nearest.double(), 7) <= 1
    assert torch.equal(kept, fast if function is RELU else x.bfloat16())


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("function", ALL)
def test_what_is_not_finite_or_far_from_zero(both, function, dtype):
    x = torch.tensor([SPECIAL])
    ((_, fast), (_, plain)) = both(dequantize_activated, *as_sums(x), dtype, function)
    at = dict(zip(SPECIAL, fast[0].float().tolist(), strict=True))
    assert torch.equal(fast.isnan(), x.isnan())  # also of -inf, where torch's gelu is NaN and the limit is 0
    assert at[math.inf] == math.inf and abs(at[-math.inf]) < 1e-34
    known = x.isfinite()
    assert ((fast - plain).abs()[known] <= 2**-7 * plain.abs()[known] + 1e-34).all()


@pytest.mark.parametrize("biased", [True, False])
@pytest.mark.parametrize("shape", SHAPES)
def test_both_forms_agree_on_any_shape(both, shape, biased):
    generator = torch.Generator().manual_seed(2)
    sums = torch.randint(-(2**15), 2**15, shape, generator=generator, dtype=torch.int32)
    rows, columns = (torch.rand(n, generator=generator) / 100 for n in shape)
    bias = torch.randn(shape[1], generator=generator) if biased else None
    for function in ALL:
        for dtype in DTYPES:
            fast, plain = both(dequantize_activated, sums, rows, columns, bias, dtype, function)
            for a, b in zip(fast, plain, strict=True):
                assert a.dtype is b.dtype is dtype and a.shape == b.shape
                digit = 2**-20 if dtype is torch.float32 else 2**-6
                # Of what is activated, not of the result: torch's is as exact as that.
                size = plain[0].float().abs() + (1 if bias is None else 1 + bias.abs())
                assert ((a.float() - b.float()).abs() <= digit * size).all()


@pytest.mark.parametrize(
    ("dtype", "wanted"),
    [(torch.float32, torch.bfloat16), (torch.float32, torch.float32), (torch.bfloat16, torch.bfloat16)],
)
@pytest.mark.parametrize("shape", [*SHAPES, (1000, 3)])
def test_the_gradient_is_changed_and_its_columns_are_summed(both, shape, dtype, wanted):
    generator = torch.Generator().manual_seed(3)
    g, x = (torch.randn(shape, generator=generator).to(dtype) for _ in range(2))
    x = x * 4
    for function in ALL:
        kept = function(x) if function is RELU else x
        (fast, sums), (plain, plain_sums) = both(activation_gradient_and_sum, g, kept, function, wanted)
        assert fast.dtype is plain.dtype is wanted and sums.dtype is torch.float32
        expected = g.double() * slope(x, function)
        size = 1.13 * g.double().abs()  # the largest slope
        digit = 2**-21 if wanted is torch.float32 else 2**-8
        assert ((fast.double() - expected).abs() <= digit * size).all()
        assert ((fast.float() - plain.float()).abs() <= 4 * digit * size).all()
        assert ((sums.double() - expected.sum(0)).abs() <= 2**-14 * size.sum(0)).all()
        assert ((plain_sums - sums).abs() <= 2**-6 * size.sum(0)).all()


@pytest.mark.parametrize("dtype", DTYPES)
def test_gradients_at_what_is_not_finite(both, dtype):
    x, g = torch.tensor([SPECIAL]).to(dtype), torch.ones(1, len(SPECIAL)).to(dtype)
    for function in ALL:
        (fast, _), _ = both(
            activation_gradient_and_sum, g, function(x) if function is RELU else x, function, dtype
        )
        at = dict(zip(SPECIAL, fast[0].tolist(), strict=True))
        assert torch.equal(fast.isnan(), x.isnan() & (function is not RELU))
        assert at[1e38] == at[3e4] == at[math.inf] == 1
        assert max(abs(at[v]) for v in (-1e38, -3e4, -math.inf)) < 1e-32
        # NaN lets relu's gradient through, as torch does; a gradient of 0 is no NaN beside an infinity.
    g[:] = math.inf
    (fast, _), _ = both(activation_gradient_and_sum, g, RELU(x), RELU, dtype)
    assert torch.equal(fast == 0, (x <= 0)) and not fast.isnan().any()


# --- In linear layers ---

TARGETS = {"linear": F.linear, "addmm": torch.addmm}


def tensors_of(kind, rows=23, inner=40, outputs=17, bias=None):
    x, w = sample(rows, inner), sample(outputs, inner, seed=1) / 3
    b = sample(outputs, seed=2) if bias is None else bias
    return [b, x, w.t().contiguous()] if kind == "addmm" else [x, w, b]


def result_and_gradients(run, kind, precision, tensors, seed=4):
    torch.manual_seed(seed)
    leaves = [t.detach().requires_grad_() for t in tensors]
    y = run(*arguments_of(kind, precision, leaves))
    return (y.detach(), *torch.autograd.grad(y, leaves, sample(*y.shape, seed=9).to(y.dtype)))


@pytest.mark.parametrize("function", ALL)
@pytest.mark.parametrize("out_type", ["fp32", "bf16"])
@pytest.mark.parametrize("precision", ["int8", "int8_all"])
@pytest.mark.parametrize("kind", ["linear", "addmm"])
def test_a_layer_with_its_activation_is_the_two_after_another(kind, precision, out_type, function):
    """Also against the reference, which differentiates through torch's function."""
    kernel, plain = select("cpu").kernel(kind, precision), reference_kernel(kind, Precision(precision))
    target, tensors = TARGETS[kind], tensors_of(kind)
    fused = result_and_gradients(
        lambda *a: kernel(target, out_type, *a, activation=function), kind, precision, tensors
    )
    apart = result_and_gradients(lambda *a: function(kernel(target, out_type, *a)), kind, precision, tensors)
    reference = result_and_gradients(
        lambda *a: plain(target, out_type, *a, activation=function), kind, precision, tensors
    )
    stochastic, narrow = precision == "int8_all", out_type == "bf16"
    for others, bounds in ((apart, (38 if narrow else 110, 35)), (reference, (38 if narrow else 100, 30))):
        for i, (a, b) in enumerate(zip(fused, others, strict=True)):
            assert a.shape == b.shape and a.dtype is b.dtype
            assert agreement_db(a, b) >= (18 if stochastic and i else bounds[min(i, 1)]), i


def test_a_bias_of_any_shape_and_no_rows():
    kernel = select("cpu").kernel("addmm", "int8")
    for bias in (sample(23, 1, seed=5), sample(1, seed=5)):
        tensors = tensors_of("addmm", bias=bias)
        fused = result_and_gradients(
            lambda *a: kernel(torch.addmm, "fp32", *a, activation=GELU), "addmm", "int8", tensors
        )
        apart = result_and_gradients(
            lambda *a: GELU(kernel(torch.addmm, "fp32", *a)), "addmm", "int8", tensors
        )
        assert all(agreement_db(a, b) >= 60 for a, b in zip(fused, apart, strict=True))
    empty = result_and_gradients(
        lambda *a: select("cpu").kernel("linear", "int8")(F.linear, "fp32", *a, activation=GELU),
        "linear", "int8", tensors_of("linear", rows=0),
    )  # fmt: skip
    assert empty[0].shape == (0, 17) and not empty[2].any()


@pytest.mark.parametrize(("function", "kept"), [(GELU, 4), (TANH, 4), (RELU, 4), (None, 0)])
def test_what_is_saved_is_what_torch_would_keep_between(function, kept):
    """gelu's input, or relu's result, the very tensor that is handed on; nothing without gradients."""
    saved = []
    leaves = [t.requires_grad_() for t in tensors_of("linear")]
    kernel = select("cpu").kernel("linear", "int8")
    with torch.autograd.graph.saved_tensors_hooks(lambda t: saved.append(t) or t, lambda t: t):
        y = kernel(F.linear, "fp32", *arguments_of("linear", "int8", leaves), activation=function)
        with torch.no_grad():
            kernel(F.linear, "fp32", *arguments_of("linear", "int8", leaves), activation=function)
    assert sum(t.nbytes for t in saved) == 23 * 40 + 4 * 23 + 17 * 40 + 4 * 17 + kept * 23 * 17
    shared = [t for t in saved if t.untyped_storage().data_ptr() == y.untyped_storage().data_ptr()]
    assert len(shared) == (function is RELU)


def test_activations_that_no_epilogue_computes_are_refused():
    assert activation("gelu", approximate="tanh") == TANH
    assert activation("relu", inplace=False) == RELU
    for kind, arguments in (("silu", {}), ("gelu", {"approximate": "cubic"}), ("relu", {"slope": 1})):
        with pytest.raises(UnsupportedError, match=f"no product can fuse {kind}"):
            activation(kind, **arguments)


@pytest.mark.parametrize("precision", ["int8", "int8_all"])
def test_backward_refuses_a_saved_result_that_was_changed(precision):
    """ReLU's backward reads its result."""
    kernel = select("cpu").kernel("linear", precision)
    tensors = [sample(6, 16, seed=0).requires_grad_(), sample(8, 16, seed=1), sample(8, seed=2)]
    y = kernel(F.linear, "fp32", *arguments_of("linear", precision, tensors), activation=RELU)
    y.mul_(-1.0)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        y.sum().backward()
