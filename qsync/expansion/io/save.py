"""Save a grown model to a folder atomically, with the data that a state dict lacks.

ema.safetensors (a moving average of the weights) and optimizer.pt (an optimizer's state dict) may lie
beside the weights; they are expanded as well. `qsync.expansion.io.load` describes the other files.
"""

from __future__ import annotations

import inspect
import json
import shutil
import sys
import tempfile
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file, save_model

from qsync.errors import FormatError, MismatchError, UnsupportedError, shortened
from qsync.expansion.apply.optimizer_state import expand_optimizer
from qsync.expansion.io.load import CONFIG, EXPANSION, WEIGHTS, Growth, quiet_transformers
from qsync.expansion.maps.describe import as_json
from qsync.expansion.plan.expansion_plan import ExpansionPlan
from qsync.expansion.recipe import module_kinds
from qsync.expansion.recipe.recipe import Recipe
from qsync.expansion.recipe.sizes import first_few
from qsync.records.json_files import check_kind, read_json, write_json

AVERAGE, OPTIMIZER = "ema.safetensors", "optimizer.pt"


def save_expanded(
    big: torch.nn.Module, folder: str | Path, plan: ExpansionPlan, arguments: Mapping[str, Any] | None = None
) -> Path:
    """Save a grown model atomically to a folder that `load_expanded` reads.

    Args:
        big: The grown model.
        folder: A new or empty folder.
        plan: The plan that grew the model.
        arguments: The arguments of the small model's class, for a class outside of transformers that carries
            its recipe.

    Returns:
        The path of the folder.

    Raises:
        FormatError: The folder is not empty, JSON cannot hold the arguments, the class does not take them, or
            an argument of this function is of another kind.
        MismatchError: `big` is not what the plan grew.
        UnsupportedError: `load_expanded` could not find the class or its recipe, or the model is in DDP,
            FSDP, torch.compile or AveragedModel.

    Example:
        >>> qsync.save_expanded(big, "big", plan, arguments={"num_layers": 6, "width": 384})
    """
    check_kind(folder, (str, Path), "folder", "pathlib.Path")
    check_kind(plan, ExpansionPlan, "plan", "qsync.plan_expansion")
    plan.check_grown(big)
    _check_loadable(big, arguments)
    return _write_atomically(Path(folder), lambda into: _save(big, into, plan, arguments))


def _check_loadable(big: torch.nn.Module, arguments: Mapping[str, Any] | None) -> None:
    """Raise UnsupportedError or FormatError for a model that `load_expanded` could not build."""
    kind = type(big)
    if hasattr(big, "save_pretrained"):
        import transformers

        if not hasattr(transformers, kind.__name__):
            raise UnsupportedError(
                f"load_expanded cannot find the class {kind.__name__} in transformers; save its "
                "state_dict() and the eps of its norms yourself"
            )
        return
    if getattr(sys.modules.get(kind.__module__), kind.__qualname__, None) is not kind:
        raise UnsupportedError(
            f"load_expanded could not import the class {kind.__module__}:{kind.__qualname__}; define it at "
            "the top of a module"
        )
    if not isinstance(getattr(kind, "recipe", None), Recipe):
        raise UnsupportedError(
            f"load_expanded needs a recipe to build a {kind.__name__}; give the class an attribute `recipe`"
        )
    try:
        inspect.signature(kind).bind(**dict(arguments or {}))
    except (TypeError, ValueError) as error:
        raise FormatError(
            f"{kind.__name__} does not accept these arguments ({shortened(error)}); set arguments= to those "
            "of the small model"
        ) from error


def expand_folder(
    small: Path, folder: Path, plan: ExpansionPlan, model: torch.nn.Module, big: torch.nn.Module
) -> Path:
    """Expand and write the contents of a folder: weights, moving average and optimizer state."""
    config = read_json(small / CONFIG)

    def save(into: Path) -> None:
        _save(big, into, plan, config.get("arguments"))
        if (small / AVERAGE).is_file():
            with torch.no_grad():
                average = plan.grown(_load_average(small / AVERAGE, model))
            tied = {name for name, m in plan.tensors.items() if m.tied}
            save_file({k: v.contiguous() for k, v in average.items() if k not in tied}, into / AVERAGE)
        if (small / OPTIMIZER).is_file():
            try:
                state = torch.load(small / OPTIMIZER, map_location="cpu", weights_only=True)
            except Exception as error:  # unpickling may raise anything
                raise FormatError(
                    f"{small / OPTIMIZER} is not an optimizer's state ({shortened(error)}); write it with "
                    "torch.save(optimizer.state_dict(), ...), or move it away"
                ) from error
            torch.save(expand_optimizer(plan, state, model, big).state_dict, into / OPTIMIZER)

    return _write_atomically(folder, save)


def _load_average(path: Path, model: torch.nn.Module) -> dict[str, torch.Tensor]:
    """Load a moving average of the weights; the model supplies buffers and tied names."""
    try:
        found = load_file(path)
    except SafetensorError as error:
        raise FormatError(
            f"{path} is not a safetensors file ({shortened(error)}); write it again, or move it away"
        ) from error
    own = dict(model.named_parameters())
    if strange := sorted(found.keys() - model.state_dict().keys()):
        raise MismatchError(
            f"{path} averages {first_few(strange)}, which the model lacks; give this model's average"
        )
    if missing := sorted(own.keys() - found.keys()):
        raise MismatchError(
            f"{path} lacks {first_few(missing)}; give an average of all of the model's weights"
        )
    first = {id(value): name for name, value in own.items()}
    everything = model.named_parameters(remove_duplicate=False)
    return {**model.state_dict(), **{name: found[first[id(value)]] for name, value in everything}, **found}


def _save(big: torch.nn.Module, into: Path, plan: ExpansionPlan, arguments: Mapping[str, Any] | None) -> None:
    """Write weights, config and expansion metadata."""
    eps = {
        path: module_kinds.eps_of(module)
        for path, module in big.named_modules()
        if path in plan.eps
        or (module_kinds.eps_name(module) and isinstance(getattr(module, "eps", None), float))
    }
    held = big.state_dict()
    constants = {
        name: value.item()
        for name, value in big.named_buffers()
        if name not in held and value.is_floating_point() and value.numel() == 1
    }
    if hasattr(big, "save_pretrained"):
        with quiet_transformers():
            big.save_pretrained(into)  # type: ignore[operator]
    else:
        name = f"{type(big).__module__}:{type(big).__qualname__}"
        try:
            config = json.loads(json.dumps({"class": name, "arguments": dict(arguments or {})}))
        except (TypeError, ValueError) as error:
            raise FormatError(
                f"the arguments of {name} cannot be written as JSON ({shortened(error)}); use only numbers, "
                "texts, lists and dicts"
            ) from error
        write_json(into / CONFIG, config)
        save_model(big, str(into / WEIGHTS))
    Growth(eps, as_json(plan), constants).save(into / EXPANSION)


def check_free(folder: Path) -> None:
    """Raise FormatError for a folder that is not empty."""
    if folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
        raise FormatError(f"{folder} already exists and is never overwritten; name another folder")


def _write_atomically(folder: Path, save: Callable[[Path], object]) -> Path:
    """Write a folder under a temporary name beside it, then rename it."""
    check_free(folder)
    folder.parent.mkdir(parents=True, exist_ok=True)
    beside = Path(tempfile.mkdtemp(dir=folder.parent, prefix=f".{folder.name}."))
    try:
        save(beside)
        beside.chmod(0o755)
        if folder.exists():
            folder.rmdir()
        beside.rename(folder)
    finally:
        shutil.rmtree(beside, ignore_errors=True)
    return folder
