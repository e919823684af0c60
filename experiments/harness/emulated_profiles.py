"""Derive profiles of a slower device, a smaller batch, or free casts from measured ones."""

from __future__ import annotations

from dataclasses import replace

import torch

from qsync.backend.devices.device_detection import detect_class
from qsync.experiments.harness.offered_precisions import offered_precisions
from qsync.records.cluster import Cluster, Link
from qsync.records.profiles import Cost, Profile
from qsync.replayer.slowdown import slowed

# This machine, and an emulated one with every time twice as long.
HERE, HALF, SHARE = "train", "infer", 0.5
# Assumed links: gloo between processes of one machine, and 80 Gbit/s between hosts.
GLOO, NETWORK = Link(1e-4, 1.5e9, 0.6), Link(30e-6, 10e9)


def of_share(profile: Profile, name: str, share: float) -> Profile:
    """Return the profile of a rank with this share of the device: times scaled up. Emulated."""
    return replace(slowed(profile, 1 / share), device_class=name, emulated_share=share)


def here_and_half(
    profile: Profile, share: float = SHARE, count: int = 1
) -> tuple[Cluster, dict[str, Profile]]:
    """Return a cluster of equally many ranks of this machine and a share of it, with both profiles.

    Both derive from this machine's profile.
    """
    here = torch.device("cpu")
    own = replace(detect_class(here), name=HERE, precisions=offered_precisions(here))
    own = replace(own, hardware=None, count=count)
    cluster = Cluster((own, replace(own, name=HALF, emulated_share=share)), GLOO)
    return cluster, {HERE: profile, HALF: of_share(profile, HALF, share)}


def without_casts(profile: Profile) -> Profile:
    """Return the profile with every cast free."""
    fit = dict.fromkeys(profile.cast_fit, (Cost(0.0), Cost(0.0)))
    return replace(profile, casts=dict.fromkeys(profile.casts, Cost(0.0)), cast_fit=fit)
