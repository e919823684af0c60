"""hybrid(check=True): what the first steps correct, on real ranks."""

from __future__ import annotations

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
    assert "leave it out, or give levers=()" in said(output, "levers")[0]
    assert "leave one of them out" in said(output, "a plan")[0]


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
