"""Measure waiting of two unequal ranks on sequences of unequal length, with and without the sampler."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import islice
from statistics import fmean
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.utils.data import DataLoader

import qsync
from qsync.distributed.agreement import agree
from qsync.distributed.monitoring.step_phases import PhaseTimer
from qsync.experiments.harness.ranks import Place
from qsync.experiments.integrations.cases import net, replicas_agree
from qsync.experiments.workloads.gpt import Gpt
from qsync.replayer.explanation.phases import mean

# A step waits for the late rank: without a margin, ranks predicted to arrive together took 5 % longer.
_MARGIN = 0.05

_SHORTEST, _LONGEST, _BATCH, _VOCABULARY = 32, 512, 16, 256
_STEPS = 6  # steps per round
ARMS = ("equal batches", "LengthSampler")


def _model() -> nn.Module:
    return Gpt(num_layers=3, width=192, num_heads=4, context=_LONGEST, vocab=_VOCABULARY)


def _loss(model: Any, one: tuple[torch.Tensor, torch.Tensor]) -> Any:
    return F.cross_entropy(model(one[0]).flatten(0, 1), one[1].flatten(), ignore_index=-100)


def _padded(rows: list[torch.Tensor]) -> tuple[torch.Tensor, torch.Tensor]:
    """Return tokens and targets, padded to the longest row."""
    tokens = nn.utils.rnn.pad_sequence([row[:-1] for row in rows], batch_first=True)
    return tokens, nn.utils.rnn.pad_sequence([row[1:] for row in rows], batch_first=True, padding_value=-100)


def measure(config: dict[str, Any], place: Place) -> dict[str, Any]:
    """Train the same steps, divided in both ways in turns; return seconds and waiting of each."""
    generator = torch.Generator().manual_seed(0)
    # Most texts are short: log-uniform lengths.
    drawn = _SHORTEST * (_LONGEST / _SHORTEST) ** torch.rand(config["sequences"], generator=generator)
    rows: Any = [torch.randint(0, _VOCABULARY, (int(n) + 1,), generator=generator) for n in drawn]
    example = _padded([row for row in rows if len(row) > 200][: _BATCH // 2])
    model: Any = qsync.hybrid(
        net(_model), example, _loss, emulated_share=place.measured_share(), margin=_MARGIN,
        cache_dir=f"{config['folder']}/plans",
    )  # fmt: skip
    sampler = qsync.LengthSampler(model, [len(row) - 1 for row in rows], _BATCH)
    timer = PhaseTimer(model, model.module)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    found: dict[str, list[dict[str, float]]] = {arm: [] for arm in ARMS}
    for number in range(config["rounds"] + 1):  # the first round traces
        sampler.set_epoch(number)
        for arm in ARMS:
            dist.barrier()
            timer.restart()
            timer.clear()
            own = (step[dist.get_rank()] for step in islice(_steps(sampler, arm), _STEPS))
            for one in DataLoader(rows, batch_sampler=own, collate_fn=_padded):
                optimizer.zero_grad()
                loss: Any = qsync.token_mean(model, _loss(model, one), (one[1] != -100).sum())
                loss.backward()
                optimizer.step()
            timer.settle()
            phases = mean(timer.steps)
            if number:
                found[arm].append({"period_s": phases.period_s, "blocked_s": phases.blocked_s})
    timer.stop()
    everyone: list[Any] = agree("gathering steps", lambda: found)
    return {
        "arms": {arm: _summary([ranks[arm] for ranks in everyone]) for arm in ARMS},
        "replicas_agree": replicas_agree(model),
    }


def _steps(sampler: qsync.LengthSampler, arm: str) -> Iterator[list[list[int]]]:
    """Yield the sampler's steps; in the first arm with equal numbers of sequences, in row order."""
    for step in sampler.steps():
        whole = sorted(index for own in step for index in own)
        yield [whole[rank :: len(step)] for rank in range(len(step))] if arm == ARMS[0] else step


def _summary(ranks: list[list[dict[str, float]]]) -> dict[str, Any]:
    """Return the mean step over all rounds, and the blocked fraction of each rank."""
    blocked = [sum(r["blocked_s"] for r in own) / sum(r["period_s"] for r in own) for own in ranks]
    return {"step_s": fmean(r["period_s"] for r in ranks[0]), "blocked": blocked}
