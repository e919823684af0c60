"""Where each coordinate of a grown space comes from, and what that asks of whoever writes and reads it.

A space of `small` coordinates grows to `large`: k = large // small whole copies, and a rest of r = large - k
small. What stands in the rest depends on who looks at the space (LEMON, arXiv:2310.07999, section 3):

    circular  the first r coordinates once more   hidden units, heads, channels: what acts on each by itself
    average   the mean of all                     what a LayerNorm reads: the mean stays, the variance shrinks
    zero      0                                   what a norm hands on, and (ours) what an RMSNorm reads
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch

from qsync.errors import UnsupportedError
from qsync.expansion.recipe.sizes import Heads

CIRCULAR, AVERAGE, ZERO = PATTERNS = ("circular", "average", "zero")
REST = -1


@dataclass(frozen=True, slots=True, eq=False)
class Growth:
    """`index` (large,): for each coordinate the one it copies, REST where it copies none. `rest` is what
    stands there: AVERAGE or ZERO. `scale` (large,), FP64: what a copy is multiplied by as it is written;
    None: 1. `product_of` are the growths of what a coordinate is made up of, if it is: a group of heads, a
    head in it, a place in the head.
    """

    num_small: int
    index: torch.Tensor
    rest: str = ZERO
    scale: torch.Tensor | None = None
    product_of: tuple[Growth, ...] = ()

    @property
    def num_large(self) -> int:
        return len(self.index)

    @property
    def is_copy(self) -> torch.Tensor:
        """Bool (large,): whether a coordinate copies one, and is not in the rest."""
        return self.index != REST

    @property
    def num_copies(self) -> torch.Tensor:
        """Int64 (large,): how often the coordinate that is copied here is copied in all; 0 in the rest."""
        counts = torch.bincount(self.index[self.is_copy], minlength=self.num_small)
        return torch.where(self.is_copy, counts[self.index.clamp(min=0)], 0)

    @property
    def is_identity(self) -> bool:
        return self.num_large == self.num_small and bool((self.index == torch.arange(self.num_small)).all())

    def by_unit(self, unit: int) -> Growth:
        """The same growth where every coordinate stands for `unit` neighbours, as a channel does for its
        pixels.

        >>> circular(2, 3).by_unit(2).index.tolist()
        [0, 1, 2, 3, 0, 1]
        """
        if unit == 1:
            return self
        if self.rest == AVERAGE and not bool(self.is_copy.all()):
            raise UnsupportedError(
                f"a space with a rest of means is read {unit} times over, for which no lossless form is "
                "known here; grow it to a multiple"
            )
        within = torch.arange(unit).repeat(self.num_large)
        index = self.index.repeat_interleave(unit)
        scale = None if self.scale is None else self.scale.repeat_interleave(unit)
        index = torch.where(index == REST, REST, index * unit + within)
        return Growth(self.num_small * unit, index, self.rest, scale)


def circular(small: int, large: int) -> Growth:
    """Copies in turn, the last round as far as it goes.

    >>> circular(3, 5).index.tolist()
    [0, 1, 2, 0, 1]
    """
    return Growth(small, torch.arange(large) % small)


def padded(small: int, large: int, rest: str) -> Growth:
    """Whole copies, then the rest.

    >>> padded(3, 7, ZERO).index.tolist()
    [0, 1, 2, 0, 1, 2, -1]
    """
    copied = torch.arange(large) % small
    copied[large // small * small :] = REST
    return Growth(small, copied, rest)


def paired(small: int, large: int) -> Growth:
    """Copies of as many as can each have two or more: what cancels needs another that it cancels with (ours).

    >>> paired(3, 5).index.tolist()
    [0, 1, 0, 1, 0]
    """
    return Growth(small, torch.arange(large) % min(small, max(large // 2, 1)))


def attention(small: Heads, large: Heads, pairs: bool = False) -> dict[str, Growth]:
    """The growths of what attention computes with: query, key, value, and mixed, which its output reads.

    Heads are copied whole. A key/value head is copied with query heads that attend to it (grouped queries);
    where its copies have fewer each, they share them out. Raises UnsupportedError where a query head would
    have no place left.

    Where heads become wider, d to d', each coordinate of query and key is scaled so that the products over
    all of its n copies, divided by sqrt(d') and no longer by sqrt(d), are what they were: by sqrt(sqrt(d' /
    d) / n); LEMON's (d / d')^(1/4) where n = d' / d, ours elsewhere. With `pairs` every coordinate of mixed
    that is copied is copied at least twice, which takes two heads (see `paired`).

    >>> attention(Heads(2, 1, 1), Heads(4, 2, 1))["mixed"].index.tolist()
    [0, 1, 0, 1]
    """
    per_small, per_large = small.queries // small.groups, large.queries // large.groups
    groups = circular(small.groups, large.groups)
    in_group = paired(per_small, per_large) if pairs else circular(per_small, per_large)
    if pairs and per_large == 1:
        groups, in_group = paired(small.groups, large.groups), circular(per_small, 1)
    heads = [groups, in_group]
    if per_large < per_small and not pairs:  # copies of a group share its heads out, each the next ones
        round_of = torch.arange(large.groups) // small.groups
        nth = (round_of[:, None] * per_large + torch.arange(per_large)) % per_small
        heads = [Growth(small.queries, (groups.index[:, None] * per_small + nth).flatten())]
    if not pairs and len(set(product(heads).index.tolist())) < small.queries:
        raise UnsupportedError(
            f"{small.queries} heads, {per_small} to a key/value head, have no room in {large.queries} of "
            f"which {per_large} share one; give more heads, or fewer kv_heads"
        )
    width = circular(small.width, large.width)
    queries, keys = product([*heads, width]), product([groups, width])
    if large.width == small.width:
        return {"query": queries, "key": keys, "value": keys, "mixed": queries}
    scale = ((large.width / small.width) ** 0.5 / width.num_copies.double()).sqrt()
    return {
        "query": replace(queries, scale=scale.repeat(large.queries)),
        "key": replace(keys, scale=scale.repeat(large.groups)),
        "value": keys,
        "mixed": queries,
    }


def product(growths: Sequence[Growth]) -> Growth:
    """The growth of pairs, triples ... of coordinates, the last running fastest.

    >>> product([circular(1, 2), circular(2, 3)]).index.tolist()
    [0, 1, 0, 0, 1, 0]
    """
    index, num_small = torch.zeros(1, dtype=torch.int64), 1
    for growth in growths:
        index = (index[:, None] * growth.num_small + growth.index).flatten()
        num_small *= growth.num_small
    return Growth(num_small, index, product_of=tuple(growths))


def stacked(growths: Sequence[Growth]) -> Growth:
    """One axis of several spaces, one after the other, as where one linear writes query, key and value.

    Raises UnsupportedError for a rest of means among others: they would be means of something else each.

    >>> stacked([circular(2, 3), circular(1, 2)]).index.tolist()
    [0, 1, 0, 2, 2]
    """
    if len(growths) == 1:
        return growths[0]
    rests = {growth.rest for growth in growths if not bool(growth.is_copy.all())}
    if AVERAGE in rests:
        raise UnsupportedError(
            "a space with a rest of means stands in one axis with others, for which no lossless form is "
            "known here; grow it to a multiple"
        )
    index, start = [], 0
    for growth in growths:
        index.append(torch.where(growth.is_copy, growth.index + start, REST))
        start += growth.num_small
    scale = None
    if any(growth.scale is not None for growth in growths):
        scale = torch.cat(
            [g.scale if g.scale is not None else torch.ones(g.num_large).double() for g in growths]
        )
    return Growth(start, torch.cat(index), ZERO, scale)
