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

Each of these is one function below, of what one operator or value finds around itself. `Lowering` applies
them one operator at a time and keeps the lowered graph of a changing assignment: `assign` re-lowers only the
neighbourhood of one operator and `undo` restores the state exactly. `qsync.lowering.vectorized` lowers a whole graph at
once, and asks these same functions once for every distinct neighbourhood.
"""

from __future__ import annotations

import heapq
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from copy import copy
from dataclasses import dataclass
from typing import Any

from qsync.errors import FormatError, MismatchError
from qsync.lowering.lowered_graph import (
    EIGHT_BIT,
    EPILOGUES,
    FUSED,
    NARROWING,
    TURNED,
    Cast,
    LoweredGraph,
    Run,
)
from qsync.records.graph import Op, OpGraph, Role
from qsync.records.identity_cache import Remembered
from qsync.records.precision import (
    CARRIED_FLOATS,
    LARGEST,
    PRECISIONS_BY_KIND,
    ROUNDS_WHAT_IT_READS,
    Precision,
    is_encoded,
    operand_type,
)
from qsync.records.save_less import FORMS, can_save_less

__all__ = [
    "EPILOGUES", "FORMS", "FUSED", "NARROWING", "TURNED", "Cast", "Change", "LoweredGraph", "Lowering", "Run",
    "lower",
]  # fmt: skip

_WIDTH = {name: -position for position, name in enumerate(CARRIED_FLOATS)}

# Kinds of operators that end the order of images though their result has four dimensions.
_NO_IMAGES = ("view", "contiguous", "matmul", "attention", "softmax", "output")
# What may compute the activation that reads it alone.
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


def may_be_cast_for(op: Op) -> bool:
    """Whether an operator may need a cast of what it reads: an embedding never does, of a table it shares."""
    return op.role is Role.ADJUSTABLE and op.kind not in ROUNDS_WHAT_IT_READS


def taken_type(op: Op, j: int, traced: str, precision: Precision, mode: str) -> str | None:
    """The type in which an operator takes its `j`-th input, traced in `traced`; None if that is no float."""
    if traced not in LARGEST:
        return None
    if op.role is Role.ADJUSTABLE:
        return operand_type(op.kind, j, precision)
    return mode if op.role is Role.FOLLOWING else traced


def mode_of(op: Op, precision: Precision, floats: Iterable[str]) -> str:
    """The precision or type in which an operator runs whose float inputs are carried in these types."""
    if op.role is Role.ADJUSTABLE:
        return str(precision)
    if op.role is Role.FIXED:
        return op.dtype
    widest = max(floats, key=_WIDTH.__getitem__, default=op.dtype)
    return "fp32" if op.magnitude > LARGEST.get(widest, float("inf")) else widest


def output_of(op: Op, precision: Precision, mode: str, narrow: str | None, wanted_narrow: bool) -> str:
    """The type in which an operator hands on its result. `narrow` is the device's 16-bit float."""
    if op.role is Role.ADJUSTABLE:
        if precision is Precision.BF16:
            return "bf16"
        return narrow if precision in EIGHT_BIT and narrow and wanted_narrow else "fp32"
    return mode if op.role is Role.FOLLOWING and op.dtype == "fp32" else op.dtype


def is_narrow(taken: str | None) -> bool:
    """Whether an adjustable operator that takes a value so narrows it to 16 bits or fewer."""
    return taken is not None and (taken == "bf16" or is_encoded(taken))


def passes_want(op: Op, num_floats: int) -> bool:
    """Whether a following operator narrows its only float input if its result is wanted narrow."""
    return op.role is Role.FOLLOWING and num_floats == 1 and op.magnitude <= LARGEST["bf16"]


def turns(op: Op, precision: Precision, first_turned: bool) -> bool:
    """Whether an operator's result is images in channels-last order though traced in another."""
    if len(op.shape) != 4 or op.kind in _NO_IMAGES:
        return False
    if op.kind == "conv2d" and precision not in (Precision.FP32, Precision.TF32):
        return True
    return first_turned


def needed_casts(taken: Iterable[str | None], carried: str) -> tuple[str, ...]:
    """The types to which a value is cast that is carried in one and taken in these."""
    return tuple(sorted({t for t in taken if t is not None and t != carried}))


def has_epilogue(op: Op, readers: Sequence[Op]) -> bool:
    """Whether an operator computes its only reader in its epilogue where its precision has one."""
    if op.kind not in _WITH_EPILOGUE or op.role is not Role.ADJUSTABLE or op.exposed or len(readers) != 1:
        return False
    follower = readers[0]
    # It takes and makes the very type that the product makes, whatever that is.
    same = follower.dtype == op.dtype == "fp32" and follower.magnitude <= LARGEST["bf16"]
    # Where gradients were switched off between the two only one of them has a backward.
    same &= follower.requires_grad == op.requires_grad and follower.shape == op.shape
    alone = follower.inputs == (op.name,) and not follower.kept
    return follower.role is Role.FOLLOWING and follower.kind in EPILOGUES and same and alone


def computes(op: Op, precision: Precision, follower_saves_less: bool) -> bool:
    """Whether an operator with an epilogue for its follower computes it there."""
    return not follower_saves_less and precision in _WITH_EPILOGUE[op.kind]


def form_of(
    op: Op, computed: str | None, is_computed: bool, saves_less: bool, is_kept: Callable[[], bool]
) -> str:
    """What an operator keeps for backward, or where it is computed: see `Run`.

    `computed` is the kind of what it computes in its epilogue; `is_computed`: in that of another.
    """
    if computed is not None:
        return computed
    if is_computed:
        return FUSED
    if not saves_less:
        return "plain"
    beside_kept, alone = FORMS[op.kind]
    return beside_kept if is_kept() else alone


def keeps(op: Op, j: int, taken: str | None, carried: str) -> bool:
    """Whether an operator keeps its `j`-th input for backward as it is carried."""
    if op.role is not Role.ADJUSTABLE or not op.requires_grad:
        return False
    return j in _KEPT_OPERANDS.get(op.kind, range(len(op.inputs))) and taken == carried


class Wiring:
    """Who reads what in a graph, by number: what lowering reads off the graph alone.

    Operators are numbered by position. Values are numbered too: graph inputs first, then one per operator.
    """

    def __init__(self, graph: OpGraph) -> None:
        self.ops, self.inputs, self.model = graph.ops, graph.inputs, graph.model
        self.position = {op.name: i for i, op in enumerate(graph.ops)}
        names = [value.name for value in graph.inputs] + [op.name for op in graph.ops]
        self.number = number = {name: i for i, name in enumerate(names)}
        self.offset = len(graph.inputs)
        self.num_values = len(names)
        self.traced = [value.dtype for value in graph.inputs] + [op.dtype for op in graph.ops]
        self.operands = [tuple(number[name] for name in op.inputs) for op in graph.ops]
        self.floats = [
            tuple(value for value in operands if self.traced[value] in LARGEST) for operands in self.operands
        ]
        self.passes_want = [
            passes_want(op, len(set(floats))) for op, floats in zip(graph.ops, self.floats, strict=True)
        ]
        consumers: list[list[int]] = [[] for _ in names]
        for i, operands in enumerate(self.operands):
            for value in dict.fromkeys(operands):
                consumers[value].append(i)
        self.consumers = consumers
        # The operator before which casts of each graph input stand, and the inputs that stand before each.
        self.anchored: list[list[int]] = [[] for _ in graph.ops]
        self.anchor: list[int | None] = []
        for value in range(self.offset):
            users = [i for i in consumers[value] if may_be_cast_for(graph.ops[i])]
            anchor = next(iter(users or consumers[value]), None)
            self.anchor.append(anchor)
            if anchor is not None:
                self.anchored[anchor].append(value)
        # The operator that may be computed in each one's epilogue, and the one in whose epilogue each may be.
        self.epilogue: list[int | None] = [None] * len(graph.ops)
        self.product: list[int | None] = [None] * len(graph.ops)
        for i, op in enumerate(graph.ops):
            readers = consumers[self.offset + i]
            if has_epilogue(op, [graph.ops[reader] for reader in readers]):
                self.epilogue[i] = readers[0]
                self.product[readers[0]] = i

    def owner(self, value: int) -> int | None:
        """The operator beside which casts of this value stand."""
        return self.anchor[value] if value < self.offset else value - self.offset

    def is_view(self, i: int) -> bool:
        """Whether the result of operator `i` has the storage of its only input."""
        return self.ops[i].kind == "view" and len(set(self.operands[i])) == 1

    def maker(self, value: int) -> int:
        """The operator whose storage this value is: what made it, or what it is a view of. Below 0: none."""
        i = value - self.offset
        while i >= 0 and self.is_view(i):
            i = self.operands[i][0] - self.offset
        return i

    def is_kept(
        self, value: int, taken: Callable[[int, int], str | None], carried: Callable[[int], str]
    ) -> bool:
        """Whether an adjustable consumer of this value, or of a view of it, keeps it as it is carried."""
        return any(
            keeps(self.ops[i], j, taken(i, j), carried(at)) for i, j, at in self.storage_readers(value)
        )

    def storage_readers(self, value: int) -> Iterator[tuple[int, int, int]]:
        """Who reads this value or a view of it: the operator, the place, and the value that stands there."""
        for i in self.consumers[value]:
            if self.is_view(i):
                yield from self.storage_readers(self.offset + i)
                continue
            for j, operand in enumerate(self.operands[i]):
                if operand == value:
                    yield i, j, value

    def check(self, name: str, precision: Precision) -> None:
        """MismatchError or FormatError unless an operator of this name can run in this precision."""
        i = self.position.get(name)
        if i is None or self.ops[i].role is not Role.ADJUSTABLE:
            raise MismatchError(f"the graph of {self.model} has no adjustable operator {name!r}")
        kind = self.ops[i].kind
        if precision not in PRECISIONS_BY_KIND[kind]:
            known = ", ".join(PRECISIONS_BY_KIND[kind])
            raise FormatError(f"{name}: there is no {precision} kernel for {kind}; choose one of {known}")

    def check_saving(self, name: str) -> None:
        """MismatchError unless an operator of this name can save less."""
        i = self.position.get(name)
        if i is None or not can_save_less(self.ops[i]):
            raise MismatchError(
                f"the graph of {self.model} has no operator {name!r} that could save less; those are "
                f"following operators of the kinds {', '.join(FORMS)}"
            )


_WIRINGS: Remembered[Wiring] = Remembered()


def wiring(graph: OpGraph) -> Wiring:
    """The wiring of a graph, worked out once."""
    return _WIRINGS.of(graph, lambda: Wiring(graph))


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
        self.wiring = wiring(graph)
        self.position = self.wiring.position
        self.anchored = self.wiring.anchored
        for name in assignment:
            self.wiring.check(name, assignment[name])
        for name in saving_less:
            self.wiring.check_saving(name)
        self.precision = [assignment.get(op.name, Precision.FP32) for op in graph.ops]
        self._offset = self.wiring.offset
        self._wanted_narrow = [False] * self.wiring.num_values
        self._mode = ["fp32"] * len(graph.ops)
        self._carried = list(self.wiring.traced)
        self.casts: list[tuple[str, ...]] = [()] * self.wiring.num_values
        self._saves_less = [False] * len(graph.ops)
        for name in saving_less:
            self._saves_less[self.position[name]] = True
        self._form = ["plain"] * len(graph.ops)
        self._turned = [False] * self.wiring.num_values
        self._lower_everything()

    def copy(self, narrow: str | None) -> Lowering:
        """Another lowering, which stands where this one does now, for a device with that 16-bit float.

        It may be another one only while no operator hands it on.
        """
        other = copy(self)
        other.narrow = narrow
        other.precision, other.casts = list(self.precision), list(self.casts)
        other._wanted_narrow, other._saves_less = list(self._wanted_narrow), list(self._saves_less)
        other._mode, other._carried = list(self._mode), list(self._carried)
        other._form, other._turned = list(self._form), list(self._turned)
        return other

    def mode(self, i: int) -> str:
        """The precision or type in which operator `i` runs."""
        return self._mode[i]

    def form(self, i: int) -> str:
        """What operator `i` keeps for backward, or where it is computed: see `Run`."""
        return self._form[i]

    def turned(self, i: int) -> bool:
        """Whether operator `i` reads images that a lowered convolution brought to channels-last order."""
        return any(self._turned[value] for value in self.wiring.operands[i])

    def output(self, i: int) -> str:
        """The type in which the result of operator `i` is handed on."""
        return self._carried[self._offset + i]

    def computed_by(self, i: int) -> str | None:
        """The operator that operator `i` computes in its epilogue, as it is now."""
        follower = self.wiring.epilogue[i]
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
            for j, value in enumerate(self.wiring.operands[i])
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
        self.wiring.check(name, precision)
        i = self.position[name]
        journal: list[tuple[list[Any], int, Any]] = []
        touched = {i}
        self._write(self.precision, i, precision, journal)
        changed_outputs = self._propagate_wants(self.wiring.operands[i], journal)
        changed_values = self._propagate_types([i, *changed_outputs], journal, touched)
        stale = set(self.wiring.operands[i]) | changed_values
        for j in list(touched):
            stale |= {self._offset + j, *self.wiring.operands[j]}
        for value in sorted(stale):
            if self._write(self.casts, value, self._needed_casts(value), journal) or value in changed_values:
                owner = self.wiring.owner(value)
                if owner is not None:
                    touched.add(owner)
        makers = {self.wiring.maker(value) for j in touched for value in self.wiring.operands[j]}
        computed = {follower for j in touched if (follower := self.wiring.epilogue[j]) is not None}
        for j in sorted(touched | makers | computed):
            if j >= 0 and self._write(self._form, j, self._form_of(j), journal):
                touched.add(j)
        return Change(tuple(sorted(touched)), tuple(journal))

    def save_less(self, name: str, less: bool = True) -> Change:
        """Let one operator save less for backward, or as much as torch does again."""
        self.wiring.check_saving(name)
        i = self.position[name]
        journal: list[tuple[list[Any], int, Any]] = []
        self._write(self._saves_less, i, less, journal)
        product = self.wiring.product[i]
        touched = (i,) if product is None else (product, i)
        for j in touched:
            self._write(self._form, j, self._form_of(j), journal)
        return Change(touched, tuple(journal))

    def undo(self, change: Change) -> None:
        """Restore the state before `change` (of `assign` or `save_less`): the last one not yet undone."""
        for target, index, old in reversed(change.journal):
            target[index] = old

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
        for value in reversed(range(self.wiring.num_values)):
            self._wanted_narrow[value] = self._wants_narrow(value)
        for i in range(len(self.graph.ops)):
            self._mode[i] = self._mode_of(i)
            self._carried[self._offset + i] = self._output_of(i)
            self._turned[self._offset + i] = self._turns(i)
        for value in range(self.wiring.num_values):
            self.casts[value] = self._needed_casts(value)
        for i in range(len(self.graph.ops)):
            self._form[i] = self._form_of(i)

    def _taken(self, i: int, j: int) -> str | None:
        traced = self.wiring.traced[self.wiring.operands[i][j]]
        return taken_type(self.graph.ops[i], j, traced, self.precision[i], self._mode[i])

    def _mode_of(self, i: int) -> str:
        floats = [self._carried[value] for value in self.wiring.floats[i]]
        return mode_of(self.graph.ops[i], self.precision[i], floats)

    def _output_of(self, i: int) -> str:
        wanted = self._wanted_narrow[self._offset + i]
        return output_of(self.graph.ops[i], self.precision[i], self._mode[i], self.narrow, wanted)

    def _turns(self, i: int) -> bool:
        operands = self.wiring.operands[i]
        first_turned = bool(operands) and self._turned[operands[0]]
        return turns(self.graph.ops[i], self.precision[i], first_turned)

    def _computes(self, i: int) -> bool:
        """Whether operator `i` computes its follower in its epilogue."""
        follower = self.wiring.epilogue[i]
        if follower is None:
            return False
        return computes(self.graph.ops[i], self.precision[i], self._saves_less[follower])

    def _form_of(self, i: int) -> str:
        follower, product = self.wiring.epilogue[i], self.wiring.product[i]
        computed = self.graph.ops[follower].kind if follower is not None and self._computes(i) else None
        is_computed = product is not None and self._computes(product)
        return form_of(
            self.graph.ops[i], computed, is_computed, self._saves_less[i],
            lambda: self.wiring.is_kept(self._offset + i, self._taken, self._carried.__getitem__),
        )  # fmt: skip

    def _wants_narrow(self, value: int) -> bool:
        """Whether every consumer of this value would narrow it to 16 bits or fewer anyway."""
        consumers = self.wiring.consumers[value]
        return bool(consumers) and all(self._narrows(i, value) for i in consumers)

    def _narrows(self, i: int, value: int) -> bool:
        if self.graph.ops[i].role is Role.ADJUSTABLE:
            operands = self.wiring.operands[i]
            return all(is_narrow(self._taken(i, j)) for j, v in enumerate(operands) if v == value)
        return self.wiring.passes_want[i] and self._wanted_narrow[self._offset + i]

    def _needed_casts(self, value: int) -> tuple[str, ...]:
        return needed_casts(
            (
                self._taken(i, j)
                for i in self.wiring.consumers[value]
                for j, operand in enumerate(self.wiring.operands[i])
                if operand == value
            ),
            self._carried[value],
        )

    def _propagate_wants(self, values: Sequence[int], journal: list[tuple[list[Any], int, Any]]) -> list[int]:
        """Recompute who wants 16 bits, upstream from these values; the operators whose output may change."""
        affected, pending = [], list(values)
        while pending:
            value = pending.pop()
            if (
                self._write(self._wanted_narrow, value, self._wants_narrow(value), journal)
                and value >= self._offset
            ):
                affected.append(value - self._offset)
                pending += self.wiring.operands[value - self._offset]
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
            if moved or not turned_values.isdisjoint(self.wiring.operands[i]):
                touched.add(i)
            if widened:
                changed.add(value)
            if turned:
                turned_values.add(value)
            if widened or turned:
                touched.add(i)
                for consumer in self.wiring.consumers[value]:
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
