"""Cases: what users do to a model, as functions that take a maker of models and return numbers."""

from qsync.experiments.takeover.cases import (  # noqa: F401  # each lists its cases
    calls,
    compiling,
    copies,
    hooks,
    parameters,
    training,
    wrapping,
)
from qsync.experiments.takeover.cases.case import CASES, Outcome, data, net

__all__ = ["CASES", "Outcome", "data", "net"]
