"""Shares of a global batch: which samples each rank takes, whatever the shares, and where a loop goes on."""

from __future__ import annotations

import pickle
from itertools import islice

import pytest
import torch
from torch.utils.data import DataLoader, DistributedSampler, IterableDataset, TensorDataset
from two_ranks import launch, said

import qsync
from qsync.distributed.share_sampler import sampler_of
from qsync.distributed.shares import SampleOrder
from qsync.errors import FormatError, MismatchError
from qsync.predictor.profiling.loader_wait import undrawn


@pytest.fixture
def place(monkeypatch):
    """Be one rank of several, as torchrun says it before a job is joined."""

    def be(rank, ranks):
        monkeypatch.setenv("RANK", str(rank))
        monkeypatch.setenv("WORLD_SIZE", str(ranks))

    return be


def epochs_of(place, ranks, shares=None, epochs=3, length=100, batch=16):
    """The samples of every step, all ranks together, and each rank's own numbers of samples."""
    model, steps, sizes = torch.nn.Linear(1, 1), None, []
    for rank in range(ranks):
        place(rank, ranks)
        sampler = qsync.ShareSampler(length, batch, seed=3)
        if shares is not None:
            sampler.take_shares(model, shares, [1] * ranks)
        own = []
        for epoch in range(epochs):
            sampler.set_epoch(epoch)
            number = len(sampler)
            found = list(sampler)
            assert len(found) == number
            own += found
        sizes.append({len(batch) for batch in own})
        steps = own if steps is None else [[*a, *b] for a, b in zip(steps, own, strict=True)]
    return steps, sizes


def test_the_samples_of_a_step_are_the_same_whatever_the_shares(place):
    alone, _ = epochs_of(place, 1)
    equal, sizes = epochs_of(place, 3)
    assert equal == alone and sizes == [{6}, {5}, {5}]
    unequal, sizes = epochs_of(place, 3, [10, 1, 5])
    assert unequal == alone and sizes == [{10}, {1}, {5}]


def test_every_sample_comes_once_an_epoch_and_batches_stay_whole(place):
    steps, _ = epochs_of(place, 2, [12, 4])
    assert len(steps) == 19 and all(len(step) == 16 for step in steps)  # 7, 6 and 6 of 300 / 16
    stream = [i for step in steps for i in step]
    epochs = [stream[k : k + 100] for k in (0, 100, 200)]
    assert all(sorted(epoch) == list(range(100)) for epoch in epochs) and epochs[0] != epochs[1]
    order = SampleOrder(100, 3)  # that of qsync.elastic
    assert steps == [order.indices(16 * step, 16) for step in range(19)]


def test_without_shuffling_the_order_is_that_of_the_dataset(place):
    place(0, 1)
    sampler = qsync.ShareSampler(10, 4, shuffle=False)
    assert [list(sampler) for _ in range(2)] == [
        [[0, 1, 2, 3], [4, 5, 6, 7], [8, 9, 0, 1]], [[2, 3, 4, 5], [6, 7, 8, 9]],
    ]  # fmt: skip


def test_epochs_follow_one_another_and_one_that_is_broken_off_begins_again(place):
    place(0, 1)
    sampler = qsync.ShareSampler(64, 16)
    first, second = list(sampler), list(sampler)
    assert sorted(i for batch in second for i in batch) == list(range(64)) and first != second
    sampler.set_epoch(1)
    assert next(iter(sampler)) == second[0] and sampler.state_dict() == {"step": 5}
    assert list(sampler) == second  # it was left after one batch
    sampler.set_epoch(0)
    assert list(sampler) == first


@pytest.mark.parametrize("num_workers", [0, 2])
@pytest.mark.parametrize("set_epoch", [True, False])
def test_a_loop_goes_on_where_it_stood_whatever_workers_have_loaded_ahead(place, num_workers, set_epoch):
    place(1, 2)
    data = TensorDataset(torch.arange(100))

    def begun(state=None):
        sampler = qsync.ShareSampler(data, 16)
        sampler.take_shares(torch.nn.Linear(1, 1), [11, 5], [1, 1])
        if state is not None:
            sampler.load_state_dict(state)
        return sampler, DataLoader(data, batch_sampler=sampler, num_workers=num_workers)

    def epochs(sampler, loader, numbers):
        for epoch in numbers:
            if set_epoch:
                sampler.set_epoch(epoch)
            yield from (batch[0].tolist() for batch in loader)

    whole = list(epochs(*begun(), range(3)))
    for taken in (6, 8) if num_workers else (1, 6, 7, 8):  # the first epoch has 7 batches
        sampler, loader = begun()
        loop = epochs(sampler, loader, range(3))
        before = list(islice(loop, taken))
        state = pickle.loads(pickle.dumps(sampler.state_dict()))
        assert state == {"step": taken}
        first = 0 if taken <= 7 and set_epoch else 1 if set_epoch else taken // 7
        after = list(epochs(*begun(state), range(first, 3)))
        assert before + after == whole


def test_batches_that_are_drawn_to_be_profiled_change_nothing(place):
    place(0, 2)
    data = TensorDataset(torch.arange(64))
    sampler = qsync.ShareSampler(data, 16)
    loader = DataLoader(data, batch_sampler=sampler)
    whole = [batch[0].tolist() for batch in loader]
    sampler.set_epoch(0)
    with sampler.drawing(13):
        assert len(next(iter(loader))[0]) == 13
    assert [batch[0].tolist() for batch in loader] == whole and sampler.share.samples == 8


def test_shares_that_a_plan_rounds_make_up_the_batch(place):
    place(0, 3)
    sampler = qsync.ShareSampler(100, 50)
    sampler.take_shares(torch.nn.Linear(1, 1), [24, 16, 8], [2, 1, 1])
    assert sampler.share.samples == 24 and [one.samples for one in sampler._shares] == [24, 17, 9]
    with pytest.raises(MismatchError, match="shares make 20 samples a step, and the sampler's batch has 50"):
        sampler.take_shares(torch.nn.Linear(1, 1), [10, 6, 4], [1, 1, 1])


def test_a_copy_counts_its_own_batches_and_is_free_for_another_model(place):
    place(0, 1)
    data = TensorDataset(torch.arange(64))
    sampler = qsync.ShareSampler(data, 16)
    model = torch.nn.Linear(1, 1)
    sampler.take_shares(model, [16], [1])
    copied = pickle.loads(pickle.dumps(sampler))
    copied.check_free(torch.nn.Linear(1, 1))
    batches = iter(DataLoader(data, batch_sampler=copied, num_workers=2))
    next(batches)
    assert copied.state_dict() == {"step": 1} and sampler.state_dict() == {"step": 0}


@pytest.mark.parametrize("num_workers", [0, 2])
def test_shares_change_under_a_loop_at_the_first_step_that_no_loader_has_drawn(place, num_workers):
    data = TensorDataset(torch.arange(100))

    def batches(rank):
        place(rank, 2)
        sampler = qsync.ShareSampler(data, 10)
        loader = DataLoader(data, batch_sampler=sampler, num_workers=num_workers)
        for epoch in range(2):
            sampler.set_epoch(epoch)
            for number, batch in enumerate(loader):
                if (epoch, number) == (0, 2):
                    step, undrawn = sampler.ahead()
                    assert (step, undrawn) == (3, 7 if num_workers else 3)
                    sampler.take_shares(torch.nn.Linear(1, 1), [7, 3], [1, 1], since=8)
                    assert sampler.share.samples == 5
                yield batch[0].tolist()

    mine, others = list(batches(0)), list(batches(1))
    assert [len(batch) for batch in mine] == [5] * 8 + [7] * 12
    whole = [sorted(a + b) for a, b in zip(mine, others, strict=True)]
    for epoch in range(2):
        assert sorted(i for batch in whole[10 * epoch :][:10] for i in batch) == list(range(100))


def test_a_loop_that_reads_while_shares_change_is_told(place):
    place(0, 2)
    sampler = qsync.ShareSampler(100, 10)
    batches = iter(sampler)
    next(batches)
    sampler.take_shares(torch.nn.Linear(1, 1), [7, 3], [1, 1])
    with pytest.raises(MismatchError, match=r"begin it anew, with iter\(loader\)"):
        next(batches)
    assert len(next(iter(sampler))) == 7


class Endless(IterableDataset):
    def __iter__(self):
        return iter(range(10))


@pytest.mark.parametrize(("make", "said_of_it"), [
    (lambda: qsync.ShareSampler(Endless(), 4), "needs a dataset with a length, found Endless"),
    (lambda: qsync.ShareSampler(iter([1]), 4), "needs a dataset with a length, found list_iterator"),
    (lambda: qsync.ShareSampler(DistributedSampler(range(9), 2, 0), 4), "found DistributedSampler; give the"),
    (lambda: qsync.ShareSampler(10, 0), "batch_size must be a whole number of at least 1, found 0"),
    (lambda: qsync.ShareSampler(10, 2.0), "batch_size must be a whole number"),
    (lambda: qsync.ShareSampler([], 1), "the length of the dataset must be a whole number of at least 1"),
    (lambda: qsync.ShareSampler(10, 16), "16 samples is more than the dataset, which has 10"),
    (lambda: qsync.ShareSampler(10, 2, seed=-1), "seed must be a whole number of at least 0, found -1"),
    (lambda: qsync.ShareSampler(10, 2).set_epoch("1"), "the epoch must be a whole number"),
    (lambda: qsync.ShareSampler(10, 2).load_state_dict({"epoch": 1}), "holds its step, found"),
])  # fmt: skip
def test_what_is_no_batch_of_a_dataset_is_one_sentence(make, said_of_it):
    with pytest.raises(FormatError, match=said_of_it) as error:
        make()
    assert "\n" not in str(error.value)


def test_a_dataset_that_grows_and_a_batch_below_the_ranks_are_refused_when_the_loop_begins(place):
    place(0, 2)
    data = list(range(10))
    sampler = qsync.ShareSampler(data, 2)
    data.append(10)
    with pytest.raises(FormatError, match="the dataset has 11 samples, and had 10"):
        list(sampler)
    place(0, 8)
    with pytest.raises(FormatError, match="a global batch of 2 samples is fewer than the 8 ranks"):
        list(qsync.ShareSampler(10, 2))


def test_a_sampler_in_another_place_of_the_loader_is_refused():
    data = TensorDataset(torch.arange(8))
    sampler = qsync.ShareSampler(data, 4)
    assert sampler_of(DataLoader(data, batch_sampler=sampler)) is sampler
    assert sampler_of(DataLoader(data, batch_size=2)) is None and sampler_of([1, 2]) is None
    with pytest.raises(FormatError, match="has the ShareSampler as its sampler; give DataLoader"):
        sampler_of(DataLoader(data, sampler=sampler))


def test_accelerates_shard_of_the_sampler_hands_out_every_batch():
    accelerate = pytest.importorskip("accelerate")
    data = TensorDataset(torch.arange(8))
    loader = DataLoader(data, batch_sampler=qsync.ShareSampler(data, 4))
    whole = [batch[0].tolist() for batch in loader]
    found = accelerate.data_loader.prepare_data_loader(loader, num_processes=2, process_index=1)
    found.set_epoch(0)
    assert [batch[0].tolist() for batch in found] == whole and len(found) == 2
    assert sampler_of(found) is loader.batch_sampler
    with undrawn(found.base_dataloader):
        next(iter(found.base_dataloader))
    assert loader.batch_sampler.state_dict() == {"step": 2}


def test_an_epoch_that_is_set_once_its_workers_have_begun_is_the_one_under_way(place):  # as Lightning does
    place(0, 1)
    data = TensorDataset(torch.arange(64))
    sampler = qsync.ShareSampler(data, 16)
    batches = iter(DataLoader(data, batch_sampler=sampler, num_workers=1))
    sampler.set_epoch(0)
    next(batches)
    assert sampler.state_dict() == {"step": 1}


BODY = """
from dataclasses import replace
from pathlib import Path
from qsync.records.levers import ClassLevers, Levers
from torch.utils.data import DataLoader, TensorDataset
from torch.nn.parallel import DistributedDataParallel as DDP

x, y = batch(size=400, width=512)
data = TensorDataset(x, y, torch.arange(400))
seen = []

def collate(items):
    x, y, numbers = (torch.stack(parts) for parts in zip(*items))
    return x, y, numbers

sampler = qsync.ShareSampler(data, batch_size=100)
loader = DataLoader(data, batch_sampler=sampler, collate_fn=collate, num_workers=1,
                    multiprocessing_context="fork")
options = {
    "loss_fn": loss_fn, "emulated_share": 0.4 if rank else None, "cache_dir": cache, "base": "fp32",
    "slack": 0.0, "device_class": ("strong", "weak")[rank], "precisions": ["fp32"],
}
net = make(width=512, depth=4)
state = torch.get_rng_state()
planned = qsync.hybrid(net, loader=loader, **options)
say(f"undrawn: {torch.equal(state, torch.get_rng_state())} {sampler.state_dict()}")
of_plan = sampler.share.samples
everyone = [None, None]
dist.all_gather_object(everyone, of_plan)
plan = qsync.Plan.load(next(Path(cache).iterdir()) / "plan.json")
names = [way.name for way in plan.verdict.ways]
say(f"verdict: {names[0]} | {names[-1]} | {list(plan.verdict.times)}")
found = [plan.levers_of(name).samples or 50 for name in ("strong", "weak")]
say(f"planned: {found == everyone} {sum(everyone)} {qsync.samples_of(planned) == of_plan}")

# Whatever a busy machine makes of the shares: these are uneven.
uneven = replace(plan, levers=Levers({"strong": ClassLevers(70), "weak": ClassLevers(30)}))
sampler = qsync.ShareSampler(data, batch_size=100)
loader = DataLoader(data, batch_sampler=sampler, collate_fn=collate, num_workers=1,
                    multiprocessing_context="fork")
net = make(width=512, depth=4)
first = {name: value.clone() for name, value in net.state_dict().items()}
own_class = {"device_class": options["device_class"], "emulated_share": options["emulated_share"]}
model = qsync.hybrid(net, loader=loader, plan=uneven, **own_class)
own = sampler.share.samples
say(f"samples_of: {qsync.samples_of(model)} {own}")
dist.all_gather_object(everyone, own)

plain = make(width=512, depth=4)
plain.load_state_dict(first)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
theirs = torch.optim.SGD(plain.parameters(), lr=0.1)
order, worst, sizes = [], 0.0, set()

def norm(net):
    return torch.cat([p.grad.flatten() for p in net.parameters()]).norm()

for epoch in range(2):
    sampler.set_epoch(epoch)
    for step, found in enumerate(loader):
        sizes.add(len(found[0]))
        for part in qsync.micro_batches(model, found):
            loss_fn(model, part[:2]).backward()
        parts = [None, None]
        dist.all_gather_object(parts, found[2].tolist())
        whole = sum(parts, [])
        order += whole
        loss_fn(plain, (x[whole], y[whole])).backward()
        worst = max(worst, abs(float(norm(model) / norm(plain)) - 1.0))
        for each in (optimizer, theirs):
            each.step()
            each.zero_grad()
        if epoch == 1 and step == 1:
            break
say(f"exact: {worst < 1e-6} {sizes == {own}}")
say(f"once: {sorted(order[:400]) == list(range(400))} {len(order)}")
mine, others = parameters(model), parameters(model).clone()
dist.broadcast(others, 0)
say(f"identical: {torch.equal(mine, others)}")

step = sampler.state_dict()
again = qsync.ShareSampler(data, batch_size=100)
again.take_shares(net, everyone[::-1], [1, 1])
again.load_state_dict(step)
again.set_epoch(1)
rest = [None, None]
dist.all_gather_object(rest, sum(again, []))
say(f"resumed: {sorted([*order[400:], *sum(rest, [])]) == list(range(400))} {step}")

def refused(what, **changes):
    try:
        qsync.hybrid(make(width=512, depth=4), **{**options, "loader": loader, **changes})
        say(f"{what}: went through")
    except QSyncError as error:
        say(f"{what}: {error}")

refused("second model")
few = qsync.ShareSampler(data, batch_size=1)
refused("few", loader=DataLoader(data, batch_sampler=few))
leading = lambda items: [part[None] for part in collate(items)]
other = qsync.ShareSampler(data, batch_size=100)
refused("leading", loader=DataLoader(data, batch_sampler=other, collate_fn=leading),
        loss_fn=lambda model, batch: F.cross_entropy(model(batch[0])[0], batch[1][0]))
small = DataLoader(data, batch_sampler=qsync.ShareSampler(data, batch_size=20))
refused("other plan", loader=small, plan=uneven, base=None, precisions=None, example_batch=None, loss_fn=None)
profiled = []
form_basis = ddp_profiling.form_basis
ddp_profiling.form_basis = lambda *args, **options: profiled.append(1) or form_basis(*args, **options)
sampler = qsync.ShareSampler(data, batch_size=100)
loader = DataLoader(data, batch_sampler=sampler, collate_fn=collate)
cached = qsync.hybrid(make(width=512, depth=4), loader=loader, **options)
say(f"cached: {not profiled} {sampler.share.samples == of_plan}")
sampler = qsync.ShareSampler(data, batch_size=100)
equal = qsync.hybrid(make(width=512, depth=4), loader=DataLoader(data, batch_sampler=sampler), plan=None,
                     levers=(), **options)
say(f"equal: {sampler.share.samples} {qsync.samples_of(equal)}")
"""


@pytest.mark.dist
def test_ranks_take_their_shares_and_the_gradient_is_that_of_the_global_batch(tmp_path):
    output = launch(tmp_path, BODY)
    assert said(output, "undrawn") == ["True {'step': 0}"] * 2
    assert said(output, "samples_of") == ["70 70", "30 30"]
    assert said(output, "exact") == ["True True"] * 2
    assert said(output, "once") == ["True 600"] * 2 and said(output, "identical") == ["True"] * 2
    assert said(output, "resumed") == ["True {'step': 6}"] * 2
    assert said(output, "verdict") == ["1 x strong alone | this plan | ['weak']"] * 2
    assert said(output, "planned") == ["True 100 True"] * 2
    assert all("to another model already; give each model" in line for line in said(output, "second model"))
    assert all("1 samples is fewer than the 2 ranks" in line for line in said(output, "few"))
    assert all("a first dimension of 1; let the" in line for line in said(output, "leading"))
    assert all("make 100 samples a step, and the sampler's" in line for line in said(output, "other plan"))
    assert said(output, "cached") == ["True True"] * 2 and said(output, "equal") == ["50 50"] * 2
