"""Shares of a batch, the order of samples, and the loader that follows both."""

from __future__ import annotations

import multiprocessing
from collections import Counter
from itertools import pairwise
from types import SimpleNamespace

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from qsync.distributed.shares import SampleOrder, Share, num_passes, share_out
from qsync.elastic_training.card_plan import CardPlan
from qsync.elastic_training.meeting import Card
from qsync.elastic_training.options import ElasticOptions
from qsync.elastic_training.share_loader import ShareLoader


@st.composite
def cards(draw):
    rates = draw(st.lists(st.floats(0.01, 100), min_size=1, max_size=8))
    limits = [draw(st.none() | st.integers(1, 40)) for _ in rates]
    return draw(st.integers(len(rates), 300)), rates, limits


@given(cards())
def test_shares_are_the_batch_and_fit_every_card(drawn):
    batch_size, rates, limits = drawn
    shares = share_out(batch_size, rates, limits)
    assert shares[0].start == 0 and sum(share.samples for share in shares) == batch_size
    for share, following in pairwise(shares):
        assert share.start + share.samples == following.start
    for share, limit in zip(shares, limits, strict=True):
        assert share.samples >= 1 and share.samples % share.passes == 0
        assert limit is None or share.samples // share.passes <= limit


@pytest.mark.parametrize(("rates", "samples"), [
    ([1, 1, 1, 1], [16, 16, 16, 16]), ([1, 1, 1], [22, 21, 21]), ([2, 1], [42, 22]), ([5], [64]),
    ([1000, 1], [63, 1]),
])  # fmt: skip
def test_samples_go_by_rate(rates, samples):
    assert [share.samples for share in share_out(64, rates, [None] * len(rates))] == samples


def test_a_card_whose_rate_is_not_known_takes_the_mean_of_the_others():
    assert [one.samples for one in share_out(64, [0.25, 0.25, 0.0], [None] * 3)] == [22, 21, 21]
    assert [one.samples for one in share_out(64, [0.0, 0.0], [None] * 2)] == [32, 32]


@pytest.mark.parametrize(("frozen", "optimizer_bytes"), [(0, 0), (0, 80), (9, 8)])
def test_what_a_card_holds_goes_by_what_is_trained_and_by_its_optimizer(frozen, optimizer_bytes):
    model = torch.nn.Sequential(*[torch.nn.Linear(10, 10, bias=False) for _ in range(10)])
    for layer in model[:frozen]:
        layer.requires_grad_(False)
    mega = 100  # the bytes of a quarter of a layer stand for a megabyte
    fixed = (4 * 10 + 4 * (10 - frozen) + optimizer_bytes) * mega
    card = CardPlan(
        Card("c", "train", 0.0, {}), SimpleNamespace(module=model, parameters=model.parameters), None,
        ElasticOptions(batch_size=64),
    )  # fmt: skip
    book = SimpleNamespace(
        samples=16, memory_bytes=fixed + 25 * 4 * mega, optimizer_bytes=optimizer_bytes * mega
    )
    assert card._most_samples(fixed + 16 * 4 * mega, book) == 25


def test_a_card_that_cannot_hold_its_share_takes_equal_passes_and_others_the_rest():
    shares = share_out(64, [1, 1, 1], [6, None, None])
    assert shares[0] == Share(0, 20, 4) and [share.samples for share in shares[1:]] == [22, 22]
    assert num_passes(23, 10) == 23 and num_passes(24, 10) == 3 and num_passes(7, None) == 1


@given(st.integers(1, 40), st.integers(1, 60), st.integers(0, 5))
def test_every_sample_of_an_epoch_is_in_the_stream_once(num_samples, size, seed):
    order = SampleOrder(num_samples, seed)
    stream = [index for step in range(0, 3 * num_samples, size) for index in order.indices(step, size)]
    for epoch in range(3):
        part = stream[epoch * num_samples : (epoch + 1) * num_samples]
        assert Counter(part) == Counter(range(num_samples))
    assert order.indices(1, num_samples) == stream[1 : num_samples + 1]


def test_another_seed_is_another_order():
    assert SampleOrder(50, 1).indices(0, 50) != SampleOrder(50, 2).indices(0, 50)
    assert SampleOrder(50, 1).indices(0, 50) != SampleOrder(50, 1).indices(50, 50)


class Numbers(torch.utils.data.Dataset):
    """The numbers themselves."""

    def __len__(self):
        return 100

    def __getitem__(self, index):
        return index


@pytest.mark.parametrize("num_workers", [0, 2])
def test_what_was_loaded_ahead_for_another_share_is_thrown_away(num_workers):
    options = ElasticOptions(batch_size=10, seed=3, num_workers=num_workers, collate_fn=torch.tensor)
    loader, order = ShareLoader(Numbers(), options), SampleOrder(100, 3)

    def taken(step, share):
        loader.turn(step, share)
        return [loader.next_batch().tolist() for _ in range(share.passes)]

    assert taken(0, Share(0, 4, 2)) == [order.indices(0, 2), order.indices(2, 2)]
    assert taken(1, Share(0, 4, 2)) == [order.indices(10, 2), order.indices(12, 2)]
    assert taken(1, Share(0, 4, 2)) == [order.indices(10, 2), order.indices(12, 2)]  # a step that was dropped
    assert taken(2, Share(5, 5, 1)) == [order.indices(25, 5)]
    loader.turn(3, Share(5, 4, 2))
    loader.next_batch()  # a step that failed between its passes
    assert taken(3, Share(5, 4, 2)) == [order.indices(35, 2), order.indices(37, 2)]
    assert taken(12, Share(0, 10, 1)) == [order.indices(120, 10)]
    assert len(multiprocessing.active_children()) == num_workers
    loader.close()
    assert not multiprocessing.active_children()
