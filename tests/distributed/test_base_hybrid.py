"""hybrid above a base: ranks start in it, weak ones go below it, and a scaler's skip is everybody's."""

from __future__ import annotations

import pytest
from two_ranks import launch, said

pytestmark = pytest.mark.dist


def test_ranks_in_autocast_plan_above_its_type_and_train_alike(tmp_path):
    body = """
from contextlib import redirect_stderr
from io import StringIO
from pathlib import Path
from qsync.runtime import planned_forward

ddp_profiling.PROFILE_S = 1.0
large = batch(size=128, width=256)
net = make(width=256)
options = {"device_class": ["strong", "weak"][rank], "cache_dir": cache, "target_s": 10.0}
with torch.autocast("cpu", torch.bfloat16):
    model = qsync.hybrid(net, large, loss_fn, **options)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
with redirect_stderr(StringIO()) as written:
    for number in range(2):
        optimizer.zero_grad()
        with torch.autocast("cpu", torch.bfloat16):
            loss = loss_fn(model, batch(128, 256, seed=10 * number + rank))
        loss.backward()
        optimizer.step()
say(f"coverage: {written.getvalue().strip()}")
mine = parameters(model)
theirs = mine.clone()
dist.broadcast(theirs, 0)
say(f"identical: {torch.equal(mine, theirs)} {bool(mine.isfinite().all())}")
(lowered,) = planned_forward.program_of(net).lowered
modes = {n.op: n.mode for n in lowered.nodes if hasattr(n, "mode")}
say(f"modes: {sorted({modes[op] for op in ('inner.0', 'inner.1', 'head')})}")
plan = qsync.Plan.load(next(Path(cache).glob("*/plan.json")))
say(f"plan: {plan.base} {plan.added_variance} {plan['weak'].predicted.base_variance > 0}")
try:
    name = options["device_class"]
    qsync.hybrid(make(width=256), large, loss_fn, plan=plan, base="fp32", device_class=name)
except qsync.QSyncError as error:
    say(f"other base: {error}")
try:
    qsync.hybrid(make(width=256), large, loss_fn, base="fp16", **options)
except qsync.QSyncError as error:
    say(f"no base: {error}")
try:
    qsync.hybrid(make(width=256), large, loss_fn, base=["fp32", "bf16"][rank], **options)
except qsync.QSyncError as error:
    say(f"unequal: {error}")
dist.destroy_process_group()
"""
    output = launch(tmp_path, body)
    assert said(output, "identical") == ["True True"] * 2
    assert said(output, "modes") == ["['bf16']"] * 2
    assert said(output, "plan") == ["bf16 0.0 True"] * 2
    assert all("the plan has base bf16, not fp32" in line for line in said(output, "other base"))
    assert all("no device here has fp16 in hardware" in line for line in said(output, "no base"))
    assert all("the base differs between ranks" in line for line in said(output, "unequal"))
    for name in ("other base", "no base", "unequal"):
        assert len(said(output, name)) == 2, name
    classes = ("strong", "weak")
    assert said(output, "coverage") == [
        f"qsync: Net: 3 of 3 products in low precision on {name} (3 bf16); see qsync.coverage(model)"
        for name in classes
    ]


def test_a_scaler_skips_on_all_ranks_when_one_overflows(tmp_path):
    body = """
from pathlib import Path

ddp_profiling.PROFILE_S = 1.0
net = make(width=64)
model = qsync.hybrid(net, batch(64, 64), loss_fn, base="bf16", cache_dir=cache, target_s=10.0)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
scaler = torch.amp.GradScaler("cpu", init_scale=2.0**10)
for number in range(3):
    optimizer.zero_grad()
    before = parameters(model)
    loss = loss_fn(model, batch(64, 64, seed=10 * number + rank))
    if number == 1 and rank == 1:
        loss = loss * float("inf")
    scaler.scale(loss).backward()
    scaler.step(optimizer)
    scaler.update()
    verb = "skipped" if torch.equal(before, parameters(model)) else "taken"
    say(f"step {number}: {verb} {scaler.get_scale()}")
dist.destroy_process_group()
"""
    output = launch(tmp_path, body)
    assert said(output, "step 0") == ["taken 1024.0"] * 2
    assert said(output, "step 1") == ["skipped 512.0"] * 2
    assert said(output, "step 2") == ["taken 512.0"] * 2
