"""Two ranks that profile, plan and train with compiled islands."""

from __future__ import annotations

import pytest
from two_ranks import launch

SCRIPT = """
import torch._inductor.compile_fx
from torch._dynamo.backends.debugging import aot_eager
from qsync.runtime import islands, planned_forward

class NoChoices:
    def get(self, key, num_choices): return None
    def keep(self, key, number): pass

torch._inductor.compile_fx.compile_fx = aot_eager  # no waiting for g++
islands._is_faster = lambda *_: True
islands._choices = lambda num_threads: NoChoices()
model = qsync.hybrid(make(), batch(), loss_fn, cache_dir=cache, compile=True)
loss = train(model)
plan = qsync.runtime.wrapping.plan_of(model)
say(f"{plan.compiled} {islands.sentence(planned_forward.program_of(model.module).rewritten)}")
everyone = [torch.empty_like(parameters(model)) for _ in range(2)]
dist.all_gather(everyone, parameters(model))
say(f"equal {torch.equal(*everyone)}")
say(f"predicted {plan.step_s > 0}")
attempt("other", plan=plan, compile=False)
attempt("ranks differ", compile=bool(rank))
attempt("again", plan=plan)
validation, basis = qsync.validate(make(), batch(), loss_fn, num_plans=1, turns=1, steps=1, compile=True)
say(f"validated {all(profile.compiled for profile in basis.profiles.values())}")
"""


@pytest.mark.dist
def test_a_job_plans_and_trains_with_compiled_islands(tmp_path):
    output = launch(tmp_path, SCRIPT)
    for rank in (0, 1):
        for expected in (
            "True 1 of 1 islands between products run compiled", "equal True", "predicted True",
            "other: MismatchError: checking the plan failed on rank 0: the plan was made from profiles with",
            "ranks differ: MismatchError: compile differs between ranks: rank 0 has False",
            "again: went through", "validated True",
        ):  # fmt: skip
            assert f"[{rank}] {expected}" in output, output
