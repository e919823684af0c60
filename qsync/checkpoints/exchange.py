"""What ranks tell each other about a checkpoint: JSON through the job's store, without any collective."""

from __future__ import annotations

import json
from datetime import timedelta
from typing import Any

import torch.distributed as dist
from torch.distributed import distributed_c10d

_TIMEOUT = timedelta(minutes=30)  # the longest that one rank may write


class Exchange:
    """A connection of its own to the job's store: it may wait in a thread while others use theirs.

    Without torch.distributed there is one rank, and nothing to tell.
    """

    def __init__(self, topic: str) -> None:
        is_job = dist.is_available() and dist.is_initialized()
        self.rank, self.num_ranks = (dist.get_rank(), dist.get_world_size()) if is_job else (0, 1)
        if self.num_ranks > 1:
            store: Any = distributed_c10d._get_default_store()
            store = store.clone()
            store.set_timeout(_TIMEOUT)
            self._store = distributed_c10d.PrefixStore(f"qsync/checkpoints/{topic}", store)

    def tell(self, what: str, value: Any) -> None:
        """Let every rank hear a value."""
        if self.num_ranks > 1:
            self._store.set(what, json.dumps(value))

    def hear(self, what: str) -> Any:
        """Wait until a value was told, and return it."""
        return json.loads(self._store.get(what))

    def collect(self, what: str, own: Any) -> list[Any]:
        """Wait for what every rank told and return it, in rank order; it is forgotten then."""
        names = [f"{what}/{rank}" for rank in range(1, self.num_ranks)]
        told = [self.hear(name) for name in names]
        for name in names:
            self._store.delete_key(name)
        return [own, *told]
