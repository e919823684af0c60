"""Correct profiles by a job's first real steps, and plan again once.

A profile covers one batch, before training. Real steps add other batches, the loop's own work, and fragmented
memory. So each class's compute time is multiplied by measured over predicted time, and host and optimizer
times are replaced by the measured ones. Where a class's peak was predicted too small and may not fit, the
excess counts as in use throughout the step.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

from qsync.distributed.agreement import agree, from_rank_zero
from qsync.distributed.monitoring.drift_monitor import Prediction, times_profiled
from qsync.distributed.monitoring.step_peak import largest
from qsync.distributed.monitoring.step_phases import PhaseTimer
from qsync.errors import DoesNotFitError
from qsync.records.plan_folder import Basis
from qsync.records.plans import Plan
from qsync.replayer.explanation.phases import Phases, as_measurable, median
from qsync.replayer.slowdown import computing

logger = logging.getLogger("qsync")

NUM_STEPS = 20
TOLERANCE = 0.03  # relative error of a class's compute time: a smaller one changes no plan

Measured = Mapping[str, Phases]  # class -> measured phases of one profiled step


def check_first_steps(
    timer: PhaseTimer,
    prediction: Prediction,
    device_class: str,
    plan_again: Callable[[Measured, Mapping[str, int]], Plan],
    adopt: Callable[[Plan], None],
) -> None:
    """Compare the timer's next steps with the prediction, once, on all ranks together.

    If a class's compute time is off by more than `TOLERANCE`, or its peak may not fit, `plan_again` runs on
    rank 0, with the phases and the bytes beyond the prediction, and `adopt` on every rank. If nothing fits,
    the plan stays. Afterwards the timer continues as before. Every rank must take the same number of
    optimizer steps.
    """
    before = timer.num_kept, timer.when_full

    def check() -> None:
        timer.num_kept, timer.when_full = before
        times, why = times_profiled(timer, prediction, device_class)
        own = median(timer.steps).to_json()
        timer.clear()
        peak, timer.peak = timer.peak, None
        own_peak = peak.num_bytes if peak is not None else None
        everyone: list[Any] = agree(
            "checking the first steps", lambda: [device_class, own_peak, own, times, why]
        )
        unlike = [
            why or "ranks call the model in different patterns" for *_, n, why in everyone if n != times
        ]
        if times == 0 or unlike:
            _say(f"the first steps cannot be compared with the prediction: {why or unlike[0]}")
            return
        measured = _by_class([(name, Phases(**phases)) for name, _, phases, *_ in everyone], times)
        peaks = largest([(name, num_bytes) for name, num_bytes, *_ in everyone])
        beyond = {name: prediction.memory[name].beyond(num_bytes) for name, num_bytes in peaks.items()}
        wrong = {name: compute_error(prediction.phases[name], phases) for name, phases in measured.items()}
        found = ", ".join(
            f"{name} computes {abs(error):.1%} {'longer' if error > 0 else 'shorter'} than predicted"
            for name, error in wrong.items()
        )
        found += "".join(
            f"; {prediction.memory[name].told(name, peaks[name])}" for name in beyond if beyond[name]
        )
        if not any(beyond.values()) and all(abs(error) <= TOLERANCE for error in wrong.values()):
            _say(f"the first {NUM_STEPS} steps are as predicted ({found})")
            return
        _say(f"the first {NUM_STEPS} steps: {found}; planning again")
        try:
            plan = from_rank_zero("planning again", lambda: plan_again(measured, beyond).to_json())
        except DoesNotFitError as error:
            _say(f"{error}; the plan stays, and a step may run out of memory")
            return
        adopt(Plan.from_json(plan))

    timer.num_kept, timer.when_full = NUM_STEPS, check


def _say(text: str) -> None:
    from_rank_zero("reporting", lambda: logger.warning("qsync: %s", text))


def _by_class(ranks: list[tuple[str, Phases]], times: int) -> dict[str, Phases]:
    """Return the median phases over each class's ranks, for one profiled step."""
    found = {}
    for name in dict.fromkeys(name for name, _ in ranks):
        phases = median([phases for of, phases in ranks if of == name])
        shares = {
            key: getattr(phases, key) / times for key in ("host_s", "compute_s", "loading_s", "forward_s")
        }
        found[name] = replace(phases, **shares)
    return found


def compute_error(predicted: Phases, measured: Phases) -> float:
    """Return the relative error of the predicted compute time; positive if steps take longer."""
    return measured.compute_s / predicted.compute_s - 1.0 if predicted.compute_s else 0.0


def corrected(
    basis: Basis, predicted: Measured, measured: Measured, beyond: Mapping[str, int] | None = None
) -> Basis:
    """Return the basis with profiles corrected by the measured first steps.

    `beyond` are the bytes by which a class's peak was predicted too small.

    >>> corrected(basis, prediction.phases, measured).profiles["infer"].optimizer_s
    """
    profiles = {}
    for name, profile in basis.profiles.items():
        wanted, found = as_measurable(predicted[name], measured[name]), measured[name]
        times = 1.0 + compute_error(wanted, found)
        launches = profile.launches and replace(profile.launches, **computing(profile.launches, times))
        changed = {
            **computing(profile, times), "launches": launches,
            "host_s": max(0.0, profile.host_s + found.host_s - wanted.host_s),
            "optimizer_s": found.optimizer_s, "loading_s": found.loading_s or profile.loading_s,
            "optimizer_bytes": profile.optimizer_bytes + (beyond or {}).get(name, 0),
        }  # fmt: skip
        profiles[name] = replace(profile, **changed)
    return replace(basis, profiles=profiles)
