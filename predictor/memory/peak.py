"""The memory peak of a step, from its lowered graph.

The peak is the largest sum over time of the bytes of live tensors. Forward runs operator by operator, then
the loss, then backward in reverse. Every tensor lives from the operator that allocates it to its last reader,
which is in backward if the tensor was saved. A storage saved by several operators counts once, and a view has
no storage of its own.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from functools import cache
from itertools import chain
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from qsync.lowering.lowered_graph import Cast, LoweredGraph, Run
from qsync.predictor.memory.cuda_allocator import EMPTY_SEGMENT_BYTES
from qsync.predictor.memory.layout import layout
from qsync.predictor.memory.lifetimes import Lifetimes
from qsync.predictor.memory.spans import Span
from qsync.records.graph import OpGraph
from qsync.records.memory_residuals import MemoryResiduals


@dataclass(frozen=True, slots=True)
class Memory:
    """The bytes in use on one rank at the peak, by part; the parts sum to `peak_bytes`.

    `inputs` are buffers of the model and the batch, `casts` copies of parameters in other types, `saved` the
    tensors saved for backward, `transient` the rest. `margin` covers the error of the prediction
    (`stated_error`). `saved_by` maps operators to bytes; a shared tensor counts for its first saver.
    """

    parameters: int
    gradients: int
    optimizer: int
    inputs: int
    casts: int
    saved: int
    transient: int
    margin: int = 0
    saved_by: Mapping[str, int] = field(default_factory=dict)

    @property
    def largest(self) -> str:
        """Return the operator that saves most bytes for backward."""
        return max(self.saved_by, key=lambda op: self.saved_by[op], default="")

    @property
    def peak_bytes(self) -> int:
        """Return the bytes that a memory budget must hold."""
        return self.estimate_bytes + self.margin

    @property
    def estimate_bytes(self) -> int:
        """Return the peak in bytes without the margin, for comparison with measurements."""
        persistent = self.parameters + self.gradients + self.optimizer + self.inputs
        return persistent + self.casts + self.saved + self.transient


def peak_memory(lowered: LoweredGraph, **options: Any) -> Memory:
    """Predict the memory peak of one training step of this lowered graph on one rank, in bytes.

    `options` are those of `StepMemory`.

    >>> peak_memory(lower(graph, assignment), optimizer_bytes=profile.optimizer_bytes).peak_bytes
    """
    return StepMemory(lowered, **options).at_peak()


class StepMemory:
    """The lifetime of every tensor of one step on one rank (`lifetimes` defines its times).

    `optimizer_bytes` is the size of the optimizer's state, and `optimizer_workspace` the most that its step
    has in use beside, after backward. With several ranks, the gradients are views of
    DDP's buckets. Gradients count in full throughout, as after the first step. `residuals` are measured bytes
    of operators beyond the prediction (`Profile.memory_residuals`).
    """

    def __init__(
        self,
        lowered: LoweredGraph,
        *,
        optimizer_bytes: int = 0,
        optimizer_workspace: int = 0,
        num_ranks: int = 1,
        device: str = "cpu",
        residuals: MemoryResiduals | None = None,
    ) -> None:
        self.graph: OpGraph = lowered.graph
        self.optimizer_bytes, self.device = optimizer_bytes, device
        self.layout, num = layout(self.graph), len(self.graph.ops)
        self.end = self.layout.last
        self._persistent = optimizer_bytes + bytes_throughout(self.graph)
        runs: list[Run] = []
        casts: dict[str, list[tuple[int, Cast]]] = {name: [] for name in self.layout.root}
        for node in lowered.nodes:
            if isinstance(node, Run):
                runs.append(node)
            else:
                # A result's cast runs at its operator's time, a graph input's cast at the next operator's.
                casts[node.value].append((self.layout.position.get(node.value, len(runs)), node))
        self._lives = Lifetimes(
            self.layout, runs.__getitem__, casts.__getitem__, device, num_ranks > 1, residuals=residuals
        )
        self._spans = {what: self._lives.spans_of(what) for what in (*self.layout.users, *range(num))}
        self._spans[num] = [Span(residuals.loss.forward if residuals else 0, num, num)]
        if optimizer_workspace:
            self._spans["optimizer"] = [Span(optimizer_workspace, self.end, self.end)]
        self._is_corrected = any(self._lives.residual(i) for i in range(num))

    @property
    def peak_bytes(self) -> int:
        """Return the most bytes in use at any time, with the margin."""
        most = max(0, int(self.come_and_go().max()))
        return self._persistent + most + self._margin_bytes(most)

    def _margin_bytes(self, num_bytes: int) -> int:
        return margin_bytes(self.device, num_bytes, bool(self.graph.recomputed), self._is_corrected)

    def come_and_go(self) -> npt.NDArray[np.int64]:
        """Return the bytes at each time of tensors that live for a part of the step, without margin."""
        return self._in_use(self.spans())

    def staying(self) -> npt.NDArray[np.int64]:
        """Return the bytes at each time of tensors that are still alive at the next time."""
        return self._in_use(self.spans(), after_death=0)

    def curve(self) -> dict[str, list[int]]:
        """Return the bytes in use at each time by part: `throughout`, `casts`, `saved`, `transient`."""
        found = {
            part: self._in_use(span for span in self.spans() if span.part == part).tolist()
            for part in ("casts", "saved", "transient")
        }
        return {"throughout": [self._persistent] * (self.end + 1), **found}

    def _in_use(self, spans: Iterable[Span], after_death: int = 1) -> npt.NDArray[np.int64]:
        change = np.zeros(self.end + 2, dtype=np.int64)
        for span in spans:
            change[span.birth] += span.num_bytes
            change[span.death + after_death] -= span.num_bytes
        return change.cumsum()[:-1]

    def at_peak(self) -> Memory:
        """Return the memory by part at the time of the peak."""
        when = int(self.come_and_go().argmax())
        parts = {"casts": 0, "saved": 0, "transient": 0}
        saved_by = dict.fromkeys(self.layout.position, 0)
        for span in self.spans():
            if span.birth <= when <= span.death:
                parts[span.part] += span.num_bytes
            if span.saver:
                saved_by[span.saver] += span.num_bytes
        entering = [v for v in self.graph.inputs if v.kind in ("buffer", "batch") and not v.passed_on]
        return Memory(
            parameters=sum(value.num_bytes for value in self.graph.parameters),
            gradients=sum(value.num_bytes for value in self.graph.parameters if value.requires_grad),
            optimizer=self.optimizer_bytes,
            inputs=sum((self.graph.num_calls if v.kind == "batch" else 1) * v.num_bytes for v in entering),
            **parts,
            margin=self._margin_bytes(sum(parts.values())),
            saved_by={op: num_bytes for op, num_bytes in saved_by.items() if num_bytes},
        )

    def spans(self) -> Iterator[Span]:
        """Yield every tensor that lives for a part of the step."""
        return chain.from_iterable(self._spans.values())


# Factor on the largest measured error: a few of 360 new plans exceeded that error, by half at most.
SAFETY = 2.0


@cache
def stated_error(device: str) -> float:
    """Return the largest relative underprediction to expect of the bytes of temporary tensors.

    It is `SAFETY` times the largest underprediction in `memory_error.json` beside this file, which
    `python -m qsync.experiments.memory.memory_error` writes. Unmeasured devices (GPUs) get the largest error
    of all measured devices.
    """
    stated = json.loads(Path(__file__).with_name("memory_error.json").read_text(encoding="utf-8"))
    worst = stated["worst_underprediction"]
    return SAFETY * float(worst.get(device, max(worst.values())))


# The largest relative underprediction with recomputed blocks. Of 48 runs (GPT, BERT, ViT, BERT with dropout;
# FP32, BF16, INT8; 0 to 4 blocks; torch 2.13 CPU) one, of INT8 with dropout, reached it.
RECOMPUTATION_ERROR = 0.01


# The largest relative underprediction of temporary tensors with residuals. Of 32 mixed plans of seven models
# one, of dilated convolutions, reached it (torch 2.13 on an EPYC with AVX2 only).
RESIDUAL_ERROR = 0.105


def margin_bytes(device: str, num_bytes: int, recomputed: bool = False, corrected: bool = False) -> int:
    """Return the margin in bytes on a prediction of `num_bytes` bytes of temporary tensors."""
    share, constant = margin_parts(device, recomputed, corrected)
    return math.ceil(share * num_bytes) + constant


def margin_parts(device: str, recomputed: bool, corrected: bool) -> tuple[float, int]:
    """Return the margin as a fraction of the bytes of temporary tensors, and a constant in bytes.

    `corrected`: the prediction includes residuals, since the model does not know this processor's kernels.
    """
    again = SAFETY * RECOMPUTATION_ERROR * recomputed
    share = max(stated_error(device), again, RESIDUAL_ERROR * corrected)
    return share, EMPTY_SEGMENT_BYTES if device == "cuda" else 0


def bytes_throughout(graph: OpGraph) -> int:
    """Return the bytes of graph inputs and of parameters' gradients, which are alive all the time."""
    calls = {"batch": graph.num_calls, "alias": 0}
    entering = sum(
        calls.get(value.kind, 1) * value.num_bytes for value in graph.inputs if not value.passed_on
    )
    return entering + sum(value.num_bytes for value in graph.parameters if value.requires_grad)
