"""Identify this machine's processor: its name, and the instruction sets that the system grants.

A hypervisor may withhold instruction sets that the model has. Two processors of one name then run other
kernels, at other speeds.
"""

from __future__ import annotations

import platform
from functools import cache
from pathlib import Path

_CPUINFO = Path("/proc/cpuinfo")
# Linux flags, widest first: kernels and step times depend on them.
_SETS = {
    "AMX": "amx_int8",
    "AVX-512 BF16": "avx512_bf16",
    "AVX-512 VNNI": "avx512_vnni",
    "AVX-512": "avx512f",
    "AVX2 VNNI": "avx_vnni",
    "AVX2": "avx2",
}


def processor() -> str:
    """Return the processor's name with family, model and widest instruction set.

    Hypervisors share names between models, and withhold instruction sets from some of their guests.

    >>> processor()
    'AMD EPYC 25.17 AVX-512 BF16'
    """
    found = _described()
    if "model name" not in found:
        return platform.processor() or platform.machine()
    granted = granted_flags()
    widest = next((name for name, flag in _SETS.items() if flag in granted), "")
    return f"{found['model name']} {found.get('cpu family', '')}.{found.get('model', '')} {widest}".strip()


def instruction_sets() -> tuple[str, ...]:
    """Return the granted instruction sets on which kernels depend, widest first."""
    return tuple(name for name, flag in _SETS.items() if flag in granted_flags())


def granted_flags() -> frozenset[str]:
    """Return the granted instruction sets by Linux's names; empty if they are not listed."""
    found = _described()
    return frozenset(found.get("flags", found.get("Features", "")).split())


@cache
def _described() -> dict[str, str]:
    """Return /proc/cpuinfo's entries for the first core."""
    found: dict[str, str] = {}
    try:
        for line in _CPUINFO.read_text().splitlines():
            key, _, value = line.partition(":")
            found.setdefault(key.strip(), value.strip())
    except OSError:
        pass
    return found
