"""DDP's buckets: their gradients, their order of completion, how they travel, and the seconds of it."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import permutations

from qsync.errors import FormatError, shortened
from qsync.records.cluster import Cluster, Host
from qsync.records.compression import Compression, Message, Shapes, kind_of
from qsync.records.graph import OpGraph
from qsync.records.identity_cache import IdentityCache

# In bytes: torch.distributed._DEFAULT_FIRST_BUCKET_BYTES, and DDP's default bucket_cap_mb.
FIRST_BUCKET_BYTES = 1024 * 1024
BUCKET_CAP_BYTES = 25 * 1024 * 1024
_MOST_TRIED_HOSTS = 8  # orders of more are not tried
_WORTH_SAYING = 0.02  # of an all-reduce: a smaller gain by another order is not mentioned


@dataclass(frozen=True, slots=True)
class Bucket:
    """Gradients that one all-reduce averages together.

    `ready` is the position of the operator whose backward completes the bucket; backward runs from the last
    operator to the first. `ready` is -1 if no operator uses some parameter of the bucket: the bucket then
    waits for the end of backward.
    """

    parameters: tuple[str, ...]
    num_bytes: int
    ready: int


# Caches by graph, whose values depend on nothing else.
_READY: IdentityCache[dict[str, int]] = IdentityCache()
_SIZES: IdentityCache[dict[int, int]] = IdentityCache()
_BUCKETS: IdentityCache[dict[int | None, tuple[Bucket, ...]]] = IdentityCache()


def ready_positions(graph: OpGraph) -> dict[str, int]:
    """Return by trained parameter the position of the operator that completes its gradient.

    Backward reverses forward, so this operator is the FIRST that reads the parameter. The position is -1 if
    no operator reads the parameter. Parameters are in the order in which their gradients become ready.

    >>> ready_positions(graph)
    {'head.weight': 12, 'head.bias': 12, 'embedding.weight': 0}
    """
    return dict(_READY.of(graph, lambda: _ready_positions(graph)))


def _ready_positions(graph: OpGraph) -> dict[str, int]:
    first = {value.name: -1 for value in graph.parameters if value.requires_grad}
    # A parameter inside a checkpointed graph may have a second name there; its gradient is the same tensor.
    real = {
        v.name: v.name.partition("@checkpoint")[0] for v in graph.inputs if v.kind in ("parameter", "alias")
    }
    for i in reversed(range(len(graph.ops))):
        for name in graph.ops[i].inputs + graph.ops[i].kept:
            if real.get(name) in first:
                first[real[name]] = i
    return dict(sorted(first.items(), key=lambda item: -item[1]))


def gradient_bytes(graph: OpGraph) -> dict[int, int]:
    """Return by operator position the bytes of gradients that its backward completes.

    Position -1 has the gradients of parameters that no operator uses.
    """
    return _SIZES.of(graph, lambda: _gradient_bytes(graph))


def _gradient_bytes(graph: OpGraph) -> dict[int, int]:
    sizes = {value.name: value.num_bytes for value in graph.parameters}
    found: dict[int, int] = {}
    for name, position in ready_positions(graph).items():
        found[position] = found.get(position, 0) + sizes[name]
    return found


def buckets(graph: OpGraph, bucket_cap_bytes: int | None = None) -> tuple[Bucket, ...]:
    """Return the buckets as DDP rebuilds them after its first step, in order of reduction.

    Buckets take gradients of one type in the order they become ready, and close once their size reaches the
    cap (torch, compute_bucket_assignment_by_size). By default the first cap of a type is 1 MiB and the others
    are 25 MiB. A given cap holds for all buckets, as with `DistributedDataParallel(bucket_cap_mb=...)`.

    >>> [bucket.num_bytes for bucket in buckets(graph)]
    """
    if bucket_cap_bytes is not None and not bucket_cap_bytes >= 1:
        raise FormatError(f"bucket_cap_bytes must be at least 1, found {bucket_cap_bytes}; DDP's is 25 MiB")
    by_cap = _BUCKETS.of(graph, dict)
    if bucket_cap_bytes not in by_cap:
        by_cap[bucket_cap_bytes] = _buckets(graph, bucket_cap_bytes)
    return by_cap[bucket_cap_bytes]


def _buckets(graph: OpGraph, bucket_cap_bytes: int | None) -> tuple[Bucket, ...]:
    caps = [FIRST_BUCKET_BYTES, BUCKET_CAP_BYTES] if bucket_cap_bytes is None else [bucket_cap_bytes]
    parameters = {value.name: value for value in graph.parameters}
    positions = ready_positions(graph)
    closed: list[Bucket] = []
    filling: dict[str, Bucket] = {}  # dtype -> open bucket
    num_closed: Counter[str] = Counter()
    for name, ready in positions.items():
        dtype, num_bytes = parameters[name].dtype, parameters[name].num_bytes
        bucket = filling.pop(dtype, Bucket((), 0, ready))
        bucket = Bucket((*bucket.parameters, name), bucket.num_bytes + num_bytes, ready)
        if bucket.num_bytes >= caps[min(num_closed[dtype], len(caps) - 1)]:
            closed.append(bucket)
            num_closed[dtype] += 1
        else:
            filling[dtype] = bucket
    return (*closed, *filling.values())


class Legs:
    """The legs of a cluster, as its collectives cross them.

    Gradients that travel in stated kinds, between several hosts of which some have several ranks, are first
    reduced on each host, then exchanged between a leader of each, then broadcast on each (`is_layered`). So
    `num_exchanging` ranks exchange the messages of a kind.
    """

    def __init__(self, cluster: Cluster) -> None:
        hosts = cluster.all_hosts
        num_ranks = sum(len(host.ranks) for host in hosts)
        self._codecs = cluster.codecs
        self.is_layered = bool(cluster.compression) and 1 < len(hosts) < num_ranks
        self.num_exchanging = len(hosts) if self.is_layered else num_ranks
        self._flat = _ring(_by_rank(hosts))
        self._exchanging = _ring(hosts) if self.is_layered else self._flat
        self._within = [(len(host.ranks) - 1, *host.leg(host.name)) for host in hosts if len(host.ranks) > 1]

    def messages(self, kind: Compression, shapes: Shapes, num_bytes: int) -> list[Message]:
        """Return the collectives that sum gradients of these shapes, and of so many bytes."""
        found = [Message("all_reduce", num_bytes)]
        if kind.kind != "fp32":
            found = kind.messages(shapes, self.num_exchanging)
        if self.is_layered:
            found = [Message("reduce", num_bytes), *found, Message("broadcast", num_bytes)]
        return found

    def all_reduce_s(self, num_bytes: float) -> float:
        """Return the seconds of an all-reduce over all ranks, once every rank has arrived."""
        return _slowest(self._flat, num_bytes)

    def exchange_s(
        self, kind: Compression, messages: Sequence[Message], num_bytes: int
    ) -> tuple[float, float]:
        """Return the seconds of a bucket's exchange: of its messages, and of its codec beyond them.

        `num_bytes` are the bucket's bytes in FP32. Without layers FP32 is all-reduced by DDP, with no codec.
        """
        wire_s = sum(map(self._message_s, messages))
        codec = self._codecs.get(str(kind)) if kind.kind != "fp32" or self.is_layered else None
        return wire_s, max(-wire_s, codec.seconds(num_bytes)) if codec is not None else 0.0

    def _message_s(self, message: Message) -> float:
        if message.is_within_hosts:  # from rank to rank in a chain
            return max(hops * latency_s + message.num_bytes / rate for hops, latency_s, rate in self._within)
        return _slowest(self._exchanging, message.as_all_reduce(self.num_exchanging))


def _by_rank(hosts: Sequence[Host]) -> list[Host]:
    """Return the host of each rank, in the order of ranks."""
    of_ranks = {rank: host for host in hosts for rank in host.ranks}
    return [of_ranks[rank] for rank in sorted(of_ranks)]


def _ring(order: Sequence[Host]) -> list[tuple[float, float]]:
    """Return seconds and seconds per byte of an all-reduce by each leg of a ring, one host for each rank.

    It has 2 (n - 1) hops of b / n bytes, each as long as over the slowest leg (Patarasu and Yuan 2009). If a
    ring crosses a leg between hosts several times, its messages share it.
    """
    num, by_name = len(order), {host.name: host for host in order}
    names = [host.name for host in order]
    crossed = Counter(zip(names, [*names[1:], names[0]], strict=True))
    lines = []
    for (own, other), times in crossed.items():
        latency_s, bytes_per_s = by_name[own].leg(other)
        sharing = 1 if own == other else times
        lines.append((2 * (num - 1) * latency_s, 2 * (num - 1) * sharing / (num * bytes_per_s)))
    return lines


def _slowest(lines: Sequence[tuple[float, float]], num_bytes: float) -> float:
    return max(latency_s + num_bytes * s_per_byte for latency_s, s_per_byte in lines)


def cluster_all_reduce_s(cluster: Cluster, num_bytes: float) -> float:
    """Return the seconds of an all-reduce over all ranks of a cluster, in their order.

    >>> cluster_all_reduce_s(cluster, 25 * 2**20)
    """
    return Legs(cluster).all_reduce_s(num_bytes)


def order_hint(cluster: Cluster, num_bytes: int = BUCKET_CAP_BYTES) -> str:
    """Return a sentence if another order of ranks makes an all-reduce faster; otherwise an empty text.

    The ranks of a host follow each other, and all orders of up to eight hosts are tried.
    """
    hosts = cluster.hosts[: _MOST_TRIED_HOSTS + 1]
    if len(hosts) < 2:
        return ""
    orders = permutations(hosts[1:]) if len(hosts) <= _MOST_TRIED_HOSTS else [cluster.hosts[1:]]
    now_s = cluster_all_reduce_s(cluster, num_bytes)
    best_s, best = min(
        ((_slowest(_ring([h for host in order for h in [host] * len(host.ranks)]), num_bytes), order)
         for order in ((hosts[0], *others) for others in orders)), key=lambda one: one[0],
    )  # fmt: skip
    if best_s > (1.0 - _WORTH_SAYING) * now_s:
        return ""
    ranks = ", ".join(str(rank) for host in best for rank in host.ranks)
    return (
        f"in another order of ranks, {shortened(ranks, quote=False)}, an all-reduce of {num_bytes / 2**20:g} "
        f"MiB takes {1e3 * best_s:.3g} instead of {1e3 * now_s:.3g} ms; start the hosts in that order"
    )


def bucket_kinds(graph: OpGraph, cluster: Cluster, those: Sequence[Bucket]) -> tuple[Compression, ...]:
    """Return how each bucket travels; all but FP32 gradients travel as they are.

    >>> [str(kind) for kind in bucket_kinds(graph, cluster, buckets(graph))]
    """
    if not cluster.compression:
        return (Compression(),) * len(those)
    types = {value.name: value.dtype for value in graph.parameters}
    return tuple(
        kind_of(cluster.compression, bucket.parameters)
        if types[bucket.parameters[0]] == "fp32"
        else Compression()
        for bucket in those
    )
