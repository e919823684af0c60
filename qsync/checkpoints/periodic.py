"""Save checkpoints of a running job: every N steps, asynchronously, keeping the newest K."""

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

_writing: weakref.WeakSet[Checkpoints] = weakref.WeakSet()  # the instances that have written in this process
_OWN_NAME = re.compile(r"step-\d{8,}(-\d+)?")


class Checkpoints:
    """Save a checkpoint every N optimizer steps while training goes on, and keep the newest K.

    `step` copies the state to CPU memory; a thread writes it to `FOLDER/step-NUMBER`. One checkpoint is
    written at a time; another that is due meanwhile is skipped. A failed write, such as on a full disk, gives
    one warning (logger "qsync"); training goes on, and earlier checkpoints are intact.

    Args:
        folder: created if needed; must be visible to all ranks.
        model, optimizer, plan, profiles, **objects: as for `qsync.save`.
        every: the number of steps from one checkpoint to the next.
        keep: number of checkpoints to keep; files that this class did not write stay.

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
                raise FormatError(f"{name} must be a whole number from 1 on, found {shortened(number)}")
        self.folder, self.every, self.keep = Path(folder), every, keep
        if (self.folder / INDEX).exists() or (self.folder.exists() and not self.folder.is_dir()):
            what = "a checkpoint" if self.folder.is_dir() else "a file"
            raise FormatError(f"{folder} is {what}; give a folder for the job's checkpoints")
        self.number = 0  # optimizer steps so far
        self._subject = Subject(model, optimizer, plan, profiles, objects)
        agree_locally("checking what to save", self._subject.state)  # fail now, not after `every` steps
        self._thread: threading.Thread | None = None
        self._saving: Save | None = None
        self._warned: set[str] = set()

    def resume(self, *, random_state: bool = True) -> int:
        """Load the newest intact checkpoint, if any; return the number of steps so far.

        Raises the errors of `qsync.load`, and MismatchError if ranks see different checkpoints.
        """
        found, errors = checkpoints_in(self.folder)
        names = [one.path.name for one in found] + sorted(path.name for path in errors)
        check_same({f"the newest checkpoint in {self.folder}": names[0] if names else "none"})
        if names:
            model, optimizer, objects = self._subject.model, self._subject.optimizer, self._subject.objects
            self.number = load(self.folder, model, optimizer, random_state=random_state, **objects).step
        return self.number

    def step(self, number: int | None = None, *, writes: bool = True) -> None:
        """Count an optimizer step, and start a checkpoint if one is due. Call it on every rank.

        Args:
            number: steps so far, instead of one more than at the last call.
            writes: False if another process writes, without torch.distributed between them.
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
            self.finish()  # rank 0 is idle, so the other ranks are about to finish, too
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
        """Return the folder name for this step; numbered if training resumed from before an existing one."""
        target, again = self.folder / f"step-{self.number:08d}", 2
        with contextlib.suppress(OSError):  # an unreachable folder: writing raises the error
            while target.exists():
                target, again = self.folder / f"step-{self.number:08d}-{again}", again + 1
        return target

    def finish(self) -> None:
        """Wait until the current checkpoint is written."""
        if self._thread is not None:
            self._thread.join()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: object, *error: object) -> None:
        if kind is not None:
            self._end()
        self.finish()

    def _end(self) -> None:
        """Finish the current write at process exit, without waiting for ranks that may be dead."""
        if self._saving is not None:
            self._saving.is_ending = True
        self.finish()

    def _write(self, saving: Save) -> None:
        """Write a checkpoint and remove old ones; warn on failure."""
        try:
            saving.write()
            self._warned.discard("failed")
            if saving.is_first:
                self._prune(saving.target)
        except Exception as error:
            self._warn(saving, "failed", shortened(error, 400))

    def _warn(self, saving: Save, kind: str, why: str) -> None:
        """Warn on rank 0, once per kind of failure; again after a success."""
        if saving.is_first and kind not in self._warned:
            self._warned.add(kind)
            logger.warning("qsync: %s; training goes on, and earlier checkpoints are intact", why)

    def _prune(self, newest: Path) -> None:
        """Remove this job's older checkpoints, and partial folders that killed processes left."""
        own = [one.path for one in checkpoints_in(self.folder)[0] if _OWN_NAME.fullmatch(one.path.name)]
        for old in own[self.keep :]:
            with contextlib.suppress(OSError):  # renamed first: a half-deleted folder is no checkpoint
                shutil.rmtree(old.rename(old.with_name(f".{old.name}{PARTIAL}")))
        with contextlib.suppress(FileNotFoundError):  # another process has already removed it
            remove_partials(self.folder, "step-*", before=newest.stat().st_mtime)


@atexit.register
def _end_all() -> None:
    for checkpoints in list(_writing):
        checkpoints._end()
