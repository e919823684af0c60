"""Records of a lowered graph: operators and casts in execution order, with their names in profiles."""

from __future__ import annotations

from dataclasses import dataclass, field

from qsync.operators.precision import EIGHT_BIT
from qsync.records.graph import OpGraph
from qsync.records.variant import CHANNELS_LAST, PLAIN, Variant

FUSED = "fused"  # form of an operator that a product computes in its epilogue


@dataclass(frozen=True, slots=True)
class Cast:
    """A conversion of a value to another type, or its encoding (INT8, FP8, FP16 operands)."""

    value: str
    source: str
    target: str
    num_elements: int
    of_parameter: bool
    channels_last: bool = False

    @property
    def taken_as(self) -> str:
        """Return the source's name in profiles: its type, and the memory order if channels-last."""
        return self.source + CHANNELS_LAST * self.channels_last

    @property
    def profile_key(self) -> tuple[str, str, str]:
        """Return the key of the cast's cost in a profile: value, source type, target type."""
        return self.value, self.taken_as, self.target


@dataclass(frozen=True, slots=True)
class Run:
    """An operator node of the lowered graph.

    `mode` is an adjustable operator's precision, or another operator's type. `form` names its saved tensors:
    "plain" as in torch, or one of `qsync.operators.registry.FORMS`. A product that computes its follower in
    its epilogue has the follower's kind as form (`EPILOGUES`), and the follower the form `FUSED`.
    `channels_last`: it reads images that a lowered convolution made channels-last. `after_other`,
    `before_other`: the product before, or after, this product runs in another precision, which slows its
    forward, or backward (`Profile.switch_s`). `as_traced`: an operator of a kind in `REPLACED` runs torch's
    own kernel, because the graph is not lowered.
    """

    op: str
    mode: str
    operands: tuple[str, ...]
    output: str
    form: str = PLAIN
    channels_last: bool = False
    # Affects the price only: a graph is traced in segments, and a segment does not see its successor.
    after_other: bool = field(default=False, compare=False)
    before_other: bool = field(default=False, compare=False)
    as_traced: bool = False

    @property
    def variant(self) -> Variant:
        """Return the variant that runs: the key of this node's cost in a profile."""
        returns_16bit = self.mode in EIGHT_BIT and self.output == "bf16"
        return Variant(self.mode, self.form, returns_16bit, self.channels_last, self.as_traced)

    @property
    def timed_as(self) -> str:
        """Return the variant as a profile's file names it."""
        return str(self.variant)


@dataclass(frozen=True, slots=True)
class LoweredGraph:
    """Operators and casts in execution order."""

    graph: OpGraph
    nodes: tuple[Cast | Run, ...]
