"""The lowering of one class as linear sums: how each operator runs, over binary variables.

The rows of the graph's table (`qsync.lowering.table`) say how a node runs and which casts exist; no rule is
repeated here. Binary variables are the precisions of operators and the levers of blocks. Further ones are
conjunctions of choices: a value is carried in some type, its readers want 16 bits, or it is in channels_last
order.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from qsync.allocator.block_levers import LESS, RECOMPUTED, Treatment
from qsync.allocator.problem import ClassProblem
from qsync.allocator.solvers.milp_expressions import (
    ONE,
    ZERO,
    FloatArray,
    IntegerProgram,
    Sum,
    difference,
    negated,
    total,
)
from qsync.lowering.lowered_graph import Run
from qsync.lowering.table import COMPUTED, COMPUTES, NUMBER, SAVED, SAVES_LESS, table
from qsync.operators.declaration import Role
from qsync.operators.precision import Precision
from qsync.operators.registry import FORMS

_Row = tuple[Run, list[str | None]]  # of any operator of a structure, and the types that its inputs take
Binaries = dict[str, Sum]  # type -> binary variable: 1 if a value or mode has this type; the sum is 1


@dataclass(frozen=True, slots=True)
class Alternative:
    """One way in which lowering may run an operator, with its binary variable.

    `taken` are the types to which its inputs are cast, None for inputs that are not floats.
    """

    mode: str
    output: str
    form: str
    taken: tuple[str | None, ...]
    binary: Sum


class LinearLowering:
    """The choices of one class, and the alternatives of every operator.

    `chosen[op][p]` is 1 if `op` runs in `p`. `weight` scales the variances of the choices to costs of the
    program. A choice whose cost exceeds `most` is left out. `levers[k][lever]` is 1 if block k has this
    lever. `carried[value]` maps the types that may carry a value (`Wiring` number) to their variables.
    `again[i]` has the variable of each alternative of operator i if it is recomputed, too.
    """

    def __init__(self, part: ClassProblem, weight: float, most: float) -> None:
        self.program = IntegerProgram()
        graph = part.graph
        self._graph, self._part = graph, part
        self.table = table(graph)
        self.wiring = self.table.wiring
        self._float16 = part.device_class.carried_16bit
        self._choose_levers()
        self.chosen: dict[str, dict[Precision, Sum]] = {}
        for op, options in part.choices.items():
            # A choice that adds more variance than a whole known plan cannot be in a better plan.
            able = [p for p in options if weight * part.variance[op][p] <= most] or [options[-1]]
            binaries = self.program.choice([weight * part.variance[op][p] for p in able])
            self.chosen[op] = dict(zip(able, binaries, strict=True))
        for op, partners in part.partners.items():
            self.chosen |= dict.fromkeys(partners, self.chosen[op])
        self.settled_cost = sum(
            weight * part.variance[op][next(iter(binaries))]
            for op, binaries in self.chosen.items()
            if len(binaries) == 1
        )
        self._wanted = self._wanted_in_16_bit()
        self._in_16_bit: dict[tuple[int, Precision], Sum] = {}
        self._rows: dict[Any, _Row] = {}
        self._result: dict[tuple[int, str], str] = {}  # type of an operator's result in a mode
        self._modes: list[Binaries] = []
        self.carried: list[Binaries] = [{traced: ONE} for traced in self.wiring.traced[: self.wiring.offset]]
        self._channels_last: list[Sum] = [ZERO] * self.wiring.offset
        for i in range(len(graph.ops)):
            self._lower(i)
        chosen = [self.chosen[op.name] for op in graph.adjustable]
        self._as_traced = self.program.all_of(found.get(Precision.FP32, ZERO) for found in chosen)
        self.alternatives = [list(self._alternatives(i)) for i in range(len(graph.ops))]
        # By operator: each alternative's binary variable if the operator is recomputed, too.
        self.again = [
            self.program.parted([one.binary for one in found], self.is_again[i])
            for i, found in enumerate(self.alternatives)
        ]

    def assignment(self, point: FloatArray) -> dict[str, Precision]:
        """Return the assignment that a solution of the program encodes."""
        return {
            op: max(binaries, key=lambda p: binaries[p].at(point)) for op, binaries in self.chosen.items()
        }

    @property
    def orders(self) -> tuple[bool, ...]:
        """Return whether images may be channels-last: (False,), or both."""
        return (False, True) if any(not order.settled for order in self._channels_last) else (False,)

    def treatment(self, point: FloatArray) -> Treatment:
        """Return the levers of the blocks that a solution of the program encodes."""
        return tuple(max(of, key=lambda lever: of[lever].at(point)) for of in self.levers)

    def _choose_levers(self) -> None:
        """Add a variable for each lever of each block, and list the levers of every operator."""
        part, ops = self._part, self._graph.ops
        self.levers: list[dict[str, Sum]] = []
        self.block: list[int | None] = [None] * len(ops)  # of operators that may be recomputed
        self.is_again = [ZERO] * len(ops)
        less = {name: ONE for name in part.saving_less}
        for number, block in enumerate(part.blocks):
            binaries = self.program.choice([0.0] * len(block.options))
            self.levers.append(dict(zip(block.options, binaries, strict=True)))
            again = self.levers[-1].get(RECOMPUTED, ZERO)
            for i in block.ops if RECOMPUTED in block.options else ():
                self.block[i], self.is_again[i] = number, again
                if ops[i].name in less:
                    less[ops[i].name] = negated(again)
            less |= dict.fromkeys(block.less, self.levers[-1].get(LESS, ZERO))
        self._less = [less.get(op.name, ZERO) for op in ops]

    def _wanted_in_16_bit(self) -> dict[int, Sum]:
        """Return by value a variable: 1 if all readers want 16 bits; only for values that depend on it."""
        wiring, ops = self.wiring, self._graph.ops
        asked = [False] * wiring.num_values
        for i, op in enumerate(ops):
            value = wiring.offset + i
            if op.role is Role.ADJUSTABLE and any(self._depends(i, p) for p in self.chosen[op.name]):
                asked[value] = True
            if asked[value]:
                for reader in wiring.consumers[value]:
                    asked[wiring.offset + reader] |= wiring.passes_16bit_on[reader]
        wanted: dict[int, Sum] = {}
        for value in reversed(range(wiring.num_values)):
            if asked[value]:
                readers = self.table.wanting.get(value)
                found = [self._wants_16_bit(i, slots, wanted) for i, slots, _ in readers or ()]
                wanted[value] = self.program.all_of(found) if readers else ZERO
        return wanted

    def _wants_16_bit(self, i: int, slots: int, wanted: Mapping[int, Sum]) -> Sum:
        if not slots:
            return wanted[self.wiring.offset + i]
        chosen = self.chosen[self._graph.ops[i].name].items()
        return total(binary for p, binary in chosen if not slots & self.table.wide_slots[self._cell(i, p)])

    def _cell(self, i: int, precision: Precision) -> int:
        return self.table.first_cell[i] + NUMBER[precision]

    def _outputs(self, i: int, precision: Precision) -> tuple[str, str]:
        """Return the types of an adjustable operator's result: else, and if all readers want 16 bits."""
        plain, wanted = self.table.outputs(self._float16)[self._cell(i, precision)]
        return self.table.type_names[plain], self.table.type_names[wanted]

    def _depends(self, i: int, precision: Precision) -> bool:
        """Return whether an operator's output type depends on readers that want 16 bits."""
        plain, wanted = self._outputs(i, precision)
        return plain != wanted

    def _lower(self, i: int) -> None:
        """Add variables for the modes, output types and channels_last order of operator i."""
        op, operands = self._graph.ops[i], self.wiring.operands[i]
        first = self._channels_last[operands[0]] if self.table.passes_order[i] else ZERO
        carried: Binaries = {}
        channels_last = first
        if op.role is Role.ADJUSTABLE:
            modes = {str(p): binary for p, binary in self.chosen[op.name].items()}
            for precision in self.chosen[op.name]:
                for output, binary in self._output_types(i, precision):
                    carried.setdefault(output, Sum()).add(binary)
            makes = self.table.makes_order
            alone, passing = (
                total(b for p, b in self.chosen[op.name].items() if makes[self._cell(i, p)] or so)
                for so in (False, self.table.passes_order[i])
            )
            through = self.program.all_of([difference(passing, alone), first])
            channels_last = total([alone, through])
        else:
            modes = self._widest(i, [self.carried[value] for value in self.wiring.floats[i]])
            for mode, binary in modes.items():
                carried.setdefault(self._result[i, mode], Sum()).add(binary)
        self._modes.append(modes)
        self.carried.append(carried)
        self._channels_last.append(channels_last)

    def _output_types(self, i: int, precision: Precision) -> Iterator[tuple[str, Sum]]:
        """Yield (output type, binary variable) of an operator in one precision."""
        op = self._graph.ops[i]
        binary, (output, in_16bit) = self.chosen[op.name][precision], self._outputs(i, precision)
        if output == in_16bit:
            yield output, binary
            return
        if (i, precision) not in self._in_16_bit:
            wanted = self._wanted[self.wiring.offset + i]
            self._in_16_bit[i, precision] = self.program.all_of([binary, wanted])
        both = self._in_16_bit[i, precision]
        yield output, difference(binary, both)
        yield in_16bit, both

    def _widest(self, i: int, inputs: Sequence[Binaries]) -> Binaries:
        """Return the binary variables of a following operator's modes, the widest type of its inputs."""

        def mode(types: list[str]) -> str:
            run, _ = self._run_of(i, Precision.FP32, types)
            self._result[i, run.mode] = run.output
            return run.mode

        settled = [next(iter(binaries)) for binaries in inputs if len(binaries) == 1]
        open_ = [binaries for binaries in inputs if len(binaries) > 1]
        # A value of undecided type is carried in FP32 or BF16 (`cast_rules.output_of`).
        wide, narrow = (mode([*settled, name]) for name in ("fp32", "bf16")) if open_ else [mode(settled)] * 2
        if wide == narrow:
            return {wide: ONE}
        every = self.program.all_of(binaries.get("bf16", ZERO) for binaries in open_)
        return {narrow: every, wide: negated(every)}

    def _alternatives(self, i: int) -> Iterator[Alternative]:
        op, ops, cells = self._graph.ops[i], self._graph.ops, self.table.may_compute
        product, follower = self.wiring.product[i], self.wiring.epilogue[i]
        if op.role is Role.ADJUSTABLE:
            for precision in self.chosen[op.name]:
                able = cells[self._cell(i, precision)]
                is_less = self._less[follower] if able and follower is not None else ZERO
                for output, binary in self._output_types(i, precision):
                    for saves_less, binary_so in self._split(binary, is_less):
                        flags = COMPUTES * (able and not saves_less)
                        yield self._alternative(i, str(precision), output, flags, binary_so)
            return
        computed_there = ZERO
        if product is not None:
            computed_there = total(
                binary
                for p, binary in self.chosen[ops[product].name].items()
                if cells[self._cell(product, p)]
            )
        is_less = self._less[i]
        is_saved = (
            ZERO if is_less.settled and not is_less.constant else self._is_saved(self.wiring.offset + i)
        )
        for mode, binary in self._modes[i].items():
            for saves_less, binary_there in self._split(binary, is_less):
                by = computed_there
                if saves_less:
                    by = is_saved if len(set(FORMS[op.kind])) > 1 else ZERO
                for so, binary_so in self._split(binary_there, by):
                    flags = (SAVED if saves_less else COMPUTED) * so + SAVES_LESS * saves_less
                    yield self._alternative(i, mode, self._result[i, mode], flags, binary_so)

    def _alternative(self, i: int, mode: str, output: str, flags: int, binary: Sum) -> Alternative:
        """Return the row of the table in which operator `i` runs so."""
        run, taken = self._row(i, mode, output, flags)
        return Alternative(run.mode, run.output, run.form, tuple(taken), binary)

    def _row(self, i: int, mode: str, output: str = "", flags: int = 0) -> _Row:
        is_adjustable = self._graph.ops[i].role is Role.ADJUSTABLE
        floats = [mode] if self.wiring.floats[i] else []
        return self._run_of(i, Precision(mode) if is_adjustable else Precision.FP32, floats, output, flags)

    def _run_of(self, i: int, precision: Precision, floats: list[str], *rest: Any) -> _Row:
        """Return `Table.run_of`, asked once for operators of equal structure."""
        key = self.table.first_cell[i], precision, *floats, *rest
        found = self._rows.get(key)
        if found is None:
            found = self._rows[key] = self.table.run_of(i, precision, floats, *rest)
        return found

    def _is_saved(self, value: int) -> Sum:
        """Return a variable: 1 if some operator saves the value, or a view of it, without a cast."""
        found = list[Sum]()
        for i, j, at in self.wiring.storage_readers(value):
            op = self._graph.ops[i]
            for p, binary in self.chosen[op.name].items() if op.role is Role.ADJUSTABLE else ():
                carried_so = self.carried[at].get(self.table.saved_as(i, j, p) or "")
                if carried_so is not None:
                    found.append(self.program.all_of([binary, carried_so]))
        return self.program.any_of(found)

    def _split(self, binary: Sum, by: Sum) -> list[tuple[bool, Sum]]:
        """Split a binary variable into two by another: conjunctions with its being 0, and 1."""
        if by.settled:
            return [(by.constant == 1.0, binary)]
        both = self.program.all_of([binary, by])
        return [(False, difference(binary, both)), (True, both)]

    def takers(self, value: int, last: int | None = None) -> dict[str, list[Sum]]:
        """Return by type the variables of readers that take this value in that type (`Wiring` number).

        With `last`, leave out the readers after this operator.
        """
        found: dict[str, list[Sum]] = {}
        for i in self.wiring.consumers[value]:
            if last is not None and i > last:
                continue
            slots = [j for j, operand in enumerate(self.wiring.operands[i]) if operand == value]
            of_mode = [(self._row(i, mode)[1], binary) for mode, binary in self._modes[i].items()]
            for j in slots:
                by_type: dict[str, Sum] = {}
                for taken, binary in of_mode:
                    if (type_name := taken[j]) is not None:
                        by_type.setdefault(type_name, Sum()).add(binary)
                for type_name, binary in by_type.items():
                    found.setdefault(type_name, []).append(binary)
        return found
