"""Predict from data sheets how fast a set of cards trains a model. Simulated."""

from __future__ import annotations

import re
from dataclasses import replace
from pathlib import Path
from typing import Any

from qsync.allocator import find_verdict
from qsync.allocator.levers.shares import BatchShares
from qsync.allocator.planner import allocate
from qsync.errors import FormatError, InfeasibleError, shortened
from qsync.integrations.hugging_face import PREFIX, read_config
from qsync.predictor.cost_model.sheet_profile import assumed_sensitivity, sheet_profile
from qsync.records.cluster import Cluster, DeviceClass, Link
from qsync.records.datasheets import DataSheet, datasheet
from qsync.records.graph import OpGraph
from qsync.records.levers import ACCUMULATE, SHARE
from qsync.records.plan_folder import Basis
from qsync.records.plans import Plan
from qsync.replayer import Recapture

CPU = "CPU"  # this machine's own processor
# Assumptions: cards of a kind share hosts of eight, linked at a rate between PCIe's and NVLink's. Hosts
# exchange over the given link.
WITHIN, CARDS_A_HOST = Link(20e-6, 50e9, num_ranks=2), 8
_LATENCY_S = 30e-6  # seconds of an all-reduce between hosts
_MOST_TOKENS = 512  # tokens of a sequence, unless a length is given
_SIDE = 224  # pixels of an image's side, if the configuration has no size
_UNITS = {"Gb": 1e9 / 8, "Mb": 1e6 / 8, "GB": 1e9, "MB": 1e6}


def judge(
    cards: dict[str, tuple[DeviceClass, DataSheet]], link: Link, graphs: tuple[OpGraph, OpGraph], base: str
) -> tuple[Basis, Plan]:
    """Return the best plan of batch shares and precisions for cards, its verdict and its basis.

    `graphs` are one model's graphs for two batch sizes, the first that of a rank with equal shares. Raises
    InfeasibleError where the model does not fit.

    >>> judge(cards_of("A100:4,T4:8"), link_of("25Gb"), graphs_of("hf:config.json", 32), "bf16")
    """
    basis, other = basis_of(cards, link, graphs)
    graph = basis.graph
    _check_weights(graph, cards)
    options: dict[str, Any] = {"base": base}
    try:
        if len(cards) == 1:
            return basis, allocate(graph, basis.profiles, basis.sensitivity, basis.cluster, **options)
        shares = BatchShares(basis, other, (SHARE, ACCUMULATE), options)
        plan = shares.plan()
    except InfeasibleError as error:
        raise InfeasibleError(f"{graph.model} cannot be trained on these cards: {error}") from error
    return basis, replace(plan, verdict=find_verdict(basis, plan, other, options, shares))


def basis_of(
    cards: dict[str, tuple[DeviceClass, DataSheet]], link: Link, graphs: tuple[OpGraph, OpGraph]
) -> tuple[Basis, Recapture]:
    """Return the basis of cards from their data sheets, and the second capture, both simulated."""
    hosts = sum(-(-one.count // CARDS_A_HOST) for one, _ in cards.values())
    cluster = Cluster(tuple(one for one, _ in cards.values()), WITHIN)
    cluster = cluster.on_hosts(hosts, link) if hosts > 1 else cluster
    profiles, others = ({name: sheet_profile(at, sheet, name) for name, (_, sheet) in cards.items()}
                       for at in graphs)  # fmt: skip
    graph, recaptured = graphs
    return Basis(graph, cluster, profiles, assumed_sensitivity(graph)), Recapture(recaptured, others)


def _check_weights(graph: OpGraph, cards: dict[str, tuple[DeviceClass, DataSheet]]) -> None:
    """Raise InfeasibleError if weights, gradients and AdamW's state in FP32 exceed a card's memory."""
    needed = 16 * sum(value.num_elements for value in graph.parameters if value.requires_grad)
    small = [name for name, (one, _) in cards.items() if one.memory_bytes < needed]
    if small:
        raise InfeasibleError(
            f"{graph.model} does not fit on {', '.join(small)}: weights, gradients and AdamW's state take "
            f"{needed / 1e9:.0f} GB of every card"
        )


def cards_of(text: str) -> dict[str, tuple[DeviceClass, DataSheet]]:
    """Parse cards such as `A100:4,T4:8` into device classes from data sheets; `CPU` is this machine.

    Raises FormatError for an unknown card (naming the nearest) or a malformed number.
    """
    found: dict[str, tuple[DeviceClass, DataSheet]] = {}
    for part in text.split(","):
        name, _, number = part.strip().partition(":")
        count = int(number) if number.isascii() and number.isdigit() else (0 if number else 1)
        if not name or not 1 <= count <= 10**6:
            raise FormatError(
                f"--cards takes CARD:NUMBER with commas, such as A100:4,T4:8; found {shortened(part)}"
            )
        sheet = _sheet_of_this_cpu() if name.upper() == CPU else datasheet(name)
        if sheet.name in found:
            raise FormatError(f"--cards names {sheet.name} twice; give their total number once")
        device, known = ("cuda", sheet.name) if sheet.capability else ("cpu", None)
        able = tuple(p for p in sheet.precisions if device not in p.facts.emulated_on)
        one = DeviceClass(sheet.name, device, count, sheet.memory_bytes, able, datasheet=known)
        found[sheet.name] = one, sheet
    return found


def _sheet_of_this_cpu() -> DataSheet:
    """Measure this machine's processor, in about a second."""
    import torch

    from qsync.what_if.cost_learning import measure_sheet

    return replace(measure_sheet(torch.device("cpu")), name=CPU)


def link_of(text: str) -> Link:
    """Parse a bandwidth, `25Gb` (bits per second) or `3GB` (bytes). Raises FormatError, also for zero."""
    matched = re.fullmatch(r"([0-9]*\.?[0-9]+) ?(Gb|Mb|GB|MB)(?:/?ps|/s)?", text.strip())
    if matched is None or not float(matched[1]) > 0.0:
        raise FormatError(
            "--link takes a bandwidth above zero, such as 25Gb (bits per second) or 3GB (bytes per second), "
            f"found {shortened(text)}"
        )
    return Link(_LATENCY_S, float(matched[1]) * _UNITS[matched[2]], num_ranks=2)


def graphs_of(model: str, samples: int, length: int | None = None) -> tuple[OpGraph, OpGraph]:
    """Capture a model from its Hugging Face configuration at two batch sizes, the first as given.

    The model is on the meta device: nothing is loaded or computed.
    """
    import torch

    import qsync

    if not model.startswith(PREFIX):
        raise FormatError(
            f"--model takes hf:CONFIG.json, a Hugging Face configuration file, found {shortened(model)}"
        )
    config, kind, _ = read_config(Path(model.removeprefix(PREFIX)))
    with torch.device("meta"):
        made = kind(config).train()
        second = samples // 2 if samples > 3 else 2 * samples  # a batch of one has other operators
        batches = [_batch_of(made, number, length) for number in (samples, second)]
    if getattr(made, "loss_type", "") is None:  # transformers' default, set here without its warning
        made.loss_type = "ForCausalLM"
    graph, other = (qsync.capture(made, batch) for batch in batches)
    return graph, other


def _batch_of(model: Any, samples: int, length: int | None) -> dict[str, Any]:
    """Return a batch with labels, of placeholder values, for a model with a head."""
    import torch

    config, name = model.config, type(model).__name__
    if "For" not in name and "LMHead" not in name:
        raise FormatError(
            f'{name} returns no loss; set "architectures" to a class with a head (…ForCausalLM)'
        )
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
