"""Make wrapped models loadable with `torch.load(weights_only=True)`, as plain data.

A file names one qsync function, `qsync._import_qsync_first`, and kinds of parts. Importing qsync registers it
as safe; `restored` builds only known kinds, from checked data.
"""

from __future__ import annotations

from typing import Any

import torch

from qsync.errors import FormatError, shortened
from qsync.runtime.activation_recomputation import Recomputed
from qsync.runtime.planned_forward import PlannedForward
from qsync.runtime.wrapping import Wrapping
from qsync.tracing.replaced_forward import REFUSE_REPLICAS, NoHook


def restored(kind: str, *data: Any) -> Any:
    """Rebuild a part of a saved model. Raises FormatError for data that this qsync did not write."""
    try:
        if kind in ("forward", "recomputed"):
            of = PlannedForward if kind == "forward" else Recomputed
            torch.serialization.add_safe_globals([of])  # its state follows
            return of.__new__(of)
        if kind == "wrapping":
            return Wrapping.from_json(*data)
        if kind in ("replicas", "hook"):
            return REFUSE_REPLICAS if kind == "replicas" else NoHook()
        raise ValueError(kind)
    except (AttributeError, FormatError, KeyError, TypeError, ValueError) as error:
        raise FormatError(
            f"the model was saved by another version of qsync ({shortened(error)}); load it with that "
            "version, and save its state_dict"
        ) from error
