"""Products of experts: groups of rows, each times a weight of its own, as transformers calls them."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

import qsync
from qsync import Precision
from qsync.backend.kernels.grouped_matmul import BLOCK_ROWS, grouped_mm_bf16, grouped_mm_fp32
from qsync.errors import UnsupportedError
from qsync.runtime import operator_timing
from qsync.runtime.planned_forward import program_of
from tests.support.kernel_calls import agreement_db

pytest.importorskip("transformers.integrations.moe")
X = torch.randn(12, 8, generator=torch.Generator().manual_seed(1))
OFFSETS = torch.tensor([5, 5, 9, 12], dtype=torch.int32)  # the second expert gets no row


class Experts(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.weight, self.fc = nn.Parameter(torch.randn(4, 16, 8)), nn.Linear(16, 3)

    def forward(self, x: torch.Tensor, offsets: torch.Tensor) -> torch.Tensor:
        grouped = torch.ops.transformers.grouped_mm_fallback
        return self.fc(grouped(x, self.weight.transpose(-2, -1), offs=offsets).relu())


def step(model, offsets=OFFSETS):
    x = X.clone().requires_grad_()
    y = model(x, offsets)
    y.square().sum().backward()
    return [y.detach(), x.grad, *(parameter.grad for parameter in model.parameters())]


def test_groups_run_in_fp32_as_torch_runs_them_and_in_bf16():
    expected = step(Experts())
    assert all(map(torch.equal, step(qsync.wrap(Experts(), "fp32", bitwise=True)), expected))
    low = qsync.wrap(Experts(), "bf16", strict=True)
    found = step(low)
    assert all(agreement_db(a, b) > 30 for a, b in zip(found, expected, strict=True))
    assert program_of(low).assignment() == {"grouped_mm": Precision.BF16, "fc": Precision.BF16}
    assert not found[2][1].any()  # the gradient of the expert without rows
    fast = step(qsync.wrap(Experts(), "fp32"))
    assert all(torch.allclose(a, b, 1e-4, 1e-4) for a, b in zip(fast, expected, strict=True))
    # Other groups of the same rows: the offsets are read at every call.
    other = torch.tensor([0, 12, 12, 12], dtype=torch.int32)
    for parameter in low.parameters():
        parameter.grad = None
    assert all(agreement_db(a, b) > 30 for a, b in zip(step(low, other), step(Experts(), other), strict=True))


def test_the_rows_of_all_groups_are_counted_once():
    (op,) = (op for op in qsync.capture(Experts(), (X, OFFSETS)).ops if op.kind == "grouped_mm")
    assert op.flops == 2 * 12 * 8 * 16
    assert [name.partition(":")[0] for name in op.kept] == ["input"]


def test_groups_that_are_timed_alone_have_rows(monkeypatch):
    seen = []

    def fastest(runs, *_):
        for run in runs:
            run()
        return 0

    def taken(value, num_rows, device):
        seen.append((value.kind, made(value, num_rows, device)))
        return seen[-1][1]

    made = operator_timing._Value.made
    monkeypatch.setattr(operator_timing._Value, "made", taken)
    monkeypatch.setattr(operator_timing, "fastest", fastest)
    monkeypatch.setattr(operator_timing, "known_choices", lambda *_: Undecided())
    step(qsync.wrap(copy.deepcopy(Experts()), "bf16"))
    assert {tuple(value.tolist()) for kind, value in seen if kind == "offsets"} == {(3, 6, 9, 12)}


def test_any_groups_are_multiplied_in_blocks_of_rows():
    """A product of another number of rows is slow in oneDNN, once for each number."""
    target = torch.ops.transformers.grouped_mm_fallback
    generator = torch.Generator().manual_seed(0)
    rows, weight = torch.randn(100, 8, generator=generator), torch.randn(5, 16, 8, generator=generator)
    rows, weight = rows.bfloat16().requires_grad_(), weight.bfloat16().mT.requires_grad_()
    for offsets in ([7, 7, 60, 61, 95], [0, 0, 0, 0, 100], [32, 64, 64, 96, 100], [0] * 5):
        offs = torch.tensor(offsets)
        expected = target(rows, weight, offs=offs)
        gradient = torch.randn(expected.shape, generator=generator).bfloat16()
        with _Products() as products:
            y = grouped_mm_bf16(target, "bf16", rows, weight, offs=offs)
            found = [y, *torch.autograd.grad(y, (rows, weight), gradient)]
        expected = [expected, *torch.autograd.grad(expected, (rows, weight), gradient)]
        assert all(torch.allclose(a, b, 1e-2, 1e-2) for a, b in zip(found, expected, strict=True))
        assert found[2].stride() == weight.stride()
        assert products.sizes and all(size % BLOCK_ROWS == 0 for size in products.sizes - {8, 16})
    (d_weight,) = torch.autograd.grad(
        grouped_mm_bf16(target, "fp32", rows.detach(), weight, offs=offs).sum(), (weight,)
    )
    assert not d_weight.any()


@pytest.mark.parametrize("ends", [[7, 7, 60, 61, 95], [0, 0, 0, 0, 100], [0] * 5])
def test_groups_in_fp32_are_the_products_of_the_call(ends):
    target, generator = torch.ops.transformers.grouped_mm_fallback, torch.Generator().manual_seed(0)
    rows = torch.randn(100, 8, generator=generator).requires_grad_()
    weight = torch.randn(5, 16, 8, generator=generator).mT.requires_grad_()
    gradient, offs = torch.randn(100, 16, generator=generator), torch.tensor(ends)
    y = grouped_mm_fp32(target, "fp32", rows, weight, offs=offs)
    found = [y, *torch.autograd.grad(y, (rows, weight), gradient)]
    expected = target(rows, weight, offs=offs)
    expected = [expected, *torch.autograd.grad(expected, (rows, weight), gradient)]
    for one, other in zip(found, expected, strict=True):
        torch.testing.assert_close(one, other)
    assert found[2].stride() == weight.stride()
    assert grouped_mm_fp32(target, "bf16", rows, weight, offs=offs).dtype == torch.bfloat16


class _Products(TorchDispatchMode):
    """The sizes of the products that run."""

    def __init__(self):
        super().__init__()
        self.sizes: set[int] = set()

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if func in (torch.ops.aten.mm.default, torch.ops.aten.mm.out):
            self.sizes |= {size for one in args[:2] for size in one.shape}
        return func(*args, **kwargs or {})


def test_exported_groups_are_those_of_the_call():
    low = qsync.wrap(Experts(), "bf16", strict=True)
    step(low)
    program = torch.export.export(low, (X.clone().requires_grad_(), OFFSETS)).module()
    other = torch.tensor([2, 6, 6, 12], dtype=torch.int32)
    for parameter in low.parameters():
        parameter.grad = None
    expected = step(low, other)
    assert all(map(torch.equal, step(program, other), expected))
    without = torch.export.export(low, (X, OFFSETS)).module()
    with pytest.raises(UnsupportedError, match="traced without the gradients"):
        step(without)


class Undecided:
    def get(self, key, num_choices):
        return None

    def decided(self, key, num_choices, trial):
        return trial()


def test_the_sensitivity_of_groups_is_near_what_is_measured():
    def of(indicator):
        loss_fn = lambda model, batch: model(*batch).square().mean()  # noqa: E731
        batches = [(X, OFFSETS)]
        found = qsync.sensitivity(Experts(), batches, loss_fn, indicator=indicator, precisions=["bf16"])
        return found.omega["grouped_mm"]["bf16"]

    assert 0.2 < of("variance") / of("empirical") < 5
