"""Plan an expansion: choose the map of every tensor by the recipe, before anything is built."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import torch

from qsync.errors import FormatError, MismatchError, UnsupportedError, shortened
from qsync.expansion.maps.depth import Depth, GrownBlock, depth_of
from qsync.expansion.maps.space_growth import (
    AVERAGE,
    CIRCULAR,
    ZERO,
    Growth,
    attention,
    circular,
    laid_out,
    padded,
    paired,
    stacked,
)
from qsync.expansion.maps.tensor_maps import FREE, SPLITS, Axis, TensorMap, shares_of
from qsync.expansion.maps.tensor_roles import Tensor, tensors_of
from qsync.expansion.maps.zero_init_blocks import check_blocks, output_init_of
from qsync.expansion.plan.expansion_plan import ExpansionPlan
from qsync.expansion.recipe import module_kinds
from qsync.expansion.recipe.recipe import FIXED, Line, Recipe, attention_part
from qsync.expansion.recipe.sizes import Extent, heads, size_name, small_sizes, target_sizes

DEPTHS = ("zero", "cancel")
# New entries of a norm's weight relative to the others: small, but not 0, which would never learn.
_ZETA = 0.1


def plan_expansion(
    model: torch.nn.Module, recipe: Recipe, *, split: str = "random", depth: str = "zero", seed: int = 0
) -> ExpansionPlan:
    """Choose the map of every tensor of `model` for the target sizes of the recipe.

    Nothing is built, and the model stays unchanged.

    Args:
        model: The trained model.
        recipe: The recipe with target sizes (`Recipe.to`).
        split: How copies of a value share the weights that read it. "random": every element by itself, the
            copies differ most. "scalar": one random share per value; an optimizer's moments can be carried
            over. "even": equal shares, with which copies stay equal for ever; a control.
        depth: How new blocks are initialized to add nothing. "zero": output layers are 0. "cancel": random
            fan-out weights that sum to 0; the whole block learns from the first step.
        seed: The seed of all random parts.

    Returns:
        The plan. `print` shows it as a table, `plan.expand(model)` builds the grown model.

    Raises:
        UnsupportedError: No lossless expansion exists: a size shrinks or does not divide, the recipe does not
            name a module, or weights are quantized. The message names the module and a remedy.
        MismatchError: Model and recipe contradict each other, or weights are tied that the recipe does not
            tie.
        FormatError: An option is unknown, or the recipe has no target.

    Example:
        >>> print(qsync.plan_expansion(model, recipe.to(width=768, layers=12)))
    """
    for what, given, known in (("split", split, SPLITS), ("depth", depth, DEPTHS)):
        if given not in known:
            raise FormatError(f"unknown {what} {shortened(given)}: choose from {', '.join(known)}")
    if type(seed) is not int:
        raise FormatError(f"seed must be a whole number, found {shortened(seed)}; give e.g. 0")
    if not isinstance(recipe, Recipe):
        raise FormatError(
            f"recipe must be a qsync.Recipe, found {type(recipe).__name__}; "
            "use qsync.recipe_of(model).to(...)"
        )
    if not recipe.target:
        raise FormatError(
            f"the recipe {recipe.name} has no target sizes; use recipe.to(width=..., layers=...)"
        )
    return _Planner(model, recipe, split, depth, seed).plan()


def sizes_of(model: torch.nn.Module, recipe: Recipe) -> dict[str, Any]:
    """Return the sizes of a model by name, as a recipe reads them off its shapes; `layers` among them."""
    planner = _Planner(model, replace(recipe, target={}), "even", "zero", 0)
    planner.read_sizes()
    layers = {"layers": _one_or_all(before)} if (before := planner.depth.num_before) else {}
    return {**planner.small, **layers}


@dataclass(slots=True)
class _Planner:
    """Work out the maps of one model, step by step."""

    model: torch.nn.Module
    recipe: Recipe
    split: str
    new_blocks: str
    seed: int
    tensors: dict[str, Tensor] = field(default_factory=dict)
    norm_input: dict[str, str] = field(default_factory=dict)  # norm's output space -> its input space
    batch_norm_input: dict[str, str] = field(default_factory=dict)  # the same for batch norms only
    patterns: dict[str, str] = field(default_factory=dict)
    small: dict[str, int] = field(default_factory=dict)
    large: dict[str, int] = field(default_factory=dict)
    divisors: dict[str, float] = field(default_factory=dict)  # space of a tied head -> divisor
    depth: Depth = field(default_factory=lambda: Depth({}))

    def read_sizes(self) -> dict[str, int]:
        """Read the sizes off the model; return those that it states itself."""
        self.tensors = tensors_of(self.model, self.recipe)
        shapes = {name: t.value.shape for name, t in self.tensors.items()}
        self.depth = depth_of(self.recipe, shapes)
        self.norm_input = {t.line.writes[0]: t.line.reads[0] for t in self.tensors.values() if t.norm}
        self.batch_norm_input = {
            t.line.writes[0]: t.line.reads[0]
            for t in self.tensors.values()
            if t.norm == module_kinds.BATCH and t.line.writes != t.line.reads
        }
        known = self._stated_sizes()
        self.small = small_sizes(self.recipe, known, self._extents(), self.norm_input)
        return known

    def plan(self) -> ExpansionPlan:
        """Return the plan."""
        known = self.read_sizes()
        check_blocks(self.recipe, self.tensors.values(), self.depth)
        self.large = target_sizes(self.recipe, self.small, known)
        self._check_multiples()
        self._set_patterns()
        self._divide_for_tied_heads()
        maps = {m.name: m for t in self.tensors.values() for m in self._maps(t)}
        sizes = dict(self.large)
        small = dict(self.small)
        if self.depth.num_layers:
            sizes["layers"] = _one_or_all(self.depth.num_layers)
            small["layers"] = _one_or_all(self.depth.num_before)
        return ExpansionPlan(
            self.recipe, maps, self._eps(), small, sizes, self.depth, self.split, self.new_blocks, self.seed
        )

    def _stated_sizes(self) -> dict[str, int]:
        """Return the sizes that the model states itself, except layers, which are counted."""
        read = self.recipe.read(self.model)
        if isinstance(read, Mapping):
            known = {name: size for name, size in read.items() if name != "layers"}
            if all(type(size) is int and size > 0 for size in known.values()):
                return known
        raise FormatError(
            f"`read` of the recipe {self.recipe.name} returned {shortened(read)}; it must return sizes by "
            'name, such as {"heads": 4}'
        )

    def _extents(self) -> Iterator[Extent]:
        """Yield every axis that is read or written."""
        for t in self.tensors.values():
            for dim, (role, length) in enumerate(zip(t.roles, t.value.shape, strict=True)):
                if role:
                    yield Extent(t.name, t.spaces(dim), length, role == "writes")

    def _size(self, space: str, sizes: Mapping[str, int]) -> int:
        """Return the size of a space."""
        return sizes[size_name(self.recipe, space, self.norm_input)]

    def _set_patterns(self) -> None:
        """Choose the pattern of each space by the norms that write and read it."""
        wanted: dict[str, dict[str, str]] = {}
        for t in self.tensors.values():
            if t.norm:
                reads, writes = t.line.reads[0], t.line.writes[0]
                if part := attention_part(reads) or attention_part(writes):
                    self._check_norm_of_heads(t, part[1])
                    continue
                if t.norm == module_kinds.BATCH:
                    wanted.setdefault(reads, {}).setdefault(CIRCULAR, t.path)
                    continue
                if isinstance(t.module, torch.nn.GroupNorm):  # a mean of channels has positions of its own
                    wanted.setdefault(reads, {}).setdefault(ZERO, t.path)
                wanted.setdefault(reads, {}).setdefault(
                    AVERAGE if t.norm == module_kinds.LAYER else ZERO, t.path
                )
                wanted.setdefault(writes, {}).setdefault(ZERO, t.path)
        for space, patterns in wanted.items():
            small, large = self._size(space, self.small), self._size(space, self.large)
            if len(patterns) > 1 and large % small:
                raise UnsupportedError(
                    f"{' and '.join(patterns.values())} need different fillings of {space} "
                    f"({', '.join(patterns)}), as with norms after the residual sum: {small} can grow "
                    f"losslessly only to its multiples; give {large // small * small} or "
                    f"{(large // small + 1) * small}"
                )
            self.patterns[space] = next(iter(patterns))

    def _check_norm_of_heads(self, t: Tensor, number: str) -> None:
        """Raise UnsupportedError unless a norm over all heads keeps its statistics: copies are whole."""
        if t.line.reads != t.line.writes:
            raise UnsupportedError(
                f"{t.path} normalizes {t.line.reads[0]} to {t.line.writes[0]}, only one of which has heads; "
                f"if it normalizes each head separately, write `{t.line.pattern}  _ -> _`"
            )
        before, after = heads(self.small, number), heads(self.large, number)
        if after.queries % before.queries or after.groups % before.groups or after.width != before.width:
            raise UnsupportedError(
                f"{t.path} normalizes all heads together, so that they grow losslessly only to multiples of "
                f"their number; give heads{number}={after.queries // before.queries * before.queries} or "
                f"{(after.queries // before.queries + 1) * before.queries}, of equal width"
            )

    def _check_multiples(self) -> None:
        """Raise UnsupportedError for a rest in a space that grows only to multiples."""
        for space in self.recipe.multiples:
            if size_name(self.recipe, space, self.norm_input) not in self.small:
                raise FormatError(
                    f"the recipe {self.recipe.name} lists {space} in `multiples`, but no line has it; name "
                    "a space of its table"
                )
            small, large = self._size(space, self.small), self._size(space, self.large)
            if large % small:
                raise UnsupportedError(
                    f"the recipe {self.recipe.name} allows {space} to grow from {small} only to multiples; "
                    f"give {large // small * small} or {(large // small + 1) * small}"
                )

    def _divide_for_tied_heads(self) -> None:
        """Divide the input of a tied head by the number of copies of the embeddings."""
        by_weight: dict[int, str] = {}
        for t in self.tensors.values():
            first = by_weight.setdefault(id(t.value), t.name)
            if first == t.name or not self._grows(t):
                continue
            pair = (t, self.tensors[first])
            stated = [(head, other) for head, other in (pair, pair[::-1]) if head.line.is_tied_to(other.name)]
            if not stated:
                raise MismatchError(
                    f"{t.name} is tied to {first}, but the recipe {self.recipe.name} does not declare it; "
                    f"end one's line with `tied` and the other's module: {t.line.pattern} ... "
                    f"tied {self.tensors[first].line.pattern}"
                )
            if (pair[0].roles, pair[0].line.reads) == (pair[1].roles, pair[1].line.reads):
                continue  # both write, or both read, the same
            head, other = stated[0]
            if "reads" not in head.roles or "reads" in other.roles or FIXED not in head.line.writes:
                raise UnsupportedError(
                    f"{head.name} and {other.name} share a weight, but are not an embedding and its head, "
                    "for which no lossless expansion is known; untie them first"
                )
            space = head.line.reads[0]
            small, large = self._size(space, self.small), self._size(space, self.large)
            self.divisors[space] = float(large // small)
            # The output of a batch norm is not divided: its fan-out is that of another space.
            if space not in self.norm_input or space in self.batch_norm_input:
                raise UnsupportedError(
                    f"{head.name} has the embeddings' weight and reads {space}, but no norm writes {space} "
                    "to be divided by the number of copies; untie the weights first"
                )
            beside = next((other.path for other in self.tensors.values() if _adds_or_norms(other, space)), "")
            if beside and self.divisors[space] > 1:
                raise UnsupportedError(
                    f"{head.name} has the embeddings' weight and reads {space}, which cannot be divided by "
                    f"the number of copies, because {beside} adds to it or norms it; untie them first"
                )

    def _grows(self, t: Tensor) -> bool:
        """Return whether any axis of a tensor grows."""
        return any(role and FIXED not in t.spaces(dim) for dim, role in enumerate(t.roles))

    def _growth(self, space: str, grown_block: GrownBlock | None) -> Growth:
        """Return the growth of a space; in pairs within a new block whose output cancels."""
        pairs = grown_block is not None and grown_block.is_new and self.new_blocks == "cancel"
        if part := attention_part(space):
            kind, number = part
            return attention(heads(self.small, number), heads(self.large, number), pairs)[kind]
        if space in self.batch_norm_input:
            return self._growth(self.batch_norm_input[space], grown_block)
        small, large = self._size(space, self.small), self._size(space, self.large)
        pattern = self.patterns.get(space, CIRCULAR)
        if pattern == CIRCULAR:
            return (
                paired(small, large)
                if pairs and space not in self.recipe.residual
                else circular(small, large)
            )
        return padded(small, large, pattern)

    def _shares(self, space: str, grown_block: GrownBlock | None, split: str) -> torch.Tensor:
        """Return the shares of a space's copies; attention's spaces have common shares."""
        block = grown_block.path if grown_block and space not in self.recipe.residual else ""
        name = "attention" if attention_part(space) else space
        if self.divisors.get(space, 1.0) > 1:  # a tied head reads whole copies
            split = "even"
        return shares_of(self._growth(space, grown_block), split, self.seed, f"{name} {block}")

    def _axis(self, t: Tensor, dim: int, grown_block: GrownBlock | None) -> Axis | None:
        """Return the map of one axis, None where it does not grow."""
        role = t.roles[dim]
        if not role or FIXED in (spaces := t.spaces(dim)):
            return None
        name = ", ".join(spaces)
        try:
            rounds = self._num_rounds(t.line, self.small), self._num_rounds(t.line, self.large)
            growths = [self._growth(space, grown_block) for space in spaces]
            growth = stacked(growths, rounds if role == "writes" else (1, 1))
            unit = t.value.shape[dim] // growth.num_small if role == "reads" else 1
            read = Growth(growth.num_small, growth.index, growth.rest).by_unit(unit)
        except UnsupportedError as error:
            raise UnsupportedError(f"{t.name}, {name}: {error}") from error
        if role == "writes":
            is_mixed = any(self._mixes_gradients(space) for space in spaces)
            split = "even" if is_mixed else self.split
            shares = laid_out([self._shares(space, grown_block, split) for space in spaces], rounds[1])
            return Axis(name, growth, shares, is_exact=not is_mixed)
        shares = torch.cat([self._shares(space, grown_block, self.split) for space in spaces])
        return Axis(name, read, shares.repeat_interleave(unit), is_read=True)

    def _num_rounds(self, line: Line, sizes: Mapping[str, int]) -> int:
        """Return in how many rounds the written spaces of a line lie in one axis."""
        part = attention_part(line.writes[0])
        if line.layout == "|" and part:
            return heads(sizes, part[1]).groups
        return self._size(line.writes[0], sizes) if line.layout != "," else 1

    def _mixes_gradients(self, space: str) -> bool:
        """Return whether the gradients of a space's copies are no fixed shares of one gradient.

        A norm returns one mean over all copies, whatever the shares of their readers. Copies of a key/value
        head may serve different query heads.
        """
        kind, number = attention_part(space) or ("", "")
        if kind in ("key", "value", "kv_heads"):
            before, after = heads(self.small, number), heads(self.large, number)
            return after.queries // after.groups < before.queries // before.groups
        over = (module_kinds.LAYER, module_kinds.RMS)
        return any(t.norm in over and t.line.reads[:1] == (space,) for t in self.tensors.values())

    def _maps(self, t: Tensor) -> Iterator[TensorMap]:
        """Yield the maps of one tensor, one for every copy of its block."""
        for name, grown_block in self.depth.copies(t.name):
            axes = tuple(self._axis(t, dim, grown_block) for dim in range(t.value.ndim))
            made = TensorMap(name, t.name, tuple(t.value.shape), axes)
            made = self._norm_map(t, made) if t.norm else self._product_map(t, made)
            if grown_block is not None and grown_block.is_new:
                block = self.depth.block_of(t.name)
                beside = [
                    other for other in self.tensors.values() if self.depth.block_of(other.name) == block
                ]
                how = output_init_of(self.recipe, t, made, beside, self.new_blocks)
                if how == "zero" and t.norm and t.kind == "weight":
                    made = replace(made, added=-module_kinds.weight_offset(t.module))
                made = replace(made, is_new=True, output_init=how)
            yield self._with_noise(t, made)

    def _norm_map(self, t: Tensor, made: TensorMap) -> TensorMap:
        """Return the map of a norm's weight or bias.

        gamma* = sqrt(s) [gamma x k, zeta], beta* = [beta x k, 0] (LEMON, section 3.2), with s the factor of
        the variance. Both are divided where a tied head reads the norm. A norm that multiplies by gamma + c
        gets (gamma + c)* - c.
        """
        if t.norm == module_kinds.BATCH or made.axes[0] is None:
            return made
        divided = self.divisors.get(t.line.writes[0], 1.0)
        growth = made.axes[0].growth
        if t.kind == "bias":
            return replace(made, factor=1.0 / divided)
        axis = replace(made.axes[0], growth=replace(growth, rest=FREE))
        factor = math.sqrt(_variance_ratio(growth)) / divided
        added = (factor - 1.0) * module_kinds.weight_offset(t.module)
        return replace(made, axes=(axis,), factor=factor, added=added)

    def _product_map(self, t: Tensor, made: TensorMap) -> TensorMap:
        """Return the map of a product's weight or bias.

        Readers of a divided space compensate for the division, except for the tied head.
        """
        if "reads" not in t.roles:
            return made
        embeddings = next((x for x in self.tensors.values() if x is not t and x.value is t.value), None)
        if embeddings is not None and t.line.tied:
            axes = tuple(self._axis(embeddings, dim, None) for dim in range(t.value.ndim))
            return replace(made, axes=axes, tied=t.line.tied)
        return replace(made, factor=self.divisors.get(t.line.reads[0], 1.0))

    def _with_noise(self, t: Tensor, made: TensorMap) -> TensorMap:
        """Return the map with noise as large as the weights, or smaller for a norm."""
        loose = [a.growth for a in made.axes if a is not None and a.takes_noise]
        is_silent = made.is_new and not made.output_init and self.new_blocks == "zero"
        if is_silent and all(growth.is_identity for growth in loose):
            return self._with_free_noise(t, made)
        if not loose or made.output_init == "zero" or (self.split == "even" and made.output_init != "cancel"):
            return made
        if t.value.is_meta:  # printing a plan needs no weights
            return made
        value = t.value.detach().double()
        if t.norm:
            return replace(made, rest_noise=_ZETA * float(value.square().mean().sqrt()) * made.factor)
        deviation = float(value.std()) if value.numel() > 1 else abs(float(value.sum()))
        # In a new block with silent output, all copies get the same gradient, whatever their shares.
        has_copies = int(loose[0].num_copies.max()) > 1 and (
            self.split == "random" or made.output_init == "cancel" or made.is_new
        )
        has_rest = not bool(loose[0].is_copy.all())
        return replace(
            made, noise=deviation * made.factor * has_copies, rest_noise=deviation * made.factor * has_rest
        )

    def _with_free_noise(self, t: Tensor, made: TensorMap) -> TensorMap:
        """Return the map of a silent block's tensor, whose copies along a written axis are arbitrary."""
        for dim, axis in enumerate(made.axes):
            if axis is None or t.roles[dim] != "writes" or t.line.writes[0] in self.recipe.residual:
                continue
            has_copies = int(axis.growth.num_copies.max()) > 1 and self.split != "even" and not t.norm
            if has_copies and not t.value.is_meta and t.value.numel() > 1:
                deviation = float(t.value.detach().double().std())
                return replace(made, noise=deviation * made.factor, noise_dim=dim)
        return made

    def _eps(self) -> dict[str, float]:
        """Return the new eps of every norm whose input has a smaller variance."""
        found = {}
        for t in self.tensors.values():
            if t.norm not in (module_kinds.LAYER, module_kinds.RMS) or t.kind != "weight":
                continue
            growth = self._growth(t.line.reads[0], None)
            if _variance_ratio(growth) != 1.0:
                for name, _ in self.depth.copies(t.name):
                    found[name.rpartition(".")[0]] = module_kinds.eps_of(t.module) * _variance_ratio(growth)
        return found


def _adds_or_norms(t: Tensor, space: str) -> bool:
    """Return whether division would change a space: others add to it, or a norm reads it."""
    return space in (t.line.reads if t.norm else t.line.writes if "writes" in t.roles else ())


def _variance_ratio(growth: Growth) -> float:
    """Return s, the ratio of the grown vector's mean square to the small one's."""
    return float(growth.is_copy.sum()) / growth.num_large


def _one_or_all(of_groups: tuple[Any, ...]) -> Any:
    """Return one value if all groups have the same, all values otherwise."""
    return of_groups[0] if len(set(of_groups)) == 1 else of_groups
