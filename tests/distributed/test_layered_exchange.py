"""Gradients of two hosts with two ranks each: added up on each host, compressed between both, then equal."""

from __future__ import annotations

import pytest
from two_ranks import launch

pytestmark = pytest.mark.dist
RANKS = 4
BODY = """
os.environ["QSYNC_HOST"] = "ab"[rank // 2]
from qsync.distributed import gradient_codecs, job
from qsync.distributed.gradient_codecs import CompressedSum, HostGroups
from qsync.distributed.gradient_weighting import compress_gradients, compressed_sum_of
from qsync.predictor.profiling import leg_benchmark
from qsync.records.cluster import Cluster, DeviceClass, Link
from qsync.records.compression import Compression, Message
from qsync.replayer.communication import Legs, cluster_all_reduce_s
from torch.nn.parallel import DistributedDataParallel as DDP

dist.init_process_group("gloo")
leg_benchmark.LEGS_S = 0.0
plain = Cluster((DeviceClass("all", "cpu", 4, 10**9, ("fp32",)),), Link(1e-3, 1e8, num_ranks=4))
cluster = job.with_measured_hosts(plain, torch.device("cpu"))
first, second = cluster.hosts
say(f"hosts: {[host.ranks for host in cluster.hosts]} {[sorted(host.latency_s) for host in cluster.hosts]}")
everywhere = job.agree("comparing", cluster.to_json)
say(f"same: {all(one == everywhere[0] for one in everywhere)}")
say(f"as measured: {cluster_all_reduce_s(cluster, 2**24) / (1e-3 + 2**24 / 1e8):.6f}")

passed = []

def counting(name, function, own):
    def counted(*tensors, **options):
        given, group = tensors[own], options.get("group")
        between = len({r // 2 for r in dist.get_process_group_ranks(group or dist.group.WORLD)}) > 1
        passed.append((between, Message(name, given.numel() * given.element_size())))
        return function(*tensors, **options)
    return counted

for name in ("all_reduce", "reduce", "broadcast"):
    setattr(dist, name, counting(name, getattr(dist, name), 0))
dist.all_to_all_single = counting("all_to_all", dist.all_to_all_single, 1)
gradient_codecs._all_gather = counting("all_gather", gradient_codecs._all_gather, 1)
samples, WEIGHTS = (24, 8, 12, 4), Message("all_reduce", 16)

def gradients(model):
    return torch.cat([p.grad.flatten() for p in model.parameters()])

def everyone(tensor):
    found = [torch.empty_like(tensor) for _ in range(4)]
    dist.all_gather(found, tensor)
    return found

whole = make()
parts = [batch(size, seed=r) for r, size in enumerate(samples)]
loss_fn(whole, tuple(torch.cat([part[k] for part in parts]) for k in (0, 1))).backward()
exact, sums = gradients(whole), {}
for text in ("fp32", "bf16", "int8", "powersgd:2", "int8+feedback"):
    model = DDP(make())
    qsync.weigh_gradients(model, samples[rank])
    compress_gradients(model, {"*": text})
    lost = torch.zeros_like(exact)
    for step in range(6):
        model.zero_grad()
        passed.clear()
        loss_fn(model, parts[rank]).backward()
        lost += gradients(model) - exact
    sums[text] = compressed_sum_of(model)
    found = gradients(model)
    is_same = all(torch.equal(one, found) for one in everyone(found))
    legs = Legs(Cluster(cluster.classes, cluster.link, compression={"*": text}, hosts=cluster.hosts))
    shapes = [tuple(p.shape) for p in reversed(list(model.parameters()))]  # as DDP rebuilds its bucket
    formula = legs.messages(Compression.parse(text), shapes, 4 * exact.numel())
    sent = [(between, one) for between, one in passed if one != WEIGHTS]
    stated = [(not one.is_within_hosts, one) for one in formula]
    is_stated = sent == [each for each in stated if rank in (0, 2) or not each[0]]
    weak = sum(one.sent_bytes(2) for between, one in sent if between)
    say(f"{text}: {is_same} {is_stated} {weak} {float(lost.norm() / 6 / exact.norm()):.7f}")

residuals = sums["int8+feedback"].residuals.values()
say(f"residuals: {any(float(one.abs().max()) > 0.0 for one in residuals)} {len(residuals)}")
# Residuals of a job without layers are in every rank's next gradient, once.
flat, again = CompressedSum(None), CompressedSum(None, HostGroups.make())
piece = [gradient_codecs.Piece("w", (40, 256))]
mine = torch.randn(40 * 256, generator=torch.Generator().manual_seed(rank))
flat.sum_(mine.clone(), piece, Compression.parse("int8+feedback"))
again.load({name: one.clone() for name, one in flat.residuals.items()}, {})
carried, bare = mine.clone() + flat.residuals["w"], mine.clone()
again.sum_(bare, piece, Compression.parse("int8+feedback"))
CompressedSum(None, again.hosts).sum_(carried, piece, Compression.parse("int8+feedback"))
say(f"carried: {torch.equal(carried, bare)}")
dist.destroy_process_group()
"""


@pytest.fixture(scope="module")
def output(tmp_path_factory) -> str:
    return launch(tmp_path_factory.mktemp("layers"), BODY, ranks=RANKS)


def said(output: str, what: str) -> list[str]:
    lines = output.splitlines()
    return [next(s.partition(f"{what}: ")[2] for s in lines if f"[{r}] {what}: " in s) for r in range(RANKS)]


@pytest.mark.parametrize(
    ("kind", "least", "most"),
    [("fp32", 0.0, 1e-6), ("bf16", 1e-4, 5e-3), ("int8", 1e-3, 2e-2), ("int8+feedback", 1e-5, 3e-3),
     ("powersgd:2", 1e-2, 0.9)],
)  # fmt: skip
def test_leaders_alone_send_the_stated_bytes_and_all_ranks_get_the_same_mean(output, kind, least, most):
    num_bytes = {"fp32": 4 * 8580, "bf16": 2 * 8580, "int8": 2 * 17 * 260, "int8+feedback": 2 * 17 * 260}
    for rank, text in enumerate(said(output, kind)):
        same, stated, weak, lost = text.split()
        assert same == stated == "True" and least <= float(lost) <= most, output[-6000:]
        if kind in num_bytes:
            assert float(weak) == (num_bytes[kind] if rank in (0, 2) else 0), output[-6000:]


def test_residuals_are_the_leaders_and_those_of_all_ranks_are_carried(output):
    assert said(output, "residuals") == ["True 6", "False 6"] * 2
    assert said(output, "carried") == ["True"] * RANKS


def test_legs_are_measured_in_both_directions_and_agree_with_the_all_reduce(output):
    assert said(output, "hosts") == ["[(0, 1), (2, 3)] [['a', 'b'], ['a', 'b']]"] * RANKS
    assert said(output, "same") == ["True"] * RANKS and said(output, "as measured") == ["1.000000"] * RANKS
