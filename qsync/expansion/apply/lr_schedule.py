"""The learning-rate schedule of a grown model: the from-scratch maximum with a faster decay."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import torch
from torch.optim.lr_scheduler import LRScheduler

from qsync.errors import CalibrationError, FormatError, shortened

# Epochs of LEMON's grown ViT over its epochs from scratch.
RATIO = 130 / 300


class ExpandedSchedule(LRScheduler):
    """The learning rate of the from-scratch run, compressed to `ratio` of its steps.

    The schedule is LEMON's for a grown model: a linear rise over `warm_up` steps, then half a cosine down to
    `floor` times the maximum, both shortened together. At step t of the grown model

        lr(t) = maximum * scratch(t / ratio),    t = 0 ... ratio * steps,

    where scratch(u) = (u + 1) / (warm_up + 1) during the rise and, with v = (u - warm_up) / (steps -
    warm_up), floor + (1 - floor) (1 + cos(pi v)) / 2 from there on. Beyond the end it stays at the floor.
    `ratio` = 1 is the from-scratch schedule itself.

    LEMON (arXiv:2310.07999) trains grown vision transformers for 130 epochs instead of 300. The default ratio
    follows from this, and the published savings of 56.7 %; for BERT the paper states 33.2 %. The paper does
    not fully define its cost. It also reports that a smaller maximum ends worse than the same maximum with a
    faster decay. Savings on small models: `python -m qsync.experiments.expansion.compare_growth`. The paper
    does not fix the shape; half a cosine is the usual choice.

    Like any torch scheduler: call `step()` once after each optimizer step, save `state_dict()` in
    checkpoints.

    Args:
        optimizer: The grown model's optimizer. Its learning rates are the from-scratch maxima.
        steps: Steps of the from-scratch run.
        warm_up: Steps of its linear rise, fewer than `steps`.
        ratio: Share of the from-scratch steps to train for, in (0, 1].
        floor: Final learning rate as a share of the maximum, in [0, 1).
        last_epoch: Index of the last step, as in torch; -1 for a new run.

    Raises:
        CalibrationError: The numbers are invalid.
        FormatError: `load_state_dict` gets the state of another scheduler.

    Example:
        >>> optimizer = torch.optim.AdamW(big.parameters(), lr=1e-3)  # the from-scratch maximum
        >>> schedule = qsync.ExpandedSchedule(optimizer, steps=300_000, warm_up=10_000)
        >>> schedule.total_steps
        130000
    """

    def __init__(
        self,
        optimizer: torch.optim.Optimizer,
        steps: int,
        *,
        warm_up: int = 0,
        ratio: float = RATIO,
        floor: float = 0.0,
        last_epoch: int = -1,
    ) -> None:
        _check(steps, warm_up, ratio, floor)
        self.scratch_steps, self.scratch_warm_up = steps, warm_up
        self.ratio, self.floor = float(ratio), float(floor)
        super().__init__(optimizer, last_epoch)

    @property
    def total_steps(self) -> int:
        """Return the number of steps until the learning rate is at its floor, at least 1."""
        return max(1, round(self.ratio * self.scratch_steps))

    def factor(self, step: int) -> float:
        """Return the share of the maximum at a step, counted from 0.

        >>> schedule.factor(schedule.total_steps)
        0.0
        """
        at, warm_up = step / self.ratio, self.scratch_warm_up
        if at < warm_up:
            return (at + 1) / (warm_up + 1)
        # total_steps is rounded, so the last step may fall just short of the end.
        done = 1.0 if step >= self.total_steps else (at - warm_up) / (self.scratch_steps - warm_up)
        return self.floor + (1.0 - self.floor) * (1.0 + math.cos(math.pi * min(done, 1.0))) / 2.0

    def get_lr(self) -> list[float | torch.Tensor]:
        """Return the current learning rate of every parameter group; torch calls this in `step()`."""
        return [base * self.factor(self.last_epoch) for base in self.base_lrs]

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Resume a saved schedule.

        Raises:
            FormatError: The state belongs to another kind of scheduler.
        """
        needed = ("scratch_steps", "scratch_warm_up", "ratio", "floor", "last_epoch", "base_lrs")
        missing = [name for name in needed if name not in state_dict]
        if missing:
            raise FormatError(
                f"this is not the state of an ExpandedSchedule, because it lacks {missing[0]!r}; pass the "
                "state_dict() of one"
            )
        groups = len(self.optimizer.param_groups)
        if len(state_dict["base_lrs"]) != groups:
            raise FormatError(
                f"the saved schedule has {len(state_dict['base_lrs'])} parameter groups, this optimizer "
                f"{groups}; group the parameters as at saving"
            )
        super().load_state_dict(dict(state_dict))


def _check(steps: int, warm_up: int, ratio: float, floor: float) -> None:
    """Raise CalibrationError unless the numbers define a schedule."""
    for name, value, least in (("steps", steps, 1), ("warm_up", warm_up, 0)):
        if type(value) is not int or value < least:
            raise CalibrationError(
                f"{name} must be a whole number of at least {least}, found {shortened(value)}; give the "
                "from-scratch run's number"
            )
    if warm_up >= steps:
        raise CalibrationError(
            f"warm_up must be less than steps, found {warm_up} of {steps}; give both numbers of the "
            "from-scratch run"
        )
    if not _is_number(ratio) or not 0.0 < ratio <= 1.0:
        raise CalibrationError(
            f"ratio must be in (0, 1], found {shortened(ratio)}; give the fraction of the from-scratch "
            "steps to train for"
        )
    if not _is_number(floor) or not 0.0 <= floor < 1.0:
        raise CalibrationError(
            f"floor must be in [0, 1), found {shortened(floor)}; give it as a fraction of the maximum "
            "learning rate"
        )


def _is_number(value: object) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool)
