"""Say how many of a model's products run in the precisions that were asked for, and why the others do not."""

from __future__ import annotations

import sys
import warnings
from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from functools import cache, partial

from torch import nn
from torch.nn.modules.conv import _ConvNd

from qsync.lowering.lowered_graph import LoweredGraph, Run
from qsync.records.graph import Op, OpGraph, Role
from qsync.records.kernel_support import why_unwritten
from qsync.records.precision import PRECISIONS_BY_KIND, Precision
from qsync.tracing.tracer import tensor_names

# Below this part of the FLOPs that were to be lowered, the line is a warning.
_LEAST_LOWERED = 0.5
_MAX_NAMED = 3


@dataclass(frozen=True, slots=True)
class Product:
    """One product of a traced graph: the precision asked for it, the one it runs in, and why they differ."""

    op: Op
    asked: str
    runs: str
    because: str = ""

    @property
    def is_changed(self) -> bool:
        """Return whether it runs otherwise than the model has it."""
        return self.runs not in (Precision.FP32, self.op.dtype)

    @property
    def is_lowered(self) -> bool:
        """Return whether it runs in another type than the model has it in."""
        return self.is_changed and self.runs != Precision.FP32_FAST


def products(
    lowered: Iterable[LoweredGraph],
    asked: Mapping[str, Precision] | Precision,
    why_not: Callable[[OpGraph, Precision], Mapping[str, str]],
) -> list[Product]:
    """Return the products of the graphs of one call.

    `asked` is an assignment, or one precision for all. Of an operator that the assignment does not name,
    its first low precision counts as asked.
    """
    each = [asked] if isinstance(asked, Precision) else asked.values()
    low = next((precision for precision in each if precision is not Precision.FP32), Precision.FP32)
    found = []
    for part in lowered:
        modes = {node.op: node.mode for node in part.nodes if isinstance(node, Run)}
        reasons = cache(partial(why_not, part.graph))  # of a precision; each looks at the whole graph
        for op in part.graph.ops:
            if not op.flops:
                continue
            runs = modes[op.name]
            wanted = asked if isinstance(asked, Precision) else asked.get(op.name)
            because = ""
            if op.role is not Role.ADJUSTABLE:
                because = op.fixed_because
            elif wanted is None:
                because = "the plan does not name it: plan again with a batch that reaches it"
            elif runs != wanted:
                because = reasons(wanted).get(op.name, "")
                if not because and wanted not in PRECISIONS_BY_KIND[op.kind]:
                    because = f"{op.kind} in {wanted} is {why_unwritten(op.kind, wanted)}"
            found.append(Product(op, low if wanted is None else wanted, runs, because))
    return found


def sentence(found: list[Product], asked: Mapping[str, Precision] | Precision, where: str) -> str:
    """Return one line: how many products run in which precision, and which do not though asked, and why."""
    if isinstance(asked, Precision):
        kept = sum(product.runs == asked for product in found)
        text = f"{kept} of {len(found)} products in {asked}{where}"
    else:
        counts = Counter(product.runs for product in found if product.is_changed)
        each = ", ".join(f"{count} {precision}" for precision, count in sorted(counts.items()))
        lowered = sum(product.is_lowered for product in found)
        text = f"{lowered} of {len(found)} products in low precision{where}" + (f" ({each})" if each else "")
    other: dict[tuple[str, str], list[str]] = {}
    for product in found:
        if product.because:
            other.setdefault((product.runs, product.because), []).append(product.op.name)
    reasons = [f"{listed(names)} in {runs} because {why}" for (runs, why), names in other.items()]
    return "; ".join([text, *reasons])


def is_mostly_lowered(found: list[Product]) -> bool:
    """Return whether at least half of the FLOPs that were to be lowered are; what makes weights is not."""
    to_lower = [p for p in found if p.asked != Precision.FP32 and not p.op.makes_weight]
    adjustable = [p for p in to_lower if p.op.role is Role.ADJUSTABLE]
    lowered = sum(p.op.flops for p in adjustable if p.is_lowered or p.runs == p.asked)
    return lowered >= _LEAST_LOWERED * sum(p.op.flops for p in to_lower)


def layers_outside(model: nn.Module, graph: OpGraph) -> list[str]:
    """Return the linear and convolutional layers of which the traced graph of a call reads no parameter.

    Either nothing calls them, or what does is not traced.
    """
    read, names = {value.name for value in graph.inputs}, tensor_names(model)
    layers = (
        (path, {names[id(p)] for p in layer.parameters()})
        for path, layer in model.named_modules()
        if isinstance(layer, (nn.Linear, _ConvNd))
    )
    return [path for path, parameters in layers if parameters and not parameters & read]


@cache
def say_once(text: str, is_good: bool) -> None:
    """Say a line once a process: print it on stderr if it is good news, else warn."""
    if is_good:
        print(f"qsync: {text}", file=sys.stderr)
    else:
        warnings.warn(f"qsync: {text}", stacklevel=2)


@cache
def warn_once(text: str) -> None:
    """Warn, once a process."""
    warnings.warn(text, stacklevel=2)


def listed(names: list[str]) -> str:
    """Name operators that run as they were not asked to, each once: all if they are few."""
    names = list(dict.fromkeys(names))
    if len(names) == 1:
        return f"{names[0]} runs"
    some = ", ".join(names[:_MAX_NAMED])
    return f"{some} run" if len(names) <= _MAX_NAMED else f"{some} and {len(names) - _MAX_NAMED} more run"
