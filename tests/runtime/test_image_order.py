"""The memory order of images: what a lowered graph says is what the operators of a running model find."""

from __future__ import annotations

import random
from itertools import pairwise
from types import SimpleNamespace

import pytest
import torch
from models import Block
from observing import Watcher
from torch import nn
from torch.nn import functional as F

import qsync
from qsync.backend import shape_choices
from qsync.backend.encoding import Encoded
from qsync.lowering.lowered_graph import Run
from qsync.operators.precision import Precision
from qsync.runtime import choosers, planned_forward

PRECISIONS = (Precision.FP32, Precision.BF16, Precision.INT8, Precision.FP16)


class Orders(Watcher):
    """An Observer of the operators that read channels-last images, beside what their nodes say."""

    def __init__(self) -> None:
        super().__init__()
        self.differ: list[tuple[str, bool]] = []
        self.num_last = 0

    def seen(self, node, result, operands):
        super().seen(node, result, operands)
        images = [t for t in operands if isinstance(t, torch.Tensor) and t.ndim == 4]
        lie = [t.is_contiguous(memory_format=torch.channels_last) for t in images if not in_both_orders(t)]
        if isinstance(node, Run) and lie and not any(isinstance(t, Encoded) for t in operands):
            self.num_last += any(lie)
            if any(lie) != node.channels_last:
                self.differ.append((node.op, node.channels_last))


def in_both_orders(t: torch.Tensor) -> bool:
    return t.is_contiguous() and t.is_contiguous(memory_format=torch.channels_last)


class Mobile(nn.Module):
    """Depthwise convolutions, groups and their norms, gates from means, pools, patches put together."""

    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Conv2d(3, 16, 3, stride=2, padding=1)
        self.expand, self.depthwise = nn.Conv2d(16, 32, 1), nn.Conv2d(32, 32, 3, padding=1, groups=32)
        self.norm = nn.GroupNorm(4, 32)
        self.gate = nn.Conv2d(32, 32, 1)
        self.project, self.down = nn.Conv2d(32, 16, 1), nn.Conv2d(16, 24, 3, stride=2, padding=1)
        self.grouped = nn.Conv2d(24, 24, 3, padding="same", groups=3)
        self.merge, self.head = nn.Conv2d(40, 24, 1), nn.Linear(24, 4)

    def forward(self, images):
        x = F.hardswish(self.stem(images))
        y = F.silu(self.norm(self.depthwise(F.relu6(self.expand(x)))))
        y = y * torch.sigmoid(self.gate(F.adaptive_avg_pool2d(y, 1)))
        x = x + self.project(y)
        y = F.leaky_relu(self.grouped(F.max_pool2d(self.down(F.pad(x, (0, 1, 0, 1))), 2, 1)))
        y = F.interpolate(y, size=x.shape[2:], mode="nearest")
        return self.head(F.relu(self.merge(torch.cat([x, y], 1))).mean((2, 3)))


class Residual(nn.Module):
    """Residual blocks with batch norms and shortcuts, as torchvision writes them."""

    def __init__(self) -> None:
        super().__init__()
        self.stem, self.head = nn.Conv2d(3, 8, 3, padding=1), nn.Linear(32, 4)
        self.blocks = nn.Sequential(Block(8, 8, 1), Block(8, 16, 2), Block(16, 32, 2))

    def forward(self, images):
        return self.head(self.blocks(F.relu(self.stem(images))).mean((2, 3)))


def residual():
    return Residual(), torch.randn(4, 3, 16, 16)


def mobile():
    return Mobile(), torch.randn(2, 3, 24, 24)


def assignments(graph):
    """Every precision everywhere, and mixtures in which a convolution often has that of the one before it."""
    names = [op.name for op in graph.adjustable]
    yield from ((str(p), dict.fromkeys(names, p)) for p in PRECISIONS)
    for seed in range(8):
        draw = random.Random(seed)
        chosen = {names[0]: draw.choice(PRECISIONS)}
        for before, name in pairwise(names):
            chosen[name] = chosen[before] if draw.random() < 0.5 else draw.choice(PRECISIONS)
        yield f"mixture {seed}", chosen


@pytest.mark.parametrize("number", [0, 1], ids=["channels last", "contiguous"])
@pytest.mark.parametrize("make", [residual, mobile])
def test_operators_find_images_in_the_order_that_their_nodes_say(make, number, monkeypatch):
    """Whichever order a convolution in fast FP32 computes in."""
    chosen = SimpleNamespace(get=lambda *_: number, decided=lambda *_: number)
    monkeypatch.setattr(shape_choices, "choices", lambda: chosen)
    torch.manual_seed(0)
    model, images = make()
    graph = qsync.capture(model, images)
    program, differ = planned_forward.attach(model, choosers.following({})), {}
    for label, assignment in assignments(graph):
        program.choose(choosers.following(assignment), orders := Orders())
        model(images).square().sum().backward()
        assert not orders.wrong
        assert bool(orders.num_last) == (label != "fp32")
        differ |= {label: orders.differ} if orders.differ else {}
    assert not differ


class Excited(torch.nn.Module):
    """A squeeze-and-excitation block: images are read by a pool beside the product that scales them."""

    def __init__(self, pool):
        super().__init__()
        self.pool, self.norm = pool, torch.nn.BatchNorm2d(16)
        self.conv, self.scale = torch.nn.Conv2d(8, 16, 3, padding=1), torch.nn.Conv2d(16, 16, 1)

    def forward(self, x):
        x = self.norm(self.conv(x))
        return x * self.scale(self.pool(x)).sigmoid()


@pytest.mark.parametrize(
    "pool", [torch.nn.AdaptiveAvgPool2d(1), lambda x: x.mean((2, 3), keepdim=True)], ids=["pool", "mean"]
)
def test_gradients_of_means_come_in_the_order_of_their_images(pool):
    model = qsync.wrap(Excited(pool), "bf16", strict=True)
    found, seen, orders = model(torch.randn(4, 8, 12, 12)), set(), {}

    def note(node):
        def noted(gradients, _=None):
            orders.setdefault(node.name(), []).extend(
                g.is_contiguous(memory_format=torch.channels_last) for g in gradients[:1]
            )

        return noted

    pending = [found.grad_fn]
    while pending:
        node = pending.pop()
        if node is None or node in seen:
            continue
        seen.add(node)
        pending += [following for following, _ in node.next_functions]
        if node.name() == "_OwnStridesBackward":
            node.register_hook(note(node))
        elif "BatchNorm" in node.name():
            node.register_prehook(note(node))
    found.sum().backward()  # of a row-major gradient
    assert orders == {"_OwnStridesBackward": [True], "NativeBatchNormBackward0": [True]}
