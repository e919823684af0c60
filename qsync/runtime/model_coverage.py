"""`qsync.coverage`: which products of a wrapped model run in which precision, and why."""

from __future__ import annotations

import torch

from qsync.errors import MismatchError
from qsync.runtime.coverage import Coverage
from qsync.runtime.planned_forward import program_of
from qsync.runtime.wrapping import wrapped_module, wrapping_of


def coverage(model: torch.nn.Module) -> Coverage:
    """Print, and return, which products of a wrapped model run in which precision, by reason.

    Args:
        model: what `qsync.wrap` or `qsync.hybrid` returned, after its first call.

    Returns:
        A record: `kept` of the products run as asked, and each of its `rows` names products (`operators`)
        that run in one precision (`runs`) for one reason (`because`); `notes` are of the whole model.

    Raises:
        MismatchError: the model is not wrapped, or was not called yet.

    Example:
        >>> qsync.coverage(model)
    """
    module = wrapped_module(model)
    program, wrapping = program_of(module), wrapping_of(module)
    if wrapping is None or not program.was_called:
        raise MismatchError(
            f"{program.name} was not called yet, and is traced at its first call; train a step, then ask"
        )
    found, _ = wrapping.covered(program)
    print(found)
    return found
