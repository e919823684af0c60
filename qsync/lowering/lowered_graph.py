"""Records of a lowered graph: operators and casts in execution order, with their names in profiles."""

from __future__ import annotations

from dataclasses import dataclass, field

from qsync.records.graph import OpGraph
from qsync.records.precision import Precision

EIGHT_BIT = (Precision.FP8, Precision.INT8, Precision.INT8_ALL)

# Added to the mode of an operator that reads images in channels-last order, as a profile writes it.
CHANNELS_LAST = " channels_last"
# Added to the mode of an 8-bit operator that returns 16 bits.
TO_16BIT = " narrowing"
# Added to the mode of an operator that runs torch's own kernel because no product is lowered.
AS_TRACED = " as traced"
# Following operators whose own kernel runs in lowered graphs alone: a graph in FP32 stays as it was traced.
REPLACED = ("dropout", "interpolate")
# Kinds of operators that an 8-bit product computes in its epilogue; the form of an operator computed so.
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
    channels_last: bool = False

    @property
    def taken_as(self) -> str:
        """Return the source as a profile names it: its type, and the memory order if it is channels-last."""
        return self.source + CHANNELS_LAST * self.channels_last

    @property
    def profile_key(self) -> tuple[str, str, str]:
        """Return the key of its cost in a profile: value, source type, target type."""
        return self.value, self.taken_as, self.target


@dataclass(frozen=True, slots=True)
class Run:
    """An operator as it runs.

    `mode` is the precision of an adjustable operator, or the type in which any other operator runs. `form`
    says what the operator saves for backward: "plain" as torch does, or one of
    `qsync.records.save_less.FORMS`. A product that computes its follower in its epilogue has the follower's
    kind as its form (`EPILOGUES`), and the follower has the form `FUSED`. `channels_last` says whether the
    operator reads images that a lowered convolution has brought to channels-last order. `after_other` says of
    a product whether the product before it runs in another precision, `before_other` whether the one after it
    does: its forward, or its backward, then takes longer (`Profile.switch_s`). `as_traced` says of the kinds
    in `REPLACED` that no operator of the graph is lowered, so that torch's own kernel runs.
    """

    op: str
    mode: str
    operands: tuple[str, ...]
    output: str
    form: str = "plain"
    channels_last: bool = False
    # Of price alone: a graph in segments is traced piece by piece, and a piece does not see what follows it.
    after_other: bool = field(default=False, compare=False)
    before_other: bool = field(default=False, compare=False)
    as_traced: bool = False

    @property
    def timed_as(self) -> str:
        """Return how a profile names this way of running.

        The name is the mode; the form, if it is not plain; whether an 8-bit operator returns 16 bits; the
        order of images, if that is channels-last; and whether torch's own kernel runs (`AS_TRACED`).
        """
        form = "" if self.form == "plain" else f" {self.form}"
        returns_16bit = self.mode in EIGHT_BIT and self.output == "bf16"
        order = CHANNELS_LAST * self.channels_last
        return self.mode + form + TO_16BIT * returns_16bit + order + AS_TRACED * self.as_traced


@dataclass(frozen=True, slots=True)
class LoweredGraph:
    """Operators and casts in execution order."""

    graph: OpGraph
    nodes: tuple[Cast | Run, ...]
