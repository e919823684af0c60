"""Meet the other cards of a job at its lighthouse, before every step.

The lighthouse is torchft's. Every card sends a `Card` record with its request for a quorum, and receives the
records of all. Each card derives the same decisions from them: who is in the step, who heals from whom, and
who trains on which samples.
"""

from __future__ import annotations

import atexit
import json
import logging
import socket
import threading
import time
import uuid
from collections.abc import Callable, Sequence
from concurrent.futures import Future, wait
from dataclasses import asdict
from datetime import timedelta
from importlib import import_module
from typing import Any, TypeVar

from qsync.elastic_training.healing import fetch
from qsync.elastic_training.job_token import FILE_VARIABLE, TOKEN_VARIABLE, JobToken, token_of_environment
from qsync.elastic_training.meeting import Card, Meeting, meeting_of
from qsync.errors import FormatError, MismatchError, QSyncError, UnsupportedError, installing, shortened
from qsync.records.record_json import as_record

logger = logging.getLogger("qsync")

_Found = TypeVar("_Found")

LIGHTHOUSE_VARIABLE = "QSYNC_LIGHTHOUSE"
HEARTBEAT_S = 0.25
_RETRY_S = 0.2
_MOST_WARNINGS = 8  # warnings about cards without a proof: anybody can send any number
_USUAL_TIMEOUTS = 2  # timeouts of one meeting that are still normal


def coordination() -> Any:
    """Return torchft's coordination module. Raises UnsupportedError if torchft is missing."""
    try:
        return import_module("torchft.coordination")
    except ImportError as error:
        raise UnsupportedError(
            f"elastic jobs need torchft's lighthouse, which is not installed ({error}); run "
            + installing("elastic")
        ) from error


def ask_to_leave(name: str, address: str) -> list[str]:
    """Ask a card to leave after its current step; return the names of the others.

    Raises FormatError if no such card is in the job.
    """
    rendezvous = Rendezvous(address, 10.0, token_of_environment())
    asking = Card(f"release-{uuid.uuid4()}", "", time.time(), {}, release=(name,))
    names: list[str] = []
    rendezvous.begin(asking.name)  # heartbeats keep this client registered during a long meeting
    try:
        for _ in range(2):  # the first meeting may contain only the asking client
            cards = rendezvous.cards(asking)
            names = sorted(card.name for card in cards if card.facts)
            if name in names:
                return [one for one in names if one != name]
    finally:
        rendezvous.leave()
    raise FormatError(
        f"there is no card {shortened(name)} in the job at {rendezvous.address}"
        + (f"; it has {shortened(', '.join(names), 200, quote=False)}" if names else ", which has no cards")
    )


class Rendezvous:
    """A card's connection to the lighthouse: heartbeats from a thread, and one meeting per step.

    Messages carry a proof of the job's token; messages without one are ignored. Raises QSyncError if no
    lighthouse answers at the address.
    """

    def __init__(self, address: str, timeout_s: float, token: JobToken | None = None) -> None:
        self.address = checked_address(address)
        self._timeout = timedelta(seconds=timeout_s)
        self._number = uuid.uuid4().hex  # makes two cards of one name distinct at the lighthouse
        self._token = token or JobToken()
        self._stamp_ns = 0  # time stamps of the last message of this card, and of all others
        self._stamps: dict[str, int] = {}
        self._passed_over: set[str] = set()
        coordination()  # may be missing
        try:
            # torchft would connect to any listener, and wait forever for a silent one.
            if b"quorum" not in fetch(self.address, "status", timeout_s):
                raise QSyncError("the answer is not a lighthouse's")
            self._client = self._connect()
        except Exception as error:
            raise QSyncError(
                f"no lighthouse answers at {self.address}; start one with `qsync lighthouse`, or correct "
                "its address"
            ) from error
        self._left = threading.Event()
        self._heartbeats: Future[None] | None = None
        self._meeting: Future[Meeting | None] | None = None  # the last meeting begun in the background

    def _connect(self) -> Any:
        return coordination().LighthouseClient(f"http://{self.address}", self._timeout)

    def own_host(self) -> str:
        """Return this machine's address as seen from the lighthouse's network."""
        host, _, port = self.address.rpartition(":")
        with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
            probe.connect((host, int(port)))
            found: str = probe.getsockname()[0]
        return found

    def begin(self, name: str) -> None:
        """Start a card's heartbeats."""
        self._heartbeats = in_background(lambda: self._beat(name))
        atexit.register(self._end)

    def in_background(self, meet: Callable[[], Meeting | None]) -> Future[Meeting | None]:
        """Start a meeting in a thread."""
        self._meeting = in_background(meet)
        return self._meeting

    def _end(self) -> None:
        """Join the threads that call torchft: one that returns during Python's exit would abort it."""
        self.leave()
        running: list[Future[Any]] = [one for one in (self._heartbeats, self._meeting) if one is not None]
        wait(running, 2 * self._timeout.total_seconds())  # a call may take slightly longer than the timeout

    def _beat(self, name: str) -> None:
        client = self._client
        while not self._left.wait(HEARTBEAT_S):
            try:
                client.heartbeat(f"{name}/{self._number}", self._timeout)
            except Exception:  # the lighthouse is gone; `meet` reports it
                if not self._left.wait(_RETRY_S):
                    client = self._reconnected(client)

    def _reconnected(self, client: Any) -> Any:
        try:
            return self._connect()
        except Exception:
            return client

    def meet(self, card: Card, may_leave: Callable[[], bool]) -> Meeting | None:
        """Wait until the cards of the job have met.

        While no lighthouse answers, the card waits, with one log line. Returns None if it may leave, or has
        left.
        """
        has_told, timeouts = False, 0
        while not self._left.is_set():
            try:
                quorum = self._quorum(card)
            except Exception as error:
                timeouts += isinstance(error, TimeoutError)
                # A lagging card costs one or two timeouts. A vanished host gives no other error.
                if not has_told and (timeouts > _USUAL_TIMEOUTS or not isinstance(error, TimeoutError)):
                    logger.warning("qsync: no lighthouse answers at %s; waiting for one", self.address)
                    has_told = True
                if may_leave() or self._left.wait(_RETRY_S):
                    return None
                self._client = self._reconnected(self._client)
            else:
                key = f"{quorum.created.seconds}.{quorum.created.nanos}"
                cards, strangers = self._read(quorum)
                self._pass_over(strangers, cards, card)
                return meeting_of(key, cards, card)
        return None

    def cards(self, asking: Card) -> list[Card]:
        """Return the cards of one meeting. Raises QSyncError if none takes place within the timeout.

        Raises MismatchError if all other cards have another token.
        """
        try:
            cards, strangers = self._read(self._quorum(asking))
        except Exception as error:
            raise QSyncError(
                f"no meeting took place at {self.address} ({shortened(str(error), 80, quote=False)}); check "
                "that a job is running there"
            ) from error
        if strangers and not any(card.facts for card in cards):
            raise MismatchError(self._unproven())
        return cards

    def _quorum(self, card: Card) -> Any:
        own = f"{card.name}/{self._number}"
        # A replayed message of an eavesdropper is older than the last one.
        self._stamp_ns = max(time.time_ns(), self._stamp_ns + 1)
        text = json.dumps({**asdict(card), "from": own, "stamp": self._stamp_ns})
        data: dict[Any, object] = {"card": text, "proof": self._token.proof("card", text.encode())}
        return self._client.quorum(replica_id=own, timeout=self._timeout, step=card.step, data=data)

    def _read(self, quorum: Any) -> tuple[list[Card], list[Card]]:
        """Return a quorum's cards, and those without a proof; other members are left out."""
        cards: list[Card] = []
        strangers: list[Card] = []
        for member in quorum.participants:
            try:
                text, proof = member.data["card"], member.data["proof"]
                content = json.loads(text)
                sender, stamp = content.pop("from"), int(content.pop("stamp"))
                card = as_record(content, Card, "card")
            except (AttributeError, FormatError, KeyError, TypeError, ValueError):
                continue
            is_new = sender == member.replica_id and stamp > self._stamps.get(sender, 0)
            if self._token.proves(proof, "card", text.encode()) and (is_new or not self._token):
                self._stamps[sender] = stamp
                cards.append(card)
            else:
                strangers.append(card)
        return cards, strangers

    def _pass_over(self, strangers: Sequence[Card], cards: Sequence[Card], own: Card) -> None:
        """Warn about cards without a proof; raise MismatchError if no other card has this one's token."""
        is_alone = not any(card.facts and card.store != own.store for card in cards)
        older = [card for card in strangers if card.has_trained or card.started_s <= own.started_s]
        if is_alone and not own.has_trained and any(card.facts for card in older):
            raise MismatchError(self._unproven())
        for name in {str(card.name) for card in strangers} - self._passed_over:
            if len(self._passed_over) < _MOST_WARNINGS:
                self._passed_over.add(name)
                logger.warning(
                    "qsync: card %s is ignored, because its token differs from this job's; set the same "
                    "token on every card", shortened(name),
                )  # fmt: skip

    def _unproven(self) -> str:
        return (
            f"the cards at {self.address} do not prove that they have this token, or have one while none is "
            f"set here; set {TOKEN_VARIABLE} or {FILE_VARIABLE} to the job's, or unset both if it has none"
        )

    def leave(self) -> None:
        """End heartbeats and connection: the next meeting is without this card."""
        self._left.set()
        if self._meeting is None or self._meeting.done():
            self._client = None


def in_background(run: Callable[[], _Found]) -> Future[_Found]:
    """Run a function in a daemon thread, since it may wait for a lighthouse forever."""
    future: Future[_Found] = Future()

    def work() -> None:
        try:
            future.set_result(run())
        except BaseException as error:
            future.set_exception(error)

    threading.Thread(target=work, name="qsync-meeting", daemon=True).start()
    return future


def checked_address(text: object) -> str:
    """Return an address HOST:PORT. Raises FormatError for anything else, including IPv6."""
    address = text.removeprefix("http://") if isinstance(text, str) else ""
    host, colon, port = address.rpartition(":")
    if not (host and colon and port.isascii() and port.isdigit() and 0 < int(port) < 65536):
        raise FormatError(
            f"a lighthouse's address must be HOST:PORT, found {shortened(text)}; give e.g. 10.0.0.1:29510"
        )
    if ":" in host:
        raise FormatError(
            f"cards meet over IPv4; give the lighthouse's name or IPv4 address, found {shortened(text)}"
        )
    return address
