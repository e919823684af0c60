"""OpGraph: the operators of a captured model, in the order they run.

An operator's *inputs* are values that lowering converts to the operator's type. Its *kept* values are read
unchanged (parameters of a norm, running statistics, indices, boolean masks). A value has the name of its
operator, or of the graph input.
"""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any

from qsync.errors import FormatError, shortened
from qsync.operators.declaration import Role
from qsync.operators.precision import type_bytes
from qsync.operators.registry import PRECISIONS_BY_KIND
from qsync.records.identity_cache import IdentityCache
from qsync.records.record_json import NOT_IN_FILES, Count, FileRecord, Number


@dataclass(frozen=True, slots=True)
class Input:
    """A graph input: a parameter, a buffer, or part of the batch.

    `channels_last`: an image or a convolution's weight in this memory order.
    """

    name: str
    # "parameter", "buffer", "batch", or "alias" (a second name of one of them in another segment's graph)
    kind: str
    dtype: str
    shape: tuple[Count, ...]
    requires_grad: bool = False
    channels_last: bool = False

    @property
    def num_elements(self) -> int:
        """Return the number of elements."""
        return num_elements(self.shape)

    @property
    def num_bytes(self) -> int:
        """Return the bytes of the tensor, which are also those of its gradient."""
        return type_bytes(self.dtype, self.num_elements)

    @property
    def passed_on(self) -> bool:
        """Return whether an earlier traced graph of the same step made it: unlike data, it has a gradient."""
        return self.kind == "batch" and self.requires_grad and self.name.startswith("segment")


@dataclass(frozen=True, slots=True)
class Derivative:
    """The tensors that torch's derivative of a call saves and needs, counted at tracing.

    `saved` are indices into (*inputs, *kept). `besides` is (type, number of elements) of each other saved
    tensor. `workspace_bytes` are alive in backward besides the gradients.
    """

    saved: tuple[Count, ...] = ()
    saves_result: bool = False
    besides: tuple[tuple[str, Count], ...] = ()
    workspace_bytes: Count = 0


@dataclass(frozen=True, slots=True)
class Op:
    """One operator of the graph.

    `flops` counts 2 per multiply-add, forward only. `magnitude` is the largest constant that its result may
    hold by construction (masks); types with a smaller range are not used. `depth` counts the adjustable
    products (no embeddings) on the longest path up to and including this one. `dilated` is for convolutions,
    `dropout` the dropout probability of attention weights. `fixed_because`: why an operator of an adjustable
    kind is fixed. `exposed`: code outside of operators reads the result, too. `copies`: when traced, a view
    or `contiguous` copied, a linear layer copied its input, or attention its values; None if unknown.
    `channels_last`: the traced result was an image in this memory order. `splits`: the results are parts of
    the operand. `derivative`: tensors saved in the traced type; None if not counted. `makes_weight`: a
    product of only parameters, buffers and constants (`qsync.records.base.why_kept`).
    """

    name: str
    kind: str
    role: Role
    inputs: tuple[str, ...]
    kept: tuple[str, ...]
    dtype: str
    shape: tuple[Count, ...]
    flops: Count = 0
    requires_grad: bool = True
    magnitude: Number = 0.0
    depth: Count = 0
    dropout: Number = 0.0
    dilated: bool = False
    fixed_because: str = ""
    exposed: bool = False
    copies: bool | None = None
    channels_last: bool = False
    splits: bool = False
    derivative: Derivative | None = None
    makes_weight: bool = False

    @property
    def num_elements(self) -> int:
        """Return the number of elements of the result."""
        return num_elements(self.shape)


@dataclass(frozen=True, slots=True, weakref_slot=True)
class OpGraph(FileRecord):
    """A model's operators in execution order, with the graph's inputs.

    Segments between graph breaks are joined in order. `recomputed` lists blocks that backward recomputes
    under a plan (`qsync.records.levers`), each as the positions of its first and last operator; files do not
    store it. A step calls the model `num_calls` times (three in a triplet loss); profiles and sensitivities
    cover all calls together.
    """

    FILE_KIND = "graph"
    ADDED_LATER = "num_calls"

    model: str
    inputs: tuple[Input, ...]
    ops: tuple[Op, ...]
    num_segments: Count = 1
    recomputed: tuple[tuple[int, int], ...] = field(default=(), metadata=NOT_IN_FILES)
    num_calls: Count = 1

    @property
    def adjustable(self) -> tuple[Op, ...]:
        """Return the adjustable operators, in order."""
        return tuple(op for op in self.ops if op.role is Role.ADJUSTABLE)

    @property
    def parameters(self) -> tuple[Input, ...]:
        """Return the parameters that enter the graph."""
        return tuple(value for value in self.inputs if value.kind == "parameter")

    @property
    def hash(self) -> str:
        """Return a hash of the model as plans see it: adjustable operators and parameter shapes."""
        return _HASHES.of(self, self._hash)

    def _hash(self) -> str:
        shapes = {value.name: value.shape for value in self.inputs if value.kind in ("parameter", "alias")}
        ops = sorted(
            [op.name, op.kind, [shapes[name] for name in op.inputs if name in shapes]]
            for op in self.adjustable
        )
        return digest(ops)

    @property
    def batch_shapes(self) -> tuple[tuple[int, ...], ...]:
        """Return the shapes of the batch's tensors."""
        return tuple(value.shape for value in self.inputs if value.kind == "batch")

    @property
    def shapes_hash(self) -> str:
        """Return a hash of the model at one batch shape, which a profile belongs to."""
        return _SHAPES_HASHES.of(self, lambda: digest([[op.name, op.shape] for op in self.ops]))

    def check_content(self) -> None:
        """Raise FormatError for an operator with an unknown input, or adjustable without a kernel."""
        known = {value.name for value in self.inputs}
        for op in self.ops:
            missing = [name for name in (*op.inputs, *op.kept) if name not in known]
            if missing:
                raise FormatError(
                    f"graph: operator {shortened(op.name)} reads {shortened(missing[0])}, which no earlier "
                    "operator computes; capture the model again"
                )
            if op.role is Role.ADJUSTABLE and op.kind not in PRECISIONS_BY_KIND:
                raise FormatError(
                    f"graph: operator {shortened(op.name)} is adjustable, but there is no kernel of kind "
                    f"{shortened(op.kind)}; capture the model again"
                )
            known.add(op.name)


_HASHES: IdentityCache[str] = IdentityCache()
_SHAPES_HASHES: IdentityCache[str] = IdentityCache()


def num_elements(shape: Iterable[int]) -> int:
    """Return the product of the sizes; 1 for a scalar."""
    return math.prod(shape)


def digest(value: Any) -> str:
    """Return a short, stable hash of a JSON value."""
    return hashlib.sha256(json.dumps(value, sort_keys=True).encode()).hexdigest()[:16]
