"""Every kernel against the reference: kernel x precision x shape x layout x values, result and gradients.

FP32 is the reference's own call: equal to the bit. INT8 results are whole numbers times two scales: equal to
the exact value but for the last digits. Everything else that rounds has a least signal to noise, stated in
`LEAST_DB`. What is not finite comes out exactly where the reference says. The rounding of INT8 gradients is
random: its mean and its variance are those of its definition.
"""

from __future__ import annotations

import math

import pytest
import torch
from kernel_calls import TARGETS, agreement_db, arguments_of, outcome, sample
from torch.nn.attention import SDPBackend, sdpa_kernel

from qsync.backend import Operand, encode, reference_kernel
from qsync.backend.precisions_that_pay import emulated_precisions, emulation_note
from qsync.backend.selection.kernel_candidates import candidates
from qsync.errors import UnsupportedError
from qsync.operators.precision import Precision
from qsync.operators.registry import PRECISIONS_BY_KIND

CPU = torch.device("cpu")
cuda = [pytest.mark.cuda, pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")]


# Of the operands, as the target takes them, and its options.
SHAPES = {
    "linear": {
        "aligned": ([(64, 32), (48, 32), (48,)], {}),
        "primes": ([(13, 37), (11, 37), (11,)], {}),
        "leading dims": ([(2, 3, 16), (8, 16), (8,)], {}),
        "one row": ([(1, 5), (3, 5), (3,)], {}),
        "no rows": ([(0, 5), (3, 5), (3,)], {}),
        "one output": ([(7, 8), (1, 8), (1,)], {}),
        "one input": ([(7, 1), (5, 1), (5,)], {}),
        "vector": ([(24,), (9, 24), (9,)], {}),
        "no bias": ([(5, 7), (3, 7)], {}),
    },
    "addmm": {
        "aligned": ([(48,), (64, 32), (32, 48)], {}),
        "primes": ([(11,), (13, 37), (37, 11)], {}),
        "one row": ([(3,), (1, 5), (5, 3)], {}),
        "no rows": ([(3,), (0, 5), (5, 3)], {}),
        "one output": ([(1,), (7, 8), (8, 1)], {}),
        "a bias per row": ([(6, 1), (6, 8), (8, 4)], {}),
        "a bias per element": ([(6, 4), (6, 8), (8, 4)], {}),
    },
    "conv2d": {
        "plain": ([(3, 4, 8, 9), (6, 4, 3, 3), (6,)], {}),
        "padded": ([(2, 16, 8, 8), (16, 16, 3, 3), (16,)], {"padding": 1}),
        "primes": ([(3, 7, 11, 5), (13, 7, 3, 3), (13,)], {"padding": 1}),
        "a heavy weight": ([(2, 16, 4, 4), (32, 16, 3, 3), (32,)], {"padding": 1}),
        "strided": ([(2, 5, 11, 7), (7, 5, 3, 3), (7,)], {"stride": (2, 1), "padding": (0, 2)}),
        "strided windows": ([(2, 16, 7, 6), (32, 16, 3, 3), (32,)], {"stride": 2, "padding": 1}),
        "dilated": ([(2, 8, 12, 12), (8, 8, 3, 3), (8,)], {"dilation": 2, "padding": 2}),
        "grouped": ([(2, 8, 6, 6), (12, 4, 3, 3), (12,)], {"groups": 2, "padding": 1}),
        "depthwise": ([(2, 8, 6, 6), (8, 1, 3, 3), (8,)], {"groups": 8, "padding": 1}),
        "pointwise": ([(3, 16, 5, 5), (8, 16, 1, 1), (8,)], {}),
        "same": ([(2, 4, 7, 7), (4, 4, 3, 5), (4,)], {"padding": "same"}),
        "same, even": ([(2, 4, 7, 6), (4, 4, 2, 4), (4,)], {"padding": "same"}),
        "valid": ([(2, 16, 4, 4), (32, 16, 3, 3), (32,)], {"padding": "valid"}),
        "one image": ([(1, 3, 9, 9), (5, 3, 7, 7), (5,)], {"stride": 2, "padding": 3}),
        "one pixel": ([(2, 5, 1, 1), (3, 5, 1, 1), (3,)], {}),
        "no images": ([(0, 3, 5, 5), (4, 3, 3, 3), (4,)], {}),
        "no bias": ([(2, 3, 5, 5), (4, 3, 3, 3)], {}),
    },
    "conv1d": {
        "padded": ([(2, 4, 11), (6, 4, 3), (6,)], {"padding": 1}),
        "primes": ([(3, 7, 23), (5, 7, 3), (5,)], {"stride": 2, "dilation": 2}),
        "a heavy weight": ([(2, 16, 8), (32, 16, 3), (32,)], {"padding": 1}),
        "grouped": ([(2, 8, 9), (12, 4, 3), (12,)], {"groups": 2}),
        "same": ([(2, 4, 7), (4, 4, 3), (4,)], {"padding": "same"}),
        "one signal": ([(1, 3, 9), (5, 3, 7)], {}),
        "no signals": ([(0, 3, 9), (5, 3, 3), (5,)], {}),
    },
    "conv3d": {
        "padded": ([(2, 3, 4, 5, 6), (4, 3, 3, 3, 3), (4,)], {"padding": 1}),
        "patches": ([(2, 3, 4, 8, 8), (16, 3, 2, 4, 4), (16,)], {"stride": (2, 4, 4)}),
        "dilated": ([(1, 4, 3, 7, 7), (6, 4, 1, 3, 3)], {"dilation": (1, 2, 2)}),
        "no videos": ([(0, 3, 2, 4, 4), (4, 3, 2, 2, 2), (4,)], {}),
    },
    "conv_transpose": {
        "doubled": ([(2, 8, 5, 6), (8, 4, 2, 2), (4,)], {"stride": 2}),
        "primes": ([(3, 7, 11, 5), (7, 13, 3, 3), (13,)], {"stride": 2, "padding": 1, "output_padding": 1}),
        "grouped": ([(2, 8, 6, 6), (8, 3, 3, 3), (6,)], {"groups": 2}),
        "signals": ([(2, 5, 9), (5, 3, 4), (3,)], {"stride": 2, "padding": 1}),
        "volumes": ([(1, 3, 2, 4, 4), (3, 2, 2, 2, 2)], {"stride": 2}),
        "no images": ([(0, 3, 5, 5), (3, 4, 3, 3), (4,)], {}),
    },
    "baddbmm": {
        "scores": ([(4, 1, 9), (4, 7, 16), (4, 16, 9)], {"beta": 1.0, "alpha": 0.25}),
        "primes": ([(3, 7, 5), (3, 7, 11), (3, 11, 5)], {}),
        "a number for all": ([(1, 1, 1), (2, 3, 4), (2, 4, 5)], {"beta": 0.5}),
        "no rows": ([(2, 0, 3), (2, 0, 5), (2, 5, 3)], {}),
    },
    "matmul": {
        "a batch": ([(4, 7, 5), (4, 5, 3)], {}),
        "heads": ([(2, 3, 9, 16), (2, 3, 16, 9)], {}),
        "primes": ([(13, 37), (37, 11)], {}),
        "one B for all": ([(2, 3, 7, 5), (5, 4)], {}),
        "broadcast": ([(2, 1, 7, 5), (3, 5, 4)], {}),
        "one row": ([(2, 1, 5), (2, 5, 3)], {}),
        "no rows": ([(2, 0, 5), (2, 5, 3)], {}),
        "no matrices": ([(0, 4, 5), (0, 5, 3)], {}),
        "squares": ([(2, 3, 16, 16), (2, 3, 16, 16)], {}),  # scales of columns are as many as rows
        "one square B": ([(8, 16), (16, 16)], {}),
        "one A for all": ([(7, 5), (3, 5, 4)], {}),
        "broadcast both": ([(2, 1, 1, 5), (1, 3, 5, 1)], {}),
        "vector times matrix": ([(5,), (5, 4)], {}),
        "vector times matrices": ([(5,), (3, 5, 4)], {}),
        "matrix times vector": ([(6, 5), (5,)], {}),
        "matrices times vector": ([(3, 6, 5), (5,)], {}),
        "vectors": ([(9,), (9,)], {}),
    },
    "attention": {
        "heads": ([(2, 3, 9, 8)] * 3, {}),
        "causal": ([(1, 2, 13, 16)] * 3, {"is_causal": True}),
        "other lengths": ([(1, 2, 7, 8), (1, 2, 11, 8), (1, 2, 11, 8)], {}),
        "one row": ([(1, 1, 1, 8), (1, 1, 5, 8), (1, 1, 5, 8)], {}),
        "scaled": ([(2, 2, 5, 8)] * 3, {"scale": 0.5}),
    },
    "einsum": {
        "matrices": ([(4, 7, 5), (4, 5, 3)], {"equation": "bij,bjk->bik"}),
        "other orders": ([(7, 4, 5), (3, 5, 4)], {"equation": "ibj,kjb->bik"}),
    },
    "grouped_mm": {
        "aligned": ([(12, 16), (4, 16, 8)], {"offs": torch.tensor([3, 6, 9, 12])}),
        "primes": ([(71, 13), (3, 13, 7)], {"offs": torch.tensor([34, 34, 71])}),
        "one group": ([(5, 8), (1, 8, 3)], {"offs": torch.tensor([5])}),
    },
    "bilinear": {
        "aligned": ([(12, 16), (12, 8), (4, 16, 8), (4,)], {}),
        "primes": ([(7, 13), (7, 11), (3, 13, 11)], {}),
        "a batch": ([(2, 5, 7), (2, 5, 3), (6, 7, 3), (6,)], {}),
        "one row": ([(5,), (3,), (2, 5, 3)], {}),
        "no rows": ([(0, 4), (0, 3), (2, 4, 3), (2,)], {}),
        "one matrix": ([(9, 4), (9, 4), (1, 4, 4)], {}),
    },
    "rnn": {
        "aligned": ([(4, 6, 16), (64, 16), (64, 16), (64,), (64,)], {}),
        "primes": ([(3, 5, 7), (44, 7), (44, 11), (44,), (44,)], {}),
        "one step": ([(2, 1, 8), (32, 8), (32, 8), (32,), (32,)], {}),
        "no bias": ([(2, 3, 5), (16, 5), (16, 4)], {}),
    },
    "embedding": {
        "a batch": ([(11, 16)], {"places": torch.arange(24).view(2, 3, 4) % 11}),
        "primes": ([(13, 37)], {"places": torch.arange(7) * 5 % 13}),
        "of 32 bits": ([(5, 8)], {"places": torch.tensor([[4, 0, 4]], dtype=torch.int32)}),
        "one place": ([(5, 8)], {"places": torch.tensor(2)}),
        "no places": ([(5, 8)], {"places": torch.zeros(3, 0, dtype=torch.int64)}),
        "one column": ([(6, 1)], {"places": torch.arange(6)}),
        "padded": ([(6, 8)], {"places": torch.tensor([0, 2, 2, 5]), "padding_idx": 2}),
        "weighed by frequency": (
            [(6, 8)],
            {"places": torch.tensor([[0, 2], [2, 5]]), "scale_grad_by_freq": True},
        ),
    },
}
LAYOUTS = {
    "contiguous": lambda t: t.contiguous(),
    "transposed": lambda t: t.mT.contiguous().mT if t.ndim > 1 else t,
    "strided": lambda t: torch.stack([t, t], -1).flatten(-2)[..., ::2] if t.ndim else t,
    "channels last": lambda t: t.movedim(1, -1).contiguous().movedim(-1, 1) if t.ndim > 2 else t,
}
# Which operand is scaled: what the result is linear in, whatever the others are. Biases go with it.
SCALED = {
    "linear": (0, 2),
    "addmm": (0, 1),
    "conv2d": (0, 2),
    "conv1d": (0, 2),
    "conv3d": (0, 2),
    "conv_transpose": (0, 2),
    "matmul": (0,),
    "baddbmm": (0, 1),
    "attention": (2,),
    "embedding": (0,),
    "einsum": (0,),
    "grouped_mm": (0,),
    "bilinear": (0, 3),
    "rnn": (),
}
# FP16 ends at 65504 and at 6e-8: operands beyond are 0 and Inf there, gradients are scaled.
TINY, HUGE = 1e-30, 1e30
TINY_FP16, HUGE_FP16 = 1e-2, 1e2
VALUES = (
    "normal", "tiny", "huge", "of all sizes", "tiny gradient", "huge gradient", "zeros",
    "nan", "inf", "-inf", "nan in the second", "inf in the second", "nan gradient", "inf gradient",
)  # fmt: skip
# Least signal to noise against the reference, in decibels: (result, gradients). Two stochastic roundings
# agree no better than the rounding itself. GPUs get 10 dB more room: they sum in other orders, and round
# some sums.
LEAST_DB = {
    "fp32": (115, 115), "tf32": (60, 60), "bf16": (45, 45), "fp16": (62, 58), "mxfp8": (120, 120),
    "fp8": (50, 35), "int8": (120, 43), "int8_all": (120, 30),
}  # fmt: skip
# Probabilities are rounded as well. INT8's reference keeps them in FP32, the kernel in BF16.
ATTENTION_DB = {"tf32": (50, 45), "bf16": (45, 40), "fp16": (60, 55), "int8": (42, 40)}
# So are the states and gates of every step.
RNN_DB = {**LEAST_DB, "bf16": (40, 38)}
# Two products in a row: what is between them is rounded, too.
BILINEAR_DB = {"fp32": (115, 115), "tf32": (55, 55), "bf16": (43, 42), "fp16": (58, 55)}
# An FP32 result of INT8 is rounded by each of three multiplications and one addition; a BF16 one once more.
INT8_BOUND = {"fp32": 2**-22, "bf16": 2**-8}


@pytest.fixture(autouse=True, scope="module")
def one_thread():
    """As ranks run under torchrun; with it the compiled casts run, which take no second thread."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


def available():
    """(device, kind, precision): all that a CPU has, and all there is for whatever GPU runs this."""
    for kind, precisions in PRECISIONS_BY_KIND.items():
        for precision in precisions:
            if any(c.kernel for c in candidates(kind, precision, CPU)):
                yield pytest.param("cpu", kind, precision, id=f"cpu-{kind}-{precision}")
            yield pytest.param("cuda", kind, precision, id=f"cuda-{kind}-{precision}", marks=cuda)


def kernels_of(device, kind, precision):
    found = candidates(kind, precision, torch.device(device))
    usable = [c for c in found if c.kernel is not None]
    if not usable:
        pytest.skip("; ".join(f"{c.name}: {c.reason}" for c in found))
    return usable


def operands(kind, shapes, values, half):
    """Contiguous tensors and the factor of the gradient, with values of a family."""
    tensors = [sample(*shape, seed=i) for i, shape in enumerate(shapes)]
    factor = {
        "tiny": TINY_FP16 if half else TINY,
        "huge": HUGE_FP16 if half else HUGE,
    }.get(values, 1.0)
    scaled = [i for i in SCALED[kind] if i < len(tensors)]
    for i in scaled:
        tensors[i] *= factor
    first, second = (1, 2) if kind in ("addmm", "baddbmm") else (0, 1)
    if values == "of all sizes" and tensors[first].ndim > 1 and kind != "attention":
        sizes = 10.0 ** (torch.arange(len(tensors[first])) % 5 * (0.5 if half else 5) - (1 if half else 10))
        tensors[first] *= sizes.view(-1, *[1] * (tensors[first].ndim - 1))
    if values == "zeros":
        tensors = [torch.zeros_like(t) for t in tensors]
    bad = values.partition(" ")[0]
    if bad in ("nan", "inf", "-inf") and "gradient" not in values:
        place = tensors[min(second, len(tensors) - 1) if "second" in values else first].view(-1)
        place[place.numel() // 2 : place.numel() // 2 + 1] = float(bad)
    return tensors


def gradient_of(shape, values):
    gradient = sample(*shape, seed=9)
    if values in ("tiny gradient", "huge gradient"):
        gradient *= TINY if "tiny" in values else HUGE
    if values in ("nan gradient", "inf gradient"):
        gradient.view(-1)[gradient.numel() // 2 : gradient.numel() // 2 + 1] = float(values.split()[0])
    return gradient


def exact_int8(kind, precision, target, tensors, options):
    """The result of an INT8 operator in float64, and the size of what was added up to it."""
    if kind == "embedding":
        rows = decode_exactly(encode(target(*tensors, **options), "int8_row"))
        return rows, rows.abs()
    arguments = arguments_of(kind, precision, tensors)
    codes = [
        decode_exactly(a.encoded) if isinstance(a, Operand) else torch.zeros_like(a, dtype=torch.double)
        for a in arguments
    ]
    product = target(*codes, **options)
    biases = [a.double() for a in arguments if not isinstance(a, Operand)]
    bias = sum(b.view(-1, *[1] * (product.ndim - 2)) if "conv" in kind else b for b in biases)
    return product + bias, product.abs() + abs(bias)


def decode_exactly(encoded):
    codes = encoded.data.double() - (128 if encoded.data.dtype is torch.uint8 else 0)
    values = codes * encoded.scale.double()
    return values.t() if encoded.layout == "col" else values


def disagreement(got, expected, least_db, spatial, skips_padding):
    """What is wrong with a tensor; None if it agrees with the reference."""
    if got.shape != expected.shape or got.dtype != expected.dtype:
        return f"{got.dtype} {tuple(got.shape)} instead of {expected.dtype} {tuple(expected.shape)}"
    finite, bad = got.isfinite(), ~expected.isfinite()
    allowed = bad
    if spatial and bad.ndim > 2:
        # Padding is multiplied by some kernels and skipped by others, and 0 x NaN is NaN: within its plane.
        allowed = in_planes(bad)
    if skips_padding:
        bad = bad & (~finite | ~in_planes(~finite))
    if (finite & bad).any() or (~finite & ~allowed).any():
        return f"not finite in {int((~finite).sum())} places instead of {int(bad.sum())}"
    known = finite & expected.isfinite()
    if math.isinf(least_db):
        return None if torch.equal(got[known], expected[known]) else "not equal to the bit"
    found = agreement_db(got[known], expected[known])
    return None if found >= least_db else f"{found:.0f} dB instead of {least_db}"


def in_planes(places):
    """The planes of images in which one of these places is."""
    return places.flatten(2).any(2).view(*places.shape[:2], *[1] * (places.ndim - 2)).expand(places.shape)


def bounds(device, kind, precision, out_type, in_torch):
    if precision is Precision.FP32 and in_torch:
        if device == "cuda" and kind.startswith("conv"):  # cuDNN adds up gradients in any order
            return (120, 120)
        least = (math.inf, math.inf)
    else:
        least = {"attention": ATTENTION_DB, "rnn": RNN_DB, "bilinear": BILINEAR_DB}.get(kind, LEAST_DB)[
            precision
        ]
    least = least if out_type == "fp32" else (min(least[0], 42), min(least[1], 42))
    return [db - 10 * (device == "cuda") - 3 * is_emulated(device, precision) for db in least]


def is_emulated(device, precision):
    """Whether a processor without 16-bit products runs torch's other kernels, which sum in other orders."""
    cpu = torch.device("cpu")
    return device == "cpu" and bool(emulation_note(cpu)) and precision in emulated_precisions(cpu)


def reference_of(kind, precision, in_torch):
    """The reference. Of attention in steps: torch's fused one returns 0 where a query is NaN or Inf."""
    plain = reference_kernel(kind, precision)
    if kind != "attention" or in_torch:
        return plain

    def in_steps(*arguments, **options):
        with sdpa_kernel(SDPBackend.MATH):
            return plain(*arguments, **options)

    return in_steps


def compare(
    candidate,
    device,
    kind,
    precision,
    tensors,
    options,
    values="normal",
    out_type="fp32",
    layout="contiguous",
):
    """What is wrong with a kernel's result and gradients, a line each."""
    target = TARGETS[kind]
    tensors = [t.to(device) for t in tensors]
    with torch.no_grad():
        shape = target(*(t.float() for t in tensors), **options).shape
    gradient = gradient_of(shape, values).to(device)
    tensors, gradient = [LAYOUTS[layout](t) for t in tensors], LAYOUTS[layout](gradient)
    got, expected = (
        outcome(kernel, kind, precision, target, tensors, gradient, out_type, **options)
        for kernel in (candidate.kernel, reference_of(kind, precision, candidate.name.startswith("torch")))
    )
    in_torch = candidate.name == "torch"
    wrong, least, spatial = [], bounds(device, kind, precision, out_type, in_torch), kind.startswith("conv")
    for i, (a, b) in enumerate(zip(got, expected, strict=True)):
        # The reference's oneDNN multiplies padding. That in the other memory order skips it, and so do the
        # convolutions of processors that multiply FP16 (AVX-512 FP16) or tiles of BF16 (AMX). In BF16 they
        # are in the other order.
        skips = precision in (Precision.FP32, Precision.FP16, Precision.BF16)
        skips_padding = skips and spatial and a.ndim > 2
        others = device == "cuda" or is_emulated(device, precision)
        if others and candidate.name.startswith("torch") and not b.isfinite().all():
            b = b.masked_fill(~a.isfinite(), math.nan)  # cuDNN and fused attention clip, skip or spread it
            a = a.masked_fill(~b.isfinite(), math.nan)
        reason = disagreement(a, b, least[min(i, 1)], spatial, skips_padding)
        if reason:
            wrong.append(f"{candidate.name}, {values}: {f'gradient {i - 1}' if i else 'result'}: {reason}")
    if precision in (Precision.INT8, Precision.INT8_ALL) and kind != "attention":
        exact, size = exact_int8(kind, precision, target, tensors, options)
        finite = exact.isfinite() & got[0].isfinite()
        error = (got[0].double() - exact).abs()[finite]
        if not (error <= INT8_BOUND[out_type] * size[finite]).all():
            wrong.append(f"{candidate.name}, {values}: the result is further from the exact one than a digit")
    return wrong


def test_the_table_has_every_kind():
    assert set(SHAPES) == set(TARGETS) == set(PRECISIONS_BY_KIND)


# In memory orders that few models have, all values are deep: the order has no part in what becomes of one.
FEW_VALUES = ("normal", "of all sizes", "huge gradient", "nan", "inf in the second", "nan gradient")
EVERY_VALUE = [pytest.param(layout, VALUES, marks=pytest.mark.deep) for layout in ("transposed", "strided")]


@pytest.mark.filterwarnings("ignore:Using padding='same' with even kernel")  # torch's, about its own
@pytest.mark.filterwarnings("ignore:.*conv2d in int8. CUTLASS has no")
@pytest.mark.parametrize(
    ("layout", "of_values"),
    [
        ("contiguous", VALUES), ("channels last", VALUES),
        ("transposed", FEW_VALUES), ("strided", FEW_VALUES), *EVERY_VALUE,
    ],
    ids=lambda given: given if isinstance(given, str) else f"{len(given)} values",
)  # fmt: skip
@pytest.mark.parametrize(("device", "kind", "precision"), list(available()))
def test_parity(device, kind, precision, layout, of_values):
    torch.manual_seed(0)
    wrong, skipped = [], []
    for candidate in kernels_of(device, kind, precision):
        for name, (shapes, options) in SHAPES[kind].items():
            if layout == "channels last" and all(len(shape) < 3 for shape in shapes):
                continue  # as contiguous ones
            for values in of_values:
                tensors = operands(kind, shapes, values, precision is Precision.FP16)
                try:
                    found = compare(
                        candidate, device, kind, precision, tensors, options, values=values, layout=layout
                    )
                except UnsupportedError as refusal:
                    if precision is Precision.INT8_ALL and options.get("groups", 1) > 1:
                        break
                    skipped.append(f"{candidate.name}, {name}: {refusal}")
                    break
                wrong += [f"{name}: {line}" for line in found]
    assert not wrong, "\n".join(wrong)
    assert device != "cpu" or not skipped, "\n".join(skipped)


@pytest.mark.filterwarnings("ignore:Using padding='same' with even kernel")
@pytest.mark.filterwarnings("ignore:.*conv2d in int8. CUTLASS has no")
@pytest.mark.parametrize(("device", "kind", "precision"), list(available()))
def test_parity_of_bf16_values_and_results(device, kind, precision):
    """What comes in BF16 along an edge gets its gradient in BF16, and the result leaves in it."""
    torch.manual_seed(0)
    wrong = []
    for candidate in kernels_of(device, kind, precision):
        for name, (shapes, options) in SHAPES[kind].items():
            tensors = operands(kind, shapes, "normal", precision is Precision.FP16)
            if precision is not Precision.FP32:
                first = 1 if kind in ("addmm", "baddbmm") else 0
                tensors[first] = tensors[first].bfloat16()
            if precision is Precision.INT8_ALL and options.get("groups", 1) > 1:
                continue
            found = compare(candidate, device, kind, precision, tensors, options, out_type="bf16")
            wrong += [f"{name}: {line}" for line in found]
    assert not wrong, "\n".join(wrong)


@pytest.mark.filterwarnings("ignore:Using padding='same' with even kernel")
@pytest.mark.filterwarnings("ignore:.*conv2d in int8. CUTLASS has no")
@pytest.mark.parametrize(("device", "kind", "precision"), list(available()))
def test_results_may_be_changed_in_place(device, kind, precision):
    """Twice the result has twice the gradients; where a kernel saved its result, backward says so instead."""

    def gradients(kernel, tensors, options, factor):
        torch.manual_seed(0)
        leaves = [t.detach().requires_grad_() for t in tensors]
        y = kernel(TARGETS[kind], "fp32", *arguments_of(kind, precision, leaves), **options)
        if factor != 1:
            y.mul_(factor)
        return torch.autograd.grad(y.sum(), leaves)

    for candidate in kernels_of(device, kind, precision):
        for shapes, options in SHAPES[kind].values():
            if precision is Precision.INT8_ALL and options.get("groups", 1) > 1:
                continue
            tensors = [t.to(device) for t in operands(kind, shapes, "normal", precision is Precision.FP16)]
            once = gradients(candidate.kernel, tensors, options, 1)
            try:
                twice = gradients(candidate.kernel, tensors, options, 2)
            except RuntimeError as error:
                assert kind in ("attention", "rnn") and "modified by an inplace operation" in str(error)
                continue
            for one, two in zip(once, twice, strict=True):
                torch.testing.assert_close(two, 2 * one, rtol=1e-5, atol=1e-6 * float(one.abs().sum()))


@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=cuda)])
@pytest.mark.parametrize("kind", ["linear", "addmm"])
def test_stochastic_rounding_has_the_mean_and_the_variance_of_its_definition(device, kind):
    """h = g s / scale becomes floor(h + u), u uniform: mean h, variance f (1 - f), f the fraction of h.

    So a gradient H C of codes C has mean h C scale and variance f (1 - f) C^2 scale^2: 400 draws of each.
    """
    shapes = [(12,), (24, 16), (16, 12)] if kind == "addmm" else [(24, 16), (12, 16), (12,)]
    first = 1 if kind == "addmm" else 0
    for candidate in kernels_of(device, kind, Precision.INT8_ALL):
        tensors = [sample(*shape, seed=i).to(device) for i, shape in enumerate(shapes)]
        x, w = (a.encoded for a in arguments_of(kind, "int8_all", tensors) if isinstance(a, Operand))
        g = sample(24, 12, seed=9).to(device)
        torch.manual_seed(1)
        draws = [
            outcome(candidate.kernel, kind, "int8_all", TARGETS[kind], tensors, g)[1 + first : 3 + first]
            for _ in range(400)
        ]
        dx, dw = (torch.stack(list(drawn)).double() for drawn in zip(*draws, strict=True))
        dw = dw.mT if kind == "addmm" else dw
        for drawn, h, codes in ((dx, g * w.scale.t(), w.data), (dw, (g * x.scale).t(), x.data)):
            scale, codes = h.double().abs().amax(1, keepdim=True) / 127, codes.double()
            fraction = (h / scale).remainder(1)
            mean, variance = h @ codes.float(), scale**2 * ((fraction * (1 - fraction)) @ codes**2)
            z = (drawn.mean(0) - mean) / (variance / len(draws)).sqrt()
            assert z.square().mean().item() == pytest.approx(1, abs=0.4), candidate.name
            assert (drawn.var(0) / variance).mean().item() == pytest.approx(1, abs=0.05), candidate.name
