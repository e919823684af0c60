"""Profiles as if a device were slower: made from measured ones by one factor."""

from __future__ import annotations

from dataclasses import replace

from qsync import Link, Profile
from qsync.records.profiles import Cost

# This machine, and the same machine with every time twice as long: emulated.
HERE, HALF, SHARE = "train", "infer", 0.5
# Links are assumptions: gloo between processes of one machine, and 80 Gbit/s between hosts.
GLOO, NETWORK = Link(1e-4, 1.5e9, 0.6), Link(30e-6, 10e9)


def slowed(profile: Profile, name: str, share: float) -> Profile:
    """Return the profile of a rank with this share of the device: every time so much longer. Emulated."""

    def longer(cost: Cost) -> Cost:
        return Cost(cost.forward_s / share, cost.backward_s / share, cost.spread_s / share)

    return replace(
        profile, device_class=name, emulated_share=share,
        ops={op: {mode: longer(cost) for mode, cost in modes.items()} for op, modes in profile.ops.items()},
        casts={key: longer(cost) for key, cost in profile.casts.items()},
        cast_fit={key: (longer(base), longer(rise)) for key, (base, rise) in profile.cast_fit.items()},
        step_s={mode: seconds / share for mode, seconds in profile.step_s.items()},
        outside=longer(profile.outside), loading_s=profile.loading_s / share, host_s=profile.host_s / share,
        optimizer_s=profile.optimizer_s / share, bucket_s_per_byte=profile.bucket_s_per_byte / share,
    )  # fmt: skip
