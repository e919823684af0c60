"""The public functions that need a model, and the training step that they run.

`training_step`      a model's loss, trained parameters and trace
`profile_model`      `profile`
`model_sensitivity`  `sensitivity`
`wrap_model`         `wrap`, `unwrap`
"""

from qsync.api.model_sensitivity import INDICATORS, calibrating, sensitivity
from qsync.api.profile_model import naming_operators, profile
from qsync.api.training_step import LossFunction, loss_of, running, trace_step, trained_parameters
from qsync.api.wrap_model import unwrap, wrap, wrap_as
from qsync.tracing.tracer import capture

__all__ = [
    "INDICATORS", "LossFunction", "calibrating", "capture", "loss_of", "naming_operators", "profile",
    "running", "sensitivity", "trace_step", "trained_parameters", "unwrap", "wrap", "wrap_as",
]  # fmt: skip
