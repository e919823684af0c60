"""Save the state of training before planning runs steps, and restore it bitwise: `undisturbed`.

Planning calls the user's model, its hooks and its loss many times. All state that they can write to is saved:
weights, buffers, gradients, attributes, containers, counters, random states. Hooks that step an optimizer
inside backward are removed during planning, which has an optimizer of its own.
"""

from __future__ import annotations

import random
from collections import OrderedDict, deque
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, field
from functools import partial
from types import CellType, FunctionType
from typing import Any

import numpy as np
import torch
from torch._subclasses import FakeTensor
from torch.nn.modules import module as modules
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

from qsync.errors import CalibrationError, UnsupportedError, shortened
from qsync.tracing.reachable import (
    attributes_of,
    generator_state,
    globals_written,
    is_filled,
    is_users,
    reachable,
    slots_of,
)
from qsync.tracing.suspended_hooks import SuspendedHooks

# Tensors outside the model (averaged weights, optimizer state) are copied up to the sum of _COPIED_BYTES and
# _COPIED_MODELS times the model's bytes. Others are only watched, as is a large frozen model under adapters.
_COPIED_BYTES, _COPIED_MODELS = 2**28, 3
_MISSING = object()


class HeldState:
    """A snapshot of all state that calls of a model, its hooks and a loss can change.

    Without `weights`, trained parameters are left out. `outer` are earlier snapshots, whose equal copies are
    shared to save memory.

    >>> held = HeldState(model, [loss]); loss().backward(); held.restore()
    """

    def __init__(
        self,
        model: torch.nn.Module,
        roots: Iterable[object],
        outer: Iterable[HeldState] = (),
        weights: bool = True,
        stop: Callable[[object], bool] = lambda _: False,
    ) -> None:
        self._outer, self._undo = list(outer), list[Callable[[], object]]()
        self._copies: dict[int, tuple[torch.Tensor, torch.Tensor]] = {}  # storage -> (bytes, copy)
        self._watched: list[tuple[torch.Tensor, int]] = []  # (tensor, version)
        trained = [p for p in model.parameters() if p.requires_grad]
        frozen = [p for p in model.parameters() if not p.requires_grad]
        buffers = list(model.buffers())
        trained_bytes = sum(p.nbytes for p in trained)
        is_small = sum(p.nbytes for p in frozen) <= max(trained_bytes, _COPIED_BYTES)
        self._copied = {id(tensor) for tensor in (*trained, *buffers, *(frozen if is_small else ()))}
        self._too_large = set() if is_small else {id(p) for p in frozen}
        own_bytes = sum(tensor.nbytes for tensor in (*trained, *buffers))
        self._room_bytes = _COPIED_BYTES + _COPIED_MODELS * own_bytes
        known = set() if weights else {id(p) for p in trained}
        self._found = []  # keeps objects alive, since ids identify them
        for found in reachable([model, *roots], known, stop):
            self._found.append(found)
            self._hold(found)

    def restore(self) -> None:
        """Restore all state; raise UnsupportedError if a tensor too large to copy has changed."""
        with torch.no_grad():
            for undo in self._undo:
                undo()
            for numbers, copy in self._copies.values():
                numbers.copy_(copy)
        for tensor, version in self._watched:
            if tensor._version != version:
                raise UnsupportedError(
                    f"a call of the model wrote to a tensor of shape {tuple(tensor.shape)}, too large to be "
                    "put back after planning: let no hook and no loss_fn write to it before training"
                )

    def _hold(self, found: Any) -> None:
        if isinstance(found, torch.Tensor):
            self._hold_tensor(found)
        elif isinstance(found, np.ndarray):
            if found.dtype != object and found.flags.writeable and self._has_room(found.nbytes):
                self._undo.append(partial(np.copyto, found, found.copy()))
        elif isinstance(found, (dict, list, set, deque)):
            self._undo.append(partial(_restore_container, found, _elements(found)))
        elif isinstance(found, CellType):
            if is_filled(found):
                self._undo.append(partial(setattr, found, "cell_contents", found.cell_contents))
        elif isinstance(found, FunctionType):
            of = found.__globals__
            written = {name: of.get(name, _MISSING) for name in globals_written(found)}
            self._undo.append(partial(_restore_names, of, written))
        elif (generator := generator_state(found)) is not None:
            state, set_state = generator
            self._undo.append(partial(set_state, state))
        elif isinstance(found, type):
            if is_users(found.__module__):
                attributes = attributes_of(found) or {}
                self._undo += [  # an Enum lets nobody else write its members
                    partial(type.__setattr__, found, name, value) for name, value in attributes.items()
                ]
        elif is_users(type(found).__module__):  # object.__setattr__ also writes frozen dataclasses' slots
            self._undo += [
                partial(object.__setattr__, found, name, getattr(found, name)) for name in slots_of(found)
            ]

    def _hold_tensor(self, tensor: torch.Tensor) -> None:
        if tensor.is_meta or isinstance(tensor, FakeTensor):
            return
        if is_traceable_wrapper_subclass(tensor):
            for name in tensor.__tensor_flatten__()[0]:
                self._hold_tensor(getattr(tensor, name))
            return
        if tensor.layout is torch.sparse_coo:
            self._hold_tensor(tensor._indices())
            tensor = tensor._values()
        elif tensor.layout is not torch.strided:
            if tensor.layout in (torch.sparse_csr, torch.sparse_csc, torch.sparse_bsr, torch.sparse_bsc):
                self._hold_tensor(tensor.values())
            return
        if not tensor.is_inference():
            self._undo.append(partial(_restore_place, tensor, tensor.detach(), tensor.requires_grad))
        storage = tensor.untyped_storage()
        if storage._cdata in self._copies:
            return
        is_copied = id(tensor) in self._copied or (
            id(tensor) not in self._too_large and self._has_room(storage.nbytes())
        )
        if not is_copied:
            if not tensor.is_inference():
                self._watched.append((tensor, tensor._version))
            return
        numbers = torch.empty(0, dtype=torch.uint8, device=tensor.device).set_(storage)
        for one in self._outer:
            _, copy = one._copies.get(storage._cdata, (None, None))
            if copy is not None and torch.equal(copy, numbers):
                break
        else:
            copy = numbers.clone()
        self._copies[storage._cdata] = numbers, copy

    def _has_room(self, num_bytes: int) -> bool:
        self._room_bytes -= num_bytes
        return self._room_bytes >= 0


def _elements(of: Any) -> list[Any]:
    """Return the elements of a dict, list, set or deque, bypassing methods of a subclass."""
    if isinstance(of, dict):
        return list((OrderedDict if isinstance(of, OrderedDict) else dict).items(of))
    return list(of)


def _restore_container(now: Any, before: list[Any]) -> None:
    """Restore the elements of a dict, list, set or deque in place, if they changed."""
    elements = _elements(now)
    if isinstance(now, dict):
        if [(id(key), id(value)) for key, value in elements] != [
            (id(key), id(value)) for key, value in before
        ]:
            kind = OrderedDict if isinstance(now, OrderedDict) else dict
            kind.clear(now)
            for key, value in before:
                kind.__setitem__(now, key, value)
    elif [*map(id, elements)] == [*map(id, before)]:
        return
    elif isinstance(now, list):
        list.__setitem__(now, slice(None), before)
    elif isinstance(now, set):
        set.clear(now)
        set.update(now, before)
    else:
        deque.clear(now)
        deque.extend(now, before)


def _restore_names(of: dict[str, Any], before: dict[str, Any]) -> None:
    for name, value in before.items():
        if value is _MISSING:
            of.pop(name, None)
        else:
            of[name] = value


def _restore_place(tensor: torch.Tensor, before: torch.Tensor, requires_grad: bool) -> None:
    """Restore a tensor's storage (after `p.data = ...`) and its `requires_grad`."""
    same = tensor.data_ptr() == before.data_ptr() and tensor.dtype is before.dtype
    if not same or tensor.shape != before.shape or tensor.stride() != before.stride():
        tensor.data = before
    if tensor.is_leaf and tensor.requires_grad != requires_grad:
        tensor.requires_grad_(requires_grad)


@dataclass(slots=True)
class _Region:
    """An open context of `undisturbed`."""

    model: torch.nn.Module
    held: HeldState
    hooks: SuspendedHooks
    # Leaf tensors outside the model -> their gradients before the context.
    outside: dict[torch.Tensor, torch.Tensor | None] = field(default_factory=dict)
    was_called: bool = False


_open: ContextVar[tuple[_Region, ...]] = ContextVar("open", default=())


@contextmanager
def undisturbed(model: torch.nn.Module, *roots: object) -> Iterator[None]:
    """Restore the state of training bitwise after the context, in which the model may run backward.

    The state is all that the model, its hooks and `roots` (a loss) can reach (`reachable`), gradients and
    hooks of other tensors that the loss trains (`leaving_gradients`), and random states. Within the context,
    hooks that step optimizers, post-accumulate hooks and torch's anomaly mode are off.
    """
    with (
        torch.inference_mode(False),
        torch.enable_grad(),
        torch.autograd.set_detect_anomaly(False),
        _held(model, roots),
    ):
        yield


@contextmanager
def _held(model: torch.nn.Module, roots: Iterable[object]) -> Iterator[None]:
    if any(parameter.is_inference() for parameter in model.parameters()):
        raise CalibrationError(
            f"parameters of {type(model).__name__} were made in inference mode, and cannot train; make the "
            "model outside of torch.inference_mode"
        )
    hooks = SuspendedHooks(model)
    called = [hooks.others, torch._C._autograd._top_saved_tensors_default_hooks(True)]
    called += [getattr(modules, f"_global_{name}hooks") for name in ("forward_", "forward_pre_", "backward_")]
    held = HeldState(model, [*roots, called], [one.held for one in _open.get()], stop=hooks.has)
    region = _Region(model, held, hooks)
    token = _open.set((*_open.get(), region))
    drawn, numpy_drawn = random.getstate(), np.random.get_state(legacy=False)
    gradients = [(parameter, parameter.grad) for parameter in model.parameters()]
    devices = sorted({p.device.index or 0 for p in model.parameters() if p.device.type == "cuda"})
    try:
        with torch.random.fork_rng(devices=devices):
            hooks.suspend()
            for parameter, _ in gradients:
                parameter.grad = None
            yield
    finally:
        _open.reset(token)
        random.setstate(drawn)
        np.random.set_state(numpy_drawn)
        hooks.restore()
        for tensor, _ in (*region.outside.items(), *gradients):
            tensor.grad = None
        try:
            held.restore()
        finally:
            for tensor, gradient in (*region.outside.items(), *gradients):
                if gradient is None or gradient.shape == tensor.shape:  # else the parameter was resized
                    tensor.grad = gradient


def first_call(model: torch.nn.Module, call: Callable[[], object]) -> None:
    """Run a model's first call in the innermost open `undisturbed`, unless an outer one ran it.

    The first batch may initialize state (a codebook, scales, masks) that the planned later calls have. On the
    meta device no call is made. Raises CalibrationError if torch cannot run the call.
    """
    regions = [region for region in _open.get() if region.model is model]
    if any(region.was_called for region in regions) or any(p.is_meta for p in model.parameters()):
        return
    try:
        call()
    except RuntimeError as error:
        raise CalibrationError(
            f"{type(model).__name__} fails on the example batch ({shortened(error, 300, quote=False)}); give "
            "one that it trains on"
        ) from error
    regions[-1].was_called = True


def leaving_gradients(loss: torch.Tensor) -> torch.Tensor:
    """Register a loss's leaf tensors, whose gradients `undisturbed` restores; return the loss.

    The first loss within the context determines the leaves.
    """
    regions = [region for region in _open.get() if not region.outside]
    if regions and isinstance(loss, torch.Tensor) and loss.grad_fn is not None:
        for leaf in _leaves_of(loss):
            for region in regions:
                region.outside[leaf] = leaf.grad
            leaf.grad = None  # backward would add to it in place
            regions[0].hooks.suspend_of(leaf)
    return loss


def _leaves_of(loss: torch.Tensor) -> Iterator[torch.Tensor]:
    """Yield the leaf tensors that accumulate gradients in the backward of a loss."""
    ahead, seen = [loss.grad_fn], set[Any]()
    while ahead:
        node: Any = ahead.pop()
        if node is not None and node not in seen:
            seen.add(node)
            if hasattr(node, "variable"):
                yield node.variable
            ahead.extend(following for following, _ in node.next_functions)
