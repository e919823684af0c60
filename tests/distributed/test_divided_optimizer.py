"""An optimizer whose state is divided over real ranks trains as DDP does, and its state loads anywhere."""

from __future__ import annotations

import pytest
from two_ranks import launch, said

SETTING = """
import copy, functools, warnings
from pathlib import Path
from torch.nn.parallel import DistributedDataParallel as DDP
from qsync.distributed import divided_optimizer
from qsync.predictor.profiling.made_optimizer import state_bytes

folder = Path(cache)
folder.mkdir(exist_ok=True)
dist.init_process_group("gloo")

def grouped(kind, model, **options):
    "Two groups: weights decay, the rest does not and learns at half the rate."
    own = list(model.parameters())
    return kind([
        {"params": [p for p in own if p.ndim > 1], **options},
        {"params": [p for p in own if p.ndim == 1], **options, "lr": options["lr"] / 2, "weight_decay": 0.0},
    ], **options)

KINDS = {
    "adamw": lambda model: torch.optim.AdamW(model.parameters(), lr=1e-2),
    "sgd": lambda model: torch.optim.SGD(model.parameters(), lr=1e-1, momentum=0.9, nesterov=True),
    "adafactor": lambda model: torch.optim.Adafactor(model.parameters(), lr=1e-2),
    "adagrad": lambda model: torch.optim.Adagrad(model.parameters(), lr=1e-2),  # its state is there at once
    "grouped": lambda model: grouped(torch.optim.AdamW, model, lr=1e-2, weight_decay=0.1),
}

def trained(model, optimizer, numbers, scheduler=None, closes=False):
    for number in numbers:
        def passes():
            optimizer.zero_grad()
            loss = loss_fn(model, batch(seed=10 * number + rank))
            loss.backward()
            torch.nn.utils.clip_grad_norm_([p for g in optimizer.param_groups for p in g["params"]], 0.5)
            return loss
        if closes:
            optimizer.step(passes)
        else:
            passes()
            optimizer.step()
        if scheduler is not None:
            scheduler.step()
    return parameters(model)

def state_of(optimizer):
    return {k: slots for k, slots in optimizer.state_dict()["state"].items()}

def same_state(one, other):
    return one.keys() == other.keys() and all(
        one[k].keys() == other[k].keys() and all(torch.equal(one[k][s], other[k][s]) for s in one[k])
        for k in one
    )
"""

TRAINS = (
    SETTING
    + """
for kind, made in KINDS.items():
    found = {}
    for divided in (False, True):
        model = DDP(make())
        optimizer = made(model)
        scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 8)
        if divided:
            assert qsync.divide_optimizer(model, optimizer, parts={0: 3, 1: 1}) is optimizer
        trained(model, optimizer, range(4), scheduler)
        found[divided] = trained(model, optimizer, range(4, 7), scheduler, closes=True), optimizer, model
    (plain, undivided, before), (own, optimizer, model) = found.values()
    other = [torch.empty_like(own) for _ in range(2)]
    dist.all_gather(other, own)
    say(f"{kind} bitwise: {torch.equal(plain, own) and torch.equal(*other)}")
    held, whole = state_bytes(optimizer, model.parameters()), state_bytes(undivided, before.parameters())
    say(f"{kind} bytes: {held} {whole}")
    gathered = state_of(optimizer)
    is_whole = same_state(gathered, state_of(undivided))
    say(f"{kind} gathered: {is_whole} {len(optimizer.state) == len(gathered)}")
dist.destroy_process_group()
"""
)


@pytest.mark.dist
def test_it_trains_bitwise_as_ddp_and_holds_its_part(tmp_path):
    output = launch(tmp_path, TRAINS)
    for kind in ("adamw", "sgd", "adafactor", "adagrad", "grouped"):
        assert said(output, f"{kind} bitwise") == ["True", "True"]
        # Rank 0 returns the whole state; the other its own part.
        assert said(output, f"{kind} gathered") == ["True False", "False True"]
        (first, whole), (second, _) = (map(int, text.split()) for text in said(output, f"{kind} bytes"))
        assert first + second == whole and 0 < second < first


SAVES = (
    SETTING
    + """
def group_of(ranks):
    dist.destroy_process_group()
    if rank < ranks:
        store = dist.FileStore(str(folder / f"store-{ranks}"), ranks)
        dist.init_process_group("gloo", store=store, rank=rank, world_size=ranks)

def fresh(parts=None):
    model = make()
    model = DDP(model) if dist.is_initialized() else model
    optimizer = KINDS["grouped"](model)
    if parts != "undivided":
        qsync.divide_optimizer(model, optimizer, parts=parts)
    return model, optimizer

plain, undivided = fresh("undivided")
trained(plain, undivided, range(3))
model, optimizer = fresh({0: 3, 1: 1})
trained(model, optimizer, range(3))
qsync.save(folder / "a", model, optimizer, step=3)
checkpoints = qsync.Checkpoints(folder / "run", model, [optimizer], every=1)
checkpoints.step()
checkpoints.finish()
state = optimizer.state_dict()
torch.save(state, folder / f"state-{rank}.pt")
dist.barrier()

wanted = trained(plain, undivided, range(3, 6))
for parts in ({0: 3, 1: 1}, {0: 1, 1: 1}, {1: 1}, None, "undivided"):
    model, optimizer = fresh(parts)
    before = sum(1 for _ in optimizer.state)
    assert qsync.load(folder / "a", model, optimizer).step == 3
    held = [name for name, p in model.module.named_parameters() if p in optimizer.state]
    same = torch.equal(trained(model, optimizer, range(3, 6)), wanted)
    say(f"saved {parts}: {same} {before} {len(held)}")
    model, optimizer = fresh(parts)
    qsync.load(folder / "run", model, [optimizer])
    qsync.load(folder / "a", model)
    say(f"in a list {parts}: {torch.equal(trained(model, optimizer, range(3, 6)), wanted)}")
    model, optimizer = fresh(parts)
    qsync.load(folder / "a", model)
    optimizer.load_state_dict(torch.load(folder / "state-0.pt"))
    say(f"state_dict {parts}: {torch.equal(trained(model, optimizer, range(3, 6)), wanted)}")
model, optimizer = fresh({0: 3, 1: 1})
qsync.load(folder / "a", model)
optimizer.load_state_dict(state)  # each rank its own
say(f"own parts: {torch.equal(trained(model, optimizer, range(3, 6)), wanted)}")
_, optimizer = fresh({0: 1, 1: 3})
try:
    optimizer.load_state_dict(torch.load(folder / "state-1.pt"))
except QSyncError as error:
    say(f"a part: {error}")

qsync.save(folder / "undivided", plain, undivided)  # what was never divided loads in parts, too
trained(plain, undivided, range(1))
model, optimizer = fresh({0: 1, 1: 1})
qsync.load(folder / "undivided", model, optimizer)
say(f"divided later: {torch.equal(trained(model, optimizer, range(1)), parameters(plain))}")
group_of(1)
if rank == 0:
    found = []
    for how in ("saved", "state_dict", "undivided"):
        model, optimizer = fresh("undivided" if how == "undivided" else None)
        qsync.load(folder / "a", model, None if how == "state_dict" else optimizer)
        if how == "state_dict":
            optimizer.load_state_dict(torch.load(folder / "state-0.pt"))
        found.append((trained(model, optimizer, range(3, 6)), sum(map(len, optimizer.state.values()))))
    say(f"one rank: {torch.equal(found[0][0], found[1][0]) and torch.equal(found[0][0], found[2][0])}")
    say(f"entries: {[each for _, each in found]}")
    dist.destroy_process_group()
"""
)


@pytest.mark.dist
def test_its_state_loads_under_any_other_division(tmp_path):
    output = launch(tmp_path, SAVES)
    held = [said(output, f"saved {parts}") for parts in ("{0: 3, 1: 1}", "{0: 1, 1: 1}", "{1: 1}", "None")]
    for found in (*held, said(output, "saved undivided")):
        assert all(text.startswith("True 0 ") for text in found), found
    for first, second in held:  # together the six parameters, each once
        assert int(first.split()[2]) + int(second.split()[2]) == 6
    assert said(output, "saved undivided") == ["True 0 6"] * 2
    for parts in ("{0: 3, 1: 1}", "{0: 1, 1: 1}", "{1: 1}", "None", "undivided"):
        assert said(output, f"in a list {parts}") == said(output, f"state_dict {parts}") == ["True"] * 2
    assert said(output, "own parts") == said(output, "divided later") == ["True"] * 2
    assert "[1] a part: this is one rank's part of a divided AdamW's state, under another" in output
    assert "[0] one rank: True" in output and "[0] entries: [18, 18, 18]" in output


PRICED = (
    SETTING
    + """
from qsync.predictor.profiling.memory_trace import optimizer_workspace
from qsync.records.cluster import Cluster, DeviceClass, Link
from qsync.replayer.levers.state_division import divided

classes = [DeviceClass(name, "cpu", 1, 2**30, (qsync.Precision.FP32,)) for name in ("train", "infer")]
cluster = Cluster(tuple(classes), Link(1e-5, 1e9))
for kind, depth in (("adamw", 1), ("adamw", 3), ("sgd", 3), ("adafactor", 1)):
    model = make(width=256, depth=depth)
    profile = qsync.profile(
        model, batch(width=256), loss_fn, precisions=["fp32"], rounds=1,
        make_optimizer=lambda parameters: KINDS[kind](model),
    )
    graph = qsync.capture(model, (batch(width=256)[0],))
    profiles, _ = divided(graph, {c.name: profile for c in classes}, cluster, {"train": 3, "infer": 1})
    predicted = profiles[("train", "infer")[rank]]
    model = DDP(make(width=256, depth=depth))
    optimizer = qsync.divide_optimizer(model, KINDS[kind](model), parts={0: 3, 1: 1})
    for _ in range(3):
        loss_fn(model, batch(width=256)).backward()
        with optimizer_workspace(torch.device("cpu")) as found:
            optimizer.step()
    held = state_bytes(optimizer, model.parameters())
    workspace = predicted.optimizer_workspace_bytes
    say(f"{kind} {depth}: {predicted.optimizer_bytes} {held} {workspace} {found[0]}")
"""
)


@pytest.mark.dist
def test_a_rank_holds_what_is_predicted_of_its_part(tmp_path):
    output = launch(tmp_path, PRICED)
    for kind in ("adamw 1", "adamw 3", "sgd 3", "adafactor 1"):
        for text in said(output, kind):
            predicted, held, workspace, used = map(int, text.split())
            assert held == pytest.approx(predicted, rel=0.01)
            assert used == pytest.approx(workspace, rel=0.01, abs=4096)
