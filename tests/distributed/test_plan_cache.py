"""Which starts of a job share a cached plan."""

from __future__ import annotations

import argparse
import subprocess
import sys
from dataclasses import replace

import torch
from graphs import cluster_of, mlp

import qsync
from qsync.distributed.plan_cache import cache_key
from qsync.operators.precision import Precision
from qsync.records.cluster import DeviceClass
from qsync.records.graph import OpGraph
from qsync.records.plans import Plan

SCRIPT = """
from functools import partial
import torch
from qsync.distributed.plan_cache import stable_text

def sgd(parameters, momentum=0.9):
    return torch.optim.SGD(parameters, momentum=momentum)

def again(parameters):
    return again(parameters)

class Loss:
    def __call__(self, model, batch):
        return model(batch).sum()

for fn in (sgd, partial(sgd, momentum=0.5), lambda parameters: torch.optim.SGD(parameters), again, Loss()):
    print(stable_text(fn))
"""


def key(make_optimizer):
    classes = [DeviceClass("cpu", "cpu", 1, 2**30, (Precision.FP32,))]
    return cache_key(OpGraph("Net", (), ()), classes, {"optimizer": make_optimizer})


def of(cls):
    return lambda parameters: cls(parameters)


def with_momentum(momentum):
    def make(parameters, momentum=momentum):
        return torch.optim.SGD(parameters, lr=0.1, momentum=momentum)

    return make


def test_another_optimizer_is_another_plan():
    makers = [
        torch.optim.SGD, torch.optim.AdamW, lambda parameters: torch.optim.SGD(parameters, lr=0.1),
        lambda parameters: torch.optim.AdamW(parameters, lr=0.1), of(torch.optim.SGD), of(torch.optim.AdamW),
        with_momentum(0.0), with_momentum(0.9),
        lambda parameters: [torch.optim.SGD(each) for each in parameters],
        lambda parameters: [torch.optim.Adam(each) for each in parameters],
    ]  # fmt: skip
    assert len({key(each) for each in makers}) == len(makers)
    assert key(of(torch.optim.SGD)) == key(of(torch.optim.SGD))


def test_a_function_has_the_same_key_in_every_process():
    command = [sys.executable, "-c", SCRIPT]
    one, other = (subprocess.run(command, capture_output=True, text=True) for _ in range(2))
    assert one.stdout.count("\n") == 5 and one.stdout == other.stdout, one.stderr


class Weighted:
    def __init__(self, weight):
        self.weight = weight

    def __call__(self, model, batch):
        return self.weight * model(batch).sum()

    def __repr__(self):
        return f"Weighted({self.weight})"


def test_another_loss_is_another_plan():
    losses = [
        None, lambda model, batch: model(batch).sum(), lambda model, batch: model(batch).square().sum(),
        Weighted(1.0), Weighted(2.0), torch.nn.MSELoss(), torch.nn.L1Loss(),
    ]  # fmt: skip
    assert len({key(each) for each in losses}) == len(losses)
    assert key(Weighted(1.0)) == key(Weighted(1.0))


def chosen_by(settings):
    """A function for each way to hold settings, none of which names what it reads in its own code."""
    plain = vars(settings)

    def of_namespace(parameters):
        return torch.optim.SGD(parameters) if settings.optimizer == "sgd" else torch.optim.AdamW(parameters)

    def of_mapping(parameters):
        return getattr(torch.optim, plain["optimizer"])(parameters)

    def chosen():
        return settings.optimizer

    def of_helper(parameters):
        return getattr(torch.optim, chosen())(parameters)

    return of_namespace, of_mapping, of_helper


def test_settings_that_a_function_reads_count_and_others_do_not():
    def settings(optimizer, run):
        return chosen_by(argparse.Namespace(optimizer=optimizer, run=run))

    first, other, later = settings("sgd", "monday"), settings("adamw", "monday"), settings("sgd", "tuesday")
    for one, two, same in zip(first, other, later, strict=True):
        assert key(one) != key(two) and key(one) == key(same)


def test_functions_and_lists_that_hold_themselves_have_a_key():
    def again(n):
        return again(n - 1) if n else endless

    endless: list[object] = []
    endless.append(endless)
    assert key(again) == key(again)


def test_what_is_trained_its_types_and_the_calls_of_a_step_make_another_plan():
    graph, classes = mlp(), cluster_of().classes
    weight = graph.parameters[0]

    def with_weight(**changes):
        inputs = tuple(replace(v, **changes) if v.name == weight.name else v for v in graph.inputs)
        return replace(graph, inputs=inputs)

    graphs = [graph, with_weight(requires_grad=False), with_weight(dtype="bf16"), replace(graph, num_calls=3)]
    assert len({cache_key(each, classes, {}) for each in graphs}) == len(graphs)
    assert cache_key(mlp(), classes, {}) == cache_key(graph, classes, {})


class Views:
    def __init__(self, number):
        self.number = number

    def __call__(self, model, batch):
        return sum(model(batch).sum() for _ in range(self.number))

    def loss(self, model, batch):
        return self(model, batch)


def test_attributes_of_a_loss_count():
    assert key(Views(1)) == key(Views(1)) != key(Views(3))
    assert key(torch.nn.CrossEntropyLoss()) != key(torch.nn.CrossEntropyLoss(label_smoothing=0.1))


def test_a_cached_plan_is_doubted_again_when_it_is_reused(tmp_path, monkeypatch, caplog):
    monkeypatch.setenv("QSYNC_PROFILE_S", "1")
    options = {"loss_fn": lambda model, batch: model(batch).square().mean(), "cache_dir": tmp_path}

    def start(**more):
        caplog.clear()
        qsync.hybrid(torch.nn.Linear(8, 3), None if more else torch.ones(4, 8), **(more or options))
        return [record.getMessage() for record in caplog.records]

    first = start()
    (file,) = tmp_path.glob("*/plan.json")
    plan = Plan.load(file)
    assert [text for text in first if text.removeprefix("qsync: ") in plan.warnings] == first
    replace(plan, warnings=("the profile was taken on a busy machine", *plan.warnings)).save(file)
    doubted = ["qsync: the profile was taken on a busy machine", *first]
    assert start() == doubted
    assert start(plan=Plan.load(file)) == doubted
    assert Plan.load(file).pin("*", "fp32").warnings == ()  # they were of another assignment
