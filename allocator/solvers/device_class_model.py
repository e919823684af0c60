"""The linear model of one class: its step's seconds as sums over binary variables.

    seconds = sum over alternatives of running a node of (its price) x (its binary variable)

The sums are exact: at every integer solution they equal replay's result for that assignment.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

from qsync.allocator.block_levers import RECOMPUTED
from qsync.allocator.problem import ClassProblem
from qsync.allocator.solvers.linear_lowering import LinearLowering
from qsync.allocator.solvers.milp_expressions import ZERO, Sum, difference
from qsync.errors import MismatchError
from qsync.lowering import cast_rules as rule
from qsync.lowering.lowered_graph import Cast, Run
from qsync.operators.precision import Precision, keeps_weight_casts
from qsync.operators.registry import REPLACED
from qsync.records.graph import Input, OpGraph
from qsync.records.profiles import Cost, Profile
from qsync.replayer.costs.class_costs import cast_cost, run_cost
from qsync.replayer.levers.apply import recomputing


class ClassModel(LinearLowering):
    """The choices of one class (`LinearLowering`), and the seconds of every operator with its casts.

    `forward_s[i]` and `backward_s[i]` are the seconds of operator i with its casts, as in `ClassCosts`.
    `captured` is the graph of which `part.graph` is a pass.
    """

    def __init__(self, captured: OpGraph, part: ClassProblem, weight: float, most: float) -> None:
        super().__init__(part, weight, most)
        recomputed = [block.path for block in part.blocks if RECOMPUTED in block.options]
        self._profile_again = part.profile
        if recomputed:
            self._profile_again = recomputing(captured, part.profile, recomputed, part.device_class.device)
        self._has_orders = len(self.orders) > 1 or any(order.constant for order in self._channels_last)
        self.forward_s = [Sum() for _ in part.graph.ops]
        self.backward_s = [Sum() for _ in part.graph.ops]
        for i in range(len(part.graph.ops)):
            self._price_run(i)
            self._price_switch(i)
        for value in range(self.wiring.num_values):
            self._price_casts(value)

    def _price_run(self, i: int) -> None:
        op, operands = self._graph.ops[i], self.wiring.operands[i]
        ordered = {id(order): order for order in (self._channels_last[value] for value in operands)}
        channels_last = self.program.any_of(ordered.values()) if self._has_orders else ZERO
        as_traced = self._as_traced if op.kind in REPLACED else ZERO
        runs: list[tuple[Sum, Run]] = []
        for one in self.alternatives[i]:
            for order, binary_there in self._split(one.binary, channels_last):
                for so, binary_so in self._split(binary_there, as_traced):
                    run = Run(op.name, one.mode, (), one.output, one.form, order, as_traced=so)
                    self._add(i, binary_so, partial(run_cost, self._part.profile, run, op))
                    runs.append((binary_so, run))
        again = self.again[i]
        if len(runs) > len(again):
            again = self.program.parted([binary for binary, _ in runs], self.is_again[i])
        for (_, run), twice in zip(runs, again, strict=True):
            self._add_again(i, twice, lambda profile, run=run: run_cost(profile, run, op))  # type: ignore[misc]

    def _price_switch(self, i: int) -> None:
        """Add the switch cost between product i and the product after it if their precisions differ."""
        after, ops = self.wiring.after[i], self._graph.ops
        if after is None:
            return
        first, second = self.chosen[ops[i].name], self.chosen[ops[after].name]
        for precision, price in self._part.profile.switch_s.items():
            one, other = (chosen.get(Precision(precision), ZERO) for chosen in (first, second))
            alike = self.program.all_of([one, other])
            self.backward_s[i].add(one, price.backward_s)
            self.backward_s[i].add(alike, -price.backward_s)
            self.forward_s[after].add(other, price.forward_s)
            self.forward_s[after].add(alike, -price.forward_s)

    def _add(self, i: int, binary: Sum, cost: Callable[[], Cost]) -> None:
        """Add a price to operator i if a variable is 1; force the variable to 0 without a price."""
        if binary.settled and binary.constant == 0.0:
            return
        try:
            found = cost()
        except MismatchError:
            if binary.settled:
                raise
            self.program.row(binary, most=0.0)
            return
        self.forward_s[i].add(binary, found.forward_s)
        self.backward_s[i].add(binary, found.backward_s)

    def _add_again(self, i: int, binary: Sum, price: Callable[[Profile], Cost]) -> None:
        """Add to operator i the seconds of recomputing what has this price, if a variable is 1."""
        if binary.settled and binary.constant == 0.0:
            return
        try:
            once, twice = price(self._part.profile), price(self._profile_again)
        except MismatchError:  # `_add` excludes it
            return
        self.forward_s[i].add(binary, twice.forward_s - once.forward_s)
        self.backward_s[i].add(binary, twice.backward_s - once.backward_s)

    def _is_cast_again(self, value: int) -> Sum:
        """Return a variable: 1 if an operator that computes or reads a value is recomputed."""
        readers = self.wiring.consumers[value]
        makers = [value - self.wiring.offset] if value >= self.wiring.offset else []
        numbers = dict.fromkeys(self.block[i] for i in (*makers, *readers))
        return self.program.at_least_any([self.levers[k][RECOMPUTED] for k in numbers if k is not None])

    def _price_casts(self, value: int) -> None:
        owner = self.wiring.owner(value)
        takers = self.takers(value)
        if owner is None or not takers:
            return
        entry = self.wiring.entries[value]
        parameter = isinstance(entry, Input) and entry.kind == "parameter"
        carried = self.carried[value]
        is_copy = parameter and keeps_weight_casts(self._part.device_class.device)
        again = ZERO if is_copy else self._is_cast_again(value)
        for target, binaries in takers.items():
            sources = [source for source in carried if rule.needed_casts([target], source)]
            if not sources:
                continue
            taken = self.program.at_least_any(binaries)
            needed = difference(taken, carried.get(target, ZERO))
            made = Sum()
            alternatives = [
                (s, channels_last, binary)
                for s in sources
                for channels_last, binary in self._split(carried[s], self._channels_last[value])
            ]
            for source, channels_last, binary in alternatives:
                if len(alternatives) == 1 and len(carried) == 1:
                    there = taken
                else:
                    there = self.program.binary()
                    self.program.at_most(there, binary)
                    made.add(there)
                cast = Cast(entry.name, source, target, entry.num_elements, parameter, channels_last)
                self._add(owner, there, partial(cast_cost, self._part.profile, cast))
                if not again.settled:
                    both = self.program.at_least_all([there, again])
                    self._add_again(owner, both, lambda profile, cast=cast: cast_cost(profile, cast))  # type: ignore[misc]
            if not made.settled:
                self.program.at_most(needed, made)
