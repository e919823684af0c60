"""Expand the optimizer state: its moments grow like the gradients that they average."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch

from qsync.errors import MismatchError, UnsupportedError, shortened
from qsync.expansion.maps.model_map import ModelMap
from qsync.expansion.maps.tensor_maps import TensorMap, along
from qsync.records.json_files import check_kind
from qsync.records.state_division import PART

# Per-element states of torch's optimizers: averages of gradients, and of squared gradients.
_LINEAR = ("exp_avg", "momentum_buffer", "grad_avg")
_SQUARED = ("exp_avg_sq", "max_exp_avg_sq", "square_avg", "sum")


@dataclass(frozen=True, slots=True)
class GrownState:
    """The expanded state of an optimizer.

    `state_dict` fits `load_state_dict` of an optimizer over the grown model. Its groups hold the same
    parameters as the small optimizer's, in the grown model's order.

    `exact` lists parameters whose gradient, in every copied element, is a known multiple of the small
    model's. `approximate` lists those whose gradient is mixed by norms (writers of a normed stream,
    embeddings with a tied head): the moments of all copies sum to the small model's. It also lists those
    whose weights are added to their gradients (weight decay that is not decoupled). `fresh` lists the
    parameters of new blocks, which have no state and count steps from 0.
    """

    state_dict: dict[str, Any]
    exact: tuple[str, ...]
    approximate: tuple[str, ...]
    fresh: tuple[str, ...]


def expand_optimizer(
    plan: ModelMap,
    optimizer: torch.optim.Optimizer | Mapping[str, Any],
    model: torch.nn.Module,
    big: torch.nn.Module,
) -> GrownState:
    """Expand the state of an optimizer to the grown model.

    With one share a per copy, a copy's gradient is g* = a g. Its moments are therefore m* = a m and v* = a^2
    v. The momentum of RMSprop averages g / sqrt(v), which stays as it is. Elements that are no copies start
    with m = 0 and the mean of v over their tensor: with v = 0 at a late step Adam's first update would exceed
    3 times the learning rate. Parameters of new blocks have no state, and so count their own steps.

    Args:
        plan: The plan that grew the model, with split="scalar" or "even".
        optimizer: The small model's optimizer, or its state dict.
        model: The small model.
        big: The grown model.

    Returns:
        A `GrownState`: the state dict, and which parameters it is exact for.

    Raises:
        UnsupportedError: The plan has split="random", which mixes gradients, or the optimizer keeps an
            unknown kind of state, or a model is in DDP, FSDP, torch.compile or AveragedModel.
        MismatchError: The optimizer belongs to another model, or a model is not the plan's.
        FormatError: An argument is of another kind.

    Example:
        >>> plan = qsync.plan_expansion(small, recipe, split="scalar")
        >>> big = plan.expand(small)
        >>> grown = qsync.expand_optimizer(plan, optimizer, small, big)
        >>> new = torch.optim.AdamW(big.parameters()); new.load_state_dict(grown.state_dict)
    """
    check_kind(plan, ModelMap, "plan", "qsync.plan_expansion")
    plan.check_small(model)
    plan.check_grown(big)
    if plan.split == "random":
        raise UnsupportedError(
            'with split="random" the copies\' gradients are not multiples of the small ones; grow with '
            'split="scalar" to carry the optimizer\'s state, or start a fresh optimizer'
        )
    groups, known = _by_name(optimizer, model)
    state: dict[int, dict[str, Any]] = {}
    grown: list[dict[str, Any]] = []
    found: dict[str, list[str]] = {"exact": [], "approximate": [], "fresh": []}
    number = 0
    for options, names in groups:
        first = number
        for name, value in big.named_parameters():
            m = plan.tensors.get(name)
            if m is None or m.source not in names:
                continue
            if m.is_new or not known.get(m.source):
                found["fresh"].append(name)
            else:
                state[number] = _grown(m, known[m.source], value, options)
                is_known = is_exact(m) and (m.is_identity or not _adds_weights(options))
                found["exact" if is_known else "approximate"].append(name)
            number += 1
        grown.append({**options, "params": list(range(first, number))})
    return GrownState({"state": state, "param_groups": grown}, *(tuple(found[k]) for k in found))


def _check_whole(state: Mapping[str, Any]) -> None:
    """Raise MismatchError for one rank's part of a divided optimizer's state."""
    if PART in state:
        raise MismatchError(
            "this is one rank's part of a divided optimizer's state; call optimizer.state_dict() on every "
            "rank, and give what rank 0 got"
        )


def _by_name(
    optimizer: torch.optim.Optimizer | Mapping[str, Any], model: torch.nn.Module
) -> tuple[list[tuple[dict[str, Any], list[str]]], dict[str, dict[str, Any]]]:
    """Return the options and parameter names of each group, and the state by parameter name."""
    parameters = dict(model.named_parameters())
    if isinstance(optimizer, torch.optim.Optimizer):
        ids = {id(value): name for name, value in parameters.items()}
        if strange := [p for group in optimizer.param_groups for p in group["params"] if id(p) not in ids]:
            raise MismatchError(
                f"the optimizer holds a parameter of shape {tuple(strange[0].shape)} that the model lacks; "
                "give the model that it was created for"
            )
        listed = [(group, [ids[id(p)] for p in group["params"]]) for group in optimizer.param_groups]
        saved = optimizer.state_dict()  # a divided optimizer gathers all parts, on rank 0
        _check_whole(saved)
        order = [name for _, names in listed for name in names]
        state = {order[k]: dict(values) for k, values in saved["state"].items()}
    else:
        check_kind(optimizer, Mapping, "optimizer", "torch.optim.AdamW or its state_dict()")
        kinds = isinstance(optimizer.get("state"), Mapping), isinstance(optimizer.get("param_groups"), list)
        if not all(kinds):
            raise MismatchError(
                "this is not an optimizer's state dict: it lacks state or param_groups; give "
                "optimizer.state_dict()"
            )
        _check_whole(optimizer)
        groups = optimizer["param_groups"]
        keys = [key for group in groups for key in group["params"]]
        order = [name for group in groups for name in group.get("param_names", ())]
        if not order and len(groups) > 1:
            raise UnsupportedError(
                f"the {len(groups)} groups of the optimizer's state do not name their parameters; give the "
                "optimizer itself, or create it from model.named_parameters()"
            )
        order = order or list(parameters)
        if len(order) != len(keys) or not set(order) <= parameters.keys():
            raise MismatchError(
                f"the optimizer's state has {len(keys)} parameters, but the model has {len(parameters)}; "
                "give its own model, or the optimizer itself if it covers only some of them"
            )
        name_of = dict(zip(keys, order, strict=True))
        if strange_keys := sorted(optimizer["state"].keys() - name_of.keys(), key=str):
            raise MismatchError(
                f"the optimizer's state has an entry {shortened(strange_keys[0])} that no group lists; give "
                "an unchanged optimizer.state_dict()"
            )
        listed = [(group, [name_of[k] for k in group["params"]]) for group in groups]
        state = {name_of[k]: dict(values) for k, values in optimizer["state"].items()}
    handled = ("params", "param_names")
    return [({k: v for k, v in group.items() if k not in handled}, names) for group, names in listed], state


def is_exact(m: TensorMap) -> bool:
    """Return whether a grown gradient is a known multiple of the small one in every copy."""
    return all(axis is None or axis.is_exact for axis in m.axes)


def grown_gradient(m: TensorMap, gradient: torch.Tensor, power: int = 1) -> torch.Tensor:
    """Expand a power of a tensor's gradient to the grown tensor, with 0 outside of copies.

    A copy along a written axis gets the share of its readers, divided by the scale of the copy. A copy along
    a read axis gets the whole gradient of the source, because it reads the same values.
    """
    made = gradient
    for dim, axis in enumerate(m.axes):
        if axis is None:
            continue
        made = made.index_select(dim, axis.growth.index.clamp(min=0).to(made.device))
        part = axis.growth.is_copy.double() if axis.is_read else axis.shares
        if axis.growth.scale is not None and not axis.is_read:
            part = part / axis.growth.scale
        made = made * along(torch.where(axis.growth.is_copy, part**power, 0.0), dim, made)
    return made / m.factor**power


def _adds_weights(options: Mapping[str, Any]) -> bool:
    """Return whether a group has coupled weight decay, which adds weights to their gradients."""
    return bool(options.get("weight_decay")) and not options.get("decoupled_weight_decay", False)


def _power_of(key: str, known: Mapping[str, Any]) -> int | None:
    """Return the power of the gradient that a state entry averages; None for an unknown entry."""
    if key == "momentum_buffer" and "square_avg" in known:
        return 0  # RMSprop averages g / sqrt(v)
    return 1 if key in _LINEAR else 2 if key in _SQUARED else None


def _grown(
    m: TensorMap, known: Mapping[str, Any], like: torch.Tensor, options: Mapping[str, Any]
) -> dict[str, Any]:
    """Expand the state of one parameter."""
    found: dict[str, Any] = {}
    for key, value in known.items():
        if key == "step" or not isinstance(value, torch.Tensor) or value.ndim == 0:
            found[key] = value.clone() if isinstance(value, torch.Tensor) else value
        elif (power := _power_of(key, known)) is not None:
            # Adagrad's start value
            start = float(options.get("initial_accumulator_value", 0.0)) if key == "sum" else 0.0
            grown = _moment(m, key, value.double() - start, power) + start
            found[key] = grown.to(dtype=value.dtype, device=like.device)
        else:
            raise UnsupportedError(
                f"the optimizer's state has an unknown entry {shortened(key)} for {m.source}, which cannot "
                "be expanded; start a fresh optimizer"
            )
    return found


def _moment(m: TensorMap, key: str, value: torch.Tensor, power: int) -> torch.Tensor:
    """Expand one moment: an average of a power of the gradient."""
    if tuple(value.shape) != m.source_shape:
        raise MismatchError(
            f"the optimizer's {key} of {m.source} has shape {tuple(value.shape)}, but the model's has "
            f"{m.source_shape}; give the optimizer of this model"
        )
    grown = grown_gradient(m, value, power)
    if power < 2:
        return grown
    is_copy = torch.ones(m.shape, dtype=torch.bool, device=grown.device)
    for dim, axis in enumerate(m.axes):
        if axis is not None:
            is_copy = is_copy & along(axis.growth.is_copy, dim, is_copy)
    return torch.where(is_copy, grown, grown[is_copy].mean())
