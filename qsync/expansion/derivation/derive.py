"""A recipe's table from one run of the model: which parameter reads and writes which space."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

from torch import nn

from qsync.errors import UnsupportedError
from qsync.expansion.derivation.interpret import Findings
from qsync.expansion.derivation.product_rules import ALL_RULES
from qsync.expansion.derivation.table_writer import (
    Entry,
    Names,
    block_of,
    lines_of,
    named,
    stream_of,
    text_of,
)
from qsync.expansion.derivation.watched_run import watch
from qsync.expansion.recipe.recipes import Recipe, Sizes


@dataclass(frozen=True, slots=True)
class Derived:
    """What one run says about how a model grows, for its author to read and confirm.

    `table` is a recipe's. `blocks` is the pattern of the modules that depth copies, `residual` the spaces
    that are one for the whole model; `sizes` and `follows` are proposals: which spaces have one size, and
    which keep their ratio to it. `multiples` grow without loss to multiples of their size alone. `heads`,
    `kv_heads` and `head_dim` are as seen (0: no attention). `notes` say what limits losslessness; `open` what
    was not understood: there the table has to be written by hand.
    """

    model: str
    table: str
    blocks: str = ""
    residual: tuple[str, ...] = ()
    sizes: dict[str, str] = field(default_factory=dict)
    follows: dict[str, str] = field(default_factory=dict)
    rotary: bool = False
    multiples: tuple[str, ...] = ()
    heads: int = 0
    kv_heads: int = 0
    head_dim: int = 0
    notes: tuple[str, ...] = ()
    open: tuple[str, ...] = ()
    inputs: Any = field(default=None, repr=False, compare=False)

    def recipe(self, build: Callable[[Any, Sizes], nn.Module], **options: Any) -> Recipe:
        """The recipe, once its author has read the table: `build(model, sizes)` makes a new model of these
        sizes; `options` are a Recipe's, where they should be others than proposed. The number of heads of
        another model of the class is read by running it too. Raises UnsupportedError while anything is open,
        unless `table` is among the options: derived.table with those lines written by hand.

        >>> recipe = derived.recipe(lambda small, sizes: Mine(sizes["width"], sizes["heads"]))
        >>> big = qsync.expand(model, recipe.to(width=768))
        """
        if self.open and "table" not in options:
            raise UnsupportedError(
                f"the table of {self.model} is not whole: {self.open[0]}; print it, and give one with these "
                "lines written by hand: derived.recipe(build, table=...)"
            )
        proposed: dict[str, Any] = {
            "table": self.table,
            "sizes": self.sizes,
            "follows": self.follows,
            "blocks": self.blocks,
            "residual": self.residual,
            "rotary": self.rotary,
            "multiples": self.multiples,
        }
        if self.heads:
            proposed["read"] = self._heads
        return Recipe(self.model, build=build, **{**proposed, **options})

    def _heads(self, model: nn.Module) -> Sizes:
        seen = Findings(watch(model, self.inputs, ALL_RULES))
        return {"heads": seen.heads, "kv_heads": seen.kv_heads}

    def __str__(self) -> str:
        facts = [f"blocks {self.blocks or 'none'}", f"residual {', '.join(self.residual) or 'none'}"]
        if self.heads:
            grouped = f" on {self.kv_heads} of keys and values" if self.kv_heads != self.heads else ""
            each = f"{self.head_dim} each{', rotary' if self.rotary else ''}"
            facts.append(f"{self.heads} heads{grouped}, {each}")
        facts += [
            f"{space} as wide as {size}" for space, size in self.sizes.items() if space not in self.residual
        ]
        facts += [f"{space} keeps its ratio to {size}" for space, size in self.follows.items()]
        lines = [f"{self.model}: {'; '.join(facts)}", "", *self.table.splitlines()]
        for title, said in (("note", self.notes), ("not understood", self.open)):
            lines += ["", *(f"{title}: {one}" for one in said)] if said else []
        return "\n".join(lines)


def derive_recipe(model: nn.Module, example_inputs: Any) -> Derived:
    """Which dimensions of `model` are tied to which, as the table of a recipe that its author only confirms.

    The model runs once (in evaluation mode, without gradients; it is left as it was), and every operator ties
    the dimensions that it needs to be equal (ours). `example_inputs` is a tensor, a tuple (positional) or a
    dict (keywords); on the meta device nothing is computed. Nothing is guessed: an operator or parameter that
    is not understood stands in `.open`, and as `?` in the table. Raises TracingError when the model cannot be
    run on the inputs.

    >>> print(qsync.derive_recipe(Gpt(), torch.zeros(1, 8, dtype=torch.int64)))
    """
    findings = Findings(watch(model, example_inputs, ALL_RULES))
    entries = list(findings.entries())
    names = named(entries, findings.blocks)
    findings.judge(entries, names)
    sizes, follows = _sizes(entries, names)
    return Derived(
        model=type(model).__name__,
        table=text_of(lines_of(entries, names, findings.parameters)),
        blocks=findings.copied,
        residual=names.residual,
        sizes=sizes,
        follows=follows,
        rotary=findings.rotary,
        multiples=tuple(findings.multiples),
        heads=findings.heads,
        kv_heads=findings.kv_heads,
        head_dim=findings.head_dim,
        notes=findings.said(findings.notes),
        open=findings.said(findings.open),
        inputs=example_inputs,
    )


def _sizes(entries: Sequence[Entry], names: Names) -> tuple[dict[str, str], dict[str, str]]:
    """Proposals. Spaces as wide as a residual stream that they stand beside are taken to be so always, and a
    block's hidden units to keep their ratio to it.
    """
    # Streams of one width, as an encoder's and a decoder's. Heads become more as the space "stream" grows.
    one = len({names.size[space] for space in names.residual}) == 1
    sizes: dict[str, str] = dict.fromkeys((*names.residual, "stream"), "width") if one else {}
    follows: dict[str, str] = {}
    for entry in entries:
        for slot in entry.writes:
            name = names.name(slot, entry.path)
            if slot.word or name in names.residual or name in sizes or entry.kind == "norm":
                continue
            beside = stream_of(block_of(entry.path, names.blocks), entries, names)
            if beside and slot.size == names.size[beside]:
                sizes[name] = sizes.get(beside, beside)
            elif beside and block_of(entry.path, names.blocks):
                follows[name] = sizes.get(beside, beside)
    return sizes, follows
