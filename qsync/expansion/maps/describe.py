"""Describe the map of a model: as a table for people, as JSON for programs."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from qsync.expansion.maps.model_map import ModelMap
from qsync.expansion.maps.tensor_maps import TensorMap, summary


def table(plan: ModelMap) -> str:
    """Format one line per tensor: shapes, and how each axis grows.

    Tensors of one kind in all blocks share a line.
    """
    rows = [("tensor", "from", "to", "how"), *_rows(plan)]
    widths = [max(len(row[i]) for row in rows) for i in range(3)]
    lines = [
        "  ".join([*(cell.ljust(w) for cell, w in zip(row, widths, strict=False)), row[3]]) for row in rows
    ]
    grown = {name: (plan.small[name], size) for name, size in plan.sizes.items() if plan.small[name] != size}
    sizes = ", ".join(f"{name} {before} -> {after}" for name, (before, after) in grown.items())
    head = f"{plan.recipe.name}: {sizes or 'as it is'}; {summary(plan.tensors)}; split {plan.split}"
    new = len(plan.depth.new_paths)
    head += f"; {new} new blocks, output {plan.new_blocks}" if new else ""
    eps = sorted({f"{value:.3g}" for value in plan.eps.values()})
    tail = [
        f"eps of {len(plan.eps)} norms: {', '.join(eps)} (no state dict holds it: save with "
        "qsync.save_expanded)"
    ]
    return "\n".join([head, "", *(line.rstrip() for line in lines), *(tail if eps else [])])


def as_json(plan: ModelMap) -> dict[str, Any]:
    """Return sizes, eps, and for every tensor its shapes and how it grows."""
    return {
        "recipe": plan.recipe.name,
        "small": dict(plan.small),
        "sizes": plan.build_sizes,
        "split": plan.split,
        "depth": plan.new_blocks,
        "seed": plan.seed,
        "eps": dict(plan.eps),
        "tensors": {
            name: {"source": m.source, "from": m.source_shape, "to": m.shape, "how": how(m)}
            for name, m in plan.tensors.items()
        },
    }


def how(m: TensorMap) -> str:
    """Describe in words how a tensor grows."""
    if m.output_init == "zero":
        return "new, 0"
    parts = [str(axis) for axis in m.axes if axis is not None and not axis.growth.is_identity]
    parts += [f"times {m.factor:.4g}"] if m.factor != 1.0 else []
    parts += ["in sum nothing"] if m.output_init == "cancel" else []
    parts += ["new"] if m.is_new else []
    parts += [f"tied {m.tied}"] if m.tied else []
    return "; ".join(parts) or "as it is"


def _rows(plan: ModelMap) -> list[Sequence[str]]:
    """Return the rows of the table; equal rows of different blocks become one row with a count."""
    counted: dict[tuple[str, str, str, str], int] = {}
    for name, m in plan.tensors.items():
        block = plan.depth.block_of(m.source)
        shown = f"{block.rpartition('.')[0]}.*{m.source[len(block) :]}" if block else name
        row = (shown, _shape(m.source_shape), _shape(m.shape), how(m))
        counted[row] = counted.get(row, 0) + 1
    return [(f"{num} x {row[0]}" if ".*" in row[0] else row[0], *row[1:]) for row, num in counted.items()]


def _shape(shape: Sequence[int]) -> str:
    return " x ".join(map(str, shape)) or "1"
