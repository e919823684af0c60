"""Choose the size of DDP's buckets: smaller ones leave less to exchange after the last gradient."""

from __future__ import annotations

from qsync.records.graph import OpGraph
from qsync.records.plan_folder import Basis
from qsync.records.plans import Plan
from qsync.replayer import replay
from qsync.replayer.communication import gradient_bytes

_LEAST_GAIN = 0.02  # of the step: less is within what a profile tells


def bucket_caps(graph: OpGraph) -> list[int | None]:
    """Return the caps to try, in bytes: DDP's own, then 1, 2, 4, ... MiB up to one bucket for all."""
    whole, caps, cap = sum(gradient_bytes(graph).values()), list[int | None]([None]), 2**20
    while cap < whole:
        caps.append(cap)
        cap *= 2
    return [*caps, cap]


def fastest_bucket_cap(basis: Basis, plan: Plan) -> int | None:
    """Return the cap under which a plan's step is shortest; None where it wins too little over DDP's own.

    Of equally fast ones it is the largest. The gradients stay the same.
    """

    def step_s(cap: int | None) -> float:
        return replay(basis.graph, plan, basis.profiles, basis.cluster, bucket_cap_bytes=cap).step_s

    steps = {cap: step_s(cap) for cap in bucket_caps(basis.graph)}
    cap = min(steps, key=lambda cap: (steps[cap], -(cap or 0)))
    return cap if steps[cap] < (1 - _LEAST_GAIN) * steps[None] else None
