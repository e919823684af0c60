"""The table of a graph: how each operator runs in each neighbourhood, and which casts each value needs.

A neighbourhood determines how an operator runs: the kind and shapes of the operator, its precision, and the
types in which its inputs are carried. Large models repeat themselves, so few neighbourhoods are distinct.
`Table` numbers them, asks the rules (`cast_rules`) once for each, and keeps the answers as rows. Rows depend
on neighbourhoods, not on an assignment. They are freed with their graph.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import numpy.typing as npt

from qsync.lowering import cast_rules as rule
from qsync.lowering.lowered_graph import Run
from qsync.lowering.numbering import Ints, Numbered
from qsync.lowering.wiring import wiring
from qsync.operators.declaration import Role
from qsync.operators.precision import Precision
from qsync.operators.registry import PRECISIONS_BY_KIND
from qsync.records.graph import OpGraph
from qsync.records.identity_cache import IdentityCache

Bools = npt.NDArray[np.bool_]

BY_NUMBER = tuple(Precision)
NUMBER = {precision: number for number, precision in enumerate(BY_NUMBER)}
_TYPE_BITS = 6  # bits per type in a key
_OPERANDS_PER_KEY = 6  # operand types that fit into 63 bits beside the number of a neighbourhood
_SHIFTS = _TYPE_BITS * np.arange(_OPERANDS_PER_KEY)[:, None]
# Flags of a neighbourhood: it computes its follower, is computed, saves less, its result is saved, it reads
# images that lowering made channels-last, makes such images, and runs as traced since nothing is lowered.
COMPUTES, COMPUTED, SAVES_LESS, SAVED, READS_ORDER, MAKES_ORDER, AS_TRACED = (1 << k for k in range(7))
_FLAG_BITS = 7


@dataclass(frozen=True, slots=True)
class Facts:
    """What lowering decides of every operator and value, as numbers that change in place.

    By operator: its precision, and whether it saves less (with one more entry). By value: whether all readers
    want it in 16 bits, whether it is in channels-last order, and the type that carries it.
    """

    precision: bytearray
    less: bytearray
    wanted: bytearray
    order: bytearray
    carried: bytearray

    def copy(self) -> Facts:
        """Return facts that change apart from these."""
        every = (self.precision, self.less, self.wanted, self.order, self.carried)
        return Facts(*(bytearray(held) for held in every))


def as_array(held: bytearray) -> npt.NDArray[np.uint8]:
    """Return facts as an array that shares their memory."""
    return np.frombuffer(held, dtype=np.uint8)


class Table:
    """The rows of one graph. `structure[i]` numbers operator `i`'s kind and input shapes.

    A cell is a structure at a precision. `rows` are `Run`s without the operator's name. `cast_sets` are
    tuples of numbers in `cast_kinds`: source, target, channels_last.
    """

    def __init__(self, graph: OpGraph) -> None:
        self.wiring = wiring(graph)
        ops, self.offset, entries = graph.ops, self.wiring.offset, self.wiring.entries
        self.num_elements = np.array([entry.num_elements for entry in entries], dtype=np.int64)
        self.type_names: list[str] = []
        self._type_numbers: dict[str, int] = {}
        kinds: dict[Any, int] = {}
        by_name = {entry.name: entry for entry in entries}
        parameters = {value.name for value in graph.parameters}
        self.structure = np.array(
            [kinds.setdefault(self._structure(i, by_name, parameters), len(kinds)) for i in range(len(ops))],
            dtype=np.int64,
        )
        self.first_cell: list[int] = (self.structure * len(BY_NUMBER)).tolist()
        self._example: dict[int, int] = {}
        for i, structure in enumerate(self.structure.tolist()):
            self._example.setdefault(structure, i)
        self._wire()
        self._fill_cells(len(kinds))
        self._outputs: dict[str | None, list[tuple[int, int]]] = {}
        self._followed: dict[int, dict[int, int]] = {cell: {} for cell in self.first_cell}
        self.settled, self.open, self.ordering = self._settle()
        self._surroundings = Numbered()
        self._neighbourhoods = [Numbered() for _ in self._floats]
        self.rows: list[Run] = []
        width = max((len(operands) for operands in self.wiring.operands), default=0)
        self._taken: Ints = np.zeros((0, width), dtype=np.int64)  # types in which rows take operands, or -1
        self._cast_sets = Numbered()
        self.cast_sets: list[tuple[int, ...]] = []
        self.kinds_by_set: Ints = np.zeros((0, 0), dtype=np.int64)  # the same, filled with -1
        self.cast_kinds: list[tuple[str, str, bool]] = []
        self._cast_kind_numbers: dict[tuple[str, str, bool], int] = {}

    def type(self, name: str) -> int:
        """Return the number of a type."""
        number = self._type_numbers.get(name)
        if number is None:
            number = self._type_numbers[name] = len(self.type_names)
            assert number < 1 << _TYPE_BITS, "more types than fit into a key"
            self.type_names.append(name)
        return number

    def _structure(self, i: int, entries: Mapping[str, Any], parameters: Collection[str]) -> Any:
        """Return an operator's properties for lowering and memory, except name and position."""
        op, follower = self.wiring.ops[i], self.wiring.epilogue[i]
        inputs = tuple(
            (e.dtype, e.shape, e.requires_grad, e.channels_last, v in parameters, op.inputs.index(v))
            for v, e in ((v, entries[v]) for v in op.inputs)
        )
        kept = tuple((entries[v].dtype, entries[v].shape, entries[v].requires_grad) for v in op.kept)
        return (
            op.kind, op.role, op.dtype, op.shape, op.requires_grad, op.magnitude, op.dropout, op.dilated,
            op.exposed, op.copies, op.channels_last, op.splits, op.derivative,
            None if follower is None else self.wiring.ops[follower].kind, self.wiring.product[i] is None,
            inputs, kept,
        )  # fmt: skip

    def _wire(self) -> None:
        """Store edges, sorted by the value read, float operands, and each operator's neighbours."""
        wiring, ops = self.wiring, self.wiring.ops
        edges = sorted(
            (v, i, j) for i, operands in enumerate(wiring.operands) for j, v in enumerate(operands)
        )
        table = np.array(edges, dtype=np.int64).reshape(-1, 3)
        values, self._edge_op, self._edge_slot = (np.ascontiguousarray(row) for row in table.T)
        self._num_edges = np.bincount(values, minlength=wiring.num_values)
        self._edge_start = np.cumsum(self._num_edges) - self._num_edges
        # Float operands, in parts of as many as fit into a key; missing ones are the value beyond the last.
        width = max(1, -(-max((len(floats) for floats in wiring.floats), default=0) // _OPERANDS_PER_KEY))
        floats = np.full((len(ops), width * _OPERANDS_PER_KEY), wiring.num_values)
        for i, operands in enumerate(wiring.floats):
            floats[i, : len(operands)] = operands
        self._floats = floats.reshape(len(ops), width, _OPERANDS_PER_KEY).transpose(1, 2, 0).copy()
        self.before, self.after, self.epilogue, self.product = (
            np.array([-1 if other is None else other for other in found], dtype=np.int64)
            for found in (wiring.before, wiring.after, wiring.epilogue, wiring.product)
        )
        self._is_replaced = np.zeros(len(ops), dtype=np.bool_)
        self._is_replaced[wiring.replaced] = True
        anchors = [-1 if anchor is None else anchor for anchor in wiring.anchor]
        self.owner = np.array([*anchors, *range(len(ops))], dtype=np.int64)
        # Values that may be wanted in 16 bits, with their readers: (operator, slots in which it reads the
        # value, its first cell), or for a follower that passes the want on (operator, 0, its result).
        self.wanting: dict[int, list[tuple[int, int, int]]] = {}
        for value in reversed(range(wiring.offset, wiring.num_values)):
            found = [(i, self._slots(i, value)) for i in wiring.consumers[value]]
            if found and all(
                slots or (wiring.passes_16bit_on[i] and wiring.offset + i in self.wanting)
                for i, slots in found
            ):
                self.wanting[value] = [
                    (i, slots, self.first_cell[i] if slots else wiring.offset + i) for i, slots in found
                ]

    def _slots(self, i: int, value: int) -> int:
        """Return the slots of an adjustable operator in which it reads a value, as bits; 0 for others."""
        if self.wiring.ops[i].role is not Role.ADJUSTABLE:
            return 0
        return sum(1 << j for j, operand in enumerate(self.wiring.operands[i]) if operand == value)

    def _fill_cells(self, num_structures: int) -> None:
        """Ask the rules that depend on an operator and its precision alone, once for every cell."""
        num_cells = num_structures * len(BY_NUMBER)
        self.wide_slots = [0] * num_cells  # the slots of adjustable operators that need more than 16 bits
        self.makes_order = [False] * num_cells
        self.may_compute = [False] * num_cells  # a product its follower, in its epilogue
        self.passes_order = [False] * len(self.wiring.ops)
        for structure, i in self._example.items():
            op = self.wiring.ops[i]
            for precision in PRECISIONS_BY_KIND[op.kind] if op.role is Role.ADJUSTABLE else ():
                cell = structure * len(BY_NUMBER) + NUMBER[precision]
                for j, value in enumerate(self.wiring.operands[i]):
                    taken = rule.taken_type(op, j, self.wiring.traced[value], precision, str(precision))
                    self.wide_slots[cell] |= (not rule.takes_16bit(taken)) << j
                self.makes_order[cell] = rule.makes_channels_last(op, precision, False)
                if self.wiring.epilogue[i] is not None:
                    self.may_compute[cell] = rule.computes_follower(op, precision, False)
        self._computes = np.array(self.may_compute, dtype=np.bool_)
        for i, op in enumerate(self.wiring.ops):
            self.passes_order[i] = bool(op.inputs) and rule.makes_channels_last(op, Precision.FP32, True)

    def _settle(self) -> tuple[bytes, list[int], list[int]]:
        """Return all values' types as traced, and the operators whose type, or whose order, may change."""
        wiring = self.wiring
        carried = bytearray(map(self.type, wiring.traced))
        varies, orders = [False] * wiring.num_values, [False] * wiring.num_values
        for i, op in enumerate(wiring.ops):
            result, operands = self.offset + i, wiring.operands[i]
            own = op.role is Role.ADJUSTABLE
            varies[result] = own or (op.role is Role.FOLLOWING and any(varies[v] for v in wiring.floats[i]))
            if op.role is Role.FOLLOWING and not varies[result]:
                carried[result] = self.type_of(i, carried)
            lowers = any(self.makes_order[self.first_cell[i] : self.first_cell[i] + len(BY_NUMBER)])
            orders[result] = lowers or (self.passes_order[i] and orders[operands[0]])
        open_, ordering = (
            [i for i in range(len(wiring.ops)) if of[self.offset + i]] for of in (varies, orders)
        )
        return bytes(carried), open_, ordering

    def outputs(self, carried_16bit: str | None) -> list[tuple[int, int]]:
        """Return the result types of adjustable operators, by cell and by demand for 16 bits."""
        found = self._outputs.get(carried_16bit)
        if found is None:
            found = self._outputs[carried_16bit] = [(0, 0)] * len(self.wide_slots)
            for structure, i in self._example.items():
                op = self.wiring.ops[i]
                for number, precision in enumerate(BY_NUMBER if op.role is Role.ADJUSTABLE else ()):
                    plain, wanted = (
                        self.type(rule.output_of(op, precision, str(precision), carried_16bit, so))
                        for so in (False, True)
                    )
                    found[structure * len(BY_NUMBER) + number] = plain, wanted
        return found

    def type_of(self, i: int, carried: bytearray) -> int:
        """Return the type of a following operator's result, from those of its float inputs."""
        known, key = self._followed[self.first_cell[i]], 0
        for value in self.wiring.floats[i]:
            key = key << _TYPE_BITS | carried[value]
        found = known.get(key)
        if found is None:
            floats = [self.type_names[carried[value]] for value in self.wiring.floats[i]]
            run, _ = self.run_of(i, Precision.FP32, floats)
            found = known[key] = self.type(run.output)
        return found

    def saved_as(self, i: int, j: int, precision: Precision) -> str | None:
        """Return the type in which an operator saves its `j`-th input for backward, if it is adjustable."""
        op, traced = self.wiring.ops[i], self.wiring.traced[self.wiring.operands[i][j]]
        if op.role is not Role.ADJUSTABLE:
            return None
        taken = rule.taken_type(op, j, traced, precision, str(precision))
        return taken if rule.saves_operand(op, j) else None

    def run_of(
        self, i: int, precision: Precision, floats: list[str], output: str | None = None, flags: int = 0
    ) -> tuple[Run, list[str | None]]:
        """Return how operator `i` runs in a neighbourhood, and the types to which its inputs are cast.

        `floats` are the types that carry its float inputs; `output` is its result's if it is adjustable. A
        type of None belongs to an input that is no float.
        """
        op, follower, wiring = self.wiring.ops[i], self.wiring.epilogue[i], self.wiring
        mode = rule.mode_of(op, precision, floats)
        traced = [wiring.traced[value] for value in wiring.operands[i]]
        taken = [rule.taken_type(op, j, dtype, precision, mode) for j, dtype in enumerate(traced)]
        computed = wiring.ops[follower].kind if follower is not None and flags & COMPUTES else None
        form = rule.run_form_of(
            op, computed, bool(flags & COMPUTED), bool(flags & SAVES_LESS), lambda: bool(flags & SAVED)
        )
        if output is None:
            output = rule.output_of(op, precision, mode, None, False)
        ordered, as_traced = bool(flags & READS_ORDER), bool(flags & AS_TRACED)
        return Run(op.name, mode, (), output, form, ordered, as_traced=as_traced), taken

    def _computing(self, ops: Ints, facts: Facts) -> Bools:
        """Return whether operators compute their followers in their epilogues."""
        cells = self.structure[ops] * len(BY_NUMBER) + as_array(facts.precision)[ops]
        found: Bools = self._computes[cells] & (as_array(facts.less)[self.epilogue[ops]] == 0)
        return found

    def rows_of(
        self, ops: Ints, facts: Facts, nothing_lowered: bool, is_saved: Callable[[int], bool]
    ) -> Ints:
        """Return the numbers of the rows of some operators in their present neighbourhoods."""
        precision, less, order = map(as_array, (facts.precision, facts.less, facts.order))
        carried, product = facts.carried, self.product[ops]
        types = as_array(carried + b"\0")
        flags = self._computing(ops, facts) * COMPUTES
        flags |= ((product >= 0) & self._computing(product, facts)) * COMPUTED
        flags |= (less[ops] > 0) * SAVES_LESS
        for k in np.flatnonzero(less[ops]).tolist():
            flags[k] |= is_saved(int(ops[k])) * SAVED
        if nothing_lowered:
            flags |= self._is_replaced[ops] * AS_TRACED
        if order.any():
            for k, i in enumerate(ops.tolist()):
                flags[k] |= any(order[value] for value in self.wiring.operands[i]) * READS_ORDER
            flags |= order[self.offset + ops] * MAKES_ORDER
        key = (self.structure[ops] << 3 | precision[ops]) << _TYPE_BITS | types[self.offset + ops]
        number, fresh = self._surroundings(key << _FLAG_BITS | flags)
        for floats, numbered in zip(self._floats, self._neighbourhoods, strict=True):
            operands = (types[floats[:, ops]].astype(np.int64) << _SHIFTS).sum(axis=0)
            number, fresh = numbered(number << _TYPE_BITS * _OPERANDS_PER_KEY | operands)
        if fresh:
            new = [
                self._ask(int(ops[k]), BY_NUMBER[precision[ops[k]]], carried, int(flags[k])) for k in fresh
            ]
            self._taken = np.concatenate((self._taken, np.array(new, dtype=np.int64)))
        return number

    def _ask(self, i: int, precision: Precision, carried: bytearray, flags: int) -> list[int]:
        """Add the row of operator `i`'s neighbourhood; return the types in which it takes operands."""
        names, wiring = self.type_names, self.wiring
        floats = [names[carried[value]] for value in wiring.floats[i]]
        run, taken = self.run_of(i, precision, floats, names[carried[self.offset + i]], flags)
        values = zip(wiring.operands[i], taken, strict=True)
        operands = tuple(names[carried[value]] if t is None else t for value, t in values)
        self.rows.append(replace(run, op="", operands=operands))
        missing = [-1] * (self._taken.shape[1] - len(taken))
        return [*(-1 if t is None else self.type(t) for t in taken), *missing]

    def casts_of(self, values: Ints, rows: Ints, facts: Facts) -> Ints:
        """Return the numbers of the sets of casts that some values need, from their readers' rows."""
        carried, order = as_array(facts.carried), as_array(facts.order)
        count = self._num_edges[values]
        at = np.repeat(np.arange(len(values)), count)
        edge = np.arange(len(at)) - np.repeat(np.cumsum(count) - count - self._edge_start[values], count)
        taken = self._taken[rows[self._edge_op[edge]], self._edge_slot[edge]]
        mask = np.zeros(len(values), dtype=np.int64)
        np.bitwise_or.at(mask, at, np.where(taken < 0, 0, 1 << np.maximum(taken, 0)))
        types = carried[values].astype(np.int64)
        number, fresh = self._cast_sets((mask << _TYPE_BITS | types) << 1 | order[values])
        for k in fresh:
            self._ask_casts(int(mask[k]), int(types[k]), bool(order[values[k]]))
        if fresh:
            width = max(map(len, self.cast_sets))
            self.kinds_by_set = np.full((len(self.cast_sets), width), -1)
            for row, kinds in zip(self.kinds_by_set, self.cast_sets, strict=True):
                row[: len(kinds)] = kinds
        return number

    def _ask_casts(self, mask: int, carried: int, channels_last: bool) -> None:
        """Apply the rule to a value's type and those in which it is taken; add its set of casts."""
        taken = [name for number, name in enumerate(self.type_names) if mask >> number & 1]
        source = self.type_names[carried]
        found = []
        for target in rule.needed_casts(taken, source):
            kind = (source, target, channels_last)
            if kind not in self._cast_kind_numbers:
                self._cast_kind_numbers[kind] = len(self.cast_kinds)
                self.cast_kinds.append(kind)
            found.append(self._cast_kind_numbers[kind])
        self.cast_sets.append(tuple(found))


_TABLES: IdentityCache[Table] = IdentityCache()


def table(graph: OpGraph) -> Table:
    """Return the table of a graph, cached."""
    return _TABLES.of(graph, lambda: Table(graph))
