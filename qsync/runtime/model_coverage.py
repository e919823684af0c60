"""`qsync.coverage`: report the precision of each product of a wrapped model, with reasons."""

from __future__ import annotations

import torch

from qsync.errors import MismatchError
from qsync.runtime.coverage import Coverage
from qsync.runtime.planned_forward import program_of
from qsync.runtime.wrapping import wrapped_module, wrapping_of


def coverage(model: torch.nn.Module) -> Coverage:
    """Print and return the precisions of a wrapped model's products, by reason.

    Args:
        model: the result of `qsync.wrap` or `qsync.hybrid`, after its first call.

    Returns:
        A record: `kept` counts products that run as requested; each of `rows` names products (`operators`)
            that run in one precision (`runs`) for one reason (`because`); `notes` concern the whole model.

    Raises:
        MismatchError: the model is not wrapped, or was not called yet.

    Example:
        >>> qsync.coverage(model)
    """
    module = wrapped_module(model)
    program, wrapping = program_of(module), wrapping_of(module)
    if wrapping is None or not program.was_called:
        raise MismatchError(f"{program.name} was not called yet, so nothing is traced; train a step first")
    found, _ = wrapping.covered(program)
    print(found)
    return found
