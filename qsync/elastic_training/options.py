"""Options of an elastic job, and their checks."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch.utils.data import default_collate

from qsync.backend.devices.device_detection import device_of
from qsync.distributed.data_parallel import check_not_parallel
from qsync.distributed.job_options import JobOptions
from qsync.elastic_training.rendezvous import LIGHTHOUSE_VARIABLE
from qsync.errors import FormatError, shortened
from qsync.records.graph import digest
from qsync.records.json_files import check_whole
from qsync.records.plans import Plan

_RESERVED = ("model", "optimizer", "job", "random", "random_cuda")
_COMPRESSIONS = ("fp32", "bf16", "int8")  # that need nothing of the cards that come and go
_LEAST = {"seed": 0, "num_workers": 0, "max_samples": 1, "batch_size": 1, "start_with": 1}


@dataclass(frozen=True, slots=True, kw_only=True)
class ElasticOptions(JobOptions):
    """Options of `qsync.elastic`, which explains them."""

    batch_size: int
    timeout_s: float = 10.0
    lighthouse: str | None = None
    start_with: int | None = None
    seed: int = 0
    states: Mapping[str, Any] | None = None
    card: str | None = None
    share: bool = False
    max_samples: int | None = None
    num_workers: int = 0
    collate_fn: Callable[[list[Any]], Any] | None = None

    def settled(
        self, model: torch.nn.Module, optimizer: torch.optim.Optimizer, dataset: Any
    ) -> ElasticOptions:
        """Return the options checked, with those that follow from the environment. Raises FormatError."""
        self.check_shared()
        check_not_parallel(model)
        self._check_kinds()
        _check_optimizer(model, optimizer)
        text = os.environ.get("WORLD_SIZE", "1")
        number: Any = int(text) if text.isascii() and text.isdigit() else text
        found = replace(
            self,
            start_with=number if self.start_with is None else self.start_with,
            collate_fn=self.collate_fn or default_collate,
            lighthouse=self.lighthouse or os.environ.get(LIGHTHOUSE_VARIABLE),
        )
        found._check_numbers()
        found._check_job(dataset)
        return found

    def _check_kinds(self) -> None:
        """Raise FormatError for an option of a wrong type, and for shares that nothing predicts."""
        is_plan = self.plan is None or self.plan is False or isinstance(self.plan, Plan)
        is_name = self.card is None or (isinstance(self.card, str) and bool(self.card.strip()))
        for name, is_right, what in (
            ("plan", is_plan, "a Plan, False or None"),
            ("share", isinstance(self.share, bool), "True or False"),
            ("collate_fn", self.collate_fn is None or callable(self.collate_fn), "a function"),
            ("states", self.states is None or isinstance(self.states, Mapping), "a dict of name -> object"),
            ("card", is_name, "a name"),
        ):
            if not is_right:
                raise FormatError(
                    f"{name} must be {what}, found {shortened(getattr(self, name))}; correct it"
                )
        if self.share and self.plan is not None and not _predicts(self.plan):
            raise FormatError(
                "share=True needs predicted seconds, which this plan lacks; leave out plan, pass a result of "
                "qsync.plan, or leave out share"
            )
        if self.compression is not None and not self.compression.startswith(_COMPRESSIONS):
            raise FormatError(
                f'an elastic job cannot use compression={shortened(self.compression)}: "auto" measures links '
                'and "powersgd" needs equal hardware, but its cards change; give "int8" or "bf16"'
            )
        if self.plan_options.get("levers"):
            raise FormatError(
                "an elastic job takes no levers, as it divides samples itself; give share=True instead"
            )
        if self.plan_options.get("divide_state"):
            raise FormatError(
                "an elastic job does not divide the optimizer's state, because any card heals one that joins "
                "from its own; leave divide_state out"
            )

    def _check_numbers(self) -> None:
        """Raise FormatError for a number out of its range."""
        for name, least in _LEAST.items():
            if name != "max_samples" or self.max_samples is not None:
                check_whole(name, getattr(self, name), least)
        for name in ("timeout_s", "join_timeout_s"):
            number = getattr(self, name)
            if isinstance(number, bool) or not isinstance(number, (int, float)) or not 0.1 <= number < 1e6:
                raise FormatError(
                    f"{name} must be at least 0.1 seconds, found {shortened(number)}; give e.g. 30"
                )

    def _check_job(self, dataset: Any) -> None:
        """Raise FormatError for a job that cannot start: its samples, its states, its lighthouse."""
        if self.num_first > self.batch_size:
            raise FormatError(
                f"{self.num_first} cards cannot share {self.batch_size} samples per step; give a larger "
                "batch_size, or fewer cards"
            )
        if not hasattr(dataset, "__len__") or not hasattr(dataset, "__getitem__") or not len(dataset):
            raise FormatError(
                f"dataset must have a length above 0 and indices, found {shortened(type(dataset).__name__)}; "
                "give a map-style dataset"
            )
        for name, one in (self.states or {}).items():
            has_state = hasattr(one, "state_dict") and hasattr(one, "load_state_dict")
            if not isinstance(name, str) or name in _RESERVED or not has_state:
                raise FormatError(
                    f"states[{shortened(name)}] must be an object with state_dict and load_state_dict, under "
                    f"another name than {', '.join(_RESERVED)}"
                )
        if self.lighthouse is None:
            raise FormatError(
                "the lighthouse's address is missing; start one with `qsync lighthouse`, and set "
                f"{LIGHTHOUSE_VARIABLE} to its address"
            )

    @property
    def num_first(self) -> int:
        """The number of cards that the first step waits for."""
        return self.start_with or 1

    def facts(self) -> dict[str, str]:
        """Return the options that must be equal on every card, by their names in messages."""
        given = self.plan.to_json() if isinstance(self.plan, Plan) else self.plan
        asked = {"base": self.base or "fp32", "bitwise": self.bitwise, "plan": given}
        texts = sorted({**self.plan_options, **asked}.items())
        names = ("batch_size", "max_samples", "share", "seed", "compression")
        alike = {name: str(getattr(self, name)) for name in names}
        return {**alike, "the options of the plan": digest([str(value) for value in texts])}


def _predicts(plan: object) -> bool:
    """Return whether a plan predicts compute times for its classes."""
    return isinstance(plan, Plan) and all(own.predicted is not None for own in plan.classes.values())


def _check_optimizer(model: torch.nn.Module, optimizer: object) -> None:
    """Raise FormatError for an object of another type, or another model's optimizer."""
    device_of(model)  # raises for a wrong type
    if not isinstance(optimizer, torch.optim.Optimizer):
        raise FormatError(
            f"optimizer must be an optimizer of torch's, found {shortened(optimizer)}; correct it"
        )
    own = set(model.parameters())
    if any(parameter not in own for group in optimizer.param_groups for parameter in group["params"]):
        raise FormatError(
            "the optimizer has parameters that the model lacks; create it from this model's parameters"
        )
