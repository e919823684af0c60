"""Verify that a grown model computes the small one's function: run both in FP64."""

from __future__ import annotations

import math
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_flatten_with_path, tree_map

from qsync.errors import CalibrationError, FormatError, UnsupportedError, shortened
from qsync.tracing.replaced_forward import plain_copy
from qsync.tracing.tracer import call_arguments, check_batch

TOLERANCE = 1e-9  # for weights in FP64: some hundred roundings of 1e-16, on values around 1
# Relative, for weights in a shorter type: each share is rounded when stored, by 2^-24 in FP32, 2^-11 in FP16
# and 2^-8 in BF16. The tolerance permits some dozen such roundings, in FP32 some thousand.
TOLERANCE_ROUNDED = {torch.float32: 1e-4, torch.float16: 1e-2, torch.bfloat16: 5e-2}


@dataclass(frozen=True, slots=True)
class Verified:
    """The result of a comparison.

    `max_difference` is the largest difference between outputs. It is relative to the largest output where
    weights are shorter than FP64 (`is_relative`). `not_compared` names outputs whose shapes differ.
    """

    max_difference: float
    tolerance: float
    is_relative: bool
    num_compared: int
    not_compared: tuple[str, ...] = ()

    @property
    def passed(self) -> bool:
        """Return whether the difference is within the tolerance."""
        return self.max_difference <= self.tolerance

    def __str__(self) -> str:
        kind = "relative " if self.is_relative else ""
        verdict = "the same function" if self.passed else "NOT the same function"
        return f"{verdict}: {kind}difference {self.max_difference:.1e}, tolerance {self.tolerance:.0e}"


def verify_expansion(
    small: torch.nn.Module, big: torch.nn.Module, inputs: Any, tolerance: float | None = None
) -> Verified:
    """Run both models in FP64 and evaluation mode, and compare their outputs.

    The function runs copies; both models stay unchanged. Explicit FP32 computations of a model (norms of
    several families have them) run in FP64 as well.

    Args:
        small: The small model.
        big: The grown model.
        inputs: One batch: a tensor, a tuple (positional) or a dict (keywords).
        tolerance: The largest permitted difference. Default: 1e-9, absolute, for weights in FP64. Shorter
            types round the shares of a split weight; the default is then relative to the largest output:
            1e-4 in FP32, 1e-2 in FP16, 5e-2 in BF16.

    Returns:
        The difference, the tolerance and the verdict (`passed`).

    Raises:
        FormatError: A model or the tolerance has a wrong type.
        CalibrationError: The batch is empty, the models cannot run on it, or outputs are not finite.
        UnsupportedError: No outputs have the same shape.

    Example:
        >>> print(qsync.verify_expansion(small, big, tokens))
        the same function: difference 2.8e-14, tolerance 1e-09
    """
    for name, model in (("small", small), ("big", big)):
        if not isinstance(model, torch.nn.Module):
            raise FormatError(f"{name} must be a torch.nn.Module, found {shortened(model)}; pass one")
    if tolerance is not None and not (type(tolerance) in (int, float) and 0 <= tolerance < math.inf):
        raise FormatError(f"tolerance must be a number from 0 on, found {shortened(tolerance)}; correct it")
    args, kwargs = call_arguments(inputs)
    check_batch(args, kwargs)
    types = {p.dtype for model in (small, big) for p in model.parameters()} - {torch.float64}
    is_relative = bool(types)
    if tolerance is None:
        tolerance = max((TOLERANCE_ROUNDED.get(kind, 1e-4) for kind in types), default=TOLERANCE)
    before, after = (_outputs(model, args, kwargs) for model in (small, big))
    alike = [name for name in before if name in after and before[name].shape == after[name].shape]
    if not alike:
        raise UnsupportedError(
            "the models have no outputs of the same shape; compare them with their training heads"
        )
    largest = max(float((before[name] - after[name]).abs().max()) for name in alike)
    scale = max(float(before[name].abs().max()) for name in alike) if is_relative else 1.0
    if not all(bool(torch.isfinite(found[name]).all()) for found in (before, after) for name in alike):
        raise CalibrationError(
            "the models return NaN or Inf on these inputs; give a batch with finite outputs"
        )
    others = tuple(sorted((before.keys() | after.keys()) - set(alike)))
    return Verified(largest / (scale or 1.0), tolerance, is_relative, len(alike), others)


def _outputs(
    model: torch.nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> dict[str, torch.Tensor]:
    """Return the floating-point outputs of a model's FP64 copy by their path in the output."""
    own = plain_copy(model).double().eval()
    with torch.no_grad(), in_float64():
        try:
            returned = own(*_double(args), **_double(kwargs))
        except (IndexError, KeyError, RuntimeError, TypeError, ValueError) as error:
            raise CalibrationError(
                f"{type(model).__name__} cannot run on these inputs ({shortened(error, 200)}); give a batch "
                "that it accepts"
            ) from error
    returned = dict(returned) if hasattr(returned, "items") else returned
    leaves, _ = tree_flatten_with_path(returned)
    return {
        "".join(map(str, path)) or "output": leaf
        for path, leaf in leaves
        if isinstance(leaf, torch.Tensor) and leaf.is_floating_point() and leaf.numel()
    }


def _double(values: Any) -> Any:
    """Convert the floating-point tensors in nested inputs to FP64."""
    return tree_map(
        lambda v: v.double() if isinstance(v, torch.Tensor) and v.is_floating_point() else v, values
    )


class _Float32AsFloat64(TorchFunctionMode):
    """Turn every request for FP32 into one for FP64."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is torch.Tensor.float:
            func = torch.Tensor.double
        args, kwargs = tree_map(lambda v: torch.float64 if v is torch.float32 else v, (args, kwargs or {}))
        if func is torch._grouped_mm:
            return _plain_grouped_mm(args[0], args[1], kwargs["offs"])
        return func(*args, **kwargs)


def _plain_grouped_mm(rows: torch.Tensor, matrices: torch.Tensor, offs: torch.Tensor) -> torch.Tensor:
    """Multiply each group of rows (T, K) by its own matrix (E, K, N): torch has no kernel in FP64."""
    parts = rows.tensor_split(offs.cpu().long())[: len(matrices)]
    return torch.cat([part @ matrix for part, matrix in zip(parts, matrices, strict=True)])


@contextmanager
def in_float64() -> Iterator[None]:
    """Compute in FP64 within the context, where the model requests FP32 too."""
    before = torch.get_default_dtype()
    torch.set_default_dtype(torch.float64)
    try:
        with _Float32AsFloat64():
            yield
    finally:
        torch.set_default_dtype(before)
