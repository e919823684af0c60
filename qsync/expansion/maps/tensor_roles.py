"""The tensors of a small model: the line of the recipe for each, and the roles of its axes.

Tensors that cannot grow are rejected here.
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass
from fnmatch import fnmatchcase
from typing import Any

import torch
from torch.nn.modules.conv import _ConvNd

from qsync.errors import MismatchError, UnsupportedError
from qsync.expansion.recipe import module_kinds
from qsync.expansion.recipe.recipe import FIXED, Line, Recipe, attention_part, check_unwrapped
from qsync.expansion.recipe.sizes import first_few

# Suffixes that weight_norm, spectral_norm and pruning of torch give the original weight.
_REPARAMETRISED = ("_g", "_orig")


@dataclass(frozen=True, slots=True)
class Tensor:
    """One parameter or buffer of the small model, its line of the recipe, and its roles."""

    name: str
    value: torch.Tensor
    line: Line
    module: torch.nn.Module
    norm: str | None
    roles: tuple[str, ...]  # Return the path of the module.

    @property
    def path(self) -> str:
        """Return the path of the module."""
        return self.name.rpartition(".")[0]

    def spaces(self, dim: int) -> tuple[str, ...]:
        """Return the spaces stacked in an axis that is read or written."""
        if self.roles[dim] == "reads":
            return self.line.reads
        return (self.line.writes[dim],) if self.line.layout == "*" else self.line.writes

    @property
    def kind(self) -> str:
        """Return the name within the module: weight, bias, running_mean and so on."""
        return self.name.rpartition(".")[2]


def tensors_of(model: torch.nn.Module, recipe: Recipe) -> dict[str, Tensor]:
    """Return every parameter with its line, and every buffer that a line applies to, by name.

    Raises:
        UnsupportedError: A parameter has no line, or is not a plain floating-point tensor.
        MismatchError: Lines of the recipe contradict each other or the model.
    """
    check_unwrapped(model)
    parameters = dict(model.named_parameters(remove_duplicate=False))
    state = model.state_dict(keep_vars=True)
    unnamed: list[str] = []
    found: dict[str, Tensor] = {}
    for name, value in {**state, **parameters}.items():
        _check_plain(name, value, name in parameters, state)
    for name, value in {**parameters, **state}.items():
        line = recipe.line_of(name)
        if line is None:
            if name in parameters:
                unnamed.append(name)
            continue
        module = model.get_submodule(name.rpartition(".")[0])
        is_vector = not line.reads and fnmatchcase(name, line.pattern)  # a plain one, as that of a GRN
        norm = None
        if _grows(line) and not is_vector:
            norm = module_kinds.norm_kind(module, name.rpartition(".")[0])
        found[name] = Tensor(name, value, line, module, norm, _roles(name, value, line, module, norm))
    if unnamed:
        _check_adapters(model)
        raise UnsupportedError(
            f"the recipe {recipe.name} has no line for {first_few(unnamed)}; add a line with its "
            f"spaces, or `{unnamed[0].rpartition('.')[0] or unnamed[0]}  _ -> _` if it "
            "does not grow"
        )
    _check_norms(model, recipe, found)
    _check_written(recipe, found.values())
    return found


def _check_adapters(model: torch.nn.Module) -> None:
    """Raise UnsupportedError for a model with adapters of peft, which shipped recipes do not know."""
    if any(type(module).__module__.startswith("peft.") for module in model.modules()):
        raise UnsupportedError(
            f"{type(model).__name__} has adapters of peft, which do not grow; grow the model without them "
            "(merge_and_unload, unload, or get_base_model of prompts), and add new adapters afterwards"
        )


def _grows(line: Line) -> bool:
    """Return whether any space of a line can grow."""
    return bool({*line.reads, *line.writes} - {FIXED})


def _check_plain(name: str, value: Any, is_parameter: bool, state: Collection[str]) -> None:
    """Raise UnsupportedError for anything but a whole, plain floating-point weight."""
    kind = name.rpartition(".")[2]
    parametrised, is_new_style, _ = name.partition(".parametrizations.")
    if is_new_style:
        raise UnsupportedError(
            f"{parametrised} has a parametrization, which cannot grow with its weight; remove it first: "
            f'torch.nn.utils.parametrize.remove_parametrizations(module, "{name.split(".")[-2]}")'
        )
    stem = next((kind.removesuffix(end) for end in _REPARAMETRISED if kind.endswith(end)), "")
    if stem and any(name.removesuffix(kind) + f"{stem}_{part}" in state for part in ("v", "mask")):
        raise UnsupportedError(
            f"{name} belongs to a reparametrized weight (weight_norm, spectral_norm or pruning); call the "
            "remove function of torch.nn.utils first"
        )
    if torch.nn.parameter.is_lazy(value):
        raise UnsupportedError(f"{name} has no shape yet; run the model once on a batch, then grow it")
    is_plain = type(value) in (torch.Tensor, torch.nn.Parameter)
    is_float = is_plain and value.is_floating_point() and value.itemsize > 1
    if not is_plain or (is_parameter and not is_float):
        type_of = value.dtype if is_plain else type(value).__name__
        raise UnsupportedError(
            f"{name} is quantized or sharded ({type_of}); grow the model unsharded in floating point, and "
            "quantize or shard it afterwards"
        )


def _check_norms(model: torch.nn.Module, recipe: Recipe, tensors: dict[str, Tensor]) -> None:
    """Reject norms whose line does not fit a norm, and growing norms without a weight."""
    for t in tensors.values():
        reads, writes = t.line.reads, t.line.writes
        if (t.norm and (len(reads), len(writes)) != (1, 1)) or (t.norm and FIXED in (*reads, *writes)):
            raise MismatchError(
                f"{t.path} is a {t.norm}, but the recipe {recipe.name} has `{t.line}` for it; write one "
                "space that it reads and one that it writes"
            )
    known = {t.path for t in tensors.values()}
    for path, module in model.named_modules():
        if path in known or not module_kinds.is_without_weight(module):
            continue
        line = recipe.line_of(f"{path}.weight")
        whole = line is not None and line.reads == line.writes and {*line.reads} <= {*recipe.multiples}
        is_plain = isinstance(module, (torch.nn.LayerNorm, torch.nn.RMSNorm))
        if line is None or (_grows(line) and not (whole and is_plain)):
            raise UnsupportedError(
                f"{path} ({type(module).__name__}) has no weight to compensate a changed variance; give it "
                f"one (elementwise_affine=True, all ones), or the line `{path}  _ -> _` if its input does "
                "not grow; a layer norm's or RMS norm's input may grow to `multiples` (`stream -> stream`)"
            )


def _check_written(recipe: Recipe, tensors: Collection[Tensor]) -> None:
    """Reject a space that is read but never written, usually a misspelt name."""
    written = {space for t in tensors for space in t.line.writes}
    for t in tensors:
        for space in t.line.reads:
            writer = space.replace("mixed", "value") if attention_part(space) else space
            if writer not in {*written, FIXED}:
                names = ", ".join(sorted(name for name in written - {FIXED} if not attention_part(name)))
                raise MismatchError(
                    f"{t.path or t.name} reads {space}, which no line of the recipe {recipe.name} writes"
                    + (" a value for" if writer != space else f" (they write {names})")
                    + f"; correct `{t.line}`, or the line of what it reads"
                )
        if t.line.tied and not any(t.line.is_tied_to(other.name) for other in tensors):
            raise MismatchError(
                f"the recipe {recipe.name} ties {t.path or t.name} to {t.line.tied}, which the model lacks; "
                "correct the name, or leave out `tied`"
            )
    if "query" in written and not any("mixed" in t.line.reads for t in tensors):
        raise MismatchError(
            f"the recipe {recipe.name} has queries, but no line reads `mixed`; write it as input of "
            "attention's output projection"
        )


def _roles(
    name: str, value: torch.Tensor, line: Line, module: torch.nn.Module, norm: str | None
) -> tuple[str, ...]:
    """Return the role of each axis: "writes", "reads", or "" for an axis that does not grow."""
    last = name.rpartition(".")[2]
    fixed = ("",) * value.ndim
    if not _grows(line):
        return fixed
    if line.layout == "*" and len(line.writes) == value.ndim:
        return tuple("writes" if space != FIXED else "" for space in line.writes)
    if norm:
        return ("writes",) if value.ndim == 1 else fixed
    if isinstance(module, _ConvNd) and last in ("weight", "bias"):
        if module.groups == value.shape[0] and line.reads == line.writes:  # one filter per channel
            return ("writes", *fixed[1:])
        if module.groups != 1 or module.transposed:
            raise UnsupportedError(
                f"{name} is a grouped or transposed convolution, which qsync cannot grow; keep its spaces "
                f"fixed with the line `{line.pattern}  _ -> _`"
            )
        return ("writes", "reads", *fixed[2:]) if value.ndim > 1 else ("writes",)
    if isinstance(module, torch.nn.Embedding):
        if module.max_norm is not None:
            raise UnsupportedError(
                f"{name} has max_norm, which its grown rows would exceed; set max_norm to None first"
            )
        return ("", "writes")
    is_own = fnmatchcase(name, line.pattern)
    is_conv1d = type(module).__name__ == "Conv1D" and last == "weight"  # of transformers
    if value.ndim >= 2 and line.reads and (value.ndim == 2 or line.is_transposed or is_own):
        last_two = ("reads", "writes") if line.is_transposed or is_conv1d else ("writes", "reads")
        return (*fixed[2:], *last_two)
    if value.ndim == 1 and line.reads and not _is_bias(module):
        raise UnsupportedError(
            f"{name} of {type(module).__name__} reads {', '.join(line.reads)} but is not a norm that qsync "
            "recognizes; store a norm's eps in an attribute `eps`, or keep the space fixed with the line "
            f"`{line.pattern}  _ -> _`"
        )
    if value.ndim and (value.ndim == 1 or not line.reads):
        return (*fixed[:-1], "writes")
    raise UnsupportedError(
        f"{name} of {type(module).__name__} has {value.ndim} axes, whose roles are unknown; name the "
        "parameter itself in the recipe, or do not grow its spaces"
    )


def _is_bias(module: torch.nn.Module) -> bool:
    """Return whether a vector of a module is added to a product: the module also has a matrix."""
    return any(p.ndim > 1 for p in module.parameters(recurse=False))
