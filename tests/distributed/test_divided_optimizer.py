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

def trained(model, optimizer, numbers, scheduler=None, closes=False, scaler=None):
    for number in numbers:
        def passes():
            optimizer.zero_grad()
            loss = loss_fn(model, batch(seed=10 * number + rank))
            (loss if scaler is None else scaler.scale(loss)).backward()
            if scaler is not None:
                scaler.unscale_(optimizer)
            torch.nn.utils.clip_grad_norm_([p for g in optimizer.param_groups for p in g["params"]], 0.5)
            return loss
        if closes:
            optimizer.step(passes)
        elif scaler is not None:
            passes()
            scaler.step(optimizer)
            scaler.update()
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
        trained(model, optimizer, range(3), scheduler)
        trained(model, optimizer, range(3, 5), scheduler, closes=True)
        scaler = torch.amp.GradScaler("cpu", init_scale=64.0)
        found[divided] = trained(model, optimizer, range(5, 7), scheduler, scaler=scaler), optimizer, model
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
from contextlib import contextmanager
from qsync.checkpoints import reader

@contextmanager
def observing_reads():
    "Names of parameters whose optimizer state this rank reads."
    found, reads = set(), reader.read_tensors
    def read(targets, **options):
        found.update(name.split("/")[2] for name in targets if name.startswith("optimizer/state/"))
        return reads(targets, **options)
    reader.read_tensors = read
    yield found
    reader.read_tensors = reads

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
    with observing_reads() as read:
        assert qsync.load(folder / "a", model, optimizer).step == 3
    held = [name for name, p in model.module.named_parameters() if p in optimizer.state]
    same = torch.equal(trained(model, optimizer, range(3, 6)), wanted)
    say(f"saved {parts}: {same} {before} {len(held)} {len(read)}")
    model, optimizer = fresh(parts)
    qsync.load(folder / "run", model, [optimizer])
    qsync.load(folder / "a", model)
    say(f"in a list {parts}: {torch.equal(trained(model, optimizer, range(3, 6)), wanted)}")
    model, optimizer = fresh(parts)
    qsync.load(folder / "a", model)
    optimizer.load_state_dict(torch.load(folder / "state-0.pt"))
    is_own = len(optimizer.state) == len(held)  # and no entry of another rank's parameter
    say(f"state_dict {parts}: {is_own and torch.equal(trained(model, optimizer, range(3, 6)), wanted)}")
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
        assert all(text.split()[2] == text.split()[3] for text in (first, second))  # and no more is read
    assert said(output, "saved undivided") == ["True 0 6 6"] * 2
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
from qsync.replayer.levers import state_division
from qsync.replayer.levers.state_division import divided

classes = [DeviceClass(name, "cpu", 1, 2**30, (qsync.Precision.FP32,)) for name in ("train", "infer")]
cluster = Cluster(tuple(classes), Link(1e-5, 1e9))
CAP = divided_optimizer.BUCKET_BYTES
for kind, depth, cap in (
    ("adamw", 1, CAP), ("adamw", 3, CAP), ("sgd", 3, CAP), ("adafactor", 1, CAP), ("sgd", 4, 20000)
):
    divided_optimizer.BUCKET_BYTES = state_division.BUCKET_BYTES = cap
    model = make(width=256, depth=depth)
    profile = qsync.profile(
        model, batch(width=256), loss_fn, precisions=["fp32"], rounds=1,
        make_optimizer=lambda parameters: KINDS[kind](model),
    )
    graph = qsync.capture(model, (batch(width=256)[0],))
    profiles = divided(graph, {c.name: profile for c in classes}, cluster, {"train": 0.75, "infer": 0.25})
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
    for kind in ("adamw 1", "adamw 3", "sgd 3", "adafactor 1", "sgd 4"):
        for text in said(output, kind):
            predicted, held, workspace, used = map(int, text.split())
            assert held == pytest.approx(predicted, rel=0.01)
            assert used == pytest.approx(workspace, rel=0.01, abs=4096)


REFUSED = (
    SETTING
    + """
from torch.distributed.fsdp import fully_shard
from torch.distributed.optim import _apply_optimizer_in_backward

def attempt(what, model=None, optimizer=None, then=None, **options):
    try:
        model = DDP(make()) if model is None else model
        optimizer = KINDS["adamw"](model) if optimizer is None else optimizer(model)
        qsync.divide_optimizer(model, optimizer, **options)
        if then is not None:
            then(model, optimizer)
        say(f"{what}: went through")
    except QSyncError as error:
        say(f"{what}: {type(error).__name__}: {error}")

def twice(model, optimizer):
    qsync.divide_optimizer(model, optimizer)

def tied(model):
    optimizer = KINDS["grouped"](model)
    optimizer.param_groups[1]["params"].append(model.module.head.weight)
    return optimizer

def in_backward(model):
    _apply_optimizer_in_backward(torch.optim.SGD, [model.module.head.bias], {"lr": 0.1})
    return KINDS["adamw"](model)

def from_a_hook(model, optimizer):
    model.module.head.bias.register_post_accumulate_grad_hook(lambda _: optimizer.step())
    loss_fn(model, batch()).backward()

def added(model, optimizer):
    optimizer.add_param_group({"params": [torch.nn.Parameter(torch.zeros(3))]})
    optimizer.step()

def unfrozen(model, optimizer):
    model.module.head.bias.requires_grad_()
    optimizer.step()

def frozen(model):
    model.module.head.bias.requires_grad_(False)
    return KINDS["adamw"](model)

attempt("lbfgs", optimizer=lambda model: torch.optim.LBFGS(model.parameters()))
attempt("a list", optimizer=lambda model: [KINDS["adamw"](model)])
attempt("twice", then=twice)
attempt("tied", optimizer=tied)
attempt("stranger", optimizer=lambda model: KINDS["adamw"](make()))
attempt("nothing trains", optimizer=lambda model: KINDS["adamw"](model.requires_grad_(False)))
attempt("in backward", optimizer=in_backward)
attempt("from a hook", then=from_a_hook)
attempt("sharded", model=fully_shard(make()))
alone = [dist.new_group([each]) for each in (0, 1)][rank]
attempt("a part of the ranks", model=DDP(make(), process_group=alone))
attempt("added", then=added)
attempt("unfrozen", optimizer=frozen, then=unfrozen)
for name, parts in {"rank": {2: 1}, "negative": {0: -1, 1: 2}, "nobody": {0: 0}, "list": [3, 1]}.items():
    attempt(f"parts {name}", parts=parts)
# Ranks that disagree
attempt("other parts", parts={0: 3, 1: 1 + rank})
attempt("parts on one", parts={0: 3, 1: 1} if rank else None)
attempt("other class", optimizer=(KINDS["adamw"], KINDS["sgd"])[rank])
attempt("other groups", optimizer=(KINDS["adamw"], KINDS["grouped"])[rank])
attempt("turned", optimizer=lambda model: torch.optim.SGD(list(model.parameters())[::1 - 2 * rank], lr=1.0))

class Own(torch.optim.SGD):
    fails = False

    def step(self, closure=None):
        loss = super().step(closure)
        if self.fails:
            raise ArithmeticError("once")
        return loss

class Outer:  # as Accelerate wraps
    def __init__(self, optimizer):
        self.optimizer = optimizer

with warnings.catch_warnings(record=True) as warned:
    warnings.simplefilter("always")
    model = DDP(make())
    own = Own(model.parameters(), lr=0.1)
    outer = Outer(own)
    assert qsync.divide_optimizer(model, outer, parts={0: 1}) is outer
say(f"own class: {[str(one.message) for one in warned if 'qsync' in str(one.message)]}")
loss_fn(model, batch()).backward()
for own.fails in (True, False):  # what a failed step leaves is whole again
    try:
        own.step()
    except ArithmeticError:
        pass
say(f"after a failure: {len(own.param_groups[0]['params'])}")

# Only rank 0 asks for the state, again.
own.state_dict()
divided_optimizer._TIMEOUT_S = 0.2
if rank == 0:
    try:
        own.state_dict()
    except QSyncError as error:
        say(f"alone: {error}")
dist.barrier()
dist.destroy_process_group()
"""
)


@pytest.mark.dist
def test_what_cannot_be_divided_is_one_sentence_on_every_rank(tmp_path):
    output = launch(tmp_path, REFUSED)
    for what, words in {
        "lbfgs": "UnsupportedError: dividing the optimizer failed on rank 0: LBFGS updates all parameters",
        "a list": "optimizer must be a torch.optim.Optimizer",
        "twice": "this AdamW is already divided",
        "tied": "AdamW has 'head.weight' in two places of its groups",
        "stranger": "AdamW has parameters that the model lacks",
        "nothing trains": "AdamW has no parameter that is trained",
        "in backward": "'head.bias' is updated within backward",
        "from a hook": "a divided AdamW steps within backward",
        "sharded": "'inner.0.weight' is sharded",
        "a part of the ranks": "the model's ranks are not those of torch.distributed's job",
        "added": "MismatchError: a parameter of shape [3] was added to it after AdamW was divided",
        "unfrozen": "MismatchError: a parameter of shape [4] was unfrozen after AdamW was divided",
        "parts rank": "parts must map ranks from 0 to 1 to weights from 0 on, found {2: 1}; give",
        "parts negative": "parts must map ranks from 0 to 1 to weights",
        "parts nobody": "parts gives no rank a weight above 0",
        "parts list": "parts must map ranks from 0 to 1 to weights from 0 on, found [3, 1]",
        "other parts": "each rank's weight differs between ranks: rank 0 has [3.0, 1.0], rank 1 has",
        "parts on one": "each rank's weight differs between ranks: rank 0 has [1.0, 1.0], rank 1",
        "other class": "the optimizer's class differs between ranks: rank 0 has AdamW, rank 1 has SGD",
        "other groups": "the number of its groups differs between ranks: rank 0 has 1, rank 1 has 2",
        "turned": "group 0 of the optimizer differs between ranks",
        "own class": "Own is not torch's own; divided, it is the same optimizer only if",
        "after a failure": "6",
    }.items():
        assert all(words in text for text in said(output, what)), (what, said(output, what))
    assert "[0] alone: state_dict of a divided Own gathers the state from all ranks, and rank 1" in output


PLANNED = (
    SETTING
    + """
from dataclasses import replace
from qsync.records.levers import ClassLevers, Levers
from qsync.records.plans import ClassPlan, Plan, Predicted

graph = qsync.capture(make(), (batch()[0],))
bf16 = {op.name: qsync.Precision.BF16 for op in graph.adjustable}
STATE = 8000
classes = {
    name: ClassPlan(bf16, Predicted(0.1, 0.0, peak, 0.0, state_bytes=STATE))
    for name, peak in (("train", 20000), ("infer", 30000))
}
own = ("train", "infer")[rank]
plan = Plan(graph.model, graph.hash, classes, budgets={"train": 45000, "infer": 33000})
found = {}
for divided in (False, True):
    model = qsync.hybrid(make(), plan=plan, device_class=own)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    if divided:
        qsync.divide_optimizer(model, optimizer)
        say(f"parts: {divided_optimizer._agreed_parts(model, None)}")
    found[divided] = trained(model, optimizer, range(6))
say(f"lowered: {torch.equal(found[False], found[True])}")
parts = Levers({"train": ClassLevers(state_part=0.7), "infer": ClassLevers(state_part=0.3)})
model = qsync.hybrid(make(), plan=replace(plan, levers=parts), device_class=own)
say(f"as planned: {divided_optimizer._agreed_parts(model, None)}")
unknown = replace(plan, classes={n: replace(c, predicted=None) for n, c in classes.items()})
model = qsync.hybrid(make(), plan=unknown, device_class=own)
say(f"unknown: {divided_optimizer._agreed_parts(model, None)}")

from qsync.runtime.wrapping import plan_of

model = qsync.hybrid(
    make(), batch(), loss_fn, device_class=own, cache_dir=cache, precisions=["fp32"], divide_state=True,
    budgets={"train": 1000000, "infer": 500000},
)
optimizer = qsync.divide_optimizer(model, torch.optim.AdamW(model.parameters()))
trained(model, optimizer, range(1))
parts = plan_of(model).levers.state_parts
part = plan_of(model)[own].predicted.state_bytes
held = state_bytes(optimizer, model.parameters())
as_planned = divided_optimizer._agreed_parts(model, None) == [parts["train"], parts["infer"]]
say(f"hybrid: {as_planned} {part == held} {held}")

# A backbone that does not train is nobody's, and is not sent.
model = make()
model.inner.requires_grad_(False)
model = DDP(model)
optimizer = qsync.divide_optimizer(model, KINDS["sgd"](model), parts={0: 1})
sent = []
broadcast = dist._broadcast_coalesced

def observed(group, tensors, *rest):
    sent.extend(tensors)
    broadcast(group, tensors, *rest)

dist._broadcast_coalesced = observed
before = model.module.head.weight._version
trained(model, optimizer, range(2))
say(f"counts as written: {model.module.head.weight._version > before}")
say(f"frozen: {sorted(set(t.numel() for t in sent))} {len(sent)}")
"""
)


@pytest.mark.dist
def test_parts_go_by_the_memory_that_the_plan_leaves(tmp_path):
    output = launch(tmp_path, PLANNED)
    assert said(output, "parts") == ["[33000.0, 11000.0]"] * 2
    assert said(output, "lowered") == ["True"] * 2
    assert said(output, "as planned") == ["[0.7, 0.3]"] * 2
    assert said(output, "unknown") == ["[1.0, 1.0]"] * 2
    (first, second) = said(output, "hybrid")
    assert first.startswith("True True ") and second.startswith("True True ")
    assert int(first.split()[2]) > int(second.split()[2])
    assert said(output, "counts as written") == ["True", "True"]
    assert said(output, "frozen") == ["[4, 256] 4"] * 2
