"""Convert states of objects to JSON with named tensors, and back; save and restore random state.

The state of a model has the keys of the plain model, that of an optimizer the names of parameters. So they
load with or without DDP, torch.compile and fully_shard, and with another order of parameters.
"""

from __future__ import annotations

import json
import random
from collections import Counter, defaultdict
from collections.abc import Mapping
from typing import Any

import numpy as np
import torch
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Shard

from qsync.checkpoints.optimizer_state import OptimizerState, check_optimizer, plain_key
from qsync.distributed.gradient_codecs import CompressedSum
from qsync.distributed.gradient_weighting import compressed_sum_of
from qsync.errors import FormatError, shortened
from qsync.runtime.wrapping import wrapped_module

Tensors = dict[str, torch.Tensor]
OPTIMIZER = "optimizer"  # its name among the saved objects


def split(value: Any, name: str, tensors: Tensors) -> Any:
    """Convert a state to JSON, and collect its tensors by name in `tensors`.

    Raises FormatError, which names the place, for a value that is neither a tensor nor JSON.
    """
    if isinstance(value, torch.Tensor):
        while name in tensors:  # duplicate names, as from {0: ..., "0": ...}
            name += "'"
        tensors[name] = value.detach()
        return {"@tensor": name}
    if value is None or isinstance(value, (bool, int, float, str)):
        return value
    if isinstance(value, (list, tuple)):
        parts = [split(item, f"{name}/{position}", tensors) for position, item in enumerate(value)]
        return {"@tuple": parts} if isinstance(value, tuple) else parts
    if isinstance(value, Counter):
        return {"@counter": split(dict(value), name, tensors)}
    if isinstance(value, Mapping) and all(isinstance(key, (str, int, float)) for key in value):
        below = f"{name}/" if name else ""
        items = [(key, split(item, f"{below}{key}", tensors)) for key, item in value.items()]
        is_plain = all(isinstance(key, str) and not key.startswith("@") for key in value)
        return dict(items) if is_plain else {"@dict": items}
    raise FormatError(
        f"the state {name} is a {type(value).__name__}, which can neither be saved nor sent to another "
        "card; return only tensors, numbers, texts, lists and dicts from state_dict()"
    )


def join(value: Any, tensors: Mapping[str, torch.Tensor]) -> Any:
    """Convert JSON and tensors of `split` back to the state."""
    if isinstance(value, list):
        return [join(item, tensors) for item in value]
    if not isinstance(value, dict):
        return value
    if "@tensor" in value:
        return tensors[value["@tensor"]]
    for tag, kind in (("@tuple", tuple), ("@counter", Counter), ("@dict", dict)):
        if tag in value:
            return kind(join(value[tag], tensors))
    return {key: join(item, tensors) for key, item in value.items()}


def names_in(value: Any) -> list[str]:
    """Return the tensor names in the JSON of `split`."""
    found: defaultdict[str, torch.Tensor] = defaultdict(torch.Tensor)
    join(value, found)
    return list(found)


class ModelState:
    """A model's state under the plain model's keys, without wrappers' prefixes."""

    def __init__(self, model: torch.nn.Module) -> None:
        self.module = wrapped_module(model)

    def state_dict(self) -> dict[str, Any]:
        """Return the state under plain keys."""
        return {plain_key(key): value for key, value in self.module.state_dict().items()}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Load a state with plain keys."""
        self.module.load_state_dict({key: state[plain_key(key)] for key in self.module.state_dict()})


class ResidualState:
    """What compressed gradients carry from step to step: each rank's residuals, and factors of low rank.

    Residuals of a parameter are one tensor, of which each rank holds its own row.
    """

    NAME = "gradient_residuals"

    def __init__(self, sums: CompressedSum) -> None:
        self._sums = sums

    def state_dict(self) -> dict[str, Any]:
        """Return residuals and factors by parameter."""
        residuals = {name: self._row(one) for name, one in self._sums.residuals.items()}
        return {
            "num_ranks": self._sums.num_ranks, "residuals": residuals, "queries": dict(self._sums.queries)
        }  # fmt: skip

    def empty_row(self, size: torch.Size) -> torch.Tensor:
        """Return an empty tensor of one row a rank, of which this rank holds its own."""
        return self._row(torch.empty(size[1]))

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Load a state of equally many ranks."""
        residuals = {name: one.to_local().flatten() for name, one in state["residuals"].items()}
        self._sums.load(residuals, state["queries"])

    def drop(self) -> None:
        """Begin without residuals."""
        self._sums.load({}, {})

    def fits(self, state: Mapping[str, Any] | None) -> bool:
        """Return whether a saved state is of equally many ranks."""
        return state is not None and state["num_ranks"] == self._sums.num_ranks

    def _row(self, own: torch.Tensor) -> torch.Tensor:
        mesh = DeviceMesh.from_group(self._sums.group, own.device.type)  # type: ignore[arg-type]
        return DTensor.from_local(own.unsqueeze(0), mesh, [Shard(0)], run_check=False)


def stateful_parts(model: torch.nn.Module, optimizer: Any, objects: Mapping[str, Any]) -> dict[str, Any]:
    """Return every object with a state, by name. Raises FormatError for one without state_dict."""
    for name, each in objects.items():
        if not name.isidentifier():
            raise FormatError(
                f"{shortened(name)} cannot name an object and its file; use only letters, digits and _"
            )
        if not (hasattr(each, "state_dict") and hasattr(each, "load_state_dict")):
            raise FormatError(
                f"{name}= must have state_dict and load_state_dict, found {shortened(each)}; add them or "
                "leave it out"
            )
    if optimizer is not None:
        check_optimizer(optimizer)
    own = {OPTIMIZER: OptimizerState(model, optimizer)} if optimizer is not None else {}
    sums = compressed_sum_of(model)
    carried = {ResidualState.NAME: ResidualState(sums)} if sums is not None else {}
    return {"model": ModelState(model), **own, **objects, **carried}


def random_state() -> str:
    """Return this process's random state as JSON: torch, its GPU, NumPy and Python."""
    numpy: Any = np.random.get_state(legacy=False)
    numpy["state"]["key"] = numpy["state"]["key"].tolist()
    found = {"torch": torch.get_rng_state().tolist(), "numpy": numpy, "python": random.getstate()}
    if torch.cuda.is_available() and torch.cuda.is_initialized():  # type: ignore[no-untyped-call]
        found["cuda"] = torch.cuda.get_rng_state().tolist()
    return json.dumps(found)


def set_random_state(text: str) -> None:
    """Restore this process's random state from JSON."""
    state = json.loads(text)
    version, numbers, gauss = state["python"]
    random.setstate((version, tuple(numbers), gauss))
    np.random.set_state(state["numpy"])
    torch.set_rng_state(torch.tensor(state["torch"], dtype=torch.uint8))
    if "cuda" in state and torch.cuda.is_available():
        torch.cuda.set_rng_state(torch.tensor(state["cuda"], dtype=torch.uint8))
