"""Levers: a plan's changes beside precisions, for each device class.

`qsync.weigh_gradients` and `qsync.micro_batches` apply shares and passes (micro-batches), `qsync.wrap`
recomputes blocks. The plan itself holds DDP's bucket size and the operators that save less.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Annotated, Any

from msgspec import Meta

from qsync.errors import FormatError, shortened
from qsync.records.graph import OpGraph
from qsync.records.record_json import Number, Positive, Record

SHARE, ACCUMULATE, BUCKETS, RECOMPUTE, SAVE_LESS = LEVERS = (
    "share", "accumulate", "buckets", "recompute", "save_less",
)  # fmt: skip


@dataclass(frozen=True, slots=True)
class ClassLevers(Record):
    """One class's levers: samples, passes, recomputed blocks, and a part of the optimizer's state.

    Each rank trains on `samples` per optimizer step (None: the captured number) in `passes` micro-batches.
    Backward recomputes the modules at the paths `recomputed`. Each rank holds the fraction `state_part` of
    the optimizer's state (None: all of it, on every rank of the cluster).
    """

    ADDED_LATER = "state_part"

    samples: Positive | None = None
    passes: Positive = 1
    recomputed: tuple[str, ...] = ()
    state_part: Annotated[float, Meta(ge=0, le=1)] | None = None

    def __str__(self) -> str:
        """Format the levers: "4 samples in 2 passes, layer.0 recomputed"."""
        parts = [f"{self.samples} samples" if self.samples is not None else "samples as captured"]
        parts[0] += f" in {self.passes} passes" if self.passes > 1 else ""
        if self.recomputed:
            parts.append(f"{', '.join(self.recomputed)} recomputed")
        if self.state_part is not None:
            parts.append(f"{self.state_part:.3g} of the optimizer's state")
        return ", ".join(parts)


@dataclass(frozen=True, slots=True)
class Without:
    """The prediction of the same plan with one lever off and precisions chosen again.

    Its difference from the plan is the lever's gain. Fields are None if there is no such plan; `reason`
    explains this, or that the target is missed.
    """

    step_s: Number | None = None
    added_variance: Number | None = None
    reason: str = ""


@dataclass(frozen=True, slots=True)
class Levers(Record):
    """The levers of a plan by class; a class not named uses none.

    `without` holds the plan with each lever switched off. `ClassPlan.origin` tells how costs at other sample
    counts were derived: "interpolated" or "proportional". `untried` gives reasons for unusable levers.

    >>> Levers({"infer": ClassLevers(samples=4, passes=2)})
    """

    ADDED_LATER = "without"

    classes: Mapping[str, ClassLevers]
    without: Mapping[str, Without] = field(default_factory=dict)
    untried: Mapping[str, str] = field(default_factory=dict)

    def __getitem__(self, device_class: str) -> ClassLevers:
        return self.classes.get(device_class, ClassLevers())

    @property
    def state_parts(self) -> dict[str, float] | None:
        """Return the part of the optimizer's state that a rank of each class holds; None if undivided."""
        found = {name: entry.state_part or 0.0 for name, entry in self.classes.items()}
        return found if any(entry.state_part is not None for entry in self.classes.values()) else None

    @property
    def used(self) -> tuple[str, ...]:
        """Return the levers that at least one class of a plan uses."""
        entries = self.classes.values()
        found = {
            SHARE: len({entry.samples for entry in entries}) > 1,
            ACCUMULATE: any(entry.passes > 1 for entry in entries),
            RECOMPUTE: any(entry.recomputed for entry in entries),
        }
        return tuple(name for name, is_used in found.items() if is_used)


@dataclass(frozen=True, slots=True)
class CarriedTo:
    """The setting to which a profile was scaled: the graph of a pass, samples per step, levers.

    `captured` (hash of shapes) and `captured_samples` describe the original graph and profile. `one_pass` is
    the graph of a pass with its profile, without recomputed blocks.
    """

    graph: OpGraph
    samples: int
    captured: str
    captured_samples: int
    levers: ClassLevers
    one_pass: tuple[OpGraph, Any] = field(compare=False, repr=False)


def is_in_module(op: str, path: str) -> bool:
    """Return whether an operator's name belongs to the module at this path."""
    return f"{op}.".startswith(f"{path}.")


def samples_of(graph: OpGraph) -> int:
    """Return a graph's captured number of samples: the first dimension of the batch's first tensor.

    Raises FormatError if the batch has no tensor.

    >>> samples_of(graph)
    """
    shape = next((value.shape for value in graph.inputs if value.kind == "batch" and value.shape), None)
    if shape is None:
        model = shortened(graph.model, quote=False)
        raise FormatError(
            f"{model} has no batch tensor as input, so its samples cannot be counted; capture it on a batch"
        )
    return shape[0]
