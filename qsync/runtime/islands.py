"""Islands: what stands between a graph's products, compiled by Inductor where that is faster.

An island is a set of calls that only compute: norms, activations, residual sums, conversions. Products,
encodings, random numbers, writes and calls that are not known to be pure stand between islands. So the
operators of an island are the same under every assignment; only the conversions at its edges differ.

AOTAutograd traces forward and backward of an island together, for the shapes, strides and types of a call.
The compiled island is timed beside the uncompiled one, forward and backward. It runs only if it is faster;
the choice is kept on disk, and Inductor keeps the code.
"""

from __future__ import annotations

import math
import threading
import time
import warnings
from collections.abc import Callable, Iterable, Sequence
from functools import cache, partial
from importlib import import_module
from typing import Any

import torch
import torch._functorch.config
import torch.fx
from torch._C._functorch import is_functorch_wrapped_tensor
from torch.fx.passes.tools_common import stable_topological_sort
from torch.fx.passes.utils.fuser_utils import erase_nodes, fuse_as_graphmodule, insert_subgm

from qsync.backend.devices.kernel_timing import apart, synchronize
from qsync.backend.devices.processor import processor
from qsync.backend.kernel_cache import Choices
from qsync.errors import UnsupportedError, shortened
from qsync.lowering.lowered_graph import REPLACED
from qsync.records.graph import Op, Role, digest
from qsync.runtime.coverage import say_once
from qsync.tracing.operator_table import FOLLOWING, call_name

Compiled = Callable[..., Sequence[torch.Tensor]]

# Notes on the nodes of a rewritten graph: the kind of a pure call; the type that a conversion returns; that
# the lowering has put a cast there; the lowered node that a call reports, with the elements it computes.
PURE, CONVERTS_TO, IS_CAST, REPORTS = (
    f"qsync_{name}" for name in ("pure", "converts_to", "is_cast", "reports")
)
_VIEW, _CONVERSION = "view", "conversion"
_FREE = (_VIEW, _CONVERSION, "contiguous", "float")  # an island of these alone would compute nothing
_PURE_KINDS = {*FOLLOWING.values(), "float", "cross_entropy"}.difference(("batch_norm", *REPLACED))
_PURE_NAMES = (
    "abs", "clamp", "cos", "exp", "log", "rsqrt", "sin", "softplus", "sqrt", "square", "sum", "var",
)  # fmt: skip
_WINS_BELOW = 0.9  # of the uncompiled island's time
_ROUNDS, _EVICTED_BYTES = 7, 2**26


def check_inductor() -> None:
    """Raise UnsupportedError where Inductor cannot read its own files, in a locale that is not UTF-8."""
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", DeprecationWarning)  # of torch's use of torch.jit
            import_module("torch._inductor.compile_fx")
    except UnicodeDecodeError as error:
        raise UnsupportedError(
            f"compile=True needs Inductor, whose files torch cannot read as {error.encoding}, this locale's "
            "encoding; set PYTHONUTF8=1 or LC_ALL=C.UTF-8, or leave compile out"
        ) from None


def pure_kind(op: Op, node: torch.fx.Node) -> str:
    """Return the kind of a traced call that only computes tensors from tensors; empty for any other."""
    if op.role is Role.ADJUSTABLE or (op.kind not in _PURE_KINDS and call_name(node) not in _PURE_NAMES):
        return ""
    values = [other.meta.get("example_value") for other in (node, *node.all_input_nodes)]
    is_plain = all(isinstance(x, torch.Tensor) and not is_functorch_wrapped_tensor(x) for x in values)
    return op.kind if is_plain else ""


def note_conversion(node: torch.fx.Node, source: torch.fx.Node, target: str) -> None:
    """Note that a node is a cast of lowering's; one between floats may be in an island."""
    node.meta[IS_CAST] = True
    dtype = {"fp32": torch.float32, "bf16": torch.bfloat16}.get(target)
    if dtype is not None and isinstance(source.meta.get("example_value"), torch.Tensor):
        node.meta |= {PURE: _CONVERSION, CONVERTS_TO: dtype, "example_value": source.meta["example_value"]}


def form_islands(module: torch.fx.GraphModule, observer: Any) -> None:
    """Make one call of every island of a rewritten graph, in place."""
    for number, nodes in enumerate(find_islands(module.graph)):
        body, inputs, outputs = fuse_as_graphmodule(
            module, nodes, f"island_{number}", always_return_tuple=True
        )
        for placeholder in body.graph.find_nodes(op="placeholder"):
            placeholder.meta = {}  # not the notes of the node that it stands for
        insert_subgm(module, body, inputs, outputs)
        setattr(module, f"island_{number}", Island(body, observer))
        erase_nodes(module, nodes)
    stable_topological_sort(module)


def find_islands(graph: torch.fx.Graph) -> list[list[torch.fx.Node]]:
    """Return the nodes of each island, in the graph's order.

    A node's level is the largest number of calls on a path to it that can be in no island. Pure neighbours of
    one level are in one island: a path that leaves the island gets to a higher level, so it never returns.

    Calls that set a mode (`no_grad`, `autocast`) have no value, so no path leads through them. They divide a
    graph into regions, and an island is in one of them. Paths lead from earlier regions to later ones, so a
    stable topological sort keeps the order of regions. Islands are compiled without autocast: none is in it.
    """
    level: dict[torch.fx.Node, int] = {}
    region: dict[torch.fx.Node, int] = {}
    island: dict[torch.fx.Node, dict[torch.fx.Node, None]] = {}
    num_modes, autocasts = 0, [False]
    for node in graph.nodes:
        num_modes += _sets_mode(node)
        region[node] = num_modes
        if call_name(node) == "_enter_autocast":
            autocasts.append(autocasts[-1] or bool(node.args[2]))
        elif call_name(node) == "_exit_autocast":
            autocasts.pop()
        level[node] = max((level[source] for source in node.all_input_nodes), default=0)
        if PURE not in node.meta or autocasts[-1]:
            # A cast feeds a product, which counts; a report passes on what it gets.
            level[node] += not (node.meta.get(IS_CAST) or REPORTS in node.meta)
            continue
        island[node] = {node: None}
        for source in node.all_input_nodes:
            is_beside = level[source] == level[node] and region[source] == region[node]
            if source in island and is_beside and island[source] is not island[node]:
                island[source].update(island[node])
                for other in island[node]:
                    island[other] = island[source]
    position = {node: k for k, node in enumerate(graph.nodes)}
    groups = {id(group): sorted(group, key=position.__getitem__) for group in island.values()}
    found = [_without_outer_views(nodes) for nodes in groups.values()]
    return [nodes for nodes in found if any(_computes_floats(node) for node in nodes)]


def _sets_mode(node: torch.fx.Node) -> bool:
    """Return whether a call stands in a graph for its effect on the calls after it: it has no value."""
    if node.op != "call_function" or node.meta.get("example_value") is not None:
        return False
    return all(_sets_mode(source) for source in node.all_input_nodes)


def _computes_floats(node: torch.fx.Node) -> bool:
    return node.meta[PURE] not in _FREE and node.meta["example_value"].is_floating_point()


def _without_outer_views(nodes: list[torch.fx.Node]) -> list[torch.fx.Node]:
    """Leave out views that are results of an island and share storage with its input or another result."""
    kept = dict.fromkeys(nodes)
    for node in reversed(nodes):
        if node.meta[PURE] == _VIEW and not any(user in kept for user in node.users):
            del kept[node]
    for node in nodes:
        is_outer_view = node.meta[PURE] == _VIEW and not any(x in kept for x in node.all_input_nodes)
        if is_outer_view and node in kept and any(user not in kept for user in node.users):
            del kept[node]
    return list(kept)


class Island(torch.nn.Module):
    """An island of a rewritten graph: compiled for each kind of call where that is faster."""

    def __init__(self, body: torch.fx.GraphModule, observer: Any) -> None:
        super().__init__()
        self._body, self._observer = body, observer
        self._reports = [node.meta[REPORTS] for node in body.graph.nodes if REPORTS in node.meta]
        self._plain, self._used = _plain(body)
        self.is_compiled = False  # at the last call
        self._key = _structure(self._plain.graph)

    def forward(self, *inputs: torch.Tensor) -> Sequence[torch.Tensor]:
        """Run the island."""
        used = [inputs[k] for k in self._used]
        compiled = _chosen(self._key, self._plain, used)
        self.is_compiled = compiled is not None
        if compiled is None:
            return self._body(*inputs)  # type: ignore[no-any-return]
        results = compiled(*used)
        if self._observer is not None:
            self._observer.seen_together(self._reports, results)
        return results


def _plain(body: torch.fx.GraphModule) -> tuple[torch.fx.GraphModule, list[int]]:
    """Return an island without reports and modules, and the positions of the inputs that it reads."""
    graph = torch.fx.Graph()
    new: dict[torch.fx.Node, torch.fx.Node] = {}
    for node in body.graph.nodes:
        if REPORTS in node.meta:
            new[node] = new[node.args[0]]
        elif CONVERTS_TO in node.meta:
            new[node] = graph.call_method("to", (new[node.args[0]], node.meta[CONVERTS_TO]))
        else:
            new[node] = graph.node_copy(node, lambda source: new[source])
        new[node].meta = {}
    placeholders = graph.find_nodes(op="placeholder")
    for node in placeholders:
        if not node.users:
            graph.erase_node(node)
    used = [k for k, node in enumerate(placeholders) if node.users]
    return torch.fx.GraphModule({}, graph), used


def _structure(graph: torch.fx.Graph) -> str:
    """Return a text that two islands share if they compute the same."""
    number = {node: k for k, node in enumerate(graph.nodes)}
    lines = []
    for node in graph.nodes:
        where = getattr(node.target, "__module__", "")
        called = "" if node.op == "placeholder" else f"{where}.{call_name(node)}"
        args, kwargs = torch.fx.map_arg((node.args, dict(node.kwargs)), lambda n: f"%{number[n]}")
        lines.append(f"{node.op} {called} {args} {kwargs}")
    return "\n".join(lines)


_lock = threading.RLock()
_known: dict[Any, Compiled | None] = {}


def _chosen(key: str, plain: torch.fx.GraphModule, inputs: Sequence[torch.Tensor]) -> Compiled | None:
    """Return the compiled island for such inputs, None where the uncompiled one is as fast."""
    trains = torch.is_grad_enabled()
    if trains and any(x.is_inference() for x in inputs):
        return None  # AOTAutograd would save it for backward, which torch refuses
    signature = (key, trains, *((x.shape, x.stride(), x.dtype, x.requires_grad, x.device) for x in inputs))
    try:
        return _known[signature]
    except KeyError:
        pass
    with _lock:
        if signature not in _known:
            _known[signature] = apart(partial(_choose, digest(str(signature)), plain, inputs))
        return _known[signature]


def _choose(name: str, plain: torch.fx.GraphModule, inputs: Sequence[torch.Tensor]) -> Compiled | None:
    choices = _choices(torch.get_num_threads())
    known = choices.get(name, 2)
    if known == 0 or any(type(x) not in (torch.Tensor, torch.nn.Parameter) for x in inputs):
        return None
    samples = [x.detach().requires_grad_(x.requires_grad) for x in inputs]
    try:
        compiled = _compile(plain, samples)
        wins = known == 1 or _is_faster(compiled, plain, samples)
    except Exception as error:  # no compiler here, or one that fails: Inductor raises anything
        reason = str(error).strip().partition("\n")[0] or type(error).__name__
        text = f"an island runs uncompiled, because Inductor fails: {shortened(reason, quote=False)}"
        say_once(text, False)
        return None
    if known is None:
        choices.keep(name, int(wins))
    return compiled if wins else None


def keep_saved_tensors() -> None:
    """Let backward of compiled islands run twice (`retain_graph=True`), in this thread.

    By default a compiled backward overwrites what forward saved, and torch then refuses a second backward.
    The user did not ask for islands, and another rank may run the same one uncompiled. torch reads this
    setting in the thread that compiles and in the thread that trains.
    """
    torch._functorch.config.donated_buffer = False


def _compile(plain: torch.fx.GraphModule, samples: Sequence[torch.Tensor]) -> Compiled:
    keep_saved_tensors()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch's, of torch
        from torch._inductor import config
        from torch._inductor.compile_fx import compile_fx

        with config.patch(compile_threads=1):  # no pool of processes beside the training
            compiled: Compiled = compile_fx(plain, list(samples))  # type: ignore[assignment]
            _step(compiled, samples)()
    return compiled


def _is_faster(compiled: Compiled, plain: Compiled, samples: Sequence[torch.Tensor]) -> bool:
    """Return whether a compiled island takes clearly less time, forward and backward, in turns.

    Between products an island finds the caches cold: hot ones favour what moves more bytes.
    """
    steps = _step(compiled, samples), _step(plain, samples)
    steps[1]()  # the compiled one has run
    other = torch.empty(_EVICTED_BYTES, dtype=torch.uint8, device=samples[0].device)
    least_s = [math.inf, math.inf]
    for k in (0, 1) * _ROUNDS:
        other.fill_(1)
        synchronize()
        start = time.perf_counter()
        steps[k]()
        synchronize()
        least_s[k] = min(least_s[k], time.perf_counter() - start)
    return least_s[0] < _WINS_BELOW * least_s[1]


def _step(run: Compiled, samples: Sequence[torch.Tensor]) -> Callable[[], None]:
    """Return a call of an island, forward and backward."""
    trained = [x for x in samples if x.requires_grad]
    gradients: list[torch.Tensor] = []

    def step() -> None:
        results = [y for y in run(*samples) if y.requires_grad]
        if not gradients:
            gradients.extend(torch.ones_like(y) for y in results)
        if results:
            torch.autograd.grad(results, trained, gradients, allow_unused=True)

    return step


@cache
def _choices(num_threads: int) -> Choices:
    return Choices("islands", {
        "torch": torch.__version__, "processor": processor(), "threads": str(num_threads),
        **({"gpu": torch.cuda.get_device_name()} if torch.cuda.is_available() else {}),
    })  # fmt: skip


def sentence(modules: Iterable[torch.nn.Module]) -> str:
    """Return how many islands of rewritten graphs ran compiled in the last call."""
    found = [island for module in modules for island in module.modules() if isinstance(island, Island)]
    num = sum(island.is_compiled for island in found)
    others = ", the others are as fast without" if num < len(found) else ""
    return f"{num} of {len(found)} islands between products run compiled{others}"
