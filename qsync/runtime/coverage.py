"""Report how many of a model's products run in the requested precision, with reasons for the rest."""

from __future__ import annotations

import sys
import warnings
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cache, partial

from torch import nn
from torch.nn.modules.conv import _ConvNd

from qsync.lowering.lowered_graph import LoweredGraph, Run
from qsync.operators.declaration import Role
from qsync.operators.precision import Precision
from qsync.operators.registry import PRECISIONS_BY_KIND, why_unwritten
from qsync.records.graph import Op, OpGraph
from qsync.tracing.tracer import tensor_names

# Below this share of the requested FLOPs, the line becomes a warning.
_LEAST_LOWERED = 0.5
_MAX_NAMED = 3
_LONGEST = 160 - len("qsync: ")  # characters of the line at a model's first call


@dataclass(frozen=True, slots=True)
class Product:
    """One product of a traced graph: requested and actual precision, and the reason of a difference."""

    op: Op
    asked: str
    runs: str
    because: str = ""

    @property
    def is_lowered(self) -> bool:
        """Return whether it runs in another type than the model's own."""
        return self.runs not in (Precision.FP32, self.op.dtype)


def products(
    lowered: Iterable[LoweredGraph],
    asked: Mapping[str, Precision] | Precision,
    why_not: Callable[[OpGraph, Precision], Mapping[str, str]],
) -> list[Product]:
    """Return the products in the graphs of one call.

    `asked` is an assignment, or one precision for all. For an operator not in the assignment, its first low
    precision counts as requested.
    """
    each = [asked] if isinstance(asked, Precision) else asked.values()
    low = next((precision for precision in each if precision is not Precision.FP32), Precision.FP32)
    found = []
    for part in lowered:
        modes = {node.op: node.mode for node in part.nodes if isinstance(node, Run)}
        reasons = cache(partial(why_not, part.graph))  # per precision; each scans the whole graph
        for op in part.graph.ops:
            if not op.flops:
                continue
            runs = modes[op.name]
            wanted = asked if isinstance(asked, Precision) else asked.get(op.name)
            because = ""
            if op.role is not Role.ADJUSTABLE:
                because = op.fixed_because
            elif wanted is None:
                because = "the plan does not name it: plan again with an example_batch= that reaches it"
            elif runs != wanted:
                because = reasons(wanted).get(op.name, "")
                if not because and wanted not in PRECISIONS_BY_KIND[op.kind]:
                    because = f"{op.kind} in {wanted} is {why_unwritten(op.kind, wanted)}"
            found.append(Product(op, low if wanted is None else wanted, runs, because))
    return found


@dataclass(frozen=True, slots=True)
class Row:
    """Products that run in one precision for one reason; an empty reason means as requested."""

    runs: str
    because: str
    operators: tuple[str, ...]

    def __str__(self) -> str:
        """Return the row in one line."""
        why = f" because {self.because}" if self.because else ""
        return f"{len(self.operators)} in {self.runs}{why}: {_named(self.operators)}"


@dataclass(frozen=True, slots=True)
class Coverage:
    """Number of products in the requested precision, and rows of reasons for the others.

    `asked` is a text: a precision, or low precision on a device class. `notes` concern the whole model.
    """

    model: str
    kept: int
    asked: str
    rows: tuple[Row, ...]
    notes: tuple[str, ...] = ()
    num_outside: int = 0  # layers that no trace reaches

    @classmethod
    def of(
        cls, model: str, found: Iterable[Product], asked: Mapping[str, Precision] | Precision, where: str,
        notes: Iterable[str] = (), num_outside: int = 0,
    ) -> Coverage:  # fmt: skip
        """Count the products of one call; `where` names the device class."""
        found, by_reason = list(found), dict[tuple[str, str], list[str]]()
        for product in found:
            by_reason.setdefault((product.runs, product.because), []).append(product.op.name)
        rows = tuple(Row(runs, why, tuple(names)) for (runs, why), names in by_reason.items())
        if isinstance(asked, Precision):
            kept, what = sum(product.runs == asked for product in found), str(asked)
        else:
            kept, what = sum(product.is_lowered for product in found), "low precision"
        what += f" on {where}" if where else ""
        return cls(model, kept, what, rows, tuple(filter(None, notes)), num_outside)

    @property
    def line(self) -> str:
        """Return one line of at most `_LONGEST` characters: the counts, and a pointer to the reasons."""
        counts = Counter[str]()
        for row in self.rows:
            counts[row.runs] += len(row.operators)
        each = ", ".join(f"{count} {runs}" for runs, count in sorted(counts.items()))
        total, end = counts.total(), "; see qsync.coverage(model)"
        text = f"{self.model}: {self.kept} of {total} products in {self.asked}"
        if self.num_outside:
            text += f", {self.num_outside} layers outside of the trace"
        is_told = set(counts) <= {self.asked.split()[0]}  # all run in the one precision
        with_counts = text if is_told else f"{text} ({each})"
        if len(with_counts) + len(end) <= _LONGEST:
            return with_counts + end
        most = _LONGEST - len(end)
        return (text if len(text) <= most else f"{text[: most - 3]}...") + end

    def __str__(self) -> str:
        """Return the table, one row per line."""
        total = sum(len(row.operators) for row in self.rows)
        title = f"{self.model}: {self.kept} of {total} products in {self.asked}"
        return "\n".join([title, *(f"  {row}" for row in self.rows), *(f"  {note}" for note in self.notes)])


def is_mostly_lowered(found: list[Product]) -> bool:
    """Return whether at least half of the requested FLOPs are lowered (products of weights apart)."""
    to_lower = [p for p in found if p.asked != Precision.FP32 and not p.op.makes_weight]
    adjustable = [p for p in to_lower if p.op.role is Role.ADJUSTABLE]
    lowered = sum(p.op.flops for p in adjustable if p.is_lowered or p.runs == p.asked)
    return lowered >= _LEAST_LOWERED * sum(p.op.flops for p in to_lower)


def layers_outside(model: nn.Module, graph: OpGraph) -> list[str]:
    """Return the linear and convolutional layers whose parameters no traced graph reads.

    Either nothing calls them, or untraced code does.
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
    """Print a line on stderr, or warn with it if it is bad news; once per process."""
    if is_good:
        print(f"qsync: {text}", file=sys.stderr)
    else:
        warnings.warn(f"qsync: {text}", stacklevel=2)


@cache
def warn_once(text: str) -> None:
    """Warn once per process."""
    warnings.warn(text, stacklevel=2)


def listed(names: list[str]) -> str:
    """Name the operators that do not run as requested; all of them if there are few."""
    names = list(dict.fromkeys(names))
    return f"{_named(names)} {'runs' if len(names) == 1 else 'run'}"


def _named(names: Sequence[str]) -> str:
    some = ", ".join(names[:_MAX_NAMED])
    return some if len(names) <= _MAX_NAMED else f"{some} and {len(names) - _MAX_NAMED} more"
