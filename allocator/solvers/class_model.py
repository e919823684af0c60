"""One class's step as sums over choices of precision: the lowered graph while nothing is chosen yet.

    seconds = sum over ways of running a node of (its price that way) x (the bit that it runs that way)

Exact: at every whole choice the sums are what `qsync.replayer` makes of that assignment (ours). What runs
how, and which casts there are, is asked of lowering's functions, case by case; nothing of the rule is said
here. The bits that follow from the choices (what a value is carried in, who wants 16 bits, the order of
images) are conjunctions of them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial

from qsync.allocator.problem import ClassProblem
from qsync.allocator.solvers.milp_expressions import ONE, ZERO, Program, Sum, negated, total
from qsync.errors import MismatchError
from qsync.lowering import rules as rule
from qsync.lowering.lowered_graph import Cast, Run
from qsync.lowering.wiring import wiring
from qsync.records.graph import Op, OpGraph, Role
from qsync.records.precision import Precision
from qsync.records.profiles import Cost
from qsync.replayer.costs import cast_cost, run_cost

Bits = dict[str, Sum]  # by type: the bit that it is this one; they add up to 1


@dataclass(frozen=True, slots=True)
class Way:
    """One way in which an operator may run, as lowering says, and the bit that it does.

    `taken` are the types in which it takes its inputs, None for what is no float.
    """

    mode: str
    output: str
    form: str
    taken: tuple[str | None, ...]
    bit: Sum


class LinearClass:
    """The choices of one class, and by operator the seconds that it and its casts take.

    `chosen[op][p]` is the bit that `op` runs in `p`; `forward_s[i]` and `backward_s[i]` are the seconds of
    operator i with its casts, as `ClassCosts` has them. `weight` scales the variances that choices cost.
    """

    def __init__(self, graph: OpGraph, part: ClassProblem, weight: float, most: float) -> None:
        self.program = Program()
        self._graph, self._part = graph, part
        self._wiring = wiring(graph)
        self._narrow = part.device_class.carried_16bit
        self._saves_less = [op.name in part.saving_less for op in graph.ops]
        self.chosen: dict[str, dict[Precision, Sum]] = {}
        for op, options in part.choices.items():
            # What alone adds more than a plan that is known cannot be part of a better one.
            able = [p for p in options if weight * part.variance[op][p] <= most] or [options[-1]]
            bits = self.program.choice([weight * part.variance[op][p] for p in able])
            self.chosen[op] = dict(zip(able, bits, strict=True))
        for op, partners in part.partners.items():
            self.chosen |= dict.fromkeys(partners, self.chosen[op])
        self.settled_cost = sum(
            weight * part.variance[op][next(iter(bits))] for op, bits in self.chosen.items() if len(bits) == 1
        )
        self.forward_s = [Sum() for _ in graph.ops]
        self.backward_s = [Sum() for _ in graph.ops]
        self._wanted = self._wants()
        self._narrowed: dict[tuple[int, Precision], Sum] = {}
        self._modes: list[Bits] = []
        self._carried: list[Bits] = [{traced: ONE} for traced in self._wiring.traced[: self._wiring.offset]]
        self._turned: list[Sum] = [ZERO] * self._wiring.offset
        for i in range(len(graph.ops)):
            self._lower(i)
        self.ways = [list(self._ways(i)) for i in range(len(graph.ops))]
        for i in range(len(graph.ops)):
            self._price_run(i)
        for value in range(self._wiring.num_values):
            self._price_casts(value)

    def assignment(self, point: Sequence[float]) -> dict[str, Precision]:
        """The precisions that a solution chooses."""
        return {
            op: max(bits, key=lambda p: bits[p].constant + sum(point[c] for c in bits[p].terms))
            for op, bits in self.chosen.items()
        }

    def excluding(self, assignment: Mapping[str, Precision]) -> tuple[Sum, float, float]:
        """The row that every assignment keeps but this one."""
        bits = [self.chosen[op][p] for op, p in assignment.items() if p in self.chosen[op]]
        open_ = [bit for bit in bits if not bit.settled]
        return total(open_), -float("inf"), len(open_) - 1.0

    def _wants(self) -> dict[int, Sum]:
        """Of the values whose maker asks, the bit that all who read it would narrow it anyway."""
        wiring, ops = self._wiring, self._graph.ops
        asked = [False] * wiring.num_values
        for i, op in enumerate(ops):
            value = wiring.offset + i
            if op.role is Role.ADJUSTABLE and any(self._depends(op, p) for p in self.chosen[op.name]):
                asked[value] = True
            if asked[value]:
                for reader in wiring.consumers[value]:
                    asked[wiring.offset + reader] |= wiring.passes_16bit_on[reader]
        wanted: dict[int, Sum] = {}
        for value in reversed(range(wiring.num_values)):
            if asked[value]:
                readers = wiring.consumers[value]
                found = [self._narrows(i, value, wanted) for i in readers]
                wanted[value] = self.program.all_of(found) if readers else ZERO
        return wanted

    def _narrows(self, i: int, value: int, wanted: Mapping[int, Sum]) -> Sum:
        op, wiring = self._graph.ops[i], self._wiring
        if op.role is not Role.ADJUSTABLE:
            return wanted[wiring.offset + i] if wiring.passes_16bit_on[i] else ZERO
        slots = [j for j, operand in enumerate(wiring.operands[i]) if operand == value]
        traced = wiring.traced[value]
        return total(
            bit
            for p, bit in self.chosen[op.name].items()
            if all(rule.takes_16bit(rule.taken_type(op, j, traced, p, str(p))) for j in slots)
        )

    def _depends(self, op: Op, precision: Precision) -> bool:
        """Whether what an operator hands on depends on who wants it narrow."""
        return self._output(op, precision, False) != self._output(op, precision, True)

    def _output(self, op: Op, precision: Precision, wanted: bool) -> str:
        return rule.output_of(op, precision, str(precision), self._narrow, wanted)

    def _lower(self, i: int) -> None:
        """How operator i runs, and what it hands on."""
        op, operands = self._graph.ops[i], self._wiring.operands[i]
        first = self._turned[operands[0]] if operands else ZERO
        if op.role is Role.ADJUSTABLE:
            self._modes.append({str(p): bit for p, bit in self.chosen[op.name].items()})
            carried: Bits = {}
            for precision in self.chosen[op.name]:
                for output, bit in self._handed_on(i, precision):
                    carried.setdefault(output, Sum()).add(bit)
            alone = [bit for p, bit in self.chosen[op.name].items() if rule.makes_channels_last(op, p, False)]
            passing = [
                bit for p, bit in self.chosen[op.name].items() if rule.makes_channels_last(op, p, True)
            ]
            through = total(passing)
            through.add(total(alone), -1.0)
            turned = total(alone)
            turned.add(self.program.all_of([through, first]))
        else:
            modes = self._widest(op, [self._carried[value] for value in self._wiring.floats[i]])
            self._modes.append(modes)
            carried = {}
            for mode, bit in modes.items():
                output = rule.output_of(op, Precision.FP32, mode, self._narrow, False)
                carried.setdefault(output, Sum()).add(bit)
            turned = first if rule.makes_channels_last(op, Precision.FP32, True) else ZERO
        self._carried.append(carried)
        self._turned.append(turned)

    def _handed_on(self, i: int, precision: Precision) -> Iterator[tuple[str, Sum]]:
        """What an operator at one precision hands on, and the bits that it runs so and does."""
        op = self._graph.ops[i]
        bit, plainly = self.chosen[op.name][precision], self._output(op, precision, False)
        if not self._depends(op, precision):
            yield plainly, bit
            return
        if (i, precision) not in self._narrowed:
            wanted = self._wanted[self._wiring.offset + i]
            self._narrowed[i, precision] = self.program.all_of([bit, wanted])
        narrowed = self._narrowed[i, precision]
        wide = total([bit])
        wide.add(narrowed, -1.0)
        yield plainly, wide
        yield self._output(op, precision, True), narrowed

    def _widest(self, op: Op, inputs: Sequence[Bits]) -> Bits:
        """The bits of the mode in which an operator runs whose inputs are carried so."""

        def mode(types: Iterable[str]) -> str:
            return rule.mode_of(op, Precision.FP32, types)

        settled = [next(iter(bits)) for bits in inputs if len(bits) == 1]
        open_ = [bits for bits in inputs if len(bits) > 1]
        types = list(dict.fromkeys(name for bits in open_ for name in bits))
        if not open_:
            return {mode(settled): ONE}
        if len(types) != 2:
            raise MismatchError(
                f"{op.name} reads values that may be carried in {', '.join(types)}: use the greedy solver"
            )
        one, other = types
        alike, others, mixed = mode([*settled, one]), mode([*settled, other]), mode([*settled, one, other])
        if alike == others:
            return {alike: ONE}
        if mixed == alike:  # one of the wider is enough
            one, other, alike, others = other, one, others, alike
        every = self.program.all_of([bits.get(one, ZERO) for bits in open_])
        return {alike: every, others: negated(every)}

    def _price_run(self, i: int) -> None:
        op, wiring = self._graph.ops[i], self._wiring
        turned = self.program.any_of(
            {id(self._turned[value]): self._turned[value] for value in wiring.operands[i]}.values()
        )
        for way in self.ways[i]:
            for order, bit_of in self._split(way.bit, turned):
                run = Run(op.name, way.mode, (), way.output, way.form, order)
                self._add(i, bit_of, partial(run_cost, self._part.profile, run, op))

    def _ways(self, i: int) -> Iterator[Way]:
        op, ops = self._graph.ops[i], self._graph.ops
        product, follower = self._wiring.product[i], self._wiring.epilogue[i]
        if op.role is Role.ADJUSTABLE:
            for precision in self.chosen[op.name]:
                computed = None
                if follower is not None and rule.computes(op, precision, self._saves_less[follower]):
                    computed = ops[follower].kind
                form = rule.form_of(op, computed, False, False, lambda: False)
                for output, bit in self._handed_on(i, precision):
                    yield Way(str(precision), output, form, self._taken(i, precision, str(precision)), bit)
            return
        computed_there = ZERO
        if product is not None:
            computed_there = total(
                bit
                for p, bit in self.chosen[ops[product].name].items()
                if rule.computes(ops[product], p, self._saves_less[i])
            )
        is_kept = self._is_kept(self._wiring.offset + i) if self._saves_less[i] else ZERO
        for mode, bit in self._modes[i].items():
            output = rule.output_of(op, Precision.FP32, mode, self._narrow, False)
            for is_computed, bit_of in self._split(bit, computed_there):
                forms = [
                    rule.form_of(op, None, is_computed, self._saves_less[i], lambda kept=kept: kept)  # type: ignore[misc]
                    for kept in (False, True)
                ]
                split = self._split(bit_of, is_kept) if forms[0] != forms[1] else [(False, bit_of)]
                for kept, bit_so in split:
                    yield Way(mode, output, forms[kept], self._taken(i, Precision.FP32, mode), bit_so)

    def _is_kept(self, value: int) -> Sum:
        """The bit that somebody keeps a value, or a view of it, for backward as it is carried."""
        wiring, found = self._wiring, list[Sum]()
        for i, j, at in wiring.storage_readers(value):
            op = self._graph.ops[i]
            for p, bit in self.chosen[op.name].items() if op.role is Role.ADJUSTABLE else ():
                taken = rule.taken_type(op, j, wiring.traced[at], p, str(p))
                found += [
                    self.program.all_of([bit, carried_so])
                    for carried, carried_so in self._carried[at].items()
                    if rule.saves_operand(op, j, taken, carried)
                ]
        return self.program.any_of(found)

    def _taken(self, i: int, precision: Precision, mode: str) -> tuple[str | None, ...]:
        op, traced = self._graph.ops[i], self._wiring.traced
        return tuple(
            rule.taken_type(op, j, traced[value], precision, mode)
            for j, value in enumerate(self._wiring.operands[i])
        )

    def _split(self, bit: Sum, by: Sum) -> list[tuple[bool, Sum]]:
        """A bit in two: where another is 0, and where it is 1."""
        if by.settled:
            return [(by.constant == 1.0, bit)]
        both = self.program.all_of([bit, by])
        rest = total([bit])
        rest.add(both, -1.0)
        return [(False, rest), (True, both)]

    def _add(self, i: int, bit: Sum, cost: Callable[[], Cost]) -> None:
        """Charge operator i with a price wherever a bit is 1; what has no price may not be."""
        if bit.settled and bit.constant == 0.0:
            return
        try:
            found = cost()
        except MismatchError:
            if bit.settled:
                raise
            self.program.row(bit, most=0.0)
            return
        self.forward_s[i].add(bit, found.forward_s)
        self.backward_s[i].add(bit, found.backward_s)

    def _price_casts(self, value: int) -> None:
        owner = self._wiring.owner(value)
        takers = self.takers(value)
        if owner is None or not takers:
            return
        entry = (
            self._graph.inputs[value]
            if value < self._wiring.offset
            else self._graph.ops[value - self._wiring.offset]
        )
        parameter = value < self._wiring.offset and self._graph.inputs[value].kind == "parameter"
        carried = self._carried[value]
        for target, bits in takers.items():
            sources = [source for source in carried if rule.needed_casts([target], source)]
            if not sources:
                continue
            taken = self.program.at_least_any(bits)
            needed = total([taken])
            needed.add(carried.get(target, ZERO), -1.0)
            made = Sum()
            ways = [(s, turned, bit) for s in sources for turned, bit in self._orders(value, carried[s])]
            for source, turned, bit in ways:
                if len(ways) == 1 and len(carried) == 1:
                    there = taken
                else:
                    there = self.program.bit()
                    gap = total([bit])
                    gap.add(there, -1.0)
                    self.program.row(gap, least=0.0)
                    made.add(there)
                cast = Cast(entry.name, source, target, entry.num_elements, parameter, turned)
                self._add(owner, there, partial(cast_cost, self._part.profile, cast))
            if not made.settled:
                made.add(needed, -1.0)
                self.program.row(made, least=0.0)

    def _orders(self, value: int, bit: Sum) -> list[tuple[bool, Sum]]:
        return self._split(bit, self._turned[value])

    def takers(self, value: int) -> dict[str, list[Sum]]:
        """By type, the bits that some operator takes this value in it; values are numbered as in `Wiring`."""
        found: dict[str, list[Sum]] = {}
        traced = self._wiring.traced[value]
        for i in self._wiring.consumers[value]:
            op = self._graph.ops[i]
            for j, operand in enumerate(self._wiring.operands[i]):
                if operand != value:
                    continue
                by_type: dict[str, Sum] = {}
                for mode, bit in self._modes[i].items():
                    precision = Precision(mode) if op.role is Role.ADJUSTABLE else Precision.FP32
                    taken = rule.taken_type(op, j, traced, precision, mode)
                    if taken is not None:
                        by_type.setdefault(taken, Sum()).add(bit)
                for taken, bit in by_type.items():
                    found.setdefault(taken, []).append(bit)
        return found
