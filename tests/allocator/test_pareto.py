"""The trade-off of step, variance and memory: plans that hold, and none that another equals in all three."""

from __future__ import annotations

import itertools

import pytest
from graphs import chain, cluster_of, profile_of, sensitivity_of

from qsync.allocator import allocate, check_plan, frontier
from qsync.allocator.pareto import _undominated
from qsync.errors import DoesNotFitError, FormatError
from qsync.figures import pareto
from qsync.records.plans import traded_classes
from qsync.replayer import profiles_under_levers

GRAPH = chain()
RECORDS = (
    GRAPH,
    {
        name: profile_of(GRAPH, name, slow=slow, latency_s=1e-8, cast_s=1e-11, saving=1.3)
        for name, slow in (("train", 1.0), ("infer", 2.0))
    },
    sensitivity_of(GRAPH),
    cluster_of(),
)


@pytest.fixture(scope="module")
def plans():
    return frontier(*RECORDS, 3, levers=["recompute", "save_less"])


def figures(plan):
    return plan.step_s, plan.added_variance, plan["infer"].predicted.memory_bytes


def test_no_plan_of_a_frontier_with_levers_is_worse_in_all(plans):
    assert len(plans) > 4
    assert [plan.step_s for plan in plans] == sorted(plan.step_s for plan in plans)
    for one, other in itertools.permutations(plans, 2):
        assert any(own < its for own, its in zip(figures(one), figures(other), strict=True))
    assert traded_classes(plans) == ["infer"]
    plain = frontier(*RECORDS, 3)
    assert figures(plans[0]) == figures(plain[0]) and plain[-1].added_variance == 0.0
    assert not traded_classes(plain) and len(plain) < len(plans)


def test_every_plan_holds_under_its_levers_and_budget(plans):
    graph, profiles, sensitivity, cluster = RECORDS
    for plan in plans:
        under = profiles_under_levers(graph, profiles, cluster, plan.levers)
        assert check_plan(graph, plan, under, sensitivity, cluster).ok
        assert plan["infer"].predicted.memory_bytes <= plan.budgets.get("infer", 1 << 60)
    used = {bool(plan.levers) or bool(plan["infer"].saving_less) for plan in plans}
    assert used == {True, False}
    least = min(plans, key=lambda plan: figures(plan)[2])
    again = allocate(
        *RECORDS, budgets=least.budgets, target_s=least.target_s, block_levers=("recompute", "save_less")
    )
    assert again.added_variance == pytest.approx(least.added_variance)


def test_of_equal_plans_one_is_kept(plans):
    assert any(plan.added_variance == 0.0 for plan in plans)
    assert _undominated([*plans, *plans], ["infer"]) == plans


def test_budgets_that_are_given_are_kept():
    whole = allocate(*RECORDS, target_s=1.0)["infer"].predicted.memory_bytes
    budget = int(0.8 * whole)
    for plan in frontier(*RECORDS, 2, levers=["recompute"], budgets={"infer": budget}):
        assert plan["infer"].predicted.memory_bytes <= budget and not plan["infer"].saving_less


@pytest.mark.parametrize("part", [0.01, 0.6])
def test_where_nothing_fits_the_frontier_names_the_class(part):
    whole = allocate(*RECORDS, target_s=1.0)["infer"].predicted.memory_bytes
    with pytest.raises(DoesNotFitError, match="infer: no assignment fits in its memory"):
        frontier(*RECORDS, 2, levers=["recompute"], budgets={"infer": int(part * whole)})


def test_levers_of_other_kinds_are_refused():
    with pytest.raises(FormatError, match="recompute and save_less, found 'share'; leave it out"):
        frontier(*RECORDS, 3, levers=["recompute", "share"])


def test_the_picture_shows_peaks_where_memory_is_traded(plans, tmp_path, monkeypatch):
    drawn = []
    monkeypatch.setattr(pareto, "save_png", lambda figure, path, dpi: drawn.append(figure))
    pareto.draw(plans, tmp_path / "frontier.png")
    above, below = drawn[0].axes
    assert [text.get_text().split(":")[0] for text in above.texts] == [str(k + 1) for k in range(len(plans))]
    assert below.get_ylabel() == "memory peak, MiB"
    peaks = [figures(plan)[2] / 2**20 for plan in plans]
    assert below.collections[0].get_offsets()[:, 1].tolist() == pytest.approx(peaks)
    shades = above.collections[0].get_facecolor()
    lowered = [number for number, plan in enumerate(plans) if plan.added_variance]
    fullest = max(lowered, key=lambda number: peaks[number])
    assert shades[fullest][3] == max(shades[number][3] for number in lowered)
