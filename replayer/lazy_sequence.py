"""A sequence computed at its first use: most callers of replay read the step time only."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any, TypeVar, overload

T = TypeVar("T")


class OnAccess(Sequence[T]):
    """A sequence whose items `make` computes at the first use; equal to a tuple of the same items.

    >>> events = OnAccess(lambda: lay_out(step))
    >>> len(events)
    """

    def __init__(self, make: Callable[[], Sequence[T]]) -> None:
        self._make: Callable[[], Sequence[T]] | None = make
        self._made: tuple[T, ...] = ()

    @property
    def _all(self) -> tuple[T, ...]:
        if self._make is not None:
            self._made = tuple(self._make())
            self._make = None  # frees the objects that `make` references
        return self._made

    @overload
    def __getitem__(self, index: int) -> T: ...
    @overload
    def __getitem__(self, index: slice) -> tuple[T, ...]: ...
    def __getitem__(self, index: int | slice) -> T | tuple[T, ...]:
        return self._all[index]

    def __len__(self) -> int:
        return len(self._all)

    def __iter__(self) -> Iterator[T]:
        return iter(self._all)

    def __eq__(self, other: object) -> bool:
        return self._all == tuple(other) if isinstance(other, (OnAccess, tuple)) else NotImplemented

    def __hash__(self) -> int:
        return hash(self._all)

    def __repr__(self) -> str:
        return repr(self._all)

    def __reduce__(self) -> tuple[Any, ...]:
        return tuple, (self._all,)
