"""Errors of qsync: each is one sentence with the problem and its remedy."""

from __future__ import annotations

import difflib
import re
from collections.abc import Iterable

DISTRIBUTION = "qsync-train"  # the package's name for pip: `qsync` is another project's
_LONGEST_RUN = 200  # characters of a quoted value or unbroken token that a message repeats unchanged
# A quote opens a value only if no word precedes it, and closes one if no word follows.
_QUOTED_RUN = re.compile(rf"(?<!\w)(?:'[^'\n]{{{_LONGEST_RUN},}}'|\"[^\"\n]{{{_LONGEST_RUN},}}\")(?!\w)")
_UNBROKEN_RUN = re.compile(rf"\S{{{_LONGEST_RUN},}}[^\s.,:;)]")


def shortened(value: object, most: int = 80, quote: bool = True) -> str:
    """Format a value on one line for a message; shorten a long one to its start and length.

    Args:
        value: formatted by `repr`; an exception by its message.
        most: maximum number of characters to keep.
        quote: False writes a string without quotes, its whitespace as single spaces.

    Example:
        >>> shortened("int7")
        "'int7'"
        >>> shortened("a" * 5000, most=10)
        "'aaaaaaaaa...' (5000 characters)"
    """
    plain = isinstance(value, BaseException) or (isinstance(value, str) and not quote)
    try:
        text = str(value) if plain else repr(value)
    except (RecursionError, ValueError):  # nested too deeply, or a number with thousands of digits
        text = f"a {type(value).__name__}"
    if not isinstance(value, str) or not quote:
        text = " ".join(text.split())
    if len(text) <= most:
        return text
    num_characters = len(value) if isinstance(value, str) else len(text)
    end = text[-1] if isinstance(value, str) and quote else ""
    return f"{text[:most]}...{end} ({num_characters} characters)"


def unknown_name(name: object, known: Iterable[str], what: str = "argument") -> str:
    """Return a message about an unknown argument, with the nearest known one.

    Example:
        >>> unknown_name("slak", ["slack", "margin"])
        "there is no argument 'slak'; did you mean slack?"
    """
    names = list(known)
    near = difflib.get_close_matches(str(name), names, 1)
    instead = f"did you mean {near[0]}?" if near else f"there are {', '.join(names)}"
    return f"there is no {what} {shortened(name)}; {instead}"


def nearest(name: str, known: Iterable[str]) -> str:
    """Return the nearest known name in brackets for a message; empty without one.

    Example:
        >>> nearest("varience", ["variance", "fisher"])
        " (nearest: 'variance')"
    """
    close = difflib.get_close_matches(name, list(known), n=1, cutoff=0.0)
    return f" (nearest: {shortened(close[0])})" if close else ""


def installing(extra: str) -> str:
    """Return the pip command that installs an extra of qsync.

    Example:
        >>> installing("elastic")
        "pip install 'qsync-train[elastic]'"
    """
    return f"pip install '{DISTRIBUTION}[{extra}]'"


def _bounded(message: str) -> str:
    """Shorten every quoted value and unbroken token of a message that exceeds any qsync name."""
    message = _QUOTED_RUN.sub(lambda run: shortened(run[0][1:-1]), message)
    return _UNBROKEN_RUN.sub(lambda run: shortened(run[0], quote=False), message)


class QSyncError(Exception):
    """The base of qsync's errors; the message names the problem and its remedy.

    A message never repeats a long value whole.
    """

    def __init__(self, *args: object) -> None:
        super().__init__(*(_bounded(arg) if isinstance(arg, str) else arg for arg in args))


class FormatError(QSyncError):
    """A file or argument is malformed: broken JSON or TOML, an unknown field, another version."""


class MismatchError(QSyncError):
    """Two things that must agree differ: a plan and a model, or two ranks; the message shows both."""


class UnsupportedError(QSyncError):
    """A device class or a kernel does not support the request."""


class MiscomputedError(UnsupportedError):
    """A library computes a call wrongly in every precision below FP32."""


class BuildError(QSyncError):
    """A kernel could not be compiled or loaded."""


class InfeasibleError(QSyncError):
    """No assignment satisfies the constraints.

    The message names the binding constraint, and by how much it is missed.
    """


class DoesNotFitError(InfeasibleError):
    """No assignment of a device class fits in its memory."""


class TracingError(QSyncError):
    """torch.compile's tracer could not read the model; the message names the place."""


class NothingToLowerError(TracingError):
    """No operator of the model can be lowered, or none can be traced: the model trains unchanged."""


def not_called(name: str = "the model") -> TracingError:
    """Return the error for a loss that never calls the model of this name."""
    return TracingError(
        f"the loss calls parts of {name}, but never {name} itself; call the model in loss_fn, or pass the "
        "part that the loss calls"
    )


class CalibrationError(QSyncError):
    """Measured values are unusable: NaN or Inf in activations, gradients or times, or an empty batch."""


class NoGradientError(CalibrationError):
    """The gradient is zero everywhere, so the cost of lowering an operator cannot be measured."""
