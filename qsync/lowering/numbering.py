"""Number distinct keys in arrays of whole numbers."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

Ints = npt.NDArray[np.int64]


class Numbered:
    """Distinct keys (whole numbers), numbered from 0 by first occurrence."""

    def __init__(self) -> None:
        self._keys: Ints = np.zeros(0, dtype=np.int64)  # sorted keys, with their numbers
        self._numbers: Ints = np.zeros(0, dtype=np.int64)

    def __len__(self) -> int:
        return len(self._keys)

    def __call__(self, keys: Ints) -> tuple[Ints, list[int]]:
        """Return each key's number, and for every new number the index of one of its keys."""
        found = self._find(keys)
        missing = np.flatnonzero(found < 0)
        if not len(missing):
            return found, []
        new, first = np.unique(keys[missing], return_index=True)
        numbers = np.arange(len(self), len(self) + len(new))
        every = np.concatenate((self._keys, new))
        order = np.argsort(every)
        self._keys, self._numbers = every[order], np.concatenate((self._numbers, numbers))[order]
        return self._find(keys), [int(place) for place in missing[first]]

    def _find(self, keys: Ints) -> Ints:
        if not len(self._keys):
            return np.full(len(keys), -1)
        place = np.minimum(np.searchsorted(self._keys, keys), len(self._keys) - 1)
        return np.where(self._keys[place] == keys, self._numbers[place], -1)
