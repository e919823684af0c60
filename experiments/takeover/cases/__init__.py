"""Cases: users' operations on a model, as functions of a model maker that return numbers."""

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
