"""The size of every space before and after growth: stated, read off shapes, or default."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass

from qsync.errors import MismatchError, UnsupportedError, shortened
from qsync.expansion.recipe.recipe import FIXED, Recipe, attention_part

WIDTH_OF_HEADS = "head_dim"
_COUNTS = {"query": "heads", "mixed": "heads", "key": "kv_heads", "value": "kv_heads"}


@dataclass(frozen=True, slots=True)
class Extent:
    """One axis of a parameter: the spaces stacked in it, and its length."""

    parameter: str
    spaces: tuple[str, ...]
    length: int
    is_written: bool


def size_name(recipe: Recipe, space: str, norm_input: Mapping[str, str]) -> str:
    """Return the name of a space's size.

    `norm_input` maps a space that a norm writes to the space that it reads: both have one size.
    """
    for _ in norm_input:
        if space in recipe.sizes:
            break
        space = norm_input.get(space, space)
    return recipe.sizes.get(space, space)


def small_sizes(
    recipe: Recipe, known: Mapping[str, int], extents: Iterable[Extent], norm_input: Mapping[str, str]
) -> dict[str, int]:
    """Return every size of the small model by name.

    Raises:
        MismatchError: The shapes contradict the stated sizes.
        UnsupportedError: The number of heads is unknown.
    """
    found = {name: size for name, size in known.items() if isinstance(size, int)}
    grown = [e for e in extents if FIXED not in e.spaces]
    parts = {part[1]: None for e in grown for space in e.spaces if (part := attention_part(space))}
    for number in parts:
        heads, kv_heads = f"heads{number}", f"kv_heads{number}"
        if heads not in found:
            raise UnsupportedError(
                f"the recipe {recipe.name} has attention, but the number of heads is unknown: make its "
                f"`read` return "
                f'{{"{heads}": ...}} (and "{kv_heads}", where they are fewer)'
            )
        if found[heads] % found.setdefault(kv_heads, found[heads]):
            raise MismatchError(
                f"{found[heads]} heads cannot share {found[kv_heads]} key/value heads evenly; correct "
                "the recipe's `read`"
            )
    # Written axes first: they have the size of the space, while a reader may see a coordinate several times.
    for extent in sorted(grown, key=lambda e: not e.is_written):
        _solve_size(recipe, extent, found, norm_input)
    return found


def _solve_size(recipe: Recipe, extent: Extent, found: dict[str, int], norm_input: Mapping[str, str]) -> None:
    """Solve one axis for its unknown size, or check it against the known ones."""
    unit: dict[str, int] = {}  # multiplicity of each size in this axis
    for space in extent.spaces:
        kind, number = attention_part(space) or (space, "")
        is_each = kind in _COUNTS
        name = WIDTH_OF_HEADS + number if is_each else size_name(recipe, space, norm_input)
        unit[name] = unit.get(name, 0) + (found[_COUNTS[kind] + number] if is_each else 1)
    unknown = [name for name in unit if name not in found]
    left = extent.length - sum(num * found[name] for name, num in unit.items() if name in found)
    if len(unknown) == 1 and left > 0 and left % unit[unknown[0]] == 0:
        found[unknown[0]] = left // unit[unknown[0]]
        return
    total = sum(num * found.get(name, 0) for name, num in unit.items())
    repeated = not extent.is_written and len(extent.spaces) == 1 and total and extent.length % total == 0
    if unknown or not (left == 0 or repeated):
        sizes = ", ".join(
            f"{name} {found.get(name, '?')}" + (f" x {num}" if num > 1 else "") for name, num in unit.items()
        )
        raise MismatchError(
            f"{extent.parameter} has an axis of {extent.length}, but the recipe {recipe.name} has "
            f"{', '.join(extent.spaces)} there ({sizes}); correct that line of the recipe, or its sizes"
        )


def target_sizes(recipe: Recipe, small: Mapping[str, int], stated: Collection[str] = ()) -> dict[str, int]:
    """Return every size of the grown model; `stated` are the sizes that the model states itself.

    Raises:
        UnsupportedError: A size shrinks, is unknown, or does not divide.
    """
    asked = {name: size for name, size in recipe.target.items() if name != "layers"}
    for name, size in asked.items():
        if name not in small:
            known = ", ".join(sorted({*small, *(["layers"] if recipe.blocks else [])}))
            raise UnsupportedError(f"{recipe.name} has no size {shortened(name)}; choose from {known}")
        if not isinstance(size, int):
            raise UnsupportedError(
                f"{name} must be a single size, found {shortened(size)}; give one whole number"
            )
        if size < small[name]:
            raise UnsupportedError(
                f"{name} would shrink from {small[name]} to {size}, which does not keep the model's "
                f"function; give {small[name]} or more"
            )
    target = {**small, **asked}
    for number in [name.removeprefix("heads") for name in small if name.startswith("heads")]:
        each = WIDTH_OF_HEADS + number
        if each not in small:  # stated for an attention that does not grow
            continue
        _default_heads(recipe, small, target, number, each in stated or each in asked)
        if recipe.rotary and target[each] != small[each]:
            raise UnsupportedError(
                f"heads of {recipe.name} are rotated by position, so they cannot grow losslessly from "
                f"{small[each]} to {target[each]}; grow heads{number}= instead"
            )
    for name, lead in recipe.follows.items():
        if name in small and lead in small and name not in asked:
            if small[name] * target[lead] % small[lead]:
                raise UnsupportedError(
                    f"{name} {small[name]} cannot keep its ratio to {lead} at {target[lead]}; give {name}= "
                    "explicitly"
                )
            target[name] = small[name] * target[lead] // small[lead]
    for name in recipe.fixed:
        if target.get(name) != small.get(name):
            raise UnsupportedError(
                f"{name} of {recipe.name} cannot grow losslessly from {small[name]} to {target[name]}, "
                f"because the model computes something else for each; keep {name}={small[name]}, and give "
                "head_dim="
            )
    return target


def _default_heads(
    recipe: Recipe, small: Mapping[str, int], target: dict[str, int], number: str, is_free: bool
) -> None:
    """Choose heads for a grown width: more heads of the same width, unless heads are given.

    With `is_free` all heads together may be wider or narrower than the width. `number` is that of the
    attention.
    """
    heads, kv_heads, head_dim = f"heads{number}", f"kv_heads{number}", WIDTH_OF_HEADS + number
    beside = [line.writes[0] for line in recipe.lines if f"mixed{number}" in line.reads]
    width = next((recipe.sizes.get(space, space) for space in beside), "")
    asked, each = recipe.target, small[head_dim]
    spans = small[heads] * each == small.get(width)
    if spans and target[width] > small[width] and heads not in asked and heads not in recipe.fixed:
        each = target[head_dim]
        if target[width] % each:
            raise UnsupportedError(
                f"{width} {target[width]} is not a multiple of the head width {each}; give {heads}= and "
                f"{head_dim}=, or a multiple of {each}"
            )
        target[heads] = target[width] // each
    elif spans and not is_free:
        if target[width] % target[heads] or target[width] // target[heads] < each:
            raise UnsupportedError(
                f"{target[heads]} heads of at least {each} do not add up to {width} {target[width]}; give "
                f"{width}={target[heads] * each}, or other {heads}="
            )
        target[head_dim] = target[width] // target[heads]
    if kv_heads not in asked:
        per_group = small[heads] // small[kv_heads]
        if target[heads] % per_group == 0:
            target[kv_heads] = target[heads] // per_group
    if target[heads] < small[heads]:
        raise UnsupportedError(
            f"{heads} would shrink from {small[heads]} to {target[heads]}; give a smaller {head_dim}, or "
            f"{heads}="
        )
    if target[heads] % target[kv_heads]:
        raise UnsupportedError(
            f"{target[heads]} heads cannot share {target[kv_heads]} key/value heads evenly; set "
            f"{kv_heads}= to a divisor of {heads}"
        )


@dataclass(frozen=True, slots=True)
class Heads:
    """The numbers of query and key/value heads of an attention, and the width of a head."""

    queries: int
    groups: int
    width: int


def heads(sizes: Mapping[str, int], number: str = "") -> Heads:
    """Return the sizes of one attention."""
    return Heads(sizes[f"heads{number}"], sizes[f"kv_heads{number}"], sizes[WIDTH_OF_HEADS + number])


def first_few(names: Sequence[str]) -> str:
    """Return the first three names as text, with the number of the others."""
    return ", ".join(names[:3]) + (f" and {len(names) - 3} more" if len(names) > 3 else "")
