"""Calibration: the model, batches and precisions from which an indicator measures sensitivity."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch

from qsync.errors import CalibrationError
from qsync.operators.precision import Precision
from qsync.operators.registry import PRECISIONS_BY_KIND
from qsync.predictor.profiling.runner import Runner, check_finite, check_scalar
from qsync.records.graph import OpGraph


@dataclass(frozen=True, slots=True)
class Calibration:
    """A model that runs any assignment, real batches, and the precisions to evaluate.

    Each of `losses` runs the model forward on one batch and returns the scalar loss. `parameters` are the
    trained ones. `seed` seeds the random numbers of indicators, and of dropout in every step.
    """

    runner: Runner
    losses: Sequence[Callable[[], torch.Tensor]]
    parameters: Sequence[torch.nn.Parameter]
    precisions: Sequence[Precision]
    seed: int = 0

    def __post_init__(self) -> None:
        if not self.losses:
            raise CalibrationError("no calibration batch was given; pass at least one real batch")

    def lowered(self, graph: OpGraph) -> Iterable[tuple[str, Precision]]:
        """Yield every adjustable operator with each precision below FP32 that its kind supports."""
        for op in graph.adjustable:
            for precision in below_fp32(op.kind, self.precisions):
                yield op.name, precision

    def zeros(self, graph: OpGraph) -> dict[str, dict[str, float]]:
        """Return omega = 0 for each operator and precision of `lowered`, to be filled in."""
        omega: dict[str, dict[str, float]] = {op.name: {} for op in graph.adjustable}
        for name, precision in self.lowered(graph):
            omega[name][str(precision)] = 0.0
        return omega

    def assign(self, assignment: Mapping[str, Precision], observer: Any = None) -> None:
        """Choose the assignment of the next steps; operators missing in it run in FP32."""
        self.runner.choose(
            lambda graph: {op.name: assignment[op.name] for op in graph.adjustable if op.name in assignment},
            observer,
        )

    def forward(self, batch: int) -> torch.Tensor:
        """Return the loss on one batch, with gradients reset and the batch's fixed random numbers."""
        for parameter in self.parameters:
            parameter.grad = None
        torch.manual_seed(self._seed_of(batch, 0))
        value = self.losses[batch]()
        check_scalar(value)
        return value

    def backward(self, loss: torch.Tensor, batch: int, draw: int = 0) -> list[torch.Tensor]:
        """Return the gradients of all reached parameters; `draw` seeds stochastic rounding."""
        torch.manual_seed(self._seed_of(batch, 1 + draw))
        loss.backward()  # type: ignore[no-untyped-call]
        return [_real(parameter.grad) for parameter in self.parameters if parameter.grad is not None]

    def gradient(self, batch: int, draw: int = 0) -> list[torch.Tensor]:
        """Return the gradients of one batch as assigned; raise CalibrationError for a non-finite loss."""
        loss = self.forward(batch)
        found = self.backward(loss, batch, draw)
        check_finite(loss)
        return found

    @contextmanager
    def perturbed(self, batch: int, step: float) -> Iterator[torch.Tensor]:
        """Set the parameters to theta + eps r within the context, then restore them bitwise.

        r is a random sign per parameter. Yields eps: `step` times the root mean square of all parameters.
        """
        parameters = [_real(parameter.detach()) for parameter in self.parameters]
        before = [parameter.clone() for parameter in parameters]
        squares = torch.stack([tensor.float().square().sum() for tensor in before]).sum()
        size = sum(tensor.numel() for tensor in before)
        eps = step * (squares / size).sqrt().clamp_min(1e-6)
        generator = self.generator(before[0].device, batch)
        try:
            with torch.no_grad():
                for parameter in parameters:
                    signs = torch.empty_like(parameter).bernoulli_(0.5, generator=generator).mul_(2).sub_(1)
                    parameter.add_(signs * eps)
            yield eps
        finally:
            with torch.no_grad():
                for parameter, value in zip(parameters, before, strict=True):
                    parameter.copy_(value)

    def generator(self, device: torch.device, batch: int) -> torch.Generator:
        """Return a random generator for one batch, seeded equally in every run with this seed."""
        return torch.Generator(device).manual_seed(self._seed_of(batch, -1))

    def _seed_of(self, batch: int, use: int) -> int:
        return hash((self.seed, batch, use)) % 2**63


def _real(tensor: torch.Tensor) -> torch.Tensor:
    """View a complex tensor as pairs of real numbers; return other tensors unchanged."""
    return torch.view_as_real(tensor) if tensor.is_complex() else tensor


def below_fp32(kind: str, precisions: Iterable[Precision]) -> list[Precision]:
    """Return the precisions below FP32 that an operator kind supports; none for unadjustable kinds."""
    able = PRECISIONS_BY_KIND.get(kind, ())
    return [precision for precision in precisions if precision in able and precision is not Precision.FP32]


def mean_over_batches(batches: Sequence[Mapping[str, Mapping[str, float]]]) -> dict[str, dict[str, float]]:
    """Return the mean of every omega[op][precision] over batches."""
    mean: dict[str, dict[str, float]] = {}
    for batch in batches:
        for name, modes in batch.items():
            entry = mean.setdefault(name, dict.fromkeys(modes, 0.0))
            for mode, added in modes.items():
                entry[mode] += added / len(batches)
    return mean
