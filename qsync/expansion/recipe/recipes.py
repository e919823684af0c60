"""Recipes: which module of a model family reads and writes which space, as a table. Data: no tensor is
touched here.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from fnmatch import fnmatchcase
from typing import Any

import torch

from qsync.errors import FormatError, UnsupportedError

FIXED = "_"  # a dimension that does not grow: vocabulary, classes, pixels
ATTENTION = ("query", "key", "value", "mixed")
Sizes = Mapping[str, Any]  # whole numbers by name; "layers" may be a tuple, one per group of blocks


@dataclass(frozen=True, slots=True)
class Line:
    """One line of a table: modules (or parameters of no module's own) and the spaces they read and write."""

    pattern: str
    reads: tuple[str, ...]
    writes: tuple[str, ...]
    tied: str = ""

    def matches(self, parameter: str) -> bool:
        """Whether the line is about this parameter, or about the module that has it."""
        module = parameter.rpartition(".")[0]
        return fnmatchcase(parameter, self.pattern) or fnmatchcase(module, self.pattern)

    def is_tied_to(self, parameter: str) -> bool:
        """Whether the line says that its module may have the weight of that parameter."""
        return bool(self.tied) and replace(self, pattern=self.tied).matches(parameter)

    def __str__(self) -> str:
        arrow = f"{', '.join(self.reads)} -> {', '.join(self.writes)}".strip()
        return f"{self.pattern}  {arrow}" + (f"  tied {self.tied}" if self.tied else "")


@dataclass(frozen=True, slots=True)
class Recipe:
    """How a family of models grows.

    `table` has one line per kind of module, "PATTERN  reads -> writes"; the first that matches counts. Spaces
    are names of your own, `_` is a dimension that does not grow, several in a row are stacked in one axis:

        tokens                           -> stream   # an embedding, or a parameter itself: its last dimension
        blocks.*.norm1             stream -> normed  # a norm: its kind says how the space that it reads grows
        blocks.*.attention.qkv     normed -> query, key, value
        blocks.*.attention.proj     mixed -> stream
        head                        final -> _  tied tokens   # may have the weight that tokens has

    query, key, value and mixed are attention's: heads are copied whole. A parameter that no module of torch's
    owns is taken as a linear's: added, if it is a vector; rows written and columns read, if it is a matrix.
    `residual` are the spaces that all blocks add to; any other is its own in every block. `blocks` are the
    numbered modules that depth copies. What a table cannot say (a sum scaled by the width, a norm that is a
    function and no module) only `qsync.verify_expansion` finds.

    `read(model)` returns sizes by name, as many as cannot be read off the parameters' shapes: the number of
    heads; `build(model, sizes)` returns a new model of the same class with these sizes. `sizes` names the
    sizes of spaces that have not their own name: {"stream": "width"}. heads, kv_heads, head_dim and layers
    are known by name. `follows` are sizes that keep their ratio to another where nothing else is asked for:
    {"mlp": "width"}. `multiples` are spaces that grow to multiples of their size alone, because something
    elementwise acts on what a norm reads or leaves 0 (derive_recipe finds them). `eps` is where the model's
    config has the eps of all its norms. With `rotary` heads cannot become wider: a rotation goes by its place
    in the head.

    >>> recipe = Recipe("mine", table, build=lambda small, sizes: Mine(sizes["width"]), sizes={"stream":
    "width"})
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
    multiples: tuple[str, ...] = ()
    eps: str = ""
    target: Sizes = field(default_factory=dict)

    def to(self, **sizes: int | tuple[int, ...]) -> Recipe:
        """The same with what to grow to: `recipe.to(width=768, layers=12)`. Raises FormatError for a size
        that is no whole number of at least 1.
        """
        for name, size in sizes.items():
            for number in size if isinstance(size, tuple) else (size,):
                if type(number) is not int or number < 1:
                    raise FormatError(f"{name} must be a whole number of at least 1, found {size!r}")
        return replace(self, target={**self.target, **sizes})

    @property
    def lines(self) -> tuple[Line, ...]:
        """The table, parsed. Raises FormatError for a line that is none."""
        rows = (row.partition("#")[0].strip() for row in self.table.splitlines())
        return tuple(_line(row, self.name) for row in rows if row)

    def line_of(self, parameter: str) -> Line | None:
        """The first line that is about a parameter."""
        return next((line for line in self.lines if line.matches(parameter)), None)


def _line(row: str, recipe: str) -> Line:
    """One row of a table."""
    left, arrow, right = row.partition("->")
    pattern, *reads = left.replace(",", " ").split() or [""]
    words = right.replace(",", " ").split()
    tied = ""
    if "tied" in words:
        at = words.index("tied")
        words, after = words[:at], words[at + 1 :]
        tied = after[0] if len(after) == 1 else ""
        arrow = arrow if tied else ""
    are_names = all(name.isidentifier() and name != "tied" for name in (*reads, *words))
    are_alike = all(len(names) == 1 or FIXED not in names for names in (reads, words))
    if not (arrow and pattern and words and are_names and are_alike):
        raise FormatError(
            f"the recipe {recipe} has the line {row!r}; write MODULE  READS -> WRITES, with `_` alone for "
            "what does not grow and `tied MODULE` last where a weight may be shared"
        )
    return Line(pattern, tuple(reads), tuple(words), tied)


def check_unwrapped(model: torch.nn.Module) -> None:
    """UnsupportedError for a model inside another that runs it, FormatError for what is none."""
    if not isinstance(model, torch.nn.Module):
        raise FormatError(f"a model to grow is a torch.nn.Module, found {type(model).__name__}; give that")
    inner = {"DistributedDataParallel": "module", "DataParallel": "module", "OptimizedModule": "_orig_mod"}
    inner["FullyShardedDataParallel"] = "module"
    kind = type(model).__name__
    if kind in inner and isinstance(getattr(model, inner[kind], None), torch.nn.Module):
        raise UnsupportedError(f"a model in {kind} is grown without it; give model.{inner[kind]}")
