"""OpGraph: the operators of a captured model, in the order they run.

The *inputs* of an operator are the values that it computes on; lowering brings them to the operator's type.
Its *kept* values are read as they are (parameters of a norm, running statistics, indices, boolean masks). A
value has the name of the operator that makes it, or of the graph input.
"""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Iterable
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any

from qsync.errors import FormatError, shortened
from qsync.records.identity_cache import IdentityCache
from qsync.records.precision import PRECISIONS_BY_KIND, type_bytes
from qsync.records.record_json import NOT_IN_FILES, Count, FileRecord, Number


class Role(StrEnum):
    """The source of an operator's precision."""

    ADJUSTABLE = "adjustable"  # the plan
    FOLLOWING = "following"  # its inputs: it runs in the widest type among them
    FIXED = "fixed"  # nobody: it runs in the type it was traced in


@dataclass(frozen=True, slots=True)
class Input:
    """A tensor that enters the graph: a parameter, a buffer, or part of the batch.

    `channels_last`: it is an image, or a convolution's weight, in that memory order.
    """

    name: str
    kind: str  # "parameter", "buffer", "batch", or "alias": one of them once more, in a graph of its own
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
        """Return the bytes of the tensor, and of its gradient."""
        return type_bytes(self.dtype, self.num_elements)

    @property
    def passed_on(self) -> bool:
        """Return whether an earlier traced graph of the same step made it: data has no gradient."""
        return self.kind == "batch" and self.requires_grad and self.name.startswith("segment")


@dataclass(frozen=True, slots=True)
class Derivative:
    """What torch's derivative of a call saves for backward and needs there, as counted when it was traced.

    `saved` are operands by their place in (*inputs, *kept); `besides` is (type, number of elements) of each
    other tensor; `workspace_bytes` are those alive in backward besides the gradients.
    """

    saved: tuple[Count, ...] = ()
    saves_result: bool = False
    besides: tuple[tuple[str, Count], ...] = ()
    workspace_bytes: Count = 0


@dataclass(frozen=True, slots=True)
class Op:
    """One operator.

    `flops` counts a multiply-add as two, forward only. `magnitude` is the largest constant that its result
    may hold by construction (masks); a type whose range ends below it is not used. `depth` counts the
    products on the longest path up to and including this one, of those that are adjustable (an embedding
    multiplies nothing). `dilated` is of convolutions. `fixed_because` says why an operator whose kind is not
    fixed is: its tensors, or how it is called. `dropout` is the part of its weights that attention drops.
    `exposed`: something that is no operator reads the result too, so that it must be made whatever its
    consumers need. `copies`: a view or `contiguous` copied when it was traced, a linear layer its input, or
    attention its values; None where that is not known.
    `channels_last`: its result, an image, had that memory order when it was traced.
    `splits`: its results are parts of its operand, and views of it are one part each.
    `derivative`: what torch's derivative saves and needs, in the traced type; None where it was not counted.
    `makes_weight`: a product that reads nothing of the batch, only parameters, buffers and constants
    (`qsync.records.base.why_kept`).
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
    """A model's operators in execution order, with what enters the graph.

    Graph breaks are joined in order. `recomputed` lists the blocks that compute forward once more in
    backward, where a plan wants that (`qsync.records.levers`): each as the positions of its first and last
    operator. No file holds it. A step calls the model `num_calls` times (three in a triplet loss): profiles
    and sensitivities are those of all calls together.
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
        """Return the identity of the model as a plan sees it: adjustable operators and parameter shapes."""
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
        """Return the identity of the model at one batch shape, as a profile was measured for it."""
        return _SHAPES_HASHES.of(self, lambda: digest([[op.name, op.shape] for op in self.ops]))

    def check_content(self) -> None:
        """Raise FormatError if an operator reads an unknown value, or is adjustable without a kernel."""
        known = {value.name for value in self.inputs}
        for op in self.ops:
            missing = [name for name in (*op.inputs, *op.kept) if name not in known]
            if missing:
                raise FormatError(
                    f"graph: operator {shortened(op.name)} reads {shortened(missing[0])}, which nothing "
                    "before it makes; capture the model again"
                )
            if op.role is Role.ADJUSTABLE and op.kind not in PRECISIONS_BY_KIND:
                raise FormatError(
                    f"graph: operator {shortened(op.name)} is adjustable, but there is no kernel of kind "
                    f"{shortened(op.kind)}; "
                    "capture the model again"
                )
            known.add(op.name)


_HASHES: IdentityCache[str] = IdentityCache()
_SHAPES_HASHES: IdentityCache[str] = IdentityCache()


def num_elements(shape: Iterable[int]) -> int:
    """Return the product of the sizes; 1 for a scalar."""
    return math.prod(shape)


def digest(value: Any) -> str:
    """Return a short, stable hash of a JSON-able value."""
    return hashlib.sha256(json.dumps(value, sort_keys=True).encode()).hexdigest()[:16]
