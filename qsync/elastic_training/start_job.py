"""`elastic`: the counterpart of `hybrid` for jobs whose cards join and leave."""

from __future__ import annotations

import inspect
import logging
import os
import time
import uuid
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any, Literal

import torch
from torch.utils.data import default_collate

import qsync
from qsync import api
from qsync.allocator import check_options
from qsync.backend.devices.device_detection import detect_class, device_of
from qsync.backend.devices.emulation import slow_down
from qsync.distributed import job
from qsync.distributed.data_parallel import check_not_parallel
from qsync.distributed.ddp_profiling import profile_seconds
from qsync.distributed.plan_cache import cache_folder
from qsync.elastic_training.elastic_job import ElasticJob
from qsync.elastic_training.healing import Server
from qsync.elastic_training.job_token import TOKEN_VARIABLE, token_of_environment
from qsync.elastic_training.plan_book import PlanBook, class_costs
from qsync.elastic_training.rendezvous import LIGHTHOUSE_VARIABLE, Card, Rendezvous
from qsync.elastic_training.share_loader import Options
from qsync.errors import FormatError, shortened
from qsync.operators.precision import Precision
from qsync.records.base import parse_base
from qsync.records.cluster import DeviceClass
from qsync.records.graph import digest
from qsync.records.plans import Plan
from qsync.tracing.held_state import undisturbed

logger = logging.getLogger("qsync")

_PROFILED_PARTS = 4  # classes are profiled on a batch divided by this number
_RESERVED = ("model", "optimizer", "job", "random", "random_cuda")


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
    check_options(options, also=list(inspect.signature(elastic).parameters)[3:-1])
    check_not_parallel(model)
    _check_kinds(model, optimizer, plan, share, collate_fn, states)
    if share and plan is not None and not _predicts(plan):
        raise FormatError(
            "share=True needs predicted seconds, which this plan lacks; leave out plan, pass a result of "
            "qsync.plan, or leave out share"
        )
    job.check_options(emulated_share, device_class, None)
    if start_with is None:
        text = os.environ.get("WORLD_SIZE", "1")
        start_with = int(text) if text.isascii() and text.isdigit() else text  # type: ignore[assignment]
    assert start_with is not None
    _check(options, states or {}, dataset, timeout_s, join_timeout_s, batch_size=batch_size,
           start_with=start_with, seed=seed, max_samples=max_samples, num_workers=num_workers)  # fmt: skip
    for what, value in (("card", card), ("device_class", device_class)):
        if value is not None and not (isinstance(value, str) and value.strip()):
            raise FormatError(f"{what} must be a name, found {shortened(value)}; correct it")
    address = lighthouse or os.environ.get(LIGHTHOUSE_VARIABLE)
    if address is None:
        raise FormatError(
            "the lighthouse's address is missing; start one with `qsync lighthouse`, and set "
            f"{LIGHTHOUSE_VARIABLE} to its address"
        )
    token = token_of_environment()
    rendezvous = Rendezvous(address, timeout_s, token)
    if not token:
        logger.warning(
            "qsync: this job has no token: anyone who reaches its ports can join it and read its weights; "
            "set %s to the same secret on every card", TOKEN_VARIABLE,
        )  # fmt: skip
    how = Options(
        batch_size,
        seed,
        start_with,
        timeout_s,
        share,
        max_samples,
        num_workers,
        collate_fn or default_collate,
        join_timeout_s,
    )
    if emulated_share is not None:
        slow_down(device_of(model), emulated_share)
    found = detect_class(device_of(model), emulated_share, job.ranks_on_host())
    own = replace(found, name=device_class) if device_class else found
    server = Server(rendezvous.own_host(), timeout_s, token)
    book = None
    if isinstance(plan, Plan):
        api.wrap_as(model, plan, own.name, speaks=True, bitwise=bitwise)
    elif plan is not False:
        # Equal on every card, whatever their number: profiles of classes must have one shape.
        samples = min(-(-batch_size // _PROFILED_PARTS), max_samples or batch_size, len(dataset))
        batches = [how.collate_fn([dataset[i] for i in range(n)]) for n in (samples, max(1, samples // 2))]
        book = _book(model, batches, loss_fn, own, server, cache_folder(cache_dir), precisions, base,
                     bitwise, _maker_of(optimizer), options)  # fmt: skip
    given = plan.to_json() if isinstance(plan, Plan) else plan
    states = {"model": model, "optimizer": optimizer, **(states or {})}
    asked = {"base": base or "fp32", "bitwise": bitwise, "plan": given}
    facts = _facts(states, dataset, how, {**options, **asked})
    name = card or f"{own.name}-{uuid.uuid4().hex[:6]}"
    entry = Card(name, own.name, time.time(), facts, limit=max_samples)
    return ElasticJob(states, dataset, entry, rendezvous, server, how, book)


def _predicts(plan: object) -> bool:
    """Return whether a plan predicts compute times for its classes."""
    return isinstance(plan, Plan) and all(own.predicted is not None for own in plan.classes.values())


def _check_kinds(
    model: torch.nn.Module,
    optimizer: object,
    plan: object,
    share: object,
    collate_fn: object,
    states: object,
) -> None:
    """Raise FormatError for an argument of a wrong type, or another model's optimizer."""
    device_of(model)  # raises for a wrong type
    own, is_plan = set(model.parameters()), plan is None or plan is False or isinstance(plan, Plan)
    for name, value, is_right, what in (
        ("optimizer", optimizer, isinstance(optimizer, torch.optim.Optimizer), "an optimizer of torch's"),
        ("plan", plan, is_plan, "a Plan, False or None"),
        ("share", share, isinstance(share, bool), "True or False"),
        ("collate_fn", collate_fn, collate_fn is None or callable(collate_fn), "a function"),
        ("states", states, states is None or isinstance(states, Mapping), "a dict of name -> object"),
    ):
        if not is_right:
            raise FormatError(f"{name} must be {what}, found {shortened(value)}; correct it")
    groups: Any = getattr(optimizer, "param_groups", ())
    if any(parameter not in own for group in groups for parameter in group["params"]):
        raise FormatError(
            "the optimizer has parameters that the model lacks; create it from this model's parameters"
        )


def _check(
    options: Mapping[str, Any],
    states: Mapping[str, Any],
    dataset: Any,
    timeout_s: Any,
    join_timeout_s: Any,
    **numbers: Any,
) -> None:
    """Raise FormatError for an invalid option."""
    if options.get("levers"):
        raise FormatError(
            "an elastic job takes no levers, as it divides samples itself; give share=True instead"
        )
    if options.get("divide_state"):
        raise FormatError(
            "an elastic job does not divide the optimizer's state, because any card heals one that joins "
            "from its own; leave divide_state out"
        )
    least = {"seed": 0, "num_workers": 0, "max_samples": 1, "batch_size": 1, "start_with": 1}
    for name, number in numbers.items():
        if name == "max_samples" and number is None:
            continue
        if type(number) is not int or number < least[name]:
            raise FormatError(
                f"{name} must be a whole number of at least {least[name]}, found {shortened(number)}; "
                "correct it"
            )
    for name, number in (("timeout_s", timeout_s), ("join_timeout_s", join_timeout_s)):
        if isinstance(number, bool) or not isinstance(number, (int, float)) or not 0.1 <= number < 1e6:
            raise FormatError(f"{name} must be at least 0.1 seconds, found {shortened(number)}; give e.g. 30")
    if numbers["start_with"] > numbers["batch_size"]:
        raise FormatError(
            f"{numbers['start_with']} cards cannot share {numbers['batch_size']} samples per step; give a "
            "larger batch_size, or fewer cards"
        )
    if not hasattr(dataset, "__len__") or not hasattr(dataset, "__getitem__") or not len(dataset):
        raise FormatError(
            f"dataset must have a length above 0 and indices, found {shortened(type(dataset).__name__)}; "
            "give a map-style dataset"
        )
    for name, one in states.items():
        if (
            not isinstance(name, str)
            or name in _RESERVED
            or not (hasattr(one, "state_dict") and hasattr(one, "load_state_dict"))
        ):
            raise FormatError(
                f"states[{shortened(name)}] must be an object with state_dict and load_state_dict, under "
                f"another name than {', '.join(_RESERVED)}"
            )


def _book(
    model: torch.nn.Module,
    batches: Sequence[Any],
    loss_fn: api.LossFunction | None,
    own: DeviceClass,
    server: Server,
    folder: Path,
    precisions: Sequence[Precision | str] | None,
    base: str | None,
    bitwise: bool,
    make_optimizer: Callable[[Any], torch.optim.Optimizer],
    options: Mapping[str, Any],
) -> PlanBook:
    """Profile the class and trace the model for any number of samples, before joining a meeting."""
    costs = class_costs(
        model, batches[0], loss_fn, own, folder, parse_base(base) if base is not None else None,
        precisions=precisions, make_optimizer=make_optimizer, seconds=profile_seconds(),
        bitwise=bitwise,
    )  # fmt: skip
    options = {**options, "base": base} if base is not None else options
    api.wrap(model, base=base or "fp32", bitwise=bitwise)
    with undisturbed(model):
        for batch in batches:
            api.loss_of(model, batch, loss_fn)().backward()  # type: ignore[no-untyped-call]
    return PlanBook(costs, server, options)


def _maker_of(optimizer: torch.optim.Optimizer) -> Callable[[Any], torch.optim.Optimizer]:
    """Return a factory of this optimizer with its defaults: momentum needs memory and time."""
    taken = inspect.signature(type(optimizer)).parameters
    return partial(type(optimizer), **{k: v for k, v in optimizer.defaults.items() if k in taken})


def _facts(
    states: Mapping[str, Any], dataset: Any, how: Options, options: Mapping[str, Any]
) -> dict[str, str]:
    """Return the facts that must be equal on every card, by their names in messages."""
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
        "batch_size": str(how.batch_size),
        "max_samples": str(how.max_samples),
        "share": str(how.share),
        "seed": str(how.seed),
        "the options of the plan": digest([str(value) for value in sorted(options.items())]),
    }
