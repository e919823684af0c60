"""Divide an optimizer's state over the ranks of a job, by the memory that each has to spare.

DDP gives every rank all gradients. Each rank then updates the parameters that it owns, and holds state for
these alone; afterwards owners broadcast what they updated (ZeRO stage 1, Rajbhandari et al. 2020; parts by
spare memory as in Cephalo and Hecate). The optimizer stays the user's own object: hooks of torch.optim narrow
its groups during a step. So schedulers, scalers and clipping see what they always saw.
"""

from __future__ import annotations

import weakref
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from datetime import timedelta
from itertools import chain, count
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel
from torch.optim import LBFGS, Optimizer

from qsync.backend.devices.device_detection import detect_class, device_of
from qsync.distributed import job
from qsync.distributed.agreement import agree, agree_locally, check_same
from qsync.errors import FormatError, MismatchError, QSyncError, UnsupportedError, shortened
from qsync.records.state_division import BUCKET_BYTES, PART, owners
from qsync.runtime.coverage import say_once, warn_once
from qsync.runtime.wrapping import wrapped_module, wrapping_of

AnyOptimizer = TypeVar("AnyOptimizer")

_TIMEOUT_S = 60.0  # longest wait for the other ranks' calls of state_dict
_PER_PARAMETER = ("torch.optim.", "torchao.")  # modules of optimizers that couple no parameters, LBFGS apart
_c10d: Any = dist  # its store classes have no type stubs


def divide_optimizer(
    model: torch.nn.Module, optimizer: AnyOptimizer, *, parts: Mapping[int, float] | None = None
) -> AnyOptimizer:
    """Divide an optimizer's state over the ranks, each of which then holds and updates its own part.

    Call it on every rank, after `qsync.hybrid` or DDP, before the first step. Parameters stay bitwise those
    of the same optimizer undivided. Each parameter's state is whole on one rank, however large it is.

    `optimizer.state_dict()` gathers the state in rank 0's host memory: call it on every rank. It loads under
    any division and number of ranks, and into an optimizer that is not divided. On other ranks it returns
    that rank's own part, which loads under the same division alone. `qsync.save` and `qsync.load` gather
    nothing: each rank writes and reads its own part.

    Args:
        model: the model, planned or in DDP; whole on every rank.
        optimizer: of `torch.optim`, over the model's parameters, in any number of groups. Divide each of
            several.
        parts: each rank's weight; a rank that is left out holds nothing. By default the memory that the
            model's plan leaves on each rank, or without a plan the same for all.

    Returns:
        The same optimizer. In a process without other ranks nothing is divided.

    Raises:
        MismatchError: ranks, or model and optimizer, differ in parameters, groups or parts.
        UnsupportedError: the optimizer couples parameters (LBFGS) or steps within backward, the model is
            sharded, or the optimizer is already divided.
        FormatError: an argument is of another kind.
        Every rank raises the same error.

    Example:
        >>> optimizer = qsync.divide_optimizer(model, torch.optim.AdamW(model.parameters(), lr=1e-3))
    """
    own: Any = getattr(optimizer, "optimizer", optimizer)  # inside Accelerate's and Lightning's wrappers
    names = agree_locally("dividing the optimizer", lambda: _checked_names(model, own, parts))
    if job.world_size() == 1:
        return optimizer
    weights = _agreed_parts(model, parts)
    check_same({
        "the optimizer's class": type(own).__name__, "the number of its groups": len(own.param_groups),
        "each rank's weight": weights,
    })  # fmt: skip
    groups = [
        ", ".join(f"{names[p]} {tuple(p.shape)} {p.dtype}" for p in group["params"])
        for group in own.param_groups
    ]
    check_same({f"group {number} of the optimizer": each for number, each in enumerate(groups)})
    if not type(own).__module__.startswith(_PER_PARAMETER):
        warn_once(
            f"qsync: {type(own).__name__} is not torch's own; divided, it is the same optimizer only if it "
            "updates each parameter from that parameter's gradient and state alone"
        )
    division = _divisions[own] = Division(own, names, weights)
    if job.is_rank_zero():
        whole = sum(division.bytes_by_rank)
        shares = shortened(", ".join(f"{each / whole:.1%}" for each in division.bytes_by_rank), quote=False)
        say_once(f"rank by rank {shares} of the weights are updated by {type(own).__name__}", True)
    return optimizer


def division_of(optimizer: Any) -> Division | None:
    """Return the division of an optimizer; None if it is not divided."""
    return _divisions.get(optimizer) if isinstance(optimizer, Optimizer) else None


class Division:
    """One optimizer's division: which rank owns which parameter, and the hooks that keep to it.

    `names` names the optimizer's parameters, `weights` are those of the ranks. Parameters that are not
    trained have no owner.
    """

    def __init__(self, optimizer: Optimizer, names: Mapping[torch.Tensor, str], weights: list[float]) -> None:
        sizes = {name: p.nbytes for p, name in names.items() if p.requires_grad}
        owned_by = owners(sizes, weights)
        self._rank, self._number = dist.get_rank(), next(_numbers)
        self._owner = {p: owned_by.get(name) for p, name in names.items()}
        # The largest first, so that torch copies no large parameter into a bucket of several.
        in_order = sorted(self._owner.items(), key=lambda item: -item[0].nbytes)
        self._by_rank = [[p for p, its in in_order if its == rank] for rank in range(len(weights))]
        self.bytes_by_rank = [sum(p.nbytes for p in those) for those in self._by_rank]
        self._whole: list[list[torch.Tensor]] | None = None  # the groups, while a step sees this rank's part
        self._num_gathered = 0
        for parameter in names:
            if not self.holds(parameter):
                optimizer.state.pop(parameter, None)  # Adagrad makes its state at once
        optimizer.register_step_pre_hook(self._before_step)
        optimizer.register_step_post_hook(self._after_step)
        optimizer.register_state_dict_post_hook(self._with_other_parts)
        optimizer.register_load_state_dict_pre_hook(self._own_part)

    def holds(self, parameter: torch.Tensor) -> bool:
        """Return whether this rank holds a parameter's state."""
        return self._owner.get(parameter) == self._rank

    def _before_step(
        self, optimizer: Optimizer, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[tuple[Any, ...], dict[str, Any]]:
        self._widen(optimizer)  # after a step that failed
        self._check(optimizer)
        named = "closure" in kwargs
        closure = kwargs["closure"] if named else args[1] if len(args) > 1 else None
        self._narrow(optimizer)
        if closure is None:
            return args, kwargs

        def evaluated() -> Any:
            """Run the closure, which may zero or clip all gradients, outside of the division."""
            self._widen(optimizer)
            try:
                return closure()
            finally:
                self._narrow(optimizer)

        if named:
            return args, {**kwargs, "closure": evaluated}
        return (args[0], evaluated, *args[2:]), kwargs

    def _check(self, optimizer: Optimizer) -> None:
        """Raise an error for a step that would leave parameters without an update."""
        kind = type(optimizer).__name__
        if torch._C._current_graph_task_id() != -1:
            raise UnsupportedError(
                f"a divided {kind} steps within backward, where its ranks would wait for "
                "each other in gradient hooks; step after backward, or leave out qsync.divide_optimizer"
            )
        for parameter in chain.from_iterable(group["params"] for group in optimizer.param_groups):
            if parameter.requires_grad and self._owner.get(parameter) is None:
                what = "unfrozen" if parameter in self._owner else "added to it"
                raise MismatchError(
                    f"a parameter of shape {list(parameter.shape)} was {what} after {kind} was divided, so "
                    "no rank updates it; divide an optimizer that has all of its parameters"
                )

    def _narrow(self, optimizer: Optimizer) -> None:
        self._whole = [group["params"] for group in optimizer.param_groups]
        for group in optimizer.param_groups:
            group["params"] = [p for p in group["params"] if self.holds(p)]

    def _widen(self, optimizer: Optimizer) -> None:
        if self._whole is not None:
            for group, whole in zip(optimizer.param_groups, self._whole, strict=True):
                group["params"] = whole
        self._whole = None

    @torch.no_grad()
    def _after_step(self, optimizer: Optimizer, *_: Any) -> None:
        self._widen(optimizer)
        for rank, owned in enumerate(self._by_rank):
            if owned:  # detached, because a parameter's own `data` would not count as changed
                _c10d._broadcast_coalesced(dist.group.WORLD, [p.detach() for p in owned], BUCKET_BYTES, rank)

    def _with_other_parts(self, optimizer: Optimizer, state: dict[str, Any]) -> dict[str, Any] | None:
        """Complete rank 0's state_dict by what other ranks hold; mark that of others as a part."""
        if _is_local:
            return None
        self._meet(type(optimizer).__name__)
        found = dict(state["state"])
        numbers = {parameter: number for number, parameter in enumerate(_parameters_of(optimizer))}
        for parameter, owner in self._owner.items():  # the same on all ranks, whatever became of groups
            number = numbers.get(parameter)
            if owner and owner == self._rank:
                dist.send_object_list([_on_host(found.get(number))], dst=0)
            elif owner and self._rank == 0:
                received: list[Any] = [None]
                dist.recv_object_list(received, src=owner)
                found |= {number: received[0]} if received[0] is not None else {}
        if self._rank:
            return {**state, PART: [number for p, number in numbers.items() if self.holds(p)]}
        return {**state, "state": found}

    def _meet(self, what: str) -> None:
        """Wait for the other ranks to call state_dict. Raises QSyncError for those that do not."""
        self._num_gathered += 1
        store = _c10d.PrefixStore(
            f"qsync/divided/{self._number}/{self._num_gathered}",
            _c10d.distributed_c10d._get_default_store().clone(),
        )
        store.set(str(self._rank), "here")
        for rank in range(dist.get_world_size()):
            try:
                store.wait([str(rank)], timedelta(seconds=_TIMEOUT_S))
            except RuntimeError as error:
                raise QSyncError(
                    f"state_dict of a divided {what} gathers the state from all ranks, and rank {rank} did "
                    f"not call it within {_TIMEOUT_S:g} s; call it on every rank, or use qsync.save"
                ) from error

    def _own_part(self, optimizer: Optimizer, state: dict[str, Any]) -> dict[str, Any]:
        """Return the entries of a state to load that are of this rank's own parameters."""
        saved = chain.from_iterable(group["params"] for group in state["param_groups"])
        numbers = dict(zip(saved, _parameters_of(optimizer), strict=False))  # torch refuses other lengths
        held = {number for number, parameter in numbers.items() if self.holds(parameter)}
        if not held <= set(state.get(PART, held)):
            raise MismatchError(
                f"this is one rank's part of a divided {type(optimizer).__name__}'s state, under another "
                "division; load what state_dict returned on rank 0"
            )
        entries = {n: each for n, each in state["state"].items() if n in held or n not in numbers}
        return {**state, "state": entries}


_divisions: weakref.WeakKeyDictionary[Optimizer, Division] = weakref.WeakKeyDictionary()
_numbers = count()  # of divisions in this process, equally on every rank
_is_local = False


@contextmanager
def own_parts() -> Iterator[None]:
    """Make state_dict return this rank's part alone, without a word to other ranks."""
    global _is_local
    before, _is_local = _is_local, True
    try:
        yield
    finally:
        _is_local = before


def _checked_names(model: torch.nn.Module, optimizer: Any, parts: object) -> dict[torch.Tensor, str]:
    """Return the names of an optimizer's parameters. Raises an error for one that cannot be divided."""
    names: dict[torch.Tensor, str] = {p: name for name, p in wrapped_module(model).named_parameters()}
    if not isinstance(optimizer, Optimizer):
        raise FormatError(
            f"optimizer must be a torch.optim.Optimizer, found {shortened(optimizer)}; divide each of several"
        )
    kind, those = type(optimizer).__name__, _parameters_of(optimizer)
    if parts is not None:
        _check_parts(parts)
    in_job = dist.is_initialized()
    if isinstance(model, DistributedDataParallel) and model.process_group.size() != job.world_size() * in_job:
        raise UnsupportedError(
            "the model's ranks are not those of torch.distributed's job: they are some of them, or cards of "
            "an elastic job, where each holds the whole state that heals others; leave out "
            "qsync.divide_optimizer"
        )
    if optimizer in _divisions:
        raise UnsupportedError(f"this {kind} is already divided; divide a new one")
    if isinstance(optimizer, LBFGS):
        raise UnsupportedError(
            f"{kind} updates all parameters together, so its state cannot be divided; leave out "
            "qsync.divide_optimizer"
        )
    seen = set[torch.Tensor]()
    for parameter in those:
        name = names.get(parameter)
        if name is None:
            raise MismatchError(f"{kind} has parameters that the model lacks; pass the model's own")
        if parameter in seen:
            raise UnsupportedError(
                f"{kind} has {shortened(name)} in two places of its groups, so no one rank can own it; list "
                "it once"
            )
        if isinstance(parameter, DTensor):
            raise UnsupportedError(
                f"{shortened(name)} is sharded (a DTensor), and so is its state already; leave out "
                "qsync.divide_optimizer"
            )
        if hasattr(parameter, "_in_backward_optimizers"):
            raise UnsupportedError(
                f"{shortened(name)} is updated within backward, where ranks cannot wait for its owner; step "
                "after backward, or leave out qsync.divide_optimizer"
            )
        seen.add(parameter)
    if not any(parameter.requires_grad for parameter in those):
        raise FormatError(f"{kind} has no parameter that is trained; leave out qsync.divide_optimizer")
    return {parameter: names[parameter] for parameter in those}


def _check_parts(parts: object) -> None:
    """Raise FormatError unless `parts` maps ranks of the job to weights."""
    ranks = range(job.world_size())
    if not isinstance(parts, Mapping) or not all(
        type(rank) is int and rank in ranks and isinstance(part, (int, float)) and 0 <= part < float("inf")
        for rank, part in parts.items()
    ):
        raise FormatError(
            f"parts must map ranks from 0 to {ranks[-1]} to weights from 0 on, found {shortened(parts)}; "
            "give {0: 3, 1: 1}, or leave it out"
        )
    if not sum(parts.values()) > 0:
        raise FormatError("parts gives no rank a weight above 0; raise one of them")


def _agreed_parts(model: torch.nn.Module, parts: Mapping[int, float] | None) -> list[float]:
    """Return every rank's weight: as given, or by its plan, or 1."""
    planned = agree("finding each rank's part", lambda: None if parts else _planned_part(model))
    if parts is not None:
        return [float(parts.get(rank, 0.0)) for rank in range(job.world_size())]
    if None in planned or not sum(planned):  # type: ignore[arg-type]
        return [1.0] * len(planned)
    return [float(each or 0.0) for each in planned]


def _planned_part(model: torch.nn.Module) -> float | None:
    """Return this rank's part of the state by its plan, else its spare memory in bytes.

    Spare memory is the budget beyond the predicted peak without optimizer state. Return None without a plan
    or a prediction.
    """
    module = wrapped_module(model)
    wrapping = wrapping_of(module)
    if wrapping is None or wrapping.plan is None:
        return None
    plan, own = wrapping.plan, wrapping.device_class
    if plan.levers is not None and plan.levers.state_parts is not None:
        return plan.levers.state_parts.get(own, 0.0)
    predicted = plan[own].predicted
    if predicted is None or not predicted.state_bytes:
        return None
    detected = detect_class(device_of(module), ranks_on_host=job.ranks_on_host()).memory_bytes
    return max(0, plan.budgets.get(own, detected) - predicted.memory_bytes + predicted.state_bytes)


def _parameters_of(optimizer: Optimizer) -> list[torch.Tensor]:
    """Return an optimizer's parameters in the order of its state's numbers."""
    return [parameter for group in optimizer.param_groups for parameter in group["params"]]


def _on_host(value: Any) -> Any:
    """Return a parameter's state with its tensors in host memory."""
    if isinstance(value, Mapping):
        return {key: _on_host(each) for key, each in value.items()}
    return value.cpu() if isinstance(value, torch.Tensor) else value
