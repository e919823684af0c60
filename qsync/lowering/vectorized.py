"""Lower a whole assignment at once: apply the rules once per distinct neighbourhood, then look up.

A neighbourhood determines how an operator runs: the kind and shapes of the operator, its precision, and the
types in which its inputs are carried. Large models repeat themselves, so few neighbourhoods are distinct.
`Tables` number them, call the functions of `qsync.lowering.cast_rules` once for each, and store the answers.
An assignment is then lowered by indexing arrays. Only two properties propagate along chains and are computed
one operator at a time: types, forward through following operators, and the demand for 16 bits, backward.

Tables depend on neighbourhoods, not on an assignment. They are freed with their graph.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from qsync.lowering import cast_rules as rule
from qsync.lowering.lowered_graph import Cast, LoweredGraph, Run
from qsync.lowering.numbering import GrowingRows, Ints, Numbered
from qsync.lowering.wiring import wiring
from qsync.operators.declaration import Role
from qsync.operators.precision import Precision
from qsync.operators.registry import PRECISIONS_BY_KIND
from qsync.records.graph import Op, OpGraph
from qsync.records.identity_cache import IdentityCache

Bools = npt.NDArray[np.bool_]

_PRECISIONS = tuple(Precision)
_NUMBER = {precision: number for number, precision in enumerate(_PRECISIONS)}
_TYPE_BITS = 6  # bits per type in a key
_OPERANDS_PER_KEY = 6  # operand types that fit into 63 bits beside the number of a neighbourhood


@dataclass(frozen=True, slots=True)
class _Cells:
    """Answers of the rules for every adjustable structure at every precision (rows)."""

    taken: Ints
    takes_16bit: Bools
    computes: Bools
    allowed: Bools


class Tables:
    """Lookup tables of one graph. `structure[i]` numbers operator `i`'s kind and input shapes."""

    def __init__(self, graph: OpGraph) -> None:
        self.wiring = wiring(graph)
        ops, self.offset, entries = graph.ops, self.wiring.offset, self.wiring.entries
        self.num_elements = np.array([entry.num_elements for entry in entries], dtype=np.int64)
        self.type_names: list[str] = []
        self._type_numbers: dict[str, int] = {}
        self._carried = np.array([self.type(dtype) for dtype in self.wiring.traced], dtype=np.int64)
        kinds: dict[Any, int] = {}
        by_name = {entry.name: entry for entry in entries}
        parameters = {value.name for value in graph.parameters}
        self.structure = np.array(
            [kinds.setdefault(self._structure(i, by_name, parameters), len(kinds)) for i in range(len(ops))],
            dtype=np.int64,
        )
        self.num_structures = len(kinds)
        self._example: dict[int, int] = {}
        for i, structure in enumerate(self.structure.tolist()):
            self._example.setdefault(structure, i)
        self._adjustable = np.array(
            [i for i, op in enumerate(ops) if op.role is Role.ADJUSTABLE], dtype=np.int64
        )
        self._named = {ops[i].name: i for i in self._adjustable.tolist()}
        self._wire()
        self._cells = self._fill_cells()
        self._outputs: dict[str | None, Ints] = {}
        self._fill_followers()
        self._surroundings = Numbered()
        self._neighbourhoods = [Numbered() for _ in range(-(-max(1, self._most_floats) // _OPERANDS_PER_KEY))]
        self.runs: list[Run] = []  # by neighbourhood number; without the operator's name
        self._taken = GrowingRows(self._most_operands, -1)
        self._cast_sets = Numbered()
        self.cast_sets: list[tuple[int, ...]] = []  # lists of numbers in `cast_kinds`, by number of the set
        self.cast_kinds: list[tuple[str, str, bool]] = []  # source, target, channels_last
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
            (
                entries[v].dtype,
                entries[v].shape,
                entries[v].requires_grad,
                entries[v].channels_last,
                v in parameters,
                op.inputs.index(v),
            )
            for v in op.inputs
        )
        kept = tuple((entries[v].dtype, entries[v].shape, entries[v].requires_grad) for v in op.kept)
        computed = None if follower is None else self.wiring.ops[follower].kind
        own = (op.kind, op.role, op.dtype, op.shape, op.requires_grad, op.magnitude, op.dropout, op.dilated)
        return (
            own,
            op.exposed,
            op.copies,
            op.channels_last,
            op.splits,
            op.derivative,
            computed,
            self.wiring.product[i] is None,
            inputs,
            kept,
        )

    def _wire(self) -> None:
        """Store edges, sorted by the value read, and float operands by slot."""
        wiring, ops = self.wiring, self.wiring.ops
        edges = sorted(
            (v, i, j) for i, operands in enumerate(wiring.operands) for j, v in enumerate(operands)
        )
        table = np.array(edges, dtype=np.int64).reshape(-1, 3)
        self._edge_value, self._edge_op, self._edge_slot = (np.ascontiguousarray(row) for row in table.T)
        self._read, self._edge_start = np.unique(self._edge_value, return_index=True)
        self._most_operands = max((len(operands) for operands in wiring.operands), default=0)
        self._most_floats = max((len(floats) for floats in wiring.floats), default=0)
        self._slots = []
        for k in range(self._most_floats):
            having = [i for i, floats in enumerate(wiring.floats) if len(floats) > k]
            values = [wiring.floats[i][k] for i in having]
            self._slots.append((np.array(having, dtype=np.int64), np.array(values, dtype=np.int64)))
        of_adjustable = np.isin(self._edge_op, self._adjustable)
        self._adjustable_edges = np.flatnonzero(of_adjustable)
        # Values that may be wanted in 16 bits, and the edges that propagate this, last reader first.
        self._may_want = np.zeros(wiring.num_values, dtype=np.bool_)
        self._may_want[self._read] = True
        passing = np.array(wiring.passes_16bit_on, dtype=np.bool_).reshape(-1)
        self._may_want[self._edge_value[~of_adjustable & ~passing[self._edge_op]]] = False
        self._want_edges = [
            (self.offset + i, value)
            for i in reversed(range(len(ops)))
            if wiring.passes_16bit_on[i]
            for value in dict.fromkeys(wiring.operands[i])
        ]
        self._epilogues = np.array(
            [(i, f) for i, f in enumerate(wiring.epilogue) if f is not None], dtype=np.int64
        ).reshape(-1, 2)
        anchors = [-1 if anchor is None else anchor for anchor in wiring.anchor]
        self.owner = np.array([*anchors, *range(len(ops))], dtype=np.int64)
        self.switches = np.array(
            [(i, j) for i, j in enumerate(wiring.after) if j is not None], dtype=np.int64
        ).reshape(-1, 2)

    def _fill_cells(self) -> _Cells:
        shape = (self.num_structures * len(_PRECISIONS), max(1, self._most_operands))
        cells = _Cells(
            np.full(shape, -1), np.zeros(shape, dtype=np.bool_),
            np.zeros(shape[0], dtype=np.bool_), np.zeros(shape[0], dtype=np.bool_),
        )  # fmt: skip
        for structure, i in self._example.items():
            op = self.wiring.ops[i]
            if op.role is not Role.ADJUSTABLE:
                continue
            for precision in PRECISIONS_BY_KIND[op.kind]:
                cell = structure * len(_PRECISIONS) + _NUMBER[precision]
                cells.allowed[cell] = True
                for j, value in enumerate(self.wiring.operands[i]):
                    taken = rule.taken_type(op, j, self.wiring.traced[value], precision, str(precision))
                    cells.taken[cell, j] = -1 if taken is None else self.type(taken)
                    cells.takes_16bit[cell, j] = rule.takes_16bit(taken)
                if self.wiring.epilogue[i] is not None:
                    cells.computes[cell] = rule.computes_follower(op, precision, False)
        return cells

    def _fill_followers(self) -> None:
        """Tabulate the result type of every following operator by its float inputs' types.

        An operator whose input types never change gets its fixed result type here.
        """
        wiring, tables = self.wiring, [dict[Any, int]() for _ in range(self.num_structures)]
        varies = np.zeros(wiring.num_values, dtype=np.bool_)
        varies[self.offset + self._adjustable] = True
        carried = self._carried.tolist()
        followers: list[tuple[int, Any, int, dict[Any, int]]] = []
        for i, op in enumerate(wiring.ops):
            if op.role is not Role.FOLLOWING:
                continue
            floats, result = wiring.floats[i], self.offset + i
            varies[result] = any(varies[value] for value in floats)
            table = tables[int(self.structure[i])]
            if len(floats) > 2:
                entry = (result, floats, -1, table)
            else:  # a single input fills both places; without inputs the result does
                entry = (result, *((*floats, *floats, result, result)[:2]), table)  # type: ignore[assignment]
            if varies[result]:
                followers.append(entry)
            else:
                self._follow([entry], carried)
        self._followers = followers
        self._carried = np.array(carried, dtype=np.int64)
        # Operators that propagate the memory order of images: result and first input.
        self._order_edges = [
            (self.offset + i, wiring.operands[i][0])
            for i, op in enumerate(wiring.ops)
            if wiring.operands[i] and rule.makes_channels_last(op, Precision.FP32, True)
        ]
        self._makes_order = np.zeros((self.num_structures, len(_PRECISIONS)), dtype=np.bool_)
        for structure, i in self._example.items():
            for number, precision in enumerate(_PRECISIONS):
                self._makes_order[structure, number] = rule.makes_channels_last(
                    wiring.ops[i], precision, False
                )

    def _follow(self, followers: list[tuple[int, Any, int, dict[Any, int]]], carried: list[int]) -> None:
        """Propagate types through following operators, in order."""
        for result, first, second, table in followers:
            key: Any
            if second < 0:
                key = tuple([carried[value] for value in first])
            else:
                key = carried[first] << _TYPE_BITS | carried[second]
            found = table.get(key)
            if found is None:
                found = table[key] = self._followed(result - self.offset, carried)
            carried[result] = found

    def _followed(self, i: int, carried: list[int]) -> int:
        op = self.wiring.ops[i]
        floats = [self.type_names[carried[value]] for value in self.wiring.floats[i]]
        mode = rule.mode_of(op, Precision.FP32, floats)
        return self.type(rule.output_of(op, Precision.FP32, mode, None, False))

    def _output(self, carried_16bit: str | None) -> Ints:
        """Return the result types of adjustable operators, by cell and by demand for 16 bits."""
        found = self._outputs.get(carried_16bit)
        if found is None:
            found = np.zeros((len(self._cells.allowed), 2), dtype=np.int64)
            for structure, i in self._example.items():
                op = self.wiring.ops[i]
                for number, precision in enumerate(_PRECISIONS if op.role is Role.ADJUSTABLE else ()):
                    for wanted in (False, True):
                        output = rule.output_of(op, precision, str(precision), carried_16bit, wanted)
                        found[structure * len(_PRECISIONS) + number, int(wanted)] = self.type(output)
            self._outputs[carried_16bit] = found
        return found

    def lower(
        self, assignment: Mapping[str, Precision], carried_16bit: str | None, saving_less: Collection[str]
    ) -> tuple[Ints, Ints, Ints, Bools, Ints]:
        """Return operators' neighbourhoods, values' casts, types and memory order, and precisions."""
        precision = self._numbers_of(assignment)
        cell = self.structure * len(_PRECISIONS) + precision
        wanted = self._wanted(cell)
        carried = self._carried.copy()
        own = self._adjustable
        carried[self.offset + own] = self._output(carried_16bit)[
            cell[own], wanted[self.offset + own].astype(np.intp)
        ]
        types = carried.tolist()
        self._follow(self._followers, types)
        carried = np.array(types, dtype=np.int64)
        channels_last = self._channels_last(precision)
        flags = self._flags(cell, saving_less, carried)
        key = (self.structure << 3 | precision) << _TYPE_BITS | carried[self.offset :]
        if channels_last.any():
            reads = np.zeros(len(key), dtype=np.int64)
            np.bitwise_or.at(reads, self._edge_op, channels_last[self._edge_value].astype(np.int64))
            flags = flags | reads << 4 | channels_last[self.offset :].astype(np.int64) << 5
        if not precision.any():
            flags[self.wiring.replaced] |= 1 << 6
        number, _ = self._surroundings(key << 7 | flags)
        fresh: list[int] = []
        for part, numbered in enumerate(self._neighbourhoods):
            for having, values in self._slots[part * _OPERANDS_PER_KEY : (part + 1) * _OPERANDS_PER_KEY]:
                number <<= _TYPE_BITS
                number[having] |= carried[values]
            number, fresh = numbered(number)
        for i in fresh:
            self._ask(i, _PRECISIONS[int(precision[i])], types, int(flags[i]))
        taken = self._taken.rows[number[self._edge_op], self._edge_slot]
        bits = np.where(taken < 0, 0, 1 << np.maximum(taken, 0))
        mask = np.zeros(len(carried), dtype=np.int64)
        if len(bits):
            mask[self._read] = np.bitwise_or.reduceat(bits, self._edge_start)
        casts, fresh = self._cast_sets((mask << _TYPE_BITS | carried) << 1 | channels_last)
        for value in fresh:
            self._ask_casts(int(mask[value]), types[value], bool(channels_last[value]))
        return number, casts, carried, channels_last, precision

    def _numbers_of(self, assignment: Mapping[str, Precision]) -> Ints:
        """Return every operator's precision as a number; FP32 for operators not in the assignment."""
        precision = np.zeros(len(self.wiring.ops), dtype=np.int64)
        try:
            at = [self._named[name] for name in assignment]
            precision[at] = [_NUMBER[p] for p in assignment.values()]
            allowed = self._cells.allowed[self.structure[at] * len(_PRECISIONS) + precision[at]].all()
        except KeyError:
            allowed = np.bool_(False)
        if not allowed:
            for name, chosen in assignment.items():
                self.wiring.check(name, chosen)
            return self._numbers_of({name: Precision.parse(str(p)) for name, p in assignment.items()})
        return precision

    def _wanted(self, cell: Ints) -> Bools:
        """Return for every value whether all its readers would cast it to at most 16 bits."""
        edges = self._adjustable_edges
        fits = self._cells.takes_16bit[cell[self._edge_op[edges]], self._edge_slot[edges]]
        start = self._may_want.copy()
        start[self._edge_value[edges[~fits]]] = False
        wanted = start.tolist()
        for result, value in self._want_edges:
            if not wanted[result]:
                wanted[value] = False
        return np.array(wanted, dtype=np.bool_)

    def _channels_last(self, precision: Ints) -> Bools:
        channels_last = np.zeros(self.wiring.num_values, dtype=np.bool_)
        channels_last[self.offset :] = self._makes_order[self.structure, precision]
        if channels_last.any():
            found = channels_last.tolist()
            for result, first in self._order_edges:
                if found[first]:
                    found[result] = True
            channels_last = np.array(found, dtype=np.bool_)
        return channels_last

    def _flags(self, cell: Ints, saving_less: Collection[str], carried: Ints) -> Ints:
        """Return flags per operator: computes its follower, is computed, saves less, result is saved."""
        flags = np.zeros(len(cell), dtype=np.int64)
        less = np.zeros(len(cell), dtype=np.bool_)
        for name in saving_less:
            self.wiring.check_saving(name)
            less[self.wiring.position[name]] = True
        products, followers = self._epilogues.T
        computes = self._cells.computes[cell[products]] & ~less[followers]
        flags[products] |= computes
        flags[followers] |= computes.astype(np.int64) << 1
        flags |= less.astype(np.int64) << 2
        if saving_less:
            types = [self.type_names[number] for number in carried.tolist()]

            def taken(i: int, j: int) -> str | None:
                number = int(self._cells.taken[cell[i], j])
                return None if number < 0 else self.type_names[number]

            for i in np.flatnonzero(less).tolist():
                flags[i] |= int(self.wiring.is_saved(self.offset + i, taken, types.__getitem__)) << 3
        return flags

    def _ask(self, i: int, precision: Precision, carried: list[int], flags: int) -> None:
        """Apply the rules to the neighbourhood of operator `i`."""
        op, follower = self.wiring.ops[i], self.wiring.epilogue[i]
        mode = rule.mode_of(op, precision, [self.type_names[carried[v]] for v in self.wiring.floats[i]])
        values = self.wiring.operands[i]
        taken = [rule.taken_type(op, j, self.wiring.traced[v], precision, mode) for j, v in enumerate(values)]
        operands = tuple(
            self.type_names[carried[v]] if t is None else t for v, t in zip(values, taken, strict=True)
        )
        computed = self.wiring.ops[follower].kind if follower is not None and flags & 1 else None
        form = rule.run_form_of(op, computed, bool(flags & 2), bool(flags & 4), lambda: bool(flags & 8))
        output = self.type_names[carried[self.offset + i]]
        self.runs.append(Run("", mode, operands, output, form, bool(flags & 16), as_traced=bool(flags & 64)))
        self._taken.add([-1 if t is None else self.type(t) for t in taken])

    def _ask_casts(self, mask: int, carried: int, channels_last: bool) -> None:
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


_TABLES: IdentityCache[Tables] = IdentityCache()


def tables(graph: OpGraph) -> Tables:
    """Return the tables of a graph, cached."""
    return _TABLES.of(graph, lambda: Tables(graph))


class Tabulated:
    """One assignment lowered by tables, equal to the graph from `Lowering`.

    `neighbourhood[i]` indexes `Tables.runs` for operator `i`, `cast_set[value]` indexes `Tables.cast_sets`,
    `precision[i]` is a precision's number; `after_other[i]` and `before_other[i]` are as in `Run`.

    >>> Tabulated(graph, assignment).lowered().nodes == lower(graph, assignment).nodes
    """

    def __init__(
        self,
        graph: OpGraph,
        assignment: Mapping[str, Precision],
        carried_16bit: str | None = "bf16",
        saving_less: Collection[str] = (),
    ) -> None:
        self.graph = graph
        self.tables = tables(graph)
        found = self.tables.lower(assignment, carried_16bit, saving_less)
        self.neighbourhood, self.cast_set, self._carried, self._channels_last, self.precision = found
        before, after = self.tables.switches.T
        switched = self.precision[before] != self.precision[after]
        self.after_other, self.before_other = np.zeros((2, len(graph.ops)), dtype=np.bool_)
        self.after_other[after], self.before_other[before] = switched, switched

    def run(self, i: int) -> Run:
        """Return operator `i` as a `Run` node."""
        op: Op = self.graph.ops[i]
        found = self.tables.runs[int(self.neighbourhood[i])]
        return Run(
            op.name, found.mode, found.operands, found.output, found.form, found.channels_last,
            bool(self.after_other[i]), bool(self.before_other[i]), found.as_traced,
        )  # fmt: skip

    def casts(self, value: int) -> Iterator[Cast]:
        """Yield the casts of a value, by its number."""
        entry = self.tables.wiring.entries[value]
        for kind in self.tables.cast_sets[int(self.cast_set[value])]:
            source, target, channels_last = self.tables.cast_kinds[kind]
            yield Cast(
                entry.name, source, target, entry.num_elements, entry.kind == "parameter", channels_last
            )

    def casts_made(self) -> tuple[Ints, Ints]:
        """Return every cast: the numbers of its value and of its kind (`Tables.cast_kinds`)."""
        width = max((len(kinds) for kinds in self.tables.cast_sets), default=0)
        kinds = np.full((len(self.tables.cast_sets), width), -1)
        for row, cast_set in enumerate(self.tables.cast_sets):
            kinds[row, : len(cast_set)] = cast_set
        found = kinds[self.cast_set]
        values, places = np.nonzero(found >= 0)
        return values, found[values, places]

    def lowered(self) -> LoweredGraph:
        """Return the lowered graph."""
        wiring = self.tables.wiring
        nodes: list[Cast | Run] = []
        for i in range(len(wiring.ops)):
            for value in wiring.anchored[i]:
                nodes += self.casts(value)
            nodes.append(self.run(i))
            nodes += self.casts(wiring.offset + i)
        return LoweredGraph(self.graph, tuple(nodes))
