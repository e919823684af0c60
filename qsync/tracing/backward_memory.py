"""The memory that torch's derivative of a call needs besides the gradients: counted, not looked up.

The derivative of `x ** 3` makes three tensors of x's size, and two of them are gone when it ends. A call that
no kernel of qsync replaces is run forward and backward on fake tensors, which take no memory, and what its
ATen calls return is counted. What a kernel allocates inside itself is not seen.
"""

from __future__ import annotations

import weakref
from typing import Any

import torch
import torch.fx
from torch._C._functorch import is_functorch_wrapped_tensor
from torch._subclasses import FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from qsync.tracing.operator_table import is_torch, traced_shape, traced_size

_known: dict[
    tuple[Any, str], int
] = {}  # by call and operands: blocks, and graphs traced anew, have equal ones


def backward_bytes(node: torch.fx.Node) -> int:
    """Return the most bytes alive in the backward of a call, besides its operands' gradients.

    0 of a call that needs its operands' numbers, as those that return as many elements as they find, and of
    one that is not torch's own.
    """
    if not is_torch(node.target) or isinstance(node.target, torch._ops.HigherOrderOperator):
        return 0
    shown = torch.fx.map_arg((node.args, node.kwargs), lambda given: _shown(given.meta.get("example_value")))
    key = (node.target, repr(shown))
    if key not in _known:
        _known[key] = _counted(node)
    return _known[key]


def _counted(node: torch.fx.Node) -> int:
    leaves: list[torch.Tensor] = []
    try:
        with torch.inference_mode(False), torch.enable_grad(), FakeTensorMode(), _own_saved_tensors():
            args, kwargs = torch.fx.map_arg((node.args, node.kwargs), lambda given: _stand_in(given, leaves))
            call = getattr(torch.Tensor, node.target) if isinstance(node.target, str) else node.target
            results = [value for value in tree_leaves(call(*args, **kwargs)) if _is_trained(value)]
            # Autograd lets go of a gradient that it made itself, here that of the negative, when it is read.
            negatives = [value.neg() for value in results]
            gradients = [torch.empty_like(value) for value in negatives]
            with _Allocations() as allocations:
                found = torch.autograd.grad(negatives, leaves, gradients, allow_unused=True)
    except Exception:  # whatever a call raises that needs numbers, or has no kernel for fake tensors
        return 0
    entered = dict(allocations.made[: len(results)])
    storages = {each.untyped_storage()._cdata: each.untyped_storage() for each in found if each is not None}
    kept: int = sum(each.nbytes() for storage, each in storages.items() if storage not in entered)
    return max(0, int(allocations.peak_bytes) - kept - sum(entered.values()))


def _own_saved_tensors() -> torch.autograd.graph.saved_tensors_hooks:
    """Return hooks that save as autograd does: a checkpoint around the model has some that count."""
    return torch.autograd.graph.saved_tensors_hooks(lambda tensor: tensor, lambda tensor: tensor)


class _Allocations(TorchDispatchMode):  # type: ignore[no-untyped-call]  # the library is untyped
    """Count the bytes of the tensors that are made inside, while they are alive."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.peak_bytes = 0
        self.made: list[tuple[int, int]] = []  # the storage and the bytes of each, in order
        self._alive: dict[int, int] = {}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        given = {value.untyped_storage()._cdata for value in tree_leaves((args, kwargs)) if _is_tensor(value)}
        result = func(*args, **(kwargs or {}))
        for value in filter(_is_tensor, tree_leaves(result)):
            storage = value.untyped_storage()
            if storage._cdata not in self._alive and storage._cdata not in given:
                self._alive[storage._cdata] = storage.nbytes()
                self.made.append((storage._cdata, storage.nbytes()))
                weakref.finalize(storage, self._alive.pop, storage._cdata, None)
        self.peak_bytes = max(self.peak_bytes, sum(self._alive.values()))
        return result


def _stand_in(node: torch.fx.Node, leaves: list[torch.Tensor]) -> Any:
    """Return what stands for an argument: of a tensor one like it, with memory of its own."""
    value = node.meta.get("example_value")
    if isinstance(value, (tuple, list)):
        return type(value)(_like(each, leaves) for each in value)
    return _like(value, leaves)


def _like(value: Any, leaves: list[torch.Tensor]) -> Any:
    if isinstance(value, torch.SymInt):
        return traced_size(value)
    if isinstance(value, (torch.SymFloat, torch.SymBool)):
        return value.node.hint
    if not isinstance(value, torch.Tensor):
        return value
    if is_functorch_wrapped_tensor(value):
        raise TypeError("a tensor of torch.vmap has a hidden dimension")
    strides = tuple(map(traced_size, value.stride()))
    device = "cpu" if value.is_meta else value.device
    made = torch.empty_strided(traced_shape(value), strides, dtype=value.dtype, device=device)
    if value.requires_grad:
        leaves.append(made.requires_grad_())
    return made


def _shown(value: Any) -> Any:
    """Return what of an argument decides how its derivative is computed."""
    if isinstance(value, (tuple, list)):
        return [_shown(each) for each in value]
    if isinstance(value, torch.Tensor) and not is_functorch_wrapped_tensor(value):
        strides = tuple(map(traced_size, value.stride()))
        return traced_shape(value), strides, value.dtype, value.device, value.requires_grad
    return traced_size(value) if isinstance(value, torch.SymInt) else value


def _is_tensor(value: Any) -> bool:
    return isinstance(value, torch.Tensor)


def _is_trained(value: Any) -> bool:
    return isinstance(value, torch.Tensor) and value.requires_grad
