"""Measure one family of the suite in a fresh process: speeds, predicted steps, memory.

On CPUs all run on one thread. Variants of a step take turns in one process, so that their ratios are free of
drift. A failure is also a result: the message that the user would read.
"""

from __future__ import annotations

import copy
import gc
import traceback
from collections.abc import Callable, Sequence
from functools import partial, wraps
from pathlib import Path
from typing import Any

import torch
from torch import nn

import qsync
from qsync import Precision
from qsync.backend import select
from qsync.errors import shortened
from qsync.experiments.harness.freed_memory import keep_freed_memory
from qsync.experiments.harness.measured_memory import step_peak_bytes
from qsync.experiments.harness.pairing import Samples, measure
from qsync.experiments.harness.peers import compiled, under_autocast
from qsync.experiments.harness.ranks import process_group_of_one
from qsync.experiments.kernels.cases import Case, Run
from qsync.experiments.memory.memory_runs import Choice, Trained
from qsync.experiments.prediction.random_plans import run_family
from qsync.experiments.workloads.families import Batch, family_named
from qsync.runtime import choosers

EAGER, AUTOCAST = "eager", "autocast"
# qsync's measured modes, by device.
MODES = {
    "cpu": ("fp32", "bf16", "int8", "int8_all"),
    "cuda": ("bf16", "int8", "fp8", "int8_all", "tf32"),
}
_REDUCE_OVERHEAD = "reduce-overhead"  # torch.compile's mode
BASE = "base bf16"  # for users who keep the loop's autocast
ALL_MODES = (BASE, *dict.fromkeys(mode for of in MODES.values() for mode in of))
# Peers under torch.compile, and qsync's modes in it. CUDA graphs are replayed where there is a GPU.
INDUCTOR, GRAPHS = "Inductor", "CUDA graphs"
PLANNED = ("bf16", *(f"{mode} in {GRAPHS}" for mode in ("bf16", "int8", "fp8")))
COMPILED = (INDUCTOR, GRAPHS, *PLANNED)


def _or_failure(run: Callable[..., dict[str, Any]]) -> Callable[..., dict[str, Any]]:
    """Return the function's result, or `failed` with the first line of its error."""

    @wraps(run)
    def found(*arguments: Any, **options: Any) -> dict[str, Any]:
        try:
            return run(*arguments, **options)
        except Exception as error:
            traceback.print_exc()  # for the log; the result holds only the sentence
            return {"failed": f"{type(error).__name__}: {shortened(error, quote=False)}"}

    return found


def _begin(name: str, tiny: bool, device: str) -> tuple[nn.Module, list[Batch]]:
    torch.set_num_threads(1)
    torch._dynamo.config.recompile_limit = 64  # every variant of a model adds an entry for the same code
    keep_freed_memory()
    model, batches = family_named(name).make(tiny)
    on_device = [
        {key: value.to(device) if isinstance(value, torch.Tensor) else value for key, value in batch.items()}
        for batch in batches
    ]
    return model.to(device), on_device


def speeds(name: str, rounds: int, tiny: bool = False, device: str = "cpu") -> dict[str, Any]:
    """Time FP32 eager, torch.autocast, the base bf16 and every mode in turns.

    Return each variant's seconds by round, and on GPUs a step's peak bytes. Each variant trains a copy of the
    model; the last ones are dropped if memory runs out.
    """
    (model, batches), where = _begin(name, tiny, device), torch.device(device)
    case = Case("", name, EAGER)

    def autocast(base: str | None = None) -> Run:
        mine = copy.deepcopy(model)
        planned = qsync.wrap(mine, base=base) if base else mine
        return training_step(planned, batches, under_autocast(planned, where))

    def in_mode(mode: str) -> Run:
        return training_step(qsync.wrap(copy.deepcopy(model), mode), batches)

    case.add(EAGER, lambda: training_step(copy.deepcopy(model), batches))
    case.add(AUTOCAST, autocast, theirs=True)
    case.add(BASE, partial(autocast, "bf16"), theirs=True)
    for mode in MODES[device]:
        case.add(mode, partial(in_mode, mode), theirs=True)
    return _variants(case, rounds, where)


@_or_failure
def compiled_steps(name: str, rounds: int, tiny: bool = False, device: str = "cpu") -> dict[str, Any]:
    """Time torch.autocast under Inductor and CUDA graphs, and wrapped models in CUDA graphs, in turns.

    The result has the form of `speeds`.
    """
    (model, batches), where = _begin(name, tiny, device), torch.device(device)
    model(**batches[0])  # transformers' models note their kind of labels, which no trace may change
    case = Case("", name, EAGER)

    def peer(mode: str | None) -> Run:
        mine = copy.deepcopy(model)
        return training_step(mine, batches, under_autocast(compiled(mine, mode), where))

    def in_mode(mode: str, in_graphs: bool) -> Run:
        mine = qsync.wrap(copy.deepcopy(model), mode)
        whole = torch.compile(mine, fullgraph=True, dynamic=False, mode=_REDUCE_OVERHEAD)
        return training_step(mine, batches, whole if in_graphs else None)

    def autocast() -> Run:
        mine = copy.deepcopy(model)
        return training_step(mine, batches, under_autocast(mine, where))

    case.add(EAGER, lambda: training_step(copy.deepcopy(model), batches))
    case.add(AUTOCAST, autocast, theirs=True)
    case.add(INDUCTOR, partial(peer, None), theirs=True)
    case.add(GRAPHS, partial(peer, _REDUCE_OVERHEAD), theirs=True)
    for of in PLANNED:
        mode, in_graphs, _ = of.partition(f" in {GRAPHS}")
        case.add(of, partial(in_mode, mode, bool(in_graphs)), theirs=True)
    return _variants(case, rounds, where)


def _variants(case: Case, rounds: int, where: torch.device) -> dict[str, Any]:
    """Return each variant's seconds by round, and on GPUs a step's peak bytes."""
    samples = _measured_together(case, rounds, where)
    on_gpu = where.type == "cuda"
    peaks_of = {of: step_peak_bytes(case.runs[of], where) if on_gpu else None for of in samples}
    return {
        "variants": {
            of: {"seconds": found.seconds, "peak_bytes": peaks_of[of]}
            for of, found in samples.items()
        },
        "unavailable": case.unavailable,
    }  # fmt: skip


def training_step(model: nn.Module, batches: Sequence[Batch], call: Callable[..., Any] | None = None) -> Run:
    """Return a training step of the model on each batch, run as `call`."""
    optimizer = torch.optim.AdamW(model.train().parameters(), lr=1e-4)
    run = model if call is None else call

    def step() -> None:
        for batch in batches:
            optimizer.zero_grad()
            run(**batch).loss.backward()
            optimizer.step()

    return step


def _measured_together(case: Case, rounds: int, where: torch.device) -> dict[str, Samples]:
    """Time a case's variants in turns; drop the last added one while memory runs out.

    Each ran alone when it was added. Eager FP32 and torch.autocast are never dropped.
    """
    while True:
        gc.collect()
        try:
            return measure(case.runs, rounds, where)
        except torch.OutOfMemoryError as error:
            last = list(case.runs)[-1]
            if last in (EAGER, AUTOCAST):
                raise
            why = f"{type(error).__name__}: {shortened(error, quote=False)}"
        case.unavailable[last] = f"beside {', '.join(list(case.runs)[:-1])}: {why}"
        del case.runs[last]


@_or_failure
def predicted(
    name: str, num_ranks: int, num_plans: int, seed: int, tiny: bool = False, traces: str | None = None
) -> dict[str, Any]:
    """Run random plans on ranks; return replay's errors, and the share within their intervals.

    `traces` is a folder for the first plan's step, predicted and measured.
    """
    runs = run_family(name, num_ranks, num_plans, seed, tiny, Path(traces) if traces else None)
    return {"errors": [run.error for run in runs], "inside": [run.is_inside for run in runs]}


class _OfBatch(nn.Module):
    """A model that gets a whole batch and returns its loss."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, batch: Batch) -> torch.Tensor:
        loss: torch.Tensor = self.model(**batch).loss
        return loss


@_or_failure
def memory(name: str, tiny: bool = False, device: str = "cpu") -> dict[str, Any]:
    """Return saved and peak bytes of a step in FP32 and each mode, predicted and measured."""
    model, batches = _begin(name, tiny, device)
    with process_group_of_one():
        trained = Trained(_OfBatch(model), (batches[0], None), lambda loss, _: loss)
        found = {}
        for mode in dict.fromkeys(("fp32", *MODES[device])):
            trained.program.choose(choosers.uniform(Precision(mode), select(device)), strict=False)
            trained.step()
            found[mode] = trained.measure(Choice(trained.program.assignment()))
    return found
