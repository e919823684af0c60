"""Replace the forward of one module, on the instance: class, state_dict keys and hooks stay.

`module(x)`, `module.forward(x)`, hooks added later, an outer torch.compile and every framework that calls the
module reach the replacement. torch.compile(module) breaks its graph there and does not trace through.
"""

from __future__ import annotations

import copy
import inspect
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import CodeType, MethodType
from typing import Any, TypeVar

import torch
from torch._C._dynamo.eval_frame import reset_code
from torch._dynamo import trace_rules

import qsync
from qsync.backend.devices.device_detection import warn_of_untested_torch
from qsync.errors import UnsupportedError

NO_DATA_PARALLEL = (
    "DataParallel runs copies of a model that have no plan; use DistributedDataParallel, a process a device"
)
_REPLICATE = "_replicate_for_data_parallel"  # what DataParallel calls on every module
# The replacement that a module was given, which other libraries' forwards around it call.
_HELD = "_qsync_forward"
# The files of torch's layers that hold products, and of those that hold such layers.
LAYER_FILES = {
    f"{trace_rules._module_dir(torch)}nn/modules/{name}.py"
    for name in ("activation", "container", "conv", "linear", "sparse", "transformer")
}
F = TypeVar("F", bound=Callable[..., Any])


def untraced(reason: str, recursive: bool = True) -> Callable[[F], F]:
    """Let torch.compile call a function without tracing it; without `recursive`, trace what that calls."""
    return torch._dynamo.disable(recursive=recursive, reason=reason)  # type: ignore[no-any-return, no-untyped-call]


class ReplacedForward:
    """A callable that stands where a module's forward stood.

    `own` is the `forward` that the instance itself had before, if it had one. `instead` is what runs in its
    place once it was replaced: a forward that another library put around it calls it still.
    """

    def __init__(self, module: torch.nn.Module) -> None:
        self.module = module
        self.own = own_forward(module)
        self.instead: Callable[..., Any] | None = None

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Run what stands in place of the module's forward."""
        raise NotImplementedError

    @property
    def __signature__(self) -> inspect.Signature:
        """Return the signature of the module's forward: trainers choose a batch's columns by it."""
        return inspect.signature(plain_forward(self.module))

    @property
    def __code__(self) -> CodeType:
        """Return the code of the module's forward: torch.export reads the names of arguments from it."""
        return plain_forward(self.module).__code__

    @property
    def __func__(self) -> Callable[..., Any]:
        """Return a function of the module and its inputs, as methods have one.

        Accelerate decorates it and binds it to the module; a copy of the module then runs its own forward.
        """

        def forward(module: torch.nn.Module, /, *args: Any, **kwargs: Any) -> Any:
            return getattr(module, _HELD)(*args, **kwargs)

        module = inspect.Parameter("module", inspect.Parameter.POSITIONAL_ONLY)
        own = self.__signature__
        signature = own.replace(parameters=[module, *own.parameters.values()])
        forward.__signature__ = signature  # type: ignore[attr-defined]
        return forward

    def __getattr__(self, name: str) -> Any:
        raise AttributeError(
            f"{name}: the forward of this module is replaced by qsync's; call qsync.unwrap(model) first"
        )


def standing_forward(module: torch.nn.Module) -> Callable[..., Any] | None:
    """Return what stands in place of a module's forward, also inside of what a library put around it."""
    outer, held = module.__dict__.get("forward"), module.__dict__.get(_HELD)
    return outer if outer is None or held is None else held.instead or held


def own_forward(module: torch.nn.Module) -> Callable[..., Any] | None:
    """Return the forward that the instance itself had before a replacement; None if it had none."""
    outer, held = module.__dict__.get("forward"), module.__dict__.get(_HELD)
    return outer if outer is None or held is None else held.own


def is_replaced(module: torch.nn.Module) -> bool:
    """Return whether a module runs a replacement of its forward."""
    return isinstance(standing_forward(module), ReplacedForward)


def plain_forward(module: torch.nn.Module) -> Callable[..., Any]:
    """Return the forward that a module would run without a replacement."""
    return own_forward(module) or MethodType(type(module).forward, module)


def compile_forward(
    module: torch.nn.Module, backend: Callable[..., Any], dynamic: bool | None = None, whole: bool = False
) -> Callable[..., Any]:
    """Return the module's plain forward, to be traced at its first call and run by a backend.

    It runs what the same backend has traced of the module before, whatever `dynamic` was then: torch.compile
    itself would trace again. `whole` allows no break of the graph. Another torch.compile may have marked
    torch's layers to be skipped; they are traced again from now on.
    """
    warn_of_untested_torch()
    for code in forward_codes(module):
        if code.co_filename in LAYER_FILES:
            reset_code(code)
    _install_capturing_hooks(module)
    forward = plain_forward(module)
    if isinstance(forward, MethodType) and trace_rules.check(forward):
        forward = MethodType(_framed, module)
    optimize = torch._dynamo.optimize(backend, nopython=whole, dynamic=dynamic)
    return optimize(forward)


def trace_again(module: torch.nn.Module) -> None:
    """Let the next call of a module be traced anew, after one that raised an error.

    The tracer gives up a frame in which an error was raised: all later calls would run as torch runs them.
    """
    for code in (_framed.__code__, *forward_codes(module)):
        reset_code(code)


def forward_codes(module: torch.nn.Module) -> list[CodeType]:
    """Return the code of the forward of each kind of module in a module, and of what it calls by super()."""
    kinds = dict.fromkeys(type(part) for part in module.modules())
    return list(dict.fromkeys(code for kind in kinds for code in _forwards_of(kind)))


def _forwards_of(kind: type[torch.nn.Module]) -> Iterator[CodeType]:
    for forward in (vars(base)["forward"] for base in kind.__mro__ if "forward" in vars(base)):
        code = getattr(forward, "__code__", None)
        if code is not None:
            yield code
        if code is None or "__class__" not in code.co_freevars:  # it calls nothing by super()
            return


def _install_capturing_hooks(module: torch.nn.Module) -> None:
    """Install the hooks by which transformers' models record hidden states.

    A model that asks for them installs them at its first call, under a lock: the trace would end there. It
    does not look whether a part of it has them, which would then record twice.
    """
    library: Any = sys.modules.get("transformers.utils.output_capturing")
    registry: Any = getattr(library, "_CAN_RECORD_REGISTRY", {})
    for part in module.modules():
        if registry.get(part) and not any(
            hasattr(m, "_output_capturing_hooks_installed") for m in part.modules()
        ):
            library.maybe_install_capturing_hooks(part)


def _framed(self: torch.nn.Module, *args: Any, **kwargs: Any) -> Any:
    """Call a forward from a frame of ours: torch traces no frame of its own modules, such as Sequential's."""
    return type(self).forward(self, *args, **kwargs)


def replace_forward(module: torch.nn.Module, forward: Callable[..., Any] | None) -> None:
    """Let a module run this forward; None stands for its class's. Replicas of a replaced one are refused.

    What another library put around a replacement stays: it calls this forward from now on.
    """
    attributes = module.__dict__
    outer, held = attributes.get("forward"), attributes.get(_HELD)
    if held is not None:
        held.instead = forward or MethodType(type(module).forward, module)
    if held is None or outer is None or outer is held:
        _forget(module)
        if forward is not None:
            attributes["forward"] = forward
        if isinstance(forward, ReplacedForward):
            attributes[_HELD] = forward
    attributes.pop(_REPLICATE, None)
    if isinstance(forward, ReplacedForward):
        attributes[_REPLICATE] = REFUSE_REPLICAS


def _forget(module: torch.nn.Module) -> dict[str, Any]:
    """Let a module run its class's forward; return the attributes by which it ran another."""
    names = [name for name in ("forward", _HELD, _REPLICATE) if name in module.__dict__]
    return {name: module.__dict__.pop(name) for name in names}


class _RefuseReplicas:
    """What DataParallel calls on a replaced module."""

    def __call__(self) -> None:
        raise UnsupportedError(f"the model is wrapped by qsync; {NO_DATA_PARALLEL}")

    def __reduce__(self) -> Any:
        return qsync._import_qsync_first, ("replicas",)


REFUSE_REPLICAS = _RefuseReplicas()


class NoHook:
    """A hook that does nothing: what copies and files of a model have in place of a hook of qsync's."""

    def __call__(self, *_: Any) -> None:
        """Do nothing."""

    def __reduce__(self) -> Any:
        return qsync._import_qsync_first, ("hook",)


def restore_forward(module: torch.nn.Module) -> None:
    """Let a module run its plain forward again."""
    if is_replaced(module):
        replace_forward(module, own_forward(module))


def plain_copy(module: torch.nn.Module) -> torch.nn.Module:
    """Return a deep copy of a module in which every module runs its plain forward."""
    copied = copy.deepcopy(module)
    for inner in copied.modules():
        restore_forward(inner)
    return copied


@contextmanager
def running_plain(module: torch.nn.Module) -> Iterator[None]:
    """Run a module without a replacement and what is around it, and without what `module.compile()` made.

    Afterwards it is as before.
    """
    own, compiled = own_forward(module), module._compiled_call_impl
    before = _forget(module)
    try:
        replace_forward(module, own)
        module._compiled_call_impl = None
        yield
    finally:
        _forget(module)
        module.__dict__.update(before)
        module._compiled_call_impl = compiled


class _Compiled(ReplacedForward):
    def __init__(self, module: torch.nn.Module, compiled: Callable[..., Any]) -> None:
        super().__init__(module)
        self._compiled = compiled

    @untraced("it is traced for another backend", recursive=False)
    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Run the compiled forward."""
        return self._compiled(*args, **kwargs)


@contextmanager
def compiled_by(
    module: torch.nn.Module, backend: Callable[..., Any], dynamic: bool | None = None
) -> Iterator[None]:
    """Let a module's plain forward be traced for a backend, inside; afterwards the module is as before."""
    with running_plain(module):
        replace_forward(module, _Compiled(module, compile_forward(module, backend, dynamic)))
        yield
