"""Embeddings: what is rounded, what is added up, what is kept, and which stay in FP32."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from observing import decibels
from torch import nn

import qsync
from qsync.backend import decode, encode, select
from qsync.experiments.harness.measured_memory import saved_bytes
from qsync.lowering.incremental import lower
from qsync.lowering.lowered_graph import Cast, Run
from qsync.operators.declaration import Role
from qsync.operators.precision import Precision

PLACES = torch.tensor([[0, 3, 3, 1], [7, 3, 0, 2]])


def table(rows: int = 9, width: int = 16) -> torch.Tensor:
    return torch.randn(rows, width, generator=torch.Generator().manual_seed(0)).requires_grad_()


def looked_up(precision: str, weight: torch.Tensor, out_type: str = "bf16", **options) -> torch.Tensor:
    return select("cpu").kernel("embedding", precision)(F.embedding, out_type, PLACES, weight, **options)


class Model(nn.Module):
    """Two embeddings, their norm and a head; which embeddings is a test's business."""

    def __init__(self, make=nn.Embedding, tied: bool = False, **options) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.tokens, self.places = make(9, 16, **options), nn.Embedding(4, 16)
        self.norm, self.fc, self.head = nn.LayerNorm(16), nn.Linear(16, 16), nn.Linear(16, 9, bias=False)
        if tied:
            self.head.weight = self.tokens.weight

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        x = self.norm(self.tokens(ids) + self.places(torch.arange(4)))
        return self.head(self.fc(x)).square().mean()


def gradients(model: nn.Module) -> dict[str, torch.Tensor]:
    model.zero_grad()
    model(PLACES).backward()
    return {name: p.grad.clone() for name, p in model.named_parameters()}


# --- The kernels ---


def test_the_rows_that_are_looked_up_are_rounded():
    rows = F.embedding(PLACES, table()).detach()
    assert torch.equal(looked_up("bf16", table()), rows.bfloat16())
    assert torch.equal(looked_up("int8", table(), "fp32"), decode(encode(rows, "int8_row")))
    assert torch.equal(looked_up("int8", table()), decode(encode(rows, "int8_row")).bfloat16())


@pytest.mark.parametrize("precision", ["bf16", "int8"])
def test_no_pass_is_made_over_the_whole_table(precision):
    """Every tensor that is made is of the size of the lookups."""
    from torch.utils._python_dispatch import TorchDispatchMode

    made = []

    class Sizes(TorchDispatchMode):
        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            result = func(*args, **(kwargs or {}))
            if isinstance(result, torch.Tensor):
                made.append(result.numel())
            return result

    large = table(rows=5000)
    with Sizes():
        looked_up(precision, large)
    assert made and max(made) <= PLACES.numel() * 16


@pytest.mark.parametrize("precision", ["bf16", "int8"])
def test_gradients_of_one_row_add_up_in_fp32(precision):
    """A thousand ones are a thousand; in BF16 they would be 256."""
    weight = table()
    kernel = select("cpu").kernel("embedding", precision)
    y = kernel(F.embedding, "bf16", torch.full((1000,), 3), weight)
    y.backward(torch.ones_like(y))
    assert weight.grad.dtype is torch.float32
    assert torch.equal(weight.grad[3], torch.full((16,), 1000.0)) and not weight.grad[2].any()


@pytest.mark.parametrize("precision", ["bf16", "int8"])
def test_nothing_but_indices_is_kept(precision):
    weight = table()
    assert saved_bytes(lambda: looked_up(precision, weight), [weight]) == 8 * PLACES.numel()


# --- In a model ---


@pytest.mark.parametrize("precision", ["bf16", "int8"])
def test_what_follows_runs_in_the_type_that_embeddings_hand_on(precision):
    """INT8 hands on 16 bits where a sum of such values, and what follows it, is cast to 16 bits anyway."""
    graph = qsync.capture(Model(), PLACES)
    assignment = dict.fromkeys((op.name for op in graph.adjustable), Precision(precision))
    lowered = lower(graph, assignment)
    modes = {node.op: node.mode for node in lowered.nodes if isinstance(node, Run)}
    assert modes["tokens.embedding"] == modes["places.embedding"] == precision
    assert modes["add"] == modes["norm.layer_norm"] == "bf16"
    assert not [n for n in lowered.nodes if isinstance(n, Cast) and n.value.startswith(("tokens", "places"))]


@pytest.mark.parametrize("precision", ["bf16", "int8"])
@pytest.mark.parametrize("options", [{}, {"tied": True}, {"padding_idx": 3}, {"scale_grad_by_freq": True}])
def test_gradients_are_those_of_fp32_but_for_rounding(precision, options):
    expected = gradients(Model(**options))
    got = gradients(qsync.wrap(Model(**options), precision, strict=True))
    assert got.keys() == expected.keys()
    for name in expected:
        assert got[name].dtype is torch.float32
        assert decibels({name: got[name]}, {name: expected[name]}) > 25, name
    if "padding_idx" in options:
        assert not got["tokens.weight"][3].any()


def test_a_cast_of_a_table_that_a_head_shares_stands_before_the_head():
    """Where its gradient is ready first; the embedding, at the start, reads the table itself."""
    lowered = lower(qsync.capture(Model(tied=True), PLACES), {"head": Precision.BF16})
    order = [node.value if isinstance(node, Cast) else node.op for node in lowered.nodes]
    assert order.index("tokens.weight") == order.index("head") - 1


def test_a_gradient_that_is_sparse_and_a_table_that_is_written_to_stay_in_fp32():
    for options, reason in (({"max_norm": 1.0}, "writes to its table"), ({"sparse": True}, "is sparse")):
        graph = qsync.capture(Model(**options), PLACES)
        ops = {op.name: op for op in graph.ops}
        assert ops["tokens.embedding"].role is Role.FIXED and reason in ops["tokens.embedding"].fixed_because
        assert ops["places.embedding"].role is Role.ADJUSTABLE
        plain, wrapped = Model(**options), qsync.wrap(Model(**options), "bf16", strict=True)
        for model in (plain, wrapped):
            model(PLACES).backward()
        assert torch.equal(plain.tokens.weight, wrapped.tokens.weight)
        assert wrapped.tokens.weight.grad.is_sparse == plain.tokens.weight.grad.is_sparse


def test_torch_embedding_has_its_arguments_elsewhere_and_stays_in_fp32():
    class Direct(nn.Embedding):
        def forward(self, ids: torch.Tensor) -> torch.Tensor:
            return torch.embedding(self.weight, ids)

    graph = qsync.capture(Model(Direct), PLACES)
    op = next(op for op in graph.ops if op.name.startswith("tokens"))
    assert op.role is Role.FIXED and "torch.nn.functional.embedding" in op.fixed_because
