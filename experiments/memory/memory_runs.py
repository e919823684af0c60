"""Models in training under plans, and the bytes that each takes: the runs of memory_error.py."""

from __future__ import annotations

import random
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from qsync import OpGraph, Precision
from qsync.distributed.job import in_ddp
from qsync.experiments.harness.measured_peak import bucket_bytes, state_bytes, step_peak_bytes
from qsync.experiments.memory.saved_bytes import saved_bytes
from qsync.experiments.workloads.gpt import Gpt
from qsync.experiments.workloads.large_models import bert
from qsync.experiments.workloads.subjects import NAMES, subject
from qsync.experiments.workloads.workload import Batch, make_optimizer, seeded
from qsync.lowering.lowered_graph import Cast, Run
from qsync.predictor.memory import peak
from qsync.records.precision import PRECISIONS_BY_KIND
from qsync.records.save_less import can_save_less
from qsync.runtime import program

SEED = 0
DROPPING = "bert-dropout"  # Hugging Face's, with a mask, and dropout in attention as elsewhere
MODELS = (*NAMES, DROPPING)
TINY = "tiny"  # a GPT for tests
PRECISIONS = (Precision.FP32, Precision.BF16, Precision.INT8, Precision.INT8_ALL)


@dataclass(frozen=True, slots=True)
class Choice:
    """A plan of one device class: precisions, and operators that save less."""

    assignment: Mapping[str, Precision]
    saving_less: tuple[str, ...] = ()


class Trained:
    """One model in training in DDP on this rank, under whatever plan is chosen for it."""

    def __init__(
        self,
        model: nn.Module,
        batch: Batch,
        loss_fn: Callable[..., torch.Tensor],
        bucket_cap_mb: float | None = None,
    ) -> None:
        self.model, self.batch, self.loss_fn = model.train(), batch, loss_fn
        self.program = program.attach(model, lambda graph: {})
        self.ddp = in_ddp(model, bucket_cap_mb)
        self.optimizer = make_optimizer(1e-3)(list(model.parameters()))
        self.buckets: list[int] = []  # bytes of each, as the last step had them
        for _ in range(2):  # the first step traces, and DDP builds its buckets anew after it
            self.step()
        self.graph: OpGraph = self.program.graph

    def step(self) -> None:
        """Take one training step."""
        loss = self.loss_fn(self.ddp(self.batch[0]), self.batch[1])
        loss.backward()  # type: ignore[no-untyped-call]
        self.optimizer.step()
        self.buckets = bucket_bytes(self.model)
        self.optimizer.zero_grad(set_to_none=True)

    @property
    def optimizer_bytes(self) -> int:
        """Return the bytes of the optimizer's state."""
        return state_bytes(self.optimizer)

    def measure(self, choice: Choice) -> dict[str, int]:
        """Return the bytes that this plan saves for backward, and at its peak; predicted and measured.

        With several ranks every rank calls it at once, each with its own plan.
        """
        copies = _Copies()
        self._choose(choice, copies)
        known = [self.batch[0], *self.model.parameters(), *self.model.buffers()]
        saved = saved_bytes(lambda: self.model(self.batch[0]), known, leave_out=copies.addresses)
        self._choose(choice, None)
        self.step()  # its end lets go of the copies of weights, so that the next one is seen to make them
        measured = self._throughout() + step_peak_bytes(self.step, torch.device("cpu"))
        found = self.predicted().at_peak()
        return {
            "saved_bytes": saved,
            "predicted_saved_bytes": sum(found.saved_by.values()),
            "peak_bytes": measured,
            "predicted_peak_bytes": found.estimate_bytes,
            "throughout_bytes": self._throughout(),
            "budget_bytes": found.peak_bytes,
            "buckets": len(self.buckets),
        }

    def predicted(self) -> peak.StepMemory:
        """Return the memory model's prediction of the step, for a rank of several."""
        (lowered,) = self.program.lowered
        return peak.StepMemory(lowered, optimizer_bytes=self.optimizer_bytes, num_ranks=2)

    def _choose(self, choice: Choice, observer: Any) -> None:
        self.program.choose(program.following(choice.assignment), observer, lambda graph: choice.saving_less)

    def _throughout(self) -> int:
        """Return the bytes that stay between steps; the gradients are DDP's buckets."""
        tensors = [*self.model.parameters(), *self.model.buffers(), self.batch[0]]
        return sum(self.buckets) + self.optimizer_bytes + sum(tensor.nbytes for tensor in tensors)


class _Copies:
    """An Observer that knows the copies of weights, which are no activations."""

    def __init__(self) -> None:
        self.addresses: set[int] = set()
        self._held: list[Any] = []  # an address freed might be used again

    def began(self) -> None:
        pass

    def seen(self, node: Cast | Run, result: Any, operands: tuple[Any, ...]) -> None:
        if isinstance(node, Cast) and node.of_parameter:
            self._held.append(result)
            tensors = [result] if isinstance(result, torch.Tensor) else [result.data, result.scale]
            self.addresses |= {t.untyped_storage().data_ptr() for t in tensors if t is not None}


def parts_of(name: str, rank: int = 0) -> tuple[nn.Module, Batch, Callable[..., torch.Tensor]]:
    """Return a model, a batch of this rank's, and the loss. Raises QSyncError for an unknown name."""
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
    """A BERT classifier of bytes, whose spaces are padding."""

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
    """Draw a random plan; shares of precisions are drawn as well, so that some plans are nearly pure."""
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
