"""Share results among ranks, and raise one rank's error on all ranks.

An error on one rank alone would leave the others waiting in a collective. Here every rank takes part in one
exchange, then all raise the same sentence.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from typing import Any, TypeVar

import torch.distributed as dist

from qsync.errors import MismatchError, QSyncError, shortened

T = TypeVar("T")

_MAX_SHOWN_CHARACTERS = 100  # characters of a value that a message repeats


def agree(step_name: str, fn: Callable[[], T], group: dist.ProcessGroup | None = None) -> list[T]:
    """Run `fn` on every rank; return all results in rank order, or raise the same error everywhere.

    If `fn` raised on any rank, all ranks raise the error of the first rank that raised a subclass of
    QSyncError, with the rank and `step_name` in the message. If no rank did, all raise a QSyncError for the
    first other error, which may only be a timeout caused by another rank. A single process without a process
    group just runs `fn`. Results must be JSON-able.

    >>> plans = agree("planning", lambda: qsync.plan(graph, profiles, sensitivity, cluster).to_json())
    """
    if not _is_distributed(group):
        return [fn()]
    # Encoded before the collective: a result that is not JSON must raise on this rank, not hang.
    texts = _exchange(step_name, lambda: (None, json.dumps(fn())), group)[1]
    return [json.loads(text) for text in texts]


def agree_locally(step_name: str, fn: Callable[[], T]) -> T:
    """Run `fn` on every rank; return this rank's result, or raise the same error everywhere.

    >>> graph = agree_locally("tracing the model", lambda: qsync.capture(model, batch))
    """
    if not _is_distributed():
        return fn()
    return _exchange(step_name, lambda: (fn(), ""))[0]


def from_rank_zero(step_name: str, fn: Callable[[], T]) -> T:
    """Run `fn` on rank 0 only; return its result on every rank, or raise its error everywhere.

    The result must be JSON-able.

    >>> plan = Plan.from_json(from_rank_zero("planning", lambda: make_plan().to_json()))
    """
    first = not _is_distributed() or dist.get_rank() == 0
    found: Any = agree(step_name, lambda: fn() if first else None)[0]
    return found  # type: ignore[no-any-return]  # rank 0's, so that it is no None of ours


def _exchange(
    step_name: str, fn: Callable[[], tuple[T, str]], group: dist.ProcessGroup | None = None
) -> tuple[T, list[str]]:
    """Run `fn`, which returns an object and a text; return the object and all ranks' texts."""
    cause: BaseException | None = None
    outcome: tuple[type[QSyncError] | None, str]
    try:
        own, text = fn()
        outcome = (None, text)
    except Exception as error:
        cause = error
        kind = type(error) if isinstance(error, QSyncError) else QSyncError
        outcome = (kind, str(error) if isinstance(error, QSyncError) else f"{type(error).__name__}: {error}")
    outcomes: list[Any] = [None] * dist.get_world_size(group)
    try:
        dist.all_gather_object(outcomes, outcome, group=group)
    except RuntimeError as error:  # a connection broke; liveness names the rank when this process ends
        raise QSyncError(
            f"{step_name}: another rank ended meanwhile ({shortened(error)}); look at its output"
        ) from error
    failed = [(rank, *each) for rank, each in enumerate(outcomes) if each[0] is not None]
    for rank, kind, message in sorted(failed, key=lambda one: one[1] is QSyncError):
        if isinstance(cause, QSyncError):
            cause = cause.__cause__  # the sentence itself is printed once
        raise kind(f"{step_name} failed on rank {rank}: {message}") from cause
    return own, [text for _, text in outcomes]


def check_same(facts: Mapping[str, object], group: dist.ProcessGroup | None = None) -> None:
    """Raise MismatchError on every rank unless the given facts are equal on all, compared as text.

    The message shows the first fact that differs, with both values. Put facts that explain others first
    (torch's version before the plan's hash).

    >>> check_same({"torch": torch.__version__, "the plan": plan_hash})
    qsync.errors.MismatchError: torch differs between ranks: rank 0 has 2.13.0, rank 1 has 2.12.0; make it ...
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


def _is_distributed(group: dist.ProcessGroup | None = None) -> bool:
    return dist.is_available() and dist.is_initialized() and dist.get_world_size(group) > 1


def _ranks(values: list[str], wanted: str) -> str:
    """Format the ranks with a given value: "1", or "1 (and 6 more)"."""
    holders = [rank for rank, value in enumerate(values) if value == wanted]
    return str(holders[0]) if len(holders) == 1 else f"{holders[0]} (and {len(holders) - 1} more)"


def _around_difference(one: str, two: str) -> tuple[str, str]:
    """Return both values, long ones cut to the region of their first difference."""
    if max(len(one), len(two)) <= _MAX_SHOWN_CHARACTERS:
        return one, two
    pairs = enumerate(zip(one, two, strict=False))
    start = next((i for i, (a, b) in pairs if a != b), min(len(one), len(two)))
    begin = max(0, start - _MAX_SHOWN_CHARACTERS // 4)
    return _cut(one, begin), _cut(two, begin)


def _cut(text: str, begin: int) -> str:
    end = begin + _MAX_SHOWN_CHARACTERS
    return ("..." if begin else "") + text[begin:end] + ("..." if end < len(text) else "")
