"""Growing in the middle of a hybrid job: the grown model is planned for anew, and nothing of the old one
stays."""

from __future__ import annotations

import pytest
from two_ranks import launch, said

pytestmark = pytest.mark.dist


def test_a_model_grows_in_a_job_and_is_planned_for_anew(tmp_path):
    """On every rank with the same seed: bitwise equal before and after training on."""
    body = """
import gc, weakref
from torch.optim.optimizer import _global_optimizer_pre_hooks
from qsync.distributed import ddp_profiling
from qsync.distributed.monitoring.drift_monitor import monitors
from qsync.runtime.wrapping import plan_of
from qsync.experiments.workloads.gpt import Gpt
from qsync.records.plans import Plan

tokens = lambda seed: torch.randint(0, 50, (4, 16), generator=torch.Generator().manual_seed(seed))

def loss_of(model, tokens):
    logits = model(tokens)
    return F.cross_entropy(logits[:, :-1].flatten(0, 1), tokens[:, 1:].flatten())

def steps(model, number):
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    for i in range(number):
        optimizer.zero_grad()
        loss = loss_of(model, tokens(10 * i + rank))
        loss.backward()
        optimizer.step()
    return loss

def same(model):
    mine = parameters(model)
    theirs = mine.clone()
    dist.broadcast(theirs, 0)
    return torch.equal(mine, theirs)

ddp_profiling.PROFILE_S = 0.5
torch.manual_seed(0)
options = {"loss_fn": loss_of, "cache_dir": cache}
model = qsync.hybrid(Gpt(1, 16, 2, 16, 50), tokens(0), **options)
steps(model, 2)
recipe = qsync.recipe_of(model.module).to(width=24, layers=2)
big = qsync.expand(model.module, recipe, seed=3)
small = model.module
checked = qsync.verify_expansion(small, big, tokens(0))
say(f"lossless: {checked.passed} {same(big)}")
old = weakref.ref(model)
monitored = old() in monitors
del model
gc.collect()
say(f"old: {monitored} {old() is None} {len(monitors)} {len(_global_optimizer_pre_hooks)}")
alone = loss_of(small, tokens(1)).item()
small.zero_grad()
loss_of(small, tokens(rank)).backward()  # no exchange of gradients any more
grads = torch.cat([p.grad.flatten() for p in small.parameters()])
others = grads.clone()
dist.broadcast(others, 0)
say(f"free: {rank == 0 or not torch.equal(grads, others)}")
del small, grads, others

model = qsync.hybrid(big, tokens(0), **options)
before = loss_of(model, tokens(1)).item()
graph_hash = plan_of(model).graph_hash
plans = [Plan.load(path) for path in sorted(__import__("pathlib").Path(cache).glob("*/plan.json"))]
say(f"plans: {len(plans)} {sum(plan.graph_hash == graph_hash for plan in plans)}")
loss = steps(model, 2)
say(f"trained: {same(model)} {bool(loss.isfinite())} {abs(before / alone - 1) < 0.02}")
"""
    output = launch(tmp_path, body)
    assert said(output, "lossless") == ["True True"] * 2
    assert said(output, "old") == ["True True 0 0"] * 2
    assert said(output, "free") == ["True"] * 2
    assert said(output, "plans") == ["2 1"] * 2
    assert said(output, "trained") == ["True True True"] * 2
