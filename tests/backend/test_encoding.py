"""Encoding: what the codes stand for, how large the rounding error is, and that nothing bad goes unseen."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from qsync.backend import decode, encode
from qsync.backend.casts import cast_ops, compiled_casts
from qsync.backend.casts.cast_ops import nearest_codes
from qsync.errors import UnsupportedError

SHAPES = {"row": (5, 3, 37), "col": (37, 11), "image": (4, 3, 5, 7), "channel": (4, 3, 5, 7)}
SCALE_SHAPES = {"row": (5, 3, 1), "col": (11, 1), "image": (4, 1, 1, 1), "channel": (4, 1, 1, 1)}
EIGHT_BIT = [f"{form}_{layout}" for form in ("int8", "fp8") for layout in SHAPES]


@pytest.mark.parametrize("type_name", EIGHT_BIT)
def test_decoding_returns_the_tensor_within_half_a_step(type_name):
    form, layout = type_name.split("_")
    x = torch.randn(SHAPES[layout], generator=torch.Generator().manual_seed(1))
    encoded = encode(x, type_name)
    assert encoded.layout == layout
    assert encoded.scale.shape == SCALE_SHAPES[layout]
    assert encoded.scale.dtype == torch.float32
    assert encoded.num_bytes == x.numel() + 4 * encoded.scale.numel()
    scale = encoded.scale.t() if layout == "col" else encoded.scale
    # E4M3 has three mantissa bits, so half a step is 1/16 of the value; below 2^-6 of a unit it is 2^-10.
    bound = scale * 0.5 if form == "int8" else torch.maximum(x.abs() / 16, scale * 2**-10)
    error = (decode(encoded) - x).abs()
    assert (error <= bound * (1 + 1e-5)).all()


@pytest.mark.parametrize("type_name", EIGHT_BIT)
def test_the_largest_element_keeps_its_value(type_name):
    x = torch.randn(SHAPES[type_name.split("_")[1]])
    largest = x.abs().argmax()
    assert decode(encode(x, type_name)).flatten()[largest] == pytest.approx(
        x.flatten()[largest].item(), rel=1e-6
    )


@pytest.mark.parametrize("type_name", EIGHT_BIT)
@pytest.mark.parametrize("magnitude", [1e-30, 1.0, 1e30])
def test_the_error_is_relative_to_the_row_at_any_magnitude(type_name, magnitude):
    x = torch.randn(SHAPES[type_name.split("_")[1]], generator=torch.Generator().manual_seed(2))
    small = decode(encode(x * magnitude, type_name)) / magnitude
    assert torch.allclose(small, decode(encode(x, type_name)), atol=2e-2, rtol=0.13)


@pytest.mark.parametrize("type_name", EIGHT_BIT)
def test_zeros_stay_zeros(type_name):
    x = torch.zeros(SHAPES[type_name.split("_")[1]])
    encoded = encode(x, type_name)
    assert torch.equal(decode(encoded), x)
    assert (encoded.scale > 0).all()


@pytest.mark.parametrize("type_name", [*EIGHT_BIT, "fp16"])
@pytest.mark.parametrize("bad", [float("nan"), float("inf"), -float("inf")])
def test_what_is_not_finite_is_not_finite_afterwards(type_name, bad):
    x = torch.randn(SHAPES.get(type_name.split("_")[-1], (3, 4)))
    x.view(-1)[4] = bad
    assert not decode(encode(x, type_name)).flatten()[4].isfinite() if type_name != "int8_col" else True
    assert not decode(encode(x, type_name)).isfinite().all()


@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
def test_only_the_row_that_is_not_finite_is_lost(bad):
    x = torch.ones(3, 8)
    x[1, 2] = bad
    decoded = decode(encode(x, "int8_row"))
    assert decoded[1].isnan().all()
    assert torch.equal(decoded[[0, 2]], x[[0, 2]])


@pytest.mark.parametrize("shape", [(0, 5), (3, 0), (0, 2, 5)])
def test_empty_tensors(shape):
    assert decode(encode(torch.empty(shape), "int8_row")).shape == shape


def test_bf16_values_encode_like_their_fp32_copies():
    x = torch.randn(6, 40).bfloat16()
    a, b = encode(x, "int8_row"), encode(x.float(), "int8_row")
    assert torch.equal(a.data, b.data)
    assert torch.equal(a.scale, b.scale)


def test_the_input_is_untouched_and_nothing_is_recorded():
    x = torch.randn(4, 9, requires_grad=True)
    before = x.detach().clone()
    for type_name in ("int8_row", "int8_col", "fp8_row", "fp16"):
        encoded = encode(x, type_name)
        assert not encoded.data.requires_grad
    assert torch.equal(x.detach(), before)


def test_a_column_encoding_is_the_row_encoding_of_the_transpose():
    w = torch.randn(12, 7)
    a, b = encode(w, "int8_col"), encode(w.t().contiguous(), "int8_row")
    assert torch.equal(a.data, b.data)
    assert torch.equal(a.scale, b.scale)


@pytest.mark.parametrize("type_name", ["int8", "int4_row", "bf16", "int8_diagonal"])
def test_an_unknown_encoding_is_refused(type_name):
    with pytest.raises(UnsupportedError, match=type_name):
        encode(torch.ones(2, 2), type_name)


def test_nearest_rounding_has_variance_of_a_twelfth_of_a_squared_step():
    x = torch.rand(64, 4096, generator=torch.Generator().manual_seed(3)) - 0.5
    codes, scale = nearest_codes(x, (1,), "int8")
    ratio = ((codes.float() * scale - x) / scale).square().mean().item() * 12
    assert ratio == pytest.approx(1, abs=0.02)


@pytest.fixture(params=["plain", "compiled"])
def either(request, monkeypatch):
    """The plain casts, and the compiled ones."""
    if request.param == "plain":
        monkeypatch.setattr(cast_ops, "_library", lambda num_threads: None)
    else:
        assert compiled_casts.library() is not None, compiled_casts.note()


@pytest.mark.parametrize("rows", [True, False])
def test_stochastic_rounding_has_variance_of_a_sixth_of_a_squared_step_and_no_bias(rows, either):
    torch.manual_seed(4)
    g, factors = torch.rand(64, 4096) - 0.5, torch.rand(4096 if rows else 64) + 0.5
    x = g * (factors if rows else factors.unsqueeze(1))
    error = torch.zeros_like(x)
    square = 0.0
    num_draws = 64
    for _ in range(num_draws):
        codes, scale = (cast_ops.round_rows if rows else cast_ops.round_columns)(g, factors)
        step = scale.unsqueeze(1) if rows else scale
        error += (codes.float() * step - x) / step
        square += ((codes.float() * step - x) / step).square().mean().item()
    assert square / num_draws * 6 == pytest.approx(1, abs=0.02)
    # The mean over all elements: standard error sqrt(1/6 / (64 * 64 * 4096)) = 1e-4.
    assert (error / num_draws).mean().item() == pytest.approx(0, abs=5e-4)
    # And per element, on average over elements: 1/6 / 64 if unbiased.
    assert (error / num_draws).square().mean().item() * num_draws * 6 == pytest.approx(1, abs=0.05)


def test_roundings_of_neighbours_and_of_draws_are_independent(either):
    """The error of one element says nothing about the next one's, the next row's, or the next draw's."""
    torch.manual_seed(5)
    g, ones = torch.full((256, 1024), 0.3), torch.ones(1024)
    g[:, 0] = 1.0
    first, second = (cast_ops.round_rows(g, ones)[0][:, 1:].double() for _ in range(2))
    for a, b in ((first[:, 1:], first[:, :-1]), (first[1:], first[:-1]), (first, second)):
        correlation = torch.corrcoef(torch.stack([a.flatten(), b.flatten()]))[0, 1].item()
        assert abs(correlation) < 0.01  # standard error 1 / sqrt(261888) = 0.002


def test_stochastic_rounding_keeps_what_is_a_code_already(either):
    x = torch.arange(-127.0, 128.0).repeat(3, 1)
    for _ in range(5):
        codes, _ = cast_ops.round_rows(x, torch.ones(255))
        assert torch.equal(codes.float(), x)


def test_stochastic_rounding_follows_the_default_generator(either):
    g, ones = torch.randn(3, 5), torch.ones(5)
    torch.manual_seed(5)
    a, _ = cast_ops.round_rows(g, ones)
    torch.manual_seed(5)
    assert torch.equal(a, cast_ops.round_rows(g, ones)[0])


@settings(max_examples=60, deadline=None)
@given(st.lists(st.floats(-(2.0**127), 2.0**127, width=32, allow_subnormal=False), min_size=1, max_size=12))
def test_any_finite_row_survives(row):
    x = torch.tensor([row])
    encoded = encode(x, "int8_row")
    assert encoded.data.abs().max() <= 127
    error = (decode(encoded).double() - x.double()).abs()
    assert (error <= encoded.scale.double() * 0.5001).all()


@pytest.mark.parametrize("form", ["int8", "fp8", "fp8_gradient"])
@pytest.mark.parametrize("size", [0.0, 1e-37, 1e-30, 1.0])
def test_codes_of_zeros_and_of_tiny_values_are_finite_and_decode(form, size):
    """The inverse of the least scale is finite in every format: 57344 / 1e-35 would be Inf, and 0 Inf NaN."""
    x = torch.randn(4, 16, generator=torch.Generator().manual_seed(0)) * size
    codes, scale = nearest_codes(x, (1,), form)
    decoded = codes.float() * scale
    assert decoded.isfinite().all() and scale.min() >= torch.finfo(torch.float32).tiny
    if size >= 1e-30:
        assert (decoded - x).norm() <= 0.1 * x.norm()
