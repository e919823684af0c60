"""Checkpoints of a running job: every N steps, asynchronously, the newest K are kept."""

from __future__ import annotations

import atexit
import contextlib
import logging
import re
import shutil
import threading
import weakref
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Self

import torch

from qsync.checkpoints.contents import INDEX, checkpoints_in
from qsync.checkpoints.reader import load
from qsync.checkpoints.writer import PARTIAL, Save, Subject, check_step, remove_partials
from qsync.distributed.agreement import agree_locally, check_same
from qsync.errors import FormatError, shortened
from qsync.records.plans import Plan
from qsync.records.profiles import Profile

logger = logging.getLogger("qsync")

_writing: weakref.WeakSet[Checkpoints] = weakref.WeakSet()  # those that have written in this process
_OWN_NAME = re.compile(r"step-\d{8,}(-\d+)?")


class Checkpoints:
    """Save a checkpoint every N optimizer steps while training goes on, and keep the newest K.

    `step` copies the state to CPU memory; a thread writes it to `FOLDER/step-NUMBER`. One checkpoint is
    written at a time: one that is due meanwhile is left out. A checkpoint that cannot be written, on a full
    disk say, is one warning (logger "qsync"); training goes on, and earlier ones are intact.

    Args:
        folder: is made if needed; all ranks see it.
        model, optimizer, plan, profiles, **objects: as for `qsync.save`.
        every: the number of steps from one checkpoint to the next.
        keep: how many to keep of those that this class wrote; others in the folder stay.

    Raises:
        FormatError: a number under 1, a folder that is a checkpoint or a file, or a state that cannot be
            saved.

    Example:
        >>> checkpoints = qsync.Checkpoints("run", model, optimizer, every=200, scheduler=scheduler)
        >>> for step in range(checkpoints.resume(), num_steps):
        ...     train()
        ...     checkpoints.step()
        >>> checkpoints.finish()
    """

    def __init__(
        self,
        folder: str | Path,
        model: torch.nn.Module,
        optimizer: Any = None,
        *,
        every: int,
        keep: int = 3,
        plan: Plan | None = None,
        profiles: Mapping[str, Profile] | None = None,
        **objects: Any,
    ) -> None:
        for name, number in (("every", every), ("keep", keep)):
            if type(number) is not int or number < 1:
                raise FormatError(f"{name} must be a number of at least 1, found {shortened(number)}")
        self.folder, self.every, self.keep = Path(folder), every, keep
        if (self.folder / INDEX).exists() or (self.folder.exists() and not self.folder.is_dir()):
            what = "a checkpoint" if self.folder.is_dir() else "a file"
            raise FormatError(f"{folder} is {what}; give the folder that is to hold the job's checkpoints")
        self.number = 0  # of optimizer steps so far
        self._subject = Subject(model, optimizer, plan, profiles, objects)
        agree_locally("checking what to save", self._subject.state)  # now rather than after `every` steps
        self._thread: threading.Thread | None = None
        self._saving: Save | None = None
        self._warned: set[str] = set()

    def resume(self, *, random_state: bool = True) -> int:
        """Load the newest checkpoint that is whole, if there is any; return the number of steps so far.

        Raises the errors of `qsync.load`, and MismatchError where ranks see different checkpoints.
        """
        found, errors = checkpoints_in(self.folder)
        names = [one.path.name for one in found] + sorted(path.name for path in errors)
        check_same({f"the newest checkpoint in {self.folder}": names[0] if names else "none"})
        if names:
            model, optimizer, objects = self._subject.model, self._subject.optimizer, self._subject.objects
            self.number = load(self.folder, model, optimizer, random_state=random_state, **objects).step
        return self.number

    def step(self, number: int | None = None, *, writes: bool = True) -> None:
        """Count an optimizer step, and begin a checkpoint if one is due. Every rank calls it.

        Args:
            number: of steps so far, instead of one more than at the last call.
            writes: False where another process, with no torch.distributed between them, writes.
        """
        if number is not None:
            check_step(number)
        self.number = self.number + 1 if number is None else number
        if self.number % self.every or not writes:
            return
        target = self._target()
        is_busy = self._thread is not None and self._thread.is_alive()
        saving = Save(target, self._subject, self.number, is_wanted=not is_busy)
        if saving.is_wanted:
            self.finish()  # where rank 0 is not busy, the others are about to end
            saving.stage()
            self._saving = saving
            self._thread = threading.Thread(
                target=self._write, args=(saving,), name="qsync checkpoint", daemon=True
            )
            self._thread.start()
            _writing.add(self)
        else:
            self._warn(saving, "late", f"step {self.number} is not saved: the one before is being written")

    def _target(self) -> Path:
        """Return the name of this step's checkpoint: with a number where training resumed from before it."""
        target, again = self.folder / f"step-{self.number:08d}", 2
        with contextlib.suppress(OSError):  # a folder out of reach: writing says so
            while target.exists():
                target, again = self.folder / f"step-{self.number:08d}-{again}", again + 1
        return target

    def finish(self) -> None:
        """Wait until the checkpoint that is being written is there."""
        if self._thread is not None:
            self._thread.join()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: object, *error: object) -> None:
        if kind is not None:
            self._end()
        self.finish()

    def _end(self) -> None:
        """Finish what is being written, but wait for no rank that may be gone: this process ends."""
        if self._saving is not None:
            self._saving.is_ending = True
        self.finish()

    def _write(self, saving: Save) -> None:
        """Write a checkpoint and remove old ones; warn where that fails."""
        try:
            saving.write()
            self._warned.discard("failed")
            if saving.is_first:
                self._prune(saving.target)
        except Exception as error:
            self._warn(saving, "failed", shortened(error, 400))

    def _warn(self, saving: Save, kind: str, why: str) -> None:
        """Warn on rank 0, once of each kind; of failures again after a success."""
        if saving.is_first and kind not in self._warned:
            self._warned.add(kind)
            logger.warning("qsync: %s; training goes on, and earlier checkpoints are intact", why)

    def _prune(self, newest: Path) -> None:
        """Remove all but the newest of its own, and what killed processes left before this one."""
        own = [one.path for one in checkpoints_in(self.folder)[0] if _OWN_NAME.fullmatch(one.path.name)]
        for old in own[self.keep :]:
            with contextlib.suppress(OSError):  # renamed first: no half of it is taken for a checkpoint
                shutil.rmtree(old.rename(old.with_name(f".{old.name}{PARTIAL}")))
        with contextlib.suppress(FileNotFoundError):  # another process has pruned it already
            remove_partials(self.folder, "step-*", before=newest.stat().st_mtime)


@atexit.register
def _end_all() -> None:
    for checkpoints in list(_writing):
        checkpoints._end()
