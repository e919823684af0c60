"""How long the tensors of a step live: from the operator that makes each to the last one that reads it.

Operator i of n runs at time i, and backward at 2n - i; one that a product computes in its epilogue runs with
the product. The tensors are those of values (a value's storages in every type, with those of its views, and
its gradient) and those that operators need besides.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Protocol

from qsync.backend.kernels.conv_strategy import packed_bytes
from qsync.lowering.lowered_graph import FUSED, Cast, Run
from qsync.predictor.memory.cuda_allocator import block_bytes
from qsync.predictor.memory.recomputation import Recomputed
from qsync.predictor.memory.saved_tensors import FP32_BYTES, Kept, families, kept_by, made_for_backward
from qsync.predictor.memory.spans import Span
from qsync.predictor.memory.workspaces import Mask, Surroundings, in_backward, in_forward
from qsync.records.graph import Input, Op, OpGraph, num_elements
from qsync.records.identity_cache import Remembered
from qsync.records.precision import is_encoded, type_bytes

# Kinds whose result's gradient is that of their first so many inputs.
PASSES_GRADIENT = {"add": 2, "sub": 1}


class Layout:
    """What of a step's memory follows from the graph alone: shapes, storages, and who reads them."""

    def __init__(self, graph: OpGraph) -> None:
        self.ops, self.inputs = graph.ops, graph.inputs
        self.end = 2 * len(graph.ops)
        entries: list[Input | Op] = [*graph.inputs, *graph.ops]
        self.dtype = {entry.name: entry.dtype for entry in entries}
        self.shape = {entry.name: entry.shape for entry in entries}
        self.elements = {entry.name: entry.num_elements for entry in entries}
        self.has_gradient = {entry.name: entry.requires_grad for entry in entries}
        self.parameters = {value.name for value in graph.parameters}
        self.position = {op.name: i for i, op in enumerate(graph.ops)}
        self.root = families(graph, self.dtype)
        self.involved = self._involve()
        self.loss_inside = any(op.kind in ("cross_entropy", "loss") for op in graph.ops)
        blocks = graph.recomputed
        self.recomputed = Recomputed(blocks, len(graph.ops), self.position, self.involved) if blocks else None
        # The last time of a step: later than `end` where something is computed twice.
        self.last = self.recomputed.end if self.recomputed else self.end

    def _involve(self) -> dict[str, list[int]]:
        """For every storage the operators that make it, or read it or one of its views, in order."""
        involved: dict[str, list[int]] = {name: [] for name, root in self.root.items() if name == root}
        for i, op in enumerate(self.ops):
            for root in dict.fromkeys(self.root[name] for name in (op.name, *op.inputs, *op.kept)):
                involved[root].append(i)
        return involved


_LAYOUTS: Remembered[Layout] = Remembered()


def layout(graph: OpGraph) -> Layout:
    """The layout of a graph, worked out once."""
    return _LAYOUTS.of(graph, lambda: Layout(graph))


class Runs(Protocol):
    """How every operator runs, by position."""

    def __getitem__(self, i: int, /) -> Run: ...


class Casts(Protocol):
    """The casts of every value by its name, each with the time at which it is made."""

    def __getitem__(self, value: str, /) -> Sequence[tuple[int, Cast]]: ...


class Lifetimes:
    """The tensors of one lowered graph. `in_buckets`: parameters' gradients are copied into DDP's buckets.

    `kept` is what operators were found to keep, by position, form and mode: it holds for every assignment.
    """

    def __init__(
        self,
        layout: Layout,
        runs: Runs,
        casts: Casts,
        device: str,
        in_buckets: bool,
        kept: dict[tuple[int, str, str], Kept] | None = None,
    ) -> None:
        self.layout, self.runs, self.casts = layout, runs, casts
        self.device, self.in_buckets = device, in_buckets
        self._kept = {} if kept is None else kept

    def of(self, what: str | int) -> list[Span]:
        """The tensors of a value (one that is no view) by its name, or those an operator needs besides."""
        found = _Family(self, what).spans if isinstance(what, str) else list(self.needs(what))
        if self.layout.recomputed is not None:
            found = [life for span in found for life in self.layout.recomputed.lives(what, span)]
        if self.device == "cuda":
            found = [replace(span, num_bytes=block_bytes(span.num_bytes)) for span in found]
        return found

    def needs(self, i: int) -> Iterator[Span]:
        """What operator `i` makes for its backward beside its result, and what that needs for a moment."""
        op, run, time = self.layout.ops[i], self.runs[i], self.layout.end - i
        if op.kind == "output" and not self.layout.loss_inside:  # the loss, outside, keeps an FP32 copy
            copy = 0
            for value in op.inputs:
                if self.layout.has_gradient[value]:
                    copy += FP32_BYTES * self.layout.elements[value]
            yield Span(copy, len(self.layout.ops), len(self.layout.ops))
        if not op.requires_grad:
            return
        for num_bytes in made_for_backward(
            op, run.mode, self.layout.shape, self.layout.dtype, self.device, run.form
        ):
            yield Span(num_bytes, i, time, "saved", op.name)
        around = self._surroundings(i)
        for when, moment in ((i, in_forward(op, run, around)), (time, in_backward(op, run, around))):
            if moment:
                yield Span(moment, when, when)

    def _surroundings(self, i: int) -> Surroundings:
        op, run = self.layout.ops[i], self.runs[i]
        return Surroundings(
            shapes=tuple(self.layout.shape[value] for value in op.inputs),
            carried=tuple(
                taken if self.is_cast(value, taken) else self.carried(value)
                for value, taken in zip(op.inputs, run.operands, strict=True)
            ),
            has_gradient=tuple(self.layout.has_gradient[value] for value in op.inputs),
            is_parameter=tuple(value in self.layout.parameters for value in op.inputs),
            gradient=run.output,
            in_buckets=self.in_buckets,
            device=self.device,
            masks=tuple(
                Mask(self.layout.shape[value], type_bytes(self.layout.dtype[value], 1))
                for value in (*op.inputs[3:], *op.kept)
                if op.kind == "attention"
            ),
        )

    def time(self, i: int) -> int:
        """When operator `i` runs."""
        return self.layout.position[self.layout.ops[i].inputs[0]] if self.runs[i].form == FUSED else i

    def kept(self, i: int) -> Kept:
        """What operator `i` keeps for backward, as it runs now."""
        key = (i, self.runs[i].form, self.runs[i].mode)
        if key not in self._kept:
            self._kept[key] = kept_by(
                self.layout.ops[i], self.layout.has_gradient, self.layout.dtype, *key[1:], self.device
            )
        return self._kept[key]

    def passes_gradient(self, i: int, j: int) -> bool:
        """Whether the gradient of operator `i`'s result is, as it is, that of its `j`-th operand."""
        op, run = self.layout.ops[i], self.runs[i]
        same = op.kind in PASSES_GRADIENT and self.layout.shape[op.inputs[j]] == op.shape
        return same and j < PASSES_GRADIENT[op.kind] and run.operands[j] == run.output

    def goes_on(self, root: str, i: int, cast: bool) -> bool:
        """Whether it is this operand of a sum, operator `i`, whose gradient outlives that of the sum.

        Of several it is the one made first. One made by a sum hands the tensor on once more, so that it
        counts for itself (ours: rather too much), unless a cast stands between.
        """
        op = self.layout.ops[i]
        roots = [
            self.layout.root[value]
            for j, value in enumerate(op.inputs)
            if self.layout.has_gradient[value] and self.passes_gradient(i, j)
        ]
        first = min(roots, key=lambda value: self.layout.position.get(value, -1))
        own = self.layout.position.get(root, -1)
        return root == first or own < 0 or (not cast and self.layout.ops[own].kind in PASSES_GRADIENT)

    def is_cast(self, value: str, taken: str) -> bool:
        """Whether who takes an activation in this type takes a conversion, which has a backward of its own:
        it runs just before that of what made the value. An encoding has none.
        """
        if value in self.layout.parameters or taken == self.carried(value) or is_encoded(taken):
            return False
        return self.cast_time(value, taken) >= 0

    def cast_time(self, value: str, target: str) -> int:
        """When a value is cast to a type; -1 if it is not (yet, while changes are looked at one by one)."""
        return next((time for time, cast in self.casts[value] if cast.target == target), -1)

    def copies(self, i: int) -> bool:
        """Whether operator `i`, a view, has to copy: rows of an image whose channels are last."""
        op = self.layout.ops[i]
        shape = self.layout.shape[op.inputs[0]] if op.inputs else ()
        flattened = op.kind == "view" and self.runs[i].channels_last and len(shape) == 4 != len(op.shape)
        return flattened and shape[1] > 1 and shape[2] * shape[3] > 1

    def picks(self, i: int) -> bool:
        """Whether operator `i` is a view of a part: its backward makes the gradient of the whole."""
        op = self.layout.ops[i]
        return op.kind == "view" and op.requires_grad and op.num_elements < self.layout.elements[op.inputs[0]]

    def carried(self, value: str) -> str:
        """The type in which a value is carried."""
        i = self.layout.position.get(value)
        return self.layout.dtype[value] if i is None else self.runs[i].output


class _Family:
    """One value with its views: its storage, its casts, and its gradient."""

    def __init__(self, lives: Lifetimes, root: str) -> None:
        self.lives = lives
        self.root = root
        self.storages: dict[tuple[str, str], Span] = {}
        self.key: dict[str, tuple[str, str]] = {}  # value -> its storage
        self.moments: list[Span] = []
        # (time, value, whether it is the gradient of what a sum made): what backward adds up to its gradient,
        # and to those of its casts.
        self.contributions: list[tuple[int, str, bool]] = []
        self.of_casts: dict[tuple[str, str], list[tuple[int, str, bool]]] = {}
        # What enters the graph is there throughout; only its casts come and go.
        if root not in lives.layout.position:
            self._enter(root, (root, lives.layout.dtype[root]))
        for i in lives.layout.involved[root]:
            self._visit(i, lives.layout.ops[i], lives.runs[i], lives.kept(i))
        self.spans = [*self.storages.values(), *self.moments, *self._gradient()]

    def _visit(self, i: int, op: Op, run: Run, kept: Kept) -> None:
        lives, time = self.lives, self.lives.time(i)
        last = len(lives.layout.ops) if op.kind == "output" else time
        for j, (value, taken) in enumerate(zip(op.inputs, run.operands, strict=True)):
            if value in self.key:
                key = self.key[value] if taken == lives.carried(value) else (value, taken)
                self._use(key, last)
                if taken == "int8_channel" and lives.device == "cpu" and key in self.storages:
                    x, w = (lives.layout.shape[name] for name in op.inputs[:2])
                    self.storages[key].num_bytes += packed_bytes(x, w, op.shape)
                if is_encoded(taken):  # its kernel is handed the value beside the codes
                    self._use(self.key[value], last)
                if j in kept.inputs or value in kept.indices:
                    self._save(key, time, op)
                apart = lives.layout.root[op.name] != self.root  # a view brings what is brought to it
                if apart and lives.layout.has_gradient[value] and (op.requires_grad or op.kind == "output"):
                    found = self.contributions
                    if lives.is_cast(value, taken):
                        found = self.of_casts.setdefault((value, taken), [])
                    found.append((lives.layout.end - last, value, lives.passes_gradient(i, j)))
                if lives.layout.root[op.name] == self.root:
                    if lives.copies(i):
                        key = (op.name, run.output)
                        self._make(key, time)
                    self._enter(op.name, key)
        for value in op.kept:
            if value in self.key:
                self._use(self.key[value], time)
                if value in kept.indices:
                    self._save(self.key[value], time, op)
        if op.name == self.root:
            if op.kind != "output" and run.form != "relu":  # whose result takes the place of the product's
                self._make((op.name, run.output), time)
            self._enter(op.name, (op.name, run.output))
        if kept.output and op.name in self.key:
            self._save(self.key[op.name], time, op)

    def _enter(self, value: str, key: tuple[str, str]) -> None:
        """A value of this family, the storage it has, and its casts."""
        self.key[value] = key
        for time, cast in self.lives.casts[value]:
            storage = self._make((value, cast.target), time)
            # A view is brought in order before it is rounded, and so are images.
            if value != self.root or (cast.target == "int8_image" and not cast.channels_last):
                self.moments.append(
                    Span(storage_bytes(cast.source, self.lives.layout.shape[value]), time, time)
                )
            if cast.of_parameter:
                storage.part = "casts"
                storage.death = self.lives.layout.end  # made once per optimizer step, and kept until then

    def _make(self, key: tuple[str, str], time: int) -> Span:
        storage = self.storages[key] = Span(
            storage_bytes(key[1], self.lives.layout.shape[key[0]]), time, time
        )
        return storage

    def _use(self, key: tuple[str, str], time: int) -> None:
        if key in self.storages:
            self.storages[key].death = max(self.storages[key].death, time)

    def _save(self, key: tuple[str, str], i: int, op: Op) -> None:
        if key in self.storages:
            storage = self.storages[key]
            storage.death = max(storage.death, self.lives.layout.end - i)
            if storage.part == "transient":
                storage.part, storage.saver = "saved", op.name

    def _gradient(self) -> Iterator[Span]:
        """The gradient, from the first operator that adds to it to the one that made the value.

        Pieces of one value (views) have gradients of their own until they are put together. So have casts, in
        their own type, until each is brought to the value's where the cast was made: a gradient of FP32 waits
        in FP32 for a value of 16 bits, however early it came.
        """
        lives = self.lives
        position = lives.layout.position.get(self.root)
        for (value, taken), found in self.of_casts.items():
            made = lives.layout.end - lives.cast_time(value, taken)
            yield from self._added_up(found, type_bytes(taken, lives.layout.elements[value]), made)
            self.contributions.append((made, value, False))
        # That of what enters the graph is nobody's here.
        if position is None or not lives.layout.has_gradient[self.root] or not self.contributions:
            return
        whole = type_bytes(lives.carried(self.root), lives.layout.elements[self.root])
        yield from self._added_up(self.contributions, whole, lives.layout.end - lives.time(position))
        for value in self.key:
            i = lives.layout.position.get(value)
            if i is not None and value != self.root and lives.picks(i):
                yield Span(whole, lives.layout.end - i, lives.layout.end - i)

    def _added_up(
        self, contributions: Sequence[tuple[int, str, bool]], num_bytes: int, death: int
    ) -> Iterator[Span]:
        """A gradient of so many bytes, and what is added to it.

        What a sum's gradient brings is that very tensor, which one of the operands then goes on with; what a
        later operator brings is there for a moment beside what it is added to.
        """
        lives, elements = self.lives, self.lives.layout.elements
        cast = contributions is not self.contributions
        begun: set[str] = set()
        birth: int | None = None
        for time, value, passed in sorted(contributions, key=lambda entry: entry[0]):
            piece = value if elements[value] < elements[self.root] else self.root
            if passed:
                if birth is None and lives.goes_on(self.root, lives.layout.end - time, cast):
                    birth = time + 1
            elif birth is None:
                birth = time
            elif cast or piece in begun or piece == self.root:
                part = num_bytes if cast else num_bytes * elements[value] // max(elements[self.root], 1)
                yield Span(part, time, time)
            begun.add(piece)
        if birth is not None:
            yield Span(num_bytes, birth, max(birth, death))


def storage_bytes(type_name: str, shape: Sequence[int]) -> int:
    """Bytes of a tensor of this type, with the FP32 scales of an encoded one."""
    size = type_bytes(type_name, num_elements(shape))
    if not is_encoded(type_name) or type_name == "fp16" or not shape:
        return size
    layout = type_name.rpartition("_")[2]
    scales = {
        "row": num_elements(shape[:-1]),
        "col": shape[-1],
        "inner": num_elements((*shape[:-2], *shape[-1:])) if len(shape) > 1 else 1,
        "image": shape[0],
        "channel": shape[0],
    }
    return size + FP32_BYTES * scales[layout]
