"""Whatever hangs on a model finds its state, after planning, bitwise as it was."""

from __future__ import annotations

import random
from collections import Counter, deque
from copy import deepcopy
from dataclasses import dataclass
from enum import Enum

import numpy as np
import pytest
import torch
from torch import nn
from torch.autograd.graph import get_gradient_edge, register_multi_grad_hook, saved_tensors_hooks
from torch.nn.modules.module import register_module_forward_hook

import qsync
from qsync.errors import UnsupportedError
from qsync.hybrid_training import job_plan
from qsync.tracing.held_state import undisturbed

NUM_CALLS = 0
SEEN: Counter[str] = Counter()


class Network(nn.Module):
    calls = 0  # of the class

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.body, self.norm, self.head = nn.Linear(16, 32), nn.BatchNorm1d(32), nn.Linear(32, 8)
        self.steps, self.largest, self.mask = 0, torch.ones(()), None

    def forward(self, x):
        return self.head(torch.relu(self.norm(self.body(x))))


@dataclass(slots=True)
class Slots:
    num: int = 0


class Average:
    """An average of the weights, as a library for it keeps one."""

    def __init__(self, model):
        self.shadows = [p.detach().clone() for p in model.parameters()]
        self.num = 0

    def update(self, model, *_):
        self.num += 1
        for shadow, parameter in zip(self.shadows, model.parameters(), strict=True):
            shadow.lerp_(parameter.detach(), 0.1)


def step_after_each_gradient(model):
    made = {p: torch.optim.AdamW([p], lr=0.1) for p in model.parameters()}

    def step(p):
        made[p].step()
        made[p].zero_grad()

    for p in model.parameters():
        p.register_post_accumulate_grad_hook(step)
    return lambda: [one.state_dict() for one in made.values()]


def step_before_each_gradient(model):
    """The weights themselves are written to as gradients pass, without any optimizer."""

    def update(gradient, parameter):
        parameter.data.add_(gradient, alpha=-0.1)
        return torch.zeros_like(gradient)

    for p in model.parameters():
        p.register_hook(lambda gradient, p=p: update(gradient, p))
    return list


def step_where_gradients_are_added_up(model):
    optimizer, nodes = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9), []
    for p in model.parameters():
        nodes.append(get_gradient_edge(p).node)
        nodes[-1].register_hook(lambda *_: optimizer.step())
        nodes[-1].register_prehook(lambda gradients: SEEN.update(["node"]))
    return lambda: (optimizer.state_dict(), len(nodes))


def step_after_several_gradients(model):
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    schedule = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.5)

    def step(gradients):
        optimizer.step()
        schedule.step()

    register_multi_grad_hook(list(model.parameters()), step)
    return lambda: (optimizer.state_dict(), schedule.state_dict())


def step_after_a_module(model):
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    model.head.register_full_backward_hook(lambda *_: optimizer.step())
    return optimizer.state_dict


def masks_that_count(model):
    mask, counted = torch.ones(32, 16).tril(), []
    model.body.weight.register_hook(lambda gradient: counted.append(1) or gradient * mask)
    return lambda: (counted, mask)


def counters(model):
    num, slots, lists = 0, Slots(), {"calls": deque([1]), "seen": {3}}

    def count(module, *_):
        nonlocal num
        global NUM_CALLS
        num += 1
        slots.num += 1
        NUM_CALLS += 1
        SEEN["forward"] += 1
        Network.calls += 1
        module.steps += 1
        count.calls = getattr(count, "calls", 0) + 1
        lists["calls"].append(num)
        lists["seen"].add(num)

    model.register_forward_hook(count)
    model.head.register_full_backward_hook(lambda *_: lists["calls"].append("backward"))
    return lambda: (num, slots.num, NUM_CALLS, dict(SEEN), Network.calls, model.steps, vars(count), lists)


def weights_that_forward_writes(model):
    def normalize(module, _):
        with torch.no_grad():
            module.weight.div_(module.weight.norm())
            module.bias.data = module.bias.data + 1.0
        model.body.weight.requires_grad_(False)

    model.head.register_forward_pre_hook(normalize)
    return lambda: [p.requires_grad for p in model.parameters()]


def averages(model):
    average = Average(model)
    model.register_forward_hook(average.update)
    return lambda: vars(average)


def tensors_that_modules_hold(model):
    def note(module, inputs, output):
        module.largest.mul_(0.5)
        module.mask = torch.ones(3)
        module.register_buffer("late", torch.ones(2))
        module.body.weight.main_gradient = torch.ones(2)
        module.norm.running_mean = torch.zeros(32)

    model.register_forward_hook(note)
    return lambda: (
        model.largest, model.mask, list(model._buffers), model.norm.running_mean, vars(model.body.weight)
    )  # fmt: skip


def random_numbers(model):
    own, python, numpy = torch.Generator(), random.Random(0), np.random.default_rng(0)

    def draw(module, inputs):
        number = torch.rand((), generator=own) + torch.rand(()) + random.random() + np.random.rand()
        return (inputs[0] + number * python.random() * numpy.random(),)

    model.register_forward_pre_hook(draw)
    return lambda: (
        own.get_state(), torch.get_rng_state(), python.getstate(), numpy.bit_generator.state,
        random.getstate(), np.random.get_state(legacy=False),
    )  # fmt: skip


def gradients_of_activations(model):
    found, histogram = [], np.zeros(4)

    def watch(module, inputs, output):
        output.register_hook(found.append)
        histogram[0] += 1

    model.body.register_forward_hook(watch)
    return lambda: (found, histogram)


def hooks_that_add_hooks(model):
    def add(module, *_):
        module.weight.register_hook(lambda gradient: SEEN.update(["late"]))
        module.weight.register_post_accumulate_grad_hook(lambda _: SEEN.update(["later"]))
        module.register_forward_hook(lambda *_: None)

    model.head.register_forward_hook(add)
    return lambda: (list(model.head._forward_hooks), dict(SEEN))


KINDS = [
    step_after_each_gradient, step_before_each_gradient, step_where_gradients_are_added_up,
    step_after_several_gradients, step_after_a_module, masks_that_count, counters,
    weights_that_forward_writes, averages, tensors_that_modules_hold, random_numbers,
    gradients_of_activations, hooks_that_add_hooks,
]  # fmt: skip


def same(one, other):
    """Whether two states are equal, number for number."""
    if isinstance(one, torch.Tensor):
        return one.dtype == other.dtype and torch.equal(one, other)
    if isinstance(one, np.ndarray):
        return np.array_equal(one, other)
    if isinstance(one, dict):
        return list(one) == list(other) and all(same(one[key], other[key]) for key in one)
    if isinstance(one, (list, tuple)):
        return len(one) == len(other) and all(map(same, one, other))
    return one == other


def loss_fn(model, x):
    return model(x).square().mean()


def states_of(model, state):
    gradients = [p.grad for p in model.parameters()]
    hooks = [[*(hooks or {})] for p in model.parameters()
             for hooks in (p._backward_hooks, p._post_accumulate_grad_hooks)]  # fmt: skip
    return deepcopy((state(), model.state_dict(), gradients, model.training)), hooks


@pytest.mark.parametrize("hang", KINDS, ids=lambda hang: hang.__name__)
def test_what_hangs_on_a_model_is_left_alone(hang):
    model, x = Network(), torch.randn(8, 16)
    state = hang(model)
    model.body.bias.grad = torch.ones(32)
    before = states_of(model, state)
    with undisturbed(model, loss_fn):
        for _ in range(2):
            loss_fn(model, x).backward()
            assert model.head.weight.grad is not None  # none has stepped and let it go
    assert same(states_of(model, state), before)
    loss_fn(model, x).backward()
    assert not same(states_of(model, state), before)  # the hooks are there again


@pytest.fixture(autouse=True)
def quickly(monkeypatch, tmp_path):
    monkeypatch.setenv("QSYNC_PROFILE_S", "0.1")
    monkeypatch.setattr(job_plan, "cache_folder", lambda chosen: tmp_path)


def planned(model, x):
    qsync.unwrap(qsync.hybrid(model, x, loss_fn, base="fp32", precisions=["fp32"]))


VERBS = {
    "capture": qsync.capture,
    "profile": lambda model, x: qsync.profile(model, x, loss_fn, precisions=["fp32"], rounds=1),
    "sensitivity": lambda model, x: qsync.sensitivity(model, [x], loss_fn),
    "hybrid": planned,
}


@pytest.mark.filterwarnings("ignore:.*was traced 8 times")  # its hooks keep lists
@pytest.mark.parametrize("verb", VERBS)
def test_every_verb_leaves_all_of_it_alone(verb):
    model, x = Network(), torch.randn(8, 16)
    apart = (weights_that_forward_writes, random_numbers)  # they make a loss that a step later differs
    states = [hang(model) for hang in KINDS if hang not in apart]
    before = states_of(model, lambda: [state() for state in states])
    VERBS[verb](model, x)
    assert same(states_of(model, lambda: [state() for state in states]), before)


def test_hooks_that_reach_no_weight_are_part_of_a_step():
    class Called(Exception):
        pass

    def called(*_):
        raise Called

    with pytest.raises(Called):
        model = Network()
        model.body.weight.register_hook(called)
        qsync.profile(model, torch.randn(8, 16), loss_fn, precisions=["fp32"], rounds=1)
    with pytest.raises(Called):
        model = Network()
        model.head.register_full_backward_hook(called)
        qsync.profile(model, torch.randn(8, 16), loss_fn, precisions=["fp32"], rounds=1)


def test_hooks_of_all_modules_and_of_saved_tensors():
    model, x, counted = Network(), torch.randn(8, 16), Counter()
    handle = register_module_forward_hook(lambda *_: counted.update(["module"]))
    try:
        with saved_tensors_hooks(lambda t: counted.update(["saved"]) or t, lambda t: t):
            with undisturbed(model):
                loss_fn(model, x).backward()
                assert counted["module"] and counted["saved"]
            assert not counted
    finally:
        handle.remove()


def test_a_head_outside_of_the_model_that_steps_inside_backward():
    model, x, head = Network(), torch.randn(8, 16), nn.Linear(8, 1)
    state = step_after_each_gradient(head)
    before = states_of(head, state)
    qsync.sensitivity(model, [x], lambda model, x: head(model(x)).square().mean())
    assert same(states_of(head, state), before)


def test_numbers_too_many_to_copy_are_refused_and_only_if_they_change(monkeypatch):
    monkeypatch.setattr("qsync.tracing.held_state._COPIED_BYTES", 2**10)
    model, x, large = Network(), torch.randn(8, 16), torch.zeros(2**20)
    model.register_forward_hook(lambda *_: large.sum())
    with undisturbed(model):
        model(x)
    model.register_forward_hook(lambda *_: large.add_(1))
    message = r"shape \(1048576,\), too large to be put back"
    with pytest.raises(UnsupportedError, match=message), undisturbed(model):
        model(x)


class Kind(Enum):
    PLAIN = "plain"


def test_a_model_may_hold_a_class_that_nobody_may_write():
    """An Enum refuses that its members are set anew."""
    model = nn.Linear(2, 2)
    model.kind, model.kinds = Kind.PLAIN, [Kind]
    with undisturbed(model):
        model.kinds.clear()
    assert model.kinds == [Kind] and Kind.PLAIN.value == "plain"
