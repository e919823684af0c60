"""Load checkpoints on any number of ranks; each reads its part, without collectives."""

from __future__ import annotations

import logging
import warnings
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.checkpoint.hf_storage import HuggingFaceStorageReader
from torch.distributed.checkpoint.state_dict_loader import load as read_tensors

from qsync.checkpoints.contents import Checkpoint, find_verified
from qsync.checkpoints.optimizer_state import OptimizerState
from qsync.checkpoints.state import (
    ModelState,
    ResidualState,
    Tensors,
    join,
    names_in,
    set_random_state,
    split,
    stateful_parts,
)
from qsync.distributed.agreement import agree_locally
from qsync.errors import FormatError, MismatchError, QSyncError, shortened
from qsync.processes.progress import is_rank_zero
from qsync.records.json_files import check_kind

logger = logging.getLogger("qsync")

_MOST_TRIES = 5  # retries while another process removes checkpoints


def load(
    folder: str | Path,
    model: torch.nn.Module,
    optimizer: Any = None,
    *,
    random_state: bool = True,
    **objects: Any,
) -> Checkpoint:
    """Load a checkpoint into a model, its optimizer and other objects. Call it on every rank.

    The number of ranks, their devices, the plan and the sharding may differ from those at saving. All files
    are verified before anything is changed. Only the given objects are loaded.

    Args:
        folder: a checkpoint, or a folder of several, whose newest intact one is loaded.
        model: with the same keys and shapes; plain, in DDP, compiled, or sharded.
        optimizer: with the same class and groups; a list if a list was saved.
        random_state: restore this rank's random state, if this rank existed then.
        **objects: under the names used at saving.

    Returns:
        The checkpoint's index: `.step`, `.plan`, `.profiles`, `.versions`, `.path`.

    Raises:
        FormatError: there is no checkpoint, it is damaged, or a newer qsync wrote it.
        MismatchError: it belongs to another model or optimizer, or lacks an object.
        Every rank raises the same error.

    Example:
        >>> step = qsync.load("checkpoints", model, optimizer, scheduler=scheduler).step
    """

    def read() -> Checkpoint:
        check_kind(folder, (str, Path), "folder", "qsync.save")
        parts = stateful_parts(model, optimizer, objects)
        for _ in range(_MOST_TRIES):
            checkpoint, errors = find_verified(Path(folder))
            try:
                return load_from(checkpoint, errors, parts)
            except Exception:
                if checkpoint.path.exists():
                    raise  # otherwise its writer has removed it for newer ones
        raise FormatError(
            f"the checkpoints in {folder} are removed before they can be read; save with a larger keep="
        )

    def load_from(
        checkpoint: Checkpoint, errors: Mapping[Path, QSyncError], parts: Mapping[str, Any]
    ) -> Checkpoint:
        for error in errors.values() if is_rank_zero() else ():
            logger.warning("qsync: %s; loading %s instead", error, checkpoint.path)
        parts = _without_residuals(checkpoint, parts)
        if missing := sorted(parts.keys() - checkpoint.state.keys()):
            raise MismatchError(
                f"{checkpoint.path} has no {missing[0]}, only {', '.join(checkpoint.state)}; leave out "
                f"{missing[0]}"
            )
        reader = HuggingFaceStorageReader(str(checkpoint.path))
        saved = reader.read_metadata().state_dict_metadata
        targets: dict[str, dict[str, torch.Tensor]] = {name: {} for name in parts}
        states = {name: checkpoint.state[name] for name in parts}
        try:
            for name, part in parts.items():  # check everything before any change
                if isinstance(part, ModelState):
                    split(part.state_dict(), "", targets[name])  # read in place
                    _check_model(checkpoint, part, targets[name], saved)
                else:
                    if isinstance(part, OptimizerState):
                        states[name] = part.held(states[name])
                    targets[name] = _new_tensors(part, states[name], saved)
        except (AttributeError, KeyError, TypeError) as error:
            raise FormatError(
                f"{checkpoint.path} does not match its index ({shortened(error)}); load another checkpoint"
            ) from error
        # Objects that cannot be checked load first: if one refuses its state, nothing else has changed.
        for name in sorted(parts, key=lambda name: isinstance(parts[name], (ModelState, OptimizerState))):
            _load(f"{checkpoint.path}: {name}", parts[name], states[name], targets[name], reader)
        own = checkpoint.random.get(str(dist.get_rank() if dist.is_initialized() else 0))
        if random_state and own is not None:
            set_random_state(own)
        return checkpoint

    return agree_locally("loading the checkpoint", read)


def _load(what: str, part: Any, state: Any, targets: Tensors, reader: HuggingFaceStorageReader) -> None:
    """Read a part's tensors and load its state. Raises MismatchError if the object refuses it."""
    if targets:
        with warnings.catch_warnings():  # silences torch's warning that ranks exchange nothing
            warnings.simplefilter("ignore")
            read_tensors(dict(targets), storage_reader=reader, no_dist=True)
    try:
        part.load_state_dict(join(state, targets))
    except (AttributeError, KeyError, RuntimeError, TypeError, ValueError) as error:
        raise MismatchError(
            f"{what} cannot load its saved state ({shortened(error, 200, quote=False)}); "
            "create it as it was at saving"
        ) from error


def _without_residuals(checkpoint: Checkpoint, parts: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return the parts without residuals, which begin anew, unless as many ranks saved theirs."""
    part = parts.get(ResidualState.NAME)
    if part is None or part.fits(checkpoint.state.get(ResidualState.NAME)):
        return parts
    part.drop()
    if is_rank_zero():
        logger.info("qsync: %s has no residuals of as many ranks; they begin at zero", checkpoint.path)
    return {name: each for name, each in parts.items() if each is not part}


def _new_tensors(part: Any, state: Any, saved: Mapping[str, Any]) -> Tensors:
    """Return tensors to read a part into. Raises MismatchError for another optimizer's state."""
    like: Tensors = {}  # tensors with the sharding that the result must have
    if isinstance(part, OptimizerState):
        part.check(state)
        for parameter, slots in part.slots_of(state):
            like |= dict.fromkeys(names_in(slots), parameter.detach())
    targets = {}
    if isinstance(part, ResidualState):  # a row for each rank
        like |= {name: part.empty_row(saved[name].size) for name in names_in(state["residuals"])}
    for name in names_in(state):
        size, dtype = saved[name].size, saved[name].properties.dtype
        is_alike = name in like and like[name].shape == size
        targets[name] = (
            torch.empty_like(like[name], dtype=dtype) if is_alike else torch.empty(size, dtype=dtype)
        )
    return targets


def _check_model(checkpoint: Checkpoint, part: ModelState, own: Tensors, saved: Mapping[str, Any]) -> None:
    """Raise MismatchError unless a checkpoint has this model's tensors."""
    there, here = (
        dict.fromkeys(each, "no tensor") for each in (checkpoint.state["model"], part.state_dict())
    )
    for key in names_in(checkpoint.state["model"]):
        there[key] = f"{saved[key].properties.dtype} {list(saved[key].size)}"
    for key, tensor in own.items():
        here[key] = f"{tensor.dtype} {list(tensor.shape)}{' on the meta device' if tensor.is_meta else ''}"
    for key in [*there, *here]:
        one, other = there.get(key, "missing"), here.get(key, "missing")
        if one != other:
            raise MismatchError(
                f"{checkpoint.path} belongs to another model: {shortened(key)} is {one} there and {other} "
                f"in this {type(part.module).__name__}; build the saved {checkpoint.model}"
            )
