"""What cards decide from a meeting, without a lighthouse."""

from __future__ import annotations

import socket

import pytest

from qsync import QSyncError
from qsync.elastic_training.healing import Server
from qsync.elastic_training.meeting import Card, meeting_of
from qsync.elastic_training.plan_book import membership_of, next_memberships, shown
from qsync.elastic_training.rendezvous import Rendezvous, checked_address

FACTS = {"torch": "2.13.0", "seed": "0"}


def card(name, step=5, history="h", facts=None, **more):
    return Card(
        name,
        name.rpartition("-")[0] or "train",
        more.pop("started_s", 1.0),
        facts or FACTS,
        step,
        history,
        **more,
    )


def names(cards):
    return [one.name for one in cards]


def test_cards_with_the_most_steps_come_first_and_others_are_healed():
    cards = [card("c", 4), card("b"), card("a", 0, ""), card("d")]
    meeting = meeting_of("k", cards, cards[0])
    assert names(meeting.current) == ["b", "d"] and names(meeting.behind) == ["a", "c"]
    assert [meeting.rank_of(name) for name in "bdac"] == [0, 1, 2, 3]
    assert meeting.source_of("a").name == "b" and meeting.source_of("c").name == "d"


def test_of_two_histories_the_larger_part_is_right():
    cards = [card("a", history="lone"), card("b"), card("c")]
    meeting = meeting_of("k", cards, cards[0])
    assert names(meeting.current) == ["b", "c"] and names(meeting.behind) == ["a"]


def test_a_card_that_has_only_resumed_does_not_replace_the_job():
    """Its checkpoint may be of another run, with more steps behind it."""
    cards = [card("a", 66, has_trained=True), card("b", 295, "other")]
    for own in cards:
        meeting = meeting_of("k", cards, own)
        assert names(meeting.current) == ["a"] and names(meeting.behind) == ["b"]
    fresh = [card("a", 66), card("b", 295, "other")]  # all have resumed: the most steps count
    assert names(meeting_of("k", fresh, fresh[0]).current) == ["b"]


def test_a_group_is_kept_by_exactly_its_cards():
    def keeps(*groups):
        cards = [card(f"c{k}", group=group) for k, group in enumerate(groups)]
        return meeting_of("k", cards, cards[0]).keeps_group

    assert keeps("g/2", "g/2")
    assert not keeps("g/3", "g/3")  # one is gone
    assert not keeps("g/2", "g/2", "")  # one is new, or its group has failed
    assert not keeps("g/2", "h/2")
    assert not keeps("", "")


def test_a_card_that_leaves_is_in_no_step_unless_it_is_the_last():
    cards = [card("a", leaves=True), card("b")]
    assert names(meeting_of("k", cards, cards[0]).cards) == ["b"]
    both = [card("a", leaves=True), card("b", leaves=True), card("c", 0, "", leaves=True)]
    assert names(meeting_of("k", both, both[0]).cards) == ["a"]
    successor = [card("a", leaves=True), card("c", 0, "")]
    meeting = meeting_of("k", successor, successor[0])
    assert names(meeting.current) == ["a"] and names(meeting.behind) == ["c"]


def test_another_job_is_refused_by_name_and_passed_over_by_the_running_one():
    other = card("z", 0, "", {**FACTS, "seed": "7"})
    cards = [card("a"), other]
    assert names(meeting_of("k", cards, cards[0]).cards) == ["a"]
    with pytest.raises(QSyncError, match="has 0 as seed, and this card has 7; start this card with the same"):
        meeting_of("k", cards, other)
    first, second = card("y", 0, "", started_s=1.0), card("b", 0, "", {**FACTS, "seed": "7"}, started_s=2.0)
    assert names(meeting_of("k", [first, second], first).cards) == ["y"]


def test_who_is_asked_to_leave_is_told_to_all():
    asking = Card("release-1", "", 0.0, {}, release=("b",))
    cards = [card("a"), card("b"), asking]
    meeting = meeting_of("k", cards, cards[0])
    assert meeting.released == ("b",) and names(meeting.cards) == ["a", "b"]


@pytest.mark.parametrize("text", ["", "host", "host:", ":80", "host:port", "host:0", "host:99999", 5, None])
def test_an_address_that_is_none_is_refused(text):
    with pytest.raises(QSyncError, match="a lighthouse's address must be HOST:PORT, found"):
        checked_address(text)


@pytest.mark.parametrize("text", ["[::1]:29510", "::1:29510"])
def test_an_address_of_ipv6_is_refused(text):
    with pytest.raises(QSyncError, match="cards meet over IPv4; give the lighthouse's name or IPv4 address"):
        checked_address(text)


def test_a_lighthouse_that_does_not_answer_is_named():
    with pytest.raises(QSyncError, match="no lighthouse answers at 127.0.0.1:9; start one with"):
        Rendezvous("127.0.0.1:9", 0.5)


def test_what_listens_and_is_no_lighthouse_is_refused():
    other = Server("127.0.0.1", timeout_s=0.1)
    other.offer("status", b"something else")
    try:
        with socket.create_server(("127.0.0.1", 0)) as silent:
            for address in (other.address, f"127.0.0.1:{silent.getsockname()[1]}"):
                with pytest.raises(QSyncError, match=f"no lighthouse answers at {address}"):
                    Rendezvous(address, 0.3)
    finally:
        other.close()


def test_memberships_count_classes_and_know_the_slowest_card():
    cards = [card("infer-1", slowdown=1.5), card("train-0"), card("infer-2")]
    membership = membership_of(cards)
    assert membership == (("infer", 2, 1.5), ("train", 1, 1.0))
    assert shown(membership) == "2 infer (1.5 x slower), 1 train"
    assert next_memberships(membership) == [
        (("infer", 1, 1.5), ("train", 1, 1.0)), (("infer", 2, 1.5),),
        (("infer", 3, 1.5), ("train", 1, 1.0)), (("infer", 2, 1.5), ("train", 2, 1.0)),
    ]  # fmt: skip
    assert next_memberships((("train", 1, 1.0),)) == [(("train", 2, 1.0),)]
