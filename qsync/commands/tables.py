"""Tables and lines of commands: plans, reasons, steps, what-ifs, memory, learned costs."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from rich.table import Table

from qsync.operators.precision import Precision
from qsync.records.plans import Plan, traded_classes
from qsync.records.profiles import Profile, shown

if TYPE_CHECKING:
    from qsync.replayer import Timeline  # imports numpy, which most commands do not need


# Seconds of a run; intervals are for its median step, which follows the profile.
RUN_S = 600.0

_NUM_LARGEST = 3  # events named in a row of the critical path

# Reasons why a plan is not proved optimal.
_WHY_UNPROVED = {
    "optimal": "within the gap that was asked for",
    "time-limited": "time was up; --time-limit gives more",
    "unproved": "the bound may be loose where memory is short or classes wait for each other",
    "unsolved": "the program ran into numerical trouble",
}


def new_table(title: str, *headings: str) -> Table:
    """Return an empty table; a column whose heading begins with ">" holds numbers, at the right."""
    table = Table(title=title)
    for heading in headings:
        table.add_column(heading.removeprefix(">"), justify="right" if heading.startswith(">") else "left")
    return table


def labelled(of_classes: Mapping[str, Any], profiles: Mapping[str, Profile]) -> dict[str, Any]:
    """Return values under the class names shown in tables and pictures."""
    return {shown(name, profiles[name].origin): value for name, value in of_classes.items()}


def reasons_table(reasons: list[Any]) -> Table:
    """Return a table of lowered operators: saving, added variance, reason against a higher precision."""
    title = f"Why {len(reasons)} operators are lowered (simulated)"
    table = new_table(title, "class", "operator", "runs in", ">saves", ">adds variance", "why not higher")
    for reason in reasons:
        table.add_row(
            shown(reason.device_class, reason.origin), reason.op, str(reason.precision),
            f"{reason.time_saved_s * 1e3:.2f} ms", f"{reason.added_variance:.2e}",
            reason.verdict.partition("; ")[2],
        )  # fmt: skip
    return table


def shadow_prices_table(prices: Sequence[Any]) -> Table:
    """Return a table of classes: variance saved by more time or memory, and the next moves."""
    title = "Variance that more time or memory would save, to first order (simulated)"
    table = new_table(title, "class", ">per ms more", ">per MiB more", "next to raise", "next to lower")
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


def path_table(path: Any, profiles: Mapping[str, Profile], counts: Mapping[str, int]) -> Table:
    """Return a table of the critical path: one row per run of events of a class and phase."""
    title = f"The critical path: what makes the step of {path.step_s * 1e3:.1f} ms (simulated)"
    table = new_table(title, "who", "phase", ">takes", ">of the step", ">of it slowed", "largest")
    for run in path.stretches():
        name = run[0].device_class
        ranks = f", any of {counts[name]}" if counts.get(name, 1) > 1 else ""
        seconds, slowed_s = (sum(getattr(event, f) for event in run) for f in ("duration_s", "slowed_s"))
        largest = sorted(run, key=lambda event: -event.duration_s)[:_NUM_LARGEST]
        named = [
            f"{event.name.removesuffix(', backward')} {event.duration_s * 1e3:.2f} ms" for event in largest
        ]
        more = [f"{len(run) - len(largest)} more"] if len(run) > len(largest) else []
        table.add_row(
            shown(name, profiles[name].origin) + ranks if name in profiles else name, run[0].phase,
            f"{seconds * 1e3:.2f} ms", f"{seconds / path.step_s:.1%}",
            f"{slowed_s * 1e3:.2f} ms" if slowed_s > 1e-9 else "-", "\n".join(named + more),
        )  # fmt: skip
    return table


def what_ifs_table(found: Sequence[Any], profiles: Mapping[str, Profile], step_s: float, most: int) -> Table:
    """Return a table of what-if changes, most seconds first; like operators share a row."""
    title = f"What would shorten the step of {step_s * 1e3:.1f} ms (simulated)"
    table = new_table(title, "what", "class", ">wins", ">of the step", ">adds variance")
    alike: dict[tuple[str, str | None], list[Any]] = {}
    for one in found:
        alike.setdefault((re.sub(r"\d+", "*", one.what), one.device_class), []).append(one)
    for (_, name), those in list(alike.items())[:most]:
        one = those[0]
        too_large = f", {one.beyond_bytes / 2**20:.3g} MiB over the budget" if one.beyond_bytes else ""
        more = f" (and {len(those) - 1} like it)" if len(those) > 1 else ""
        table.add_row(
            one.what + more + too_large, shown(name, profiles[name].origin) if name else "-",
            f"{one.won_s * 1e3:.2f} ms", f"{one.won_s / step_s:.1%}",
            f"{one.variance:+.2e}" if one.kind == "precision" else "-",
        )  # fmt: skip
    return table


def measured_table(logged: Mapping[str, Any]) -> Table:
    """Return a table of ranks: medians of the logged steps, and the predictions."""
    table = Table(title=f"Medians of {logged['num_steps']} logged steps, ms: measured (predicted)")
    table.add_column("rank", no_wrap=True)
    names = list(logged["ranks"][0]["measured"])
    for name in (*names, "step"):
        table.add_column(name.partition(" ")[0], justify="right", no_wrap=True)
    for one in logged["ranks"]:
        both = [(one["measured"][name], one["predicted"][name]) for name in names]
        both.append((sum(m for m, _ in both), sum(p for _, p in both)))
        table.add_row(
            f"{one['rank']}, {one['device_class']}", *(f"{m * 1e3:.3g} ({p * 1e3:.3g})" for m, p in both)
        )
    return table


def drift_lines(logged: Mapping[str, Any]) -> list[str]:
    """Return the logged steps that were slower than predicted, or a line that none were."""
    if logged["slower"]:
        return list(logged["slower"])
    slowdown = logged["slowdown"]
    slow = f" on machines {slowdown:.2f} times slower than when they were profiled, as all of these are"
    return [f"No fifty steps in a row take a tenth longer than predicted{slow if slowdown >= 1.05 else ''}."]


def memory_table(memory: Mapping[str, Any], profiles: Mapping[str, Profile]) -> Table:
    """Return a table of memory peaks in bytes by kind, a column per class, with budgets."""
    names = (f">{name}" for name in labelled(memory, profiles))
    table = new_table("Memory of a rank at its fullest, MiB (simulated)", "what for", *names)

    def row(what: str, of_classes: Iterable[int], **options: Any) -> None:
        table.add_row(what, *(f"{n / 2**20:.1f}" if n else "-" for n in of_classes), **options)

    kinds = list(dict.fromkeys(kind for peak in memory.values() for kind in peak.parts))
    # Savings of a single class come last.
    kinds.sort(key=lambda kind: kind in ("temporaries, workspaces", "margin"))
    for kind in kinds:
        row(kind, (peak.parts.get(kind, 0) for peak in memory.values()), end_section=kind == kinds[-1])
    row("peak", (peak.peak_bytes for peak in memory.values()))
    row("budget", (peak.budget_bytes for peak in memory.values()))
    return table


def unsupported_table(unsupported: Sequence[Any], profiles: Mapping[str, Profile]) -> Table:
    """Return a table of operators without a kernel, by class, precision and reason."""
    alike: dict[tuple[str, str, str], list[Any]] = {}
    for one in unsupported:
        name = one.device_class
        where = shown(name, profiles[name].origin) if name else "all"
        key = (where, str(one.precision or "all lower"), one.why)
        alike.setdefault(key, []).append(one)
    title = "What no kernel serves, and what it runs in instead"
    table = new_table(title, "class", "precision", "operators", "run in", "why")
    for (device_class, precision, why), those in alike.items():
        some = ", ".join(one.op for one in those[:2])
        more = f" and {len(those) - 2} more" if len(those) > 2 else ""
        instead = ", ".join(dict.fromkeys(one.runs_in for one in those))
        table.add_row(device_class, precision, some + more, instead, why)
    return table


def plan_table(plan: Plan) -> Table:
    """Return a table of classes: lowered operators by precision, and predictions."""
    table = new_table(
        f"Plan for {plan.model}: {1e3 * (plan.step_s or 0.0):.1f} ms a step (simulated)",
        "class", ">lowered", "precisions", ">waiting", ">memory peak", ">added variance",
    )  # fmt: skip
    for name, entry in plan.classes.items():
        counts: dict[str, int] = {}
        for precision in entry.assignment.values():
            counts[str(precision)] = counts.get(str(precision), 0) + 1
        precisions = ", ".join(f"{number} {precision}" for precision, number in counts.items())
        predicted = entry.predicted
        assert predicted is not None  # the allocator predicts every class of its plans
        table.add_row(
            shown(name, entry.origin), f"{len(entry.lowered)} of {len(entry.assignment)}", precisions,
            f"{predicted.wait_s * 1e3:.1f} ms", f"{predicted.memory_bytes / 2**20:.0f} MiB",
            f"{predicted.added_variance:.2e}",
        )  # fmt: skip
    return table


def lever_lines(plan: Plan) -> list[str]:
    """Return a plan's levers, and the gain of each (simulated)."""
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


def gap_lines(plan: Plan) -> list[str]:
    """Return a line on how far the plan's variance may exceed the optimum, if its solver reports it."""
    if plan.gap is None:
        return []
    same = "step, memory and levers" if plan.levers else "step and memory"
    if plan.gap <= 1e-6:
        return [f"No plan adds less variance at this {same} (proved)"]
    return [
        f"No plan adds less than {plan.bound:.3g} variance at this {same}; this one adds "
        f"{plan.added_variance:.3g}, {plan.gap:.1%} of it perhaps needlessly "
        f"({_WHY_UNPROVED.get(plan.status or '', plan.status)})"
    ]


def base_lines(plan: Plan) -> list[str]:
    """Return a line on the baseline of the variance, if the base is not FP32."""
    if plan.base is Precision.FP32:
        return []
    own = sum(entry.predicted.base_variance for entry in plan.classes.values() if entry.predicted)
    return [f"Variance is stated above that of {plan.base} on every class, {own:.2e}"]


def frontier_table(plans: Sequence[Plan]) -> Table:
    """Return a table of the trade-off's plans, fastest first; with peaks where plans trade memory."""
    traded = traded_classes(plans)
    title = f"Step time against added variance of {plans[0].model} (simulated)"
    peaks = [f">peak of {name}" for name in traded]
    table = new_table(title, "plan", ">step", ">added variance", ">perhaps needless", *peaks, "lowered")
    for number, plan in enumerate(plans, 1):
        lowered = [
            f"{len(entry.lowered)} on {shown(name, entry.origin)}"
            for name, entry in plan.classes.items()
            if entry.lowered
        ]
        held = [f"{entry.memory_bytes / 2**20:.3g} MiB" for name in traded if (entry := plan[name].predicted)]
        table.add_row(
            f"plan-{number}.json", f"{1e3 * (plan.step_s or 0.0):.1f} ms",
            f"{plan.added_variance or 0.0:.2e}", f"{plan.gap or 0.0:.1%}", *held,
            ", ".join(lowered) or "nothing",
        )  # fmt: skip
    return table


def timeline_table(timeline: Timeline, model: str) -> Table:
    """Return a table of classes: parts of the step, and the memory peak (simulated)."""
    interval = (
        f", {timeline.interval_s[0] * 1e3:.1f} to {timeline.interval_s[1] * 1e3:.1f} in nine of ten runs of "
        f"{RUN_S / 60:.0f} minutes" if timeline.interval_s else ""
    )  # fmt: skip
    table = new_table(
        f"One step of {model}: {timeline.step_s * 1e3:.1f} ms{interval} (simulated)",
        "class", ">ranks", ">loading", ">compute", ">communication", ">waiting", ">memory peak",
    )  # fmt: skip
    for name, entry in timeline.classes.items():
        table.add_row(
            shown(name, entry.origin), str(entry.num_ranks),
            f"{entry.loading_s * 1e3:.1f} ms" if entry.loading_s else "-",
            f"{(entry.compute_s - entry.loading_s) * 1e3:.1f} ms",
            f"{(entry.slowed_s + entry.exposed_s) * 1e3:.1f} ms", f"{entry.wait_s * 1e3:.1f} ms",
            f"{entry.memory_bytes / 2**20:.0f} MiB",
        )  # fmt: skip
    return table


def loading_lines(profiles: Mapping[str, Profile]) -> list[str]:
    """Return the classes whose predictions ignore data loading."""
    without = [profile.device_class for profile in profiles.values() if not profile.loading_s]
    if not without:
        return []
    return [
        f"Data loading is no part of the steps of {', '.join(without)}: no loader was profiled (pass "
        "loader= to qsync.hybrid or qsync.profile)"
    ]


def learned_costs_table(error: Any) -> Table:
    """Return a table of operator kinds: the error of learned costs (a cost model's `error`)."""
    title = "Error of the learned costs, at shapes held out (measured)"
    table = new_table(title, "operator", ">median", ">95th percentile")
    for kind, (median, most) in {**error.by_kind, "all": error.overall}.items() if error else ():
        table.add_row(kind, f"{median:.0%}", f"{most:.0%}")
    return table
