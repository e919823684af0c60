"""Tables of plans for the command line: what was chosen, why, what was refused, what fills memory."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from rich.table import Table

from qsync.records.plans import Plan
from qsync.records.profiles import shown


def reasons_table(reasons: list[Any]) -> Table:
    table = Table(title=f"Why {len(reasons)} operators are lowered (simulated)")
    for heading in ("class", "operator", "runs in", "saves", "adds variance", "why not higher"):
        table.add_column(heading, justify="right" if heading in ("saves", "adds variance") else "left")
    for reason in reasons:
        table.add_row(
            shown(reason.device_class, reason.origin), reason.op, str(reason.precision),
            f"{reason.time_saved_s * 1e3:.2f} ms", f"{reason.added_variance:.2e}",
            reason.verdict.partition("; ")[2],
        )  # fmt: skip
    return table


def shadow_table(prices: Sequence[Any]) -> Table:
    """What each class would give for more time or memory, and its next moves."""
    table = Table(title="Variance that more time or memory would save, to first order (simulated)")
    table.add_column("class")
    for heading in ("per ms more", "per MiB more"):
        table.add_column(heading, justify="right")
    for heading in ("next to raise", "next to lower"):
        table.add_column(heading)
    for price in prices:
        table.add_row(
            shown(price.device_class, price.origin), _variance(price.variance_per_s, 1e-3),
            _variance(price.variance_per_byte, 2**20), _next_raise(price.next_raise),
            _next_lowering(price.next_lowering),
        )  # fmt: skip
    return table


def _variance(rate: float | None, unit: float) -> str:
    return f"{rate * unit:.2e}" if rate is not None else "-"


def _next_raise(found: Any) -> str:
    if found is None:
        return "-"
    beyond = (
        f"{found.beyond_s * 1e3:.3g} ms over the target"
        if found.beyond_s
        else f"{found.beyond_bytes / 2**20:.3g} MiB over the budget"
    )
    return f"{', '.join(found.ops)} to {found.precision}\n{found.variance:+.2e}, {beyond}"


def _next_lowering(found: Any) -> str:
    if found is None:
        return "-"
    return (
        f"{', '.join(found.ops)} to {found.precision}\n"
        f"{found.variance:+.2e}, {-found.seconds * 1e3:.3g} ms less"
    )


def memory_table(memory: Mapping[str, Any], profiles: Mapping[str, Any]) -> Table:
    table = Table(title="Memory of a rank at its fullest, MiB (simulated)")
    table.add_column("what for")
    for name in memory:
        table.add_column(shown(name, profiles[name].origin), justify="right")

    def row(what: str, of_classes: Iterable[int], **options: Any) -> None:
        table.add_row(what, *(f"{n / 2**20:.1f}" if n else "-" for n in of_classes), **options)

    kinds = list(dict.fromkeys(kind for peak in memory.values() for kind in peak.parts))
    kinds.sort(key=lambda kind: kind in ("for a moment", "margin"))  # what one class alone saves stays before
    for kind in kinds:
        row(kind, (peak.parts.get(kind, 0) for peak in memory.values()), end_section=kind == kinds[-1])
    row("peak", (peak.peak_bytes for peak in memory.values()))
    row("budget", (peak.budget_bytes for peak in memory.values()))
    return table


def refusals_table(refused: list[Any], profiles: Mapping[str, Any]) -> Table:
    """A row for operators that are refused the same precision on the same class for the same reason."""
    alike: dict[tuple[str, str, str], list[Any]] = {}
    for refusal in refused:
        name = refusal.device_class
        where = shown(name, profiles[name].origin) if name else "all"
        key = (where, str(refusal.precision or "all lower"), refusal.why)
        alike.setdefault(key, []).append(refusal)
    table = Table(title="What no kernel serves, and what it runs in instead")
    for heading in ("class", "precision", "operators", "run in", "why"):
        table.add_column(heading)
    for (device_class, precision, why), those in alike.items():
        some = ", ".join(refusal.op for refusal in those[:2])
        more = f" and {len(those) - 2} more" if len(those) > 2 else ""
        instead = ", ".join(dict.fromkeys(refusal.runs_in for refusal in those))
        table.add_row(device_class, precision, some + more, instead, why)
    return table


def plan_table(chosen: Any) -> Table:
    table = Table(title=f"Plan for {chosen.model}: {chosen.step_s * 1e3:.1f} ms a step (simulated)")
    for heading in ("class", "lowered", "precisions", "waiting", "memory peak", "added variance"):
        table.add_column(heading, justify="left" if heading in ("class", "precisions") else "right")
    for name, entry in chosen.classes.items():
        counts: dict[str, int] = {}
        for precision in entry.assignment.values():
            counts[str(precision)] = counts.get(str(precision), 0) + 1
        precisions = ", ".join(f"{number} {precision}" for precision, number in counts.items())
        table.add_row(
            shown(name, entry.origin), f"{len(entry.lowered)} of {len(entry.assignment)}", precisions,
            f"{entry.predicted.wait_s * 1e3:.1f} ms", f"{entry.predicted.memory_bytes / 2**20:.0f} MiB",
            f"{entry.predicted.added_variance:.2e}",
        )  # fmt: skip
    return table


def lever_lines(plan: Plan) -> list[str]:
    """What a plan changes beside precisions, and what each lever bought. Simulated."""
    lines = [
        f"{name} saves less for backward: {', '.join(entry.saving_less)}"
        for name, entry in sorted(plan.classes.items())
        if entry.saving_less
    ]
    if plan.levers is None:
        return lines
    lines += [f"{name} takes {entry}" for name, entry in sorted(plan.levers.classes.items())]
    if plan.bucket_cap_bytes:
        lines.append(f"DDP's buckets hold {plan.bucket_cap_bytes / 2**20:g} MiB (bucket_cap_mb)")
    for lever, other in plan.levers.without.items():
        if other.step_s is None or other.added_variance is None:
            lines.append(f"without {lever} there is no such plan: {other.reason}")
            continue
        late = f" ({other.reason})" if other.reason else ""
        lines.append(
            f"without {lever} it would take {other.step_s * 1e3:.4g} ms and add {other.added_variance:.3g}, "
            f"not {1e3 * (plan.step_s or 0.0):.4g} ms and {plan.added_variance or 0.0:.3g}{late}"
        )
    return lines + [f"{lever} was not tried: {reason}" for lever, reason in plan.levers.untried.items()]


def frontier_table(plans: Sequence[Plan]) -> Table:
    """One line per point of the trade, the fastest first."""
    table = Table(title=f"Step time against added variance of {plans[0].model} (simulated)")
    for heading in ("plan", "step", "added variance", "perhaps needless", "lowered"):
        table.add_column(heading, justify="left" if heading in ("plan", "lowered") else "right")
    for number, plan in enumerate(plans, 1):
        lowered = [
            f"{len(entry.lowered)} on {shown(name, entry.origin)}"
            for name, entry in plan.classes.items()
            if entry.lowered
        ]
        table.add_row(
            f"plan-{number}.json", f"{1e3 * (plan.step_s or 0.0):.1f} ms",
            f"{plan.added_variance or 0.0:.2e}", f"{plan.gap or 0.0:.1%}", ", ".join(lowered) or "nothing",
        )  # fmt: skip
    return table
