"""The precision plan that compare_growth.py trains a grown model under.

Two device classes: this machine, and half of it. The profile is measured here; that of the half is the same
with every time twice as long: emulated. One process computes both ranks' shares of a batch in turn, on one
set of parameters, so the gradient is what DDP would give two ranks: only that nobody waits for anybody.
"""

from __future__ import annotations

import copy
from dataclasses import replace
from pathlib import Path

import torch
from torch import nn

import qsync
from qsync import api
from qsync.backend.device_detection import candidates, detect_class
from qsync.experiments.expansion.growth_subjects import LARGE, Setting, workload_of
from qsync.experiments.expansion.starts import grown, source_of
from qsync.experiments.harness.emulated_profiles import GLOO, HALF, HERE, SHARE, slowed
from qsync.records.cluster import Cluster
from qsync.records.plans import Plan

CLASSES = (HERE, HALF)
PROFILE_S = 20.0


def plan_path(folder: Path, of: Setting) -> Path:
    """Return where the plan of a workload is."""
    return folder / f"plan-{of.workload}.json"


def make_plan(of: Setting, folder: Path, seed: int = 0, rounds: int | None = None) -> Plan:
    """Profile the model grown from a seed's source on this machine, plan for it, and keep the plan."""
    workload = workload_of(of)
    model = grown(of, source_of(of, seed, folder), "random", seed)
    inputs, targets = workload.batch(seed, 0, LARGE)
    batch = tuple(part.chunk(len(CLASSES))[0] for part in (inputs, targets))
    graph = api.trace_step(model, batch, workload.loss)
    own = replace(detect_class(torch.device("cpu")), name=HERE)
    own = replace(own, precisions=candidates(own))
    profile = qsync.profile(model, batch, workload.loss, device_class=own, seconds=PROFILE_S, rounds=rounds)
    weak = replace(own, name=HALF, emulated_share=SHARE)
    plan: Plan = qsync.plan(
        graph,
        {HERE: profile, HALF: slowed(profile, HALF, SHARE)},
        qsync.sensitivity(model, [batch], workload.loss),
        Cluster((own, weak), GLOO),
    )
    plan.save(plan_path(folder, of))
    return plan


def in_ranks(model: nn.Module, plan: Plan) -> dict[str, nn.Module]:
    """Return the model as a rank of each class computes it, all with the model's own parameters."""
    ranks = {}
    for name in CLASSES:
        shared = copy.deepcopy(model, {id(p): p for p in model.parameters()})
        ranks[name] = qsync.wrap(shared, plan, device_class=name)
    return ranks
