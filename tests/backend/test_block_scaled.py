"""MXFP8: codes and scales against the specification in plain Python, gradients, what is saved, where it runs.

Source: OCP Microscaling Formats (MX) Specification 1.0, sections 5.2, 5.3.1 and 6.3.
"""

from __future__ import annotations

import bisect
import math
from dataclasses import replace

import pytest
import torch
from graphs import cluster_of, mlp, profile_of, sensitivity_of
from kept_for_backward import saved_by_torch
from kernel_calls import call, outcome, sample
from torch import nn
from torch.nn import functional as F

import qsync
from qsync.allocator import allocate, check_plan, explain
from qsync.backend import decode, encode, reference_kernel
from qsync.backend.encoding import block_codes, decode_blocks
from qsync.backend.precisions_that_pay import default_precisions, precisions_to_profile
from qsync.backend.selection.kernel_candidates import candidates, device_precisions
from qsync.errors import FormatError, UnsupportedError
from qsync.operators.precision import Precision, scale_bytes
from qsync.predictor.cost_model.op_calls import calls, parts
from qsync.predictor.sensitivity.rounding import rounding_error
from qsync.records.cluster import Cluster, DeviceClass
from qsync.records.datasheets import DATASHEETS
from qsync.records.kernel_support import precisions_up, why_not_multiplied
from qsync.records.plans import Plan
from qsync.what_if.card_verdicts import cards_of

FP32, MXFP8 = Precision.FP32, Precision.MXFP8
CPU = torch.device("cpu")
LARGEST_FP32 = torch.finfo(torch.float32).max


# Every finite magnitude of E4M3, in the order of its codes: four exponent bits, three mantissa bits.
E4M3 = [(code % 8 / 8 + (code > 7)) * 2.0 ** (max(code // 8, 1) - 7) for code in range(0x7F)]


def in_e4m3(value: float) -> float:
    """The nearest value of E4M3, ties to the even code, at most the largest."""
    above = bisect.bisect_left(E4M3, abs(value))
    near = [code for code in (above - 1, above) if 0 <= code < len(E4M3)]
    nearest = min(near, key=lambda code: (abs(E4M3[code] - abs(value)), code % 2))
    return math.copysign(E4M3[nearest], value)


def block_by_hand(values: list[float]) -> tuple[int, list[float]]:
    """The scale's byte and the decoded values of one block, in numbers of 64 bits."""
    if not all(map(math.isfinite, values)):
        return 255, [math.nan] * len(values)
    largest = max(map(abs, values))
    exponent = max(math.frexp(largest)[1] - 1 - 8, -127) if largest else -127
    return exponent + 127, [in_e4m3(v * 2.0**-exponent) * 2.0**exponent for v in values]


def rounded_by_hand(x: torch.Tensor, dim: int) -> torch.Tensor:
    """A matrix or vector rounded in blocks of 32 along a dimension, one number after the other."""
    rows = x.movedim(dim, -1)
    found = [
        [v for at in range(0, len(row), 32) for v in block_by_hand(row[at : at + 32])[1]]
        for row in rows.reshape(-1, rows.shape[-1]).tolist()
    ]
    return torch.tensor(found).view(rows.shape).movedim(-1, dim)


BLOCKS = {
    "zeros": [0.0] * 32,
    "negative zeros and a value": [-0.0] * 31 + [3.0],
    "subnormal in FP32": [1e-42, -3e-45, 1.4e-45],
    "the least normal": [2.0**-126, 2.0**-127],
    "the largest": [LARGEST_FP32, -LARGEST_FP32, 1.0, 1e30],
    "beyond the largest code": [511.0, -465.0, 463.9, 464.0, 449.0, 448.0],
    "ties": [256.0, 17.0, 19.0, -21.0, 1.0625, 1.1875, 2.0**-10, 3 * 2.0**-10],
    "subnormal codes": [448.0, 2.0**-6, 2.0**-7, 5 * 2.0**-9, 2.0**-9, 2.0**-10, 1.01 * 2.0**-10],
    "NaN": [1.0, math.nan, 2.0],
    "Inf": [1.0, math.inf, 2.0],
    "-Inf": [-math.inf] * 4,
    "powers of two": [2.0**k for k in range(-20, 12)],
    "one": [1.0],
}


@pytest.mark.parametrize("name", BLOCKS)
def test_a_block_is_encoded_as_the_specification_says(name):
    values = torch.tensor([BLOCKS[name]])
    byte, decoded = block_by_hand(values[0].tolist())
    codes, scale = block_codes(values, 1)
    assert codes.dtype is torch.float8_e4m3fn and scale.dtype is torch.float8_e8m0fnu
    assert scale.view(torch.uint8).tolist() == [[byte]]
    torch.testing.assert_close(
        decode_blocks(codes, scale, 1), torch.tensor([decoded]), rtol=0, atol=0, equal_nan=True
    )


@pytest.mark.parametrize("shape", [(3, 70), (2, 3, 33), (64,), (5, 1), (1, 31), (40, 32)])
def test_blocks_lie_along_the_dimension_and_the_last_is_shorter(shape):
    x = sample(*shape, seed=1) * 10.0 ** sample(*shape, seed=2)
    for dim in range(-len(shape), len(shape)):
        codes, scale = block_codes(x, dim)
        assert scale.shape[dim] == math.ceil(shape[dim] / 32)
        assert torch.equal(decode_blocks(codes, scale, dim), rounded_by_hand(x, dim))


def test_passes_over_a_large_tensor_do_not_show(monkeypatch):
    x = sample(300, 96)
    at_once = block_codes(x, 0), block_codes(x, 1)
    monkeypatch.setattr("qsync.backend.encoding._PASS_ELEMENTS", 1000)
    for dim, (codes, scale) in enumerate(at_once):
        again, of_again = block_codes(x, dim)
        assert torch.equal(again.view(torch.uint8), codes.view(torch.uint8))
        assert torch.equal(of_again.view(torch.uint8), scale.view(torch.uint8))


@pytest.mark.parametrize(("layout", "dim"), [("row", 1), ("col", 0), ("inner", 0)])
def test_an_encoding_has_a_byte_per_element_and_one_per_block(layout, dim):
    x = sample(70, 45).bfloat16()
    encoded = encode(x, f"mxfp8_{layout}")
    assert torch.equal(decode(encoded), rounded_by_hand(x.float(), dim))
    assert encoded.num_bytes == x.numel() + math.ceil(x.shape[dim] / 32) * x.shape[1 - dim]
    assert encoded.scale.nbytes == scale_bytes(f"mxfp8_{layout}", x.shape)


@pytest.mark.parametrize("shape", [(0, 5), (3, 0), (0,), ()])
def test_what_is_empty_or_a_number_is_encoded(shape):
    x = torch.full(shape, 1.06)
    assert rounding_error(x, "mxfp8_row").shape == shape
    assert (rounding_error(x, "mxfp8_row") != 0).all()
    assert scale_bytes("mxfp8_row", (3, 0)) == scale_bytes("mxfp8_row", (0, 5)) == 0


@pytest.mark.parametrize("type_name", ["mxfp8", "mxfp8_image", "mxfp8_channel", "mxfp4_row"])
def test_an_encoding_that_there_is_not_is_refused(type_name):
    with pytest.raises(UnsupportedError, match=f"'{type_name}' is no encoding: choose one of mxfp8_row"):
        encode(torch.ones(2, 2), type_name)


# --- Products ---

PRODUCTS = {
    "linear": (F.linear, [(13, 37), (11, 37), (11,)]),
    "linear, a batch": (F.linear, [(2, 3, 70), (5, 70)]),
    "addmm": (torch.addmm, [(11,), (40, 37), (37, 11)]),
    "matmul": (torch.matmul, [(3, 7, 37), (3, 37, 5)]),
    "matmul, one for all": (torch.matmul, [(2, 3, 7, 37), (37, 5)]),
}


@pytest.mark.parametrize("name", PRODUCTS)
def test_each_product_rounds_along_what_it_sums(name):
    """Against autograd of the emulated product: the operands of each rounded by hand along its own sum."""
    kind, (target, shapes) = name.split(",")[0], PRODUCTS[name]
    tensors = [sample(*shape, seed=i) for i, shape in enumerate(shapes)]
    first = 1 if kind == "addmm" else 0
    left, right = tensors[first : first + 2]
    bias = tensors[0] if first else tensors[2] if len(tensors) > 2 else torch.zeros(())
    matrix = right.mT if kind == "linear" else right  # (..., K, N)
    x, w = rounded_by_hand(left, -1), rounded_by_hand(matrix, -2)
    expected = x @ w + bias
    g = sample(*expected.shape, seed=9)

    y, *gradients = outcome(reference_kernel(kind, MXFP8), kind, MXFP8, target, tensors, g)
    torch.testing.assert_close(y, expected)

    leaf = left.clone().requires_grad_()
    (dx,) = torch.autograd.grad(leaf @ rounded_by_hand(w, -1), leaf, rounded_by_hand(g, -1))
    leaf, rows, ended = matrix.clone().requires_grad_(), x, g
    if matrix.ndim == 2:
        rows, ended = x.flatten(0, -2), g.flatten(0, -2)
    (dw,) = torch.autograd.grad(rounded_by_hand(rows, -2) @ leaf, leaf, rounded_by_hand(ended, -2))
    torch.testing.assert_close(gradients[first], dx)
    torch.testing.assert_close(gradients[first + 1], dw.mT if kind == "linear" else dw)
    if bias.ndim:
        db = gradients[0 if first else 2]
        torch.testing.assert_close(db, g.sum(0))


@pytest.mark.parametrize(("options", "is_refused"), [({"alpha": 0.5}, True), ({"beta": 0}, False)])
def test_a_scaled_addmm_is_refused_and_one_without_its_first_operand_computed(options, is_refused):
    bias, x, w = torch.full((4,), math.nan), sample(3, 8), sample(8, 4)
    if is_refused:
        with pytest.raises(UnsupportedError, match=r"alpha=0\.5 and beta=1 has no MXFP8 kernel: keep it"):
            call(reference_kernel("addmm", MXFP8), "addmm", MXFP8, torch.addmm, [bias, x, w], **options)
    else:
        y = call(reference_kernel("addmm", MXFP8), "addmm", MXFP8, torch.addmm, [bias, x, w], **options)
        torch.testing.assert_close(y, rounded_by_hand(x, 1) @ rounded_by_hand(w, 0))


@pytest.mark.parametrize("trained", [0, 1])
def test_an_operand_is_saved_only_if_the_other_has_a_gradient(trained):
    tensors = [sample(64, 96, seed=0), sample(32, 96, seed=1)]
    tensors[trained].requires_grad_()
    saved: list[int] = []
    with torch.autograd.graph.saved_tensors_hooks(lambda t: saved.append(t.nbytes) or t, lambda t: t):
        call(reference_kernel("linear", MXFP8), "linear", MXFP8, F.linear, tensors)
    other = tensors[1 - trained]
    assert saved == [other.numel(), other.numel() // 32]


def test_it_cannot_be_differentiated_twice():
    x = sample(3, 8).requires_grad_()
    y = call(reference_kernel("linear", MXFP8), "linear", MXFP8, F.linear, [x, sample(4, 8)])
    with pytest.raises(UnsupportedError, match="differentiated twice"):
        torch.autograd.grad(y.sum(), x, create_graph=True)


# --- A precision like any other ---


class Mixed(nn.Module):
    """Three layers of one input, and a convolution after them."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.q, self.k, self.v = (nn.Linear(80, 48, bias=False) for _ in range(3))
        self.convolution = nn.Conv2d(1, 2, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.convolution((self.q(x) * self.k(x) + self.v(x))[:, None])


def test_a_model_runs_in_it_where_its_kinds_have_it_and_says_why_others_do_not():
    model, x = Mixed(), sample(4, 6, 80)
    expected = model(x)
    error = (qsync.wrap(model, "mxfp8", strict=True)(x) - expected).norm() / expected.norm()
    assert 0.01 < error < 0.1
    rows = {row.runs: row for row in qsync.coverage(model).rows}
    assert set(rows["mxfp8"].operators) == {"q", "k", "v"}
    (kept,) = (row for runs, row in rows.items() if runs != "mxfp8")
    assert kept.because == "conv2d in mxfp8 is not written; torch has no convolution in FP8"


@pytest.mark.parametrize("device", ["cpu", "cuda"])
def test_it_is_profiled_only_if_it_is_named_because_it_is_emulated(device):
    one = DeviceClass("one", device, 1, 1 << 30, tuple(Precision))
    assert MXFP8 not in default_precisions(one)
    assert MXFP8 in precisions_to_profile(one, nn.Linear(2, 2), ["mxfp8"])
    (emulated,) = candidates("linear", MXFP8, CPU)
    assert (emulated.name, emulated.reason) == ("emulated", None)
    assert MXFP8 in device_precisions(CPU)


def test_query_key_and_value_share_one_input_and_save_codes_and_scales_alone():
    class Sums(Mixed):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.q(x) + self.k(x) + self.v(x)

    x = sample(2, 50, 80)
    model = qsync.wrap(Sums(), "mxfp8", strict=True)
    model(x)
    assert saved_by_torch(model, x) == x.numel() + 2 * 50 * 3


def test_the_variance_of_rounding_is_that_of_samples():
    """E4M3's step from 1/2 to 1 is 2^-4, and the error's square 1/12 of its square on average."""
    x = torch.rand(2000, 32, generator=torch.Generator().manual_seed(0)) / 2 + 0.5
    x[:, 0] = 1.0  # the largest of each block: 256 times its scale
    squares = rounding_error(x, "mxfp8_row")[:, 1:].square()
    assert squares.mean().item() == pytest.approx(2.0**-8 / 12, rel=0.05)


def test_the_largest_values_of_a_block_are_cut_to_448_of_its_scale():
    """The specification's scale is a power of two: from 1.75 times one on, the block's largest saturate."""
    x = torch.tensor([[1.74, 1.76, 1.99, -1.99]])
    assert decode(encode(x, "mxfp8_row")).tolist() == [[1.75, 1.75, 1.75, -1.75]]


def test_sensitivity_is_that_of_measured_gradients():
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(64, 128), nn.Tanh(), nn.Linear(128, 96), nn.Tanh(), nn.Linear(96, 10))
    targets = torch.randint(0, 10, (128,))
    data = [torch.randn(128, 64) * torch.rand(128, 1).exp() for _ in range(4)]

    def loss(model: nn.Module, batch: torch.Tensor) -> torch.Tensor:
        return F.cross_entropy(model(batch), targets)

    omega, truth = (
        qsync.sensitivity(model, data, loss, indicator=name, precisions=["mxfp8"]).omega
        for name in ("variance", "empirical")
    )
    for name, modes in truth.items():
        assert omega[name]["mxfp8"] == pytest.approx(modes["mxfp8"], rel=0.5), name


@pytest.mark.parametrize("pays", [True, False])
def test_a_plan_takes_it_where_its_price_pays(pays, tmp_path):
    graph = mlp(width=256, rows=512)
    precisions = (FP32, MXFP8)
    profiles = {
        name: profile_of(graph, name, precisions=precisions, slow=slow, cast_s=1e-12 if pays else 1e-6)
        for name, slow in (("train", 1.0), ("infer", 1.5))
    }
    cluster, sensitivity = cluster_of(precisions=precisions), sensitivity_of(graph)
    plan = allocate(graph, profiles, sensitivity, cluster)
    lowered = set(plan["infer"].assignment.values()) - {FP32}
    assert lowered == ({MXFP8} if pays else set())
    assert check_plan(graph, plan, profiles, sensitivity, cluster).ok
    assert bool(explain(graph, plan, profiles, sensitivity, cluster)) == pays
    assert Plan.load(plan.save(tmp_path / "plan.json")) == plan


def test_only_blackwell_multiplies_it_and_only_when_asked():
    able = {name for name, sheet in DATASHEETS.items() if MXFP8 in sheet.precisions}
    assert able == {"B200", "RTX5090"}
    assert all("fp8" in DATASHEETS[name].flops_per_s for name in able)
    assert why_not_multiplied(MXFP8, (9, 0)) == "needs compute capability 10.0, this GPU has 9.0"
    assert precisions_up(MXFP8, "bf16") == [MXFP8, Precision.BF16, FP32]


def test_a_cluster_file_has_it_where_it_is_named(tmp_path):
    def loaded(card: str, precisions: str = "") -> Cluster:
        classes = f'[[classes]]\nname = "one"\ncount = 1\ndatasheet = "{card}"\n{precisions}\n'
        (tmp_path / "cluster.toml").write_text(classes + "[link]\nlatency_s = 1e-5\nbytes_per_s = 1e10\n")
        return Cluster.load(tmp_path / "cluster.toml")

    assert MXFP8 not in loaded("B200").classes[0].precisions
    named = 'precisions = ["fp32", "mxfp8"]'
    (device_class,) = loaded("B200", named).classes
    assert device_class.precisions == (FP32, MXFP8)
    with pytest.raises(FormatError, match="H100 does not support mxfp8; choose from fp32"):
        loaded("H100", named)
    assert MXFP8 not in next(iter(cards_of("B200").values()))[0].precisions


def test_a_data_sheet_prices_it_at_fp8_s_rate_and_a_cpu_at_fp32_s():
    _, call = next(calls(mlp()))
    blackwell = DATASHEETS["B200"]
    on_cpu = replace(blackwell, capability=None, flops_per_s={"fp32": 1e11, "bf16": 2e11})
    for direction in ("forward", "backward"):
        assert parts(call, "mxfp8", direction, blackwell)[1] == parts(call, "fp8", direction, blackwell)[1]
        assert parts(call, "mxfp8", direction, on_cpu)[1] == parts(call, "fp32", direction, on_cpu)[1]
    with pytest.raises(KeyError, match="fp8"):
        parts(call, "mxfp8", "forward", DATASHEETS["A100"])


def test_a_misspelt_name_lists_it():
    with pytest.raises(FormatError, match="mxfp4.*choose one of fp32, tf32, bf16, fp16, mxfp8, fp8"):
        qsync.wrap(nn.Linear(2, 2), "mxfp4")
