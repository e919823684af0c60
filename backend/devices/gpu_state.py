"""Read the state of GPUs from nvidia-smi: clocks, memory in use, and throttling."""

from __future__ import annotations

import shutil
import subprocess

import torch

FIELDS = ("name", "driver_version", "memory.total", "memory.used", "clocks.sm", "clocks.max.sm",
          "power.limit", "clocks_event_reasons.active", "utilization.gpu")  # fmt: skip
# the field's name before driver 535
_FORMER = {"clocks_event_reasons.active": "clocks_throttle_reasons.active"}
# Bits of clocks_event_reasons.active (NVML's nvmlClocksEventReason...). A power cap is left out: at full load
# it is normal.
_HELD_DOWN = {0x08: "a slowdown by its hardware", 0x20: "heat", 0x40: "heat", 0x80: "its power brake"}
_TIMEOUT_S = 30


def gpu_states(device: torch.device | None = None) -> list[dict[str, str]]:
    """Return nvidia-smi's fields for each GPU, or for one; empty if nvidia-smi fails.

    >>> gpu_states()[0]["clocks.sm"]
    '1980'
    """
    if shutil.which("nvidia-smi") is None:
        return []
    which = [] if device is None else ["-i", f"GPU-{torch.cuda.get_device_properties(device).uuid}"]
    asked = {field: field for field in FIELDS}  # field -> its name in this driver
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
        # nvidia-smi rejects the whole query for one unknown field: 'Field "..." is not a valid field'.
        unknown = next((f for f, name in asked.items() if f'"{name}"' in done.stdout + done.stderr), None)
        if unknown is None:
            return []
        if asked[unknown] in _FORMER:
            asked[unknown] = _FORMER[asked[unknown]]
        else:
            del asked[unknown]
    return []


def why_held_down(state: dict[str, str]) -> str:
    """Return why a GPU's clock is throttled, from its state; empty if only load and power cap set it.

    >>> why_held_down({"clocks_event_reasons.active": "0x0000000000000020"})
    'heat'
    """
    try:
        active = int(state.get("clocks_event_reasons.active", ""), 16)
    except ValueError:  # an old driver reports no reasons
        return ""
    return " and ".join(dict.fromkeys(why for bit, why in _HELD_DOWN.items() if active & bit))
