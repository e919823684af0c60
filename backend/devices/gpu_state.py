"""What nvidia-smi says of GPUs now: clocks, memory in use, and why a clock is held down."""

from __future__ import annotations

import shutil
import subprocess

import torch

FIELDS = ("name", "driver_version", "memory.total", "memory.used", "clocks.sm", "clocks.max.sm",
          "power.limit", "clocks_event_reasons.active", "utilization.gpu")  # fmt: skip
_FORMER = {"clocks_event_reasons.active": "clocks_throttle_reasons.active"}  # before driver 535
# Bits of clocks_event_reasons.active (NVML's nvmlClocksEventReason...). A power cap is not among them: at
# full load it is the usual state of a card.
_HELD_DOWN = {0x08: "a slowdown by its hardware", 0x20: "heat", 0x40: "heat", 0x80: "its power brake"}
_TIMEOUT_S = 30


def gpu_states(device: torch.device | None = None) -> list[dict[str, str]]:
    """Return what nvidia-smi says of each GPU of the machine, or of one; nothing where it says nothing.

    >>> gpu_states()[0]["clocks.sm"]
    '1980'
    """
    if shutil.which("nvidia-smi") is None:
        return []
    which = [] if device is None else ["-i", f"GPU-{torch.cuda.get_device_properties(device).uuid}"]
    asked = {field: field for field in FIELDS}  # -> its name in this driver
    while asked:
        command = ["nvidia-smi", f"--query-gpu={','.join(asked.values())}", "--format=csv,noheader,nounits"]
        try:
            done = subprocess.run(
                [*command, *which], capture_output=True, text=True, timeout=_TIMEOUT_S, check=False
            )
        except (OSError, subprocess.TimeoutExpired):
            return []
        if done.returncode == 0:
            rows = done.stdout.strip().splitlines()
            return [dict(zip(asked, map(str.strip, row.split(",")), strict=False)) for row in rows]
        # One field that a driver does not know would silence all others: 'Field "..." is not a valid field'.
        unknown = next((f for f, name in asked.items() if f'"{name}"' in done.stdout + done.stderr), None)
        if unknown is None:
            return []
        if asked[unknown] in _FORMER:
            asked[unknown] = _FORMER[asked[unknown]]
        else:
            del asked[unknown]
    return []


def why_held_down(state: dict[str, str]) -> str:
    """Return why a GPU's clock is held down, by its state; empty if nothing but its load and cap sets it.

    >>> why_held_down({"clocks_event_reasons.active": "0x0000000000000020"})
    'heat'
    """
    try:
        active = int(state.get("clocks_event_reasons.active", ""), 16)
    except ValueError:  # an old driver does not say
        return ""
    return " and ".join(dict.fromkeys(why for bit, why in _HELD_DOWN.items() if active & bit))
