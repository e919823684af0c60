"""How much a class's rounding weighs in the gradient that all ranks average."""

from __future__ import annotations

from collections.abc import Mapping

from qsync.records.cluster import Cluster, DeviceClass
from qsync.records.profiles import Profile


def gradient_weight(device_class: DeviceClass, profiles: Mapping[str, Profile], cluster: Cluster) -> float:
    """What a class's sensitivities are multiplied by: n_c / N^2, or under unequal shares of the batch

        n_c (b_c / B)^2 max(1, s / b_c)                                                           (ours)

    where a rank of the class takes b_c of a step's B samples, and the sensitivities were gathered with s of
    them. What samples round for themselves averages out as 1 / b_c, what they share (weights) does not:
    whatever the parts of the two, the variance with b_c samples is at most that with s times max(1, s / b_c).

    >>> gradient_weight(cluster["infer"], profiles, cluster)
    """
    setting = profiles[device_class.name].setting
    if setting is None:
        return device_class.count / cluster.num_ranks**2
    total = cluster.num_ranks * setting.captured_samples  # shares keep the batch
    share = setting.samples / total
    return device_class.count * share**2 * max(1.0, setting.captured_samples / setting.samples)
