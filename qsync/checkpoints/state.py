"""Turn the state of objects into JSON with named tensors, and back; also random state.

The state of a model has the keys of the plain model, that of an optimizer the names of parameters. So they
load under DDP, torch.compile, fully_shard or none of them, and where parameters have another order.
"""

from __future__ import annotations

import random
from collections import Counter, defaultdict
from collections.abc import Mapping
from typing import Any

import numpy as np
import torch

from qsync.errors import FormatError, MismatchError, shortened
from qsync.runtime.wrapping import wrapped_module

_TENSOR, _TUPLE, _COUNTER, _ITEMS = "@tensor", "@tuple", "@counter", "@items"


def split(value: Any, name: str, tensors: dict[str, torch.Tensor]) -> Any:
    """Return a state as JSON; its tensors go to `tensors` by their names.

    Raises FormatError, which names the place, for what is neither a tensor nor JSON.
    """
    if isinstance(value, torch.Tensor):
        tensors[name] = value.detach()
        return {_TENSOR: name}
    if value is None or isinstance(value, (bool, int, float, str)):
        return value
    if isinstance(value, Mapping) and all(isinstance(key, (str, int, float)) for key in value):
        keyed = [
            (key, split(item, f"{name}/{key}" if name else str(key), tensors)) for key, item in value.items()
        ]
        if isinstance(value, Counter):
            return {_COUNTER: keyed}
        if all(isinstance(key, str) and not key.startswith("@") for key in value):
            return dict(keyed)
        return {_ITEMS: keyed}
    if isinstance(value, (list, tuple)):
        items = [split(item, f"{name}/{position}", tensors) for position, item in enumerate(value)]
        return {_TUPLE: items} if isinstance(value, tuple) else items
    raise FormatError(
        f"the state {name} is a {type(value).__name__}, which a checkpoint cannot hold; return tensors, "
        "numbers, texts, lists and dicts from state_dict()"
    )


def join(value: Any, tensors: Mapping[str, torch.Tensor]) -> Any:
    """Return the state that `split` turned into JSON."""
    if isinstance(value, list):
        return [join(item, tensors) for item in value]
    if not isinstance(value, dict):
        return value
    if _TENSOR in value:
        return tensors[value[_TENSOR]]
    if _TUPLE in value:
        return tuple(join(item, tensors) for item in value[_TUPLE])
    for tag, kind in ((_COUNTER, Counter), (_ITEMS, dict)):
        if tag in value:
            return kind({key: join(item, tensors) for key, item in value[tag]})
    return {key: join(item, tensors) for key, item in value.items()}


def names_in(value: Any) -> list[str]:
    """Return the names of the tensors of a state that `split` turned into JSON."""
    found: defaultdict[str, torch.Tensor] = defaultdict(torch.Tensor)
    join(value, found)
    return list(found)


class ModelState:
    """The state of a model by the plain model's keys."""

    def __init__(self, model: torch.nn.Module) -> None:
        self.module = wrapped_module(model)

    def state_dict(self) -> dict[str, Any]:
        """Return the state by plain keys."""
        return {_plain(key): value for key, value in self.module.state_dict().items()}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Load a state that has plain keys."""
        self.module.load_state_dict({key: state[_plain(key)] for key in self.module.state_dict()})


class OptimizerState:
    """The state of an optimizer by names of parameters.

    torch's get_optimizer_state_dict takes a step of an optimizer that has no state yet, with gradients of
    zero: saving would change what is trained.
    """

    def __init__(self, model: torch.nn.Module, optimizer: torch.optim.Optimizer) -> None:
        self.optimizer = optimizer
        self.parameters = {_plain(name): each for name, each in wrapped_module(model).named_parameters()}
        names = {parameter: name for name, parameter in self.parameters.items()}
        groups = [group["params"] for group in optimizer.param_groups]
        if any(parameter not in names for group in groups for parameter in group):
            raise MismatchError("the optimizer has parameters that the model does not have; give its own")
        self.groups = [[names[parameter] for parameter in group] for group in groups]
        self.order = [name for group in self.groups for name in group]

    def state_dict(self) -> dict[str, Any]:
        """Return the state by names."""
        found = self.optimizer.state_dict()
        groups = zip(found["param_groups"], self.groups, strict=True)
        return {
            "class": class_of(self.optimizer),
            "state": {self.order[position]: state for position, state in found["state"].items()},
            "param_groups": [{**group, "params": names} for group, names in groups],
        }

    def check(self, state: Mapping[str, Any]) -> None:
        """Raise MismatchError for the state of an optimizer of another class or with other groups."""
        mine = class_of(self.optimizer)
        if state["class"] != mine:
            raise MismatchError(f"the checkpoint holds {state['class']}, the optimizer is {mine}; give that")
        saved = [sorted(group["params"]) for group in state["param_groups"]]
        if saved != [sorted(group) for group in self.groups]:
            raise MismatchError(
                f"the optimizer's {len(self.groups)} groups do not hold the parameters of the checkpoint's "
                f"{len(saved)}; make it as the saved one"
            )

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Load a state that has names; parameters may have another order in their group."""
        number = {name: position for position, name in enumerate(self.order)}
        groups = zip(state["param_groups"], self.groups, strict=True)
        self.optimizer.load_state_dict({
            "state": {number[name]: each for name, each in state["state"].items()},
            "param_groups": [{**group, "params": [number[name] for name in own]} for group, own in groups],
        })  # fmt: skip


def class_of(optimizer: Any) -> str:
    """Return the name of an optimizer's class; of what Accelerate wraps."""
    return type(getattr(optimizer, "optimizer", optimizer)).__name__


def _plain(key: str) -> str:
    """Return a key of a state dict without what wrappers of parts of the model add."""
    return key.replace("_orig_mod.", "").replace("_checkpoint_wrapped_module.", "")


def stateful_parts(
    model: torch.nn.Module, optimizer: torch.optim.Optimizer | None, objects: Mapping[str, Any]
) -> dict[str, Any]:
    """Return everything with a state by its name. FormatError for an object without state_dict."""
    parts: dict[str, Any] = {"model": ModelState(model)}
    if optimizer is not None:
        parts["optimizer"] = OptimizerState(model, optimizer)
    for name, each in objects.items():
        if not (hasattr(each, "state_dict") and hasattr(each, "load_state_dict")):
            raise FormatError(
                f"{name}= needs state_dict and load_state_dict, found {shortened(each)}; give them or leave "
                "it out"
            )
    return {**parts, **objects}


def random_state() -> dict[str, Any]:
    """Return this process's random state as JSON: torch's, its GPU's, NumPy's and Python's."""
    _, numbers, *rest = np.random.get_state()
    _, python, gauss = random.getstate()
    found = {
        "torch": _hex(torch.get_rng_state()),
        "numpy": [np.asarray(numbers).tobytes().hex(), *rest],
        "python": [np.asarray(python, dtype=np.uint32).tobytes().hex(), gauss],
    }
    if torch.cuda.is_available() and torch.cuda.is_initialized():  # type: ignore[no-untyped-call]
        found["cuda"] = _hex(torch.cuda.get_rng_state())
    return found


def set_random_state(state: Mapping[str, Any]) -> None:
    """Set this process's random state."""
    torch.set_rng_state(_tensor(state["torch"]))
    numbers, *rest = state["numpy"]
    np.random.set_state(("MT19937", np.frombuffer(bytes.fromhex(numbers), dtype=np.uint32), *rest))
    python, gauss = state["python"]
    numbers = np.frombuffer(bytes.fromhex(python), dtype=np.uint32)
    random.setstate((3, tuple(numbers.tolist()), gauss))
    if "cuda" in state and torch.cuda.is_available():
        torch.cuda.set_rng_state(_tensor(state["cuda"]))


def _hex(state: torch.Tensor) -> str:
    return state.numpy().tobytes().hex()


def _tensor(text: str) -> torch.Tensor:
    return torch.frombuffer(bytearray.fromhex(text), dtype=torch.uint8)
