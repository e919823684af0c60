"""Shadow prices: what more time or memory would buy, against replay of every single change."""

from __future__ import annotations

from dataclasses import replace

import pytest
from graphs import Builder, cluster_of, profile_of, sensitivity_of

from qsync.allocator import allocate, shadow_prices
from qsync.operators.precision import Precision
from qsync.operators.registry import PRECISIONS_BY_KIND
from qsync.records.cluster import Link
from qsync.records.graph import OpGraph
from qsync.records.plans import Plan
from qsync.records.profiles import Cost
from qsync.replayer import replay

FP32, BF16, INT8 = Precision.FP32, Precision.BF16, Precision.INT8


def chain() -> OpGraph:
    """Products of unlike sizes with gelu between them: every value has one reader, so none move together."""
    builder = Builder("chain")
    x = builder.enter("x", (64, 96))
    for number, width in enumerate((64, 160, 32, 96, 48)):
        x = builder.follow(f"act{number}", "gelu", builder.linear(f"fc{number}", x, width))
    builder.loss("loss", x)
    return builder.build()


GRAPH = chain()
SENSITIVITY = sensitivity_of(GRAPH)
CLUSTER = cluster_of({"train": 1, "infer": 3})
PROFILES = {
    name: profile_of(GRAPH, name, slow=slow, latency_s=1e-8, cast_s=1e-11)
    for name, slow in (("train", 1.0), ("infer", 1.8))
}
PLAN = allocate(GRAPH, PROFILES, SENSITIVITY, CLUSTER, slack=0.02)


def prices_of(plan: Plan, budgets: dict[str, int] | None = None) -> dict[str, object]:
    plan = replace(plan, budgets={**plan.budgets, **(budgets or {})})
    found = shadow_prices(GRAPH, plan, PROFILES, SENSITIVITY, CLUSTER)
    assert [price.device_class for price in found] == ["train", "infer"]
    return {price.device_class: price for price in found}


def changed_by_one(plan: Plan, name: str, **budgets: int) -> list[dict[str, object]]:
    """Every change of one operator of a class, as full replay sees it."""
    mine, n = plan[name].assignment, CLUSTER.num_ranks
    now, found = replay(GRAPH, plan, PROFILES, CLUSTER)[name], []
    for op in GRAPH.adjustable:
        for precision in PRECISIONS_BY_KIND[op.kind]:
            if precision not in CLUSTER[name].precisions or precision == mine[op.name]:
                continue
            both = {other: dict(entry.assignment) for other, entry in plan.classes.items()}
            both[name][op.name] = precision
            then = replay(GRAPH, both, PROFILES, CLUSTER)
            added = SENSITIVITY[op.name, precision] - SENSITIVITY[op.name, mine[op.name]]
            found.append({
                "move": ((op.name,), precision), "variance": added * CLUSTER[name].count / n**2,
                "seconds": then[name].compute_s - now.compute_s, "step_s": then.step_s,
                "memory_bytes": then[name].memory_bytes,
                "grown_bytes": then[name].memory_bytes - now.memory_bytes,
                "late": then.step_s > plan.target_s * (1 + 1e-9),
                "large": then[name].memory_bytes > budgets.get(name, CLUSTER[name].memory_bytes),
            })  # fmt: skip
    return found


def test_time_has_the_price_of_the_densest_raise_that_the_target_forbids():
    price = prices_of(PLAN)["infer"]
    raises = [one for one in changed_by_one(PLAN, "infer") if one["variance"] < 0]
    assert raises and all(one["late"] for one in raises)  # nothing is left that could be had for nothing
    assert price.variance_per_s == pytest.approx(max(-one["variance"] / one["seconds"] for one in raises))
    assert price.variance_per_byte is None  # no budget binds
    beyond = {one["move"]: -one["variance"] / (one["step_s"] - PLAN.target_s) for one in raises}
    assert (price.next_raise.ops, price.next_raise.precision) == max(beyond, key=beyond.get)


def test_the_next_lowering_frees_most_time_for_its_variance():
    for name, price in prices_of(PLAN).items():
        lowerings = [one for one in changed_by_one(PLAN, name) if one["variance"] > 0 and one["seconds"] < 0]
        best = min(lowerings, key=lambda one: one["variance"] / -one["seconds"])
        found = price.next_lowering
        assert (found.ops, found.precision) == best["move"]
        for field in ("variance", "seconds", "step_s", "memory_bytes"):
            assert getattr(found, field) == pytest.approx(best[field])


def test_a_target_longer_by_what_the_next_raise_needs_regains_at_least_as_much():
    found = prices_of(PLAN)["infer"].next_raise
    longer = PLAN.target_s + found.beyond_s
    again = allocate(GRAPH, PROFILES, SENSITIVITY, CLUSTER, target_s=longer * (1 + 1e-9))
    assert again.added_variance <= PLAN.added_variance + found.variance * (1 - 1e-3)
    raised = {**PLAN["infer"].assignment, **dict.fromkeys(found.ops, found.precision)}
    timeline = replay(GRAPH, {"train": PLAN["train"].assignment, "infer": raised}, PROFILES, CLUSTER)
    assert found.step_s == pytest.approx(timeline.step_s) == pytest.approx(longer)
    assert found.memory_bytes == timeline["infer"].memory_bytes and found.beyond_bytes == 0


def test_a_class_that_is_as_it_would_be_has_no_price():
    """Everything in FP32, or time enough for everything: more of it buys nothing."""
    for price in (prices_of(PLAN)["train"], prices_of(replace(PLAN, target_s=10.0))["infer"]):
        assert (price.variance_per_s, price.variance_per_byte, price.next_raise) == (None, None, None)
        assert price.next_lowering is not None


def test_memory_has_a_price_where_it_alone_forbids_a_raise():
    fp32 = replay(GRAPH, {"train": {}, "infer": {}}, PROFILES, CLUSTER)["infer"].memory_bytes
    budgets = {"infer": int(fp32 * 0.985)}
    plan = allocate(GRAPH, PROFILES, SENSITIVITY, CLUSTER, target_s=10.0, budgets=budgets)
    price = prices_of(plan, budgets=budgets)["infer"]
    raises = [one for one in changed_by_one(plan, "infer", **budgets) if one["variance"] < 0]
    assert raises and all(one["large"] for one in raises)
    expected = max(-one["variance"] / one["grown_bytes"] for one in raises)
    assert price.variance_per_byte == pytest.approx(expected) and price.variance_per_s is None
    found = price.next_raise
    assert found.beyond_s == 0 and found.beyond_bytes == found.memory_bytes - budgets["infer"] > 0
    again = allocate(
        GRAPH, PROFILES, SENSITIVITY, CLUSTER, target_s=10.0, budgets={"infer": found.memory_bytes}
    )
    assert again.added_variance < plan.added_variance
    assert prices_of(plan, budgets={"infer": 1 << 40})["infer"].variance_per_byte is None


def test_memory_has_the_price_of_the_densest_raise_that_the_budget_forbids():
    lowest = dict.fromkeys((op.name for op in GRAPH.adjustable), INT8)
    timeline = replay(GRAPH, {"train": {}, "infer": lowest}, PROFILES, CLUSTER)
    budgets = {"infer": timeline["infer"].memory_bytes}
    plan = allocate(GRAPH, PROFILES, SENSITIVITY, CLUSTER, target_s=10.0, pins={"*": "int8"}, lower_all=True)
    plan = replace(plan, pins={}, classes={**plan.classes, "train": PLAN["train"]})
    assert plan["infer"].assignment == lowest
    large = [one for one in changed_by_one(plan, "infer", **budgets) if one["large"] and one["variance"] < 0]
    prices = {-one["variance"] / one["grown_bytes"] for one in large}
    assert len(prices) > 1
    assert prices_of(plan, budgets=budgets)["infer"].variance_per_byte == pytest.approx(max(prices))


def test_what_both_forbid_has_no_price():
    """More time alone would not buy it, nor more memory alone."""
    budgets = {"infer": replay(GRAPH, PLAN, PROFILES, CLUSTER)["infer"].memory_bytes}
    raises = [one for one in changed_by_one(PLAN, "infer", **budgets) if one["variance"] < 0]
    price = prices_of(PLAN, budgets=budgets)["infer"]
    by_time = max(-one["variance"] / one["seconds"] for one in raises if one["late"] and not one["large"])
    assert price.variance_per_s == pytest.approx(by_time)
    assert price.variance_per_s < prices_of(PLAN)["infer"].variance_per_s and price.variance_per_byte is None


def test_on_machines_a_million_times_faster_a_second_is_worth_a_million_times_more():
    """Which changes of time are rounding depends on the class's compute, not on its seconds."""
    profiles = {
        name: profile_of(
            GRAPH, name, slow=1e-6 * slow, latency_s=1e-8, cast_s=1e-11, outside=Cost(1e-12, 2e-12)
        )
        for name, slow in (("train", 1.0), ("infer", 1.8))
    }
    cluster = cluster_of({"train": 1, "infer": 3}, link=Link(1e-11, 1e16))
    plan = replace(PLAN, target_s=1e-6 * PLAN.target_s)
    _, found = shadow_prices(GRAPH, plan, profiles, SENSITIVITY, cluster)
    assert found.variance_per_s == pytest.approx(1e6 * prices_of(PLAN)["infer"].variance_per_s)


def test_what_is_pinned_stays_as_it_is():
    """No price is read off an operator that is not free to change, and its own budget is a plan's."""
    dearest = prices_of(PLAN)["infer"].next_raise.ops[0]
    pins = {dearest: PLAN["infer"].assignment[dearest]}
    plan = replace(allocate(GRAPH, PROFILES, SENSITIVITY, CLUSTER, target_s=PLAN.target_s), pins=pins)
    assert plan["infer"].assignment == PLAN["infer"].assignment
    price = prices_of(plan)["infer"]
    assert price.next_raise.ops[0] != dearest
    budgets = {"infer": replay(GRAPH, PLAN, PROFILES, CLUSTER)["infer"].memory_bytes}
    assert prices_of(PLAN, budgets=budgets) != prices_of(PLAN)


def test_a_class_that_may_be_late_pays_more_for_a_second():
    classes = {**PLAN.classes, "infer": replace(PLAN["infer"], margin=0.1)}
    late = prices_of(replace(PLAN, classes=classes))["infer"]
    assert late.variance_per_s == pytest.approx(prices_of(PLAN)["infer"].variance_per_s / 1.1)
    assert late.next_raise.beyond_s > prices_of(PLAN)["infer"].next_raise.beyond_s


def test_operators_that_read_one_value_are_raised_together():
    """Alone each would pay for a cast that the others still need."""
    builder = Builder("siblings")
    x = builder.enter("x", (64, 64))
    q, k = (builder.linear(name, x, 64) for name in ("q", "k"))
    builder.loss("loss", builder.follow("add", "add", q, k))
    graph = builder.build()
    profiles = {
        name: profile_of(graph, name, slow=s, cast_s=3e-9) for name, s in (("train", 1), ("infer", 2))
    }
    cluster, sensitivity = cluster_of(), sensitivity_of(graph)
    plan = allocate(graph, profiles, sensitivity, cluster, pins={"*": "int8"}, lower_all=True, target_s=1.0)
    plan = replace(plan, target_s=plan.step_s, pins={})
    for price in shadow_prices(graph, plan, profiles, sensitivity, cluster):
        assert price.next_raise.ops == ("q", "k")
