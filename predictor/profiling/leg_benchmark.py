"""The legs within and between the hosts of a job: seconds of messages, both ways at once.

A leader of each host measures the legs to the others, two hosts at a time, so that no leg carries another
message. Two ranks of each host measure the one within it. The least of several times counts, which tells
legs apart on a busy machine, too.
"""

from __future__ import annotations

import time
from collections import defaultdict
from collections.abc import Iterator, Sequence

import torch
import torch.distributed as dist

_SIZES = (2**10, 2**22)  # bytes of messages, whose difference tells the rate
_ROUNDS = 4
LEGS_S = 3.0  # seconds after which no further round begins


def measure_legs(hosts: Sequence[Sequence[int]], device: torch.device) -> list[tuple[int, float, float]]:
    """Return the legs into this rank's host: the number of the other host, latency and rate.

    `hosts` has the ranks of each. Ranks that measure nothing return no leg. All ranks must call it.
    """
    rank, found = dist.get_rank(), defaultdict[tuple[int, int], list[float]](list)
    on = device if "nccl" in dist.get_backend() else torch.device("cpu")
    out, into = (torch.zeros(_SIZES[1], dtype=torch.uint8, device=on) for _ in range(2))
    began_s, late = time.perf_counter(), torch.zeros(1, device=on)
    for turn in range(_ROUNDS + 1):
        for other, peer in _meetings(hosts, rank):
            for size in _SIZES:
                _exchange(out[:1], into[:1], peer)  # until both are there
                seconds = _exchange(out[:size], into[:size], peer)
                if turn:  # the first warms up
                    found[other, size].append(seconds)
        late[0] = time.perf_counter() - began_s
        dist.broadcast(late, 0)  # rank 0's clock counts
        if turn and float(late) > LEGS_S:
            break
    legs = []
    for other in sorted({other for other, _ in found}):
        small_s, large_s = (min(found[other, size]) for size in _SIZES)
        legs.append((other, small_s, (_SIZES[1] - _SIZES[0]) / max(large_s - small_s, 1e-9)))
    return legs


def _meetings(hosts: Sequence[Sequence[int]], rank: int) -> Iterator[tuple[int, int]]:
    """Yield whom a rank meets, in an order without a deadlock: the host, and its rank.

    Every two of the hosts meet once, each in one meeting of a round (the circle method).
    """
    for own, ranks in enumerate(hosts):
        if len(ranks) > 1 and rank in ranks[:2]:
            yield own, ranks[1] if rank == ranks[0] else ranks[0]
    seats = list(range(len(hosts) + len(hosts) % 2))  # of an odd number one sits out
    for _ in seats[1:]:
        for pair in zip(seats, reversed(seats[len(seats) // 2 :]), strict=False):
            for own, other in (pair, pair[::-1]):
                if max(pair) < len(hosts) and rank == hosts[own][0]:
                    yield other, hosts[other][0]
        seats = [seats[0], seats[-1], *seats[1:-1]]


def _exchange(out: torch.Tensor, into: torch.Tensor, peer: int) -> float:
    """Send to a peer and receive as much; return the seconds until all has come."""
    began_s = time.perf_counter()
    first, *others = dist.batch_isend_irecv(
        [dist.P2POp(dist.irecv, into, peer), dist.P2POp(dist.isend, out, peer)]
    )
    first.wait()
    if into.is_cuda:
        torch.cuda.synchronize(into.device)
    seconds = time.perf_counter() - began_s
    for work in others:
        work.wait()
    return seconds
