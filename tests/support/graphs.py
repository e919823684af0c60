"""Small graphs, profiles and clusters for the tests of planning: made by hand or drawn by hypothesis."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from hypothesis import settings
from hypothesis import strategies as st

from qsync.lowering.lowered_graph import FUSED
from qsync.operators.declaration import Role
from qsync.operators.precision import CARRIED_FLOATS, Precision
from qsync.operators.registry import EPILOGUES, FORMS, PRECISIONS_BY_KIND, REPLACED
from qsync.records.cluster import Cluster, DeviceClass, Link
from qsync.records.graph import Derivative, Input, Op, OpGraph, num_elements
from qsync.records.profiles import Cost, Profile, Sensitivity
from qsync.records.save_less import can_save_less
from qsync.records.variant import Variant

# No deadline: machines that run tests are busy.
settings.register_profile("qsync", deadline=None, max_examples=60)
settings.load_profile("qsync")

ALL = tuple(Precision)
CPU_PRECISIONS = (Precision.FP32, Precision.BF16, Precision.INT8)
# Seconds per element of a product, relative to FP32.
SPEED = {
    "fp32": 1.0, "tf32": 0.7, "bf16": 0.5, "fp16": 0.5, "mxfp8": 0.35, "fp8": 0.3, "int8": 0.25,
    "int8_all": 0.15,
}  # fmt: skip
# Variance relative to bf16; monotone in the order in which precisions are called higher.
OMEGA = {
    "tf32": 0.01,
    "bf16": 1.0,
    "fp16": 0.5,
    "mxfp8": 10.0,
    "fp8": 40.0,
    "int8": 20.0,
    "int8_all": 90.0,
}


def _derivative(kind: str, shape: tuple[int, ...]) -> Derivative | None:
    """What torch's derivative of such a call saves, as tracing would count it."""
    if kind in ("relu", "tanh", "sigmoid", "softmax"):
        return Derivative(saves_result=True)
    if kind in ("add", "sub", "cat", "mean", "sum", "clone"):
        return Derivative()
    besides = {"max_pool2d": "int64", "cross_entropy": "fp32"}
    if kind in besides:
        saved = () if kind == "cross_entropy" else (0,)
        return Derivative(saved, besides=((besides[kind], num_elements(shape)),))
    return None


class Builder:
    """Writes a graph operator by operator; every method returns the name of the value it makes."""

    def __init__(self, model: str = "model") -> None:
        self.model = model
        self.inputs: list[Input] = []
        self.ops: list[Op] = []
        self.shape: dict[str, tuple[int, ...]] = {}
        self.dtype: dict[str, str] = {}

    def enter(
        self,
        name: str,
        shape: tuple[int, ...],
        kind: str = "batch",
        dtype: str = "fp32",
        grad: bool | None = None,
    ) -> str:
        requires_grad = kind == "parameter" if grad is None else grad
        self.inputs.append(Input(name, kind, dtype, shape, requires_grad))
        self.shape[name], self.dtype[name] = shape, dtype
        return name

    def op(
        self, name: str, kind: str, role: Role, inputs: Sequence[str], shape: tuple[int, ...] | None = None,
        kept: Sequence[str] = (), dtype: str = "fp32", flops: int = 0, requires_grad: bool = True,
        magnitude: float = 0.0, exposed: bool = False,
    ) -> str:  # fmt: skip
        out = self.shape[inputs[0]] if shape is None else shape
        depth = 1 + sum(op.role is Role.ADJUSTABLE for op in self.ops)
        self.ops.append(
            Op(
                name,
                kind,
                role,
                tuple(inputs),
                tuple(kept),
                dtype,
                out,
                flops,
                requires_grad,
                magnitude,
                depth,
                exposed=exposed,
                derivative=_derivative(kind, self.shape[inputs[0]] if inputs else out),
            )
        )
        self.shape[name], self.dtype[name] = out, dtype
        return name

    def linear(self, name: str, x: str, width: int, weight: str | None = None, bias: bool = False) -> str:
        """y = x W' (+ b), with a weight of its own unless one is given."""
        taken = [x, weight or self.enter(f"{name}.weight", (width, self.shape[x][-1]), "parameter")]
        if bias:
            taken.append(self.enter(f"{name}.bias", (width,), "parameter"))
        shape = (*self.shape[x][:-1], width)
        flops = 2 * num_elements(shape) * self.shape[x][-1]
        return self.op(name, "linear", Role.ADJUSTABLE, taken, shape, flops=flops)

    def matmul(self, name: str, x: str, y: str) -> str:
        shape = (*self.shape[x][:-1], self.shape[y][-1])
        return self.op(
            name, "matmul", Role.ADJUSTABLE, [x, y], shape, flops=2 * num_elements(shape) * self.shape[x][-1]
        )

    def follow(self, name: str, kind: str, *inputs: str, kept: Sequence[str] = ()) -> str:
        return self.op(name, kind, Role.FOLLOWING, inputs, kept=kept)

    def norm(self, name: str, x: str) -> str:
        width = self.shape[x][-1:]
        kept = [self.enter(f"{name}.{part}", width, "parameter") for part in ("weight", "bias")]
        return self.follow(name, "layer_norm", x, kept=kept)

    def loss(self, name: str, x: str) -> str:
        return self.op(name, "loss", Role.FIXED, [x], ())

    def output(self, *values: str) -> str:
        return self.op("output", "output", Role.FIXED, values, (0,), dtype="none", requires_grad=False)

    def build(self) -> OpGraph:
        return OpGraph(self.model, tuple(self.inputs), tuple(self.ops))


def mlp(num_layers: int = 3, width: int = 32, rows: int = 16) -> OpGraph:
    """linear, gelu, linear, ... with a loss at the end."""
    builder = Builder("mlp")
    x = builder.enter("x", (rows, width))
    for layer in range(num_layers):
        x = builder.linear(f"fc{layer}", x, width, bias=True)
        x = builder.follow(f"act{layer}", "gelu", x)
    builder.loss("loss", x)
    return builder.build()


def chain(num_layers: int = 4, rows: int = 512, width: int = 16) -> OpGraph:
    """Blocks of linear and gelu."""
    builder = Builder("chain")
    x = builder.enter("x", (rows, width))
    for layer in range(num_layers):
        x = builder.follow(f"{layer}.act", "gelu", builder.linear(f"{layer}.fc", x, width))
    builder.loss("loss", x)
    return builder.build()


def encoder(num_layers: int = 2, width: int = 64, rows: int = 32, hidden: int = 4) -> OpGraph:
    """A transformer encoder: q, k and v of one value, residual adds, layer norms."""
    builder = Builder("encoder")
    tokens = builder.enter("tokens", (rows,), dtype="int64")
    table = builder.enter("embedding.weight", (100, width), "parameter")
    x = builder.op("embedding", "embedding", Role.FIXED, [table], (rows, width), kept=[tokens])
    for layer in range(num_layers):
        at = f"layer.{layer}."
        q, k, v = (builder.linear(at + name, x, width, bias=True) for name in ("query", "key", "value"))
        views = [
            builder.op(at + f"view{j}", "view", Role.FOLLOWING, [y], (1, 1, rows, width))
            for j, y in enumerate((q, k, v))
        ]
        y = builder.op(at + "attention", "attention", Role.ADJUSTABLE, views, flops=4 * rows * rows * width)
        y = builder.op(at + "heads", "view", Role.FOLLOWING, [y], (rows, width))
        y = builder.linear(at + "out", y, width, bias=True)
        x = builder.norm(
            at + "norm1", builder.follow(at + "add1", "add", builder.follow(at + "drop1", "dropout", y), x)
        )
        y = builder.follow(at + "gelu", "gelu", builder.linear(at + "fc1", x, hidden * width, bias=True))
        y = builder.linear(at + "fc2", y, width, bias=True)
        x = builder.norm(
            at + "norm2", builder.follow(at + "add2", "add", builder.follow(at + "drop2", "dropout", y), x)
        )
    x = builder.linear("head", x, 10)
    builder.loss("loss", x)
    return builder.build()


def images(num_blocks: int = 2, channels: int = 8, side: int = 8, rows: int = 4) -> OpGraph:
    """A residual network: convolutions with batch norms around shortcuts, then a linear on a view."""
    builder = Builder("images")
    shape = (rows, channels, side, side)
    x = builder.enter("images", shape)

    def conv(name: str, x: str) -> str:
        weight = builder.enter(f"{name}.weight", (channels, channels, 3, 3), "parameter")
        flops = 18 * channels * num_elements(shape)
        y = builder.op(name, "conv2d", Role.ADJUSTABLE, [x, weight], shape, flops=flops)
        kept = [builder.enter(f"{name}.norm.{part}", (channels,), "parameter") for part in ("weight", "bias")]
        return builder.follow(f"{name}.norm", "batch_norm", y, kept=kept)

    for block in range(num_blocks):
        y = builder.follow(f"{block}.relu", "relu", conv(f"{block}.conv1", x))
        x = builder.follow(f"{block}.add", "add", conv(f"{block}.conv2", y), x)
    x = builder.op("view", "view", Role.FOLLOWING, [x], (rows, channels * side * side))
    builder.loss("loss", builder.linear("head", x, 10))
    return builder.build()


def profile_of(
    graph: OpGraph,
    name: str = "infer",
    precisions: Sequence[Precision] = CPU_PRECISIONS,
    slow: float = 1.0,
    cast_s: float = 1e-9,
    latency_s: float = 1e-6,
    saving: float | None = None,
    **changes: object,
) -> Profile:
    """A profile in which time follows FLOPs and elements; every cast is priced by the fit.

    What saves less takes `saving` times as long, codes half as long again; without, it has no times.
    """
    ops: dict[str, dict[str, Cost]] = {}
    for op in graph.ops:
        if op.role is Role.ADJUSTABLE:
            modes = [p for p in PRECISIONS_BY_KIND[op.kind] if p in precisions]
            times = {str(p): slow * SPEED[p] * max(op.flops, 1) * 1e-10 for p in modes}
            fused = [p for p in modes if p in (Precision.INT8, Precision.INT8_ALL)]
            times |= {
                f"{p} {kind}": times[p] + slow * op.num_elements * 1e-10 for p in fused for kind in EPILOGUES
            }
        else:
            times = {
                mode: slow * max(op.num_elements, 1) * 1e-9 * (0.5 if mode == "bf16" else 1.0)
                for mode in dict.fromkeys([op.dtype, *CARRIED_FLOATS])
            }
            if op.kind in REPLACED:
                times[str(Variant("fp32", as_traced=True))] = 1.25 * times["fp32"]
            if op.kind in EPILOGUES:
                times |= dict.fromkeys([f"{mode} {FUSED}" for mode in CARRIED_FLOATS], 0.0)
            if saving is not None and can_save_less(op):
                each = {form: saving * (1.5 if form == "codes" else 1.0) for form in FORMS[op.kind]}
                each.pop("plain", None)
                times |= {f"{m} {form}": s * times[m] for m in CARRIED_FLOATS for form, s in each.items()}
        ops[op.name] = {mode: Cost(t, 2 * t if op.requires_grad else 0.0) for mode, t in times.items()}
    sources = ("fp64", "fp32", "bf16", "fp16")
    layouts = ("row", "col", "inner", "image", "channel")
    targets = (*sources, *(f"{t}_{layout}" for t in ("int8", "fp8", "mxfp8") for layout in layouts))
    fit = {
        (s, t): (Cost(slow * latency_s), Cost(slow * cast_s, slow * cast_s if "_" not in t else 0.0))
        for s in sources
        for t in targets
        if s != t
    }
    fields: dict[str, object] = {
        "host_s": slow * 1e-5, "optimizer_s": slow * 2e-5, "optimizer_bytes": 0, "outside": Cost(1e-6, 2e-6),
        "reduce_s_per_call": slow * 1e-7, "reduce_s_per_byte": slow * 1e-10,
        "switch_s": {str(p): Cost(slow * k * 1e-7, slow * k * 2e-7) for k, p in enumerate(precisions)},
    }  # fmt: skip
    fields.update(changes)
    return Profile(
        name,
        graph.hash,
        graph.shapes_hash,
        ops,
        {},
        fit,
        step_s={},
        machine={},
        **fields,  # type: ignore[arg-type]
    )


def sensitivity_of(graph: OpGraph, weights: Mapping[str, float] | None = None) -> Sensitivity:
    """Variance by precision, times a weight per operator (default: its place in the order)."""
    omega = {}
    for place, op in enumerate(graph.adjustable):
        weight = float(place + 1) if weights is None else weights[op.name]
        omega[op.name] = {
            str(p): weight * OMEGA[p] for p in PRECISIONS_BY_KIND[op.kind] if p is not Precision.FP32
        }
    return Sensitivity(graph.hash, "variance", omega)


def cluster_of(
    counts: Mapping[str, int] | None = None,
    precisions: Sequence[Precision] = CPU_PRECISIONS,
    memory_bytes: int = 1 << 40,
    link: Link | None = None,
    device: str = "cpu",
) -> Cluster:
    """A cluster of classes of one device; one rank each of `train` and `infer` by default."""
    classes = tuple(
        DeviceClass(name, device, count, memory_bytes, tuple(precisions))
        for name, count in (counts or {"train": 1, "infer": 1}).items()
    )
    return Cluster(classes, link or Link(1e-5, 1e10))


@st.composite
def graphs(draw: st.DrawFn, max_ops: int = 12) -> OpGraph:
    """Graphs of products, followers and fixed operators that share values, weights and types at random."""
    builder = Builder("drawn")
    size = 4
    shape = draw(st.sampled_from([(size, size), (2, 2, size, size)]))
    builder.enter("x", shape)
    builder.enter("mask", shape, dtype="bool")
    builder.enter("wide", shape, dtype=draw(st.sampled_from(["fp32", "fp64", "bf16"])))
    weights = [builder.enter(f"w{j}", (size, size), "parameter") for j in range(3)]
    values = ["x", "wide"]
    for number in range(draw(st.integers(1, max_ops))):
        name = f"op{number}"
        kind = draw(
            st.sampled_from(
                ["linear", "addmm", "matmul", "conv2d", "gelu", "relu", "add", "masked_fill", "loss", "norm"]
            )
        )
        x, y = draw(st.sampled_from(values)), draw(st.sampled_from(values))
        if builder.dtype[x] != "fp32":  # capture makes whatever was not traced in FP32 fixed
            kind = "loss"
        if builder.dtype[y] != "fp32":
            y = "x"
        weight = draw(st.sampled_from(weights))
        if kind in ("linear", "conv2d"):
            exposed = draw(st.sampled_from([False, False, True]))
            builder.op(name, kind, Role.ADJUSTABLE, [x, weight], shape, flops=128, exposed=exposed)
        elif kind == "addmm":
            builder.op(name, kind, Role.ADJUSTABLE, [weights[0], x, weight], shape, flops=128)
        elif kind == "matmul":
            builder.op(name, kind, Role.ADJUSTABLE, [x, y], shape, flops=128)
        elif kind == "add":
            builder.follow(name, kind, x, draw(st.sampled_from([y, weight])))
        elif kind == "masked_fill":
            magnitude = draw(st.sampled_from([0.0, 1e9, 3.4028234663852886e38]))
            builder.op(name, kind, Role.FOLLOWING, [x, "mask"], magnitude=magnitude)
        elif kind == "norm":
            builder.follow(name, "layer_norm", x, kept=[weight])
        elif kind in ("gelu", "relu"):
            last = values[-1] if builder.dtype[values[-1]] == "fp32" else x  # often the only reader
            builder.follow(name, kind, draw(st.sampled_from([x, last])))
        else:
            builder.op(name, kind, Role.FIXED, [x], dtype=builder.dtype[x])
        values.append(name)
    return builder.build()


def precisions_for(graph: OpGraph) -> st.SearchStrategy[tuple[str, Precision]]:
    """One adjustable operator with one of its kind's precisions."""
    kinds = {op.name: op.kind for op in graph.adjustable}
    return st.sampled_from(sorted(kinds)).flatmap(
        lambda name: st.tuples(st.just(name), st.sampled_from(PRECISIONS_BY_KIND[kinds[name]]))
    )


def assignments_for(
    graph: OpGraph, among: Sequence[Precision] = ALL
) -> st.SearchStrategy[dict[str, Precision]]:
    """An assignment of every adjustable operator."""
    choices = {op.name: [p for p in PRECISIONS_BY_KIND[op.kind] if p in among] for op in graph.adjustable}
    return st.fixed_dictionaries({name: st.sampled_from(options) for name, options in choices.items()})
