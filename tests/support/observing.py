"""Watches what a wrapped model runs: the nodes of the lowered graph in order, and the types of what they
made."""

from __future__ import annotations

import math
from typing import Any

import torch

from qsync.backend.encoding import Encoded
from qsync.lowering.lowered_graph import Cast, LoweredGraph, Run
from qsync.runtime import choosers, planned_forward

DTYPES = {"fp64": torch.float64, "fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}


class Watcher:
    """An Observer that keeps every node it is told of, with the types of its operands and of its result."""

    def __init__(self) -> None:
        self.nodes: list[Cast | Run] = []
        self.wrong: list[str] = []

    def began(self) -> None:
        pass

    def seen(self, node: Cast | Run, result: Any, operands: tuple[Any, ...]) -> None:
        self.nodes.append(node)
        if isinstance(node, Cast):
            self._compare(f"cast of {node.value}", node.source, operands[0])
            self._compare(f"cast of {node.value} to {node.target}", node.target, result)
            return
        self._compare(f"{node.op} in {node.mode}", node.output, result)
        if len(operands) == len(node.operands):  # all of them, but for what enters or leaves a checkpoint
            for expected, operand in zip(node.operands, operands, strict=True):
                self._compare(f"an operand of {node.op}", expected, operand)

    def _compare(self, what: str, expected: str, found: Any) -> None:
        for item in found if type(found) in (tuple, list) else (found,):
            if isinstance(item, Encoded):
                prefix = {
                    torch.int8: "int8",
                    torch.uint8: "int8",
                    torch.float16: "fp16",
                    torch.float8_e4m3fn: "fp8",
                }[item.data.dtype]
                if not expected.startswith(prefix):
                    self.wrong.append(f"{what} is {item}, not {expected}")
            elif (
                isinstance(item, torch.Tensor)
                and item.is_floating_point()
                and item.dtype != DTYPES.get(expected)
            ):
                self.wrong.append(f"{what} is {item.dtype}, not {expected}")


def watched(model: torch.nn.Module, assignment: dict[str, Any]) -> Watcher:
    """Make the model run this assignment, watched."""
    watcher = Watcher()
    program = planned_forward.attach(model, choosers.following(assignment))
    program.choose(choosers.following(assignment), watcher)
    return watcher


def computed(lowered: LoweredGraph) -> tuple[Cast | Run, ...]:
    """The nodes of a lowered graph that do something: all but the one that hands results out."""
    outputs = {op.name for op in lowered.graph.ops if op.kind == "output"}
    return tuple(node for node in lowered.nodes if isinstance(node, Cast) or node.op not in outputs)


def decibels(got: dict[str, torch.Tensor], expected: dict[str, torch.Tensor]) -> float:
    """Signal to noise of all gradients together."""
    noise = sum(float((got[name] - expected[name]).double().square().sum()) for name in expected)
    signal = sum(float(expected[name].double().square().sum()) for name in expected)
    return math.inf if noise == 0 else 10 * math.log10(signal / noise)
