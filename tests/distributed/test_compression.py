"""Gradients that travel compressed: fewer bytes, equal on all ranks, in profiles and in training."""

from __future__ import annotations

from two_ranks import launch, said

BODY = """
from dataclasses import replace
from pathlib import Path
from torch.nn.parallel import DistributedDataParallel as DDP
from qsync.records.levers import ClassLevers, Levers

ddp_profiling.PROFILE_S = 0.0
own = ("strong", "weak")[rank]
given = {"loss_fn": loss_fn, "device_class": own, "precisions": ["fp32"], "base": "fp32", "cache_dir": cache}
all_reduce, sent = dist.all_reduce, []

def counted(tensor, *rest, **options):
    sent.append((tensor.dtype, tensor.numel() * tensor.element_size()))
    return all_reduce(tensor, *rest, **options)

dist.all_reduce = counted
num_bytes = 4 * sum(p.numel() for p in make().parameters())

def step(model, samples=None):
    sent.clear()
    model.zero_grad()
    x, y = batch(seed=rank)
    loss_fn(model, (x[:samples], y[:samples])).backward()
    return torch.cat([p.grad.flatten() for p in model.parameters()])

def exact(samples):
    parts = [batch(seed=r) for r in (0, 1)]
    x, y = (torch.cat([part[k][:n] for part, n in zip(parts, samples)]) for k in (0, 1))
    plain = make()
    loss_fn(plain, (x, y)).backward()
    return torch.cat([p.grad.flatten() for p in plain.parameters()])

def compared(what, model, samples=(32, 32)):
    found, of_all = step(model, samples[rank]), exact(samples)
    others = [torch.empty_like(found) for _ in range(2)]
    dist.all_gather(others, found)
    off = float((found - of_all).norm() / of_all.norm())
    in_bf16 = sum(n for dtype, n in sent if dtype is torch.bfloat16)
    say(f"{what}: {torch.equal(*others)} {1e-4 < off < 5e-3} {in_bf16 / num_bytes} {off}")

model = qsync.hybrid(make(), batch(seed=rank), compression="bf16", **given)
say(f"profiled: {any(dtype is torch.bfloat16 for dtype, _ in sent)}")
compared("equal", model)
compared("second step", model)
model = qsync.hybrid(make(), batch(seed=rank), **given)
sent.clear()
found = step(model)
bf16 = [dtype for dtype, _ in sent if dtype is torch.bfloat16]
say(f"without: {bf16} {float((found - exact((32, 32))).norm()) < 1e-5}")
plan = qsync.Plan.load(next(Path(cache).glob("*/plan.json")))
say(f"kept apart: {len(list(Path(cache).glob('*/plan.json')))}")
uneven = replace(plan, levers=Levers({"strong": ClassLevers(24), "weak": ClassLevers(8)}))
model = qsync.hybrid(make(), plan=uneven, device_class=own, compression="bf16")
compared("shares", model, (24, 8))
framework = qsync.hybrid(make(), plan=plan, device_class=own, ddp=False, compression="bf16")
compared("framework", DDP(framework))
counted_tokens = qsync.hybrid(make(), plan=plan, device_class=own, compression="bf16")
sent.clear()
qsync.token_mean(counted_tokens, loss_fn(counted_tokens, batch()), 3 + rank).backward()
say(f"tokens: {sum(n for dtype, n in sent if dtype is torch.bfloat16) / num_bytes}")
embedding = DDP(torch.nn.Embedding(8, 4, sparse=True))
qsync.weigh_gradients(embedding, 2)
from qsync.distributed.gradient_weighting import compress_gradients
compress_gradients(embedding, {"*": "bf16"})
sent.clear()
embedding(torch.tensor([rank, 5])).sum().backward()
row = embedding.module.weight.grad.to_dense()[5].tolist()
say(f"sparse: {[dtype for dtype, _ in sent if dtype is torch.bfloat16]} {row}")

unequal = replace(plan, levers=Levers({"strong": ClassLevers(24, passes=2), "weak": ClassLevers(8)}))
for kind in ("int8", "int8+feedback"):
    model = qsync.hybrid(make(), plan=unequal, device_class=own, compression=kind)
    for k in (1, 2):
        model.zero_grad()
        x, y = batch(seed=rank)
        for part in qsync.micro_batches(model, (x[:(24, 8)[rank]], y[:(24, 8)[rank]])):
            loss_fn(model, part).backward()
    found, of_all = torch.cat([p.grad.flatten() for p in model.parameters()]), exact((24, 8))
    off = float((found - of_all).norm() / of_all.norm())
    others = [torch.empty_like(found) for _ in range(2)]
    dist.all_gather(others, found)
    say(f"{kind}: {torch.equal(*others)} {1e-3 < off < 2e-2} {off}")
    model.zero_grad()
    counts, parts = ((3, 0)[rank], (5, 8)[rank]), (batch(seed=rank), batch(seed=2 + rank))
    with model.no_sync():
        qsync.token_mean(model, loss_fn(model, parts[0]), counts[0]).backward()
    qsync.token_mean(model, loss_fn(model, parts[1]), counts[1]).backward()
    alone = make()
    each = ((3, 0), (5, 2), (0, 1), (8, 3)) if kind == "int8" else ()
    for count, seed in each:
        (loss_fn(alone, batch(seed=seed)) * count / 16).backward()
    if each:
        exact_tokens = torch.cat([p.grad.flatten() for p in alone.parameters()])
        found = torch.cat([p.grad.flatten() for p in model.parameters()])
        off = float((found - exact_tokens).norm() / exact_tokens.norm())
        say(f"{kind} tokens: {1e-3 < off < 2e-2} {off}")
copy = __import__("copy").deepcopy(model)  # a moving average, say; it makes its own exchange if it trains
step(copy, (24, 8)[rank])
say(f"copied: {copy._comm_hooks[0][1].compressed is not None}")

attempt("unknown", compression="int4", precisions=["fp32"])
attempt("on one rank", compression="bf16" if rank else None, precisions=["fp32"])
from torch.distributed.fsdp import fully_shard
sharded = qsync.hybrid(make(), plan=plan, device_class=own, ddp=False, compression="bf16")
for part in (sharded.head, sharded):
    fully_shard(part)
try:
    step(sharded)
    say("sharded: went through")
except QSyncError as error:
    say(f"sharded: {error}")
codes, exchange = [], dist.all_to_all_single

def all_to_all(received, message, **options):
    codes.append(message.numel())
    return exchange(received, message, **options)

dist.all_to_all_single = all_to_all
sharded = qsync.hybrid(make(), plan=uneven, device_class=own, ddp=False, compression="int8")
fully_shard(sharded)
x, y = batch(seed=rank)
loss_fn(sharded, (x[:(24, 8)[rank]], y[:(24, 8)[rank]])).backward()
found = torch.cat([p.grad.full_tensor().flatten() for p in sharded.parameters()])
off = float((found - exact((24, 8)) / 2).norm() / found.norm())  # of 64 samples, which the plan expects
say(f"sharded int8: {1e-3 < off < 2e-2} {codes} {off}")
dist.destroy_process_group()
"""


def test_gradients_travel_in_half_the_bytes(tmp_path):
    output = launch(tmp_path, BODY)
    for what in ("equal", "second step", "shares", "framework"):
        for text in said(output, what):
            assert text.startswith("True True 0.5 "), output[-6000:]
    assert said(output, "profiled") == ["True"] * 2 and said(output, "without") == ["[] True"] * 2
    for kind in ("int8", "int8+feedback"):
        assert all(text.startswith("True True ") for text in said(output, kind)), output[-6000:]
    assert all(text.startswith("True ") for text in said(output, "int8 tokens")), output[-6000:]
    assert said(output, "copied") == ["True"] * 2
    assert said(output, "kept apart") == ["2"] * 2 and said(output, "tokens") == ["0.5"] * 2
    assert said(output, "sparse") == ["[] [1.0, 1.0, 1.0, 1.0]"] * 2
    assert all("compression 'int4' does not exist; choose" in text for text in said(output, "unknown"))
    assert all("MismatchError" in text and "compression" in text for text in said(output, "on one rank"))
    assert all('give compression="int8", or' in text for text in said(output, "sharded"))
    # 32 x 64 + 32 elements of two layers and 2 x 64 + 2 of the head: 17 blocks for each of two ranks
    assert all(text.startswith(f"True [{2 * 17 * 260}] ") for text in said(output, "sharded int8")), output
