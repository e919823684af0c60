"""Clusters: device classes, the number of ranks of each, and the links between them."""

from __future__ import annotations

import tomllib
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from itertools import count
from pathlib import Path
from typing import Annotated, Any

from msgspec import Meta

from qsync.errors import FormatError, shortened
from qsync.operators.precision import Precision
from qsync.records.compression import CodecCost, Compression
from qsync.records.datasheets import datasheet
from qsync.records.json_files import read_text
from qsync.records.record_json import LARGEST_FLOAT, Fraction, Number, Positive, Record, as_record


@dataclass(frozen=True, slots=True)
class DeviceClass:
    """One kind of device: its precisions, memory and hardware.

    `emulated_share` is the share of its core that an emulated rank gets. `datasheet` names the data sheet of
    an absent device, for which plans are simulated. `hardware` names the GPU, or the processor with a rank's
    threads, if known: a profile of other hardware is an error.
    """

    ADDED_LATER = "hardware"

    name: str
    device: Annotated[str, Meta(pattern="^(cpu|cuda)$")]
    count: Positive
    memory_bytes: Positive
    precisions: tuple[Precision, ...]
    emulated_share: Fraction | None = None
    datasheet: str | None = None
    hardware: str | None = None

    @property
    def carried_16bit(self) -> str | None:
        """Return this class's 16-bit float for tensors between operators, or None.

        It is never FP16, which may not hold gradients in true scale.
        """
        return "bf16" if Precision.BF16 in self.precisions else None


@dataclass(frozen=True, slots=True)
class Link:
    """A link over which ranks exchange gradients.

    An all-reduce of b bytes takes latency_s + b / bytes_per_s once all ranks have arrived. `num_ranks` is the
    number of ranks at measurement; None: the same as in use.

    On a CPU communication and compute share cores: beside compute an all-reduce runs at `overlap_rate` of its
    speed alone (1 with a copy engine). It slows compute by `Profile.reduce_s_per_byte`, times `waiting_toll`
    if its peers only wait and so answer at once.

    `error` is the link's share in the prediction error of steps: a relative standard deviation, 0 if not
    measured.
    """

    latency_s: Number
    bytes_per_s: Annotated[float, Meta(gt=0, le=LARGEST_FLOAT)]
    overlap_rate: Fraction = 1.0
    num_ranks: Annotated[int, Meta(ge=2)] | None = None
    error: Number = 0.0
    waiting_toll: Annotated[float, Meta(ge=1, le=LARGEST_FLOAT)] = 1.0


@dataclass(frozen=True, slots=True)
class Cluster(Record):
    """The device classes of one synchronous job and the links between its ranks.

    `link` connects all ranks. If `between` is given, `link` connects the ranks of one host, and `between` the
    `num_hosts` hosts with equally many ranks each. `broadcasts_buffers` is DDP's `broadcast_buffers`.

    `compression` says how gradients travel, by parameter (`qsync.records.compression.kind_of`). `codecs` has
    by kind what an exchange takes beyond the links' time of its bytes: encoding, decoding, and what its
    collectives take otherwise than an all-reduce.
    """

    ADDED_LATER = "broadcasts_buffers"

    classes: tuple[DeviceClass, ...]
    link: Link
    between: Link | None = None
    num_hosts: Positive = 1
    broadcasts_buffers: bool = True
    compression: Mapping[str, str] = field(default_factory=dict)
    codecs: Mapping[str, CodecCost] = field(default_factory=dict)

    @property
    def num_ranks(self) -> int:
        """Return the number of ranks of all classes."""
        return sum(device_class.count for device_class in self.classes)

    def __getitem__(self, name: str) -> DeviceClass:
        for device_class in self.classes:
            if device_class.name == name:
                return device_class
        known = shortened(", ".join(device_class.name for device_class in self.classes), 160, quote=False)
        raise FormatError(f"the cluster has no device class {shortened(name)}; choose from {known}")

    def with_memory(self, budgets: Mapping[str, int]) -> Cluster:
        """Return this cluster with other memory for some classes: name -> bytes.

        Raises FormatError for an unknown class.
        """
        for name in budgets:
            self[name]
        classes = tuple(replace(c, memory_bytes=budgets.get(c.name, c.memory_bytes)) for c in self.classes)
        return replace(self, classes=classes)

    @classmethod
    def from_json(cls, value: Any, where: str | None = None) -> Cluster:
        """Read the JSON of `to_json`.

        FormatError names the file or argument (`where`) and the wrong place in it.
        """
        where = where or "cluster"
        classes = value.get("classes") if isinstance(value, Mapping) else None
        if isinstance(classes, (list, tuple)):
            places = (f"{where}, classes, entry {i}" for i in count(1))
            value = {**value, "classes": [_completed(*each) for each in zip(classes, places, strict=False)]}
        cluster = as_record(value, cls, where)
        cluster._check(where)
        return cluster

    def _check(self, where: str) -> None:
        """Raise FormatError for fields that contradict each other."""
        if not self.classes:
            raise FormatError(f"{where} has no device class; add a [[classes]] table")
        names = [device_class.name for device_class in self.classes]
        for name, device_class in zip(names, self.classes, strict=True):
            if names.count(name) > 1:
                raise FormatError(
                    f"{where} names the device class {shortened(name)} twice; give each class one table"
                )
            if Precision.FP32 not in device_class.precisions:
                raise FormatError(f"{where}, {shortened(name)}: precisions must include 'fp32'; add it")
        for kind in self.compression.values():
            Compression.parse(kind)
        if (self.between is None) != (self.num_hosts == 1):
            raise FormatError(
                f"{where}: num_hosts and a [between] link need each other; give both or neither"
            )
        if self.num_hosts > self.num_ranks:
            raise FormatError(
                f"{where}: {shortened(self.num_hosts)} hosts for {shortened(self.num_ranks)} ranks; "
                "give fewer hosts"
            )

    @classmethod
    def load(cls, path: str | Path) -> Cluster:
        """Read a cluster file (cluster.toml, see docs/guide/clusters.md); keys are the record's fields."""
        text = read_text(path, "a cluster.toml")
        try:
            return cls.from_json(tomllib.loads(text), where=str(path))
        except tomllib.TOMLDecodeError as error:
            raise FormatError(f"{path}: not valid TOML ({shortened(error)}); correct that line") from error
        # Nested too deeply, or a number with thousands of digits
        except (RecursionError, ValueError) as error:
            raise FormatError(
                f"{path} is not a cluster file ({shortened(error)}); see docs/guide/clusters.md"
            ) from error


def _completed(entry: Any, where: str) -> Any:
    """Fill in a class's missing memory and precisions from its data sheet."""
    name = entry.get("datasheet") if isinstance(entry, Mapping) else None
    if not isinstance(name, str):
        return entry  # later checks accept or refuse it
    try:
        sheet = datasheet(name)
    except FormatError as error:
        raise FormatError(f"{where}: {error}") from error
    usual = [str(precision) for precision in sheet.precisions if not precision.facts.on_request]
    found = {"device": "cuda", "memory_bytes": sheet.memory_bytes, "precisions": usual, **entry}
    asked = found["precisions"]
    for text in asked if isinstance(asked, (list, tuple)) else ():
        if text not in list(sheet.precisions):
            known = ", ".join(sheet.precisions)
            raise FormatError(
                f"{where}: {sheet.name} does not support {shortened(text, quote=False)}; choose from {known}"
            )
    return {**found, "datasheet": sheet.name}
