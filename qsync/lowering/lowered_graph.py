"""LoweredGraph: operators and casts in execution order, and what a profile calls them. A record."""

from __future__ import annotations

from dataclasses import dataclass

from qsync.records.graph import OpGraph
from qsync.records.precision import Precision

EIGHT_BIT = (Precision.FP8, Precision.INT8, Precision.INT8_ALL)

# What a profile adds to the name of what reads images in channels-last order.
TURNED = " channels_last"
# The same of an 8-bit operator that hands on 16 bits.
NARROWING = " narrowing"
# What an 8-bit product computes in its epilogue, and the form of the operator that was.
EPILOGUES = ("gelu", "relu")
FUSED = "fused"


@dataclass(frozen=True, slots=True)
class Cast:
    """A value brought to another type: a conversion, or an encoding (INT8, FP8, FP16 operands)."""

    value: str
    source: str
    target: str
    num_elements: int
    of_parameter: bool
    turned: bool = False

    @property
    def taken_as(self) -> str:
        """What a profile calls the source: its type, and its order if a lowered convolution turned it."""
        return self.source + TURNED * self.turned


@dataclass(frozen=True, slots=True)
class Run:
    """An operator as it runs. `mode` is its precision if it is adjustable, else the type it runs in.

    `form` is what it keeps for backward, "plain" as torch does or one of `FORMS`; or the kind of the
    following operator that it computes as well (`EPILOGUES`), whose own form is "fused". `turned` says that
    it reads images which a lowered convolution has brought to channels-last order.
    """

    op: str
    mode: str
    operands: tuple[str, ...]
    output: str
    form: str = "plain"
    turned: bool = False

    @property
    def timed_as(self) -> str:
        """What a profile calls this way of running: the mode; the form, if it is not plain; that an 8-bit
        operator hands on 16 bits; the order of images, if it was turned.
        """
        form = "" if self.form == "plain" else f" {self.form}"
        narrows = self.mode in EIGHT_BIT and self.output == "bf16"
        return self.mode + form + NARROWING * narrows + TURNED * self.turned


@dataclass(frozen=True, slots=True)
class LoweredGraph:
    """Operators and casts in execution order."""

    graph: OpGraph
    nodes: tuple[Cast | Run, ...]
