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
# The numbers of a shape are rounded up to so many bits for a choice: similar lengths are timed once.
_SHAPE_BITS = 3


def folder() -> Path:
    """Return the folder of compiled kernels and tuning results.

    It lies under `$QSYNC_CACHE_DIR`, or `~/.cache/qsync`. A user without a home folder has one of this
    process alone.
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
    """Return the library that `build(path)` writes for these facts: from the cache, or built now.

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
    # A folder that cannot be written or a full disk costs every process its own build, and nothing more.
    try:
        return _in(_own_folder(), file_name, build)
    except OSError as error:
        raise BuildError(
            f"cannot store compiled kernels in {folder()} ({first_error.strerror or first_error}) nor in "
            f"a temporary folder ({error.strerror or error}); set QSYNC_CACHE_DIR to a folder that can be "
            "written"
        ) from error


@cache
def _own_folder() -> Path:
    """Return a folder of this process alone, which is removed when the process ends."""
    made, process = tempfile.mkdtemp(prefix="qsync-kernels-"), os.getpid()

    @atexit.register
    def _remove() -> None:
        if os.getpid() == process:  # and not at the end of a fork
            shutil.rmtree(made, ignore_errors=True)

    return Path(made)


class Choices:
    """Numbers of the kernels that were the fastest, kept on disk: later processes choose alike.

    Each is a line of JSON, appended in one write; the first line of a key counts. A folder that cannot be
    written costs later processes their own choice, and nothing more.
    """

    def __init__(self, name: str, facts: Mapping[str, str]) -> None:
        self._path = folder() / f"{name}-{digest(facts)}.jsonl"
        self._found: dict[str, list[int]] = {}
        self._used: dict[Hashable, int] = {}
        self._decides = False  # this process holds the lock, in whichever thread
        self._read()

    def get(self, key: Hashable, num_choices: int) -> int | None:
        """Return what was chosen among so many for a key: an object of numbers, texts and tuples."""
        number = self._used.get(key)
        if number is None:
            number = next((one for one in self._found.get(str(key), ()) if one < num_choices), None)
            if number is not None:
                self._used[key] = number
        return number

    def decided(self, key: Hashable, num_choices: int, decide: Callable[[], int]) -> int:
        """Return what was chosen for a key, or `decide()`: one process decides for all that ask at once.

        A decision may run kernels, in other threads, that are chosen themselves. Their decisions are made
        within it: to wait for its lock would be to wait for ever.
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
        """Let this process alone decide for as long as `held` lasts; all, if the folder is unusable."""
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
            with suppress(ValueError, RecursionError):  # of a process that was killed, or damaged since
                match json.loads(line):
                    case [str() as key, int() as number] if number >= 0 and not isinstance(number, bool):
                        self._found.setdefault(key, []).append(number)

    def alias(self, key: Hashable, number: int) -> int:
        """Return a number that this process finds by another key from now on, one that is quicker to make."""
        self._used[key] = number
        return number

    def keep(self, key: Hashable, number: int) -> None:
        """Keep what was chosen for a key."""
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
        if _is_whole(path):  # another rank built it while this one waited
            return path
        for left in place.glob(f".building-*-{file_name}"):  # by a process that was killed
            left.unlink(missing_ok=True)
        # The suffix stays last: compilers read it.
        handle, temporary = tempfile.mkstemp(dir=place, prefix=".building-", suffix=f"-{file_name}")
        os.close(handle)
        try:
            build(Path(temporary))
            # The hash comes first: neither a file without its hash nor a hash without its file is ever used.
            write_text(_hash_path(path), _content_hash(Path(temporary)))
            os.replace(temporary, path)
        finally:
            Path(temporary).unlink(missing_ok=True)
    return path


@contextmanager
def _locked(path: Path) -> Iterator[None]:
    """Hold a lock between processes of this machine; the system frees it if a holder dies."""
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
