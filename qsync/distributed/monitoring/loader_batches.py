"""Every batch that a DataLoader of this process hands out, as those who listen see it."""

from __future__ import annotations

import weakref
from contextlib import AbstractContextManager, ExitStack
from typing import Any, Protocol

from torch.utils.data.dataloader import _BaseDataLoaderIter as _LoaderIterator


class Listener(Protocol):
    """What is told of batches: `fetching` is entered before a loader is asked, and left with the batch."""

    def fetching(self, batches: Any) -> AbstractContextManager[None]:
        """Stand around the fetch of the next batch of a loader's iterator."""


_listeners: weakref.WeakSet[Any] = weakref.WeakSet()
_next_batch = _LoaderIterator.__next__


def listen(listener: Listener) -> None:
    """Tell a listener of all further batches, as long as it lives.

    The iterators of all loaders share one `__next__`; without listeners it is torch's own.
    """
    _listeners.add(listener)
    _LoaderIterator.__next__ = _told_next_batch  # type: ignore[assignment, method-assign]


def ignore(listener: Listener) -> None:
    """Tell a listener nothing more."""
    _listeners.discard(listener)
    if not _listeners:
        _LoaderIterator.__next__ = _next_batch  # type: ignore[method-assign]


def _told_next_batch(batches: Any) -> Any:
    with ExitStack() as fetching:
        for listener in list(_listeners):
            fetching.enter_context(listener.fetching(batches))
        return _next_batch(batches)
