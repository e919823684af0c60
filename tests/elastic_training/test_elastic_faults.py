"""What the cards of an elastic job refuse, and who must not suffer from it."""

from __future__ import annotations

import http.client
import os
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path
from typing import Any

import pytest
import torch

from qsync.elastic_training.elastic_ddp import ElasticHook
from qsync.elastic_training.healing import fetch
from qsync.elastic_training.meeting import Card, meeting_of
from qsync.elastic_training.rendezvous import Rendezvous, checked_address
from qsync.errors import FormatError, MismatchError, QSyncError
from qsync.experiments.elastic.cluster import GO, STOP, Cards


def card(name: str, started_s: float, seed: str = "0", **fields: Any) -> Card:
    """Return a card of a job of two samples a step."""
    fields = {"store": f"{name}{started_s}", **fields}
    return Card(name, "cls", started_s, {"seed": seed, "batch_size": "2"}, **fields)


def test_a_newcomer_of_another_job_with_more_steps_is_the_one_refused() -> None:
    old = card("old", 2.0, step=10, has_trained=True)
    new = card("new", 1.0, seed="1", step=1000)
    assert meeting_of("k", [old, new], old).cards == (old,)
    with pytest.raises(MismatchError, match="has 0 as seed, and this card has 1"):
        meeting_of("k", [old, new], new)


def test_a_card_whose_scheduler_is_elsewhere_is_refused_and_the_job_goes_on() -> None:
    old = card("old", 1.0, history="h", has_trained=True, learning_rates=(0.1,))
    new = card("new", 2.0, history="h", has_trained=True, learning_rates=(0.2,))
    assert meeting_of("k", [old, new], old).cards == (new, old)
    with pytest.raises(MismatchError, match="is 0.1, but this card's is 0.2; pass the scheduler"):
        meeting_of("k", [old, new], new)


def test_the_second_card_of_a_name_is_refused() -> None:
    old, new = card("one", 1.0, has_trained=True), card("one", 2.0)
    assert meeting_of("k", [new, old], old).cards == (old,)
    with pytest.raises(FormatError, match="the job already has a card 'one'"):
        meeting_of("k", [old, new], new)


def test_the_card_beyond_the_samples_of_a_batch_is_refused() -> None:
    cards = [card("c", 3.0), card("b", 2.0, has_trained=True), card("a", 1.0, has_trained=True)]
    assert meeting_of("k", cards, cards[1]).cards == (cards[2], cards[1])
    with pytest.raises(FormatError, match="3 cards cannot share 2 samples"):
        meeting_of("k", cards, cards[0])


@pytest.mark.parametrize("text", ["127.0.0.1:\u00b2", "host", ":1", "h:0", "h:70000", 29510, None])
def test_an_address_is_host_and_port(text: object) -> None:
    with pytest.raises(FormatError, match="HOST:PORT"):
        checked_address(text)


def test_a_source_that_dies_while_it_sends_is_a_failed_exchange() -> None:
    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            self.send_response(200)
            self.send_header("Content-Length", "100")
            self.end_headers()
            self.wfile.write(b"half")

        def log_message(self, *_: Any) -> None:
            """Say nothing."""

    with HTTPServer(("127.0.0.1", 0), Handler) as server:
        threading.Thread(target=server.handle_request, daemon=True).start()
        with pytest.raises(QSyncError, match="did not send state") as caught:
            fetch(f"127.0.0.1:{server.server_address[1]}", "state", 5.0)
    assert isinstance(caught.value.__cause__, http.client.IncompleteRead)


def test_counted_tokens_weigh_every_bucket_where_cards_have_equally_many_samples(
    two_cards_that_sum: Callable[[torch.Tensor], torch.futures.Future[list[torch.Tensor]]],
) -> None:
    class Sums:
        all_reduce = staticmethod(lambda sent, group: two_cards_that_sum(sent))

    hook = ElasticHook(Sums())  # type: ignore[arg-type]
    hook.num_equal = 2
    hook.count(torch.tensor(3.0))
    buckets = [hook.reduce(torch.full((2,), 6.0), is_first).wait() for is_first in (True, False)]
    assert [bucket.tolist() for bucket in buckets] == [[2.0, 2.0], [2.0, 2.0]]


def test_a_lighthouse_that_falls_silent_is_waited_for(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with Cards(tmp_path, timeout_s=0.2) as cards, ThreadPoolExecutor(1) as pool:
        rendezvous, own = Rendezvous(cards.address, 0.2), card("a", 1.0)
        assert cards.lighthouse is not None
        cards.lighthouse.send_signal(STOP)
        os.waitpid(cards.lighthouse.pid, os.WUNTRACED)  # a busy machine stops it later than it is told to
        met = pool.submit(rendezvous.meet, own, lambda: False)
        while "no lighthouse answers" not in caplog.text:
            assert not met.done()
            time.sleep(0.02)
        cards.lighthouse.send_signal(GO)
        assert met.result(60.0).cards == (own,)
    assert caplog.text.count("no lighthouse answers") == 1


@pytest.fixture
def two_cards_that_sum() -> Callable[[torch.Tensor], torch.futures.Future[list[torch.Tensor]]]:
    """Return an all-reduce between two cards that send the same."""

    def all_reduce(sent: torch.Tensor) -> torch.futures.Future[list[torch.Tensor]]:
        done: torch.futures.Future[list[torch.Tensor]] = torch.futures.Future()
        done.set_result([sent * 2])
        return done

    return all_reduce
