"""By how much gradients and roundings are larger in a grown model than in the small one, read off its maps
(ours).

Of a space with n copies of each coordinate, values are copied, so that their squared norm is n times what it
was. The gradients of the copies sum to that of their source, and what was drawn for copies to differ adds the
gradient of what it leads to:

    even, or shares a_c       |g*|^2 = sum over c of a_c^2 |g|^2
    drawn beside that         + (n - 1) p |g|^2        p: |g*|^2 / |g|^2 where the reader writes

because weights that are drawn have the deviation of those that were there. What comes back to a sum through
one of its own branches is left out: its gradient mostly comes down the sum itself.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Sequence
from statistics import fmean

from qsync.expansion.maps.tensor_maps import Axis, TensorMap
from qsync.expansion.plan.plan import ExpansionPlan
from qsync.expansion.recipe.recipes import ATTENTION, FIXED

# Of what reads a space: the part of its gradient that goes by shares, and the one that goes by p.
Parts = tuple[float, float]
_ALL_ON: Parts = (0.0, 1.0)


def gradient_gain(plan: ExpansionPlan) -> float:
    """|G*|^2 / |G|^2, G being the gradient of all parameters: the mean over weights of what their maps say,
    each counted alike, without those of new blocks.

    A weight's gradient is g x' of what it writes and reads: its squared norm is |g|^2 |x|^2 where rows are
    unlike each other. An error of a value, which all copies of it make alike, moves the function as it did in
    the small model, and so the gradient by this much more.

    >>> gradient_gain(plan)        # twice the width, copies that part at random
    3.5
    """
    flow = _Flow(plan)
    gains = []
    for m in _matrices(plan):
        line = plan.recipe.line_of(m.source)
        if line is not None:
            gains.append(flow.of(line.writes) * _mean(_copies(a) for a in m.axes if a and a.is_read))
    return fmean(gains) if gains else 1.0


def rounding_gain(m: TensorMap) -> float:
    """What rounding a grown weight adds to a product, in parts of what rounding the small one did.

    The parts of a weight are rounded each by itself, to so many bits of its own size: their errors are
    unrelated where the parts differ, and the same where they are equal.
    """
    reading = [axis for axis in m.axes if axis is not None and axis.is_read and axis.shares is not None]
    return sum(_parts(reading[0], m)) if reading and not _is_even(reading[0], m) else 1.0


class _Flow:
    """What writes and reads each space, for gradients to come back along it."""

    def __init__(self, plan: ExpansionPlan) -> None:
        self._edges: dict[str, dict[tuple[str, ...], list[Parts]]] = defaultdict(lambda: defaultdict(list))
        for m in _kept(plan):
            line = plan.recipe.line_of(m.source)
            if line is None or not line.reads or not m.source.endswith("weight"):
                continue
            for space in line.reads:
                self._edges[_joined(space)][line.writes].append(_read_parts(m))

    def of(self, spaces: Sequence[str]) -> float:
        """p, |g*|^2 / |g|^2, of what a module writes; 1 where it is not known who reads it."""
        return _mean(self._gain(space, ()) for space in spaces)

    def _gain(self, space: str, above: tuple[str, ...]) -> float | None:
        """None where every way leads back to a space that the gradient was already in."""
        if space == FIXED:
            return 1.0
        space = _joined(space)
        if space in above:
            return None
        found = []
        for writes, parts in self._edges[space].items():
            beyond = [self._gain(next_space, (*above, space)) for next_space in writes]
            known = [gain for gain in beyond if gain is not None]
            if known:
                found += [even + drawn * fmean(known) for even, drawn in parts]
        return fmean(found) if found else None


def _joined(space: str) -> str:
    """Query, key and value get their gradients from what attention mixes of them."""
    return "mixed" if space in ATTENTION else space


def _kept(plan: ExpansionPlan) -> Iterator[TensorMap]:
    """The maps of everything that is not in a new block."""
    new = [f"{p.path}." for places in plan.depth.places.values() for p in places if p.is_new]
    return (m for m in plan.tensors.values() if not m.name.startswith(tuple(new)))


def _matrices(plan: ExpansionPlan) -> Iterator[TensorMap]:
    return (m for m in _kept(plan) if len(m.source_shape) > 1)


def _read_parts(m: TensorMap) -> Parts:
    """Of a weight; of a norm's, which hands every coordinate on by itself."""
    if len(m.source_shape) == 1:
        return _ALL_ON
    reading = [axis for axis in m.axes if axis is not None and axis.is_read and axis.shares is not None]
    if reading:
        return _parts(reading[0], m)
    # A head with the embeddings' weight is copied, and what it reads is divided: even shares.
    tied = [axis for axis in m.axes[1:] if axis is not None]
    return (1.0 / _copies(tied[0]), 0.0) if tied else _ALL_ON


def _parts(axis: Axis, m: TensorMap) -> Parts:
    assert axis.shares is not None
    num = axis.growth.num_small
    even = float(axis.shares.square().sum()) / num
    drawn = (int(axis.growth.is_copy.sum()) - num) / num if m.noise else 0.0
    return even, drawn


def _is_even(axis: Axis, m: TensorMap) -> bool:
    """Whether all copies of a coordinate have equal parts."""
    assert axis.shares is not None
    copies = axis.growth.is_copy
    return not m.noise and bool(
        (axis.shares[copies] * axis.growth.num_copies[copies] - 1.0).abs().max() < 1e-12
    )


def _copies(axis: Axis) -> float:
    """Of how many copies each coordinate has, the mean."""
    return float(axis.growth.is_copy.sum()) / axis.growth.num_small


def _mean(gains: Iterator[float | None] | Iterator[float]) -> float:
    known = [gain for gain in gains if gain is not None]
    return fmean(known) if known else 1.0
