"""A graph that several layers share is a segment for each: its own names, precisions and results."""

from __future__ import annotations

import copy
import gc
import weakref

import pytest
import torch
import torch._dynamo
from torch import nn

import qsync
from qsync.api import trace_step
from qsync.errors import MismatchError, UnsupportedError
from qsync.operators.declaration import Role
from qsync.operators.precision import Precision
from qsync.records.plans import ClassPlan
from qsync.runtime import choosers, planned_forward
from qsync.tracing.graph_sharing import SharedGraph

WIDTH = 16
BATCH = torch.randn(8, WIDTH, generator=torch.Generator().manual_seed(1))
PRECISIONS = [Precision.INT8, Precision.BF16, Precision.FP32]


class Block(nn.Module):
    """A layer in whose middle the trace stops."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(WIDTH, 2 * WIDTH), nn.Linear(2 * WIDTH, WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = nn.functional.gelu(self.up(x))
        torch._dynamo.graph_break()
        return x + self.down(y)


class Model(nn.Module):
    def __init__(self, alike: bool = True, skips: bool = False) -> None:
        super().__init__()
        # Each block is traced by itself if none is alike: of another class.
        kinds = [Block if alike else type(f"Block{k}", (Block,), {}) for k in range(len(PRECISIONS))]
        self.blocks = nn.ModuleList([kind() for kind in kinds])
        self.skips = skips

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            if self.skips and torch.rand([]) < 0.5:
                continue
            x = block(x)
        return x


def made(**options: bool) -> Model:
    torch.manual_seed(0)
    return Model(**options)


def loss(model: nn.Module, batch: torch.Tensor) -> torch.Tensor:
    return model(batch).square().mean()


def assignment() -> dict[str, Precision]:
    """Another precision in every block, and another order of them for its second product."""
    return {
        f"blocks.{k}.{name}": PRECISIONS[(k + shift) % len(PRECISIONS)]
        for k in range(len(PRECISIONS))
        for shift, name in enumerate(("up", "down"))
    }


def trained(model: Model, chosen: dict[str, Precision] | None = None) -> list[torch.Tensor]:
    """Return the loss and the gradients of a step under an assignment."""
    chosen = chosen or assignment()
    program = planned_forward.attach(model, choosers.following(chosen))
    value = loss(model, BATCH)
    value.backward()
    assert program.assignment() == chosen
    return [value.detach(), *(parameter.grad for parameter in model.parameters())]


def same(one: list[torch.Tensor], other: list[torch.Tensor]) -> bool:
    return all(map(torch.equal, one, other))


def test_every_layer_has_operators_of_its_own():
    graph = qsync.capture(made(), BATCH)
    assert graph.num_segments >= 2 * len(PRECISIONS)
    assert {op.name for op in graph.adjustable} == set(assignment())
    names = [op.name for op in graph.ops]
    assert len(names) == len(set(names))
    weights = {value.name for value in graph.inputs if value.kind == "parameter"}
    assert weights == {name for name, _ in made().named_parameters()}


def test_every_layer_runs_in_its_own_precision_as_if_it_were_traced_by_itself():
    expected = trained(made(alike=False))
    assert same(trained(made()), expected)
    one = next(iter(assignment()))
    assert not same(trained(made(), assignment() | {one: Precision.FP32}), expected)


def test_other_parameters_of_the_same_names_run_as_the_old_ones():
    model = made()
    program = planned_forward.attach(model, choosers.following(assignment()))
    loss(model, BATCH)
    traced = len(program._entries)
    for block in model.blocks:
        block.up.weight = nn.Parameter(block.up.weight.detach().clone())
    first = loss(model, BATCH)
    assert len(program._entries) == traced and program.assignment() == assignment()
    assert torch.equal(first, loss(model, BATCH))


def test_parameters_that_are_not_the_model_s_run_as_it_was_traced():
    model, other = made(), made()
    program = planned_forward.attach(model, choosers.uniform(Precision.BF16))
    loss(model, BATCH)
    traced = len(program._entries)
    with torch.no_grad():
        for parameter in other.parameters():
            parameter.mul_(0.5)
    given = dict(other.named_parameters())
    found = torch.func.functional_call(model, given, (BATCH,))
    planned_forward.attach(other, choosers.uniform(Precision.BF16))
    assert torch.equal(found, other(BATCH))
    assert len(program._entries) == traced


def test_a_layer_that_is_called_again_has_one_precision_and_says_why():
    class Thrice(Model):
        def forward(self, x):
            for _ in range(3):  # the second call's input has a gradient, so the third runs the second's graph
                x = self.blocks[0](x)
            return x

    graph = qsync.capture(Thrice(), BATCH)
    fixed = [op for op in graph.ops if op.kind == "linear" and op.role is Role.FIXED]
    assert fixed and all("more than once in a step, on the same weights" in op.fixed_because for op in fixed)


def test_layers_that_are_called_again_are_profiled_under_their_names():
    class Loop(Model):
        def forward(self, x):
            for _ in range(3):
                x = super().forward(x)
            return x

    profile = qsync.profile(Loop(), BATCH, loss, precisions=["fp32", "bf16"], rounds=2)
    graph = qsync.capture(Loop(), BATCH)
    assert profile.graph_hash == graph.hash and set(profile.ops) >= {op.name for op in graph.adjustable}
    values = {op.name for op in graph.ops} | {value.name for value in graph.inputs}
    assert {value for value, *_ in profile.casts} <= values


def test_parameters_that_change_places_run_as_the_layers_they_are_in_now():
    model = made()
    program = planned_forward.attach(model, choosers.following(assignment()))
    loss(model, BATCH)
    one, other = model.blocks[0], model.blocks[2]
    for name in ("up", "down"):
        a, b = getattr(one, name), getattr(other, name)
        a.weight, b.weight, a.bias, b.bias = b.weight, a.weight, b.bias, a.bias
    found = loss(model, BATCH)
    fresh = made(alike=False)
    fresh.load_state_dict(model.state_dict())
    planned_forward.attach(fresh, choosers.following(assignment()))
    assert torch.equal(found, loss(fresh, BATCH)) and program.assignment() == assignment()


class Experts(nn.Module):
    """Layers that are called where nothing is traced, each by the samples that choose it."""

    def __init__(self) -> None:
        super().__init__()
        self.experts = nn.ModuleList([nn.Linear(WIDTH, WIDTH) for _ in range(3)])

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        found = torch.zeros_like(x)
        for number, expert in enumerate(self.experts):
            rows = (x[:, 0].abs() * 3).long().clamp(max=2).eq(number).nonzero().flatten()
            if len(rows):
                found = found.index_add(0, rows, expert(x[rows]))
        return found


class Ahead(nn.Linear):
    """A layer that every sample passes, and that leaves its choice as it is."""

    def __init__(self) -> None:
        super().__init__(WIDTH, WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.cat([x[:, :1], super().forward(x)[:, 1:]], dim=1)


def chosen(*numbers: int) -> torch.Tensor:
    """Return a batch whose samples choose these experts."""
    x = torch.randn(len(numbers), WIDTH, generator=torch.Generator().manual_seed(2))
    x[:, 0] = torch.tensor(numbers) / 3 + 0.1
    return x


def test_a_layer_that_is_traced_by_itself_has_its_own_name_whatever_ran_before():
    torch.manual_seed(0)
    model = Experts()
    chooses = choosers.following({"experts.1": Precision.INT8, "experts.2": Precision.BF16})
    program = planned_forward.attach(model, chooses)
    for numbers, ran in (((1, 2), "12"), ((0, 1, 2), "012"), ((0, 0, 0, 2), "02"), ((1, 1), "1")):
        loss(model, chosen(*numbers)).backward()
        assert list(program.assignment()) == [f"experts.{number}" for number in ran]
        expected = {"experts.0": "fp32", "experts.1": "int8", "experts.2": "bf16"}
        assert all(expected[op] == precision for op, precision in program.assignment().items())


def test_sensitivities_need_a_first_batch_that_reaches_every_operator():
    few, all_of_them = chosen(0, 0, 2, 2), chosen(0, 1, 2, 1)
    found = qsync.sensitivity(Experts(), [all_of_them, few], loss, precisions=["bf16"])
    assert set(found.omega) == {"experts.0", "experts.1", "experts.2"}
    with pytest.raises(UnsupportedError, match="'experts.1' on this batch and not on the first"):
        qsync.sensitivity(Experts(), [few, all_of_them], loss, precisions=["bf16"])


def test_graphs_keep_no_weights_alive():
    model = made()
    planned_forward.attach(model, choosers.following(assignment()))
    loss(model, BATCH).backward()
    weights = [weakref.ref(parameter) for parameter in model.parameters()]
    del model
    gc.collect()
    assert not any(weight() is not None for weight in weights)


def test_a_copy_has_graphs_of_its_own():
    model = made()
    planned_forward.attach(model, choosers.following(assignment()))
    loss(model, BATCH)
    copied = copy.deepcopy(model)
    with torch.no_grad():
        for parameter in copied.parameters():
            parameter.mul_(0.5)
    other = made(alike=False)
    other.load_state_dict(copied.state_dict())
    planned_forward.attach(other, choosers.following(assignment()))
    assert torch.equal(loss(copied, BATCH), loss(other, BATCH))


def test_layers_that_are_skipped_at_random_are_refused_by_a_profile():
    torch.manual_seed(0)
    with pytest.raises(UnsupportedError, match=r"runs 'blocks.* in one step and not in another.*layerdrop"):
        qsync.profile(made(skips=True), BATCH, loss, precisions=["fp32", "bf16"], rounds=2)


def test_a_layer_that_was_skipped_at_first_gets_its_own_precision_when_it_runs():
    model = made(skips=True)
    program = planned_forward.attach(model, choosers.following(assignment()))
    seen: dict[str, Precision] = {}
    for seed in range(8):
        torch.manual_seed(seed)
        value = loss(model, BATCH)
        if value.requires_grad:
            seen |= program.assignment()
            assert program.assignment().items() <= assignment().items()
    assert seen == assignment()


def test_a_graph_is_read_once_for_the_parameters_of_each_name():
    graph = torch.fx.Graph()
    x, weight = graph.placeholder("x"), graph.placeholder("weight")
    graph.output(graph.call_function(torch.mul, (x, weight)))
    example = x.meta["example_value"] = torch.zeros(3)
    one, two, strange = (nn.Parameter(torch.ones(3)) for _ in range(3))
    names, read = {id(one): "one", id(two): "two"}, []

    def reading(module: torch.fx.GraphModule, inputs: list[object]) -> int:
        read.append(inputs)
        return len(read)

    shared = SharedGraph(torch.fx.GraphModule({}, graph), [BATCH, one], lambda: names, reading)
    x.meta.clear()  # as the tracer does
    assert [shared.of([BATCH, value]) for value in (one, two, strange, two, one)] == [1, 2, 1, 2, 1]
    assert read[1][0] is example and read[1][1] is two and len(read) == 2
    new = nn.Parameter(torch.ones(3))
    names[id(new)] = "two"
    assert shared.of([BATCH, new]) == 2 and len(read) == 2
    names[id(one)], names[id(two)] = "two", "one"
    assert [shared.of([BATCH, value]) for value in (one, two)] == [2, 1]


def test_the_first_batch_under_a_plan_need_not_reach_every_layer():
    torch.manual_seed(0)
    model, example = Experts(), chosen(0, 1, 2, 1)
    graph = trace_step(model, example, loss)
    planned = dict(zip((op.name for op in graph.adjustable), PRECISIONS, strict=True))
    plan = qsync.Plan(graph.model, graph.hash, {"all": ClassPlan(planned)}, batch=graph.batch_shapes)
    qsync.wrap(model, plan)
    program = planned_forward.programs[model]
    for numbers, ran in (((0, 0, 2, 2), "02"), ((0, 1, 2, 1), "012")):
        loss(model, chosen(*numbers)).backward()
        assert program.assignment() == {f"experts.{number}": planned[f"experts.{number}"] for number in ran}


def test_numbers_of_samples_per_expert_are_no_batch_that_was_never_profiled(capsys):
    model = nn.Sequential(Ahead(), Experts())
    graph = trace_step(model, chosen(0, 1, 2, 1), loss)
    assignment = {op.name: Precision.BF16 for op in graph.adjustable}
    plan = qsync.Plan(graph.model, graph.hash, {"all": ClassPlan(assignment)}, batch=graph.batch_shapes)
    qsync.wrap(model, plan)
    for numbers in ((0, 1, 1, 2), (0, 0, 1, 2)):
        loss(model, chosen(*numbers)).backward()
    assert "never profiled" not in capsys.readouterr().err
    torch._dynamo.reset()
    qsync.wrap(model, plan)
    loss(model, chosen(0, 1, 2, 0, 1)).backward()
    assert "a batch of 5x16 was never profiled: it runs as planned for 4x16" in capsys.readouterr().err


def test_a_plan_of_more_layers_than_the_model_has_is_refused():
    model = Experts()
    graph = trace_step(model, chosen(0, 1, 2, 1), loss)
    assignment = {op.name: Precision.BF16 for op in graph.adjustable} | {"experts.3": Precision.BF16}
    qsync.wrap(model, qsync.Plan(graph.model, graph.hash, {"all": ClassPlan(assignment)}))
    with pytest.raises(MismatchError, match="assigns 'experts.3', which Experts lacks"):
        loss(model, chosen(0, 0, 2, 2))
