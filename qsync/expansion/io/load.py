"""Load a folder that holds a model, grown or not.

Two layouts are supported. Hugging Face's: config.json and model.safetensors, as `save_pretrained` writes
them. Custom classes: a config.json of {"class": "package.module:Class", "arguments": {...}} beside
model.safetensors. The folder of a grown model also holds expansion.json: the eps of its norms, constants that
its class computes from sizes (a scale of embeddings), and for a custom class the sizes for its recipe's
`build`.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from importlib import import_module
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import load_model

from qsync.errors import FormatError, MismatchError, UnsupportedError, shortened
from qsync.expansion.recipe import module_kinds
from qsync.expansion.recipe.shipped_recipes import recipe_of
from qsync.expansion.recipe.sizes import first_few
from qsync.records.json_files import check_kind, read_json
from qsync.records.record_json import FileRecord, as_record

CONFIG, WEIGHTS, EXPANSION = "config.json", "model.safetensors", "expansion.json"


@dataclass(frozen=True, slots=True)
class Growth(FileRecord):
    """The contents of expansion.json: the eps of norms by path, and the plan of the expansion.

    `constants` are buffers of one number that no state dict holds.
    """

    FILE_KIND = "expansion"

    eps: Mapping[str, Any]
    plan: Mapping[str, Any]
    constants: Mapping[str, float] = field(default_factory=dict)


def load_expanded(folder: str | Path) -> torch.nn.Module:
    """Load the model in a folder, grown or not, with the eps of its norms and its constants.

    Args:
        folder: A folder with config.json and model.safetensors; see this module for the two layouts.

    Returns:
        The model, in the type of its weights.

    Raises:
        FormatError: The folder holds no model, or a file in it is malformed.
        MismatchError: Weights and config belong to different models.
        UnsupportedError: Weights are quantized or of several types, or transformers is not installed.

    Example:
        >>> model = qsync.load_expanded("big")
    """
    check_kind(folder, (str, Path), "folder", "qsync.save_expanded")
    folder = Path(folder)
    if (folder / "adapter_config.json").is_file():
        raise UnsupportedError(
            f"{folder} holds adapters of peft, which do not grow; merge them into their model "
            "(merge_and_unload, then save_pretrained into another folder), or give a folder without them"
        )
    config = read_json(folder / CONFIG)
    growth = Growth.load(file) if (file := folder / EXPANSION).is_file() else Growth({}, {})
    if "class" in config:
        model = _load_custom(folder, config, growth)
    elif "model_type" in config:
        model = _load_pretrained(folder, config)
    else:
        raise FormatError(
            f"{folder / CONFIG} does not name a model: write "
            f'{{"class": "package.module:Class", "arguments": {{}}}}, or save a Hugging Face model '
            "there"
        )
    for path, eps in growth.eps.items():
        try:
            module = model.get_submodule(path)
        except AttributeError:
            module = None
        if module is None or type(eps) not in (int, float):
            raise FormatError(
                f"{folder / EXPANSION}: eps of {shortened(path)} is {shortened(eps)}; the model has no such "
                "norm, or eps is not a number; grow the model again"
            )
        setattr(module, module_kinds.eps_name(module) or "eps", eps)
    buffers = dict(model.named_buffers())
    for name, value in growth.constants.items():
        if name not in buffers or buffers[name].numel() != 1:
            raise FormatError(
                f"{folder / EXPANSION}: {shortened(name)} is {shortened(value)}, but the model has no such "
                "constant; grow the model again"
            )
        buffers[name].fill_(value)
    return model


def _load_custom(folder: Path, config: Mapping[str, Any], growth: Growth) -> torch.nn.Module:
    """Load a model of a custom class."""
    where = str(folder / CONFIG)
    name = as_record(config["class"], str, f"{where}, class")
    arguments = as_record(config.get("arguments", {}), dict[str, Any], f"{where}, arguments")
    path, _, attribute = name.partition(":")
    try:
        made = getattr(import_module(path), attribute)(**arguments)
    except (ImportError, AttributeError, ValueError) as error:
        raise FormatError(
            f"{where} names the class {shortened(name)}, which cannot be imported ({shortened(error)}); "
            "correct it"
        ) from error
    except TypeError as error:
        raise FormatError(
            f"{where}: {name} does not accept these arguments ({shortened(error)}); correct them"
        ) from error
    sizes = growth.plan.get("sizes")
    if sizes:
        sizes = {k: tuple(v) if isinstance(v, list) else v for k, v in sizes.items()}
        made = recipe_of(made).build(made, sizes)
    made.to(_check_weights(folder, made))
    load_model(made, str(folder / WEIGHTS))
    return made  # type: ignore[no-any-return]


def _check_weights(folder: Path, model: torch.nn.Module) -> torch.dtype:
    """Return the type of the weights in a folder.

    Raises:
        MismatchError: The weights are not those of the model that the config builds.
    """
    path = folder / WEIGHTS
    if not path.is_file():
        raise FormatError(f"{path} is missing; save the weights there (safetensors.torch.save_model)")
    try:
        with safe_open(str(path), "pt") as file:
            found = {name: tuple(file.get_slice(name).get_shape()) for name in file.keys()}  # noqa: SIM118
            types = {file.get_tensor(name).dtype for name in found}
    except SafetensorError as error:
        raise FormatError(
            f"{path} is not a safetensors file ({shortened(error)}); save the weights again"
        ) from error
    wanted = {name: tuple(value.shape) for name, value in model.state_dict().items()}
    for name, shape in found.items():
        if wanted.get(name) != shape:
            raise MismatchError(
                f"{path} has {name} of shape {shape}, but {CONFIG} expects "
                f"{wanted.get(name, 'no such weight')}; give the config of these weights"
            )
    own = model.state_dict(keep_vars=True)
    shared = {id(value) for name, value in own.items() if name in found}
    missing = [name for name, value in own.items() if name not in found and id(value) not in shared]
    if missing:
        raise MismatchError(
            f"{path} lacks {first_few(missing)}, which {CONFIG} expects; give the config of these weights"
        )
    floating: set[torch.dtype] = {kind for kind in types if kind.is_floating_point}
    if len(floating) != 1:
        named = ", ".join(sorted(map(str, floating))) or "none"
        raise UnsupportedError(
            f"{path} holds weights of several types or quantized ones ({named}); save all weights in one "
            "floating-point type"
        )
    return floating.pop()


def _load_pretrained(folder: Path, config: Mapping[str, Any]) -> torch.nn.Module:
    """Load a Hugging Face model as the class that it was saved from."""
    try:
        import transformers
    except ImportError:
        raise UnsupportedError(
            f"{folder} holds a Hugging Face model; install transformers to read it"
        ) from None
    names = config.get("architectures") or []
    made = getattr(transformers, names[0], None) if names else None
    if made is None:
        raise FormatError(
            f"{folder / CONFIG} names no class of transformers in `architectures`; save the model again"
        )
    for key in ("quantization_config", "compression_config"):
        if key in config:
            method = config[key].get("quant_method", key) if isinstance(config[key], dict) else key
            raise UnsupportedError(
                f"{folder} holds weights quantized by {method}; grow the model in floating point, and lower "
                "its precision afterwards"
            )
    options = {"dtype": "auto", "output_loading_info": True, "ignore_mismatched_sizes": True}
    try:
        with quiet_transformers():
            model, info = made.from_pretrained(folder, local_files_only=True, **options)
    except (OSError, ValueError, RuntimeError, SafetensorError) as error:
        raise FormatError(
            f"{folder} cannot be read as a {names[0]}: {str(error).splitlines()[0]}; save it again"
        ) from error
    wrong = sorted(str(key[0] if isinstance(key, tuple) else key) for key in info.get("mismatched_keys", ()))
    wrong += sorted(info.get("missing_keys", ()))
    if wrong:
        raise MismatchError(
            f"the weights in {folder} do not match its {CONFIG}: {first_few(wrong)}; give the config of "
            "these weights"
        )
    return model  # type: ignore[no-any-return]


@contextmanager
def quiet_transformers() -> Iterator[None]:
    """Silence the notes and progress bars of transformers within the context."""
    import transformers

    logging: Any = transformers.logging

    before, bars = logging.get_verbosity(), logging.is_progress_bar_enabled()
    logging.set_verbosity_error()
    logging.disable_progress_bar()
    try:
        yield
    finally:
        logging.set_verbosity(before)
        if bars:
            logging.enable_progress_bar()
