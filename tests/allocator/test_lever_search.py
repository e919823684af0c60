"""The search of levers: what it finds holds, goes on where it stopped, and says what each lever bought."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import pytest
from graphs import cluster_of, encoder, profile_of, sensitivity_of

from qsync import planning
from qsync.allocator import allocate, check_plan, search, uniform
from qsync.allocator.levers.search import LeverSetting, Search
from qsync.errors import FormatError, InfeasibleError, MismatchError
from qsync.hybrid_training.saved_plan import save_with_warnings
from qsync.operators.precision import Precision
from qsync.records.levers import ClassLevers, Levers
from qsync.records.plan_folder import Basis
from qsync.records.plans import Plan
from qsync.replayer import Recapture, profiles_under_levers

GRAPH, SMALLER = encoder(2, rows=32), encoder(2, rows=16)
SLOW = {"train": 1.0, "infer": 3.0}


def profiles_of(graph):
    return {n: profile_of(graph, n, slow=slow, latency_s=1e-8, cast_s=1e-11) for n, slow in SLOW.items()}


PROFILES, OTHER = profiles_of(GRAPH), Recapture(SMALLER, profiles_of(SMALLER))
CLUSTER, SENSITIVITY = cluster_of(), sensitivity_of(GRAPH)
PARTS = (GRAPH, PROFILES, SENSITIVITY, CLUSTER)
FAST = {"slack": 0.3}


def checked(plan: Plan, other=OTHER) -> bool:
    profiles = profiles_under_levers(GRAPH, PROFILES, CLUSTER, plan.levers, other)
    return check_plan(GRAPH, plan, profiles, SENSITIVITY, CLUSTER).ok


def test_levers_add_less_variance_at_the_same_step_and_each_says_what_it_bought():
    plain = allocate(*PARTS, **FAST)
    plan = search(*PARTS, other=OTHER, **FAST)
    assert plan.target_s < plain.target_s and checked(plan)  # shares make the least step shorter, too
    assert plan.added_variance < 0.5 * plain.added_variance
    assert "share" in plan.levers.used and set(plan.levers.without) >= set(plan.levers.used)
    problem = Search(Basis(PARTS[0], PARTS[3], PARTS[1], PARTS[2]), ("share",), OTHER, FAST)
    setting = LeverSetting(replace(plan.levers, without={}), plan.bucket_cap_bytes)
    for lever, without in plan.levers.without.items():
        if without.added_variance is not None:
            again = problem.evaluate(setting.without(lever))[1]
            assert (again.step_s, again.added_variance) == (without.step_s, without.added_variance)


def test_a_lever_that_is_not_named_stays_off():
    for lever in ("share", "accumulate", "buckets", "recompute"):
        plan = search(*PARTS, levers=[lever], other=OTHER, **FAST)
        used = set(plan.levers.used if plan.levers else ())
        assert used <= {lever} and (plan.bucket_cap_bytes is None or lever == "buckets")
        assert checked(plan)
    assert search(*PARTS, levers=["share"], other=OTHER, **FAST).levers.used == ("share",)


def in_fp32_alone(counts: dict[str, int] | None = None, **cluster):
    """A problem whose devices have FP32 alone, with the step of every share of its weak class."""
    offered = {"precisions": (Precision.FP32,)}
    profiles, smaller = (
        {n: profile_of(g, n, slow=s, latency_s=1e-8, **offered) for n, s in SLOW.items()}
        for g in (GRAPH, SMALLER)
    )
    machines, other = cluster_of(counts, **offered, **cluster), Recapture(SMALLER, smaller)
    parts = (GRAPH, profiles, SENSITIVITY, machines)
    strong, weak = (c.count for c in machines.classes)

    def step_s(of_weak: int) -> float:
        of_strong = (32 * (strong + weak) - weak * of_weak) // strong
        levers = Levers({"train": ClassLevers(of_strong), "infer": ClassLevers(of_weak)})
        shared = profiles_under_levers(GRAPH, profiles, machines, levers, other)
        return uniform(GRAPH, shared, machines, {}).step_s

    return parts, other, step_s


@pytest.mark.parametrize("counts", [{"train": 1, "infer": 1}, {"train": 2, "infer": 4}])
def test_shares_shorten_the_step_where_no_precision_does(counts):
    parts, other, step_s = in_fp32_alone(counts)
    plain = allocate(*parts)
    plan = search(*parts, levers=["share"], other=other)
    # Costs are known up to 48 samples: one rank each takes equal times at 48 and 16, of 2 and 4 ranks the
    # strong would take 57 and take 48.
    least_s = min(step_s(of_weak) for of_weak in ((16, 17, 18) if counts["train"] == 1 else (24, 26, 28)))
    assert plan.step_s <= least_s * (1 + 1e-9) < 0.8 * plain.step_s
    assert plan.added_variance == 0.0 and plan.target_s < 0.8 * plain.target_s
    assert plan.levers.without["share"].reason == "no precisions reach the target"


def test_slack_is_added_to_the_step_of_shares_too():
    parts, other, step_s = in_fp32_alone()
    plan = search(*parts, levers=["share"], other=other, slack=0.1)
    assert plan.target_s == pytest.approx(1.1 * min(map(step_s, (16, 17, 18))))


def test_an_uncertain_profile_costs_shares_no_speed():
    """Nothing tells which of two steps is shorter by a fifth; the shorter one is taken all the same."""
    graph, profiles, sensitivity, cluster = PARTS
    unsure = {name: replace(profile, error=0.2) for name, profile in profiles.items()}
    least = search(graph, unsure, sensitivity, cluster, levers=["share"], other=OTHER, slack=0.0)
    plan = search(graph, unsure, sensitivity, cluster, levers=["share"], other=OTHER)
    assert plan.target_s <= 1.011 * least.target_s


def test_a_target_that_needs_the_strongest_class_is_reached_by_shares_or_refused():
    target_s = 0.95 * allocate(*PARTS, slack=0.0).target_s
    with pytest.raises(InfeasibleError, match="no plan reaches a step"):
        search(*PARTS, levers=["buckets"], target_s=target_s)
    plan = search(*PARTS, levers=["share"], other=OTHER, target_s=target_s)
    assert not plan["train"].lowered and plan.target_s == target_s and plan.step_s <= target_s * (1 + 1e-9)


def test_a_target_that_is_given_stands_over_that_of_shares():
    parts, other, _ = in_fp32_alone()
    target_s = 1.01 * allocate(*parts).step_s
    plan = search(*parts, levers=["share"], other=other, target_s=target_s)
    assert plan.target_s == target_s


@pytest.mark.parametrize("room", [1.0, 1.05])
def test_shares_stay_within_the_memory_of_the_strong_class(room):
    parts, other, step_s = in_fp32_alone()
    budget = int(room * allocate(*parts)["train"].predicted.memory_bytes)
    plan = search(*parts, levers=["share"], other=other, budgets={"train": budget})
    samples = plan.levers_of("train").samples or 32
    assert (
        32 <= samples < 44
        and (samples > 32) == (room > 1.0)
        and plan["train"].predicted.memory_bytes <= budget
    )
    assert plan.step_s == pytest.approx(step_s(64 - samples))
    over = profiles_under_levers(
        parts[0], parts[1], parts[3],
        Levers({"train": ClassLevers(samples + 1), "infer": ClassLevers(63 - samples)}), other,
    )  # fmt: skip
    assert uniform(parts[0], over, parts[3], {})["train"].predicted.memory_bytes > budget


def test_the_strong_class_is_not_lowered_to_hold_more_samples():
    budgets = {"train": int(1.02 * allocate(*PARTS)["train"].predicted.memory_bytes)}
    slow = {n: profile_of(GRAPH, n, slow=s, latency_s=1e-8) for n, s in {"train": 1.0, "infer": 30.0}.items()}
    plan = search(GRAPH, slow, SENSITIVITY, CLUSTER, levers=["share"], other=OTHER, budgets=budgets)
    assert not plan["train"].lowered and plan["infer"].lowered
    assert 32 < plan.levers["train"].samples < 48
    assert plan["train"].predicted.memory_bytes <= budgets["train"]


def test_a_weak_class_that_equal_shares_do_not_fit_takes_fewer_samples():
    parts, other, _ = in_fp32_alone()
    budgets = {"infer": int(0.9 * allocate(*parts)["infer"].predicted.memory_bytes)}
    with pytest.raises(InfeasibleError, match="infer: no assignment fits"):
        allocate(*parts, budgets=budgets)
    plan = search(*parts, levers=["share"], other=other, budgets=budgets)
    assert plan["infer"].predicted.memory_bytes <= budgets["infer"] and plan.levers["infer"].samples < 32


def test_passes_are_taken_where_memory_asks_for_them_alone():
    graph, smaller = encoder(2, width=16, rows=512), encoder(2, width=16, rows=128)
    profiles, theirs = (
        {n: profile_of(g, n, slow=slow, precisions=(Precision.FP32,)) for n, slow in SLOW.items()}
        for g in (graph, smaller)
    )
    parts = (graph, profiles, sensitivity_of(graph), CLUSTER)
    options = {"levers": ["share", "accumulate"], "other": Recapture(smaller, theirs)}
    roomy = search(*parts, **options)
    assert all(entry.passes == 1 for entry in roomy.levers.classes.values())
    budgets = {"train": int(0.8 * roomy["train"].predicted.memory_bytes)}
    plan = search(*parts, **options, budgets=budgets)
    assert plan["train"].predicted.memory_bytes <= budgets["train"] and plan.step_s < 1.1 * roomy.step_s
    assert plan.levers["train"].passes > 1 and plan.levers["infer"].passes == 1


def test_a_class_that_needs_passes_takes_samples_that_they_divide():
    graph, smaller = (encoder(2, width=16, rows=rows) for rows in (511, 128))
    profiles, theirs = (
        {n: profile_of(g, n, slow=slow, precisions=(Precision.FP32,)) for n, slow in SLOW.items()}
        for g in (graph, smaller)
    )
    cluster = cluster_of({"train": 1, "infer": 1}, precisions=(Precision.FP32,))
    parts, other = (graph, profiles, sensitivity_of(graph), cluster), Recapture(smaller, theirs)
    one_pass = search(*parts, levers=["share"], other=other)
    # Equal times ask for an odd number of samples, which no passes divide.
    room = {"train": int(0.6 * one_pass["train"].predicted.memory_bytes)}
    squeezed = search(*parts, levers=["share"], other=other, budgets=room)
    plan = search(*parts, levers=["share", "accumulate"], other=other, budgets=room)
    own = plan.levers["train"]
    assert own.passes > 1 and own.samples % own.passes == 0
    assert own.samples > squeezed.levers["train"].samples
    assert plan.step_s < 1.15 * one_pass.step_s < 0.9 * squeezed.step_s
    assert plan["train"].predicted.memory_bytes <= room["train"]


def test_shares_leave_every_rank_the_samples_that_are_asked_for():
    parts, other, _ = in_fp32_alone()
    assert search(*parts, levers=["share"], other=other).levers["infer"].samples < 24
    plan = search(*parts, levers=["share"], other=other, least_samples=24)
    assert plan.levers["infer"].samples == 24 and plan.levers["train"].samples == 40


def test_shares_of_three_classes_make_up_the_batch_and_take_equally_long():
    counts = {"a": 2, "b": 1, "c": 3}
    slow = {"a": 1.0, "b": 2.0, "c": 4.0}
    cluster = cluster_of(counts)
    profiles, smaller = (
        {n: profile_of(g, n, slow=s, latency_s=1e-9) for n, s in slow.items()} for g in (GRAPH, SMALLER)
    )
    plan = search(GRAPH, profiles, SENSITIVITY, cluster, levers=["share"], other=Recapture(SMALLER, smaller))
    samples = {name: plan.levers[name].samples for name in counts}
    assert sum(counts[name] * own for name, own in samples.items()) == 6 * 32
    assert not plan["a"].lowered and plan["b"].lowered and plan["c"].lowered
    # Lowered, b is as fast as the strong a in FP32: it takes as much as its profiles reach.
    assert samples == {"a": 36, "b": 48, "c": 24}
    assert plan.step_s < 0.5 * uniform(GRAPH, profiles, cluster, {}).step_s


def test_a_given_bucket_cap_holds_in_a_search_of_other_levers():
    plan = search(*PARTS, levers=["recompute"], bucket_cap_bytes=4096, **FAST)
    assert plan.bucket_cap_bytes == 4096 and checked(plan)
    assert plan.target_s == allocate(*PARTS, bucket_cap_bytes=4096, **FAST).target_s


def test_recomputing_makes_fit_what_does_not():
    graph = encoder(4, width=16, rows=512)
    profiles = {n: profile_of(graph, n, slow=s) for n, s in (("train", 1.0), ("infer", 1.2))}
    parts = (graph, profiles, sensitivity_of(graph), CLUSTER)
    pins = {"*": "fp32"}
    whole = allocate(*parts, pins=pins, target_s=1.0)["infer"].predicted.memory_bytes
    options = {"pins": pins, "target_s": 1.0, "budgets": {"infer": int(0.8 * whole)}}
    with pytest.raises(InfeasibleError, match="infer: no assignment fits"):
        allocate(*parts, **options)
    plan = search(*parts, levers=["recompute"], **options)
    assert plan["infer"].predicted.memory_bytes <= 0.8 * whole and plan.levers["infer"].recomputed
    assert plan.levers.without["recompute"].reason == "nothing fits in memory"
    with pytest.raises(InfeasibleError, match="infer: no assignment fits"):
        search(*parts, levers=["buckets"], **options)


def test_without_a_target_that_can_be_reached_the_step_is_named():
    with pytest.raises(InfeasibleError, match="no plan reaches a step of 1e-05 s"):
        search(*PARTS, levers=["share"], other=OTHER, target_s=1e-5)


def test_a_second_capture_of_another_model_is_refused_before_the_search():
    for other, why in ((encoder(3, rows=16), "not of the same operators"), (GRAPH, "both captures .* have")):
        with pytest.raises(MismatchError, match=why):
            search(*PARTS, levers=["share"], other=Recapture(other, {}), **FAST)


def test_inputs_of_a_second_capture_may_have_other_names():
    names = {value.name: f"their {value.name}" for value in SMALLER.inputs if value.kind == "batch"}

    def theirs(values: Sequence[str]) -> tuple[str, ...]:
        return tuple(names.get(value, value) for value in values)

    renamed = replace(
        SMALLER,
        inputs=tuple(replace(value, name=names.get(value.name, value.name)) for value in SMALLER.inputs),
        ops=tuple(replace(op, inputs=theirs(op.inputs), kept=theirs(op.kept)) for op in SMALLER.ops),
    )
    assert names and renamed.hash == SMALLER.hash
    expected = search(*PARTS, levers=["share"], other=Recapture(SMALLER, {}), **FAST)
    found = search(*PARTS, levers=["share"], other=Recapture(renamed, {}), **FAST)
    assert found.levers == expected.levers and found.step_s == expected.step_s


def test_a_plan_with_levers_is_doubted_and_kept_as_any_other(tmp_path):
    basis = Basis(GRAPH, CLUSTER, PROFILES, SENSITIVITY)
    plan = planning.plan(*PARTS, levers=["buckets", "recompute"], **FAST)
    plan = save_with_warnings(tmp_path, plan, basis, None)
    assert Plan.load(tmp_path / "plan.json") == plan
    levers = Levers({"infer": ClassLevers(recomputed=("layer.0",))})
    twice = allocate(
        GRAPH, profiles_under_levers(GRAPH, PROFILES, CLUSTER, levers), SENSITIVITY, CLUSTER, **FAST
    )
    twice = save_with_warnings(tmp_path, twice, basis, None)
    assert Plan.load(tmp_path / "plan.json") == twice and checked(plan, None)


def test_searches_that_cannot_be_are_refused_with_what_to_do():
    with pytest.raises(FormatError, match="unknown lever 'shares': choose from share, accumulate, buckets"):
        search(*PARTS, levers=["shares"])
    with pytest.raises(FormatError, match="no lever to search with"):
        search(*PARTS, levers=[])
    with pytest.raises(MismatchError, match="than the 32 that encoder was captured with; capture it"):
        search(*PARTS, levers=["accumulate"])
    with pytest.raises(FormatError, match="the bucket cap is given, and to be searched too"):
        search(*PARTS, levers=["buckets"], bucket_cap_bytes=2**20)
    with pytest.raises(FormatError, match="levers are for several ranks"):
        search(GRAPH, PROFILES, SENSITIVITY, cluster_of({"infer": 1}), levers=["buckets"])
