"""`qsync replay --churn`: what a plan's job trains while cards leave and return. Imports no torch."""

from __future__ import annotations

from pathlib import Path

from rich.table import Table

from qsync.commands.options import console, print_json
from qsync.records.plan_folder import Basis
from qsync.records.plans import Plan
from qsync.replayer.churn import ChurnCosts, ChurnReport, MembershipSteps, RandomChurn, play, read_events

_SHOWN_MEMBERSHIPS = 8


def replay_churn(
    plan: Plan, basis: Basis, churn: str, costs: str | None, picture: Path | None, as_json: bool
) -> None:
    """Play a trace (a file, or "mtbf=...") over a plan, print what it costs, and draw it."""
    ranks = {c.name: c.count for c in basis.cluster.classes}
    seconds = ChurnCosts.parse(costs) if costs is not None else ChurnCosts()
    is_random = "=" in churn and not Path(churn).is_file()
    events = RandomChurn.parse(churn).events(ranks) if is_random else read_events(churn)
    steps = MembershipSteps(basis.graph, plan, basis.profiles, basis.cluster)
    report = play(events, ranks, steps, seconds, samples_per_step=steps.samples_per_step)
    if picture is not None:
        from qsync.figures import churn as figure

        figure.throughput(report, events, picture, model=plan.model)
    if as_json:
        print_json(report.to_json())
        return
    console.print(_causes_table(report, plan.model))
    console.print(_memberships_table(report, steps))
    lossless = report.samples_per_s / (report.lossless_samples_per_s or 1.0)
    console.print(
        f"{report.num_steps} steps of {steps.samples_per_step} samples, {report.samples_per_s:.4g} samples/s "
        f"(simulated): {report.of_ideal:.1%} of all cards without an event, {lossless:.1%} of the cards "
        "present without a loss",
        highlight=False, soft_wrap=True,
    )  # fmt: skip


def _causes_table(report: ChurnReport, model: str) -> Table:
    """Return a row per cause that took time, after the time that trained."""
    table = Table(title=f"{report.duration_s:.6g} s of {model} (simulated)")
    for heading in ("spent on", "seconds", "part"):
        table.add_column(heading, justify="left" if heading == "spent on" else "right")
    for cause, seconds in {"training": report.training_s, **report.lost_s}.items():
        if seconds:
            table.add_row(cause.replace("_", " "), f"{seconds:.2f}", f"{seconds / report.duration_s:.2%}")
    return table


def _memberships_table(report: ChurnReport, steps: MembershipSteps) -> Table:
    """Return a row per membership with its plan, those that trained longest."""
    num = len(report.memberships)
    title = f"{num} memberships that trained, in {report.num_reconfigurations} changes"
    if num > _SHOWN_MEMBERSHIPS:
        title += f"; the {_SHOWN_MEMBERSHIPS} longest"
    table = Table(title=title)
    for heading in ("cards", "samples of a card", "step", "steps", "part"):
        table.add_column(heading, justify="left" if heading == "cards" else "right")
    for one in report.memberships[:_SHOWN_MEMBERSHIPS]:
        table.add_row(
            ", ".join(f"{name} {count}" for name, count in one.ranks.items()),
            ", ".join(str(samples) for samples in steps.shares(one.ranks).values()),
            f"{1e3 * one.step_s:.1f} ms", str(one.num_steps), f"{one.training_s / report.duration_s:.2%}",
        )  # fmt: skip
    return table
