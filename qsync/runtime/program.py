"""The program of a wrapped model: its traced graphs, rewritten for a plan.

A Program is the backend that torch.compile calls. It holds each traced graph as a Segment, so that another
assignment rewrites the segments without tracing again. `planned_forward` makes a model run through one.
"""

from __future__ import annotations

import weakref
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, nullcontext
from dataclasses import dataclass, replace
from functools import cache
from typing import Any

import torch
import torch._dynamo
import torch.fx
from torch._dynamo.callback import CallbackArgs, callback_handler

from qsync import backend
from qsync.backend.custom_operators import OpaqueKernels
from qsync.backend.devices.device_detection import device_of
from qsync.errors import QSyncError, TracingError, UnsupportedError
from qsync.lowering.incremental import lower
from qsync.lowering.lowered_graph import Cast, LoweredGraph, Run
from qsync.operators.declaration import Role
from qsync.operators.precision import FLOATS, Precision
from qsync.processes.progress import shown_on_rank_zero
from qsync.records.graph import OpGraph
from qsync.runtime.assignment_timing import fastest_assignment
from qsync.runtime.choosers import Chooser, SavingChooser, at_base, candidates, kept, saving, unsupported
from qsync.runtime.coverage import warn_once
from qsync.runtime.node_calls import Observer
from qsync.runtime.operator_timing import fastest_precisions
from qsync.runtime.python_stack import with_room
from qsync.runtime.rewriting import rewrite
from qsync.runtime.weight_cache import (
    WeightCopy,
    check_copies,
    copies_of,
    forget_copies,
    note_copies,
)
from qsync.tracing.forward_writes import BuffersBefore
from qsync.tracing.graph_sharing import SharedGraph
from qsync.tracing.operator_table import call_name
from qsync.tracing.replaced_forward import plain_forward, trace_again, untraced
from qsync.tracing.segments import Segment, join, names_at, read_segment
from qsync.tracing.tracer import (
    autocast_type,
    cannot_trace,
    dynamo_settings,
    graph_breaks,
    met_recompile_limit,
    nothing_to_lower,
    num_skipped_frames,
    tensor_names,
    why_broken,
    why_skipped,
    why_untraced,
    without_autocast,
)

_MANY_TRACES = 32  # traces per model; torch traces lengths that its code does not depend on once
_MANY_ALIKE = 8  # traces of equal shapes; torch.compile's own limit
# Settings without which torch.compile replaces nn.MultiheadAttention and its layers by one call.
_WHOLE_ATTENTION = {
    "multi_head_attention_forward", "_native_multi_head_attention", "_transformer_encoder_layer_fwd",
}  # fmt: skip


# A lowered graph, and its operators in a higher precision than chosen, with the reason.
_Lowering = tuple[LoweredGraph, dict[str, str]]


@dataclass(slots=True)
class _Entry:
    segment: Segment
    graph: OpGraph
    lowered: LoweredGraph
    slower: dict[str, str]  # operators in a higher precision, with the reason
    run: torch.fx.GraphModule
    rivals: Sequence[_Lowering] = ()  # among which the next call decides


def _has_products(entries: Iterable[_Entry]) -> bool:
    """Return whether a traced graph has an adjustable operator."""
    return any(op.role is Role.ADJUSTABLE for entry in entries for op in entry.graph.ops)


class _Placed:
    """An observer that sees nodes under their names in the joined graph."""

    def __init__(self, observer: Observer, program: Program) -> None:
        self._observer, self._program = observer, program
        self.only_times = getattr(observer, "only_times", False)
        if hasattr(observer, "taken"):
            self.taken = self._placed_taken  # an observer without this method gets no operands

    def began(self) -> None:
        """Handle the start of a traced graph."""
        self._observer.began()

    def seen(self, node: Cast | Run, result: Any, operands: tuple[Any, ...]) -> None:
        """Pass on a node under its name in the joined graph."""
        self._observer.seen(self._renamed(node), result, operands)

    def _renamed(self, node: Cast | Run) -> Cast | Run:
        names = self._program.names
        if isinstance(node, Run):
            return replace(node, op=names[node.op]) if node.op in names else node
        return replace(node, value=names[node.value]) if node.value in names else node

    def _placed_taken(self, op: str, index: int, operand: Any) -> Any:
        return self._observer.taken(self._program.names.get(op, op), index, operand)  # type: ignore[attr-defined]


class Program:
    """Runs in a model's place: its traced segments, rewritten for the current assignment."""

    def __init__(
        self,
        model: torch.nn.Module,
        choose: Chooser,
        check: Callable[[OpGraph, Collection[str]], None] | None = None,
        saving_less: SavingChooser | None = None,
        report: Callable[[Program, bool], None] | None = None,
        base: Precision | None = None,
        is_part: bool = False,
        strict: bool = True,
        dynamic: bool | None = None,
        as_torch: bool = False,
        carries_16bit: bool = True,
        bitwise: bool = False,
    ) -> None:
        self._model = weakref.ref(model)
        self.dynamic = dynamic  # as in torch.compile: False traces every shape separately
        self._strict = strict  # if not, operators run in the fastest precision from the chosen one up
        self._carries_16bit = carries_16bit  # if the device does; False if the plan was priced without
        self._is_part = is_part  # of a model with separate programs for sharded blocks
        self._choose, self._check, self._report = choose, check, report
        self._num_reported = -1  # nothing yet: the first call is always reported
        self._base = base  # allowed type of torch.autocast around a call; None: any
        self._observer: Observer | None = None
        self._saving_less = saving_less or saving(())
        self._checked = self._has_run = False  # checked against the plan; called at all
        # Nothing is lowered: once the plan is checked, the model's own forward runs untraced.
        self._as_torch = as_torch
        self.names: dict[str, str] = {}  # names in the joined graph for the running segment, where different
        self._entries: list[_Entry] = []
        self._times_alike: Counter[str] = Counter()  # number of traces with the same shapes
        self._ran: list[_Entry] = []
        self._copies: list[WeightCopy] = []  # of all rewritten segments
        self._tensor_names: dict[int, str] | None = None  # for this call, filled on demand
        self._num_given_up = num_skipped_frames()  # frames given up by the tracer at the last new trace
        self.num_calls = 0  # with gradients, so far
        self.met_other_shapes = False  # than the plan's: warned once
        self.skipped = ""  # why the tracer gave up a frame, so that only its layers are lowered
        self.broken = ""  # where the tracer stopped in the first call
        self.device = device_of(model)
        self.kernels = backend.select(self.device, bitwise)

    @property
    def model(self) -> torch.nn.Module:
        """Return the program's model."""
        model = self._model()
        assert model is not None, "a program outlived its model"
        return model

    @property
    def name(self) -> str:
        """Return the name of the model's class."""
        return type(self._model()).__name__

    @property
    def was_called(self) -> bool:
        """Return whether a call has shown the graphs, or none is needed."""
        return self._checked or self._has_run or self.runs_as_torch

    @property
    def runs_as_torch(self) -> bool:
        """Return whether the model's own forward runs from now on, because its plan lowers nothing."""
        return self._as_torch and (self._checked or self._check is None)

    @property
    def graph(self) -> OpGraph:
        """Return the last call's graph: its segments joined in execution order."""
        return join(self.segments, self.name)

    @property
    def segments(self) -> list[Segment]:
        """Return the last call's traced segments, in execution order."""
        return [entry.segment for entry in self._ran]

    @property
    def rewritten(self) -> list[torch.fx.GraphModule]:
        """Return the rewritten modules of the last call."""
        return [entry.run for entry in self._ran]

    @property
    def lowered(self) -> tuple[LoweredGraph, ...]:
        """Return the lowered graphs of the last call's segments, in execution order."""
        return tuple(entry.lowered for entry in self._ran)

    def assignment(self) -> dict[str, Precision]:
        """Return the last call's precision of each adjustable operator."""
        adjustable = {op.name for lowered in self.lowered for op in lowered.graph.adjustable}
        runs = (node for lowered in self.lowered for node in lowered.nodes if isinstance(node, Run))
        return {run.op: Precision(run.mode) for run in runs if run.op in adjustable}

    def why_not(self, graph: OpGraph, precision: Precision) -> dict[str, str]:
        """Return operator -> why it does not run in a precision of its kind."""
        slower = {op: why for entry in self._ran for op, why in entry.slower.items()}
        return slower | self.unsupported(graph, precision) | kept(graph, precision)

    def unsupported(self, graph: OpGraph, precision: Precision) -> dict[str, str]:
        """Return operator -> why the device lacks a kernel for it, in a precision of its kind."""
        return unsupported(graph, precision, self.kernels)

    def choose(
        self,
        choose: Chooser,
        observer: Observer | None = None,
        saving_less: SavingChooser | None = None,
        strict: bool = True,
    ) -> None:
        """Use another assignment from the next call on, with an optional observer of every node.

        Without `saving_less` every operator saves torch's tensors. Unless `strict`, an operator runs in its
        fastest precision from the chosen one up.
        """
        self._choose, self._observer, self._strict = choose, observer, strict
        self._saving_less = saving_less or saving(())
        self._copies.clear()
        for entry in self._entries:
            self._lower(entry)

    def adopt(self, other: Program) -> None:
        """Take over another program's settings and traced graphs of this model."""
        if self._ran and other._check is not None:
            other._check(self.graph, self._chosen_by_data())
        self._check, self._report, self._base = other._check, other._report, other._base
        self._as_torch, self._carries_16bit = other._as_torch, other._carries_16bit
        self.dynamic, self.kernels = other.dynamic, other.kernels
        self._num_reported = -1
        self.choose(other._choose, saving_less=other._saving_less, strict=other._strict)

    def forget(self) -> None:
        """Trace again from the next call on."""
        if self._entries:
            self._entries.clear()
            self._ran.clear()
            self._times_alike.clear()
            trace_again(self.model)
        self.num_calls, self._checked, self._has_run = 0, False, False

    def compile(self, module: torch.fx.GraphModule, example_inputs: list[Any]) -> Callable[..., Any]:
        """Build the replacement of a traced graph; torch.compile calls this as its backend."""
        shared = SharedGraph(module, example_inputs, self._names_in_call, self._enter)

        def run(*args: Any) -> Any:
            entry = shared.of(args)
            self._ran.append(entry)
            if entry.rivals:
                self._compare(entry, args)
            if self._observer is not None:
                self.names = names_at(self.segments, len(self._ran) - 1)
                self._observer.began()
            return entry.run.forward(*args)

        return with_room(run)

    def _names_in_call(self) -> dict[int, str]:
        """Return id -> name of each parameter and buffer in this call."""
        if self._tensor_names is None:
            self._tensor_names = tensor_names(self.model)
        return self._tensor_names

    def _enter(self, module: torch.fx.GraphModule, inputs: list[Any]) -> _Entry:
        """Read a traced graph, and rewrite it."""
        segment = read_segment(module, inputs, self._names_in_call(), self.segments)
        graph = join([segment], self.name)
        entry = _Entry(segment, graph, LoweredGraph(graph, ()), {}, segment.module)
        self._lower(entry)
        self._entries.append(entry)
        self._times_alike[graph.hash + graph.shapes_hash] += 1
        return entry

    def exported(
        self, module: torch.fx.GraphModule, inputs: list[Any], names: dict[int, str]
    ) -> torch.fx.GraphModule:
        """Build the module that an outer torch.compile or torch.export traces instead of a graph.

        `names` maps the id of each parameter and buffer among the inputs to its name.
        """
        name = type(self._model()).__name__
        segment = read_segment(module, inputs, names)
        called = {call_name(node): node for node in segment.module.graph.nodes}
        if segment.nested:
            raise not_exported(name, "it computes activations again in backward")
        if whole := called.keys() & _WHOLE_ATTENTION:
            raise not_exported(name, f"torch.compile treats {min(whole)} as one call (torch.export does not)")
        graph = join([segment], name)
        if not graph.adjustable:
            raise nothing_to_lower(self.model, graph_breaks(), graph.ops)
        if self._check is not None and torch.is_grad_enabled():
            self._check(graph, ())
        found, alone = self._lowerings(segment, graph)
        return rewrite(segment, found[alone][0], OpaqueKernels(self.kernels))

    def call(self, compiled: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """Call the model once."""
        is_autocast = self._check_autocast()
        self.num_calls += torch.is_grad_enabled()
        model = self.model
        if self.runs_as_torch:
            self._report_new_graphs()
            with without_autocast(self.device) if is_autocast else nullcontext():
                return plain_forward(model)(*args, **kwargs)
        if model.training:
            check_copies(self._copies)
        else:
            forget_copies()
        is_evaluation = self._check is not None and not torch.is_grad_enabled()
        breaks, num_skipped = graph_breaks(), num_skipped_frames()
        if self._checked or (is_evaluation and self._has_run):
            result = self._run(compiled, args, kwargs)
            if num_skipped_frames() > num_skipped:  # traces of such a frame are never used again
                self.skipped = why_skipped(model, breaks, num_skipped)
                self._num_reported = -1
            given_up = num_skipped_frames() > self._num_given_up
            if given_up and self._is_past_limit() and _has_products(self._entries):
                warn_once(
                    f"a call of {type(model).__name__} ran in FP32: another torch.compile of its class met "
                    "the recompile limit, after which torch traces no new shape; the next call is traced "
                    "anew. Raise torch._dynamo.config.recompile_limit, or compile the other with dynamic=True"
                )
                trace_again(model)
                self._num_given_up = num_skipped_frames()
            self._report_new_graphs()
            return result
        # The first call with gradients checks the plan against the model (evaluation has other operators). If
        # it fails, running statistics are restored.
        buffers = BuffersBefore(model)
        try:
            result = self._run(compiled, args, kwargs)
            if self._is_past_limit():
                buffers.restore()
                trace_again(model)
                result = self._run(compiled, args, kwargs)
            if not self._is_part and not _has_products(self._ran):
                raise nothing_to_lower(model, breaks, [op for entry in self._ran for op in entry.graph.ops])
            self.skipped, self.broken = why_skipped(model, breaks, num_skipped), why_broken(breaks)
            if self._check is not None and not is_evaluation:
                self._check(self.graph, self._chosen_by_data())
        except QSyncError:
            buffers.restore()
            raise
        self._checked, self._has_run = not is_evaluation, True
        self._report_new_graphs()
        return result

    def _chosen_by_data(self) -> Collection[str]:
        """Return the paths of layers in untraceable code, which a call may skip."""
        return {path for path, _ in self.model.named_modules() if path} if self.skipped else ()

    def _check_autocast(self) -> bool:
        """Return whether torch.autocast is on. Raises UnsupportedError if its type is not the base."""
        dtype = autocast_type(self.device)
        if self._base is not None and dtype is not None and dtype != self._base:
            raise UnsupportedError(
                f"torch.autocast is on in {dtype}, but the plan's base is {self._base}: give base={dtype!r} "
                "to qsync.hybrid, plan or wrap, or call the model outside of autocast"
            )
        return dtype is not None

    def _report_new_graphs(self) -> None:
        """Report the lowered products after the first call, and after a call with a new trace."""
        if len(self._entries) > self._num_reported:
            self._speak()

    @untraced("it speaks to the user")
    def _speak(self) -> None:
        if self._report is not None:
            self._report(self, self._num_reported < 0)
        self._num_reported = len(self._entries)
        if max(self._times_alike.values(), default=0) >= _MANY_ALIKE:
            warn_once(
                f"{self.name} was traced {_MANY_ALIKE} times for the same shapes: Python "
                "state that forward or a hook reads changes from call to call, as the length of a list does "
                "that it appends to; a trace takes seconds and its memory stays: keep that state outside of "
                "the model (TORCH_LOGS=recompiles names it)"
            )
            return
        num_traces = self._num_reported // max(len(self._ran), 1)
        if num_traces >= _MANY_TRACES:
            warn_once(
                f"{self.name} was traced {_MANY_TRACES} times, anew for shapes not seen "
                "before; it runs as planned at each, but a trace takes seconds and its memory stays: pad "
                "batches to a few lengths"
            )

    def _run(self, compiled: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        self._ran.clear()
        self._tensor_names = None
        try:
            with dynamo_settings(), without_autocast(self.device), self._tracing_shown():
                result = compiled(*args, **kwargs)
        except torch._dynamo.exc.BackendCompilerFailed as error:
            raise error.inner_exception from None
        except torch._dynamo.exc.TorchDynamoException as error:
            if isinstance(error, torch._dynamo.exc.TorchRuntimeError):
                self._run_as_torch(args, kwargs)
            raise cannot_trace(self._model(), error) from None
        note_copies()
        if not self._ran and (reason := why_untraced()):
            raise TracingError(
                f"{self.name} ran without qsync's kernels ({reason}); remove the cause, or call "
                "qsync.unwrap(model) first"
            )
        return result

    @contextmanager
    def _tracing_shown(self) -> Iterator[None]:
        """Show progress while torch traces the model again, which takes seconds."""
        with ExitStack() as shown:

            @cache
            def begin() -> None:
                title = f"qsync: tracing {self.name} anew, since inputs or its own state changed"
                shown.enter_context(shown_on_rank_zero(title))

            def show(_: CallbackArgs) -> None:
                if self._has_run:
                    begin()

            callback_handler.register_start_callback(show)
            shown.callback(callback_handler.remove_start_callback, show)
            yield

    @untraced("it looks at gradients that the tracer cannot read")
    def drops_gradients_of_other_shapes(self) -> bool:
        """Drop gradients of parameters that were resized since; return whether there were any."""
        pairs = ((p, p.grad) for p in self.model.parameters())
        stale = [p for p, gradient in pairs if gradient is not None and gradient.shape != p.shape]
        for parameter in stale:
            parameter.grad = None
        if stale:
            warn_once(
                f"gradients of {type(self._model()).__name__} from before a parameter was resized "
                "(resize_token_embeddings) are dropped: torch neither traces nor steps beside them"
            )
        return bool(stale)

    @untraced("it asks what torch has traced")
    def _is_past_limit(self) -> bool:
        """Return whether a call ran without lowered products because torch's trace limit was reached."""
        return not _has_products(self._ran) and met_recompile_limit(self.model)

    @untraced("it meets the error of a call that the tracer could not run")
    def _run_as_torch(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """Run a call in plain torch to raise its own error, such as for wrong shapes."""
        with torch.no_grad():
            try:
                plain_forward(self.model)(*args, **kwargs)
            except Exception as error:
                raise error from None

    def _rewrite(self, segment: Segment, lowered: LoweredGraph) -> torch.fx.GraphModule:
        observer = _Placed(self._observer, self) if self._observer is not None else None
        run = rewrite(segment, lowered, self.kernels, observer)
        self._copies += copies_of(run)
        return run

    def _lower(self, entry: _Entry) -> None:
        """Lower and rewrite a traced graph; where several precisions compete, the next call decides."""
        found, alone = self._lowerings(entry.segment, entry.graph)
        entry.lowered, entry.slower = found[alone]
        entry.rivals = found if len(found) > 1 else ()
        entry.run = self._rewrite(entry.segment, entry.lowered)

    def _lowerings(self, segment: Segment, graph: OpGraph) -> tuple[list[_Lowering], int]:
        """Return candidate lowerings, and the index of the one whose operators are fastest when timed alone.

        The first is as chosen. Unless `strict`, others may follow: every operator in its fastest precision,
        and, below 16 bits, torch.autocast's precisions.
        """
        chosen, saving_less = dict(self._choose(graph)), self._saving_less(graph)
        carried_16bit = self.kernels.sixteen_bit if self._carries_16bit else None

        def lowering(assignment: Mapping[str, Precision], where: str) -> _Lowering:
            slower = {
                op: f"{chosen[op]} is slower {where} (strict=True keeps it)"
                for op, precision in assignment.items() if precision != chosen[op]
            }  # fmt: skip
            return lower(graph, assignment, carried_16bit, saving_less), slower

        asked = lowering(chosen, "")
        if self._strict:
            return [asked], 0
        fast = fastest_precisions(segment, asked[0], candidates(graph, chosen, self.kernels), self.kernels)
        rivals, half = {"": chosen}, self.kernels.sixteen_bit
        if fast != chosen:
            rivals["at these shapes"] = fast
        if half is not None and not set(chosen.values()).issubset(FLOATS):
            rivals["in whole passes"] = chosen | dict(at_base(Precision(half), self.kernels)(graph))
        found = [asked, *(lowering(one, where) for where, one in rivals.items() if where)]
        return found, list(rivals.values()).index(fast)

    def _compare(self, entry: _Entry, inputs: Sequence[Any]) -> None:
        """Let whole passes over a call's inputs decide between rival lowered graphs."""
        rivals, entry.rivals = entry.rivals, ()
        number = fastest_assignment(entry.segment, [one for one, _ in rivals], inputs, self.kernels)
        if number is not None and rivals[number][0] is not entry.lowered:
            entry.lowered, entry.slower = rivals[number]
            entry.run = self._rewrite(entry.segment, entry.lowered)


def not_exported(name: str, why: str) -> UnsupportedError:
    """Return the error for a model that cannot be exported in its current state."""
    return UnsupportedError(f"{name} cannot be exported: {why}; call qsync.unwrap(model) first")
