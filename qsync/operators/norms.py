"""Norms: they take 16-bit input beside FP32 parameters and statistics, since they reduce in FP32."""

from __future__ import annotations

from qsync.operators.declaration import Operator, Role, following

LAYER_NORM = following("layer_norm", is_norm=True, saves_statistics=True, saves_less=("output", "codes"))
RMS_NORM = following("rms_norm", is_norm=True, saves_statistics=True)
GROUP_NORM = following("group_norm", is_norm=True, saves_statistics=True)
BATCH_NORM = following(
    "batch_norm", is_norm=True, saves_statistics=True, works_by_rule=True, saves_less=("codes", "codes")
)
# In evaluation mode a batch norm computes no statistics. No call has this name: arguments tell the two apart.
FROZEN_BATCH_NORM = Operator(
    kind="frozen_batch_norm", role=Role.FOLLOWING, calls={}, is_norm=True, works_by_rule=True
)

OPERATORS = (LAYER_NORM, RMS_NORM, GROUP_NORM, BATCH_NORM, FROZEN_BATCH_NORM)
