"""Levers: the changes that a plan may make beside precisions, for each device class.

Shares of the batch and passes (micro-batches) are taken by `qsync.weigh_gradients` and `qsync.micro_batches`,
blocks are recomputed by `qsync.wrap`; the size of DDP's buckets, and which operators save less for backward,
stand in the plan itself.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from qsync.errors import FormatError, shortened
from qsync.records.graph import OpGraph
from qsync.records.record_json import Number, Positive, Record

SHARE, ACCUMULATE, BUCKETS, RECOMPUTE, SAVE_LESS = LEVERS = (
    "share", "accumulate", "buckets", "recompute", "save_less",
)  # fmt: skip


@dataclass(frozen=True, slots=True)
class ClassLevers(Record):
    """The levers of one class.

    Each of its ranks takes `samples` per optimizer step (None: as many as the graph was captured with) in
    `passes` micro-batches. The blocks `recomputed` (paths of modules) compute forward once more in backward.
    """

    samples: Positive | None = None
    passes: Positive = 1
    recomputed: tuple[str, ...] = ()

    def __str__(self) -> str:
        """Say the levers in words: "4 samples in 2 passes, layer.0 recomputed"."""
        parts = [f"{self.samples} samples" if self.samples is not None else "samples as captured"]
        parts[0] += f" in {self.passes} passes" if self.passes > 1 else ""
        if self.recomputed:
            parts.append(f"{', '.join(self.recomputed)} recomputed")
        return ", ".join(parts)


@dataclass(frozen=True, slots=True)
class Without:
    """The plan with one lever off, the others as they are, and precisions chosen anew.

    Its difference from the plan is the gain of the lever. Fields are None where there is no such plan;
    `reason` says why, or that the target is then missed.
    """

    step_s: Number | None = None
    added_variance: Number | None = None
    reason: str = ""


@dataclass(frozen=True, slots=True)
class Levers(Record):
    """The levers that a plan uses; a class not named uses none. In a plan each is named, with its samples.

    `without` holds the plan with each lever switched off. `ClassPlan.origin` says how the costs at other
    numbers of samples were found: "interpolated" or "proportional". `untried` names levers that a search
    could not use, with the reasons.

    >>> Levers({"infer": ClassLevers(samples=4, passes=2)})
    """

    ADDED_LATER = "without"

    classes: Mapping[str, ClassLevers]
    without: Mapping[str, Without] = field(default_factory=dict)
    untried: Mapping[str, str] = field(default_factory=dict)

    def __getitem__(self, device_class: str) -> ClassLevers:
        return self.classes.get(device_class, ClassLevers())

    @property
    def used(self) -> tuple[str, ...]:
        """Return the levers that some class of a plan uses."""
        entries = self.classes.values()
        found = {
            SHARE: len({entry.samples for entry in entries}) > 1,
            ACCUMULATE: any(entry.passes > 1 for entry in entries),
            RECOMPUTE: any(entry.recomputed for entry in entries),
        }
        return tuple(name for name, is_used in found.items() if is_used)


@dataclass(frozen=True, slots=True)
class CarriedTo:
    """The setting that a profile was carried over to: the graph of a pass, the samples of a step, the levers.

    `captured` is the hash of the shapes, and `captured_samples` the number of samples, that graph and profile
    were made with.
    """

    graph: OpGraph
    samples: int
    captured: str
    captured_samples: int
    levers: ClassLevers


def is_in_module(op: str, path: str) -> bool:
    """Return whether an operator, by its name, belongs to the module at this path."""
    return f"{op}.".startswith(f"{path}.")


def samples_of(graph: OpGraph) -> int:
    """Return the number of samples a graph was captured with: the first size of the batch's first tensor.

    Raises FormatError for a graph whose batch has none.

    >>> samples_of(graph)
    """
    shape = next((value.shape for value in graph.inputs if value.kind == "batch" and value.shape), None)
    if shape is None:
        model = shortened(graph.model, quote=False)
        raise FormatError(f"no tensor of a batch enters {model}, so it has no samples to share out")
    return shape[0]
