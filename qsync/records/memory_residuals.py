"""Differences between a step's measured and predicted memory in bytes, by operator."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import NamedTuple


class Residual(NamedTuple):
    """Measured minus predicted bytes of one operator.

    `saved` live from its forward to its backward; `forward` and `backward` only while it runs.
    """

    saved: int = 0
    forward: int = 0
    backward: int = 0

    def scaled(self, factor: float) -> Residual:
        """Return the residual with its bytes multiplied by a factor."""
        return Residual(*(round(factor * num_bytes) for num_bytes in self))


NOTHING = Residual()


@dataclass(frozen=True, slots=True, weakref_slot=True)
class MemoryResiduals:
    """Memory residuals of a graph on a device: `ops` maps operator -> precision -> bytes.

    An operator without its own precision uses that of the product before it (`Layout.product`). For the
    `loss`, outside the graph, only `forward` is used.

    >>> MemoryResiduals({"fc1": {"bf16": Residual(0, 4096, 0)}}).of("fc1", "bf16")
    Residual(saved=0, forward=4096, backward=0)
    """

    ops: Mapping[str, Mapping[str, Residual]] = field(default_factory=dict)
    loss: Residual = NOTHING

    def __bool__(self) -> bool:
        return bool(self.ops) or self.loss != NOTHING

    def of(self, op: str, precision: str) -> Residual:
        """Return an operator's residual; zero if it was not measured in this precision."""
        return self.ops.get(op, {}).get(precision, NOTHING)

    def scaled(self, factor: float) -> MemoryResiduals:
        """Return the residuals scaled to another number of samples."""
        ops = {op: {p: found.scaled(factor) for p, found in own.items()} for op, own in self.ops.items()}
        return MemoryResiduals(ops, self.loss.scaled(factor))

    @classmethod
    def joined(cls, parts: Iterable[MemoryResiduals]) -> MemoryResiduals:
        """Combine several steps: per operator and precision the first residual, for the loss the largest."""
        ops: dict[str, dict[str, Residual]] = {}
        losses: list[Residual] = []
        for part in parts:
            losses.append(part.loss)
            for op, own in part.ops.items():
                ops[op] = {**own, **ops.get(op, {})}
        return cls(ops, max(losses, key=lambda loss: loss.forward, default=NOTHING))
