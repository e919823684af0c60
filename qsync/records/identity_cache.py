"""Cache what follows from a record alone: it is computed once, and freed with the record."""

from __future__ import annotations

import weakref
from collections.abc import Callable
from typing import Any, Generic, TypeVar

T = TypeVar("T")


class IdentityCache(Generic[T]):
    """A cache of one value per record, by identity: comparing graphs would cost more than it saves.

    A value must not hold its record, or neither would ever be freed.

    >>> HASHES: IdentityCache[str] = IdentityCache()
    >>> HASHES.of(graph, lambda: graph.hash)
    """

    def __init__(self) -> None:
        self._held: dict[int, tuple[weakref.ref[Any], T]] = {}

    def of(self, record: Any, make: Callable[[], T]) -> T:
        """Return the value of this record; make it if there is none yet."""
        key = id(record)
        found = self._held.get(key)
        if found is None:
            value = make()
            held = self._held
            # Once a record is gone its number may be another's.
            self._held[key] = (weakref.ref(record, lambda _: held.pop(key, None)), value)
            return value
        return found[1]
