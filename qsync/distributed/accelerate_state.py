"""What Hugging Face's Accelerate was asked for in this process, read where it is loaded.

Accelerate leaves a model that is in DDP already as it is (from version 1.15 on): it neither casts it nor
wraps it. What an Accelerator was asked for beyond that must therefore be what the plan says.
"""

from __future__ import annotations

import sys
from typing import Any

from qsync.errors import MismatchError, UnsupportedError
from qsync.records.levers import ClassLevers
from qsync.records.precision import Precision

_BASES = ("bf16", "fp16")


def mixed_precision() -> str | None:
    """Return the base that Accelerate's mixed precision asks for; None without any."""
    asked = _shared("AcceleratorState").get("_mixed_precision")
    return asked if asked in _BASES else None


def check_prepared(base: Precision, share: ClassLevers | None) -> None:
    """Raise an error where Accelerate was asked for what it does not do to a model that is in DDP.

    MismatchError: for another type than the plan's base, or for other passes than the plan's.
    UnsupportedError: for FP8, and by a Trainer under a plan with shares.
    """
    asked = _shared("AcceleratorState").get("_mixed_precision")
    if asked in _BASES and asked != base:
        raise MismatchError(
            f"Accelerate was asked for mixed precision {asked}, and the model was planned above {base}; give "
            f'base="{asked}" to qsync.hybrid, or leave mixed_precision out'
        )
    if asked == "fp8":
        raise UnsupportedError(
            'Accelerate\'s FP8 does not reach a planned model; give mixed_precision="bf16"'
        )
    if share is None:
        return
    if _is_called_by_trainer():
        raise UnsupportedError(
            "a Trainer weighs losses by itself, and the plan has shares of the batch, which would weigh them "
            "again; plan without levers"
        )
    passes = num_passes()
    if share.passes != passes:
        raise MismatchError(
            f"the plan takes {share.passes} passes a step on this rank, and Accelerate {passes}; give "
            f"Accelerator(gradient_accumulation_steps={share.passes})"
        )


def divides_loss(parallel: object) -> bool:
    """Return whether `accelerator.backward` divides losses of a model in DDP: one that it has prepared."""
    prepared = vars(parallel).get("_is_accelerate_prepared") or vars(parallel).get("is_prepared")
    return bool(prepared) and num_passes() > 1


def num_passes() -> int:
    """Return the number of passes by which `accelerator.backward` divides a loss."""
    return int(_shared("GradientState").get("plugin_kwargs", {}).get("num_steps", 1))


def _shared(name: str) -> dict[str, Any]:
    """Return the state that all instances of a class of accelerate.state share; empty without Accelerate."""
    return dict(getattr(getattr(sys.modules.get("accelerate.state"), name, None), "_shared_state", {}))


def _is_called_by_trainer() -> bool:
    trainer = getattr(sys.modules.get("transformers.trainer"), "Trainer", None)
    frame = sys._getframe()
    while trainer is not None and frame is not None:
        if isinstance(frame.f_locals.get("self"), trainer):
            return True
        frame = frame.f_back  # type: ignore[assignment]
    return False
