"""The result of `make_optimizer` in a profile: one optimizer, a list of several, or a wrapper."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import partial
from types import FunctionType, ModuleType
from typing import Any

import torch
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

from qsync.errors import CalibrationError, QSyncError, shortened

MakeOptimizer = Callable[[Any], Any]

_KEEP_NO_STATE = (torch.nn.Module, type, FunctionType, ModuleType, str, bytes)
_FOR_EXAMPLE = "for example functools.partial(torch.optim.SGD, lr=0.1)"


class Chain:
    """Optimizers that step together, each on its own parameters (Muon on matrices, AdamW on the rest)."""

    def __init__(self, optimizers: Iterable[Any]) -> None:
        self.optimizers = list(optimizers)

    def step(self) -> None:
        """Take a step with each optimizer."""
        for optimizer in self.optimizers:
            optimizer.step()

    def zero_grad(self) -> None:
        """Reset the gradients of all optimizers' parameters."""
        for optimizer in self.optimizers:
            optimizer.zero_grad()


def maker_of(optimizer: torch.optim.Optimizer) -> MakeOptimizer:
    """Return a factory of this optimizer with its defaults: momentum needs memory and time."""
    taken = inspect.signature(type(optimizer)).parameters
    return partial(type(optimizer), **{k: v for k, v in optimizer.defaults.items() if k in taken})


def made(make: MakeOptimizer, parameters: Sequence[torch.nn.Parameter]) -> Any:
    """Return the optimizer that `make` creates for these parameters, or a chain of several.

    Raises CalibrationError if `make` fails or returns no optimizer.
    """
    if not callable(make):
        raise CalibrationError(
            f"make_optimizer is a {type(make).__name__}; give a function that returns an optimizer of the "
            f"parameters it gets, or a list of optimizers, {_FOR_EXAMPLE}"
        )
    try:
        found = make(parameters)
    except QSyncError:
        raise
    except Exception as error:
        raise CalibrationError(
            f"make_optimizer failed ({type(error).__name__}: {shortened(error, 200, quote=False)}); it gets "
            "all parameters that train, in a list: give a function that makes an optimizer of these, or "
            "returns a list of optimizers, each of some of them"
        ) from error
    each = list(found) if isinstance(found, (list, tuple)) else [found]
    if not each or not all(hasattr(one, "step") and hasattr(one, "zero_grad") for one in each):
        raise CalibrationError(
            f"make_optimizer made {shortened(found)}; give a function that returns an optimizer of the "
            f"parameters it gets, or a list of optimizers, {_FOR_EXAMPLE}"
        )
    return found if each == [found] else Chain(each)


def state_bytes(optimizer: Any, parameters: Iterable[torch.Tensor]) -> int:
    """Return the bytes of all tensors that an optimizer holds, also in inner optimizers.

    Parameters and their gradients are excluded. A storage shared by several tensors counts once.
    """
    others = [tensor for p in parameters for tensor in (p, p.grad) if tensor is not None]
    known = {_storage(tensor) for other in others for tensor in _plain(other)}
    kept = {_storage(tensor): tensor for found in _tensors_in(optimizer) for tensor in _plain(found)}
    return sum(_num_bytes(tensor) for storage, tensor in kept.items() if storage not in known)


def state_by_parameter(optimizer: Any, model: torch.nn.Module) -> dict[str, int]:
    """Return the bytes of state by parameter name: tensors that a mapping of the optimizer keeps under it."""
    names: dict[torch.Tensor, str] = {p: name for name, p in model.named_parameters()}
    return {
        names[key]: sum(_num_bytes(tensor) for found in _tensors_in(slots) for tensor in _plain(found))
        for each in _reachable(optimizer)
        if isinstance(each, Mapping)
        for key, slots in each.items()
        if isinstance(key, torch.Tensor) and key in names
    }


def _tensors_in(value: Any) -> Iterator[torch.Tensor]:
    """Yield every tensor that is reachable from an object."""
    return (each for each in _reachable(value) if isinstance(each, torch.Tensor))


def _reachable(value: Any) -> Iterator[Any]:
    """Yield tensors and other objects that are reachable through attributes and containers."""
    ahead, seen = [value], dict[int, Any]()
    while ahead:
        each = ahead.pop()
        if id(each) in seen or isinstance(each, _KEEP_NO_STATE):
            continue
        seen[id(each)] = each  # keeps the object alive, since its id may be reused
        yield each
        if isinstance(each, torch.Tensor):
            continue
        if isinstance(each, Mapping):
            ahead.extend(each.values())
        elif isinstance(each, (list, tuple, set, frozenset)):
            ahead.extend(each)
        else:
            ahead.extend(getattr(each, "__dict__", {}).values())


def _plain(tensor: torch.Tensor) -> Iterator[torch.Tensor]:
    """Yield a tensor's plain tensors: itself, or codes and scales of 8-bit states, or a shard."""
    if not is_traceable_wrapper_subclass(tensor):
        yield tensor
        return
    for name in tensor.__tensor_flatten__()[0]:
        yield from _plain(getattr(tensor, name))


def _storage(tensor: torch.Tensor) -> int:
    return tensor.untyped_storage()._cdata if tensor.layout is torch.strided else id(tensor)


def _num_bytes(tensor: torch.Tensor) -> int:
    return tensor.untyped_storage().nbytes() if tensor.layout is torch.strided else tensor.nbytes
