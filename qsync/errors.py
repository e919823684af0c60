"""What can be wrong with a request, said in one sentence that tells the reader what to do."""

from __future__ import annotations


class QSyncError(Exception):
    """The request cannot be carried out; the message says which thing is wrong and what to do about it."""


class FormatError(QSyncError):
    """A file is not what it claims to be: malformed JSON or TOML, an unknown field, another version."""


class MismatchError(QSyncError):
    """Two things that must agree do not: a plan and a model, or two ranks. Both sides are in the message."""


class UnsupportedError(QSyncError):
    """A device class or a kernel cannot do what was asked."""


class BuildError(QSyncError):
    """A kernel could not be compiled, or what was compiled could not be loaded."""


class InfeasibleError(QSyncError):
    """No assignment satisfies the constraints.

    The message names the binding one and by how much it is missed.
    """


class TracingError(QSyncError):
    """torch.compile's tracer could not read the model. The message says where it stopped."""


class CalibrationError(QSyncError):
    """What was measured cannot be used: NaN or Inf in activations, gradients or times, or an empty batch."""
