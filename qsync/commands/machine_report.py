"""The fingerprint that `qsync doctor --report` writes."""

from __future__ import annotations

import getpass
import os
import re
import socket
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from qsync.backend.devices.processor import instruction_sets
from qsync.commands.device_report import examine, one_thread
from qsync.fingerprint.measure import measure_model
from qsync.fingerprint.small_models import SMALL_MODELS
from qsync.records.fingerprint import Fingerprint, KernelFound, SmallModel
from qsync.what_if.cost_learning import measure_sheet

_MOST_S = 180.0
_PATH = re.compile(r"(?<![\w.])~?/[^\s:;,'\")]*")


def take_fingerprint(progress: Callable[[str], None]) -> Fingerprint:
    """Measure this machine in three minutes at most; models are measured on its CPU, by one thread."""
    begun_s, load = time.perf_counter(), os.getloadavg()[0]
    progress("timing the kernels of this machine")
    found = examine()
    models: list[SmallModel] = []
    left_out: list[str] = []
    with one_thread():
        sheet = measure_sheet(torch.device("cpu"))
        for number, name in enumerate(SMALL_MODELS):
            left_s = begun_s + _MOST_S - time.perf_counter()
            own_s = left_s / (len(SMALL_MODELS) - number)
            if models and own_s < _MOST_S / 20:
                left_out.append(name)
                continue
            model = measure_model(name, time.perf_counter() + 0.8 * own_s, progress)
            why = {mode: {op: impersonal(text) for op, text in of.items()} for mode, of in model.why.items()}
            models.append(replace(model, why=why))
    left_out += [f"operators of {model.name}" for model in models if not model.gaps]
    host = found["machine"]
    return Fingerprint(
        processor=host["processor"],
        instruction_sets=instruction_sets(),
        gpus=tuple(host["gpus"]),
        cores=host["cores"],
        memory_bytes=host["memory_bytes"],
        versions={name: str(host[name]) for name in ("qsync", "torch", "python")},
        load_average=load,
        seconds=time.perf_counter() - begun_s,
        peak_flops_per_s=sheet.flops_per_s,
        copied_bytes_per_s=sheet.bytes_per_s,
        kernels=tuple(
            _kernel(device["device"], row) for device in found["devices"] for row in device["kernels"]
        ),
        models=tuple(models),
        left_out=tuple(left_out),
    )


def _kernel(device: str, row: dict[str, Any]) -> KernelFound:
    why = impersonal(row["note"]) if row["note"] else None
    rate, speedup = row.get("flops_per_s"), row.get("speedup")
    return KernelFound(device, row["kind"], row["precision"], row["kernel"], rate, speedup, why)


def impersonal(text: str) -> str:
    """Return a text without paths, the user's name and the host's.

    >>> impersonal("g++ failed: /home/ada/.cache/qsync/casts.cc")
    'g++ failed: ...'
    """
    for own in (str(Path.home()), socket.gethostname(), getpass.getuser()):
        text = re.sub(rf"(?<!\w){re.escape(own)}(?!\w)", "/...", text)
    return _PATH.sub("...", text)
