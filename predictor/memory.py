"""How much memory a step takes, read off the lowered graph: what it saves for backward, what lives a while.

The largest sum over time of the tensors that are alive (ours). Forward runs operator by operator, then the
loss, then backward in reverse; every tensor lives from the operator that makes it to the last one that reads
it, which is in backward if it was saved. One storage saved by several operators counts once, and a view has
no storage of its own.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

from qsync.graph import Op, OpGraph, num_elements
from qsync.lowering import Cast, LoweredGraph, Run
from qsync.precision import LARGEST, Precision, is_encoded, type_bytes

# What each kind of operator keeps for backward, as torch's derivatives.yaml has it. A kind that is not named
# keeps its inputs: too much rather than too little.
SAVES_OUTPUT = ("relu", "tanh", "sigmoid", "softmax", "log_softmax", "sqrt", "rsqrt", "exp")
SAVES_NOTHING = (
    "add", "sub", "neg", "mean", "sum", "contiguous", "clone", "cat", "stack", "pad", "roll", "float",
    "input", "output", "view", "dropout", "embedding", "where", "masked_fill", "cross_entropy",
)  # fmt: skip
# Kinds that keep what is no float among what they read: indices and masks.
SAVES_INDICES = ("embedding", "where", "masked_fill", "view", "cross_entropy")
# The two operands of a product: each is kept if the other one has a gradient.
FACTORS = {"linear": (0, 1), "addmm": (1, 2), "conv2d": (0, 1), "conv1d": (0, 1), "matmul": (0, 1)}
NORMS = ("layer_norm", "rms_norm", "group_norm", "batch_norm")
ALIASES = ("view", "input", "float")
FP32_BYTES = 4

Key = tuple[str, str]  # a storage: the value whose storage it is, and the type it is stored in


@dataclass(frozen=True, slots=True)
class Memory:
    """Bytes on one rank at the moment of the step when most are in use; the parts sum to `peak_bytes`.

    `inputs` are buffers of the model and the batch, `casts` copies of parameters in other types, `saved` what
    waits for backward, `transient` the rest. `saved_by` says for each operator what it keeps for backward and
    no operator before it does already.
    """

    parameters: int
    gradients: int
    optimizer: int
    buckets: int
    inputs: int
    casts: int
    saved: int
    transient: int
    saved_by: Mapping[str, int] = field(default_factory=dict)

    @property
    def largest(self) -> str:
        """The operator that keeps most for backward."""
        return max(self.saved_by, key=lambda op: self.saved_by[op], default="")

    @property
    def peak_bytes(self) -> int:
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
    graph = lowered.graph
    parameters = sum(type_bytes(v.dtype, v.num_elements) for v in graph.parameters)
    gradients = sum(FP32_BYTES * v.num_elements for v in graph.parameters if v.requires_grad)
    inputs = sum(type_bytes(v.dtype, v.num_elements) for v in graph.inputs if v.kind in ("buffer", "batch"))
    walk = _Walk(lowered, num_ranks, device)
    casts, saved, transient = walk.peak()
    return Memory(
        parameters,
        gradients,
        optimizer_bytes,
        gradients if num_ranks > 1 and not gradient_as_bucket_view else 0,
        inputs,
        casts,
        saved,
        transient,
        walk.saved_by,
    )


@dataclass(slots=True)
class _Storage:
    """Bytes alive from `birth` to `death`, both included; `part` says what for."""

    num_bytes: int
    birth: int
    death: int
    part: str = "transient"


class _Walk:
    """Every storage of one step with its lifetime: operator i of n runs at time i, and backward at 2n - i."""

    def __init__(self, lowered: LoweredGraph, num_ranks: int, device: str) -> None:
        self.graph: OpGraph = lowered.graph
        self.num_ranks = num_ranks
        self.device = device
        self.end = 2 * len(self.graph.ops)
        self.storages: dict[Key, _Storage] = {}
        self.spans: list[_Storage] = []  # gradients
        self.saved_by: dict[str, int] = {}
        self._key = {
            value.name: (value.name, value.dtype) for value in self.graph.inputs
        }  # value -> its own storage
        self._carried = {value.name: value.dtype for value in self.graph.inputs}
        self._shape = {value.name: value.shape for value in self.graph.inputs}
        self._grad = {value.name: value.requires_grad for value in self.graph.inputs}
        self._parameters = {value.name for value in self.graph.parameters}
        self._loss_inside = any(op.kind in ("cross_entropy", "loss") for op in self.graph.ops)
        self._first_gradient: dict[Key, int] = {}
        self._walk(lowered)

    def peak(self) -> tuple[int, int, int]:
        """Copies of parameters, saved and transient bytes at the time when their sum is largest."""
        change = [0] * (self.end + 2)
        alive = [*self.storages.values(), *self.spans]
        for storage in alive:
            change[storage.birth] += storage.num_bytes
            change[storage.death + 1] -= storage.num_bytes
        total = best = when = 0
        for time, delta in enumerate(change):
            total += delta
            if total > best:
                best, when = total, time
        parts = {"casts": 0, "saved": 0, "transient": 0}
        for storage in alive:
            if storage.birth <= when <= storage.death:
                parts[storage.part] += storage.num_bytes
        return parts["casts"], parts["saved"], parts["transient"]

    def _walk(self, lowered: LoweredGraph) -> None:
        i = -1
        for node in lowered.nodes:
            if isinstance(node, Cast):
                made_inside = i >= 0 and self.graph.ops[i].name == node.value
                self._cast(node, i if made_inside else i + 1)
            else:
                i += 1
                self._run(i, node)
        for i, op in enumerate(self.graph.ops):
            key = self._key[op.name]
            if op.requires_grad and key == (op.name, self._carried[op.name]) and key in self._first_gradient:
                size = type_bytes(self._carried[op.name], op.num_elements)
                self.spans.append(_Storage(size, self._first_gradient[key], self.end - i))

    def _cast(self, cast: Cast, time: int) -> None:
        storage = self._new((cast.value, cast.target), _bytes(cast.target, self._shape[cast.value]), time)
        if cast.of_parameter:
            storage.part = "casts"
            if is_encoded(cast.target):  # encoded once per optimizer step and kept until the next one
                storage.death = self.end

    def _run(self, i: int, run: Run) -> None:
        op = self.graph.ops[i]
        operands = [self._key_as(value, taken) for value, taken in zip(op.inputs, run.operands, strict=True)]
        for key in (*operands, *(self._key[value] for value in op.kept)):
            self._use(key, i)
        self._carried[op.name], self._shape[op.name], self._grad[op.name] = (
            run.output,
            op.shape,
            op.requires_grad,
        )
        if op.kind in ALIASES and len(operands) == 1:
            self._key[op.name] = operands[0]
        else:
            self._key[op.name] = (op.name, run.output)
            if op.kind != "output":
                self._new(self._key[op.name], _bytes(run.output, op.shape), i)
        if op.kind == "output":
            self._output(i, op, operands)
        if op.requires_grad:
            for key in self._saved(op, operands):
                self._save(key, op, i)
            for name, size in self._extras(op, run):
                self._new((op.name, name), size, i)
                self._save((op.name, name), op, i)
            self._gradients(i, op, run, operands)

    def _saved(self, op: Op, operands: Sequence[Key]) -> Iterator[Key]:
        """The storages that this operator keeps for its backward."""
        if op.kind in FACTORS and len(operands) > max(FACTORS[op.kind]):
            first, second = FACTORS[op.kind]
            yield from self._crosswise(op, operands, first, second)
        elif op.kind == "attention":
            yield from operands
            yield self._key[op.name]
        elif op.kind == "mul" and len(operands) == 2:
            yield from self._crosswise(op, operands, 0, 1)
        elif op.kind in SAVES_OUTPUT:
            yield self._key[op.name]
        elif op.kind not in SAVES_NOTHING and not _is_mean(op):
            yield from operands
        if op.kind in SAVES_INDICES and (op.kind != "view" or len(operands) > 1):
            yield from (self._key[v] for v in (*op.inputs, *op.kept) if self._carried[v] not in LARGEST)

    def _crosswise(self, op: Op, operands: Sequence[Key], first: int, second: int) -> Iterator[Key]:
        if self._grad[op.inputs[second]]:
            yield operands[first]
        if self._grad[op.inputs[first]]:
            yield operands[second]

    def _extras(self, op: Op, run: Run) -> Iterator[tuple[str, int]]:
        """What an operator makes for its backward beside its result: masks, indices, statistics."""
        if op.kind == "dropout":
            # The CPU multiplies by a mask in the type of the input; CUDA's fused kernel keeps one byte per
            # element.
            yield "mask", op.num_elements if self.device == "cuda" else type_bytes(run.mode, op.num_elements)
        elif op.kind == "max_pool2d":
            yield "indices", type_bytes("int64", op.num_elements)
        elif op.kind == "attention":
            yield "logsumexp", FP32_BYTES * num_elements(op.shape[:-1])
        elif op.kind == "cross_entropy":
            yield "log_probabilities", FP32_BYTES * num_elements(self._shape[op.inputs[0]])
        elif op.kind in NORMS:
            rows = (
                op.shape[1] if op.kind == "batch_norm" and len(op.shape) > 1 else num_elements(op.shape[:-1])
            )
            yield "statistics", 2 * FP32_BYTES * rows

    def _output(self, i: int, op: Op, operands: Sequence[Key]) -> None:
        """What leaves the graph is read by the loss, which, if outside the graph, keeps an FP32 copy."""
        middle = len(self.graph.ops)
        for key, value in zip(operands, op.inputs, strict=True):
            self._use(key, middle)
            if self._grad[value]:
                self._first_gradient[key] = min(self._first_gradient.get(key, self.end), middle)
                if not self._loss_inside:
                    self.spans.append(_Storage(FP32_BYTES * num_elements(self._shape[value]), middle, middle))

    def _gradients(self, i: int, op: Op, run: Run, operands: Sequence[Key]) -> None:
        """Gradients that this operator's backward makes, and what it needs while it makes them."""
        time, extra = self.end - i, 0
        for key, value, taken in zip(operands, op.inputs, run.operands, strict=True):
            own = self._key[value]
            if self._grad[value]:
                self._first_gradient[own] = min(self._first_gradient.get(own, self.end), time)
                if taken != self._carried[value] and not is_encoded(taken):
                    extra += type_bytes(taken, num_elements(self._shape[value]))
                if value in self._parameters and self.num_ranks > 1:  # made here, then copied into its bucket
                    extra += FP32_BYTES * num_elements(self._shape[value])
            if run.mode == Precision.INT8 and key != own and is_encoded(taken):  # 16-bit backward
                extra += type_bytes("bf16", num_elements(self._shape[value]))
        if extra:
            self.spans.append(_Storage(extra, time, time))

    def _key_as(self, value: str, taken: str) -> Key:
        """The storage that holds this value in this type: its own, or the cast's."""
        return self._key[value] if taken == self._carried[value] else (value, taken)

    def _new(self, key: Key, num_bytes: int, time: int) -> _Storage:
        storage = self.storages[key] = _Storage(num_bytes, time, time)
        return storage

    def _use(self, key: Key, time: int) -> None:
        if key in self.storages:  # else it is a graph input, which lives throughout
            self.storages[key].death = max(self.storages[key].death, time)

    def _save(self, key: Key, op: Op, i: int) -> None:
        storage = self.storages.get(key)
        if storage is None:
            return
        storage.death = max(storage.death, self.end - i)
        if storage.part == "transient":
            storage.part = "saved"
            self.saved_by[op.name] = self.saved_by.get(op.name, 0) + storage.num_bytes


def _is_mean(op: Op) -> bool:
    """Pooling to one pixel, which torch computes as a mean and which so keeps nothing."""
    return op.kind == "adaptive_avg_pool2d" and op.shape[-2:] == (1, 1)


def _bytes(type_name: str, shape: Sequence[int]) -> int:
    """Bytes of a tensor of this type, with the FP32 scales of an encoded one."""
    size = type_bytes(type_name, num_elements(shape))
    if not is_encoded(type_name) or type_name == "fp16" or not shape:
        return size
    layout = type_name.rpartition("_")[2]
    scales = {"row": num_elements(shape[:-1]), "col": shape[-1], "sample": shape[0]}[layout]
    return size + FP32_BYTES * scales
