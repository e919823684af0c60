"""The profile of a slower device: all times scaled by a factor. Pure."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from qsync.records.profiles import Cost, Profile
from qsync.replayer.levers.batch_size import times


def slowed(profile: Profile, factor: float) -> Profile:
    """Return the profile of a device on which everything takes `factor` times as long.

    >>> slowed(profile, 2.0).host_s == 2.0 * profile.host_s
    True
    """
    return replace(
        profile, **computing(profile, factor),
        host_s=factor * profile.host_s, optimizer_s=factor * profile.optimizer_s,
        bucket_s_per_byte=factor * profile.bucket_s_per_byte,
        step_s={mode: factor * seconds for mode, seconds in profile.step_s.items()},
        launches=profile.launches and slowed(profile.launches, factor),
    )  # fmt: skip


def computing(profile: Profile, factor: float) -> dict[str, Any]:
    """Return the profile's fields of operators, casts, loss and loading, with scaled times."""

    def longer(cost: Cost) -> Cost:
        return times(cost, factor)

    return {
        "ops": {
            op: {mode: longer(cost) for mode, cost in modes.items()} for op, modes in profile.ops.items()
        },
        "casts": {key: longer(cost) for key, cost in profile.casts.items()},
        "cast_fit": {key: (longer(base), longer(rise)) for key, (base, rise) in profile.cast_fit.items()},
        "switch_s": {mode: longer(cost) for mode, cost in profile.switch_s.items()},
        "outside": longer(profile.outside),
        "loading_s": factor * profile.loading_s,
    }
