"""torch's own transformers under a padding mask: one traced graph, in FP32 bitwise the model's own."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import nn

import qsync
from qsync.runtime.planned_forward import program_of

WIDTH, HEADS, LENGTH = 32, 4, 12


class Padded(nn.Module):
    """A transformer over sequences (samples, positions) whose zeros are padding."""

    def __init__(self, form: str, mask_type: str = "bool") -> None:
        super().__init__()
        self.form, self.mask_type = form, mask_type
        self.table, self.head = nn.Embedding(50, WIDTH), nn.Linear(WIDTH, 8)
        in_order = form != "encoder, positions first"
        layer = {"nhead": HEADS, "dim_feedforward": 48, "dropout": 0.0, "batch_first": in_order}
        if form.startswith("encoder"):
            layers = nn.TransformerEncoderLayer(WIDTH, norm_first=form == "encoder, norms first", **layer)
            self.inside = nn.TransformerEncoder(layers, 2, enable_nested_tensor=False)
        elif form == "both":
            self.inside = nn.Transformer(WIDTH, num_encoder_layers=1, num_decoder_layers=1, **layer)
        else:
            self.inside = nn.MultiheadAttention(WIDTH, HEADS, batch_first=True)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        mask, x = ids == 0, self.table(ids)
        if self.mask_type == "float":
            mask = torch.zeros(mask.shape).masked_fill(mask, float("-inf"))
        if self.form == "encoder, positions first":
            y = self.inside(x.transpose(0, 1), src_key_padding_mask=mask).transpose(0, 1)
        elif self.form.startswith("encoder"):
            y = self.inside(x, src_key_padding_mask=mask)
        elif self.form == "both":
            y = self.inside(
                x, x, src_key_padding_mask=mask, tgt_key_padding_mask=mask, memory_key_padding_mask=mask
            )
        else:
            y = self.inside(x, x, x, key_padding_mask=mask, need_weights=self.form == "weights")[0]
        return self.head(y)


def padded(num: int, length: int = LENGTH) -> torch.Tensor:
    ids = torch.randint(1, 50, (num, length))
    ids[::2, length // 2 :] = 0
    return ids


FORMS = ("encoder", "encoder, norms first", "encoder, positions first", "both", "attention", "weights")


@pytest.mark.parametrize("mask_type", ["bool", "float"])
@pytest.mark.parametrize("form", FORMS)
def test_a_padding_mask_breaks_no_graph(form, mask_type):
    torch.manual_seed(0)
    graph = qsync.capture(Padded(form, mask_type), padded(4))
    assert sum(op.kind == "output" for op in graph.ops) == 1
    products = [op for op in graph.ops if op.kind in ("linear", "attention", "matmul", "baddbmm")]
    attends = {"both": 3}.get(form, 2 if form.startswith("encoder") else 1)
    assert sum(op.kind in ("attention", "matmul") for op in products) == attends
    assert all(op.name in {o.name for o in graph.adjustable} for op in products if op.kind == "linear")


@pytest.mark.parametrize("form", FORMS)
def test_in_fp32_it_is_bitwise_the_model_s_own(form):
    torch.manual_seed(0)
    plain, ids = Padded(form), padded(4)
    model = qsync.wrap(copy.deepcopy(plain), "fp32", bitwise=True)
    for ids in (padded(4), padded(3), padded(4, 9), padded(5, 7)):  # the last ones by dynamic shapes
        results = []
        for one in (plain, model):
            one.zero_grad()
            y = one(ids)
            y.square().sum().backward()
            results.append((y, *(p.grad for p in one.parameters())))
        for a, b in zip(*results, strict=True):
            torch.testing.assert_close(a, b, rtol=0, atol=0)


@pytest.mark.parametrize("precision", ["bf16", "int8"])
def test_in_low_precision_every_projection_is_lowered(precision):
    torch.manual_seed(0)
    plain, ids = Padded("encoder"), padded(4)
    model = qsync.wrap(copy.deepcopy(plain), precision, strict=True)
    y, expected = model(ids), plain(ids)
    ran = program_of(model).assignment()
    assert sum(str(p) == precision for op, p in ran.items() if "inside" in op) >= 8
    assert 0 < (y - expected).norm() / expected.norm() < 0.1


@pytest.mark.parametrize("warm", [False, True])
def test_a_mask_of_another_shape_is_named(warm):
    """At the first call, and where the shapes that came before were traced."""

    class Wrong(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.attend, self.head = (
                nn.MultiheadAttention(WIDTH, HEADS, batch_first=True),
                nn.Linear(WIDTH, 8),
            )

        def forward(self, x: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
            return self.head(self.attend(x, x, x, key_padding_mask=mask, need_weights=False)[0])

    model = qsync.wrap(Wrong(), "bf16", strict=True)
    for num in (4, 3, 5) if warm else ():
        model(torch.randn(num, LENGTH, WIDTH), torch.zeros(num, LENGTH, dtype=torch.bool))
    with pytest.raises(AssertionError, match=r"key_padding_mask has shape \(4, 13\); give one of \(4, 12\)"):
        model(torch.randn(4, LENGTH, WIDTH), torch.zeros(4, LENGTH + 1, dtype=torch.bool))
