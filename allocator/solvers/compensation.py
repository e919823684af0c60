"""Which changes go together: one that lessens the variance, and those that pay for what it takes (ours).

A knapsack of few pieces: the payers of least variance for what is lacking are taken one after the other, and
after each of them the one is looked for that alone makes up for the rest at the least variance.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

FloatArray = npt.NDArray[np.float64]
BoolArray = npt.NDArray[np.bool_]

# How many payers one gain may have, and for how many gains, the largest first, payers are looked for.
_MOST_PAYERS, _MOST_GAINS = 6, 2000


@dataclass(frozen=True, slots=True)
class Changes:
    """Changes one may make: row i changes the operators `of[i]`, adds `variance[i]` and takes `takes[i]` of
    every kind of room (seconds, bytes at some time). Sorted by variance.
    """

    of: BoolArray
    variance: FloatArray
    takes: FloatArray


def paid(changes: Changes, room: FloatArray, least: float) -> list[tuple[float, tuple[int, ...]]]:
    """What can be made within `room`, as (variance added, rows), the least first.

    No operator is changed twice, and each lessens the variance by more than `least`.

    >>> paid(Changes(of, np.array([-3.0, 1.0]), np.array([[2.0], [-2.0]])), np.zeros(1), 0.0)
    [(-2.0, (0, 1))]
    """
    found: set[tuple[float, tuple[int, ...]]] = set()
    for gain in range(min(len(changes.variance), _MOST_GAINS)):
        if changes.variance[gain] >= -least:
            break
        found |= _paid(changes, gain, room, least)
    return sorted(found)


def _paid(changes: Changes, gain: int, room: FloatArray, least: float) -> set[tuple[float, tuple[int, ...]]]:
    found, rows = set(), [gain]
    variance, taken, of = float(changes.variance[gain]), changes.takes[gain], changes.of[gain]
    for _ in range(_MOST_PAYERS):
        lack = np.maximum(taken - room, 0.0)
        if not lack.any():
            found.add((variance, tuple(sorted(rows))))
        able = ~changes.of[:, of].any(axis=1) & (changes.variance < -least - variance)
        last = able & (changes.takes <= room - taken).all(axis=1)
        if last.any():
            row = int(np.argmin(np.where(last, changes.variance, np.inf)))
            found.add((variance + float(changes.variance[row]), tuple(sorted([*rows, row]))))
        if not lack.any():
            break
        part = np.minimum(-changes.takes[:, lack > 0.0], lack[lack > 0.0]).sum(axis=1) / lack.sum()
        able &= part > 0.0
        if not able.any():
            break
        price = np.maximum(changes.variance, 0.0) / np.where(able, part, 1.0)
        row = int(np.argmin(np.where(able, price, np.inf)))
        rows.append(row)
        variance += float(changes.variance[row])
        taken, of = taken + changes.takes[row], of | changes.of[row]
    return found
