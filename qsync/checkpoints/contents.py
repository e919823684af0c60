"""What a checkpoint folder holds, and whether it is whole.

    checkpoint.json        the index: step, versions, plan, all state but tensors; files with size and SHA-256
    model.safetensors      the plain state dict
    optimizer.safetensors  its tensors by parameter name
    state.safetensors      tensors of other objects

Files of a sharded model carry their rank: model-rank0.safetensors. A checkpoint is written in a hidden folder
beside it and renamed when it is whole.
"""

from __future__ import annotations

import hashlib
import os
from collections.abc import Mapping
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

from qsync.errors import FormatError, QSyncError, shortened
from qsync.records.graph import digest
from qsync.records.json_files import check_header, read_json, write_json
from qsync.records.plans import Plan
from qsync.records.profiles import Profile

INDEX = "checkpoint.json"
VERSION = 1


@dataclass(frozen=True, slots=True)
class Checkpoint:
    """One checkpoint: what its index says. `state` is JSON in which tensors are named."""

    path: Path
    step: int
    saved: str  # UTC, when it was staged
    model: str  # its class
    num_parameters: int
    optimizer: str | None  # its class
    num_ranks: int
    versions: Mapping[str, str]
    plan: Plan | None
    profiles: Mapping[str, Profile]
    files: Mapping[str, tuple[int, str]]  # name -> bytes, SHA-256
    state: Mapping[str, Any]  # of the model, the optimizer and each other object
    random: Mapping[str, Any]  # by rank

    @classmethod
    def read(cls, path: str | Path) -> Checkpoint:
        """Read the index of a checkpoint. FormatError says why there is none, or why it cannot be read."""
        where = Path(path) / INDEX
        if not where.is_file():
            raise FormatError(f"{path} has no {INDEX}; give a folder that qsync.save wrote")
        value = read_json(where)
        version = value.get("version")
        if value.get("kind") == "checkpoint" and isinstance(version, int) and version > VERSION:
            raise FormatError(
                f"{path} was written by a newer qsync (format {shortened(version)}, not {VERSION}); update "
                "qsync"
            )
        check_header(value, "checkpoint", VERSION)
        if value.pop("digest", None) != digest(value):
            raise FormatError(f"{where} was changed after it was written; load another checkpoint")
        plan = Plan.from_json(value["plan"]) if value["plan"] else None
        profiles = {name: Profile.from_json(each) for name, each in value["profiles"].items()}
        value |= {"path": Path(path), "plan": plan, "profiles": profiles}
        return cls(**{each.name: value[each.name] for each in fields(cls)})

    def verify(self, contents: bool = True) -> None:
        """Raise FormatError unless every file has its size and, with `contents`, its SHA-256."""
        there = {file.name for file in self.path.glob("*.safetensors")}
        if strange := sorted(there - self.files.keys()):
            raise FormatError(f"{self.path} holds {strange[0]}, which its index does not name; remove it")
        for name, (size, sha256) in self.files.items():
            path = self.path / name
            if name not in there:
                why = "is missing"
            elif path.stat().st_size != size:
                why = f"has {path.stat().st_size} bytes instead of {size}"
            elif contents and file_digest(path) != sha256:
                why = "differs from what was written (SHA-256)"
            else:
                continue
            raise FormatError(f"{path} {why}; load another checkpoint")


def file_digest(path: Path, to_disk: bool = False) -> str:
    """Return the SHA-256 of a file; with `to_disk`, after it has reached the disk."""
    with path.open("rb") as file:
        if to_disk:
            os.fsync(file.fileno())
        return hashlib.file_digest(file, "sha256").hexdigest()


def write_index(folder: Path, value: Mapping[str, Any]) -> None:
    """Write the index of a checkpoint, through to the disk."""
    value = {"kind": "checkpoint", "version": VERSION, **value}
    file_digest(write_json(folder / INDEX, {**value, "digest": digest(value)}), to_disk=True)
    sync_folder(folder)


def sync_folder(folder: Path) -> None:
    """Make the names in a folder reach the disk."""
    handle = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def checkpoints_in(folder: Path) -> list[tuple[Path, Checkpoint | QSyncError]]:
    """Return the checkpoints of a folder, the newest first; one that is not whole with its error."""
    found: list[tuple[str, Path, Checkpoint | QSyncError]] = []
    for path in folder.iterdir() if folder.is_dir() else ():
        if path.name.startswith(".") or not (path / INDEX).is_file():
            continue
        try:
            checkpoint = Checkpoint.read(path)
            checkpoint.verify(contents=False)
            found.append((checkpoint.saved, path, checkpoint))
        except QSyncError as error:
            found.append(("", path, error))
    return [(path, each) for _, path, each in sorted(found, key=lambda one: one[:2], reverse=True)]


def find_verified(folder: str | Path) -> tuple[Checkpoint, list[QSyncError]]:
    """Return the checkpoint of a folder, or the newest in it, verified; and why others in it are not whole.

    Raises FormatError if there is none.
    """
    folder = Path(folder)
    inside = checkpoints_in(folder) if not (folder / INDEX).is_file() else [(folder, Checkpoint.read(folder))]
    errors: list[QSyncError] = [each for _, each in inside if isinstance(each, QSyncError)]
    for _, each in inside:
        if isinstance(each, Checkpoint):
            try:
                each.verify()
                return each, errors
            except QSyncError as error:
                errors.append(error)
    if errors:
        raise errors[0]
    raise FormatError(
        f"{folder} holds no checkpoint; give a folder that qsync.save or qsync.Checkpoints wrote"
    )
