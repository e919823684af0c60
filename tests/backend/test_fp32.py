"""FP32: every kernel that may be chosen against torch's own, and the choice, which is by time."""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from types import SimpleNamespace

import pytest
import torch
from torch.nn import functional as F

import qsync
from qsync import Cluster, Link, Plan
from qsync.allocator import uniform
from qsync.backend import shape_choices
from qsync.backend.devices import kernel_timing
from qsync.backend.devices.device_detection import detect_class
from qsync.backend.kernel_cache import Choices
from qsync.backend.kernels import fp32
from qsync.backend.kernels.fp32 import addmm_fp32, conv2d_fp32, linear_fp32, matmul_fp32, multiply
from qsync.errors import MismatchError

pytestmark = pytest.mark.filterwarnings("ignore:Using padding='same' with even kernel lengths:UserWarning")
LAST = torch.channels_last
CALLS = {
    "linear": (linear_fp32, F.linear, [(4, 9, 65), (33, 65), (33,)], {}),
    "linear without bias": (linear_fp32, F.linear, [(7, 65), (33, 65)], {}),
    "linear, a bias per row": (linear_fp32, F.linear, [(7, 65), (33, 65), (7, 1)], {}),
    "linear, a bias per element": (linear_fp32, F.linear, [(7, 65), (33, 65), (7, 33)], {}),
    "linear of a batch, a bias per row": (linear_fp32, F.linear, [(2, 7, 65), (33, 65), (7, 33)], {}),
    "linear, one bias": (linear_fp32, F.linear, [(7, 65), (33, 65), (1,)], {}),
    "addmm": (addmm_fp32, torch.addmm, [(33,), (7, 65), (65, 33)], {}),
    "addmm, a bias per row": (addmm_fp32, torch.addmm, [(7, 1), (7, 65), (65, 33)], {}),
    "addmm, scaled": (addmm_fp32, torch.addmm, [(33,), (7, 65), (65, 33)], {"alpha": 0.5, "beta": 2}),
    "matmul": (matmul_fp32, torch.matmul, [(2, 3, 7, 65), (2, 3, 65, 33)], {}),
    "matmul of one matrix": (matmul_fp32, torch.matmul, [(2, 7, 65), (65, 33)], {}),
    "matmul, broadcast": (matmul_fp32, torch.matmul, [(2, 1, 7, 65), (3, 65, 33)], {}),
    "conv2d": (conv2d_fp32, torch.conv2d, [(2, 5, 9, 8), (7, 5, 3, 3), (7,)], {"padding": 1}),
    "conv2d, strided": (
        conv2d_fp32, torch.conv2d, [(2, 6, 9, 9), (8, 3, 3, 3)], {"stride": 2, "groups": 2},
    ),
    "conv2d, padded unevenly": (
        conv2d_fp32, torch.conv2d, [(2, 6, 9, 8), (8, 6, 4, 2), (8,)], {"padding": "same"},
    ),
}  # fmt: skip


@pytest.fixture(autouse=True)
def small(monkeypatch):
    """Let the kernels compute products of any size."""
    monkeypatch.setattr(fp32, "_MIN_MULTIPLIES", 1)


@pytest.fixture(params=[0, 1], ids=["torch's", "the other"])
def chosen(request, monkeypatch):
    """Let every product run the kernel of this number, whatever it takes."""
    chosen = SimpleNamespace(get=lambda *_: request.param, decided=lambda *_: request.param)
    monkeypatch.setattr(shape_choices, "choices", lambda: chosen)
    return request.param


def draw(*shape):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(sum(shape)))


def outcome(call, tensors):
    leaves = [t.detach().requires_grad_() for t in tensors]
    y = call(*leaves)
    return [y, *torch.autograd.grad(y, leaves, draw(*y.shape))]


def relative_error(got, expected):
    return ((got.double() - expected.double()).norm() / expected.double().norm()).item()


@pytest.mark.parametrize("name", CALLS)
def test_every_kernel_is_torchs_fp32_but_for_rounding(name, chosen):
    kernel, target, shapes, options = CALLS[name]
    tensors = [draw(*shape) for shape in shapes]
    got = outcome(lambda *leaves: kernel(target, "fp32", *leaves, **options), tensors)
    exact = outcome(lambda *leaves: target(*leaves, **options), [t.double() for t in tensors])
    for a, b in zip(got, exact, strict=True):
        assert a.shape == b.shape and a.dtype is torch.float32
        assert relative_error(a, b) <= 1e-6


@pytest.mark.parametrize(
    ("a", "b", "bias"),
    [
        (draw(65, 7).t(), draw(33, 65).t(), draw(66)[::2]),
        (draw(1, 65).expand(7, 65), draw(65, 66)[:, ::2], draw(1).expand(33)),
        (draw(14, 130)[::2, 3:68], draw(65, 1).expand(65, 33), None),
        (draw(1, 65).as_strided((1, 65), (1, 1)), draw(65, 1).t().t(), draw(1)),
    ],
    ids=["transposed", "expanded", "sliced", "of one row"],
)
def test_strides_are_free(chosen, a, b, bias):
    exact = a.double() @ b.double() + (0 if bias is None else bias.double())
    assert relative_error(multiply(a, b, bias), exact) <= 1e-6


@pytest.mark.parametrize("channels", [5, 1])
@pytest.mark.parametrize("filters", [7, 1])
def test_images_lie_as_torch_leaves_them_and_gradients_return_in_their_own(chosen, channels, filters):
    for order in (torch.contiguous_format, LAST):
        x = draw(2, channels, 9, 8).contiguous(memory_format=order).requires_grad_()
        weight = draw(filters, channels, 3, 3).requires_grad_()
        y = conv2d_fp32(torch.conv2d, "fp32", x, weight)
        assert y.stride() == torch.conv2d(x, weight).stride() and not y._is_view()
        inner = torch.autograd.grad(y, [x, weight], draw(*y.shape))
        assert inner[0].stride() == x.stride() and (inner[1].stride() == weight.stride() or not chosen)


@pytest.mark.parametrize("name", [name for name in CALLS if "scaled" not in name and "broadcast" not in name])
def test_gradients_can_be_differentiated_and_many_computed_at_once(name, chosen):
    kernel, target, shapes, options = CALLS[name]
    found = []
    for call in (partial(kernel, target, "fp32"), target):
        leaves = [draw(*shape).requires_grad_() for shape in shapes]
        y = call(*leaves, **options)
        many = torch.autograd.grad(y, leaves, draw(3, *y.shape), retain_graph=True, is_grads_batched=True)
        first = torch.autograd.grad(y, leaves, draw(*y.shape), create_graph=True)
        squares = sum(g.square().sum() for g in first)
        found.append([*many, *torch.autograd.grad(squares, leaves[-2:] if "addmm" in name else leaves[:2])])
    for a, b in zip(*found, strict=True):
        assert relative_error(a, b) <= 1e-5


@pytest.mark.parametrize("order", [torch.contiguous_format, LAST])
def test_the_gradient_of_a_pointwise_weight_has_its_strides(chosen, order):
    """Both orders describe it; DDP's buckets have the parameter's own strides."""
    weight = draw(7, 5, 1, 1).to(memory_format=order).requires_grad_()
    x = draw(2, 5, 9, 8).contiguous(memory_format=LAST)
    y = conv2d_fp32(torch.conv2d, "fp32", x, weight)
    (dw,) = torch.autograd.grad(y, weight, draw(*y.shape))
    assert dw.stride() == weight.stride()
    exact = torch.einsum("ncij,noij->oc", x.double(), draw(*y.shape).double())
    assert relative_error(dw[:, :, 0, 0], exact) <= 1e-6


@pytest.fixture
def machine(tmp_path, monkeypatch):
    """A machine on which nothing was chosen yet; the call returns a later process's choices there."""
    monkeypatch.setenv("QSYNC_CACHE_DIR", str(tmp_path))

    def begin():
        choices = Choices("shapes", {})
        monkeypatch.setattr(shape_choices, "choices", lambda: choices)
        return choices

    begin()
    return begin


def test_each_shape_is_timed_once_and_the_faster_kernel_runs(monkeypatch, machine):
    now, ran = [0.0], []

    def kernel(name, seconds):
        def run(a, b, bias):
            now[0] += seconds(a.shape[0])
            ran.append(name)
            return a @ b

        return run

    monkeypatch.setattr(kernel_timing.time, "perf_counter", lambda: now[0])
    monkeypatch.setattr(fp32, "_by_torch", kernel("torch", lambda rows: 0.001 * rows))
    monkeypatch.setattr(fp32, "_by_onednn", kernel("onednn", lambda rows: 0.004))
    for rows, expected in ((2, "torch"), (5, "onednn"), (8, "onednn")):
        multiply(draw(rows, 3), draw(3, 2))
        assert ran[-1] == expected and set(ran) == {"torch", "onednn"}
        ran.clear()
        multiply(draw(rows, 3), draw(3, 2))
        assert ran == [expected]
        ran.clear()
        machine()  # a later process
        multiply(draw(rows, 3), draw(3, 2))
        assert ran == [expected]
        ran.clear()


def test_torchs_kernel_is_left_for_one_that_takes_a_tenth_less(monkeypatch, machine):
    now = [0.0]

    def taking(seconds):
        def run():
            now[0] += seconds

        return run

    monkeypatch.setattr(kernel_timing.time, "perf_counter", lambda: now[0])
    runs = [taking(1.09), taking(1.0)], [taking(1.11), taking(1.0)]
    assert [shape_choices.choose(("a", k), pair) for k, pair in enumerate(runs)] == [0, 1]


def test_sequences_of_similar_length_share_a_choice(tmp_path, machine):
    for rows in range(65, 81):
        multiply(draw(rows, 24), draw(24, 8))
    (kept,) = tmp_path.glob("kernels/shapes-*.jsonl")
    assert len(kept.read_text().splitlines()) == 1


def test_a_choice_cut_short_is_none_and_the_first_of_two_counts(tmp_path, machine):
    machine().keep("a", 1)
    (kept,) = tmp_path.glob("kernels/shapes-*.jsonl")
    kept.write_text(kept.read_text() + '["a", 0]\n["b", 1]\n["c", ')
    found = machine()
    assert [found.get(key, 2) for key in "abc"] == [1, 1, None]


def test_lines_of_a_damaged_disk_are_no_choices(tmp_path, machine):
    machine().keep("a", 1)
    (kept,) = tmp_path.glob("kernels/shapes-*.jsonl")
    flipped = b'["b", 1]'.replace(b"b", b"\xe2")
    lines = b'5\nnull\n["b", null]\n["b", -1]\n["b", true]\n["b", 1.0]\n["b", 1, 1]\n[["b"], 1]\n["b", 2]'
    kept.write_bytes(b"\n".join((b"\0" * 9, b"[" * 10**5, flipped, lines, kept.read_bytes())))
    assert [machine().get(key, 2) for key in "ab"] == [1, None]
    assert machine().decided("b", 2, lambda: 0) == 0
    assert machine().get("b", 2) == 0  # the first line of a number that can be


def test_a_folder_that_cannot_be_written_keeps_nothing(tmp_path, monkeypatch):
    (tmp_path / "kernels").write_text("a file")
    monkeypatch.setenv("QSYNC_CACHE_DIR", str(tmp_path))
    choices = Choices("shapes", {})
    choices.keep("a", 1)
    assert choices.get("a", 2) == 1 and Choices("shapes", {}).get("a", 2) is None


class Net(torch.nn.Sequential):
    def __init__(self):
        torch.manual_seed(0)
        super().__init__(
            torch.nn.Conv2d(3, 8, 3, padding=1), torch.nn.BatchNorm2d(8), torch.nn.ReLU(),
            torch.nn.Conv2d(8, 8, 3, stride=2), torch.nn.Flatten(), torch.nn.Linear(8 * 49, 10),
        )  # fmt: skip


IMAGES = draw(4, 3, 16, 16)


def step(model):
    loss = F.cross_entropy(model(IMAGES), torch.arange(4))
    loss.backward()
    return loss, [p.grad for p in model.parameters()]


@pytest.fixture
def ran(monkeypatch):
    """The sizes of the products that oneDNN has multiplied."""
    found, run = [], fp32._by_onednn
    monkeypatch.setattr(fp32, "_by_onednn", lambda a, *rest: found.append(a.shape) or run(a, *rest))
    return found


@pytest.mark.parametrize("bitwise", [False, True])
def test_a_model_runs_the_kernels_that_were_chosen_unless_it_is_to_be_torchs_to_the_bit(chosen, ran, bitwise):
    expected, gradients = step(Net())
    loss, found = step(qsync.wrap(Net(), "fp32", bitwise=bitwise))
    assert bool(ran) is bool(chosen and not bitwise)
    assert torch.equal(loss, expected) or (chosen and not bitwise)
    assert loss.item() == pytest.approx(expected.item(), rel=1e-5)
    for (name, _), a, b in zip(Net().named_parameters(), gradients, found, strict=True):
        # Batch norm subtracts the bias before it, whose gradient is rounding alone.
        assert torch.equal(a, b) or (not bitwise and (name == "0.bias" or relative_error(b, a) <= 1e-5))
        assert a.stride() == b.stride()


@pytest.mark.parametrize("bitwise", [False, True])
def test_a_plan_runs_fp32_as_its_profile_was_measured(chosen, ran, bitwise):
    own = replace(detect_class(torch.device("cpu")), name="here")
    profile = qsync.profile(
        Net(), IMAGES, lambda model, x: model(x).sum(), device_class=own, precisions=["fp32"], rounds=1,
        bitwise=bitwise,
    )  # fmt: skip
    graph, cluster = qsync.capture(Net(), IMAGES), Cluster((own,), Link(0.0, 1e9))
    plan = Plan.from_json(uniform(graph, {"here": profile}, cluster, {}).to_json())
    ran.clear()
    step(qsync.wrap(Net(), plan))
    assert bool(ran) is bool(chosen and not bitwise)
    with pytest.raises(MismatchError, match="the plan and the profile of here differ in bitwise"):
        qsync.replay(graph, plan, {"here": replace(profile, bitwise=not bitwise)}, cluster)
    if not bitwise:
        with pytest.raises(MismatchError, match="the plan runs FP32 by the fastest kernels on here"):
            qsync.wrap(Net(), plan, bitwise=True)


def test_products_too_small_to_gain_are_torchs(monkeypatch, machine):
    monkeypatch.setattr(fp32, "_MIN_MULTIPLIES", 7 * 65 * 33)
    monkeypatch.setattr(fp32, "multiply", None)  # an error if it is called
    x, weight = draw(6, 65), draw(33, 65)
    assert torch.equal(linear_fp32(F.linear, "fp32", x, weight), F.linear(x, weight))
    with pytest.raises(TypeError):
        linear_fp32(F.linear, "fp32", draw(7, 65), weight)
