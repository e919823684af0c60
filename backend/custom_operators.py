"""Lowered operators as custom operators of torch: `torch.ops.qsync.linear` and so on.

torch.export, AOTAutograd and Inductor see one opaque call with a list of tensors and a text. The text holds
the rest: operator, precision, other arguments, and the type, shape and strides of each tensor. The custom
operator calls the usual kernel. A trial on tensors of ones runs the operator forward and backward once:
autograd shows which tensors it saves. The custom operator returns these tensors beside its result. The
trial's autograd graph computes the gradients from them.
"""

from __future__ import annotations

import ast
import operator
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import cache, partial
from threading import Lock
from types import NoneType
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.autograd.graph import get_gradient_edge, saved_tensors_hooks

from qsync.backend.autograd import is_replayed, no_second_derivative
from qsync.backend.casts.epilogues import Activation
from qsync.backend.compressed_saves.saved_ops import saving
from qsync.backend.devices.kernel_timing import apart
from qsync.backend.encoding import Encoded, Operand, encode
from qsync.backend.kernels.linear import DTYPES
from qsync.backend.selection.kernel_selection import Kernels, select
from qsync.errors import UnsupportedError
from qsync.operators.precision import Precision, is_encoded
from qsync.operators.registry import FORMS, PRECISIONS_BY_KIND, REPLACED

_CAST, _KERNEL, _SAVING, _FOLLOWING = "cast", "kernel", "saving", "following"
_SCHEMA = "(Tensor[] tensors, str call) -> Tensor[]"
_BELOW = (torch._C.DispatchKey.AutogradFunctionality, torch._C.DispatchKey.AutogradOther,
          torch._C.DispatchKey.ADInplaceOrView)  # fmt: skip


class OpaqueKernels:
    """The kernels of a device as custom operators, for graphs that torch traces again."""

    keeps_copies = False
    plain_casts = ("fp32", "bf16")
    replaced_in_bf16 = ()

    def __init__(self, kernels: Kernels) -> None:
        self._kernels, self.replaced_in_fp32 = kernels, kernels.replaced_in_fp32

    @property
    def sixteen_bit(self) -> str | None:
        """Return the device's 16-bit float for tensors between operators."""
        return self._kernels.sixteen_bit

    def cast(self, tensor: Tensor, target: str) -> Tensor | Encoded:
        """Return a tensor in another type, through torch's own conversion, which Inductor fuses."""
        if not is_encoded(target):
            return tensor.to(DTYPES[target])
        data, *scale = self._run(_CAST, (_CAST, target), tensor.detach())
        return Encoded(data, scale[0] if scale else None, target.partition("_")[2] or "plain")

    def kernel(self, kind: str, precision: Precision) -> Callable[..., Tensor]:
        """Return the custom operator of a kind of operator in a precision."""
        self._kernels.kernel(kind, precision)  # raises if there is no kernel

        def run(target: Callable[..., Tensor], out_type: str, *args: Any, **kwargs: Any) -> Tensor:
            head = (_KERNEL, kind, str(precision), out_type, _name(target))
            return self._run(kind, head, *args, **kwargs)[0]

        return run

    def saving(self, kind: str, form: str) -> Callable[..., Tensor]:
        """Return the custom operator of a kind that saves less, in this form."""
        return lambda target, *args, **kwargs: self._run(
            kind, (_SAVING, kind, form, _name(target)), *args, **kwargs
        )[0]

    def in_lowered_graphs(self, kind: str) -> Callable[..., Tensor]:
        """Return the custom operator that replaces a kind listed in `REPLACED`."""
        return lambda target, *args, **kwargs: self._run(
            kind, (_FOLLOWING, kind, _name(target)), *args, **kwargs
        )[0]

    def _run(self, name: str, head: tuple[str, ...], *args: Any, **kwargs: Any) -> list[Tensor]:
        tensors: list[Tensor] = []
        tree = _packed((args, kwargs), tensors)
        layouts = tuple(
            (str(t.dtype).removeprefix("torch."), *(tuple(map(int, n)) for n in (t.shape, t.stride())),
             torch.is_grad_enabled() and t.requires_grad)
            for t in tensors
        )  # fmt: skip
        call = repr((head, tree, str(self._kernels.device), layouts))
        _call_of(call)  # raises for a call that the kernel does not support
        return getattr(torch.ops.qsync, name)(tensors, call)  # type: ignore[no-any-return]


_TREES: dict[str, Any] = {kind.__name__: kind for kind in (Operand, Encoded, Activation, tuple, list, dict)}


def _packed(value: Any, tensors: list[Tensor]) -> Any:
    """Return an argument as literals, with each tensor replaced by its index in `tensors`."""
    if isinstance(value, (bool, int, float, str, torch.SymInt, NoneType)):
        return int(value) if isinstance(value, torch.SymInt) else value
    if isinstance(value, Tensor):
        tensors.append(value)
        return ("tensor", len(tensors) - 1)
    kind = "tuple" if isinstance(value, torch.Size) else type(value).__name__
    if kind not in _TREES:
        raise UnsupportedError(
            f"a call with a {kind} argument cannot become a custom operator: keep this operator in fp32"
        )
    parts = (value.data, value.scale, value.layout) if isinstance(value, Encoded) else value
    parts = value.items() if isinstance(value, dict) else parts
    return (kind, *(_packed(part, tensors) for part in parts))


def _unpacked(value: Any, tensors: Sequence[Tensor]) -> Any:
    if not isinstance(value, tuple):
        return value
    kind, *parts = value
    if kind == "tensor":
        return tensors[parts[0]]
    found = [_unpacked(part, tensors) for part in parts]
    return _TREES[kind](found) if kind in ("tuple", "list", "dict") else _TREES[kind](*found)


def _name(target: Callable[..., Any]) -> str:
    """Return the name from which `_target` finds a torch function again."""
    name = torch.overrides.resolve_name(target) or f"{target.__module__}.{target.__name__}"
    if isinstance(target, torch._ops.OpOverloadPacket):
        name = f"torch.ops.{target}"
    if _target(name) is not target:
        raise UnsupportedError(f"{name} cannot become a custom operator: keep this operator in fp32")
    return name


def _target(name: str) -> Any:
    """Return the function of this name, from torch or Python's operator module only."""
    root, *path = name.split(".")
    found: Any = {"torch": torch, "_operator": operator}.get(root)
    for part in path:
        found = getattr(found, part, None)
    return found


def _function(head: tuple[str, ...], device: str) -> Callable[..., Any]:
    """Return the plain function that a custom operator wraps."""
    kind, *rest = head
    if kind == _CAST:
        return lambda tensor: encode(tensor, rest[0])
    target = _target(rest[-1])
    if kind == _KERNEL:
        return partial(select(device).kernel(rest[0], rest[1]), target, rest[2])
    return partial(
        saving(rest[0], rest[1]) if kind == _SAVING else Kernels.in_lowered_graphs(rest[0]), target
    )


class _Layout(NamedTuple):
    """A tensor's type, shape and strides, known before the tensor exists."""

    dtype: torch.dtype
    shape: tuple[int, ...]
    strides: tuple[int, ...]
    wanted: bool = False  # whether its gradient is wanted

    @classmethod
    def of(cls, tensor: Tensor) -> _Layout:
        """Return the layout of a tensor."""
        is_expanded = 0 in tensor.stride() and tensor.numel() > 0
        laid = torch.empty(tensor.shape, device="meta") if is_expanded else tensor
        return cls(tensor.dtype, tuple(tensor.shape), laid.stride())

    def empty(self, device: torch.device | str) -> Tensor:
        """Return a tensor of this layout."""
        return torch.empty_strided(self.shape, self.strides, dtype=self.dtype, device=device)

    def ones(self, device: str) -> Tensor:
        """Return ones in this layout; integers are zeros, which are valid indices everywhere."""
        last = sum((size - 1) * stride for size, stride in zip(self.shape, self.strides, strict=True))
        size, is_index = (
            (last + 1) * (0 not in self.shape),
            not (self.dtype.is_floating_point or self.dtype == torch.bool),
        )
        memory = torch.full((size,), 1 - is_index, device=device).to(self.dtype)
        return memory.as_strided(self.shape, self.strides)

    def taken(self, tensor: Tensor, others: Sequence[Tensor] = ()) -> Tensor:
        """Return a tensor in this layout: itself, or a copy if strides differ or memory is shared."""
        if tuple(tensor.shape) != self.shape or tensor.dtype != self.dtype:
            raise UnsupportedError(
                f"this operator was traced for {self.dtype} {list(self.shape)} and got {tensor.dtype} "
                f"{list(tensor.shape)}: trace the model again at these shapes"
            )
        pairs = zip(self.shape, self.strides, tensor.stride(), strict=True)
        lies = all(size < 2 or mine == its for size, mine, its in pairs)
        if lies and not any(_shares(tensor, other) for other in others):
            return tensor
        copied = self.empty(tensor.device)
        # one write per stored element of an expanded tensor
        written = tuple(slice(None if stride else 1) for stride in self.strides)
        copied[written].copy_(tensor[written])
        return copied


def _shares(tensor: Tensor, other: Tensor) -> bool:
    """Return whether two tensors share memory; kernels return no view of another element size."""
    storage, its = tensor.untyped_storage(), other.untyped_storage()
    return storage.nbytes() > 0 and storage.data_ptr() == its.data_ptr()


class _Call:
    """A call without its tensors; a trial finds its results and saved tensors."""

    def __init__(self, text: str) -> None:
        self.head, self._tree, self.device, layouts = ast.literal_eval(text)
        self._inputs = [_Layout(getattr(torch, dtype), *rest) for dtype, *rest in layouts]
        self._function = _function(self.head, self.device)
        self._lock = Lock()
        self._now: Sequence[Tensor] = ()  # tensors that the recorded graph reads in the current call
        self.bases: list[int] = []  # indices of inputs, then outputs, that hold tensors for backward
        self.outputs: list[_Layout] = []
        self.given: list[int] = []  # indices of inputs that get a gradient
        self.gradients: list[_Layout] = []
        apart(self._try)

    def _try(self) -> None:
        """Run the call once on ones to find its results, saved tensors and gradients."""
        gpus = [torch.device(self.device)] if self.device.startswith("cuda") else []
        with torch.random.fork_rng(devices=gpus):
            made = [one.ones(self.device) for one in self._inputs]
            inputs, results, saved = self._recorded(made)
            if not all(map(torch.equal, made, [one.ones(self.device) for one in self._inputs])):
                raise UnsupportedError(
                    f"{self.head[1]} writes to its arguments, which custom operators must not do: leave out "
                    "save_less"
                )
            self._plan(made, results, saved)
            self._leaves = [x for x in inputs if x.requires_grad]
            if self._leaves and results[0].requires_grad:
                self._edge = get_gradient_edge(results[0])
                found = self._differentiated(torch.ones_like(results[0]), saved)
                wanted = [k for k, one in enumerate(self._inputs) if one.wanted]
                self.given = [k for k, g in zip(wanted, found, strict=True) if g is not None]
                self.gradients = [_Layout.of(g) for g in found if g is not None]
        for tensor in made:  # the graph needs only their shapes
            tensor.untyped_storage().resize_(0)

    def _plan(self, inputs: list[Tensor], results: list[Tensor], saved: list[Tensor]) -> None:
        """Find each saved tensor's place: an input, a result, or an additional output."""
        every = [*inputs, *results]
        self._fresh: list[int] = []  # saved tensors that become additional outputs
        self._saved: list[tuple[int, _Layout, int]] = []  # base, layout, offset from the base's
        for number, tensor in enumerate(saved):
            layout = _Layout(tensor.dtype, tuple(tensor.shape), tensor.stride())
            position = next((k for k, base in enumerate(every) if _shares(tensor, base)), len(every))
            if position == len(every):
                layout = _Layout.of(tensor)
                every.append(tensor)
                self._fresh.append(number)
            if position not in self.bases:
                self.bases.append(position)
            offset = int(tensor.storage_offset() - every[position].storage_offset())
            self._saved.append((self.bases.index(position), layout, offset))
        self.outputs = [_Layout.of(tensor) for tensor in every[len(inputs) :]]
        self._bases = [[*self._inputs, *self.outputs][k] for k in self.bases]

    def _recorded(self, tensors: Sequence[Tensor]) -> tuple[list[Tensor], list[Tensor], list[Tensor]]:
        """Run under autograd; return its inputs, its results and the tensors it saves."""
        inputs = [
            tensor.detach().requires_grad_(one.wanted)
            for tensor, one in zip(tensors, self._inputs, strict=True)
        ]
        saved: list[Tensor] = []

        def pack(tensor: Tensor) -> int:
            saved.append(tensor.detach())
            return len(saved) - 1

        hooks = saved_tensors_hooks(pack, lambda number: self._now[number])
        differentiable = any(one.wanted for one in self._inputs)
        with _recording(), torch.set_grad_enabled(differentiable), hooks:
            args, kwargs = _unpacked(self._tree, inputs)
            result = self._function(*args, **kwargs)
        if isinstance(result, Encoded):
            return inputs, [result.data] if result.scale is None else [result.data, result.scale], saved
        return inputs, [result], saved

    def gives(self, needed: Sequence[bool]) -> bool:
        """Return whether the trace covers the gradients of all inputs that require one."""
        return all(one.wanted or not need for one, need in zip(self._inputs, needed, strict=True))

    def run(self, tensors: Sequence[Tensor]) -> list[Tensor]:
        """Return the results, and the additional tensors that backward needs."""
        tensors = [one.taken(tensor) for one, tensor in zip(self._inputs, tensors, strict=True)]
        _, results, saved = self._recorded(tensors)
        if len(saved) != len(self._saved):
            raise UnsupportedError(
                f"{self.head[1]} saves other tensors for these values than when it was traced: leave out "
                "save_less"
            )
        outputs = [*results, *(saved[number] for number in self._fresh)]
        found: list[Tensor] = []
        for one, output in zip(self.outputs, outputs, strict=True):
            found.append(one.taken(output.detach(), (*tensors, *found)))
        return found

    def differentiate(self, gradient: Tensor, *bases: Tensor) -> list[Tensor]:
        """Return the gradients of the inputs that require one."""
        bases = tuple(one.taken(base) for one, base in zip(self._bases, bases, strict=True))
        saved = [
            bases[k].view(dtype).as_strided(shape, strides, bases[k].storage_offset() + offset)
            for k, (dtype, shape, strides, _), offset in self._saved
        ]
        found = self._differentiated(gradient, saved)
        taken: list[Tensor] = []
        for one, g in zip(self.gradients, (g for g in found if g is not None), strict=True):
            taken.append(one.taken(g, (gradient, *bases, *taken)))
        return taken

    def _differentiated(self, gradient: Tensor, saved: Sequence[Tensor]) -> Sequence[Tensor | None]:
        with self._lock:
            self._now = saved
            try:
                return torch.autograd.grad(
                    self._edge, self._leaves, gradient, retain_graph=True, allow_unused=True
                )
            finally:
                self._now = ()


@contextmanager
def _recording() -> Iterator[None]:
    """Enable autograd inside a custom operator, where torch has turned it off."""
    excluded = torch._C._dispatch_tls_local_exclude_set()
    for key in _BELOW:
        excluded = excluded.remove(key)
    token = is_replayed.set(True)
    try:
        with torch._C._ForceDispatchKeyGuard(torch._C._dispatch_tls_local_include_set(), excluded):
            yield
    finally:
        is_replayed.reset(token)


_call_of = cache(_Call)


def _empty(tensors: list[Tensor], layouts: list[_Layout]) -> list[Tensor]:
    return [layout.empty(tensors[0].device) for layout in layouts]


def _keep(ctx: Any, inputs: tuple[list[Tensor], str], output: list[Tensor]) -> None:
    tensors, ctx.call = inputs
    every, ctx.num_tensors = [*tensors, *output], len(tensors)
    ctx.set_materialize_grads(False)
    ctx.mark_non_differentiable(*output[1:])
    ctx.save_for_backward(*(every[k] for k in _call_of(ctx.call).bases))


def _differentiate(name: str, ctx: Any, gradients: list[Tensor | None]) -> tuple[list[Tensor | None], None]:
    found: list[Tensor | None] = [None] * ctx.num_tensors
    given = _call_of(ctx.call).given
    if gradients[0] is not None:
        if torch.is_grad_enabled():
            raise no_second_derivative()
        if not _call_of(ctx.call).gives(ctx.needs_input_grad[0]):
            raise UnsupportedError(
                f"qsync::{name} was traced without the gradients that this call needs: trace outside of "
                "no_grad(), with inputs and parameters that require gradients"
            )
        backward = getattr(torch.ops.qsync, f"{name}_backward")
        for k, gradient in zip(given, backward([gradients[0], *ctx.saved_tensors], ctx.call), strict=True):
            found[k] = gradient
    return found, None


def _refuse(ctx: Any, *_: Any) -> None:
    raise no_second_derivative()


def _register(name: str, run: Any, fake: Any, backward: Any, setup: Any = None) -> None:
    # Tagged as random: some operators draw random numbers, so equal calls must not be merged.
    torch.library.define(name, _SCHEMA, tags=(torch.Tag.nondeterministic_seeded,))
    torch.library.impl(name, "CompositeExplicitAutograd", run)
    torch.library.register_fake(name, fake)
    torch.library.register_autograd(name, backward, setup_context=setup)


for _kind in sorted({_CAST, *REPLACED, *PRECISIONS_BY_KIND, *FORMS}):
    _register(
        f"qsync::{_kind}",
        lambda tensors, call: _call_of(call).run(tensors),
        lambda tensors, call: _empty(tensors, _call_of(call).outputs),
        partial(_differentiate, _kind),
        _keep,
    )
    _register(
        f"qsync::{_kind}_backward",
        lambda tensors, call: _call_of(call).differentiate(*tensors),
        lambda tensors, call: _empty(tensors, _call_of(call).gradients),
        _refuse,
    )
