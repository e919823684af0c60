"""Write checkpoints: copy the state in the calling thread, write in any thread, publish by a rename.

One rank writes each shard, and each part of a divided optimizer's state; rank 0 writes all else. Files have
the format of torch.distributed.checkpoint's HuggingFaceStorageWriter, so that torch's reader reshards them.
torch's writers exchange pickles in collectives; here ranks exchange JSON through the job's store.
"""

from __future__ import annotations

import contextlib
import errno
import glob
import itertools
import json
import os
import platform
import shutil
import time
import uuid
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from datetime import UTC, datetime, timedelta
from itertools import chain
from pathlib import Path
from types import NoneType
from typing import Any

import torch
import torch.distributed as dist
from safetensors.torch import save_file
from torch.distributed.tensor import DTensor

import qsync
from qsync.checkpoints.contents import INDEX, VERSION, checkpoints_in, file_digest
from qsync.checkpoints.optimizer_state import OptimizerState, states_in
from qsync.checkpoints.state import OPTIMIZER, Tensors, names_in, random_state, split, stateful_parts
from qsync.distributed.agreement import agree_locally
from qsync.errors import FormatError, QSyncError, shortened
from qsync.records.graph import digest
from qsync.records.json_files import check_kind, write_json
from qsync.records.plans import Plan
from qsync.records.profiles import Profile
from qsync.runtime.wrapping import plan_of, wrapped_module

PARTIAL = ".qsync-partial"  # suffix of a folder that is not yet, or no longer, a checkpoint
_SHARDS = "DCP_SHARDING_INFO"  # metadata key in which torch.distributed.checkpoint's reader finds offsets
_TIMEOUT = timedelta(minutes=30)  # longest time for one rank's write
_ENDING_S = 20.0  # seconds to wait for other ranks at process exit
_POLL_S = 0.02
_NOT_IN_FILES = (torch.complex128, torch.complex32)  # types that safetensors lacks
_c10d: Any = dist  # its store classes have no type stubs
_numbers = itertools.count()  # counts saves in this process, equally on every rank


@dataclass(frozen=True, slots=True)
class Subject:
    """The objects to save: a model, its optimizer, other objects with a state, and records."""

    model: torch.nn.Module
    optimizer: Any
    plan: Plan | None
    profiles: Mapping[str, Profile] | None
    objects: Mapping[str, Any]
    buffers: Tensors = field(default_factory=dict)  # CPU copies of tensors, reused by the next save

    def __post_init__(self) -> None:
        check_kind(self.plan, (Plan, NoneType), "plan", "qsync.plan or qsync.Plan.load")
        check_kind(self.profiles, (Mapping, NoneType), "profiles", "dict of class -> qsync.profile")
        for name, profile in (self.profiles or {}).items():
            check_kind(profile, Profile, f"profiles[{shortened(name)}]", "qsync.profile")

    def state(self) -> tuple[dict[str, Any], dict[str, Tensors], set[str]]:
        """Return the states by name as JSON, their tensors, and the names of this rank's part of them.

        The part is that of a divided optimizer's state; empty without one.
        """
        tensors: dict[str, Tensors] = {}
        state: dict[str, Any] = {}
        own = set[str]()
        for name, part in stateful_parts(self.model, self.optimizer, self.objects).items():
            prefix = name if name != "model" else ""  # the model's keys stay plain
            state[name] = split(part.state_dict(), prefix, tensors.setdefault(name, {}))
            for key, tensor in tensors[name].items():
                _check_tensor(key, tensor)
            if isinstance(part, OptimizerState):
                slots = (each["state"].items() for each in states_in(state[name]))
                own = {key for n, entry in chain(*slots) if part.is_own(n) for key in names_in(entry)}
        return state, tensors, own

    def copy(self, name: str, tensor: torch.Tensor) -> torch.Tensor:
        """Copy a tensor to CPU memory, asynchronously from a GPU."""
        buffer = self.buffers.get(name)
        if buffer is None or (buffer.shape, buffer.dtype) != (tensor.shape, tensor.dtype):
            buffer = torch.empty(tensor.shape, dtype=tensor.dtype, device="cpu", pin_memory=tensor.is_cuda)
        self.buffers[name] = buffer.copy_(tensor, non_blocking=True)
        return buffer

    def records(self) -> dict[str, Any]:
        """Return the index's entries other than states and files."""
        plan, python = self.plan or plan_of(self.model), platform.python_version()
        return {
            "model": type(wrapped_module(self.model)).__name__,
            "num_parameters": sum(each.numel() for each in self.model.parameters()),
            "versions": {"qsync": qsync.__version__, "torch": torch.__version__, "python": python},
            "plan": plan.to_json() if plan is not None else None,
            "profiles": {name: profile.to_json() for name, profile in (self.profiles or {}).items()},
        }


class Save:
    """One checkpoint being written. Every rank makes one, and calls `stage` and `write` if `is_wanted`.

    Rank 0 decides `is_wanted`; the argument is ignored on other ranks.
    """

    def __init__(self, target: Path, subject: Subject, step: int, is_wanted: bool = True) -> None:
        self.target, self._subject, self._step = target, subject, step
        self._rank, self._num_ranks, self._store = _connection()
        self.is_first = self._rank == 0
        if self.is_first:
            self._store.set("begin", f".{target.name}.{uuid.uuid4().hex}{PARTIAL}" if is_wanted else "")
        self.is_ending = False  # set at process exit: other ranks may be dead
        hidden = self._wait("begin", "rank 0").decode()
        self._partial, self.is_wanted = target.parent / hidden, bool(hidden)

    def stage(self) -> None:
        """Copy this rank's part of the state to CPU memory; copies from a GPU are only started."""
        self._saved = datetime.now(UTC).isoformat(timespec="microseconds")
        self._random = random_state()
        self._state, tensors, self._part = self._subject.state()
        self._files: dict[str, tuple[Tensors, dict[str, str]]] = {}
        for name, those in tensors.items():
            parts = {
                each: _own_part(tensor, 0 if each in self._part else self._rank)
                for each, tensor in those.items()
            }
            own = {each: part for each, part in parts.items() if part is not None}
            if own:
                offsets = {each: {"saved_offsets": offset} for each, (_, offset) in own.items()}
                is_shard = any(isinstance(each, DTensor) for each in those.values())
                rank = f"-rank{self._rank}" if is_shard or self._part & own.keys() else ""
                self._files[f"{name}{rank}.safetensors"] = (
                    {each: self._subject.copy(each, tensor) for each, (tensor, _) in own.items()},
                    {"format": "pt", _SHARDS: json.dumps(offsets)},
                )
        devices = {tensor.device for those in tensors.values() for tensor in those.values()}
        self._copied = [
            torch.cuda.current_stream(device).record_event() for device in devices if device.type == "cuda"
        ]

    def write(self) -> None:
        """Write this rank's files; on rank 0, wait for the other ranks and publish.

        If any rank cannot write, raises QSyncError on every rank and removes the partial files.
        """
        self._store.set(f"written/{self._rank}", _outcome(self._write_files))
        if self.is_first:
            published = _outcome(self._publish)
            shutil.rmtree(self._partial, ignore_errors=True)  # does nothing after the rename
            self._store.set("published", published)
        if error := json.loads(self._wait("published", "rank 0"))["error"]:
            if "; " in error:  # the error already has its remedy
                raise QSyncError(f"{self.target} could not be written: {error}")
            advice = "make space there" if _is_full(error) else "see that it can be"
            raise QSyncError(
                f"{self.target} could not be written ({error}); {advice}, or name another folder"
            )

    def _write_files(self) -> dict[str, Any]:
        """Write this rank's files to the disk; return their digests, its random state and its own states."""
        for copied in self._copied:
            copied.synchronize()
        self._partial.mkdir(parents=True, exist_ok=True)
        for name, (tensors, metadata) in self._files.items():
            path = self._partial / name
            save_file(tensors, path, metadata)
            path.chmod(self._partial.stat().st_mode & 0o666)  # safetensors lets only the owner read
            _sync(path)
        files = {name: file_digest(self._partial / name) for name in self._files}
        own = {OPTIMIZER: self._state[OPTIMIZER]} if self._part else {}
        return {"files": files, "random": self._random, "state": own}

    def _publish(self) -> None:
        """Write the index and rename the folder, after all ranks have written."""
        index: dict[str, Any] = {
            "kind": "checkpoint", "version": VERSION, "step": self._step, "saved": self._saved_after_others(),
            "num_ranks": self._num_ranks, "state": self._state, "files": {}, "random": {},
            **self._subject.records(),
        }  # fmt: skip
        keys = [f"written/{rank}" for rank in range(self._num_ranks)]
        for rank, outcome in enumerate(
            [json.loads(self._wait(key, f"rank {rank}")) for rank, key in enumerate(keys)]
        ):
            self._store.delete_key(keys[rank])
            if outcome["error"]:
                raise OSError(outcome["error"])
            index["files"] |= outcome["result"]["files"]
            index["random"][str(rank)] = outcome["result"]["random"]
            index["state"] = _merged(index["state"], outcome["result"]["state"])
        _sync(write_json(self._partial / INDEX, {**index, "digest": digest(index)}))
        _sync(self._partial)
        self._partial.rename(self.target)
        _sync(self.target.parent)

    def _wait(self, key: str, who: str) -> bytes:
        """Wait for a value from a rank. Raises QSyncError after half an hour; sooner at process exit."""
        began_s = time.monotonic()
        while not self._store.check([key]):
            waited_s = time.monotonic() - began_s
            if waited_s > (_ENDING_S if self.is_ending else _TIMEOUT.total_seconds()):
                raise QSyncError(f"{who} did not take part in saving; call save on every running rank")
            time.sleep(_POLL_S)
        return bytes(self._store.get(key))

    def _saved_after_others(self) -> str:
        """Return the current time, or just after the newest checkpoint if a clock went backwards."""
        beside = checkpoints_in(self.target.parent)[0]
        if not beside or beside[0].saved < self._saved:
            return self._saved
        newest = datetime.fromisoformat(beside[0].saved)
        return (newest + timedelta(microseconds=1)).isoformat(timespec="microseconds")


def check_step(step: object) -> None:
    """Raise FormatError unless `step` is a step number."""
    if type(step) is not int or step < 0:
        raise FormatError(f"step must be a whole number from 0 on, found {shortened(step)}; correct it")


def _check_tensor(name: str, tensor: torch.Tensor) -> None:
    """Raise FormatError for a tensor that safetensors cannot store."""
    kinds = {"sparse": tensor.layout is not torch.strided, "on the meta device": tensor.is_meta,
             "quantized": tensor.is_quantized, str(tensor.dtype): tensor.dtype in _NOT_IN_FILES}  # fmt: skip
    for kind, holds in kinds.items():
        if holds:
            raise FormatError(
                f"the tensor {name} is {kind}, which cannot be saved; leave it out of the state"
            )


def _is_full(error: str) -> bool:
    return any(os.strerror(number) in error for number in (errno.ENOSPC, errno.EDQUOT))


def _outcome(fn: Callable[[], Any]) -> str:
    """Run a function; return its result or its error, as JSON."""
    try:
        return json.dumps({"error": "", "result": fn()})
    except Exception as error:
        return json.dumps({"error": shortened(error, 200)})


def _connection() -> tuple[int, int, Any]:
    """Return the rank, the world size, and a store connection for this save alone.

    A thread's wait then does not block other connections. Without torch.distributed the world size is 1.
    """
    rank, num_ranks, store = 0, 1, _c10d.HashStore()
    if dist.is_initialized() and dist.get_world_size() > 1:
        rank, num_ranks = dist.get_rank(), dist.get_world_size()
        store = _c10d.distributed_c10d._get_default_store().clone()
    store.set_timeout(_TIMEOUT)
    return rank, num_ranks, _c10d.PrefixStore(f"qsync/checkpoints/{next(_numbers)}", store)


def _own_part(tensor: torch.Tensor, rank: int) -> tuple[torch.Tensor, list[int]] | None:
    """Return this rank's part of a tensor to write, with its offsets; None if it has none."""
    if not isinstance(tensor, DTensor):
        return (tensor, [0] * tensor.dim()) if rank == 0 else None
    place = tensor.device_mesh.get_coordinate()
    if place is None or any(
        at and kind.is_replicate() for at, kind in zip(place, tensor.placements, strict=True)
    ):
        return None
    (chunk,) = tensor.__create_chunk_list__()  # type: ignore[no-untyped-call]
    local = tensor.to_local()
    return (local, list(chunk.offsets)) if local.numel() or not tensor.numel() else None


def _merged(one: Any, other: Any) -> Any:
    """Return a state's JSON with the entries that only another rank's has."""
    if isinstance(one, dict) and isinstance(other, dict):
        both = {key: _merged(value, other.get(key, value)) for key, value in one.items()}
        return {**other, **both}
    if isinstance(one, list) and isinstance(other, list) and len(one) == len(other):
        return [_merged(*pair) for pair in zip(one, other, strict=True)]
    return one


def _sync(path: Path) -> None:
    """Flush a file, or a folder's entries, to the disk."""
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def remove_partials(folder: Path, pattern: str, before: float = float("inf")) -> None:
    """Remove hidden folders of unfinished or half-removed checkpoints."""
    for path in folder.glob(f".{pattern}{PARTIAL}*"):
        with contextlib.suppress(OSError):
            if path.stat().st_mtime < before:  # renamed first, because its writer may be about to publish it
                shutil.rmtree(path.rename(path.with_name(path.name + PARTIAL)))


def save(
    folder: str | Path,
    model: torch.nn.Module,
    optimizer: Any = None,
    *,
    step: int = 0,
    plan: Plan | None = None,
    profiles: Mapping[str, Profile] | None = None,
    **objects: Any,
) -> Path:
    """Save a checkpoint to a new folder, atomically. Call it on every rank.

    `model.safetensors` has the keys of the plain model. Each rank's random state is saved as well.

    Args:
        folder: a new or empty folder, or a link to one, visible to all ranks.
        model: plain, wrapped, in DDP, compiled, or sharded by fully_shard.
        optimizer: any object with step, state_dict and load_state_dict over the model's parameters; wrappers
            and lists of optimizers, too.
        step: number of optimizer steps so far.
        plan: the plan to save, instead of the model's current one.
        profiles: profiles by device class, saved as well.
        **objects: other objects with state_dict and load_state_dict: `scheduler=`, `sampler=`, `scaler=`.
            Rank 0's state is saved; it may hold tensors, numbers, texts, lists and dicts.

    Returns:
        The folder.

    Raises:
        FormatError: the folder is not empty, a state holds another type, or the step is not a number.
        QSyncError: writing failed; no partial files remain.
        Every rank raises the same error.

    Example:
        >>> qsync.save("checkpoints/last", model, optimizer, step=1000, scheduler=scheduler)
    """
    subject = Subject(model, optimizer, plan, profiles, objects)

    def checked_target() -> Path:
        if not isinstance(folder, (str, Path)):
            raise FormatError(
                f"save takes a folder, then the model, found {shortened(folder)}; give a folder"
            )
        path = Path(folder)
        target = Path(os.path.realpath(path)) if path.is_symlink() else path  # a link itself stays
        if target.is_symlink() or (target.exists() and (not target.is_dir() or any(target.iterdir()))):
            raise FormatError(f"{folder} already exists and is never overwritten; name another folder")
        check_step(step)
        subject.state()
        return target

    target = agree_locally("checking what to save", checked_target)
    saving = Save(target, subject, step)
    saving.stage()
    saving.write()
    if saving.is_first:
        # Escaped, so that run[1] does not match run1, and run.1 does not belong to run.
        remove_partials(target.parent, f"{glob.escape(target.name)}.{'[0-9a-f]' * 32}")
    return Path(folder)
