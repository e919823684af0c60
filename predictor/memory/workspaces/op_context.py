"""The context of an operator for memory prediction: properties that are missing in its record."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Mask:
    """A mask of attention: its shape, and the bytes per element (`width`)."""

    shape: tuple[int, ...]
    width: int


@dataclass(frozen=True, slots=True)
class OpContext:
    """The context of an operator: shapes, carried types and gradients of its operands, and its device.

    With `in_buckets`, gradients of parameters are copied into DDP's buckets. `in_order` has the operands in
    channels-last order of their own, as a weight after `model.to(memory_format=torch.channels_last)`.
    `writes_scores`: attention runs torch's plain kernel.
    """

    shapes: tuple[tuple[int, ...], ...]
    carried: tuple[str, ...]
    has_gradient: tuple[bool, ...]
    is_parameter: tuple[bool, ...]
    gradient: str  # the type in which the gradient of the result arrives
    in_buckets: bool
    device: str
    masks: tuple[Mask, ...] = ()
    in_order: tuple[int, ...] = ()
    writes_scores: bool = False
