"""Run plans on models with sharded blocks (fully_shard, FSDP2).

FSDP2 gathers a block's parameters before its forward and frees them afterwards, outside of traces. So each
sharded block is traced separately, and runs its part of the plan. Between blocks values have the model's own
types; the prediction, made before sharding, ignores these casts.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass

import torch

from qsync.errors import MismatchError
from qsync.operators.precision import Precision
from qsync.records.graph import OpGraph
from qsync.tracing.module_names import operator_name


@dataclass(frozen=True, slots=True)
class Block:
    """One module's part of an assignment, by the module's path (empty for the model itself)."""

    path: str
    assignment: Mapping[str, Precision]

    def name_in_plan(self, name: str) -> str | None:
        """Return the plan's name of the module's operator `name`; None if the plan lacks it."""
        whole = f"{self.path}.{name}" if self.path else name
        if whole in self.assignment:
            return whole
        kind, mark, number = name.partition("#")  # an operator of the module itself, not of a submodule
        own = operator_name(self.path, kind) + mark + number
        return own if own in self.assignment else None

    def choose(self, graph: OpGraph) -> dict[str, Precision]:
        """Choose the plan's precision for every operator that the plan names."""
        names = {op.name: self.name_in_plan(op.name) for op in graph.adjustable}
        return {op: self.assignment[name] for op, name in names.items() if name is not None}

    def check(self, graph: OpGraph, _layers: Collection[str]) -> None:
        """Raise MismatchError unless the plan names all adjustable operators of the module."""
        unknown = [op.name for op in graph.adjustable if self.name_in_plan(op.name) is None]
        if unknown:
            where = f"{self.path}." if self.path else ""
            raise MismatchError(
                f"the plan lacks {where}{unknown[0]} of the sharded {graph.model}; plan the model "
                "before fully_shard"
            )


def blocks_apart(module: torch.nn.Module) -> Iterator[tuple[str, torch.nn.Module]]:
    """Yield a module's separately traced submodules, with their paths.

    These are the sharded ones and their siblings, since sharded modules break the calling frame's graph.
    """
    if not any(_is_sharded(inner) for inner in module.modules() if inner is not module):
        return
    for name, child in module.named_children():
        is_called = not isinstance(child, (torch.nn.ModuleList, torch.nn.ModuleDict))
        holds_sharded = any(_is_sharded(inner) for inner in child.modules() if inner is not child)
        if is_called and (_is_sharded(child) or not holds_sharded):
            if not _is_elementwise(child):
                yield name, child
        else:
            inside = blocks_apart(child) if holds_sharded else child.named_children()
            yield from ((f"{name}.{path}", inner) for path, inner in inside)


def _is_sharded(module: torch.nn.Module) -> bool:
    return any(base.__name__ == "FSDPModule" for base in type(module).__mro__)


def _is_elementwise(module: torch.nn.Module) -> bool:
    """Return whether a module is a torch layer without parameters: an activation, dropout."""
    return type(module).__module__.startswith("torch.nn.") and not list(module.parameters())
