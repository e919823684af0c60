"""The FX pass: what runs is the lowered graph, node for node, and in FP32 it is the model bit for bit."""

from __future__ import annotations

import copy
import random
from dataclasses import replace
from functools import cache, partial

import pytest
import torch
import torch.nn.functional as F
from graphs import cluster_of, profile_of
from hypothesis import given, settings
from hypothesis import strategies as st
from models import FAMILIES, MLP, build, graph_of, step
from observing import Watcher, decibels, watched
from priced_nodes import TRIED, priced
from torch import nn
from torch.utils.checkpoint import checkpoint
from traced_models import Applied, Broken, Checkpointed, X

import qsync
from qsync import backend
from qsync.experiments.harness.measured_memory import saved_bytes
from qsync.lowering.incremental import lower
from qsync.lowering.lowered_graph import Cast, Run
from qsync.operators.precision import Precision
from qsync.operators.registry import FORMS, PRECISIONS_BY_KIND
from qsync.records.graph import OpGraph
from qsync.records.plans import ClassPlan, Plan
from qsync.records.save_less import ops_that_save_less
from qsync.replayer import replay
from qsync.runtime import choosers, planned_forward
from qsync.runtime.node_calls import KernelCall
from qsync.runtime.rewriting import rewrite
from qsync.tracing.tracer import trace

pytestmark = pytest.mark.filterwarnings(  # torch.compile does it when a model has a function of its own
    "ignore:.*autograd.function.Function.* should not be instantiated:DeprecationWarning"
)


def drawn(graph: OpGraph, seed: int) -> dict[str, Precision]:
    """A random assignment of every adjustable operator."""
    draw = random.Random(seed)
    return {
        op.name: draw.choice([p for p in PRECISIONS_BY_KIND[op.kind] if p in TRIED])
        for op in graph.adjustable
    }


def priced_saving_less(graph: OpGraph, assignment: dict[str, Precision]) -> tuple[Cast | Run, ...]:
    """The same for a plan in which every operator that can saves less."""
    profile = profile_of(graph, "infer", TRIED)
    ops = {
        op.name: {timed: cost for mode, cost in profile.ops[op.name].items()
                  for timed in (mode, *(f"{mode} {form}" for form in FORMS.get(op.kind, ())))}
        for op in graph.ops
    }  # fmt: skip
    plan = Plan(graph.model, graph.hash, {"infer": ClassPlan(assignment)}).save_less("*")
    cluster = cluster_of({"infer": 1}, precisions=TRIED)
    timeline = replay(graph, plan, {"infer": replace(profile, ops=ops)}, cluster)
    outputs = {op.name for op in graph.ops if op.kind == "output"}
    return tuple(n for n in timeline.sequence("infer") if isinstance(n, Cast) or n.op not in outputs)


def run(model: nn.Module, watcher: Watcher, *inputs: torch.Tensor) -> tuple[Cast | Run, ...]:
    """One step of a small model; what ran forward."""
    watcher.nodes.clear()
    loss = model(*inputs)
    nodes = tuple(watcher.nodes)
    loss.backward()
    return nodes


@pytest.fixture(scope="module")
def wrapped():
    """A model of a family and its batch, which is wrapped and traced once for all assignments."""

    @cache
    def wrapped(family: str) -> tuple[nn.Module, dict[str, torch.Tensor]]:
        model, batch = build(family)
        return qsync.wrap(model, "fp32", bitwise=True), batch

    return wrapped


def chosen(model: nn.Module, assignment: dict[str, Precision], *saving) -> Watcher:
    """Make a wrapped model run another assignment, watched."""
    watcher = Watcher()
    planned_forward.program_of(model).choose(choosers.following(assignment), watcher, *saving)
    return watcher


# --- All FP32 is the model itself ---


@pytest.mark.parametrize("family", [*FAMILIES, "mlp"])
def test_an_all_fp32_assignment_is_bitwise_the_model(wrapped, family):
    """Loss, every gradient and every buffer, with dropout on and the same seed."""
    plain, batch = build(family)
    expected_loss, expected = step(plain, batch)
    model, _ = wrapped(family)
    for _ in range(2):
        loss, gradients = step(model, batch)
        assert torch.equal(loss, expected_loss)
        assert gradients.keys() == expected.keys()
        for name, gradient in gradients.items():
            assert torch.equal(gradient, expected[name]), name
        if family == "resnet":  # the second step has moved the running statistics
            break
    for name, buffer in model.named_buffers():
        assert torch.equal(buffer, plain.get_buffer(name)), name


def test_checkpointed_and_broken_models_are_bitwise_themselves_in_fp32():
    for make in (Checkpointed, Broken):
        torch.manual_seed(0)
        plain = make()
        torch.manual_seed(0)
        model = qsync.wrap(make(), "fp32", bitwise=True)
        for one in (plain, model):
            one(X).backward()
        for one, two in zip(plain.parameters(), model.parameters(), strict=True):
            assert torch.equal(one.grad, two.grad)


# --- The graph that is priced is the graph that runs ---


@pytest.mark.parametrize("family", FAMILIES)
def test_what_runs_is_what_was_priced(wrapped, family):
    (model, batch), graph = wrapped(family), graph_of(family)
    for seed in range(2):
        assignment = drawn(graph, seed)
        watcher = chosen(model, assignment)
        step(model, batch)
        assert tuple(watcher.nodes) == priced(graph, assignment)
        assert not watcher.wrong
        assert any(isinstance(node, Cast) for node in watcher.nodes)


class Everything(nn.Module):
    """Residuals, shared values and weights, views, a norm, a branch that stays in FP32, a convolution,
    attention."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.fc1, self.fc2, self.fc3, self.out = (nn.Linear(8, 8) for _ in range(4))
        self.conv = nn.Conv2d(2, 2, 3, padding=1)
        self.norm = nn.LayerNorm(8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        q, k, v = self.fc1(x), self.fc2(x), self.fc1(F.gelu(x))
        y = F.scaled_dot_product_attention(q[None], k[None], v[None])[0]
        y = self.norm(x + self.fc3(y))
        z = self.conv(y.view(2, 2, 2, 4).expand(2, 2, 2, 4)).view(4, 8)
        left, right = torch.cat([y, z], 1).chunk(2, 1)
        y = torch.where(left > 0, left, right) @ self.fc3.weight
        return self.out(y + torch.cumsum(y, 0)).square().mean()


@pytest.fixture(scope="module")
def everything() -> tuple[Everything, OpGraph]:
    model = Everything()
    graph = qsync.capture(model, X)
    planned_forward.attach(model, lambda graph: {})
    model(X)
    return model, graph


@settings(max_examples=30, deadline=None)
@given(data=st.data())
def test_any_assignment_runs_as_it_was_priced(everything, data):
    """The one idea. Changing the assignment rewrites; nothing is traced again."""
    model, graph = everything
    kinds = {op.name: [p for p in PRECISIONS_BY_KIND[op.kind] if p in TRIED] for op in graph.adjustable}
    assignment = data.draw(st.fixed_dictionaries({name: st.sampled_from(p) for name, p in kinds.items()}))
    watcher = Watcher()
    planned_forward.program_of(model).choose(choosers.following(assignment), watcher)
    assert run(model, watcher, X) == priced(graph, assignment)
    assert not watcher.wrong
    assert all(p.grad.dtype is torch.float32 for p in model.parameters())


CONSTANT = torch.arange(8.0)


class Doubled(torch.autograd.Function):
    """A function with a backward of its own: a graph inside the graph, which nobody may look into."""

    @staticmethod
    def forward(ctx, x):
        return x * 2

    @staticmethod
    def backward(ctx, gradient):
        return gradient * 2


@pytest.mark.parametrize(
    "model",
    [
        Checkpointed(),
        Broken(),
        Applied(lambda m, x: m.fc1(x)),
        Applied(lambda m, x: torch.hstack(m.fc2(x).chunk(2, -1))),
        Applied(lambda m, x: torch.stack(m.fc2(x).unbind(0)).cumsum(0)),
        Applied(lambda m, x: F.layer_norm(x, (8,), weight=m.fc2(x)[0])),
        Applied(lambda m, x: m.fc1(print() or x)),
        Applied(lambda m, x: Doubled.apply(m.fc2(x))),
        Applied(lambda m, x: m.fc2(x) * CONSTANT + torch.tensor([0.5, 2.0] * 4)),
    ],
    ids=[
        "checkpointed",
        "broken",
        "shared",
        "chunks",
        "unbound",
        "adaptive norm",
        "shared across a break",
        "own backward",
        "constants",
    ],
)
def test_unusual_models_run_as_they_were_priced(model):
    graph = qsync.capture(model, X)
    for seed in range(3):
        assignment = drawn(graph, seed)
        watcher = watched(model, assignment)
        assert run(model, watcher, X) == priced(graph, assignment)
        assert not watcher.wrong


FOLLOWING_CALLS = {
    "relu": F.relu, "relu6": F.relu6, "leaky_relu": F.leaky_relu, "gelu": F.gelu, "silu": F.silu,
    "tanh": torch.tanh, "sigmoid": torch.sigmoid, "hardswish": F.hardswish, "hardtanh": F.hardtanh,
    "elu": F.elu, "selu": F.selu, "celu": F.celu, "mish": F.mish, "hardsigmoid": F.hardsigmoid,
    "abs": torch.abs, "glu": lambda x: F.glu(torch.cat([x, x], -1)), "softmax": lambda x: x.softmax(-1),
    "dropout": F.dropout, "layer_norm": lambda x: F.layer_norm(x, (8,), torch.ones(8), torch.ones(8)),
    "rms_norm": lambda x: F.rms_norm(x, (8,), torch.ones(8)),
    "group_norm": lambda x: F.group_norm(x, 2, torch.ones(8), torch.ones(8)),
    "batch_norm": lambda x: F.batch_norm(x, torch.zeros(8), torch.ones(8), torch.ones(8), training=True),
    "add": lambda x: x + 1.0, "sub": lambda x: x - x.abs(), "mul": lambda x: x * 2, "div": lambda x: x / 3,
    "neg": torch.neg, "pow": lambda x: x**2, "mean": lambda x: x + x.mean(-1, keepdim=True),
    "max_pool2d": lambda x: F.max_pool2d(x[None], 1)[0], "avg_pool2d": lambda x: F.avg_pool2d(x[None], 1)[0],
    "adaptive_avg_pool2d": lambda x: F.adaptive_avg_pool2d(x[None], (4, 8))[0],
    "avg_pool1d": lambda x: F.avg_pool1d(x, 1), "adaptive_avg_pool1d": lambda x: F.adaptive_avg_pool1d(x, 8),
    "adaptive_avg_pool3d": lambda x: F.adaptive_avg_pool3d(x[None, None, None], (1, 4, 8))[0, 0, 0],
    "contiguous": lambda x: x.t().contiguous().t(), "cat": lambda x: torch.cat([x, x])[:4],
    "stack": lambda x: torch.stack([x, x])[1], "where": lambda x: torch.where(x > 0, x, x),
    "masked_fill": lambda x: x.masked_fill(x > 1, 0.0), "pad": lambda x: F.pad(x, (1, 1))[:, 1:-1],
    "clone": lambda x: x.clone(), "roll": lambda x: x.roll(1, 0), "repeat": lambda x: x.repeat(2, 1)[:4],
    "interpolate": lambda x: F.interpolate(x[None, None], size=(4, 8), mode="bilinear")[0, 0],
    "repeat_interleave": lambda x: x.repeat_interleave(2, 0)[::2],
    "concat": lambda x: torch.concat([x, x])[4:],
    "view": lambda x: x.view(2, 16).reshape(4, 8), "transpose": lambda x: x.transpose(0, 1).permute(1, 0),
    "expand": lambda x: x[None].expand(2, 4, 8)[0], "split": lambda x: x.split(4, 1)[0].repeat(1, 2),
    "unbind": lambda x: torch.stack(x.unbind(0)), "flatten": lambda x: x.flatten().unflatten(0, (4, 8)),
    "squeeze": lambda x: x.unsqueeze(0).squeeze(0), "movedim": lambda x: x.movedim(0, 1).t(),
    "select": lambda x: x.select(0, 1) + x.narrow(0, 0, 4), "index": lambda x: x[torch.tensor([0, 1, 1, 2])],
    "swapaxes": lambda x: x.swapaxes(0, 1).t(), "view_as": lambda x: x.view_as(x).expand_as(x),
}  # fmt: skip


SIX_EACH = [[*FOLLOWING_CALLS][k : k + 6] for k in range(0, len(FOLLOWING_CALLS), 6)]


@pytest.mark.parametrize("names", SIX_EACH, ids=" ".join)
def test_following_operators_run_in_the_type_they_are_given(names):
    """BF16 between two BF16 products, forward and backward; beside FP32, FP32."""

    def body(m, x):
        for name in names:
            x = FOLLOWING_CALLS[name](x)
        return x

    model = Applied(body)
    assignment = {"fc1": Precision.BF16, "fc2": Precision.BF16}
    watcher = watched(model, assignment)
    nodes = run(model, watcher, X)
    assert not watcher.wrong
    assert nodes == priced(planned_forward.program_of(model).graph, assignment)


# --- Numbers ---

# Least signal to noise of all gradients together, in dB: what a uniform choice costs on these models, with
# margin.
LEAST_DB = {"bf16": 30.0, "fp16": 50.0, "int8": 22.0, "int8_all": 15.0}


@pytest.mark.parametrize("precision", LEAST_DB)
@pytest.mark.parametrize("family", ["bert", "llama"])
def test_low_precision_is_near_full_precision_and_not_equal(wrapped, family, precision):
    plain, batch = build(family)
    expected_loss, expected = step(plain, batch)
    lowered, (model, _) = Precision(precision), wrapped(family)
    able = [op.name for op in graph_of(family).adjustable if lowered in PRECISIONS_BY_KIND[op.kind]]
    chosen(model, dict.fromkeys(able, lowered))
    loss, gradients = step(model, batch)
    assert abs(loss - expected_loss) < 0.02 * expected_loss
    assert LEAST_DB[precision] < decibels(gradients, expected) < 100
    assert all(gradient.dtype is torch.float32 for gradient in gradients.values())


# --- The pass itself ---


def test_the_traced_graph_is_untouched_by_rewriting():
    model, batch = build("mlp")
    segment = trace(model, batch)[0]
    code, nodes = segment.module.code, list(segment.module.graph.nodes)
    arguments = [(node.op, node.target, node.args, node.kwargs, dict(node.meta)) for node in nodes]
    graph = OpGraph("MLP", tuple(segment.inputs), tuple(segment.ops))
    for precision in (Precision.BF16, Precision.INT8):
        lowered = lower(graph, {op.name: precision for op in graph.adjustable})
        assert rewrite(segment, lowered, backend.select("cpu")).code != code
    assert segment.module.code == code and list(segment.module.graph.nodes) == nodes
    assert [(n.op, n.target, n.args, n.kwargs, dict(n.meta)) for n in nodes] == arguments
    assert not any(name.startswith(("cast", "linear")) for name in segment.module._modules)


def test_an_fp32_program_is_the_traced_code():
    """Nothing is added for operators that stay, to the bit: no module, no call."""
    segment = trace(*build("mlp"))[0]
    lowered = lower(OpGraph("MLP", tuple(segment.inputs), tuple(segment.ops)), {})
    rewritten = rewrite(segment, lowered, backend.select("cpu", bitwise=True))
    assert not list(rewritten.children())
    calls = [[(n.op, n.target) for n in module.graph.nodes] for module in (segment.module, rewritten)]
    assert calls[0] == calls[1]


def test_a_new_assignment_does_not_trace_again():
    model, batch = build("mlp")
    program = planned_forward.attach(model, lambda graph: {})
    step(model, batch)
    traced = []
    compile_again = program.compile
    program.compile = lambda *args: traced.append(1) or compile_again(*args)
    program.choose(choosers.uniform(Precision.BF16))
    step(model, batch)
    assert not traced and {type(node) for node in program.lowered[0].nodes} == {Cast, Run}


# --- Checkpointing ---


@pytest.mark.parametrize("precision", ["fp32", "bf16", "int8"])
def test_checkpoints_save_memory_and_run_again_in_backward(precision):
    x = torch.randn(64, 8)
    plain, saving = (
        qsync.wrap(Checkpointed(enabled=False), precision, strict=True),
        qsync.wrap(Checkpointed(), precision, strict=True),
    )
    for model in (plain, saving):
        model(x).backward()
    less, all_of_it = (saved_bytes(lambda: model(x), model.parameters()) for model in (saving, plain))  # noqa: B023
    assert less < 0.5 * all_of_it
    for one, two in zip(plain.parameters(), saving.parameters(), strict=True):
        assert torch.equal(one.grad, two.grad)
    watcher = watched(saving, {"layers.0.0": Precision(precision)})
    saving(x).backward()
    assert [getattr(node, "op", None) for node in watcher.nodes].count("layers.0.0") == 2


def test_dropout_inside_a_checkpoint_is_the_same_the_second_time():
    class Dropping(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            torch.manual_seed(0)
            self.inner = MLP(16)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            body = lambda x: self.inner(x)["logits"]  # noqa: E731
            return torch.utils.checkpoint.checkpoint(body, x, use_reentrant=False).square().mean()

    x = torch.randn(8, 16)
    gradients = []
    for wrapped in (False, True):
        model = qsync.wrap(Dropping(), "fp32", bitwise=True) if wrapped else Dropping()
        torch.manual_seed(3)
        model(x).backward()
        gradients.append([p.grad for p in model.parameters()])
    assert all(torch.equal(one, two) for one, two in zip(*gradients, strict=True))


# --- What a product computes in its epilogue ---


def fused_calls(model: nn.Module) -> list[str]:
    """What products of the model that runs compute in their epilogues."""
    runs = [module for entry in planned_forward.program_of(model)._entries for module in entry.run.modules()]
    return [
        str(call._activation.program)
        for call in runs
        if isinstance(call, KernelCall) and call._activation is not None
    ]


def outcome_of(body, precision: str) -> tuple[nn.Module, torch.Tensor, list[torch.Tensor]]:
    model = qsync.wrap(Applied(body), precision, strict=True)
    x = X.clone().requires_grad_()
    loss = model(x)
    loss.backward()
    return model, loss.detach(), [x.grad, *(p.grad for p in model.parameters())]


@pytest.mark.parametrize("precision", ["int8", "int8_all"])
@pytest.mark.parametrize(
    ("call", "program"),
    [
        (F.gelu, "gelu"),
        (lambda x: F.gelu(input=x, approximate="tanh"), "gelu_tanh"),
        (nn.GELU(approximate="tanh"), "gelu_tanh"),
        (F.relu, "relu"),
        (lambda x: x.relu(), "relu"),
        (lambda x: F.relu(x, True), "relu"),
        (nn.ReLU(inplace=True), "relu"),
    ],
)
def test_an_activation_runs_in_the_epilogue_with_its_own_arguments(call, program, precision):
    """What the unfused graph gives: a second reader of the product's result keeps the two apart."""
    torch.manual_seed(0)
    fused, loss, gradients = outcome_of(lambda m, x: call(x), precision)
    torch.manual_seed(0)

    def beside(m: nn.Module, x: torch.Tensor) -> torch.Tensor:
        y = x * 0
        return call(x) + y

    apart, expected, others = outcome_of(beside, precision)
    assert (fused_calls(fused), fused_calls(apart)) == ([program], [])
    assert (loss - expected).abs() <= 2e-2 * expected.abs()
    got, wanted = (dict(enumerate(tensors)) for tensors in (gradients, others))
    assert decibels(got, wanted) > (25 if precision == "int8" else 8)


UNFUSED = {
    "read twice": lambda m, x: F.gelu(x) + x,
    "handed out of a checkpoint": lambda m, x: F.gelu(checkpoint(m.fc1, x, use_reentrant=False)),
    "gradients switched off": lambda m, x: without_gradient(x) + m.fc1(x),
    "written to": lambda m, x: F.gelu(m.fc1(written(m.fc1(x)))),
    "another function": lambda m, x: F.silu(m.fc1(x)),
}


def without_gradient(x: torch.Tensor) -> torch.Tensor:
    with torch.no_grad():
        return F.gelu(x)


def written(x: torch.Tensor) -> torch.Tensor:
    y = F.relu(x)
    x[0] = 0.0
    return y + 1


@pytest.mark.parametrize("name", UNFUSED)
def test_what_may_not_be_computed_in_an_epilogue_is_not(name):
    model = Applied(UNFUSED[name])
    watcher = watched(model, dict.fromkeys(("fc1", "fc2"), Precision.INT8))
    nodes = run(model, watcher, X)
    first = next(node for node in nodes if isinstance(node, Run) and node.op == "fc1")
    assert first.form == "plain" and not watcher.wrong
    assert nodes == priced(qsync.capture(model, X), dict.fromkeys(("fc1", "fc2"), Precision.INT8))


class Asserted(nn.Module):
    """Something that is no operator reads the product's result."""

    def __init__(self) -> None:
        super().__init__()
        self.fc1, self.fc2 = nn.Linear(8, 1), nn.Linear(1, 8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.fc1(x[:1])
        torch._assert_async(y)
        return self.fc2(F.relu(y)).sum()


def test_what_is_read_by_no_operator_is_made_all_the_same():
    model = Asserted()
    with torch.no_grad():
        model.fc1.weight.fill_(-1.0)
    watcher = watched(model, {"fc1": Precision.INT8})
    run(model, watcher, X.abs())  # relu(y) is 0, which the assertion would not pass
    assert {node.form for node in watcher.nodes if isinstance(node, Run)} == {"plain"}


def test_a_checkpointed_activation_runs_in_the_epilogue_inside():
    model, plain = Checkpointed(), Checkpointed(enabled=False)
    for one in (model, plain):
        qsync.wrap(one, "int8", strict=True)
        one(X).backward()
        assert fused_calls(one) == ["gelu"] * 3
    for one, two in zip(model.parameters(), plain.parameters(), strict=True):
        assert torch.equal(one.grad, two.grad)


# --- Saving less for backward ---


@pytest.mark.parametrize("family", FAMILIES)
def test_what_saves_less_is_what_was_priced_and_its_loss_is_the_same(wrapped, family):
    (model, batch), graph = wrapped(family), graph_of(family)
    for assignment in ({op.name: Precision.FP32 for op in graph.adjustable}, drawn(graph, 1)):
        chosen(model, assignment)
        loss, gradients = step(model, batch)
        watcher = chosen(model, assignment, choosers.saving(["*"]))
        less_loss, less_gradients = step(model, batch)
        assert tuple(watcher.nodes) == priced_saving_less(graph, assignment)
        assert not watcher.wrong
        # Bit for bit, but where gelu or relu was computed in a product's epilogue and now stands beside it.
        apart = {n.op for n in watcher.nodes if isinstance(n, Run) and n.mode.startswith("int8")}
        assert torch.equal(less_loss, loss) or (apart and (less_loss - loss).abs() < 1e-3 * loss.abs())
        assert decibels(less_gradients, gradients) > 30
        found = {
            node.op: node.form for node in watcher.nodes if isinstance(node, Run) and node.form != "plain"
        }
        assert bool(found) == bool(ops_that_save_less(graph, ["*"]))


def test_a_checkpointed_model_saves_less_inside():
    model = Checkpointed()
    graph = qsync.capture(model, X)
    able = ops_that_save_less(graph, ["*"])
    planned_forward.attach(model, lambda graph: {}, saving_less=choosers.saving(["*"]))
    model(X).backward()
    forms = {
        n.op: n.form
        for part in planned_forward.program_of(model).lowered
        for n in part.nodes
        if isinstance(n, Run)
    }
    assert {op for op, form in forms.items() if form != "plain"} == set(able)


class ViewsAfterConvolution(nn.Module):
    """What a contiguous model may do with a convolution's result, and hand out."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Conv2d(3, 16, 3, padding=1), nn.Conv2d(16, 16, 3, padding=1)
        self.head = nn.Linear(16 * 36, 4)

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        y = self.second(torch.relu(self.first(x)))
        return self.head(y.view(y.shape[0], -1)), y


@pytest.mark.parametrize("precision", ["bf16", "int8"])
def test_the_order_of_elements_inside_is_nobody_s_business(precision):
    """Convolutions run in channels-last order; views, what is handed out and gradients are as they were."""
    torch.manual_seed(0)
    model, x = ViewsAfterConvolution(), torch.randn(2, 3, 6, 6)
    expected, expected_maps = model(x)
    qsync.wrap(model, precision, strict=True)
    logits, maps = model(x)
    assert maps.is_contiguous() and maps.view(2, -1).shape == (2, 16 * 36)
    assert (logits - expected).norm() < 0.05 * expected.norm()
    assert (maps - expected_maps).norm() < 0.05 * expected_maps.norm()
    (logits.sum() + maps.sum()).backward()
    for parameter in model.parameters():
        assert parameter.grad.stride() == parameter.stride()


class InPlace(nn.Module):
    """Residual ReLUs in place: after a norm, after a sum, and after a sum that is read again."""

    def __init__(self) -> None:
        super().__init__()
        self.conv, self.norm = nn.Conv2d(4, 4, 3, padding=1, bias=False), nn.BatchNorm2d(4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = F.relu(self.norm(self.conv(x)), inplace=True)
        total = y + x
        z = F.relu(total + y, inplace=True)
        return F.relu(total, inplace=True) * z * total


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_a_relu_in_place_overwrites_what_nothing_else_reads(precision):
    model = InPlace()
    x = torch.randn(2, 4, 6, 6)
    expected = [p.grad for p in _stepped(model, x)]
    program = planned_forward.attach(model, choosers.uniform(Precision(precision)))
    found = [p.grad for p in _stepped(model, x)]
    relus = [n for n in program._entries[0].run.graph.nodes if n.target is F.relu]
    assert [n.kwargs.get("inplace", False) for n in relus] == [True, True, False]
    for one, other in zip(found, expected, strict=True):
        assert (one - other).norm() <= (precision == "bf16") * (0.05 * other.norm() + 0.01)


def _stepped(model, x):
    model.zero_grad()
    model(x).square().mean().backward()
    return list(model.parameters())


class Masking(nn.Module):
    """A layer whose result code outside of any graph changes in place, as SpecAugment does."""

    def __init__(self) -> None:
        super().__init__()
        self.project, self.head = nn.Linear(16, 24), nn.Linear(24, 8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.project(x)
        torch._dynamo.graph_break()
        x[torch.arange(len(x)) % 2 == 0] = 0.0
        return self.head(x)


@pytest.mark.parametrize("precision", ["bf16", "int8", "int8_all"])
def test_results_are_changed_in_place_between_graphs_and_behind_them(precision):
    torch.manual_seed(0)
    plain, x = Masking(), torch.randn(6, 5, 16)
    found = {}
    for name, model in (
        ("fp32", plain),
        (precision, qsync.wrap(copy.deepcopy(plain), precision, strict=True)),
    ):
        y = model(x)
        y[:, 0] = 1.0
        y.square().sum().backward()
        found[name] = [y.detach(), *(p.grad for p in model.parameters())]
    for one, two in zip(*found.values(), strict=True):
        assert (one - two).norm() < 0.05 * one.norm()


# --- What depends on the order of elements, on versions and on shared memory ---


class Images(nn.Module):
    """Two convolutions with a norm between them, and what the test does there."""

    def __init__(self, body) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first = nn.Conv2d(4, 4, 3, padding=1, bias=False)
        self.second = nn.Conv2d(4, 4, 3, padding=1)
        self.norm, self.body = nn.BatchNorm2d(4), body

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.body(self, x)


def assert_runs_like_torch(plain: nn.Module, x: torch.Tensor, precision: str, tolerance: float) -> None:
    """Assert that results, gradients and buffers of a wrapped model are those of the model in eager mode."""
    found = []
    for model in (plain, qsync.wrap(copy.deepcopy(plain), precision, strict=True, bitwise=True)):
        image = x.clone().requires_grad_()
        results = model(image)
        results = results if isinstance(results, tuple) else (results,)
        sum((result.float() * torch.linspace(-1, 1, result.numel()).view(result.shape)).sum()
            for result in results if result.requires_grad).backward()  # fmt: skip
        gradients = [p.grad for p in (*model.parameters(), image) if p.grad is not None]
        found.append([*results, *gradients, *model.buffers()])
    assert len(found[0]) == len(found[1])
    for expected, result in zip(*found, strict=True):
        if precision == "fp32":
            assert torch.equal(result, expected)
        assert (result - expected).double().norm() <= tolerance * expected.double().norm()


CLOSE = [("fp32", 0.0), ("bf16", 0.05)]


class Normed(nn.Module):
    """A block whose norm updates its statistics, and one that updates a buffer of its own."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.fc, self.norm, self.out = nn.Linear(8, 8), nn.BatchNorm1d(8), nn.Linear(8, 8)
        self.register_buffer("average", torch.zeros(8))

    def block(self, x: torch.Tensor) -> torch.Tensor:
        y = self.fc(x)
        with torch.no_grad():
            self.average.mul_(0.9).add_(y.mean(0), alpha=0.1)
        return F.gelu(self.norm(y) - self.average)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.out(checkpoint(self.block, x, use_reentrant=self.is_reentrant))


@pytest.mark.parametrize("is_reentrant", [False, True])
@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_a_block_that_is_computed_again_may_update_its_buffers(precision, is_reentrant):
    plain = Normed()
    plain.is_reentrant = is_reentrant
    plain.fc.bias.requires_grad_(False)  # in front of a norm its gradient is noise
    assert_runs_like_torch(plain, torch.randn(16, 8), precision, 0.0 if precision == "fp32" else 0.05)


def zeroed_through_a_view(m: Images, x: torch.Tensor) -> torch.Tensor:
    y = m.norm(m.first(x))
    y.view(2, -1)[:, :7] = 0
    return m.second(y)


def scaled_through_a_view(m: Images, x: torch.Tensor) -> torch.Tensor:
    y = m.norm(m.first(x))
    y.reshape(2, -1)[:, 50:].mul_(3.0)
    return m.second(y)


@pytest.mark.parametrize("body", [zeroed_through_a_view, scaled_through_a_view])
@pytest.mark.parametrize(("precision", "tolerance"), [*CLOSE, ("int8", 0.15)])
def test_a_write_through_a_view_reaches_the_images(body, precision, tolerance):
    assert_runs_like_torch(Images(body), torch.randn(2, 4, 6, 6), precision, tolerance)


@torch.library.custom_op("qsync_tests::doubled_rows", mutates_args=())
def doubled_rows(x: torch.Tensor) -> torch.Tensor:
    """An operator of a user's own that wants its images by rows."""
    assert x.is_contiguous()
    return x * 2


@doubled_rows.register_fake
def _(x: torch.Tensor) -> torch.Tensor:
    return torch.empty_like(x)


doubled_rows.register_autograd(lambda ctx, gradient: gradient * 2)

STRIDED = {
    "view_as": lambda m, x: m.first(x).view_as(x.reshape(2, 144)),
    "aten view": lambda m, x: torch.ops.aten.view(m.first(x), [2, 144]),
    "view as a function": lambda m, x: torch.Tensor.view(m.first(x), 2, 144),
    "view_as_complex": lambda m, x: torch.view_as_complex(m.first(x).view(2, 4, 6, 3, 2)).abs(),
    "another type": lambda m, x: m.first(x) + m.first(x).detach().view(torch.int32).shape[-1],
    "half a type": lambda m, x: m.first(x) * (m.first(x).detach().view(torch.int16).shape[-1]),
    "own operator": lambda m, x: m.second(doubled_rows(m.first(x))),
    "as_strided": lambda m, x: m.first(x).as_strided((4, 4), (1, 4)),
    "as_strided of a view": lambda m, x: m.first(x).transpose(1, 2).as_strided((4, 4), (1, 4)),
    "as_strided of a part": lambda m, x: m.first(x)[:, 1:].as_strided((4, 4), (1, 4)),
    "as_strided beyond a part": lambda m, x: m.first(x)[:, 1:].as_strided((4, 36), (36, 1), 0),
}


@pytest.mark.parametrize("name", STRIDED)
@pytest.mark.parametrize(("precision", "tolerance"), CLOSE)
def test_calls_that_depend_on_strides_find_those_that_were_traced(name, precision, tolerance):
    assert_runs_like_torch(Images(STRIDED[name]), torch.randn(2, 4, 6, 6), precision, tolerance)


class Returning(nn.Module):
    """Two layers, with code between them that writes to a view of what the first returns."""

    def __init__(self, first: nn.Module, second: nn.Module, view) -> None:
        super().__init__()
        self.first, self.second, self.view = first, second, view

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.first(x)
        parts = self.view(y)
        torch._dynamo.graph_break()
        parts[-1].mul_(2)
        return self.second(y), parts[0] * 1.0


VIEWS = {
    "one": lambda y: (y.view(len(y), 2, -1),),
    "a view of a view": lambda y: (y.flatten(), y.view(len(y), -1)[:, 3:]),
    "parts": lambda y: (y.flatten(1).transpose(0, 1), y[:1]),
    "detached": lambda y: (y.view(-1), y.detach().view(size=(2, -1))),
}


@pytest.mark.parametrize("name", VIEWS)
@pytest.mark.parametrize("images", [False, True])
@pytest.mark.parametrize(("precision", "tolerance"), CLOSE)
def test_what_shared_memory_when_traced_is_returned_sharing_it(name, images, precision, tolerance):
    torch.manual_seed(0)
    layer = partial(nn.Conv2d, 4, 4, 3, padding=1) if images else partial(nn.Linear, 16, 16)
    x = torch.randn(2, 4, 6, 6) if images else torch.randn(8, 16)
    plain = Returning(layer(), layer(), VIEWS[name])
    assert_runs_like_torch(plain, x, precision, tolerance)


@pytest.mark.parametrize("precision", ["fp32", "bf16", "int8"])
def test_a_caller_may_write_to_a_view_that_a_model_returns(precision):
    class Both(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.fc = nn.Linear(8, 8)

        def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, ...]:
            y = self.fc(x)
            left, right = y.view(2, 2, 8).chunk(2, -1)
            return y, y.view(2, 16), left, right

    model = qsync.wrap(Both(), precision, strict=True)
    with torch.no_grad():
        whole, rows, left, right = model(X)
        rows.zero_()
        assert not whole.any() and not left.any() and not right.any()
        right.fill_(1.0)
        assert whole.sum() == rows.sum() == right.numel()


class BiasAlone(nn.Module):
    """A layer norm with a bias and no weight, between products."""

    def __init__(self):
        super().__init__()
        self.first, self.last = nn.Linear(32, 32), nn.Linear(32, 8)
        self.bias = nn.Parameter(torch.randn(32))

    def forward(self, x):
        return self.last(F.layer_norm(self.first(x), (32,), None, self.bias))


@pytest.mark.parametrize("precision", ["fp32", "bf16", "int8"])
@pytest.mark.parametrize("save_less", [False, True])
def test_a_layer_norm_with_a_bias_alone_trains(precision, save_less):
    torch.manual_seed(0)
    model = BiasAlone()
    low = qsync.wrap(copy.deepcopy(model), precision, strict=True, save_less=save_less)
    x = torch.randn(16, 32)
    for each in (model, low):
        each(x).square().sum().backward()
    for found, expected in zip(low.parameters(), model.parameters(), strict=True):
        assert (found.grad - expected.grad).norm() <= 0.05 * expected.grad.norm()
