"""How a large model begins in compare_growth.py: from scratch, or from a trained small one, and under a plan.

*Stacked* is plain growing, not lossless. Depth as in progressive stacking (Gong et al. 2019): the copy of a
block stands on top of the whole stack and works from the first step on. Width by tiling: an axis starts over
until it is long enough. So that a layer that reads more copies answers no louder, its columns are scaled by
how much longer they became; which copies there are twice, and what norms make of them, is not looked at.

A plan is for two device classes: this machine, and half of it. The profile is measured here; that of the half
is the same with every time twice as long: emulated. One process computes both ranks' shares of a batch in
turn, on one set of parameters, so the gradient is what DDP would give two ranks: only that nobody waits.
"""

from __future__ import annotations

import copy
import re
from dataclasses import replace
from pathlib import Path

import torch
from torch import nn

import qsync
from qsync import Cluster, Plan, api
from qsync.backend.device_detection import default_precisions, detect_class
from qsync.experiments.expansion.growth_subjects import LARGE, Setting, make, workload_of
from qsync.experiments.harness.emulated_profiles import GLOO, HALF, HERE, SHARE, slowed

CLASSES = (HERE, HALF)
PROFILE_S = 20.0
# "plan" is "expanded" trained on under a hybrid precision plan; "source" is the small model itself.
STARTS = ("source", "scratch", "expanded", "even", "stacked", "plan")
BLOCK = re.compile(r"^blocks\.(\d+)\.")


def begun(of: Setting, start: str, seed: int, folder: Path) -> nn.Module:
    """Return the model before its first step; `folder` has the sources."""
    if start == "source":
        return make(of, of.small, seed)
    if start == "scratch":
        return make(of, of.large, seed)
    source = source_of(of, seed, folder)
    if start == "stacked":
        return stacked(source, make(of, of.large, seed))
    return grown(of, source, "even" if start == "even" else "random", seed)


def grown(of: Setting, source: nn.Module, split: str, seed: int) -> nn.Module:
    """Expand the source to the large model's sizes."""
    to = {"width": of.large.width, "layers": of.large.layers, "heads": of.large.heads}
    large: nn.Module = qsync.expand(source, qsync.recipe_of(source).to(**to), split=split, seed=seed)
    return large


def source_path(folder: Path, of: Setting, seed: int) -> Path:
    """Return where the weights of a source are."""
    return folder / f"source-{of.workload}-{seed}.pt"


def source_of(of: Setting, seed: int, folder: Path) -> nn.Module:
    """Return the trained source, as its own run left it."""
    model = make(of, of.small, seed)
    model.load_state_dict(torch.load(source_path(folder, of, seed), weights_only=True))
    return model


def stacked(small: nn.Module, large: nn.Module) -> nn.Module:
    """Tile and stack the weights of `small` into `large`, a new model of its class; return `large`."""
    trained = small.state_dict()
    layers = len(small.blocks)  # type: ignore[arg-type]
    modules = dict(large.named_modules())
    with torch.no_grad():
        for name, value in large.state_dict().items():
            found = BLOCK.match(name)
            before = BLOCK.sub(f"blocks.{int(found[1]) % layers}.", name) if found else name
            source, module = trained[before], modules[name.rpartition(".")[0]]
            # Queries, keys and values are stacked in one axis, and start over each for itself.
            parts = 3 if ".qkv." in name else 1
            value.copy_(torch.cat([_tiled(part, value, parts) for part in source.chunk(parts)]))
            if isinstance(module, nn.Linear) and name.endswith("weight"):
                value *= source.shape[1] / value.shape[1]
    return large


def _tiled(source: torch.Tensor, value: torch.Tensor, parts: int) -> torch.Tensor:
    """`source`, each axis started over until it is as long as that of `value`, the first a part of it."""
    lengths = (value.shape[0] // parts, *value.shape[1:])
    for axis, length in enumerate(lengths):
        source = source.index_select(axis, torch.arange(length) % source.shape[axis])
    return source


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
    own = replace(own, precisions=default_precisions(own))
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
