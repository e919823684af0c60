"""Load plans and their bases for commands; simulate profiles of absent devices."""

from __future__ import annotations

import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

from qsync.errors import FormatError, MismatchError
from qsync.records.cluster import Cluster
from qsync.records.datasheets import datasheet
from qsync.records.plan_folder import Basis
from qsync.records.plans import Plan
from qsync.records.profiles import MEASURED, WHAT_IF, Profile, check_versions
from qsync.replayer import Recapture, changed_since_planned, under_levers

COSTS = "costs.json"  # the cost model of `qsync learn`, beside the profiles


def load_plan(
    plan_file: Path, folder: Path | None, cluster: Path | None, *, force: bool = False
) -> tuple[Plan, Basis]:
    """Load a plan and its basis under its levers, from `folder` (default: the plan's own).

    Without `cluster` and `force`, warns on stderr if the plan was made from another basis. Raises FormatError
    for a missing or malformed file, MismatchError if plan and basis do not belong together.
    """
    plan = Plan.load(plan_file)
    if folder is None and not (plan_file.parent / "graph.json").is_file():
        raise FormatError(
            f"there is no graph.json beside {plan_file}; give the folder of its graph and profiles with "
            "--basis"
        )
    folder = folder or plan_file.parent
    basis = load_basis(folder, cluster, force=force)
    plan.check_graph(basis.graph)
    found = under_levers(basis, plan.levers, Recapture.load(folder))
    if cluster is None and not force:
        doubt = changed_since_planned(found.graph, plan, found.profiles, found.cluster)
        if doubt:
            print(f"qsync: {doubt}; give others with --basis and --cluster", file=sys.stderr)
    return plan, found


def load_basis(folder: str | Path, cluster: str | Path | None = None, *, force: bool = False) -> Basis:
    """Load the basis (graph, profiles, sensitivity) in a folder, for its own or another cluster file.

    A class with a data sheet gets a simulated profile, from the fraction of peak that the measured profile
    reaches, or from costs.json. `force` accepts profiles of another batch shape, machine or version, labelled
    "what if". Raises FormatError if the folder has no measured profile.

    >>> basis = load_basis("demo-out", "cluster.toml")
    """
    folder = Path(folder)
    basis = Basis.load(folder, Cluster.load(cluster) if cluster else None)
    if force:
        basis = replace(basis, profiles=_forced(basis))
    wanted = {c.name: c.datasheet for c in basis.cluster.classes if c.datasheet is not None}
    if not wanted:
        return basis
    # Imports scipy: half a second, which only simulated devices need.
    from qsync.predictor.cost_model.fill_profile import simulate
    from qsync.predictor.cost_model.model import CostModel

    measured = _measured(folder)
    here = (basis.graph.hash, basis.graph.shapes_hash)
    forced = force and (measured.graph_hash, measured.shapes_hash) != here
    if forced:
        measured = measured.what_if(basis.graph)
    model = CostModel.load(folder / COSTS) if (folder / COSTS).is_file() else None
    simulated = {
        name: simulate(measured, basis.graph, datasheet(sheet), name, model) for name, sheet in wanted.items()
    }
    if forced:  # labelled, since neither the device nor the model was measured
        origin = f"simulated device, {WHAT_IF}"
        simulated = {name: replace(profile, origin=origin) for name, profile in simulated.items()}
    return replace(basis, profiles={**basis.profiles, **simulated})


def _forced(basis: Basis) -> dict[str, Profile]:
    """Return profiles with those of another graph, class or version labelled "what if"."""
    forced: dict[str, Profile] = {}
    for name, profile in basis.profiles.items():
        try:
            profile.check_graph(basis.graph)
            profile.check_class(basis.cluster[name])
            check_versions({**forced, name: profile})
            forced[name] = profile
        except MismatchError:
            forced[name] = profile.what_if(basis.graph)
    return forced


def _measured(folder: Path) -> Profile:
    """Return the folder's measured profile; an emulated class's only if there is no other."""
    found = [Profile.load(path) for path in sorted(folder.glob("profile-*.json"))]
    real = [profile for profile in found if profile.origin == MEASURED]
    if not real:
        raise FormatError(
            f"{folder} has no measured profile, which simulating a device needs; profile the model on any "
            "device first"
        )
    return next((profile for profile in real if profile.emulated_share is None), real[0])


def measured_beside_predicted(plan: Plan, basis: Basis, folder: Path) -> dict[str, Any]:
    """Return measured and predicted phases of each rank of a logged job, and what was slower."""
    from qsync.replayer import replay
    from qsync.replayer.explanation.measured_steps import MeasuredSteps, split
    from qsync.replayer.explanation.phases import expected

    logged = MeasuredSteps.load(folder)
    for rank, (name, calls) in enumerate(zip(logged.classes, logged.calls, strict=True)):
        if name not in plan.classes:
            raise MismatchError(
                f"rank {rank} of {folder} has class {name!r}, which the plan lacks; give the plan of that job"
            )
        planned = basis.graph.num_calls * plan.levers_of(name).passes
        if calls != planned:
            raise MismatchError(
                f"rank {rank} of {folder} calls the model {calls} times per step, but the plan {planned} "
                "times; log steps like the profiled ones"
            )
    timeline = replay(
        basis.graph, plan, basis.profiles, basis.cluster, bucket_cap_bytes=plan.bucket_cap_bytes
    )
    phases = expected(timeline)
    ranks = [
        {
            "rank": rank, "device_class": name, "measured": found,
            "predicted": split(phases[name], timeline[name].exposed_s, timeline[name].wait_s),
        }
        for rank, (name, found) in enumerate(zip(logged.classes, logged.by_rank(), strict=True))
    ]  # fmt: skip
    slower = [f"steps {first} to {last}: {drift}" for first, last, drift in logged.drifts(phases)]
    return {
        "num_steps": len(logged.steps), "ranks": ranks, "slower": slower,
        "slowdown": logged.slowdown(phases),
    }  # fmt: skip
