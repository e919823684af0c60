"""hybrid(check=True): what the first steps correct, on real ranks."""

from __future__ import annotations

import ast

import pytest
from graphs import cluster_of, mlp, profile_of
from two_ranks import launch, said

from qsync.distributed.monitoring.first_steps import corrected
from qsync.records.plan_folder import Basis
from qsync.replayer.explanation.phases import Phases

SCRIPT = """
import logging
logging.getLogger("qsync").addHandler(logging.StreamHandler(sys.stdout))
model = qsync.hybrid(make(), batch(), loss_fn, cache_dir=cache, check=True, base="fp32")
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
for number in range(70):
    loss = loss_fn(model, batch(seed=number))
    time.sleep(0.05)  # the profile did not see that
    loss.backward()
    optimizer.step()
from qsync.runtime.wrapping import plan_of
from qsync.distributed.monitoring.drift_monitor import monitors
from qsync.records.graph import digest
say("plan: " + digest(plan_of(model.module).to_json()))
say("drift: " + str(monitors[model].drift))
say("weights: " + digest(parameters(model).tolist()))
attempt("no bool", check="yes")
attempt("levers", check=True, levers=["buckets"])
attempt("a plan", check=True, plan=plan_of(model.module))
"""


@pytest.mark.dist
def test_a_job_that_computes_longer_than_profiled_is_planned_again_once(tmp_path):
    output = launch(tmp_path, SCRIPT)
    assert output.count("planning again") == 1
    for what in ("plan", "weights"):
        assert len(set(said(output, what))) == 1
    assert said(output, "drift")[0] == "None"  # the corrected prediction holds
    (cached,) = (tmp_path / "cache").glob("*/plan.json")
    basis = Basis.load(cached.parent)
    (profile,) = basis.profiles.values()
    assert (
        profile.outside.total_s + sum(c["fp32"].total_s for c in profile.ops.values() if "fp32" in c) > 0.04
    )
    assert "check must be True or False" in said(output, "no bool")[0]
    assert "only in qsync's own DDP, with a loader of a qsync.ShareSampler" in said(output, "levers")[0]
    assert "leave one of them out" in said(output, "a plan")[0]


SHARES = """
import logging
from torch.utils.data import DataLoader, TensorDataset
logging.getLogger("qsync").addHandler(logging.StreamHandler(sys.stdout))
x, y = batch(size=800, width=512)  # steps are long enough that profiles at two sizes differ beyond the noise
data = TensorDataset(x, y, torch.arange(800))
sampler = qsync.ShareSampler(data, batch_size=200)
loader = DataLoader(data, batch_sampler=sampler, num_workers=1, multiprocessing_context="fork")
plain = make(width=512, depth=4)
model = qsync.hybrid(
    make(width=512, depth=4), loader=loader, loss_fn=lambda model, batch: loss_fn(model, batch[:2]),
    cache_dir=cache, check=True, base="fp32", precisions=["fp32"], device_class=("strong", "weak")[rank],
)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
order, sizes, worst = [], [], 0.0
for epoch in range(10):
    sampler.set_epoch(epoch)
    for found in loader:
        sizes.append(len(found[0]))
        for part in qsync.micro_batches(model, found):
            loss = loss_fn(model, part[:2])
            time.sleep(0.0004 * len(part[0]) * (1 + 3 * rank))  # by samples, and the profile did not see that
            loss.backward()
        parts = [None, None]
        dist.all_gather_object(parts, found[2].tolist())
        order += sum(parts, [])
        plain.load_state_dict(model.module.state_dict())
        whole = torch.autograd.grad(loss_fn(plain, (x[order[-200:]], y[order[-200:]])), plain.parameters())
        for mine, theirs in zip(model.parameters(), whole):
            worst = max(worst, float((mine.grad - theirs).norm() / theirs.norm()))
        optimizer.step()
        optimizer.zero_grad()
changes = [step for step in range(1, 40) if sizes[step] != sizes[step - 1]]
say(f"sizes: {[sizes[0], sizes[-1]]} changes {len(changes)} {bool(changes) and changes[0] > 20}")
say(f"once: {all(sorted(order[e * 800:e * 800 + 800]) == list(range(800)) for e in range(10))}")
say(f"exact: {worst < 1e-4} {worst}")
say("samples_of: " + str(qsync.samples_of(model) == sizes[-1]))
"""


@pytest.mark.dist
def test_shares_follow_what_the_first_steps_show_while_the_loop_goes_on(tmp_path):
    output = launch(tmp_path, SHARES)
    assert output.count("planning again") == 1
    strong, weak = said(output, "sizes")
    assert strong.endswith("changes 1 True") and weak.endswith("changes 1 True"), (strong, weak)
    before, after = ast.literal_eval(weak.partition(" changes")[0])
    assert after < before  # four times as long for a sample
    assert said(output, "once") == ["True", "True"] and said(output, "samples_of") == ["True", "True"]
    assert all(one.startswith("True") for one in said(output, "exact")), said(output, "exact")


def test_what_the_first_steps_took_is_what_their_class_takes():
    basis = Basis(
        mlp(), cluster_of(), {"train": profile_of(mlp(), "train"), "infer": profile_of(mlp(), "infer")}, None
    )
    predicted = {"train": Phases(0.01, 0.20, 0.10, 0.02), "infer": Phases(0.01, 0.40, 0.0, 0.02)}
    measured = {"train": Phases(0.03, 0.20, 0.10, 0.05, 0.04), "infer": Phases(0.01, 0.60, 0.0, 0.02)}
    found = corrected(basis, predicted, measured).profiles
    before, after = basis.profiles["infer"], found["infer"]
    op = next(iter(before.ops))
    for mode, cost in before.ops[op].items():
        assert after.ops[op][mode].forward_s == pytest.approx(1.5 * cost.forward_s)
    assert found["train"].ops[op] == basis.profiles["train"].ops[op]
    assert found["train"].optimizer_s == 0.05 and found["train"].loading_s == 0.04
    assert found["train"].host_s == pytest.approx(basis.profiles["train"].host_s + 0.02)
