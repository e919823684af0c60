"""Choose a plan, judge it, and save it with the profiles that it was made from."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

from qsync.allocator import find_verdict, find_warnings
from qsync.allocator.compression_choice import compression_lines, with_compression
from qsync.allocator.levers.bucket_cap import fastest_bucket_cap
from qsync.distributed import job
from qsync.errors import DoesNotFitError, QSyncError, shortened
from qsync.planning import plan as choose_plan
from qsync.records.plan_folder import Basis, save_plan
from qsync.records.plans import Plan
from qsync.replayer import Recapture, under_levers
from qsync.runtime.coverage import say_once

logger = logging.getLogger("qsync")


def plan_and_save(
    basis: Basis,
    folder: Path,
    bucket_cap_bytes: int | None,
    options: Mapping[str, Any],
    chooses_buckets: bool = False,
) -> Plan:
    """Return the plan of a basis, with its verdict and warnings; save both in the folder.

    `options` are those of `qsync.plan`. With `chooses_buckets` the plan has the size of DDP's buckets that
    makes its step shortest, if that wins enough. Raises DoesNotFitError where no plan fits; the basis is
    saved then.
    """
    other, parts = options.get("other"), (basis.graph, basis.profiles, basis.sensitivity, basis.cluster)
    try:
        plan = choose_plan(*parts, bucket_cap_bytes=bucket_cap_bytes, **options)
        cap = fastest_bucket_cap(under_levers(basis, plan.levers, other), plan) if chooses_buckets else None
        if cap is not None:
            plan = choose_plan(*parts, bucket_cap_bytes=cap, **options)
    except DoesNotFitError as error:
        with suppress(OSError):  # a full disk costs nothing more
            basis.save(folder)
            if other is not None:
                other.save(folder)
        raise DoesNotFitError(f"{error}; qsync fit {folder} says what would fit") from error
    if basis.sensitivity.exchange:
        under = under_levers(basis, plan.levers, other)
        plan = with_compression(under, plan, options.get("target_s"))
        lines = compression_lines(under, plan)
        say_once("\n".join(f"{basis.graph.model}: {line}" for line in lines), bool(lines))
    plan = replace(plan, verdict=find_verdict(basis, plan, other, options))
    return save_with_warnings(folder, plan, basis, options.get("budgets"), other)


def save_with_warnings(
    folder: Path,
    plan: Plan,
    basis: Basis,
    budgets: Mapping[str, int] | None,
    other: Recapture | None = None,
) -> Plan:
    """Write a plan beside its basis, and log the reasons to doubt it, or why it is not kept.

    Returns the plan with these reasons, which whoever uses it later reads again.
    """
    profiles = under_levers(basis, plan.levers, other).profiles
    found = find_warnings(basis.graph, plan, profiles, basis.cluster, budgets)
    plan = replace(plan, warnings=tuple(found))
    try:
        if other is not None:
            other.save(folder)
        save_plan(folder, plan, basis)
    except OSError as error:  # a full disk is found after the profiles were measured
        logger.warning(
            "qsync: the plan is not kept in %s (%s), so the next start profiles again; make space there, or "
            "give cache_dir another folder", folder, error.strerror or error,
        )  # fmt: skip
    log_warnings(plan)
    return plan


def log_warnings(plan: Plan) -> None:
    """Log the reasons to doubt a plan, on rank 0."""
    for warning in plan.warnings if job.is_rank_zero() else ():
        logger.warning("qsync: %s", warning)


def write_report(file: Path, plan: Plan, folder: Path) -> None:
    """Write the page about a plan from the basis in its folder, or log why it cannot be written."""
    from qsync.figures import page  # imports matplotlib

    try:
        page.write(file, plan, under_levers(Basis.load(folder), plan.levers, Recapture.load(folder)))
    except (OSError, QSyncError) as error:  # as where a full disk took neither profiles nor page
        logger.warning("qsync: the report is not written: %s; training goes on", shortened(error, 400))
