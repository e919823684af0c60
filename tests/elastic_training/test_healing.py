"""The state of a card on its way to another: bytes, and a server."""

from __future__ import annotations

import threading
import urllib.request

import pytest
import torch

from qsync import QSyncError
from qsync.elastic_training.healing import Server, decode, encode, fetch


def test_a_state_arrives_as_it_was():
    model = torch.nn.Sequential(torch.nn.Linear(3, 4), torch.nn.BatchNorm1d(4))
    optimizer = torch.optim.AdamW(model.parameters())
    model(torch.randn(5, 3)).sum().backward()
    optimizer.step()
    state = {
        "model": model.state_dict(),
        "optimizer": optimizer.state_dict(),
        "more": [(1, None), True, "x", 0.1],
    }
    found = decode(encode(state))
    assert found["more"] == state["more"]
    assert found["optimizer"]["param_groups"] == state["optimizer"]["param_groups"]
    for name, tensor in state["model"].items():
        assert torch.equal(found["model"][name], tensor) and found["model"][name].dtype == tensor.dtype
    for number, entry in state["optimizer"]["state"].items():
        assert all(torch.equal(found["optimizer"]["state"][number][name], one) for name, one in entry.items())


def test_later_changes_do_not_show_and_shared_memory_is_sent():
    weight = torch.ones(3)
    alike = {"0": torch.zeros(1), 0: torch.ones(1)}
    content = encode({"a": weight, "b": weight, "c": weight[1:], "empty": torch.zeros(0, 2), "alike": alike})
    weight.zero_()
    found = decode(content)
    assert (
        found["a"].tolist() == [1, 1, 1] and found["c"].tolist() == [1, 1] and found["empty"].shape == (0, 2)
    )
    assert found["alike"] == alike


def test_what_only_a_pickle_could_carry_is_refused():
    with pytest.raises(
        QSyncError, match="the state seen is a set, which can neither be saved nor sent to another card"
    ):
        encode({"seen": {1, 2}})


def test_cards_reach_each_other_past_the_proxy_of_the_environment(monkeypatch):
    monkeypatch.setenv("http_proxy", "http://127.0.0.1:9")
    monkeypatch.setattr(urllib.request, "_opener", None)  # what earlier requests made of the environment
    server = Server("127.0.0.1", timeout_s=5.0)
    try:
        server.offer("state/1", b"one")
        assert fetch(server.address, "state/1", 5.0) == b"one"
    finally:
        server.close()


def test_a_request_waits_for_its_content_and_gives_up():
    server = Server("127.0.0.1", timeout_s=5.0)
    try:
        threading.Timer(0.2, lambda: server.offer("state/1", b"one")).start()
        assert fetch(server.address, "state/1", 5.0) == b"one"
        server.offer("state/2", lambda: b"two", instead_of="state/")
        assert fetch(server.address, "state/2", 5.0) == b"two"
        with pytest.raises(QSyncError, match="did not send state/1"):
            fetch(server.address, "state/1", 0.3)
        server.withdraw("begin/", "state/")
        with pytest.raises(QSyncError, match="did not send state/2"):
            fetch(server.address, "state/2", 0.3)
    finally:
        server.close()
    with pytest.raises(QSyncError, match=f"the card at {server.address} did not send"):
        fetch(server.address, "state/2", 0.5)
