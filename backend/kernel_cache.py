"""Compiled kernels on disk: built once per machine, however many ranks start at once, and never used wrong.

A file's name carries the hash of everything that decides its content, and a second file beside it the hash of
the content itself: a file that was cut short, altered, or made for another processor or by another compiler
is not found, and is built anew.
"""

from __future__ import annotations

import fcntl
import hashlib
import json
import os
import tempfile
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

from qsync.errors import BuildError
from qsync.records.json_files import write_text

_refused: str | None = None


def folder() -> Path:
    """Where compiled kernels and tuning results are kept: `$QSYNC_CACHE_DIR`, or `~/.cache/qsync`."""
    chosen = os.environ.get("QSYNC_CACHE_DIR")
    if chosen:
        return Path(chosen) / "kernels"
    return Path(os.environ.get("XDG_CACHE_HOME", Path.home() / ".cache")) / "qsync" / "kernels"


def built(name: str, facts: Mapping[str, str], build: Callable[[Path], None], suffix: str = ".so") -> Path:
    """The file that `build(path)` writes for these facts: from the cache, or built now.

    `facts` is all that decides the content: source, compiler and its version, processor, flags. Ranks that
    ask at once wait for the one that builds. Where the cache folder cannot be written, the file is built in a
    folder of this process alone. Raises BuildError, in one sentence, if it cannot be built anywhere.

    >>> built("casts", {"source": source, "processor": "znver5"}, executable.export_library)
    """
    digest = hashlib.sha256(json.dumps(dict(facts), sort_keys=True).encode()).hexdigest()[:16]
    global _refused
    try:
        return _in(folder(), f"{name}-{digest}{suffix}", build)
    except OSError as error:
        refused = error
        _refused = (
            f"{folder()} cannot be used ({error.strerror or error}); set QSYNC_CACHE_DIR to a folder that can"
        )
    # A folder that cannot be written or a full disk costs every process its own build, and nothing more.
    try:
        return _in(Path(tempfile.mkdtemp(prefix="qsync-kernels-")), f"{name}-{digest}{suffix}", build)
    except OSError as error:
        raise BuildError(
            f"cannot store compiled kernels in {folder()} ({refused.strerror or refused}) nor in a temporary "
            f"folder ({error.strerror or error}); set QSYNC_CACHE_DIR to a folder that can be written"
        ) from error


def refusal() -> str | None:
    """Why this process could not use the cache folder, in one sentence; None if it could, or did not try."""
    return _refused


def _in(place: Path, file_name: str, build: Callable[[Path], None]) -> Path:
    path = place / file_name
    if _is_whole(path):
        return path
    place.mkdir(parents=True, exist_ok=True)
    with _locked(place / f".{file_name}.lock"):
        if _is_whole(path):  # another rank built it while this one waited
            return path
        for left in place.glob(f".building-*-{file_name}"):  # by a process that was killed
            left.unlink(missing_ok=True)
        # The suffix stays last: compilers look at it.
        handle, temporary = tempfile.mkstemp(dir=place, prefix=".building-", suffix=f"-{file_name}")
        os.close(handle)
        try:
            build(Path(temporary))
            # Its hash first: a file without its hash is never used, a hash without its file neither.
            write_text(_hash_path(path), _content_hash(Path(temporary)))
            os.replace(temporary, path)
        finally:
            Path(temporary).unlink(missing_ok=True)
    return path


@contextmanager
def _locked(path: Path) -> Iterator[None]:
    """Held by one process of this machine at a time; the kernel lets go of it when its holder dies."""
    with open(path, "w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield


def _hash_path(path: Path) -> Path:
    return path.with_name(f"{path.name}.sha256")


def _is_whole(path: Path) -> bool:
    try:
        return _hash_path(path).read_text() == _content_hash(path)
    except OSError:
        return False


def _content_hash(path: Path) -> str:
    return hashlib.sha256(path.read_bytes()).hexdigest()
