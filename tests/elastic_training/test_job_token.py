"""Cards of one token train together; whoever lacks it reads nothing, and asks nobody to leave."""

from __future__ import annotations

import http.client
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any

import pytest
from lighthouses import lighthouse

from qsync.elastic_training import healing
from qsync.elastic_training.healing import Server, fetch
from qsync.elastic_training.job_token import JobToken, token_of_environment
from qsync.elastic_training.meeting import Card, Meeting
from qsync.elastic_training.rendezvous import Rendezvous, ask_to_leave
from qsync.errors import FormatError, MismatchError, QSyncError

OURS, THEIRS = JobToken("0123456789abcdef"), JobToken("fedcba9876543210")


@pytest.fixture(autouse=True)
def _no_token(monkeypatch):
    for name in ("QSYNC_TOKEN", "QSYNC_TOKEN_FILE"):
        monkeypatch.delenv(name, raising=False)


def test_the_token_is_found_in_a_variable_or_a_file_and_never_shown(monkeypatch, tmp_path):
    assert not token_of_environment()
    monkeypatch.setenv("QSYNC_TOKEN", "0123456789abcdef")
    found = token_of_environment()
    monkeypatch.delenv("QSYNC_TOKEN")
    (tmp_path / "token").write_text("0123456789abcdef\n")
    monkeypatch.setenv("QSYNC_TOKEN_FILE", str(tmp_path / "token"))
    assert token_of_environment().proof("x", b"y") == found.proof("x", b"y") != ""
    assert "0123" not in repr(found)


@pytest.mark.parametrize(("text", "file", "words"), [
    ("", None, "the token in QSYNC_TOKEN has 0 characters; give at least 16"),
    ("  short  ", None, "the token in QSYNC_TOKEN has 5 characters"),
    ("0123456789abcdef", "/x", "QSYNC_TOKEN and QSYNC_TOKEN_FILE are both set; unset one of them"),
    (None, "/no/such", r"the file '/no/such' of QSYNC_TOKEN_FILE cannot be read \(No such file"),
    (None, "/dev/null", "the token in the file '/dev/null' of QSYNC_TOKEN_FILE has 0 characters"),
])  # fmt: skip
def test_a_token_that_is_none_is_refused(monkeypatch, text, file, words):
    for name, value in (("QSYNC_TOKEN", text), ("QSYNC_TOKEN_FILE", file)):
        if value is not None:
            monkeypatch.setenv(name, value)
    with pytest.raises(FormatError, match=words):
        token_of_environment()


def test_a_proof_is_of_one_purpose_and_of_each_part():
    proof = OURS.proof("card", b"ab", b"c")
    assert OURS.proves(proof, "card", b"ab", b"c")
    assert not OURS.proves(proof, "card", b"a", b"bc") and not OURS.proves(proof, "answer", b"ab", b"c")
    for other in (THEIRS.proof("card", b"ab", b"c"), "", None, 5, "\u00e9"):
        assert not OURS.proves(other, "card", b"ab", b"c")
    assert JobToken().proves("", "card", b"ab") and not JobToken().proves(proof, "card", b"ab", b"c")


def test_a_card_serves_and_believes_only_its_own_job():
    servers = {token: Server("127.0.0.1", 5.0, token) for token in (OURS, JobToken())}
    try:
        for token, server in servers.items():
            server.offer("state", b"weights")
            assert fetch(server.address, "state", 5.0, token) == b"weights"
        for token in (THEIRS, None):
            with pytest.raises(QSyncError, match="did not send state .*403"):
                fetch(servers[OURS].address, "state", 5.0, token)
        open_server = next(server for token, server in servers.items() if not token)
        with pytest.raises(QSyncError, match="403|does not prove that it has the job's token"):
            fetch(open_server.address, "state", 5.0, OURS)
    finally:
        for server in servers.values():
            server.close()


def test_a_request_that_was_overheard_is_good_for_nothing():
    server, other = Server("127.0.0.1", 5.0, OURS), Server("127.0.0.1", 5.0, OURS)
    for each in (server, other):
        each.offer("state", b"weights")
    parts = (b"once", server.address.encode(), b"state")
    headers = {healing._NONCE: "once", healing._PROOF: OURS.proof("request", *parts)}

    def status(address: str, name: str) -> int:
        connection = http.client.HTTPConnection(address, timeout=5.0)
        connection.request("GET", f"/{name}", headers=headers)
        try:
            return connection.getresponse().status
        finally:
            connection.close()

    try:
        assert status(other.address, "state") == 403 and status(server.address, "class") == 403
        assert status(server.address, "state") == 200
        assert status(server.address, "state") == 403
    finally:
        server.close()
        other.close()


def card(name: str, started_s: float, **fields: Any) -> Card:
    """Return a card of a job of eight samples a step."""
    return Card(name, "cls", started_s, {"batch_size": "8"}, store=f"{name}:1", **fields)


@contextmanager
def training(address: str, *cards: Card) -> Iterator[list[list[Meeting]]]:
    """Let these cards meet again and again; yield the meetings of each so far."""
    found: list[list[Meeting]] = [[] for _ in cards]
    all_rendezvous = [Rendezvous(address, 5.0, OURS) for _ in cards]

    def meets(own: Card, rendezvous: Rendezvous, meetings: list[Meeting]) -> None:
        rendezvous.begin(own.name)
        while (meeting := rendezvous.meet(own, lambda: False)) is not None:
            meetings.append(meeting)

    with ThreadPoolExecutor(len(cards)) as pool:
        running = list(map(pool.submit, [meets] * len(cards), cards, all_rendezvous, found))
        try:
            yield found
        finally:
            for rendezvous in all_rendezvous:
                rendezvous.leave()
    for one in running:
        one.result()


def wait_until(condition: Callable[[], bool]) -> None:
    until = time.monotonic() + 90.0
    while not condition():
        assert time.monotonic() < until
        time.sleep(0.05)


@pytest.mark.parametrize(("token", "text"), [(THEIRS, "fedcba9876543210"), (JobToken(), None)])
def test_cards_of_one_token_meet_and_pass_others_over(token, text, monkeypatch, caplog):
    a, b = card("a", 1.0, has_trained=True, step=1), card("b", 2.0)
    with lighthouse() as address, training(address, a, b) as found:
        wait_until(lambda: all(each and len(each[-1].cards) == 2 for each in found))
        # Another token, or none, is younger than the job: it is that card which is refused.
        refused, own = Rendezvous(address, 5.0, token), card("c", 3.0)
        refused.begin("c")
        with pytest.raises(MismatchError, match="do not prove that they have this token.*set QSYNC_TOKEN"):
            while True:
                refused.meet(own, lambda: False)
        refused.leave()
        wait_until(lambda: "card 'c' is ignored, because its token differs" in caplog.text)
        # So it is with who asks a card to leave.
        if text is not None:
            monkeypatch.setenv("QSYNC_TOKEN", text)
        with pytest.raises(MismatchError, match="do not prove"):
            ask_to_leave("b", address)
        assert not any(meeting.has("c") or meeting.released for each in found for meeting in each)
        monkeypatch.setenv("QSYNC_TOKEN", "0123456789abcdef")
        assert ask_to_leave("b", address) == ["a"]
        wait_until(lambda: all(any("b" in meeting.released for meeting in each) for each in found))
    assert "0123456789abcdef" not in caplog.text


def test_what_a_card_sent_before_counts_once_and_from_nobody_else():
    with lighthouse() as address:
        sender, hearer = (Rendezvous(address, 5.0, OURS) for _ in range(2))
        sender._client = SimpleNamespace(quorum=lambda **sent: SimpleNamespace(**sent))
        first, second = (sender._quorum(card("a", 1.0)) for _ in range(2))
        forged = SimpleNamespace(replica_id="b/1", data=second.data)
        changed = SimpleNamespace(
            replica_id=second.replica_id,
            data={**second.data, "card": second.data["card"].replace("cls", "x")},
        )
        other = SimpleNamespace(replica_id="torchft", data={"step": 1})

        def counts(*participants: Any) -> tuple[int, int]:
            cards, strangers = hearer._read(SimpleNamespace(participants=participants))
            return len(cards), len(strangers)

        assert counts(first, other) == (1, 0)
        assert counts(first) == (0, 1)
        assert counts(forged, changed) == (0, 2)
        assert counts(second) == (1, 0)
        assert counts(first) == (0, 1)
