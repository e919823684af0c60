"""`qsync replay`: predict a step under a plan on every rank. No torch."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from qsync.commands import tables
from qsync.commands.options import (
    MAX_SEED,
    BasisFolder,
    ClusterFile,
    Force,
    Json,
    PlanFile,
    check_outputs,
    console,
    print_json,
    print_lines,
)
from qsync.errors import QSyncError


def replay(
    plan_file: PlanFile,
    basis: BasisFolder = None,
    cluster: ClusterFile = None,
    trace: Annotated[Path | None, typer.Option(help="Write a Perfetto trace here.")] = None,
    measured: Annotated[
        Path | None, typer.Option(help="Folder of hybrid's log_steps: the trace also shows its last steps.")
    ] = None,
    picture: Annotated[Path | None, typer.Option(help="Draw the step, or the churn, here (PNG).")] = None,
    steps: Annotated[
        int | None, typer.Option(help="Also simulate so many steps that vary as the profiles did.")
    ] = None,
    seed: Annotated[int, typer.Option(min=0, max=MAX_SEED, help="Seed of these steps.")] = 0,
    churn: Annotated[
        str | None,
        typer.Option(
            help="Play cards that leave and return: a CSV file of time_s,event,card, or mtbf=HOURS"
            "[,mttr=MINUTES][,days=D][,seed=S][,classes=A+B].",
            show_default="none",
        ),
    ] = None,
    churn_costs: Annotated[
        str | None,
        typer.Option(
            help="Seconds that events cost: detection=5,timeout=30,...",
            show_default="those of a small machine",
        ),
    ] = None,
    force: Force = False,
    as_json: Json = False,
) -> None:
    """Predict a step under a plan on every rank, and where each rank waits (simulated)."""
    from qsync.commands.loading import load_plan
    from qsync.replayer import replay as simulate
    from qsync.replayer import vary

    if churn is None and churn_costs is not None:
        raise QSyncError(
            "--churn-costs has no effect without --churn; add --churn with a trace, or mtbf=HOURS"
        )
    if churn is not None and (trace is not None or steps is not None):
        raise QSyncError("--churn simulates many steps; leave out --trace and --steps, which show one step")
    if measured is not None and trace is None:
        raise QSyncError("--measured adds measured steps to the trace; name its file with --trace")
    check_outputs({"--trace": trace, "--picture": picture}, basis or plan_file.parent, plan_file, cluster)
    plan, found = load_plan(plan_file, basis, cluster, force=force)
    if churn is not None:
        from qsync.commands.churn import replay_churn

        replay_churn(plan, found, churn, churn_costs, picture, as_json)
        return
    parts, cap = (found.graph, plan, found.profiles, found.cluster), plan.bucket_cap_bytes
    ahead = {name: profile.ahead(tables.RUN_S) for name, profile in found.profiles.items()}
    timeline = simulate(found.graph, plan, ahead, found.cluster, bucket_cap_bytes=cap)
    varied = None
    if steps is not None:
        varied = vary(*parts, num_steps=steps, seed=seed, bucket_cap_bytes=cap)
    if trace is not None:
        from qsync.replayer.chrome_trace import write_trace
        from qsync.replayer.explanation.measured_steps import MeasuredSteps

        write_trace(timeline, trace, MeasuredSteps.load(measured) if measured is not None else None)
    if picture is not None:
        from qsync.figures import timeline as figure

        figure.timelines(figure.lanes_of(timeline), picture, simulated=True)
    if as_json:
        print_json({**timeline.to_json(), **({"steps_s": list(varied.steps_s)} if varied else {})})
        return
    console.print(tables.timeline_table(timeline, plan.model))
    lines = tables.loading_lines(found.profiles)
    if varied is not None:
        low, high = (1e3 * seconds for seconds in varied.range_s)
        lines.append(
            f"{steps} steps that vary as the profiles did (simulated, seed {seed}): nine in ten take "
            f"{low:.1f} to {high:.1f} ms; waiting for whoever is late costs {varied.lost:.1%}"
        )
    print_lines(*lines)
