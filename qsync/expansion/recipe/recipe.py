"""Recipes: a table of the spaces that each module of a model family reads and writes."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from fnmatch import fnmatchcase
from functools import cache
from typing import Any

import torch

from qsync.errors import FormatError, UnsupportedError, shortened

FIXED = "_"  # a dimension that does not grow: vocabulary, classes, pixels
_ATTENTION = re.compile(r"(query|key|value|mixed|heads|kv_heads)(\d*)")
# How spaces lie: one after the other in one axis, by key/value head, by coordinate, or in one axis each.
LAYOUTS = (",", "|", ":", "*")
Sizes = Mapping[str, Any]  # whole numbers by name; "layers" may be a tuple, one per group of blocks


_LARGEST = 2**24  # largest size; more is a mistake


@dataclass(frozen=True, slots=True)
class Line:
    """One line of a table: a pattern of modules, and the spaces that they read and write.

    `layout` is one of LAYOUTS and applies to `writes`. `is_transposed` states that a matrix has its inputs
    in the axis before its outputs.
    """

    pattern: str
    reads: tuple[str, ...]
    writes: tuple[str, ...]
    tied: str = ""
    layout: str = ","
    is_transposed: bool = False

    def matches(self, parameter: str) -> bool:
        """Return whether the line applies to a parameter or to its module."""
        module = parameter.rpartition(".")[0]
        return fnmatchcase(parameter, self.pattern) or fnmatchcase(module, self.pattern)

    def is_tied_to(self, parameter: str) -> bool:
        """Return whether the line allows its module to share the weight of a parameter."""
        return bool(self.tied) and replace(self, pattern=self.tied).matches(parameter)

    def __str__(self) -> str:
        return f"{self.pattern}  {', '.join(self.reads)} -> {self.written}".replace("   ->", "  ->")

    @property
    def written(self) -> str:
        """Return the part of the line behind the arrow."""
        writes = f"{',' if self.layout == ',' else f' {self.layout}'} ".join(self.writes)
        return writes + "  transposed" * self.is_transposed + (f"  tied {self.tied}" if self.tied else "")


@dataclass(frozen=True, slots=True)
class Recipe:
    """How a family of models grows.

    The table has one line per kind of module, `PATTERN  reads -> writes`. The first matching line counts. The
    names of spaces are free, except for these: `_` is a dimension that does not grow; query, key, value and
    mixed belong to attention, whose heads are replicated whole; heads and kv_heads are dimensions with one
    element per head. Attentions of different sizes have numbers: query0, heads1. Several spaces in a row are
    stacked in one axis. Behind the arrow, `query | key | value` stands for the queries, key and value of one
    key/value head, then of the next, `gate : up` for coordinates that alternate, and `heads * _` for the axes
    of a plain parameter:

        tokens                           -> stream   # an embedding or a plain parameter: its last dimension
        blocks.*.norm1             stream -> normed  # a norm: its kind decides how the space it reads grows
        blocks.*.attention.qkv     normed -> query, key, value
        blocks.*.attention.proj     mixed -> stream
        head                        final -> _  tied tokens   # may share the weight of tokens
        experts.up                 normed -> hidden  transposed   # inputs in the axis before outputs

    A parameter of a custom module is treated like that of a linear layer: a vector is added, the rows of a
    matrix are written and its columns read. A table cannot express a sum that is scaled by the width, or a
    norm that is a function instead of a module. `qsync.verify_expansion` detects these.

    Args:
        name: The name of the family, for messages.
        table: The table.
        build: `build(model, sizes)` returns a new model of the same class with these sizes. For configs
            that list a kind per block, `sizes["sources"]` has the number of the block that each one copies.
        read: `read(model)` returns the sizes, by name, that the shapes of the parameters do not show: heads,
            and kv_heads where they are fewer.
        sizes: The name of the size of a space, where it differs from the space: {"stream": "width"}. The
            names heads, kv_heads, head_dim and layers are predefined.
        follows: Sizes that keep their ratio to another unless requested otherwise: {"mlp": "width"}.
        blocks: The pattern of the numbered modules that depth replicates: "blocks.*".
        residual: The spaces that all blocks add to. Any other space belongs to one block.
        rotary: Whether heads are rotated by position. Such heads cannot become wider.
        fixed: Sizes that cannot grow, as the number of heads with a constant each (ALiBi).
        multiples: Spaces that grow only to multiples of their size, because an elementwise operator acts on
            the input of a norm or changes the zeros of its output. `derive_recipe` finds them.
        eps: The field of the model's config that holds the eps of all its norms.
        target: The requested sizes; `to` sets them.
        inputs: A batch on which every grown model is verified. `derive_recipe` sets it.

    Example:
        >>> recipe = qsync.Recipe(
        ...     "mine", table, build=lambda small, sizes: Mine(sizes["width"]), sizes={"stream": "width"}
        ... )
        >>> big = qsync.expand(model, recipe.to(width=768))
    """

    name: str
    table: str
    build: Callable[[Any, Sizes], torch.nn.Module]
    read: Callable[[Any], Sizes] = field(default=lambda model: {})
    sizes: Mapping[str, str] = field(default_factory=dict)
    follows: Mapping[str, str] = field(default_factory=dict)
    blocks: str = ""
    residual: tuple[str, ...] = ("stream",)
    rotary: bool = False
    fixed: tuple[str, ...] = ()
    multiples: tuple[str, ...] = ()
    eps: str = ""
    target: Sizes = field(default_factory=dict)
    inputs: Any = field(default=None, repr=False, compare=False)

    def to(self, **sizes: int | tuple[int, ...]) -> Recipe:
        """Return the recipe with target sizes added.

        Args:
            **sizes: Target sizes by name, in elements (width, mlp) or counts (heads, layers). `layers` may be
                a tuple with one number per group of blocks.

        Returns:
            A new recipe.

        Raises:
            FormatError: A size is not a whole number, or out of range.

        Example:
            >>> recipe.to(width=768, layers=12)
        """
        for name, size in sizes.items():
            for number in size if isinstance(size, tuple) else (size,):
                if type(number) is not int or not 1 <= number <= _LARGEST:
                    raise FormatError(
                        f"{name} must be a whole number from 1 to {_LARGEST}, found {shortened(size)}; give "
                        "e.g. 768"
                    )
        return replace(self, target={**self.target, **sizes})

    @property
    def lines(self) -> tuple[Line, ...]:
        """Return the parsed table.

        Raises:
            FormatError: A line cannot be parsed.
        """
        if not isinstance(self.table, str):
            raise FormatError(
                f"the table of the recipe {self.name} must be text, found {shortened(self.table)}; write one "
                "line for every kind of module"
            )
        rows = (row.partition("#")[0].strip() for row in self.table.splitlines())
        return tuple(_line(row, self.name) for row in rows if row)

    def line_of(self, parameter: str) -> Line | None:
        """Return the first line that applies to a parameter, or None."""
        return next((line for line in self.lines if line.matches(parameter)), None)


def _line(row: str, recipe: str) -> Line:
    """Parse one row of a table."""
    left, arrow, right = row.partition("->")
    pattern, *reads = left.replace(",", " ").split() or [""]
    right, is_tied, tied = f" {right} ".partition(" tied ")
    tied = tied.strip()
    arrow = "" if is_tied and len(tied.split()) != 1 else arrow
    layout = next((sign for sign in LAYOUTS[1:] if sign in right), ",")
    words = right.replace(layout, " ").split()
    is_transposed = words[1:] != [] and words[-1] == "transposed"
    words = words[: len(words) - is_transposed]
    are_names = all(name.isidentifier() and name != "tied" for name in (*reads, *words))
    are_alike = all(
        len(names) == 1 or FIXED not in names for names in (reads, words if layout != "*" else [])
    )
    if not (arrow and pattern and words and are_names and are_alike):
        raise FormatError(
            f"the recipe {recipe} has the line {shortened(row)}; write MODULE  READS -> WRITES, with `_` for "
            "a fixed space and `tied MODULE` at the end for a shared weight"
        )
    return Line(pattern, tuple(reads), tuple(words), tied, layout, is_transposed)


@cache
def attention_part(space: str) -> tuple[str, str] | None:
    """Return the kind of a space of attention and the number of its attention; None for others.

    >>> attention_part("query0"), attention_part("heads"), attention_part("stream0")
    (('query', '0'), ('heads', ''), None)
    """
    found = _ATTENTION.fullmatch(space)
    return (found[1], found[2]) if found else None


def check_unwrapped(model: torch.nn.Module) -> None:
    """Raise UnsupportedError for a wrapped model, FormatError for anything but a module."""
    if not isinstance(model, torch.nn.Module):
        raise FormatError(
            f"model must be a torch.nn.Module, found {type(model).__name__}; pass the module to grow"
        )
    inner = {"DistributedDataParallel": "module", "DataParallel": "module", "AveragedModel": "module"}
    inner |= {"FullyShardedDataParallel": "module", "OptimizedModule": "_orig_mod"}
    for kind in type(model).__mro__:  # the result of qsync.hybrid is a subclass of DistributedDataParallel
        name = inner.get(kind.__name__, "")
        if name and isinstance(getattr(model, name, None), torch.nn.Module):
            raise UnsupportedError(f"a model in {type(model).__name__} cannot be grown; pass model.{name}")
