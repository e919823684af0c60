"""`elastic`: the counterpart of `hybrid` for jobs whose cards join and leave."""

from __future__ import annotations

import logging
import time
import uuid
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, Literal

import torch

import qsync
from qsync import api
from qsync.distributed import job
from qsync.elastic_training.elastic_job import ElasticJob
from qsync.elastic_training.healing import Server
from qsync.elastic_training.job_token import TOKEN_VARIABLE, JobToken, token_of_environment
from qsync.elastic_training.meeting import Card
from qsync.elastic_training.options import ElasticOptions
from qsync.elastic_training.plan_book import PlanBook, class_costs
from qsync.elastic_training.rendezvous import Rendezvous
from qsync.operators.precision import Precision
from qsync.predictor.profiling.made_optimizer import maker_of
from qsync.records.cluster import DeviceClass
from qsync.records.graph import digest
from qsync.records.plans import Plan
from qsync.tracing.held_state import undisturbed

logger = logging.getLogger("qsync")

_PROFILED_PARTS = 4  # classes are profiled on a batch divided by this number


def elastic(
    model: torch.nn.Module,
    optimizer: torch.optim.Optimizer,
    dataset: Any,
    *,
    batch_size: int,
    loss_fn: api.LossFunction | None = None,
    lighthouse: str | None = None,
    start_with: int | None = None,
    seed: int = 0,
    states: Mapping[str, Any] | None = None,
    plan: Plan | Literal[False] | None = None,
    card: str | None = None,
    device_class: str | None = None,
    emulated_share: float | None = None,
    precisions: Sequence[Precision | str] | None = None,
    base: str | None = None,
    bitwise: bool = False,
    compression: str | None = None,
    share: bool = False,
    max_samples: int | None = None,
    timeout_s: float = 10.0,
    join_timeout_s: float = 600.0,
    num_workers: int = 0,
    collate_fn: Callable[[list[Any]], Any] | None = None,
    cache_dir: str | Path | None = None,
    **options: Any,
) -> ElasticJob:
    """Join a training job whose cards join and leave, at its lighthouse (`qsync lighthouse`).

    Call it in one process per card, started by torchrun or by hand, at any time. It profiles the card's class
    unless cached. The global batch is constant: its samples are divided among the current cards, and every
    step's gradient is their mean. Dead, stopped or stuck cards are left out; new cards are healed from a
    training card. (As in torchft, whose lighthouse and process groups this uses.)

    Args:
        model: the same on every card; the first card's weights are used.
        optimizer: the optimizer of the model's parameters.
        dataset: a dataset with `len` and integer indices; the same on every card.
        batch_size: the number of samples of a step on all cards together.
        loss_fn: `loss_fn(model, batch)` returns the scalar loss of a batch from `collate_fn`, for profiling.
            Default: the model output's `.loss`.
        lighthouse: HOST:PORT; default: the variable QSYNC_LIGHTHOUSE.
        start_with: the number of cards to wait for before the first step; default: torchrun's WORLD_SIZE,
            else 1.
        seed: seed of the order of samples.
        states: further objects by name with `state_dict` and `load_state_dict`, sent to joining cards:
            schedulers, averages.
        plan: use this plan under every membership, without profiling. False: lower nothing.
        card: the name of this card, for `qsync release`; default: its class and a number.
        device_class: the name of this card's class, instead of the detected one.
        emulated_share: slow this process to this share of its core, in (0, 1]: as in `qsync.hybrid`.
        precisions: the precisions to choose from, instead of all that this card has in hardware.
        base: as in `qsync.hybrid`; default "fp32".
        bitwise: as in `qsync.hybrid`.
        compression: how gradients travel between cards, for slow links: "bf16" or "int8", each also with
            "+feedback", which begins anew where cards join or leave. Plans predict FP32's exchange.
        share: give cards samples in proportion to their predicted speed, instead of equally many.
        max_samples: the largest number of samples of a card per pass; default: by the memory model.
        timeout_s: seconds after which a silent card is left out; must exceed the difference between the
            slowest and the fastest step.
        join_timeout_s: seconds to wait before the first step for missing cards, or cards without a plan;
            logged every ten seconds.
        num_workers: of `torch.utils.data.DataLoader`.
        collate_fn: of `torch.utils.data.DataLoader`.
        cache_dir: the folder of cached profiles, instead of `~/.cache/qsync`.
        **options: options of `qsync.plan`, but for levers.

    Returns:
        The job: call `job.model`, and iterate over `job.steps(...)`.

    Raises:
        QSyncError: no lighthouse answers; `steps` raises it for missing cards.
        FormatError: an unknown or invalid option.
        CalibrationError, TracingError, UnsupportedError: as in `qsync.hybrid`.

    Example:
        >>> job = qsync.elastic(model, optimizer, dataset, batch_size=64, loss_fn=loss_fn)
        >>> for step in job.steps(epochs=3):
        ...     optimizer.zero_grad()
        ...     for batch in step:
        ...         loss_fn(job.model, batch).backward()
        ...     if step.arrived():
        ...         optimizer.step()
    """
    asked = ElasticOptions(
        batch_size=batch_size, loss_fn=loss_fn, lighthouse=lighthouse, start_with=start_with, seed=seed,
        states=states, plan=plan, card=card, device_class=device_class, emulated_share=emulated_share,
        precisions=precisions, base=base, bitwise=bitwise, compression=compression, share=share,
        max_samples=max_samples, timeout_s=timeout_s, join_timeout_s=join_timeout_s, num_workers=num_workers,
        collate_fn=collate_fn, cache_dir=cache_dir, plan_options=options,
    ).settled(model, optimizer, dataset)  # fmt: skip
    token = token_of_environment()
    rendezvous = _rendezvous(asked, token)
    own = job.detect_rank(model, asked.emulated_share, asked.device_class).device_class
    server = Server(rendezvous.own_host(), asked.timeout_s, token)
    book = None
    if isinstance(asked.plan, Plan):
        api.wrap_as(model, asked.plan, own.name, speaks=True, bitwise=asked.bitwise)
    elif asked.plan is None:
        book = _book(model, optimizer, dataset, asked, own, server)
    parts = {"model": model, "optimizer": optimizer, **(asked.states or {})}
    name = asked.card or f"{own.name}-{uuid.uuid4().hex[:6]}"
    facts = {**_facts(parts, dataset), **asked.facts()}
    entry = Card(name, own.name, time.time(), facts, limit=asked.max_samples)
    return ElasticJob(parts, dataset, entry, rendezvous, server, asked, book)


def _rendezvous(asked: ElasticOptions, token: JobToken) -> Rendezvous:
    """Return the meeting at the lighthouse; log a warning if the job has no token."""
    assert asked.lighthouse is not None, "settled options have an address"
    rendezvous = Rendezvous(asked.lighthouse, asked.timeout_s, token)
    if not token:
        logger.warning(
            "qsync: this job has no token: anyone who reaches its ports can join it and read its weights; "
            "set %s to the same secret on every card", TOKEN_VARIABLE,
        )  # fmt: skip
    return rendezvous


def _book(
    model: torch.nn.Module,
    optimizer: torch.optim.Optimizer,
    dataset: Any,
    asked: ElasticOptions,
    own: DeviceClass,
    server: Server,
) -> PlanBook:
    """Profile the class and trace the model for any number of samples, before joining a meeting."""
    assert asked.collate_fn is not None, "settled options have one"
    # Equal on every card, whatever their number: profiles of classes must have one shape.
    samples = min(
        -(-asked.batch_size // _PROFILED_PARTS), asked.max_samples or asked.batch_size, len(dataset)
    )
    batches = [asked.collate_fn([dataset[i] for i in range(n)]) for n in (samples, max(1, samples // 2))]
    costs = class_costs(model, batches[0], asked, own, maker_of(optimizer))
    api.wrap(model, base=asked.base or "fp32", bitwise=asked.bitwise)
    with undisturbed(model):
        for batch in batches:
            api.loss_of(model, batch, asked.loss_fn)().backward()  # type: ignore[no-untyped-call]
    return PlanBook(costs, server, asked.for_plan)


def _facts(states: Mapping[str, Any], dataset: Any) -> dict[str, str]:
    """Return facts of model, optimizer and dataset that must be equal on every card, by their names."""
    model, optimizer = states["model"], states["optimizer"]
    layout = [f"{name} {tuple(p.shape)} {p.dtype} {p.requires_grad}" for name, p in model.named_parameters()]
    buffers = [f"{name} {tuple(b.shape)} {b.dtype}" for name, b in model.named_buffers()]
    groups = [str(len(group["params"])) for group in optimizer.param_groups]
    return {
        "qsync": qsync.__version__,
        "torch": torch.__version__,
        "the model's class": type(model).__name__,
        "the number of parameters": str(len(layout)),
        "the shapes of the parameters": digest(layout),
        "the shapes of the buffers": digest(buffers),
        "the optimizer": f"{type(optimizer).__name__} of {' + '.join(groups)} parameters",
        "states": ", ".join(f"{name}: {type(one).__name__}" for name, one in sorted(states.items())),
        "the number of samples in the dataset": str(len(dataset)),
    }
