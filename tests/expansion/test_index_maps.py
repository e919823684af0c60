"""Index maps of single spaces: the source of every coordinate, and what cannot grow."""

from __future__ import annotations

import pytest
import torch
from expanding import made

import qsync
from qsync.errors import UnsupportedError
from qsync.expansion.maps.describe import as_json
from qsync.expansion.maps.space_growth import (
    AVERAGE,
    ZERO,
    attention,
    circular,
    padded,
    paired,
    product,
    stacked,
)
from qsync.expansion.maps.tensor_maps import TensorMap, shares_of
from qsync.expansion.recipe.sizes import Heads
from qsync.experiments.workloads.gpt import Gpt


@pytest.mark.parametrize(
    ("growth", "index"),
    [
        (circular(3, 5), [0, 1, 2, 0, 1]),
        (padded(3, 7, ZERO), [0, 1, 2, 0, 1, 2, -1]),
        (padded(3, 8, AVERAGE), [0, 1, 2, 0, 1, 2, -1, -1]),
        (paired(3, 5), [0, 1, 0, 1, 0]),
        (paired(3, 6), [0, 1, 2, 0, 1, 2]),
        (paired(3, 1), [0]),
        (product([circular(1, 2), circular(2, 3)]), [0, 1, 0, 0, 1, 0]),
        (stacked([circular(2, 3), padded(1, 2, ZERO)]), [0, 1, 0, 2, 2]),
        (circular(2, 3).by_unit(2), [0, 1, 2, 3, 0, 1]),
        (padded(2, 3, ZERO).by_unit(2), [0, 1, 2, 3, -1, -1]),
    ],
)
def test_the_source_of_every_coordinate(growth, index):
    assert growth.index.tolist() == index
    assert growth.num_large == len(index)
    counts = [index.count(source) if source >= 0 else 0 for source in index]
    assert growth.num_copies.tolist() == counts


def test_units_and_stacks_count_the_coordinates_of_the_small_space():
    assert circular(2, 3).by_unit(2).num_small == 4
    assert stacked([circular(2, 3), circular(1, 2)]).num_small == 3
    wider = attention(Heads(1, 1, 2), Heads(1, 1, 3))["query"]
    assert torch.equal(wider.by_unit(2).scale, wider.scale.repeat_interleave(2))
    assert torch.equal(stacked([wider, circular(1, 2)]).scale[3:], torch.ones(2, dtype=torch.float64))
    assert product([circular(1, 2), circular(2, 3)]).num_small == 2


def test_growth_to_the_same_size_is_the_identity_if_nothing_moves():
    assert circular(3, 3).is_identity and padded(3, 3, ZERO).is_identity
    assert not paired(4, 4).is_identity and not circular(3, 6).is_identity


def test_scalar_shares_are_a_quarter_to_three_quarters_of_two_copies():
    """Before they are divided by their sum, shares are uniform in [0.5, 1.5)."""
    growth = circular(200, 400)
    shares = shares_of(growth, "scalar", 0, "stream")
    assert torch.allclose(shares[:200] + shares[200:], torch.ones(200, dtype=torch.float64))
    assert 0.25 < shares.min() < 0.3 and 0.7 < shares.max() < 0.75
    assert torch.equal(shares, shares_of(growth, "scalar", 0, "stream"))
    assert not torch.equal(shares, shares_of(growth, "scalar", 1, "stream"))
    assert torch.equal(shares_of(growth, "random", 0, "stream"), torch.full_like(shares, 0.5))


def test_a_rest_of_means_is_neither_read_in_units_nor_stacked():
    mean = padded(3, 7, AVERAGE)
    assert mean.by_unit(1) is mean and stacked([mean]) is mean
    with pytest.raises(UnsupportedError, match="filled up with means is read 2 times"):
        mean.by_unit(2)
    with pytest.raises(UnsupportedError, match="filled up with means shares an axis"):
        stacked([mean, circular(2, 3)])
    whole = padded(3, 6, AVERAGE)  # a multiple has no rest
    assert whole.by_unit(2).num_large == 12
    assert stacked([whole, circular(2, 3)]).num_large == 9


@pytest.mark.parametrize(
    ("small", "large", "pairs", "query", "key"),
    [
        (Heads(2, 1, 1), Heads(4, 2, 1), False, [0, 1, 0, 1], [0, 0]),
        (Heads(4, 1, 1), Heads(4, 2, 1), False, [0, 1, 2, 3], [0, 0]),  # two copies share out four heads
        (Heads(6, 2, 1), Heads(8, 4, 1), False, [0, 1, 3, 4, 2, 0, 5, 3], [0, 1, 0, 1]),
        (Heads(2, 2, 2), Heads(3, 3, 2), False, [0, 1, 2, 3, 0, 1], [0, 1, 2, 3, 0, 1]),
        (Heads(2, 2, 1), Heads(3, 3, 1), True, [0, 0, 0], [0, 0, 0]),
        (Heads(3, 1, 1), Heads(5, 1, 1), True, [0, 1, 0, 1, 0], [0]),
    ],
)
def test_the_source_of_every_head(small, large, pairs, query, key):
    found = attention(small, large, pairs)
    assert found["query"].index.tolist() == found["mixed"].index.tolist() == query
    assert found["key"].index.tolist() == found["value"].index.tolist() == key
    assert all(growth.scale is None for growth in found.values())


def test_wider_heads_scale_queries_and_keys_alone():
    found = attention(Heads(2, 1, 2), Heads(2, 1, 3))
    assert found["value"].scale is None and found["mixed"].scale is None
    products = 1.5**0.5 / torch.tensor([2.0, 1.0, 2.0], dtype=torch.float64)  # by the number of copies
    assert torch.allclose(found["query"].scale.square(), products.repeat(2))
    assert torch.allclose(found["key"].scale.square(), products)


def test_heads_without_a_copy_are_rejected():
    with pytest.raises(UnsupportedError, match="4 heads with 4 per key/value head do not fit"):
        attention(Heads(4, 1, 1), Heads(3, 3, 1))


def test_a_plan_describes_every_tensor():
    small, _ = made("Gpt")
    plan = qsync.plan_expansion(small, Gpt.recipe.to(width=80, layers=3))
    described = as_json(plan)["tensors"]
    assert described["tokens.weight"]["how"] == "stream 32 copied to 64 + 16 average"
    assert described["blocks.0.norm1.weight"]["how"].startswith("normed 32 copied to 64 + 16 free; times 0.8")
    assert described["head.weight"]["how"] == "final 32 split over 64 + 16"
    new = [name for name, m in plan.tensors.items() if m.is_new]
    assert new and all(described[name]["how"].partition(", 0")[0].endswith("new") for name in new)
    assert not any("new" in entry["how"] for name, entry in described.items() if name not in new)
    rows = str(plan).splitlines()
    assert any(row.startswith("2 x blocks.*.norm1.weight ") for row in rows)
    assert any(row.startswith("tokens.weight ") for row in rows)


@pytest.mark.parametrize("factor", [0.5, 1.0, 2.0])
def test_the_factor_multiplies_every_element(factor):
    plain = TensorMap("weight", "weight", (3,), (None,), factor=factor)
    assert torch.equal(plain.grown(torch.arange(3.0), 0), factor * torch.arange(3.0))
    assert plain.is_identity == (factor == 1.0)
