"""Phases of steps in loops of every kind: passes, clipping, closures, two networks; and who is compared."""

from __future__ import annotations

import copy
import json
import pickle
import threading
from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist
from torch import nn
from two_ranks import launch, said

from qsync.distributed.monitoring import step_phases
from qsync.distributed.monitoring.drift_monitor import Monitor, Prediction
from qsync.distributed.monitoring.positions import AFTER_BACKWARD
from qsync.distributed.monitoring.step_phases import PhaseTimer
from qsync.predictor.profiling.clocks import WallClock
from qsync.replayer.explanation.phases import Phases

BATCH = torch.randn(4, 8)


class Ticks(WallClock):
    """A clock that moves when a test says so: nothing that the machine does takes time."""

    wall_s = cpu_s = 0.0

    def now(self) -> float:
        return self.wall_s

    def sleep(self, seconds: float) -> None:
        self.wall_s += seconds

    def work(self, seconds: float) -> None:
        self.wall_s += seconds
        self.cpu_s += seconds


CLOCK = Ticks()


@pytest.fixture(autouse=True)
def clock(monkeypatch):
    monkeypatch.setattr(step_phases, "WallClock", lambda: CLOCK)
    monkeypatch.setattr(step_phases, "time", SimpleNamespace(thread_time=lambda: CLOCK.cpu_s))


class Slow(nn.Module):
    """A model whose forward takes a known time."""

    def __init__(self, seconds: float = 0.0) -> None:
        super().__init__()
        self.layer, self.seconds = nn.Linear(8, 4), seconds

    def forward(self, x):
        CLOCK.sleep(self.seconds)
        return self.layer(x)


def run(timer: PhaseTimer, step, number: int = 3) -> list[Phases]:
    for _ in range(number):
        step()
    timer.settle()
    timer.stop()
    assert len(timer.steps) == number - 1
    return list(timer.steps)


def test_time_between_passes_is_not_compute():
    model = Slow(0.01)
    optimizer, timer = torch.optim.SGD(model.parameters(), lr=0.1), PhaseTimer(model, model)

    def step():
        for _ in range(2):
            model(BATCH).sum().backward()
            CLOCK.sleep(0.02)  # of which the last is clipping
        optimizer.step()

    for phases in run(timer, step):
        assert (phases.compute_s, phases.host_s) == pytest.approx((0.02, 0.04)) and phases.blocked_s == 0.0
    assert set(timer.num_calls) == {2} and not timer.others


class Stepping(torch.optim.Optimizer):
    """An optimizer that works and waits for a known time, after it has called its closure."""

    def step(self, closure=None):
        loss = closure and closure()
        CLOCK.work(0.003)
        CLOCK.sleep(0.02)
        return loss


def test_a_closure_s_passes_are_compute_and_not_the_optimizer_s():
    model = Slow(0.01)
    optimizer, timer = Stepping(model.parameters(), {}), PhaseTimer(model, model)

    def closure():
        optimizer.zero_grad()
        loss = model(BATCH).square().mean()
        loss.backward()
        return loss

    for phases in run(timer, lambda: optimizer.step(closure)):
        assert (phases.compute_s, phases.optimizer_s) == pytest.approx((0.01, 0.023))


def test_an_optimizer_that_waits_takes_no_cpu_seconds():
    model = Slow()
    optimizer, timer = Stepping(model.parameters(), {}), PhaseTimer(model, model)

    def step():
        model(BATCH).sum().backward()
        optimizer.step()

    for phases in run(timer, step):
        assert (phases.optimizer_s, phases.optimizer_cpu_s) == pytest.approx((0.023, 0.003))


def test_hooks_are_left_nowhere_and_what_others_step_is_no_step():
    model = Slow(0.01)
    optimizer, other = (torch.optim.SGD(m.parameters(), lr=0.1) for m in (model, Slow()))
    timer = PhaseTimer(model, model)

    def step():
        model(BATCH).sum().backward()
        other.step()
        optimizer.step()

    assert len(run(timer, step)) == 2
    step()
    timer.settle()
    assert len(timer.steps) == 2
    assert not model._forward_pre_hooks and not any(p._post_accumulate_grad_hooks for p in model.parameters())


class Batches(torch.utils.data.Dataset):
    """Batches that take a known time, and that of a loader which they read from."""

    def __init__(self, inner: torch.utils.data.DataLoader | None = None) -> None:
        self.inner = inner

    def __len__(self) -> int:
        return 3

    def __getitem__(self, index: int) -> torch.Tensor:
        CLOCK.sleep(0.005)
        return next(iter(self.inner)) if self.inner else BATCH


def test_what_a_loader_keeps_the_loop_waiting_is_loading_and_the_rest_is_host():
    model = Slow(0.01)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    inner = torch.utils.data.DataLoader(Batches(), batch_size=None)
    loader = torch.utils.data.DataLoader(Batches(inner), batch_size=None)
    asked = torch.utils.data.dataloader._BaseDataLoaderIter.__next__
    timer = PhaseTimer(model, model)
    for _ in range(2):  # epochs
        for batch in loader:
            ahead = threading.Thread(target=lambda: next(iter(inner)))  # keeps nobody waiting
            ahead.start()
            ahead.join()
            with timer.fetching():  # what is no DataLoader
                CLOCK.sleep(0.005)
            model(batch).sum().backward()
            next(iter(inner))  # as for one more pass of this step
            optimizer.step()
    timer.settle()
    assert len(timer.steps) == 5
    for step in timer.steps:  # a fetch and its inner one count once
        found = step.loading_s, step.host_s, step.compute_s, step.period_s
        assert found == pytest.approx((0.02, 0.005, 0.01, 0.035))
    timer.stop()
    assert torch.utils.data.dataloader._BaseDataLoaderIter.__next__ is asked


def test_what_happens_before_the_model_inside_is_called_is_communication():
    class Around(nn.Module):  # as DDP, which hands out buffers there
        def __init__(self, inside: nn.Module) -> None:
            super().__init__()
            self.inside = inside

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            CLOCK.sleep(0.01)
            return self.inside(x)

    model = Around(Slow(0.02))
    optimizer, timer = torch.optim.SGD(model.parameters(), lr=0.1), PhaseTimer(model, model.inside)

    def step():
        model(BATCH).sum().backward()
        optimizer.step()

    for phases in run(timer, step):
        assert (phases.blocked_s, phases.compute_s) == pytest.approx((0.01, 0.02))
    assert not model._forward_pre_hooks and not model.inside._forward_pre_hooks


def test_a_second_backward_after_one_forward_counts():
    model = Slow()
    optimizer, timer = torch.optim.SGD(model.parameters(), lr=0.1), PhaseTimer(model, model)

    def step():
        y = model(BATCH)
        y.sum().backward(retain_graph=True)
        y.square().sum().backward()
        optimizer.step()

    for phases in run(timer, step):
        assert all(value >= 0 for value in phases.to_json().values())
        parts_s = phases.forward_s + phases.optimizer_cpu_s
        assert phases.period_s == pytest.approx(sum(phases.to_json().values()) - parts_s)
    assert set(timer.num_calls) == {1}


def test_few_gradients_are_watched_once_their_order_is_known():
    model = nn.Sequential(*(nn.Linear(8, 8) for _ in range(30)))
    optimizer, timer = torch.optim.SGD(model.parameters(), lr=0.1), PhaseTimer(model, model)
    for layer in model:  # known to take a millisecond
        layer.weight.register_hook(lambda _: CLOCK.sleep(0.001))

    def step():
        optimizer.zero_grad()
        model(BATCH).sum().backward()
        optimizer.step()

    for _ in range(2):
        assert len(timer._gradients) == 60
        step()
    assert len(timer._gradients) == 8
    model(BATCH).sum().backward()
    assert timer.position() == (2, AFTER_BACKWARD, 8, False)
    optimizer.step()
    timer.settle()
    assert [phases.compute_s for phases in timer.steps] == pytest.approx([0.03] * 2)  # to the last gradient

    watched = {id(p) for p in model.parameters() if p._post_accumulate_grad_hooks}
    for p in model.parameters():
        p.requires_grad_(id(p) not in watched)
    step()
    assert len(timer._gradients) == 52  # none that was watched came, so all that are trained are again


def test_an_optimizer_whose_first_parameter_is_frozen_ends_steps():
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 2))
    model[0].requires_grad_(False)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    timer, full = PhaseTimer(model, model, 10), []
    timer.when_full = lambda: full.append(1)
    for _ in range(25):
        model(torch.randn(3, 4)).sum().backward()
        optimizer.step()
    assert full and not timer.others and len(timer._passes) <= 1


def test_a_second_optimizer_in_a_step_does_not_resume():
    model, resumed = Slow(0.01), []
    timer = PhaseTimer(model, model, num_kept=2)
    optimizers = [torch.optim.SGD([p], lr=0.1) for p in model.parameters()]
    taken: list[int] = []
    timer.when_full = lambda: setattr(timer, "when_resumed", lambda: resumed.append(taken[-1]))
    for number in range(5):
        taken.append(number)
        model(BATCH).sum().backward()
        for optimizer in optimizers:
            optimizer.step()
        if resumed:
            timer.when_resumed = None
    timer.stop()
    assert resumed == [3]  # two steps after the first, and the next one


def test_passes_that_no_optimizer_ends_are_forgotten_and_said_once(monkeypatch, caplog):
    monkeypatch.setattr(step_phases, "_MOST_PASSES", 5)
    model = Slow()
    timer, optimizer = PhaseTimer(model, model, 10), torch.optim.SGD(model.parameters(), lr=0.1)
    for _ in range(30):
        model(BATCH).sum().backward()
        assert len(timer._passes) <= 5
    assert caplog.text.count("without a step of a torch.optim.Optimizer") == 1
    optimizer.step()
    for _ in range(3):
        model(BATCH).sum().backward()
        optimizer.step()
    timer.settle()
    timer.stop()
    assert list(timer.num_calls) == [1, 1, 1]


def test_another_network_that_trains_in_the_step_is_named():
    one, other = Slow(), Slow()
    timers = [PhaseTimer(one, one), PhaseTimer(other, other)]
    optimizers = [torch.optim.SGD(model.parameters(), lr=0.1) for model in (one, other)]
    for _ in range(2):
        for model, optimizer in zip((one, other), optimizers, strict=True):
            model(BATCH).sum().backward()
            optimizer.step()
    for timer in timers:
        assert timer.others == {"Slow", "SGD"}
        timer.stop()


def test_copies_and_pickles_of_a_timed_model_are_not_timed():
    model = Slow()
    timer = PhaseTimer(model, model)
    for other in (copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
        other(BATCH).sum().backward()
        assert timer._num_calls == 0
    timer.stop()


@pytest.fixture
def job(tmp_path):
    dist.init_process_group("gloo", init_method=f"file://{tmp_path}/store", rank=0, world_size=1)
    yield
    dist.destroy_process_group()


PREDICTED = Prediction({"train": Phases(0.0, 0.01, 0.0, 0.0)}, {"train": 1})


def watched(model: nn.Module, prediction: Prediction = PREDICTED, lasting_s: float = 0.0) -> Monitor:
    monitor = Monitor(model, model, prediction, "train", num_steps=3, tolerance=1.0)
    monitor.lasting_s = lasting_s
    return monitor


@pytest.mark.usefixtures("job")
@pytest.mark.parametrize("passes", [1, 3])
def test_a_step_of_several_passes_is_compared_with_as_many(passes):
    model = Slow(0.01)
    optimizer, monitor = torch.optim.SGD(model.parameters(), lr=0.1), watched(model)

    def steps(number: int) -> None:
        for _ in range(number):
            for _ in range(passes):
                model(BATCH).sum().backward()
            optimizer.step()

    steps(5)
    assert monitor.drift is None and monitor.incomparable == ""
    model.seconds = 0.05
    steps(4)
    assert (monitor.drift.rank, monitor.drift.phase) == (0, "compute")
    monitor.stop()


@pytest.mark.usefixtures("job")
def test_nobody_is_blamed_where_a_step_does_what_was_not_profiled():
    one, other = Slow(0.05), Slow(0.05)
    monitors = [watched(one), watched(other)]
    optimizers = [torch.optim.SGD(model.parameters(), lr=0.1) for model in (one, other)]
    for _ in range(5):  # a GAN
        for model, optimizer in zip((one, other), optimizers, strict=True):
            model(BATCH).sum().backward()
            optimizer.step()
    for monitor in monitors:
        assert monitor.drift is None and "trains in the same step" in monitor.incomparable
        monitor.stop()
    alone = Slow(0.05)
    monitor = watched(alone, Prediction(PREDICTED.phases, {"train": 2}))
    optimizer = torch.optim.SGD(alone.parameters(), lr=0.1)
    for _ in range(5):
        alone(BATCH).sum().backward()
        optimizer.step()
    assert monitor.drift is None
    assert monitor.incomparable == "a step calls the model 1 times, the profiled one 2 times"
    monitor.stop()


def compared(monitor: Monitor, *computes_s: float) -> None:
    """Compare steps that compute for so long, as rank 0 does after so many steps."""
    monitor.timer.steps.extend(Phases(0.0, compute_s, 0.0, 0.0) for compute_s in computes_s)
    monitor.timer.num_calls.extend(1 for _ in computes_s)
    monitor._publish()
    monitor.timer.clear()
    monitor.timer.when_resumed()


@pytest.mark.usefixtures("job")
def test_only_entries_of_the_same_steps_are_compared():
    monitor = watched(Slow())
    monitor._world_size = 2

    def publish(number: int, compute_s: float) -> None:
        phases = Phases(0.0, compute_s, 0.0, 0.0).to_json()
        monitor._store.set("1", json.dumps([number, 1, "train", 3 * compute_s, phases, phases]))

    publish(1, 0.01)
    compared(monitor, 0.01)
    assert monitor.drift is None and monitor.incomparable == ""
    compared(monitor, 0.05)  # the other rank's steps are still those before
    assert monitor.drift is None and monitor.incomparable == "ranks take different numbers of steps"
    publish(3, 0.08)
    compared(monitor, 0.05)
    assert (monitor.drift.rank, monitor.incomparable) == (1, "")
    monitor.stop()


@pytest.mark.usefixtures("job")
def test_a_stall_in_some_steps_is_blamed_where_it_recurs_and_a_single_pause_is_not():
    monitor = watched(Slow())
    stalled = (0.01, 0.01, 0.01, 0.2)
    for steps in (stalled, (0.01,) * 4, stalled):
        compared(monitor, *steps)
        assert monitor.drift is None
    compared(monitor, *stalled)
    assert (monitor.drift.rank, monitor.drift.phase) == (0, "compute")
    monitor.stop()


@pytest.mark.usefixtures("job")
def test_slow_seconds_of_a_machine_are_no_drift_and_a_slowdown_that_lasts_is():
    monitor = watched(Slow(), lasting_s=30.0)
    slow, fine = (4.0,) * 3, (0.01,) * 3
    compared(monitor, *slow)
    compared(monitor, *slow)
    assert monitor.drift is None and monitor.slow_s == pytest.approx(24.0)
    compared(monitor, *fine)
    assert monitor.slow_s == 0.0
    for _ in range(2):
        compared(monitor, *slow)
        assert monitor.drift is None
    compared(monitor, *slow)
    assert monitor.slow_s == pytest.approx(36.0)
    assert monitor.drift.phase_s == pytest.approx(4.0)
    monitor.expect(PREDICTED)  # another plan: what was slow before says nothing of it
    assert monitor.drift is None and monitor.slow_s == 0.0
    monitor.stop()


@pytest.mark.usefixtures("job")
def test_a_slowdown_near_the_tolerance_is_judged_by_all_its_steps():
    predicted = Prediction({"train": Phases(0.0, 4.0, 0.0, 0.0)}, {"train": 1})
    for computes_s, drifts in (((9.0, 7.8, 9.0), True), ((8.1, 7.5, 7.5), False), ((9.0, 5.0, 9.0), False)):
        monitor = watched(Slow(), predicted, lasting_s=60.0)  # twice as long is beyond the tolerance
        for compute_s in computes_s:
            compared(monitor, *[compute_s] * 3)
        assert (monitor.drift is not None) is drifts, computes_s
        monitor.stop()


@pytest.mark.usefixtures("job")
def test_all_steps_of_a_slow_stretch_tell_who_is_to_blame():
    monitor = watched(Slow(), lasting_s=30.0)
    monitor._world_size = 2
    for number, (own_s, others_s) in enumerate([(8.0, 6.0), (1.0, 8.0)], start=1):
        phases = Phases(0.0, others_s, 0.0, 0.0).to_json()
        monitor._store.set("1", json.dumps([number, 1, "train", 3 * others_s, phases, phases]))
        assert monitor.drift is None
        compared(monitor, *[own_s] * 3)
    assert (monitor.drift.rank, monitor.drift.phase_s) == (1, pytest.approx(7.0))
    monitor.stop()


@pytest.mark.usefixtures("job")
def test_two_models_of_a_job_publish_apart():
    one, other = (watched(Slow()) for _ in range(2))
    one._store.set("0", "of the first")
    assert one._store.check(["0"]) and not other._store.check(["0"])
    for monitor in (one, other):
        monitor.stop()


WAITS = """
from qsync.distributed.monitoring.positions import AFTER_BACKWARD
from qsync.distributed.monitoring.step_phases import PhaseTimer
from qsync.replayer.explanation.phases import median
from torch.nn.parallel import DistributedDataParallel as DDP

dist.init_process_group("gloo")

class Late(Net):
    def forward(self, x):
        time.sleep(0.5 * rank)
        return super().forward(x)

torch.manual_seed(0)
model = DDP(Late())
timer = PhaseTimer(model, model.module)
train(model, 4)
timer.settle()
found = median(timer.steps)
say(f"phases: {found.blocked_s > found.compute_s} {found.host_s < found.compute_s + found.blocked_s}")
timer.stop()
dist.destroy_process_group()
"""


@pytest.mark.dist
def test_waiting_for_another_rank_s_gradients_is_blocked_time(tmp_path):
    output = launch(tmp_path, WAITS)
    assert said(output, "phases") == ["True True", "False True"]
