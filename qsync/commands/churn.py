"""`qsync replay --churn`: simulate a plan's job while cards leave and return. No torch."""

from __future__ import annotations

from pathlib import Path

from qsync.commands.options import console, print_json, print_lines
from qsync.commands.tables import new_table
from qsync.records.plan_folder import Basis
from qsync.records.plans import Plan
from qsync.replayer.churn import ChurnCosts, MembershipSteps, RandomChurn, play, read_events

_SHOWN_MEMBERSHIPS = 8


def replay_churn(
    plan: Plan, basis: Basis, churn: str, costs: str | None, picture: Path | None, as_json: bool
) -> None:
    """Simulate a plan under a trace of leaving cards (a file, or "mtbf=..."); print and draw the costs."""
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
    table = new_table(
        f"{report.duration_s:.6g} s of {plan.model} (simulated)",
        "spent on", ">samples of a card", ">step", ">steps", ">seconds", ">part",
    )  # fmt: skip
    for one in report.memberships[:_SHOWN_MEMBERSHIPS]:
        table.add_row(
            ", ".join(f"{name} {count}" for name, count in one.ranks.items()),
            ", ".join(str(samples) for samples in steps.shares(one.ranks).values()),
            f"{1e3 * one.step_s:.1f} ms", str(one.num_steps),
            f"{one.training_s:.2f}", f"{one.training_s / report.duration_s:.2%}",
        )  # fmt: skip
    for cause, lost_s in report.lost_s.items():
        if lost_s:
            table.add_row(
                cause.replace("_", " "), "", "", "", f"{lost_s:.2f}", f"{lost_s / report.duration_s:.2%}"
            )
    console.print(table)
    lossless = report.samples_per_s / (report.lossless_samples_per_s or 1.0)
    print_lines(
        f"{report.num_steps} steps of {steps.samples_per_step} samples, {report.samples_per_s:.4g} samples/s "
        f"(simulated): {report.of_ideal:.1%} of all cards without an event, {lossless:.1%} of the cards "
        f"present without a loss; {len(report.memberships)} memberships in {report.num_reconfigurations} "
        "changes"
    )
