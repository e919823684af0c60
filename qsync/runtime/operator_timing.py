"""Time a traced graph's operators, to run each in its fastest precision from the requested one up.

An operator runs alone, forward and backward, as in the lowered graph: with its neighbours' operand types, its
casts, and the operators behind it that inherit its type (activations, norms, a residual sum). Operators of
one shape that read the same values (q, k and v) are timed together, since they share casts. Each shape is
timed once per machine, and the choice is kept on disk.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import astuple, dataclass, replace
from functools import cache, partial
from typing import Any

import torch
import torch.fx
from torch.utils._pytree import tree_leaves

from qsync import __version__
from qsync.backend import Kernels
from qsync.backend.devices.kernel_timing import apart, fastest, fastest_on_gpu
from qsync.backend.devices.processor import processor
from qsync.backend.kernel_cache import Choices, rounded_up
from qsync.lowering.cast_rules import takes_16bit
from qsync.lowering.incremental import lower
from qsync.lowering.lowered_graph import LoweredGraph, Run
from qsync.operators.declaration import Role
from qsync.operators.precision import EIGHT_BIT, Precision
from qsync.operators.structure import OUTPUT
from qsync.processes.progress import shown_on_rank_zero
from qsync.records.graph import Input, Op, OpGraph
from qsync.runtime.rewriting import rewrite
from qsync.tracing.operator_table import DTYPES, traced_shape, traced_size
from qsync.tracing.segments import Segment

# Relative time that another precision must save: closer races are decided by noise.
_TIE = 0.05
_ROUNDS, _TIMED_S = 20, 0.05  # rounds and seconds per choice
_TYPES = {name: dtype for dtype, name in DTYPES.items()}
_OFFSETS = "offsets"  # kind of argument: offsets of groups of rows
_READER = "the readers of the result"
# (value, whether of its gradient) -> strides
Strides = Mapping[tuple[str, bool], tuple[int, ...]]


@dataclass(frozen=True, slots=True)
class _Value:
    """Properties of a tensor that an operator reads; `order` lists dimensions by stride."""

    shape: tuple[int, ...]
    order: tuple[int, ...]
    type: str
    kind: str
    requires_grad: bool

    def made(self, num_rows: int, device: torch.device) -> torch.Tensor:
        """Create such a tensor; integers are below `num_rows`, and offsets split these rows evenly."""
        if self.kind == _OFFSETS:
            return (torch.arange(1, self.shape[0] + 1) * num_rows // self.shape[0]).to(device)
        dtype, shape = _TYPES[self.type], [self.shape[k] for k in self.order]
        if dtype.is_floating_point:
            value = torch.randn(shape).to(dtype)
        else:
            is_mask = dtype is torch.bool
            value = torch.ones(shape, dtype=dtype) if is_mask else torch.randint(num_rows, shape, dtype=dtype)
        back = sorted(range(len(shape)), key=self.order.__getitem__)
        return value.permute(back).to(device).requires_grad_(self.requires_grad)


def fastest_precisions(
    segment: Segment,
    lowered: LoweredGraph,
    candidates: Mapping[str, Sequence[Precision]],
    kernels: Kernels,
) -> dict[str, Precision]:
    """Return the fastest precision of each operator among its candidates; a tie goes to the first.

    `lowered` has every operator in its first candidate.

    >>> fastest_precisions(segment, lowered, {"fc1": [Precision.INT8, Precision.BF16]}, kernels)
    """
    part = Part(segment, lowered)
    groups: dict[tuple[Any, ...], list[str]] = {}
    for op, precisions in candidates.items():
        if len(precisions) > 1:
            groups.setdefault((part.alone(op), tuple(precisions), part.activations(op)), []).append(op)
    asked = [
        ((description, key[1], len(ops), torch.get_num_threads()), ops)
        for key, ops in groups.items()
        if (description := part.description(ops))
    ]
    known = known_choices(kernels.device, kernels.bitwise)
    found = {op: precisions[0] for op, precisions in candidates.items()}
    new = {key for key, ops in asked if known.get(key, len(candidates[ops[0]])) is None}
    title = "qsync: timing operators, once a shape"
    with shown_on_rank_zero(title, once=True) if new else nullcontext(str) as progress:
        for key, ops in asked:
            progress(ops[0])
            precisions = candidates[ops[0]]
            trial = partial(part.fastest, ops, precisions, kernels)
            number = known.decided(key, len(precisions), partial(apart, trial))
            found |= dict.fromkeys(ops, precisions[number])
    return found


@cache
def known_choices(device: torch.device, bitwise: bool) -> Choices:
    """Return the choices of precisions that this machine has made."""
    facts = {"device": processor(), "torch": torch.__version__, "qsync": __version__}
    facts |= {"fp32": "torch's own"} if bitwise else {}
    if device.type == "cuda":
        facts |= {"device": torch.cuda.get_device_name(device), "timed": "kernels"}
    return Choices("precisions", facts)


class Part:
    """A lowered segment from which operators are taken to run alone."""

    def __init__(self, segment: Segment, lowered: LoweredGraph) -> None:
        graph = lowered.graph
        self._ops = {op.name: op for op in graph.ops}
        self._inputs = {value.name: value for value in graph.inputs}
        self._runs = {node.op: node for node in lowered.nodes if isinstance(node, Run)}
        self._taken: dict[str, list[tuple[str, str]]] = {}  # value -> its readers and their operand types
        for run in self._runs.values():
            for value, taken in zip(self._ops[run.op].inputs, run.operands, strict=True):
                self._taken.setdefault(value, []).append((run.op, taken))
        self._nodes: dict[str, torch.fx.Node] = {}
        self._value_of: dict[torch.fx.Node, str] = {}
        self._position: dict[torch.fx.Node, int] = {}
        pending = [segment]
        while pending:
            one = pending.pop()
            pending += one.nested.values()
            self._position |= {node: k for k, node in enumerate(one.module.graph.nodes)}
            self._nodes |= {name: node for node, name in one.op_of.items()}
            self._value_of |= one.value_of

    def members(self, op: str) -> list[str]:
        """Return an operator and its followers, as `pass_of` runs them; empty if they cannot be repeated."""
        calls = self._calls([op])
        return [self._value_of[node] for node in calls] if self._described(calls) else []

    def activations(self, op: str) -> tuple[str, ...]:
        """Return the values that an operator reads from other operators."""
        return tuple(name for name in self._ops[op].inputs if name not in self._inputs)

    def alone(self, op: str) -> tuple[Any, ...]:
        """Return the facts that determine an operator's time without its followers."""
        return self._described([self._nodes[op]])

    def description(self, ops: Sequence[str]) -> tuple[Any, ...]:
        """Return the facts that determine these operators' time, with activation sizes rounded up.

        Empty for a call that cannot be repeated.
        """
        calls = self._calls(ops)
        found = self._described(calls)
        in_order = tuple(map(self._is_read_by_channels, self._results(calls)))
        return (self._results_16bit(calls), in_order, *found) if found else ()

    def _described(self, calls: Sequence[torch.fx.Node]) -> tuple[Any, ...]:
        found: list[Any] = []
        for node in calls:
            constants = torch.fx.map_arg((node.args, node.kwargs), lambda _: None)
            found.append((self._op(node).kind, str(constants)))
            for source in node.all_input_nodes:
                if source in self._value_of and source not in calls:
                    if not isinstance(source.meta.get("example_value"), torch.Tensor):
                        return ()
                    value = self._value(source, node)
                    shape = value.shape if value.kind == "parameter" else rounded_up(value.shape)
                    found.append(astuple(replace(value, shape=shape)))
        return tuple(found)

    def fastest(self, ops: Sequence[str], precisions: Sequence[Precision], kernels: Kernels) -> int:
        """Return the index of the precision in which these operators together take least time."""
        gpus = [kernels.device] if kernels.device.type == "cuda" else []
        with torch.random.fork_rng(devices=gpus), torch.enable_grad():
            torch.manual_seed(0)
            runs = [self.pass_of(ops, precision, kernels) for precision in precisions]
            if gpus:  # an 8-bit product launches more kernels
                return fastest_on_gpu(runs, [precision in EIGHT_BIT for precision in precisions], _TIE)
            return fastest(runs, _ROUNDS, _TIMED_S, _TIE)

    def _calls(self, ops: Sequence[str]) -> list[torch.fx.Node]:
        """Return the calls of these operators and of followers that inherit their type.

        They include one residual sum and end before the next, because a residual stream passes through all
        layers.
        """
        found, streams = {self._nodes[op] for op in ops}, len(ops)
        seen = set(found)
        while behind := {user for node in found for user in node.users} - seen:
            node = min(behind, key=self._position.__getitem__)
            seen.add(node)
            if self._follows(node):
                streams -= sum(self._made(source) and source not in found for source in node.all_input_nodes)
                if streams < 0:
                    break
                found.add(node)
        return sorted(found, key=self._position.__getitem__)

    def _follows(self, node: torch.fx.Node) -> bool:
        """Return whether a node is a following operator of float tensors that can be called again."""
        if node not in self._value_of or self._op(node).role is not Role.FOLLOWING:
            return False
        result, *read = ((other, other.meta.get("example_value")) for other in (node, *node.all_input_nodes))
        is_known = all(
            source in self._value_of if isinstance(value, torch.Tensor) else isinstance(value, torch.SymInt)
            for source, value in read
        )
        # Other random values may be out of range
        is_known &= not any(_is_integer(value) for _, value in read)
        return is_known and isinstance(result[1], torch.Tensor) and result[1].is_floating_point()

    def _made(self, node: torch.fx.Node) -> bool:
        """Return whether a value is an operator's result, not a graph input or a size."""
        return self._value_of.get(node) in self._ops

    def _op(self, node: torch.fx.Node) -> Op:
        return self._ops[self._value_of[node]]

    def _results(self, calls: Sequence[torch.fx.Node]) -> list[torch.fx.Node]:
        return [node for node in calls if not node.users or not set(node.users).issubset(calls)]

    def _results_16bit(self, calls: Sequence[torch.fx.Node]) -> bool:
        """Return whether all readers of these calls' results use at most 16 bits of them."""
        inside = {self._value_of[node] for node in calls}
        taken = [
            type_
            for node in self._results(calls)
            for reader, type_ in self._taken.get(self._value_of[node], ())
            if reader not in inside
        ]
        return bool(taken) and all(map(takes_16bit, taken))

    def _is_read_by_channels(self, node: torch.fx.Node) -> bool:
        """Return whether readers of an image take it in channels-last order, and return its gradient so.

        Callers of the graph get it as traced.
        """
        readers = [op for op, _ in self._taken.get(self._value_of[node], ())]
        inside = [self._runs[op] for op in readers if self._ops[op].kind != OUTPUT.kind]
        return len(self._op(node).shape) == 4 and any(run.channels_last for run in inside)

    def _value(self, node: torch.fx.Node, reader: torch.fx.Node) -> _Value:
        """Return the properties of a value as its reader gets it."""
        name, example = self._value_of[node], node.meta["example_value"]
        entry = self._inputs.get(name) or self._ops[name]
        kind = "parameter" if isinstance(entry, Input) and entry.kind in ("parameter", "alias") else "batch"
        if self._op(reader).kind == "grouped_mm" and name in self._op(reader).kept:
            kind = _OFFSETS
        strides = [traced_size(stride) for stride in example.stride()]
        order = tuple(sorted(range(len(strides)), key=lambda k: (-strides[k], k)))
        if kind == "batch" and len(order) == 4 and self._runs[self._value_of[reader]].channels_last:
            order = (0, 2, 3, 1)
        carried = self._runs[name].output if name in self._runs else entry.dtype
        requires_grad = entry.requires_grad and self._op(reader).requires_grad
        return _Value(traced_shape(example), order, carried, kind, requires_grad)

    def pass_of(
        self, ops: Sequence[str], precision: Precision, kernels: Kernels, strides: Strides | None = None
    ) -> Callable[[], None]:
        """Return a function that runs these operators and their followers forward and backward.

        `strides` are those of values and gradients in a step; without them values are as traced, and a
        gradient is as its result.
        """
        in_step = strides or {}
        graph, new = torch.fx.Graph(), dict[torch.fx.Node, Any]()
        op_of: dict[torch.fx.Node, str] = {}
        value_of: dict[torch.fx.Node, str] = {}
        values: dict[str, _Value] = {}
        taken_out: list[Op] = []
        calls = self._calls(ops)
        for node in calls:
            for source in node.all_input_nodes:
                if source in new:
                    continue
                if source not in self._value_of:  # a size
                    new[source] = traced_size(source.meta["example_value"])
                    continue
                new[source] = graph.placeholder(f"value_{len(values)}")
                value_of[new[source]] = name = self._value_of[source]
                values[name] = self._value(source, node)
            new[node] = graph.node_copy(node, new.__getitem__)
            op_of[new[node]] = value_of[new[node]] = name = self._value_of[node]
            taken_out.append(self._ops[name])
        results = self._results(calls)
        # Else results are handed out as traced. The two conversions made a convolution with its norm in BF16
        # take 13.7 ms alone and 10.7 in a step, a first one 8.2 and 2.7 (one thread of a Zen 4, CPU time).
        for node in filter(self._is_read_by_channels, results):
            traced = node.meta["example_value"]
            new[node].meta["example_value"] = traced.contiguous(memory_format=torch.channels_last)
        narrow = kernels.sixteen_bit is not None and self._results_16bit(calls)
        role, kind = (Role.ADJUSTABLE, "linear") if narrow else (Role.FIXED, "output")
        read = tuple(self._value_of[node] for node in results)
        taken_out.append(Op(_READER, kind, role, read, (), "fp32", (0,)))
        op_of[graph.output(tuple(new[node] for node in results))] = _READER
        assignment = dict.fromkeys(ops, precision) | ({_READER: Precision.BF16} if narrow else {})
        inputs = [Input(name, v.kind, v.type, v.shape, v.requires_grad) for name, v in values.items()]
        lowered = lower(OpGraph("", tuple(inputs), tuple(taken_out)), assignment, kernels.sixteen_bit)
        segment = Segment(torch.fx.GraphModule({}, graph), op_of=op_of, value_of=value_of)
        run = rewrite(segment, lowered, kernels)
        rows = next((value.shape[0] for value in values.values() if value.kind == "parameter"), 1)
        if any(value.kind == _OFFSETS for value in values.values()):
            rows = next(iter(values.values())).shape[0]  # rows of the first operand, which are grouped
        operands = [
            _laid_out(value.made(rows, kernels.device), in_step.get((name, False)))
            for name, value in values.items()
        ]
        leaves = [operand for operand in operands if operand.requires_grad]
        gradients: list[torch.Tensor] = []

        def step() -> None:
            found = tree_leaves(run(*operands))  # a recurrence also returns its states
            if leaves:
                names = read if len(read) == len(found) else ("",) * len(found)
                new = [*zip(names, found, strict=True)][len(gradients) :]
                gradients.extend(
                    _laid_out(torch.randn_like(one), in_step.get((name, True))) for name, one in new
                )
                torch.autograd.grad(found, leaves, gradients, allow_unused=True)

        return step


def _laid_out(tensor: torch.Tensor, strides: tuple[int, ...] | None) -> torch.Tensor:
    """Return a tensor of floats with other strides, 0 where it is expanded; itself for its own."""
    is_other = strides is not None and len(strides) == tensor.ndim and tensor.stride() != strides
    if not is_other or strides is None or not tensor.is_floating_point():
        return tensor
    length = 1 + sum((size - 1) * stride for size, stride in zip(tensor.shape, strides, strict=True))
    storage = torch.randn(length, device=tensor.device).to(tensor.dtype)
    return storage.as_strided(tensor.shape, strides).requires_grad_(tensor.requires_grad)


def _is_integer(value: Any) -> bool:
    """Return whether a value is a tensor of whole numbers, such as indices."""
    is_number = isinstance(value, torch.Tensor) and value.dtype is not torch.bool
    return is_number and not (value.is_floating_point() or value.is_complex())
