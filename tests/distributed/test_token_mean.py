"""Losses that are means over tokens: the gradient of a step is the mean over all its tokens, exactly."""

from __future__ import annotations

import pytest
from two_ranks import launch, said

pytestmark = pytest.mark.dist

BODY = """
import contextlib, copy, io
from torch.distributed.algorithms.join import Join
from torch.nn.parallel import DistributedDataParallel as DDP

dist.init_process_group("gloo")

def net():
    torch.manual_seed(0)
    return torch.nn.Sequential(torch.nn.Embedding(11, 6), torch.nn.GELU(), torch.nn.Linear(6, 11)).double()

# Sequences of unequal lengths: four for rank 0, two for rank 1; -100 is padding.
lengths = [3, 9, 1, 5, 2, 8]
generator = torch.Generator().manual_seed(1)
x = torch.randint(0, 11, (6, 9), generator=generator)
y = torch.where(torch.arange(9) < torch.tensor(lengths)[:, None], x.flip(1), -100)
own = (slice(0, 4), slice(4, 6))[rank]

def mean_loss(model, x, y):
    return F.cross_entropy(model(x).flatten(0, 1), y.flatten(), ignore_index=-100)

alone = net()
mean_loss(alone, x, y).backward()

def error(model, exact=None):
    pairs = list(zip(model.parameters(), exact or [p.grad for p in alone.parameters()]))
    largest = max(float(g.abs().max()) for _, g in pairs)
    return max(float((p.grad - g).abs().max()) for p, g in pairs) / largest

def step(model, x=x[own], y=y[own], passes=1):
    for k, (xs, ys) in enumerate(zip(x.tensor_split(passes), y.tensor_split(passes))):
        with model.no_sync() if k < passes - 1 else contextlib.nullcontext():
            qsync.token_mean(model, mean_loss(model, xs, ys), (ys != -100).sum()).backward()

for what, options in {
    "ddp": {}, "views": {"gradient_as_bucket_view": True}, "buckets": {"bucket_cap_mb": 2**-12},
    "unused": {"find_unused_parameters": True}, "static": {"static_graph": True},
}.items():
    model = DDP(net(), **options)
    errors = []
    for _ in range(3):  # DDP rebuilds its buckets after the first step
        model.zero_grad()
        step(model)
        errors.append(error(model))
    say(f"{what}: {max(errors) < 1e-12} {max(errors)}")

with torch.no_grad():  # evaluation counts for nothing, nor does a step that is skipped
    qsync.token_mean(model, mean_loss(model, x[own], y[own]), 1000)
qsync.token_mean(model, mean_loss(model, x[own], y[own]), 1000)
model.zero_grad()
step(model)
say(f"not counted: {error(model) < 1e-12}")

late = DDP(net())  # rank 1 has no input at all
qsync.weigh_gradients(late, 4)
with Join([late]):
    for _ in range((1, 0)[rank]):
        mean_loss(late, x[own], y[own]).backward()
first = net()
mean_loss(first, x[:4], y[:4]).backward()
say(f"no input: {rank == 1 or error(late, [p.grad for p in first.parameters()]) < 1e-12}")

model = DDP(net())
step(model, passes=(2, 1)[rank])
say(f"passes: {error(model) < 1e-12}")
model.zero_grad()
step(model)
say(f"after: {error(model) < 1e-12}")

model.zero_grad()  # a rank whose tokens are all padding
part = net()
mean_loss(part, x[:4], y[:4]).backward()
step(model, y=y[own] if rank == 0 else torch.full_like(y[own], -100))
say(f"empty: {error(model, [p.grad for p in part.parameters()]) < 1e-12}")
model.zero_grad()
step(model, y=torch.full_like(y[own], -100))
say(f"all empty: {all(bool((p.grad == 0).all()) for p in model.parameters())}")

def masked_mean(model, x, y):  # 0 / 0 without tokens, and so are its gradients
    each = F.cross_entropy(model(x).flatten(0, 1), y.flatten().clamp(min=0), reduction="none")
    return (each * (y.flatten() != -100)).sum() / (y != -100).sum()

model.zero_grad()
padded = y[own] if rank == 0 else torch.full_like(y[own], -100)
qsync.token_mean(model, masked_mean(model, x[own], padded), (padded != -100).sum()).backward()
say(f"empty by a mask: {error(model, [p.grad for p in part.parameters()]) < 1e-12}")

model.zero_grad()
with model.no_sync():
    step(model)
model.zero_grad()  # what was never exchanged is dropped
step(model)
say(f"dropped: {error(model) < 1e-12}")

plain = DDP(net())
mean_loss(plain, x[own], y[own]).backward()
say(f"without: {error(plain) > 1e-2}")

joined = DDP(net())
with Join([joined]):  # rank 0 has two steps, rank 1 one: its own tokens alone count in the second
    for _ in range((2, 1)[rank]):
        joined.zero_grad()
        step(joined)
say(f"join: {rank == 1 or error(joined, [p.grad for p in part.parameters()]) < 1e-12}")

shares = DDP(net())
qsync.weigh_gradients(shares, (4, 2)[rank])
with Join([shares]):
    for _ in range((2, 1)[rank]):
        shares.zero_grad()
        mean_loss(shares, x[own], y[own]).backward()
say(f"join with shares: {rank == 1 or error(shares, [p.grad for p in part.parameters()]) < 1e-12}")

low = DDP(torch.nn.Linear(6, 4).bfloat16())  # whose gradients could not hold a count
batch = torch.full((1, 6), float(rank), dtype=torch.bfloat16)
qsync.token_mean(low, low(batch).float().sum(), (256, 1)[rank]).backward()
say(f"bf16: {bool((low.module.weight.grad == torch.tensor(1 / 257).bfloat16()).all())}")

hybrid = qsync.hybrid(net().float(), (x[:2],), lambda m, b: m(b[0]).square().mean(), cache_dir=cache)
step(hybrid)
say(f"hybrid: {error(hybrid) < 1e-5}")
buffer = io.BytesIO()
torch.save(hybrid, buffer)
buffer.seek(0)
for what, other in (("copied", copy.deepcopy(hybrid)), ("loaded", torch.load(buffer, weights_only=False))):
    other.zero_grad()
    step(other)
    say(f"{what}: {error(other) < 1e-5}")

bare = net().float()
qsync.hybrid(bare, (x[:2],), lambda m, b: m(b[0]).square().mean(), cache_dir=cache, ddp=False)
outer = DDP(bare)
loss = mean_loss(outer, x[own], y[own])  # this call finds the DDP around the model
qsync.token_mean(bare, loss, (y[own] != -100).sum()).backward()
say(f"of the inner model: {error(outer) < 1e-5}")

qsync.weigh_gradients(hybrid, (4, 2)[rank])
hybrid.zero_grad()
mean_loss(hybrid, x[own], y[own]).backward()
weighed = [p.grad.clone() for p in hybrid.parameters()]
buffer = io.BytesIO()
torch.save(hybrid, buffer)
buffer.seek(0)
loaded = torch.load(buffer, weights_only=False)
mean_loss(loaded, x[own], y[own]).backward()
say(f"loaded shares: {error(loaded, weighed) < 1e-6} {error(plain, weighed) > 1e-2}")

def attempt(what, do):
    try:
        do()
        say(f"{what}: went through")
    except (QSyncError, RuntimeError) as error:
        say(f"{what}: {type(error).__name__}: {str(error).splitlines()[0]}")

loss = lambda m=model: mean_loss(m, x[own], y[own])
attempt("plain model", lambda: qsync.token_mean(net(), loss(), 3))
attempt("no number", lambda: qsync.token_mean(model, loss(), -1))
hooked = DDP(net())
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import allreduce_hook
hooked.register_comm_hook(None, allreduce_hook)
attempt("hooked", lambda: qsync.token_mean(hooked, loss(), 3))
mixed = DDP(net())
qsync.weigh_gradients(mixed, 4)
attempt("mixed", lambda: (step(mixed) if rank else mean_loss(mixed, x[own], y[own]).backward()))
dist.destroy_process_group()
"""


def test_the_gradient_is_the_mean_over_the_tokens_of_all_ranks_and_passes(tmp_path):
    output = launch(tmp_path, BODY)
    for what in ("ddp", "views", "buckets", "unused", "static"):
        assert all(text.startswith("True") for text in said(output, what)), said(output, what)
    for what in (
        "not counted",
        "no input",
        "passes",
        "after",
        "empty",
        "all empty",
        "empty by a mask",
        "dropped",
        "without",
        "join",
        "join with shares",
        "bf16",
    ):
        assert said(output, what) == ["True"] * 2, what
    for what in ("hybrid", "copied", "loaded", "of the inner model"):
        assert said(output, what) == ["True"] * 2, what
    assert said(output, "loaded shares") == ["True True"] * 2
    sentences = {
        "plain model": "UnsupportedError: weighting gradients needs a model in DistributedDataParallel",
        "no number": "FormatError: num_tokens must be a whole number of at least 0, found -1",
        "hooked": "but this DDP already has allreduce_hook; leave that hook out",
        "mixed": "token_mean was called on some ranks only",
    }
    for what, sentence in sentences.items():
        assert all(sentence in text for text in said(output, what)), said(output, what)
