"""How much memory a step takes, read off the lowered graph: what it saves for backward, what lives a while.

The largest sum over time of the tensors that are alive (ours). Forward runs operator by operator, then the
loss, then backward in reverse; every tensor lives from the operator that makes it to the last one that reads
it, which is in backward if it was saved. One storage saved by several operators counts once, and a view has
no storage of its own.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np

from qsync.graph import Input, Op, OpGraph, num_elements
from qsync.lowering import FUSED, Cast, LoweredGraph, Lowering, Run
from qsync.precision import is_encoded, type_bytes
from qsync.predictor.kept import FP32_BYTES, Kept, families, kept_by, made_for_backward
from qsync.predictor.temporaries import Mask, Surroundings, in_backward, in_forward

# Kinds whose result's gradient is that of their first so many inputs.
PASSES_GRADIENT = {"add": 2, "sub": 1}


@dataclass(frozen=True, slots=True)
class Memory:
    """Bytes on one rank at the moment of the step when most are in use; the parts sum to `peak_bytes`.

    `inputs` are buffers of the model and the batch, `casts` copies of parameters in other types, `saved` what
    waits for backward, `transient` the rest; `margin` is by how much the prediction may be too small
    (`stated_error`). `saved_by` says for each operator what it keeps for backward and no operator before it
    does already.
    """

    parameters: int
    gradients: int
    optimizer: int
    buckets: int
    inputs: int
    casts: int
    saved: int
    transient: int
    margin: int = 0
    saved_by: Mapping[str, int] = field(default_factory=dict)

    @property
    def largest(self) -> str:
        """The operator that keeps most for backward."""
        return max(self.saved_by, key=lambda op: self.saved_by[op], default="")

    @property
    def peak_bytes(self) -> int:
        """What a budget must hold."""
        return self.estimate_bytes + self.margin

    @property
    def estimate_bytes(self) -> int:
        """The peak without the margin: what is compared with measurements."""
        persistent = self.parameters + self.gradients + self.optimizer + self.buckets + self.inputs
        return persistent + self.casts + self.saved + self.transient

    def to_json(self) -> dict[str, Any]:
        return {**asdict(self), "peak_bytes": self.peak_bytes}


def peak_memory(
    lowered: LoweredGraph,
    *,
    optimizer_bytes: int = 0,
    num_ranks: int = 1,
    device: str = "cpu",
    gradient_as_bucket_view: bool = True,
) -> Memory:
    """The memory peak of one training step of this lowered graph on one rank, in bytes.

    `optimizer_bytes` is the optimizer's state. With several ranks DDP's buckets are the gradients themselves,
    or stand beside them if not `gradient_as_bucket_view`. Gradients count in full throughout, as after the
    first step.

    >>> peak_memory(lower(graph, assignment), optimizer_bytes=profile.optimizer_bytes).peak_bytes
    """
    memory = StepMemory(lowered, optimizer_bytes=optimizer_bytes, num_ranks=num_ranks, device=device)
    return memory.at_peak(gradient_as_bucket_view)


@dataclass(slots=True)
class Span:
    """Bytes alive from `birth` to `death`, both included: what for (`part`) and which operator keeps it."""

    num_bytes: int
    birth: int
    death: int
    part: str = "transient"
    saver: str = ""


class StepMemory:
    """Everything that is alive during one step. Operator i of n runs at time i, and backward at 2n - i; one
    that a product computes in its epilogue runs with the product.

    The spans are held by value (its storages in every type, with those of its views, and its gradient) and by
    operator (what it needs besides), so that `update` looks again only at what a changed operator can have
    changed.
    """

    def __init__(
        self, lowered: LoweredGraph, *, optimizer_bytes: int = 0, num_ranks: int = 1, device: str = "cpu"
    ) -> None:
        self.graph: OpGraph = lowered.graph
        self.optimizer_bytes, self.num_ranks, self.device = optimizer_bytes, num_ranks, device
        self.end = 2 * len(self.graph.ops)
        entries: list[Input | Op] = [*self.graph.inputs, *self.graph.ops]
        self._dtype = {entry.name: entry.dtype for entry in entries}
        self._shape = {entry.name: entry.shape for entry in entries}
        self._elements = {entry.name: entry.num_elements for entry in entries}
        self._grad = {entry.name: entry.requires_grad for entry in entries}
        self._parameters = {value.name for value in self.graph.parameters}
        self._position = {op.name: i for i, op in enumerate(self.graph.ops)}
        self._root = families(self.graph, self._dtype)
        self._kept: dict[tuple[int, str, str], Kept] = {}
        self._involved = self._involve()
        self._loss_inside = any(op.kind in ("cross_entropy", "loss") for op in self.graph.ops)
        self._persistent = optimizer_bytes + _throughout(self.graph)
        self._read(lowered)
        self._change = np.zeros(
            self.end + 2, dtype=np.int64
        )  # bytes by which each time differs from the one before
        self._spans: dict[str | int, list[Span]] = {}
        self._look((*self._involved, *range(len(self.graph.ops))))

    @property
    def peak_bytes(self) -> int:
        """The most bytes in use at any time, margin included, DDP's buckets being the gradients."""
        most = max(0, int(self._change.cumsum().max()))
        return self._persistent + most + self._margin(most)

    def curve(self) -> dict[str, list[int]]:
        """Bytes in use at each time of the step, by part: `throughout`, `casts`, `saved`, `transient`."""
        change = {part: np.zeros(self.end + 2, dtype=np.int64) for part in ("casts", "saved", "transient")}
        for span in self.spans():
            change[span.part][span.birth] += span.num_bytes
            change[span.part][span.death + 1] -= span.num_bytes
        found = {part: [int(b) for b in steps.cumsum()[:-1]] for part, steps in change.items()}
        return {"throughout": [self._persistent] * (self.end + 1), **found}

    def _margin(self, num_bytes: int) -> int:
        return math.ceil(stated_error(self.device) * num_bytes) + (SEGMENTS if self.device == "cuda" else 0)

    def update(self, lowering: Lowering, positions: Iterable[int]) -> None:
        """Look again at the operators at these positions: those that `Lowering.assign` or `undo` touched."""
        stale: dict[str | int, None] = {}
        positions = tuple(positions)
        for i in positions:
            op = self.graph.ops[i]
            self._runs[i] = lowering.run(i)
            self._casts[op.name] = [(i, cast) for cast in lowering.output_casts(i)]
            for value in lowering.anchored[i]:
                self._casts[self.graph.inputs[value].name] = []
            for cast in lowering.anchored_casts(i):
                self._casts[cast.value].append((i, cast))
            values = [self._root[name] for name in (op.name, *op.inputs, *op.kept)]
            # Those that read its result may cast from another type now, though they run as before.
            stale |= dict.fromkeys([i, *values, *self._involved[values[0]]])
            # What it is added to may have to bring a gradient of its own now.
            stale |= dict.fromkeys(
                self._root[name]
                for j in self._involved[values[0]]
                if self.graph.ops[j].kind in PASSES_GRADIENT
                for name in self.graph.ops[j].inputs
            )
        self._look(stale)

    def at_peak(self, gradient_as_bucket_view: bool = True) -> Memory:
        """What the memory is used for at the time when most of it is."""
        when = int(self._change.cumsum().argmax())
        parts = {"casts": 0, "saved": 0, "transient": 0}
        saved_by = dict.fromkeys(self._position, 0)
        for span in self.spans():
            if span.birth <= when <= span.death:
                parts[span.part] += span.num_bytes
            if span.saver:
                saved_by[span.saver] += span.num_bytes
        beside = [value for value in self.graph.inputs if value.kind in ("buffer", "batch")]
        gradients = sum(FP32_BYTES * v.num_elements for v in self.graph.parameters if v.requires_grad)
        return Memory(
            parameters=sum(type_bytes(v.dtype, v.num_elements) for v in self.graph.parameters),
            gradients=gradients,
            optimizer=self.optimizer_bytes,
            buckets=gradients if self.num_ranks > 1 and not gradient_as_bucket_view else 0,
            inputs=sum(type_bytes(v.dtype, v.num_elements) for v in beside),
            **parts,
            margin=self._margin(sum(parts.values())),
            saved_by={op: num_bytes for op, num_bytes in saved_by.items() if num_bytes},
        )

    def spans(self) -> Iterator[Span]:
        """Everything that lives for a part of the step."""
        for held in self._spans.values():
            yield from held

    def _involve(self) -> dict[str, list[int]]:
        """For every storage the operators that make it, or read it or one of its views, in order."""
        involved: dict[str, list[int]] = {name: [] for name, root in self._root.items() if name == root}
        for i, op in enumerate(self.graph.ops):
            for root in dict.fromkeys(self._root[name] for name in (op.name, *op.inputs, *op.kept)):
                involved[root].append(i)
        return involved

    def _read(self, lowered: LoweredGraph) -> None:
        self._runs: list[Run] = []
        self._casts: dict[str, list[tuple[int, Cast]]] = {name: [] for name in self._root}
        for node in lowered.nodes:
            if isinstance(node, Run):
                self._runs.append(node)
            else:
                # A cast of a result has its operator's time, one of a graph input the next operator's.
                self._casts[node.value].append((self._position.get(node.value, len(self._runs)), node))

    def _look(self, stale: Iterable[str | int]) -> None:
        for what in stale:
            for span in self._spans.get(what, ()):
                self._change[span.birth] -= span.num_bytes
                self._change[span.death + 1] += span.num_bytes
            found = _Family(self, what).spans if isinstance(what, str) else list(self._needs(what))
            if self.device == "cuda":
                found = [replace(span, num_bytes=block_bytes(span.num_bytes)) for span in found]
            for span in found:
                self._change[span.birth] += span.num_bytes
                self._change[span.death + 1] -= span.num_bytes
            self._spans[what] = found

    def _needs(self, i: int) -> Iterator[Span]:
        """What operator `i` makes for its backward beside its result, and what that needs for a moment."""
        op, run, time = self.graph.ops[i], self._runs[i], self.end - i
        if op.kind == "output" and not self._loss_inside:  # the loss, outside, keeps an FP32 copy
            copy = 0
            for value, taken in zip(op.inputs, run.operands, strict=True):
                if self._grad[value]:
                    copy += FP32_BYTES * self._elements[value]
                    if (
                        self.carried(value) != taken
                    ):  # its gradient, brought back to the type it is carried in
                        copy += type_bytes(self.carried(value), self._elements[value])
            yield Span(copy, len(self.graph.ops), len(self.graph.ops))
        if not op.requires_grad:
            return
        for num_bytes in made_for_backward(op, run.mode, self._shape, self._dtype, self.device, run.form):
            yield Span(num_bytes, i, time, "saved", op.name)
        around = self._surroundings(i)
        for when, moment in ((i, in_forward(op, run, around)), (time, in_backward(op, run, around))):
            if moment:
                yield Span(moment, when, when)

    def _surroundings(self, i: int) -> Surroundings:
        op, run = self.graph.ops[i], self._runs[i]
        return Surroundings(
            shapes=tuple(self._shape[value] for value in op.inputs),
            carried=tuple(self.carried(value) for value in op.inputs),
            has_gradient=tuple(self._grad[value] for value in op.inputs),
            is_parameter=tuple(value in self._parameters for value in op.inputs),
            gradient=run.output,
            in_buckets=self.num_ranks > 1,
            device=self.device,
            masks=tuple(
                Mask(self._shape[value], type_bytes(self._dtype[value], 1))
                for value in (*op.inputs[3:], *op.kept)
                if op.kind == "attention"
            ),
        )

    def time(self, i: int) -> int:
        """When operator `i` runs."""
        return self._position[self.graph.ops[i].inputs[0]] if self._runs[i].form == FUSED else i

    def kept(self, i: int) -> Kept:
        """What operator `i` keeps for backward, as it runs now."""
        key = (i, self._runs[i].form, self._runs[i].mode)
        if key not in self._kept:
            self._kept[key] = kept_by(self.graph.ops[i], self._grad, self._dtype, *key[1:], self.device)
        return self._kept[key]

    def passes_gradient(self, i: int, j: int) -> bool:
        """Whether the gradient of operator `i`'s result is, as it is, that of its `j`-th input."""
        op, run = self.graph.ops[i], self._runs[i]
        same = op.kind in PASSES_GRADIENT and self._shape[op.inputs[j]] == op.shape
        return (
            same
            and j < PASSES_GRADIENT[op.kind]
            and run.operands[j] == run.output == self.carried(op.inputs[j])
        )

    def goes_on(self, root: str, i: int) -> bool:
        """Whether it is this operand of a sum, operator `i`, whose gradient outlives that of the sum.

        Of several it is the one made first. One made by a sum hands the tensor on once more, so that it
        counts for itself (ours: rather too much).
        """
        op = self.graph.ops[i]
        roots = [
            self._root[value]
            for j, value in enumerate(op.inputs)
            if self._grad[value] and self.passes_gradient(i, j)
        ]
        first = min(roots, key=lambda value: self._position.get(value, -1))
        own = self._position.get(root, -1)
        return root == first or own < 0 or self.graph.ops[own].kind in PASSES_GRADIENT

    def copies(self, i: int) -> bool:
        """Whether operator `i`, a view, has to copy: rows of an image whose channels are last."""
        op = self.graph.ops[i]
        shape = self._shape[op.inputs[0]] if op.inputs else ()
        flattened = op.kind == "view" and self._runs[i].turned and len(shape) == 4 != len(op.shape)
        return flattened and shape[1] > 1 and shape[2] * shape[3] > 1

    def picks(self, i: int) -> bool:
        """Whether operator `i` is a view of a part: its backward makes the gradient of the whole."""
        op = self.graph.ops[i]
        return op.kind == "view" and op.requires_grad and op.num_elements < self._elements[op.inputs[0]]

    def carried(self, value: str) -> str:
        """The type in which a value is carried."""
        i = self._position.get(value)
        return self._dtype[value] if i is None else self._runs[i].output


class _Family:
    """One value with its views: its storage, its casts, and its gradient."""

    def __init__(self, memory: StepMemory, root: str) -> None:
        self.memory = memory
        self.root = root
        self.storages: dict[tuple[str, str], Span] = {}
        self.key: dict[str, tuple[str, str]] = {}  # value -> its storage
        self.moments: list[Span] = []
        # (time, value, whether it is the gradient of what a sum made): what backward adds up to its gradient.
        self.contributions: list[tuple[int, str, bool]] = []
        # What enters the graph is there throughout; only its casts come and go.
        if root not in memory._position:
            self._enter(root, (root, memory._dtype[root]))
        for i in memory._involved[root]:
            self._visit(i, memory.graph.ops[i], memory._runs[i], memory.kept(i))
        self.spans = [*self.storages.values(), *self.moments, *self._gradient()]

    def _visit(self, i: int, op: Op, run: Run, kept: Kept) -> None:
        memory, time = self.memory, self.memory.time(i)
        last = len(memory.graph.ops) if op.kind == "output" else time
        for j, (value, taken) in enumerate(zip(op.inputs, run.operands, strict=True)):
            if value in self.key:
                key = self.key[value] if taken == memory.carried(value) else (value, taken)
                self._use(key, last)
                if is_encoded(taken):  # its kernel is handed the value beside the codes
                    self._use(self.key[value], last)
                if j in kept.inputs or value in kept.indices:
                    self._save(key, time, op)
                apart = memory._root[op.name] != self.root  # a view brings what is brought to it
                if apart and memory._grad[value] and (op.requires_grad or op.kind == "output"):
                    passed = memory.passes_gradient(i, j)
                    self.contributions.append((memory.end - last, value, passed))
                if memory._root[op.name] == self.root:
                    if memory.copies(i):
                        key = (op.name, run.output)
                        self._make(key, time)
                    self._enter(op.name, key)
        for value in op.kept:
            if value in self.key:
                self._use(self.key[value], time)
                if value in kept.indices:
                    self._save(self.key[value], time, op)
        if op.name == self.root:
            if op.kind != "output" and run.form != "relu":  # whose result takes the place of the product's
                self._make((op.name, run.output), time)
            self._enter(op.name, (op.name, run.output))
        if kept.output and op.name in self.key:
            self._save(self.key[op.name], time, op)

    def _enter(self, value: str, key: tuple[str, str]) -> None:
        """A value of this family, the storage it has, and its casts."""
        self.key[value] = key
        for time, cast in self.memory._casts[value]:
            storage = self._make((value, cast.target), time)
            # A view is brought in order before it is rounded, and so are images.
            if value != self.root or (cast.target == "int8_image" and not cast.turned):
                self.moments.append(Span(_bytes(cast.source, self.memory._shape[value]), time, time))
            if cast.of_parameter:
                storage.part = "casts"
                storage.death = self.memory.end  # made once per optimizer step, and kept until then

    def _make(self, key: tuple[str, str], time: int) -> Span:
        storage = self.storages[key] = Span(_bytes(key[1], self.memory._shape[key[0]]), time, time)
        return storage

    def _use(self, key: tuple[str, str], time: int) -> None:
        if key in self.storages:
            self.storages[key].death = max(self.storages[key].death, time)

    def _save(self, key: tuple[str, str], i: int, op: Op) -> None:
        if key in self.storages:
            storage = self.storages[key]
            storage.death = max(storage.death, self.memory.end - i)
            if storage.part == "transient":
                storage.part, storage.saver = "saved", op.name

    def _gradient(self) -> Iterator[Span]:
        """The gradient, from the first operator that adds to it to the one that made the value.

        What a sum's gradient brings is that very tensor, which one of the operands then goes on with; what a
        later operator brings is there for a moment beside what it is added to. Pieces of one value (views)
        have gradients of their own until they are put together.
        """
        memory = self.memory
        position = memory._position.get(self.root)
        if position is None or not memory._grad[self.root] or not self.contributions:
            return
        carried, elements = memory.carried(self.root), memory._elements
        death = memory.end - memory.time(position)
        found = sorted(self.contributions, key=lambda entry: entry[0])
        begun: set[str] = set()
        birth: int | None = None
        for time, value, passed in found:
            piece = value if elements[value] < elements[self.root] else self.root
            if passed:
                if birth is None and memory.goes_on(self.root, memory.end - time):
                    birth = time + 1
            elif birth is None:
                birth = time
            elif piece in begun or piece == self.root:
                yield Span(type_bytes(carried, elements[value]), time, time)
            begun.add(piece)
        for value in self.key:
            i = memory._position.get(value)
            if i is not None and value != self.root and memory.picks(i):
                yield Span(type_bytes(carried, elements[self.root]), memory.end - i, memory.end - i)
        if birth is not None:
            yield Span(type_bytes(carried, elements[self.root]), birth, max(birth, death))


# torch's caching allocator on GPUs (c10/cuda/CUDACachingAllocator.cpp): blocks of 512 bytes; below 1 MiB they
# come out of segments of 2 MiB, below 10 MiB out of segments of 20 MiB, and larger ones are segments of their
# own, rounded to 2 MiB. One segment of either kind may be nearly empty. A model of those rules: not verified
# on a GPU.
BLOCK, LARGE, ROUNDED = 512, 10 * 2**20, 2 * 2**20
SEGMENTS = (2 + 20) * 2**20


def block_bytes(num_bytes: int) -> int:
    """What the caching allocator of GPUs takes for a tensor of so many bytes.

    >>> block_bytes(1), block_bytes(11 * 2**20)
    (512, 12582912)
    """
    unit = ROUNDED if num_bytes >= LARGE else BLOCK
    return -(-num_bytes // unit) * unit


@cache
def stated_error(device: str) -> float:
    """The part by which what comes and goes in a step was ever predicted too small, as measured.

    From `memory_error.json` beside this file, which `python -m qsync.experiments.memory_error` writes. What
    was never measured (GPUs) is taken to be as wrong as what was.
    """
    stated = json.loads(Path(__file__).with_name("memory_error.json").read_text(encoding="utf-8"))
    return float(stated["worst_underprediction"].get(device, max(stated["worst_underprediction"].values())))


def _throughout(graph: OpGraph) -> int:
    """Bytes of what enters the graph and of the gradients of parameters, which are there all the time."""
    entering = sum(type_bytes(v.dtype, v.num_elements) for v in graph.inputs if v.kind != "alias")
    return entering + sum(FP32_BYTES * v.num_elements for v in graph.parameters if v.requires_grad)


def _bytes(type_name: str, shape: Sequence[int]) -> int:
    """Bytes of a tensor of this type, with the FP32 scales of an encoded one."""
    size = type_bytes(type_name, num_elements(shape))
    if not is_encoded(type_name) or type_name == "fp16" or not shape:
        return size
    layout = type_name.rpartition("_")[2]
    scales = {
        "row": num_elements(shape[:-1]),
        "col": shape[-1],
        "inner": num_elements((*shape[:-2], *shape[-1:])) if len(shape) > 1 else 1,
        "image": shape[0],
        "channel": shape[0],
    }
    return size + FP32_BYTES * scales[layout]
