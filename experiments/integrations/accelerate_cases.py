"""Cases of Accelerate's training loop on planned models."""

from __future__ import annotations

import itertools
from typing import Any

import torch
import torch.distributed as dist
from accelerate import Accelerator
from torch.utils.data import DataLoader

import qsync
from qsync.experiments.integrations.cases import (
    BF16_TOLERANCE,
    Arm,
    Outcome,
    batch,
    case,
    cases,
    facts,
    loss_of,
    net,
    norm,
    rows,
    same_state,
    sgd,
)
from qsync.records.levers import ClassLevers, Levers
from qsync.records.plans import ClassPlan, Plan

_GROUP = "Accelerate"


def prepared(arm: Arm, accelerator: Accelerator, **options: Any) -> tuple[Any, Any, Any]:
    """Return the results of `accelerator.prepare` for a model, its optimizer and its loader."""
    model = net() if arm.is_plain else arm.hybrid(net(), batch(), loss_of, **options)
    found: tuple[Any, Any, Any] = accelerator.prepare(model, sgd(model), DataLoader(rows(), 4))
    return found


def loop(
    accelerator: Accelerator,
    model: Any,
    optimizer: Any,
    loader: Any,
    steps: int = 6,
    clip: float | None = None,
) -> list[float]:
    """Train as in Accelerate's documentation; return the gradient norms."""
    norms = []
    for one in itertools.islice(loader, steps):
        with accelerator.accumulate(model):
            accelerator.backward(loss_of(model, one))
            if accelerator.sync_gradients:
                found = accelerator.clip_grad_norm_(model.parameters(), clip) if clip else norm(model)
                norms.append(float(found))
            optimizer.step()
            optimizer.zero_grad()
    return norms


def _outcome(arm: Arm, clip: float | None = None, options: Any = None, **settings: Any) -> Outcome:
    accelerator = Accelerator(cpu=True, **settings)
    model, optimizer, loader = prepared(arm, accelerator, **(options or {}))
    return Outcome(loop(accelerator, model, optimizer, loader, clip=clip), model)


cases(_GROUP, _outcome, {
    "`gradient_accumulation_steps=2`, `accelerator.accumulate`": {
        "gradient_accumulation_steps": 2,
    },
    '`mixed_precision="bf16"` around a hybrid of another base': {
        "mixed_precision": "bf16", "options": {"base": "fp32"},
        "refused": 'give base="bf16" to qsync.hybrid',
    },
    "`qsync.hybrid(model, ddp=False)`: Accelerate wraps it": {"options": {"ddp": False}},
})  # fmt: skip


@case(_GROUP, '`mixed_precision="bf16"` before the hybrid: the base', BF16_TOLERANCE, tested=True)
def _(arm: Arm) -> Outcome:
    return _outcome(arm, mixed_precision="bf16", options=arm.in_bf16)


@case(_GROUP, "`save_state`, `load_state`")
def _(arm: Arm) -> Outcome:
    accelerator = Accelerator(cpu=True)
    model, optimizer, loader = prepared(arm, accelerator)
    norms = loop(accelerator, model, optimizer, loader, 2)
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    folder = str(arm.folder / "state")
    accelerator.save_state(folder)
    accelerator.wait_for_everyone()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.zero_()
    accelerator.load_state(folder)
    others = facts(same=same_state(before, model.state_dict()))
    return Outcome([*norms, *loop(accelerator, model, optimizer, loader, 2)], model, others)


def _plan(passes: int) -> Plan:
    """Return a plan of unequal shares: twelve samples on rank 0 and four on rank 1, in passes."""
    graph = qsync.capture(net(), batch()[0])
    assignment = {op.name: qsync.Precision.FP32 for op in graph.adjustable}
    classes = {f"class{rank}": ClassPlan(assignment) for rank in (0, 1)}
    levers = {"class0": ClassLevers(12, passes=passes), "class1": ClassLevers(4, passes=passes)}
    return Plan(graph.model, graph.hash, classes, levers=Levers(levers))


def _shares(arm: Arm, accumulation: int, passes: int) -> Outcome:
    rank, (x, y) = dist.get_rank(), rows().tensors
    accelerator = Accelerator(cpu=True, gradient_accumulation_steps=accumulation)
    x, y = x[:16], y[:16]
    if arm.is_plain:
        model = accelerator.prepare(net())
        loss_of(model, (x, y)).backward()
        return Outcome([norm(model)], model)
    own = (slice(0, 12), slice(12, 16))[rank]
    model = accelerator.prepare(qsync.hybrid(net(), plan=_plan(passes), device_class=f"class{rank}"))
    if arm.precision == "int8":
        model = qsync.wrap(model, "int8", strict=True)
    for part in zip(x[own].chunk(accumulation), y[own].chunk(accumulation), strict=True):
        with accelerator.accumulate(model):
            accelerator.backward(loss_of(model, part))
    return Outcome([norm(model)], model)


cases(_GROUP, _shares, {
    "a plan with shares and as many passes as `gradient_accumulation_steps`": {
        "accumulation": 2, "passes": 2,
    },
    "a plan with shares and other passes than `gradient_accumulation_steps`": {
        "accumulation": 2, "passes": 4, "refused": "give Accelerator(",
    },
})  # fmt: skip


@case(_GROUP, "`qsync.token_mean` in Accelerate's own DDP, accumulation 2", tested=True)
def _(arm: Arm) -> Outcome:
    accelerator = Accelerator(cpu=True, gradient_accumulation_steps=2)
    model, optimizer, loader = prepared(arm, accelerator, ddp=False)
    norms = []
    for one in itertools.islice(loader, 6):
        with accelerator.accumulate(model):
            loss = loss_of(model, one)
            accelerator.backward(loss if arm.is_plain else qsync.token_mean(model, loss, len(one[0])))
            if accelerator.sync_gradients:
                norms.append(norm(model))
            optimizer.step()
            optimizer.zero_grad()
    return Outcome(norms, model)


@case(_GROUP, "`accelerator.prepare` of a ShareSampler's loader under a plan with shares")
def _(arm: Arm) -> Outcome:
    accelerator, data, norms = Accelerator(cpu=True), rows(), []
    sampler = qsync.ShareSampler(data, batch_size=16)
    loader: Any = DataLoader(data, batch_sampler=sampler)
    model = net()
    if not arm.is_plain:
        model = qsync.hybrid(model, loader=loader, plan=_plan(1), device_class=f"class{dist.get_rank()}")
    model, optimizer, loader = accelerator.prepare(model, sgd(model), loader)
    if arm.precision == "int8":
        model = qsync.wrap(model, "int8", strict=True)
    for one in loader:
        accelerator.backward(loss_of(model, one))
        norms.append(norm(model))
        optimizer.step()
        optimizer.zero_grad()
    return Outcome(norms, model)
