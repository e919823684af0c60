"""Save on four ranks and load on other numbers of them: replicated and sharded."""

from __future__ import annotations

import signal

import pytest
import torch
from safetensors.torch import load_file
from torch.distributed.checkpoint import HuggingFaceStorageReader
from torch.distributed.checkpoint import load as torch_load
from two_ranks import launch, start_ranks

import qsync

SCRIPT = """
from pathlib import Path
import numpy, random, resource
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel as DDP

torch.set_num_threads(1)
folder = Path(cache)

def whole(value):
    return value.full_tensor() if isinstance(value, DTensor) else value

def built(kind):
    model = make(width=10)  # 10 rows: shards of unequal size on 3 and 4 ranks, and empty ones of the head
    if kind == "sharded":
        for layer in (*model.inner, model.head):
            fully_shard(layer)
        model = fully_shard(model)
    elif kind == "ddp":
        model = DDP(model)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    return model, optimizer, torch.optim.lr_scheduler.StepLR(optimizer, 2)

def stepped(model, optimizer, scheduler, steps):
    for number in range(steps):
        optimizer.zero_grad()
        loss_fn(model, batch(width=10, seed=number)).backward()  # alike on all ranks, however many they are
        optimizer.step()
        scheduler.step()

def state(model, optimizer):
    plain = getattr(model, "module", model)
    names = {id(p): name for name, p in plain.named_parameters()}
    found = {name: whole(value).clone() for name, value in plain.state_dict().items()}
    for parameter, slots in optimizer.state.items():
        found |= {f"{names[id(parameter)]} {slot}": whole(v).clone() for slot, v in slots.items()}
    return found

def same(one, other):
    return one.keys() == other.keys() and all(torch.equal(one[name], other[name]) for name in one)

def drawn():
    return [torch.rand(1).item(), numpy.random.rand(), random.random()]

def group_of(ranks):
    if dist.is_initialized():
        dist.destroy_process_group()
    if rank < ranks:
        store = dist.FileStore(str(folder / f"store-{ranks}"), ranks)
        dist.init_process_group("gloo", store=store, rank=rank, world_size=ranks)

folder.mkdir(exist_ok=True)
dist.init_process_group("gloo")
saved, draws = {}, {}
for kind in ("ddp", "sharded"):
    torch.manual_seed(rank); numpy.random.seed(rank); random.seed(rank)
    model, optimizer, scheduler = built(kind)
    checkpoints = qsync.Checkpoints(folder / kind, model, optimizer, every=2, keep=1, scheduler=scheduler)
    for _ in range(4):
        stepped(model, optimizer, scheduler, 1)
        checkpoints.step()
        checkpoints.finish()  # else the second may be left out on a slow machine
    saved[kind], draws[kind] = state(model, optimizer), drawn()
torch.save(saved["ddp"], folder / f"expected-{rank}.pt")
assert not same(saved["ddp"], {})
dist.barrier()
if rank == 1:  # its disk is full: nothing is published, and all ranks know
    resource.setrlimit(resource.RLIMIT_FSIZE, (100, resource.RLIM_INFINITY))
checkpoints.step(6)
checkpoints.finish()
try:
    qsync.save(folder / "sharded" / "more", model, optimizer)
except QSyncError as error:
    say(f"full: {error}")
resource.setrlimit(resource.RLIMIT_FSIZE, (resource.RLIM_INFINITY, resource.RLIM_INFINITY))
for ranks in (4, 3, 2):
    if ranks < 4:
        group_of(ranks)
    if rank >= ranks:
        break
    for kind in ("ddp", "sharded"):
        for there in ("ddp", "sharded", "plain"):
            model, optimizer, scheduler = built(there)
            stepped(model, optimizer, scheduler, 1 if there == "ddp" else 0)  # with and without state before
            found = qsync.load(folder / kind, model, optimizer, scheduler=scheduler)
            assert found.step == 4 and found.num_ranks == 4
            assert drawn() == draws[kind], (kind, there)
            assert same(state(model, optimizer), saved[kind]), (kind, there, ranks)
            assert scheduler.last_epoch == 4
    say(f"loaded on {ranks}")
    dist.barrier()
try:
    qsync.load(folder / "ddp", torch.nn.Linear(2, 2))
except QSyncError as error:
    say(f"another model: {error}")
if dist.is_initialized():
    dist.destroy_process_group()
"""


@pytest.mark.dist
def test_four_ranks_save_and_fewer_load(tmp_path):
    said = launch(tmp_path, SCRIPT, ranks=4)
    folder = tmp_path / "cache"
    assert all(said.count(f"loaded on {ranks}") == ranks for ranks in (4, 3, 2)), said
    assert said.count("belongs to another model") == 4
    assert said.count("full: ") == said.count("more could not be written") == 4, said
    assert sorted(path.name for path in (folder / "sharded").iterdir()) == ["step-00000004"]
    # One process, without torch.distributed, and plain PyTorch.
    expected = torch.load(folder / "expected-0.pt")
    model = torch.nn.ModuleDict({
        "inner": torch.nn.Sequential(torch.nn.Linear(10, 10), torch.nn.Linear(10, 10)),
        "head": torch.nn.Linear(10, 4),
    })  # fmt: skip
    model.load_state_dict(load_file(folder / "ddp" / "step-00000004" / "model.safetensors"))
    for name, value in model.state_dict().items():
        assert torch.equal(value, expected[name])
    shards = {name: torch.zeros_like(value) for name, value in model.state_dict().items()}
    reader = HuggingFaceStorageReader(str(folder / "sharded" / "step-00000004"))
    with pytest.warns(UserWarning, match="torch.distributed is disabled"):
        torch_load(shards, storage_reader=reader, no_dist=True)
    assert all(torch.equal(value, expected[name]) for name, value in shards.items())
    for kind in ("ddp", "sharded"):
        optimizer = torch.optim.AdamW(model.parameters())
        for parameter in model.parameters():
            parameter.data.zero_()
        qsync.load(folder / kind, model, optimizer)
        for name, parameter in model.named_parameters():
            assert torch.equal(parameter, expected[name])
            for slot, value in optimizer.state[parameter].items():
                assert torch.equal(value, expected[f"{name} {slot}"])


DEAD = """
import os, signal, sys, torch, qsync
import torch.distributed as dist
from qsync.checkpoints import writer

writer._ENDING_S = 1.0
dist.init_process_group("gloo")
model = torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(8, 8))
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
checkpoints = qsync.Checkpoints(sys.argv[1], model, optimizer, every=1)
if os.environ["RANK"] == "1":
    writer.Save._write_files = lambda self: os.kill(os.getpid(), signal.SIGKILL)
for _ in range(100):
    optimizer.zero_grad()
    model(torch.ones(4, 8)).sum().backward()
    optimizer.step()
    checkpoints.step()
"""


@pytest.mark.dist
def test_a_rank_that_dies_while_it_writes_holds_up_no_other(tmp_path):
    """Started by hand: torchrun would end the others itself."""
    (tmp_path / "dies.py").write_text(DEAD)
    ranks = start_ranks([tmp_path / "dies.py"] * 2, tmp_path, str(tmp_path / "run"))
    (code, said), (killed, _) = (rank.ended() for rank in ranks.values())
    assert code not in (0, None) and killed == -signal.SIGKILL
    assert "could not be written: rank 1 did not take part in saving" in said
    assert not list(tmp_path.glob("run/*"))
