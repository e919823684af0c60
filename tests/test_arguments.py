"""Arguments of public functions that are no such record: one sentence says what to give."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
import torch
from graphs import cluster_of, mlp, profile_of, sensitivity_of

import qsync
from qsync.errors import FormatError, TracingError

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
        (3, replace(CLUSTER, classes=(replace(CLUSTER.classes[0], count=0),)), "count must be at least 1"),
        (3, replace(CLUSTER, classes=(CLUSTER.classes[0],) * 2), "twice"),
        (3, replace(CLUSTER, classes=None), "the cluster cannot be read"),
        (3, replace(CLUSTER, classes=("train",)), "the cluster cannot be read"),
        (
            3,
            replace(CLUSTER, link={"latency_s": 1e-5, "bytes_per_s": 1e9}),
            "a link of the cluster is a dict",
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


class Pair(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.maker, self.judge = torch.nn.Linear(8, 8), torch.nn.Linear(8, 1)

    def forward(self, x):
        return self.judge(self.maker(x))


def test_a_loss_that_calls_parts_alone_is_refused():
    batch, words = torch.randn(4, 8), "the loss calls parts of .* and never"

    def loss(model, x):
        return model.judge(model.maker(x)).mean()

    with pytest.raises(TracingError, match=words):
        qsync.profile(Pair(), batch, loss, precisions=["fp32"], seconds=0.1)
    with pytest.raises(TracingError, match=words):
        qsync.sensitivity(Pair(), [batch], loss)
