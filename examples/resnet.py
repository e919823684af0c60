"""Run convolutions with BatchNorm in INT8 and in a mixed plan, beside FP32: python examples/resnet.py."""

from __future__ import annotations

import copy
import time

import torch
from sklearn.datasets import load_digits
from torch import nn
from torch.nn.functional import cross_entropy, interpolate

import qsync
from qsync.records.plans import ClassPlan


class Block(nn.Module):
    """Two convolutions with BatchNorm around a shortcut."""

    def __init__(self, channels: int) -> None:
        super().__init__()
        self.first, self.second = (nn.Conv2d(channels, channels, 3, padding=1, bias=False) for _ in range(2))
        self.norm1, self.norm2 = nn.BatchNorm2d(channels), nn.BatchNorm2d(channels)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Return images of the same shape, (N, C, H, W)."""
        return torch.relu(x + self.norm2(self.second(torch.relu(self.norm1(self.first(x))))))


def step(model: nn.Module, images: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    """Run forward and backward, and return the gradient of all parameters in one vector."""
    model.zero_grad()
    cross_entropy(model(images), labels).backward()
    return torch.cat([parameter.grad.flatten() for parameter in model.parameters()])


def main() -> None:
    """Print the time of a step and the error of its gradient, for FP32, INT8 and a mixed plan."""
    torch.manual_seed(0)
    pixels, labels = (torch.tensor(array[:16]) for array in load_digits(return_X_y=True))
    images = interpolate(pixels.float().view(16, 1, 8, 8) / 16, size=16)
    fp32 = nn.Sequential(nn.Conv2d(1, 64, 3, padding=1), Block(64), nn.Flatten(), nn.Linear(64 * 16**2, 10))
    graph = qsync.capture(fp32, images)
    lowered = ClassPlan({op.name: qsync.Precision.INT8 for op in graph.adjustable})
    plan = qsync.Plan(graph.model, graph.hash, {"here": lowered})
    mixed = plan.pin("0", "fp32").pin("3", "fp32")  # the first layer and the last

    exact = step(fp32, images, labels)
    for name, wanted in (("FP32", "fp32"), ("INT8", "int8"), ("mixed", mixed)):
        model = qsync.wrap(copy.deepcopy(fp32), wanted)
        error = (step(model, images, labels) - exact).norm() / exact.norm()
        begun = time.perf_counter()
        for _ in range(5):
            step(model, images, labels)
        print(f"{name}: {(time.perf_counter() - begun) / 5 * 1e3:.0f} ms a step, gradient error {error:.1%}")


if __name__ == "__main__":
    main()
