"""Index maps: the source of each coordinate of a grown space.

A space of `small` coordinates grows to `large`: k = large // small whole copies, and a rest of
r = large - k small coordinates. The reader of the space decides the content of the rest (LEMON,
arXiv:2310.07999, section 3; the zero rest of RMSNorm follows docs/method.md):

    circular  the first r coordinates again  hidden units, heads, channels: all that acts elementwise
    average   the mean of all coordinates    input of a LayerNorm: the mean stays, the variance shrinks
    zero      0                              output of a norm, input of an RMSNorm
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch

from qsync.errors import UnsupportedError
from qsync.expansion.recipe.sizes import Heads

CIRCULAR, AVERAGE, ZERO = "circular", "average", "zero"
REST = -1


@dataclass(frozen=True, slots=True, eq=False)
class Growth:
    """The growth of one space.

    `index` (large,) holds the source of each coordinate, REST for a coordinate of the rest. `rest` is the
    content of the rest: AVERAGE or ZERO. `scale` (large,), FP64, multiplies each copy where it is written;
    None stands for 1. A space of tuples (a group of heads, a head in the group, a coordinate in the head)
    has the growths of its factors in `product_of`.
    """

    num_small: int
    index: torch.Tensor
    rest: str = ZERO
    scale: torch.Tensor | None = None
    product_of: tuple[Growth, ...] = ()

    @property
    def num_large(self) -> int:
        """Return the number of coordinates after growth."""
        return len(self.index)

    @property
    def is_copy(self) -> torch.Tensor:
        """Return Bool (large,): whether each coordinate copies one, and is not in the rest."""
        return self.index != REST

    @property
    def num_copies(self) -> torch.Tensor:
        """Return Int64 (large,): the fan-out of each coordinate's source, 0 in the rest."""
        counts = torch.bincount(self.index[self.is_copy], minlength=self.num_small)
        return torch.where(self.is_copy, counts[self.index.clamp(min=0)], 0)

    @property
    def is_identity(self) -> bool:
        """Return whether the space stays as it is."""
        return self.num_large == self.num_small and bool((self.index == torch.arange(self.num_small)).all())

    def by_unit(self, unit: int) -> Growth:
        """Return the same growth where every coordinate stands for `unit` neighbours.

        A channel stands for its pixels in this way once it is flattened.

        >>> circular(2, 3).by_unit(2).index.tolist()
        [0, 1, 2, 3, 0, 1]
        """
        if unit == 1:
            return self
        if self.rest == AVERAGE and not bool(self.is_copy.all()):
            raise UnsupportedError(
                f"a space filled up with means is read {unit} times, for which no lossless form is known; "
                "grow the space to a multiple of its size"
            )
        within = torch.arange(unit).repeat(self.num_large)
        index = self.index.repeat_interleave(unit)
        scale = None if self.scale is None else self.scale.repeat_interleave(unit)
        index = torch.where(index == REST, REST, index * unit + within)
        return Growth(self.num_small * unit, index, self.rest, scale)


def circular(small: int, large: int) -> Growth:
    """Copy all coordinates in turn; the last round may be partial.

    >>> circular(3, 5).index.tolist()
    [0, 1, 2, 0, 1]
    """
    return Growth(small, torch.arange(large) % small)


def padded(small: int, large: int, rest: str) -> Growth:
    """Copy all coordinates in whole rounds, then append the rest.

    >>> padded(3, 7, ZERO).index.tolist()
    [0, 1, 2, 0, 1, 2, -1]
    """
    copied = torch.arange(large) % small
    copied[large // small * small :] = REST
    return Growth(small, copied, rest)


def paired(small: int, large: int) -> Growth:
    """Copy only as many coordinates as can have two copies or more each.

    Random fan-out weights of a single copy cannot sum to 0.

    >>> paired(3, 5).index.tolist()
    [0, 1, 0, 1, 0]
    """
    return Growth(small, torch.arange(large) % min(small, max(large // 2, 1)))


def attention(small: Heads, large: Heads, pairs: bool = False) -> dict[str, Growth]:
    """Return the growths of attention's spaces: query, key, value, mixed, heads and kv_heads.

    The output projection reads mixed. Heads are replicated whole. A key/value head is replicated with the
    query heads that attend to it (grouped queries). Copies with fewer query heads each share these out.

    Wider heads, d to d', need scaled queries and keys: the sum of the products over all n copies of a
    coordinate, divided by sqrt(d') instead of sqrt(d), must stay the same. The scale of both is
    sqrt(sqrt(d' / d) / n). It equals LEMON's (d / d')^(1/4) where n = d' / d. With `pairs` every copied
    coordinate of mixed has two copies or more, which takes two heads (see `paired`).

    Raises:
        UnsupportedError: A query head would have no copy.

    >>> attention(Heads(2, 1, 1), Heads(4, 2, 1))["mixed"].index.tolist()
    [0, 1, 0, 1]
    """
    per_small, per_large = small.queries // small.groups, large.queries // large.groups
    groups = circular(small.groups, large.groups)
    in_group = paired(per_small, per_large) if pairs else circular(per_small, per_large)
    if pairs and per_large == 1:
        groups, in_group = paired(small.groups, large.groups), circular(per_small, 1)
    heads = [groups, in_group]
    if per_large < per_small and not pairs:  # each copy of a group uses the next heads
        round_of = torch.arange(large.groups) // small.groups
        nth = (round_of[:, None] * per_large + torch.arange(per_large)) % per_small
        heads = [Growth(small.queries, (groups.index[:, None] * per_small + nth).flatten())]
    if not pairs and len(set(product(heads).index.tolist())) < small.queries:
        raise UnsupportedError(
            f"{small.queries} heads with {per_small} per key/value head do not fit into {large.queries} "
            f"with {per_large}; give more heads, or fewer kv_heads"
        )
    width = circular(small.width, large.width)
    queries, keys = product([*heads, width]), product([groups, width])
    counts = {"heads": product(heads), "kv_heads": groups}
    if large.width == small.width:
        return {**counts, "query": queries, "key": keys, "value": keys, "mixed": queries}
    scale = ((large.width / small.width) ** 0.5 / width.num_copies.double()).sqrt()
    return {
        **counts,
        "query": replace(queries, scale=scale.repeat(large.queries)),
        "key": replace(keys, scale=scale.repeat(large.groups)),
        "value": keys,
        "mixed": queries,
    }


def product(growths: Sequence[Growth]) -> Growth:
    """Return the growth of a space of tuples; the last factor runs fastest.

    >>> product([circular(1, 2), circular(2, 3)]).index.tolist()
    [0, 1, 0, 0, 1, 0]
    """
    index, num_small = torch.zeros(1, dtype=torch.int64), 1
    for growth in growths:
        index = (index[:, None] * growth.num_small + growth.index).flatten()
        num_small *= growth.num_small
    return Growth(num_small, index, product_of=tuple(growths))


def laid_out(parts: Sequence[torch.Tensor], num_rounds: int) -> torch.Tensor:
    """Lay out vectors by rounds: the first part of each, then the second part of each, and so on.

    >>> laid_out([torch.tensor([0, 1]), torch.tensor([2, 3])], 2).tolist()
    [0, 2, 1, 3]
    """
    return torch.cat([part.reshape(num_rounds, -1) for part in parts], 1).flatten()


def stacked(growths: Sequence[Growth], num_rounds: tuple[int, int] = (1, 1)) -> Growth:
    """Return the growth of several spaces that are stacked in one axis.

    The axis of a linear that writes query, key and value is an example. `num_rounds` states in how many
    rounds the spaces lie before and after growth (`laid_out`).

    Raises:
        UnsupportedError: A space's rest is AVERAGE. Its mean would differ from that over the whole axis.

    >>> stacked([circular(2, 3), circular(1, 2)]).index.tolist()
    [0, 1, 0, 2, 2]
    """
    if len(growths) == 1:
        return growths[0]
    rests = {growth.rest for growth in growths if not bool(growth.is_copy.all())}
    if AVERAGE in rests:
        raise UnsupportedError(
            "a space filled up with means shares an axis with others, for which no lossless form is known; "
            "grow the space to a multiple of its size"
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
    if num_rounds == (1, 1):
        return Growth(start, torch.cat(index), ZERO, scale)
    starts = [sum(growth.num_small for growth in growths[:i]) for i in range(len(growths))]
    rows = [torch.arange(g.num_small) + at for g, at in zip(growths, starts, strict=True)]
    row_of, one = laid_out(rows, num_rounds[0]).argsort(), laid_out(index, num_rounds[1])
    if scale is not None:
        sizes = [growth.num_large for growth in growths]
        scale = laid_out(torch.split(scale, sizes), num_rounds[1])
    return Growth(start, torch.where(one == REST, REST, row_of[one.clamp(min=0)]), ZERO, scale)
