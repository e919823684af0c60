"""Put objects back as they were: planning runs a training step, which may count, collect and average."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Collection, Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch
from torch.utils.data import Dataset

_NUMBERS = (bool, int, float, complex, str, bytes, type(None))
_COLLECTIONS = (list, tuple, dict, set, deque)
_TENSORS = (torch.Tensor, np.ndarray)
Restore = Callable[[], Any]


@contextmanager
def unchanged(owners: Iterable[object], leave_out: Collection[str] = ()) -> Iterator[None]:
    """Let what runs inside leave no trace in the attributes of these objects, modules among them.

    Restored are buffers, numbers, tensors and arrays, also in collections inside collections, and the
    attributes of objects that these attributes name, as a meter's; collections keep their identity. What is
    created inside goes. Data sets are not looked at, nor attributes that `leave_out` names.
    """
    kept = [(vars(owner), _attributes(owner, leave_out)) for owner in _with_parts(owners, leave_out)]
    try:
        yield
    finally:
        for attributes, before in kept:
            for name in set(attributes) - set(before):
                if _is_state(name, attributes[name]):
                    del attributes[name]
            for name, restore in before.items():
                if restore is not None:
                    attributes[name] = restore()


def _with_parts(owners: Iterable[object], leave_out: Collection[str]) -> list[object]:
    """Return the objects, and those of a user's own classes that their attributes name."""
    found = {id(owner): owner for owner in owners}
    for owner in list(found.values()):
        for name, value in vars(owner).items():
            is_part = hasattr(value, "__dict__") and not callable(value) and not isinstance(value, Dataset)
            if is_part and name not in leave_out and _is_own(value):
                found.setdefault(id(value), value)
    return list(found.values())


def _is_own(value: object) -> bool:
    """Return whether an object is of a class that no library defines."""
    library = type(value).__module__.partition(".")[0]
    return library not in ("torch", "lightning", "pytorch_lightning", "transformers", "accelerate", "qsync")


def _attributes(owner: object, leave_out: Collection[str]) -> dict[str, Restore | None]:
    """Return what puts each attribute back; None for one that stays as it is."""
    attributes, seen = vars(owner), set[int]()
    return {
        name: _restore(value, seen) if _is_state(name, value) and name not in leave_out else None
        for name, value in attributes.items()
    }


def _is_state(name: str, value: object) -> bool:
    """Return whether an attribute is what a step may change. Hooks, parameters and submodules are torch's."""
    is_torch_s = name in ("_parameters", "_modules") or name.endswith("_hooks") or "_hooks_" in name
    return not is_torch_s and isinstance(value, (*_NUMBERS, *_COLLECTIONS, *_TENSORS))


def _restore(value: Any, seen: set[int]) -> Restore:
    """Return a function that gives a value its present content back and returns it."""
    if id(value) in seen:  # a collection that holds itself
        return lambda: value
    if isinstance(value, _TENSORS):
        return _restore_tensor(value)
    if not isinstance(value, _COLLECTIONS) or (isinstance(value, tuple) and _is_flat(value)):
        return lambda: value
    seen.add(id(value))
    if isinstance(value, dict):
        content = {key: _restore(each, seen) for key, each in value.items()}
        return lambda: _refilled(value, value.update, {key: restore() for key, restore in content.items()})
    if isinstance(value, set):
        members = set(value)
        return lambda: _refilled(value, value.update, members)
    items = list(value) if _is_flat(value) else [_restore(each, seen) for each in value]
    if isinstance(value, tuple):
        return lambda: (value, [restore() for restore in items])[0]
    if _is_flat(value):
        return lambda: _refilled(value, value.extend, items)
    return lambda: _refilled(value, value.extend, [restore() for restore in items])


def _is_flat(values: Iterable[Any]) -> bool:
    return all(isinstance(each, _NUMBERS) for each in values)


def _restore_tensor(value: Any) -> Restore:
    if not _can_be_written(value):
        return lambda: value
    saved = value.detach().clone() if isinstance(value, torch.Tensor) else value.copy()

    def put_back() -> Any:
        if isinstance(value, np.ndarray):
            value[...] = saved
        elif value.is_inference():  # which nothing may write to out here
            return saved
        else:
            with torch.no_grad():
                value.copy_(saved)
        return value

    return put_back


def _can_be_written(value: Any) -> bool:
    """Return whether a step can write to a tensor or array: none that is meta, read-only or expanded."""
    if isinstance(value, np.ndarray):
        return bool(value.flags.writeable)
    is_expanded = value.layout is torch.strided and any(
        stride == 0 and size > 1 for size, stride in zip(value.shape, value.stride(), strict=True)
    )
    return not (value.is_meta or is_expanded)


def _refilled(value: Any, fill: Callable[[Any], Any], content: Any) -> Any:
    value.clear()
    fill(content)
    return value
