"""Do plans hold? A thousand made-up problems.

    python -m qsync.experiments.allocation.random_checks --out FOLDER

Each is solved by both solvers. Every plan is given to `check_plan`, which replays it. Where every assignment
can be tried, problems called infeasible must be so, and the exact solver's variance and bound are compared
with the least there is. Problems: `random_problems`; seconds are the processor's.
"""

from __future__ import annotations

import itertools
import math
import random
import statistics
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
import typer
from rich.table import Table

from qsync import OpGraph
from qsync.allocator import allocate, check_plan
from qsync.allocator.problem import Constraints, Problem, make_problem
from qsync.allocator.search_state import State
from qsync.allocator.solvers.precision_recovery import holds
from qsync.errors import InfeasibleError
from qsync.experiments.allocation.random_problems import Drawn, problem
from qsync.experiments.harness import Experiment, Fresh, Out, bar, run_command, table_of
from qsync.experiments.workloads.subjects import NAMES, subject
from qsync.tracing.tracer import capture

PROBLEMS_A_PIECE = 25
SOLVERS = ("milp", "greedy")
# With more assignments than this, of all classes that may be lowered together, not every one is tried.
MOST_TRIED = 3000
TIME_LIMIT_S = 5.0
WRONG = "problems with something wrong"
GREEDY_BAR, ROUNDING = 0.05, 1e-6
# The exact solver stops within this part of the least variance; so near, the other may end below it.
STOPS = 1e-3


def main(
    out: Out = Path("allocation_random"), problems: int = 1000, seed: int = 0, fresh: Fresh = False
) -> None:
    """Solve the problems, print the counts, write every row to the folder."""
    if problems < 1:
        raise typer.BadParameter("--problems must be at least 1")
    torch.set_num_threads(1)
    experiment = Experiment("random problems", out, seed=seed, fresh=fresh)
    graphs = [captured_graph(name) for name in NAMES]
    rows = []
    with experiment.progress():
        for begin in range(0, problems, PROBLEMS_A_PIECE):
            numbers = range(begin, min(begin + PROBLEMS_A_PIECE, problems))
            piece = f"problems {numbers[0]} to {numbers[-1]}"
            rows += experiment.piece(piece, partial(try_problems, seed, numbers, graphs))
    found = counts(rows)
    bars = [bar(what, found[what], 0) for what in ("violations of plans", "broke")]
    bars.append(bar(WRONG, len(found[WRONG]), 0))
    experiment.finish(
        {"counts": found, "rows": rows}, bars=bars,
        measured="seconds; costs, sensitivities and clusters are made up", tables=[table(found)],
    )  # fmt: skip


def captured_graph(name: str) -> OpGraph:
    """Return the graph of one of the experiments' models, for a batch of two."""
    chosen = subject(name, 2)
    return capture(chosen.make_model(0), chosen.batch(0, 0, 0)[0])


def try_problems(seed: int, numbers: Sequence[int], graphs: Sequence[OpGraph]) -> list[dict[str, Any]]:
    """Solve the problems of these numbers."""
    return [try_problem(seed, number, graphs) for number in numbers]


def try_problem(seed: int, number: int, graphs: Sequence[OpGraph] = ()) -> dict[str, Any]:
    """Solve one problem with both solvers; return what they found, and in `wrong` what is wrong."""
    drawn = problem(seed, number, graphs)
    drawn = bounded(drawn, random.Random(f"budgets {seed} {number}"))
    row: dict[str, Any] = {
        "number": number, "operators": len(drawn.graph.adjustable), "classes": len(drawn.cluster.classes),
        "budgets": "budgets" in drawn.options, "target": "target_s" in drawn.options,
    }  # fmt: skip
    wrong: list[str] = []
    given, at = (drawn.graph, drawn.profiles, drawn.sensitivity, drawn.cluster), drawn.options
    for solver in SOLVERS:
        begun = time.process_time()
        try:
            plan = allocate(*given, **at, solver=solver, time_limit_s=TIME_LIMIT_S)
        except InfeasibleError as error:
            row[solver] = {"infeasible": str(error)}
            continue
        except Exception as error:  # what breaks is what is looked for
            row[solver] = {"broke": repr(error)}
            wrong.append(f"{solver} broke: {error!r}")
            continue
        seconds = time.process_time() - begun
        kept: dict[str, Any] = {key: at.get(key) for key in ("budgets", "bucket_cap_bytes")}
        found = check_plan(drawn.graph, plan, *given[1:], **kept)
        wrong += [f"{solver}: {violation}" for violation in found.violations]
        row[solver] = {
            "variance": plan.added_variance, "gap": plan.gap, "bound": plan.bound, "seconds": seconds,
            "target_s": plan.target_s, "violations": len(found.violations),
        }  # fmt: skip
    wrong += _compared(row)
    wrong += _tried(drawn, row)
    return {**row, "wrong": wrong}


def bounded(drawn: Drawn, draw: random.Random) -> Drawn:
    """Add budgets, or a target, to the problem in half of all cases: some that cannot be kept."""
    state = State(_posed(drawn))
    options = dict(drawn.options)
    step_s, peaks = state.step_s(), {name: one.peak_bytes for name, one in state.classes.items()}
    for name, one in state.classes.items():
        state.move(name, {op: choices[0] for op, choices in one.part.choices.items()})
    if draw.random() < 0.5:
        options["budgets"] = {}
        for name, one in state.classes.items():
            low, high = sorted((one.peak_bytes, peaks[name]))
            if draw.random() < 0.7:
                options["budgets"][name] = max(1, int(low + draw.uniform(-0.2, 1.2) * (high - low)))
    if draw.random() < 0.4:
        options.pop("slack")
        options["target_s"] = state.step_s() + draw.uniform(-0.2, 1.0) * (step_s - state.step_s())
    return replace(drawn, options=options)


def _posed(drawn: Drawn) -> Problem:
    names = ("budgets", "pins", "bucket_cap_bytes")
    given = {name: drawn.options[name] for name in names if name in drawn.options}
    return make_problem(drawn.graph, drawn.profiles, drawn.sensitivity, drawn.cluster, Constraints(**given))


def _compared(row: Mapping[str, Any]) -> Iterator[str]:
    """Compare the solvers with each other."""
    exact, quick = row["milp"], row["greedy"]
    if ("infeasible" in exact) != ("infeasible" in quick):
        yield "only one solver calls it infeasible"
    if "variance" not in exact or "variance" not in quick:
        return
    # Where the exact solver cannot prove its plan, it and greedy end in plans that no window betters.
    apart = min(max(exact["gap"], STOPS), GREEDY_BAR)
    if exact["variance"] > quick["variance"] * (1 + apart + ROUNDING):
        yield f"the exact solver's variance is {exact['variance'] / quick['variance'] - 1:.2%} above greedy's"
    yield from _bounds(row, min(exact["variance"], quick["variance"]), "a plan")


def _bounds(row: Mapping[str, Any], least: float, what: str) -> Iterator[str]:
    """Compare the solvers' bounds with the least variance that is known."""
    for solver in SOLVERS:
        if row[solver]["bound"] > least * (1 + ROUNDING) + 1e-300:
            yield f"{solver}'s bound is {row[solver]['bound'] / max(least, 1e-300) - 1:.2%} above {what}"


def _tried(drawn: Drawn, row: dict[str, Any]) -> Iterator[str]:
    """Compare with every assignment, if these are few; `row["least"]` is the least variance of any."""
    if any("broke" in row[solver] for solver in SOLVERS):
        return
    state = State(_posed(drawn))
    lowerable = _lowerable(state, bool(drawn.options.get("lower_all")))
    choices = {name: state.classes[name].part.choices for name in lowerable}
    many = math.prod(len(options) for of in choices.values() for options in of.values())
    row["tried"] = many <= MOST_TRIED and not drawn.options.get("margin")
    if not row["tried"]:
        return
    every = {name: list(itertools.product(*of.values())) for name, of in choices.items()}
    infeasible = "infeasible" in row["milp"]
    target_s = drawn.options.get("target_s") if infeasible else row["milp"]["target_s"]
    least = math.inf
    for chosen in itertools.product(*every.values()):
        for name, assignment in zip(every, chosen, strict=True):
            state.move(name, dict(zip(choices[name], assignment, strict=True)))
        # Without a target only memory can be missed.
        fits = all(one.fits() for one in state.classes.values())
        if (fits if target_s is None else holds(state, target_s)) and state.variance < least:
            least = state.variance
    row["least"] = least if math.isfinite(least) else None
    if infeasible and row["least"] is not None:
        yield "called infeasible, but an assignment holds"
    if infeasible:
        return
    exact = row["milp"]
    if exact["variance"] > least * (1 + STOPS + ROUNDING) + 1e-300:
        more = exact["variance"] / max(least, 1e-300) - 1
        yield f"the exact solver's variance is {more:.2%} above the least"
    yield from _bounds(row, least, "the least")


def _lowerable(state: State, lower_all: bool) -> list[str]:
    """Return the classes that `allocate` lowers: all but the strongest, if FP32 fits there."""
    strongest = min(state.classes, key=lambda name: state.classes[name].work.total_s)
    return [n for n, one in state.classes.items() if lower_all or n != strongest or not one.fits()]


def counts(rows: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Count how problems came out, and how far greedy is from the exact solver."""
    solved = [row for row in rows if all("variance" in row[solver] for solver in SOLVERS)]
    lowered = [row for row in solved if row["milp"]["variance"] > 0.0]
    more = sorted(row["greedy"]["variance"] / row["milp"]["variance"] - 1 for row in lowered)
    gaps = [row["milp"]["gap"] for row in solved]
    tried = [row for row in rows if row.get("tried")]
    return {
        "problems": len(rows),
        "solved": len(solved),
        "of these something lowered": len(lowered),
        "infeasible": sum("infeasible" in row["milp"] for row in rows),
        "violations of plans": sum(row[s].get("violations", 0) for row in rows for s in SOLVERS),
        "broke": sum("broke" in row[s] for row in rows for s in SOLVERS),
        "every assignment tried": len(tried),
        "infeasible, and every assignment tried": sum("infeasible" in row["milp"] for row in tried),
        "greedy above MILP, median": statistics.median(more) if more else 0.0,
        "greedy above MILP, 95th percentile": more[int(0.95 * (len(more) - 1))] if more else 0.0,
        "greedy above MILP, worst": more[-1] if more else 0.0,
        "greedy more than 5 % above MILP": sum(one > GREEDY_BAR for one in more),
        "MILP gap above 1 %": sum(gap > 0.01 for gap in gaps),
        "MILP gap, worst": max(gaps, default=0.0),
        "MILP seconds, worst": max((row["milp"]["seconds"] for row in solved), default=0.0),
        WRONG: [[row["number"], *row["wrong"]] for row in rows if row["wrong"]],
    }


def table(found: Mapping[str, Any]) -> Table:
    """Return the counts, and what is wrong where."""
    rows = []
    for name, value in found.items():
        if isinstance(value, list):
            rows += [[f"problem {number}", "; ".join(texts)] for number, *texts in value[:40]]
        else:
            rows.append([name, f"{value:.3g}" if isinstance(value, float) else str(value)])
    return table_of("Random problems (made up)", ("", ""), rows, left=2)


if __name__ == "__main__":
    run_command(main)
