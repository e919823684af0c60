"""Write records as JSON, and read them with types and limits checked by msgspec.

A record's annotations define valid files. An error names the place, the value and the expected type.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import MISSING, fields, is_dataclass
from enum import EnumType
from functools import cache
from itertools import repeat
from pathlib import Path
from types import NoneType, UnionType
from typing import Annotated, Any, ClassVar, Self, TypeVar, Union, get_args, get_origin, get_type_hints

import msgspec
from msgspec import Meta

from qsync.errors import FormatError, nearest, shortened
from qsync.records.json_files import encoded, read_json, write_json

T = TypeVar("T")

_LARGEST_INT, LARGEST_FLOAT = 2**63 - 1, sys.float_info.max  # infinity lies beyond, and NaN is in no range
Count = Annotated[int, Meta(ge=0, le=_LARGEST_INT)]  # of samples, elements, bytes
Positive = Annotated[int, Meta(ge=1, le=_LARGEST_INT)]
Fraction = Annotated[float, Meta(gt=0, le=1)]
# Seconds, variances, rates. Whole numbers stay integers: hashes of files tell 1 from 1.0.
Number = Count | Annotated[float, Meta(ge=0, le=LARGEST_FLOAT)]

NOT_IN_FILES = {"in_files": False}  # metadata of a field that files do not store


class Record:
    """A record that JSON can hold.

    `ADDED_LATER` names the first of the newer fields, which files omit at their default, like older files.
    """

    __slots__ = ()
    ADDED_LATER: ClassVar[str] = ""

    def to_json(self) -> dict[str, Any]:
        """Return the record as JSON."""
        found: dict[str, Any] = as_json(self)
        return found

    @classmethod
    def from_json(cls, value: Any, where: str | None = None) -> Self:
        """Read the JSON of `to_json`.

        FormatError names the file or argument (`where`) and the wrong place in it.
        """
        return as_record(value, cls, where or cls.__name__.lower())


class FileRecord(Record):
    """A record with its own file, which holds its kind and version."""

    __slots__ = ()
    FILE_KIND: ClassVar[str]
    FILE_VERSION: ClassVar[int] = 1

    def to_json(self) -> dict[str, Any]:
        """Return the record as JSON with kind and version."""
        return {"kind": self.FILE_KIND, "version": self.FILE_VERSION, **as_json(self)}

    @classmethod
    def from_json(cls, value: Any, where: str | None = None) -> Self:
        """Read the JSON of `to_json`, checking kind and version.

        FormatError names the file or argument (`where`) and the wrong place in it.
        """
        body = without_header(value, cls.FILE_KIND, cls.FILE_VERSION)
        found = as_record(body, cls, where or cls.FILE_KIND)
        found.check_content()
        return found

    def check_content(self) -> None:
        """Raise FormatError for fields that contradict each other."""

    def save(self, path: str | Path) -> Path:
        """Write the record to a file, atomically."""
        return write_json(path, self.to_json())

    @classmethod
    def load(cls, path: str | Path) -> Self:
        """Read the record from a file; FormatError names the file, and the wrong line or place."""
        content = read_json(path)
        try:
            return cls.from_json(content)
        except FormatError as error:
            raise FormatError(f"{path}: {error}") from error


def without_header(value: Mapping[str, Any], kind: str, version: int = 1) -> dict[str, Any]:
    """Return a file's content without its header; check kind and version first."""
    found = value.get("kind", "no kind") if isinstance(value, Mapping) else value
    if found != kind:
        raise FormatError(f"expected a {kind} file, found {shortened(found)}; give a {kind} file")
    if value.get("version") != version:
        raise FormatError(
            f"this {kind} file has version {shortened(value.get('version'))}, but this qsync reads version "
            f"{version}; write it again, or use the qsync that wrote it"
        )
    return {name: item for name, item in value.items() if name not in ("kind", "version")}


def as_json(value: Any) -> Any:
    """Return a record, or a mapping or sequence of records, as JSON."""
    if _is_record(value):
        kind: Any = type(value)
        written = _written_fields(kind)
        return {
            name: write(item) for name, usual, write in written if (item := getattr(value, name)) != usual
        }
    if isinstance(value, Mapping):
        return {key: as_json(item) for key, item in value.items()}
    return [as_json(item) for item in value] if isinstance(value, (tuple, list)) else _plain(value)


def _is_record(value: Any) -> bool:
    return is_dataclass(value)


def _plain(value: Any) -> Any:
    return msgspec.to_builtins(value, enc_hook=_builtin)


def _builtin(value: Any) -> str | int | float:
    """Convert a derived string or number (torch's version, NumPy's float64) to Python's own type."""
    for kind in (str, int, float):
        if isinstance(value, kind):
            return kind(value)
    raise TypeError(f"a {type(value).__name__} cannot be written as JSON")


def as_record(value: Any, kind: type[T], where: str) -> T:
    """Read a record from JSON; FormatError names `where`, the place and the problem.

    >>> as_record({"latency_s": 1e-5, "bytes_per_s": 1e9}, Link, "link")
    """
    try:
        _check_names(value, kind, where)
        encoded(json.dumps(value, ensure_ascii=False, default=str, skipkeys=True), where)
        return msgspec.convert(value, kind)
    except msgspec.ValidationError as error:
        raise FormatError(
            f"{_reason(value, kind, where, error)}; correct it or write the file again"
        ) from None
    except (RecursionError, ValueError) as error:  # nested too deeply, or a number with thousands of digits
        raise FormatError(f"{where} cannot be read ({shortened(error)}); write the file again") from None


@cache
def _written_fields(record: Any) -> list[tuple[str, Any, Callable[[Any], Any]]]:
    """Return the stored fields: name, the default at which it is omitted, and its writer."""
    found: list[tuple[str, Any, Callable[[Any], Any]]] = []
    later = False
    for each in fields(record):
        later |= each.name == getattr(record, "ADDED_LATER", None)
        usual = each.default if each.default_factory is MISSING else each.default_factory()
        write = as_json if _has_records(_hints(record)[each.name]) else _plain
        if each.metadata.get("in_files", True):
            found.append((each.name, usual if later else MISSING, write))
    return found


def _check_names(value: Any, kind: Any, where: str) -> None:
    """Raise FormatError for an unknown field, such as a misspelt one."""
    kind = _given(kind)
    if _is_record(kind) and isinstance(value, Mapping):
        known = [name for name, *_ in _written_fields(kind)]
        for name in value:
            if name not in known:
                near = nearest(str(name), known)
                raise FormatError(
                    f"{where} has an unknown field {shortened(name)}{near}; rename or remove it"
                )
    if _has_records(kind):
        for name, part, part_kind in _parts(value, kind):
            _check_names(part, part_kind, f"{where}, {name}")


@cache
def _has_records(kind: Any) -> bool:
    return _is_record(kind) or any(_has_records(part) for part in get_args(kind))


def _reason(value: Any, kind: Any, where: str, error: msgspec.ValidationError) -> str:
    """Describe the first invalid part of a value, with its place."""
    for name, part, part_kind in _parts(value, kind):
        try:
            msgspec.convert(part, part_kind)
        except msgspec.ValidationError as of_part:
            return _reason(part, part_kind, f"{where}, {name}", of_part)
    if isinstance(kind := _given(kind), EnumType):
        return f"{where}: unknown {kind.__name__.lower()} {shortened(value)}: choose one of {', '.join(kind)}"
    reason = str(error).partition(" - at ")[0].replace(f"<= {LARGEST_FLOAT}", "that is finite")
    if reason.startswith("Expected"):
        reason = f"{reason.partition(', got ')[0]}, found {shortened(value)}"
    return f"{where}: {reason[0].lower()}{reason[1:]}"


def _parts(value: Any, kind: Any) -> Iterator[tuple[str, Any, Any]]:
    """Yield a value's parts with their names and expected types."""
    kind = _given(kind)
    origin, arguments = get_origin(kind), get_args(kind)
    if _is_record(kind) and isinstance(value, Mapping):
        hints = _hints(kind)
        yield from ((name, value[name], hints[name]) for name in hints if name in value)
    elif origin is Mapping and isinstance(value, Mapping):
        for key, item in value.items():
            yield shortened(key if isinstance(key, str) else " ".join(key), quote=False), item, arguments[1]
    elif isinstance(value, (list, tuple)) and hasattr(kind, "_fields"):  # a NamedTuple
        yield from zip(_hints(kind), value, _hints(kind).values(), strict=False)
    elif isinstance(value, (list, tuple)) and origin in (tuple, Sequence):
        kinds = arguments if origin is tuple and arguments[-1] is not ... else repeat(arguments[0])
        yield from ((f"entry {i}", *each) for i, each in enumerate(zip(value, kinds, strict=False), 1))


@cache
def _given(kind: Any) -> Any:
    """Return the type of a value that is not None: X for `X | None`."""
    is_union = get_origin(kind) in (Union, UnionType)
    return next(each for each in get_args(kind) if each is not NoneType) if is_union else kind


@cache
def _hints(record: type) -> dict[str, Any]:
    return get_type_hints(record, include_extras=True)
