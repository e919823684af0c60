"""The lifetimes of a step's tensors, each from its allocation to its last reader.

Operator i of n runs forward at time i and backward at time 2n - i. An operator in a product's epilogue runs
at the time of the product. Tensors belong to values (storages in every type, copies of views, and gradients)
or to operators (workspaces, and further tensors saved for backward).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace

from qsync.backend.kernels.convolution.conv_strategy import packed_bytes
from qsync.lowering.lowered_graph import FUSED, Cast, Run
from qsync.operators.precision import is_encoded, keeps_weight_casts, scale_bytes, type_bytes
from qsync.operators.registry import declared
from qsync.predictor.memory.cuda_allocator import block_bytes
from qsync.predictor.memory.layout import Layout
from qsync.predictor.memory.saved_tensors import (
    FP32_BYTES,
    Saved,
    made_for_backward,
    saved_by_op,
    writes_scores,
)
from qsync.predictor.memory.spans import Span
from qsync.predictor.memory.workspaces.op_context import Mask, OpContext
from qsync.predictor.memory.workspaces.op_workspaces import backward_workspace, forward_workspace
from qsync.records.graph import Op, num_elements
from qsync.records.memory_residuals import MemoryResiduals, Residual


class Lifetimes:
    """The lifetimes of one lowered graph's tensors.

    `run` returns the Run of an operator by position. `casts` returns a value's casts by name, each with the
    time at which it runs. With `in_buckets`, parameters' gradients are copied to DDP's buckets. `saved`
    caches saved tensors by position, form and mode, for all assignments. `residuals` are measured bytes of
    operators beyond the predicted ones.
    """

    def __init__(
        self,
        layout: Layout,
        run: Callable[[int], Run],
        casts: Callable[[str], Sequence[tuple[int, Cast]]],
        device: str,
        in_buckets: bool,
        saved: dict[tuple[int, str, str], Saved] | None = None,
        residuals: MemoryResiduals | None = None,
    ) -> None:
        self.layout, self.run, self.casts = layout, run, casts
        self.device, self.in_buckets = device, in_buckets
        self._saved = {} if saved is None else saved
        self._residuals = residuals or None

    def spans_of(self, what: str | int) -> list[Span]:
        """Return the tensors of a value that is no view (by name), or of an operator (by position)."""
        found = _ValueGroup(self, what).spans if isinstance(what, str) else list(self.op_spans(what))
        if self.layout.recomputed is not None:
            again = not keeps_weight_casts(self.device)
            found = [part for span in found for part in self.layout.recomputed.spans(what, span, again)]
        if self.layout.num_calls > 1:  # in the last call, the saved tensors of all calls are alive
            for span in found:
                span.num_bytes *= 1 if span.part == "transient" else self.layout.num_calls
        if self.device == "cuda":
            found = [replace(span, num_bytes=block_bytes(span.num_bytes)) for span in found]
        return found

    def op_spans(self, i: int) -> Iterator[Span]:
        """Yield the workspaces of operator `i`, and the further tensors that it saves for backward."""
        op, run, time = self.layout.ops[i], self.run(i), self.layout.end - i
        if residual := self.residual(i):
            yield Span(residual.saved, i, time, "saved", op.name)
            yield Span(residual.forward, i, i)
            yield Span(residual.backward, time, time)
        if op.kind == "output" and not self.layout.loss_inside:  # a loss outside the graph saves an FP32 copy
            copy = 0
            for value in op.inputs:
                if self.layout.has_gradient[value]:
                    copy += FP32_BYTES * self.layout.elements[value]
            yield Span(copy, len(self.layout.ops), len(self.layout.ops))
        context = self._context(i)
        if forward := forward_workspace(op, run, context):
            yield Span(forward, i, i)
        if not op.requires_grad:
            return
        for num_bytes in made_for_backward(op, self.layout, run.form, run.mode, self.device):
            yield Span(num_bytes, i, time, "saved", op.name)
        if backward := backward_workspace(op, run, context):
            yield Span(backward, time, time)

    def residual(self, i: int) -> Residual | None:
        """Return the measured bytes of operator `i` beyond the prediction in its current mode, if any."""
        if self._residuals is None:
            return None
        found = self._residuals.of(self.layout.ops[i].name, self.run(self.layout.product[i]).mode)
        return found if any(found) else None

    def _context(self, i: int) -> OpContext:
        op, run = self.layout.ops[i], self.run(i)
        return OpContext(
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
            writes_scores=op.kind == "attention" and writes_scores(op, self.layout, run.mode, self.device),
            in_order=tuple(j for j, value in enumerate(op.inputs) if value in self.layout.in_order),
        )

    def time(self, i: int) -> int:
        """Return the time at which operator `i` runs."""
        return self.layout.position[self.layout.ops[i].inputs[0]] if self.run(i).form == FUSED else i

    def saved(self, i: int) -> Saved:
        """Return the operands and result that operator `i` saves for backward in its current mode."""
        key = (i, self.run(i).form, self.run(i).mode)
        if key not in self._saved:
            self._saved[key] = saved_by_op(self.layout.ops[i], self.layout, *key[1:], self.device)
        return self._saved[key]

    def passes_gradient(self, i: int, j: int) -> bool:
        """Return whether operator `i` passes its result's gradient unchanged to its `j`-th operand."""
        op, run = self.layout.ops[i], self.run(i)
        same = j < declared(op.kind).passes_gradient and self.layout.shape[op.inputs[j]] == op.shape
        return same and run.operands[j] == run.output

    def takes_over_gradient(self, root: str, i: int, cast: bool) -> bool:
        """Return whether operand `root` of the sum `i` reuses the tensor of the sum's gradient.

        Among several operands, the one computed first reuses it. An operand that is itself a sum passes the
        tensor on, so it always counts (an overestimate), unless it is read through a cast.
        """
        op = self.layout.ops[i]
        roots = [
            self.layout.root[value]
            for j, value in enumerate(op.inputs)
            if self.layout.has_gradient[value] and self.passes_gradient(i, j)
        ]
        first = min(roots, key=lambda value: self.layout.position.get(value, -1))
        own = self.layout.position.get(root, -1)
        return (
            root == first or own < 0 or (not cast and declared(self.layout.ops[own].kind).passes_gradient > 0)
        )

    def is_cast(self, value: str, taken: str) -> bool:
        """Return whether reading a value in type `taken` means reading a cast with a backward.

        A cast's backward runs just before that of the operator that computed the value. Encodings have none.
        """
        if value in self.layout.parameters or taken == self.carried(value) or is_encoded(taken):
            return False
        return self.cast_time(value, taken) >= 0

    def cast_time(self, value: str, target: str) -> int:
        """Return the time at which a value is cast to a type; -1 without a cast (or before an update)."""
        return next((time for time, cast in self.casts(value) if cast.target == target), -1)

    def must_copy(self, i: int) -> bool:
        """Return whether operator `i` copies its input although its kind is a view.

        A view that flattens a channels_last image copies. So does `contiguous` after FP32 attention, whose
        result has the memory order of its queries, not that of other kernels.
        """
        op = self.layout.ops[i]
        if op.kind == "contiguous" and op.copies:
            return self.run(self.layout.position[self.layout.root[op.name]]).mode == "fp32"
        shape = self.layout.shape[op.inputs[0]] if op.inputs else ()
        flattened = op.kind == "view" and self.run(i).channels_last and len(shape) == 4 != len(op.shape)
        return flattened and shape[1] > 1 and shape[2] * shape[3] > 1

    def is_partial_view(self, i: int) -> bool:
        """Return whether operator `i` views a part; its backward allocates the whole's gradient."""
        op = self.layout.ops[i]
        return op.kind == "view" and op.requires_grad and op.num_elements < self.layout.elements[op.inputs[0]]

    def carried(self, value: str) -> str:
        """Return the type in which a value is carried."""
        i = self.layout.position.get(value)
        return self.layout.dtype[value] if i is None else self.run(i).output


class _ValueGroup:
    """One value with its views: its storage, its casts, and its gradient."""

    def __init__(self, lives: Lifetimes, root: str) -> None:
        self.lives = lives
        self.root = root
        self.storages: dict[tuple[str, str], Span] = {}
        self.key: dict[str, tuple[str, str]] = {}  # value -> its storage
        self.workspaces: list[Span] = []
        # Terms (time, value, whether it is a sum's gradient passed on) of the gradient of the value, and of
        # the gradients of its casts.
        self.contributions: list[tuple[int, str, bool]] = []
        self.cast_contributions: dict[tuple[str, str], list[tuple[int, str, bool]]] = {}
        # A graph input is alive throughout, so it has no span, unless an earlier graph computed it.
        if root not in lives.layout.position:
            if root in lives.layout.entered:
                self._make((root, lives.layout.dtype[root]), lives.layout.entered[root])
            self._enter(root, (root, lives.layout.dtype[root]))
        for i in lives.layout.users[root]:
            self._visit(i, lives.layout.ops[i], lives.run(i), lives.saved(i))
        self.spans = [*self.storages.values(), *self.workspaces, *self._gradient()]

    def _visit(self, i: int, op: Op, run: Run, saved: Saved) -> None:
        lives, time = self.lives, self.lives.time(i)
        for j, (value, taken) in enumerate(zip(op.inputs, run.operands, strict=True)):
            if value in self.key:
                handed_out = op.kind == "output" and not lives.layout.is_passed_on(value, i)
                last = len(lives.layout.ops) if handed_out else time
                key = self.key[value] if taken == lives.carried(value) else (value, taken)
                self._use(key, last)
                if taken == "int8_channel" and lives.device == "cpu" and key in self.storages:
                    x, w = (lives.layout.shape[name] for name in op.inputs[:2])
                    self.storages[key].num_bytes += packed_bytes(x, w, op.shape)
                if is_encoded(taken):  # the kernel reads the value and its codes
                    self._use(self.key[value], last)
                if j in saved.inputs or value in saved.indices:
                    self._save(key, time, op)
                apart = (
                    lives.layout.root[op.name] != self.root
                )  # a view passes on the gradient that reaches it
                if apart and lives.layout.has_gradient[value] and (op.requires_grad or op.kind == "output"):
                    found = self.contributions
                    if lives.is_cast(*key):
                        found = self.cast_contributions.setdefault(key, [])
                    found.append((lives.layout.end - last, value, lives.passes_gradient(i, j)))
                if lives.layout.root[op.name] == self.root:
                    if lives.must_copy(i):
                        key = (op.name, run.output)
                        self._make(key, time)
                    self._enter(op.name, key)
        for value in op.kept:
            if value in self.key:
                self._use(self.key[value], time)
                if value in saved.indices:
                    self._save(self.key[value], time, op)
        if op.name == self.root:
            if op.kind != "output" and run.form != "relu":  # relu overwrites the product's result
                self._make((op.name, run.output), time)
            self._enter(op.name, (op.name, run.output))
        if saved.output and op.name in self.key:
            self._save(self.key[op.name], time, op)

    def _enter(self, value: str, key: tuple[str, str]) -> None:
        """Record a value of this group with its storage, and allocate its casts."""
        self.key[value] = key
        for time, cast in self.lives.casts(value):
            storage = self._make((value, cast.target), time)
            # Rounding first copies a view, or an image in another memory order, to a contiguous tensor.
            in_order = cast.channels_last or value in self.lives.layout.in_order
            if value != self.root or (cast.target == "int8_image" and not in_order):
                self.workspaces.append(
                    Span(storage_bytes(cast.source, self.lives.layout.shape[value]), time, time)
                )
            if cast.of_parameter and keeps_weight_casts(self.lives.device):
                storage.part = "casts"
                storage.death = self.lives.layout.end  # cast once per optimizer step, and alive until its end

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
        """Yield the gradient's spans, from its first term to the backward of the value's operator.

        A cast has a gradient of its own, in the cast's type, until the cast's backward. An FP32 gradient of a
        16-bit value therefore stays in FP32 until then.
        """
        lives = self.lives
        position = lives.layout.position.get(self.root)
        for (value, taken), found in self.cast_contributions.items():
            made = lives.layout.end - lives.cast_time(value, taken)
            num_bytes = type_bytes(taken, lives.layout.elements[value])
            yield from self._accumulated(found, num_bytes, made, cast=True)
            self.contributions.append((made, value, False))
        if not lives.layout.has_gradient[self.root] or not self.contributions:
            return
        whole = type_bytes(lives.carried(self.root), lives.layout.elements[self.root])
        if self.root in lives.layout.parameters:
            yield from self._shared_parameter(whole)
        made_at = lives.layout.entered.get(self.root) if position is None else lives.time(position)
        if made_at is None:  # `bytes_throughout` counts the gradients of parameters
            return
        yield from self._views_gradients()
        yield from self._accumulated(self.contributions, whole, lives.layout.end - made_at)

    def _views_gradients(self) -> Iterator[Span]:
        """Yield the gradients of partial views; leave in `contributions` the terms of the whole value.

        A partial view has a gradient of its own until its backward allocates one of the whole. All parts of a
        split have gradients until the backward of the split.
        """
        lives, end = self.lives, self.lives.layout.end
        to: dict[str, list[tuple[int, str, bool]]] = {value: [] for value in self.key}
        for time, value, passed in self.contributions:
            to[value].append((time, value, passed))
        for value in reversed(self.key):
            i = lives.layout.position.get(value)
            if value == self.root or i is None or not to[value]:
                continue
            splits, parent = lives.layout.ops[i].splits, lives.layout.ops[i].inputs[0]
            above = lives.layout.position.get(parent, i)
            of_split = parent != self.root and lives.layout.ops[above].splits
            backward = end - (above if of_split else i)
            if not (of_split or splits or lives.is_partial_view(i)):  # views all elements
                to[parent] += [(time, parent, passed) for time, _, passed in to[value]]
                continue
            if not splits:
                part = type_bytes(lives.carried(value), lives.layout.elements[value])
                yield from self._accumulated(to[value], part, backward)
            to[parent].append((backward, parent, False))
        self.contributions = to[self.root]

    def _shared_parameter(self, num_bytes: int) -> Iterator[Span]:
        """Yield the terms of a shared parameter's gradient that wait for terms of its other readers.

        Without buckets the first term becomes the gradient, which `bytes_throughout` counts. Terms of one
        cast are summed in its type. Autograd adds in place unless the first term is a view, as the terms of
        torch's FP32 products are.
        """
        lives, terms = self.lives, dict[int, bool]()  # time of a term -> whether it is a view
        by_type: dict[str, list[int]] = {}
        for time, value, _ in self.contributions:
            i = lives.layout.end - time
            reads = dict(zip(lives.layout.ops[i].inputs, lives.run(i).operands, strict=True))
            taken = reads.get(value, lives.carried(value))  # a cast of the parameter's view adds its own sum
            if taken == lives.carried(value) or is_encoded(taken):
                terms[time] = taken == "fp32"
            else:
                by_type.setdefault(taken, []).append(time)
        for taken, times in by_type.items():
            terms[max(times)] = False
            if len(set(times)) > 1:
                yield Span(type_bytes(taken, lives.layout.elements[self.root]), min(times) + 1, max(times))
        first, *others = sorted(terms)
        if others and lives.in_buckets:
            yield Span(num_bytes, first + 1, others[-1])
        for time in others:
            for _ in range((not lives.in_buckets) + terms[first]):
                yield Span(num_bytes, time, time)

    def _accumulated(
        self, contributions: Sequence[tuple[int, str, bool]], num_bytes: int, death: int, cast: bool = False
    ) -> Iterator[Span]:
        """Yield the span of a gradient of `num_bytes` bytes, and of each term while it is added.

        A sum passes on its own gradient, and one operand reuses that tensor. The term of a later operator is
        a workspace at the time of its addition. `cast`: the gradient is that of a cast.
        """
        lives = self.lives
        birth: int | None = None
        for time, _, passed in sorted(contributions, key=lambda entry: entry[0]):
            if passed:
                if birth is None and lives.takes_over_gradient(self.root, lives.layout.end - time, cast):
                    birth = time + 1
            elif birth is None:
                birth = time
            else:
                yield Span(num_bytes, time, time)
        if birth is not None:
            yield Span(num_bytes, birth, max(birth, death))


def storage_bytes(type_name: str, shape: Sequence[int]) -> int:
    """Return the bytes of a tensor of this type, including the scales of an encoded tensor."""
    return type_bytes(type_name, num_elements(shape)) + scale_bytes(type_name, shape)
