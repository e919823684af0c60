"""Connect a job's ranks to their rendezvous store, which rank 0 or torchrun serves."""

from __future__ import annotations

import os
import socket
import sys
import time
from dataclasses import dataclass
from datetime import timedelta
from typing import Self

from torch._C._distributed_c10d import Store, TCPStore

from qsync.distributed.monitoring.liveness import TOLD_S
from qsync.errors import FormatError, QSyncError, shortened

_RETRY_S = 0.1


@dataclass(frozen=True, slots=True)
class JobAddress:
    """The address of a job's store, with this process's rank and the number of ranks."""

    rank: int
    world_size: int
    host: str
    port: int

    @classmethod
    def of_environment(cls) -> Self:
        """Read torchrun's environment variables. Raises FormatError for a missing or invalid one."""
        found = {
            name: os.environ.get(name, "") for name in ("RANK", "WORLD_SIZE", "MASTER_PORT", "MASTER_ADDR")
        }
        for name, text in found.items():
            if not text or (name != "MASTER_ADDR" and not (text.isascii() and text.isdigit())):
                raise FormatError(
                    f"RANK is set, but {name} is {shortened(text)}; start the job with torchrun, or unset "
                    "RANK"
                )
        rank, world_size, port = (int(found[name]) for name in ("RANK", "WORLD_SIZE", "MASTER_PORT"))
        return cls(rank, world_size, found["MASTER_ADDR"], port)

    def connect(self, join_timeout_s: float, timeout: timedelta) -> Store:
        """Serve the store, or connect to it once it is up; its calls then time out after `timeout`.

        Raises QSyncError if it is not up within `join_timeout_s`.
        """
        serves = self.rank == 0 and os.environ.get("TORCHELASTIC_USE_AGENT_STORE") != "True"
        if not serves:
            self._wait_for_server(join_timeout_s)
        try:
            store = TCPStore(
                self.host, self.port, self.world_size, serves, timedelta(seconds=join_timeout_s),
                wait_for_workers=False, multi_tenant=True,
            )  # fmt: skip
        except RuntimeError as error:
            why = shortened(str(error).splitlines()[0], 120, quote=False)
            raise QSyncError(
                f"rank {self.rank} cannot {'serve' if serves else 'reach'} the rendezvous store at "
                f"{self.host}:{self.port} ({why}); set another MASTER_PORT, the same on every rank"
            ) from error
        store.set_timeout(timeout)
        return store

    def _wait_for_server(self, join_timeout_s: float) -> None:
        """Wait for rank 0 with a line every ten seconds, where torch's store would be silent."""
        began_s = told_s = time.monotonic()
        while True:
            try:
                socket.create_connection((self.host, self.port), timeout=TOLD_S).close()
                return
            except OSError as error:
                why = error.strerror or str(error)
            now_s = time.monotonic()
            whom = f"rank 0, which serves the rendezvous store at {self.host}:{self.port} ({why})"
            if now_s - began_s > join_timeout_s:
                raise QSyncError(
                    f"rank {self.rank} has waited {now_s - began_s:.0f} s for {whom}; look at the output of "
                    "rank 0, or give a larger join_timeout_s"
                )
            if now_s - told_s >= TOLD_S:
                told_s = now_s
                print(f"rank {self.rank} has waited {now_s - began_s:.0f} s for {whom}", file=sys.stderr)
            time.sleep(_RETRY_S)
