"""Coverage: one line at the first call, a warning where less is lowered than was asked for."""

from __future__ import annotations

import copy
import warnings

import pytest
import torch
from models import build, step
from torch import nn

import qsync
from qsync.operators.precision import Precision
from qsync.records.plans import ClassPlan, Plan
from qsync.runtime.coverage import Coverage, Row


class Mixed(nn.Module):
    """A large product, and two smaller ones of which one stays as it is."""

    def __init__(self, large: int = 64) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(8, large), nn.Linear(large, 8)
        self.exact = nn.Linear(8, 8).double()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.exact(self.down(self.up(x)).double())


def test_the_first_call_says_what_is_lowered_and_why_the_rest_is_not(capsys):
    model = qsync.wrap(Mixed(), "int8", strict=True)
    for _ in range(2):
        model(torch.randn(4, 8))
    assert capsys.readouterr().err == (
        "qsync: Mixed: 2 of 3 products in int8 (1 fp64, 2 int8); see qsync.coverage(model)\n"
    )
    copy.deepcopy(model)(torch.randn(4, 8))
    assert capsys.readouterr().err == ""  # the same line once
    found = qsync.coverage(model)
    assert (
        capsys.readouterr().out
        == f"{found}\n"
        == (
            "Mixed: 2 of 3 products in int8\n"
            "  2 in int8: up, down\n"
            "  1 in fp64 because the model has it in fp64: exact\n"
        )
    )
    assert found.rows[1].operators == ("exact",) and found.kept == 2


def test_the_first_line_is_short_whatever_the_names():
    rows = (Row("int8", "", ("a",) * 300), Row("fp32", "it is small", ("b",) * 20))
    found = Coverage("M" * 200, 300, "low precision on " + "c" * 50, rows)
    assert len(f"qsync: {found.line}") == 160 and found.line.endswith("...; see qsync.coverage(model)")
    assert "(20 fp32, 300 int8)" in Coverage("Gpt", 300, "low precision on infer", rows).line


def test_what_was_not_called_has_no_coverage():
    with pytest.raises(qsync.QSyncError, match="Mixed was not called yet"):
        qsync.coverage(qsync.wrap(Mixed(), "int8"))
    with pytest.raises(qsync.QSyncError, match="not wrapped"):
        qsync.coverage(Mixed())


def test_less_than_half_of_what_was_asked_for_is_a_warning():
    with pytest.warns(UserWarning, match=r"qsync: Mixed: 2 of 3 products in int8"):
        qsync.wrap(Mixed(large=2), "int8", strict=True)(torch.randn(4, 8))


def test_a_plan_is_counted_by_precision_and_names_its_class(capsys):
    model, batch = build("mlp")
    graph = qsync.capture(model, batch)
    names = [op.name for op in graph.adjustable]
    low = dict(zip(names, (Precision.INT8, *[Precision.FP32] * (len(names) - 1)), strict=True))
    plan = Plan(graph.model, graph.hash, {"infer": ClassPlan(low)})
    step(qsync.wrap(model, plan), batch)
    rest = len(names) - 1
    assert capsys.readouterr().err == (
        f"qsync: {graph.model}: 1 of {len(names)} products in low precision on infer ({rest} fp32, 1 int8); "
        "see qsync.coverage(model)\n"
    )


def test_a_graph_that_the_plan_was_not_made_for_is_a_warning():
    class Switching(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.one, self.two, self.second = nn.Linear(8, 8), nn.Linear(8, 8), False

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.two(x) if self.second else self.one(x)

    model, x = Switching(), torch.randn(4, 8)
    graph = qsync.capture(model, x)
    low = {op.name: Precision.INT8 for op in graph.adjustable}
    qsync.wrap(model, Plan(graph.model, graph.hash, {"infer": ClassPlan(low)}))
    model(x)
    model.second = True
    with pytest.warns(UserWarning, match="Switching: 0 of 1 products in low precision on infer"):
        model(x)
    assert "in fp32 because the plan does not name it: plan again" in str(qsync.coverage(model))


def test_fp32_asks_for_nothing(capsys):
    model, batch = build("mlp")
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        step(qsync.wrap(model, "fp32"), batch)
    assert "products in fp32" in capsys.readouterr().err


def test_only_rank_zero_says_it(capsys, monkeypatch):
    monkeypatch.setenv("RANK", "1")
    model, batch = build("mlp")
    step(qsync.wrap(model, "int8", strict=True), batch)
    assert capsys.readouterr().err == ""


def test_many_products_are_named_by_three_and_tables_are_no_products():
    class Doubles(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.table, self.first = nn.Embedding(9, 8), nn.Linear(8, 8)
            self.rest = nn.ModuleList(nn.Linear(8, 8).double() for _ in range(4))

        def forward(self, ids: torch.Tensor) -> torch.Tensor:
            x = self.first(self.table(ids)).double()
            for layer in self.rest:
                x = layer(x)
            return x

    model = qsync.wrap(Doubles(), "int8", strict=True)
    with pytest.warns(UserWarning, match="Doubles: 1 of 5 products in int8"):
        model(torch.arange(4))
    reason = "4 in fp64 because the model has it in fp64: rest.0, rest.1, rest.2 and 1 more"
    assert reason in str(qsync.coverage(model))


class Untraced(nn.Module):
    """Two layers in a forward that torch.compile is told to leave alone."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(8, 64), nn.Linear(64, 8)

    @torch.compiler.disable
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.down(self.up(x))


class Beside(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.inner, self.last = nn.Linear(8, 8), Untraced(), nn.Linear(8, 8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.last(self.inner(self.first(x)))


def test_layers_outside_of_what_is_traced_are_named(capsys):
    """Where the trace does not break, a layer outside is one that nothing calls."""
    model = qsync.wrap(Beside(), "bf16", strict=True)
    model(torch.randn(4, 8))
    assert "2 of 2 products in bf16, 2 layers outside of the trace; see" in capsys.readouterr().err
    (note,) = qsync.coverage(model).notes
    assert note.startswith(
        "inner.up, inner.down run outside of what torch.compile traces, or not at all: Skip "
    )
    assert "`torch.compiler.disable()`d function" in note

    class Idle(Mixed):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.down(self.up(x))

    capsys.readouterr()
    qsync.wrap(Idle(), "bf16", strict=True)(torch.randn(4, 8))
    assert capsys.readouterr().err == "qsync: Idle: 2 of 2 products in bf16; see qsync.coverage(model)\n"


def test_more_layers_outside_than_products_inside_are_a_warning():
    model = qsync.wrap(nn.Sequential(nn.Linear(8, 8), Untraced()), "bf16", strict=True)
    with pytest.warns(UserWarning, match="1 of 1 products in bf16, 2 layers outside of the trace; see"):
        model(torch.randn(4, 8))
    given_up, outside = qsync.coverage(model).notes
    assert given_up.startswith("of code that torch.compile gives up only layers are lowered: ")
    assert outside == "1.up, 1.down run outside of what torch.compile traces, or not at all"
