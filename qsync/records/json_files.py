"""Read and write qsync's JSON files atomically; errors name the malformed line."""

from __future__ import annotations

import json
import os
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from qsync.errors import FormatError, shortened


def write_bytes(path: str | Path, data: bytes) -> Path:
    """Write `data` to `path` atomically: a reader sees the old file or the new one.

    A link is kept, and its target replaced. Devices and pipes are written to directly.
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
        if isinstance(error, OSError) and error.filename is None:  # full disk
            error.filename = str(path)
        raise
    return given


def write_text(path: str | Path, text: str) -> Path:
    """Write `text` as UTF-8, atomically."""
    return write_bytes(path, encoded(text, f"the text of {path}"))


def encoded(text: str, place: str) -> bytes:
    """Encode a text as UTF-8. Raises FormatError for a lone surrogate, which JSON can hold."""
    try:
        return text.encode("utf-8")
    except UnicodeEncodeError as error:
        before = shortened(text[max(error.start - 30, 0) : error.start])
        raise FormatError(
            f"{place} has an invalid character {text[error.start]!r} after {before}; write the file again"
        ) from error


def _umask() -> int:
    """Return the process's umask, which can only be read by setting it."""
    mask = os.umask(0o077)
    os.umask(mask)
    return mask


def write_json(path: str | Path, value: Mapping[str, Any]) -> Path:
    """Write a JSON object, indented for diffs."""
    return write_text(path, json.dumps(value, indent=1) + "\n")


def read_text(path: str | Path, expected: str) -> str:
    """Read a text file. FormatError names the file, and the `expected` content."""
    try:
        return Path(path).read_text(encoding="utf-8")
    except TypeError:
        raise FormatError(
            f"a path must be a string or a Path, found {shortened(path)}; give the path of a file"
        ) from None
    except OSError as error:
        raise FormatError(f"cannot read {path}: {error.strerror or error}; check the path") from error
    except UnicodeDecodeError as error:
        raise FormatError(f"{path} is not a text file; give {expected}") from error


def read_json(path: str | Path) -> dict[str, Any]:
    """Read a JSON object. FormatError names the file and the malformed line."""
    text = read_text(path, "a JSON file that qsync wrote")
    try:
        value = json.loads(text)
    except json.JSONDecodeError as error:
        raise FormatError(
            f"{path}, line {error.lineno}: not valid JSON ({error.msg}); correct that line or write the "
            "file again"
        ) from error
    except (RecursionError, ValueError) as error:  # nested too deeply, or a number with thousands of digits
        raise FormatError(f"{path} is not a file of qsync ({shortened(error)}); write it again") from error
    if not isinstance(value, dict):
        raise FormatError(
            f"{path} holds a JSON {type(value).__name__}, not an object; give a file that qsync wrote"
        )
    return value


def check_folder(option: str, folder: Path) -> None:
    """Raise FormatError unless a folder is writable or can be created, before a long run."""
    there = next((path for path in (folder, *folder.absolute().parents) if path.exists()), folder)
    if there.exists() and not there.is_dir():
        what = "is" if there == folder else f"cannot be made: {there} is"
        raise FormatError(f"{option} {folder} {what} a file; name a folder")
    try:
        with tempfile.TemporaryFile(dir=there):
            pass
    except OSError as error:
        raise FormatError(
            f"{option} {folder} is not writable ({error.strerror or error}); name another folder"
        ) from error


def check_kind(given: object, kind: type | tuple[type, ...], name: str, how: str) -> None:
    """Raise FormatError for an argument of another type; `how` names the function that returns this one."""
    if not isinstance(given, kind):
        raise FormatError(f"{name} is a {type(given).__name__}, {shortened(given)}; give what {how} returns")


def check_whole(name: str, number: object, least: int) -> None:
    """Raise FormatError unless an argument is a whole number of at least `least`."""
    if type(number) is not int or number < least:
        raise FormatError(
            f"{name} must be a whole number of at least {least}, found {shortened(number)}; correct it"
        )
