"""Tensor maps: how one tensor of the grown model is made from one of the small model."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from dataclasses import dataclass

import torch

from qsync.expansion.maps.space_growth import AVERAGE, Growth

SPLITS = ("random", "scalar", "even")
FREE = "free"  # any rest is correct: it is not read, or it reads zeros


@dataclass(frozen=True, slots=True, eq=False)
class Axis:
    """One axis of a tensor: its growth, its role, and the names of its spaces for messages.

    `shares` (large,), FP64, is the share of the source's weight that the readers give each copy; 0 in the
    rest. `is_exact` states that all readers give the same shares and no norm stands in between. The gradient
    of a copy along a written axis is then that share of the source's gradient.
    """

    spaces: str
    growth: Growth
    shares: torch.Tensor
    is_read: bool = False
    is_exact: bool = True

    @property
    def takes_noise(self) -> bool:
        """Return whether noise along this axis can leave the function unchanged."""
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
    """How `name` of the grown model is made from `source` of the small one.

    `axes` holds one entry per dimension; None leaves a dimension as it is. `factor` multiplies the result,
    `added` is added to it: for a norm that multiplies by its weight plus a constant.
    `noise` is the standard deviation of the noise that makes copies differ, `rest_noise` that of the noise
    in a rest that reads zeros. `noise_dim` is the written axis whose copies differ, in a new block that is
    silent; None for the axis that is read. `output_init` is "zero" or "cancel" for an output layer of a new
    block.
    `is_new` marks tensors of new blocks, `tied` names the module that shares the weight.
    """

    name: str
    source: str
    source_shape: tuple[int, ...]
    axes: tuple[Axis | None, ...]
    factor: float = 1.0
    added: float = 0.0
    noise: float = 0.0
    rest_noise: float = 0.0
    noise_dim: int | None = None
    output_init: str = ""
    is_new: bool = False
    tied: str = ""

    @property
    def shape(self) -> tuple[int, ...]:
        """Return the shape of the grown tensor."""
        return tuple(
            size if axis is None else axis.growth.num_large
            for size, axis in zip(self.source_shape, self.axes, strict=True)
        )

    @property
    def is_identity(self) -> bool:
        """Return whether the grown tensor equals the small one bitwise."""
        plain = self.factor == 1.0 and not self.output_init
        return plain and all(
            axis is None or (axis.growth.is_identity and axis.growth.scale is None) for axis in self.axes
        )

    def grown(self, source: torch.Tensor, seed: int) -> torch.Tensor:
        """Return the grown tensor, in the type and on the device of `source`, differentiable in it.

        Written axes are copied. Along an axis that is read, source column j has n_j copies c:
        W*[:, c] = share_c W[:, j] + R[:, c] - mean of R over the copies of j (LEMON, section 3.3,
        generalized to unequal shares). The copies sum to W[:, j] for any R. R depends only on the seed and
        the name, so that a moving average of the weights grows as the weights do.
        """
        if self.is_identity:
            return source.clone()
        made = source
        for dim, axis in enumerate(self.axes):
            if axis is not None and not axis.is_read:
                made = _written(made, dim, axis.growth)
        if self.output_init == "zero":
            return torch.full(self.shape, self.added, dtype=source.dtype, device=source.device)
        for dim, axis in enumerate(self.axes):
            if axis is not None and axis.is_read:
                shares = along(axis.shares if self.output_init != "cancel" else 0 * axis.shares, dim, made)
                made = made.index_select(dim, axis.growth.index.clamp(min=0).to(made.device)) * shares
        made = made * self.factor if self.factor != 1.0 else made
        made = made + self.added if self.added else made
        if self.noise or self.rest_noise:
            made = made + self._noise_values(seed).to(made)
        return made

    def _noise_values(self, seed: int) -> torch.Tensor:
        """Return the noise in FP64; it sums to 0 over the copies of every coordinate."""
        noise = torch.randn(self.shape, generator=generator(seed, self.name), dtype=torch.float64)
        axes = [
            (dim, axis.growth)
            for dim, axis in enumerate(self.axes)
            if axis is not None and (axis.takes_noise if self.noise_dim is None else dim == self.noise_dim)
        ]
        assert len(axes) == 1, f"{self.name}: one axis can take noise"
        dim, growth = axes[0]
        copies, rest = _zero_sum_parts(noise, dim, growth)
        return self.noise * copies + self.rest_noise * rest


def generator(seed: int, name: str) -> torch.Generator:
    """Return the random generator of one name, independent of all other draws."""
    digest = hashlib.sha256(f"{seed} {name}".encode()).digest()
    return torch.Generator().manual_seed(int.from_bytes(digest[:7], "big"))


def shares_of(growth: Growth, split: str, seed: int, name: str) -> torch.Tensor:
    """Return the share of a source column that each copy has; the shares of a source sum to 1.

    Shares are equal unless `split` is "scalar". All coordinates of a head have one share: unequal shares
    within a head would mix the gradients of its scores. The copies of a key/value head have one share as
    well; each of its query heads has a part of it.
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
    # x / x is 1, so that a coordinate with one copy keeps its weight bitwise.
    return torch.where(growth.is_copy, parts / sums[growth.index.clamp(min=0)], 0.0)


def along(vector: torch.Tensor, dim: int, like: torch.Tensor) -> torch.Tensor:
    """Shape a vector to broadcast along one dimension of `like`, in its type unless Boolean."""
    shape = [1] * like.ndim
    shape[dim] = len(vector)
    vector = vector.to(like.device) if vector.dtype == torch.bool else vector.to(like)
    return vector.view(shape)


def _written(tensor: torch.Tensor, dim: int, growth: Growth) -> torch.Tensor:
    """Grow one written axis."""
    copies = tensor.index_select(dim, growth.index.clamp(min=0).to(tensor.device))
    if growth.scale is not None:
        copies = copies * along(growth.scale, dim, copies)
    if bool(growth.is_copy.all()):
        return copies
    is_copy = along(growth.is_copy, dim, copies)
    rest = tensor.mean(dim, keepdim=True) if growth.rest == AVERAGE else torch.zeros((), dtype=tensor.dtype)
    return torch.where(is_copy, copies, rest.to(tensor.device))


def _zero_sum_parts(noise: torch.Tensor, dim: int, growth: Growth) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the noise of the copies, centred over each source, and the noise of the rest.

    The noise of the rest is centred where the rest reads means, unchanged where it reads zeros.
    """
    index, is_copy = growth.index.clamp(min=0), along(growth.is_copy, dim, noise)
    copies, rest = torch.where(is_copy, noise, 0.0), torch.where(is_copy, 0.0, noise)
    shape = list(noise.shape)
    shape[dim] = growth.num_small
    sums = torch.zeros(shape, dtype=noise.dtype).index_add(dim, index, copies)
    counts = along(growth.num_copies.clamp(min=1), dim, noise)
    copies = torch.where(is_copy, noise - sums.index_select(dim, index) / counts, 0.0)
    if growth.rest == AVERAGE:
        num = growth.num_large - int(growth.is_copy.sum())
        rest = torch.where(is_copy, 0.0, rest - rest.sum(dim, keepdim=True) / max(num, 1))
    return copies, rest


def summary(maps: Mapping[str, TensorMap]) -> str:
    """Return the number of tensors, and the numbers of elements before and after, in one line."""
    before = sum(torch.Size(m.source_shape).numel() for m in {m.source: m for m in maps.values()}.values())
    after = sum(torch.Size(m.shape).numel() for m in maps.values())
    return f"{len(maps)} tensors, {before:,} numbers -> {after:,}"
