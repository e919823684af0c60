"""Measure models, and build the clusters of compare_methods.py.

Profiles are measured on this machine. `half` is the same machine with every time twice as long: emulated.
Classes named after a GPU are SIMULATED from its data sheet, at this machine's fraction of peak, and get
batches GPU_BATCH times as large: with small batches launches would dominate.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path

import torch

from qsync import Cluster, DeviceClass, OpGraph, Precision, Profile, Sensitivity, api
from qsync.backend.devices.device_detection import detect_class
from qsync.experiments.harness.emulated_profiles import HERE, NETWORK, SHARE, here_and_half
from qsync.experiments.harness.offered_precisions import offered_precisions
from qsync.experiments.workloads.subjects import subject
from qsync.predictor.cost_model.fill_profile import fill, learned_from, simulate
from qsync.predictor.cost_model.model import CostModel
from qsync.records.datasheets import datasheet
from qsync.records.plan_folder import Basis

# Clusters of data-sheet GPUs, one rank per class.
SIMULATED = (("A100", "T4"), ("H100", "L4"), ("V100", "T4", "L4", "A100"))
GPU_BATCH = 16
MEASURED = "measured profile, emulated share"


@dataclass(frozen=True, slots=True)
class ModelOnCluster:
    """A model on a cluster. `kind` tells what is measured and what is simulated."""

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
) -> None:
    """Profile a model of the experiments; write graph, profile and sensitivity to a folder.

    It also writes the graph at the larger batch, `graph-large.json`. The sensitivity uses two batches.
    """
    chosen = subject(name)
    model, batch = chosen.make_model(seed), chosen.batch(seed, 0, 0)
    graph = api.trace_step(model, batch, chosen.loss)
    large = [value[:1].expand(GPU_BATCH * len(value), *value.shape[1:]).contiguous() for value in batch]
    torch._dynamo.reset()  # otherwise a second shape makes sizes symbolic
    api.trace_step(model, (large[0], large[1]), chosen.loss).save(folder / "graph-large.json")
    torch._dynamo.reset()
    own = replace(detect_class(torch.device("cpu")), name=HERE)
    profile = api.profile(
        model, batch, chosen.loss, device_class=own, precisions=offered_precisions(torch.device("cpu")),
        seconds=seconds, rounds=rounds,
    )  # fmt: skip
    batches = [chosen.batch(seed, step, 0) for step in range(2)]
    graph.save(folder / "graph.json")
    profile.save(folder / f"profile-{HERE}.json")
    api.sensitivity(model, batches, chosen.loss, seed=seed).save(folder / "sensitivity.json")


@dataclass(frozen=True)
class MeasuredModel:
    """The results of `measure`; `large` is the graph at the larger batch."""

    graph: OpGraph
    large: OpGraph
    profile: Profile
    sensitivity: Sensitivity

    @classmethod
    def load(cls, folder: Path) -> MeasuredModel:
        """Read the files of a folder."""
        graph, large = (OpGraph.load(folder / f"{which}.json") for which in ("graph", "graph-large"))
        profile = Profile.load(folder / f"profile-{HERE}.json")
        return cls(graph, large, profile, Sensitivity.load(folder / "sensitivity.json"))

    @cached_property
    def _large_profile(self) -> Profile:
        return fill(self.profile, self.large, self._costs, measured_on=self.graph)

    @cached_property
    def _costs(self) -> CostModel:
        return learned_from(self.graph, self.profile)

    def beside_share(self, share: float = SHARE, count: int = 1) -> Basis:
        """Return the basis of equally many ranks of this machine and of a share of it. Emulated."""
        cluster, profiles = here_and_half(self.profile, share, count)
        return Basis(self.graph, cluster, profiles, self.sensitivity)

    def on_cards(self, names: Sequence[str]) -> Basis:
        """Return the basis of one GPU of each kind at the larger batch. Simulated from data sheets."""
        cards = {name: card(name) for name in names}
        profiles = {
            c.name: simulate(self._large_profile, self.large, datasheet(name), c.name, self._costs)
            for name, c in cards.items()
        }
        return Basis(self.large, Cluster(tuple(cards.values()), NETWORK), profiles, self.sensitivity)


def problems(name: str, folder: Path) -> list[ModelOnCluster]:
    """Return the clusters on which a measured model is planned."""
    measured = MeasuredModel.load(folder)
    here = ModelOnCluster(name, "this machine + half of it", MEASURED, measured.beside_share())
    simulated = [
        ModelOnCluster(name, " + ".join(names), "simulated devices", measured.on_cards(names))
        for names in SIMULATED
    ]
    return [here, *simulated]


def card(sheet: str, count: int = 1, memory_bytes: int | None = None) -> DeviceClass:
    """Return a data-sheet GPU's class with the default precisions, without `int8_all`."""
    found = datasheet(sheet)
    precisions = tuple(p for p in found.precisions if p is not Precision.INT8_ALL)
    memory = memory_bytes or found.memory_bytes
    return DeviceClass(found.name.lower(), "cuda", count, memory, precisions, datasheet=found.name)
