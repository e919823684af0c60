"""Wrap a planned model in DDP: check its options, and average gradients exactly once.

DDP inside DDP silently divides gradients by the world size twice. So a wrapped model refuses another DDP, and
reports to Accelerate that it is already wrapped.
"""

from __future__ import annotations

import inspect
import weakref
from collections.abc import Mapping
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor
from torch.nn.modules.module import (
    register_module_module_registration_hook,
    register_module_parameter_registration_hook,
)
from torch.nn.parallel import DistributedDataParallel

from qsync.backend.devices.device_detection import device_of
from qsync.distributed import accelerate_state
from qsync.errors import FormatError, MismatchError, UnsupportedError, shortened, unknown_name
from qsync.operators.precision import Precision
from qsync.records.levers import ClassLevers
from qsync.tracing.replaced_forward import is_replaced, untraced

_DDP_ARGUMENTS = inspect.signature(DistributedDataParallel.__init__).parameters
_FLAGS = (
    "find_unused_parameters", "static_graph", "gradient_as_bucket_view", "broadcast_buffers",
    "forward_sync_buffers", "init_sync", "batched_grad_copy",
)  # fmt: skip
DDP_OPTIONS = tuple(name for name in (*_FLAGS, "bucket_cap_mb", "process_group") if name in _DDP_ARGUMENTS)
_WHY_NOT = {
    "module": "the model is hybrid's first argument",
    "device_ids": "a rank trains where its parameters are",
    "output_device": "a rank trains where its parameters are",
    "mixed_precision": 'the plan decides every cast; base="bf16" is what trains in BF16',
    "device_mesh": "give its process_group",
    "dim": "a rank takes whole batches",
    "bucket_cap_mb_list": "steps are predicted for buckets of one size; give bucket_cap_mb",
    "delay_all_reduce_named_params": "gradients that other hooks reduce are not weighed",
    "param_to_hook_all_reduce": "gradients that other hooks reduce are not weighed",
    "skip_all_reduce_unused_params": "it may skip the first bucket, which carries the weights of gradients",
    "check_reduction": "torch ignores it",
}
_VIEWS = "gradient_as_bucket_view"
_CALLS_PER_CHECK = 100
_TWICE = (
    "the model is in qsync's DistributedDataParallel already, and a second one would divide its gradients by "
    "the world size again; leave the second one out, or plan with qsync.hybrid(..., ddp=False)"
)


class _Registered:
    """Counts parameters and modules added to any module of this process.

    Modules made in a traced forward (a slice of a ModuleList) are not counted: counting there would force a
    new trace at every call.
    """

    def __init__(self) -> None:
        self.count = 0
        register_module_parameter_registration_hook(self._note)
        register_module_module_registration_hook(self._note)

    def _note(self, *_: Any) -> None:
        if not torch.compiler.is_compiling():
            self.count += 1


_registered = _Registered()


class HybridDDP(DistributedDataParallel):
    """DDP around a planned model, the result of `qsync.hybrid`. It copies and pickles like DDP.

    A call through another DDP raises UnsupportedError. A parameter that was added, unfrozen, replaced,
    sharded or converted after wrapping raises MismatchError: its gradient would never be averaged.

    Args:
        module: the model.
        base: the plan's base.
        share: this rank's samples and passes a step, under a plan with levers.
        **options: DDP's.
    """

    def __init__(
        self,
        module: torch.nn.Module,
        base: Precision = Precision.FP32,
        share: ClassLevers | None = None,
        **options: Any,
    ) -> None:
        super().__init__(module, **options)
        self._base, self._share = base, share
        self.is_prepared = False  # set by Accelerate
        self._register()

    def _register(self) -> None:
        self._averaged = {id(p): p.dtype for p in self.module.parameters() if p.requires_grad}
        # In a list, because an attribute would register the parameter a second time.
        self._first = [p for p in self.module.parameters() if p.requires_grad][:1]
        self._num_registered = _registered.count
        self._frozen = [p for p in self.module.parameters() if not p.requires_grad]
        self._num_calls = 0
        self.let_group_outlive_reducer()
        note_ddp(self.module, self)

    def let_group_outlive_reducer(self) -> None:
        """Make the process group the attribute that is destroyed last.

        A reducer that owns a group alone destroys it while holding the GIL. The group then waits for its
        threads, and a thread that drops a Python object waits for the GIL (torch 2.13).
        """
        self.process_group = self.__dict__.pop("process_group")

    def forward(self, *inputs: Any, **kwargs: Any) -> Any:
        """Call the model once; backward averages its gradients."""
        self._check_call()
        return super().forward(*inputs, **kwargs)  # type: ignore[no-untyped-call]

    @untraced("it only checks")
    def _check_call(self) -> None:
        if not torch.is_grad_enabled():  # a teacher inside another DDP's forward runs without gradients
            return
        if DistributedDataParallel._active_ddp_module is not None:
            raise UnsupportedError(_TWICE)
        # Checking every parameter takes 0.5 ms for 400 parameters.
        if (
            self._num_calls % _CALLS_PER_CHECK == 0
            or self._num_registered != _registered.count
            or any(p.dtype is not self._averaged[id(p)] for p in self._first)
            or any(p.requires_grad for p in self._frozen)
        ):
            self._check_parameters()
        self._num_calls += 1

    def _check_parameters(self) -> None:
        unknown = [
            name
            for name, p in self.module.named_parameters()
            if p.requires_grad and id(p) not in self._averaged and name not in self.parameters_to_ignore
        ]
        if unknown:
            raise MismatchError(
                f"DDP does not average {shortened(unknown[0], quote=False)} (and {len(unknown) - 1} more), "
                "which was added, unfrozen or sharded after qsync.hybrid; change the plain model first, "
                "then call qsync.hybrid"
            )
        for name, p in self.module.named_parameters():
            if p.requires_grad and p.dtype is not self._averaged.get(id(p), p.dtype):
                raise MismatchError(
                    f"{shortened(name, quote=False)} was converted to {p.dtype}, but DDP averages its "
                    f"gradients in {self._averaged[id(p)]}: convert the plain model first, then call "
                    "qsync.hybrid"
                )
        self._num_registered = _registered.count

    def register_comm_hook(self, state: object, hook: Any) -> None:
        """Register a communication hook. Raises UnsupportedError if there is already one."""
        if there := comm_hook_of(self):
            raise UnsupportedError(one_hook(there))
        super().register_comm_hook(state, hook)

    def _register_builtin_comm_hook(self, comm_hook_type: Any) -> None:
        if there := comm_hook_of(self):
            raise UnsupportedError(one_hook(there))
        super()._register_builtin_comm_hook(comm_hook_type)  # type: ignore[no-untyped-call]

    @property
    def _ddp_params_and_buffers_to_ignore(self) -> list[str]:
        """Refuse a second DDP, whose constructor reads this attribute first."""
        raise UnsupportedError(_TWICE)

    @property
    def _is_accelerate_prepared(self) -> bool:
        """Tell Accelerate that the model is prepared, after checking Accelerate's settings."""
        accelerate_state.check_prepared(self._base, self._share)
        return True

    @_is_accelerate_prepared.setter
    def _is_accelerate_prepared(self, value: bool) -> None:
        """Accept the mark that Accelerate sets on every prepared model."""
        self.is_prepared = value

    @property
    def loss_type(self) -> Any:
        """Return the model's loss type, which transformers' Trainer reads to count shifted labels."""
        return self.module.loss_type

    @property
    def config(self) -> Any:
        """Return the model's config, which transformers' Trainer reads to detect encoder-decoders."""
        return self.module.config

    def __setstate__(self, state: dict[str, Any]) -> None:
        hooks = state.pop("_comm_hooks", [])
        super().__setstate__({**state, "_comm_hooks": []})  # type: ignore[no-untyped-call]
        for hook, of_hook in hooks:
            self.register_comm_hook(of_hook, hook)
        self._register()


def comm_hook_of(parallel: DistributedDataParallel) -> str:
    """Return the name of a DDP's communication hook, built-in ones included; empty without one."""
    return parallel._get_ddp_logging_data().get("comm_hook") or ""  # type: ignore[no-untyped-call]


def one_hook(there: str) -> str:
    """Return the message that DDP already has another communication hook."""
    return (
        f"DDP takes one communication hook, and this one has {there}; leave one of them out (under "
        "token_mean, weigh_gradients, compression and levers it is qsync's own, and none fits beside it)"
    )


# The DDP that averages each model's gradients: qsync's, or a framework's, seen at a call.
_ddp_of: weakref.WeakKeyDictionary[torch.nn.Module, weakref.ref[DistributedDataParallel]] = (
    weakref.WeakKeyDictionary()
)


def note_ddp(module: torch.nn.Module, parallel: DistributedDataParallel) -> None:
    """Remember the DDP that averages a model's gradients."""
    _ddp_of[module] = weakref.ref(parallel)


def ddp_of(model: Any) -> DistributedDataParallel | None:
    """Return the DDP that averages a model's gradients: the model itself, or the known DDP around it."""
    if isinstance(model, DistributedDataParallel):
        return model
    found = _ddp_of.get(model) if isinstance(model, torch.nn.Module) else None
    return found() if found else None


def check_not_parallel(model: Any) -> None:
    """Raise UnsupportedError if a model is sharded, or is, contains or sits in a DDP."""
    if not isinstance(model, torch.nn.Module):
        return  # another check refuses it with a better message
    if any(isinstance(parameter, DTensor) for parameter in model.parameters()):
        raise UnsupportedError(
            "the model is already sharded (its parameters are DTensors), but only whole models can be "
            "planned; call qsync.hybrid(model, ..., ddp=False) first, then fully_shard"
        )
    is_planned = isinstance(model, DistributedDataParallel) or is_replaced(model)
    outer = ddp_of(model) if is_planned else None
    inner = [
        name for name, module in model.named_modules() if name and isinstance(module, DistributedDataParallel)
    ]
    if outer is None and not inner:
        return
    what = f"its {inner[0]} is" if outer is None else "the model is"
    raise UnsupportedError(
        f"{what} already in DistributedDataParallel, so gradients would be averaged twice; give "
        "qsync.hybrid the plain module (qsync.unwrap takes it out of qsync's)"
    )


def check_ddp_options(options: object, bucket_cap_mb: float | None = None) -> None:
    """Raise FormatError for invalid DDP options, UnsupportedError for a partial process group."""
    if not isinstance(options, Mapping):
        raise FormatError(
            f"ddp_options must be a mapping of DDP's arguments, found {shortened(options)}; give "
            '{"find_unused_parameters": True}'
        )
    options = stated_options(options)
    for name in options:
        if name in _WHY_NOT:
            raise FormatError(f"ddp_options does not accept {name}: {_WHY_NOT[name]}")
        if name not in DDP_OPTIONS:
            raise FormatError(f"ddp_options: {unknown_name(name, DDP_OPTIONS)}")
    for name in _FLAGS:
        if not isinstance(options.get(name, False), bool):
            raise FormatError(
                f"ddp_options: {name} must be True or False, found {shortened(options[name])}; leave it out"
            )
    if options.get("bucket_cap_mb") is not None and bucket_cap_mb is not None:
        raise FormatError("bucket_cap_mb is given twice, once in ddp_options; leave out one of them")
    group = options.get("process_group")
    if group is None:
        return
    if not isinstance(group, dist.ProcessGroup):
        raise FormatError(
            f"ddp_options: process_group must be torch.distributed's, found {shortened(group)}; leave it out"
        )
    if group.size() != dist.get_world_size():
        raise UnsupportedError(
            f"process_group has {group.size()} of the job's {dist.get_world_size()} ranks, but a plan "
            "covers all ranks; start a separate job for each group"
        )


def stated_options(options: Mapping[str, Any]) -> dict[str, Any]:
    """Return the options that differ from DDP's defaults; command lines and configurations set them."""

    def is_default(name: str) -> bool:
        default = _DDP_ARGUMENTS[name].default if name in _DDP_ARGUMENTS else inspect.Parameter.empty
        return type(options[name]) is type(default) and options[name] == default

    return {name: value for name, value in options.items() if not is_default(name)}


def settled_options(options: Mapping[str, Any], by_qsync: bool) -> dict[str, Any]:
    """Return the set options, and whether gradients are views of buckets (not in a framework's DDP)."""
    return {**stated_options(options), _VIEWS: options.get(_VIEWS, by_qsync)}


def in_ddp(
    model: torch.nn.Module, bucket_cap_mb: float | None = None, options: Mapping[str, Any] | None = None,
    **planned: Any,
) -> HybridDDP:  # fmt: skip
    """Wrap the model in DDP, by default with gradients as bucket views, as replay assumes.

    `planned` is the plan's base and share of the batch.
    """
    device = device_of(model)
    given = {_VIEWS: True, "bucket_cap_mb": bucket_cap_mb, **(options or {})}
    device_ids = [device.index] if device.type == "cuda" else None
    return HybridDDP(model, device_ids=device_ids, **planned, **given)
