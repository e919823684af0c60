"""The plans of an elastic job by membership: every card gets those of the first."""

from __future__ import annotations

import threading
import time
from dataclasses import replace

import pytest
from graphs import cluster_of, mlp, profile_of, sensitivity_of

from qsync.allocator import allocate
from qsync.elastic_training import plan_book
from qsync.elastic_training.healing import Server
from qsync.elastic_training.meeting import Card
from qsync.elastic_training.plan_book import CardCosts, PlanBook, membership_of
from qsync.errors import QSyncError
from qsync.records.cluster import Link

GRAPH, ONE = mlp(), cluster_of({"cpu": 1})
COSTS = CardCosts(ONE.classes[0], GRAPH, profile_of(GRAPH, "cpu"), sensitivity_of(GRAPH))


def test_a_plan_that_was_begun_before_the_link_was_measured_is_made_again(monkeypatch):
    server = Server("127.0.0.1", 10.0)
    book, card = PlanBook(COSTS, server, {}), Card("first", "cpu", 0.0, {}, server=server.address)
    begun, measured = threading.Event(), threading.Event()

    def planned(membership):
        link = book.link
        begun.set()
        measured.wait(30)
        return f"planned with {link.bytes_per_s:g}"

    monkeypatch.setattr(book, "_planned", planned)
    book.attend([card], "first")
    assert begun.wait(30)
    book.note_link(Link(1e-4, 1e8))
    measured.set()
    end = time.monotonic() + 30
    while membership_of([card]) not in book._plans and time.monotonic() < end:
        time.sleep(0.01)
    book.close()
    server.close()
    assert set(book._plans.values()) == {"planned with 1e+08"}


@pytest.mark.parametrize("error", [QSyncError("a card did not answer"), TypeError("no JSON")])
def test_planning_that_failed_is_tried_again(monkeypatch, error):
    monkeypatch.setattr(plan_book, "_RETRY_S", 0.01)
    server = Server("127.0.0.1", 10.0)
    book, card = PlanBook(COSTS, server, {}), Card("first", "cpu", 0.0, {}, server=server.address)
    errors = [error]

    def planned(membership):
        if errors:
            raise errors.pop()
        return "planned"

    monkeypatch.setattr(book, "_planned", planned)
    end = time.monotonic() + 30
    while membership_of([card]) not in book._plans and time.monotonic() < end:
        book.attend([card], "first")
        time.sleep(0.01)
    book.close()
    server.close()
    assert not errors and book._plans[membership_of([card])] == "planned"


def test_a_card_with_as_many_plans_as_the_first_copies_the_one_that_it_lacks():
    plan = allocate(GRAPH, {"cpu": COSTS.profile}, COSTS.sensitivity, ONE)
    servers = [Server("127.0.0.1", 10.0) for _ in range(2)]
    leader, other = (PlanBook(COSTS, server, {}) for server in servers)
    cards = [
        Card(name, "cpu", 0.0, {}, server=s.address)
        for name, s in zip(("first", "other"), servers, strict=True)
    ]
    both = membership_of(cards)
    other._plans[membership_of(cards[:1])] = plan
    other.attend(cards, "other")  # copies nothing: the first card has no plan yet
    time.sleep(0.3)
    assert other.find(both) is None and len(other) == 1
    leader._plans[both] = plan
    end = time.monotonic() + 30
    while other.find(both) is None and time.monotonic() < end:
        other.attend([replace(cards[0], book=len(leader)), cards[1]], "other")
        time.sleep(0.01)
    assert other.find(both) is not None
    for each in (leader, other, *servers):
        each.close()
