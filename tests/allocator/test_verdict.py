"""The verdict on a plan: what each way to use the same cards makes, and which card to leave out."""

from __future__ import annotations

from dataclasses import replace

import pytest
from graphs import cluster_of, encoder, profile_of, sensitivity_of

from qsync.allocator import allocate, find_verdict, search, uniform
from qsync.records.cluster import Link
from qsync.records.plan_folder import Basis
from qsync.records.plans import Plan
from qsync.records.verdict import Verdict
from qsync.replayer import Recapture

GRAPH, SMALLER = encoder(2, rows=32), encoder(2, rows=16)


def basis_of(slow, counts=None, error=0.0, link=None):
    profiles = {
        n: replace(profile_of(GRAPH, n, slow=s, latency_s=1e-8, cast_s=1e-11), error=error)
        for n, s in slow.items()
    }
    return Basis(
        GRAPH, cluster_of(counts or dict.fromkeys(slow, 1), link=link), profiles, sensitivity_of(GRAPH)
    )


def other_of(slow):
    found = {n: profile_of(SMALLER, n, slow=s, latency_s=1e-8, cast_s=1e-11) for n, s in slow.items()}
    return Recapture(SMALLER, found)


def planned(basis, other=None, **options):
    parts = (basis.graph, basis.profiles, basis.sensitivity, basis.cluster)
    if other is None:
        return allocate(*parts, **options)
    return search(*parts, levers=["share"], other=other, **options)


def test_every_way_makes_what_its_own_plan_is_replayed_to():
    slow = {"train": 1.0, "infer": 2.0}
    basis, other = basis_of(slow), other_of(slow)
    plan = planned(basis, other)
    found = find_verdict(basis, plan, other)
    names = [way.name for way in found.ways]
    assert names == [
        "1 x train alone", "DDP, equal batches, fp32", "shares by speed, fp32", "precisions, equal batches",
        "this plan",
    ]  # fmt: skip
    rates = [way.samples_per_s for way in found.ways]
    assert rates[4] == pytest.approx(64 / plan.step_s)
    assert rates[3] == pytest.approx(64 / planned(basis).step_s)
    plain = uniform(GRAPH, basis.profiles, basis.cluster, {})
    assert rates[1] == pytest.approx(64 / plain.step_s)
    assert rates[4] == max(rates) and rates[1] < rates[2] and found.with_shares is None
    assert found.times == {"infer": pytest.approx(rates[4] / rates[0])} and not found.leave_out
    assert Plan.from_json(replace(plan, verdict=found).to_json()).verdict == found


def test_the_strongest_class_alone_takes_the_whole_batch():
    slow = {"train": 1.0, "infer": 2.0}
    basis, other = basis_of(slow), other_of(slow)
    expensive = {n: replace(p, optimizer_s=0.01) for n, p in basis.profiles.items()}
    basis = replace(basis, profiles=expensive)
    alone = find_verdict(basis, planned(basis, other), other).ways[0].samples_per_s
    one = replace(basis.cluster, classes=(basis.cluster["train"],))
    of_its_share = uniform(GRAPH, {"train": basis.profiles["train"]}, one, {})
    # Costs are known up to 48 samples: an optimizer's step for these, not for 32.
    assert alone > 1.3 * 32 / of_its_share.step_s


def test_a_card_that_adds_nothing_is_to_be_left_out():
    slow = {"train": 1.0, "infer": 400.0}
    basis, other = basis_of(slow), other_of(slow)
    found = find_verdict(basis, planned(basis, other), other)
    assert found.leave_out == ("infer",) and found.times["infer"] < 1.0
    assert any(line.startswith("infer: -") and "leave it out" in line for line in found.lines())


def test_a_gain_within_the_interval_is_none():
    slow = {"train": 1.0, "infer": 6.0}
    other = other_of(slow)
    sure, unsure = (
        find_verdict(basis, planned(basis, other, slack=0.0), other)
        for basis in (basis_of(slow, error=0.001), basis_of(slow, error=0.5))
    )
    assert sure.times["infer"] > 1.0 and unsure.times["infer"] > 1.0
    assert not sure.leave_out and unsure.leave_out == ("infer",)
    assert unsure.ways[-1].interval[0] < unsure.ways[0].samples_per_s < unsure.ways[-1].samples_per_s


def test_of_three_classes_each_is_compared_with_the_others_alone():
    slow = {"a": 1.0, "b": 1.5, "c": 300.0}
    basis, other = basis_of(slow), other_of(slow)
    found = find_verdict(basis, planned(basis, other), other)
    assert set(found.times) == {"b", "c"} and found.leave_out == ("c",) and found.times["b"] > 1.2


def test_without_another_number_of_samples_shares_are_estimated():
    slow = {"train": 1.0, "infer": 8.0}
    basis, other = basis_of(slow), other_of(slow)
    found = find_verdict(basis, planned(basis))
    assert [way.name for way in found.ways] == ["1 x train alone", "DDP, equal batches, fp32", "this plan"]
    shared = find_verdict(basis, planned(basis, other), other).ways[-1].samples_per_s
    assert found.with_shares == pytest.approx(shared, rel=0.15)
    assert "give a loader of a qsync.ShareSampler" in found.lines()[-1]


@pytest.mark.parametrize("shared", [True, False])
def test_a_base_of_16_bits_is_named_where_it_is_faster_than_the_plan(shared):
    """BF16 takes half of FP32's time here; the strong class stays in the base."""
    slow = {"train": 1.0, "infer": 1.2}
    basis, other = basis_of(slow), other_of(slow) if shared else None
    found, below = (
        find_verdict(basis, planned(basis, other, base=base), other, {"base": base})
        for base in ("fp32", "bf16")
    )
    assert found.lower_base.name == "bf16" and below.lower_base is None
    assert found.lower_base.samples_per_s == pytest.approx(below.ways[-1].samples_per_s, rel=0.02)
    assert found.lower_base.samples_per_s > 1.1 * found.ways[-1].samples_per_s
    assert found.lines()[-1].endswith('(base="bf16")') or not shared
    assert Verdict.from_json(found.to_json()) == found
    unsure = basis_of(slow, error=9.0)
    assert find_verdict(unsure, planned(unsure, other), other).lower_base is None
    without = {
        n: replace(c, precisions=("fp32", "int8")) for n, c in ((c.name, c) for c in basis.cluster.classes)
    }
    lacking = replace(basis, cluster=replace(basis.cluster, classes=tuple(without.values())))
    assert find_verdict(lacking, planned(lacking, other), other).lower_base is None


def test_one_class_has_no_verdict():
    basis = basis_of({"train": 1.0}, {"train": 2})
    assert find_verdict(basis, planned(basis)) is None


def test_a_slow_link_is_in_every_way():
    slow = {"train": 1.0, "infer": 2.0}
    basis, other = basis_of(slow, link=Link(1e-3, 1e7)), other_of(slow)
    found = find_verdict(basis, planned(basis, other), other)
    assert found.leave_out == ("infer",)  # one rank alone exchanges nothing


def test_lines_are_few_and_say_the_ratio_to_the_strongest_class():
    slow = {"train": 1.0, "infer": 2.0}
    basis, other = basis_of(slow, error=0.01), other_of(slow)
    found: Verdict = find_verdict(basis, planned(basis, other), other)
    lines = found.lines()
    assert len(lines) <= 10 and "1.00x" in lines[1] and all(len(line) <= 100 for line in lines)
    times = found.ways[-1].samples_per_s / found.ways[0].samples_per_s
    assert f"{times:.2f}x" in lines[5] and lines[6] == f"infer: {times - 1:+.0%}"


def test_strong_cards_on_a_host_of_their_own_do_not_use_the_link_between_hosts():
    slow = {"train": 1.0, "infer": 2.0}
    basis, other = basis_of(slow, {"train": 2, "infer": 2}), other_of(slow)
    cluster = basis.cluster.on_hosts(2, Link(1.0, 1e9))
    here, apart = (
        find_verdict(at, planned(at, other), other) for at in (basis, replace(basis, cluster=cluster))
    )
    assert apart.ways[0].samples_per_s == pytest.approx(here.ways[0].samples_per_s)
    assert apart.ways[1].samples_per_s < 0.1 * here.ways[1].samples_per_s


def test_ddp_is_no_way_where_equal_batches_do_not_fit():
    slow = {"train": 1.0, "infer": 2.0}
    basis, other = basis_of(slow), other_of(slow)
    predicted = uniform(GRAPH, basis.profiles, basis.cluster, {})["infer"].predicted
    tight = replace(basis, cluster=basis.cluster.with_memory({"infer": predicted.memory_bytes - 1}))
    assert "DDP" in str(find_verdict(basis, planned(basis, other), other).ways)
    assert "DDP" not in str(find_verdict(tight, planned(tight, other), other).ways)
