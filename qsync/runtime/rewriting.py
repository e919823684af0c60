"""The FX pass: turn a traced segment and its lowered graph into a GraphModule.

The segment stays untouched. Nothing here decides where a cast goes: every node of the lowered graph, Cast or
Run, becomes one call, in the lowered graph's order. An operator in FP32 or BF16 is the traced call itself on
operands of that type. The exceptions:

- Products in FP32 of a CPU call the backend's kernels, unless the numbers are to be torch's to the bit.
- Convolutions, attention and embeddings in BF16 call the backend's kernels.
- Every other precision calls the backend's kernel for it.
- An operator that saves less calls the backend's operator of that form.
- An operator that another computes in its epilogue becomes no call.
- Dropout calls the backend's, which gives the same numbers.
- Norms of 16-bit values that torch takes no FP32 parameters beside call the backend's.
"""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
import torch.fx
from torch.autograd.grad_mode import _enter_inference_mode, _exit_inference_mode
from torch.utils.checkpoint import checkpoint

from qsync.backend.casts.epilogues import activation
from qsync.backend.custom_operators import OpaqueKernels
from qsync.backend.encoding import Operand
from qsync.backend.kernels.convolution.image_order import receive_in_own_order, with_own_strides
from qsync.backend.kernels.linear import DTYPES
from qsync.backend.kernels.norms import NORMS_OF_ONE_TYPE, has_bias_alone, norm
from qsync.lowering.cast_rules import runs_as_traced
from qsync.lowering.lowered_graph import FUSED, Cast, LoweredGraph, Run
from qsync.operators.precision import Precision, is_encoded
from qsync.operators.registry import EPILOGUES, PRODUCTS, REPLACED, declared
from qsync.records.graph import Op, OpGraph
from qsync.runtime.memory_order import (
    asks_for_order,
    by_rows,
    is_filter_of_open_strides,
    is_image_by_rows,
    is_registered,
    owners_of_order,
    spell_as_reshape,
    viewed,
    viewed_again,
)
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
from qsync.tracing.operator_table import call_name
from qsync.tracing.segments import Segment

_TIMED = "timed"  # name prefix of reports to an observer that only measures time
# Operand index of attention's mask, which observers do not see: a mask with a gradient has slow kernels
_MASK = 3
_NEVER_SAVED = ("add", "batch_norm")  # calls that do not save their result for backward


def rewrite(
    segment: Segment,
    lowered: LoweredGraph,
    kernels: KernelTable,
    observer: Observer | None = None,
) -> torch.fx.GraphModule:
    """Build a GraphModule that runs a segment's lowered graph.

    `lowered` covers the segment's own operators. With an observer each node reports after it ran; results are
    equal.
    """
    return _Rewriter(lowered, kernels, observer).module(segment)


def needs_kernel(op: Op, precision: Precision, kernels: KernelTable) -> bool:
    """Return whether an adjustable operator runs a backend kernel instead of the traced call."""
    if runs_as_traced(op, precision):
        return op.dtype == "fp32" and op.kind in kernels.replaced_in_fp32
    return precision is not Precision.BF16 or PRODUCTS[op.kind].has_bf16_kernel


def is_norm_of_one_type(op: Op, run: Run, node: torch.fx.Node) -> bool:
    """Return whether a call is a norm for which torch refuses FP32 parameters with 16-bit input.

    These are all norms on a GPU, and a layer_norm with only a bias.
    """
    value = node.meta.get("example_value")
    on_gpu = isinstance(value, torch.Tensor) and value.is_cuda and op.kind in NORMS_OF_ONE_TYPE
    alone = op.kind == "layer_norm" and has_bias_alone(node.args, node.kwargs)
    return (on_gpu or alone) and run.operands[0] != "fp32"


class _Rewriter:
    def __init__(self, lowered: LoweredGraph, kernels: KernelTable, observer: Observer | None) -> None:
        self._graph: OpGraph = lowered.graph
        self._kernels, self._observer = kernels, observer
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
        self._image_norms: list[torch.fx.Node] = []  # batch norms of channels-last images, in the new graph
        # (value, type) -> node of the new graph.
        self._node_of: dict[tuple[str, str], torch.fx.Node] = {}
        # Whether a kernel may return another memory order than traced.
        self._reorders = any(
            self._ops[name].role == "adjustable"
            and PRODUCTS[self._ops[name].kind].reorders
            and not runs_as_traced(self._ops[name], Precision(run.mode))
            and needs_kernel(self._ops[name], Precision(run.mode), kernels)
            for name, run in self._runs.items()
        )

    def module(self, segment: Segment) -> torch.fx.GraphModule:
        """Return the rewritten module of a segment, or of a nested graph."""
        module = torch.fx.GraphModule(segment.module, torch.fx.Graph())
        graph = module.graph
        new: dict[torch.fx.Node, torch.fx.Node] = {}
        laid_out = owners_of_order(segment) if self._reorders else set()
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
                    continue  # the body of a recomputed graph, replaced by its rewritten form
                _share(segment.module, module, str(node.target))
            if node in segment.nested:
                new[node] = self._emit_recomputed(module, segment, node, new)
            elif name is None or node.op == "placeholder":
                given = partial(self._given, node, new)
                new[node] = graph.node_copy(node, given)
            else:
                new[node] = self._emit_run(module, segment, node, self._runs[name], new)
                new[node].meta.setdefault("example_value", node.meta.get("example_value"))
            if node in laid_out:
                new[node] = graph.call_function(by_rows, (new[node],))
                new[node].meta["example_value"] = node.meta["example_value"]
            value = segment.value_of.get(node)
            if value is not None:
                self._node_of[value, self._carried[value]] = new[node]
            if name is not None:
                new[node] = self._report(module, self._runs[name], new[node], self._operands_of(name))
                self._node_of[name, self._carried[name]] = new[node]
                for cast in self._after.get(name, ()):
                    self._emit_cast(module, cast)
        _write_over(module.graph)
        for call in self._image_norms:  # after other passes: they count readers
            with graph.inserting_after(call):
                graph.call_function(receive_in_own_order, (call,))
        module.graph.lint()
        module.recompile()
        for node in module.graph.find_nodes(op="call_module"):  # calling through a module takes 2 us more
            module.__dict__[node.target] = module.get_submodule(node.target).forward
        return module

    def _returned(
        self,
        segment: Segment,
        node: torch.fx.Node,
        name: str | None,
        new: dict[torch.fx.Node, torch.fx.Node],
    ) -> Any:
        """Return the graph's outputs in their traced types and memory order.

        Convolution kernels return channels-last order, which callers do not expect. Outputs that shared
        memory when traced share it here.
        """

        def handed_out(source: torch.fx.Node) -> torch.fx.Node:
            found = self._operand(segment, name, source, new)
            return found.graph.call_function(by_rows, (found,)) if is_image_by_rows(source) else found

        found = {source: handed_out(source) for source in node.all_input_nodes}
        returned = self._sharing_memory(segment, name, found, new) if name is not None else found
        for unused in set(found.values()) - set(returned.values()):
            if not unused.users:
                unused.graph.erase_node(unused)
        return torch.fx.map_arg(node.args[0], returned.__getitem__)

    def _sharing_memory(
        self,
        segment: Segment,
        name: str,
        found: dict[torch.fx.Node, torch.fx.Node],
        new: dict[torch.fx.Node, torch.fx.Node],
    ) -> dict[torch.fx.Node, torch.fx.Node]:
        """Return the outputs, with those that shared memory when traced as views of one tensor.

        Separate casts would not share memory, but callers may write to one and read the other.
        """
        returned, groups = dict(found), dict[torch.fx.Node, list[torch.fx.Node]]()
        for source in found:
            groups.setdefault(viewed(segment, source), []).append(source)
        for base, sources in groups.items():
            is_cast = any(self._operand(segment, name, source, new) is not new[source] for source in sources)
            if len(sources) == 1 or not (is_cast or self._reorders):
                continue
            views = {base: found[base] if base in found else self._as_traced(segment, base, new)}
            for source in sources:
                returned[source] = viewed_again(source, base, views, new)
        return returned

    def _as_traced(
        self, segment: Segment, node: torch.fx.Node, new: dict[torch.fx.Node, torch.fx.Node]
    ) -> torch.fx.Node:
        """Return a node's value in its traced type and memory order."""
        found, traced = new[node], node.meta["example_value"]
        carried = DTYPES.get(self._carried.get(segment.value_of.get(node, ""), ""), traced.dtype)
        if carried != traced.dtype:
            found = found.graph.call_method("to", (found, traced.dtype))
        return found.graph.call_function(by_rows, (found,)) if is_image_by_rows(node) else found

    def _emit_cast(self, module: torch.fx.GraphModule, cast: Cast, trains: bool = True) -> None:
        """Add the call of a cast; `trains` tells whether the operator beside it has a backward."""
        source = self._node_of[cast.value, cast.source]
        # An input's first reader may run in no_grad() or inference_mode(), and a later one may train.
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
        self._node_of[cast.value, cast.target] = self._report(module, cast, node, [source])

    def _is_replaced(self, op: Op, run: Run) -> bool:
        """Return whether a kernel for lowered graphs replaces the traced call."""
        if op.kind in REPLACED:
            return not run.as_traced
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
        if run.form == FUSED:  # the product has already computed it
            return self._node_of[op.inputs[0], run.operands[0]]
        native = op.role != "adjustable" or not needs_kernel(op, Precision(run.mode), self._kernels)

        def operand(source: torch.fx.Node) -> Any:
            taken = self._operand(segment, run.op, source, new)
            if native and call_name(node) == "as_strided" and (self._reorders or taken is not new[source]):
                base = viewed(segment, source)  # it reads the base's memory, not that of a copied part
                return viewed_again(source, base, {base: self._as_traced(segment, base, new)}, new)
            if native and self._reorders and asks_for_order(op, node):
                return self._in_order(source, taken)
            is_filter = op.kind == "conv2d" and is_filter_of_open_strides(node, source)
            spreads = run.channels_last and declared(op.kind).gradient_by_rows
            if native and self._reorders and (is_filter or spreads):
                taken = module.graph.call_function(with_own_strides, (taken,))
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
            if callable(node.target) and is_norm_of_one_type(op, run, node):
                call = _call(module, op.kind, FollowingCall(norm, node.target), args, kwargs)
            else:
                call = module.graph.create_node(node.op, node.target, args, kwargs, type_expr=node.type)
                spell_as_reshape(call)
            is_traced_again = isinstance(self._kernels, OpaqueKernels)  # tensors have no hooks there
            if run.channels_last and op.kind == "batch_norm" and not is_traced_again:
                self._image_norms.append(call)
            call.meta = dict(node.meta)
            return call
        product = KernelCall(self._kernels, op.kind, run, target)
        return _call(module, f"{op.kind}_{run.mode}", product, args, kwargs)

    def _given(
        self, reader: torch.fx.Node, new: dict[torch.fx.Node, torch.fx.Node], source: torch.fx.Node
    ) -> torch.fx.Node:
        """Return the node for an argument of a call that is not an operator."""
        if self._reorders and is_registered(reader):
            return self._in_order(source, new[source])
        return new[source]

    @staticmethod
    def _in_order(source: torch.fx.Node, taken: torch.fx.Node) -> torch.fx.Node:
        """Return an operand in its traced memory order if that was row-major."""
        return taken.graph.call_function(by_rows, (taken,)) if is_image_by_rows(source) else taken

    def _arguments(self, segment: Segment, node: torch.fx.Node) -> dict[str, Any]:
        """Return the arguments, beside the value, of the call computed in this node's epilogue."""
        ran = {user: self._runs[segment.op_of[user]] for user in node.users if user in segment.op_of}
        follower = next(user for user, run in ran.items() if run.form == FUSED)
        positional = zip(("inplace",), follower.args[1:], strict=False)  # for relu; gelu has none
        named = [(name, value) for name, value in follower.kwargs.items() if value is not node]
        return dict([*positional, *named])

    def _operand(
        self,
        segment: Segment,
        name: str | None,
        source: torch.fx.Node,
        new: dict[torch.fx.Node, torch.fx.Node],
    ) -> torch.fx.Node:
        """Return the node for `source` in operator `name`'s operand type."""
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
        kinds = {value.name: value for value in self._graph.inputs}
        is_reentrant = node.kwargs.get("use_reentrant") is not False
        bound = []
        for place, source in enumerate(node.args[1:]):
            value = kinds.get(segment.value_of.get(source, "")) if isinstance(source, torch.fx.Node) else None
            if value is not None and value.kind != "batch" and not (is_reentrant and value.requires_grad):
                bound.append(place)
        return module.graph.call_function(recomputed, (body, tuple(bound), *args), dict(node.kwargs))

    def _operands_of(self, name: str) -> list[torch.fx.Node]:
        """Return the nodes for an operator's inputs in its operand types."""
        keys = zip(self._ops[name].inputs, self._runs[name].operands, strict=True)
        return [node for node in map(self._node_of.get, keys) if node is not None]

    def _report(
        self,
        module: torch.fx.GraphModule,
        ran: Cast | Run,
        result: torch.fx.Node,
        operands: list[torch.fx.Node],
    ) -> torch.fx.Node:
        """Add a report to the observer, if any, about a finished node; return the result's node."""
        if self._observer is None:
            return result
        report = Report(self._observer, ran)
        if self._only_times:
            # Outside of the dataflow, so the graph runs unchanged
            _call(module, _TIMED, report, (result,), {})
            return result
        # Values that cross into a checkpointed graph belong to another graph.
        shown = [node for node in operands if node.graph is module.graph]
        node = _call(module, "report", report, (result, *shown), {})
        node.meta = dict(result.meta)
        return node


def recomputed(body: torch.nn.Module, bound: tuple[int, ...], *args: Any, **options: Any) -> Any:
    """Run a body under checkpoint, binding the arguments at positions `bound` in a closure.

    Bound arguments are buffers and parameters. `checkpoint` would save them with their versions, and a norm
    that updates its statistics would fail in backward.
    """

    def run(*others: Any) -> Any:
        rest = iter(others)
        return body(*(value if place in bound else next(rest) for place, value in enumerate(args)))

    return checkpoint(run, *(value for place, value in enumerate(args) if place not in bound), **options)


def _write_over(graph: torch.fx.Graph) -> None:
    """Let a traced in-place ReLU overwrite a sum or batch norm without other readers.

    Their backward does not read the result. A separate result would cost page faults.
    """
    for node in graph.nodes:
        if node.meta.get(WAS_IN_PLACE) and node.target is torch.nn.functional.relu:
            (source,) = node.all_input_nodes
            readers = [user for user in source.users if not str(user.target).startswith(_TIMED)]
            if len(readers) == 1 and source.op != "call_module" and call_name(source) in _NEVER_SAVED:
                node.args, node.kwargs = (source,), {"inplace": True}


def _share(source: torch.fx.GraphModule, target: torch.fx.GraphModule, name: str) -> None:
    """Copy `source`'s constant, or body of a higher-order call, of this name to `target`."""
    value = getattr(source, name)
    if isinstance(value, torch.Tensor):
        target.register_buffer(name, value)
    else:
        setattr(target, name, value)


def _attach(module: torch.fx.GraphModule, stem: str, child: torch.nn.Module) -> str:
    """Add a submodule under an unused name."""
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
