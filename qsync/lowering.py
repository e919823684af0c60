"""Where casts go: the one place that decides it. Pure.

    lower(graph, assignment) -> LoweredGraph

The FX pass executes the lowered graph, the replayer prices it and the memory model reads it, node for node.
The rule, in full:

- every operator takes each of its inputs in one type: an adjustable operator in its precision's operand type,
  a following operator in the widest type among its inputs, a fixed operator in the type that was traced
  (FP32);
- a value that is not carried in a type some consumer takes is cast to it once, however many consumers there
  are;
- a cast of an operator's result stands right after the operator; a cast of what enters the graph (a weight)
  stands right before the first adjustable consumer that may take it so (an embedding takes its table in FP32
  and rounds the rows it looks up), so that its gradient is ready as early as the operator's;
- an 8-bit operator hands on the device's 16-bit float if every consumer would narrow the value anyway, else
  FP32;
- images that a lowered convolution made are in channels-last order, and stay so through every operator that
  computes images from images: what such a node costs is another number (`turned`), what it computes is not;
- an 8-bit linear layer computes in its epilogue the GELU or ReLU that is its result's only reader, unless
  that one is to save less; the latter's node then runs nothing;
- a following operator that is to save less keeps its result for backward if an adjustable consumer keeps that
  very tensor anyway, else bits or 8-bit codes (`FORMS`).

`Lowering` keeps the lowered graph of a changing assignment: `assign` re-lowers only the neighbourhood of one
operator and `undo` restores the state exactly.
"""

from __future__ import annotations

import fnmatch
import heapq
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from qsync.errors import FormatError, MismatchError
from qsync.graph import Op, OpGraph, Role
from qsync.precision import (
    CARRIED_FLOATS,
    LARGEST,
    PRECISIONS_BY_KIND,
    ROUNDS_WHAT_IT_READS,
    Precision,
    is_encoded,
    operand_type,
)

_WIDTH = {name: -position for position, name in enumerate(CARRIED_FLOATS)}
_EIGHT_BIT = (Precision.FP8, Precision.INT8, Precision.INT8_ALL)

# What a following operator that saves less keeps for backward: if a consumer keeps its result anyway, and if
# not. "plain" is what torch keeps, which is then no more than that result.
FORMS: dict[str, tuple[str, str]] = {
    "gelu": ("output", "codes"),
    "silu": ("codes", "codes"),
    "layer_norm": ("output", "codes"),
    "batch_norm": ("codes", "codes"),
    "softmax": ("plain", "codes"),
    "relu": ("plain", "bits"),
    "dropout": ("bits", "bits"),
}
# What a profile adds to the name of what reads images in channels-last order; and the kinds of operators that
# end it though their result has four dimensions.
TURNED = " channels_last"
# The same of an 8-bit operator that hands on 16 bits.
NARROWING = " narrowing"
_NO_IMAGES = ("view", "contiguous", "matmul", "attention", "softmax", "output")
# What an 8-bit product of these kinds computes in its epilogue, and the form of the operator that was.
EPILOGUES = ("gelu", "relu")
FUSED = "fused"
_WITH_EPILOGUE = {
    "linear": (Precision.INT8, Precision.INT8_ALL),
    "addmm": (Precision.INT8, Precision.INT8_ALL),
}
# The operands that a product keeps.
_KEPT_OPERANDS = {
    "linear": (0,),
    "conv2d": (0,),
    "conv1d": (0,),
    "addmm": (1,),
    "matmul": (0, 1),
    "embedding": (),
}


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
        operator hands on 16 bits; the order of images, if it was turned."""
        form = "" if self.form == "plain" else f" {self.form}"
        narrows = self.mode in _EIGHT_BIT and self.output == "bf16"
        return self.mode + form + NARROWING * narrows + TURNED * self.turned


@dataclass(frozen=True, slots=True)
class LoweredGraph:
    """Operators and casts in execution order."""

    graph: OpGraph
    nodes: tuple[Cast | Run, ...]


@dataclass(frozen=True, slots=True)
class Change:
    """What one `Lowering.assign` did: where node or casts changed, and how to undo it."""

    touched: tuple[int, ...]
    journal: tuple[tuple[list[Any], int, Any], ...]


def lower(
    graph: OpGraph,
    assignment: Mapping[str, Precision],
    narrow: str | None = "bf16",
    saving_less: Collection[str] = (),
) -> LoweredGraph:
    """The graph with the casts that this assignment needs.

    `assignment` maps names of adjustable operators to precisions; operators it leaves out run in FP32.
    `narrow` is the 16-bit float that the device can carry along edges, None if it has none. `saving_less`
    names following operators that save less for backward. Raises MismatchError for names that are not
    adjustable operators of the graph, or cannot save less, and FormatError for a precision its kind of
    operator does not have.

    >>> lower(graph, {"encoder.0.fc1": Precision.BF16}, saving_less=["encoder.0.gelu"]).nodes
    """
    return Lowering(graph, assignment, narrow, saving_less).lowered()


def can_save_less(op: Op) -> bool:
    """Whether an operator can be run so that it saves less for backward."""
    return op.role is Role.FOLLOWING and op.kind in FORMS and op.requires_grad


def _casts(op: Op) -> bool:
    """Whether an operator may need a cast of what it reads: an embedding never does, of a table it shares."""
    return op.role is Role.ADJUSTABLE and op.kind not in ROUNDS_WHAT_IT_READS


def matching(graph: OpGraph, patterns: Iterable[str]) -> tuple[str, ...]:
    """The operators that can save less and whose names match one of these patterns, in order.

    >>> matching(graph, ["encoder.layer.0.*"])
    """
    wanted = tuple(patterns)
    return tuple(
        op.name
        for op in graph.ops
        if can_save_less(op) and any(fnmatch.fnmatchcase(op.name, pattern) for pattern in wanted)
    )


class Lowering:
    """The lowered graph of an assignment that changes one operator at a time."""

    def __init__(
        self,
        graph: OpGraph,
        assignment: Mapping[str, Precision],
        narrow: str | None = "bf16",
        saving_less: Collection[str] = (),
    ) -> None:
        self.graph = graph
        self.narrow = narrow
        self.position = {op.name: i for i, op in enumerate(graph.ops)}
        self._inputs = {value.name: i for i, value in enumerate(graph.inputs)}
        for name in assignment:
            self._check(name, assignment[name])
        for name in saving_less:
            self._check_saving(name)
        self.precision = [assignment.get(op.name, Precision.FP32) for op in graph.ops]
        # Values are numbered: graph inputs first, then one per operator.
        names = [value.name for value in graph.inputs] + [op.name for op in graph.ops]
        number = {name: i for i, name in enumerate(names)}
        self._offset = len(graph.inputs)
        self._traced = [value.dtype for value in graph.inputs] + [op.dtype for op in graph.ops]
        self._operands = [[number[name] for name in op.inputs] for op in graph.ops]
        self._consumers: list[list[int]] = [[] for _ in names]
        for i, operands in enumerate(self._operands):
            for value in dict.fromkeys(operands):
                self._consumers[value].append(i)
        # The operator before which casts of each graph input stand, and the inputs that stand before each
        # operator.
        self.anchored: list[list[int]] = [[] for _ in graph.ops]
        self._anchor: list[int | None] = []
        for value in range(self._offset):
            users = [i for i in self._consumers[value] if _casts(graph.ops[i])]
            anchor = next(iter(users or self._consumers[value]), None)
            self._anchor.append(anchor)
            if anchor is not None:
                self.anchored[anchor].append(value)
        self._wanted_narrow = [False] * len(names)
        self._mode = ["fp32"] * len(graph.ops)
        self._carried = list(self._traced)
        self.casts: list[tuple[str, ...]] = [()] * len(names)
        self._saves_less = [False] * len(graph.ops)
        for name in saving_less:
            self._saves_less[self.position[name]] = True
        self._form = ["plain"] * len(graph.ops)
        self._turned = [False] * len(names)
        # The operator that may be computed in each one's epilogue, and the one in whose epilogue each may be.
        self._epilogue = [self._epilogue_of(i) for i in range(len(graph.ops))]
        self._product: list[int | None] = [None] * len(graph.ops)
        for i, follower in enumerate(self._epilogue):
            if follower is not None:
                self._product[follower] = i
        self._lower_everything()

    def mode(self, i: int) -> str:
        """The precision or type in which operator `i` runs."""
        return self._mode[i]

    def form(self, i: int) -> str:
        """What operator `i` keeps for backward, or where it is computed: see `Run`."""
        return self._form[i]

    def turned(self, i: int) -> bool:
        """Whether operator `i` reads images that a lowered convolution brought to channels-last order."""
        return any(self._turned[value] for value in self._operands[i])

    def output(self, i: int) -> str:
        """The type in which the result of operator `i` is handed on."""
        return self._carried[self._offset + i]

    def computed_by(self, i: int) -> str | None:
        """The operator that operator `i` computes in its epilogue, as it is now."""
        follower = self._epilogue[i]
        return self.graph.ops[follower].name if follower is not None and self._computes(i) else None

    def output_casts(self, i: int) -> list[Cast]:
        """The casts that stand right after operator `i`."""
        return self._casts_of(self._offset + i)

    def anchored_casts(self, i: int) -> list[Cast]:
        """The casts of graph inputs that stand right before operator `i`."""
        return [cast for value in self.anchored[i] for cast in self._casts_of(value)]

    def run(self, i: int) -> Run:
        """Operator `i` as it runs."""
        operands = tuple(
            self._carried[value] if (taken := self._taken(i, j)) is None else taken
            for j, value in enumerate(self._operands[i])
        )
        name = self.graph.ops[i].name
        return Run(name, self._mode[i], operands, self.output(i), self._form[i], self.turned(i))

    def assignment(self) -> dict[str, Precision]:
        """The assignment as it is now: every adjustable operator with its precision."""
        return {
            op.name: self.precision[i] for i, op in enumerate(self.graph.ops) if op.role is Role.ADJUSTABLE
        }

    def saving_less(self) -> tuple[str, ...]:
        """The operators that save less as it is now, in order."""
        return tuple(op.name for op, less in zip(self.graph.ops, self._saves_less, strict=True) if less)

    def lowered(self) -> LoweredGraph:
        """The lowered graph as it is now."""
        nodes: list[Cast | Run] = []
        for i in range(len(self.graph.ops)):
            nodes += [*self.anchored_casts(i), self.run(i), *self.output_casts(i)]
        return LoweredGraph(self.graph, tuple(nodes))

    def assign(self, name: str, precision: Precision) -> Change:
        """Give one operator another precision and re-lower its neighbourhood only."""
        self._check(name, precision)
        i = self.position[name]
        journal: list[tuple[list[Any], int, Any]] = []
        touched = {i}
        self._write(self.precision, i, precision, journal)
        changed_outputs = self._propagate_wants(self._operands[i], journal)
        changed_values = self._propagate_types([i, *changed_outputs], journal, touched)
        stale = set(self._operands[i]) | changed_values
        for j in list(touched):
            stale |= {self._offset + j, *self._operands[j]}
        for value in sorted(stale):
            if self._write(self.casts, value, self._needed_casts(value), journal) or value in changed_values:
                owner = self._anchor[value] if value < self._offset else value - self._offset
                if owner is not None:
                    touched.add(owner)
        makers = {self._maker(value) for j in touched for value in self._operands[j]}
        computed = {follower for j in touched if (follower := self._epilogue[j]) is not None}
        for j in sorted(touched | makers | computed):
            if j >= 0 and self._write(self._form, j, self._form_of(j), journal):
                touched.add(j)
        return Change(tuple(sorted(touched)), tuple(journal))

    def save_less(self, name: str, less: bool = True) -> Change:
        """Let one operator save less for backward, or as much as torch does again."""
        self._check_saving(name)
        i = self.position[name]
        journal: list[tuple[list[Any], int, Any]] = []
        self._write(self._saves_less, i, less, journal)
        product = self._product[i]
        touched = (i,) if product is None else (product, i)
        for j in touched:
            self._write(self._form, j, self._form_of(j), journal)
        return Change(touched, tuple(journal))

    def undo(self, change: Change) -> None:
        """Restore the state before `change` (of `assign` or `save_less`): the last one not yet undone."""
        for target, index, old in reversed(change.journal):
            target[index] = old

    def _check(self, name: str, precision: Precision) -> None:
        i = self.position.get(name)
        if i is None or self.graph.ops[i].role is not Role.ADJUSTABLE:
            raise MismatchError(f"the graph of {self.graph.model} has no adjustable operator {name!r}")
        kind = self.graph.ops[i].kind
        if precision not in PRECISIONS_BY_KIND[kind]:
            known = ", ".join(PRECISIONS_BY_KIND[kind])
            raise FormatError(f"{name}: there is no {precision} kernel for {kind}; choose one of {known}")

    def _check_saving(self, name: str) -> None:
        i = self.position.get(name)
        if i is None or not can_save_less(self.graph.ops[i]):
            raise MismatchError(
                f"the graph of {self.graph.model} has no operator {name!r} that could save less; those are "
                f"following operators of the kinds {', '.join(FORMS)}"
            )

    def _casts_of(self, value: int) -> list[Cast]:
        if not self.casts[value]:
            return []
        entry = self.graph.inputs[value] if value < self._offset else self.graph.ops[value - self._offset]
        source, parameter, turned = self._carried[value], entry.kind == "parameter", self._turned[value]
        return [
            Cast(entry.name, source, target, entry.num_elements, parameter, turned)
            for target in self.casts[value]
        ]

    def _lower_everything(self) -> None:
        for value in reversed(range(len(self._traced))):
            self._wanted_narrow[value] = self._wants_narrow(value)
        for i in range(len(self.graph.ops)):
            self._mode[i] = self._mode_of(i)
            self._carried[self._offset + i] = self._output_of(i)
            self._turned[self._offset + i] = self._turns(i)
        for value in range(len(self._traced)):
            self.casts[value] = self._needed_casts(value)
        for i in range(len(self.graph.ops)):
            self._form[i] = self._form_of(i)

    def _taken(self, i: int, j: int) -> str | None:
        """The type in which operator `i` takes its `j`-th input; None if that is no float."""
        op, traced = self.graph.ops[i], self._traced[self._operands[i][j]]
        if traced not in LARGEST:
            return None
        if op.role is Role.ADJUSTABLE:
            return operand_type(op.kind, j, self.precision[i])
        return self._mode[i] if op.role is Role.FOLLOWING else traced

    def _mode_of(self, i: int) -> str:
        op = self.graph.ops[i]
        if op.role is Role.ADJUSTABLE:
            return str(self.precision[i])
        if op.role is Role.FIXED:
            return op.dtype
        floats = [self._carried[value] for value in self._operands[i] if self._traced[value] in LARGEST]
        widest = max(floats, key=_WIDTH.__getitem__, default=op.dtype)
        return "fp32" if op.magnitude > LARGEST.get(widest, float("inf")) else widest

    def _output_of(self, i: int) -> str:
        op = self.graph.ops[i]
        if op.role is Role.ADJUSTABLE:
            precision = self.precision[i]
            if precision is Precision.BF16:
                return "bf16"
            narrowed = precision in _EIGHT_BIT and self.narrow and self._wanted_narrow[self._offset + i]
            return self.narrow if narrowed and self.narrow else "fp32"
        return self._mode[i] if op.role is Role.FOLLOWING and op.dtype == "fp32" else op.dtype

    def _turns(self, i: int) -> bool:
        """Whether the result of operator `i` is images in channels-last order though traced in another."""
        op = self.graph.ops[i]
        if len(op.shape) != 4 or op.kind in _NO_IMAGES:
            return False
        if op.kind == "conv2d" and self.precision[i] not in (Precision.FP32, Precision.TF32):
            return True
        return bool(self._operands[i]) and self._turned[self._operands[i][0]]

    def _epilogue_of(self, i: int) -> int | None:
        """The operator that `i` computes in its epilogue where its precision has one; None: there is none."""
        op, readers = self.graph.ops[i], self._consumers[self._offset + i]
        if op.kind not in _WITH_EPILOGUE or op.role is not Role.ADJUSTABLE or op.exposed or len(readers) != 1:
            return None
        follower = self.graph.ops[readers[0]]
        # It takes and makes the very type that the product makes, whatever that is.
        same = follower.dtype == op.dtype == "fp32" and follower.magnitude <= LARGEST["bf16"]
        # Where gradients were switched off between the two only one of them has a backward.
        same &= follower.requires_grad == op.requires_grad and follower.shape == op.shape
        alone = follower.inputs == (op.name,) and not follower.kept
        fits = follower.role is Role.FOLLOWING and follower.kind in EPILOGUES and same and alone
        return readers[0] if fits else None

    def _computes(self, i: int) -> bool:
        """Whether operator `i` computes its follower in its epilogue."""
        follower = self._epilogue[i]
        if follower is None or self._saves_less[follower]:
            return False
        return self.precision[i] in _WITH_EPILOGUE[self.graph.ops[i].kind]

    def _form_of(self, i: int) -> str:
        follower, product = self._epilogue[i], self._product[i]
        if follower is not None and self._computes(i):
            return self.graph.ops[follower].kind
        if product is not None and self._computes(product):
            return FUSED
        if not self._saves_less[i]:
            return "plain"
        beside_kept, alone = FORMS[self.graph.ops[i].kind]
        return beside_kept if self._is_kept(self._offset + i) else alone

    def _is_kept(self, value: int) -> bool:
        """Whether an adjustable consumer of this value, or of a view of it, keeps it as it is carried."""
        for i in self._consumers[value]:
            op = self.graph.ops[i]
            if op.kind == "view" and len(set(self._operands[i])) == 1:
                if self._is_kept(self._offset + i):
                    return True
            elif op.role is Role.ADJUSTABLE and op.requires_grad:
                kept = _KEPT_OPERANDS.get(op.kind, range(len(op.inputs)))
                if any(
                    self._operands[i][j] == value and self._taken(i, j) == self._carried[value] for j in kept
                ):
                    return True
        return False

    def _maker(self, value: int) -> int:
        """The operator whose storage this value is: what made it, or what it is a view of. Below 0: none."""
        i = value - self._offset
        while i >= 0 and self.graph.ops[i].kind == "view" and len(set(self._operands[i])) == 1:
            i = self._operands[i][0] - self._offset
        return i

    def _wants_narrow(self, value: int) -> bool:
        """Whether every consumer of this value would narrow it to 16 bits or fewer anyway."""
        consumers = self._consumers[value]
        return bool(consumers) and all(self._consumer_narrows(i, value) for i in consumers)

    def _consumer_narrows(self, i: int, value: int) -> bool:
        op = self.graph.ops[i]
        if op.role is Role.ADJUSTABLE:
            taken = {self._taken(i, j) for j, operand in enumerate(self._operands[i]) if operand == value}
            return all(t is not None and (t == "bf16" or is_encoded(t)) for t in taken)
        floats = [operand for operand in self._operands[i] if self._traced[operand] in LARGEST]
        lone = op.role is Role.FOLLOWING and len(set(floats)) == 1 and op.magnitude <= LARGEST["bf16"]
        return lone and self._wanted_narrow[self._offset + i]

    def _needed_casts(self, value: int) -> tuple[str, ...]:
        carried = self._carried[value]
        taken = {
            self._taken(i, j)
            for i in self._consumers[value]
            for j, operand in enumerate(self._operands[i])
            if operand == value
        }
        return tuple(sorted(t for t in taken if t is not None and t != carried))

    def _propagate_wants(self, values: list[int], journal: list[tuple[list[Any], int, Any]]) -> list[int]:
        """Recompute who wants 16 bits, upstream from these values; the operators whose output may change."""
        affected, pending = [], list(values)
        while pending:
            value = pending.pop()
            if (
                self._write(self._wanted_narrow, value, self._wants_narrow(value), journal)
                and value >= self._offset
            ):
                affected.append(value - self._offset)
                pending += self._operands[value - self._offset]
        return affected

    def _propagate_types(
        self, start: list[int], journal: list[tuple[list[Any], int, Any]], touched: set[int]
    ) -> set[int]:
        """Recompute types downstream from these operators, in execution order: the values that changed."""
        changed: set[int] = set()
        turned_values: set[int] = set()
        heap = sorted(set(start))
        queued = set(heap)
        while heap:
            i = heapq.heappop(heap)
            value = self._offset + i
            moved = self._write(self._mode, i, self._mode_of(i), journal)
            widened = self._write(self._carried, value, self._output_of(i), journal)
            turned = self._write(self._turned, value, self._turns(i), journal)
            if moved or not turned_values.isdisjoint(self._operands[i]):
                touched.add(i)
            if widened:
                changed.add(value)
            if turned:
                turned_values.add(value)
            if widened or turned:
                touched.add(i)
                for consumer in self._consumers[value]:
                    if consumer not in queued:
                        queued.add(consumer)
                        heapq.heappush(heap, consumer)
        return changed

    @staticmethod
    def _write(target: list[Any], index: int, new: Any, journal: list[tuple[list[Any], int, Any]]) -> bool:
        old = target[index]
        if old == new:
            return False
        journal.append((target, index, old))
        target[index] = new
        return True
