"""Clusters: device classes, the number of ranks of each, and the links between them."""

from __future__ import annotations

import math
import tomllib
from collections.abc import Mapping
from dataclasses import asdict, dataclass, fields, replace
from pathlib import Path
from typing import Any

from qsync.errors import FormatError, shortened
from qsync.records.datasheets import datasheet
from qsync.records.json_files import check_fields, field, read_text
from qsync.records.precision import Precision


@dataclass(frozen=True, slots=True)
class DeviceClass:
    """The abilities of one kind of card.

    `emulated_share` is set when the class is emulated: the share of its core that such a rank gets.
    `datasheet` names the data sheet of a device that is not here: a plan for it is simulated. `hardware` is
    the name of the GPU, or of the processor with a rank's threads, if it is known: a profile of other
    hardware is an error.
    """

    name: str
    device: str  # "cpu" or "cuda"
    count: int
    memory_bytes: int
    precisions: tuple[Precision, ...]
    emulated_share: float | None = None
    datasheet: str | None = None
    hardware: str | None = None

    @property
    def carried_16bit(self) -> str | None:
        """Return the 16-bit float that this class carries along edges, None if it has none.

        It is never FP16: gradients leave an FP16 operator in true scale, which FP16 may not hold.
        """
        return "bf16" if Precision.BF16 in self.precisions else None


@dataclass(frozen=True, slots=True)
class Link:
    """A link over which ranks exchange gradients.

    An all-reduce of b bytes takes latency_s + b / bytes_per_s once all ranks have arrived. `num_ranks` is the
    number of ranks that it was measured between; None: as many as it is used for.

    On a CPU communication and compute share the cores: beside compute an all-reduce runs at `overlap_rate` of
    its speed alone (1 where a copy engine does the work). It slows compute by an amount that each class has
    measured (`Profile.reduce_s_per_byte`): by `waiting_toll` times as much where its peers only wait, and so
    answer every message at once.

    `error` is by how much steps that were taken with the link missed their replay, beyond what the profiles
    missed: a standard deviation, as a part of a step; 0 where no steps were compared.
    """

    latency_s: float
    bytes_per_s: float
    overlap_rate: float = 1.0
    num_ranks: int | None = None
    error: float = 0.0
    waiting_toll: float = 1.0


@dataclass(frozen=True, slots=True)
class Cluster:
    """The device classes of one synchronous job and the links between its ranks.

    `link` is between all ranks; or, where `between` is given, between those of one host, and `between` is the
    link from host to host, of which there are `num_hosts` with as many ranks each. `broadcasts_buffers` says
    whether DDP hands out the model's buffers before every call of the model (its `broadcast_buffers`).
    """

    classes: tuple[DeviceClass, ...]
    link: Link
    between: Link | None = None
    num_hosts: int = 1
    broadcasts_buffers: bool = True

    @property
    def num_ranks(self) -> int:
        """Return the number of ranks of all classes."""
        return sum(device_class.count for device_class in self.classes)

    def __getitem__(self, name: str) -> DeviceClass:
        for device_class in self.classes:
            if device_class.name == name:
                return device_class
        known = shortened(", ".join(device_class.name for device_class in self.classes), 160, quote=False)
        raise FormatError(f"no device class {shortened(name)} in this cluster; it has {known}")

    def with_memory(self, budgets: Mapping[str, int]) -> Cluster:
        """Return this cluster with other memory for some classes: name -> bytes.

        FormatError for an unknown class.
        """
        for name in budgets:
            self[name]
        classes = tuple(replace(c, memory_bytes=budgets.get(c.name, c.memory_bytes)) for c in self.classes)
        return replace(self, classes=classes)

    def to_json(self) -> dict[str, Any]:
        """Return the cluster as a JSON object."""
        body = asdict(self)
        body["classes"] = list(body["classes"])
        for entry in body["classes"]:
            if entry["hardware"] is None:  # as in files from before there was this field
                del entry["hardware"]
        if body["broadcasts_buffers"]:
            del body["broadcasts_buffers"]
        return body

    @classmethod
    def from_json(cls, value: Mapping[str, Any], where: str = "cluster") -> Cluster:
        """Read a cluster; FormatError names the field that is missing or wrong."""
        entries = field(value, "classes", list, where)
        if not entries:
            raise FormatError(f"{where} has no device class; add a [[classes]] table")
        classes = tuple(_device_class(entry, f"{where}, class {i + 1}") for i, entry in enumerate(entries))
        names = [device_class.name for device_class in classes]
        for name in names:
            if names.count(name) > 1:
                raise FormatError(
                    f"{where} names the device class {shortened(name)} twice; give each class one table"
                )
        link = _link(field(value, "link", dict, where), f"{where}, link")
        broadcasts = field({"broadcasts_buffers": True, **value}, "broadcasts_buffers", bool, where)
        cluster = cls(classes, link, *_hosts(value, where), broadcasts)
        if cluster.num_hosts > cluster.num_ranks:
            raise FormatError(
                f"{where}: {shortened(cluster.num_hosts)} hosts for {shortened(cluster.num_ranks)} ranks; "
                "give fewer hosts"
            )
        _check_known(value, cls, where)
        check_fields(cluster, where)
        return cluster

    @classmethod
    def load(cls, path: str | Path) -> Cluster:
        """Read cluster.toml. The format is the record's own fields; see docs/guide/clusters.md."""
        text = read_text(path, "a cluster.toml")
        try:
            return cls.from_json(tomllib.loads(text), where=str(path))
        except tomllib.TOMLDecodeError as error:
            raise FormatError(f"{path}: not valid TOML, {shortened(error)}; mend that line") from error
        except (RecursionError, ValueError) as error:  # nested too deeply, or a number of thousands of digits
            raise FormatError(
                f"{path} is no cluster file ({shortened(error)}); see docs/guide/clusters.md"
            ) from error


def _device_class(entry: Any, where: str) -> DeviceClass:
    if not isinstance(entry, dict):
        raise FormatError(f"{where} must be a table with name, device, count, memory_bytes and precisions")
    if entry.get("datasheet") is not None:
        entry = _from_datasheet(entry, where)
    count = field(entry, "count", int, where)
    memory = field(entry, "memory_bytes", int, where)
    share = entry.get("emulated_share")
    _check_known(entry, DeviceClass, where)
    if count < 1:
        raise FormatError(
            f"{where}: count must be at least 1, found {shortened(count)}; remove the class or give it ranks"
        )
    if memory < 1:
        raise FormatError(
            f"{where}: memory_bytes must be positive, found {shortened(memory)}; give one device's"
        )
    if share is not None and (
        isinstance(share, bool) or not (isinstance(share, (int, float)) and 0 < share <= 1)
    ):
        raise FormatError(
            f"{where}: emulated_share must lie in (0, 1], found {shortened(share)}; "
            "leave it out for a whole one"
        )
    try:
        precisions = tuple(
            Precision.parse(str(text)) for text in field(entry, "precisions", (list, tuple), where)
        )
    except FormatError as error:
        raise FormatError(f"{where}: {error}" if where not in str(error) else str(error)) from error
    if Precision.FP32 not in precisions:
        raise FormatError(f"{where}: precisions must include 'fp32'; add it")
    device = field(entry, "device", str, where)
    if device not in ("cpu", "cuda"):
        raise FormatError(f"{where}: device must be 'cpu' or 'cuda', found {shortened(device)}")
    name, sheet = field(entry, "name", str, where), entry.get("datasheet")
    hardware = entry.get("hardware")
    if hardware is not None and not isinstance(hardware, str):
        raise FormatError(
            f"{where}: hardware must be the name of a GPU or processor, found {shortened(hardware)}"
        )
    return DeviceClass(name, device, count, memory, precisions, share, sheet, hardware)


def _from_datasheet(entry: Mapping[str, Any], where: str) -> dict[str, Any]:
    """Complete a class with the memory and precisions of its data sheet, where it has none of its own."""
    try:
        sheet = datasheet(field(entry, "datasheet", str, where))
    except FormatError as error:
        raise FormatError(str(error) if where in str(error) else f"{where}: {error}") from error
    for text in field({"precisions": [], **entry}, "precisions", (list, tuple), where):
        if text not in list(sheet.precisions):
            known = ", ".join(sheet.precisions)
            raise FormatError(f"{where}: {sheet.name} has no {shortened(text, quote=False)}; it has {known}")
    usual = [str(precision) for precision in sheet.precisions if precision is not Precision.INT8_ALL]
    own = {"device": "cuda", "memory_bytes": sheet.memory_bytes, "precisions": usual}
    return {**own, **entry, "datasheet": sheet.name}


def _link(entry: Mapping[str, Any], where: str) -> Link:
    _check_known(entry, Link, where)
    values = {name: field(entry, name, (int, float), where) for name in ("latency_s", "bytes_per_s")}
    for name, usual in (("overlap_rate", 1.0), ("error", 0.0), ("waiting_toll", 1.0)):
        values[name] = field({name: usual, **entry}, name, (int, float), where)
    latency, rate, overlap, error, toll = values.values()
    for name, is_valid, rule, hint in (
        ("latency_s", 0 <= latency < math.inf, "be finite and not negative", "; give seconds"),
        ("bytes_per_s", 0 < rate < math.inf, "be positive and finite", "; give what an all-reduce reaches"),
        ("overlap_rate", 0 < overlap <= 1, "lie in (0, 1]", "; 1 if nothing slows it"),
        ("error", 0 <= error < math.inf, "be finite and not negative", ""),
        ("waiting_toll", 1 <= toll < math.inf, "be finite and at least 1",
         "; 1 if an all-reduce takes the same beside peers that wait"),
    ):  # fmt: skip
        if not is_valid:
            raise FormatError(f"{where}: {name} must {rule}, found {shortened(values[name])}{hint}")
    num_ranks = entry.get("num_ranks")
    if num_ranks is not None and (type(num_ranks) is not int or num_ranks < 2):
        raise FormatError(
            f"{where}: num_ranks must be a whole number of at least 2, found {shortened(num_ranks)}"
        )
    check_fields(Link(**values), where)
    return Link(**{name: float(number) for name, number in values.items()}, num_ranks=num_ranks)


def _hosts(value: Mapping[str, Any], where: str) -> tuple[Link | None, int]:
    """Return the link between hosts and the number of hosts; neither or both must be given."""
    num_hosts = field({"num_hosts": 1, **value}, "num_hosts", int, where)
    entry = value.get("between")
    if num_hosts < 1:
        raise FormatError(
            f"{where}: num_hosts must be at least 1, found {shortened(num_hosts)}; leave it out for one host"
        )
    if (entry is None) != (num_hosts == 1):
        raise FormatError(f"{where}: num_hosts and a [between] link go together; give both or neither")
    if entry is None:
        return None, 1
    return _link(field(value, "between", dict, where), f"{where}, between"), num_hosts


def _check_known(entry: Mapping[str, Any], record: type, where: str) -> None:
    """Raise FormatError for a field that the record does not have, such as a misspelt one."""
    known = [entry.name for entry in fields(record)]
    for name in entry:
        if name not in known:
            raise FormatError(
                f"{where} has an unknown field {shortened(name)}; the fields are {', '.join(known)}"
            )
