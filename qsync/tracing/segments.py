"""Segments: traced torch.fx graphs, converted to operators, and joined into one OpGraph.

A model is traced as one graph, or as several if Python code between operators cannot be traced (graph
breaks). Each graph is a `Segment`; `join` joins them into one OpGraph in their execution order. Activation
checkpointing is a graph inside a graph; its operators are listed like all others.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
import torch.fx
from torch._C._functorch import is_functorch_wrapped_tensor

from qsync.errors import UnsupportedError
from qsync.operators.declaration import Role
from qsync.operators.norms import BATCH_NORM, FROZEN_BATCH_NORM
from qsync.operators.precision import LARGEST
from qsync.operators.registry import PRODUCTS, declared, reads_fp32
from qsync.records.graph import Derivative, Input, Op, OpGraph
from qsync.tracing.counted_calls import Counted, counted, counted_flops
from qsync.tracing.inplace_calls import make_out_of_place
from qsync.tracing.module_names import argument_name, module_place, operator_name, roots_of
from qsync.tracing.operator_table import (
    bare_name,
    bodies_of,
    call_name,
    classify,
    draws,
    dropped,
    flops,
    flops_of_unwritten,
    is_dilated,
    large_constants,
    named_operands,
    names_a_type,
    operands,
    traced_shape,
    traced_type,
    why_traced_as_is,
)
from qsync.tracing.traced_tensors import copies, example_of, is_channels_last

_CHECKPOINT = "tag_activation_checkpoint"
_SIZES = ("size", "dim", "numel")  # calls that read a tensor's shape only
# Calls that enter and leave a level of torch.vmap or another torch.func transform.
_ENTER_LEVEL = (
    "_vmap_increment_nesting", "_grad_increment_nesting", "_jvp_increment_nesting", "_enter_dual_level",
)  # fmt: skip
_LEAVE_LEVEL = (
    "_vmap_decrement_nesting", "_grad_decrement_nesting", "_jvp_decrement_nesting", "_exit_dual_level",
)  # fmt: skip


@dataclass(slots=True)
class Segment:
    """One traced graph: a private copy of the module, with the operator or value of each node.

    `nested` maps a node that calls a checkpointed graph to that graph's Segment. `counts` has the number of
    uses of each name, in this and earlier segments.
    """

    module: torch.fx.GraphModule
    ops: list[Op] = field(default_factory=list)
    inputs: list[Input] = field(default_factory=list)
    op_of: dict[torch.fx.Node, str] = field(default_factory=dict)
    value_of: dict[torch.fx.Node, str] = field(default_factory=dict)
    nested: dict[torch.fx.Node, Segment] = field(default_factory=dict)
    output_values: list[str | None] = field(default_factory=list)
    counts: dict[str, int] = field(default_factory=dict)


def join(segments: Sequence[Segment], model: str) -> OpGraph:
    """Join the segments of one call, in execution order, into one OpGraph.

    A segment that ran twice (its layer was called twice, or has no weights) would share one precision in all
    runs, so its operators are fixed. Names of later runs begin with the position of the run.
    """
    inputs: dict[str, Input] = {}
    ops: list[Op] = []
    runs = Counter(id(segment) for segment in segments)
    for place, segment in enumerate(segments):
        renamed = names_at(segments, place)
        for value in segment.inputs:
            name = renamed.get(value.name, value.name)
            inputs.setdefault(name, replace(value, name=name))
        for op in segment.ops:
            role, because = op.role, op.fixed_because
            if runs[id(segment)] > 1 and role is Role.ADJUSTABLE:
                role = Role.FIXED
                because = "its traced graph runs more than once in a step, on the same weights"
            name = renamed.get(op.name, op.name)
            reads, kept = (tuple(renamed.get(v, v) for v in values) for values in (op.inputs, op.kept))
            ops.append(replace(op, name=name, role=role, inputs=reads, kept=kept, fixed_because=because))
    return OpGraph(model, tuple(inputs.values()), tuple(ops), len(segments))


def names_at(segments: Sequence[Segment], place: int) -> dict[str, str]:
    """Return old -> new names of a segment's operators and inputs, if it ran before in the call."""
    here = segments[place]
    if not any(segment is here for segment in segments[:place]):
        return {}
    own = [op.name for op in here.ops] + [value.name for value in here.inputs if value.kind == "batch"]
    return {name: f"segment{place + 1}:{name}" for name in own}


def read_segment(
    module: torch.fx.GraphModule,
    example_inputs: list[Any],
    names: dict[int, str],
    earlier: Sequence[Segment] = (),
) -> Segment:
    """Convert one traced graph to a segment.

    `names` maps the id of each parameter and buffer to its name. `earlier` are the segments before it in the
    same call, whose names are taken. Raises UnsupportedError for tensor-parallel parameters.
    """
    if any(type(value).__name__ == "DTensor" for value in example_inputs):
        raise UnsupportedError(
            "the model has tensor-parallel parameters (DTensor), which qsync has no kernels for: wrap the "
            "modules that are not parallelized, or shard with fully_shard instead"
        )
    private = copy_of(module)
    reader = _Reader(names, earlier)
    segment = Segment(private)
    placeholders = [node for node in private.graph.nodes if node.op == "placeholder"]
    for node, value in zip(placeholders, example_inputs, strict=True):
        if isinstance(value, torch.Tensor):
            reader.enter(segment, node, value)
    reader.roots = roots_of(private.graph, segment.value_of)
    reader.read(segment)
    segment.inputs = list(reader.inputs.values())
    segment.ops = reader.ops
    segment.counts = dict(reader.count)
    return segment


@dataclass(frozen=True, slots=True)
class _Call:
    """A converted call: its operand values (`read`), uncast values (`kept`), and result."""

    name: str
    kind: str
    role: Role
    read: list[str]
    value: torch.Tensor
    kept: Sequence[str] = ()
    magnitude: float = 0.0
    because: str = ""


class _Reader:
    """A converter of a segment, and of the graphs nested in it, to operators and values."""

    def __init__(self, names: dict[int, str], earlier: Sequence[Segment]) -> None:
        self.names = names
        self.roots: dict[str, str] = {}
        self.inputs: dict[str, Input] = {}
        self.ops: list[Op] = []
        self.count = Counter(set(names.values()))  # a buffer may have an operator's name, as `mean`
        for segment in earlier:
            self.count |= Counter(segment.counts)
        self._place = len(earlier) + 1
        self._entered = {value.name for segment in earlier for value in segment.inputs}
        self._dtype: dict[str, str] = {}
        self._shape: dict[str, tuple[int, ...]] = {}
        self._magnitude: dict[str, float] = {}
        # The user's data, possibly reshaped, whose numbers are unknown while tracing.
        self._given: set[str] = set()
        self._depth: dict[str, int] = {}
        # Nodes that depend on parameters, constants and sizes only, not on the batch's numbers.
        self._apart: set[torch.fx.Node] = set()
        self._num_levels = 0  # levels of torch.vmap and torch.func around the current node

    def enter(self, segment: Segment, node: torch.fx.Node, value: torch.Tensor) -> None:
        """Record an input tensor of the outermost graph."""
        name = self.names.get(id(value))
        if name is None:
            prefix = f"segment{self._place}:" if self._place > 1 else ""
            kind, name = "batch", self._unique(f"{prefix}input:{argument_name(node.name)}")
        else:
            kind = "parameter" if isinstance(value, torch.nn.Parameter) else "buffer"
            if name in self._entered:  # each segment casts its own parameters
                kind, name = "alias" if kind == "parameter" else kind, f"{name}@segment{self._place}"
        order = is_channels_last(value)
        self._declare(Input(name, kind, traced_type(value), traced_shape(value), value.requires_grad, order))
        segment.value_of[node] = name
        if kind != "batch":
            self._apart.add(node)

    def read(self, segment: Segment, nested: bool = False) -> None:
        """Convert every node of a segment, in order."""
        written = make_out_of_place(segment.module.graph)
        pinned = written | {user for node in written for user in node.users}
        for node in segment.module.graph.nodes:
            if self._is_apart(node, written):
                self._apart.add(node)
            if node.op == "get_attr":
                self._read_constant(segment, node)
            elif node.op in ("call_function", "call_method"):
                self._num_levels += (call_name(node) in _ENTER_LEVEL) - (call_name(node) in _LEAVE_LEVEL)
                if str(node.target).endswith(_CHECKPOINT):
                    self._read_nested(segment, node)
                elif (value := example_of(node)) is not None and node.args and node.args[0] in segment.nested:
                    self._read_result(segment, node, value)
                elif value is not None:
                    self._read_call(segment, node, value, pinned)
            elif node.op == "output":
                self._read_output(segment, node, nested)
        self._expose(segment)
        segment.module.recompile()

    def _is_apart(self, node: torch.fx.Node, written: set[torch.fx.Node]) -> bool:
        """Return whether a node is independent of the batch's numbers and of random draws."""
        if node.op == "placeholder":  # tensors are classified by `enter`; other placeholders are sizes
            return node in self._apart or not isinstance(node.meta.get("example_value"), torch.Tensor)
        if node.op == "get_attr":
            return True
        if node.op == "output" or node in written or draws(node, classify(node)[0]):
            return False
        is_size = call_name(node) in _SIZES
        return is_size or all(source in self._apart for source in node.all_input_nodes)

    def _expose(self, segment: Segment) -> None:
        """Mark operators whose results are read by other calls than operators (`setitem`, RNN, `item`)."""
        exposed = {
            name
            for node, name in segment.op_of.items()
            if any(self._is_unseen(segment, user) for user in node.users)
        }
        self.ops = [replace(op, exposed=True) if op.name in exposed else op for op in self.ops]

    @staticmethod
    def _is_unseen(segment: Segment, node: torch.fx.Node) -> bool:
        known = node in segment.op_of or node in segment.nested or node.op == "output"
        return not known and call_name(node) not in _SIZES

    def _declare(self, value: Input) -> None:
        self.inputs.setdefault(value.name, value)
        self._dtype[value.name], self._shape[value.name] = value.dtype, value.shape
        if value.kind in ("batch", "buffer"):
            self._given.add(value.name)

    def _read_constant(self, segment: Segment, node: torch.fx.Node) -> None:
        value = node.meta.get("example_value")
        if isinstance(value, torch.Tensor):
            name = f"constant:{node.name}"
            self._declare(Input(name, "buffer", traced_type(value), traced_shape(value)))
            segment.value_of[node] = name

    def _read_call(
        self, segment: Segment, node: torch.fx.Node, value: torch.Tensor, pinned: set[torch.fx.Node]
    ) -> None:
        kind, role = classify(node)
        if kind == "matmul" and "mat2" in node.kwargs:  # only bmm and mm name an operand mat2
            named = dict(node.kwargs)
            node.args = (*node.args, *(named.pop(name) for name in ("input", "mat2") if name in named))
            node.kwargs = named
        if kind == "dropout" and not dropped(node, kind):
            kind = "view"  # it returns its input
        read = [segment.value_of[o] for o in operands(node, kind) if o in segment.value_of]
        everything = [segment.value_of[o] for o in node.all_input_nodes if o in segment.value_of]
        kept = [name for name in dict.fromkeys(everything) if name not in read]
        if declared(kind).is_norm:
            # Parameters and statistics are kept uncast. Scales computed by the model (adaptive norms) are
            # operands.
            kept = [name for name in read[1:] if name in self.inputs]
            read = [name for name in read if name not in kept]
        magnitude = max([self._magnitude.get(name, 0.0) for name in everything], default=0.0)
        if role is not Role.ADJUSTABLE:
            magnitude = max([magnitude, *large_constants(node)])
        because = ""
        if role is not Role.FIXED:
            if node in pinned:
                because = "it is written to in place, or reads what is"
            elif names_a_type(node):
                because = "its author asked for a type"
            else:
                because = self._why_fixed(read, value, kind, role, magnitude, node)
            role = Role.FIXED if because else role
        label = (
            BATCH_NORM.kind if kind == FROZEN_BATCH_NORM.kind else kind
        )  # same name in training and evaluation
        name = self._name(node, bare_name(node).strip("_") if kind == "other" else label)
        if kind in ("view", "contiguous", "clone", "float") and set(everything) <= self._given:
            self._given.add(name)
        self._add(segment, node, _Call(name, kind, role, read, value, kept, magnitude, because))

    def _is_float(self, name: str) -> bool:
        return self._dtype[name] in LARGEST

    def _why_fixed(
        self,
        read: list[str],
        value: torch.Tensor,
        kind: str,
        role: Role,
        magnitude: float,
        node: torch.fx.Node,
    ) -> str:
        """Return why an operator's tensors fix it to its traced type; empty if they do not."""
        types = [
            dtype
            for dtype in [*(self._dtype[name] for name in read), traced_type(value)]
            if dtype in (*LARGEST, "complex64")
        ]
        other = next((dtype for dtype in types if dtype != "fp32"), None)
        in_bf16 = role is Role.ADJUSTABLE and not reads_fp32(kind) and set(types) == {"bf16"}
        if other is not None and not in_bf16:  # the author's choice of type
            return f"the model has it in {other}"
        # Kernels do not see torch.vmap's hidden dimension. torch also refuses their autograd functions there,
        # even on values without a hidden dimension.
        if self._num_levels or is_functorch_wrapped_tensor(value):
            return "it runs under a transform of torch.func, as torch.vmap"
        if role is not Role.ADJUSTABLE:
            return ""
        # Masks often contain finfo(float32).min, which is -inf in BF16; a whole row of -inf has no softmax.
        if kind == "attention" and any(name in self._given and self._is_float(name) for name in read[3:]):
            return "its mask is data in floats, which may be out of the range of 16 bits: give one of bools"
        if magnitude:
            return f"it reads constants of up to {magnitude:.3g}, which 16 bits may not hold"
        if not any(self._is_float(name) for name in read) or traced_type(value) not in ("fp32", "bf16"):
            return "it computes on no floats"
        if value.dim() == PRODUCTS[kind].batch_dims:
            return "its input has no batch dimension, and scales are per image"
        if kind == "linear" and len(self._shape[read[1]]) != 2:
            return "its weight is no matrix"
        # The same value as both operands would need two encodings.
        if PRODUCTS[kind].encodings_differ and len(read) != len(set(read)):
            return "it reads one value in two places"
        if kind == "attention" and node.kwargs.get("enable_gqa"):
            _, keys, values = (self._shape[name] for name in read[:3])
            if keys[-3] != values[-3]:
                return "its keys and values have different numbers of heads"
        return why_traced_as_is(node, kind)

    def _add(self, segment: Segment, node: torch.fx.Node, call: _Call) -> None:
        name, kind, read, kept = call.name, call.kind, call.read, call.kept
        shape = traced_shape(call.value)
        product = call.role is Role.ADJUSTABLE and kind != "embedding"
        depth = max((self._depth.get(source, 0) for source in (*read, *kept)), default=0) + product
        count = flops(kind, [self._shape[source] for source in read], shape) if len(read) > 1 else 0
        because = call.because
        if kind == "einsum":
            count = counted_flops(node)
        if kind == "other" and (unwritten := flops_of_unwritten(node) or counted_flops(node)):
            count, because = unwritten, f"qsync has no kernel for {bare_name(node)} in low precision"
            if bodies_of(node):
                because = "a torch.autograd.Function runs as it is written"
        # Example values of `zeros` that are written to later have the requires_grad of the written values.
        count_of = self._counted(node, call) if call.value.requires_grad else None
        trained = call.value.requires_grad and (count_of is None or count_of.has_gradient)
        is_view = kind == "other" and count_of is not None and count_of.is_view  # as aten.slice
        kind = "view" if is_view else kind
        drops = dropped(node, kind) if kind == "attention" else 0.0
        dilated = is_dilated(node) if kind == "conv2d" else False
        op = Op(
            name, kind, call.role, tuple(read), tuple(kept), traced_type(call.value), shape, count,
            trained, call.magnitude, depth, drops, dilated, because,
            copies=False if is_view else copies(node, kind), channels_last=is_channels_last(call.value),
            splits=kind == "view" and isinstance(node.meta.get("example_value"), (tuple, list)),
            derivative=self._derivative(segment, node, call, count_of) if trained and count_of else None,
            makes_weight=product and node in self._apart,
        )  # fmt: skip
        self.ops.append(op)
        self._dtype[name], self._shape[name], self._depth[name] = op.dtype, shape, depth
        self._magnitude[name] = call.magnitude if declared(kind).passes_magnitude else 0.0
        segment.op_of[node] = name
        segment.value_of[node] = name

    def _counted(self, node: torch.fx.Node, call: _Call) -> Counted | None:
        """Return the counted derivative of a call; None if the memory model has rules for the call.

        It has rules for products with kernels, dropout and functions of the user.
        """
        by_rule = declared(call.kind).saves_by_rule
        return None if by_rule or self._num_levels else counted(node)

    @staticmethod
    def _derivative(segment: Segment, node: torch.fx.Node, call: _Call, found: Counted) -> Derivative:
        """Return the counted derivative of a call as a record, with indices of the operator's operands."""
        named = [segment.value_of.get(operand) for operand in named_operands(node)]
        saved = {named[place] for place in found.operands}
        return Derivative(
            saved=tuple(k for k, name in enumerate((*call.read, *call.kept)) if name in saved),
            saves_result=found.result,
            besides=found.besides,
            workspace_bytes=0 if declared(call.kind).works_by_rule else found.workspace_bytes,
        )

    def _read_nested(self, outer: Segment, node: torch.fx.Node) -> None:
        """Convert a recomputed graph: list its operators in place, with one `input` operator per tensor."""
        body = node.args[0]
        assert isinstance(body, torch.fx.Node) and isinstance(body.target, str)
        inner = Segment(getattr(outer.module, body.target))
        placeholders = [n for n in inner.module.graph.nodes if n.op == "placeholder"]
        for placeholder, argument in zip(placeholders, node.args[1:], strict=True):
            if argument in self._apart:
                self._apart.add(placeholder)
            value = example_of(placeholder)
            if not isinstance(argument, torch.fx.Node) or value is None or argument not in outer.value_of:
                continue
            source = outer.value_of[argument]
            if source in self.inputs and self.inputs[source].kind != "batch":
                self._enter_parameter(inner, placeholder, source, shared=len(argument.users) > 1)
            else:
                name = self._name(placeholder, "input")
                self._add(inner, placeholder, _Call(name, "input", Role.FOLLOWING, [source], value))
        self.read(inner, nested=True)
        outer.nested[node] = inner

    def _read_result(self, outer: Segment, node: torch.fx.Node, value: torch.Tensor) -> None:
        """Convert a result of a recomputed graph, taken by index, to a view of the inner value."""
        nested, index = node.args
        source = outer.nested[nested].output_values[index]  # type: ignore[index]
        assert source is not None, f"{node} takes something out of a checkpointed graph that is no tensor"
        self._add(outer, node, _Call(self._name(node, "view"), "view", Role.FOLLOWING, [source], value))

    def _enter_parameter(self, inner: Segment, placeholder: torch.fx.Node, source: str, shared: bool) -> None:
        """Name a parameter inside a nested graph: its own name, or an alias if other nodes use it, too."""
        name = source
        if shared:
            name = self._unique(f"{source}@checkpoint")
            self._declare(replace(self.inputs[source], name=name, kind="alias"))
        inner.value_of[placeholder] = name

    def _read_output(self, segment: Segment, node: torch.fx.Node, nested: bool) -> None:
        """Convert the outputs; those of the outermost graph keep their traced types."""
        returned = node.args[0] if isinstance(node.args[0], (tuple, list)) else (node.args[0],)
        segment.output_values = [
            segment.value_of.get(item) if isinstance(item, torch.fx.Node) else None for item in returned
        ]
        values = dict.fromkeys(value for value in segment.output_values if value is not None)
        if values and not nested:
            name = self._unique("output")
            self.ops.append(Op(name, "output", Role.FIXED, tuple(values), (), "none", (0,), 0, False))
            segment.op_of[node] = name

    def _name(self, node: torch.fx.Node, kind: str) -> str:
        base, path = module_place(node)
        return self._unique(operator_name(f"{self.roots.get(base, '')}.{path}".strip("."), kind))

    def _unique(self, name: str) -> str:
        self.count[name] += 1
        return name if self.count[name] == 1 else f"{name}#{self.count[name]}"


def copy_of(module: torch.fx.GraphModule) -> torch.fx.GraphModule:
    """Copy a graph with its metadata, sharing tensors, so that the tracer's graph stays unchanged."""
    copied = torch.fx.GraphModule(module, _copy_graph(module))
    for name, child in module.named_children():
        if isinstance(child, torch.fx.GraphModule):
            setattr(copied, name, copy_of(child))
    return copied


def _copy_graph(module: torch.fx.GraphModule) -> torch.fx.Graph:
    graph = torch.fx.Graph()
    mapping: dict[torch.fx.Node, torch.fx.Node] = {}
    output = graph.graph_copy(module.graph, mapping)
    graph.output(output)
    for old, new in mapping.items():
        new.meta = dict(old.meta)
    return graph
