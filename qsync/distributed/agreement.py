"""What ranks must agree on, before the first step: found out together, refused together, on every rank,
without a hang.

An error on one rank alone leaves the others waiting in a collective. Here every rank takes part in one
exchange whatever happens to it, and then all raise the same sentence.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from typing import Any, TypeVar

import torch.distributed as dist

from qsync.errors import MismatchError, QSyncError

T = TypeVar("T")

_SHOWN = 100  # characters of a value that a message repeats


def agree(step_name: str, fn: Callable[[], T], group: dist.ProcessGroup | None = None) -> list[T]:
    """Run `fn` on every rank and give every rank the results of all, in rank order; or raise on every rank.

    If `fn` raised on any rank, all ranks raise what the first such rank raised (its subclass of QSyncError,
    else QSyncError) and name that rank and `step_name`. What has no name of ours comes last: it may be a rank
    that waited in vain for the one with the cause. A single process without a process group just runs
    `fn`. Results must be JSON-able.

    >>> plans = agree("planning", lambda: qsync.plan(graph, profiles, sensitivity, cluster))
    """
    if not _is_distributed(group):
        return [fn()]
    cause: Exception | None = None
    try:
        # Encoded here and not in the collective: a result that cannot be must be this rank's error, not a
        # hang.
        outcome: tuple[type[QSyncError] | None, Any] = (None, json.dumps(fn()))
    except Exception as error:
        cause = error
        kind = type(error) if isinstance(error, QSyncError) else QSyncError
        outcome = (kind, str(error) if isinstance(error, QSyncError) else f"{type(error).__name__}: {error}")
    outcomes: list[Any] = [None] * dist.get_world_size(group)
    dist.all_gather_object(outcomes, outcome, group=group)
    failed = [(rank, *outcome) for rank, outcome in enumerate(outcomes) if outcome[0] is not None]
    for rank, kind, message in sorted(failed, key=lambda one: one[1] is QSyncError):
        raise kind(f"{step_name} failed on rank {rank}: {message}") from cause
    return [json.loads(payload) for _, payload in outcomes]


def check_same(facts: Mapping[str, object], group: dist.ProcessGroup | None = None) -> None:
    """Raise MismatchError on every rank unless all ranks hold the same facts, compared as text.

    The message names the first fact, in this order, that differs, with both sides. Put what explains other
    differences first (torch's version before the plan's hash).

    >>> check_same({"torch": torch.__version__, "the plan": plan_hash}) qsync.errors.MismatchError: torch
    differs between ranks: rank 0 has 2.13.0, rank 1 has 2.12.0; make it the same ...
    """
    gathered = agree(
        "comparing ranks", lambda: {str(name): str(value) for name, value in facts.items()}, group
    )
    for name in dict.fromkeys(name for each in gathered for name in each):
        values = [each.get(name, "nothing") for each in gathered]
        other = next((rank for rank, value in enumerate(values) if value != values[0]), None)
        if other is not None:
            mine, theirs = _around_difference(values[0], values[other])
            raise MismatchError(
                f"{name} differs between ranks: rank {_ranks(values, values[0])} has {mine}, "
                f"rank {_ranks(values, values[other])} has {theirs}; make it the same on every rank"
            )


def _is_distributed(group: dist.ProcessGroup | None) -> bool:
    return dist.is_available() and dist.is_initialized() and dist.get_world_size(group) > 1


def _ranks(values: list[str], wanted: str) -> str:
    """The ranks that hold this value: "1", or "1 (and 6 more)"."""
    holders = [rank for rank, value in enumerate(values) if value == wanted]
    return str(holders[0]) if len(holders) == 1 else f"{holders[0]} (and {len(holders) - 1} more)"


def _around_difference(one: str, two: str) -> tuple[str, str]:
    """Both values; long ones cut to the part where they begin to differ, so that the difference can be
    seen.
    """
    if max(len(one), len(two)) <= _SHOWN:
        return one, two
    pairs = enumerate(zip(one, two, strict=False))
    start = next((i for i, (a, b) in pairs if a != b), min(len(one), len(two)))
    begin = max(0, start - _SHOWN // 4)
    return _cut(one, begin), _cut(two, begin)


def _cut(text: str, begin: int) -> str:
    end = begin + _SHOWN
    return ("..." if begin else "") + text[begin:end] + ("..." if end < len(text) else "")
