"""Shares of the batch in other libraries' loops: exact gradients, each sample once, resumed in mid-epoch."""

from __future__ import annotations

import pytest
from two_ranks import launch, said

pytestmark = pytest.mark.dist

# Plans with shares are stated: nothing hangs on measured times.
SHARED = """
import copy
from dataclasses import replace
from pathlib import Path
from torch.utils.data import DataLoader, TensorDataset
from qsync.distributed import job
from qsync.records.levers import ClassLevers, Levers

ddp_profiling.PROFILE_S = 0.0
job.join_job(torch.device("cpu"))
own = ("strong", "weak")[rank]
planning = {"device_class": own, "precisions": ["fp32"], "base": "fp32", "bitwise": True, "cache_dir": cache}

def uneven(samples, name):
    [found] = [p for p in map(qsync.Plan.load, Path(cache).glob("*/plan.json")) if p.model == name]
    return replace(found, levers=Levers({c: ClassLevers(n) for c, n in zip(("strong", "weak"), samples)}))

def everywhere(value):
    found = [None, None]
    dist.all_gather_object(found, value)
    return found

def norm(model):
    return float(torch.cat([p.grad.flatten().double() for p in model.parameters()]).norm())

class Checked:
    # Compares the gradient of every step with that of one process on all ranks' batches.
    def __init__(self, plain, loss_fn, divided_by=None):
        self.plain, self.loss_fn, self.divided_by = copy.deepcopy(plain), loss_fn, divided_by
        self.batches, self.steps, self.sizes, self.norms, self.worst = [], [], set(), [], 0.0

    def step(self, model):
        whole = sum(everywhere(self.batches), [])
        self.sizes |= {len(part) for part in self.batches}
        self.steps.append(sorted(int(i) for part in whole for i in part))
        self.plain.load_state_dict(model.state_dict())
        self.plain.zero_grad()
        self.loss_fn(self.plain, torch.cat([torch.as_tensor(part) for part in whole])).backward()
        self.norms.append(norm(model))
        # Lightning divides losses by its accumulation also where an epoch ends with fewer batches.
        exact = norm(self.plain) * len(self.batches) / (self.divided_by or len(self.batches))
        self.worst = max(self.worst, abs(self.norms[-1] / exact - 1.0))
        self.batches = []

def refused(what, do):
    try:
        do()
        say(f"{what}: went through")
    except QSyncError as error:
        say(f"{what}: {error}")

def identical(model):
    mine = parameters(model)
    return all(torch.equal(mine, torch.as_tensor(other)) for other in everywhere(mine.tolist()))
"""

TRAINER = (
    SHARED
    + """
import transformers
from qsync.experiments.integrations.trainer_cases import Rows, llama
from qsync.integrations.transformers import QSyncTrainer
from transformers import Trainer, TrainerCallback, TrainingArguments

class Numbered(Rows):
    def __len__(self):
        return 42

class Classifier(torch.nn.Module):  # whose loss is a mean over samples
    def __init__(self):
        super().__init__()
        self.embedding, self.head = torch.nn.Embedding(64, 16), torch.nn.Linear(16, 4)

    def forward(self, input_ids, labels):
        logits = self.head(F.gelu(self.embedding(input_ids)).mean(1))
        return {"loss": F.cross_entropy(logits, labels[:, -1] % 4), "logits": logits}

rows = Numbered()
whole = {name: torch.stack([rows[i][name] for i in range(42)]) for name in ("input_ids", "labels")}
number_of = {tuple(row): i for i, row in enumerate(whole["input_ids"].tolist())}

def loss_of(model, numbers):
    return model(**{name: part[numbers] for name, part in whole.items()})["loss"]

class Step(TrainerCallback):
    def __init__(self, checked):
        self.checked = checked

    def on_pre_optimizer_step(self, args, state, control, model=None, **_):
        self.checked.step(model)

def trainer(model, kind=QSyncTrainer, steps=-1, **options):
    checked = Checked(model, loss_of)
    args = TrainingArguments(
        str(Path(cache).parent / type(model).__name__), per_device_train_batch_size=4, learning_rate=0.05,
        optim="sgd", lr_scheduler_type="constant", max_grad_norm=0.0, gradient_accumulation_steps=2,
        num_train_epochs=2, max_steps=steps, save_strategy="steps", save_steps=4, report_to=[],
        disable_tqdm=True, use_cpu=True, ddp_backend="gloo", logging_steps=1, dataloader_pin_memory=False,
        remove_unused_columns=False, logging_nan_inf_filter=False,
    )

    class Recording(kind):
        def training_step(self, model, inputs, *args, **kwargs):
            checked.batches.append([number_of[tuple(row)] for row in inputs["input_ids"].tolist()])
            return super().training_step(model, inputs, *args, **kwargs)

    made = Recording(model=model, args=args, train_dataset=rows, callbacks=[Step(checked)], **options)
    return made, checked

def make(kind):
    torch.manual_seed(0)
    return llama() if kind == "LlamaForCausalLM" else Classifier()

given = {name: value for name, value in planning.items() if name != "base"}
for what, kind in (("tokens", "LlamaForCausalLM"), ("samples", "Classifier")):
    plain, expected = trainer(make(kind), Trainer, steps=6)
    plain.train()
    trainer(make(kind), steps=1, hybrid_options={**given, "levers": ()})[0].train()
    options = {"hybrid_options": {**given, "plan": uneven((6, 2), kind)}}
    made, checked = trainer(make(kind), **options)
    made.train()
    say(f"{what} exact: {checked.worst < 1e-6} {checked.sizes == {(6, 2)[rank]}} {identical(made.model)}")
    close = max(abs(a / b - 1.0) for a, b in zip(checked.norms, expected.norms))
    say(f"{what} as the Trainer: {checked.steps == expected.steps} {len(checked.steps)} {close < 1e-6}")
    losses = [[e["loss"] for e in one.state.log_history if "loss" in e] for one in (made, plain)]
    say(f"{what} logged: {max(abs(a / b - 1.0) for a, b in zip(*losses)) < 1e-3}")
    once = [sorted({i for step in checked.steps[k : k + 3] for i in step}) for k in (0, 3)]
    say(f"{what} once: {once == [list(range(42))] * 2} {sum(map(len, checked.steps))}")
    again, rest = trainer(make(kind), **options)
    again.train(resume_from_checkpoint=str(Path(made.args.output_dir) / "checkpoint-4"))
    say(f"{what} resumed: {rest.steps == checked.steps[4:]} {rest.norms == checked.norms[4:]}")

def refused(what, **options):
    try:
        trainer(make("Classifier"), steps=1, hybrid_options={**given, **options})[0].train()
        say(f"{what}: went through")
    except QSyncError as error:
        say(f"{what}: {error}")

passes = uneven((6, 2), "Classifier")
passes = replace(passes, levers=Levers({"strong": ClassLevers(6, passes=2), "weak": ClassLevers(2)}))
refused("passes", plan=passes)
QSyncTrainer.get_train_dataloader = lambda self: self.accelerator.prepare(DataLoader(rows, 4))
refused("own loader", plan=uneven((6, 2), "Classifier"))
dist.destroy_process_group()
"""
)


def test_the_trainers_ranks_take_their_shares(tmp_path):
    output = launch(tmp_path, TRAINER)
    for what in ("tokens", "samples"):
        assert said(output, f"{what} exact") == ["True True True"] * 2, output[-6000:]
        assert said(output, f"{what} as the Trainer") == ["True 6 True"] * 2
        assert said(output, f"{what} once") == ["True 96"] * 2
        assert said(output, f"{what} resumed") == ["True True"] * 2
        assert said(output, f"{what} logged") == ["True"] * 2
    assert all("cannot split a rank's batch into passes" in text for text in said(output, "passes"))
    assert all("has no qsync.ShareSampler; plan without share" in text for text in said(output, "own loader"))


LIGHTNING = (
    SHARED
    + """
import lightning.pytorch as pl
from lightning.pytorch.callbacks import Callback
from qsync.experiments.integrations.cases import Net as Small
from qsync.experiments.integrations.lightning_cases import Classifier
from qsync.integrations.lightning import QSyncStrategy

x, y = batch(size=42, width=32)
data = TensorDataset(x, y, torch.arange(42))
loss_of = lambda model, numbers: F.cross_entropy(model(x[numbers]), y[numbers])

class Module(Classifier):
    def __init__(self, num_workers):
        super().__init__(Small)
        self.checked, self.num_workers = Checked(self.net, loss_of, 2), num_workers

    def train_dataloader(self):  # a new one for each call
        context = "fork" if self.num_workers else None
        return DataLoader(data, batch_sampler=qsync.ShareSampler(data, batch_size=8),
                          num_workers=self.num_workers, multiprocessing_context=context)

    def val_dataloader(self):
        return DataLoader(data, 4)

    def on_train_batch_start(self, one, index):
        self.checked.batches.append(one[2].tolist())

    def on_before_optimizer_step(self, optimizer):
        self.checked.step(self.net)

class Save(Callback):  # in the midst of the second epoch
    def on_train_batch_end(self, trainer, module, outputs, batch, index):
        if (trainer.global_step, index) == (4, 1):
            trainer.save_checkpoint(Path(cache).parent / "mid.ckpt")

given = {name: value for name, value in planning.items() if name != "base"}

def fit(module, ckpt_path=None, callbacks=(), epochs=2, **options):
    trainer = pl.Trainer(
        accelerator="cpu", devices=2, strategy=QSyncStrategy(hybrid_options={**given, **options}),
        logger=False, max_epochs=epochs, accumulate_grad_batches=2, enable_checkpointing=False,
        enable_progress_bar=False, enable_model_summary=False, callbacks=list(callbacks),
    )
    trainer.fit(module, ckpt_path=ckpt_path, weights_only=False)
    return trainer

def module(num_workers):
    torch.manual_seed(0)
    return Module(num_workers)

fit(module(0), levers=(), epochs=1)
shares = {"plan": uneven((6, 2), "Module")}
first = module(0)
trainer = fit(first, callbacks=[Save()], **shares)
checked = first.checked
say(f"exact: {checked.worst < 1e-6} {checked.sizes == {(6, 2)[rank]}} {identical(first)}")
stream = [i for step in checked.steps for i in step]
say(f"once: {sorted(set(stream[:48])) == list(range(42))} {len(stream)} {[len(s) for s in checked.steps]}")
counts = torch.bincount(torch.tensor(stream), minlength=42)
say(f"stream: {counts.min().item()} {counts.max().item()}")
validation = [len(one[0]) for one in trainer.val_dataloaders]
say(f"validation: {validation}")
for workers in (0, 2):
    rest = module(workers)
    fit(rest, ckpt_path=Path(cache).parent / "mid.ckpt", **shares)
    rest = rest.checked
    say(f"resumed {workers}: {rest.steps == checked.steps[4:]} {rest.norms == checked.norms[4:]}")

def refused(what, kind, **options):
    try:
        fit(kind, epochs=1, **options)
        say(f"{what}: went through")
    except QSyncError as error:
        say(f"{what}: {error}")

other = module(0)
other.train_dataloader = lambda: DataLoader(data, 4)
refused("no sampler", other, **shares)
refused("passes", module(0), levers=["share", "accumulate"])
dist.destroy_process_group()
"""
)


def test_lightnings_ranks_take_their_shares(tmp_path):
    output = launch(tmp_path, LIGHTNING)
    assert said(output, "exact") == ["True True True"] * 2, output[-6000:]
    assert said(output, "once") == ["True 88 [16, 16, 16, 16, 16, 8]"] * 2
    assert said(output, "stream") == ["2 3"] * 2
    assert said(output, "validation") == ["[4, 4, 4, 4, 4, 1]"] * 2
    assert said(output, "resumed 0") == said(output, "resumed 2") == ["True True"] * 2
    assert all("has no qsync.ShareSampler; plan without share" in text for text in said(output, "no sampler"))
    assert all("cannot split a rank's batch into passes" in text for text in said(output, "passes"))


ACCELERATE = (
    SHARED
    + """
import itertools
from accelerate import Accelerator, DataLoaderConfiguration, skip_first_batches

class Language(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.embedding, self.head = torch.nn.Embedding(11, 16), torch.nn.Linear(16, 11)

    def forward(self, x):
        return self.head(F.gelu(self.embedding(x)))

tokens = torch.randint(0, 11, (42, 9), generator=torch.Generator().manual_seed(0))
labels = torch.where(torch.arange(9) < torch.randint(1, 9, (42, 1)), tokens.flip(1), -100)
dist.broadcast(labels, 0)
data = TensorDataset(tokens, labels, torch.arange(42))
mean = lambda model, one: F.cross_entropy(model(one[0]).flatten(0, 1), one[1].flatten(), ignore_index=-100)
by_sample = lambda model, one: model(one[0]).square().mean()

def make():
    torch.manual_seed(0)
    return Language()

def loader_of(seed=0, **more):
    sampler = qsync.ShareSampler(data, batch_size=8, seed=seed)
    return DataLoader(data, batch_sampler=sampler, **more), sampler

qsync.hybrid(make(), loader=loader_of()[0], loss_fn=mean, levers=(), **planning)
plan = uneven((6, 2), "Language")

def job_of(loss_fn=mean, **more):
    accelerator = Accelerator(cpu=True, gradient_accumulation_steps=2)
    loader, sampler = loader_of(**more)
    model = qsync.hybrid(make(), loader=loader, plan=plan, device_class=own)
    model, optimizer, loader = accelerator.prepare(
        model, torch.optim.SGD(model.parameters(), lr=0.05), loader
    )
    checked = Checked(make(), lambda plain, numbers: loss_fn(plain, (tokens[numbers], labels[numbers])))

    def train(batches):
        for one in batches:
            with accelerator.accumulate(model):
                checked.batches.append(one[2].tolist())
                loss = loss_fn(model, one)
                if loss_fn is mean:
                    loss = qsync.token_mean(model, loss, (one[1] != -100).sum())
                accelerator.backward(loss)
                if accelerator.sync_gradients:
                    checked.step(model.module)
                optimizer.step()
                optimizer.zero_grad()

    return model, loader, sampler, checked, train

for what, loss_fn, more in (
    ("tokens", mean, {"num_workers": 2, "multiprocessing_context": "fork"}), ("samples", by_sample, {})
):
    model, loader, sampler, checked, train = job_of(loss_fn, **more)
    sampler.set_epoch(0)
    train(loader)
    sampler.set_epoch(1)
    train(itertools.islice(loader, 2))
    state, weights = sampler.state_dict(), copy.deepcopy(model.module.state_dict())
    say(f"{what} exact: {checked.worst < 1e-6} {checked.sizes == {(6, 2)[rank]}} {identical(model)} {state}")
    first = sorted({i for step in checked.steps[:3] for i in step})
    say(f"{what} once: {first == list(range(42))} {len(loader)}")
    sampler.set_epoch(1)
    before = len(checked.steps) - 1
    model.module.load_state_dict(weights)
    train(itertools.islice(skip_first_batches(loader, 2), 2))
    skipped = sampler.state_dict()
    later, loader, sampler, rest, train = job_of(loss_fn, **more)
    later.module.load_state_dict(weights)
    sampler.load_state_dict(state)
    train(itertools.islice(loader, 2))
    say(f"{what} resumed: {rest.steps == checked.steps[-1:]} {rest.norms == checked.norms[-1:]} {skipped}")

sampler, epochs = loader_of()[1], []
loader = Accelerator(cpu=True).prepare(DataLoader(data, batch_sampler=sampler))
for epoch in (2, None, 0):
    if epoch is not None:
        loader.set_epoch(epoch)
    epochs.append(len([one for one in loader]))
say(f"epochs: {epochs} {sampler.state_dict()}")

whole = DataLoaderConfiguration(split_batches=True)
refused("split", lambda: Accelerator(cpu=True, dataloader_config=whole).prepare(loader_of()[0]))
from accelerate.state import AcceleratorState, GradientState
AcceleratorState._reset_state()
shared = DataLoaderConfiguration(dispatch_batches=True)
dealt = Accelerator(cpu=True, dataloader_config=shared).prepare(loader_of()[0])
refused("dealt", lambda: rank or next(iter(dealt)))
costs = {name: 1.0 for name in ("strong", "weak")}
refused("lengths", lambda: qsync.LengthSampler(model, [3] * 8, 4, costs=costs))
dist.destroy_process_group()
"""
)


def test_accelerate_leaves_the_batches_of_shares_whole(tmp_path):
    output = launch(tmp_path, ACCELERATE)
    for what in ("tokens", "samples"):
        assert said(output, f"{what} exact") == ["True True True {'step': 8}"] * 2, output[-6000:]
        assert said(output, f"{what} once") == ["True 5"] * 2
        assert said(output, f"{what} resumed") == ["True True {'step': 10}"] * 2
    assert said(output, "epochs") == ["[5, 5, 6] {'step': 6}"] * 2
    assert all("leave split_batches out" in text for text in said(output, "split"))
    assert "leave dispatch_batches out" in said(output, "dealt")[0]
    assert all("the plan already divides the batch by samples" in text for text in said(output, "lengths"))


SHARDED = (
    SHARED
    + """
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions, get_model_state_dict, set_model_state_dict,
)
from torch.distributed.fsdp import fully_shard

x, y = batch(size=42, width=32)
data = TensorDataset(x, y, torch.arange(42))
loss_fn = lambda model, one: F.cross_entropy(model(one[0]), one[1])

class Blocks(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.layers = torch.nn.ModuleList(torch.nn.Linear(32, 32) for _ in range(3))
        self.head = torch.nn.Linear(32, 10)

    def forward(self, x):
        for layer in self.layers:
            x = x + F.gelu(layer(x))
        return self.head(x)

def job_of(plan=None, **more):
    torch.manual_seed(0)
    sampler = qsync.ShareSampler(data, batch_size=8)
    loader = DataLoader(data, batch_sampler=sampler)
    given = {"plan": plan, "device_class": own} if plan is not None else {**planning, **more}
    model = qsync.hybrid(Blocks(), loader=loader, loss_fn=loss_fn, ddp=False, **given)
    for layer in (*model.layers, model):
        fully_shard(layer)
    return model, sampler, loader, torch.optim.SGD(model.parameters(), lr=0.05)

def whole(model):
    options = StateDictOptions(full_state_dict=True)
    return {name: value.clone() for name, value in get_model_state_dict(model, options=options).items()}

def norm_of(model):
    return float(torch.cat([p.grad.full_tensor().flatten().double() for p in model.parameters()]).norm())

def train(model, loader, optimizer, most=None):
    steps, worst, calls = [], 0.0, 0
    plain = Blocks()
    for one in loader:
        plain.load_state_dict(whole(model))
        plain.zero_grad()
        for part in qsync.micro_batches(model, one):
            calls += 1
            loss_fn(model, part).backward()
        together = sum(everywhere(one[2].tolist()), [])
        loss_fn(plain, (x[together], y[together])).backward()
        worst = max(worst, abs(norm_of(model) / norm(plain) - 1.0))
        steps.append(sorted(together))
        optimizer.step()
        optimizer.zero_grad()
        if len(steps) == most:
            break
    return steps, worst, calls

job_of(levers=())
plan = uneven((6, 2), "Blocks")
model, sampler, loader, optimizer = job_of(plan)
say(f"samples: {sampler.share.samples} {qsync.samples_of(model)}")
steps, worst, calls = train(model, loader, optimizer)
say(f"exact: {worst < 1e-6} {calls // len(steps)}")
say(f"once: {sorted(set(sum(steps, []))) == list(range(42))} {len(sum(steps, []))}")
sampler.set_epoch(1)
batches = iter(loader)
train(model, batches, optimizer, most=2)
position, state = sampler.state_dict(), whole(model)
rest, _, _ = train(model, batches, optimizer)
again, sampler, loader, optimizer = job_of(plan)
set_model_state_dict(again, state, options=StateDictOptions(full_state_dict=True))
sampler.load_state_dict(position)
sampler.set_epoch(1)
resumed, _, _ = train(again, loader, optimizer)
trained = whole(model), whole(again)
same = all(torch.equal(value, trained[1][name]) for name, value in trained[0].items())
say(f"resumed: {resumed == rest} {len(rest)} {same}")
qsync.weigh_gradients(again, 6 if rank == 0 else 2, passes=2, total=8)
_, worst, calls = train(again, loader, optimizer, most=2)
say(f"two passes: {worst < 1e-6} {calls}")

part = Blocks()
fully_shard(part.head)
refused("a part", lambda: qsync.weigh_gradients(part, 4))
refused("none", lambda: list(qsync.micro_batches(Blocks(), (x, y), passes=2)))
refused("tokens", lambda: qsync.token_mean(model, loss_fn(model, (x, y)), 3))
refused("other passes", lambda: qsync.weigh_gradients(model, 6 if rank == 0 else 2, passes=2 - rank))
apart = replace(plan, levers=Levers({"strong": ClassLevers(6, passes=3), "weak": ClassLevers(2)}))
model, _, loader, optimizer = job_of(apart)
refused("a plan's passes", lambda: train(model, loader, optimizer, most=1))
dist.destroy_process_group()
"""
)


def test_the_ranks_of_a_sharded_model_take_their_shares(tmp_path):
    output = launch(tmp_path, SHARDED)
    assert said(output, "samples") == ["6 6", "2 2"], output[-6000:]
    assert said(output, "exact") == ["True 1"] * 2 and said(output, "once") == ["True 48"] * 2
    assert said(output, "resumed") == ["True 3 True"] * 2
    assert said(output, "two passes") == ["True 4"] * 2
    assert all("are not reduced between shards" in text for text in said(output, "a part"))
    assert all(
        "DistributedDataParallel or fully_shard, found Blocks" in text for text in said(output, "none")
    )
    assert all("needs a model in DistributedDataParallel" in text for text in said(output, "tokens"))
    for what in ("other passes", "a plan's passes"):
        assert all("in every pass, and so must take equally many" in text for text in said(output, what))
