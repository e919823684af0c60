"""Check hybrid options of other libraries' Trainers, and compare the plans of checkpoints."""

from __future__ import annotations

import logging
from collections.abc import Callable, Collection, Mapping
from typing import Any

from qsync.distributed.job import is_rank_zero
from qsync.errors import FormatError, QSyncError
from qsync.records.levers import ACCUMULATE, SHARE
from qsync.records.plans import Plan

logger = logging.getLogger("qsync")


def check_hybrid_options(options: Mapping[str, Any], stated: Collection[str]) -> None:
    """Raise FormatError for options that a Trainer sets itself, and for several passes per batch."""
    given = [name for name in sorted(options) if name in stated]
    if given:
        raise FormatError(f"the Trainer sets {', '.join(given)} itself; leave it out of hybrid_options")
    if ACCUMULATE in (options.get("levers") or ()) or ACCUMULATE in _levers_of(options.get("plan")):
        raise FormatError(
            f"a Trainer cannot split a rank's batch into passes; plan without {ACCUMULATE}, or write the "
            "training loop with qsync.micro_batches"
        )


def needs_sampler(options: Mapping[str, Any], why_not: str) -> None:
    """Raise FormatError if shares of the batch are planned without a sampler for them."""
    if SHARE in (options.get("levers") or ()) or SHARE in _levers_of(options.get("plan")):
        raise FormatError(f"shares of the batch are impossible here: {why_not}; plan without {SHARE}")


def _levers_of(plan: object) -> Collection[str]:
    return plan.levers.used if isinstance(plan, Plan) and plan.levers is not None else ()


def warn_of_other_plan(read: Callable[[], Plan], now: Plan | None) -> None:
    """Log on rank 0 that training continues under another plan than the checkpoint's."""
    if not is_rank_zero():
        return
    try:
        is_other = now is not None and read().diff(now)
    except QSyncError as error:
        logger.warning("qsync: the checkpoint's plan cannot be read: %s", error)
        return
    if is_other:
        logger.warning("qsync: the checkpoint has another plan; training continues under this one")
