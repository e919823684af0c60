"""The growth of gradients and rounding errors from a small to a grown model, by its maps.

In a space with n copies of each coordinate, values are copied, so that their squared norm grows n-fold. The
gradients of the copies sum to that of their source. Noise that makes copies differ adds the gradient of the
outputs that the copies reach:

    even, or shares a_c       |g*|^2 = sum over c of a_c^2 |g|^2
    noise                     + (n - 1) p |g|^2        p: |g*|^2 / |g|^2 where the reader writes

because noise has the standard deviation of the original weights. The formula ignores the gradient that
returns to a residual sum through its branches, because most flows along the sum itself. The derivation is in
docs/method.md.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Sequence
from statistics import fmean

from qsync.expansion.maps.tensor_maps import Axis, TensorMap
from qsync.expansion.plan.expansion_plan import ExpansionPlan
from qsync.expansion.recipe.recipe import FIXED, attention_part

# Parts of a reader's gradient: proportional to shares, and proportional to p.
Parts = tuple[float, float]
_ALL_ON: Parts = (0.0, 1.0)


def gradient_gain(plan: ExpansionPlan) -> float:
    """Return |G*|^2 / |G|^2 for the gradient G of all parameters, predicted from the maps.

    The result is the plain mean over the weights outside of new blocks. A weight's gradient is g x', with
    output gradient g and input x: its squared norm is |g|^2 |x|^2 for unrelated rows. An error that all
    copies of a value share changes the function as in the small model, and the gradient by this factor.

    >>> gradient_gain(plan)        # twice the width, random split
    3.5
    """
    flow = _Flow(plan)
    gains = []
    for m in _maps_outside_new_blocks(plan):
        line = plan.recipe.line_of(m.source)
        if line is not None and len(m.source_shape) > 1:
            gains.append(flow.of(line.writes) * _mean(_copies(a) for a in m.axes if a and a.is_read))
    return fmean(gains) if gains else 1.0


def rounding_gain(m: TensorMap) -> float:
    """Return the growth of a product's error from rounding a weight.

    Each share of a weight is rounded to its own size. The errors of unequal shares are independent, those of
    equal shares identical.
    """
    axis = _read_axis(m)
    return sum(_parts(axis, m)) if axis is not None and not _is_even(axis, m) else 1.0


class _Flow:
    """The writers and readers of each space, along which gradients flow back."""

    def __init__(self, plan: ExpansionPlan) -> None:
        self._edges: dict[str, dict[tuple[str, ...], list[Parts]]] = defaultdict(lambda: defaultdict(list))
        for m in _maps_outside_new_blocks(plan):
            line = plan.recipe.line_of(m.source)
            if line is None or not line.reads or not m.source.endswith("weight"):
                continue
            for space in line.reads:
                self._edges[_joined(space)][line.writes].append(_read_parts(m))

    def of(self, spaces: Sequence[str]) -> float:
        """Return p, |g*|^2 / |g|^2, of a module's output; 1 where its readers are unknown."""
        return _mean(self._gain(space, ()) for space in spaces)

    def _gain(self, space: str, above: tuple[str, ...]) -> float | None:
        """Return p of one space; None if every path leads back to a space in `above`."""
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
                found += [even + noisy * fmean(known) for even, noisy in parts]
        return fmean(found) if found else None


def _joined(space: str) -> str:
    """Merge query, key and value with mixed, from which their gradients come."""
    part = attention_part(space)
    return f"mixed{part[1]}" if part else space


def _maps_outside_new_blocks(plan: ExpansionPlan) -> Iterator[TensorMap]:
    """Yield all maps but those of new blocks."""
    new = tuple(f"{path}." for path in plan.depth.new_paths)
    return (m for m in plan.tensors.values() if not m.name.startswith(new))


def _read_parts(m: TensorMap) -> Parts:
    """Return the gradient parts of a matrix, or of a norm, which treats coordinates separately."""
    if len(m.source_shape) == 1:
        return _ALL_ON
    axis = _read_axis(m)
    if axis is not None:
        return _parts(axis, m)
    # A tied head is copied and its input divided, which equals even shares.
    tied = [axis for axis in m.axes[1:] if axis is not None]
    return (1.0 / _copies(tied[0]), 0.0) if tied else _ALL_ON


def _read_axis(m: TensorMap) -> Axis | None:
    """Return the first axis that is read, None if there is none."""
    return next((axis for axis in m.axes if axis is not None and axis.is_read), None)


def _parts(axis: Axis, m: TensorMap) -> Parts:
    """Return the even and the noisy part of one axis."""
    num = axis.growth.num_small
    even = float(axis.shares.square().sum()) / num
    noisy = (int(axis.growth.is_copy.sum()) - num) / num if m.noise else 0.0
    return even, noisy


def _is_even(axis: Axis, m: TensorMap) -> bool:
    """Return whether all copies of a coordinate have equal shares."""
    copies = axis.growth.is_copy
    return not m.noise and bool(
        (axis.shares[copies] * axis.growth.num_copies[copies] - 1.0).abs().max() < 1e-12
    )


def _copies(axis: Axis) -> float:
    """Return the mean fan-out of an axis."""
    return float(axis.growth.is_copy.sum()) / axis.growth.num_small


def _mean(gains: Iterator[float | None] | Iterator[float]) -> float:
    """Return the mean of the known numbers, 1 if there are none."""
    known = [gain for gain in gains if gain is not None]
    return fmean(known) if known else 1.0
