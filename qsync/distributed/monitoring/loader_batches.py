"""Notify listeners of every batch that a DataLoader of this process returns."""

from __future__ import annotations

import weakref
from contextlib import AbstractContextManager, ExitStack
from typing import Any, Protocol

from torch.utils.data.dataloader import _BaseDataLoaderIter as _LoaderIterator


class Listener(Protocol):
    """Listener to batches: the context `fetching` encloses each fetch of a batch."""

    def fetching(self, batches: Any) -> AbstractContextManager[None]:
        """Enclose the fetch of the next batch of a loader's iterator."""


_listeners: weakref.WeakSet[Any] = weakref.WeakSet()
_next_batch = _LoaderIterator.__next__


def listen(listener: Listener) -> None:
    """Notify a listener of all further batches, as long as it lives.

    All loaders' iterators share one patched `__next__`; without listeners it is torch's own.
    """
    _listeners.add(listener)
    _LoaderIterator.__next__ = _told_next_batch  # type: ignore[assignment, method-assign]


def ignore(listener: Listener) -> None:
    """Stop notifying a listener."""
    _listeners.discard(listener)
    if not _listeners:
        _LoaderIterator.__next__ = _next_batch  # type: ignore[method-assign]


def _told_next_batch(batches: Any) -> Any:
    with ExitStack() as fetching:
        for listener in list(_listeners):
            fetching.enter_context(listener.fetching(batches))
        return _next_batch(batches)
