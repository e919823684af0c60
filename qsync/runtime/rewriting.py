"""The FX pass: a traced segment and its lowered graph -> a GraphModule that runs it, node for node.

The segment stays untouched. Nothing here decides where a cast goes: every node of the lowered graph, Cast or
Run, becomes one call, in the lowered graph's order. An operator in FP32 or BF16 is the traced call itself on
operands of that type. The exceptions:

- Convolutions, attention and embeddings in BF16 call the backend's kernels.
- Every other precision calls the backend's kernel for it.
- An operator that saves less calls the backend's operator of that form.
- An operator that another computes in its epilogue becomes no call.
- Dropout calls the backend's, which gives the same numbers.
- Norms of 16-bit values on GPUs call the backend's, which rounds their parameters.
"""

from __future__ import annotations

from itertools import pairwise
from typing import Any

import torch
import torch.fx
from torch.autograd.grad_mode import _enter_inference_mode, _exit_inference_mode
from torch.utils.checkpoint import checkpoint

from qsync.backend.casts.epilogues import activation
from qsync.backend.encoding import Operand
from qsync.backend.kernels.linear import DTYPES
from qsync.backend.kernels.norms import NORMS_OF_ONE_TYPE, norm
from qsync.lowering.cast_rules import runs_as_traced
from qsync.lowering.lowered_graph import EPILOGUES, FUSED, REPLACED, Cast, LoweredGraph, Run
from qsync.records.graph import Op, OpGraph
from qsync.records.precision import Precision, is_encoded
from qsync.runtime.islands import PURE, REPORTS, form_islands, note_conversion, pure_kind
from qsync.runtime.node_calls import (
    CastCall,
    FollowingCall,
    KernelCall,
    KernelTable,
    Observer,
    Report,
    Taken,
)
from qsync.runtime.weight_cache import WeightCast
from qsync.tracing.inplace_calls import WAS_IN_PLACE
from qsync.tracing.operator_table import call_name, names_a_type
from qsync.tracing.segments import Segment

_TIMED = "timed"  # begins the names of reports to an observer that only takes times
_MASK = 3  # the operand of attention that observers do not take: a mask with a gradient has slow kernels
_NEVER_SAVED = ("add", "batch_norm")  # calls that do not save their result for backward
# Kinds that have a kernel for BF16; others run the traced call on BF16 operands.
_KINDS_WITH_BF16_KERNEL = (
    "conv1d", "conv2d", "conv3d", "conv_transpose", "attention", "embedding", "grouped_mm",
)  # fmt: skip


def rewrite(
    segment: Segment,
    lowered: LoweredGraph,
    kernels: KernelTable,
    observer: Observer | None = None,
    compile_islands: bool = False,
) -> torch.fx.GraphModule:
    """Build a GraphModule that computes the segment as the lowered graph says.

    `lowered` is the lowering of the segment's own operators. With an observer each node reports after it ran;
    the numbers are the same. With `compile_islands` what stands between products is compiled (see `islands`).
    """
    compile_islands &= observer is None or hasattr(observer, "seen_together")
    return _Rewriter(lowered, kernels, observer, compile_islands).module(segment)


def needs_kernel(op: Op, precision: Precision) -> bool:
    """Return whether an adjustable operator runs through a kernel of the backend, not the traced call."""
    if runs_as_traced(op, precision):
        return False
    return precision is not Precision.BF16 or op.kind in _KINDS_WITH_BF16_KERNEL


def is_norm_on_gpu(op: Op, run: Run, node: torch.fx.Node) -> bool:
    """Return whether a call is a norm of 16-bit values on a GPU, where torch takes no FP32 parameters."""
    value = node.meta.get("example_value")
    on_gpu = isinstance(value, torch.Tensor) and value.is_cuda
    return on_gpu and op.kind in NORMS_OF_ONE_TYPE and run.operands[0] != "fp32"


class _Rewriter:
    def __init__(
        self, lowered: LoweredGraph, kernels: KernelTable, observer: Observer | None, compile_islands: bool
    ) -> None:
        self._graph: OpGraph = lowered.graph
        self._kernels, self._observer, self._compile_islands = kernels, observer, compile_islands
        self._watched = hasattr(observer, "taken")
        self._only_times = getattr(observer, "only_times", False)
        self._ops = {op.name: op for op in lowered.graph.ops}
        self._runs: dict[str, Run] = {}
        self._before: dict[str, list[Cast]] = {}
        self._after: dict[str, list[Cast]] = {}
        self._carried = {value.name: value.dtype for value in lowered.graph.inputs}
        inputs = set(self._carried)
        self._trained = {name for op in lowered.graph.ops if op.requires_grad for name in op.inputs}
        pending: list[Cast] = []
        for node in lowered.nodes:
            if isinstance(node, Run):
                self._runs[node.op], self._before[node.op], pending = node, pending, []
                self._carried[node.op] = node.output
            elif node.value in inputs:
                pending.append(node)
            else:
                self._after.setdefault(node.value, []).append(node)
        # Where each value stands in the new graph, as it is carried and as it was cast.
        self._node_of: dict[tuple[str, str], torch.fx.Node] = {}

    def module(self, segment: Segment) -> torch.fx.GraphModule:
        """Return the rewritten module of a segment, or of a graph nested in it."""
        module = torch.fx.GraphModule(segment.module, torch.fx.Graph())
        graph = module.graph
        new: dict[torch.fx.Node, torch.fx.Node] = {}
        for node in segment.module.graph.nodes:
            name = segment.op_of.get(node)
            if name is not None:
                for cast in self._before.get(name, ()):
                    self._emit_cast(module, cast, trains=self._ops[name].requires_grad)
            if node.op == "output":
                graph.output(self._returned(segment, node, name, new))
                continue
            if node.op == "get_attr":
                if all(user in segment.nested for user in node.users):
                    continue  # the body of a recomputed graph: its rewritten form takes its place
                _share(segment.module, module, str(node.target))
            if node in segment.nested:
                new[node] = self._emit_recomputed(module, segment, node, new)
            elif name is None or node.op == "placeholder":
                new[node] = graph.node_copy(node, lambda n: new[n])
            else:
                new[node] = self._emit_run(module, segment, node, self._runs[name], new)
                new[node].meta.setdefault("example_value", node.meta.get("example_value"))
            value = segment.value_of.get(node)
            if value is not None:
                self._node_of[value, self._carried[value]] = new[node]
            if name is not None:
                computed = self._ops[name].num_elements * (self._ops[name].kind != "view")
                operands = self._operands_of(name)
                new[node] = self._report(module, self._runs[name], new[node], operands, computed)
                self._node_of[name, self._carried[name]] = new[node]
                for cast in self._after.get(name, ()):
                    self._emit_cast(module, cast)
        # A write keeps its place only among calls that keep theirs.
        if self._compile_islands and not segment.written:
            form_islands(module, self._observer)
        _write_over(module.graph)
        module.graph.lint()
        module.recompile()
        for node in module.graph.find_nodes(op="call_module"):  # a call of the module itself takes 2 us more
            module.__dict__[node.target] = module.get_submodule(node.target).forward
        return module

    def _returned(
        self,
        segment: Segment,
        node: torch.fx.Node,
        name: str | None,
        new: dict[torch.fx.Node, torch.fx.Node],
    ) -> Any:
        """Return the outputs of the graph in the types that they were traced in, by rows where they lay so.

        Kernels of convolutions return channels-last order, which callers of the graph do not expect, of parts
        and views of images neither.
        """

        def handed_out(source: torch.fx.Node) -> torch.fx.Node:
            found = self._operand(segment, name, source, new)
            traced = source.meta.get("example_value")
            if not isinstance(traced, torch.Tensor) or traced.ndim < 3 or not lies_by_rows(traced):
                return found
            return found.graph.call_function(by_rows, (found,))

        return torch.fx.map_arg(node.args[0], handed_out)

    def _emit_cast(self, module: torch.fx.GraphModule, cast: Cast, trains: bool = True) -> None:
        """Add the call of a cast; `trains` says whether the operator beside it has a backward."""
        source = self._node_of[cast.value, cast.source]
        # The first reader of an input may run in no_grad() or inference_mode(), and a later one train.
        outside = None
        if not trains and cast.value in self._trained:
            outside = module.graph.call_function(_enter_inference_mode, (False,))
        is_kept = cast.of_parameter and self._kernels.keeps_copies
        is_tensor = isinstance(source.meta.get("example_value"), torch.Tensor)
        if not is_kept and is_tensor and cast.target in self._kernels.plain_casts:
            node = module.graph.call_method("to", (source, DTYPES[cast.target]))
        else:
            call = (WeightCast if is_kept else CastCall)(self._kernels.cast, cast.target)
            node = _call(module, f"cast_{cast.target}", call, (source,), {})
        if outside is not None:
            module.graph.call_function(_exit_inference_mode, (outside,))
        else:
            note_conversion(node, source, cast.target)
        node = self._report(module, cast, node, [source], cast.num_elements)
        self._node_of[cast.value, cast.target] = node

    def _is_replaced(self, op: Op, run: Run) -> bool:
        """Return whether a kernel of lowered graphs stands in for the traced call."""
        if op.kind in REPLACED:
            return not run.as_traced
        if self._compile_islands and op.role != "adjustable":
            return False  # Inductor compiles it with its neighbours
        return run.mode == Precision.BF16 and op.dtype != "bf16" and op.kind in self._kernels.replaced_in_bf16

    def _emit_run(
        self,
        module: torch.fx.GraphModule,
        segment: Segment,
        node: torch.fx.Node,
        run: Run,
        new: dict[Any, torch.fx.Node],
    ) -> torch.fx.Node:
        op = self._ops[run.op]
        if run.form == FUSED:  # the product has computed it
            return self._node_of[op.inputs[0], run.operands[0]]
        native = op.role != "adjustable" or not needs_kernel(op, Precision(run.mode))

        def operand(source: torch.fx.Node) -> Any:
            taken = self._operand(segment, run.op, source, new)
            value = segment.value_of.get(source)
            if self._watched and run.mode == "fp32" and op.role == "adjustable" and value in op.inputs:
                index = op.inputs.index(value)
                if op.kind == "attention" and index >= _MASK:
                    return taken
                return _call(module, "taken", Taken(self._observer, op.name, index), (taken,), {})
            if native or value not in op.inputs or not is_encoded(run.operands[op.inputs.index(value)]):
                return taken
            return Operand(self._node_of[value, self._carried[value]], taken)  # type: ignore[arg-type]  # nodes

        args = torch.fx.map_arg(node.args, operand)
        kwargs = torch.fx.map_arg(node.kwargs, operand)
        target = getattr(torch.Tensor, node.target) if isinstance(node.target, str) else node.target
        if run.form in EPILOGUES:
            computed = activation(run.form, **self._arguments(segment, node))
            both = KernelCall(self._kernels, op.kind, run, target, computed)
            return _call(module, f"{op.kind}_{run.mode}_{run.form}", both, args, kwargs)
        if run.form != "plain":
            saving = FollowingCall(self._kernels.saving(op.kind, run.form), target)
            return _call(module, f"{op.kind}_{run.form}", saving, args, kwargs)
        if native and self._is_replaced(op, run) and callable(node.target):
            following = FollowingCall(self._kernels.in_lowered_graphs(op.kind), node.target)
            return _call(module, op.kind, following, args, kwargs)
        if native:
            if callable(node.target) and is_norm_on_gpu(op, run, node):
                call = _call(module, op.kind, FollowingCall(norm, node.target), args, kwargs)
            else:
                if call_name(node) == "as_strided" and lies_by_rows(
                    node.all_input_nodes[0].meta["example_value"]
                ):
                    args = (module.graph.call_function(by_rows, (args[0],)), *args[1:])
                # A view asks for an order of elements that a convolution's result may not have here.
                named = "reshape" if node.target == "view" and not names_a_type(node) else node.target
                call = module.graph.create_node(node.op, named, args, kwargs, type_expr=node.type)
            call.meta = dict(node.meta)
            if self._compile_islands and (kind := pure_kind(op, node)):
                call.meta[PURE] = kind
            return call
        product = KernelCall(self._kernels, op.kind, run, target)
        return _call(module, f"{op.kind}_{run.mode}", product, args, kwargs)

    def _arguments(self, segment: Segment, node: torch.fx.Node) -> dict[str, Any]:
        """Return the arguments, beside the value, of the call that this node computes in its epilogue."""
        ran = {user: self._runs[segment.op_of[user]] for user in node.users if user in segment.op_of}
        follower = next(user for user, run in ran.items() if run.form == FUSED)
        positional = zip(("inplace",), follower.args[1:], strict=False)  # relu's; gelu has none
        named = [(name, value) for name, value in follower.kwargs.items() if value is not node]
        return dict([*positional, *named])

    def _operand(
        self,
        segment: Segment,
        name: str | None,
        source: torch.fx.Node,
        new: dict[torch.fx.Node, torch.fx.Node],
    ) -> torch.fx.Node:
        """Return the node that stands for `source` in the type that operator `name` takes."""
        value = segment.value_of.get(source)
        if name is None or value is None or value not in self._ops[name].inputs:
            return new[source]
        taken = self._runs[name].operands[self._ops[name].inputs.index(value)]
        return self._node_of[value, taken] if taken != self._carried[value] else new[source]

    def _emit_recomputed(
        self,
        module: torch.fx.GraphModule,
        segment: Segment,
        node: torch.fx.Node,
        new: dict[torch.fx.Node, torch.fx.Node],
    ) -> torch.fx.Node:
        inner = self.module(segment.nested[node])
        name = _attach(module, "checkpointed", inner)
        body = module.graph.get_attr(name)
        args = torch.fx.map_arg(node.args[1:], lambda n: new[n])
        return module.graph.call_function(checkpoint, (body, *args), dict(node.kwargs))

    def _operands_of(self, name: str) -> list[torch.fx.Node]:
        """Return the nodes that stand for an operator's inputs in the types that it takes."""
        keys = zip(self._ops[name].inputs, self._runs[name].operands, strict=True)
        return [node for node in map(self._node_of.get, keys) if node is not None]

    def _report(
        self,
        module: torch.fx.GraphModule,
        ran: Cast | Run,
        result: torch.fx.Node,
        operands: list[torch.fx.Node],
        num_elements: int,
    ) -> torch.fx.Node:
        """Show the observer, if there is one, a node that has run; return what stands for its result."""
        if self._observer is None:
            return result
        report = Report(self._observer, ran)
        if self._only_times and not self._compile_islands:  # a report is a part of its island
            _call(module, _TIMED, report, (result,), {})  # beside the graph, which runs as if nobody looked
            return result
        # What crosses the border of a checkpointed graph is a node of the other graph.
        shown = [node for node in operands if node.graph is module.graph and not self._only_times]
        node = _call(module, "report", report, (result, *shown), {})
        node.meta = {**result.meta, REPORTS: (ran, num_elements)}
        return node


def lies_by_rows(value: torch.Tensor) -> bool:
    """Return whether no dimension of a tensor has a larger stride than one before it."""
    strides = [stride for size, stride in zip(value.shape, value.stride(), strict=True) if size != 1]
    return all(outer >= inner for outer, inner in pairwise(strides))


def by_rows(value: torch.Tensor) -> torch.Tensor:
    """Return a tensor that lies by rows: itself, or a contiguous copy."""
    return value if lies_by_rows(value) else value.contiguous()


def _write_over(graph: torch.fx.Graph) -> None:
    """Let a ReLU that was traced in place overwrite a sum or a batch norm that nothing else reads.

    The backward of neither reads its result. A result of its own would cost a ReLU fresh pages of memory.
    """
    for node in graph.nodes:
        if node.meta.get(WAS_IN_PLACE) and node.target is torch.nn.functional.relu:
            (source,) = node.all_input_nodes
            readers = [user for user in source.users if not str(user.target).startswith(_TIMED)]
            if len(readers) == 1 and source.op != "call_module" and call_name(source) in _NEVER_SAVED:
                node.args, node.kwargs = (source,), {"inplace": True}


def _share(source: torch.fx.GraphModule, target: torch.fx.GraphModule, name: str) -> None:
    """Let `target` have the constant, or the body of a higher-order call, that `source` calls `name`."""
    value = getattr(source, name)
    if isinstance(value, torch.Tensor):
        target.register_buffer(name, value)
    else:
        setattr(target, name, value)


def _attach(module: torch.fx.GraphModule, stem: str, child: torch.nn.Module) -> str:
    """Add a submodule under a free name."""
    count = sum(name.startswith(stem) for name in module._modules)
    name = f"{stem}_{count}"
    module.add_submodule(name, child)
    return name


def _call(
    module: torch.fx.GraphModule,
    stem: str,
    child: torch.nn.Module,
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
) -> torch.fx.Node:
    return module.graph.call_module(_attach(module, stem, child), args, kwargs)
