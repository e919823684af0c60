"""Save and load optimizer states by parameter names, for one, a list, or a wrapper of optimizers.

Of a divided optimizer, each rank has the entries of the parameters that it owns.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch

from qsync.distributed.divided_optimizer import division_of, own_parts
from qsync.errors import FormatError, MismatchError, shortened
from qsync.runtime.wrapping import wrapped_module

_Part = tuple[Mapping[str, Any], list[str]]  # an optimizer's state by parameter numbers, and their names


class OptimizerState:
    """An optimizer's state with parameter names in place of torch's numbers.

    Every torch optimizer's state inside `state_dict` (lists, wrappers) is translated; the rest is unchanged.
    torch's get_optimizer_state_dict is not used: it steps an optimizer without state, so saving would change
    training.
    """

    def __init__(self, model: torch.nn.Module, optimizer: Any) -> None:
        self._each = list(optimizer) if isinstance(optimizer, (list, tuple)) else [optimizer]
        self._is_list = isinstance(optimizer, (list, tuple))
        self.parameters = {plain_key(name): p for name, p in wrapped_module(model).named_parameters()}
        names = {parameter: name for name, parameter in self.parameters.items()}
        self._parts: list[tuple[Any, list[str]]] = []  # optimizers, with parameter names by number
        for part in _with_groups(self._each):
            own = [parameter for group in part.param_groups for parameter in group["params"]]
            if any(parameter not in names for parameter in own):
                raise MismatchError("the optimizer has parameters that the model lacks; pass the model's own")
            self._parts.append((part, [names[parameter] for parameter in own]))
        self._divided = {  # whether this rank holds a parameter's state, if that is divided
            name: found.holds(self.parameters[name])
            for part, own_names in self._parts
            if (found := division_of(part)) is not None
            for name in own_names
        }

    def is_own(self, name: str) -> bool:
        """Return whether this rank alone holds the state of a parameter."""
        return self._divided.get(name, False)

    def held(self, saved: Mapping[str, Any]) -> Any:
        """Return a saved state without the entries of parameters whose state other ranks hold."""

        def here(state: Mapping[str, Any]) -> Mapping[str, Any]:
            entries = {n: each for n, each in state["state"].items() if self._divided.get(n, True)}
            return {**state, "state": entries}

        return _mapped(saved, here) if self._divided else saved

    def state_dict(self) -> dict[str, Any]:
        """Return the state by parameter names; of a divided optimizer this rank's part."""
        with own_parts():
            return self._whole_state()

    def _whole_state(self) -> dict[str, Any]:
        kinds = [type(getattr(one, "optimizer", one)).__name__ for one in self._each]  # Accelerate's wrapper
        left = self._numbered_states()
        states = [_mapped(one.state_dict(), lambda state: _named(state, left)) for one in self._each]
        if self._is_list or not _is_state(states[0]):
            return {"class": ", ".join(kinds), "whole": states if self._is_list else states[0]}
        others = {key: value for key, value in states[0].items() if key not in ("state", "param_groups")}
        return {
            **({"others": others} if others else {}),
            "class": kinds[0], "state": states[0]["state"], "param_groups": states[0]["param_groups"],
        }  # fmt: skip

    def check(self, saved: Mapping[str, Any]) -> None:
        """Raise MismatchError for a saved state of another optimizer class or other parameter groups."""
        own = self.state_dict()
        groups = [
            [sorted(map(str, group)) for state in states_in(each) for group in _groups(state)]
            for each in (saved, own)
        ]
        if (saved["class"], groups[0]) != (own["class"], groups[1]):
            raise MismatchError(
                f"the checkpoint is of {saved['class']} with {len(groups[0])} groups of parameters, the "
                f"optimizer is {own['class']} with {len(groups[1])}; create the optimizer as the saved one"
            )

    def slots_of(self, saved: Mapping[str, Any]) -> Iterator[tuple[torch.Tensor, Any]]:
        """Yield each parameter with its entry in a saved optimizer state."""
        for state in states_in(saved):
            if all(isinstance(name, str) for group in _groups(state) for name in group):
                yield from ((self.parameters[name], slots) for name, slots in state["state"].items())

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Load a state by parameter names; the order of parameters within a group may differ."""
        own = {key: state[key] for key in ("state", "param_groups") if key in state}
        whole = state["whole"] if "whole" in state else {**state.get("others", {}), **own}
        with own_parts():
            parts = self._numbered_states()
        numbered = _mapped(whole, lambda one: _numbered(one, parts))
        for one, its in zip(self._each, numbered if self._is_list else [numbered], strict=True):
            one.load_state_dict(its)

    def _numbered_states(self) -> list[_Part]:
        """Return each torch optimizer's state with its parameters' names."""
        states = ((part.state_dict(), names) for part, names in self._parts)
        return [
            (state, names)
            for state, names in states
            if _is_state(state) and {n for group in _groups(state) for n in group} == set(range(len(names)))
        ]


def check_optimizer(optimizer: Any) -> None:
    """Raise FormatError unless the argument is an optimizer or a list of optimizers."""
    each = optimizer if isinstance(optimizer, (list, tuple)) else [optimizer]
    needed = ("step", "state_dict", "load_state_dict")
    if not each or not all(callable(getattr(one, name, None)) for one in each for name in needed):
        raise FormatError(
            f"optimizer must have {', '.join(needed)}, or be a list of such, found {shortened(optimizer)}; "
            "pass the training loop's optimizer"
        )


def plain_key(key: str) -> str:
    """Return a state dict key without the prefixes of wrappers (DDP, torch.compile)."""
    return key.replace("_orig_mod.", "").replace("_checkpoint_wrapped_module.", "")


def _with_groups(optimizers: list[Any]) -> list[Any]:
    """Return the optimizers with parameter groups, among these and those inside wrappers."""
    found: list[Any] = []
    ahead, seen = list(optimizers), dict[int, Any]()
    while ahead:
        each = ahead.pop(0)
        if id(each) in seen:
            continue
        seen[id(each)] = each
        if isinstance(each, (list, tuple, Mapping)):
            ahead += each.values() if isinstance(each, Mapping) else each
        elif hasattr(each, "step") and hasattr(each, "state_dict"):
            found += [each] if hasattr(each, "param_groups") else []
            held = getattr(each, "__dict__", {})
            ahead += [value for name, value in held.items() if name not in ("state", "param_groups")]
    return found


def _is_state(value: Any) -> bool:
    """Return whether a value is a torch optimizer's state_dict, by numbers or names."""
    return isinstance(value, Mapping) and {"state", "param_groups"} <= value.keys()


def _groups(state: Mapping[str, Any]) -> list[list[Any]]:
    return [group["params"] for group in state["param_groups"]]


def states_in(value: Any) -> Iterator[Mapping[str, Any]]:
    """Yield the optimizer states inside a state, be it raw or JSON."""
    if _is_state(value):
        yield value
    elif isinstance(value, (list, tuple, Mapping)):
        for each in value.values() if isinstance(value, Mapping) else value:
            yield from states_in(each)


def _mapped(value: Any, change: Callable[[Mapping[str, Any]], Any]) -> Any:
    """Return a copy of a state with a function applied to its optimizer states."""
    if _is_state(value):
        return change(value)
    if isinstance(value, dict):
        return {key: _mapped(each, change) for key, each in value.items()}
    return type(value)(_mapped(each, change) for each in value) if type(value) in (list, tuple) else value


def _named(state: Mapping[str, Any], left: list[_Part]) -> Mapping[str, Any]:
    """Return an optimizer's state by parameter names; unchanged if no known optimizer matches.

    `left` holds the states and names of the optimizers not matched yet. An optimizer is matched by its state,
    or before its first step by its groups.
    """
    like = [k for k, (own, _) in enumerate(left) if _groups(own) == _groups(state)]
    if not like:
        return state
    same = [k for k in like if all(state["state"].get(n) is kept for n, kept in left[k][0]["state"].items())]
    _, names = left.pop((same or like)[0])
    return {
        **state,
        "state": {names[number]: slots for number, slots in state["state"].items()},
        "param_groups": [
            {**group, "params": [names[number] for number in group["params"]]}
            for group in state["param_groups"]
        ],
    }


def _numbered(state: Mapping[str, Any], parts: list[_Part]) -> Mapping[str, Any]:
    """Return an optimizer's state by numbers, for the local optimizer with the same parameters."""
    wanted = {name for group in _groups(state) for name in group}
    own, names = next((part for part in parts if set(part[1]) == wanted), ({}, []))
    if not own:
        return state
    number = {name: k for k, name in enumerate(names)}
    return {
        **state,
        "state": {number[name]: slots for name, slots in state["state"].items()},
        "param_groups": [
            {**group, "params": mine["params"]}
            for group, mine in zip(state["param_groups"], own["param_groups"], strict=True)
        ],
    }
