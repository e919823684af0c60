"""`qsync plan --cards`: what a pile of cards would make of a model, from data sheets, before there is one."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from qsync.commands.options import print_json, print_lines, working
from qsync.errors import FormatError, InfeasibleError, shortened
from qsync.integrations.hugging_face import PREFIX, read_config
from qsync.records.cluster import Cluster, DeviceClass, Link
from qsync.records.datasheets import datasheet
from qsync.records.graph import OpGraph
from qsync.records.plan_folder import Basis
from qsync.records.plans import Plan

_LATENCY_S = 30e-6  # of an all-reduce between hosts (an assumption)
_MOST_TOKENS = 512  # of a sequence, unless --length says otherwise
_SIDE = 224  # of an image whose configuration says nothing
_UNITS = {"Gb": 1e9 / 8, "Mb": 1e6 / 8, "GB": 1e9, "MB": 1e6}


def judge(
    cards: str, link: str, model: str, batch: int, length: int | None, base: str, as_json: bool
) -> None:
    """Print the verdict on a pile of cards: `A100:4,T4:8` beside a link of `25Gb`. Simulated."""
    from qsync import planning
    from qsync.allocator import find_verdict
    from qsync.predictor.cost_model.sheet_profile import assumed_sensitivity, sheet_profile
    from qsync.replayer import Recapture

    cluster = Cluster(classes_of(cards), link_of(link))
    if batch < 2 * cluster.num_ranks:
        raise FormatError(
            f"--batch {batch} leaves {cluster.num_ranks} cards fewer than 2 samples each; give a larger one"
        )
    each = batch // cluster.num_ranks
    with working("capturing the model") as progress:
        graph, smaller = (_graph_of(model, samples, length) for samples in (each, max(1, each // 2)))
        progress("planning")
        profiles = {c.name: sheet_profile(graph, datasheet(c.name), c.name) for c in cluster.classes}
        basis = Basis(graph, cluster, profiles, assumed_sensitivity(graph))
        other, options = Recapture(smaller, {}), dict[str, Any](base=base)
        levers = ("share", "accumulate") if len(cluster.classes) > 1 else ()
        with_levers = dict[str, Any](levers=levers, other=other) if levers else {}
        try:
            plan = planning.plan(graph, profiles, basis.sensitivity, cluster, **options, **with_levers)
        except InfeasibleError as error:
            raise InfeasibleError(f"{graph.model} does not train on these cards: {error}") from error
        plan = replace(plan, verdict=find_verdict(basis, plan, other, options))
    if as_json:
        print_json(_as_json(basis, plan))
        return
    taken, bandwidth = each * cluster.num_ranks, shortened(link, quote=False)
    print_lines(
        f"{graph.model}, {taken} samples a step over {bandwidth}, {base}",
        *_lines(basis, plan),
        "simulated from data sheets: no card was measured, and precisions are judged without data",
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


def classes_of(text: str) -> tuple[DeviceClass, ...]:
    """Read `A100:4,T4:8`: a class of each card, named by its data sheet.

    FormatError for an unknown card, which names the nearest, and for a number that is none.
    """
    found: dict[str, DeviceClass] = {}
    for part in text.split(","):
        name, _, number = part.strip().partition(":")
        count = int(number) if number.isascii() and number.isdigit() else (0 if number else 1)
        if not name or not 1 <= count <= 10**6:
            raise FormatError(
                f"--cards takes CARD:NUMBER with commas, as A100:4,T4:8; found {shortened(part)}"
            )
        sheet = datasheet(name)
        if sheet.name in found:
            raise FormatError(f"--cards names {sheet.name} twice; give all of them as one number")
        found[sheet.name] = DeviceClass(
            sheet.name, "cuda", count, sheet.memory_bytes, sheet.precisions, datasheet=sheet.name
        )
    return tuple(found.values())


def link_of(text: str) -> Link:
    """Read `25Gb` (bits a second) or `3GB` (bytes). FormatError for what is none, and for a link of zero."""
    matched = re.fullmatch(r"([0-9]*\.?[0-9]+) ?(Gb|Mb|GB|MB)(?:/?ps|/s)?", text.strip())
    if matched is None or not float(matched[1]) > 0.0:
        raise FormatError(
            "--link takes a bandwidth above zero, as 25Gb (bits a second) or 3GB (bytes), found "
            f"{shortened(text)}"
        )
    return Link(_LATENCY_S, float(matched[1]) * _UNITS[matched[2]])


def _graph_of(model: str, samples: int, length: int | None) -> OpGraph:
    """Capture a model by its Hugging Face configuration, on the meta device: nothing is loaded."""
    import torch

    import qsync

    if not model.startswith(PREFIX):
        raise FormatError(
            f"--model takes hf:CONFIG.json, a configuration of Hugging Face, found {shortened(model)}"
        )
    config, kind, _ = read_config(Path(model.removeprefix(PREFIX)))
    with torch.device("meta"):
        made = kind(config)
        batch = _batch_of(made, samples, length)
    captured: OpGraph = qsync.capture(made.train(), batch)
    return captured


def _batch_of(model: Any, samples: int, length: int | None) -> dict[str, Any]:
    """Return a batch with labels for a model with a head, whatever its numbers."""
    import torch

    config, name = model.config, type(model).__name__
    if "For" not in name and "LMHead" not in name:
        raise FormatError(f"{name} has no loss; name a class with a head in architectures (…ForCausalLM)")
    if model.main_input_name == "pixel_values":
        side = getattr(config, "image_size", None) or _SIDE
        shape = (samples, getattr(config, "num_channels", 3), side, side)
        return {"pixel_values": torch.zeros(shape), "labels": torch.zeros(samples, dtype=torch.int64)}
    longest: int = getattr(config, "max_position_embeddings", None) or _MOST_TOKENS
    if length is not None and not 1 <= length <= longest:
        raise FormatError(
            f"--length must be from 1 to the {longest} tokens that {name} takes, found {length}"
        )
    ids = torch.zeros((samples, length or min(longest, _MOST_TOKENS)), dtype=torch.int64)
    is_by_sequence = "SequenceClassification" in name
    return {"input_ids": ids, "labels": torch.zeros(samples, dtype=torch.int64) if is_by_sequence else ids}
