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

from qsync.errors import UnsupportedError

NO_DATA_PARALLEL = (
    "DataParallel runs copies of a model that have no plan; use DistributedDataParallel, a process a device"
)
_REPLICATE = "_replicate_for_data_parallel"  # what DataParallel calls on every module
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

    `own` is the `forward` that the instance itself had before, if it had one.
    """

    def __init__(self, module: torch.nn.Module) -> None:
        self.module = module
        before = module.__dict__.get("forward")
        self.own: Callable[..., Any] | None = before.own if isinstance(before, ReplacedForward) else before

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

    def __getattr__(self, name: str) -> Any:
        raise AttributeError(
            f"{name}: the forward of this module is replaced by qsync's; call qsync.unwrap(model) first"
        )


def is_replaced(module: torch.nn.Module) -> bool:
    """Return whether a module runs a replacement of its forward."""
    return isinstance(module.__dict__.get("forward"), ReplacedForward)


def plain_forward(module: torch.nn.Module) -> Callable[..., Any]:
    """Return the forward that a module would run without a replacement."""
    forward = module.__dict__.get("forward")
    if isinstance(forward, ReplacedForward):
        forward = forward.own
    return forward or MethodType(type(module).forward, module)


def compile_forward(
    module: torch.nn.Module, backend: Callable[..., Any], **options: Any
) -> Callable[..., Any]:
    """Return the module's plain forward, to be traced at its first call and run by a backend.

    Another torch.compile may have marked torch's layers to be skipped; they are traced again from now on.
    """
    codes = {getattr(type(layer).forward, "__code__", None) for layer in module.modules()}
    for code in codes:
        if code is not None and code.co_filename in LAYER_FILES:
            reset_code(code)
    _install_capturing_hooks(module)
    forward = plain_forward(module)
    if isinstance(forward, MethodType) and trace_rules.check(forward):
        forward = MethodType(_framed, module)
    return torch.compile(forward, backend=backend, **options)


def trace_again(module: torch.nn.Module) -> None:
    """Let the next call of a module be traced anew, after one that raised an error.

    The tracer gives up a frame in which an error was raised: all later calls would run as torch runs them.
    """
    forwards = (type(layer).forward for layer in module.modules())
    for code in {_framed.__code__, *(getattr(forward, "__code__", None) for forward in forwards)}:
        if code is not None:
            reset_code(code)


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
    """Let a module run this forward; None stands for its class's. Replicas of a replaced one are refused."""
    for name in ("forward", _REPLICATE):
        module.__dict__.pop(name, None)
    if forward is not None:
        module.__dict__["forward"] = forward
    if isinstance(forward, ReplacedForward):
        module.__dict__[_REPLICATE] = _refuse_replicas


def _refuse_replicas() -> None:
    raise UnsupportedError(f"the model is wrapped by qsync; {NO_DATA_PARALLEL}")


def restore_forward(module: torch.nn.Module) -> None:
    """Let a module run its plain forward again."""
    forward = module.__dict__.get("forward")
    if isinstance(forward, ReplacedForward):
        replace_forward(module, forward.own)


def plain_copy(module: torch.nn.Module) -> torch.nn.Module:
    """Return a deep copy of a module in which every module runs its plain forward."""
    copied = copy.deepcopy(module)
    for inner in copied.modules():
        restore_forward(inner)
    return copied


@contextmanager
def running_plain(module: torch.nn.Module) -> Iterator[None]:
    """Run a module without a replacement, and without what `module.compile()` made; then as before."""
    before, compiled = module.__dict__.get("forward"), module._compiled_call_impl
    try:
        restore_forward(module)
        module._compiled_call_impl = None
        yield
    finally:
        replace_forward(module, before)
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
def compiled_by(module: torch.nn.Module, backend: Callable[..., Any], **options: Any) -> Iterator[None]:
    """Let a module's plain forward be traced for a backend, inside; afterwards the module is as before."""
    with running_plain(module):
        replace_forward(module, _Compiled(module, compile_forward(module, backend, **options)))
        yield
