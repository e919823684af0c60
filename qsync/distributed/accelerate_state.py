"""Read Hugging Face Accelerate's settings in this process, if it is loaded.

From version 1.15 on, Accelerate neither casts nor wraps a model that is already in DDP. Its other settings
must therefore agree with the plan.
"""

from __future__ import annotations

import sys
from typing import Any

from qsync.errors import MismatchError, UnsupportedError
from qsync.operators.precision import Precision
from qsync.records.levers import ClassLevers

_BASES = ("bf16", "fp16")


def mixed_precision() -> str | None:
    """Return the base for Accelerate's mixed precision; None without any."""
    asked = _shared("AcceleratorState").get("_mixed_precision")
    return asked if asked in _BASES else None


def check_prepared(base: Precision, share: ClassLevers | None) -> None:
    """Raise an error for Accelerate settings that have no effect on a model in DDP.

    MismatchError: another type than the plan's base, or another number of passes. UnsupportedError: FP8, and
    a Trainer under a plan with shares.
    """
    asked = _shared("AcceleratorState").get("_mixed_precision")
    if asked in _BASES and asked != base:
        raise MismatchError(
            f'Accelerate uses mixed precision {asked}, but the plan\'s base is {base}; give base="{asked}" '
            "to qsync.hybrid, or leave out mixed_precision"
        )
    if asked == "fp8":
        raise UnsupportedError(
            'Accelerate\'s FP8 has no effect on a planned model; give mixed_precision="bf16"'
        )
    if share is None or share.samples is None:
        return
    if _is_called_by_trainer():
        raise UnsupportedError(
            "a Trainer weights losses itself, so a plan with unequal shares would weight them twice; give "
            "levers=()"
        )
    passes = num_passes()
    if share.passes not in (1, passes):  # one pass per batch: Accelerate accumulates global batches
        raise MismatchError(
            f"the plan has {share.passes} passes per step on this rank, but Accelerate {passes}; give "
            f"Accelerator(gradient_accumulation_steps={share.passes})"
        )


def divides_loss(parallel: object) -> bool:
    """Return whether `accelerator.backward` divides this model's loss: only if it prepared the model."""
    prepared = vars(parallel).get("_is_accelerate_prepared") or vars(parallel).get("is_prepared")
    return bool(prepared) and num_passes() > 1


def num_passes() -> int:
    """Return the divisor of a loss in `accelerator.backward`: its number of passes."""
    return int(_shared("GradientState").get("plugin_kwargs", {}).get("num_steps", 1))


def _shared(name: str) -> dict[str, Any]:
    """Return the shared state of a class in accelerate.state; empty without Accelerate."""
    return dict(getattr(getattr(sys.modules.get("accelerate.state"), name, None), "_shared_state", {}))


def is_used() -> bool:
    """Return whether this process has an Accelerator."""
    return bool(_shared("AcceleratorState"))


def leave_whole() -> None:
    """Make Accelerate's batch sampler shard pass on every batch, by reporting a size that it accepts.

    Raises UnsupportedError if it would split batches.
    """
    asking = sys._getframe(2)
    if asking.f_globals.get("__name__") != "accelerate.data_loader":
        return
    if asking.f_locals.get("split_batches"):
        raise UnsupportedError(
            "ShareSampler and LengthSampler already give each rank its own batches; leave split_batches out "
            "of Accelerator's settings"
        )
    shard: Any = asking.f_locals.get("self")
    if hasattr(shard, "process_index"):
        shard.num_processes, shard.process_index = 1, 0


def check_not_dispatched() -> None:
    """Raise UnsupportedError if Accelerate reads batches on rank 0 and distributes them."""
    if _caller("accelerate.data_loader", "DataLoaderDispatcher") is not None:
        raise UnsupportedError(
            "ShareSampler and LengthSampler already give each rank its own batches; leave dispatch_batches "
            "out of Accelerator's settings"
        )


def counts_epochs() -> bool:
    """Return whether Accelerate's loader calls set_epoch by itself, counting from 0 in every job."""
    kind = getattr(sys.modules.get("accelerate.data_loader"), "DataLoaderShard", None)
    frame = sys._getframe(2).f_back
    return kind is not None and frame is not None and frame.f_code is kind.__iter__.__code__


def num_ahead(sampler: object) -> int:
    """Return the number of batches that Accelerate's loader has prefetched."""
    references = _shared("GradientState").get("_dataloader_references_ref", ())
    loaders = [reference() for reference in references if reference is not None]
    return int(any(sampler in inner_samplers(one) and not one.end_of_dataloader for one in loaders if one))


def inner_samplers(loader: Any) -> list[Any]:
    """Return a loader's batch sampler and the samplers that it wraps (Accelerate's shards)."""
    found = []
    while (loader := getattr(loader, "batch_sampler", None)) is not None:
        found.append(loader)
    return found


def _is_called_by_trainer() -> bool:
    """Return whether a transformers Trainer other than qsync's is on the call stack."""
    trainer = _caller("transformers.trainer", "Trainer")
    return trainer is not None and not hasattr(trainer, "_hybrid_options")


def _caller(module: str, name: str) -> Any:
    """Return the nearest instance of a class on the call stack; None if there is none."""
    kind = getattr(sys.modules.get(module), name, None)
    frame = sys._getframe()
    while kind is not None and frame is not None:
        if isinstance(found := frame.f_locals.get("self"), kind):
            return found
        frame = frame.f_back  # type: ignore[assignment]
    return None
