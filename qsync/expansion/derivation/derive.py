"""Derive a recipe's table: which parameter reads and writes which space."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

from torch import nn

from qsync.errors import UnsupportedError
from qsync.expansion.derivation.axis_tracer import trace_axes
from qsync.expansion.derivation.interpret import Findings
from qsync.expansion.derivation.product_rules import ALL_RULES
from qsync.expansion.derivation.table_writer import (
    Entry,
    Names,
    block_of,
    fold_lines,
    format_table,
    name_spaces,
    stream_of,
)
from qsync.expansion.recipe.recipe import Recipe, Sizes, check_unwrapped


@dataclass(frozen=True, slots=True)
class Derived:
    """The recipe proposed from one run, for its author to read and confirm.

    Attributes:
        model: The name of the model's class.
        table: The table of the recipe.
        blocks: The pattern of the modules that depth replicates.
        residual: The spaces shared by the whole model.
        sizes: Proposed: the spaces that share a size.
        follows: Proposed: the spaces that keep their ratio to a size.
        rotary: Whether heads are rotated by position.
        multiples: The spaces that grow only to multiples of their size.
        fixed: The sizes that cannot grow.
        attentions: The numbers of query heads and of key/value heads, and the width of a head in elements,
            of each kind of attention.
        notes: Limits of lossless growth.
        open: The lines that could not be derived. The author has to write them.
        inputs: The example inputs.
    """

    model: str
    table: str
    blocks: str = ""
    residual: tuple[str, ...] = ()
    sizes: dict[str, str] = field(default_factory=dict)
    follows: dict[str, str] = field(default_factory=dict)
    rotary: bool = False
    multiples: tuple[str, ...] = ()
    fixed: tuple[str, ...] = ()
    attentions: tuple[tuple[int, int, int], ...] = ()
    notes: tuple[str, ...] = ()
    open: tuple[str, ...] = ()
    inputs: Any = field(default=None, repr=False, compare=False)

    def recipe(self, build: Callable[[Any, Sizes], nn.Module], **options: Any) -> Recipe:
        """Return the recipe, after its author has read the table.

        The number of heads of another model of the class is read by running it as well.

        Args:
            build: `build(model, sizes)` returns a new model of these sizes.
            **options: Fields of `Recipe` that replace the proposed ones.

        Returns:
            The recipe.

        Raises:
            UnsupportedError: Lines are open, and `table` is not among the options. Pass `derived.table` with
                these lines completed.

        Example:
            >>> recipe = derived.recipe(lambda small, sizes: Mine(sizes["width"], sizes["heads"]))
            >>> big = qsync.expand(model, recipe.to(width=768))
        """
        if self.open and "table" not in options:
            raise UnsupportedError(
                f"the table of {self.model} is incomplete: {self.open[0]}; complete the lines with `?` and "
                "pass the table: derived.recipe(build, table=...)"
            )
        proposed: dict[str, Any] = {
            "table": self.table,
            "sizes": self.sizes,
            "follows": self.follows,
            "blocks": self.blocks,
            "residual": self.residual,
            "rotary": self.rotary,
            "multiples": self.multiples,
            "fixed": self.fixed,
            "inputs": self.inputs,
        }
        if self.attentions:
            proposed["read"] = self._heads
        return Recipe(self.model, build=build, **{**proposed, **options})

    def _heads(self, model: nn.Module) -> Sizes:
        return Findings(trace_axes(model, self.inputs, ALL_RULES)).sizes

    def __str__(self) -> str:
        facts = [f"blocks {self.blocks or 'none'}", f"residual {', '.join(self.residual) or 'none'}"]
        for heads, kv_heads, head_dim in self.attentions:
            grouped = f" on {kv_heads} of keys and values" if kv_heads != heads else ""
            facts.append(f"{heads} heads{grouped}, {head_dim} each{', rotary' if self.rotary else ''}")
        facts += [
            f"{space} as wide as {size}" for space, size in self.sizes.items() if space not in self.residual
        ]
        facts += [f"{space} keeps its ratio to {size}" for space, size in self.follows.items()]
        lines = [f"{self.model}: {'; '.join(facts)}", "", *self.table.splitlines()]
        for title, messages in (("note", self.notes), ("not understood", self.open)):
            lines += ["", *(f"{title}: {one}" for one in messages)] if messages else []
        return "\n".join(lines)


def derive_recipe(model: nn.Module, example_inputs: Any) -> Derived:
    """Derive the table of a recipe from one run, for its author to confirm.

    The model runs once, in evaluation mode and without gradients, and stays unchanged. Every operator unifies
    the dimensions that it requires to be equal. Nothing is guessed: an operator or parameter that is not
    understood is listed in `.open` and written as `?` in the table.

    Args:
        model: The model; on the meta device only shapes are traced.
        example_inputs: One batch: a tensor, a tuple (positional) or a dict (keywords).

    Returns:
        The table and the proposed fields of a recipe.

    Raises:
        TracingError: The model cannot run on the inputs.
        UnsupportedError: The model is in DDP, FSDP, torch.compile or AveragedModel.
        CalibrationError: The inputs hold no tensor, or an empty batch.

    Example:
        >>> print(qsync.derive_recipe(Gpt(), torch.zeros(1, 8, dtype=torch.int64)))
    """
    check_unwrapped(model)
    findings = Findings(trace_axes(model, example_inputs, ALL_RULES))
    entries = list(findings.entries())
    names = name_spaces(entries, findings.blocks)
    findings.check_events(entries, names)
    sizes, follows = _sizes(entries, names)
    return Derived(
        model=type(model).__name__,
        table=format_table(fold_lines(entries, names, findings.parameters)),
        blocks=findings.copied,
        residual=names.residual,
        sizes=sizes,
        follows=follows,
        rotary=findings.rotary,
        multiples=tuple(findings.multiples),
        fixed=tuple(findings.fixed),
        attentions=tuple(findings.shapes),
        notes=findings.fold_messages(findings.notes),
        open=findings.fold_messages(findings.open),
        inputs=example_inputs,
    )


def _sizes(entries: Sequence[Entry], names: Names) -> tuple[dict[str, str], dict[str, str]]:
    """Propose sizes and ratios.

    A space as wide as the residual stream beside it is assumed to share its size always. The hidden units of
    a block are assumed to keep their ratio to it.
    """
    # Streams of equal width (encoder and decoder) share a size. Heads multiply as "stream" grows.
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
