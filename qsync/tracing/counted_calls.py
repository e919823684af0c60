"""Count a call's operations, saved tensors and backward workspace by a dry run.

For example, the derivative of `x ** 3` saves x and allocates three tensors of its size, of which it frees two
at its end. A call that no kernel of qsync replaces is run forward and backward on fake tensors, which take no
memory. Hooks see the saved tensors, and the results of ATen calls are counted. Memory that a kernel allocates
internally is not seen.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.fx
from torch._C._functorch import is_functorch_wrapped_tensor
from torch._subclasses import FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from torch.utils.flop_counter import FlopCounterMode

from qsync.operators.registry import declared
from qsync.tracing.operator_table import (
    bodies_of,
    classify,
    is_torch,
    named_operands,
    traced_shape,
    traced_size,
    traced_type,
)


@dataclass(frozen=True, slots=True)
class Counted:
    """The tensors that a call saves for backward, and its backward's workspace without gradients.

    `operands` are the saved operands, by index among `named_operands`; `result` says whether the result is
    saved. `besides` has the type and number of elements of each other saved tensor. A call whose result has
    no gradient saves nothing. `is_view`: the result shares the storage of an operand.
    """

    operands: frozenset[int]
    result: bool
    besides: tuple[tuple[str, int], ...]
    workspace_bytes: int
    has_gradient: bool = True
    is_view: bool = False


_aten = torch.ops.aten
# Calls that real derivatives run in place on new zeros, but derivatives of fake tensors out of place.
_INTO_FIRST = (_aten.scatter, _aten.scatter_add, _aten.index_add, _aten.index_put, _aten.index_copy)
_ALLOCATES_TWICE = (_aten.native_batch_norm_backward,)  # allocates its first result twice on CPUs

# Caches by call and operands, since blocks and later traces repeat equal calls.
_known: dict[tuple[Any, str], Counted | None] = {}
_known_flops: dict[tuple[Any, str], int] = {}


def counted(node: torch.fx.Node) -> Counted | None:
    """Return the saved tensors and workspace of a call's derivative, if a dry run can count them.

    Returns None for a call that depends on its operands' numbers (as `nonzero`), and for calls outside torch.
    """
    if not _can_run(node):
        return None
    key = _key(node)
    if key not in _known:
        _known[key] = _counted(node)
    return _known[key]


def counted_flops(node: torch.fx.Node) -> int:
    """Return the floating-point operations of products inside a call's forward; 0 without any.

    An LSTM cell, `torch.tensordot` and functions of the user run products. A multiply-add counts as two.
    """
    if bodies := bodies_of(node):
        return sum(counted_flops(inner) for inner in bodies[0].nodes if inner.op.startswith("call"))
    if not _can_run(node) or len(named_operands(node)) < 2:
        return 0
    key = _key(node)
    if key not in _known_flops:
        _known_flops[key] = _flops(node)
    return _known_flops[key]


def _flops(node: torch.fx.Node) -> int:
    try:
        with torch.no_grad(), FakeTensorMode(), FlopCounterMode(display=False) as counter:
            _run(node, lambda given: _stand_in(given.meta.get("example_value")))
    except Exception:  # the call needs numbers, or has no fake kernel
        return 0
    return int(counter.get_total_flops())


def _can_run(node: torch.fx.Node) -> bool:
    return is_torch(node.target) and not isinstance(node.target, torch._ops.HigherOrderOperator)


def _key(node: torch.fx.Node) -> tuple[Any, str]:
    """Return a key that is equal for calls with equal derivatives and operations."""
    order = {operand: k for k, operand in enumerate(node.all_input_nodes)}
    shown = torch.fx.map_arg(
        (node.args, node.kwargs), lambda given: (order[given], _shown(given.meta.get("example_value")))
    )
    return node.target, repr(shown)


def _run(node: torch.fx.Node, stand_in: Callable[[torch.fx.Node], Any]) -> Any:
    """Run a call on stand-ins of its operands."""
    args, kwargs = torch.fx.map_arg((node.args, node.kwargs), stand_in)
    call = getattr(torch.Tensor, node.target) if isinstance(node.target, str) else node.target
    return call(*args, **kwargs)


def _counted(node: torch.fx.Node) -> Counted | None:
    stand_ins: list[Any] = []  # one for each of `named_operands`
    packed: list[torch.Tensor] = []
    of_node: dict[torch.fx.Node, Any] = {}
    repeats = declared(classify(node)[0]).counts_repeats  # a square has two factors and so two gradients

    def stand_in(given: torch.fx.Node) -> Any:
        if repeats or given not in of_node:
            of_node[given] = _stand_in(given.meta.get("example_value"))
        stand_ins.append(of_node[given])
        return of_node[given]

    def pack(tensor: torch.Tensor) -> torch.Tensor:
        packed.append(tensor)
        return tensor

    # A checkpoint around the model has hooks that count saved tensors. These hooks shield the checkpoint's.
    saving = torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor)
    # torch's anomaly mode keeps tensors alive and checks fake tensors for NaN.
    plain = torch.autograd.set_detect_anomaly(False)
    try:
        with torch.inference_mode(False), torch.enable_grad(), plain, FakeTensorMode(), saving:
            results = list(filter(_is_tensor, tree_leaves(_run(node, stand_in))))
            trained = list(filter(_is_trained, results))
            workspace_bytes = _backward_bytes(trained, tree_leaves(stand_ins)) if trained else 0
    except Exception:  # any error of a call that needs numbers, or has no fake kernel
        return None
    if not trained:
        return Counted(frozenset(), False, (), 0, has_gradient=False)
    places = {_storage(value): k for k, given in enumerate(stand_ins) for value in tree_leaves(given)
              if _is_tensor(value)}  # fmt: skip
    saved = {_storage(tensor): tensor for tensor in packed}
    own = _storage(results[0])
    return Counted(
        operands=frozenset(places[storage] for storage in saved if storage in places),
        result=own in saved and own not in places,
        besides=tuple(
            (traced_type(tensor), tensor.untyped_storage().nbytes() // tensor.itemsize)
            for storage, tensor in saved.items() if storage not in places and storage != own
        ),
        workspace_bytes=workspace_bytes,
        is_view=own in places,
    )  # fmt: skip


def _backward_bytes(results: list[torch.Tensor], operands: list[Any]) -> int:
    """Return the peak bytes of backward, without the gradients of results and operands."""
    # Autograd frees only gradients that it computed itself, so the results get theirs through a negation.
    negatives = [value.neg() for value in results]
    gradients = [torch.empty_like(value) for value in negatives]
    with _Allocations() as allocations:
        leaves = list(filter(_is_trained, operands))
        found = torch.autograd.grad(negatives, leaves, gradients, allow_unused=True)
    entered = dict(allocations.made[: len(results)])
    storages = {_storage(each): each.untyped_storage() for each in found if each is not None}
    kept: int = sum(each.nbytes() for storage, each in storages.items() if storage not in entered)
    return max(0, int(allocations.peak_bytes) - kept - sum(entered.values()))


def _storage(tensor: torch.Tensor) -> int:
    return int(tensor.untyped_storage()._cdata)


class _Allocations(TorchDispatchMode):  # type: ignore[no-untyped-call]  # the library is untyped
    """A mode that counts the bytes of live tensors allocated within it."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.peak_bytes = 0
        self.made: list[tuple[int, int]] = []  # (storage, bytes) of each allocation, in order
        self._alive: dict[int, int] = {}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        given = {_storage(value) for value in tree_leaves((args, kwargs)) if _is_tensor(value)}
        result = func(*args, **(kwargs or {}))
        kind = getattr(func, "overloadpacket", None)
        if kind in _INTO_FIRST:
            self._alive.pop(_storage(args[0]), None)
        for value in filter(_is_tensor, tree_leaves(result)):
            storage = value.untyped_storage()
            if storage._cdata not in self._alive and storage._cdata not in given:
                self._alive[storage._cdata] = storage.nbytes()
                self.made.append((storage._cdata, storage.nbytes()))
                weakref.finalize(storage, self._alive.pop, storage._cdata, None)
        hidden = result[0].nbytes if kind in _ALLOCATES_TWICE and result[0].device.type == "cpu" else 0
        self.peak_bytes = max(self.peak_bytes, sum(self._alive.values()) + hidden)
        return result


def _stand_in(value: Any) -> Any:
    """Return a stand-in of an argument: for a tensor, a new one of equal properties."""
    if isinstance(value, (tuple, list)):
        return type(value)(map(_stand_in, value))
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
    return made.requires_grad_(value.requires_grad)


def _shown(value: Any) -> Any:
    """Return the properties of an argument that determine a call's derivative."""
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
