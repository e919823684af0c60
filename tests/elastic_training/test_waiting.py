"""A card says whom it waits for, and ends; a card that has left keeps no sockets."""

from __future__ import annotations

import gc
import socket
import weakref

import pytest
import torch
from lighthouses import lighthouse

import qsync
from qsync.elastic_training.waiting import Waiting
from qsync.errors import QSyncError


def started(address, **options):
    model = torch.nn.Linear(4, 4)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    job = qsync.elastic(
        model, optimizer, [torch.ones(4)] * 32, batch_size=4, plan=False, lighthouse=address, **options
    )
    return job, optimizer


def test_what_is_waited_for_is_said_every_ten_seconds_up_to_a_bound(caplog):
    now_s = [0.0]
    waiting = Waiting("a", 25.0, lambda: now_s[0])
    for now_s[0] in (0.0, 5.0, 10.0, 15.0, 20.0, 25.0):
        waiting.note("b", is_bounded=True)
    assert [record.getMessage() for record in caplog.records] == [
        "qsync: a waits for b", "qsync: a has waited 10 s for b", "qsync: a has waited 20 s for b",
    ]  # fmt: skip
    now_s[0] = 26.0
    with pytest.raises(QSyncError, match="a has waited 26 s for b; look at the output of the missing"):
        waiting.note("b", is_bounded=True)
    waiting.note("c", is_bounded=True)  # what changes begins anew
    now_s[0] = 1e6
    waiting.note("d", is_bounded=False)
    now_s[0] = 2e6
    waiting.note("d", is_bounded=False)
    assert caplog.text.count("waits for d") == 1 and "waited" not in caplog.records[-1].getMessage()


def test_cards_that_do_not_come_end_the_wait_for_the_first_step(caplog):
    with lighthouse() as address:
        job, _ = started(address, start_with=2, join_timeout_s=1.0, card="first")
        words = "first has waited [0-9]+ s for 1 more of the 2 cards that it starts with, beside first; look"
        with pytest.raises(QSyncError, match=words):
            next(job.steps(num_steps=1))
    assert "has no token: anyone who reaches its ports can join" in caplog.text


@pytest.mark.parametrize("seconds", [0, float("nan"), "x", True])
def test_a_bound_that_is_none_is_refused(seconds):
    with pytest.raises(QSyncError, match="join_timeout_s must be at least 0.1 seconds, found"):
        started("127.0.0.1:9", join_timeout_s=seconds)


def test_a_card_that_has_left_keeps_no_sockets(monkeypatch, caplog):
    monkeypatch.setenv("QSYNC_TOKEN", "0123456789abcdef")
    with lighthouse() as address:
        job, optimizer = started(address)
        for step in job.steps(num_steps=2):
            for batch in step:
                job.model(batch).sum().backward()
            assert step.arrived()
            optimizer.step()
            optimizer.zero_grad()
        for served in (job._own.store, job._own.server):
            host, _, port = served.rpartition(":")
            with pytest.raises(ConnectionRefusedError):
                socket.create_connection((host, int(port)))
        model = weakref.ref(job.model)
        del job, step, batch
        gc.collect()
        assert model() is None  # which holds the connections of its process group
    assert "has no token" not in caplog.text
