"""`qsync lighthouse`: the meeting point of an elastic job. `qsync release`: ask a card to leave."""

from __future__ import annotations

import os
import signal
import socket
import time
from typing import Annotated

import typer

from qsync.commands.options import Json, print_json, print_lines
from qsync.errors import FormatError, QSyncError, shortened

DEFAULT_PORT = 29510
_EVERYWHERE = "0.0.0.0"
_QUORUM_TICK_MS = 100


def lighthouse(
    port: Annotated[int, typer.Option(help="Port that cards come to; 0 for a free one.")] = DEFAULT_PORT,
    bind: Annotated[str, typer.Option(help="Address to listen at; 0.0.0.0 for all.")] = "127.0.0.1",
    dead_after: Annotated[float, typer.Option(help="Seconds without heartbeat: a card is dead.")] = 1.0,
    wait: Annotated[float, typer.Option(help="Seconds to wait for a card that lags.")] = 10.0,
    as_json: Json = False,
) -> None:
    """Run the meeting point of an elastic job, until interrupted. One lighthouse serves one job."""
    if not 0 <= port < 65536:
        raise FormatError(f"--port must be from 0 to 65535, found {shortened(port)}; give e.g. 29510")
    if ":" in bind:
        raise FormatError(f"--bind must be an IPv4 address, found {shortened(bind)}")
    for name, seconds in (("--dead-after", dead_after), ("--wait", wait)):
        if not 0.2 <= seconds <= 86400:
            raise FormatError(f"{name} must be from 0.2 to 86400 seconds, found {shortened(seconds)}")
    os.environ.setdefault("RUST_LOG", "error")  # torchft logs every request
    from qsync.elastic_training.rendezvous import coordination

    try:
        server = coordination().LighthouseServer(
            bind=f"{bind}:{port}", min_replicas=1, join_timeout_ms=round(1e3 * wait),
            heartbeat_timeout_ms=round(1e3 * dead_after), quorum_tick_ms=_QUORUM_TICK_MS,
        )  # fmt: skip
    except RuntimeError as error:
        raise QSyncError(
            f"cannot listen at {bind}:{port} ({shortened(str(error), 80, quote=False)}); give another --port "
            "or --bind"
        ) from error
    host = _own_address() if bind == _EVERYWHERE else bind
    address = f"{host}:{server.address().rpartition(':')[2]}"
    if as_json:
        print_json({"lighthouse": address, "pid": os.getpid()})
    else:
        print_lines(f"lighthouse at {address}; start cards with QSYNC_LIGHTHOUSE={address}")
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    try:
        while True:
            time.sleep(3600)
    except KeyboardInterrupt:
        server.shutdown()


def _own_address() -> str:
    """Return this machine's network address: a card bound to 0.0.0.0 would report 127.0.0.1.

    The socket sends nothing; its peer address belongs to no machine.
    """
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        try:
            probe.connect(("192.0.2.1", 9))
        except OSError:  # no network
            return socket.gethostname()
        found: str = probe.getsockname()[0]
    return found


def release(
    card: Annotated[str, typer.Argument(help="The name of the card.", show_default=False)],
    at: Annotated[
        str | None, typer.Option("--lighthouse", help="HOST:PORT.", show_default="$QSYNC_LIGHTHOUSE")
    ] = None,
    as_json: Json = False,
) -> None:
    """Ask a card of an elastic job to leave after its current step."""
    os.environ.setdefault("RUST_LOG", "error")
    from qsync.elastic_training.rendezvous import LIGHTHOUSE_VARIABLE, ask_to_leave

    address = at or os.environ.get(LIGHTHOUSE_VARIABLE)
    if address is None:
        raise FormatError(
            f"the lighthouse's address is missing; give it with --lighthouse or {LIGHTHOUSE_VARIABLE}"
        )
    others = ask_to_leave(card, address)
    if as_json:
        print_json({"released": card, "others": others})
    else:
        print_lines(f"{card} leaves after its present step; {len(others)} cards stay")
