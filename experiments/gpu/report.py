"""Table and bars of the GPU measurements, with reasons for missing results."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from rich.table import Table

from qsync.experiments.harness import Bar, bar, table_of
from qsync.experiments.unseen import report as suite

Pieces = Mapping[str, Mapping[str, Any]]
_TESTS = ("tests", "older architectures")
_WITHOUT = ("not_run", "cut", "failed")


def bars(pieces: Pieces) -> list[Bar]:
    """Return the bars; the tests' bar is open while some have not run and none failed."""
    tests = [result for group in _TESTS for _, result in _of(pieces, group)]
    failed = sum(len(result["failed"]) for result in tests)
    are_all = tests and all("result" in found for key, found in pieces.items() if key.startswith(_TESTS))
    families = _families(pieces)
    of_tests = bar("tests that fail on the GPU", failed if failed or are_all else None, 0)
    return [of_tests, *(suite.bars(families) if families else ())]


def _families(pieces: Pieces) -> dict[str, dict[str, Any]]:
    """Return the measurements of every model of the suite, by part."""
    families: dict[str, dict[str, Any]] = {}
    for _, result in _of(pieces, "suite"):
        for name, parts in result["families"].items():
            families.setdefault(name, {}).update(parts)
    return families


def failure(result: Mapping[str, Any]) -> str | None:
    """Return why a part of the suite failed; None for other results."""
    found = [
        part["failed"]
        for parts in result.get("families", {}).values() for part in parts.values() if "failed" in part
    ]  # fmt: skip
    return found[0] if found else None


def cards(pieces: Pieces) -> str:
    """Name the measured GPUs; empty if unknown."""
    states = [state for found in pieces.values() for state in found.get("gpus_before", ())]
    names = dict.fromkeys(f"{gpu['name']} (driver {gpu['driver_version']})" for gpu in states)
    return f"{', '.join(names)}." if names else ""


def tables(pieces: Pieces) -> list[Table]:
    """Return a table of whole steps, if any were measured, and one of pieces by state."""
    states: dict[str, list[str]] = {}
    for key, found in pieces.items():
        states.setdefault(_state(found), []).append(key)
    rows = [[", ".join(keys), state] for state, keys in states.items()]
    return [*suite.tables(_families(pieces), {}), table_of("Pieces", ("", "result"), rows, left=2)]


def failures(pieces: Pieces) -> list[str]:
    """List failed tests, kernels and whole steps, with reasons."""
    kernels = (
        (f"{case['section']} {case['shape']} {name}", why)
        for _, result in _of(pieces, "kernels")
        for case in result["cases"]
        for name, why in case.get("failed", {}).items()
    )
    tests = (
        failed for group in _TESTS for _, result in _of(pieces, group) for failed in result["failed"].items()
    )
    steps = (
        (f"{name} {of}", why)
        for _, result in _of(pieces, "suite")
        for name, parts in result["families"].items()
        for part in parts.values()
        for of, why in part.get("unavailable", {}).items()
    )
    return [f"Failed: {what}: {why}" for what, why in (*tests, *kernels, *steps)]


def _of(pieces: Pieces, group: str) -> Iterator[tuple[str, Any]]:
    """Yield name and result of every finished piece of a group."""
    for key, found in pieces.items():
        name = key.removeprefix(f"{group} ")
        if name != key and "result" in found:
            yield name, found["result"]


def _state(found: Mapping[str, Any]) -> str:
    """Describe a piece's result."""
    if "result" not in found:
        return next(f"{why.replace('_', ' ')}: {found[why]}" for why in _WITHOUT if why in found)
    result, took = found["result"], f"{found['seconds']:.0f} s"
    if set(result) == {"passed", "skipped", "failed"}:
        counts = f"{result['passed']} passed, {result['skipped']} skipped, {len(result['failed'])} failed"
        return f"{counts}, {took}"
    held = [one["holds"] for one in result.get("bars", ())]
    return f"{sum(map(bool, held))} of {len(held)} bars hold, {took}" if held else took
