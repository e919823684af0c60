"""Write checkpoints: stage on the calling thread, write on any, publish by one rename.

A replicated model is written by rank 0 alone. Of a sharded one every rank writes its shards, in the format
of torch.distributed.checkpoint's HuggingFaceStorageWriter, so that torch's reader reshards them. torch's
writers exchange pickles in collectives; here ranks exchange JSON through the job's store.
"""

from __future__ import annotations

import contextlib
import itertools
import json
import platform
import shutil
import uuid
from collections.abc import Mapping
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch.distributed.tensor import DTensor

import qsync
from qsync.checkpoints.contents import file_digest, sync_folder, write_index
from qsync.checkpoints.exchange import Exchange
from qsync.checkpoints.state import class_of, random_state, split, stateful_parts
from qsync.distributed.agreement import agree_locally
from qsync.errors import FormatError, QSyncError, shortened
from qsync.records.plans import Plan
from qsync.records.profiles import Profile
from qsync.runtime.wrapping import plan_of, wrapped_module

PARTIAL = ".qsync-partial"  # ends the name of a folder that is not yet, or no longer, a checkpoint
_SHARDS = "DCP_SHARDING_INFO"  # where torch.distributed.checkpoint's reader finds offsets
_numbers = itertools.count()  # of saves in this process: the same on every rank

Tensors = dict[str, torch.Tensor]


@dataclass(frozen=True, slots=True)
class Subject:
    """What is saved: a model, its optimizer, other objects with a state, and records."""

    model: torch.nn.Module
    optimizer: torch.optim.Optimizer | None
    plan: Plan | None
    profiles: Mapping[str, Profile] | None
    objects: Mapping[str, Any]

    def state(self) -> tuple[dict[str, Any], dict[str, Tensors]]:
        """Return all states as JSON, and their tensors by kind of file."""
        tensors: dict[str, Tensors] = {"model": {}, "optimizer": {}, "state": {}}
        state: dict[str, Any] = {}
        for name, part in stateful_parts(self.model, self.optimizer, self.objects).items():
            prefix = name if name != "model" else ""  # its keys stay plain
            state[name] = split(part.state_dict(), prefix, tensors.get(name, tensors["state"]))
        return state, tensors

    def records(self) -> dict[str, Any]:
        """Return what an index says beside states and files."""
        plan = self.plan or plan_of(self.model)
        return {
            "model": type(wrapped_module(self.model)).__name__,
            "num_parameters": sum(each.numel() for each in self.model.parameters()),
            "optimizer": class_of(self.optimizer) if self.optimizer is not None else None,
            "versions": {
                "qsync": qsync.__version__,
                "torch": torch.__version__,
                "python": platform.python_version(),
            },
            "plan": plan.to_json() if plan is not None else None,
            "profiles": {name: profile.to_json() for name, profile in (self.profiles or {}).items()},
        }


class Save:
    """One checkpoint on its way to disk. Every rank makes one, and calls `stage` and `write` if `is_wanted`.

    Rank 0 decides whether it is wanted: elsewhere the argument is ignored.
    """

    def __init__(self, target: Path, subject: Subject, step: int, is_wanted: bool = True) -> None:
        self.target, self._subject = target, subject
        self._exchange = Exchange(str(next(_numbers)))
        self.is_first = self._exchange.rank == 0
        if self.is_first:
            hidden = f".{target.name}.{uuid.uuid4().hex}{PARTIAL}" if is_wanted else ""
            self._exchange.tell("begin", hidden)
        else:
            hidden = self._exchange.hear("begin")
        self.is_wanted = bool(hidden)
        self._partial = target.parent / hidden
        self._files: dict[str, tuple[Tensors, dict[str, str]]] = {}
        self._index = {
            "step": step,
            "saved": datetime.now(UTC).isoformat(timespec="microseconds"),
            "num_ranks": self._exchange.num_ranks,
        }

    def stage(self, buffers: Tensors) -> Tensors:
        """Copy this rank's part of the state into CPU memory; return the memory, for the next time.

        Copies from a GPU are only begun: the GPU's next work waits for them, the host does not.
        """
        self._random = random_state()
        self._copied: Any = None
        is_sharded = any(isinstance(each, DTensor) for each in self._subject.model.parameters())
        used: Tensors = {}
        if not (self.is_first or is_sharded):
            return used
        self._index["state"], tensors = self._subject.state()
        for kind, those in tensors.items():
            copies, offsets = {}, {}
            for name, (tensor, offset) in _own(those, self.is_first).items():
                buffer = buffers.get(name)
                if buffer is None or (buffer.shape, buffer.dtype) != (tensor.shape, tensor.dtype):
                    buffer = torch.empty(
                        tensor.shape, dtype=tensor.dtype, device="cpu", pin_memory=tensor.is_cuda
                    )
                used[name] = copies[name] = buffer.copy_(tensor, non_blocking=True)
                offsets[name] = {"saved_offsets": offset}
            if copies:
                rank = f"-rank{self._exchange.rank}" if is_sharded else ""
                sharding = {_SHARDS: json.dumps(offsets)} if is_sharded else {}
                self._files[f"{kind}{rank}.safetensors"] = copies, {"format": "pt", **sharding}
        if any(buffer.is_pinned() for buffer in used.values()):
            self._copied = torch.cuda.current_stream().record_event()
        return used

    def write(self) -> None:
        """Write this rank's files; on rank 0 wait for the others' and publish.

        Raises QSyncError on every rank if any of them cannot write; then nothing is left of it.
        """
        report: dict[str, Any] = {"error": "", "random": self._random}
        try:
            report["files"] = self._write_files()
        except Exception as error:
            report["error"] = shortened(error, 200)
        if self.is_first:
            failed = self._publish(report)
            self._exchange.tell("end", failed)
        else:
            self._exchange.tell(f"report/{self._exchange.rank}", report)
            failed = self._exchange.hear("end")
        if failed:
            raise QSyncError(
                f"{self.target} could not be written ({failed}); make space there, or name another folder"
            )

    def _write_files(self) -> dict[str, tuple[int, str]]:
        """Write this rank's files to the disk; return their sizes and digests."""
        if self._copied is not None:
            self._copied.synchronize()
        found = {}
        self._partial.mkdir(parents=True, exist_ok=True)
        for name, (tensors, metadata) in self._files.items():
            path = self._partial / name
            save_file(tensors, path, metadata)
            found[name] = path.stat().st_size, file_digest(path, to_disk=True)
        return found

    def _publish(self, report: dict[str, Any]) -> str:
        """Write the index and rename the folder, or remove it; return why it failed."""
        try:
            reports = self._exchange.collect("report", report)
            if failed := next((each["error"] for each in reports if each["error"]), ""):
                raise OSError(failed)
            write_index(self._partial, {
                **self._index,
                **self._subject.records(),
                "files": {name: each for report in reports for name, each in report["files"].items()},
                "random": {str(rank): report["random"] for rank, report in enumerate(reports)},
            })  # fmt: skip
            self._partial.rename(self.target)
            sync_folder(self.target.parent)
        except Exception as error:
            shutil.rmtree(self._partial, ignore_errors=True)
            return shortened(error, 200)
        return ""


def _own(tensors: Tensors, is_first: bool) -> dict[str, tuple[torch.Tensor, list[int]]]:
    """Return the tensors that this rank writes, with the offsets of its shards: each shard once."""
    found = {}
    for name, tensor in tensors.items():
        if not isinstance(tensor, DTensor):
            if is_first:
                found[name] = tensor, [0] * tensor.dim()
            continue
        place = tensor.device_mesh.get_coordinate()
        if place is None or any(
            at and kind.is_replicate() for at, kind in zip(place, tensor.placements, strict=True)
        ):
            continue
        local = tensor.to_local()
        (chunk,) = tensor.__create_chunk_list__()  # type: ignore[no-untyped-call]
        if local.numel() or not tensor.numel():
            found[name] = local, list(chunk.offsets)
    return found


def remove_partials(folder: Path, start: str, before: float = float("inf")) -> None:
    """Remove hidden folders of checkpoints that never came to be, or that were pruned."""
    for path in folder.glob(f".{start}*{PARTIAL}"):
        with contextlib.suppress(OSError):
            if path.stat().st_mtime < before:  # renamed first: its writer may be about to publish it
                shutil.rmtree(path.rename(path.with_name(path.name + PARTIAL)))


def save(
    folder: str | Path,
    model: torch.nn.Module,
    optimizer: torch.optim.Optimizer | None = None,
    *,
    step: int = 0,
    plan: Plan | None = None,
    profiles: Mapping[str, Profile] | None = None,
    **objects: Any,
) -> Path:
    """Save a checkpoint to a new folder, whole or not at all. Every rank calls it.

    `model.safetensors` has the keys of the plain model. Each rank's random state is saved as well.

    Args:
        folder: a new or empty one, which all ranks see.
        model: plain, wrapped, in DDP, compiled, or sharded by fully_shard.
        optimizer: of the model's parameters.
        step: how many optimizer steps were taken.
        plan: the plan to save, instead of the one that the model runs under.
        profiles: by device class, to be saved along.
        **objects: whatever else has state_dict and load_state_dict: `scheduler=`, `sampler=`, `scaler=`. The
            state saved is rank 0's; it holds tensors, numbers, texts, lists and dicts.

    Returns:
        The folder.

    Raises:
        FormatError: the folder is not empty, or a state holds something else.
        QSyncError: it could not be written; nothing is left of it.
        Every rank raises the same error.

    Example:
        >>> qsync.save("checkpoints/last", model, optimizer, step=1000, scheduler=scheduler)
    """
    folder, subject = Path(folder), Subject(model, optimizer, plan, profiles, objects)

    def check() -> None:
        if folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
            raise FormatError(f"{folder} is there already, and nothing is written over; name another folder")
        subject.state()

    agree_locally("checking what to save", check)
    saving = Save(folder, subject, step)
    saving.stage({})
    saving.write()
    if saving.is_first:
        remove_partials(folder.parent, f"{folder.name}.")
    return folder
