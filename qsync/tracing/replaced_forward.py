"""Replace the forward of one module instance; its class, state_dict keys and hooks stay.

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
_REPLICATE = "_replicate_for_data_parallel"  # name of the method that DataParallel calls on every module
# Attribute with a module's replacement, which other libraries' wrapping forwards call.
_HELD = "_qsync_forward"
# Source files of torch's layers with products, and of containers of such layers.
LAYER_FILES = {
    f"{trace_rules._module_dir(torch)}nn/modules/{name}.py"
    for name in ("activation", "container", "conv", "linear", "sparse", "transformer")
}
F = TypeVar("F", bound=Callable[..., Any])


def untraced(reason: str) -> Callable[[F], F]:
    """Make an outer torch.compile call a function untraced, with all that it calls but what it compiles."""
    return torch._dynamo.disable(reason=reason)  # type: ignore[no-any-return, no-untyped-call]


class ReplacedForward:
    """A callable that replaces a module's forward.

    `own` is the instance's own `forward` before the replacement, if it had one. `instead` is the forward that
    replaced this one later: another library's wrapping forward still calls this one, which must pass on.
    """

    def __init__(self, module: torch.nn.Module) -> None:
        self.module = module
        self.own = own_forward(module)
        self.instead: Callable[..., Any] | None = None

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Run the replacement of the module's forward."""
        raise NotImplementedError

    @property
    def __signature__(self) -> inspect.Signature:
        """Return the signature of the module's plain forward, by which trainers select columns."""
        return inspect.signature(plain_forward(self.module))

    @property
    def __code__(self) -> CodeType:
        """Return the code of the module's plain forward, from which torch.export reads argument names."""
        return plain_forward(self.module).__code__

    @property
    def __func__(self) -> Callable[..., Any]:
        """Return a function of the module and its inputs, like the `__func__` of a method.

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
    """Return the callable that replaces a module's forward, also if a library has wrapped it."""
    outer, held = module.__dict__.get("forward"), module.__dict__.get(_HELD)
    return outer if outer is None or held is None else held.instead or held


def own_forward(module: torch.nn.Module) -> Callable[..., Any] | None:
    """Return the instance's own forward before a replacement; None if it had none."""
    outer, held = module.__dict__.get("forward"), module.__dict__.get(_HELD)
    return outer if outer is None or held is None else held.own


def is_replaced(module: torch.nn.Module) -> bool:
    """Return whether a module's forward is replaced."""
    return isinstance(standing_forward(module), ReplacedForward)


def plain_forward(module: torch.nn.Module) -> Callable[..., Any]:
    """Return the forward that a module would run without a replacement."""
    return own_forward(module) or MethodType(type(module).forward, module)


def compile_forward(
    module: torch.nn.Module, backend: Callable[..., Any], dynamic: bool | None = None, whole: bool = False
) -> Callable[..., Any]:
    """Return the module's plain forward, traced at its first call and run by a backend.

    It reuses the same backend's earlier traces of the module, whatever `dynamic` was; torch.compile itself
    would trace again. `whole` forbids graph breaks. Another torch.compile may have marked torch's layers to
    be skipped; this call resets these marks.
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
    """Reset the tracer for a module after a call that raised an error.

    Otherwise the tracer skips a frame that raised an error, and all later calls run untraced.
    """
    for code in (_framed.__code__, *forward_codes(module)):
        reset_code(code)


def forward_codes(module: torch.nn.Module) -> list[CodeType]:
    """Return the code of all forwards in a module, one per class, with those called by super()."""
    kinds = dict.fromkeys(type(part) for part in module.modules())
    return list(dict.fromkeys(code for kind in kinds for code in _forwards_of(kind)))


def _forwards_of(kind: type[torch.nn.Module]) -> Iterator[CodeType]:
    for forward in (vars(base)["forward"] for base in kind.__mro__ if "forward" in vars(base)):
        code = getattr(forward, "__code__", None)
        if code is not None:
            yield code
        if code is None or "__class__" not in code.co_freevars:  # it does not call super()
            return


def _install_capturing_hooks(module: torch.nn.Module) -> None:
    """Install the hooks with which transformers' models record hidden states.

    Such a model installs them at its first call under a lock, which would break the trace. It does not check
    for hooks in its parts, which would then record twice.
    """
    library: Any = sys.modules.get("transformers.utils.output_capturing")
    registry: Any = getattr(library, "_CAN_RECORD_REGISTRY", {})
    for part in module.modules():
        if registry.get(part) and not any(
            hasattr(m, "_output_capturing_hooks_installed") for m in part.modules()
        ):
            library.maybe_install_capturing_hooks(part)


def _framed(self: torch.nn.Module, *args: Any, **kwargs: Any) -> Any:
    """Call a module's forward from qsync's frame, since torch traces no frame of its own modules."""
    return type(self).forward(self, *args, **kwargs)


def replace_forward(module: torch.nn.Module, forward: Callable[..., Any] | None) -> None:
    """Set a module's forward (None: its class's); refuse DataParallel replicas of a replaced one.

    A library's wrapper around an earlier replacement stays and calls the new forward.
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
    """Remove a module's own forward attributes, and return the removed ones."""
    names = [name for name in ("forward", _HELD, _REPLICATE) if name in module.__dict__]
    return {name: module.__dict__.pop(name) for name in names}


class _RefuseReplicas:
    """The method that DataParallel calls on a replaced module, which raises an error."""

    def __call__(self) -> None:
        raise UnsupportedError(f"the model is wrapped by qsync; {NO_DATA_PARALLEL}")

    def __reduce__(self) -> Any:
        return qsync._import_qsync_first, ("replicas",)


REFUSE_REPLICAS = _RefuseReplicas()


class NoHook:
    """A hook without effect, which replaces qsync's hooks in copies and files of a model."""

    def __call__(self, *_: Any) -> None:
        """Do nothing, in place of a hook of qsync."""

    def __reduce__(self) -> Any:
        return qsync._import_qsync_first, ("hook",)


def restore_forward(module: torch.nn.Module) -> None:
    """Restore a module's plain forward."""
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
    """Run a module's plain forward within the context, without replacement, wrappers or compile.

    All of them are restored afterwards.
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

    @untraced("it is traced for another backend")
    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Run the compiled forward of the module."""
        return self._compiled(*args, **kwargs)


@contextmanager
def compiled_by(
    module: torch.nn.Module, backend: Callable[..., Any], dynamic: bool | None = None
) -> Iterator[None]:
    """Compile a module's plain forward for a backend within the context, then restore the module."""
    with running_plain(module):
        replace_forward(module, _Compiled(module, compile_forward(module, backend, dynamic)))
        yield
