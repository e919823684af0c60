"""What experiments/allocation/compare_methods.py plans for: measured models, and the clusters they are planned on.

Profiles are measured on this machine. `half` is the same machine with every time twice as long: emulated.
Classes named after a GPU are SIMULATED from its data sheet, at the shares of peak that this machine reaches,
and get batches GPU_BATCH times as large: with the small ones such a device would only wait for launches.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path

import torch

from qsync import api
from qsync.backend.device_detection import candidates, detect_class
from qsync.experiments.workloads.subjects import subject
from qsync.predictor.cost_model.fill_profile import fill, simulate
from qsync.records.basis import Basis
from qsync.records.cluster import Cluster, DeviceClass, Link
from qsync.records.datasheets import datasheet
from qsync.records.graph import OpGraph
from qsync.records.precision import Precision
from qsync.records.profiles import Cost, Profile, Sensitivity

HERE, HALF, SHARE = "train", "infer", 0.5
# Clusters of data sheets, one rank of each class.
SIMULATED = (("A100", "T4"), ("H100", "L4"), ("V100", "T4", "L4", "A100"))
GPU_BATCH = 16
# Links are assumptions: gloo between processes of one machine, and 80 Gbit/s between hosts.
GLOO, NETWORK = Link(1e-4, 1.5e9, 0.6), Link(30e-6, 10e9)
MEASURED = "measured profile, emulated share"


@dataclass(frozen=True, slots=True)
class Posed:
    """A model on a cluster. `kind` says what of it is measured."""

    model: str
    cluster_name: str
    kind: str
    basis: Basis


def measure(
    name: str,
    folder: Path,
    *,
    seconds: float = 30.0,
    rounds: int | None = None,
    seed: int = 0,
    progress: Callable[[str], None] = lambda text: None,
) -> None:
    """Profile one of the experiments' models on this machine; graph, profile and sensitivity to a folder.

    Beside it the graph at the larger batch, `graph-large.json`. The sensitivity is that of two batches.
    """
    chosen = subject(name)

    def loss(model: torch.nn.Module, batch: tuple[torch.Tensor, torch.Tensor]) -> torch.Tensor:
        return chosen.loss_fn(model(batch[0]), batch[1])

    model, batch = chosen.make_model(seed), chosen.batch(seed, 0, 0)
    graph = api.trace_step(model, batch, loss)
    large = [value[:1].expand(GPU_BATCH * len(value), *value.shape[1:]).contiguous() for value in batch]
    torch._dynamo.reset()  # otherwise the second shape makes sizes symbols
    api.trace_step(model, (large[0], large[1]), loss).save(folder / "graph-large.json")
    torch._dynamo.reset()
    own = replace(detect_class(torch.device("cpu")), name=HERE)
    profile = api.profile(
        model, batch, loss, device_class=own, seconds=seconds, rounds=rounds, progress=progress
    )
    batches = [chosen.batch(seed, step, 0) for step in range(2)]
    graph.save(folder / "graph.json")
    profile.save(folder / f"profile-{HERE}.json")
    api.sensitivity(model, batches, loss, seed=seed).save(folder / "sensitivity.json")


def posed(name: str, folder: Path) -> list[Posed]:
    """The clusters that a measured model is planned on."""
    graph = OpGraph.load(folder / "graph.json")
    profile = Profile.load(folder / f"profile-{HERE}.json")
    sensitivity = Sensitivity.load(folder / "sensitivity.json")
    own = replace(detect_class(torch.device("cpu")), name=HERE)
    own = replace(own, precisions=candidates(own), hardware=None)
    weak = replace(own, name=HALF, emulated_share=SHARE)
    profiles = {HERE: profile, HALF: slowed(profile, HALF, SHARE)}
    found = [Posed(name, "this machine + half of it", MEASURED,
                   Basis(graph, Cluster((own, weak), GLOO), profiles, sensitivity))]  # fmt: skip
    large = OpGraph.load(folder / "graph-large.json")
    larger = fill(profile, large, measured_on=graph)
    for names in SIMULATED:
        cluster = Cluster(tuple(card(sheet) for sheet in names), NETWORK)
        profiles = {
            c.name: simulate(larger, large, datasheet(c.datasheet or ""), c.name) for c in cluster.classes
        }
        basis = Basis(large, cluster, profiles, sensitivity)
        found.append(Posed(name, " + ".join(names), "simulated devices", basis))
    return found


def card(sheet: str, count: int = 1, memory_bytes: int | None = None) -> DeviceClass:
    """The class of a GPU that is not here. INT8 in all three products is left out, as it is by default."""
    found = datasheet(sheet)
    precisions = tuple(p for p in found.precisions if p is not Precision.INT8_ALL)
    return DeviceClass(
        found.name.lower(),
        "cuda",
        count,
        memory_bytes or found.memory_bytes,
        precisions,
        datasheet=found.name,
    )


def slowed(profile: Profile, name: str, share: float) -> Profile:
    """The profile of a rank that gets this share of the device: every time so much longer. Emulated."""

    def longer(cost: Cost) -> Cost:
        return Cost(cost.forward_s / share, cost.backward_s / share, cost.spread_s / share)

    return replace(
        profile, device_class=name, emulated_share=share,
        ops={op: {mode: longer(cost) for mode, cost in modes.items()} for op, modes in profile.ops.items()},
        casts={key: longer(cost) for key, cost in profile.casts.items()},
        cast_fit={key: (longer(base), longer(rise)) for key, (base, rise) in profile.cast_fit.items()},
        outside=longer(profile.outside), host_s=profile.host_s / share,
        optimizer_s=profile.optimizer_s / share, loading_s=profile.loading_s / share,
        bucket_s_per_byte=profile.bucket_s_per_byte / share,
        step_s={mode: seconds / share for mode, seconds in profile.step_s.items()},
    )  # fmt: skip
