"""Shared options of commands, their parsing, and the consoles for output."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from os.path import realpath
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console

from qsync.errors import QSyncError

MAX_SEED = 2**32 - 1  # limit of NumPy's generators
_BASIS = ("graph.json", "cluster.json", "sensitivity.json", "profile-*.json")  # the files of a Basis

# Without a terminal rich would assume 80 columns and break tables. Markup and emoji are off: [a] or :100: in
# a name or path must print unchanged.
console = Console(width=None if sys.stdout.isatty() else 120, markup=False, emoji=False, highlight=False)

Json = Annotated[bool, typer.Option("--json", help="Print JSON instead of a table.")]
PlanFile = Annotated[Path, typer.Argument(help="A plan.json.", show_default=False)]
BasisFolder = Annotated[
    Path | None,
    typer.Option("--basis", help="Folder with the graph and profiles.", show_default="the plan's own folder"),
]
ClusterFile = Annotated[
    Path | None,
    typer.Option("--cluster", help="cluster.toml to plan for.", show_default="the folder's cluster.json"),
]
Memory = Annotated[
    list[str] | None, typer.Option(help="Memory budget: CLASS=BYTES, or with K, M, G. Repeatable.")
]
Folder = Annotated[
    Path | None,
    typer.Argument(
        metavar="[FOLDER]", help="Holds graph, cluster, sensitivity and profiles.", show_default=False
    ),
]
Cards = Annotated[
    str | None,
    typer.Option(
        help="Without a folder: cards from data sheets, as A100:4,T4:8; CPU is this machine.",
        show_default="none",
    ),
]
CardsModel = Annotated[
    str | None,
    typer.Option(help="With --cards: hf:CONFIG.json, a model of Hugging Face.", show_default="none"),
]
CardsLength = Annotated[
    int | None,
    typer.Option(help="With --cards: tokens of a sequence.", show_default="the model's, up to 512"),
]
Force = Annotated[
    bool,
    typer.Option("--force", help="Take profiles of other batch shapes, machines or versions, as what-if."),
]
LoggedSteps = Annotated[
    Path | None,
    typer.Option("--measured", help="Folder of hybrid's log_steps: measured phases beside predicted ones."),
]
WeakShare = Annotated[float, typer.Option(help="Share of its core that the emulated weak rank gets.")]


def pairs_of(texts: list[str] | None, option: str, form: str) -> dict[str, str]:
    """Parse 'name=value' options into a dict. Raises QSyncError if one name has two values."""
    pairs: dict[str, str] = {}
    for text in texts or []:
        name, found, value = text.rpartition("=")
        if not found or not name or not value:
            raise QSyncError(f"{option} must have the form {form}, found {text!r}")
        if pairs.get(name, value) != value:
            raise QSyncError(f"{option} gives {name!r} both {pairs[name]} and {value}; give it once")
        pairs[name] = value
    return pairs


def budgets_of(texts: list[str] | None) -> dict[str, int]:
    """Parse --memory options into bytes by class."""
    return {name: _bytes(text) for name, text in pairs_of(texts, "--memory", "CLASS=BYTES").items()}


def patterns_of(texts: list[str] | None) -> dict[str, tuple[str, ...]]:
    """Parse --save-less options into patterns of operators by class."""
    found: dict[str, tuple[str, ...]] = {}
    for text in texts or []:
        name, equals, pattern = text.partition("=")
        if not name or not equals or not pattern:
            raise QSyncError(f"--save-less must have the form CLASS=PATTERN, found {text!r}")
        found[name] = tuple(dict.fromkeys((*found.get(name, ()), pattern)))
    return found


def _bytes(text: str) -> int:
    units = {"k": 2**10, "m": 2**20, "g": 2**30}
    scale = units.get(text[-1:].lower(), 1)
    try:
        number = int(float(text[:-1] if text[-1:].lower() in units else text) * scale)
    except (ValueError, OverflowError):
        raise QSyncError(f"--memory must be bytes, or a number with K, M or G, found {text!r}") from None
    if number < 1:
        raise QSyncError(f"--memory must be positive, found {text!r}; give bytes, or a number with K, M or G")
    return number


def check_outputs(outputs: Mapping[str, Path | None], folder: Path, *inputs: Path | None) -> None:
    """Raise QSyncError for an output path that would overwrite one of the plan's inputs.

    `outputs` are paths by option, `folder` is the basis's, and `inputs` are other files read.
    """
    read = {*inputs, *(path for pattern in _BASIS for path in folder.glob(pattern))}
    places = {realpath(path) for path in read if path is not None}
    for option, path in outputs.items():
        if path is None:
            continue
        named = realpath(path.parent) == realpath(folder) and any(map(path.match, _BASIS))
        if named or realpath(path) in places:
            raise QSyncError(
                f"{option} {path} would overwrite a file that the plan is made from; name another file"
            )


@contextmanager
def working(title: str) -> Iterator[Callable[[str], None]]:
    """Show progress on stderr while a command works; a new text replaces the title."""
    with Console(stderr=True).status(title) as status:
        yield status.update


def print_lines(*lines: str) -> None:
    """Print each line on stdout unwrapped."""
    for line in lines:
        console.print(line, soft_wrap=True)


def print_json(value: Any) -> None:
    """Print a value as JSON on stdout."""
    print(json.dumps(value, indent=1))
