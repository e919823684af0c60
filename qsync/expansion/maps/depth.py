"""Depth: which block of the grown model comes from which of the small one, and which of them are new."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from qsync.errors import UnsupportedError
from qsync.expansion.recipe.recipes import Recipe


@dataclass(frozen=True, slots=True)
class Place:
    """One block of the grown model: its path, that of the small model's block, and whether it is new."""

    path: str
    source: str
    is_new: bool


@dataclass(frozen=True, slots=True)
class Depth:
    """All blocks of the grown model, by the path of the block of the small model that they copy."""

    places: Mapping[str, tuple[Place, ...]]
    num_layers: tuple[int, ...] = ()
    num_before: tuple[int, ...] = ()

    def block_of(self, name: str) -> str:
        """The block that a parameter of the small model is in; "" for none."""
        parts = name.split(".")
        paths = (".".join(parts[:n]) for n in range(len(parts), 0, -1))
        return next((path for path in paths if path in self.places), "")

    def source_of(self, name: str) -> str:
        """What a module or parameter of the grown model is called in the small one; its own name where depth
        changes nothing.
        """
        sources = {place.path: place.source for places in self.places.values() for place in places}
        parts = name.split(".")
        for n in range(len(parts), 0, -1):
            if (path := ".".join(parts[:n])) in sources:
                return sources[path] + name[len(path) :]
        return name

    def copies(self, name: str) -> tuple[tuple[str, Place | None], ...]:
        """What a parameter of the small model is called in the grown one, once for every copy of its
        block.
        """
        block = self.block_of(name)
        if not block:
            return ((name, None),)
        return tuple((place.path + name[len(block) :], place) for place in self.places[block])


def depth_of(recipe: Recipe, shapes: Mapping[str, Sequence[int]]) -> Depth:
    """Where every block goes; `shapes` are those of the small model's parameters and buffers, by name.

    A new block follows the one that it copies, and the copied ones are spread evenly. Only blocks that look
    like the last of their group are copied: a ResNet's first block of a stage, which changes the resolution,
    is not. Raises UnsupportedError for fewer layers, or more than twice as many (LEMON, section 3.4).
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
                f"{recipe.name} cannot grow in depth: {where}; give blocks='PATH.*', or leave layers out"
            )
        return Depth({})
    before = tuple(len(numbers) for numbers in groups.values())
    after = wanted if isinstance(wanted, tuple) else tuple(wanted or n for n in before)
    if wanted is None:
        after = before
    if len(after) != len(before):
        raise UnsupportedError(
            f"{recipe.name} has {len(before)} groups of blocks, found {len(after)} numbers of layers"
        )
    places: dict[str, tuple[Place, ...]] = {}
    for (prefix, numbers), layers in zip(groups.items(), after, strict=True):
        places.update(_places(prefix, numbers, layers, shapes))
    return Depth(places, after, before)


def _groups(pattern: str, shapes: Mapping[str, Sequence[int]]) -> dict[str, list[int]]:
    """The numbers of the blocks by the path that stands before them."""
    *groups, last = pattern.split("*")
    if not groups or last:
        raise UnsupportedError(f"blocks are called PATH.*, with the number last, found {pattern!r}")
    # A path may begin anywhere: a model with a head holds the model without.
    expression = re.compile(r"((?:.+?\.)?" + r"[^.]+".join(map(re.escape, groups)) + r")(\d+)\.")
    found: dict[str, set[int]] = {}
    for name in shapes:
        if match := expression.match(name):
            found.setdefault(match[1], set()).add(int(match[2]))
    return {prefix: sorted(numbers) for prefix, numbers in found.items()}


def _places(
    prefix: str, numbers: Sequence[int], layers: int, shapes: Mapping[str, Sequence[int]]
) -> dict[str, tuple[Place, ...]]:
    inside = {number: _inside(f"{prefix}{number}.", shapes) for number in numbers}
    able = [number for number in numbers if inside[number] == inside[numbers[-1]]]
    num_new = layers - len(numbers)
    if num_new < 0:
        raise UnsupportedError(
            f"{prefix}* would shrink from {len(numbers)} blocks to {layers}, and nothing that shrinks keeps "
            f"its function; give {len(numbers)} or more"
        )
    if num_new > len(numbers):
        raise UnsupportedError(
            f"{prefix}* grows from {len(numbers)} blocks to {2 * len(numbers)} at most, found {layers}; "
            "grow twice"
        )
    copied = [able[(2 * i + 1) * len(able) // (2 * num_new)] for i in range(num_new)]
    found, next_number = {}, numbers[0]
    for number in numbers:
        places = []
        for is_new in (False, *[True] * copied.count(number)):
            places.append(Place(f"{prefix}{next_number}", f"{prefix}{number}", is_new))
            next_number += 1
        found[f"{prefix}{number}"] = tuple(places)
    return found


def _inside(block: str, shapes: Mapping[str, Sequence[int]]) -> dict[str, tuple[int, ...]]:
    return {name[len(block) :]: tuple(shape) for name, shape in shapes.items() if name.startswith(block)}
