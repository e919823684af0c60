"""A lighthouse of its own for a test."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def lighthouse() -> Iterator[str]:
    """Serve a lighthouse as `qsync lighthouse` does, on a free port; yield its address."""
    os.environ.setdefault("RUST_LOG", "error")  # torchft logs every request
    from qsync.elastic_training.rendezvous import coordination

    server = coordination().LighthouseServer(
        bind="127.0.0.1:0", min_replicas=1, join_timeout_ms=10_000, heartbeat_timeout_ms=1_000,
        quorum_tick_ms=100,
    )  # fmt: skip
    try:
        yield f"127.0.0.1:{server.address().rpartition(':')[2]}"
    finally:
        server.shutdown()
