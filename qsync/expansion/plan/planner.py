"""The layout of a growth: which map every tensor of a model gets, by its recipe; all of it before anything
is built.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace

import torch

from qsync.errors import FormatError, MismatchError, UnsupportedError
from qsync.expansion.maps.depth import Depth, Place, depth_of
from qsync.expansion.maps.space_growth import (
    AVERAGE,
    CIRCULAR,
    ZERO,
    Growth,
    attention,
    circular,
    padded,
    paired,
    stacked,
)
from qsync.expansion.maps.tensor_maps import FREE, SPLITS, Axis, TensorMap, shares_of
from qsync.expansion.maps.tensor_roles import Tensor, tensors_of
from qsync.expansion.maps.zero_init_blocks import check_blocks, silenced
from qsync.expansion.plan.plan import ExpansionPlan
from qsync.expansion.recipe import module_kinds
from qsync.expansion.recipe.recipes import ATTENTION, FIXED, Recipe
from qsync.expansion.recipe.sizes import Extent, heads, size_name, small_sizes, target_sizes

DEPTHS = ("zero", "cancel")
# New entries of a norm's weight, beside the others: small, and not 0, which would never learn.
_ZETA = 0.1


def plan_expansion(
    model: torch.nn.Module, recipe: Recipe, *, split: str = "random", depth: str = "zero", seed: int = 0
) -> ExpansionPlan:
    """Which map every tensor of `model` gets on its way to the sizes that `recipe.to(...)` asked for.

    `split` is how the weights that read a copied value share it: "random" (every element by itself: what
    copies most unlike), "scalar" (one random part per value: an optimizer's moments can come along), "even"
    (equal parts: copies never part again; a control). `depth` is how what a new block adds is silenced:
    "zero", or "cancel" (random, in sum nothing: all of the block learns from the first step). `seed` says
    what is drawn. Nothing is built, and the model is not changed.

    Raises UnsupportedError, with the module and the way out, for what has no lossless form: sizes that shrink
    or do not divide, modules that the recipe does not name, quantized weights; MismatchError where model and
    recipe do not fit together or weights are tied unsaid.

    >>> print(qsync.plan_expansion(model, recipe.to(width=768, layers=12)))
    """
    for what, given, known in (("split", split, SPLITS), ("depth", depth, DEPTHS)):
        if given not in known:
            raise FormatError(f"unknown {what} {given!r}: choose from {', '.join(known)}")
    if not isinstance(recipe, Recipe):
        raise FormatError(
            f"a recipe is a qsync.Recipe, found {type(recipe).__name__}; take qsync.recipe_of(model).to(...)"
        )
    if not recipe.target:
        raise FormatError(
            f"the recipe {recipe.name} does not say what to grow to; use recipe.to(width=..., layers=...)"
        )
    return _Layout(model, recipe, split, depth, seed).plan()


@dataclass(slots=True)
class _Layout:
    model: torch.nn.Module
    recipe: Recipe
    split: str
    new_blocks: str
    seed: int
    tensors: dict[str, Tensor] = field(default_factory=dict)
    same: dict[str, str] = field(default_factory=dict)  # what a norm writes: what it reads
    handed_on: dict[str, str] = field(default_factory=dict)  # what a batch norm writes: what it reads
    pattern: dict[str, str] = field(default_factory=dict)
    small: dict[str, int] = field(default_factory=dict)
    large: dict[str, int] = field(default_factory=dict)
    divided: dict[str, float] = field(
        default_factory=dict
    )  # spaces that a tied head reads: what they are divided by
    depth: Depth = field(default_factory=lambda: Depth({}))

    def plan(self) -> ExpansionPlan:
        self.tensors = tensors_of(self.model, self.recipe)
        shapes = {name: t.value.shape for name, t in self.tensors.items()}
        self.depth = depth_of(self.recipe, shapes)
        check_blocks(self.recipe, self.tensors.values(), self.depth)
        self.same = {t.line.writes[0]: t.line.reads[0] for t in self.tensors.values() if t.norm}
        self.handed_on = {
            t.line.writes[0]: t.line.reads[0]
            for t in self.tensors.values()
            if t.norm == module_kinds.BATCH and t.line.writes != t.line.reads
        }
        known = self._known()
        self.small = small_sizes(self.recipe, known, self._extents(), self.same)
        self.large = target_sizes(self.recipe, self.small, known)
        self._multiples()
        self._patterns()
        self._ties()
        maps = {m.name: m for t in self.tensors.values() for m in self._maps(t)}
        sizes = dict(self.large)
        small = dict(self.small)
        if self.depth.num_layers:
            sizes["layers"] = _one_or_all(self.depth.num_layers)
            small["layers"] = _one_or_all(self.depth.num_before)
        return ExpansionPlan(
            self.recipe, maps, self._eps(), small, sizes, self.depth, self.split, self.new_blocks, self.seed
        )

    def _known(self) -> dict[str, int]:
        """The sizes that the model says of itself, but for layers, which are counted."""
        read = self.recipe.read(self.model)
        if isinstance(read, Mapping):
            known = {name: size for name, size in read.items() if name != "layers"}
            if all(type(size) is int and size > 0 for size in known.values()):
                return known
        raise FormatError(
            f"`read` of the recipe {self.recipe.name} returned {read!r}; let it return sizes by name, as "
            '{"heads": 4}'
        )

    def _extents(self) -> Iterator[Extent]:
        for t in self.tensors.values():
            for role, length in zip(t.roles, t.value.shape, strict=True):
                if role:
                    yield Extent(
                        t.name, t.line.writes if role == "writes" else t.line.reads, length, role == "writes"
                    )

    def _size(self, space: str, sizes: Mapping[str, int]) -> int:
        return sizes[size_name(self.recipe, space, self.same)]

    def _patterns(self) -> None:
        """How each space grows, by the norms at either end of it."""
        wanted: dict[str, dict[str, str]] = {}
        for t in self.tensors.values():
            if t.norm:
                reads, writes = t.line.reads[0], t.line.writes[0]
                if set(ATTENTION) & {reads, writes}:
                    raise UnsupportedError(
                        f"{t.path} norms {reads} to {writes}, of which one goes by heads; where it norms "
                        f"each head by itself, write `{t.line.pattern}  _ -> _`"
                    )
                if t.norm == module_kinds.BATCH:
                    wanted.setdefault(reads, {}).setdefault(CIRCULAR, t.name)
                    continue
                wanted.setdefault(reads, {}).setdefault(
                    AVERAGE if t.norm == module_kinds.LAYER else ZERO, t.name
                )
                wanted.setdefault(writes, {}).setdefault(ZERO, t.name)
        for space, patterns in wanted.items():
            small, large = self._size(space, self.small), self._size(space, self.large)
            if len(patterns) > 1 and large % small:
                raise UnsupportedError(
                    f"{' and '.join(name.rpartition('.')[0] for name in patterns.values())} ask for another "
                    f"rest of {space} each ({', '.join(patterns)}), as norms after the residual sum do: "
                    f"{small} grows without loss to its multiples alone; give {large // small * small} or "
                    f"{(large // small + 1) * small}"
                )
            self.pattern[space] = next(iter(patterns))

    def _multiples(self) -> None:
        """UnsupportedError where a rest would stand in a space that has no lossless form with one."""
        for space in self.recipe.multiples:
            if size_name(self.recipe, space, self.same) not in self.small:
                raise FormatError(
                    f"the recipe {self.recipe.name} has {space} among its `multiples`, and no line with it; "
                    "name a space of its table"
                )
            small, large = self._size(space, self.small), self._size(space, self.large)
            if large % small:
                raise UnsupportedError(
                    f"the recipe {self.recipe.name} says that {space} grows from {small} to multiples alone; "
                    f"give {large // small * small} or {(large // small + 1) * small}"
                )

    def _ties(self) -> None:
        """What a head with the embeddings' weight reads is divided by how often that weight then counts."""
        by_weight: dict[int, str] = {}
        for t in self.tensors.values():
            first = by_weight.setdefault(id(t.value), t.name)
            if first == t.name or not self._grows(t):
                continue
            pair = (t, self.tensors[first])
            said = [(head, other) for head, other in (pair, pair[::-1]) if head.line.is_tied_to(other.name)]
            if not said:
                raise MismatchError(
                    f"{t.name} is {first}, and the recipe {self.recipe.name} does not say that they are "
                    f"tied; end the line of one with `tied` and the other's module: {t.line.pattern} ... "
                    f"tied {self.tensors[first].line.pattern}"
                )
            if (pair[0].roles, pair[0].line.reads) == (pair[1].roles, pair[1].line.reads):
                continue  # both write, or both read, the same
            head, other = said[0]
            if "reads" not in head.roles or "reads" in other.roles or FIXED not in head.line.writes:
                raise UnsupportedError(
                    f"{head.name} and {other.name} are one weight, and no embedding and the head that reads "
                    "what it writes: no lossless expansion is known for that; untie them first"
                )
            space = head.line.reads[0]
            small, large = self._size(space, self.small), self._size(space, self.large)
            self.divided[space] = float(large // small)
            if (
                space not in self.same or space in self.handed_on
            ):  # a batch norm's has copies of another number
                raise UnsupportedError(
                    f"{head.name} has the embeddings' weight and reads {space}, which no norm writes that "
                    "could be divided by the number of copies; untie the weights first"
                )
            beside = next((other.path for other in self.tensors.values() if _adds_or_norms(other, space)), "")
            if beside and self.divided[space] > 1:
                raise UnsupportedError(
                    f"{head.name} has the embeddings' weight and reads {space}, which cannot be divided by "
                    f"the number of copies as {beside} adds to it or norms it; untie the weights first"
                )

    def _grows(self, t: Tensor) -> bool:
        spaces = [t.line.reads if role == "reads" else t.line.writes for role in t.roles if role]
        return any(FIXED not in each for each in spaces)

    def _growth(self, space: str, place: Place | None) -> Growth:
        """How a space grows; in a new block whose additions cancel, in pairs."""
        pairs = place is not None and place.is_new and self.new_blocks == "cancel"
        if space in ATTENTION:
            return attention(heads(self.small), heads(self.large), pairs)[space]
        if space in self.handed_on:
            return self._growth(self.handed_on[space], place)
        small, large = self._size(space, self.small), self._size(space, self.large)
        pattern = self.pattern.get(space, CIRCULAR)
        if pattern == CIRCULAR:
            return (
                paired(small, large)
                if pairs and space not in self.recipe.residual
                else circular(small, large)
            )
        return padded(small, large, pattern)

    def _shares(self, space: str, place: Place | None, split: str) -> torch.Tensor:
        """The parts that copies of a space have; those of attention's spaces go together."""
        block = place.path if place and space not in self.recipe.residual else ""
        name = "attention" if space in ATTENTION else space
        return shares_of(self._growth(space, place), split, self.seed, f"{name} {block}")

    def _axis(self, t: Tensor, dim: int, place: Place | None) -> Axis | None:
        role = t.roles[dim]
        spaces = t.line.reads if role == "reads" else t.line.writes
        if not role or FIXED in spaces:
            return None
        name = ", ".join(spaces)
        try:
            growth = stacked([self._growth(space, place) for space in spaces])
            unit = t.value.shape[dim] // growth.num_small if role == "reads" else 1
            read = Growth(growth.num_small, growth.index, growth.rest).by_unit(unit)
        except UnsupportedError as error:
            raise UnsupportedError(f"{t.name}, {name}: {error}") from error
        if role == "writes":
            is_mixed = any(self._is_mixed(space) for space in spaces)
            split = "even" if is_mixed else self.split
            shares = torch.cat([self._shares(space, place, split) for space in spaces])
            return Axis(name, growth, shares, is_exact=not is_mixed)
        shares = torch.cat([self._shares(space, place, self.split) for space in spaces])
        return Axis(name, read, shares.repeat_interleave(unit), is_read=True)

    def _is_mixed(self, space: str) -> bool:
        """Whether gradients of a space's copies are no parts of one: a norm hands on one mean of all of them,
        whatever the parts that its readers have; copies of a key/value head may have other heads to serve
        each.
        """
        if space in ("key", "value"):
            before, after = heads(self.small), heads(self.large)
            return after.queries // after.groups < before.queries // before.groups
        over = (module_kinds.LAYER, module_kinds.RMS)
        return any(t.norm in over and t.line.reads[:1] == (space,) for t in self.tensors.values())

    def _maps(self, t: Tensor) -> Iterator[TensorMap]:
        for name, place in self.depth.copies(t.name):
            axes = tuple(self._axis(t, dim, place) for dim in range(t.value.ndim))
            made = TensorMap(name, t.name, tuple(t.value.shape), axes)
            made = self._of_norm(t, made) if t.norm else self._of_product(t, made)
            if place is not None and place.is_new:
                block = self.depth.block_of(t.name)
                beside = [
                    other for other in self.tensors.values() if self.depth.block_of(other.name) == block
                ]
                how = silenced(self.recipe, t, made, beside, self.new_blocks)
                made = replace(made, is_new=True, silenced=how)
            yield self._with_noise(t, made)

    def _of_norm(self, t: Tensor, made: TensorMap) -> TensorMap:
        """gamma* = sqrt(s) [gamma x k, zeta], beta* = [beta x k, 0] (LEMON, section 3.2): s is what the
        variance is multiplied by. Divided where a tied head reads.
        """
        kind = t.name.rpartition(".")[2]
        if t.norm == module_kinds.BATCH or made.axes[0] is None:
            return made
        divided = self.divided.get(t.line.writes[0], 1.0)
        growth = made.axes[0].growth
        if kind == "bias":
            return replace(made, factor=1.0 / divided)
        axis = replace(made.axes[0], growth=replace(growth, rest=FREE))
        return replace(made, axes=(axis,), factor=math.sqrt(_shrinks(growth)) / divided)

    def _of_product(self, t: Tensor, made: TensorMap) -> TensorMap:
        """As its axes say; what reads a divided space makes up for it, but for the head that it is divided
        for.
        """
        if "reads" not in t.roles:
            return made
        embeddings = next((x for x in self.tensors.values() if x is not t and x.value is t.value), None)
        if embeddings is not None and t.line.tied:
            axes = tuple(self._axis(embeddings, dim, None) for dim in range(t.value.ndim))
            return replace(made, axes=axes, tied=t.line.tied)
        return replace(made, factor=self.divided.get(t.line.reads[0], 1.0))

    def _with_noise(self, t: Tensor, made: TensorMap) -> TensorMap:
        """What is drawn has the deviation of what is there; less for a norm's weight."""
        loose = [a.growth for a in made.axes if a is not None and a.is_loose]
        if not loose or made.silenced == "zero" or (self.split == "even" and made.silenced != "cancel"):
            return made
        if t.value.is_meta:  # to be looked at: there is nothing to grow
            return made
        value = t.value.detach().double()
        if t.norm:
            return replace(made, rest_noise=_ZETA * float(value.square().mean().sqrt()) * made.factor)
        deviation = float(value.std()) if value.numel() > 1 else abs(float(value.sum()))
        has_copies = int(loose[0].num_copies.max()) > 1 and (
            self.split == "random" or made.silenced == "cancel"
        )
        has_rest = not bool(loose[0].is_copy.all())
        return replace(
            made, noise=deviation * made.factor * has_copies, rest_noise=deviation * made.factor * has_rest
        )

    def _eps(self) -> dict[str, float]:
        """What eps of each norm becomes, where the variance that it is added to shrinks."""
        found = {}
        for t in self.tensors.values():
            if t.norm not in (module_kinds.LAYER, module_kinds.RMS) or t.kind != "weight":
                continue
            growth = self._growth(t.line.reads[0], None)
            if _shrinks(growth) != 1.0:
                for name, _ in self.depth.copies(t.name):
                    found[name.rpartition(".")[0]] = module_kinds.eps_of(t.module) * _shrinks(growth)
        return found


def _adds_or_norms(t: Tensor, space: str) -> bool:
    """Whether a space would not be the same divided: others add to it, or a norm reads it."""
    return space in (t.line.reads if t.norm else t.line.writes if "writes" in t.roles else ())


def _shrinks(growth: Growth) -> float:
    """s: what the mean square of a grown vector is of that of the small one, around the same mean."""
    return float(growth.is_copy.sum()) / growth.num_large


def _one_or_all(numbers: tuple[int, ...]) -> int:
    return numbers[0] if len(set(numbers)) == 1 else numbers  # type: ignore[return-value]
