"""`qsync links`: bandwidth and latency within and between hosts, in each direction."""

from __future__ import annotations

import os
from dataclasses import replace
from pathlib import Path
from typing import Annotated

import typer
from rich.table import Table

from qsync.commands.options import Json, console, print_json, print_lines
from qsync.errors import FormatError
from qsync.records.cluster import Cluster
from qsync.records.json_files import read_json


def links(
    source: Annotated[
        Path | None,
        typer.Argument(
            metavar="[SOURCE]",
            help="A plan's folder or a cluster.toml; without it torchrun's ranks measure.",
            show_default=False,
        ),
    ] = None,
    as_json: Json = False,
) -> None:
    """Show bandwidth and latency from host to host, and whether another order of ranks is faster."""
    from qsync.replayer.communication import order_hint

    cluster = _measured() if source is None else _saved(source)
    if cluster is None:  # rank 0 prints
        return
    hosts, hint = cluster.all_hosts, order_hint(cluster)
    if as_json:
        print_json({"hosts": replace(cluster, hosts=hosts).to_json()["hosts"], "order": hint})
        return
    table = Table(title="A message from one rank to another: bandwidth, latency")
    for name in ("from", "ranks", *(f"to {host.name or 'each other'}" for host in hosts)):
        table.add_column(name)
    for host in hosts:
        legs = [host.leg(other.name) for other in hosts]
        cells = [f"{8e-9 * rate:.3g} Gb/s, {1e6 * latency_s:.3g} us" for latency_s, rate in legs]
        table.add_row(host.name or "all ranks", ", ".join(map(str, host.ranks)), *cells)
    console.print(table)
    print_lines(*([hint] if hint else []))


def _saved(source: Path) -> Cluster:
    if not source.is_dir():
        return Cluster.load(source)
    file = source / "cluster.json"
    return Cluster.from_json(read_json(file), where=str(file))


def _measured() -> Cluster | None:
    """Measure the links of the job that torchrun started; None on all ranks but the first."""
    if int(os.environ.get("WORLD_SIZE", "1")) < 2:
        raise FormatError(
            "qsync links measures between ranks: give a plan's folder or a cluster.toml, or start it in each "
            "rank: torchrun --nproc-per-node 2 -m qsync links"
        )
    import torch

    from qsync.backend.devices.device_detection import detect_class
    from qsync.distributed import job

    is_gpu = torch.cuda.is_available()
    device = torch.device("cuda", int(os.environ.get("LOCAL_RANK", "0"))) if is_gpu else torch.device("cpu")
    job.join_job(device)
    cluster, _ = job.form_cluster(job.Rank(device, detect_class(device, None, job.ranks_on_host())))
    return cluster if job.is_rank_zero() else None
