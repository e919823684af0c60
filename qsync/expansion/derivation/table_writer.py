"""Write a derived table: name its spaces, and fold equal lines of numbered modules."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from fnmatch import fnmatchcase
from itertools import combinations

from torch import nn

from qsync.expansion.recipe.recipe import Line, attention_part

UNKNOWN = "?"
# Names with another meaning in recipes.
_RESERVED_NAMES = ("tied", "transposed", "width", "layers", "head_dim")
# Module names that do not distinguish spaces.
_GENERIC_NAMES = ("dense", "linear", "proj", "projection", "fc", "weight", "conv", "convolution")


@dataclass(frozen=True, slots=True)
class Slot:
    """One space as a parameter shows it: the pieces that grow, and their number of coordinates.

    `word` holds a name that is known in advance (`_`, `?`, query and so on).
    """

    pieces: tuple[int, ...] = ()
    size: int = 0
    word: str = ""


@dataclass(frozen=True, slots=True)
class Entry:
    """A module, or a plain parameter, before spaces have names; `at` orders by first use."""

    at: int
    path: str
    kind: str  # linear, convolution, lookup, norm, batch_norm or parameter
    reads: tuple[Slot, ...]
    writes: tuple[Slot, ...]
    tied: str = ""
    layout: str = ","
    is_transposed: bool = False


@dataclass(slots=True)
class Names:
    """The names of spaces in every block, and their sizes."""

    blocks: str
    of: dict[tuple[str, tuple[int, ...]], str] = field(default_factory=dict)
    residual: tuple[str, ...] = ()
    size: dict[str, int] = field(default_factory=dict)

    def name(self, slot: Slot, path: str) -> str:
        """Return the name of a space."""
        if slot.word:
            return slot.word
        found = self.of.get(("", slot.pieces))
        return found or self.of[block_of(path, self.blocks), slot.pieces]


# -- blocks --


def blocks_pattern(model: nn.Module, sums: Iterable[str]) -> tuple[str, list[str]]:
    """Return one pattern for the numbered modules with residual sums, and the open points.

    The pattern is "" without such modules. Modules in one list with modules of another class are parts of a
    block.
    """
    found: dict[str, None] = {}
    for path in sums:
        parts = path.split(".")
        while parts and not (parts[-1].isdecimal() and _is_list(model, parts)):
            parts.pop()
        if parts:
            found[".".join("*" if part.isdecimal() else part for part in parts)] = None
    outer = [one for one in found if not any(one.startswith(f"{other}.") for other in found)]
    if not outer:
        return "", []
    depths = {one.count(".") for one in outer}
    if len(depths) > 1:
        return outer[0], [f"blocks are called {' and '.join(outer)}; a recipe has one pattern of blocks"]
    columns = [_common_pattern(column) for column in zip(*(one.split(".") for one in outer), strict=True)]
    return ".".join(columns), []


def _is_list(model: nn.Module, parts: Sequence[str]) -> bool:
    """Return whether all numbered siblings of a module have its class."""
    beside = model.get_submodule(".".join(parts[:-1])).named_children()
    return len({type(module) for name, module in beside if name.isdecimal()}) == 1


def _common_pattern(words: Sequence[str]) -> str:
    """Return one pattern for words that differ in their numbers, or altogether.

    >>> _common_pattern(["layer1", "layer2"]), _common_pattern(["encoder", "decoder"])
    ('layer*', '*')
    """
    if len(set(words)) == 1:
        return words[0]
    stems = {re.sub(r"\d+", "*", word) for word in words}
    return stems.pop() if len(stems) == 1 else "*"


def block_of(path: str, blocks: str) -> str:
    """Return the block that holds a module: the start of its path that matches `blocks`, or ""."""
    wanted, parts = blocks.split("."), path.split(".")
    if not blocks or len(parts) < len(wanted):
        return ""
    inside = parts[: len(wanted)]
    fits = all(fnmatchcase(part, want) for part, want in zip(inside, wanted, strict=True))
    return ".".join(inside) if fits and inside[-1].isdecimal() else ""


# -- names --


def name_spaces(entries: Sequence[Entry], blocks: str) -> Names:
    """Choose a name for every space.

    A space shared by several blocks, or by a block and the rest, is a residual stream. Outputs of norms are
    called normed in every block. Other spaces are named after their writer.
    """
    names = Names(blocks)
    touched: dict[tuple[int, ...], dict[str, None]] = {}
    for entry, slot, _ in _slots(entries):
        touched.setdefault(slot.pieces, {})[block_of(entry.path, blocks)] = None
    shared = [pieces for pieces, places in touched.items() if len(places) > 1]
    for number, pieces in enumerate(shared):
        names.of["", pieces] = f"stream{number}" if len(shared) > 1 else "stream"
    names.residual = tuple(names.of.values())
    last_norm = [entry.path for entry in entries if entry.kind == "norm" and not block_of(entry.path, blocks)]
    wanted: dict[tuple[str, tuple[int, ...]], tuple[str, int]] = {}
    for entry, slot, is_written in _slots(entries):
        key = (block_of(entry.path, blocks), slot.pieces)
        if is_written and ("", slot.pieces) not in names.of and key not in wanted:
            wanted[key] = _proposed_name(entry, entries, names, last_norm), slot.size
    _distinguish(wanted, names)
    for entry, slot, _ in _slots(entries):
        if ("", slot.pieces) not in names.of:
            # No understood operator writes it.
            names.of.setdefault((block_of(entry.path, blocks), slot.pieces), UNKNOWN)
        names.size[names.name(slot, entry.path)] = slot.size
    return names


def _slots(entries: Iterable[Entry]) -> Iterator[tuple[Entry, Slot, bool]]:
    """Yield every unnamed space of every entry, and whether it is written."""
    for entry in entries:
        for slot in entry.reads:
            if not slot.word:
                yield entry, slot, False
        for slot in entry.writes:
            if not slot.word:
                yield entry, slot, True


def _proposed_name(entry: Entry, entries: Sequence[Entry], names: Names, last_norm: Sequence[str]) -> str:
    """Return the name of the space that an entry writes, before names are made unique."""
    block = block_of(entry.path, names.blocks)
    if entry.kind == "norm":
        read = names.of.get(("", entry.reads[0].pieces), "")
        if block:
            return read.replace("stream", "normed") if read else "normed_" + tail(entry.path)
        return "final" if entry.path == last_norm[-1] else tail(entry.path)
    if entry.kind == "lookup":
        return "embedded"
    if not block:
        return tail(entry.path)
    beside = {
        slot.pieces
        for other, slot, is_written in _slots(entries)
        if is_written and other.kind == entry.kind and block_of(other.path, names.blocks) == block
        and ("", slot.pieces) not in names.of
    }  # fmt: skip
    alone = {"linear": "mlp", "convolution": "inner"}.get(entry.kind)
    name = alone if alone and len(beside) == 1 else tail(entry.path)
    # Several streams, as in a ResNet: spaces of a block have the number of its stream.
    number = stream_of(block, entries, names).removeprefix("stream")
    return name + "_" * (bool(number) and name[-1].isdecimal()) + number


def stream_of(block: str, entries: Iterable[Entry], names: Names) -> str:
    """Return the residual stream that a block adds to, or "".

    Outside of blocks it is the only stream, or one of several of equal width.
    """
    if not block:
        return names.residual[0] if len({names.size[space] for space in names.residual}) == 1 else ""
    written = [
        names.of["", slot.pieces]
        for entry, slot, is_written in _slots(entries)
        if is_written and ("", slot.pieces) in names.of and block_of(entry.path, names.blocks) == block
    ]
    return written[-1] if written else ""


def _distinguish(wanted: Mapping[tuple[str, tuple[int, ...]], tuple[str, int]], names: Names) -> None:
    """Make names unique: one size per name, and one space per name and block.

    The outputs of norms of one space share a name because they grow alike.
    """
    sizes: dict[str, list[int]] = {}
    for name, size in wanted.values():
        if size not in sizes.setdefault(name, []):
            sizes[name].append(size)
    names_in_use: dict[tuple[str, str], tuple[int, ...]] = {}
    for (block, pieces), (name, size) in wanted.items():
        if len(sizes[name]) > 1:
            name += "_" * name[-1].isdecimal() + str(sizes[name].index(size))
        number, first = 2, name
        while not name.startswith("normed") and (
            name in (*names.residual, *_RESERVED_NAMES)
            or attention_part(name)
            or names_in_use.setdefault((block, name), pieces) != pieces
        ):
            name, number = f"{first}_{number}", number + 1
        names.of[block, pieces] = name


def tail(path: str) -> str:
    """Return the last part of a module's path, with its number, as a word that a table may hold.

    >>> tail("bert.pooler.dense"), tail("features.4")
    ('pooler', 'features4')
    """
    parts = path.split(".")
    while len(parts) > 1 and parts[-1] in _GENERIC_NAMES:
        parts.pop()
    numbers: list[str] = []
    while len(parts) > 1 and parts[-1].isdecimal():
        numbers.insert(0, parts.pop())
    word = re.sub(r"\W", "_", parts[-1] + "_".join(numbers)) or "model"
    return word if word.isidentifier() else f"space{word}"


# -- lines --


def fold_lines(entries: Sequence[Entry], names: Names, parameters: Sequence[str]) -> list[Line]:
    """Return one line per entry, and one line for equal entries of numbered modules.

    `parameters` lists all parameters of the model: the first line that matches each must be its own.
    """
    lines_by_path = {}
    for entry in entries:
        reads, writes = (
            [names.name(slot, entry.path) for slot in slots] for slots in (entry.reads, entry.writes)
        )
        lines_by_path[entry.path] = Line(
            entry.path, tuple(reads), tuple(writes), entry.tied, entry.layout, entry.is_transposed
        )
    own = {name: lines_by_path.get(name) or lines_by_path.get(name.rpartition(".")[0]) for name in parameters}
    found: list[Line] = []
    for line in lines_by_path.values():
        mine = [name for name, other in own.items() if other is line]
        if not mine or not all(any(earlier.matches(name) for earlier in found) for name in mine):
            found.append(_folded(line, own, found, names.blocks))
    return found


def _folded(line: Line, own: Mapping[str, Line | None], found: Sequence[Line], blocks: str) -> Line:
    """Return the line with as many numbers left open as the other lines permit.

    The first blocks of a ResNet's stages differ from the others. If only the number of the last block is left
    open, earlier lines may cover the other blocks differently.
    """
    for pattern in _patterns(line.pattern):
        folded = replace(line, pattern=pattern)
        matched = {name: other for name, other in own.items() if folded.matches(name)}
        if not all(
            _same_spaces(other, line) or any(earlier.matches(name) for earlier in found)
            for name, other in matched.items()
        ):
            continue
        others = {other.pattern: other for other in matched.values() if other is not None}
        beside = [one for path, one in others.items() if path.count(".") == pattern.count(".")]
        if pattern == line.pattern or _ends_group(line.pattern, pattern, own, blocks):
            return folded
        if len(beside) > 1 and all(_same_spaces(other, line) for other in beside):
            return folded
    return line


def _ends_group(path: str, pattern: str, own: Mapping[str, Line | None], blocks: str) -> bool:
    """Return whether a pattern opens only a block's number, and the path is in the last block."""
    block = block_of(path, blocks)
    group, _, number = block.rpartition(".")
    if not block or pattern != f"{group}.*{path[len(block) :]}":
        return False
    numbers = [block_of(name, blocks).rpartition(".") for name in own]
    return int(number) == max(int(last) for before, _, last in numbers if before == group and last)


def _same_spaces(one: Line | None, other: Line) -> bool:
    """Return whether two lines state the same spaces."""
    return one is not None and replace(one, pattern=other.pattern) == other


def _patterns(path: str) -> Iterator[str]:
    """Yield a path with numbers left open, the most general first, the path itself last."""
    parts = path.split(".")
    numbered = [index for index, part in enumerate(parts) if part.isdecimal()]
    for num in range(len(numbered), -1, -1):
        for chosen in combinations(numbered, num):
            yield ".".join("*" if index in chosen else part for index, part in enumerate(parts))


def format_table(lines: Sequence[Line]) -> str:
    """Return the table as text with aligned arrows."""
    paths = max((len(line.pattern) for line in lines), default=0)
    reads = max((len(", ".join(line.reads)) for line in lines), default=0)
    return "\n".join(
        f"{line.pattern:<{paths}}  {', '.join(line.reads):>{reads}} -> {line.written}" for line in lines
    )
