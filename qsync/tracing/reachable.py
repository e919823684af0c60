"""Objects that the user's Python code can change: all reachable ones, found without running it.

Containers, attributes, closures, default arguments and globals named by a function are followed. Objects of
libraries are not followed, since a restored queue or log would contradict the world outside. Exceptions are
objects with tensors among their attributes (averaged weights), modules and optimizers of any author.
"""

from __future__ import annotations

import dis
import functools
import random
import sys
import sysconfig
import weakref
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from types import (
    BuiltinFunctionType,
    CellType,
    CodeType,
    FunctionType,
    MappingProxyType,
    MethodType,
    ModuleType,
)
from typing import Any

import numpy as np
import torch
from torch.utils.data import DataLoader, Dataset, Sampler

_PLAIN = (
    type(None), bool, int, float, complex, str, bytes, torch.dtype, torch.device, torch.Size, ModuleType,
    BuiltinFunctionType, CodeType,
)  # fmt: skip
_CONTAINERS = (dict, list, set, deque)
_DATA = (Dataset, DataLoader, Sampler)  # planning restores the batches that it takes from them
_OF_TORCH = (torch.nn.Module, torch.optim.Optimizer, torch.optim.lr_scheduler.LRScheduler)
_LIBRARIES = tuple({sysconfig.get_path(name) for name in ("stdlib", "platstdlib", "purelib", "platlib")})
_OWN = ("qsync", "torch", "numpy")
_INTEGRATIONS = "qsync.integrations."  # integrations' losses call a framework's module


def reachable(roots: Iterable[object], known: set[int], stop: Callable[[object], bool]) -> Iterator[Any]:
    """Yield every object reachable from roots, each once; skip objects for which `stop` is true.

    `known` has the ids of objects yielded before; the caller keeps these objects alive.
    """
    ahead = list(roots)
    while ahead:
        found = ahead.pop()
        if isinstance(found, _PLAIN) or id(found) in known or stop(found):
            continue
        known.add(id(found))
        yield found
        ahead += _parts(found)


def attributes_of(found: object) -> dict[str, Any] | None:
    """Return the mutable attribute dictionary of an object; None without one.

    For a class, return a copy with its data attributes.
    """
    if isinstance(found, type):
        return {name: value for name, value in vars(found).items() if _is_data(name, value)}
    attributes = getattr(found, "__dict__", None)
    return attributes if isinstance(attributes, dict) else None


def slots_of(found: object) -> Iterator[str]:
    """Yield the names of an object's slots that have a value."""
    for kind in type(found).__mro__:
        slots = vars(kind).get("__slots__", ())
        for name in (slots,) if isinstance(slots, str) else slots:
            if name not in ("__dict__", "__weakref__") and hasattr(found, name):
                yield name


def globals_written(function: FunctionType) -> Iterator[str]:
    """Yield the names of the globals that a user's function assigns."""
    if is_users(function.__module__):
        for code in _codes(function.__code__):
            if any(name in function.__globals__ for name in code.co_names):
                yield from (i.argval for i in dis.get_instructions(code) if i.opname == "STORE_GLOBAL")


def _parts(found: Any) -> Iterable[object]:
    """Return the objects that an object references."""
    if isinstance(found, torch.Tensor):
        return [vars(found)] if hasattr(found, "__dict__") else []
    if isinstance(found, dict):
        return [*found.keys(), *found.values()]
    if isinstance(found, (list, set, deque, tuple, frozenset)):
        return list(found)
    if isinstance(found, MappingProxyType):
        return list(found.values())
    if isinstance(found, MethodType):
        return [found.__self__, found.__func__]
    if isinstance(found, functools.partial):
        return [found.func, *found.args, *found.keywords.values(), found.__dict__]
    if isinstance(found, CellType):
        return [found.cell_contents] if is_filled(found) else []
    if isinstance(found, weakref.ref):
        return [found()]
    if isinstance(found, FunctionType):
        return _parts_of_function(found)
    if isinstance(found, type):
        return [*(attributes_of(found) or {}).values()] if is_users(found.__module__) else []
    return _parts_of_object(found)


def _parts_of_function(function: FunctionType) -> list[object]:
    used = [*(function.__closure__ or ()), *(function.__defaults__ or ()), function.__dict__]
    used += (function.__kwdefaults__ or {}).values()
    if is_users(function.__module__):
        names = {name for code in _codes(function.__code__) for name in code.co_names}
        used += [function.__globals__[name] for name in names & function.__globals__.keys()]
    return used


def _parts_of_object(found: Any) -> list[object]:
    kind, attributes = type(found), attributes_of(found)
    is_own = is_users(kind.__module__) or kind.__module__.startswith(_INTEGRATIONS)
    if isinstance(found, _DATA) or not (is_own or isinstance(found, _OF_TORCH) or _has_tensors(attributes)):
        return []
    parts: list[object] = [attributes] if attributes is not None else []
    if is_own:
        parts += [kind, *(getattr(found, name) for name in slots_of(found))]
        run = getattr(kind, "forward", None) or vars(kind).get("__call__")
        if isinstance(run, FunctionType):
            parts += [run, *(method for method in map(vars(kind).get, run.__code__.co_names) if method)]
    return parts


def _has_tensors(attributes: dict[str, Any] | None) -> bool:
    """Return whether an attribute of an object is a tensor, or a container with one."""
    for value in (attributes or {}).values():
        values = value.values() if isinstance(value, dict) else value
        several = isinstance(values, (list, tuple)) or isinstance(value, dict)
        if any(isinstance(each, torch.Tensor) for each in (values if several else (value,))):
            return True
    return False


def is_users(module: object) -> bool:
    """Return whether the module of this name is the user's, not a library's."""
    return _is_users(module) if isinstance(module, str) else False


@functools.cache
def _is_users(module: str) -> bool:
    if module.partition(".")[0] in _OWN:
        return False
    file = getattr(sys.modules.get(module), "__file__", None)
    return module == "__main__" if file is None else not file.startswith(_LIBRARIES)


def _codes(code: CodeType) -> Iterator[CodeType]:
    yield code
    for constant in code.co_consts:
        if isinstance(constant, CodeType):
            yield from _codes(constant)


def _is_data(name: str, value: object) -> bool:
    return not name.startswith("__") and isinstance(value, (*_PLAIN, *_CONTAINERS, tuple, torch.Tensor))


def is_filled(cell: CellType) -> bool:
    """Return whether a closure's cell has a value."""
    try:
        return cell.cell_contents is not cell
    except ValueError:
        return False


def generator_state(found: object) -> tuple[Any, Callable[[Any], object]] | None:
    """Return the state of a random generator and its setter; None for another object."""
    if isinstance(found, torch.Generator):
        return found.get_state(), found.set_state
    if isinstance(found, random.Random):
        return found.getstate(), found.setstate
    if isinstance(found, np.random.RandomState):
        return found.get_state(legacy=False), found.set_state
    if isinstance(found, np.random.Generator):
        return found.bit_generator.state, functools.partial(setattr, found.bit_generator, "state")
    return None
