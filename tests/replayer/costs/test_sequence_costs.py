"""Sequences by length: what they cost, and who takes which so that nobody waits long."""

from __future__ import annotations

import itertools

import pytest
import torch
from graphs import cluster_of, profile_of
from hypothesis import given, settings
from hypothesis import strategies as st

import qsync
from qsync.errors import FormatError
from qsync.records.levers import ClassLevers, Levers
from qsync.replayer import Recapture, profiles_under_levers, replay
from qsync.replayer.costs.sequence_costs import (
    SequenceCost,
    hand_out,
    quadratic_ops,
    sequence_costs,
    waiting,
)

FAST, SLOW = SequenceCost(0.5, 1.0, 0.01), SequenceCost(1.0, 2.0, 0.05)


def makespan(lengths, taken, costs):
    return max(
        cost.seconds(len(own), max(lengths[i] for i in own)) for own, cost in zip(taken, costs, strict=True)
    )


def best_of_all_cuts(lengths, costs):
    ordered = sorted(range(len(lengths)), key=lambda i: -lengths[i])
    times = []
    for ranks in itertools.permutations(range(len(costs))):
        for cuts in itertools.combinations(range(1, len(lengths)), len(costs) - 1):
            ends = [0, *cuts, len(lengths)]
            taken = [[] for _ in costs]
            for k, rank in enumerate(ranks):
                taken[rank] = ordered[ends[k] : ends[k + 1]]
            times.append(makespan(lengths, taken, costs))
    return min(times)


@given(st.lists(st.integers(1, 60), min_size=2, max_size=8), st.floats(0.1, 5), st.floats(0, 0.2))
@settings(max_examples=60, deadline=None)
def test_two_ranks_get_what_makes_the_slower_fastest(lengths, factor, quadratic):
    costs = [FAST, SequenceCost(0.2, factor, quadratic)]
    taken = hand_out(lengths, costs)
    assert sorted(i for own in taken for i in own) == list(range(len(lengths)))
    assert makespan(lengths, taken, costs) == pytest.approx(best_of_all_cuts(lengths, costs), rel=1e-6)


@given(st.lists(st.integers(1, 60), min_size=3, max_size=9))
@settings(max_examples=40, deadline=None)
def test_every_rank_takes_something_and_nothing_is_taken_twice(lengths):
    taken = hand_out(lengths, [FAST, SLOW, FAST])
    assert all(taken) and sorted(i for own in taken for i in own) == list(range(len(lengths)))


def test_the_square_of_the_length_decides_how_many_long_sequences_a_rank_takes():
    lengths = list(range(1, 61))

    def longest_half(cost):
        taken = hand_out(lengths, [cost, cost])
        return len(min(taken, key=lambda own: -max(own)))

    assert longest_half(SequenceCost(0, 1.0, 0.0)) > longest_half(SequenceCost(0, 0.0, 1.0)) > 1


def test_waiting_is_less_than_in_batches_of_equal_size():
    generator = torch.Generator().manual_seed(0)
    lengths = torch.randint(8, 256, (64,), generator=generator).tolist()
    costs = [FAST, SLOW]
    equal = [list(range(32)), list(range(32, 64))]
    assert 3 * waiting(lengths, hand_out(lengths, costs), costs) < waiting(lengths, equal, costs)


def test_sequences_that_do_not_fit_are_refused():
    with pytest.raises(FormatError, match="1 sequences for 2 ranks"):
        hand_out([5], [FAST, SLOW])
    with pytest.raises(FormatError, match="do not fit in 8 tokens a rank"):
        hand_out([5, 5, 5, 5], [FAST, SLOW], max_tokens=8)
    taken = hand_out([5, 5, 5, 5], [FAST, SLOW], max_tokens=10)
    assert [len(own) for own in taken] == [2, 2]


class Attention(torch.nn.Module):
    def __init__(self, fused: bool) -> None:
        super().__init__()
        self.qkv, self.out, self.fused = torch.nn.Linear(16, 48), torch.nn.Linear(16, 16), fused

    def forward(self, x):
        q, k, v = self.qkv(x).chunk(3, -1)
        if self.fused:
            return self.out(torch.nn.functional.scaled_dot_product_attention(q, k, v))
        return self.out((q @ k.transpose(-1, -2)).softmax(-1) @ v)


@pytest.mark.parametrize("length", [16, 24])  # 16: activations are as wide as they are long
@pytest.mark.parametrize("fused", [True, False])
def test_attention_is_what_grows_with_the_square(fused, length):
    graph = qsync.capture(Attention(fused), torch.randn(3, length, 16))
    found = quadratic_ops(graph, 3, length)
    assert not {"qkv", "out"} & found
    assert {op.kind for op in graph.ops if op.name in found} >= (
        {"attention"} if fused else {"matmul", "softmax"}
    )


def test_the_costs_of_a_step_add_up_to_its_time():
    graph = qsync.capture(Attention(True), torch.randn(3, 24, 16))
    profiles = {name: profile_of(graph, name, slow=slow) for name, slow in (("train", 1.0), ("infer", 2.0))}
    timeline = replay(graph, {"train": {}, "infer": {}}, profiles, cluster_of())
    costs = sequence_costs(graph, timeline, profiles)
    for name, cost in costs.items():
        assert cost.quadratic_s > 0 and cost.linear_s > 0 and cost.fixed_s > 0
        assert cost.seconds(3, 24) == pytest.approx(timeline[name].compute_s)
    flat = qsync.capture(torch.nn.Linear(16, 4), torch.randn(16))
    assert sequence_costs(flat, timeline, profiles) is None


def test_a_class_with_its_own_share_has_the_costs_of_its_own_sequences():
    """Whatever its share, a class takes the replayed time for the sequences that it takes."""
    graph, half = (qsync.capture(Attention(True), torch.randn(num, 24, 16)) for num in (8, 4))
    profiles = {name: profile_of(graph, name, slow=slow) for name, slow in (("train", 1.0), ("infer", 2.0))}
    levers = Levers({"train": ClassLevers(12), "infer": ClassLevers(4)})
    profiles = profiles_under_levers(graph, profiles, cluster_of(), levers, Recapture(half, {}))
    timeline = replay(graph, {"train": {}, "infer": {}}, profiles, cluster_of())
    for name, cost in sequence_costs(graph, timeline, profiles).items():
        own = {"train": 12, "infer": 4}[name]
        assert cost.seconds(own, 24) == pytest.approx(timeline[name].compute_s)
