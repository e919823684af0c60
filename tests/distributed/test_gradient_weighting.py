"""Unequal shares and passes between real ranks: the gradient of the mean over all samples, or a sentence."""

from __future__ import annotations

from collections import OrderedDict, UserDict
from collections.abc import MutableMapping

import pytest
import torch
from torch import nn
from two_ranks import launch, said

import qsync
from qsync.distributed.gradient_weighting import _part, check_share
from qsync.errors import FormatError, UnsupportedError

BODY = """
import warnings
from collections import namedtuple
from torch.nn.parallel import DistributedDataParallel as DDP

dist.init_process_group("gloo")
Pair = namedtuple("Pair", "x y")

def net():
    torch.manual_seed(0)
    return torch.nn.Sequential(torch.nn.Linear(6, 5), torch.nn.GELU(), torch.nn.Linear(5, 3)).double()

generator = torch.Generator().manual_seed(1)
x = torch.randn(8, 6, generator=generator, dtype=torch.float64)
y = torch.arange(8) % 3
loss_fn = lambda model, batch: F.cross_entropy(model(batch[0]), batch[1])

alone = net()
loss_fn(alone, (x, y)).backward()
exact = torch.cat([p.grad.flatten() for p in alone.parameters()])

def error(model):
    mine = torch.cat([p.grad.flatten() for p in model.parameters()])
    return float((mine - exact).abs().max() / exact.abs().max())

def own(counts):
    start = sum(counts[:rank])
    return Pair(x[start:start + counts[rank]], y[start:start + counts[rank]])

model = DDP(net())
qsync.weigh_gradients(model, (3, 5)[rank], total=8)
for _ in range(2):  # DDP rebuilds its buckets after the first step
    model.zero_grad()
    loss_fn(model, own((3, 5))).backward()
say(f"shares: {error(model) < 1e-12}")

model.zero_grad()  # the shares change: called again
qsync.weigh_gradients(model, (2, 6)[rank], passes=(1, 3)[rank])
for part in qsync.micro_batches(model, own((2, 6)), passes=(1, 3)[rank]):
    loss_fn(model, part).backward()
say(f"passes: {error(model) < 1e-12}")

from qsync.distributed.gradient_weighting import set_share
expecting = DDP(net())  # more samples than the ranks have
set_share(expecting, (3, 5)[rank], 1, expected=12)
for _ in range(2):
    expecting.zero_grad()
    loss_fn(expecting, own((3, 5))).backward()
say(f"expecting: {error(expecting) < 1e-12}")

plain = DDP(net())
loss_fn(plain, own((3, 5))).backward()
say(f"without: {error(plain) > 1e-3}")

from qsync.records.levers import ClassLevers, Levers
from qsync.records.plans import ClassPlan, Plan
graph = qsync.capture(net().float(), x[:4].float())
classes = {f"class{r}": ClassPlan({op.name: qsync.Precision.FP32 for op in graph.adjustable}) for r in (0, 1)}
levers = Levers({"class0": ClassLevers(2), "class1": ClassLevers(6, passes=3)})
plan = Plan(graph.model, graph.hash, classes, levers=levers)
hybrid = qsync.hybrid(net().float(), plan=plan, device_class=f"class{rank}")
share = plan.levers[f"class{rank}"]
for part in qsync.micro_batches(hybrid, own((2, 6)), passes=share.passes):
    loss_fn(hybrid, (part.x.float(), part.y)).backward()
say(f"hybrid: {error(hybrid) < 1e-6}")

from dataclasses import dataclass
from collections import OrderedDict
from torch.nn.utils.rnn import pack_sequence

@dataclass
class Both:
    x: torch.Tensor
    note: str = "kept"

for what, batch in {
    "dataclass": Both(x[:4]), "ordered": OrderedDict(x=x[:4]), "packed": pack_sequence([x[:2], x[:2]]),
    "text": ["none", 1, torch.tensor(2.0)],
}.items():
    try:
        parts = list(qsync.micro_batches(plain, batch, 2))
        cut = [part.x if what == "dataclass" else part["x"] for part in parts]
        say(f"{what}: {type(parts[0]) is type(batch)} {[list(part.shape) for part in cut]}")
    except QSyncError as error:
        say(f"{what}: {type(error).__name__}: {error}")

def attempt(what, *arguments, **options):
    try:
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            qsync.weigh_gradients(*arguments, **options)
        say(f"{what}: {[str(w.message) for w in caught]}")
    except QSyncError as error:
        say(f"{what}: {type(error).__name__}: {error}")

attempt("none", DDP(net()), (0, 8)[rank])
before = [p.grad.clone() for p in plain.parameters()]
attempt("total", plain, (3, 5)[rank], total=9)
plain.zero_grad()
loss_fn(plain, own((3, 5))).backward()
say(f"refused: {all(torch.allclose(p.grad, g) for p, g in zip(plain.parameters(), before))}")
attempt("disagree", DDP(net()), 4, total=(8, 9)[rank])
attempt("uneven", DDP(net()), 4, passes=(1, 3)[rank])
wrapped = DDP(net())
attempt("bare", wrapped.module if rank else wrapped, 4)
normed = DDP(torch.nn.Sequential(torch.nn.Linear(6, 4), torch.nn.BatchNorm1d(4)))
attempt("norm", normed, (3, 5)[rank])
attempt("equal", normed, 4)
graph = qsync.capture(normed.module, x[:4].float())
classes = {f"class{r}": ClassPlan({op.name: qsync.Precision.FP32 for op in graph.adjustable}) for r in (0, 1)}
plan = Plan(graph.model, graph.hash, classes, levers=levers)
with warnings.catch_warnings(record=True) as caught:
    warnings.simplefilter("always")
    qsync.hybrid(normed.module, plan=plan, device_class=f"class{rank}")
say(f"given: {[str(w.message) for w in caught if 'BatchNorm' in str(w.message)]}")
dist.destroy_process_group()
"""


@pytest.mark.dist
def test_the_gradient_is_that_of_the_mean_over_all_samples(tmp_path):
    output = launch(tmp_path, BODY)
    for what in ("shares", "passes", "expecting", "without", "hybrid", "refused"):
        assert said(output, what) == ["True", "True"]
    sentences = {
        "none": "FormatError: weighing gradients failed on rank 0: samples must be a whole number",
        "total": "MismatchError: the ranks have 3 + 5 = 8 samples per step instead of 9",
        "disagree": "MismatchError: the samples that all ranks are to have differs between ranks",
        "uneven": "FormatError: weighing gradients failed on rank 1: 3 passes do not divide 4 samples evenly",
        "bare": "UnsupportedError: weighing gradients failed on rank 1: weighting gradients needs a model",
    }
    for what, sentence in sentences.items():
        assert all(text.startswith(sentence) for text in said(output, what)), said(output, what)
    assert said(output, "dataclass") == said(output, "ordered") == ["True [[2, 6], [2, 6]]"] * 2
    assert all("PackedSequence cannot be split into passes" in text for text in said(output, "packed"))
    assert all("(list) has no tensor to split into passes" in text for text in said(output, "text"))
    for what in ("norm", "given"):
        assert all("BatchNorm" in text and text.count("'") == 2 for text in said(output, what))
    assert said(output, "equal") == ["[]", "[]"]


def test_a_batch_is_cut_into_equal_parts_of_what_has_samples():
    check_share(12, 4)
    with pytest.raises(FormatError, match="5 passes do not divide 12 samples evenly"):
        check_share(12, 5)
    with pytest.raises(UnsupportedError, match="in DistributedDataParallel or fully_shard, found Linear"):
        next(iter(qsync.micro_batches(nn.Linear(2, 2), torch.zeros(4, 2), 2)))
    with pytest.raises(UnsupportedError, match="in DistributedDataParallel, found Linear"):
        qsync.weigh_gradients(nn.Linear(2, 2), 4)


class Shared(MutableMapping):
    """A mapping whose copies share its items."""

    def __init__(self, **items) -> None:
        self.items_ = items

    def __getitem__(self, name):
        return self.items_[name]

    def __setitem__(self, name, value) -> None:
        self.items_[name] = value

    def __delitem__(self, name) -> None:
        del self.items_[name]

    def __iter__(self):
        return iter(self.items_)

    def __len__(self) -> int:
        return len(self.items_)


@pytest.mark.parametrize("kind", [Shared, UserDict, OrderedDict])
def test_a_batch_stays_as_it_is_while_it_is_cut(kind):
    batch = kind(x=torch.arange(8), name="text")
    parts = [_part(batch, k, 2) for k in range(2)]
    assert [part["x"].tolist() for part in parts] == [[0, 1, 2, 3], [4, 5, 6, 7]]
    assert batch["x"].tolist() == list(range(8)) and {part["name"] for part in parts} == {"text"}
    assert kind is Shared or {type(part) for part in parts} == {kind}
