"""Find and read a cached plan, so that a restarted job does not profile again.

`records/plan_folder.py` writes plans.
"""

from __future__ import annotations

import argparse
import inspect
import types
from collections.abc import Mapping, Sequence
from dataclasses import fields, is_dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch

import qsync
from qsync.backend.kernel_cache import user_folder
from qsync.distributed.agreement import from_rank_zero
from qsync.errors import FormatError, QSyncError, shortened
from qsync.records.cluster import DeviceClass
from qsync.records.graph import OpGraph, digest
from qsync.records.plans import Plan


def cache_folder(given: str | Path | None) -> Path:
    """Return the folder of cached plans: the given one, or the user's cache.

    Raises QSyncError for a user without a home folder who gives none, FormatError for an invalid path.
    """
    if given is not None and (not isinstance(given, (str, Path)) or "\0" in str(given)):
        raise FormatError(
            f"cache_dir must be the path of a folder, found {shortened(given)}; correct it or leave it out"
        )
    found = Path(given) if given is not None else user_folder()
    if found is None:
        raise QSyncError(
            "this user has no home folder for cached plans; pass cache_dir, or set XDG_CACHE_HOME"
        )
    return found


def make_folder(folder: Path) -> None:
    """Create a plan's folder before its profiles are measured. Raises FormatError if it cannot be created."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise FormatError(
            f"the plan cannot be saved in {shortened(str(folder), 200, quote=False)} ({error.strerror}); "
            "set cache_dir to a writable folder"
        ) from error


def cache_key(graph: OpGraph, classes: Sequence[DeviceClass], options: Mapping[str, object]) -> str:
    """Return the name of a plan's folder: a hash of step, device classes, versions and options.

    The link is left out, because its measurement takes a second and differs in every job.
    """
    stated = [
        [
            *(c.name, c.device, c.hardware, c.emulated_share, c.count, c.memory_bytes),
            [str(p) for p in c.precisions],
        ]
        for c in classes
    ]
    chosen = {name: stable_text(value) for name, value in options.items()}
    return digest([step_key(graph), stated, chosen])


def step_key(graph: OpGraph) -> str:
    """Return a hash of a captured step, and of the versions of qsync and torch.

    It covers shapes, types, trained parameters, and the number of calls per step.
    """
    tensors = [[value.name, value.dtype, value.requires_grad] for value in graph.inputs]
    step = [tensors, [op.dtype for op in graph.ops], graph.num_calls]
    return digest([graph.hash, graph.shapes_hash, step, qsync.__version__, torch.__version__])


def cached_plan(folder: Path) -> Plan | None:
    """Return rank 0's cached plan on every rank; None if it is missing or malformed."""

    def read() -> dict[str, Any] | None:
        try:
            return Plan.load(folder / "plan.json").to_json()
        except QSyncError:
            return None

    found = from_rank_zero("reading the plan cache", read)
    return Plan.from_json(found) if found is not None else None


def stable_text(value: object) -> str:
    """Return a text of a value that is equal in every run: code and names instead of addresses.

    >>> stable_text(torch.optim.AdamW)
    """
    return _text(value, ())


def _text(value: object, inside: tuple[int, ...]) -> str:
    """Return a value's stable text; `inside` holds the enclosing functions' code, against recursion."""
    if isinstance(value, partial):
        arguments = [_part(each, inside) for each in (*value.args, value.keywords)]
        return digest([_text(value.func, inside), arguments])
    code = getattr(value, "__code__", None)
    if code is not None:
        if id(code) in inside:
            return str(code.co_qualname)
        inside, read = (*inside, id(code)), _names(code)
        named = inspect.getclosurevars(value)  # type: ignore[arg-type]
        defaults = inspect.signature(value).parameters  # type: ignore[arg-type]
        seen = {**named.globals, **named.nonlocals, "self": _settings(getattr(value, "__self__", None))}
        return digest([
            code.co_qualname, _instructions(code),
            {name: _part(each, inside, read) for name, each in seen.items()},
            {name: _part(each.default, inside, read) for name, each in defaults.items()},
        ])  # fmt: skip
    if callable(value) and hasattr(value, "__qualname__"):
        return f"{value.__module__}.{value.__qualname__}"
    if callable(value):  # an object whose repr may contain its address
        text = "" if type(value).__repr__ is object.__repr__ else str(value)
        of_type = [type(value).__qualname__, text, _text(type(value).__call__, inside)]
        return digest([*of_type, _part(_settings(value), (*inside, id(value)))])
    return str(value)


def _settings(value: object) -> object:
    """Return an object's attributes; classes, modules and objects without any are returned themselves."""
    if isinstance(value, (type, types.ModuleType)) or not hasattr(value, "__dict__"):
        return value
    return vars(value)


def _instructions(code: types.CodeType) -> list[object]:
    """Return a code object's instructions, with names looked up and nested functions."""
    constants = [
        _instructions(each) if isinstance(each, types.CodeType) else repr(each) for each in code.co_consts
    ]
    return [code.co_code.hex(), list(code.co_names), constants]


def _names(code: types.CodeType) -> frozenset[str]:
    """Return the attribute names and texts that a code object or its nested functions look up."""
    texts = {each for each in code.co_consts if isinstance(each, str)}
    nested = [_names(each) for each in code.co_consts if isinstance(each, types.CodeType)]
    return frozenset(code.co_names).union(texts, *nested)


def _part(value: object, inside: tuple[int, ...], read: frozenset[str] | None = None) -> str:
    """Return the stable text of classes, functions, numbers, texts and collections; of others, the type.

    Of settings only the entries that the function reads count: others, such as a run's name, may change.
    """
    if id(value) in inside:  # a collection that contains itself
        return type(value).__qualname__
    if is_dataclass(value) and not isinstance(value, type):
        value = {each.name: getattr(value, each.name, None) for each in fields(value)}
    elif isinstance(value, (argparse.Namespace, types.SimpleNamespace)):
        value = vars(value)
    within = (*inside, id(value))
    if isinstance(value, Mapping):
        kept = [(key, each) for key, each in value.items() if read is None or str(key) in read]
        return str([(str(key), _part(each, within, read)) for key, each in kept])
    if isinstance(value, (list, tuple)):
        return str([_part(each, within, read) for each in value])
    if value is None or isinstance(value, (int, float, str)):
        return repr(value)
    # A library's function counts by name: the key has the versions, and its code may be long.
    if isinstance(value, types.FunctionType) and "site-packages" not in value.__code__.co_filename:
        return _text(value, inside)
    return str(getattr(value, "__qualname__", type(value)))
