"""Keep compiled kernels on disk: build each once per machine, however many ranks start.

A file's name carries the hash of everything that determines its content. A second file beside it carries
the hash of the content itself. A file that was cut short, altered, or made for another processor or by
another compiler is therefore not found, and is built anew.
"""

from __future__ import annotations

import atexit
import fcntl
import hashlib
import json
import os
import shutil
import tempfile
from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, suppress
from functools import cache
from pathlib import Path

from qsync.errors import BuildError
from qsync.records.graph import digest
from qsync.records.json_files import write_text

_why_unusable: str | None = None
# Leading bits kept of each dimension of a shape: similar lengths share one timing.
_SHAPE_BITS = 3


def folder() -> Path:
    """Return the folder of compiled kernels and tuning results.

    It lies under `$QSYNC_CACHE_DIR`, or `~/.cache/qsync`. Without a home folder it is a temporary folder of
    this process.
    """
    chosen = os.environ.get("QSYNC_CACHE_DIR")
    found = Path(chosen) if chosen else user_folder()
    if found is not None:
        return found / "kernels"
    global _why_unusable
    _why_unusable = "this user has no home folder; set QSYNC_CACHE_DIR to a folder that can be written"
    return _own_folder()


def user_folder() -> Path | None:
    """Return this user's folder of kernels and plans; None where there is no home folder.

    It is `$XDG_CACHE_HOME/qsync`, or `~/.cache/qsync`.
    """
    chosen = os.environ.get("XDG_CACHE_HOME")
    try:
        return (Path(chosen) if chosen else Path.home() / ".cache") / "qsync"
    except RuntimeError:
        return None


def built(name: str, facts: Mapping[str, str], build: Callable[[Path], None]) -> Path:
    """Return the path of a library from the cache, or build it by `build(path)`.

    `facts` are all that determines the content: source, compiler and its version, processor, flags. Of
    ranks that ask at the same time one builds and the others wait. If the cache folder cannot be written,
    the file is built in a folder of this process alone. Raises BuildError, in one sentence, if it cannot
    be built anywhere.

    >>> built("casts", {"source": source, "processor": "znver5"}, executable.export_library)
    """
    file_name = f"{name}-{digest(facts)}.so"
    global _why_unusable
    try:
        return _in(folder(), file_name, build)
    except OSError as error:
        first_error = error
        _why_unusable = (
            f"{folder()} cannot be used ({error.strerror or error}); set QSYNC_CACHE_DIR to a folder that can"
        )
    # If the folder cannot be written or the disk is full, each process builds its own copy.
    try:
        return _in(_own_folder(), file_name, build)
    except OSError as error:
        raise BuildError(
            f"cannot store compiled kernels in {folder()} ({first_error.strerror or first_error}) nor in "
            f"a temporary folder ({error.strerror or error}); set QSYNC_CACHE_DIR to a writable folder"
        ) from error


@cache
def _own_folder() -> Path:
    """Return a temporary folder of this process, removed when the process ends."""
    made, process = tempfile.mkdtemp(prefix="qsync-kernels-"), os.getpid()

    @atexit.register
    def _remove() -> None:
        if os.getpid() == process:  # not at the end of a forked child
            shutil.rmtree(made, ignore_errors=True)

    return Path(made)


class Choices:
    """Indices of the fastest kernels, kept on disk so that later processes make the same choice.

    Each is a line of JSON, appended in one write; the first line of a key counts. If the folder cannot be
    written, later processes measure again.
    """

    def __init__(self, name: str, facts: Mapping[str, str]) -> None:
        self._path = folder() / f"{name}-{digest(facts)}.jsonl"
        self._found: dict[str, list[int]] = {}
        self._used: dict[Hashable, int] = {}
        self._decides = False  # whether this process holds the lock, in any thread
        self._read()

    def get(self, key: Hashable, num_choices: int) -> int | None:
        """Return the stored choice among `num_choices` for a key of numbers, texts and tuples, or None."""
        number = self._used.get(key)
        if number is None:
            number = next((one for one in self._found.get(str(key), ()) if one < num_choices), None)
            if number is not None:
                self._used[key] = number
        return number

    def decided(self, key: Hashable, num_choices: int, decide: Callable[[], int]) -> int:
        """Return the stored choice for a key, or `decide()`; concurrent processes decide once.

        A decision may run kernels in other threads, which need choices of their own. These are made under the
        same lock: waiting for it would deadlock.
        """
        number = self.get(key, num_choices)
        if number is None:
            with ExitStack() as held:
                if not self._decides:
                    self._lock(held)
                self._read()
                number = self.get(key, num_choices)
                if number is None:
                    number = decide()
                    self.keep(key, number)
        return number

    def _lock(self, held: ExitStack) -> None:
        """Hold the lock on decisions until `held` ends; do nothing if the folder cannot be used."""
        with suppress(OSError):
            self._path.parent.mkdir(parents=True, exist_ok=True)
            held.enter_context(_locked(self._path.with_suffix(".lock")))
            self._decides = True
            held.callback(setattr, self, "_decides", False)

    def _read(self) -> None:
        try:
            lines = self._path.read_text(encoding="utf-8", errors="replace").splitlines()
        except OSError:
            return
        self._found = {}
        for line in lines:
            with suppress(ValueError, RecursionError):  # the line of a killed process, or a damaged one
                match json.loads(line):
                    case [str() as key, int() as number] if number >= 0 and not isinstance(number, bool):
                        self._found.setdefault(key, []).append(number)

    def alias(self, key: Hashable, number: int) -> int:
        """Return a stored choice under a second key of this process that is quicker to build."""
        self._used[key] = number
        return number

    def keep(self, key: Hashable, number: int) -> None:
        """Store a choice for a key."""
        self._used[key] = number
        with suppress(OSError):
            self._path.parent.mkdir(parents=True, exist_ok=True)
            with self._path.open("a") as file:
                file.write(json.dumps([str(key), number]) + "\n")


def rounded_up(shape: Sequence[int]) -> tuple[int, ...]:
    """Return a shape with every number rounded up to its three leading bits."""
    shifts = (max(n.bit_length() - _SHAPE_BITS, 0) for n in shape)
    return tuple(-(-n >> shift) << shift for n, shift in zip(shape, shifts, strict=True))


def why_unusable() -> str | None:
    """Return why this process could not use the cache folder; None if it could, or did not try."""
    return _why_unusable


def _in(place: Path, file_name: str, build: Callable[[Path], None]) -> Path:
    path = place / file_name
    if _is_whole(path):
        return path
    place.mkdir(parents=True, exist_ok=True)
    with _locked(place / f".{file_name}.lock"):
        if _is_whole(path):  # another rank built it while this one waited for the lock
            return path
        for left in place.glob(f".building-*-{file_name}"):  # the leftovers of a killed process
            left.unlink(missing_ok=True)
        # The suffix stays last: compilers go by it.
        handle, temporary = tempfile.mkstemp(dir=place, prefix=".building-", suffix=f"-{file_name}")
        os.close(handle)
        try:
            build(Path(temporary))
            # Written in this order, a library is never found without its hash.
            write_text(_hash_path(path), _content_hash(Path(temporary)))
            os.replace(temporary, path)
        finally:
            Path(temporary).unlink(missing_ok=True)
    return path


@contextmanager
def _locked(path: Path) -> Iterator[None]:
    """Hold a lock between processes of this machine; the system frees it if the holder dies."""
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
