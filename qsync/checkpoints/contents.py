"""Read and verify the contents of checkpoint folders.

    checkpoint.json        the index: step, versions, plan, all state but tensors; files with their SHA-256
    model.safetensors      the plain state dict
    optimizer.safetensors  its tensors by parameter name
    NAME.safetensors       tensors of the object that was given by this name

Files of a sharded state carry their rank: model-rank0.safetensors. A checkpoint is written to a hidden
folder, which is renamed once complete.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from qsync.errors import FormatError, QSyncError
from qsync.records.graph import digest
from qsync.records.json_files import read_json
from qsync.records.plans import Plan
from qsync.records.profiles import Profile
from qsync.records.record_json import as_record, without_header

INDEX = "checkpoint.json"
VERSION = 1


@dataclass(frozen=True, slots=True)
class Checkpoint:
    """The index of one checkpoint. `state` is JSON that refers to tensors by name."""

    path: Path
    step: int
    saved: str  # UTC time at which the state was copied
    model: str  # the model's class
    num_parameters: int
    num_ranks: int
    versions: Mapping[str, str]
    plan: Plan | None
    profiles: Mapping[str, Profile]
    files: Mapping[str, str]  # name -> SHA-256
    state: Mapping[str, Any]  # states of the model, the optimizer and each other object
    random: Mapping[str, str]  # random states by rank

    @classmethod
    def read(cls, path: Path) -> Checkpoint:
        """Read the index of a checkpoint. Raises FormatError with the reason if it is unreadable."""
        value = read_json(path / INDEX)
        written = value.pop("digest", None)
        body = without_header(value, "checkpoint", VERSION)
        if written != digest(value):
            raise FormatError(f"{path / INDEX} was modified after it was written; load another checkpoint")
        where, plan = str(path / INDEX), body.get("plan")
        profiles = as_record(body.get("profiles"), dict[str, Any], f"{where}, profiles")
        found = as_record({**body, "path": path, "plan": None, "profiles": {}}, cls, where)
        return replace(
            found,
            plan=Plan.from_json(plan) if plan else None,
            profiles={name: Profile.from_json(each) for name, each in profiles.items()},
        )

    def verify(self) -> None:
        """Raise FormatError unless every file has the SHA-256 of the index."""
        try:
            there = {file.name: file_digest(file) for file in self.path.glob("*.safetensors")}
        except OSError as error:
            raise FormatError(
                f"{error.filename} cannot be read ({error.strerror}); load another checkpoint"
            ) from error
        for name in sorted(there | self.files.keys()):
            if there.get(name) != self.files.get(name):
                what = "is not what was written (SHA-256)" if name in there else "is missing"
                raise FormatError(f"{self.path / name} {what}; load another checkpoint")


def file_digest(path: Path) -> str:
    """Return the SHA-256 of a file."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def checkpoints_in(folder: Path) -> tuple[list[Checkpoint], dict[Path, QSyncError]]:
    """Return a folder's checkpoints, newest first, and the errors of unreadable ones by path."""
    found, errors = [], {}
    for index in folder.glob(f"[!.]*/{INDEX}"):
        try:
            found.append(Checkpoint.read(index.parent))
        except QSyncError as error:
            errors[index.parent] = error
    return sorted(found, key=lambda one: (one.saved, one.path), reverse=True), errors


def find_verified(folder: Path) -> tuple[Checkpoint, dict[Path, QSyncError]]:
    """Return the newest intact checkpoint of a folder (or itself), and the errors of others by path.

    Raises FormatError if there is none.
    """
    if (folder / INDEX).is_file():
        found, errors = [Checkpoint.read(folder)], dict[Path, QSyncError]()
    else:
        found, errors = checkpoints_in(folder)
    for each in found:
        try:
            each.verify()
            return each, errors
        except QSyncError as error:
            errors[each.path] = error
    if not (folder / INDEX).is_file() and any(each.path not in errors for each in checkpoints_in(folder)[0]):
        return find_verified(folder)  # a running job has written new checkpoints and removed these
    none = f"{folder} holds no checkpoint; give a folder that qsync.save or qsync.Checkpoints wrote"
    raise next(iter(errors.values()), FormatError(none))
