"""`qsync plan --cards`: predict from data sheets how fast cards would train a model."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from qsync.commands.options import print_json, print_lines, working
from qsync.errors import FormatError, shortened
from qsync.records.plan_folder import Basis
from qsync.records.plans import Plan


def judge_cards(
    cards: str, link: str, model: str, batch: int, length: int | None, base: str, as_json: bool
) -> None:
    """Print the verdict on cards such as `A100:4,T4:8` with a link such as `25Gb`. Simulated."""
    from qsync.what_if.card_verdicts import cards_of, graphs_of, judge, link_of

    between, pile = link_of(link), cards_of(cards)
    num_ranks = sum(one.count for one, _ in pile.values())
    if batch < 2 * num_ranks:
        raise FormatError(
            f"--batch {batch} is less than 2 samples for each of {num_ranks} cards; give a larger batch"
        )
    each = batch // num_ranks
    with working("capturing the model") as progress:
        graphs = graphs_of(model, each, length)
        progress("planning")
        basis, plan = judge(pile, between, graphs, base)
    if as_json:
        print_json(_as_json(basis, plan))
        return
    taken, bandwidth = each * num_ranks, shortened(link, quote=False)
    print_lines(
        f"{plan.model}, {taken} samples a step over {bandwidth}, {base}",
        *_lines(basis, plan),
        "simulated from data sheets: no card was measured, and precisions are judged without data",
        *(f"{name} is this machine, {sheet.source}" for name, (_, sheet) in pile.items() if name == "CPU"),
    )


def _lines(basis: Basis, plan: Plan) -> list[str]:
    rate = basis.cluster.num_ranks * basis.graph.batch_shapes[0][0] / (plan.step_s or 1.0)
    found = (
        plan.verdict.lines() if plan.verdict is not None else [f"{rate:.4g} samples per second, predicted"]
    )
    for name, entry in plan.classes.items():
        lowered = [entry.assignment[op] for op in entry.lowered]
        kinds = ", ".join(f"{lowered.count(p)} in {p}" for p in dict.fromkeys(lowered))
        own = f"{_samples(basis, plan, name)} samples a step"
        found.append(f"{name}: {own}, {len(entry.assignment)} products" + (f", {kinds}" if kinds else ""))
    return found


def _samples(basis: Basis, plan: Plan, name: str) -> int:
    return plan.levers_of(name).samples or basis.graph.batch_shapes[0][0]


def _as_json(basis: Basis, plan: Plan) -> Mapping[str, Any]:
    classes = {
        name: {"samples": _samples(basis, plan, name), "passes": plan.levers_of(name).passes,
               "lowered": len(entry.lowered), "products": len(entry.assignment)}
        for name, entry in plan.classes.items()
    }  # fmt: skip
    body = plan.to_json()
    return {"model": plan.model, "simulated": True, "base": str(plan.base), "step_s": plan.step_s,
            "classes": classes, "verdict": body.get("verdict")}  # fmt: skip
