"""A wrapped model inside torch.export and torch.compile(fullgraph=True): the same numbers."""

from __future__ import annotations

import subprocess
import sys

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch._dynamo.utils import counters
from torch.utils.checkpoint import checkpoint

import qsync
from qsync.errors import MismatchError, UnsupportedError
from qsync.operators.precision import Precision
from qsync.records.plans import ClassPlan, Plan


class Mixed(nn.Module):
    """Every kind of product, a batch norm, dropout, and a result that is a dict."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding, self.image = nn.Embedding(50, 32), nn.Linear(128, 32)
        self.convolution, self.norm2d = nn.Conv2d(3, 8, 3, padding=1, stride=2), nn.BatchNorm2d(8)
        self.qkv, self.out, self.norm = nn.Linear(32, 96), nn.Linear(32, 32), nn.LayerNorm(32)
        self.mlp = nn.Sequential(nn.Linear(32, 64), nn.GELU(), nn.Dropout(0.1), nn.Linear(64, 32))

    def forward(self, tokens, images=None):
        x = self.embedding(tokens)
        if images is not None:
            x = x + self.image(F.relu(self.norm2d(self.convolution(images))).flatten(1))[:, None]
        rows, length, width = x.shape
        q, k, v = self.qkv(self.norm(x)).view(rows, length, 3, 2, 16).permute(2, 0, 3, 1, 4).unbind(0)
        heads = F.scaled_dot_product_attention(q, k, v).transpose(1, 2).reshape(rows, length, width)
        x = x + self.out(heads)
        x = x + torch.matmul(0.1 * torch.matmul(x, x.mT), x)
        return {"y": x + self.mlp(self.norm(x)), "rows": rows}


def mixed(precision: str = "int8", **options) -> Mixed:
    torch.manual_seed(0)
    return qsync.wrap(Mixed(), precision, strict=True, **options)


def batch() -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(0)
    tokens = torch.randint(50, (4, 6), generator=generator)
    return tokens, torch.randn(4, 3, 8, 8, generator=generator)


def step(run, model: nn.Module) -> dict[str, torch.Tensor]:
    """Return the result, the gradients and the buffers of a step."""
    torch.manual_seed(1)
    y = run(*batch())["y"]
    torch.manual_seed(2)  # of gradients that are rounded at random
    y.square().mean().backward()
    gradients = {name: parameter.grad for name, parameter in model.named_parameters()}
    return {"y": y.detach(), **gradients, **dict(model.named_buffers())}


def assert_equal(found: dict[str, torch.Tensor], expected: dict[str, torch.Tensor]) -> None:
    assert found.keys() == expected.keys()
    assert not [name for name, value in expected.items() if not torch.equal(found[name], value)]


def names_of(graph: torch.fx.Graph) -> set[str]:
    found = {str(node.target) for node in graph.nodes if node.op == "call_function"}
    return {name.split(".")[1] for name in found if name.startswith("qsync.")}


@pytest.mark.parametrize(
    ("precision", "strict"),
    [
        ("int8", False),
        ("int8", True),
        ("bf16", False),
        ("int8_all", False),
        ("fp16", False),
        ("fp32", False),
    ],
)
def test_an_exported_program_trains_as_the_model_does(precision, strict):
    expected = step(model := mixed(precision), model)
    program = torch.export.export(mixed(precision), batch(), strict=strict)
    found = {"conv2d", *({"cast", "linear", "matmul"} if precision != "bf16" else {"attention"})}
    assert names_of(program.graph) >= found - ({"cast"} if precision == "fp32" else set())
    module = program.module()
    assert_equal(step(module, module), expected)


def test_an_exported_program_does_not_change_the_model():
    expected = step(model := mixed(), model)
    model = mixed()
    torch.export.export(model, batch())
    assert_equal(step(model, model), expected)
    torch.export.export(model, batch())  # after a call as well


def test_an_exported_program_evaluates():
    model = mixed().eval()
    with torch.no_grad():
        expected = model(*batch())["y"]
        program = torch.export.export(model, batch())
        assert torch.equal(program.module()(*batch())["y"], expected)


def test_arguments_have_their_names():
    tokens, images = batch()
    program = torch.export.export(mixed(), (tokens,), {"images": images})
    torch.manual_seed(1)
    y = program.module()(tokens, images=images)["y"]
    assert torch.equal(y, step(model := mixed(), model)["y"])


# The tests of this file import torch first.
@pytest.mark.parametrize("order", ["qsync, torch", pytest.param("torch, qsync", marks=pytest.mark.deep)])
def test_a_saved_program_runs_wherever_qsync_is_imported(tmp_path, order):
    program = torch.export.export(mixed().eval(), batch())
    torch.export.save(program, tmp_path / "program.pt2")
    torch.save((batch(), program.module()(*batch())["y"].detach()), tmp_path / "numbers.pt")
    code = f"""
import {order}
inputs, expected = torch.load("numbers.pt")
y = torch.export.load("program.pt2").module()(*inputs)["y"]
assert torch.equal(y, expected)
y.sum().backward()
"""
    done = subprocess.run([sys.executable, "-c", code], cwd=tmp_path, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize("precision", ["int8", "bf16", "fp16"])
def test_one_graph_of_torch_compile_trains_as_the_model_does(precision):
    expected = step(model := mixed(precision), model)
    model = mixed(precision)
    assert_equal(step(torch.compile(model, backend="aot_eager", fullgraph=True), model), expected)


@pytest.mark.deep  # half a minute of a C++ compiler; the one above stands for it
@pytest.mark.filterwarnings("ignore:.*torch.jit.script_method:DeprecationWarning")  # torch's, of torch
def test_inductor_compiles_what_stands_between_products():
    """Within rounding, and each precision as itself: nothing cached for one serves the other."""
    found = {}
    for precision in ("bf16", "int8"):
        expected = step(model := mixed(precision), model)
        model = mixed(precision)
        found[precision] = step(torch.compile(model, fullgraph=True), model)
        for name in ("y", "qkv.weight", "embedding.weight", "norm2d.running_var"):
            error = (found[precision][name] - expected[name]).norm() / expected[name].norm()
            assert error < 0.02, (precision, name)
    assert not torch.equal(found["bf16"]["y"], found["int8"]["y"])


def test_torch_compile_that_may_break_its_graph_calls_the_model_as_it_is():
    expected = step(model := mixed(), model)
    seen = []

    def backend(module, inputs):
        seen.append(module)
        return module.forward

    model = mixed()
    assert_equal(step(torch.compile(model, backend=backend), model), expected)
    targets = {str(node.target) for module in seen for node in module.graph.nodes}
    assert not [target for target in targets if "bypassing" in target or "qsync" in target]


@pytest.mark.filterwarnings("ignore:.*torch.jit.script_method:DeprecationWarning")  # torch's, of torch
def test_torch_compile_around_a_model_traces_nothing_of_qsync_and_nothing_at_later_steps():
    """It would trace qsync's own calls, and again at every step: their state changes."""
    model = mixed("int8")
    compiled = torch.compile(model)
    for _ in range(2):
        step(compiled, model)
    before = dict(counters["frames"])
    for _ in range(3):
        step(compiled, model)
    assert dict(counters["frames"]) == before


def test_a_plan_names_the_operators_of_an_exported_program():
    """Also where the planned model is a part of what is exported, and has a part called `module`."""

    class Inner(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.module = nn.Sequential(nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, 8))

        def forward(self, x):
            return self.module(x)

    class Outer(nn.Module):
        def __init__(self, inner: nn.Module) -> None:
            super().__init__()
            self.inner = inner

        def forward(self, x):
            return self.inner(x).tanh()

    def planned() -> Outer:
        torch.manual_seed(0)
        inner = Inner()
        graph = qsync.capture(inner, X)
        assignment = {op.name: Precision.FP32 for op in graph.adjustable} | {"module.2": Precision.INT8}
        plan = Plan(graph.model, graph.hash, {"infer": ClassPlan(assignment)})
        return Outer(qsync.wrap(inner, plan, device_class="infer", strict=True))

    X = torch.randn(4, 8)
    expected = planned()(X)
    for run in (
        torch.export.export(planned(), (X,)).module(),
        torch.export.export(planned(), (X,), strict=True).module(),
        torch.compile(planned(), backend="aot_eager", fullgraph=True),
    ):
        assert torch.equal(run(X), expected)


def test_an_exported_graph_that_the_plan_was_not_made_for_is_refused():
    layers = [nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8)), nn.Sequential(nn.Linear(8, 8))]
    graph = qsync.capture(layers[0], torch.randn(4, 8))
    assignment = {op.name: Precision.INT8 for op in graph.adjustable}
    plan = Plan(layers[1]._get_name(), graph.hash, {"infer": ClassPlan(assignment)})
    model = qsync.wrap(layers[1], plan, device_class="infer")
    with pytest.raises(MismatchError, match="the plan"):
        torch.export.export(model, (torch.randn(4, 8),))


def test_a_batch_norm_that_saves_less_is_refused():
    with pytest.raises(UnsupportedError, match="batch_norm writes to its arguments"):
        torch.export.export(mixed("bf16", save_less=True), batch())


def test_recomputed_activations_are_refused():
    class Recomputing(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = nn.Linear(8, 8)

        def forward(self, x):
            return checkpoint(self.layer, x, use_reentrant=False)

    model = qsync.wrap(Recomputing(), "int8", strict=True)
    with pytest.raises(UnsupportedError, match="cannot be exported: it computes activations again"):
        torch.export.export(model, (torch.randn(4, 8),))


def test_attention_layers_are_exported_and_refused_by_one_graph_of_torch_compile():
    layer = nn.TransformerEncoderLayer(16, 2, 32, dropout=0.0, batch_first=True)
    model, x = qsync.wrap(layer, "int8", strict=True), torch.randn(2, 6, 16)
    expected = model(x)
    assert torch.equal(torch.export.export(model, (x,)).module()(x), expected)
    with pytest.raises(Exception, match="torch.compile treats multi_head_attention_forward as one call"):
        torch.compile(model, backend="aot_eager", fullgraph=True)(x)


def test_shapes_of_an_exported_program_are_those_it_was_exported_with():
    model, x = qsync.wrap(nn.Linear(8, 8), "int8", strict=True), torch.randn(4, 8)
    with pytest.raises(Exception, match="specialized|specialised"):
        torch.export.export(model, (x,), dynamic_shapes=({0: torch.export.Dim("rows")},))
