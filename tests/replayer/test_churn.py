"""Traces of leaving and returning cards: every second has one cause; memberships cost what replay says."""

from __future__ import annotations

import math
import random
from collections.abc import Mapping
from dataclasses import replace

import pytest
from graphs import Builder, cluster_of, encoder, mlp, profile_of, sensitivity_of
from hypothesis import given, settings
from hypothesis import strategies as st

from qsync.allocator import allocate
from qsync.errors import FormatError
from qsync.records.cluster import Cluster, Link
from qsync.records.graph import OpGraph
from qsync.records.levers import ClassLevers, Levers
from qsync.replayer import profiles_under_levers, replay
from qsync.replayer.churn import (
    ChurnCosts,
    ChurnEvent,
    MembershipSteps,
    RandomChurn,
    play,
    read_events,
)
from qsync.replayer.churn.trace import check_events
from qsync.replayer.levers.batch_size import Recapture

RANKS = {"a": 1, "b": 2}
COSTS = ChurnCosts(2.0, 4.0, 1.0, 3.0, 1.0, 2.0, release_s=0.0)
NOTHING = ChurnCosts(*[0.0] * 7)


def step_s(ranks: Mapping[str, int]) -> float:
    """3, 2 and 1 cards take 1, 1.5 and 3 seconds."""
    return 3.0 / sum(ranks.values())


def trace(*events: str) -> list[ChurnEvent]:
    """Events such as "10.5 kill b:1"."""
    parts = [(*text.split(), "")[:3] for text in events]
    return [ChurnEvent(float(time_s), kind, card) for time_s, kind, card in parts]


def played(*events: str, costs: ChurnCosts = COSTS, ranks: Mapping[str, int] = RANKS):
    report = play(trace(*events), ranks, step_s, costs, samples_per_step=6)
    assert report.training_s + sum(report.lost_s.values()) == pytest.approx(report.duration_s)
    return report


def lost(report) -> dict[str, float]:
    return {cause: pytest.approx(seconds) for cause, seconds in report.lost_s.items() if seconds}


def test_without_events_the_job_reaches_the_ideal():
    report = played("10.25 end")
    assert report.of_ideal == pytest.approx(1.0) and report.samples_per_s == pytest.approx(6.0)
    assert (report.num_steps, report.num_reconfigurations, lost(report)) == (10, 0, {})
    assert report.lossless_samples_per_s == pytest.approx(6.0)


def test_a_killed_card_costs_its_step_its_detection_and_two_changes():
    # 10 steps of 1 s; detected at 12.5, reformed at 13.5; 7 steps of 1.5 s until 24, because the card that
    # joined at 20 has the state at 23; reformed at 25; 5 steps.
    report = played("10.5 kill b:1", "20 join b:1", "30 end")
    assert lost(report) == {"lost_step": 0.5, "detection": 2.0, "reconfiguration": 2.0}
    assert report.num_steps == 22 and report.samples_per_s == pytest.approx(22 * 6 / 30)
    full, two = report.memberships
    assert (dict(full.ranks), full.num_steps, full.training_s) == (RANKS, 15, pytest.approx(15.0))
    assert (dict(two.ranks), two.num_steps, two.step_s) == ({"a": 1, "b": 1}, 7, 1.5)
    # Without a loss: 10.5 s and 10 s of three cards, 9.5 s of two.
    assert report.lossless_samples_per_s * 30 == pytest.approx(6 * (20.5 + 9.5 / 1.5))


@pytest.mark.parametrize(("events", "losses", "num_steps"), [
    # A stopped card returns without a start: out at 15.5; state at 21, 4 steps until 21.5; in at 22.5.
    ("10.5 stop b:0, 20 cont b:0", {"lost_step": 0.5, "timeout": 4.0, "reconfiguration": 2.0}, 10 + 4 + 7),
    # Or as a new process, as the killed card above: out at 15.5; 5 steps of 1.5 s until 23, then 6 of 1 s.
    ("10.5 stop b:1, 20 join b:1", {"lost_step": 0.5, "timeout": 4.0, "reconfiguration": 2.0}, 10 + 5 + 6),
    # Failures at once are waited for together: detected at 12.5, timed out at 15.5, one change until 16.5.
    ("10.5 kill b:0, 11.5 stop b:1",
     {"lost_step": 0.5, "detection": 2.0, "timeout": 3.0, "reconfiguration": 1.0}, None),
    ("10.5 kill b:0, 13 kill b:1", {"lost_step": 0.5, "detection": 3.5, "reconfiguration": 2.0}, None),
    # A card that fails before it enters costs the others nothing.
    ("10 release b:1, 12 join b:1, 14 kill b:1, 16 join b:1, 17 stop b:1", {"reconfiguration": 1.0}, None),
    # A lighthouse that is back late.
    ("10.5 lighthouse", {"lighthouse": 2.5}, None),
])  # fmt: skip
def test_what_a_failure_loses(events, losses, num_steps):
    report = played(*events.split(", "), "30 end")
    assert lost(report) == losses and num_steps in (None, report.num_steps)
    assert report.num_reconfigurations == losses.get("reconfiguration", 0.0)


def test_a_released_card_finishes_its_step():
    report = played("10.5 release a:0", "30 end")
    assert lost(report) == {"reconfiguration": 1.0} and report.memberships[1].num_steps == 11
    at_a_boundary = played("10 release a:0", "30 end")
    assert lost(at_a_boundary) == {"reconfiguration": 1.0} and at_a_boundary.memberships[1].num_steps == 10


def test_the_others_wait_until_a_released_card_is_dropped():
    report = played("10.5 release a:0", "30 end", costs=replace(COSTS, release_s=1.5))
    assert lost(report) == {"release": 1.0, "reconfiguration": 1.0}  # the step ends at 11, the wait at 12
    assert report.memberships[1].num_steps == 11


def test_a_lighthouse_that_is_back_before_the_step_ends_costs_nothing():
    quick = replace(COSTS, lighthouse_s=0.25)
    report = played("10.5 lighthouse", "30 end", costs=quick)
    assert lost(report) == {} and report.num_steps == 30


def test_without_a_card_the_job_waits():
    report = played("3.5 release a:0", "20 join a:0", "40 end", ranks={"a": 1})
    # The step ends at 6; the card has the state at 23, and trains from 24 on.
    assert lost(report) == {"reconfiguration": 2.0, "no_card": 16.0}
    assert report.num_steps == 2 + 5 and report.training_s == pytest.approx(6.0 + 16.0)


def test_a_wait_that_outlasts_the_trace_is_counted_whole():
    report = played("29.5 stop b:1", "30 end")
    assert report.duration_s == 33.5 and lost(report) == {"lost_step": 0.5, "timeout": 4.0}


def test_events_that_cost_nothing_leave_the_lossless_rate_but_for_broken_steps():
    report = played("10 release b:1", "19 join b:1", "30 end", costs=NOTHING)
    assert report.samples_per_s == pytest.approx(report.lossless_samples_per_s)
    assert report.num_steps == 10 + 6 + 11


@st.composite
def traces(draw: st.DrawFn) -> list[ChurnEvent]:
    """Any events that three cards can have."""
    state = {"a:0": "present", "b:0": "present", "b:1": "present"}
    now, events = 0.0, []
    for _ in range(draw(st.integers(0, 12))):
        now += draw(st.sampled_from([0.0, 0.1, 0.5, 1.0, 3.0, 7.7, 30.0]))
        card = draw(st.sampled_from(sorted(state)))
        kinds = {"present": ["kill", "stop", "release"], "gone": ["join", "cont"]}
        kind = draw(st.sampled_from([*kinds[state[card]], "lighthouse"]))
        after = {"kill": "gone", "release": "gone", "stop": "gone", "cont": "present", "join": "present"}
        state[card] = after.get(kind, state[card])
        events.append(ChurnEvent(now, kind, "" if kind == "lighthouse" else card))
    return [*events, ChurnEvent(now + draw(st.floats(0.01, 50.0)), "end")]


@given(traces(), st.sampled_from([COSTS, NOTHING, ChurnCosts()]))
@settings(max_examples=200, deadline=None)
def test_every_second_trains_or_has_one_cause(events, costs):
    report = play(events, RANKS, step_s, costs, samples_per_step=6)
    assert report.training_s + sum(report.lost_s.values()) == pytest.approx(report.duration_s)
    assert report.duration_s >= events[-1].time_s
    assert min(report.lost_s.values()) >= 0.0
    samples = sum(6 * one.training_s / one.step_s for one in report.memberships)
    assert report.samples_per_s * report.duration_s == pytest.approx(samples)
    assert report.progress[-1][1] == pytest.approx(samples)
    assert list(report.progress) == sorted(report.progress)
    # A step that ends after its card has left is the only one beyond the lossless rate.
    leaving = sum(event.kind in ("release", "kill", "stop") for event in events)
    assert samples <= report.lossless_samples_per_s * report.duration_s + 6 * leaving + 1e-6
    assert report == play(events, RANKS, step_s, costs, samples_per_step=6)


def test_each_membership_is_priced_once():
    asked: list[tuple[tuple[str, int], ...]] = []

    def counting(ranks: Mapping[str, int]) -> float:
        asked.append(tuple(ranks.items()))
        return step_s(ranks)

    ranks = {"train": 2_000, "infer": 8_000}
    events = RandomChurn(mtbf=5_000.0, days=30.0).events(ranks)
    report = play(events, ranks, counting, samples_per_step=320_000)
    assert len(asked) == len(set(asked)) and len(events) > 2_000
    assert 0.9 < report.of_ideal < 1.0 and report.num_steps > 10**9


@pytest.mark.parametrize(
    ("events", "message"),
    [
        (("1 kill b:2",), "no card 'b:2'; there are a:0 to a:0, b:0 to b:1"),
        (("1 kill c:0",), "no card 'c:0'"),
        (("1 kill",), "no card ''"),
        (("1 explode b:0",), "no event 'explode'"),
        (("2 kill b:0", "1 kill b:1"), "not before 2.0 s"),
        (("nan kill b:0",), "must be finite"),
        (("-1 kill b:0",), "must be finite"),
        (("inf end",), "must be finite"),
        (("1 join b:0",), "b:0 has joined before"),
        (("1 kill b:0", "2 release b:0"), "b:0 has left before"),
        (("1 cont b:0",), "b:0 has joined before"),
        (("1 end", "2 end"), "must be the last event"),
        (("0 kill b:0",), "ends at 0 s"),
        ((), "ends at 0 s"),
    ],
)
def test_events_that_cards_cannot_have_are_refused(events, message):
    with pytest.raises(FormatError, match=message):
        played(*events)


def test_clusters_and_step_times_that_cannot_be_played_are_refused():
    for ranks in ({"a": 10_001}, {"a": 0}):
        with pytest.raises(FormatError, match="1 to 10000 ranks"):
            check_events(trace("1 end"), ranks)
    for seconds in (0.0, math.nan, math.inf):
        with pytest.raises(FormatError, match="give positive seconds"):
            play(trace("1 end"), RANKS, lambda ranks, seconds=seconds: seconds)


def test_a_trace_is_read_and_bad_lines_are_named(tmp_path):
    path = tmp_path / "trace.csv"
    path.write_text("time_s,event,card\n10.5,kill,infer:1\n\n 20 , lighthouse ,\n30,end,\n")
    assert read_events(path) == (
        ChurnEvent(10.5, "kill", "infer:1"), ChurnEvent(20.0, "lighthouse"), ChurnEvent(30.0, "end"),
    )  # fmt: skip
    for text, message in (
        ("", "line 1 must be time_s,event,card"),
        ("time_s,event,card\n1,lighthouse\n", "line 2: expected time_s"),
        ("time_s,event,card\nsoon,kill,infer:1\n", "line 2: expected time_s"),
        ("time_s,event,card\n1,kill,infer:1,2\n", "line 2: expected time_s"),
    ):
        path.write_text(text)
        with pytest.raises(FormatError, match=message):
            read_events(path)
    with pytest.raises(FormatError, match="cannot read .*none.csv.*No such file.*give a CSV file"):
        read_events(tmp_path / "none.csv")
    path.write_bytes(b"\xff\xfe\x00")
    with pytest.raises(FormatError, match="cannot read .*give a CSV file"):
        read_events(path)


def test_random_failures_follow_their_seed_and_rates():
    churn = RandomChurn.parse("mtbf=10,mttr=60,days=20,seed=3,classes=b")
    events = churn.events({"a": 5, "b": 50})
    assert events == churn.events({"a": 5, "b": 50}) != replace(churn, seed=4).events({"a": 5, "b": 50})
    assert {event.card[0] for event in events[:-1]} == {"b"}
    check_events(events, {"a": 5, "b": 50})
    kills = sum(event.kind == "kill" for event in events)
    assert kills == pytest.approx(50 * 20 * 24 / 11, rel=0.1)  # a cycle is 10 hours and 60 minutes


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("mtbf=0", "needs mtbf=HOURS, above 0"),
        ("mtbf=-1", "mtbf must be a number, at least 0"),
        ("mtbf=often", "found 'often'"),
        ("mtbf=inf", "mtbf must be"),
        ("mtbf=", "mtbf must be"),
        ("mttr=5", "needs mtbf"),
        ("mtbf=5,mttl=5", "did you mean mttr"),
        ("mtbf=5,days=-1", "days must be"),
        ("mtbf=5,seed=one", "seed must be a number"),
        ("mtbf=5,classes=c", "no device class 'c'"),
        ("mtbf=1e-9,mttr=1e-6", "too many to play"),
        ("mtbf=1,days=1e300", "too many to play"),
    ],
)
def test_random_churn_that_cannot_be_is_refused(text, message):
    with pytest.raises(FormatError, match=message):
        RandomChurn.parse(text).events({"a": 1, "b": 2})


def test_costs_are_read_and_those_left_out_are_the_defaults():
    assert ChurnCosts.parse("detection=2.5, start=3") == ChurnCosts(detection_s=2.5, start_s=3.0)
    for text, message in (
        ("detektion=1", "did you mean detection"), ("start=-1", "at least 0"), ("start=soon", "found 'soon'"),
        ("costs.json", "no cost of churn"), ("start=nan", "must be a number"),
    ):  # fmt: skip
        with pytest.raises(FormatError, match=message):
            ChurnCosts.parse(text)


GRAPH = encoder(2, rows=32)
PROFILES = {
    "train": profile_of(GRAPH, "train"),
    "infer": profile_of(GRAPH, "infer", slow=2.0, bucket_s_per_byte=1e-10),
}
COUNTS = {"train": 2, "infer": 3}


def steps_of(cluster: Cluster, profiles=PROFILES):
    plan = allocate(GRAPH, profiles, sensitivity_of(GRAPH), cluster, bucket_cap_bytes=100_000)
    return MembershipSteps(GRAPH, plan, profiles, cluster), plan


def test_the_planned_membership_takes_the_replayed_step():
    steps, plan = steps_of(cluster_of(COUNTS))
    assert steps(COUNTS) == pytest.approx(plan.step_s, rel=1e-9) and steps.samples_per_step == 160
    assert steps.shares(COUNTS) == {"train": 32, "infer": 32}
    hosts = cluster_of(COUNTS).on_hosts(2, Link(1e-4, 1e9))
    steps, plan = steps_of(hosts)
    assert steps(COUNTS) == pytest.approx(plan.step_s, rel=1e-9)
    assert steps({"train": 1, "infer": 0}) > plan.step_s


def test_levers_are_kept_and_their_shares_in_proportion():
    levers = Levers({"train": ClassLevers(44, passes=2), "infer": ClassLevers(20, passes=2)})
    cluster = cluster_of({"train": 1, "infer": 1})
    profiles = profiles_under_levers(GRAPH, PROFILES, cluster, levers, Recapture(encoder(2, rows=16), {}))
    steps, plan = steps_of(cluster, profiles)
    ranks = {"train": 1, "infer": 1}
    assert steps.shares(ranks) == {"train": 44, "infer": 20}
    assert steps(ranks) == pytest.approx(plan.step_s, rel=1e-9)


def test_a_membership_costs_what_replay_says_of_its_graph():
    """With half the cards, each takes twice the samples: the same as profiles of twice the samples."""
    cluster = cluster_of({"train": 4})
    profiles = {"train": profile_of(GRAPH, "train", reduce_s_per_call=0.0, reduce_s_per_byte=0.0)}
    steps, plan = steps_of(cluster, profiles)
    double = {
        op: {
            mode: cost._replace(forward_s=2 * cost.forward_s, backward_s=2 * cost.backward_s)
            for mode, cost in modes.items()
        }
        for op, modes in profiles["train"].ops.items()
    }
    outside = profiles["train"].outside
    slower = replace(
        profiles["train"], ops=double,
        outside=outside._replace(forward_s=2 * outside.forward_s, backward_s=2 * outside.backward_s),
    )  # fmt: skip
    half = replay(GRAPH, plan, {"train": slower}, cluster_of({"train": 2}), bucket_cap_bytes=100_000)
    assert steps({"train": 2}) == pytest.approx(half.step_s, rel=1e-9)


def test_passes_are_added_only_where_memory_is_short():
    plenty, plan = steps_of(cluster_of(COUNTS))
    most = max(entry.predicted.memory_bytes for entry in plan.classes.values())
    short = steps_of(cluster_of(COUNTS, memory_bytes=most))[0]
    few = {"train": 1, "infer": 1}
    assert plenty(COUNTS) == short(COUNTS) and plenty(few) < short(few)
    budgeted = replace(plan, budgets=dict.fromkeys(COUNTS, most))
    assert MembershipSteps(GRAPH, budgeted, PROFILES, cluster_of(COUNTS))(few) == short(few)


@pytest.mark.parametrize("frozen", [0, 5])
def test_what_a_pass_may_hold_is_what_memory_holds(frozen):
    """Frozen weights have neither gradients nor states of an optimizer."""

    def graph_of(rows: int) -> OpGraph:
        build = Builder()
        x = build.enter("x", (rows, 64))
        for k in range(6):
            weight = build.enter(f"{k}.weight", (64, 64), "parameter", grad=k >= frozen)
            x = build.follow(f"{k}.act", "gelu", build.linear(f"{k}.fc", x, 64, weight=weight))
        build.loss("loss", x)
        build.output("loss")
        return build.build()

    def memory_bytes(rows: int) -> int:
        graph = graph_of(rows)
        own = {"train": replace(profile_of(graph, "train"), optimizer_bytes=8 * (6 - frozen) * 64 * 64)}
        return replay(graph, {"train": {}}, own, cluster_of({"train": 2}))["train"].memory_bytes

    graph, cluster = graph_of(32), cluster_of({"train": 8}, memory_bytes=memory_bytes(100))
    profile = replace(profile_of(graph, "train"), optimizer_bytes=8 * (6 - frozen) * 64 * 64)
    plan = allocate(graph, {"train": profile}, sensitivity_of(graph), cluster)
    steps = MembershipSteps(graph, plan, {"train": profile}, cluster)
    assert 85 < steps._limits["train"] <= 100  # what does not grow with samples is counted to what does


@given(st.integers(0, 2), st.integers(0, 3), st.randoms(use_true_random=False))
@settings(max_examples=50, deadline=None)
def test_shares_keep_the_batch_and_fewer_cards_take_longer(train, infer, draw: random.Random):
    ranks = {"train": train, "infer": infer}
    if not train + infer:
        return
    steps = STEPS
    shares = steps.shares(ranks)
    most = sum(ranks[name] * samples for name, samples in shares.items())
    assert steps.samples_per_step <= most < steps.samples_per_step + train + infer
    fewer = dict(ranks)
    name = draw.choice(sorted(name for name, count in ranks.items() if count))
    fewer[name] -= 1
    if sum(fewer.values()):
        assert min(steps.shares(fewer).values()) >= min(shares.values())
        assert steps(fewer) > 0.9 * steps(ranks)


STEPS = steps_of(cluster_of(COUNTS))[0]


def test_a_graph_without_levers_of_one_rank_is_played():
    graph = mlp(2)
    profiles = {"train": profile_of(graph, "train")}
    cluster = cluster_of({"train": 1})
    plan = allocate(graph, profiles, sensitivity_of(graph), cluster)
    steps = MembershipSteps(graph, plan, profiles, cluster)
    assert steps({"train": 1}) == pytest.approx(plan.step_s)
    report = play(trace("1 end"), {"train": 1}, steps, samples_per_step=steps.samples_per_step)
    assert report.samples_per_s == pytest.approx(16 / plan.step_s)
