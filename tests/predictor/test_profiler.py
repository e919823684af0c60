"""Profiles: every node of every lowered graph that ran has a time, and the model is left alone."""

from __future__ import annotations

import copy
import time
from dataclasses import replace
from queue import SimpleQueue

import pytest
import torch
import torch.nn.functional as F
from graphs import mlp
from torch import nn

import qsync
from qsync.backend.devices.kernel_timing import kernel_s
from qsync.errors import CalibrationError
from qsync.lowering.incremental import lower
from qsync.lowering.lowered_graph import Cast, Run
from qsync.operators.precision import Precision
from qsync.predictor.profiling import profiler as profiler_module
from qsync.predictor.profiling.clocks import CudaClock, KernelClock, LaunchClock, ShareClock, WallClock
from qsync.predictor.profiling.node_timer import NodeTimer, StepTimes
from qsync.predictor.profiling.profiler import Profiler
from qsync.predictor.profiling.step_statistics import node_costs, switch_costs, timer_seconds
from qsync.records.profiles import Cost, Profile
from qsync.records.save_less import ops_that_save_less
from qsync.replayer import Timeline, replay
from qsync.replayer.costs.class_costs import cast_cost, run_cost
from qsync.runtime import planned_forward

PRECISIONS = ["fp32", "bf16", "int8"]


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.norm, self.second = nn.Linear(32, 48), nn.BatchNorm1d(48), nn.Linear(48, 8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.second(F.dropout(F.relu(self.norm(self.first(x))), 0.1, self.training))


def loss(model: nn.Module, batch: tuple[torch.Tensor, torch.Tensor]) -> torch.Tensor:
    return F.cross_entropy(model(batch[0]), batch[1])


@pytest.mark.parametrize(
    ("optimizer", "sparse", "said"),
    [
        (torch.optim.LBFGS, False, "LBFGS failed .*closure.*; give another"),
        (torch.optim.Adam, True, "Adam failed .*sparse gradients.*SparseAdam.*; give another"),
    ],
)
def test_an_optimizer_that_cannot_step_is_one_sentence(optimizer, sparse, said):
    model = nn.Sequential(nn.Embedding(8, 8, sparse=sparse), nn.Linear(8, 8))
    with pytest.raises(CalibrationError, match=said):
        qsync.profile(
            model, torch.arange(4), lambda model, x: model(x).square().mean(),
            make_optimizer=optimizer, precisions=["fp32"],
        )  # fmt: skip


def penalized(model: nn.Module, x: torch.Tensor) -> torch.Tensor:
    """A loss that takes a gradient itself, as WGAN-GP's."""
    x = x.detach().requires_grad_()
    (gradient,) = torch.autograd.grad(model(x).sum(), x, create_graph=True)
    return (gradient.norm(dim=1) - 1).square().mean()


def test_a_gradient_that_the_loss_takes_is_no_backward():
    model = nn.Sequential(nn.Linear(8, 16), nn.SiLU(), nn.Linear(16, 1))
    profile = qsync.profile(model, torch.randn(4, 8), penalized, precisions=["fp32"], seconds=0.1, rounds=2)
    assert Profile.from_json(profile.to_json()) == profile
    assert profile.outside.forward_s > 0 and profile.outside.backward_s >= 0


class Ticks:
    """A clock that moves one second a reading, or `tick_s`."""

    def __init__(self) -> None:
        self.time, self.tick_s = 0.0, 1.0

    def now(self) -> float:
        self.time += self.tick_s
        return self.time

    def seconds(self, start: float, end: float) -> float:
        return end - start

    def settle(self) -> None:
        pass

    def held_down(self) -> str:
        return ""


BATCH = (torch.randn(64, 32), torch.randint(0, 8, (64,)))


@pytest.fixture(scope="module")
def measured() -> tuple[nn.Module, qsync.OpGraph, Profile]:
    torch.manual_seed(0)
    model = Net()
    profile = qsync.profile(model, BATCH, loss, precisions=PRECISIONS, rounds=2)
    return model, qsync.capture(model, BATCH[0]), profile


def test_every_node_of_any_lowering_has_a_cost(measured):
    _, graph, profile = measured
    assert profile.graph_hash == graph.hash and profile.shapes_hash == graph.shapes_hash
    ops = {op.name: op for op in graph.ops}
    for first in PRECISIONS:
        for second in PRECISIONS:
            lowered = lower(graph, {"first": Precision(first), "second": Precision(second)})
            for node in lowered.nodes:
                if isinstance(node, Cast):
                    assert cast_cost(profile, node).total_s >= 0
                else:
                    assert run_cost(profile, node, ops[node.op]).total_s >= 0


def test_products_have_forward_and_backward_times_at_each_precision(measured):
    _, _, profile = measured
    for op in ("first", "second"):
        assert {mode.partition(" ")[0] for mode in profile.ops[op]} == set(PRECISIONS)
        for cost in profile.ops[op].values():
            assert cost.forward_s > 0 and cost.backward_s > 0
    assert profile.optimizer_s > 0 and profile.host_s > 0 and profile.outside.forward_s > 0


def test_the_parts_of_a_profiled_step_make_up_the_whole():
    """Replayed from its own profile, a step takes what it took, to the last tick of the clock."""
    model = Net()
    program = planned_forward.attach(model, lambda graph: {})
    parameters = list(model.parameters())
    profiler = Profiler(program, lambda: loss(model, BATCH), parameters, [Precision.FP32], Ticks())
    for _ in range(3):
        profiler.round()
    profile = profiler.profile("only", machine={})
    cluster = qsync.Cluster(
        (qsync.DeviceClass("only", "cpu", 1, 2**30, (Precision.FP32,)),), qsync.Link(0.0, 1e12)
    )
    timeline = replay(profiler.graph, {"only": {}}, {"only": profile}, cluster)
    assert timeline.step_s - profile.optimizer_s == pytest.approx(profile.step_s["fp32"], rel=1e-9)


def test_the_weights_are_put_back_though_real_steps_are_taken():
    torch.manual_seed(5)
    model = Net()
    before = copy.deepcopy(model.state_dict())
    taken: SimpleQueue[bool] = SimpleQueue()  # a list would be put back

    def watched(model: nn.Module, batch: tuple[torch.Tensor, torch.Tensor]) -> torch.Tensor:
        taken.put(torch.equal(model.first.weight, before["first.weight"]))
        return loss(model, batch)

    qsync.profile(model, BATCH, watched, precisions=["fp32", "bf16"], rounds=1)
    seen = [taken.get() for _ in range(taken.qsize())]
    assert seen and not all(seen), "no step of the optimizer was ever taken"
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())


def ticking(ticks_s: list[float]) -> Profiler:
    """A profiler after rounds in which every reading of the clock takes so many seconds."""
    model = Net()
    program = planned_forward.attach(model, lambda graph: {})
    clock = Ticks()
    precisions = [Precision.FP32, Precision.BF16]
    profiler = Profiler(program, lambda: loss(model, BATCH), list(model.parameters()), precisions, clock)
    for clock.tick_s in ticks_s:
        profiler.round()
    # Evenly, however busy this machine is.
    num_samples = len(profiler._ended_at_s)
    profiler._ended_at_s = [float(k) for k in range(num_samples)]
    profiler._began_s = time.perf_counter() - num_samples
    return profiler


def test_a_slow_round_is_drift_and_not_noise():
    profiler = ticking([1.0, 2.0, 3.0])
    steady, slow = ticking([1.0, 1.0, 1.0]).profile("x", {}), profiler.profile("x", {})
    as_it_came = profiler.profile("x", {}, drift=[1.0] * len(profiler.drift_factors()))
    assert steady.drift < 1e-12 and steady.noise == 0.0
    assert slow.drift > 0.2 and slow.noise < 0.1 * slow.drift
    spreads, came = (
        [cost.spread_s / cost.total_s for cost in one.ops["first"].values()] for one in (slow, as_it_came)
    )
    assert max(spreads) < 0.5 * min(came)


def test_the_timer_is_taken_out_of_slow_and_fast_steps_alike():
    """It adds as much to a fast node as to a slow one: the costs are those of steps without it."""
    added_s, own_s = 1e-4, {"fp32": 4e-3, "bf16": 1e-3}

    def step(mode: str, more_s: float) -> StepTimes:
        run = Run("fc", mode, (mode,), mode)
        return StepTimes([(run, Cost(own_s[mode] / 4, 3 * own_s[mode] / 4 + more_s))], 0.0, Cost(0.0))

    samples = [(mode, step(mode, added_s)) for mode in own_s for _ in range(3)]
    timer_s = timer_seconds([timed for _, timed in samples], [own_s[mode] for mode, _ in samples])
    ops = node_costs(samples, [1.0] * len(samples), timer_s).ops
    assert {mode: cost.total_s for mode, cost in ops["fc"].items()} == pytest.approx(own_s)
    assert timer_seconds([timed for _, timed in samples], [None] * len(samples)) == 0.0


def test_what_a_switch_of_precision_costs_is_taken_out_of_the_products():
    """It takes as long for a small product as for a large one, and no part of either's own price."""
    graph, own_s = mlp(6), [1e-3 * (1 + k) for k in range(6)]
    switch_s = {"fp32": Cost(0.0, 0.0), "bf16": Cost(1e-4, 2e-4)}

    def step(assignment: dict[str, Precision]) -> StepTimes:
        nodes = []
        for node in lower(graph, assignment).nodes:
            if isinstance(node, Run) and node.op.startswith("fc"):
                price, own = switch_s[node.mode], own_s[int(node.op[2:])]
                forward_s = own + node.after_other * price.forward_s
                nodes.append((node, Cost(forward_s, 2 * own + node.before_other * price.backward_s)))
        return StepTimes(nodes, 0.0, Cost(0.0))

    drawn = [{f"fc{k}": Precision.BF16 for k in chosen} for chosen in
             ((), range(6), (0, 1, 3), (2, 3, 5), (1, 2, 4, 5))]  # fmt: skip
    found = node_costs([(str(k), step(assignment)) for k, assignment in enumerate(drawn)], [1.0] * 5)
    for mode, price in switch_s.items():
        got = found.switch_s[mode]
        assert (got.forward_s, got.backward_s) == pytest.approx(
            (price.forward_s, price.backward_s), abs=1e-12
        )
    for k, own in enumerate(own_s):
        for cost in found.ops[f"fc{k}"].values():
            assert (cost.forward_s, cost.backward_s) == pytest.approx((own, 2 * own))


@pytest.mark.parametrize(
    ("differences", "price"),
    [((3, -2, 2, -1, 1, -3, 0.5), 0.0), ((3, 2, 2.5, 2.2, 1.8, 2.4, 2.6), 2.4), ((0.5, 0.5, 0.5), 0.5)],
)
def test_a_switch_has_a_price_where_products_agree_that_it_has(differences, price):
    """Products that differ as often the other way show noise: a price would be taken out of all of them."""
    runs = {}
    for k, difference in enumerate(differences):
        beside_other, beside_like = (
            Run(f"fc{k}", "bf16", ("bf16",), "bf16", after_other=switched) for switched in (True, False)
        )
        runs[f"fc{k}", "bf16"] = [(beside_other, Cost(9.0 + difference)), (beside_like, Cost(9.0))]
    assert switch_costs(runs)["bf16"].forward_s == pytest.approx(price)


def test_noise_makes_no_node_free():
    """A switch or a timer that seems to take longer than a product itself leaves it a part of its time."""
    switched = Run("fc", "bf16", ("bf16",), "bf16", after_other=True, before_other=True)
    samples = []
    for k in range(5):
        like, cost = k % 2 == 1, Cost(1.0 if k % 2 else 3.0, 1.0)
        others = [(Run(f"fc{j}", "bf16", ("bf16",), "bf16", after_other=not like), cost) for j in range(3)]
        samples.append((str(k), StepTimes([(switched, Cost(0.5, 0.5)), *others], 0.0, Cost(0.0))))
    found = node_costs(samples, [1.0] * 5)
    assert found.switch_s["bf16"].forward_s == pytest.approx(2.0)
    assert 0 < found.ops["fc"]["bf16"].forward_s < 0.5 == found.ops["fc"]["bf16"].backward_s
    timed = node_costs(samples, [1.0] * 5, timer_s=7.0).ops
    assert all(cost.forward_s > 0 < cost.backward_s for modes in timed.values() for cost in modes.values())
    two = [(label, StepTimes(step.nodes[:3], 0.0, Cost(0.0))) for label, step in samples]
    assert node_costs(two, [1.0] * 5).switch_s["bf16"].forward_s == 0


def test_torch_s_own_dropout_is_timed_apart_from_the_one_in_lowered_graphs():
    model = nn.Sequential(nn.Linear(8, 8), nn.Dropout(0.5), nn.Linear(8, 8))
    made = qsync.profile(
        model, torch.randn(4, 8), lambda m, b: m(b).sum(), precisions=["fp32", "bf16"], rounds=1
    )
    apart = {name: modes for name, modes in made.ops.items() if "fp32 as traced" in modes}
    assert len(apart) == 1 and all(len(modes) > 1 for modes in apart.values())


def test_rounds_end_when_a_step_is_known_or_time_is_up():
    steps = [
        qsync.profile(Net(), BATCH, loss, precisions=["fp32"], seconds=seconds).num_steps
        for seconds in (0.0, 3600.0)
    ]
    warm_up, per_round = 2, 4  # the first step traces the model; one so short is taken four times
    assert steps[0] == warm_up + 2 * per_round
    assert warm_up + 2 * per_round <= steps[1] <= warm_up + 12 * per_round


def test_the_interval_is_as_wide_as_the_profile_is_uncertain(measured):
    _, graph, profile = measured
    cluster = qsync.Cluster(
        (qsync.DeviceClass(profile.device_class, "cpu", 1, 2**30, tuple(map(Precision, PRECISIONS))),),
        qsync.Link(0.0, 1e12),
    )
    name = profile.device_class

    def replayed(**changes: float) -> Timeline:
        return replay(graph, {name: {}}, {name: replace(profile, **changes)}, cluster)

    sure, unsure = replayed(error=0.0, drift=0.0), replayed(error=0.03, drift=0.04)
    assert sure.interval_s is None
    assert unsure.interval_s is not None
    low, high = unsure.interval_s
    assert (low, high) == pytest.approx(
        ((1 - 1.645 * 0.05) * unsure.step_s, (1 + 1.645 * 0.05) * unsure.step_s)
    )
    assert Timeline.from_json(unsure.to_json()) == unsure


def test_an_emulated_share_stretches_cpu_time():
    clock = ShareClock(0.25)
    assert clock.seconds(1.0, 2.0) == 4.0
    assert WallClock().seconds(1.0, 2.0) == 1.0


def test_the_timer_gives_each_node_the_time_between_marks():
    model = Net()
    timer = NodeTimer(Ticks())
    program = planned_forward.attach(model, lambda graph: {})
    program.choose(lambda graph: {}, timer)
    timer.start()
    value = loss(model, BATCH)
    timer.loss_ready()
    value.backward()
    step = timer.finish()
    costs = {node.op: cost for node, cost in step.nodes}
    assert all(cost.forward_s == 1.0 for cost in costs.values())
    assert costs["first"].backward_s == costs["second"].backward_s == 1.0
    parts = step.host_s + step.outside.total_s + sum(cost.total_s for _, cost in step.nodes)
    assert parts == step.total_s


def test_saving_less_is_measured_beside():
    model = Net()
    plain = qsync.profile(model, BATCH, loss, precisions=PRECISIONS, rounds=1)
    assert not any(
        form in mode for modes in plain.ops.values() for mode in modes for form in ("output", "codes")
    )
    profile = qsync.profile(model, BATCH, loss, precisions=PRECISIONS, rounds=1, save_less=True)
    graph = qsync.capture(model, BATCH[0])
    ops = {op.name: op for op in graph.ops}
    able = ops_that_save_less(graph, ["*"])
    assert able
    for first in PRECISIONS:
        lowered = lower(graph, {"first": Precision(first)}, saving_less=able)
        for node in lowered.nodes:
            if isinstance(node, Run):
                assert run_cost(profile, node, ops[node.op]).total_s >= 0
    assert set(plain.step_s) < set(profile.step_s)


def test_a_profile_says_what_held_the_clock_down():
    class Warming(WallClock):
        """A device that gets hot in its second round."""

        asked = 0

        def held_down(self) -> str:
            self.asked += 1
            return "heat" if self.asked > 1 else ""

    model = Net()
    program = planned_forward.attach(model, lambda graph: {})
    profiler = Profiler(
        program, lambda: loss(model, BATCH), list(model.parameters()), [Precision.FP32], Warming()
    )
    profiler.round()
    cool = profiler.profile("cpu", {})
    profiler.round()
    profiler.round()
    hot = profiler.profile("cpu", {})
    assert cool.held_down == () and hot.held_down == ("heat",)
    assert Profile.from_json(hot.to_json()).held_down == ("heat",)
    assert "held_down" not in cool.to_json()


class _NoGpu(CudaClock, WallClock):
    """The clock of a GPU whose work is done when it is launched."""

    now, seconds, settle, held_down = WallClock.now, WallClock.seconds, WallClock.settle, WallClock.held_down


@pytest.fixture
def launching(monkeypatch):
    """A profiler that has timed launches apart, as on a GPU."""
    for name in ("KernelClock", "LaunchClock"):
        monkeypatch.setattr(profiler_module, name, WallClock)
    model = Net()
    program = planned_forward.attach(model, lambda graph: {})
    precisions = [Precision(p) for p in PRECISIONS]
    profiler = Profiler(program, lambda: loss(model, BATCH), list(model.parameters()), precisions, _NoGpu())
    profiler.round()
    return profiler


def test_launches_are_priced_wherever_kernels_are(launching):
    profile = launching.profile("gpu", {})
    launches = profile.launches
    assert {op: set(modes) for op, modes in launches.ops.items()} == {
        op: set(modes) for op, modes in profile.ops.items()
    }
    assert (
        launches.casts.keys() == profile.casts.keys() and launches.cast_fit.keys() == profile.cast_fit.keys()
    )
    assert launches.optimizer_s > 0 and launches.host_s > 0 and launches.launches is None
    assert Profile.from_json(profile.to_json()) == profile
    assert profile.step_s.keys() >= set(PRECISIONS)


def test_launches_take_what_they_take_where_the_host_does_not_wait(launching):
    found = launching._launches
    whole = [step.total_s + s for (_, step), s in zip(found.samples, found.optimizer_s, strict=True)]
    found.free.clear()
    for (label, _), seconds in zip(found.samples, whole, strict=True):
        found.free[label] = [(0.8 * seconds, 2 * seconds)]
    assert found.part_without_waits() == pytest.approx(0.8)
    first = found.samples[0][0]
    found.free[first] = [(0.5 * whole[0], whole[0])]  # of the others the GPU's queue was full
    assert found.part_without_waits() == pytest.approx(0.5)
    for label in found.free:
        found.free[label] = [(1e9, 1e9)]
    assert found.part_without_waits() == 1.0


@pytest.mark.cuda
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")
def test_kernels_are_timed_without_the_pauses_of_the_host():
    clock, x = KernelClock(), torch.randn(256, 256, device="cuda")
    x @ x
    start = clock.now()
    x @ x
    time.sleep(0.005)
    end = clock.now()
    clock.settle()
    assert 0 < clock.seconds(start, end) < 0.005


@pytest.mark.cuda
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")
def test_launches_are_timed_without_the_kernels():
    clock, x = LaunchClock(), torch.randn(8192, 8192, device="cuda")
    x @ x
    start = clock.now()
    y = x @ x
    end = clock.now()
    assert 0 < clock.seconds(start, end) < kernel_s(lambda: torch.mm(x, x, out=y))[0]
