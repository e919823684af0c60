"""The operands that torch.matmul expands to the batch of its result.

torch expands both operands, merges their batch dimensions by `reshape`, and calls `bmm` (`_matmul_impl` of
ATen's LinearAlgebra.cpp). An operand stays a view if all of its batch dimensions are expanded. If only some
are, it is copied, and autograd saves the copy. The gradient has the expanded size until it is summed.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from qsync.records.graph import num_elements


@dataclass(frozen=True, slots=True)
class Expanded:
    """An operand (by index), its number of elements after expansion, and whether torch copies it."""

    operand: int
    num_elements: int
    is_copied: bool


def expanded(left: Sequence[int], right: Sequence[int]) -> tuple[Expanded, ...]:
    """Return the operands of these shapes that torch.matmul expands.

    A single matrix for the whole batch is not expanded, also as a batch of 1 beside three dimensions: torch
    multiplies two matrices if it has a gradient.

    >>> expanded((1, 32, 4, 8), (16, 32, 8, 1))
    (Expanded(operand=0, num_elements=16384, is_copied=True),)
    """
    rank = max(len(left), len(right))
    if rank <= 3:
        return ()
    batches = [(1,) * (rank - max(len(shape), 2)) + tuple(shape[:-2]) for shape in (left, right)]
    batch = [theirs if mine == 1 else mine for mine, theirs in zip(*batches, strict=True)]
    found = []
    for operand, (shape, own) in enumerate(zip((left, right), batches, strict=True)):
        same = [mine == size for mine, size in zip(own, batch, strict=True) if size != 1]
        if len(shape) > 2 and not all(same):
            found.append(Expanded(operand, num_elements((*batch, *shape[-2:])), any(same)))
    return tuple(found)
