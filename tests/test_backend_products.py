"""Every fast kernel against the reference: odd shapes, strides, empty inputs, NaN and Inf; what is saved."""

from __future__ import annotations

import math

import pytest
import torch
from torch.nn import functional as F

from qsync.backend import Operand, convolution, decode, encode, reference_kernel, select
from qsync.backend.products import LONGEST_INT32_SUM, int8_sums
from qsync.errors import UnsupportedError
from qsync.precision import Precision, is_encoded, operand_type

CPU = ["int8", "int8_all", "fp16", "bf16"]
LINEAR_SHAPES = {
    "one row": ((1, 5), 3),
    "no rows": ((0, 5), 3),
    "primes": ((13, 37), 11),
    "leading dims": ((2, 3, 16), 8),
    "vector": ((24,), 9),
    "one output": ((7, 8), 1),
}
# Signal to noise against the reference, in decibels: (result, gradients). INT8 sums are exact, so results
# differ by FP32 rounding only. The gradients of int8_all are two independent stochastic roundings of the same
# gradient.
LEAST_DB = {"int8": (110, 45), "int8_all": (110, 22), "fp16": (60, 50), "bf16": (40, 40)}


def sample(*shape, seed=0, scale=1.0):
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)) * scale


def call(kernel, kind, precision, target, tensors, out_type="fp32", **options):
    """The kernel as a rewritten graph calls it: each operand in its type, encodings beside the values."""
    arguments = []
    for i, tensor in enumerate(tensors):
        type_name = operand_type(kind, i, Precision(precision))
        if is_encoded(type_name):
            tensor = Operand(tensor, encode(tensor, type_name))
        elif type_name == "bf16":
            tensor = tensor.to(torch.bfloat16)
        arguments.append(tensor)
    return kernel(target, out_type, *arguments, **options)


def outcome(kernel, kind, precision, target, tensors, gradient=None, out_type="fp32", **options):
    """Result and gradients, with fresh leaves, so that two kernels see the same inputs."""
    leaves = [t.detach().requires_grad_() for t in tensors]
    y = call(kernel, kind, precision, target, leaves, out_type, **options)
    if gradient is None:
        gradient = sample(*y.shape, seed=9)
    return (y.detach(), *torch.autograd.grad(y, leaves, gradient.to(y.dtype)))


def agreement_db(got, expected):
    noise = (got.double() - expected.double()).square().sum().item()
    signal = expected.double().square().sum().item()
    return math.inf if noise == 0 else 10 * math.log10(signal / noise) if signal else -math.inf


def assert_parity(kind, precision, target, tensors, bounds=None, **options):
    torch.manual_seed(0)
    got = outcome(select("cpu").kernel(kind, precision), kind, precision, target, tensors, **options)
    expected = outcome(
        reference_kernel(kind, Precision(precision)), kind, precision, target, tensors, **options
    )
    bounds = bounds or LEAST_DB[precision]
    for i, (a, b) in enumerate(zip(got, expected, strict=True)):
        assert a.shape == b.shape
        assert a.dtype == b.dtype
        if a.numel():
            finite = b.isfinite()
            assert torch.equal(a.isfinite(), finite), f"tensor {i}"
            assert not finite.any() or agreement_db(a[finite], b[finite]) >= bounds[min(i, 1)], f"tensor {i}"
    return got


def linear_tensors(shape, outputs, kind, scale=1.0):
    x, w, b = (
        sample(*shape, scale=scale),
        sample(outputs, shape[-1], seed=1),
        sample(outputs, seed=2, scale=scale),
    )
    return [b, x.reshape(-1, shape[-1]), w.t().contiguous()] if kind == "addmm" else [x, w, b]


TARGETS = {"linear": F.linear, "addmm": torch.addmm}


@pytest.mark.parametrize("precision", CPU)
@pytest.mark.parametrize("kind", ["linear", "addmm"])
@pytest.mark.parametrize("shape", LINEAR_SHAPES)
def test_linear_shapes(kind, precision, shape):
    assert_parity(kind, precision, TARGETS[kind], linear_tensors(*LINEAR_SHAPES[shape], kind))


@pytest.mark.parametrize("precision", CPU)
@pytest.mark.parametrize("kind", ["linear", "addmm"])
@pytest.mark.parametrize("scale", [1e-30, 1e-4, 1e4, 1e30])
def test_linear_magnitudes(kind, precision, scale):
    if precision == "fp16" and scale != 1e-4:
        pytest.skip("outside the range of FP16: operands or results become 0 or Inf")
    assert_parity(kind, precision, TARGETS[kind], linear_tensors((9, 16), 8, kind, scale))


@pytest.mark.parametrize("precision", CPU)
@pytest.mark.parametrize("kind", ["linear", "addmm"])
@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
@pytest.mark.parametrize("where", [0, 1, 2])
def test_what_is_not_finite_comes_out(kind, precision, bad, where):
    tensors = linear_tensors((6, 8), 4, kind)
    tensors[where].view(-1)[2] = bad
    kernel = select("cpu").kernel(kind, precision)
    y, *gradients = outcome(kernel, kind, precision, TARGETS[kind], tensors)
    assert not y.isfinite().all()
    in_bias = where == (2 if kind == "linear" else 0)
    assert in_bias or any(not g.isfinite().all() for g in gradients)


@pytest.mark.parametrize("precision", CPU)
@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
def test_a_gradient_that_is_not_finite_comes_out(precision, bad):
    gradient = sample(6, 4)
    gradient[1, 2] = bad
    kernel = select("cpu").kernel("linear", precision)
    _, dx, dw, db = outcome(
        kernel, "linear", precision, F.linear, linear_tensors((6, 8), 4, "linear"), gradient=gradient
    )
    for g in (dx, dw, db):
        assert not g.isfinite().all()


@pytest.mark.parametrize("precision", CPU)
def test_zeros(precision):
    tensors = [torch.zeros(5, 8), torch.zeros(3, 8), torch.zeros(3)]
    results = outcome(select("cpu").kernel("linear", precision), "linear", precision, F.linear, tensors)
    for tensor in results[:3]:
        assert torch.equal(tensor, torch.zeros_like(tensor))


@pytest.mark.parametrize("precision", CPU)
def test_strides(precision):
    x = sample(16, 5, 3).transpose(0, 2)
    w = sample(16, 8, seed=1).t()
    assert_parity("linear", precision, F.linear, [x, w, sample(8, seed=2)])
    assert_parity("linear", precision, F.linear, [sample(12, 32)[::2, ::2], w, sample(8, seed=2)])


@pytest.mark.parametrize("precision", CPU)
@pytest.mark.parametrize("kind", ["linear", "addmm"])
def test_an_expanded_gradient(kind, precision):
    """`y.sum().backward()` sends a gradient of stride 0."""
    tensors = linear_tensors((6, 8), 4, kind)
    kernel = select("cpu").kernel(kind, precision)
    gradient = torch.ones(()).expand(6, 4)
    got = outcome(kernel, kind, precision, TARGETS[kind], tensors, gradient=gradient)
    expected = outcome(kernel, kind, precision, TARGETS[kind], tensors, gradient=torch.ones(6, 4))
    if precision != "int8_all":
        assert all(torch.equal(a, b) for a, b in zip(got, expected, strict=True))


@pytest.mark.parametrize("precision", ["int8", "int8_all", "fp16"])
@pytest.mark.parametrize("kind", ["linear", "addmm"])
def test_a_bf16_result_and_bf16_values(kind, precision):
    bounds = (45, min(40, LEAST_DB[precision][1]))
    tensors = linear_tensors((9, 32), 16, kind)
    y, *_ = assert_parity(kind, precision, TARGETS[kind], tensors, bounds, out_type="bf16")
    assert y.dtype == torch.bfloat16
    x = 1 if kind == "addmm" else 0
    tensors[x] = tensors[x].bfloat16()
    results = assert_parity(kind, precision, TARGETS[kind], tensors, bounds, out_type="bf16")
    assert results[1 + x].dtype == torch.bfloat16
    assert all(results[1 + i].dtype == torch.float32 for i in range(3) if i != x)


@pytest.mark.parametrize("kind", ["linear", "addmm"])
def test_int8_forward_is_the_integer_product_times_its_scales(kind):
    bias, x, w = linear_tensors((13, 37), 11, "addmm")
    xq, wq = encode(x, "int8_row"), encode(w, "int8_col")
    y = select("cpu").kernel("addmm", "int8")(torch.addmm, "fp32", bias, Operand(x, xq), Operand(w, wq))
    sums = (xq.data.long() @ wq.data.t().long()).float()
    # But for the last digit: the compiled kernel rounds a multiplication and an addition once.
    expected = sums * xq.scale * wq.scale.t() + bias
    assert ((y - expected).abs() <= 2**-22 * (expected.abs() + bias.abs())).all()


def test_the_same_inputs_give_the_same_bits():
    tensors = linear_tensors((32, 64), 48, "linear")
    for precision in CPU:
        kernel = select("cpu").kernel("linear", precision)
        torch.manual_seed(7)
        first = outcome(kernel, "linear", precision, F.linear, tensors)
        torch.manual_seed(7)
        again = outcome(kernel, "linear", precision, F.linear, tensors)
        assert all(torch.equal(a, b) for a, b in zip(first, again, strict=True)), precision


def test_int8_all_gradients_are_unbiased():
    tensors = linear_tensors((24, 16), 12, "linear")
    kernel = select("cpu").kernel("linear", "int8_all")
    torch.manual_seed(1)
    draws = [outcome(kernel, "linear", "int8_all", F.linear, tensors) for _ in range(400)]
    x, w, _ = (decode(encode(t, "int8_row")) if t.ndim == 2 else t for t in tensors)
    g = sample(24, 12, seed=9)
    for i, exact in ((1, g @ w), (2, g.t() @ x)):
        stack = torch.stack([draw[i] for draw in draws])
        z = (stack.mean(0) - exact) / (stack.std(0) / math.sqrt(len(draws)))
        assert z.square().mean().item() == pytest.approx(1, abs=0.4)


@pytest.mark.parametrize("rows", [0, 1, 2, 17])
def test_integer_products_of_any_shape_and_stride(rows):
    """Exhaustive, because `torch._int_mm` leaves its result unwritten for some strides."""

    def layouts(m, n):
        codes = torch.randint(-127, 128, (2 * m, 2 * n), dtype=torch.int8)
        yield codes[:m, :n].contiguous()
        yield codes[:m, :n].t().contiguous().t()
        yield codes[:m, :n]
        yield codes[::2, ::2]
        yield codes[:1, :n].expand(m, n)
        yield codes[:m, :1].expand(m, n)

    for inner in (1, 2, 3, 8, 33):
        for columns in (1, 2, 5, 16):
            for a in layouts(rows, inner):
                for b in layouts(inner, columns):
                    assert torch.equal(int8_sums(a, b), a.int() @ b.int())


def test_long_inner_dimensions_do_not_overflow():
    inner = LONGEST_INT32_SUM + 4097
    a = torch.full((2, inner), 127, dtype=torch.int8)
    product = int8_sums(a, a.t())
    assert torch.equal(product, torch.full((2, 2), 127.0**2 * inner))
    assert product.dtype is torch.float32


@pytest.mark.parametrize("kind", ["linear", "addmm"])
@pytest.mark.parametrize("precision", ["int8", "int8_all"])
def test_an_int8_layer_saves_its_codes_and_scales_and_nothing_else(kind, precision):
    tensors = [t.requires_grad_() for t in linear_tensors((32, 64), 48, kind)]
    saved = []
    with torch.autograd.graph.saved_tensors_hooks(lambda t: saved.append(t.nbytes) or t, lambda t: t):
        call(select("cpu").kernel(kind, precision), kind, precision, TARGETS[kind], tensors)
    assert sum(saved) == 32 * 64 + 4 * 32 + 48 * 64 + 4 * 48


def test_the_values_are_not_kept_alive():
    x = sample(16, 32).requires_grad_()
    w = sample(8, 32, seed=1).requires_grad_()
    value = x * 2
    operand = Operand(value, encode(value, "int8_row"))
    y = select("cpu").kernel("linear", "int8")(F.linear, "fp32", operand, Operand(w, encode(w, "int8_row")))
    storage = torch.multiprocessing.reductions.StorageWeakRef(value.untyped_storage())
    del value, operand
    assert storage.expired()
    y.sum().backward()
    assert x.grad is not None


@pytest.mark.parametrize("precision", ["int8", "int8_all", "fp16"])
@pytest.mark.parametrize("frozen", [(0,), (1,), (2,), (0, 1), (0, 1, 2)])
def test_frozen_inputs_get_no_gradient_and_save_nothing_for_it(precision, frozen):
    tensors = linear_tensors((32, 64), 48, "linear")
    everything = outcome(select("cpu").kernel("linear", precision), "linear", precision, F.linear, tensors)
    leaves = [t.detach().requires_grad_(i not in frozen) for i, t in enumerate(tensors)]
    saved = []
    with torch.autograd.graph.saved_tensors_hooks(lambda t: saved.append(t.nbytes) or t, lambda t: t):
        y = call(select("cpu").kernel("linear", precision), "linear", precision, F.linear, leaves)
    assert y.requires_grad == (len(frozen) < 3)
    if precision != "fp16":
        assert sum(saved) == (1 not in frozen) * (32 * 64 + 4 * 32) + (0 not in frozen) * (48 * 64 + 4 * 48)
    if y.requires_grad:
        y.backward(sample(32, 48, seed=9))
    for i, leaf in enumerate(leaves):
        assert (leaf.grad is None) == (i in frozen)
        if leaf.grad is not None and precision != "int8_all":
            assert torch.equal(leaf.grad, everything[1 + i])


def test_no_grad_records_nothing():
    tensors = [t.requires_grad_() for t in linear_tensors((4, 8), 3, "linear")]
    for precision in ("int8", "int8_all", "fp16"):
        with torch.no_grad():
            y = call(select("cpu").kernel("linear", precision), "linear", precision, F.linear, tensors)
        assert y.grad_fn is None


@pytest.mark.parametrize("shape", [(4,), (1, 4), (6, 4), (6, 1)])
def test_addmm_broadcasts_its_bias(shape):
    _, x, w = linear_tensors((6, 8), 4, "addmm")
    assert_parity("addmm", "int8", torch.addmm, [sample(*shape, seed=3), x, w])


def test_addmm_with_other_factors_is_refused():
    tensors = linear_tensors((6, 8), 4, "addmm")
    with pytest.raises(UnsupportedError, match="alpha=2"):
        call(select("cpu").kernel("addmm", "int8"), "addmm", "int8", torch.addmm, tensors, alpha=2)


CONVOLUTIONS = {
    "plain": ((3, 4, 8, 9), (6, 4, 3, 3), {}),
    "padded": ((2, 16, 8, 8), (16, 16, 3, 3), {"padding": 1}),
    "strided": ((2, 5, 11, 7), (7, 5, 3, 3), {"stride": (2, 1), "padding": (0, 2)}),
    "dilated": ((2, 8, 12, 12), (8, 8, 3, 3), {"dilation": 2, "padding": 2}),
    "grouped": ((2, 8, 6, 6), (12, 4, 3, 3), {"groups": 2, "padding": 1}),
    "depthwise": ((2, 8, 6, 6), (8, 1, 3, 3), {"groups": 8, "padding": 1}),
    "pointwise": ((3, 16, 5, 5), (8, 16, 1, 1), {}),
    "same": ((2, 4, 7, 7), (4, 4, 3, 5), {"padding": "same"}),
    "same, even kernel": ((2, 4, 7, 6), (4, 4, 2, 4), {"padding": "same"}),
    "valid": ((2, 4, 7, 7), (4, 4, 3, 3), {"padding": "valid"}),
    "one image": ((1, 3, 9, 9), (5, 3, 7, 7), {"stride": 2, "padding": 3}),
}


@pytest.mark.filterwarnings(
    "ignore:Using padding='same' with even kernel"
)  # torch's, about its own convolution
@pytest.mark.parametrize("precision", ["int8", "fp16", "bf16"])
@pytest.mark.parametrize("name", CONVOLUTIONS)
def test_conv2d_geometries(name, precision):
    x, w, options = CONVOLUTIONS[name]
    assert_parity(
        "conv2d", precision, torch.conv2d, [sample(*x), sample(*w, seed=1), sample(w[0], seed=2)], **options
    )


@pytest.mark.parametrize("channels_last", [False, True])
@pytest.mark.parametrize("out_type", ["fp32", "bf16"])
def test_conv2d_int8_returns_channels_last_of_any_input(channels_last, out_type):
    x, w = sample(2, 8, 6, 6), sample(4, 8, 3, 3, seed=1)
    if channels_last:
        x, w = (t.contiguous(memory_format=torch.channels_last) for t in (x, w))
    y, dx, dw = assert_parity("conv2d", "int8", torch.conv2d, [x, w], (45, 40), out_type=out_type)
    assert y.is_contiguous(memory_format=torch.channels_last)
    assert dx.shape == x.shape
    assert dw.shape == w.shape
    assert dw.stride() == w.stride()  # DDP reduces gradients in their parameters' strides


@pytest.mark.parametrize("scale", [1e-20, 1e20])
def test_conv2d_int8_magnitudes_differ_between_images(scale):
    x = sample(4, 8, 6, 6)
    x[1] *= scale
    got = outcome(
        select("cpu").kernel("conv2d", "int8"), "conv2d", "int8", torch.conv2d, [x, sample(4, 8, 3, 3)]
    )
    expected = outcome(
        reference_kernel("conv2d", Precision.INT8), "conv2d", "int8", torch.conv2d, [x, sample(4, 8, 3, 3)]
    )
    for image in range(4):
        assert agreement_db(got[0][image], expected[0][image]) > 110
        assert agreement_db(got[1][image], expected[1][image]) > 45


def test_conv2d_int8_corner_cases():
    kernel = select("cpu").kernel("conv2d", "int8")
    w = sample(4, 3, 3, 3)
    y, _, dw = outcome(kernel, "conv2d", "int8", torch.conv2d, [torch.zeros(2, 3, 5, 5), w])
    assert torch.equal(y, torch.zeros_like(y))
    assert torch.equal(dw, torch.zeros_like(dw))
    x = sample(2, 3, 5, 5)
    x[1, 0, 0, 0] = float("nan")
    y, _, dw = outcome(kernel, "conv2d", "int8", torch.conv2d, [x, w])
    assert y[1].isnan().all()
    assert y[0].isfinite().all()
    assert dw.isnan().all()
    y, _, dw = outcome(kernel, "conv2d", "int8", torch.conv2d, [torch.zeros(0, 3, 5, 5), w])
    assert y.shape == (0, 4, 3, 3)
    assert torch.equal(dw, torch.zeros_like(dw))
    with pytest.raises(UnsupportedError, match="batch"):
        call(kernel, "conv2d", "int8", torch.conv2d, [sample(3, 5, 5), w])


def test_conv2d_int8_saves_its_codes_and_scales_and_packs_its_weight_once():
    x, w = sample(4, 8, 6, 6).requires_grad_(), sample(16, 8, 3, 3, seed=1).requires_grad_()
    weight = Operand(w, encode(w, "int8_channel"))
    kernel = select("cpu").kernel("conv2d", "int8")
    saved = []
    with torch.autograd.graph.saved_tensors_hooks(lambda t: saved.append(t.nbytes) or t, lambda t: t):
        kernel(torch.conv2d, "fp32", Operand(x, encode(x, "int8_image")), weight)
    assert sum(saved) == 4 * 8 * 36 + 4 * 4 + 16 * 8 * 9 + 4 * 16
    packed = dict(weight.encoded.packed)
    kernel(torch.conv2d, "fp32", Operand(x, encode(x, "int8_image")), weight)
    assert len(packed) == 1
    assert all(weight.encoded.packed[key] is value for key, value in packed.items())


@pytest.mark.parametrize("precision", ["fp16", "bf16"])
@pytest.mark.parametrize(
    ("kind", "target", "shapes", "options"),
    [
        ("matmul", torch.matmul, [(2, 7, 5), (2, 5, 3)], {}),
        ("matmul", torch.bmm, [(2, 7, 5), (2, 5, 3)], {}),
        ("attention", F.scaled_dot_product_attention, [(2, 2, 9, 8)] * 3, {"is_causal": True}),
        ("conv1d", torch.conv1d, [(2, 4, 11), (6, 4, 3), (6,)], {"padding": 1}),
    ],
)
def test_other_products(kind, target, shapes, options, precision):
    tensors = [sample(*shape, seed=i) for i, shape in enumerate(shapes)]
    bounds = (30, 25) if kind == "attention" else LEAST_DB[precision]
    assert_parity(kind, precision, target, tensors, bounds, **options)


def test_attention_in_fp16_takes_a_mask_and_dropout():
    q, k, v = (sample(1, 2, 6, 8, seed=i).requires_grad_() for i in range(3))
    kernel = select("cpu").kernel("attention", "fp16")
    operands = [Operand(t, encode(t, "fp16")) for t in (q, k, v)]
    for mask in (torch.ones(6, 6, dtype=torch.bool).tril(), torch.zeros(6, 6)):
        y = kernel(F.scaled_dot_product_attention, "fp32", *operands, attn_mask=mask, dropout_p=0.2)
        y.sum().backward()
        assert q.grad.isfinite().all()


@pytest.mark.parametrize("magnitude", [1e-7, 1e-20, 1e-37, 1e20])
def test_fp16_gradients_of_any_magnitude_survive(magnitude):
    tensors = linear_tensors((16, 32), 8, "linear")
    gradient = sample(16, 8, seed=9)
    kernel = select("cpu").kernel("linear", "fp16")
    expected = outcome(kernel, "linear", "fp16", F.linear, tensors, gradient=gradient)
    got = outcome(kernel, "linear", "fp16", F.linear, tensors, gradient=gradient * magnitude)
    for a, b in zip(got[1:], expected[1:], strict=True):
        assert agreement_db(a.double() / magnitude, b) > 55


def test_fp16_backward_frees_what_it_saved_and_cannot_run_twice():
    x, w = sample(8, 16).requires_grad_(), sample(4, 16, seed=1).requires_grad_()
    kernel = select("cpu").kernel("linear", "fp16")
    encoded = encode(x, "fp16")
    y = kernel(F.linear, "fp32", Operand(x, encoded), Operand(w, encode(w, "fp16")))
    storage = torch.multiprocessing.reductions.StorageWeakRef(encoded.data.untyped_storage())
    del encoded
    assert not storage.expired()
    y.sum().backward(retain_graph=True)
    assert storage.expired()
    with pytest.raises(RuntimeError, match="second time"):
        y.sum().backward()


@pytest.mark.parametrize("kind", ["linear", "addmm"])
@pytest.mark.parametrize("magnitude", [1e-9, 1.0, 1e9])
def test_a_device_that_multiplies_fp16_only(monkeypatch, kind, magnitude):
    """Codes are at most 127, so scaling the gradient is enough for FP16; done here on the CPU."""
    from qsync.backend import linear, products

    for module in (linear, products):
        monkeypatch.setattr(module, "narrow_dtype", lambda device: torch.float16)
    tensors = linear_tensors((33, 64), 48, kind)
    gradient = sample(33, 48, seed=9) * magnitude
    kernel = select("cpu").kernel(kind, "int8")
    got = outcome(kernel, kind, "int8", TARGETS[kind], tensors, gradient=gradient)
    plain = reference_kernel(kind, Precision.INT8)
    expected = outcome(plain, kind, "int8", TARGETS[kind], tensors, gradient=gradient)
    for a, b in zip(got[1:], expected[1:], strict=True):
        assert agreement_db(a / magnitude, b / magnitude) > 45


def test_frozen_and_repeated_backward_of_int8():
    x, w = sample(8, 16).requires_grad_(), sample(4, 16, seed=1).requires_grad_()
    y = call(select("cpu").kernel("linear", "int8"), "linear", "int8", F.linear, [x, w])
    y.sum().backward(retain_graph=True)
    once = w.grad.clone()
    y.sum().backward()
    assert torch.equal(w.grad, 2 * once)


WINDOWED = [  # images, weight, stride, padding, dilation: all where the weight outweighs the images
    ((2, 16, 4, 4), (32, 16, 3, 3), 1, 1, 1),
    ((2, 16, 7, 6), (32, 16, 3, 3), 2, 1, 1),
    ((2, 16, 5, 5), (32, 16, 3, 3), 1, 2, 2),
    ((2, 16, 4, 4), (32, 16, 1, 1), 2, 0, 1),
    ((1, 17, 3, 3), (5, 17, 2, 3), (2, 1), (0, 1), 1),
    ((2, 16, 4, 4), (32, 16, 3, 3), 1, "valid", 1),
]


@pytest.mark.parametrize(("x_shape", "w_shape", "stride", "padding", "dilation"), WINDOWED)
@pytest.mark.parametrize("channels_last", [True, False])
def test_a_bf16_convolution_of_windows_is_onednn_s(
    x_shape, w_shape, stride, padding, dilation, channels_last, monkeypatch
):
    results = []
    for pays in (True, False):
        monkeypatch.setattr(convolution, "_windows_pay", lambda *_, pays=pays: pays)
        x, w, b = sample(*x_shape), sample(*w_shape, seed=1), sample(w_shape[0], seed=2)
        if channels_last:
            x, w = (t.contiguous(memory_format=torch.channels_last) for t in (x, w))
        leaves = [t.requires_grad_() for t in (x, w, b)]
        kernel = select("cpu").kernel("conv2d", "bf16")
        y = kernel(torch.conv2d, "bf16", *(t.bfloat16() for t in leaves), stride, padding, dilation)
        assert y.dtype is torch.bfloat16
        gradient = sample(*y.shape, seed=3).bfloat16()
        results.append((y, *torch.autograd.grad(y, leaves, gradient)))
    for windowed, through_onednn in zip(*results, strict=True):
        assert windowed.shape == through_onednn.shape
        assert (windowed - through_onednn).norm() <= 6e-3 * through_onednn.norm()


def test_a_bf16_convolution_saves_its_input_and_its_weight_and_no_windows():
    x, w = sample(2, 16, 4, 4).bfloat16().requires_grad_(), sample(32, 16, 3, 3).bfloat16().requires_grad_()
    saved = []
    with torch.autograd.graph.saved_tensors_hooks(lambda t: saved.append(t.nbytes) or t, lambda t: t):
        select("cpu").kernel("conv2d", "bf16")(torch.conv2d, "bf16", x, w, padding=1)
    assert sum(saved) == x.nbytes + w.nbytes
