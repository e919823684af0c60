"""Predicted memory of each class at its peak, by use. Pure."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from qsync.lowering.lowered_graph import LoweredGraph, Run
from qsync.operators.precision import Precision
from qsync.predictor.memory.peak import StepMemory
from qsync.records.cluster import Cluster, DeviceClass
from qsync.records.graph import OpGraph
from qsync.records.plans import Plan
from qsync.records.profiles import Profile
from qsync.replayer.check_records import checked_lowerings


@dataclass(frozen=True, slots=True)
class Peak:
    """Bytes by use on every rank of one class at the peak; `parts` sum to `peak_bytes`.

    Bytes saved for backward are split by the mode of the operator that saves them. The margin is the stated
    error of the prediction. `curve` covers the whole step (`StepMemory.curve`): bytes by part, at each
    operator's forward, then at each operator's backward.
    """

    device_class: str
    budget_bytes: int
    parts: Mapping[str, int]
    curve: Mapping[str, Sequence[int]]

    @property
    def peak_bytes(self) -> int:
        """Return the bytes in use at the peak."""
        return sum(self.parts.values())

    def to_json(self) -> dict[str, Any]:
        """Return the peak as a JSON object."""
        return {
            "peak_bytes": self.peak_bytes, "budget_bytes": self.budget_bytes, "parts": dict(self.parts),
            "curve": {part: list(values) for part, values in self.curve.items()},
        }  # fmt: skip


def peaks(
    graph: OpGraph,
    plan: Plan | Mapping[str, Mapping[str, Precision]],
    profiles: Mapping[str, Profile],
    cluster: Cluster,
) -> dict[str, Peak]:
    """Return the memory peak of every class under a plan, with its memory in the cluster as budget.

    `plan` may also map class names to assignments. Raises MismatchError if the records do not match.

    >>> peaks(graph, plan, profiles, cluster)["infer"].parts["saved by int8 operators"]
    """
    lowerings = checked_lowerings(graph, plan, profiles, cluster)
    return {
        name: _peak(lowering.lowered(), profiles[name], cluster.num_ranks, cluster[name])
        for name, lowering in lowerings.items()
    }


def _peak(lowered: LoweredGraph, profile: Profile, num_ranks: int, device_class: DeviceClass) -> Peak:
    step = StepMemory(
        lowered,
        optimizer_bytes=profile.optimizer_bytes,
        optimizer_workspace=profile.optimizer_workspace_bytes,
        num_ranks=num_ranks,
        device=device_class.device,
        residuals=profile.memory_residuals,
    )
    memory, curve = step.at_peak(), step.curve()
    totals = [sum(parts) for parts in zip(*curve.values(), strict=True)]
    fullest = totals.index(max(totals))
    modes = {node.op: node.mode for node in lowered.nodes if isinstance(node, Run)}
    saved = dict.fromkeys(sorted(set(modes.values()), key=_order), 0)
    for span in step.spans():
        if span.part == "saved" and span.birth <= fullest <= span.death:
            saved[modes[span.saver]] += span.num_bytes
    gradients = "gradients, in DDP's buckets" if num_ranks > 1 else "gradients"
    parts = {
        "parameters": memory.parameters,
        gradients: memory.gradients,
        "optimizer": memory.optimizer,
        "buffers and batch": memory.inputs,
        "copies of weights": memory.casts,
        **{f"saved by {mode} operators": num_bytes for mode, num_bytes in saved.items()},
        "temporaries, workspaces": memory.transient,
        "margin": memory.margin,
    }
    return Peak(device_class.name, device_class.memory_bytes, {k: n for k, n in parts.items() if n}, curve)


def _order(mode: str) -> tuple[int, str]:
    known = [str(precision) for precision in Precision]
    return (known.index(mode) if mode in known else len(known), mode)
