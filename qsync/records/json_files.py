"""Read and write qsync's JSON files: whole or not at all, with the line of what is malformed."""

from __future__ import annotations

import json
import math
import os
import tempfile
from collections.abc import Callable, Mapping
from dataclasses import is_dataclass
from functools import cache
from pathlib import Path
from types import NoneType, UnionType
from typing import Any, TypeVar, get_args, get_origin, get_type_hints

from qsync.errors import FormatError, shortened

Record = TypeVar("Record")


def write_bytes(path: str | Path, data: bytes) -> Path:
    """Write `data` to `path` so that a reader sees the old file or the new one, never a part.

    A link stays, and what it names is replaced. Devices and pipes are written to.
    """
    given, path = Path(path), Path(os.path.realpath(path))
    if path.exists() and not path.is_file() and not path.is_dir():
        path.write_bytes(data)
        return given
    path.parent.mkdir(parents=True, exist_ok=True)
    handle, temporary = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}.", suffix=".tmp")
    try:
        with os.fdopen(handle, "wb") as file:
            file.write(data)
        os.chmod(temporary, 0o666 & ~_umask())
        os.replace(temporary, path)
    except BaseException as error:
        Path(temporary).unlink(missing_ok=True)
        if isinstance(error, OSError) and error.filename is None:  # of a full disk
            error.filename = str(path)
        raise
    return given


def write_text(path: str | Path, text: str) -> Path:
    """Write `text` as UTF-8, whole or not at all."""
    return write_bytes(path, _encoded(text, f"the text of {path}"))


def _encoded(text: str, place: str) -> bytes:
    """Return a text as UTF-8. Raises FormatError for half of a pair of surrogates, which JSON can hold."""
    try:
        return text.encode("utf-8")
    except UnicodeEncodeError as error:
        raise FormatError(
            f"{place} has half of a character, {text[error.start]!r}; write the file that it is from anew"
        ) from error


def _umask() -> int:
    """Return the process's umask, which can only be read by setting it."""
    mask = os.umask(0o077)
    os.umask(mask)
    return mask


def write_json(path: str | Path, value: Mapping[str, Any]) -> Path:
    """Write a JSON object, indented and diffable."""
    return write_text(path, json.dumps(value, indent=1) + "\n")


def read_text(path: str | Path, expected: str) -> str:
    """Read a text file; FormatError names it where it cannot be read, and says what was `expected`."""
    try:
        return Path(path).read_text(encoding="utf-8")
    except TypeError:
        raise FormatError(f"a path is a string or a Path, found {shortened(path)}; give a file's") from None
    except OSError as error:
        raise FormatError(f"cannot read {path}: {error.strerror or error}; check the path") from error
    except UnicodeDecodeError as error:
        raise FormatError(f"{path} is not a text file; give {expected}") from error


def read_json(path: str | Path) -> dict[str, Any]:
    """Read a JSON object; FormatError names the file, and the line where it is malformed."""
    text = read_text(path, "a JSON file that qsync wrote")
    try:
        value = json.loads(text)
    except json.JSONDecodeError as error:
        raise FormatError(
            f"{path}, line {error.lineno}: not valid JSON ({error.msg}); mend that line or write the file "
            "anew"
        ) from error
    except (RecursionError, ValueError) as error:  # nested too deeply, or a number of thousands of digits
        raise FormatError(
            f"{path} is no file that qsync wrote ({shortened(error)}); write it anew"
        ) from error
    if not isinstance(value, dict):
        raise FormatError(
            f"{path} holds a JSON {type(value).__name__}, not an object; give a file that qsync wrote"
        )
    return value


def check_folder(option: str, folder: Path) -> None:
    """Raise FormatError unless files can be made in a folder, or it can: a long run would fail at its end."""
    there = next((path for path in (folder, *folder.absolute().parents) if path.exists()), folder)
    if there.exists() and not there.is_dir():
        what = "is" if there == folder else f"cannot be made: {there} is"
        raise FormatError(f"{option} {folder} {what} a file; name a folder")
    try:
        with tempfile.TemporaryFile(dir=there):
            pass
    except OSError as error:
        raise FormatError(
            f"{option} {folder} cannot be written ({error.strerror or error}); name another folder"
        ) from error


def read_record(path: str | Path, from_json: Callable[[dict[str, Any]], Record]) -> Record:
    """Return what `from_json` makes of a JSON file; its FormatError names the file."""
    content = read_json(path)
    try:
        return from_json(content)
    except FormatError as error:
        if str(path) in str(error):
            raise
        raise FormatError(f"{path}: {error}") from error


def check_header(value: Mapping[str, Any], kind: str, version: int) -> None:
    """Refuse a record of another kind or of a version this code does not read."""
    if value.get("kind") != kind:
        raise FormatError(
            f"expected a {kind} file, found {shortened(value.get('kind', 'no kind'))}; give a {kind} file"
        )
    if value.get("version") != version:
        raise FormatError(
            f"this {kind} file has version {shortened(value.get('version'))}, this qsync reads "
            f"version {version}; write it anew, or use the qsync that wrote it"
        )


def field(value: Mapping[str, Any], name: str, expected: type | tuple[type, ...], where: str) -> Any:
    """Return `value[name]`, checked to be there and of the expected type."""
    if name not in value:
        raise FormatError(f"{where} lacks the field {name!r}; write the file anew or add the field")
    found = value[name]
    if not isinstance(found, expected) or (
        isinstance(found, bool) and expected in (int, float, (int, float))
    ):
        names = " or ".join(t.__name__ for t in (expected if isinstance(expected, tuple) else (expected,)))
        raise FormatError(f"{where}: field {name!r} must be {names}, found {shortened(found)}")
    return found


def check_kind(given: object, kind: type | tuple[type, ...], name: str, how: str) -> None:
    """Raise FormatError for an argument of another kind; `how`: what returns one of this kind."""
    if not isinstance(given, kind):
        raise FormatError(f"{name} is a {type(given).__name__}, {shortened(given)}; give what {how} returns")


def check_fields(record: Any, where: str) -> None:
    """Raise FormatError unless every field of a record from a file has its declared type.

    Numbers must be finite and not negative: files hold counts, sizes, seconds, bytes and variances.
    """
    for name, expected in _fields(type(record)).items():  # type: ignore[arg-type]  # classes are hashable
        _check(getattr(record, name), expected, f"{where}: field {name!r}")


@cache
def _fields(record: type) -> dict[str, Any]:
    return get_type_hints(record)


def _check(value: Any, expected: Any, place: str) -> None:
    if isinstance(expected, UnionType):  # only `X | None` occurs
        if value is not None:
            _check(value, next(t for t in get_args(expected) if t is not NoneType), place)
        return
    origin, arguments = get_origin(expected), get_args(expected)
    if expected in (int, float):
        _check_number(value, expected, place)
    elif origin is tuple:
        each = arguments[:1] * len(value) if isinstance(value, tuple) and arguments[-1] is ... else arguments
        if not isinstance(value, tuple) or len(value) != len(each):
            raise _wrong(place, "a list", value)
        for item, item_type in zip(value, each, strict=True):
            _check(item, item_type, place)
    elif origin is not None:  # a mapping
        if not isinstance(value, Mapping):
            raise _wrong(place, "an object", value)
        for key, item in value.items():
            _check(key, arguments[0], place)
            entry = shortened(key if isinstance(key, str) else " ".join(key), quote=False)
            _check(item, arguments[1], f"{place}, {entry}")
    elif expected is not Any:
        if not isinstance(value, expected):
            raise _wrong(place, expected.__name__, value)
        if isinstance(value, str):
            _encoded(value, place)
        if is_dataclass(value):
            check_fields(value, place)


def _check_number(value: Any, expected: type, place: str) -> None:
    kinds = (int, float) if expected is float else (int,)
    if not isinstance(value, kinds) or isinstance(value, bool):
        raise _wrong(place, expected.__name__, value)
    try:
        good = math.isfinite(value) and value >= 0
    except OverflowError:  # an integer beyond every float
        good = False
    if not good:
        raise _wrong(place, "finite and not negative", value)


def _wrong(place: str, wanted: str, found: Any) -> FormatError:
    return FormatError(f"{place} must be {wanted}, found {shortened(found)}; write the file anew")
