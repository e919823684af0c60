"""Arguments of public functions that are no such record: one sentence says what to give."""

from __future__ import annotations

import copy
import math
from dataclasses import replace

import pytest
import torch
from graphs import cluster_of, mlp, profile_of, sensitivity_of

import qsync
from qsync.distributed.plan_cache import cache_folder
from qsync.errors import (
    CalibrationError,
    FormatError,
    MismatchError,
    QSyncError,
    TracingError,
    UnsupportedError,
)

GRAPH, CLUSTER = mlp(3, width=32, rows=16), cluster_of()
PROFILES = {name: profile_of(GRAPH, name, slow=s) for name, s in (("train", 1.0), ("infer", 1.4))}
PARTS = (GRAPH, PROFILES, sensitivity_of(GRAPH), CLUSTER)


@pytest.mark.parametrize(
    ("place", "given", "words"),
    [
        (0, "graph.json", "graph is a str, 'graph.json'; give what qsync.capture returns"),
        (1, [1], "profiles is a list"),
        (1, {"train": "profile.json"}, r"profiles\['train'\] is a str"),
        (2, {}, "sensitivity is a dict"),
        (3, "cluster.toml", "cluster is a str, 'cluster.toml'; give what qsync.Cluster.load returns"),
        (3, replace(CLUSTER, link=replace(CLUSTER.link, latency_s=-1.0)), "latency_s"),
        (3, replace(CLUSTER, link=replace(CLUSTER.link, bytes_per_s=math.nan)), "bytes_per_s"),
        (3, replace(CLUSTER, classes=(replace(CLUSTER.classes[0], count=0),)), "count: expected `int` >= 1"),
        (3, replace(CLUSTER, classes=(CLUSTER.classes[0],) * 2), "twice"),
        (3, replace(CLUSTER, classes=None), "cluster, classes: expected `array`"),
        (3, replace(CLUSTER, classes=("train",)), "classes, entry 1: expected `object`"),
        (
            3,
            replace(CLUSTER, link={"latency_s": 1e-5, "bytes_per_s": 1e9}),
            "the link of the cluster is a dict",
        ),
    ],
)
def test_what_no_file_could_hold_is_refused_by_plan_and_replay(place, given, words):
    parts = [*PARTS[:place], given, *PARTS[place + 1 :]]
    with pytest.raises(FormatError, match=words):
        qsync.plan(*parts)
    if place != 2:
        with pytest.raises(FormatError, match=words):
            qsync.replay(parts[0], qsync.plan(*PARTS, slack=0.2), parts[1], parts[3])


def test_profiles_under_each_other_s_names_are_refused():
    train, infer = PROFILES.values()
    assert qsync.plan(GRAPH, {"train": train, "infer": train}, *PARTS[2:]).classes
    with pytest.raises(MismatchError, match="of infer is given as that of 'train', and 'infer' has that of"):
        qsync.plan(GRAPH, {"train": infer, "infer": train}, *PARTS[2:])


@pytest.mark.parametrize("folder", [5, "a\0b"])
def test_a_cache_folder_that_is_no_path_is_refused(folder):
    with pytest.raises(FormatError, match="cache_dir must be the path of a folder"):
        cache_folder(folder)


def test_a_plan_s_file_is_no_plan():
    with pytest.raises(
        FormatError, match="plan is a str, 'plan.json'; give what qsync.plan or qsync.Plan.load"
    ):
        qsync.replay(GRAPH, "plan.json", PROFILES, CLUSTER)
    layer = torch.nn.Linear(4, 4)
    with pytest.raises(FormatError, match="plan is a str, 'plan.json'"):
        qsync.hybrid(layer, torch.ones(2, 4), plan="plan.json")
    with pytest.raises(FormatError, match="model must be a torch.nn.Module, found 'model'"):
        qsync.capture("model", torch.ones(2, 4))
    with pytest.raises(FormatError, match="model must be a torch.nn.Module, found 'model'"):
        qsync.hybrid("model", torch.ones(2, 4))
    with pytest.raises(FormatError, match="bucket_cap_bytes is of qsync.plan; give bucket_cap_mb"):
        qsync.hybrid(layer, torch.ones(2, 4), lambda m, b: m(b).sum(), bucket_cap_bytes=2**20)


class Pair(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.maker, self.judge = torch.nn.Linear(8, 8), torch.nn.Linear(8, 1)

    def forward(self, x):
        return self.judge(self.maker(x))


def test_a_loss_that_calls_parts_alone_is_refused():
    batch, words = torch.randn(4, 8), "the loss calls parts of .*, but never"

    def loss(model, x):
        return model.judge(model.maker(x)).mean()

    with pytest.raises(TracingError, match=words):
        qsync.profile(Pair(), batch, loss, precisions=["fp32"], seconds=0.1)
    with pytest.raises(TracingError, match=words):
        qsync.sensitivity(Pair(), [batch], loss)


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"budgets": {"infer": "16G"}}, "memory budget of 'infer' must be a number of bytes, found '16G'"),
        ({"budgets": {"infer": True}}, "memory budget of 'infer' must be a number of bytes"),
        ({"budgets": "1G"}, "budgets must be a dict of class -> bytes, found '1G'"),
        ({"pins": "fp32"}, "pins must be a dict of pattern -> precision"),
        ({"pins": {3: "fp32"}}, "pins must be a dict of pattern -> precision"),
        ({"saving_less": {"infer": None}}, r"saving_less\['infer'\] must be a list of patterns, found None"),
        ({"saving_less": {"infer": {"*"}}}, r"saving_less\['infer'\] must be a list of patterns"),
        ({"together": None}, "together must be a list of lists"),
        ({"together": ["layers.*"]}, "together must be a list of lists"),
        ({"bucket_cap_bytes": "1"}, "bucket_cap_bytes must be a number of bytes, found '1'"),
        ({"levers": "recompute"}, "levers must be a list of names, found 'recompute'"),
        ({"levers": 3}, "levers must be a list of names, found 3"),
        ({"levers": ["buckets"], "least_samples": 2.5}, "least_samples must be a whole number from 1"),
        ({"block_levers": ["buckets"]}, "block_levers must be of 'recompute' and 'save_less'"),
        ({"levers": ["share"], "other": "x"}, "other is a str"),
    ],
    ids=str,
)
def test_options_of_plan_of_another_kind(options, words):
    with pytest.raises(FormatError, match=words):
        qsync.plan(*PARTS, slack=0.2, **options)


@pytest.mark.parametrize(
    ("plan", "options", "words"),
    [
        ({"train": {}, "infer": "int8"}, {}, "assignment of 'infer' must be a dict of operator -> precision"),
        ({"train": {}, "infer": None}, {}, "assignment of 'infer' must be a dict"),
        ({"train": {}, "infer": {"layers.0": ["int8"]}}, {}, "assignment of 'infer' must be a dict"),
        ({"train": {}, "infer": {}}, {"bucket_cap": 1}, "bucket_cap.*bucket_cap_bytes"),
        ({"train": {}, "infer": {}}, {"bucket_cap_bytes": "x"}, "bucket_cap_bytes must be a number of bytes"),
    ],
)
def test_what_replay_cannot_take(plan, options, words):
    with pytest.raises(FormatError, match=words):
        qsync.replay(GRAPH, plan, PROFILES, CLUSTER, **options)


@pytest.mark.parametrize(
    ("levers", "words"),
    [
        (["shares"], "unknown lever 'shares': choose from share"),
        ("share", "levers must be a list of names, found 'share'"),
    ],
    ids=str,
)
def test_levers_of_hybrid_are_checked_before_anything_is_profiled(levers, words):
    def loss_fn(model, batch):
        raise AssertionError("the model ran")

    with pytest.raises((FormatError, MismatchError), match=words):
        qsync.hybrid(torch.nn.Linear(4, 4), torch.ones(2, 4), loss_fn, levers=levers)


LAYER, ROWS = torch.nn.Sequential(torch.nn.Linear(4, 2)), torch.ones(3, 4)


def squared(model, batch):
    return model(batch).square().mean()


@pytest.mark.parametrize(
    ("loss_fn", "words"),
    [
        (lambda model, batch: squared(model, batch).item(), "the loss is a float, .*; return the loss alone"),
        (lambda model, batch: (squared(model, batch), 1), "the loss is a tuple, .*; return the loss alone"),
        (lambda model, batch: squared(model, batch).detach(), "the loss has no gradient: it was detached"),
        (torch.no_grad()(squared), "the loss has no gradient"),
    ],
)
@pytest.mark.parametrize("of", [qsync.profile, lambda m, b, f, **_: qsync.sensitivity(m, [b], f)])
def test_a_loss_that_cannot_be_trained_on_is_refused(loss_fn, words, of):
    with pytest.raises(CalibrationError, match=words):
        of(copy.deepcopy(LAYER), ROWS, loss_fn, precisions=["fp32"], rounds=1)


def test_what_makes_no_optimizer_and_no_list_of_batches_is_refused():
    layer = copy.deepcopy(LAYER)
    given = {"precisions": ["fp32"], "rounds": 1}
    with pytest.raises(CalibrationError, match="make_optimizer is a SGD; give a function"):
        qsync.profile(layer, ROWS, squared, make_optimizer=torch.optim.SGD(layer.parameters()), **given)
    with pytest.raises(CalibrationError, match="make_optimizer made None; give a function"):
        qsync.profile(layer, ROWS, squared, make_optimizer=lambda parameters: None, **given)
    with pytest.raises(FormatError, match="device_class is a str, 'infer'; give what qsync.DeviceClass"):
        qsync.profile(layer, ROWS, squared, device_class="infer", **given)
    with pytest.raises(CalibrationError, match="batches must be a list of batches, found None"):
        qsync.sensitivity(layer, None, squared)
    with pytest.raises(UnsupportedError, match="unknown indicator None"):
        qsync.sensitivity(layer, [ROWS], squared, indicator=None)
    assert qsync.sensitivity(layer, (ROWS for _ in range(1)), squared).omega


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"emulated_share": math.nan}, r"emulated_share must be in \(0, 1\], found nan"),
        ({"emulated_share": 0.0}, r"emulated_share must be in \(0, 1\], found 0.0"),
        ({"emulated_share": "x" * 5000}, r"emulated_share must be in .*\(5000 characters\)"),
        ({"device_class": ""}, "device_class must be a name, found ''"),
        ({"device_class": 3}, "device_class must be a name, found 3"),
        ({"bucket_cap_mb": math.nan}, "bucket_cap_mb must be positive, found nan"),
        ({"bucket_cap_mb": -1}, "bucket_cap_mb must be positive, found -1"),
        ({"bucket_cap_mb": "25"}, "bucket_cap_mb must be positive, found '25'"),
        ({"precisions": ["int7"]}, "unknown precision 'int7'"),
    ],
)
def test_options_of_hybrid_of_another_kind(options, words):
    with pytest.raises(QSyncError, match=words) as error:
        qsync.hybrid(copy.deepcopy(LAYER), ROWS, squared, **options)
    assert len(str(error.value)) < 300


@pytest.mark.parametrize("options", [{"rounds": "3"}, {"rounds": 0}, {"seconds": math.nan}, {"seconds": "1"}])
def test_numbers_of_profile_that_measure_nothing(options):
    with pytest.raises(CalibrationError, match="must be .*at least"):
        qsync.profile(LAYER, ROWS, squared, **options)


@pytest.mark.parametrize("plan", [None, 3, {"a": "fp32"}, "int7"])
def test_what_is_no_plan_is_not_run(plan):
    with pytest.raises(FormatError, match="plan must be a qsync.Plan|unknown precision"):
        qsync.wrap(LAYER, plan)
