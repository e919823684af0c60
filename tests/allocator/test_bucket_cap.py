"""The size of DDP's buckets is that of the shortest predicted step, if it wins by what a profile tells."""

from __future__ import annotations

import pytest
from graphs import cluster_of, mlp, profile_of, sensitivity_of

from qsync.allocator import allocate
from qsync.allocator.levers.bucket_cap import bucket_caps, fastest_bucket_cap
from qsync.hybrid_training.saved_plan import plan_and_save
from qsync.records.cluster import Link
from qsync.records.plan_folder import Basis
from qsync.replayer import replay

GRAPH = mlp(num_layers=6, width=1024, rows=64)  # six gradients of 4 MiB


@pytest.mark.parametrize(
    ("latency_s", "bytes_per_s", "cap"), [(1e-4, 1e8, 2**22), (1.0, 1e8, 2**25), (1e-4, 1e14, None)]
)
def test_small_buckets_win_by_their_bytes_and_large_ones_by_latency(latency_s, bytes_per_s, cap, tmp_path):
    link = Link(latency_s, bytes_per_s, num_ranks=2)
    profiles = {name: profile_of(GRAPH, name) for name in ("train", "infer")}
    basis = Basis(GRAPH, cluster_of(link=link), profiles, sensitivity_of(GRAPH))
    plan = allocate(GRAPH, profiles, basis.sensitivity, basis.cluster)
    assert fastest_bucket_cap(basis, plan) == cap
    assert plan_and_save(basis, tmp_path, None, {}, chooses_buckets=True).bucket_cap_bytes == cap
    assert plan_and_save(basis, tmp_path, None, {}).bucket_cap_bytes is None
    assert bucket_caps(GRAPH) == [None, *(2**k for k in range(20, 26))]
    steps = {
        size: replay(GRAPH, plan, profiles, basis.cluster, bucket_cap_bytes=size).step_s
        for size in bucket_caps(GRAPH)
    }
    assert steps[cap] == min(steps.values()) or (cap is None and min(steps.values()) > 0.98 * steps[None])
