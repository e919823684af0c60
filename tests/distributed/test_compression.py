"""Gradients that travel in BF16: half the bytes, equal on all ranks, in profiles and in training."""

from __future__ import annotations

from two_ranks import launch, said

BODY = """
from dataclasses import replace
from pathlib import Path
from torch.nn.parallel import DistributedDataParallel as DDP
from qsync.distributed.gradient_weighting import GradientHook
from qsync.records.levers import ClassLevers, Levers

ddp_profiling.PROFILE_S = 0.0
own = ("strong", "weak")[rank]
given = {"loss_fn": loss_fn, "device_class": own, "precisions": ["fp32"], "base": "fp32", "cache_dir": cache}
exchange, sent = GradientHook.exchange, []

def counted(hook, tensor):
    sent.append((tensor.dtype, tensor.numel() * tensor.element_size()))
    return exchange(hook, tensor)

GradientHook.exchange = counted
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
say(f"without: {sent} {float((found - exact((32, 32))).norm()) < 1e-5}")
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
compress_gradients(embedding, "bf16")
sent.clear()
embedding(torch.tensor([rank, 5])).sum().backward()
row = embedding.module.weight.grad.to_dense()[5].tolist()
say(f"sparse: {[dtype for dtype, _ in sent if dtype is torch.bfloat16]} {row}")

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
dist.destroy_process_group()
"""


def test_gradients_travel_in_half_the_bytes(tmp_path):
    output = launch(tmp_path, BODY)
    for what in ("equal", "second step", "shares", "framework"):
        for text in said(output, what):
            assert text.startswith("True True 0.5 "), output[-6000:]
    assert said(output, "profiled") == ["True"] * 2 and said(output, "without") == ["[] True"] * 2
    assert said(output, "kept apart") == ["2"] * 2 and said(output, "tokens") == ["0.5"] * 2
    assert said(output, "sparse") == ["[] [1.0, 1.0, 1.0, 1.0]"] * 2
    assert all("compression must be 'bf16', found 'int4'" in text for text in said(output, "unknown"))
    assert all("MismatchError" in text and "compression" in text for text in said(output, "on one rank"))
    assert all("MixedPrecisionPolicy(reduce_dtype" in text for text in said(output, "sharded"))
