"""The learning rate of a grown model: as high as from scratch, and sooner over."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import torch
from torch.optim.lr_scheduler import LRScheduler

from qsync.errors import CalibrationError, FormatError

# Epochs that LEMON trains a grown ViT, over the epochs from scratch.
RATIO = 130 / 300


class ExpandedSchedule(LRScheduler):
    """The from-scratch run's learning rate in `ratio` of its steps: LEMON's schedule for a grown model.

    The optimizer is made with the from-scratch maximum, and `steps`, `warm_up` and `floor` are the
    from-scratch run's own: a linear rise over `warm_up` of its `steps`, then half a cosine down to `floor`
    times the maximum. Both are shortened together, so that at step t of the grown model

        lr(t) = maximum * scratch(t / ratio),    t = 0 ... ratio * steps,

    where scratch(u) = (u + 1) / (warm_up + 1) while it rises and, for v = (u - warm_up) / (steps - warm_up),
    floor + (1 - floor) (1 + cos(pi v)) / 2 from there on. Beyond the end it stays at the floor. `ratio` = 1
    is the from-scratch schedule itself.

    Where the numbers come from: LEMON (arXiv:2310.07999) trains grown vision transformers for 130 epochs
    instead of 300, hence the default and the 56.7 % it says are saved; for BERT it says 33.2 %. What counts
    as cost there is the paper's. By it, a smaller maximum ends worse than the same one that decays faster.
    What a ratio saves on small models: `python -m qsync.experiments.expansion.compare_growth`. The shape is the usual one,
    and ours to choose.

    A torch scheduler like any other: `step()` once after each step of the optimizer, `state_dict` for a
    checkpoint. Raises CalibrationError for numbers that make no schedule, FormatError for the state of
    another kind of scheduler.

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
        """Steps until the learning rate is at its floor, at least one."""
        return max(1, round(self.ratio * self.scratch_steps))

    def factor(self, step: int) -> float:
        """The share of the maximum that step number `step`, counted from 0, has.

        >>> schedule.factor(schedule.total_steps)
        0.0
        """
        at, warm_up = step / self.ratio, self.scratch_warm_up
        if at < warm_up:
            return (at + 1) / (warm_up + 1)
        # Rounding of total_steps may leave the last step just short of the end.
        done = 1.0 if step >= self.total_steps else (at - warm_up) / (self.scratch_steps - warm_up)
        return self.floor + (1.0 - self.floor) * (1.0 + math.cos(math.pi * min(done, 1.0))) / 2.0

    def get_lr(self) -> list[float | torch.Tensor]:
        """The learning rate of every parameter group now; torch calls this in `step()`."""
        return [base * self.factor(self.last_epoch) for base in self.base_lrs]

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Go on where a saved schedule stood.

        Raises FormatError for the state of another kind of scheduler.
        """
        needed = ("scratch_steps", "scratch_warm_up", "ratio", "floor", "last_epoch", "base_lrs")
        missing = [name for name in needed if name not in state_dict]
        if missing:
            raise FormatError(
                f"this is no state of an ExpandedSchedule, it lacks {missing[0]!r}; give what the "
                "state_dict() of one returned"
            )
        groups = len(self.optimizer.param_groups)
        if len(state_dict["base_lrs"]) != groups:
            raise FormatError(
                f"the saved schedule has {len(state_dict['base_lrs'])} parameter groups, this optimizer "
                f"{groups}; group the parameters as they were when it was saved"
            )
        super().load_state_dict(dict(state_dict))


def _check(steps: int, warm_up: int, ratio: float, floor: float) -> None:
    """CalibrationError unless these make a schedule."""
    for name, value, least in (("steps", steps, 1), ("warm_up", warm_up, 0)):
        if type(value) is not int or value < least:
            raise CalibrationError(
                f"{name} must be a whole number of at least {least}, found {value!r}; give the from-scratch "
                "run's"
            )
    if warm_up >= steps:
        raise CalibrationError(
            f"warm_up must be less than steps, found {warm_up} of {steps}; both are the from-scratch run's"
        )
    if not _is_number(ratio) or not 0.0 < ratio <= 1.0:
        raise CalibrationError(
            f"ratio must lie in (0, 1], found {ratio!r}; it is the share of the from-scratch steps to train "
            "for"
        )
    if not _is_number(floor) or not 0.0 <= floor < 1.0:
        raise CalibrationError(
            f"floor must lie in [0, 1), found {floor!r}; it is a share of the maximum learning rate"
        )


def _is_number(value: object) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool)
