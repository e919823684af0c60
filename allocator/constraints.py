"""The caller's constraints on a problem of allocation: budgets, pins, what may change beside precisions."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from qsync.errors import FormatError, shortened
from qsync.operators.precision import Precision
from qsync.records.levers import RECOMPUTE, SAVE_LESS


@dataclass(frozen=True, slots=True)
class Constraints:
    """The caller's constraints on a problem.

    `budgets` (bytes by class) replace the cluster's memory. `pins` map patterns of operator names to
    precisions. `together` lists patterns of operators that share a precision (`matched_groups`).
    `bucket_cap_bytes` is DDP's cap, None for its defaults. `saving_less` maps classes to patterns of
    following operators that save less for backward (`Plan.save_less`), at the time and memory of profile and
    memory model. `block_levers` ("recompute", "save_less") may be chosen for any block of a class that lacks
    memory (`qsync.allocator.block_levers`). `base` is the highest precision of the operators that
    torch.autocast lowers (qsync.records.base); None means the type in which the model was loaded.
    """

    budgets: Mapping[str, int] | None = None
    pins: Mapping[str, str | Precision] | None = None
    together: Sequence[Sequence[str]] = ()
    bucket_cap_bytes: int | None = None
    saving_less: Mapping[str, Sequence[str]] | None = None
    base: str | Precision | None = None
    block_levers: Sequence[str] = ()

    def check_kinds(self) -> None:
        """Raise FormatError for a constraint of a wrong type."""
        forms = {
            "budgets": "class -> bytes",
            "pins": "pattern -> precision",
            "saving_less": "class -> patterns",
        }
        for name, what in forms.items():
            value = getattr(self, name)
            if value is not None and not _is_by_name(value):
                raise FormatError(f"{name} must be a dict of {what}, found {shortened(value)}; give that")
        for name, budget in (self.budgets or {}).items():
            if isinstance(budget, bool) or not isinstance(budget, (int, float)):
                raise FormatError(
                    f"the memory budget of {shortened(name)} must be a number of bytes, found "
                    f"{shortened(budget)}; 16 GiB are 16 * 2**30"
                )
        for name, patterns in (self.saving_less or {}).items():
            if not _are_names(patterns):
                raise FormatError(
                    f"saving_less[{shortened(name)}] must be a list of patterns, found {shortened(patterns)}"
                )
        if not isinstance(self.together, (list, tuple)) or not all(map(_are_names, self.together)):
            raise FormatError(
                f"together must be a list of lists of patterns, found {shortened(self.together)}; give that"
            )
        check_bucket_cap(self.bucket_cap_bytes)
        known = isinstance(self.block_levers, (list, tuple)) and {RECOMPUTE, SAVE_LESS}.issuperset(
            self.block_levers
        )
        if not known:
            raise FormatError(
                f"block_levers must be of 'recompute' and 'save_less', found {shortened(self.block_levers)}"
            )


def check_bucket_cap(cap: object) -> None:
    """Raise FormatError unless a cap of DDP's buckets is None or a number of bytes."""
    if cap is not None and (isinstance(cap, bool) or not isinstance(cap, (int, float))):
        raise FormatError(
            f"bucket_cap_bytes must be a number of bytes, found {shortened(cap)}; DDP's is 25 MiB"
        )


def _is_by_name(value: object) -> bool:
    return isinstance(value, Mapping) and all(isinstance(key, str) for key in value)


def _are_names(value: object) -> bool:
    return isinstance(value, (list, tuple)) and all(isinstance(one, str) for one in value)
