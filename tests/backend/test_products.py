"""What kernels save, free and refuse, in which order results lie, and integer products of any shape.

That they compute what the reference does is in test_backend_parity.py.
"""

from __future__ import annotations

import math

import pytest
import torch
from kernel_calls import agreement_db, call, outcome, sample
from torch.multiprocessing.reductions import StorageWeakRef
from torch.nn import functional as F

from qsync.backend import Operand, encode, reference_kernel, select
from qsync.backend.devices.onednn import sums_int8_exactly
from qsync.backend.int8_products import _int_mm_cuda, int8_sums
from qsync.backend.kernels.convolution import conv_products, convolution_bf16
from qsync.backend.kernels.fp16_tf32 import product_fp16, product_tf32
from qsync.backend.kernels.linear_fp16_tf32 import addmm_fp16, addmm_tf32, linear_fp16, linear_tf32
from qsync.errors import UnsupportedError
from qsync.operators.precision import Precision

CPU = ["int8", "int8_all", "fp16", "bf16"]


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
def test_an_expanded_gradient(kind, precision):
    """`y.sum().backward()` sends a gradient of stride 0."""
    tensors = linear_tensors((6, 8), 4, kind)
    kernel = select("cpu").kernel(kind, precision)
    gradient = torch.ones(()).expand(6, 4)
    got = outcome(kernel, kind, precision, TARGETS[kind], tensors, gradient=gradient)
    expected = outcome(kernel, kind, precision, TARGETS[kind], tensors, gradient=torch.ones(6, 4))
    if precision != "int8_all":
        assert all(torch.equal(a, b) for a, b in zip(got, expected, strict=True))


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


def test_the_values_are_not_kept_alive():
    x = sample(16, 32).requires_grad_()
    w = sample(8, 32, seed=1).requires_grad_()
    value = x * 2
    operand = Operand(value, encode(value, "int8_row"))
    y = select("cpu").kernel("linear", "int8")(F.linear, "fp32", operand, Operand(w, encode(w, "int8_row")))
    storage = StorageWeakRef(value.untyped_storage())
    del value, operand
    assert storage.expired()
    y.sum().backward()
    assert x.grad is not None


@pytest.mark.parametrize("precision", ["int8", "int8_all", "fp16"])
@pytest.mark.parametrize("frozen", [(), (0,), (1,), (2,), (0, 1), (0, 1, 2)])
def test_frozen_inputs_get_no_gradient_and_save_nothing_for_it(precision, frozen):
    tensors = linear_tensors((32, 64), 48, "linear")
    everything = outcome(select("cpu").kernel("linear", precision), "linear", precision, F.linear, tensors)
    leaves = [t.detach().requires_grad_(i not in frozen) for i, t in enumerate(tensors)]
    saved = []
    with torch.autograd.graph.saved_tensors_hooks(lambda t: saved.append(t.nbytes) or t, lambda t: t):
        y = call(select("cpu").kernel("linear", precision), "linear", precision, F.linear, leaves)
    assert y.requires_grad == (len(frozen) < 3)
    if precision == "fp16":
        assert sum(saved) == 2 * ((1 not in frozen) * 32 * 64 + (0 not in frozen) * 48 * 64)
    else:
        assert sum(saved) == (1 not in frozen) * (32 * 64 + 4 * 32) + (0 not in frozen) * (48 * 64 + 4 * 48)
    if y.requires_grad:
        y.backward(sample(32, 48, seed=9))
    for i, leaf in enumerate(leaves):
        assert (leaf.grad is None) == (i in frozen)
        if leaf.grad is not None and precision != "int8_all":
            assert torch.equal(leaf.grad, everything[1 + i])


def test_addmm_with_other_factors_is_refused():
    tensors = linear_tensors((6, 8), 4, "addmm")
    with pytest.raises(UnsupportedError, match="alpha=2"):
        call(select("cpu").kernel("addmm", "int8"), "addmm", "int8", torch.addmm, tensors, alpha=2)


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
    assert len(packed) == int(sums_int8_exactly())  # FP32 sums need no packed weight
    assert all(weight.encoded.packed[key] is value for key, value in packed.items())


def test_attention_in_fp16_takes_a_mask_and_dropout():
    q, k, v = (sample(1, 2, 6, 8, seed=i).requires_grad_() for i in range(3))
    kernel = select("cpu").kernel("attention", "fp16")
    operands = [Operand(t, encode(t, "fp16")) for t in (q, k, v)]
    for mask in (torch.ones(6, 6, dtype=torch.bool).tril(), torch.zeros(6, 6)):
        y = kernel(F.scaled_dot_product_attention, "fp32", *operands, attn_mask=mask, dropout_p=0.2)
        y.sum().backward()
        assert q.grad.isfinite().all()


def test_an_int8_convolution_without_a_batch_is_refused():
    kernel = select("cpu").kernel("conv2d", "int8")
    with pytest.raises(UnsupportedError, match="batch"):
        call(kernel, "conv2d", "int8", torch.conv2d, [sample(3, 5, 5), sample(4, 3, 3, 3)])


@pytest.mark.parametrize("kind", ["linear", "addmm"])
@pytest.mark.parametrize("rows", [(6,), (2, 3), (0,)])
@pytest.mark.parametrize("form", ["fp16", "tf32"])
def test_a_linear_layer_computes_what_any_product_in_its_precision_does(kind, rows, form):
    """FP16's gradient of the bias is summed in FP32."""
    tensors = linear_tensors((*rows, 8), 4, kind)
    rows = rows if kind == "linear" else (math.prod(rows),)
    ways = {"fp16": (linear_fp16, addmm_fp16, product_fp16), "tf32": (linear_tf32, addmm_tf32, product_tf32)}
    own, any_product = ways[form][kind == "addmm"], ways[form][2]
    for carried in ("fp32", "bf16"):
        found = [
            outcome(kernel, kind, form, TARGETS[kind], tensors, sample(*rows, 4, seed=9), carried)
            for kernel in (own, any_product)
        ]
        for a, b in zip(*found, strict=True):
            torch.testing.assert_close(a, b, rtol=2e-3, atol=2e-3 if form == "fp16" else 1e-6)


def test_what_addmm_leaves_to_any_product():
    b, x, w = (sample(*shape, seed=i) for i, shape in enumerate([(6, 4), (6, 8), (8, 4)]))
    y = addmm_fp16(torch.addmm, "fp32", *(Operand(t, encode(t, "fp16")) for t in (b, x, w)))
    torch.testing.assert_close(y, torch.addmm(b, x, w), rtol=1e-2, atol=1e-2)
    y = addmm_tf32(torch.addmm, "fp32", b[0], x, w, beta=2.0, alpha=0.5)
    torch.testing.assert_close(y, torch.addmm(b[0], x, w, beta=2.0, alpha=0.5))


@pytest.mark.parametrize("shape", [(6, 4), (6, 1), (1, 4), (4,), (1,), ()])
@pytest.mark.parametrize("form", ["fp16", "tf32"])
def test_a_bias_of_any_shape_gets_its_gradient(shape, form):
    x, w, b = sample(6, 8), sample(4, 8, seed=1), torch.full(shape, 0.5)
    kernel = {"fp16": linear_fp16, "tf32": linear_tf32}[form]
    gradient = sample(6, 4, seed=9)
    got = outcome(kernel, "linear", form, F.linear, [x, w, b], gradient, "fp32")
    leaves = [t.clone().requires_grad_() for t in (x, w, b)]
    y = F.linear(*leaves)
    for a, e in zip(got, [y, *torch.autograd.grad(y, leaves, gradient)], strict=True):
        assert a.shape == e.shape
        torch.testing.assert_close(a, e.detach(), rtol=1e-2, atol=1e-2)


def test_fp16_backward_frees_what_it_saved_unless_it_is_to_run_again():
    x, w = sample(8, 16).requires_grad_(), sample(16, 4, seed=1).requires_grad_()
    kernel = select("cpu").kernel("matmul", "fp16")
    encoded = encode(x, "fp16")
    y = kernel(torch.matmul, "fp32", Operand(x, encoded), Operand(w, encode(w, "fp16")))
    storage = StorageWeakRef(encoded.data.untyped_storage())
    del encoded
    assert not storage.expired()
    loss = y.sum()
    loss.backward(retain_graph=True)
    once = x.grad.clone()
    loss.backward()
    assert torch.equal(x.grad, 2 * once) and storage.expired()
    with pytest.raises(RuntimeError, match="second time"):
        y.sum().backward()


def test_a_product_in_fp16_holds_no_copy_of_its_result():
    x, w = sample(8, 16).requires_grad_(), sample(16, 4, seed=1).requires_grad_()
    made = []

    def matmul(a, b):
        made.append(StorageWeakRef((y := torch.matmul(a, b)).untyped_storage()))
        return y

    operands = [Operand(t, encode(t, "fp16")) for t in (x, w)]
    y = product_fp16(matmul, "fp32", *operands)
    assert made[0].expired()
    y.sum().backward()
    assert x.grad.isfinite().all()


@pytest.mark.parametrize("kind", ["linear", "addmm"])
@pytest.mark.parametrize("magnitude", [1e-9, 1.0, 1e9])
def test_a_device_that_multiplies_fp16_only(monkeypatch, kind, magnitude):
    """Codes are at most 127, so scaling the gradient is enough for FP16; done here on the CPU."""
    from qsync.backend import sixteen_bit_operands
    from qsync.backend.kernels import linear

    for module in (linear, sixteen_bit_operands):
        monkeypatch.setattr(module, "sixteen_bit_dtype", lambda device: torch.float16)
    tensors = linear_tensors((33, 64), 48, kind)
    gradient = sample(33, 48, seed=9) * magnitude
    kernel = select("cpu").kernel(kind, "int8")
    got = outcome(kernel, kind, "int8", TARGETS[kind], tensors, gradient=gradient)
    plain = reference_kernel(kind, Precision.INT8)
    expected = outcome(plain, kind, "int8", TARGETS[kind], tensors, gradient=gradient)
    for a, b in zip(got[1:], expected[1:], strict=True):
        assert agreement_db(a / magnitude, b / magnitude) > 45


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
        monkeypatch.setattr(convolution_bf16, "multiplies_windows", lambda *_, pays=pays: pays)
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


@pytest.mark.parametrize("precision", ["bf16", "int8"])
def test_a_depthwise_convolution_s_gradients_are_those_of_torch_by_either_kernel(precision, monkeypatch):
    results = []
    kernel = select("cpu").kernel("conv2d", precision)  # chosen by calls that the loop does not serve
    for loop in (True, False):
        for module in (conv_products, convolution_bf16):
            monkeypatch.setattr(module, "loop_pays", lambda *_, loop=loop: loop)
        tensors = [sample(2, 8, 7, 6), sample(8, 1, 3, 3, seed=1), sample(8, seed=2)]
        results.append(
            outcome(kernel, "conv2d", precision, torch.conv2d, tensors, stride=2, padding=1, groups=8)
        )
    for by_loop, by_torch in zip(*results, strict=True):
        assert by_loop.shape == by_torch.shape and by_loop.stride() == by_torch.stride()
        assert (by_loop - by_torch).norm() <= 6e-3 * by_torch.norm()


def test_a_bf16_convolution_saves_its_input_and_its_weight_and_no_windows():
    x, w = sample(2, 16, 4, 4).bfloat16().requires_grad_(), sample(32, 16, 3, 3).bfloat16().requires_grad_()
    saved = []
    with torch.autograd.graph.saved_tensors_hooks(lambda t: saved.append(t.nbytes) or t, lambda t: t):
        select("cpu").kernel("conv2d", "bf16")(torch.conv2d, "bf16", x, w, padding=1)
    assert sum(saved) == x.nbytes + w.nbytes


@pytest.mark.parametrize("sizes", [(0, 8, 8), (8, 0, 8), (8, 8, 0)])
def test_a_gpu_s_integer_product_of_nothing_is_zeros(sizes):
    """cuBLASLt refuses empty matrices: what surrounds its call answers for them."""
    rows, inner, columns = sizes
    a, b = torch.zeros(rows, inner, dtype=torch.int8), torch.zeros(inner, columns, dtype=torch.int8)
    product = _int_mm_cuda(a, b)
    assert product.shape == (rows, columns) and product.dtype is torch.int32 and not product.any()
