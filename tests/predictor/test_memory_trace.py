"""Memory of running steps: what profiles state beyond the memory model, and where they state nothing."""

from __future__ import annotations

import os
from dataclasses import replace
from itertools import accumulate

import pytest
import torch
import torch.nn.functional as F
from graphs import cluster_of, encoder, mlp, profile_of, sensitivity_of
from torch import nn
from torch.profiler import ProfilerActivity

import qsync
from qsync.allocator import allocate
from qsync.errors import FormatError, InfeasibleError
from qsync.lowering.incremental import lower
from qsync.operators.precision import Precision
from qsync.operators.registry import PRECISIONS_BY_KIND
from qsync.predictor.memory.peak import StepMemory, peak_memory
from qsync.predictor.profiling.allocator_events import ALLOCATOR, allocator_events
from qsync.predictor.profiling.memory_trace import StepBytes, TimeMarks, residuals_of, trace_memory
from qsync.records.memory_residuals import MemoryResiduals, Residual
from qsync.records.profiles import Profile
from qsync.replayer import Recapture, replay
from qsync.replayer.levers.batch_size import at_samples, resized
from qsync.replayer.memory_breakdown import peaks
from qsync.runtime import choosers, planned_forward

PRECISIONS = ("fp32", "bf16", "int8")


class Recurrent(nn.Module):
    """An LSTM, whose scratch no model knows on all processors, and products around it."""

    def __init__(self) -> None:
        super().__init__()
        self.fc, self.lstm, self.head = nn.Linear(12, 24), nn.LSTM(24, 20, batch_first=True), nn.Linear(20, 9)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(self.lstm(F.gelu(self.fc(x)))[0])


class Packed(Recurrent):
    """The same of packed sequences, which no trace reaches."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        lengths = torch.arange(1, 1 + len(x)) * (x.shape[1] // len(x))
        packed = nn.utils.rnn.pack_padded_sequence(self.fc(x), lengths, True, enforce_sorted=False)
        return self.head(nn.utils.rnn.pad_packed_sequence(self.lstm(packed)[0], batch_first=True)[0])


class Dilated(nn.Module):
    """Convolutions for which processors have unlike kernels."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Conv2d(3, 16, 3), nn.Conv2d(16, 16, 3, dilation=3, padding=3)
        self.head = nn.Linear(16, 5)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(F.relu(self.second(F.relu(self.first(x)))).amax((2, 3)))


MODELS = {
    "recurrent": (Recurrent, (8, 32, 12)),
    "packed": (Packed, (8, 32, 12)),
    "dilated": (Dilated, (4, 3, 24, 24)),
}


def loss(model: nn.Module, x: torch.Tensor) -> torch.Tensor:
    """A loss with tensors of its own, which the graph of the model does not show."""
    y = model(x)
    return (y.float().softmax(-1) - y.sigmoid()).pow(2).mean()


def uniform(graph: qsync.OpGraph, precision: str) -> dict[str, Precision]:
    wanted = Precision(precision)
    return {op.name: wanted for op in graph.adjustable if wanted in PRECISIONS_BY_KIND[op.kind]}


def measured_peak(model: nn.Module, x: torch.Tensor, graph: qsync.OpGraph, precision: str) -> int:
    """The most bytes of a step, whose gradients are there before, beyond what it began with."""
    program = planned_forward.attach(model.train(), choosers.following(uniform(graph, precision)))
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
    for _ in range(2):
        loss(model, x).backward()
        optimizer.step()  # frees the copies of weights
        optimizer.zero_grad(set_to_none=False)
    assert program.graph.shapes_hash == graph.shapes_hash
    with allocator_events() as events:
        loss(model, x).backward()
    assert {name for name, _ in events} == {ALLOCATOR}
    return max(accumulate(num_bytes for _, num_bytes in events))


@pytest.mark.parametrize("name", list(MODELS))
def test_a_profile_makes_the_peak_of_each_precision_the_measured_one(name):
    make, shape = MODELS[name]
    torch.manual_seed(0)
    model, x = make(), torch.randn(shape)
    profile = qsync.profile(model, x, loss, precisions=PRECISIONS, seconds=0.1, rounds=1)
    graph = qsync.capture(model, (x,))
    profile.check_graph(graph)
    for precision in PRECISIONS:
        torch._dynamo.reset()
        step = StepMemory(
            lower(graph, uniform(graph, precision)), num_ranks=2, residuals=profile.memory_residuals
        )
        measured = measured_peak(model, x, graph, precision)
        assert int(step.come_and_go().max()) == pytest.approx(measured, rel=0.01), precision


def differing(lowered, i: int, saved: int, forward=0, backward=0, loss=0) -> tuple[str, StepBytes]:
    """The bytes of a step whose `i`-th operator needs so many more than predicted, and its name."""
    memory, num = StepMemory(lowered, num_ranks=2), len(lowered.graph.ops)
    most, staying = memory.come_and_go(), memory.staying()
    most[i : 2 * num - i + 1] += saved
    staying[i : 2 * num - i] += saved
    for time, num_bytes in ((i, forward), (2 * num - i, backward), (num, loss)):
        most[time] += num_bytes
    return lowered.graph.ops[i].name, StepBytes(most, staying)


def test_what_an_operator_leaves_and_what_it_takes_are_told_apart():
    lowered = lower(mlp(1), {})
    name, found = differing(lowered, 1, 100_000, 40_000, 7_000, 13_000)
    residuals = residuals_of(found, lowered)
    assert residuals.loss == Residual(forward=13_000)
    assert {op: list(own.values()) for op, own in residuals.ops.items()} == {
        name: [Residual(100_000, 40_000, 7_000)]
    }
    again = StepMemory(lowered, num_ranks=2, residuals=residuals)
    assert again.come_and_go().tolist() == found.most.tolist()


def test_a_peak_that_was_predicted_leaves_nothing_to_state():
    lowered = lower(mlp(1), {})
    peak = int(StepMemory(lowered, num_ranks=2).come_and_go().max())
    cases = {peak // 200: False, -peak // 200: False, peak // 20: True, -peak // 20: True}
    for more, states in cases.items():
        _, found = differing(lowered, 0, more)
        assert bool(residuals_of(found, lowered)) is states


def test_times_at_which_nothing_is_seen_have_the_bytes_of_the_time_before():
    model, x = nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8)), torch.randn(4, 8)
    program = planned_forward.attach(model, choosers.following({}))
    loss(model, x)
    found = trace_memory(TimeMarks(program.graph), lambda: loss(model, x), list(model.parameters()))
    assert len(found.most) == 2 * len(program.graph.ops) + 1  # no marks: all is of the first time
    assert set(found.at_end.tolist()) == {int(found.at_end[0])} and found.most[0] > found.most[1]
    assert all(parameter.grad is None for parameter in model.parameters())


@pytest.mark.parametrize("why", ["profiler", "several calls"])
def test_a_step_that_cannot_be_traced_has_no_residuals(why):
    model, x = nn.Sequential(nn.Linear(8, 8), nn.GELU(), nn.Linear(8, 8)), torch.randn(4, 8)
    options = {"precisions": ["fp32"], "seconds": 0.1, "rounds": 1}
    if why == "profiler":
        with torch.profiler.profile(activities=[ProfilerActivity.CPU]):
            found = qsync.profile(model, x, loss, **options)
    else:
        found = qsync.profile(model, x, lambda m, x: loss(m, x) + loss(m, x), **options)
    assert not found.memory_residuals and found.ops


def test_what_others_write_meanwhile_is_not_lost(capfd):
    with allocator_events():
        os.write(2, b"profile fp32, memory\n")
        torch.zeros(8)
    assert capfd.readouterr().err == "profile fp32, memory\n"


RESIDUALS = MemoryResiduals(
    {"fc0": {"fp32": Residual(4096, -64, 128)}, "act0": {"fp32": Residual(8, 0, 0)}}, Residual(forward=-16)
)


def test_residuals_read_back(tmp_path):
    graph = mlp(2)
    profile = replace(profile_of(graph), memory_residuals=RESIDUALS)
    assert Profile.load(profile.save(tmp_path / "profile.json")) == profile
    assert profile.hash != profile_of(graph).hash
    assert "memory_residuals" not in profile_of(graph).to_json()
    assert not MemoryResiduals() and RESIDUALS and MemoryResiduals(loss=Residual(forward=1))


@pytest.mark.parametrize(
    "value",
    [
        {"ops": {"fc0": None}},
        {"ops": {"fc0": {"fp32": [1, 2, "3"]}}, "loss": [0, 0, 0]},
        {"ops": {"fc0": {"fp32": [1, 2, 3, 4]}}, "loss": [0, 0, 0]},
        {"ops": {"fc0": [1, 2, 3]}, "loss": [0, 0, 0]},
        {"ops": {}, "loss": 5},
        [1],
    ],
)
def test_malformed_residuals_are_refused(value):
    with pytest.raises(FormatError, match="profile of infer, memory_residuals.*: expected .*, found"):
        Profile.from_json({**profile_of(mlp(2)).to_json(), "memory_residuals": value})


def test_several_steps_join_to_the_first_of_each_precision_and_the_largest_loss():
    first = MemoryResiduals({"a": {"fp32": Residual(1)}}, Residual(forward=5))
    second = MemoryResiduals({"a": {"fp32": Residual(2), "bf16": Residual(3)}, "b": {}}, Residual(forward=9))
    joined = MemoryResiduals.joined([first, second])
    assert joined.of("a", "fp32") == Residual(1) and joined.of("a", "bf16") == Residual(3)
    assert joined.loss.forward == 9 and joined.of("b", "bf16") == joined.of("c", "fp32") == Residual()


def test_residuals_follow_the_samples_and_leave_with_the_model():
    large, small = encoder(1, rows=16), encoder(1, rows=8)
    name = large.ops[0].name
    residuals = MemoryResiduals({name: {"fp32": Residual(1000, 10, -20)}}, Residual(forward=30))
    profile = replace(profile_of(large), memory_residuals=residuals)
    half = at_samples(profile, large, Recapture(small, {}), 8, resized(large, small, 8))
    assert half.memory_residuals.of(name, "fp32") == Residual(500, 5, -10)
    assert half.memory_residuals.loss.forward == 15
    assert not profile.what_if(small).memory_residuals


def test_plans_and_replay_count_them():
    """A residual that one precision alone has decides what fits."""
    graph = mlp(3)
    more = MemoryResiduals({op.name: {"fp32": Residual(0, 0, 1 << 20)} for op in graph.ops})
    plain = {name: profile_of(graph, name) for name in ("train", "infer")}
    profiles = {**plain, "infer": replace(plain["infer"], memory_residuals=more)}
    cluster, sensitivity = cluster_of(), sensitivity_of(graph)
    assignment = {"train": {}, "infer": {}}
    before, after = (replay(graph, assignment, p, cluster).classes for p in (plain, profiles))
    assert after["infer"].memory_bytes - before["infer"].memory_bytes >= 1 << 20
    assert after["train"].memory_bytes == before["train"].memory_bytes
    broken_down = peaks(graph, assignment, profiles, cluster)["infer"]
    assert broken_down.peak_bytes == after["infer"].memory_bytes
    lowest = {op.name: Precision.BF16 for op in graph.adjustable}
    budget = peak_memory(lower(graph, lowest), num_ranks=2).peak_bytes + (1 << 19)
    weak = replace(cluster["infer"], memory_bytes=budget)
    tight = replace(cluster, classes=(cluster["train"], weak))
    plan = allocate(graph, profiles, sensitivity, tight, slack=10.0)
    assert set(plan["infer"].lowered) == {op.name for op in graph.adjustable}
    everywhere = {op.name: dict.fromkeys(map(str, Precision), Residual(0, 0, 1 << 20)) for op in graph.ops}
    hopeless = {
        **profiles, "infer": replace(plain["infer"], memory_residuals=MemoryResiduals(everywhere)),
    }  # fmt: skip
    with pytest.raises(InfeasibleError, match="memory"):
        allocate(graph, hopeless, sensitivity, tight, slack=10.0)
