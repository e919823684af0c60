"""Profile: measured costs of a graph on a device class. Sensitivity: added variance by precision.

Both are measured once, saved, and read by replay and allocation without torch.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple

import qsync
from qsync.errors import FormatError, MismatchError, shortened
from qsync.operators.precision import Precision
from qsync.records.cluster import DeviceClass
from qsync.records.compression import CodecCost
from qsync.records.graph import OpGraph, digest
from qsync.records.levers import CarriedTo
from qsync.records.memory_residuals import MemoryResiduals
from qsync.records.record_json import NOT_IN_FILES, Count, FileRecord, Number, as_record, without_header
from qsync.records.variant import variant_of


class Cost(NamedTuple):
    """Seconds of a lowered graph's node, forward and backward, measured in a running step.

    `spread_s` is the variation of their sum between steps (a robust standard deviation).
    """

    forward_s: Number
    backward_s: Number = 0.0
    spread_s: Number = 0.0

    @property
    def total_s(self) -> float:
        """Return the seconds of forward and backward."""
        return self.forward_s + self.backward_s


# Rows of a file: the key of `Profile.casts` or `Profile.cast_fit`, and the costs in seconds.
_CAST_ROWS = tuple[tuple[str, str, str, Number, Number, Number], ...]
_FIT_ROWS = tuple[tuple[str, str, Number, Number, Number, Number], ...]

MEASURED, LEARNED, SIMULATED, WHAT_IF = "measured", "learned", "simulated", "what if"
CARRIED = "carried"
_SHOWN = {
    MEASURED: "", LEARNED: " (learned costs)", SIMULATED: " (simulated device)",
    CARRIED: " (carried over from a smaller model)",
}  # fmt: skip
# Origins for which the device itself was measured, on this or another model.
DEVICE_MEASURED = (MEASURED, LEARNED, CARRIED)
MEASURE_AGAIN = "measure it again with qsync.profile, or take it as what-if with --force"
# A throttled rank gets the requested share of its core to within some parts in a thousand.
_SAME_SHARE = 0.02


def shown(device_class: str, origin: str) -> str:
    """Return a class's name for tables, with the origin of its costs unless measured."""
    return device_class + _SHOWN.get(origin, f" ({origin})")


@dataclass(frozen=True, slots=True, weakref_slot=True)
class Profile(FileRecord):
    """Measured costs of one device class for one graph and batch shape.

    `ops` maps operator -> variant -> cost, where a key is what `qsync.records.variant.Variant` writes.
    `casts` maps (value, source type, target type) -> cost, as measured. `switch_s` maps precision -> what a
    product takes longer forward if the product before it ran in another, and backward if the one after it
    did. `cast_fit` maps (source, target) -> (latency, seconds per element) forward and backward, for casts no
    measured step contained. `outside` is what runs before and after the graph (the loss). `host_s` is the
    rest of a step: Python. `loading_s` is how long a step waits for its next batch, 0 where no loader was
    given to be timed. `optimizer_s` is one optimizer step with zero_grad; `optimizer_bytes` its state, and
    DDP's buckets where they are not the gradients. `bucket_s_per_byte` is what filling the DDP buckets adds
    to backward. An all-reduce takes `reduce_s_per_call` plus `reduce_s_per_byte` from this class's own
    compute.

    How far to trust it, as parts of a step's time (standard deviations): `noise` is how much one step differs
    from its like, `drift` how far the machine's speed departs from its mean in `seconds`, and `error` by how
    much the profile missed steps of mixed precision that it had not seen. It took `num_steps` steps and
    `seconds`.

    `origin` says where the costs come from: LEARNED where a model priced the operators in `filled`, each with
    the model's stated error as a fraction; SIMULATED where all are those of a data sheet's device; CARRIED
    where they come from a model that this one grew from (`predictor.cost_model.fill_profile`); WHAT_IF where
    they were measured for something else (`what_if`).

    `model` and `batch` (shapes) say in words what it was measured for, `machine` on what and with which
    versions; empty in files from before. `refused` maps operator -> precision -> why the device did not serve
    it in one that was to be measured.

    `held_down`: why the device ran below its own clock while it was taken (heat). `launches` prices the
    launches of the kernels, which the host makes while the device runs earlier ones (a GPU): the same costs,
    in seconds of the host. None where a call returns when its work is done.

    `memory_residuals` are bytes of steps as measured beyond those that the memory model predicts; none on
    GPUs, and for losses that call the model several times. `bitwise`: FP32 was measured with torch's own
    kernels, not the fastest of a CPU. `optimizer_workspace_bytes` is the most that a step of the optimizer
    has in use beside its state; 0 where that was not measured. `state_bytes` are the bytes of the state by
    parameter; empty for an optimizer that does not say which state is whose. `exchange_tolls` has by kind of
    compression the seconds of this class's own compute that the exchange of a bucket takes.

    `setting` is what it was carried over to where a plan uses levers (`replayer.levers.apply`). It is in no
    file.
    """

    FILE_KIND = "profile"
    ADDED_LATER = "refused"  # plans store the hash of the file's content

    device_class: str
    graph_hash: str
    shapes_hash: str
    ops: Mapping[str, Mapping[str, Cost]]
    casts: Mapping[tuple[str, str, str], Cost]
    cast_fit: Mapping[tuple[str, str], tuple[Cost, Cost]]
    outside: Cost
    host_s: Number
    optimizer_s: Number
    optimizer_bytes: Count
    step_s: Mapping[str, Number]
    machine: Mapping[str, Any]
    emulated_share: Number | None = None
    bucket_s_per_byte: Number = 0.0
    reduce_s_per_call: Number = 0.0
    reduce_s_per_byte: Number = 0.0
    noise: Number = 0.0
    drift: Number = 0.0
    error: Number = 0.0
    num_steps: Count = 0
    seconds: Number = 0.0
    origin: str = MEASURED
    filled: Mapping[str, Number] = field(default_factory=dict)
    refused: Mapping[str, Mapping[str, str]] = field(default_factory=dict)
    loading_s: Number = 0.0
    model: str = ""
    batch: tuple[tuple[Count, ...], ...] = ()
    setting: CarriedTo | None = field(default=None, metadata=NOT_IN_FILES)
    switch_s: Mapping[str, Cost] = field(default_factory=dict)
    held_down: tuple[str, ...] = ()
    launches: Profile | None = None
    memory_residuals: MemoryResiduals = field(default_factory=MemoryResiduals)
    bitwise: bool = True
    optimizer_workspace_bytes: Count = 0
    state_bytes: Mapping[str, Count] = field(default_factory=dict)
    exchange_tolls: Mapping[str, CodecCost] = field(default_factory=dict)

    @property
    def device(self) -> str | None:
        """Return the profiled device, "cpu" or "cuda"; None if unknown."""
        stated = self.machine.get("device")  # older profiles only list the machine's GPUs
        return stated or ("cpu" if self.machine.get("gpus") == [] else None)

    @property
    def hardware(self) -> str | None:
        """Return the profiled GPU, or the processor with the rank's threads, if known."""
        stated = self.machine.get("hardware")
        if stated is None and self.device == "cpu" and {"processor", "threads"} <= self.machine.keys():
            return processor_with(self.machine["processor"], self.machine["threads"])
        return stated

    @property
    def uncertainty(self) -> float:
        """Return the expected standard deviation of (measured - predicted) / predicted, median step.

        It holds for steps interleaved with the profile's, or for a profile extrapolated by `ahead`.
        """
        return math.hypot(self.error, self.drift)

    def ahead(self, run_s: float) -> Profile:
        """Return the profile with `drift` extrapolated to the mean step of the next `run_s` seconds.

        The machine's slowness is a random walk (`predictor.profiling.machine_drift`). A walk of rate q
        departs from its own mean over S seconds by a variance of qS/6, which is what `drift` states. Its mean
        over the next T seconds departs from that mean by q(S + T)/3.

        >>> replay(graph, plan, {name: p.ahead(600.0) for name, p in profiles.items()}, cluster).interval_s
        """
        if not self.drift or not self.seconds:
            return self
        return replace(self, drift=self.drift * math.sqrt(2.0 * (1.0 + run_s / self.seconds)))

    @property
    def hash(self) -> str:
        """Return a hash of the content."""
        return digest(self.to_json())

    def precisions_of(self, op: str) -> tuple[Precision, ...]:
        """Return the precisions that were measured for an adjustable operator."""
        try:
            modes = (variant_of(key).mode for key in self.ops.get(op, {}))
            return tuple(dict.fromkeys(Precision.parse(mode) for mode in modes))
        except FormatError as error:
            raise FormatError(
                f"profile of {shortened(self.device_class, quote=False)}, operator {shortened(op)}: {error}"
            ) from error

    def check_graph(self, graph: OpGraph) -> None:
        """Raise MismatchError unless this profile was measured for `graph` at its batch shape."""
        name = shortened(self.device_class, quote=False)
        if self.graph_hash != graph.hash:
            mine, other = (
                f"{shortened(model, quote=False)}, graph {h}" if model else f"graph {h}"
                for model, h in ((self.model, self.graph_hash), (graph.model, graph.hash))
            )
            raise MismatchError(
                f"the profile of {name} belongs to another model ({mine}; this one is "
                f"{other}{self._other_operators(graph)}); {MEASURE_AGAIN}"
            )
        if (self.setting.captured if self.setting else self.shapes_hash) != graph.shapes_hash:
            sides = f" ({shown_shapes(self.batch)}, this one is {shown_shapes(graph.batch_shapes)})"
            raise MismatchError(
                f"the profile of {name} belongs to another batch shape{sides if self.batch else ''}; capture "
                "and profile with the same example batch, or accept it as a what-if with --force"
            )

    def _other_operators(self, graph: OpGraph) -> str:
        """Name the operators that only one of `graph` and the profiled graph has, if any."""
        here = {op.name for op in graph.ops}
        lacking = [op.name for op in graph.adjustable if op.name not in self.ops]
        surplus = [name for name in self.ops if name not in here]
        if lacking:
            return f", which also has {_some(lacking)}"
        return f", which has no {_some(surplus)}" if surplus else ", whose parameters have other shapes"

    def graph_of(self, graph: OpGraph) -> OpGraph:
        """Return the graph that this profile prices: under its class's levers, if any."""
        return self.setting.graph if self.setting else graph

    def check_class(self, device_class: DeviceClass) -> None:
        """Raise MismatchError unless this profile's hardware, if known, is the class's."""
        if self.origin not in DEVICE_MEASURED:
            return
        name = shortened(self.device_class, quote=False)
        mine, its = (
            shortened(has, quote=False) if has else has for has in (self.hardware, device_class.hardware)
        )
        if mine and its and self.hardware != device_class.hardware:
            raise MismatchError(
                f"the profile of {name} was measured on another machine ({mine}, the class is {its}); "
                f"{MEASURE_AGAIN}"
            )
        if self.device not in (None, device_class.device):
            how = "without a GPU" if self.device == "cpu" else "on a GPU"
            raise MismatchError(
                f"the profile of {name} was measured {how} ({mine}), but the class is "
                f"{device_class.device}; {MEASURE_AGAIN}"
            )
        shares = [share or 1.0 for share in (self.emulated_share, device_class.emulated_share)]
        if abs(shares[0] - shares[1]) > _SAME_SHARE:
            found, wanted = (
                f"an emulated device (emulated_share = {share:.4g})" if share < 1 else "a whole one"
                for share in shares
            )
            raise MismatchError(
                f"the profile of {name} was measured on {found}, but the class is {wanted}; correct the "
                "class, or measure again with qsync.profile"
            )

    def what_if(self, graph: OpGraph) -> Profile:
        """Return this profile relabelled "what if", as if measured for `graph`."""
        return replace(
            self, origin=WHAT_IF, graph_hash=graph.hash, shapes_hash=graph.shapes_hash,
            model=graph.model, batch=graph.batch_shapes, memory_residuals=MemoryResiduals(),
        )  # fmt: skip

    def to_json(self) -> dict[str, Any]:
        """Return the profile as a JSON object."""
        body = FileRecord.to_json(self)
        if self.setting:
            body["levers"] = self.setting.levers.to_json()
        body["casts"] = [[*key, *cost] for key, cost in self.casts.items()]
        body["cast_fit"] = [[*key, *base[:2], *slope[:2]] for key, (base, slope) in self.cast_fit.items()]
        if self.launches:
            body["launches"] = self.launches.to_json()
        return body

    @classmethod
    def from_json(cls, value: Any, where: str | None = None) -> Profile:
        """Read the JSON of `to_json`.

        FormatError names the file or argument (`where`) and the wrong place in it.
        """
        name = value.get("device_class") if isinstance(value, Mapping) else None
        where = where or f"profile of {shortened(name, quote=False)}"
        return as_record(_with_tables(value, where), cls, where)


def _with_tables(value: Any, where: str) -> dict[str, Any]:
    """Return a profile's JSON fields with casts and launches converted from rows to tables."""
    body = without_header(value, "profile")
    if "casts" in body:
        casts = as_record(body["casts"], _CAST_ROWS, f"{where}, casts")
        body["casts"] = {row[:3]: row[3:] for row in casts}
    if "cast_fit" in body:
        fits = as_record(body["cast_fit"], _FIT_ROWS, f"{where}, cast_fit")
        body["cast_fit"] = {row[:2]: (row[2:4], row[4:]) for row in fits}
    if body.get("launches"):
        body["launches"] = _with_tables(body["launches"], f"{where}, launches")
    return body


def check_versions(profiles: Mapping[str, Profile]) -> None:
    """Raise MismatchError unless all profiles share torch's version and this qsync's version.

    Patch releases count as equal.
    """
    for what in ("torch", "qsync"):
        known: dict[str, str] = {}
        for name, profile in profiles.items():
            version = profile.machine.get(what)
            if version and profile.origin in DEVICE_MEASURED:
                known.setdefault(_minor(version), name)
        for version, name in known.items():
            if what == "qsync" and version != _minor(qsync.__version__):
                raise MismatchError(
                    f"the profile of {name} was measured with qsync {version}, but this is qsync "
                    f"{qsync.__version__}; {MEASURE_AGAIN}"
                )
        if len(known) > 1:
            (one, first), (other, second) = list(known.items())[:2]
            raise MismatchError(
                f"the profile of {first} was measured with {what} {one}, that of {second} with {other}; "
                "measure one of them again, or accept it as a what-if with --force"
            )


def _minor(version: object) -> str:
    return ".".join(str(version).split(".")[:2])


def processor_with(processor: str, num_threads: int) -> str:
    """Return the hardware name of a CPU rank: the processor and the rank's threads."""
    return f"{processor}, {num_threads} thread{'s' if num_threads != 1 else ''}"


def _some(names: Sequence[str]) -> str:
    return shortened(names[0]) + (f" and {len(names) - 1} others" if names[1:] else "")


def shown_shapes(batch: Sequence[tuple[int, ...]]) -> str:
    """Format the shapes of a batch's tensors for a message."""
    return shortened(", ".join("x".join(map(str, shape)) or "a number" for shape in batch), quote=False)


@dataclass(frozen=True, slots=True)
class Sensitivity(FileRecord):
    """Sensitivity: gradient variance added by each operator at each precision (squared gradient norm).

    `exchange` has by kind of compression the squared error of each bucket's mean gradient, as measured.
    """

    FILE_KIND = "sensitivity"
    ADDED_LATER = "exchange"

    graph_hash: str
    indicator: str
    omega: Mapping[str, Mapping[str, Number]]
    num_batches: Count = 1
    exchange: Mapping[str, tuple[Number, ...]] = field(default_factory=dict)

    def __getitem__(self, key: tuple[str, Precision]) -> float:
        op, precision = key
        if precision is Precision.FP32:
            return 0.0
        try:
            return self.omega[op][precision]
        except KeyError:
            raise MismatchError(
                f"the sensitivity of {shortened(op, quote=False)} at {precision} is missing; run "
                "qsync.sensitivity again"
            ) from None
