"""Whether a batch fits, and the ways to make it: each is what replay and the memory model say of it."""

from __future__ import annotations

import itertools
from dataclasses import replace

import pytest
from graphs import cluster_of, encoder, profile_of, sensitivity_of
from hypothesis import given
from hypothesis import strategies as st

from qsync.allocator import uniform
from qsync.allocator.fit import find_fit, least
from qsync.errors import QSyncError
from qsync.records.levers import ClassLevers
from qsync.records.plan_folder import Basis
from qsync.replayer import Recapture
from qsync.replayer.levers.apply import profile_under
from qsync.replayer.levers.recomputation import blocks

ROWS, LAYERS = 256, 4
GRAPH, OTHER = encoder(LAYERS, rows=ROWS), encoder(LAYERS, rows=ROWS // 4)


def basis_of(memory_bytes: int = 1 << 40) -> Basis:
    profiles = {name: profile_of(GRAPH, name) for name in ("train", "infer")}
    return Basis(GRAPH, cluster_of(memory_bytes=memory_bytes), profiles, sensitivity_of(GRAPH))


@pytest.fixture(scope="module")
def other() -> Recapture:
    return Recapture(OTHER, {"infer": profile_of(OTHER, "infer", slow=0.25)})


def of_budget(part: float, other: Recapture | None):
    """What fits in a part of the base's peak, and that budget."""
    needed = find_fit(basis_of(), "infer", other).base.peak_bytes
    return find_fit(basis_of(int(part * needed)), "infer", other), int(part * needed)


def test_what_fits_needs_no_way(other):
    found = find_fit(basis_of(), "infer", other)
    assert found.fits and found.ways == (found.base,) and found.base.levers == ClassLevers()
    assert found.base.num_lowered == 0 and found.peak.peak_bytes == found.base.peak_bytes
    assert sum(found.peak.parts.values()) == found.peak.peak_bytes


@pytest.mark.parametrize("part", [0.9, 0.75, 0.6, 0.46])
def test_every_way_fits_and_none_is_worse_in_all(other, part):
    found, budget = of_budget(part, other)
    assert not found.fits and found.ways
    assert all(way.peak_bytes <= budget for way in found.ways)
    steps = [way.step_s for way in found.ways]
    assert steps == sorted(steps)
    for number, way in enumerate(found.ways):
        assert not any(faster.is_no_worse(way) for faster in found.ways[:number])
        assert way.is_no_worse(way), "of two alike one is enough"


def test_a_way_s_figures_are_those_of_its_own_replay(other):
    found, budget = of_budget(0.75, other)
    basis = basis_of(budget)
    alone = replace(basis.cluster, classes=(replace(basis.cluster["infer"], count=2),))
    for way in (*found.ways, found.nearest):
        if not way.num_lowered:
            profile = profile_under(GRAPH, basis.profiles["infer"], way.levers, other, "cpu")
            plan = uniform(GRAPH, {"infer": profile}, alone, {})
            assert plan["infer"].predicted.memory_bytes == way.peak_bytes and plan.step_s == way.step_s


def test_as_few_blocks_are_recomputed_as_fit_in_the_base(other):
    found, budget = of_budget(0.8, None)  # without a second capture there are no passes
    assert found.largest is None and all(way.levers.passes == 1 for way in found.ways)
    recomputed = [way.levers.recomputed for way in found.ways if not way.num_lowered]
    basis = basis_of(budget)
    alone = replace(basis.cluster, classes=(replace(basis.cluster["infer"], count=2),))
    fewest = min(map(len, recomputed))
    for paths in itertools.combinations(blocks(GRAPH), fewest - 1):
        levers = ClassLevers(recomputed=paths)
        profile = profile_under(GRAPH, basis.profiles["infer"], levers, None, "cpu")
        assert uniform(GRAPH, {"infer": profile}, alone, {})["infer"].predicted.memory_bytes > budget


def test_the_largest_batch_fits_and_one_more_does_not(other):
    found, budget = of_budget(0.9, other)
    basis = basis_of(budget)
    alone = replace(basis.cluster, classes=(replace(basis.cluster["infer"], count=2),))

    def peak(samples: int) -> int:
        levers = ClassLevers(samples=samples)
        profile = profile_under(GRAPH, basis.profiles["infer"], levers, other, "cpu")
        return uniform(GRAPH, {"infer": profile}, alone, {})["infer"].predicted.memory_bytes

    assert 0 < found.largest < ROWS and peak(found.largest) <= budget < peak(found.largest + 1)


def test_where_nothing_fits_the_nearest_way_is_named(other):
    found = find_fit(basis_of(1000), "infer", other)
    assert found.ways == () and found.largest == found.trusted_from - 1
    assert found.nearest.peak_bytes < found.base.peak_bytes


def test_sizes_that_are_not_whole_are_left_out():
    odd = [replace(op, shape=(ROWS // 4, 63)) if op.name == "layer.0.add1" else op for op in OTHER.ops]
    other = Recapture(replace(OTHER, ops=tuple(odd)), {})
    found, _ = of_budget(0.8, other)
    assert found.largest is None and found.ways
    assert {way.levers.passes for way in found.ways} <= {1, 4}  # two passes would be of 63 1/3


def test_an_unknown_class_is_one_sentence(other):
    with pytest.raises(QSyncError, match="no device class 'nobody'; choose from"):
        find_fit(basis_of(), "nobody", other)


@given(st.integers(1, 200), st.integers(1, 300))
def test_bisection_finds_the_least(most, first):
    assert least(lambda k: k >= first, most) == min(first, most)
