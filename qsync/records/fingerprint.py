"""The fingerprint of a machine: what `qsync doctor --report` writes, to be attached to a bug report."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Annotated

from msgspec import Meta

from qsync.records.record_json import LARGEST_FLOAT, Count, FileRecord, Number, Positive

Signed = Annotated[float, Meta(ge=-LARGEST_FLOAT, le=LARGEST_FLOAT)]


@dataclass(frozen=True, slots=True)
class KernelFound:
    """The kernel of a kind of product in a precision at a representative shape; `why` there is none."""

    device: str
    kind: str
    precision: str
    kernel: str | None = None
    flops_per_s: Number | None = None
    speedup: Number | None = None
    why: str | None = None


@dataclass(frozen=True, slots=True)
class Gap:
    """`count` operators of one shape: mean seconds of one inside a step, and its seconds alone.

    `causes` are the seconds by which each cause lengthens it inside the step (`qsync.fingerprint.in_step`).
    """

    precision: str
    operators: str
    count: Positive
    in_step_s: Number
    alone_s: Number
    causes: Mapping[str, Signed]

    @property
    def ratio(self) -> float:
        """Return the time inside a step over the time alone."""
        return self.in_step_s / self.alone_s

    @property
    def explained(self) -> float:
        """Return the part of the difference that the causes make up."""
        return sum(self.causes.values()) / (self.in_step_s - self.alone_s)


@dataclass(frozen=True, slots=True)
class SmallModel:
    """What was measured of one small model.

    `step_errors` and `memory_errors` are predicted over measured minus 1, of mixed plans. `chosen` maps a
    mode of `qsync.wrap` to each operator's precision, and `why` to the reasons of those in another one.
    """

    name: str
    step_s: Mapping[str, Number]
    step_errors: tuple[Signed, ...]
    memory_errors: tuple[Signed, ...]
    chosen: Mapping[str, Mapping[str, str]]
    why: Mapping[str, Mapping[str, str]]
    gaps: tuple[Gap, ...]


@dataclass(frozen=True, slots=True)
class Fingerprint(FileRecord):
    """A machine's fingerprint, without a name, a path or a setting of its user.

    Seconds are CPU time of one thread. `load_average` is the number of running processes before. `left_out`
    names what three minutes did not suffice for.
    """

    FILE_KIND = "fingerprint"

    processor: str
    instruction_sets: tuple[str, ...]
    gpus: tuple[str, ...]
    cores: Positive
    memory_bytes: Count
    versions: Mapping[str, str]
    load_average: Number
    seconds: Number
    peak_flops_per_s: Mapping[str, Number]
    copied_bytes_per_s: Number
    kernels: tuple[KernelFound, ...]
    models: tuple[SmallModel, ...]
    left_out: tuple[str, ...] = ()
