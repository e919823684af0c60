"""Calibration: what every indicator is given, and the one step that they all take.

An indicator is a function `Calibration -> Sensitivity`; qsync.predictor.sensitivity.registry names them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch

from qsync.errors import CalibrationError
from qsync.predictor.profiling.runner import Runner, check_finite, check_scalar
from qsync.records.graph import OpGraph
from qsync.records.precision import PRECISIONS_BY_KIND, Precision


@dataclass(frozen=True, slots=True)
class Calibration:
    """A model that runs as told, real batches, and the precisions to judge.

    Each of `losses` runs the model forward on one batch and returns the scalar loss; `parameters` are those
    that train; `seed` is what an indicator draws from, and what dropout is drawn from in every step.
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
        """Every adjustable operator with each precision below FP32 that its kind has."""
        for op in graph.adjustable:
            for precision in self.precisions:
                if precision in PRECISIONS_BY_KIND[op.kind] and precision is not Precision.FP32:
                    yield op.name, precision

    def empty(self, graph: OpGraph) -> dict[str, dict[str, float]]:
        """Omega = 0 for each of `lowered`, to be filled."""
        omega: dict[str, dict[str, float]] = {op.name: {} for op in graph.adjustable}
        for name, precision in self.lowered(graph):
            omega[name][str(precision)] = 0.0
        return omega

    def assign(self, assignment: Mapping[str, Precision], observer: Any = None) -> None:
        """Run this assignment from the next step on. What it does not name runs in FP32."""
        self.runner.choose(
            lambda graph: {op.name: assignment[op.name] for op in graph.adjustable if op.name in assignment},
            observer,
        )

    def forward(self, batch: int) -> torch.Tensor:
        """The loss on one batch, with empty gradients, and with the same random numbers every time."""
        for parameter in self.parameters:
            parameter.grad = None
        torch.manual_seed(self._mixed(batch, 0))
        value = self.losses[batch]()
        check_scalar(value)
        return value

    def backward(self, loss: torch.Tensor, batch: int, draw: int = 0) -> list[torch.Tensor]:
        """The gradient of every parameter that got one. Stochastic rounding differs from draw to draw."""
        torch.manual_seed(self._mixed(batch, 1 + draw))
        loss.backward()  # type: ignore[no-untyped-call]
        return [parameter.grad for parameter in self.parameters if parameter.grad is not None]

    def gradient(self, batch: int, draw: int = 0) -> list[torch.Tensor]:
        """One step as assigned: `forward`, `backward`. CalibrationError for a loss that is not finite."""
        loss = self.forward(batch)
        found = self.backward(loss, batch, draw)
        check_finite(loss)
        return found

    @contextmanager
    def aside(self, batch: int, step: float) -> Iterator[torch.Tensor]:
        """Inside, parameters are theta + eps r, r a sign for each; afterwards bitwise as before. Yields eps.

        eps is `step` of the root mean square of all parameters.
        """
        kept = [parameter.detach().clone() for parameter in self.parameters]
        squares = torch.stack([tensor.float().square().sum() for tensor in kept]).sum()
        size = sum(tensor.numel() for tensor in kept)
        eps = step * (squares / size).sqrt().clamp_min(1e-6)
        generator = self.generator(kept[0].device, batch)
        try:
            with torch.no_grad():
                for parameter in self.parameters:
                    signs = torch.empty_like(parameter).bernoulli_(0.5, generator=generator).mul_(2).sub_(1)
                    parameter.add_(signs * eps)
            yield eps
        finally:
            with torch.no_grad():
                for parameter, value in zip(self.parameters, kept, strict=True):
                    parameter.copy_(value)

    def generator(self, device: torch.device, batch: int) -> torch.Generator:
        """Random numbers of one batch's own, the same in every run with this seed."""
        return torch.Generator(device).manual_seed(self._mixed(batch, -1))

    def _mixed(self, batch: int, use: int) -> int:
        return hash((self.seed, batch, use)) % 2**63
