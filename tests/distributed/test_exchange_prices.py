"""Predicted bytes of every kind are those that ranks pass to their collectives; prices are measured."""

from __future__ import annotations

import pytest
from two_ranks import launch, said

pytestmark = pytest.mark.dist
BODY = """
from dataclasses import replace
from pathlib import Path
from qsync.distributed import exchange_prices, gradient_codecs
from qsync.records.compression import Message
from qsync.records.plan_folder import Basis
from qsync.replayer.communication import Bucket

ddp_profiling.PROFILE_S = exchange_prices.PROBE_S = 0.0
passed = []

def counting(name, function, own):
    def counted(*tensors, **options):
        given = tensors[own]
        passed.append(Message(name, given.numel() * given.element_size()))
        return function(*tensors, **options)
    return counted

dist.all_reduce = counting("all_reduce", dist.all_reduce, 0)
dist.all_to_all_single = counting("all_to_all", dist.all_to_all_single, 1)
gradient_codecs._all_gather = counting("all_gather", gradient_codecs._all_gather, 1)
def slow_link(*given):
    found = measure_link(*given)
    return replace(found, link=replace(found.link, bytes_per_s=1e5, latency_s=1e-6))

def net_of(model):
    return qsync.unwrap(model)

WEIGHTS = Message("all_reduce", 16)  # of a step, in a message of their own

for kind in ("none", "bf16", "int8", "int8+feedback", "powersgd:2"):
    own = Path(cache) / kind.replace(":", "-")
    torch.manual_seed(0)
    net = torch.nn.Sequential(*[torch.nn.Linear(64, n, bias=False) for n in (64, 64, 64, 8)])
    model = qsync.hybrid(
        net, batch(seed=rank), loss_fn=loss_fn, device_class=("strong", "weak")[rank], cache_dir=own,
        precisions=["fp32"], base="fp32", bucket_cap_mb=0.02,
        compression=None if kind == "none" else kind,
    )
    train(model, 2)  # DDP rebuilds its buckets
    passed.clear()
    train(model, 1)
    counted = sum(one.sent_bytes(2) for one in passed if one != WEIGHTS)
    dist.barrier()
    (folder,) = own.glob("*/")
    basis, plan = Basis.load(folder), qsync.Plan.load(folder / "plan.json")
    timeline = qsync.replay(basis.graph, plan, basis.profiles, basis.cluster)
    if kind == "none":  # DDP itself exchanges, out of sight
        counted = timeline.sent_bytes
    measured = sorted(basis.cluster.codecs) == sorted(basis.profiles["weak"].exchange_tolls)
    say(f"{kind}: {counted == timeline.sent_bytes} {int(counted)} {measured} {sorted(basis.cluster.codecs)}")

ddp_profiling.job.measure_link = (measure_link := ddp_profiling.job.measure_link) and slow_link
torch.manual_seed(0)
net = torch.nn.Sequential(*[torch.nn.Linear(64, n, bias=False) for n in (64, 64, 64, 8)])
own = Path(cache) / "auto"
model = qsync.hybrid(
    net, batch(seed=rank), loss_fn=loss_fn, device_class=("strong", "weak")[rank], cache_dir=own,
    precisions=["fp32"], base="fp32", bucket_cap_mb=0.02, compression="auto",
)
(folder,) = own.glob("*/")
basis, plan = Basis.load(folder), qsync.Plan.load(folder / "plan.json")
errors = {kind: len(each) for kind, each in basis.sensitivity.exchange.items()}
ordered = [sum(basis.sensitivity.exchange[kind]) for kind in ("bf16", "int8", "powersgd:4")]
say(f"errors: {errors} {0.0 < ordered[0] < ordered[1] < ordered[2]}")
say(f"effective: {sum(basis.sensitivity.exchange['int8+feedback']) < 0.6 * ordered[1]}")
train(model, 2)
passed.clear()
train(model, 1)
counted = sum(one.sent_bytes(2) for one in passed if one != WEIGHTS)
timeline = qsync.replay(basis.graph, plan, basis.profiles, basis.cluster)
say(f"auto: {counted == timeline.sent_bytes} {sorted(set(plan.compression.values()))} {counted}")
again = qsync.hybrid(net_of(model), plan=plan, device_class=("strong", "weak")[rank])
train(again, 2)
passed.clear()
train(again, 1)
say(f"followed: {sum(one.sent_bytes(2) for one in passed if one != WEIGHTS) == counted}")
noise, bucket = {"weight": torch.randn(64, 64)}, Bucket(("weight",), 4 * 64 * 64, 0)
say(f"offered: {list(exchange_prices.compression_errors(noise, [bucket], ['int8', 'powersgd:2']))}")
dist.destroy_process_group()
"""


@pytest.fixture(scope="module")
def output(tmp_path_factory) -> str:
    return launch(tmp_path_factory.mktemp("prices"), BODY)


def test_a_slow_link_chooses_kinds_by_measured_errors_and_a_plan_is_followed(output):
    for text in said(output, "errors"):
        assert text == str(dict.fromkeys(("bf16", "int8", "int8+feedback", "powersgd:4"), 2)) + " True"
    assert said(output, "effective") == ["True"] * 2 and said(output, "followed") == ["True"] * 2
    for text in said(output, "auto"):
        assert text.startswith("True ['") and "fp32" not in text, output[-6000:]


def test_a_kind_that_loses_most_of_the_gradient_is_not_offered(output):
    assert said(output, "offered") == ["['int8']"] * 2


def test_predicted_bytes_are_those_that_travel_and_prices_are_measured(output):
    num_bytes = {}
    for kind in ("none", "bf16", "int8", "int8+feedback", "powersgd:2"):
        for text in said(output, kind):
            same, counted, measured, codecs = text.split(maxsplit=3)
            assert same == measured == "True", output[-6000:]
            assert codecs == str([] if kind == "none" else [kind])
            num_bytes[kind] = int(counted)
    assert num_bytes["none"] == 4 * (3 * 64 * 64 + 64 * 8)  # of two ranks, each sends as many
    assert num_bytes["bf16"] == num_bytes["none"] / 2
    assert num_bytes["int8"] == num_bytes["int8+feedback"]
    assert num_bytes["int8"] == num_bytes["none"] * 65 / 256  # whole blocks
    assert num_bytes["powersgd:2"] < num_bytes["none"] / 8
