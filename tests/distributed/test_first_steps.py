"""hybrid(check=True): what the first steps correct, on real ranks."""

from __future__ import annotations

import ast

import pytest
import torch
from graphs import cluster_of, mlp, profile_of
from two_ranks import launch, said

from qsync.distributed.monitoring.first_steps import corrected
from qsync.distributed.monitoring.step_peak import PredictedMemory, StepPeak, largest
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
ddp_profiling.PROFILE_S = 3.0  # two sizes must differ beyond the noise
x, y = batch(size=800, width=512)
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
    assert strong.endswith("changes 1 True") and weak.endswith("changes 1 True"), output
    before, after = ast.literal_eval(weak.partition(" changes")[0])
    assert after < before  # four times as long for a sample
    assert said(output, "once") == ["True", "True"] and said(output, "samples_of") == ["True", "True"]
    assert all(one.startswith("True") for one in said(output, "exact")), said(output, "exact")


MEMORY = """
import logging
logging.getLogger("qsync").addHandler(logging.StreamHandler(sys.stdout))
from qsync.runtime.wrapping import plan_of
def run(name, held, **options):
    model = qsync.hybrid(
        make(width=256, depth=6), batch(size=1024, width=256), loss_fn, cache_dir=cache, base="fp32",
        precisions=["fp32", "int8"], target_s=100.0, device_class=("strong", "weak")[rank], **options,
    )
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    before = plan_of(model.module)["weak"]
    for number in range(24 if options.get("check") else 0):
        loss = loss_fn(model, batch(seed=number, size=1024, width=256))
        kept = torch.ones(held if rank else 0, dtype=torch.uint8)  # the profile did not see that
        loss.backward()
        optimizer.step()
        del kept
    after = plan_of(model.module)["weak"]
    say(f"{name}: {len(before.lowered)} then {len(after.lowered)}")
    return before.predicted.memory_bytes
peak = run("roomy", 0)
run("held", peak // 8, check=True, budgets={"weak": int(1.05 * peak)})
run("too much", 2 * peak, check=True, budgets={"weak": int(1.06 * peak)})
"""


@pytest.mark.dist
def test_a_class_that_uses_more_memory_than_predicted_is_planned_again_before_it_runs_out(tmp_path):
    """Half of the model's products in INT8 would save an eighth of the peak."""
    output = launch(tmp_path, MEMORY)
    assert said(output, "roomy") == ["0 then 0", "0 then 0"]
    first, second = said(output, "held")
    assert first == second and first.startswith("0 then ") and int(first.split()[-1]) > 0
    assert output.count("; a step of weak takes ") == 2 and "a step of strong takes" not in output
    assert said(output, "too much") == ["0 then 0", "0 then 0"]
    assert output.count("the plan stays, and a step may run out of memory") == 1


@pytest.mark.parametrize(
    ("measured", "beyond"), [(1000, 0), (1051, 0), (1100, 0), (1330, 0), (1340, 340), (2000, 1000)]
)
def test_a_peak_is_told_where_it_exceeds_the_prediction_and_comes_near_the_budget(measured, beyond):
    assert PredictedMemory(peak=1000, held=300, budget=1400).beyond(measured) == beyond
    assert PredictedMemory(peak=2000, held=300, budget=1400).beyond(measured) == 0


def test_a_step_s_peak_is_measured_between_the_ends_of_two_steps():
    peak = StepPeak(torch.device("cpu"), held=10**6)
    for number in range(4):
        kept = torch.zeros((1, 9 * 10**6, 4 * 10**6, 1)[number], dtype=torch.uint8)
        assert kept.numel() > 0 and peak.num_bytes is (None if number < 3 else peak.num_bytes)
        del kept
        peak.step_ended()
    assert peak.num_bytes == pytest.approx(5 * 10**6, rel=0.01)
    assert largest([("a", 1), ("b", None), ("a", 3), ("a", 2)]) == {"a": 3}


def test_what_the_first_steps_took_is_what_their_class_takes():
    basis = Basis(
        mlp(), cluster_of(), {"train": profile_of(mlp(), "train"), "infer": profile_of(mlp(), "infer")}, None
    )
    predicted = {"train": Phases(0.01, 0.20, 0.10, 0.02), "infer": Phases(0.01, 0.40, 0.0, 0.02)}
    measured = {"train": Phases(0.03, 0.20, 0.10, 0.05, 0.04), "infer": Phases(0.01, 0.60, 0.0, 0.02)}
    found = corrected(basis, predicted, measured, {"infer": 1000}).profiles
    assert found["infer"].optimizer_bytes == basis.profiles["infer"].optimizer_bytes + 1000
    assert found["train"].optimizer_bytes == basis.profiles["train"].optimizer_bytes
    before, after = basis.profiles["infer"], found["infer"]
    op = next(iter(before.ops))
    for mode, cost in before.ops[op].items():
        assert after.ops[op][mode].forward_s == pytest.approx(1.5 * cost.forward_s)
    assert found["train"].ops[op] == basis.profiles["train"].ops[op]
    assert found["train"].optimizer_s == 0.05 and found["train"].loading_s == 0.04
    assert found["train"].host_s == pytest.approx(basis.profiles["train"].host_s + 0.02)
