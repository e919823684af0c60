"""Compiled casts against plain ones: the same codes and scales to the bit, the rest to the last digit."""

from __future__ import annotations

import math
import subprocess
import sys

import pytest
import torch
from compiled_and_plain import DTYPES, SHAPES, equal

from qsync.backend.casts import cast_ops, compiled_casts

pytestmark = pytest.mark.xdist_group("casts")  # one process compiles the programs of GPUs for all of them


def matrices(shape, dtype):
    """Ordinary values, values of every magnitude, zeros, and rows that are not finite."""
    generator = torch.Generator().manual_seed(sum(shape))
    x = torch.randn(shape, generator=generator)
    yield x.to(dtype)
    yield (x * torch.logspace(-36, 36, max(x.numel(), 1))[: x.numel()].view(shape)).to(dtype)
    yield torch.zeros(shape, dtype=dtype)
    yield (torch.randint(-3, 4, shape, generator=generator) / 2).to(dtype)  # ties
    for bad in (math.nan, math.inf, -math.inf):
        if x.numel():
            worse = x.clone()
            worse.view(-1)[x.numel() // 2] = bad
            yield worse.to(dtype)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("name", ["quantize_rows", "quantize_columns", "quantize_rows_unsigned"])
def test_codes_and_scales_are_the_same_to_the_bit(both, name, shape, dtype):
    for x in matrices(shape, dtype):
        (codes, scale), (plain_codes, plain_scale) = both(getattr(cast_ops, name), x)
        assert equal(scale, plain_scale)
        # Where the scale is NaN every code decodes to NaN.
        known = scale.isfinite() if name == "quantize_columns" else scale.isfinite().unsqueeze(1)
        assert torch.equal(codes[known.expand(codes.shape)], plain_codes[known.expand(codes.shape)])


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("rows", [True, False])
def test_stochastic_codes_are_one_of_the_two_neighbours_and_scales_are_the_same(both, rows, shape, dtype):
    function = cast_ops.round_rows if rows else cast_ops.round_columns
    factors = torch.rand(shape[1] if rows else shape[0], generator=torch.Generator().manual_seed(1)) + 0.5
    for g in matrices(shape, dtype):
        (codes, scale), (_, plain_scale) = both(function, g, factors)
        assert equal(scale, plain_scale)
        step = scale.unsqueeze(1) if rows else scale
        exact = g.float() * (factors if rows else factors.unsqueeze(1))
        known = step.isfinite().expand(exact.shape)
        assert (codes[known].abs() <= 127).all()
        assert ((codes * step - exact).abs() <= step * (1 + 1e-4))[known].all()


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("biased", [True, False])
@pytest.mark.parametrize("shape", SHAPES)
def test_dequantized_sums_differ_in_the_last_digit_at_most(both, shape, biased, dtype):
    generator = torch.Generator().manual_seed(2)
    sums = torch.randint(-(2**24), 2**24, shape, generator=generator, dtype=torch.int32)
    rows, columns = (torch.rand(n, generator=generator) + 0.1 for n in shape)
    bias = torch.randn(shape[1], generator=generator) * 1e6 if biased else None
    fast, plain = both(cast_ops.dequantize, sums, rows, columns, bias, dtype)
    assert fast.dtype is plain.dtype is dtype
    digit = 2**-22 if dtype is torch.float32 else 2**-7
    size = plain.float().abs() + (0 if bias is None else bias.abs())
    assert ((fast.float() - plain.float()).abs() <= digit * size).all()


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("layout", ["rows", "transposed", "unsigned"])
def test_decoded_codes_are_the_same_to_the_bit(both, shape, layout):
    generator = torch.Generator().manual_seed(3)
    codes = torch.randint(-127, 128, shape, generator=generator, dtype=torch.int8)
    scale = torch.rand(shape[0], generator=generator)
    if len(scale) > 1:
        scale[1] = math.nan
    if layout == "transposed":
        codes = codes.t().contiguous().t()
    if layout == "unsigned":
        codes = codes.view(torch.uint8).bitwise_xor(128)
    fast, plain = both(cast_ops.decode_rows, codes, scale)
    assert equal(fast, plain)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", [*SHAPES, (1000, 3)])
def test_narrowed_gradients_are_the_same_and_their_sums_as_good(both, shape, dtype):
    for g in matrices(shape, dtype):
        (narrow, sums), (plain_narrow, _) = both(cast_ops.to_bf16_and_sum, g)
        assert equal(narrow, plain_narrow)
        exact, size = g.double().sum(0), g.double().abs().sum(0)
        finite = exact.isfinite()
        assert torch.equal(sums.isfinite() | (exact.abs() > 3e38), finite | (exact.abs() > 3e38))
        assert ((sums.double() - exact).abs() <= 64 * 2**-24 * size)[finite].all()


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", [(1, 1, 1, 1), (3, 5, 4, 2), (2, 64, 3, 3), (0, 4, 2, 2)])
def test_scaled_images_differ_in_the_last_digit_at_most(both, shape, dtype):
    y = torch.randn(shape).contiguous(memory_format=torch.channels_last)
    rows, bias = torch.rand(shape[0]) + 0.1, torch.randn(shape[1])
    for offsets in (None, bias):
        fast, plain = both(cast_ops.scale_images, y, rows, offsets, dtype)
        y = torch.randn(shape).contiguous(memory_format=torch.channels_last)
        assert fast.dtype is dtype and fast.is_contiguous(memory_format=torch.channels_last)
        size = plain.float().abs() + (0 if offsets is None else offsets.abs().view(-1, 1, 1))
        digit = 2**-22 if dtype is torch.float32 else 2**-7
        assert ((fast.float() - plain.float()).abs() <= digit * size).all()


def test_what_the_compiled_casts_do_not_take_goes_to_the_plain_ones():
    x = torch.randn(6, 8)
    for strange in (x.t(), x.double(), x[:, ::2]):
        codes, scale = cast_ops.quantize_rows(strange)
        assert ((codes * scale.unsqueeze(1) - strange).abs() <= scale.unsqueeze(1) * 0.51).all()


def test_a_library_that_is_compiled_already_needs_no_tvm():
    """Ranks start at once: the library is loaded by tvm_ffi alone, and calls nothing of TVM's runtime."""
    assert compiled_casts.library() is not None
    code = (
        "import sys, torch\n"
        "from qsync.backend import encode\n"
        "from qsync.backend.casts import cast_ops as casts\n"
        "from qsync.backend.casts import compiled_casts as compiled\n"
        "assert compiled.library() is not None, compiled.note()\n"
        "casts.round_rows(torch.randn(4, 40), torch.ones(40)); encode(torch.randn(4, 40), 'int8_col')\n"
        "assert 'tvm' not in sys.modules\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    assert done.stderr == ""


GEOMETRIES = [  # images (n, h, w, C), kernel, stride, padding, dilation
    ((2, 5, 6, 3), (3, 3), [1, 1], [1, 1], [1, 1]),
    ((1, 7, 7, 17), (3, 2), [2, 1], [0, 1], [1, 2]),
    ((3, 4, 4, 8), (1, 1), [2, 2], [0, 0], [1, 1]),
    ((2, 1, 9, 5), (1, 3), [1, 2], [0, 2], [1, 1]),
    ((1, 3, 3, 4), (3, 3), [1, 1], [2, 2], [1, 1]),
]


@pytest.mark.parametrize("geometry", GEOMETRIES)
@pytest.mark.parametrize("dtype", [torch.uint8, torch.int8, torch.bfloat16])
def test_windows_are_those_of_a_convolution(both, geometry, dtype):
    shape, kernel, stride, padding, dilation = geometry
    generator = torch.Generator().manual_seed(4)
    signed = torch.randint(-127, 128, shape, generator=generator)
    signed = signed.to(torch.int8 if dtype is torch.uint8 else dtype)
    images = signed.view(torch.uint8).bitwise_xor(128) if dtype is torch.uint8 else signed
    fast, plain = both(cast_ops.unfold, images, kernel, stride, padding, dilation)
    assert equal(fast, plain)
    expected = torch.nn.functional.unfold(
        signed.float().permute(0, 3, 1, 2), kernel, dilation=dilation, padding=padding, stride=stride
    )
    n, p, q, kh, kw, channels = fast.shape
    columns = fast.float().permute(0, 5, 3, 4, 1, 2).reshape(n, channels * kh * kw, p * q)
    assert torch.equal(columns, expected)


@pytest.mark.parametrize("geometry", GEOMETRIES)
def test_the_gradient_of_a_depthwise_weight_is_torch_s(geometry, monkeypatch):
    shape, kernel, *options = geometry
    generator = torch.Generator().manual_seed(6)
    x = torch.randint(-8, 9, shape, generator=generator).bfloat16()
    weight = torch.zeros(shape[3], 1, *kernel, requires_grad=True)
    y = torch.conv2d(x.float().permute(0, 3, 1, 2), weight, None, *options, shape[3])
    g = torch.randint(-8, 9, y.shape, generator=generator).bfloat16()
    (expected,) = torch.autograd.grad(y, weight, g.float())
    for library in (cast_ops.compiled_for, lambda *_: None):
        monkeypatch.setattr(cast_ops, "compiled_for", library)
        pixels = g.permute(0, 2, 3, 1).contiguous()
        assert torch.equal(cast_ops.depthwise_weight_gradient(x, pixels, kernel, *options), expected)


@pytest.mark.parametrize("geometry", GEOMETRIES)
def test_folding_is_the_adjoint_of_unfolding(both, geometry):
    """<unfold(x), w> = <x, fold(w)> for whole numbers, exactly."""
    shape, kernel, stride, padding, dilation = geometry
    generator = torch.Generator().manual_seed(5)
    x = torch.randint(-8, 9, shape, generator=generator).bfloat16()
    windows = cast_ops.unfold(x, kernel, stride, padding, dilation)
    w = torch.randint(-8, 9, windows.shape, generator=generator).bfloat16()
    fast, plain = both(cast_ops.fold, w, (shape[1], shape[2]), stride, padding, dilation)
    assert equal(fast, plain)
    assert (windows.double() * w.double()).sum() == (x.double() * fast.double()).sum()


@pytest.mark.parametrize(
    ("source", "target"),
    [
        (torch.bfloat16, torch.float32),
        *((dtype, dtype) for dtype in (torch.int8, torch.bfloat16, torch.float32)),
    ],
)
@pytest.mark.parametrize("shape", [(1, 1, 1), (4, 3, 9), (2, 65, 33), (1, 64, 96), (3, 100, 32), (0, 2, 3)])
def test_transposed_matrices_are_the_same_to_the_bit(both, source, target, shape):
    x = (torch.randn(shape) * 50).to(source)
    fast, plain = both(cast_ops.transpose_last, x, target)
    assert equal(fast, plain) and fast.is_contiguous()
    assert torch.equal(fast, x.transpose(1, 2).to(target))


@pytest.mark.parametrize("dtype", DTYPES)
def test_sums_of_columns_are_as_good_as_torch_s(both, dtype):
    g = torch.randn(5000, 37).to(dtype)
    fast, _ = both(cast_ops.sum_columns, g)
    exact = g.double().sum(0)
    assert fast.dtype is torch.float32
    assert ((fast.double() - exact).abs() <= 64 * 2**-24 * g.double().abs().sum(0)).all()


@pytest.mark.parametrize("shape", [(1024, 513), (2, 512, 600), (524288,), (256, 256, 3, 3), (175001, 3)])
def test_narrowed_tensors_are_torch_s_and_differentiable(shape, monkeypatch):
    x = (torch.randn(shape) * torch.logspace(-38, 38, shape[-1])).requires_grad_()
    gradient = torch.randn(shape).bfloat16()
    for library in (cast_ops.compiled_for, lambda *_: None):
        monkeypatch.setattr(cast_ops, "compiled_for", library)
        y = cast_ops.to_bf16(x)
        assert equal(cast_ops.to_bf16(x.detach()), x.detach().bfloat16()) and equal(y, x.detach().bfloat16())
        assert equal(torch.autograd.grad(y, x, gradient)[0], gradient.float())


def test_no_nan_becomes_a_number():
    """Whatever the bits of a NaN are, its BF16 is NaN: adding half a digit to 0x7FFFFFFF would give -0."""
    bits = torch.tensor([0x7FFFFFFF, 0x7F800001, 0x7FC00000, -1, -0x7FFFFF], dtype=torch.int32)
    g = bits.view(torch.float32).repeat(2**17, 1)
    assert cast_ops.to_bf16(g).isnan().all() and cast_ops.to_bf16_and_sum(g)[0].isnan().all()


def test_the_largest_element_of_a_row_never_changes_its_sign():
    """127 + u rounds up to 128 once in some 2^18 draws, which in eight bits would be -128."""
    g, ones = torch.ones(4096, 1024), torch.ones(1024)
    for _ in range(3):
        codes, _ = cast_ops.round_rows(g, ones)
        assert codes.min() == codes.max() == 127
