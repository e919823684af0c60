"""Sums of gradients over ranks, encoded on the way: the same bits on every rank.

    sum(gradients + residual) -> encode -> exchange -> decode,   residual = what encoding lost on this rank

A rank that rounds the sum of a part adds what that lost to its own residual, since gradients are summed. So
one residual a parameter and rank carries all losses to the next step (error feedback: Seide et al. 2014).
NaN and Inf make the decoded block or matrix NaN on every rank, and leave no residual.
"""

from __future__ import annotations

import math
import queue
import threading
import warnings
import weakref
import zlib
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from qsync.backend.casts.cast_ops import quantize_rows
from qsync.distributed.job import ranks_by_host
from qsync.records.compression import BLOCK, Compression, kind_of, message_bytes, part_elements

# torch 2.13 renamed it.
_all_gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor


class Piece(NamedTuple):
    """One parameter's gradient in a bucket: its name, and its shape in the order of memory."""

    name: str
    shape: tuple[int, ...]


def encode_int8(values: Tensor) -> Tensor:
    """Return rows of whole blocks as bytes: INT8 codes, then the blocks' FP32 scales.

    `values` is (rows, elements) in FP32; the result is (rows, message_bytes(elements)) in uint8.
    """
    rows, elements = values.shape
    codes, scales = quantize_rows(values.reshape(-1, BLOCK))
    message = torch.empty(rows, message_bytes(elements), dtype=torch.uint8, device=values.device)
    message[:, :elements].view(torch.int8).copy_(codes.view(rows, elements))
    message[:, elements:].view(torch.float32).copy_(scales.view(rows, -1))
    return message


def decode_int8(message: Tensor) -> Tensor:
    """Return the FP32 values (rows, elements) of `encode_int8`."""
    elements = message.shape[1] * BLOCK // (BLOCK + 4)
    codes = message[:, :elements].view(torch.int8).reshape(-1, BLOCK)
    scales = message[:, elements:].view(torch.float32).reshape(-1, 1)
    return torch.mul(codes, scales).view(-1, elements)


def scattered_sum(values: Tensor, group: dist.ProcessGroup | None) -> tuple[Tensor, Tensor]:
    """Return the codes of what this rank sends to each, and its own part's sum over the ranks, in FP32.

    `values` has a row of whole blocks for each rank.
    """
    message = encode_int8(values)
    received = torch.empty_like(message)
    dist.all_to_all_single(received, message, group=group)
    return message, decode_int8(received).sum(0)


class HostGroups(NamedTuple):
    """Groups of ranks, for exchanges in layers: those of this host, and a leader of each host.

    `within` is None on a host of one rank, `leaders` on all ranks but the leaders.
    """

    within: dist.ProcessGroup | None
    leaders: dist.ProcessGroup | None
    leader: int  # this host's, of the whole job
    num_hosts: int

    @classmethod
    def make(cls, group: dist.ProcessGroup | None = None) -> HostGroups | None:
        """Make the groups of a group's hosts; None where all ranks share a host, or none does."""
        of_job = dist.get_process_group_ranks(group or dist.group.WORLD)
        by_host = [[of_job[rank] for rank in ranks] for ranks in ranks_by_host(group).values()]
        if not 1 < len(by_host) < len(of_job):
            return None
        rank, backend = dist.get_rank(), dist.get_backend(group)
        within: dict[int, dist.ProcessGroup] = {}
        for ranks in by_host:  # every rank takes part in making every group
            if len(ranks) > 1:
                within |= dict.fromkeys(ranks, dist.new_group(ranks, backend=backend))
        leaders = dist.new_group([ranks[0] for ranks in by_host], backend=backend)
        leader = next(ranks[0] for ranks in by_host if rank in ranks)
        return cls(within.get(rank), leaders if rank == leader else None, leader, len(by_host))

    def destroy(self) -> None:
        """End the groups that this rank is in."""
        for group in (self.within, self.leaders):
            if group is not None:
                dist.destroy_process_group(group)


class CompressedSum:
    """Sum buckets of FP32 gradients over a group's ranks, with residuals by parameter.

    With `hosts`, ranks of a host first add up their gradients as they are. One leader of each host exchanges
    the sum in the kind asked for, and hands the result to the others.

    `residuals` and `queries` (the right factors of `powersgd`, which the next step begins with) are flat
    tensors by parameter. Residuals belong to a rank; queries are the same on all that exchange.
    """

    def __init__(self, group: dist.ProcessGroup | None, hosts: HostGroups | None = None) -> None:
        self.group, self.num_ranks = group, dist.get_world_size(group)
        self.hosts = hosts
        self._among = hosts.leaders if hosts is not None else group  # who exchanges
        self._exchanges = hosts is None or hosts.leaders is not None
        self._num_exchanging = hosts.num_hosts if hosts is not None else self.num_ranks
        among = self._among
        self._position = (dist.get_rank() if among is None else among.rank()) if self._exchanges else 0
        self.residuals: dict[str, Tensor] = {}
        self.queries: dict[str, Tensor] = {}
        self._flat: dict[tuple[str, ...], Tensor] = {}  # residuals of a bucket, which `residuals` view

    def sum_(self, buffer: Tensor, pieces: Sequence[Piece], asked: Compression) -> None:
        """Replace a bucket by its sum over the ranks."""
        kind = asked.on([piece.shape for piece in pieces], self._num_exchanging)
        residual = self._residual(buffer, pieces) if asked.has_feedback else None
        if residual is not None:
            buffer.add_(residual)
            residual.zero_()
        hosts = self.hosts
        if hosts is not None and hosts.within is not None:
            dist.reduce(buffer, hosts.leader, group=hosts.within)
        if self._exchanges:
            self._exchange(buffer, pieces, residual, kind)
        if hosts is not None and hosts.within is not None:
            dist.broadcast(buffer, hosts.leader, group=hosts.within)
        if residual is not None:
            residual.nan_to_num_(0.0, 0.0, 0.0)

    def _exchange(
        self, buffer: Tensor, pieces: Sequence[Piece], residual: Tensor | None, kind: Compression
    ) -> None:
        """Replace a bucket by its sum over the ranks that exchange."""
        if kind.kind == "int8":
            self._sum_int8(buffer, residual)
        elif kind.kind == "powersgd":
            self._sum_low_rank(buffer, pieces, residual, kind)
        elif kind.kind == "bf16":
            narrow = buffer.bfloat16()
            if residual is not None:
                torch.sub(buffer, narrow, out=residual)
            dist.all_reduce(narrow, group=self._among)
            buffer.copy_(narrow)
        else:
            dist.all_reduce(buffer, group=self._among)

    def _residual(self, buffer: Tensor, pieces: Sequence[Piece]) -> Tensor:
        """Return a bucket's residual; DDP's buckets change once, and their parameters stay."""
        names = tuple(piece.name for piece in pieces)
        flat = self._flat.get(names)
        if flat is None:
            flat = torch.zeros_like(buffer)
            for piece, part in _parts(flat, pieces):
                if piece.name in self.residuals:
                    part.copy_(self.residuals[piece.name])
                self.residuals[piece.name] = part
            stale = [other for other in self._flat if not set(other).isdisjoint(names)]
            for other in stale:
                del self._flat[other]
            self._flat[names] = flat
        return flat

    def load(self, residuals: Mapping[str, Tensor], queries: Mapping[str, Tensor]) -> None:
        """Take saved residuals and queries in the place of the current ones."""
        self._flat.clear()
        self.residuals, self.queries = dict(residuals), dict(queries)

    def _sum_int8(self, buffer: Tensor, residual: Tensor | None) -> None:
        ranks, size = self._num_exchanging, buffer.numel()
        part, padded = part_elements(size, ranks), buffer
        if size != ranks * part:
            padded = torch.zeros(ranks * part, device=buffer.device)
            padded[:size] = buffer
        message, own = scattered_sum(padded.view(ranks, part), self._among)
        if residual is not None:
            torch.sub(buffer, decode_int8(message).view(-1)[:size], out=residual)
        answer = encode_int8(own.view(1, part))
        if residual is not None:
            begin, end = self._position * part, min((self._position + 1) * part, size)
            if begin < end:
                residual[begin:end] += (own - decode_int8(answer)[0])[: end - begin]
        _all_gather(message, answer, group=self._among)  # received in the place of what was sent
        buffer.copy_(decode_int8(message).view(-1)[:size])

    def _sum_low_rank(
        self, buffer: Tensor, pieces: Sequence[Piece], residual: Tensor | None, kind: Compression
    ) -> None:
        """Sum matrices as products of factors (Vogels et al. 2019, Algorithm 1), all else as it is."""
        parts = _parts(buffer, pieces)
        whole = [part for piece, part in parts if not kind.is_factored(piece.shape)]
        factored = [(piece, part) for piece, part in parts if kind.is_factored(piece.shape)]
        matrices = [part.view(piece.shape[0], -1) for piece, part in factored]
        queries = [
            self._query(piece.name, matrix.shape[1], kind.rank, matrix.device)
            for (piece, _), matrix in zip(factored, matrices, strict=True)
        ]
        left = [matrix @ query for matrix, query in zip(matrices, queries, strict=True)]
        self._all_reduce([*left, *whole])
        left = [torch.linalg.qr(one).Q for one in left]
        for matrix, one, query in zip(matrices, left, queries, strict=True):
            torch.mm(matrix.t(), one, out=query)
        if residual is not None:
            lost = [part for piece, part in _parts(residual, pieces) if kind.is_factored(piece.shape)]
            for matrix, one, query, part in zip(matrices, left, queries, lost, strict=True):
                torch.sub(matrix, one @ query.t(), out=part.view_as(matrix))
        self._all_reduce(queries)
        for matrix, one, query in zip(matrices, left, queries, strict=True):
            torch.mm(one, query.t(), out=matrix)

    def _query(self, name: str, columns: int, rank: int, device: torch.device) -> Tensor:
        """Return the right factor of a parameter's last step; a random one, the same on all ranks, at first.

        After a step with NaN or Inf it is random again.
        """
        found = self.queries.get(name)
        if found is None or found.numel() != columns * rank or not bool(found.isfinite().all()):
            generator = torch.Generator().manual_seed(zlib.crc32(name.encode()))
            found = torch.randn(columns, rank, generator=generator)
        self.queries[name] = found.view(columns, rank).to(device)
        return self.queries[name]

    def _all_reduce(self, tensors: Sequence[Tensor]) -> None:
        """Sum tensors over the ranks in place, in one message."""
        if not tensors:
            return
        flat = torch.cat([one.reshape(-1) for one in tensors])
        dist.all_reduce(flat, group=self._among)
        for one, summed in zip(tensors, torch.split(flat, [one.numel() for one in tensors]), strict=True):
            one.copy_(summed.view_as(one))


def _parts(flat: Tensor, pieces: Sequence[Piece]) -> list[tuple[Piece, Tensor]]:
    """Return each parameter's part of a bucket, flat."""
    return list(zip(pieces, torch.split(flat, [math.prod(piece.shape) for piece in pieces]), strict=True))


class CompressedExchange:
    """Sum DDP's buckets in a thread of its own, one after the other, while backward goes on.

    An exchange of several collectives must begin them in one order on all ranks. Hence the thread, and a
    group of its own. `kinds` maps parameters to kinds (`qsync.records.compression.kind_of`).
    """

    is_saved = True  # whether checkpoints hold its residuals

    def __init__(
        self,
        model: torch.nn.Module,
        kinds: Mapping[str, str],
        group: dist.ProcessGroup | None,
        hosts: HostGroups | None = None,
    ) -> None:
        self.sums = CompressedSum(group, hosts)
        self._kinds = dict(kinds)
        self._names = {id(parameter): name for name, parameter in model.named_parameters()}
        self._jobs: queue.SimpleQueue[Any] = queue.SimpleQueue()
        threading.Thread(target=_work, args=(self._jobs,), daemon=True, name="qsync gradients").start()
        weakref.finalize(self, self._jobs.put, None)

    def sum(self, gradients: Tensor, parameters: Iterable[Tensor]) -> torch.futures.Future[list[Tensor]]:
        """Sum a bucket over the ranks in place, as an all-reduce does; sparse and other types as they are."""
        device = gradients.device
        done: torch.futures.Future[list[Tensor]] = torch.futures.Future(
            devices=[device] if device.type == "cuda" else None
        )
        filled = torch.cuda.current_stream(device).record_event() if device.type == "cuda" else None
        pieces = [Piece(self._names[id(one)], shape_in_memory(one)) for one in parameters]
        self._jobs.put((self, gradients, pieces, filled, done))
        return done

    def _sum(self, gradients: Tensor, pieces: Sequence[Piece]) -> None:
        if gradients.is_sparse:
            dist.all_reduce(gradients, group=self.sums.group)
            return
        is_fp32 = gradients.dtype is torch.float32
        kind = kind_of(self._kinds, (piece.name for piece in pieces)) if is_fp32 else Compression()
        self.sums.sum_(gradients, pieces, kind)


def _work(jobs: queue.SimpleQueue[Any]) -> None:
    """Sum the buckets of a queue in order, until it holds None."""
    for exchange, gradients, pieces, filled, done in iter(jobs.get, None):
        try:
            with torch.no_grad(), warnings.catch_warnings():
                warnings.simplefilter("ignore", FutureWarning)  # torch's, about names of collectives
                if filled is None:
                    exchange._sum(gradients, pieces)
                else:
                    beside = torch.cuda.Stream(gradients.device)  # type: ignore[no-untyped-call]
                    with torch.cuda.stream(beside):
                        beside.wait_event(filled)
                        exchange._sum(gradients, pieces)
                        beside.synchronize()
        except Exception as error:
            done.set_exception(error)
        else:
            done.set_result([gradients])
        del exchange, gradients, pieces, filled, done  # nothing is held while it waits


def shape_in_memory(parameter: Tensor) -> tuple[int, ...]:
    """Return the sizes of a dense tensor's dimensions in the order of memory, the outermost first."""
    return tuple(parameter.shape[d] for d in memory_order(parameter))


def memory_order(tensor: Tensor) -> list[int]:
    """Return a dense tensor's dimensions in the order of memory, which DDP's buckets keep."""
    strides = tensor.stride()
    return sorted(range(len(strides)), key=lambda d: (-strides[d], d))
