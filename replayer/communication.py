"""DDP's buckets: their gradients, their order of completion, how they travel, and the seconds of it."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

from qsync.errors import FormatError
from qsync.records.cluster import Cluster, Link
from qsync.records.compression import Compression, Message, kind_of
from qsync.records.graph import OpGraph
from qsync.records.identity_cache import IdentityCache

# In bytes: torch.distributed._DEFAULT_FIRST_BUCKET_BYTES, and DDP's default bucket_cap_mb.
FIRST_BUCKET_BYTES = 1024 * 1024
BUCKET_CAP_BYTES = 25 * 1024 * 1024


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


def all_reduce_s(link: Link, num_bytes: float, num_ranks: int | None = None) -> float:
    """Return the seconds of one all-reduce once every rank has arrived: t = latency + bytes / rate.

    For another number of ranks than the link was measured between, scale as a ring: n - 1 hops, with
    (n - 1) / n of the bytes over each (Patarasu and Yuan 2009).

    >>> all_reduce_s(Link(1e-4, 1e9), 10**9)
    1.0001
    """
    hops = volume = 1.0
    if link.num_ranks is not None and num_ranks is not None:
        if num_ranks < 2:
            return 0.0
        hops = (num_ranks - 1) / (link.num_ranks - 1)
        volume = hops * link.num_ranks / num_ranks
    return hops * link.latency_s + volume * num_bytes / link.bytes_per_s


def cluster_all_reduce_s(cluster: Cluster, num_bytes: float) -> float:
    """Return the seconds of an all-reduce over a cluster: within each host, then between hosts.

    >>> cluster_all_reduce_s(cluster, 25 * 2**20)
    """
    if cluster.between is None:
        return all_reduce_s(cluster.link, num_bytes, cluster.num_ranks)
    on_a_host = -(-cluster.num_ranks // cluster.num_hosts)
    within = all_reduce_s(cluster.link, num_bytes, on_a_host) if on_a_host > 1 else 0.0
    return within + all_reduce_s(cluster.between, num_bytes, cluster.num_hosts)


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


def bucket_messages(graph: OpGraph, bucket: Bucket, kind: Compression, num_ranks: int) -> list[Message]:
    """Return the collectives that exchange a bucket."""
    if kind.kind == "fp32":
        return [Message("all_reduce", bucket.num_bytes)]
    shapes = {value.name: value.shape for value in graph.parameters}
    return kind.messages([shapes[name] for name in bucket.parameters], num_ranks)


def exchange_s(
    cluster: Cluster, messages: Sequence[Message], kind: Compression, num_bytes: int
) -> tuple[float, float]:
    """Return the seconds of a bucket's exchange: of its bytes on the links, and of its codec beyond them.

    `num_bytes` are the bucket's bytes in FP32.
    """
    ranks = cluster.num_ranks
    wire_s = sum(cluster_all_reduce_s(cluster, message.as_all_reduce(ranks)) for message in messages)
    codec = cluster.codecs.get(str(kind))
    return wire_s, max(-wire_s, codec.seconds(num_bytes)) if codec is not None else 0.0
