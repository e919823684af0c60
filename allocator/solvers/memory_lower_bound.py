"""Lower bounds of the memory in use at moments of a step, as sums over choices.

The functions of the memory model give the tensors that each operator saves, and their types, for every
alternative of running it. A storage saved by several operators counts once. So do tensors that live only
around that moment (workspaces, gradients, values on the way), for the alternatives of one of their users at
the least over those of the others. A row of the exact solver that keeps such a sum within the budget
therefore excludes no assignment that fits. With the levers of blocks, at the moment of operator i's backward:

    bytes = sum over a of j <= i of (made_a + saved_a) (x_a - z_a)    z_a is 0 in i's own block
            + sum over blocks b before i of (inputs_b + state) r_b
            + copies of weights, workspace of i, gradients around i
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator

import numpy as np

from qsync.allocator.block_levers import RECOMPUTED
from qsync.allocator.solvers.linear_lowering import Alternative, LinearLowering
from qsync.allocator.solvers.milp_expressions import ONE, ZERO, Sum, difference, total
from qsync.allocator.solvers.moments import LOSS, Moment
from qsync.lowering.cast_rules import mode_of
from qsync.lowering.lowered_graph import Cast, Run
from qsync.operators.declaration import Role
from qsync.operators.precision import LARGEST, Precision, keeps_weight_casts
from qsync.predictor.memory.layout import layout
from qsync.predictor.memory.lifetimes import Lifetimes, storage_bytes
from qsync.predictor.memory.saved_tensors import Saved, made_for_backward, saved_by_op
from qsync.records.graph import OpGraph
from qsync.replayer.levers.recomputation import RANDOM_STATE

# Of a value with more combinations of its users' alternatives, only what is saved counts.
_MOST_COMBINED = 2000
_MOST_EXCEEDING = 64
_STATE_BYTES = 8 * RANDOM_STATE


def saved_bytes(linear: LinearLowering, graph: OpGraph, device: str, moment: Moment = LOSS) -> Sum:
    """Return a lower bound of the bytes in use only for a part of the step, as a linear sum.

    If the graph has recomputed blocks that are not the program's to choose, the sum is 0: no saved tensor is
    certain.

    >>> saved_bytes(linear, graph, "cpu").at(point)
    """
    return Sum() if graph.recomputed else _Saved(linear, graph, device, moment).bytes()


def bytes_around(
    linear: LinearLowering, graph: OpGraph, device: str, in_buckets: bool, moment: Moment
) -> Iterator[tuple[Sum, int]]:
    """Yield (variable, bytes) of the tensors that are alive only around a moment."""
    yield from _Around(linear, graph, device, in_buckets, moment).parts()


class _Saved:
    """The saved tensors alive at one moment, and the variables that are 1 if they are."""

    def __init__(self, linear: LinearLowering, graph: OpGraph, device: str, moment: Moment) -> None:
        self._linear, self._graph, self._device, self._moment = linear, graph, device, moment
        self._known = layout(graph)
        at = moment.op
        self._last = len(graph.ops) if at is None else at
        # The block whose tensors are there again; in its first forward a recomputed block saves none.
        is_first = moment.is_forward and moment.again is None
        self._own = None if at is None or is_first else linear.block[at]
        # By storage (value, type): its bytes; by operator the variable that is 1 if the operator saves it.
        self._size: dict[tuple[str, str], int] = {}
        self._savers: dict[tuple[str, str], dict[int, Sum]] = {}
        self._held: dict[tuple[str, str], list[Sum]] = {}  # and those that are 1 if a block holds it

    def bytes(self) -> Sum:
        """Return the sum of their bytes."""
        found, linear, graph, device = Sum(), self._linear, self._graph, self._device
        for i, op in enumerate(graph.ops[: self._last + 1]):
            for alternative, again in zip(linear.alternatives[i], linear.again[i], strict=True):
                form, mode = alternative.form, alternative.mode
                for num_bytes in (
                    made_for_backward(op, self._known, form, mode, device) if op.requires_grad else ()
                ):
                    left = self._unless(i, linear.block[i], alternative.binary, again)
                    found.add(left, graph.num_calls * num_bytes)
                if op.requires_grad:
                    self._save(i, alternative, again)
            if not linear.is_again[i].settled and linear.block[i] != self._own:
                self._hold(i)
        for key in dict.fromkeys([*self._savers, *self._held]):
            if not (self._moment.is_forward and self._known.users[key[0]][-1] >= self._last):
                by = [*self._savers.get(key, {}).values(), *self._held.get(key, ())]
                found.add(linear.program.at_least_any(by), graph.num_calls * self._size[key])
        for number, value in enumerate(graph.inputs if keeps_weight_casts(device) else ()):
            if value.kind != "parameter":
                continue
            for taken, binaries in linear.takers(
                number, self._last if self._moment.is_forward else None
            ).items():
                if taken != value.dtype:  # cast once per optimizer step, and kept until its end
                    copies = graph.num_calls * storage_bytes(taken, value.shape)
                    found.add(linear.program.at_least_any(binaries), copies)
        for of in linear.levers:
            found.add(of.get(RECOMPUTED, ZERO), graph.num_calls * _STATE_BYTES)
        return found

    def _save(self, i: int, alternative: Alternative, again: Sum) -> None:
        """Record the operands and the result that operator `i` saves in an alternative."""
        op = self._graph.ops[i]
        saved = saved_by_op(op, self._known, alternative.form, alternative.mode, self._device)
        values = [(op.inputs[j], alternative.taken[j]) for j in saved.inputs]
        values += [(op.name, alternative.output)] if saved.output else []
        for key in dict.fromkeys(self._storage(value, taken) for value, taken in values if taken is not None):
            if key is not None:
                left = self._unless(i, self._maker_block(key[0]), alternative.binary, again)
                self._savers.setdefault(key, {}).setdefault(i, Sum()).add(left)

    def _hold(self, i: int) -> None:
        """Record the operands from before a recomputed block, which are alive until it runs again."""
        linear, wiring, offset = self._linear, self._linear.wiring, self._linear.wiring.offset
        for j, (value, number) in enumerate(zip(self._graph.ops[i].inputs, wiring.operands[i], strict=True)):
            held = [
                (alternative.taken[j], again)
                for alternative, again in zip(linear.alternatives[i], linear.again[i], strict=True)
            ]
            if number >= offset:
                held += [
                    (name, difference(total([linear.is_again[i], so]), ONE))
                    for name, so in linear.carried[number].items()
                ]
            for name, binary in held:
                key = self._storage(value, name) if name is not None else None
                if key is None:
                    continue
                place = self._known.position.get(key[0])
                made_in = self._maker_block(key[0]) if place is None else linear.block[place]
                if made_in != linear.block[i]:
                    self._held.setdefault(key, []).append(binary)

    def _unless(self, i: int, made_in: int | None, binary: Sum, again: Sum) -> Sum:
        """Return the variable of a saver without recomputation, if that frees what it saves by now."""
        frees = made_in is not None and made_in == self._linear.block[i] != self._own
        return difference(binary, again) if frees and not again.settled else binary

    def _maker_block(self, root: str) -> int | None:
        """Return the block that makes a value again if it is recomputed; None if it keeps the value."""
        known = self._known
        readers, place = known.users[root], known.position.get(root)
        if place is None:  # a graph input, whose casts a recomputed block makes again unless they are kept
            place = self._linear.wiring.anchor[self._linear.wiring.number[root]]
            if place is None or keeps_weight_casts(self._device):
                return None
        block = self._linear.block[place]
        return block if block == self._linear.block[readers[-1]] else None

    def _storage(self, value: str, type_name: str) -> tuple[str, str] | None:
        """Record and return the storage of a value in a type; None if it is in use throughout the step."""
        known = self._known
        root, num_bytes = known.root[value], storage_bytes(type_name, known.shape[value])
        is_kept = value in known.parameters and keeps_weight_casts(self._device)
        if root not in known.position and (is_kept or type_name == known.dtype[value]):
            return None  # a graph input; kept casts of parameters are counted below
        key = (root, type_name)
        self._size[key] = min(num_bytes, self._size.get(key, num_bytes))
        return key


class _Around:
    """The tensors alive around one moment, by the memory model's own lifetimes of every combination."""

    def __init__(
        self, linear: LinearLowering, graph: OpGraph, device: str, in_buckets: bool, moment: Moment
    ) -> None:
        self._linear, self._graph, self._known, self._moment = linear, graph, layout(graph), moment
        num = len(graph.ops)
        self._at, self._time, self._is_whole = num - 1 if moment.op is None else moment.op, num, False
        if moment.op is not None:
            self._time = moment.op if moment.is_forward else 2 * num - moment.op
        self._before = 0  # 1: count what is alive before and at the moment
        self._runs: dict[int, Run] = {}
        cache: dict[tuple[int, str, str], Saved] = {}
        self._lives = Lifetimes(self._known, self._runs.__getitem__, self._casts, device, in_buckets, cache)

    def parts(self) -> Iterator[tuple[Sum, int]]:
        """Yield (variable, bytes) of each."""
        yield from self._of_op(self._at)
        self._is_whole = self._moment.is_forward
        yield from self._of_values(self._at)
        if self._moment.again is not None:  # gradients that wait for the block's backward
            last = max(i for i, block in enumerate(self._linear.block) if block == self._moment.again)
            self._time, self._is_whole, self._before = 2 * len(self._graph.ops) - last, False, 1
            yield from self._of_values(last + 1)

    def _of_values(self, at: int) -> Iterator[tuple[Sum, int]]:
        for root, users in self._known.users.items():
            place = self._known.position.get(root)
            if place is not None:  # a product may compute it in its epilogue
                place = self._linear.wiring.product[place] or place
            if place is not None and place <= at - self._before and at <= users[-1]:
                yield from self._of_value(root, users)

    def _of_op(self, i: int) -> Iterator[tuple[Sum, int]]:
        """Yield the workspaces of operator `i`, at the least over the types that carry its operands."""
        op, known = self._graph.ops[i], self._known
        makers = [known.position[value] for value in dict.fromkeys(op.inputs) if value in known.position]
        types = [list(self._linear.carried[self._linear.wiring.offset + maker]) for maker in makers]
        for alternative in self._linear.alternatives[i]:
            found = []
            for order, carried in itertools.product(self._linear.orders, itertools.product(*types)):
                self._runs.clear()
                for maker, output in zip(makers, carried, strict=True):
                    self._runs[maker] = Run(known.ops[maker].name, "", (), output)
                self._run(i, alternative, order)
                found.append(self._alive(i))
            yield alternative.binary, min(found)

    def _of_value(self, root: str, users: list[int]) -> Iterator[tuple[Sum, int]]:
        """Yield a value's bytes: by one user's alternatives, and what combinations with others take more."""
        options = [self._linear.alternatives[i] for i in users]
        shape = tuple(map(len, options))
        if math.prod(shape) > _MOST_COMBINED:
            return
        table = np.full(shape, -1)  # of impossible combinations
        for chosen in np.ndindex(shape):
            found = []
            for order in self._linear.orders:
                self._runs.clear()
                for i, own, k in zip(users, options, chosen, strict=True):
                    self._run(i, own[k], order)
                found += [self._alive(root)] if all(map(self._is_possible, users)) else []
            table[chosen] = min(found, default=-1)
        binaries = [[alternative.binary for alternative in own] for own in options]
        for axis in range(len(shape)):  # merge alternatives that make no difference here
            table, kinds = np.unique(table, axis=axis, return_inverse=True)
            of_kind = [Sum() for _ in range(table.shape[axis])]
            for kind, binary in zip(kinds.tolist(), binaries[axis], strict=True):
                of_kind[kind].add(binary)
            binaries[axis] = of_kind if len(of_kind) > 1 else [ONE]
        possible = np.where(table < 0, table.max(), table)
        least = [possible.min(axis=tuple({*range(len(shape))} - {axis})) for axis in range(len(shape))]
        axis = max(range(len(shape)), key=lambda one: float(least[one].mean()))
        yield from zip(binaries[axis], least[axis].tolist(), strict=True)
        known = np.expand_dims(least[axis], tuple({*range(len(shape))} - {axis}))
        more = np.argwhere(table > known).tolist()
        for kinds_of in more if len(more) <= _MOST_EXCEEDING else ():
            together = [of[k] for of, k in zip(binaries, kinds_of, strict=True)]
            excess = int(table[tuple(kinds_of)] - least[axis][kinds_of[axis]])
            yield self._linear.program.at_least_all(together), excess

    def _run(self, i: int, alternative: Alternative, channels_last: bool) -> None:
        op, dtype = self._graph.ops[i], self._known.dtype
        taken = tuple(t or dtype[value] for value, t in zip(op.inputs, alternative.taken, strict=True))
        self._runs[i] = Run(
            op.name, alternative.mode, taken, alternative.output, alternative.form, channels_last
        )

    def _is_possible(self, i: int) -> bool:
        """Return whether a following operator has the mode that its operands, as far as known, give it."""
        op, known = self._graph.ops[i], self._known
        if op.role is not Role.FOLLOWING:
            return True
        floats = [value for value in op.inputs if known.dtype[value] in LARGEST]
        places = [known.position.get(value) for value in floats]
        types = [
            known.dtype[v] if p is None else self._runs[p].output
            for v, p in zip(floats, places, strict=True)
            if p is None or p in self._runs
        ]
        mode = self._runs[i].mode
        return mode_of(op, Precision.FP32, types if len(types) == len(floats) else [*types, mode]) == mode

    def _casts(self, value: str) -> list[tuple[int, Cast]]:
        wiring, carried = self._linear.wiring, self._lives.carried(value)
        number, found = wiring.number[value], dict[str, None]()
        for i in wiring.consumers[number]:
            if i in self._runs and self._runs[i].operands:
                pairs = zip(self._graph.ops[i].inputs, self._runs[i].operands, strict=True)
                found |= dict.fromkeys(taken for name, taken in pairs if name == value and taken != carried)
        size = self._known.elements[value]
        owner = wiring.owner(number) or 0
        order = any(run.channels_last for run in self._runs.values())
        return [(owner, Cast(value, carried, target, size, False, order)) for target in found]

    def _alive(self, what: str | int) -> int:
        """Return a value's or an operator's bytes at the moment; in backward those of unsaved tensors."""
        return sum(
            span.num_bytes
            for span in self._lives.spans_of(what)
            if span.birth <= self._time - self._before
            and self._time <= span.death
            and (self._is_whole or span.part == "transient")
        )
