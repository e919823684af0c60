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
from qsync.records.record_json import (
    LARGEST_FLOAT,
    Count,
    Fraction,
    Number,
    Positive,
    Record,
    as_record,
)


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

    def leg(self, num_ranks: int) -> tuple[float, float]:
        """Return latency and rate of a message between neighbours in a ring of so many ranks.

        An all-reduce of b bytes over n ranks is 2 (n - 1) messages of b / n bytes, one after the other.
        """
        ranks = max(2, self.num_ranks or num_ranks)
        return self.latency_s / (2 * (ranks - 1)), self.bytes_per_s * 2 * (ranks - 1) / ranks


@dataclass(frozen=True, slots=True)
class Host:
    """One host: its ranks, and its legs by the name of the other host, "*" for all that are not named.

    A message of b bytes takes latency_s + b / bytes_per_s, while one comes the other way. The leg by the
    host's own name connects its ranks; without one they are as near as the nearest other host.
    """

    name: str
    ranks: tuple[Count, ...]
    latency_s: Mapping[str, Number]
    bytes_per_s: Mapping[str, Annotated[float, Meta(gt=0, le=LARGEST_FLOAT)]]

    def leg(self, other: str) -> tuple[float, float]:
        """Return latency and rate of a message to another host, or between the ranks of this one."""
        latency_s, bytes_per_s = (
            legs[other] if other in legs else nearest(legs.values()) if other == self.name else legs["*"]
            for legs, nearest in ((self.latency_s, min), (self.bytes_per_s, max))
        )
        return latency_s, bytes_per_s


@dataclass(frozen=True, slots=True)
class _AlikeHosts:
    """The short form of hosts in files: so many with equally many ranks each, all joined by the same link."""

    between: Link | None = None
    num_hosts: Positive = 1


@dataclass(frozen=True, slots=True)
class Cluster(Record):
    """The device classes of one synchronous job and the links between its ranks.

    `link` connects all ranks. If `hosts` are given, their legs price what it would, and it tells how
    exchanges slow compute and miss their prediction. `broadcasts_buffers` is DDP's `broadcast_buffers`.

    `compression` says how gradients travel, by parameter (`qsync.records.compression.kind_of`). `codecs` has
    by kind what an exchange takes beyond the links' time of its bytes: encoding, decoding, and what its
    collectives take otherwise than an all-reduce.
    """

    ADDED_LATER = "broadcasts_buffers"

    classes: tuple[DeviceClass, ...]
    link: Link
    broadcasts_buffers: bool = True
    compression: Mapping[str, str] = field(default_factory=dict)
    codecs: Mapping[str, CodecCost] = field(default_factory=dict)
    hosts: tuple[Host, ...] = ()

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

    @property
    def all_hosts(self) -> tuple[Host, ...]:
        """Return the hosts; one with all ranks where none are given."""
        latency_s, bytes_per_s = self.link.leg(self.num_ranks)
        whole = Host("", tuple(range(self.num_ranks)), {"": latency_s}, {"": bytes_per_s})
        return self.hosts or (whole,)

    def on_hosts(self, num_hosts: int, between: Link) -> Cluster:
        """Return this cluster on so many hosts: `link` connects the ranks of each, and `between` the hosts.

        >>> cluster.on_hosts(2, Link(1e-4, 1e9))
        """
        latency_s, bytes_per_s = self.link.leg(-(-self.num_ranks // num_hosts))
        apart_s, rate = between.leg(num_hosts)
        hosts = tuple(
            Host(name, (), {name: latency_s, "*": apart_s}, {name: bytes_per_s, "*": rate})
            for name in (f"host {i}" for i in range(num_hosts))
        )
        return replace(self, hosts=hosts).with_classes(self.classes)

    def with_classes(self, classes: tuple[DeviceClass, ...], num_hosts: int | None = None) -> Cluster:
        """Return a cluster of these classes, in equal parts on the first of this one's hosts (or all)."""
        total = sum(device_class.count for device_class in classes)
        num = min(total, num_hosts or len(self.hosts))
        hosts = tuple(
            replace(host, ranks=tuple(range(total * i // num, total * (i + 1) // num)))
            for i, host in enumerate(self.hosts[:num])
        )
        return replace(self, classes=classes, hosts=hosts)

    def with_legs(
        self, latency: float = 1.0, rate: float = 1.0, *, within: bool = True, between: bool = True
    ) -> Cluster:
        """Return this cluster with latencies and rates times a factor, within hosts and between them."""

        def changed(own: str, values: Mapping[str, float], factor: float) -> dict[str, float]:
            return {at: v * factor if (within if at == own else between) else v for at, v in values.items()}

        hosts = tuple(
            Host(
                host.name, host.ranks, changed(host.name, host.latency_s, latency),
                changed(host.name, host.bytes_per_s, rate),
            )
            for host in self.hosts
        )  # fmt: skip
        latency_s, bytes_per_s = self.link.latency_s * latency, self.link.bytes_per_s * rate
        link = replace(self.link, latency_s=latency_s, bytes_per_s=bytes_per_s) if within else self.link
        return replace(self, link=link, hosts=hosts)

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
        short: dict[str, Any] = {}
        if isinstance(value, Mapping):
            short = {name: value[name] for name in ("between", "num_hosts") if name in value}
            value = {name: part for name, part in value.items() if name not in short}
        alike = as_record(short, _AlikeHosts, where)
        cluster = as_record(value, cls, where)
        if (alike.between is None) != (alike.num_hosts == 1):
            raise FormatError(
                f"{where}: num_hosts and a [between] link need each other; give both or neither"
            )
        if alike.between and cluster.hosts:
            raise FormatError(f"{where}: a [between] link stands for [[hosts]]; give one of them")
        if alike.num_hosts > cluster.num_ranks:
            raise FormatError(
                f"{where}: {shortened(alike.num_hosts)} hosts for {shortened(cluster.num_ranks)} ranks; "
                "give fewer hosts"
            )
        cluster._check(where)
        return cluster.on_hosts(alike.num_hosts, alike.between) if alike.between else cluster

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
        if self.hosts:
            _check_hosts(self.hosts, self.num_ranks, where)

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


def _check_hosts(hosts: tuple[Host, ...], num_ranks: int, where: str) -> None:
    """Raise FormatError unless every rank is on one host, and every host has a leg to each other."""
    found = sorted(rank for host in hosts for rank in host.ranks)
    names = {host.name for host in hosts}
    if found != list(range(num_ranks)) or not all(host.ranks for host in hosts) or len(names) < len(hosts):
        raise FormatError(
            f"{where}: [[hosts]] have the ranks {shortened(found)}; give each of the ranks 0 to "
            f"{num_ranks - 1} to one host, every host some, and a name of its own"
        )
    for host in hosts:
        for what, legs in (("latency_s", host.latency_s), ("bytes_per_s", host.bytes_per_s)):
            needed = names - {host.name} - legs.keys() if "*" not in legs else set()
            if needed or not legs:
                raise FormatError(
                    f"{where}: {what} of host {shortened(host.name)} lacks "
                    f"{shortened(min(needed, default=host.name))}; give one for every host, or '*' for the "
                    "others"
                )


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
