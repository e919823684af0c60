"""Errors of qsync: each is one sentence that says what is wrong and what to do about it."""

from __future__ import annotations

import difflib
import re
from collections.abc import Iterable

DISTRIBUTION = "qsync-train"  # by which pip knows the package: `qsync` is another project's
_LONGEST_RUN = 200  # characters of a quoted value or an unbroken token that a message repeats as they are
# A quote opens a value only where no word precedes it, and closes one where none follows.
_QUOTED_RUN = re.compile(rf"(?<!\w)(?:'[^'\n]{{{_LONGEST_RUN},}}'|\"[^\"\n]{{{_LONGEST_RUN},}}\")(?!\w)")
_UNBROKEN_RUN = re.compile(rf"\S{{{_LONGEST_RUN},}}[^\s.,:;)]")


def shortened(value: object, most: int = 80, quote: bool = True) -> str:
    """Write a value on one line for a message: a long one as its beginning and its length.

    Args:
        value: written as `repr` does; an exception as its message.
        most: characters that are written as they are.
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
    except (RecursionError, ValueError):  # nested too deeply, or a number of thousands of digits
        text = f"a {type(value).__name__}"
    if not isinstance(value, str) or not quote:
        text = " ".join(text.split())
    if len(text) <= most:
        return text
    num_characters = len(value) if isinstance(value, str) else len(text)
    end = text[-1] if isinstance(value, str) and quote else ""
    return f"{text[:most]}...{end} ({num_characters} characters)"


def unknown_name(name: object, known: Iterable[str], what: str = "argument") -> str:
    """Say that there is no such argument, and which known one is nearest.

    Example:
        >>> unknown_name("slak", ["slack", "margin"])
        "there is no argument 'slak'; did you mean slack?"
    """
    names = list(known)
    near = difflib.get_close_matches(str(name), names, 1)
    instead = f"did you mean {near[0]}?" if near else f"there are {', '.join(names)}"
    return f"there is no {what} {shortened(name)}; {instead}"


def nearest(name: str, known: Iterable[str]) -> str:
    """Say which known name is nearest, in brackets; nothing where none is known.

    Example:
        >>> nearest("varience", ["variance", "fisher"])
        " (nearest: 'variance')"
    """
    close = difflib.get_close_matches(name, list(known), n=1, cutoff=0.0)
    return f" (nearest: {shortened(close[0])})" if close else ""


def installing(extra: str) -> str:
    """Return the command that installs what an extra of qsync needs.

    Example:
        >>> installing("elastic")
        "pip install 'qsync-train[elastic]'"
    """
    return f"pip install '{DISTRIBUTION}[{extra}]'"


def _bounded(message: str) -> str:
    """Shorten every quoted value and unbroken token of a message that is longer than any name of ours."""
    message = _QUOTED_RUN.sub(lambda run: shortened(run[0][1:-1]), message)
    return _UNBROKEN_RUN.sub(lambda run: shortened(run[0], quote=False), message)


class QSyncError(Exception):
    """The request cannot be carried out; the message says which thing is wrong and what to do about it.

    A message never repeats a long value whole, whatever malformed file it comes from.
    """

    def __init__(self, *args: object) -> None:
        super().__init__(*(_bounded(arg) if isinstance(arg, str) else arg for arg in args))


class FormatError(QSyncError):
    """A file is not what it claims to be: malformed JSON or TOML, an unknown field, another version."""


class MismatchError(QSyncError):
    """Two things that must agree do not: a plan and a model, or two ranks. Both sides are in the message."""


class UnsupportedError(QSyncError):
    """A device class or a kernel cannot do what was asked."""


class MiscomputedError(UnsupportedError):
    """A library computes a call wrongly, in every type that is lower than FP32."""


class BuildError(QSyncError):
    """A kernel could not be compiled, or what was compiled could not be loaded."""


class InfeasibleError(QSyncError):
    """No assignment satisfies the constraints.

    The message names the binding one and by how much it is missed.
    """


class TracingError(QSyncError):
    """torch.compile's tracer could not read the model. The message says where it stopped."""


class NothingToLowerError(TracingError):
    """No operator of the model can be lowered, or the tracer reads none: the model trains as it is."""


def not_called(name: str = "the model") -> TracingError:
    """Return the error of a loss that never calls the model, named so."""
    return TracingError(
        f"the loss calls parts of {name}, and never {name} itself, whose forward is what is lowered; call "
        "the model in it, or give the part that it calls"
    )


class CalibrationError(QSyncError):
    """What was measured cannot be used: NaN or Inf in activations, gradients or times, or an empty batch."""


class NoGradientError(CalibrationError):
    """The gradient is zero everywhere, so that nothing tells what lowering an operator costs."""
