"""Maps: how each tensor of the grown model is made from one of the small model, worked out before anything
is built.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from dataclasses import dataclass

import torch

from qsync.expansion.maps.space_growth import AVERAGE, Growth

SPLITS = ("random", "scalar", "even")
FREE = "free"  # what stands in the rest does not matter: nobody reads it, or it reads zeros


@dataclass(frozen=True, slots=True, eq=False)
class Axis:
    """One axis of a tensor: what grows it, whether it is written or read, and the spaces' names for people.

    `shares` (large,), FP64: which part of a source's weight each of its copies has with those that read it; 0
    in the rest. `is_exact` is whether they are the same with all that read it, and no norm stands between:
    then an axis that is written has that part of the source's gradient as well.
    """

    spaces: str
    growth: Growth
    shares: torch.Tensor
    is_read: bool = False
    is_exact: bool = True

    @property
    def is_loose(self) -> bool:
        """Whether what is drawn can be added along it and change nothing."""
        return self.is_read or self.growth.rest == FREE

    def __str__(self) -> str:
        if self.growth.is_identity:
            return f"{self.spaces}, as it is"
        done = "split over" if self.is_read else "copied to"
        rest = int((~self.growth.is_copy).sum())
        text = f"{self.spaces} {self.growth.num_small} {done} {self.growth.num_large - rest}"
        return text + (f" + {rest} {'' if self.is_read else self.growth.rest}".rstrip() if rest else "")


@dataclass(frozen=True, slots=True, eq=False)
class TensorMap:
    """`name` of the grown model from `source` of the small one, axis by axis (None: as it is).

    `factor` multiplies what is made. `noise` is the deviation of what is drawn for copies to differ,
    `rest_noise` of what is drawn for a rest that reads zeros. `silenced` is "zero" or "cancel" for what a new
    block adds to its residual stream; `is_new` is whether the tensor is one of a new block, `tied` the module
    whose weight it is.
    """

    name: str
    source: str
    source_shape: tuple[int, ...]
    axes: tuple[Axis | None, ...]
    factor: float = 1.0
    noise: float = 0.0
    rest_noise: float = 0.0
    silenced: str = ""
    is_new: bool = False
    tied: str = ""

    @property
    def shape(self) -> tuple[int, ...]:
        """The grown tensor's."""
        return tuple(
            size if axis is None else axis.growth.num_large
            for size, axis in zip(self.source_shape, self.axes, strict=True)
        )

    @property
    def is_identity(self) -> bool:
        """Whether the grown tensor is the small one, to the bit."""
        plain = self.factor == 1.0 and not self.silenced
        return plain and all(
            axis is None or (axis.growth.is_identity and axis.growth.scale is None) for axis in self.axes
        )

    def grown(self, source: torch.Tensor, seed: int) -> torch.Tensor:
        """The grown tensor, in the type and on the device of `source`; differentiable in `source`.

        Written axes copy. For an axis that is read, with copies c of source column j, n_j of them:
        W*[:, c] = share_c W[:, j] + R[:, c] - mean of R over the copies of j (LEMON, section 3.3, with shares
        of our own), so that the copies sum to W[:, j] whatever is drawn. The same R comes of the same seed,
        whatever the source holds: a moving average of the weights grows as the weights do.
        """
        if self.is_identity:
            return source.clone()
        made = source
        for dim, axis in enumerate(self.axes):
            if axis is not None and not axis.is_read:
                made = _written(made, dim, axis.growth)
        if self.silenced == "zero":
            return torch.zeros(self.shape, dtype=source.dtype, device=source.device)
        for dim, axis in enumerate(self.axes):
            if axis is not None and axis.is_read:
                shares = along(axis.shares if self.silenced != "cancel" else 0 * axis.shares, dim, made)
                made = made.index_select(dim, axis.growth.index.clamp(min=0).to(made.device)) * shares
        made = made * self.factor if self.factor != 1.0 else made
        if self.noise or self.rest_noise:
            made = made + self._drawn(seed).to(made)
        return made

    def _drawn(self, seed: int) -> torch.Tensor:
        """What is added, FP64: nothing in sum wherever it is read."""
        drawn = torch.randn(self.shape, generator=generator(seed, self.name), dtype=torch.float64)
        loose = [
            (dim, axis.growth) for dim, axis in enumerate(self.axes) if axis is not None and axis.is_loose
        ]
        assert len(loose) == 1, f"{self.name}: one axis has room for what is drawn"
        dim, growth = loose[0]
        copies, rest = _without_sums(drawn, dim, growth)
        return self.noise * copies + self.rest_noise * rest


def generator(seed: int, name: str) -> torch.Generator:
    """Draws for one name: the same whatever else is drawn, and in which order."""
    digest = hashlib.sha256(f"{seed} {name}".encode()).digest()
    return torch.Generator().manual_seed(int.from_bytes(digest[:7], "big"))


def shares_of(growth: Growth, split: str, seed: int, name: str) -> torch.Tensor:
    """Which part of a source column each of its copies has: they sum to 1. Equal parts, but for "scalar".

    A head has one part: parts of its own for every place in it would mix the gradients of its scores. So
    have the copies of a key/value head, of which each of its query heads then has a part.
    """
    if growth.product_of:
        shares, splits = torch.ones(1, dtype=torch.float64), [split] * (len(growth.product_of) - 1) + ["even"]
        for depth, (part, how) in enumerate(zip(growth.product_of, splits, strict=True)):
            shares = (shares[:, None] * shares_of(part, how, seed, f"{name} {depth}")).flatten()
        return shares
    parts = torch.ones(growth.num_large, dtype=torch.float64)
    if split == "scalar":
        parts += torch.rand(growth.num_large, generator=generator(seed, name), dtype=torch.float64) - 0.5
    parts = torch.where(growth.is_copy, parts, 0.0)
    sums = torch.zeros(growth.num_small, dtype=torch.float64).index_add(0, growth.index.clamp(min=0), parts)
    # A coordinate copied once keeps its weight to the bit: x / x is 1.
    return torch.where(growth.is_copy, parts / sums[growth.index.clamp(min=0)], 0.0)


def along(vector: torch.Tensor, dim: int, like: torch.Tensor) -> torch.Tensor:
    """A vector laid along one dimension of a tensor, in its type where it is a float."""
    shape = [1] * like.ndim
    shape[dim] = len(vector)
    vector = vector.to(like.device) if vector.dtype == torch.bool else vector.to(like)
    return vector.view(shape)


def _written(tensor: torch.Tensor, dim: int, growth: Growth) -> torch.Tensor:
    copies = tensor.index_select(dim, growth.index.clamp(min=0).to(tensor.device))
    if growth.scale is not None:
        copies = copies * along(growth.scale, dim, copies)
    if bool(growth.is_copy.all()):
        return copies
    is_copy = along(growth.is_copy, dim, copies)
    rest = tensor.mean(dim, keepdim=True) if growth.rest == AVERAGE else torch.zeros((), dtype=tensor.dtype)
    return torch.where(is_copy, copies, rest.to(tensor.device))


def _without_sums(drawn: torch.Tensor, dim: int, growth: Growth) -> tuple[torch.Tensor, torch.Tensor]:
    """What is drawn for copies, less its mean over those of each source column, and what is drawn for the
    rest: less its mean, where the rest reads means, and as it is where it reads zeros.
    """
    index, is_copy = growth.index.clamp(min=0), along(growth.is_copy, dim, drawn)
    copies, rest = torch.where(is_copy, drawn, 0.0), torch.where(is_copy, 0.0, drawn)
    shape = list(drawn.shape)
    shape[dim] = growth.num_small
    sums = torch.zeros(shape, dtype=drawn.dtype).index_add(dim, index, copies)
    counts = along(growth.num_copies.clamp(min=1), dim, drawn)
    copies = torch.where(is_copy, drawn - sums.index_select(dim, index) / counts, 0.0)
    if growth.rest == AVERAGE:
        num = growth.num_large - int(growth.is_copy.sum())
        rest = torch.where(is_copy, 0.0, rest - rest.sum(dim, keepdim=True) / max(num, 1))
    return copies, rest


def summary(maps: Mapping[str, TensorMap]) -> str:
    """One line: how many tensors, and how many numbers before and after."""
    before = sum(torch.Size(m.source_shape).numel() for m in {m.source: m for m in maps.values()}.values())
    after = sum(torch.Size(m.shape).numel() for m in maps.values())
    return f"{len(maps)} tensors, {before:,} numbers -> {after:,}"
