"""Cache values derived from a record: computed once, and freed with the record."""

from __future__ import annotations

import weakref
from collections.abc import Callable
from typing import Any, Generic, TypeVar

T = TypeVar("T")


class IdentityCache(Generic[T]):
    """A cache of one value per record, keyed by identity, because comparing graphs is slow.

    A value must not reference its record, or neither would be freed.

    >>> HASHES: IdentityCache[str] = IdentityCache()
    >>> HASHES.of(graph, lambda: graph.hash)
    """

    def __init__(self) -> None:
        self._held: dict[int, tuple[weakref.ref[Any], T]] = {}

    def of(self, record: Any, make: Callable[[], T]) -> T:
        """Return a record's cached value; compute it on the first call."""
        key = id(record)
        found = self._held.get(key)
        if found is None:
            value = make()
            held = self._held
            # Once a record is freed, its id may be reused.
            self._held[key] = (weakref.ref(record, lambda _: held.pop(key, None)), value)
            return value
        return found[1]
