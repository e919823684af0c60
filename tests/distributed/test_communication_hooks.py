"""A communication hook of the user's beside weighed gradients, in any order: one sentence, at once."""

from __future__ import annotations

from two_ranks import launch, said

BODY = """
import copy
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks, powerSGD_hook
from torch.nn.parallel import DistributedDataParallel as DDP
from qsync.distributed.data_parallel import in_ddp
from qsync.records.levers import ClassLevers, Levers
from qsync.records.plans import ClassPlan, Plan

dist.init_process_group("gloo")

HOOKS = {
    "own": lambda ddp: ddp.register_comm_hook(None, default_hooks.allreduce_hook),
    "powersgd": lambda ddp: ddp.register_comm_hook(
        powerSGD_hook.PowerSGDState(None, start_powerSGD_iter=2), powerSGD_hook.powerSGD_hook),
    "builtin": lambda ddp: ddp._register_builtin_comm_hook(dist.BuiltinCommHookType.ALLREDUCE),
}
WEIGHINGS = {
    "shares": lambda ddp: qsync.weigh_gradients(ddp, 32),
    "tokens": lambda ddp: qsync.token_mean(ddp, loss_fn(ddp, batch()), 32),
}
KINDS = {"qsync": in_ddp, "torch": DDP}

def attempt(what, then):
    try:
        then()
        say(f"{what}: went through")
    except QSyncError as error:
        say(f"{what}: {type(error).__name__}: {error}")

for kind, wrapped in KINDS.items():
    for hook, register in HOOKS.items():
        for name, weigh in WEIGHINGS.items():
            ddp = wrapped(make())
            register(ddp)
            attempt(f"{kind} {hook} {name}", lambda: weigh(ddp))
            attempt(f"{kind} {hook} {name} again", lambda: weigh(ddp))  # nothing was left of the first
            loss_fn(ddp, batch()).backward()  # which still trains
            ddp = wrapped(make())
            weigh(ddp)
            attempt(f"{kind} {name} {hook}", lambda: register(ddp))
            weigh(ddp)
            loss_fn(ddp, batch()).backward()

graph = qsync.capture(make(), batch()[0])
one = {op.name: qsync.Precision.FP32 for op in graph.adjustable}
levers = Levers({"here": ClassLevers(32)})
plan = Plan(graph.model, graph.hash, {"here": ClassPlan(one)}, levers=levers)
model = qsync.hybrid(make(), plan=plan, device_class="here")
attempt("hybrid levers", lambda: HOOKS["own"](model))
plan = Plan(graph.model, graph.hash, {"here": ClassPlan(one)})
plain = qsync.hybrid(make(), plan=plan, device_class="here")
attempt("hybrid", lambda: HOOKS["own"](plain))
attempt("hybrid twice", lambda: HOOKS["powersgd"](plain))
copied = copy.deepcopy(plain)
attempt("copied", lambda: HOOKS["builtin"](copied))
loss_fn(plain, batch(seed=rank)).backward()
gradients = torch.cat([p.grad.flatten() for p in plain.parameters()])
own = make()
(sum(loss_fn(own, batch(seed=each)) for each in (0, 1)) / 2).backward()
mean = torch.cat([p.grad.flatten() for p in own.parameters()])
say(f"averaged: {torch.allclose(gradients, mean, atol=1e-6)}")
"""

NAMES = {"own": "allreduce_hook", "powersgd": "powerSGD_hook", "builtin": "BuiltinCommHookType.ALLREDUCE"}


def test_one_sentence_in_any_order(tmp_path):
    found = launch(tmp_path, BODY)
    for kind in ("qsync", "torch"):
        for hook, name in NAMES.items():
            for weighing in ("shares", "tokens"):
                sentence = (
                    "weighting gradients needs DDP's only communication hook, but this DDP already "
                    f"has {name}; leave that hook out"
                )
                for again in ("", " again"):
                    for first in said(found, f"{kind} {hook} {weighing}{again}"):
                        assert first.startswith("UnsupportedError: ") and first.endswith(sentence)
                for second in said(found, f"{kind} {weighing} {hook}"):
                    assert second.startswith("UnsupportedError: DDP takes one communication hook, and this")
    for text in said(found, "hybrid levers"):
        assert "this one has average_bucket; leave one of them out" in text
    assert said(found, "hybrid") == ["went through"] * 2
    for text in (*said(found, "hybrid twice"), *said(found, "copied")):
        assert "this one has allreduce_hook; leave one of them out" in text
    assert said(found, "averaged") == ["True"] * 2
