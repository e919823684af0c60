"""The variants of an operator: how it runs, as the key of its cost in a profile."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache

from qsync.operators.precision import TYPE_BYTES

PLAIN = "plain"  # form of an operator that saves what torch saves, in a kernel of its own
CHANNELS_LAST = " channels_last"
_TO_16BIT, _AS_TRACED = " narrowing", " as traced"


@dataclass(frozen=True, slots=True)
class Variant:
    """One way in which an operator runs.

    `mode` is an adjustable operator's precision, or another operator's type. `form` names its saved tensors
    or its epilogue (see `qsync.lowering.lowered_graph.Run`). `returns_16bit`: an 8-bit product returns 16
    bits. `channels_last`: it reads channels-last images. `as_traced`: torch's own kernel runs, because no
    product is lowered.

    >>> str(Variant("int8", "gelu", returns_16bit=True))
    'int8 gelu narrowing'
    """

    mode: str
    form: str = PLAIN
    returns_16bit: bool = False
    channels_last: bool = False
    as_traced: bool = False

    def __str__(self) -> str:
        """Return the key in a profile's file."""
        form = "" if self.form == PLAIN else f" {self.form}"
        order = CHANNELS_LAST * self.channels_last
        return self.mode + form + _TO_16BIT * self.returns_16bit + order + _AS_TRACED * self.as_traced

    @property
    def width(self) -> int:
        """Return the bytes of an element in its mode."""
        return TYPE_BYTES.get(self.mode, 4)


@cache
def variant_of(key: str) -> Variant:
    """Return the variant that a key of a profile names.

    >>> variant_of("int8 gelu narrowing").form
    'gelu'
    """
    rest, as_traced = _without(key, _AS_TRACED)
    rest, channels_last = _without(rest, CHANNELS_LAST)
    rest, returns_16bit = _without(rest, _TO_16BIT)
    mode, _, form = rest.partition(" ")
    return Variant(mode, form or PLAIN, returns_16bit, channels_last, as_traced)


def _without(text: str, suffix: str) -> tuple[str, bool]:
    return text.removesuffix(suffix), text.endswith(suffix)
