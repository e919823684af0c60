"""Depth: the block of the small model that each block of the grown model copies."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from qsync.errors import UnsupportedError, shortened
from qsync.expansion.recipe.recipe import Recipe


@dataclass(frozen=True, slots=True)
class GrownBlock:
    """One block of the grown model: its path, the path of its source, and whether it is new."""

    path: str
    source: str
    is_new: bool


@dataclass(frozen=True, slots=True)
class Depth:
    """All blocks of the grown model, by the path of the small model's block that they copy."""

    grown_blocks: Mapping[str, tuple[GrownBlock, ...]]
    num_layers: tuple[int, ...] = ()
    num_before: tuple[int, ...] = ()

    @property
    def new_paths(self) -> tuple[str, ...]:
        """Return the paths of all new blocks."""
        return tuple(copy.path for copies in self.grown_blocks.values() for copy in copies if copy.is_new)

    @property
    def sources(self) -> tuple[tuple[int, ...], ...]:
        """Return the number of the copied block, by group and block of the grown model."""
        found: dict[str, list[int]] = {}
        for copies in self.grown_blocks.values():
            for grown in copies:
                group, _, number = grown.source.rpartition(".")
                found.setdefault(group, []).append(int(number))
        return tuple(map(tuple, found.values()))

    def block_of(self, name: str) -> str:
        """Return the path of the block that holds a parameter of the small model, or ""."""
        parts = name.split(".")
        paths = (".".join(parts[:n]) for n in range(len(parts), 0, -1))
        return next((path for path in paths if path in self.grown_blocks), "")

    def source_of(self, name: str) -> str:
        """Return the small model's name of a module or parameter of the grown model.

        A name outside of blocks stays as it is.
        """
        sources = {grown.path: grown.source for copies in self.grown_blocks.values() for grown in copies}
        parts = name.split(".")
        for n in range(len(parts), 0, -1):
            if (path := ".".join(parts[:n])) in sources:
                return sources[path] + name[len(path) :]
        return name

    def copies(self, name: str) -> tuple[tuple[str, GrownBlock | None], ...]:
        """Return the names in the grown model of one parameter, one for every copy of its block."""
        block = self.block_of(name)
        if not block:
            return ((name, None),)
        return tuple((grown.path + name[len(block) :], grown) for grown in self.grown_blocks[block])


def depth_of(recipe: Recipe, shapes: Mapping[str, Sequence[int]]) -> Depth:
    """Return the block that every block of the grown model copies.

    `shapes` holds the shapes of the small model's parameters and buffers by name. A new block follows the
    block that it copies, and the copied blocks are spread evenly. Only blocks with the shapes of the last
    block of their group are copied. The first block of a ResNet stage changes the resolution and is
    therefore not.

    Raises:
        UnsupportedError: Fewer layers are requested, or more than twice as many (LEMON, section 3.4).
    """
    wanted = recipe.target.get("layers")
    groups = _groups(recipe.blocks, shapes) if recipe.blocks else {}
    if not groups:
        if wanted is not None:
            where = (
                f"no block of the model is called {recipe.blocks}"
                if recipe.blocks
                else "its recipe names no blocks"
            )
            raise UnsupportedError(
                f"{recipe.name} cannot grow in depth: {where}; give blocks='PATH.*', or leave out layers"
            )
        return Depth({})
    before = tuple(len(numbers) for numbers in groups.values())
    after = wanted if isinstance(wanted, tuple) else tuple(wanted or n for n in before)
    if len(after) != len(before):
        raise UnsupportedError(
            f"{recipe.name} has {len(before)} groups of blocks, found {len(after)} numbers of layers"
        )
    grown_blocks: dict[str, tuple[GrownBlock, ...]] = {}
    for (prefix, numbers), layers in zip(groups.items(), after, strict=True):
        grown_blocks.update(_grow_group(prefix, numbers, layers, shapes))
    return Depth(grown_blocks, after, before)


def _groups(pattern: str, shapes: Mapping[str, Sequence[int]]) -> dict[str, list[int]]:
    """Return the numbers of the blocks by the path in front of the number."""
    *groups, last = pattern.split("*")
    if not groups or last:
        raise UnsupportedError(f"blocks must be a pattern such as PATH.*, found {shortened(pattern)}")
    # The pattern may match within a path: a model with a head contains the model without.
    expression = re.compile(r"((?:.+?\.)?" + r"[^.]+".join(map(re.escape, groups)) + r")(\d+)\.")
    found: dict[str, set[int]] = {}
    for name in shapes:
        if match := expression.match(name):
            found.setdefault(match[1], set()).add(int(match[2]))
    return {prefix: sorted(numbers) for prefix, numbers in found.items()}


def _grow_group(
    prefix: str, numbers: Sequence[int], layers: int, shapes: Mapping[str, Sequence[int]]
) -> dict[str, tuple[GrownBlock, ...]]:
    """Return the copies of every block of one group."""
    inside = {number: _inside(f"{prefix}{number}.", shapes) for number in numbers}
    able = [number for number in numbers if inside[number] == inside[numbers[-1]]]
    num_new = layers - len(numbers)
    if num_new < 0:
        raise UnsupportedError(
            f"{prefix}* would shrink from {len(numbers)} blocks to {layers}, which does not keep the "
            f"model's function; give {len(numbers)} or more"
        )
    if num_new > len(numbers):
        raise UnsupportedError(
            f"{prefix}* can grow from {len(numbers)} to at most {2 * len(numbers)} blocks, found {layers}; "
            "grow in two steps"
        )
    copied = [able[(2 * i + 1) * len(able) // (2 * num_new)] for i in range(num_new)]
    found, next_number = {}, numbers[0]
    for number in numbers:
        grown_blocks = []
        for is_new in (False, *[True] * copied.count(number)):
            grown_blocks.append(GrownBlock(f"{prefix}{next_number}", f"{prefix}{number}", is_new))
            next_number += 1
        found[f"{prefix}{number}"] = tuple(grown_blocks)
    return found


def _inside(block: str, shapes: Mapping[str, Sequence[int]]) -> dict[str, tuple[int, ...]]:
    """Return the shapes of the tensors in a block by their names in the block."""
    return {name[len(block) :]: tuple(shape) for name, shape in shapes.items() if name.startswith(block)}
