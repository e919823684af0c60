"""A base precision in wrap: bitwise what torch.autocast computes, INT8 above it, and refusals."""

from __future__ import annotations

import copy

import pytest
import torch
from models import build, step
from torch import nn

import qsync
from qsync.errors import FormatError, MismatchError, UnsupportedError
from qsync.operators.precision import Precision
from qsync.records.plans import ClassPlan, Plan
from qsync.runtime.planned_forward import program_of


def in_autocast(model, batch, dtype=torch.bfloat16):
    """The loss and the gradients of one step inside torch.autocast."""
    with torch.autocast("cpu", dtype):
        loss = model(**batch)["loss"]
    loss.backward()
    return loss.detach().float(), [p.grad for p in model.parameters() if p.grad is not None]


class Small(nn.Module):
    """Products, a norm, a softmax, a residual: float outputs and no loss of its own."""

    def __init__(self, attends: bool = True) -> None:
        super().__init__()
        self.attends = attends
        self.table, self.norm = nn.Embedding(50, 32), nn.LayerNorm(32)
        self.attend, self.conv, self.head = nn.MultiheadAttention(32, 4), nn.Conv1d(6, 6, 3), nn.Linear(30, 8)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        x = self.table(ids)
        x = x + (self.attend(*[self.norm(x)] * 3, need_weights=False)[0] if self.attends else self.norm(x))
        return self.head(self.conv(x)).softmax(-1)


def gradients_of(model, ids, autocast: bool):
    model.zero_grad()
    with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
        out = model(ids)
    out.float().square().sum().backward()
    return out.detach().float(), [p.grad for p in model.parameters()]


@pytest.mark.parametrize("around", [False, True])
@pytest.mark.parametrize("attends", [False, True])
def test_the_base_computes_what_autocast_computes(attends, around):
    """Bitwise; attention, of which there are two kernels here, to rounding."""
    torch.manual_seed(0)
    plain, ids = Small(attends), torch.randint(50, (4, 6))
    model = qsync.wrap(copy.deepcopy(plain), base="bf16")
    expected, reference = gradients_of(plain, ids, autocast=True)
    out, found = gradients_of(model, ids, autocast=around)
    torch.testing.assert_close(out, expected, rtol=2e-2 * attends, atol=2e-3 * attends)
    for one, other in zip(found, reference, strict=True):
        if one is not None:
            assert (one - other).norm() <= 0.02 * other.norm() + 1e-6
    graph = program_of(model).graph
    modes = {n.op: n.mode for part in program_of(model).lowered for n in part.nodes if hasattr(n, "op")}
    kinds = {op.kind: modes[op.name] for op in graph.adjustable}
    assert kinds.pop("embedding") == "fp32" and set(kinds.values()) == {"bf16"}
    assert ("attention" in kinds) == attends


class Decoder(nn.Module):
    """A convolution of videos, a transposed one, and a scaled and shifted product of batches."""

    def __init__(self) -> None:
        super().__init__()
        self.volume, self.up = nn.Conv3d(1, 4, (2, 3, 3), padding=(0, 1, 1)), nn.ConvTranspose2d(4, 3, 2, 2)
        self.shift = nn.Parameter(torch.randn(1, 1, 8))

    def forward(self, video: torch.Tensor) -> torch.Tensor:
        images = self.up(self.volume(video).squeeze(2).relu()).flatten(1, 2)
        return self.shift.baddbmm(images, images[:, :16, :8], beta=0.5, alpha=0.25)


def test_products_of_volumes_and_of_batches_are_computed_as_in_autocast():
    torch.manual_seed(0)
    plain, video = Decoder(), torch.randn(2, 1, 2, 8, 8)
    model = qsync.wrap(copy.deepcopy(plain), base="bf16")
    expected, reference = gradients_of(plain, video, autocast=True)
    out, found = gradients_of(model, video, autocast=False)
    assert torch.equal(out, expected)
    for one, other in zip(found, reference, strict=True):
        torch.testing.assert_close(one, other, rtol=0.02, atol=0.02 * float(other.abs().max()))
    modes = {n.op: n.mode for part in program_of(model).lowered for n in part.nodes if hasattr(n, "mode")}
    assert {modes[name] for name in ("volume", "up", "baddbmm")} == {"bf16"}


@pytest.mark.parametrize("family", ["mlp", "bert"])
def test_models_in_the_base_are_as_accurate_as_in_autocast(family):
    model, batch = build(family)
    model.eval()
    exact, _ = step(copy.deepcopy(model), batch)
    cast, _ = in_autocast(copy.deepcopy(model), batch)
    based, _ = step(qsync.wrap(copy.deepcopy(model), base="bf16"), batch)
    assert abs(based - exact) <= 1.5 * abs(cast - exact) + 1e-3


def test_int8_over_a_base_falls_to_the_next_precision_up_and_not_to_the_base():
    torch.manual_seed(0)
    model, ids = qsync.wrap(Small(), "int8_all", base="bf16", strict=True), torch.randint(50, (4, 6))
    model(ids)
    modes = {n.op: n.mode for part in program_of(model).lowered for n in part.nodes if hasattr(n, "op")}
    kinds = {op.name: op.kind for op in program_of(model).graph.adjustable}
    for name, kind in kinds.items():
        assert modes[name] == ("int8_all" if kind == "linear" else "int8"), (name, kind)


def test_autocast_of_another_type_is_refused_whenever_it_is_switched_on():
    model, batch = build("mlp")
    qsync.wrap(model, base="bf16")
    step(model, batch)
    in_autocast(model, batch)
    with pytest.raises(UnsupportedError, match=r"torch.autocast is on in fp16.*base is bf16.*base='fp16'"):
        in_autocast(model, batch, torch.float16)
    step(model, batch)
    qsync.wrap(model, "int8", strict=True)
    with pytest.raises(UnsupportedError, match=r"torch.autocast is on in bf16.*base is fp32.*base='bf16'"):
        in_autocast(model, batch)


def test_bad_bases_are_one_sentence():
    model, batch = build("mlp")
    for base in ("fp16", "tf32"):
        with pytest.raises(UnsupportedError, match=f"no device here has {base} in .* one of fp32, bf16"):
            qsync.wrap(model, base=base)
    with pytest.raises(FormatError, match="int8 is not a base precision"):
        qsync.wrap(model, "int8", base="int8")
    with pytest.raises(FormatError, match="fp32 is not below the base bf16"):
        qsync.wrap(model, "fp32", base="bf16")
    with pytest.raises(FormatError, match="plan must be a qsync.Plan"):
        qsync.wrap(model)
    graph = qsync.capture(model, batch)
    full = ClassPlan(dict.fromkeys((op.name for op in graph.adjustable), Precision.FP32))
    with pytest.raises(
        MismatchError, match="the plan has base fp32, not bf16; leave out base, or plan again"
    ):
        qsync.wrap(model, Plan(graph.model, graph.hash, {"all": full}), base="bf16")
    assert "forward" not in vars(model)


def test_capture_and_sensitivity_inside_autocast_see_the_model_as_it_is():
    model, batch = build("mlp")
    graph, sensitivity = qsync.capture(model, batch), qsync.sensitivity(model, [batch])
    with torch.autocast("cpu", torch.bfloat16):
        assert qsync.capture(model, batch).hash == graph.hash
        assert qsync.sensitivity(model, [batch]).graph_hash == sensitivity.graph_hash
