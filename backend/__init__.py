"""What a precision means, and the fastest way to compute it on each device."""

from __future__ import annotations

from importlib import import_module
from typing import Any

_PUBLIC = {
    "Choice": "selection",
    "Encoded": "encoding",
    "Kernels": "selection",
    "Operand": "encoding",
    "decode": "encoding",
    "encode": "encoding",
    "reference_kernel": "reference",
    "select": "selection",
}
__all__ = list(_PUBLIC)


def __getattr__(name: str) -> Any:
    # Lazy, so that what needs no kernels (planning) imports no torch.
    if name not in _PUBLIC:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(f"{__name__}.{_PUBLIC[name]}"), name)
