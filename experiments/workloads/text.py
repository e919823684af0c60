"""Training text as bytes: the source of Python's standard library, or the user's files.

Whole files are held out if there are enough: windows of one file resemble each other, so a split inside files
would flatter the held-out loss.
"""

from __future__ import annotations

import sysconfig
import zlib
from collections.abc import Iterable
from dataclasses import dataclass
from functools import cache
from pathlib import Path

import numpy as np
import torch

from qsync.errors import QSyncError

MAX_BYTES = 50_000_000  # a short run would never read more
HELDOUT_EVERY = 20  # one file in twenty, or the last twentieth of the bytes
_SKIPPED_FOLDERS = frozenset({"site-packages", "dist-packages", "__pycache__", "test", "tests", "idle_test"})


@dataclass(frozen=True, slots=True)
class Text:
    """Train and held-out text, one byte per element (uint8), with its source."""

    train: np.ndarray
    heldout: np.ndarray
    source: str


@cache
def load_text(data: str | Path | None = None, *, context: int = 256) -> Text:
    """Load train and held-out text from the standard library's source, or `data` (a file or folder).

    The split depends only on relative file names, so it is equal in every rank and run. A single file, or a
    folder with too few files, gives its last 5 % to the held-out part. At most 50 MB are read. Raises
    QSyncError if `data` is missing, unreadable, empty, or too small for one window of `context` + 1 bytes in
    each part.
    """
    if data is None:
        root = Path(sysconfig.get_path("stdlib"))
        sources = [file for file in _walk(root, _SKIPPED_FOLDERS) if file.suffix == ".py"]
        return _split_files(root, sources, f"Python standard library ({root})", context)
    path = Path(data).expanduser()
    if path.is_dir():
        visible = [file for file in _walk(path) if not any(part.startswith(".") for part in file.parts)]
        return _split_files(path, visible, str(path), context)
    if not path.exists():
        raise QSyncError(f"file or folder {path} does not exist; give --data a path that exists")
    return _split_tail(_read(path, MAX_BYTES), str(path), context)


def windows(text: np.ndarray, starts: Iterable[int], context: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Return inputs and targets (int64, len(starts) x context): the target is the byte after."""
    rows = torch.from_numpy(
        np.stack([text[start : start + context + 1] for start in starts]).astype(np.int64)
    )
    return rows[:, :-1].contiguous(), rows[:, 1:].contiguous()


def _walk(root: Path, skipped: frozenset[str] = frozenset()) -> list[Path]:
    """Yield files below `root` by relative path, in an order independent of the file system."""
    found = (path.relative_to(root) for path in root.rglob("*") if path.is_file())
    return sorted((path for path in found if skipped.isdisjoint(path.parts)), key=Path.as_posix)


def _split_files(root: Path, names: list[Path], source: str, context: int) -> Text:
    parts: tuple[list[bytes], list[bytes]] = ([], [])
    left_bytes = MAX_BYTES
    for name in names:
        content = _read(root / name, left_bytes)
        if b"\0" in content[:8192]:
            continue  # pictures, archives, bytecode: not text
        is_heldout = zlib.crc32(name.as_posix().encode()) % HELDOUT_EVERY == 0
        parts[is_heldout].append(content)
        left_bytes -= len(content)
        if left_bytes <= 0:
            break
    train, heldout = (b"\n".join(part) for part in parts)
    # With few files, or one that dominates, whole files would make the parts too unequal.
    balanced = 0.01 * len(train) < len(heldout) < 0.2 * len(train)
    if not balanced or min(len(train), len(heldout)) <= context:
        return _split_tail(b"\n".join(parts[0] + parts[1]), source, context)
    return Text(_array(train), _array(heldout), source)


def _split_tail(content: bytes, source: str, context: int) -> Text:
    needed = (context + 1) * HELDOUT_EVERY
    if not content.strip():
        raise QSyncError(f"{source} contains no text; give --data with at least {needed:,} bytes of text")
    if len(content) < needed:
        raise QSyncError(
            f"{source} contains {len(content):,} bytes of text, but training needs at least {needed:,}; "
            "give --data with more text"
        )
    cut = len(content) - len(content) // HELDOUT_EVERY
    return Text(_array(content[:cut]), _array(content[cut:]), source)


def _read(path: Path, limit: int) -> bytes:
    try:
        with path.open("rb") as file:
            return file.read(limit)
    except OSError as error:
        raise QSyncError(
            f"cannot read {path}: {error.strerror or error}; give --data with readable text"
        ) from error


def _array(content: bytes) -> np.ndarray:
    return np.frombuffer(content, dtype=np.uint8)
