"""How each bucket travels: equal to trying all choices, and quick for many buckets."""

from __future__ import annotations

import itertools
import math
from dataclasses import replace
from random import Random

import numpy as np
import pytest
from graphs import cluster_of, encoder, mlp, profile_of, sensitivity_of

import qsync
from qsync.allocator import allocate
from qsync.allocator.compression_choice import (
    SLACK,
    Ways,
    choose_kinds,
    compression_lines,
    with_compression,
)
from qsync.allocator.planner import Options, as_plan
from qsync.errors import MismatchError
from qsync.operators.precision import Precision
from qsync.records.cluster import Link
from qsync.records.compression import CodecCost
from qsync.records.plan_folder import Basis
from qsync.replayer import GradientExchange, Work, buckets
from qsync.replayer.simulate import simulate_step


def drawn(seed, num_buckets, num_kinds, with_tolls):
    draw, most = Random(seed), 0.12 if seed % 2 else 0.03  # seconds of backward between buckets
    classes = []
    for _ in range(2):
        ready = tuple(itertools.accumulate(draw.uniform(0.0, most) for _ in range(num_buckets)))
        backward_s = ready[-1] + draw.choice([0.0, 0.02])
        classes.append(Work(draw.uniform(0.0, 0.1), ready, backward_s, draw.uniform(0.0, 0.01), (), True))
    exact = np.array([draw.uniform(0.001, 0.2) for _ in range(num_buckets)])
    durations = exact[:, None] * np.array(
        [1.0, *sorted(draw.uniform(0.05, 0.9) for _ in range(num_kinds - 1))]
    )
    durations[:, 1:] += draw.uniform(0.0, 0.003)
    tolls = with_tolls * np.array([[[draw.uniform(0.0, 0.1) for _ in row] for row in durations]] * 2)
    variance = np.array([[0.0, *(10 ** draw.uniform(-6, -1) for _ in range(num_kinds - 1))] for _ in exact])
    link = Link(1e-4, 1e9, draw.choice([1.0, 0.7]), 2, 0.0, draw.choice([1.0, 2.0]))
    return classes, Ways(durations, tolls, variance), link


@pytest.mark.parametrize("with_tolls", [0.0, 1.0])
@pytest.mark.parametrize("seed", range(8))
def test_the_choice_equals_trying_all(seed, with_tolls):
    num_buckets, num_kinds = ((8, 3), (4, 5), (6, 3), (3, 4))[seed % 4]
    works, ways, link = drawn(seed, num_buckets, num_kinds, with_tolls)
    tried = {
        chosen: (ways.step_s(works, chosen, link), float(ways.variance[range(num_buckets), chosen].sum()))
        for chosen in itertools.product(range(num_kinds), repeat=num_buckets)
    }
    least_s, most_s = min(s for s, _ in tried.values()), tried[(0,) * num_buckets][0]
    for target_s in (None, least_s + 0.3 * (most_s - least_s), 0.5 * least_s, 2 * most_s):
        limit_s = (1 + SLACK) * least_s if target_s is None else target_s
        chosen = choose_kinds(works, ways, link, target_s=target_s)
        reached = [one for one in tried.values() if one[0] <= limit_s * (1 + 1e-9)]
        if reached:
            assert tried[chosen][0] <= limit_s * (1 + 1e-9)
            assert tried[chosen][1] == pytest.approx(min(v for _, v in reached), rel=1e-6)
        else:
            assert tried[chosen][0] == pytest.approx(least_s)


def test_an_exchange_that_compute_hides_is_not_compressed():
    work = Work(0.1, (0.1, 0.4), 0.4, 0.0)
    ways = Ways(
        np.array([[0.2, 0.05], [0.2, 0.05]]), np.zeros((1, 2, 2)), np.array([[0.0, 1e-9], [0.0, 1e-3]])
    )
    assert choose_kinds([work], ways, Link(0.0, 1e9)) == (0, 1)


def test_a_plan_names_its_kinds_what_they_save_and_their_variance():
    graph = encoder(2)
    codecs = {"bf16": CodecCost(1e-6, 0.0), "int8": CodecCost(1e-6, 0.0)}
    cluster = replace(cluster_of(), link=Link(1e-5, 1e6, 1.0, 2), codecs=codecs)
    profiles = {name: profile_of(graph, name) for name in ("train", "infer")}
    cap = 40_000
    plan = replace(as_plan(graph, {"train": {}, "infer": {}}, profiles, cluster), bucket_cap_bytes=cap)
    num = len(buckets(graph, cap))
    errors = {"bf16": [1e-6] * num, "int8": [1e-4] * num}
    basis = Basis(graph, cluster, profiles, replace(sensitivity_of(graph), exchange=errors))
    found = with_compression(basis, plan)
    lines = compression_lines(basis, found)
    before = qsync.replay(graph, plan, profiles, cluster)
    after = qsync.replay(graph, found, profiles, cluster)
    assert after.step_s == found.step_s < before.step_s and after.sent_bytes < before.sent_bytes / 2
    assert set(found.compression.values()) >= {"int8"} and len(lines) == num
    assert all(" in int8: saves " in line or " in bf16: saves " in line for line in lines)
    assert all(", adds 0.0001" in line or ", adds 1e-06" in line for line in lines)
    assert 0.0 < found.compression_variance <= 1.001e-4 * num
    assert qsync.Plan.from_json(found.to_json()) == found
    asked = replace(basis, cluster=replace(cluster, compression={"*": "powersgd:4"}))
    assert compression_lines(asked, plan)[0].startswith("bucket 1 in powersgd:4: saves ")
    assert not any("adds" in line for line in compression_lines(asked, plan))
    assert with_compression(basis, plan, 2 * before.step_s) == plan and compression_lines(basis, plan) == []
    other = replace(basis, sensitivity=replace(basis.sensitivity, exchange={"int8": [1e-4]}))
    with pytest.raises(MismatchError, match="profile again"):
        with_compression(other, plan)


@pytest.mark.parametrize("seed", [1, 3, 13, 28])
def test_precisions_and_kinds_together_equal_trying_all(seed):
    draw, graph, cap = Random(seed), mlp(3, width=64), 30_000
    codecs = {"bf16": CodecCost(1e-6, 0.0), "int8": CodecCost(2e-6, 0.0)}
    link = Link(1e-6, 10 ** draw.uniform(8.5, 9.5), 1.0, 2)
    cluster = replace(cluster_of(), link=link, codecs=codecs)
    slow = {"train": 1.0, "infer": draw.uniform(1.3, 2.5)}
    profiles = {n: profile_of(graph, n, slow=s, latency_s=1e-8, cast_s=1e-11) for n, s in slow.items()}
    num, scale = len(buckets(graph, cap)), 10 ** draw.uniform(-1, 1)
    errors = {
        kind: [scale * s * draw.uniform(0.5, 2.0) for _ in range(num)]
        for kind, s in (("bf16", 0.01), ("int8", 0.1))
    }
    basis = Basis(graph, cluster, profiles, replace(sensitivity_of(graph), exchange=errors))
    plan = allocate(graph, profiles, basis.sensitivity, cluster, bucket_cap_bytes=cap, slack=0.0)
    assert num > 1 and any(entry.lowered for entry in plan.classes.values())
    limit_s = draw.uniform(0.95, 1.15) * plan.step_s
    exchanges = [
        GradientExchange(graph, replace(cluster, compression={"*": kind}), cap)
        for kind in ("fp32", "bf16", "int8")
    ]
    ways = Ways(
        np.array([one.durations_s for one in exchanges]).T,
        np.array([[one.tolls_s(profiles[n]) for one in exchanges] for n in slow]).transpose(0, 2, 1),
        np.array([[0.0] * num, *errors.values()]).T,
    )
    best, ops = math.inf, [op.name for op in graph.adjustable]
    for chosen in itertools.product((Precision.FP32, Precision.BF16, Precision.INT8), repeat=len(ops)):
        own = as_plan(
            graph, {"train": {}, "infer": dict(zip(ops, chosen, strict=True))}, profiles, cluster,
            Options(bucket_cap_bytes=cap), sensitivity=basis.sensitivity,
        )  # fmt: skip
        works = simulate_step(graph, own, profiles, cluster).works
        for kinds in itertools.product(range(3), repeat=num):
            total = own.added_variance + float(ways.variance[range(num), kinds].sum())
            if total < best and ways.step_s(works, kinds, link) <= limit_s * (1 + 1e-9):
                best = total
    found = with_compression(basis, plan, limit_s)
    mine = found.added_variance + found.compression_variance
    assert found.step_s <= limit_s * (1 + 1e-9) and mine == pytest.approx(best, rel=1e-2)
