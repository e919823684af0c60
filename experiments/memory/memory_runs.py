"""Train models under plans and measure their memory: the runs of memory_error.py.

On one rank, and on two real ones: random plans, a different one on each, and plans accepted under budgets. A
rank of a job needs memory that a single process does not: buckets as DDP builds and rebuilds them between
ranks, all-reduces in flight during backward, buffers broadcast before forward.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise, product
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.utils._pytree import tree_leaves

import qsync
from qsync import Cluster, Link, OpGraph, Precision, Profile
from qsync.backend.devices.device_detection import detect_class
from qsync.distributed import job
from qsync.distributed.agreement import agree, from_rank_zero
from qsync.distributed.data_parallel import in_ddp
from qsync.errors import InfeasibleError
from qsync.experiments.harness.measured_memory import (
    bucket_bytes,
    saved_bytes,
    state_bytes,
    step_peak_bytes,
)
from qsync.experiments.harness.ranks import BUCKET_CAP_MB, FAST, WEAK, Place, run_on_ranks
from qsync.experiments.workloads.gpt import Gpt
from qsync.experiments.workloads.large_models import bert
from qsync.experiments.workloads.subjects import NAMES, subject
from qsync.experiments.workloads.workload import Batch, make_optimizer, seeded
from qsync.lowering.incremental import lower
from qsync.lowering.lowered_graph import Cast, Run
from qsync.operators.registry import PRECISIONS_BY_KIND
from qsync.predictor.memory import peak
from qsync.predictor.profiling.memory_trace import measure_residuals
from qsync.processes.progress import shown_on_rank_zero
from qsync.records.memory_residuals import MemoryResiduals
from qsync.records.save_less import can_save_less
from qsync.runtime import choosers, planned_forward
from qsync.runtime.choosers import Chooser

SEED = 0
DROPPING = "bert-dropout"  # Hugging Face's BERT with a mask, and dropout also in attention
MODELS = (*NAMES, DROPPING)
TINY = "tiny"  # a GPT for tests
PRECISIONS = (Precision.FP32, Precision.BF16, Precision.INT8, Precision.INT8_ALL)

# Budgets, as fractions of FP32's peak.
SHARES = (0.95, 0.85, 0.75, 0.95)
SENSITIVITIES = 4  # number of sensitivities: the model's own, and made-up ones, so that plans differ
# Time limit relative to the least step: memory must decide, not time.
SLACK = 2.0
# Seconds: with tight memory the exact solver proves little and would use any limit.
PLANNING_S = 1.0
# Seconds; no rank waits in vain here, but other measurements may stop one for long.
TIMEOUT_S = 7200.0


@dataclass(frozen=True, slots=True)
class Choice:
    """A plan of one device class: precisions, and operators that save less."""

    assignment: Mapping[str, Precision]
    saving_less: tuple[str, ...] = ()


class Trained:
    """One model in DDP training on this rank, under a changeable plan."""

    def __init__(
        self,
        model: nn.Module,
        batch: tuple[Any, Any],
        loss_fn: Callable[..., torch.Tensor],
        bucket_cap_mb: float | None = None,
        bitwise: bool = False,
    ) -> None:
        self.model, self.batch, self.loss_fn = model.train(), batch, loss_fn
        self.program = planned_forward.attach(model, lambda graph: {}, bitwise=bitwise)
        self.ddp = in_ddp(model, bucket_cap_mb)
        self.optimizer = make_optimizer(1e-3)(list(model.parameters()))
        self._chosen = Choice({})
        self._residuals = MemoryResiduals()
        self.buckets: list[int] = []  # bytes of each, in the last step
        for _ in range(2):  # the first step traces, and DDP rebuilds its buckets after it
            self.step()
        self.graph: OpGraph = self.program.graph

    def step(self) -> None:
        """Run one training step."""
        loss = self.loss_fn(self.ddp(self.batch[0]), self.batch[1])
        loss.backward()  # type: ignore[no-untyped-call]
        self.optimizer.step()
        self.buckets = bucket_bytes(self.model)
        self.optimizer.zero_grad(set_to_none=True)

    def measure_residuals(self) -> None:
        """Measure a profile's memory residuals in all precisions."""

        def assignments() -> Iterator[Chooser]:
            for precision in PRECISIONS:
                choose = choosers.uniform(precision)
                self._choose(Choice(choose(self.graph)), None)
                self.step()
                yield choose

        self._residuals = measure_residuals(
            self.program, assignments(), lambda: self.loss_fn(self.model(self.batch[0]), self.batch[1]),
            list(self.model.parameters()),
        )  # fmt: skip
        self.step()  # gradients are DDP's buckets again

    @property
    def _inputs(self) -> list[torch.Tensor]:
        return [leaf for leaf in tree_leaves(self.batch[0]) if isinstance(leaf, torch.Tensor)]

    @property
    def optimizer_bytes(self) -> int:
        """Return the bytes of the optimizer's state."""
        return state_bytes(self.optimizer)

    def measure(self, choice: Choice) -> dict[str, int]:
        """Return this plan's saved and peak bytes, predicted and measured.

        With several ranks every rank calls it at once, each with its own plan.
        """
        copies = _Copies()
        self._choose(choice, copies)
        known = [*self._inputs, *self.model.parameters(), *self.model.buffers()]
        saved = saved_bytes(lambda: self.model(self.batch[0]), known, leave_out=copies.addresses)
        self._choose(choice, None)
        self.step()  # its end frees copies of weights, so that the next step makes them again
        measured = self._throughout() + step_peak_bytes(self.step, next(self.model.parameters()).device)
        found, profiled = (self.predicted(residuals).at_peak() for residuals in (None, self._residuals))
        return {
            "saved_bytes": saved,
            "predicted_saved_bytes": sum(found.saved_by.values()),
            "peak_bytes": measured,
            "predicted_peak_bytes": found.estimate_bytes,
            "profiled_peak_bytes": profiled.estimate_bytes,
            "throughout_bytes": self._throughout(),
            "budget_bytes": found.peak_bytes,
            "buckets": len(self.buckets),
        }

    def predicted(self, residuals: MemoryResiduals | None = None) -> peak.StepMemory:
        """Return the predicted step of one of several ranks, by the memory model and residuals."""
        chosen, sixteen_bit = self._chosen, self.program.kernels.sixteen_bit
        lowered = lower(self.graph, chosen.assignment, sixteen_bit, chosen.saving_less)
        device = self.program.device.type
        return peak.StepMemory(
            lowered, optimizer_bytes=self.optimizer_bytes, num_ranks=2, device=device, residuals=residuals
        )

    def _choose(self, choice: Choice, observer: Any) -> None:
        self._chosen = choice
        self.program.choose(choosers.following(choice.assignment), observer, lambda graph: choice.saving_less)

    def _throughout(self) -> int:
        """Return the bytes that stay between steps; gradients are DDP's buckets."""
        tensors = [*self.model.parameters(), *self.model.buffers(), *self._inputs]
        return sum(self.buckets) + self.optimizer_bytes + sum(tensor.nbytes for tensor in tensors)


class _Copies:
    """An Observer that records the copies of weights, which are not activations."""

    def __init__(self) -> None:
        self.addresses: set[int] = set()
        self._held: list[Any] = []  # kept alive, because a freed address might be reused

    def began(self) -> None:
        pass

    def seen(self, node: Cast | Run, result: Any, operands: tuple[Any, ...]) -> None:
        if isinstance(node, Cast) and node.of_parameter:
            self._held.append(result)
            tensors = [result] if isinstance(result, torch.Tensor) else [result.data, result.scale]
            self.addresses |= {t.untyped_storage().data_ptr() for t in tensors if t is not None}


def parts_of(name: str, rank: int = 0) -> tuple[nn.Module, Batch, Callable[..., torch.Tensor]]:
    """Return a model, this rank's batch and the loss. Raises QSyncError for an unknown name."""
    workload = subject("gpt" if name in (DROPPING, TINY) else name)
    inputs, targets = workload.batch(SEED, 0, rank)
    if name == TINY:
        model = seeded(lambda: Gpt(1, 64, 2, context=64), SEED)
        return model, (inputs[:, :64], targets[:, :64]), workload.loss_fn
    if name == DROPPING:
        classes = torch.arange(len(inputs)) % 2
        return seeded(_Dropping, SEED), (inputs, classes), nn.functional.cross_entropy
    return workload.make_model(SEED), (inputs, targets), workload.loss_fn


def loss_of(loss_fn: Callable[..., torch.Tensor]) -> Callable[[nn.Module, Any], torch.Tensor]:
    """Return the loss as a function of a model and a batch."""
    return lambda model, batch: loss_fn(model(batch[0]), batch[1])


class _Dropping(nn.Module):
    """A byte-level BERT classifier that treats spaces as padding."""

    def __init__(self) -> None:
        super().__init__()
        self.bert = bert(
            vocab_size=256, hidden_size=256, num_hidden_layers=4, num_attention_heads=4,
            intermediate_size=1024, max_position_embeddings=128,
        )  # fmt: skip

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        logits: torch.Tensor = self.bert(input_ids=tokens, attention_mask=(tokens != 32).long()).logits
        return logits


def drawn(graph: OpGraph, number: int, seed: int = SEED) -> Choice:
    """Draw a random plan with random shares of precisions, so that some plans are nearly uniform."""
    draw = random.Random(f"{seed} {number}")
    weights = [draw.expovariate(1.0) for _ in PRECISIONS]
    share = draw.choice((0.0, 0.3, 0.6, 1.0))
    assignment = {}
    for op in graph.adjustable:
        able, precision = PRECISIONS_BY_KIND[op.kind], draw.choices(PRECISIONS, weights)[0]
        if precision is Precision.INT8_ALL and precision not in able:
            precision = Precision.INT8
        assignment[op.name] = precision if precision in able else Precision.FP32
    saving = tuple(op.name for op in graph.ops if can_save_less(op) and draw.random() < share)
    return Choice(assignment, saving)


def run_ranks(models: Sequence[str], num_plans: int, seed: int) -> list[dict[str, Any]]:
    """Run plans of each model on two ranks under torchrun; return a row per plan and rank.

    Rows have the bytes of `Trained.measure`; those of accepted plans also their budget. Raises QSyncError if
    a rank fails.
    """
    config = {"models": list(models), "num_plans": num_plans, "seed": seed}
    rows: list[dict[str, Any]] = run_on_ranks(measured, config, command="memory", timeout_s=TIMEOUT_S)
    return rows


def measured(config: dict[str, Any], place: Place) -> list[dict[str, Any]]:
    """Return the rows of all ranks."""
    rows: list[dict[str, Any]] = []
    with shown_on_rank_zero("qsync: memory of two ranks") as progress:
        for name in config["models"]:
            progress(name)
            found = list(rows_of(name, config["num_plans"], config["seed"]))
            for own in agree("gathering what was measured", lambda found=found: found):  # type: ignore[misc]
                rows += own
    return rows


def rows_of(name: str, num_plans: int, seed: int) -> Iterator[dict[str, Any]]:
    """Yield this rank's measurements of one model, in step with the other rank."""
    rank = dist.get_rank()
    planned = accepted(name, rank)
    torch._dynamo.reset()
    trained = Trained(*parts_of(name, rank), BUCKET_CAP_MB)
    trained.measure_residuals()
    about = {"model": name, "rank": rank, "seed": seed}
    for number in range(num_plans):
        choice = drawn(trained.graph, 2 * number + rank, seed)
        yield {**about, "part": "two ranks", "plan": number, **trained.measure(choice)}
    for number, plan in enumerate(planned):
        if plan is None:
            yield {**about, "part": "refused", "plan": number}
            continue
        budget, assignment = plan[rank]
        found = trained.measure(Choice({op: Precision(p) for op, p in assignment.items()}))
        yield {**about, "part": "accepted", "plan": number, **found, "budget_bytes": budget}


def accepted(name: str, rank: int) -> list[list[Any] | None]:
    """Return plans that `qsync.plan` accepts for budgets below FP32's memory.

    Each entry has every class's budget and assignment, in rank order; None if no plan is accepted. Each rank
    profiles one of two classes; rank 0 plans.
    """
    torch._dynamo.reset()
    model, batch, loss_fn = parts_of(name, rank)
    loss = loss_of(loss_fn)
    own = replace(detect_class(torch.device("cpu")), name=(FAST, WEAK)[rank])
    # Emulated precisions count, too: memory decides here.
    precisions = [p for p in own.precisions if p not in (Precision.FP16, Precision.INT8_ALL)]
    profile = agree("profiling", lambda: qsync.profile(
        model, batch, loss, device_class=own, precisions=precisions, rounds=1,
        make_optimizer=make_optimizer(1e-3),
    ).to_json())  # fmt: skip
    graph = job.form_graph(job.TrainingStep(model, batch, loss))
    profiles = {entry["device_class"]: Profile.from_json(entry) for entry in profile}
    cluster = Cluster(tuple(replace(own, name=name) for name in profiles), Link(1e-4, 1e9))

    def planned() -> Iterator[list[Any] | None]:
        plain = lower(graph, {})
        full = {
            name: peak.peak_memory(plain, optimizer_bytes=one.optimizer_bytes, num_ranks=2).peak_bytes
            for name, one in profiles.items()
        }
        measured = qsync.sensitivity(model, [batch], loss)
        for number, shares in product(range(SENSITIVITIES), pairwise(SHARES)):
            draw = random.Random(number)
            omega = {
                op: {p: added * 10 ** draw.uniform(-2, 2) for p, added in modes.items()}
                for op, modes in measured.omega.items()
            }
            sensitivity = replace(measured, omega=omega) if number else measured
            budgets = {name: int(share * full[name]) for name, share in zip(full, shares, strict=True)}
            try:
                plan = qsync.plan(
                    graph, profiles, sensitivity, cluster, budgets=budgets, slack=SLACK,
                    time_limit_s=PLANNING_S,
                )  # fmt: skip
            except InfeasibleError:
                yield None
            else:
                yield [[budgets[name], dict(plan[name].assignment)] for name in (FAST, WEAK)]

    return from_rank_zero("planning", lambda: list(planned()))
