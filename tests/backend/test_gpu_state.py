"""What nvidia-smi says, read; by a program of that name."""

from __future__ import annotations

import pytest

from qsync.backend.devices.gpu_state import FIELDS, gpu_states, why_held_down

ROW = "NVIDIA H100 80GB HBM3, 570.86, 81559, 1024, 1755, 1980, 700.00, 0x0000000000000024, 98"


def pretend(tmp_path, monkeypatch, body):
    program = tmp_path / "nvidia-smi"
    program.write_text(f"#!/bin/sh\n{body}\n")
    program.chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path), prepend=":")


def test_each_gpu_is_a_row(tmp_path, monkeypatch):
    pretend(tmp_path, monkeypatch, f"echo '{ROW}'; echo '{ROW}'")
    first, second = gpu_states()
    assert first == second and first["clocks.sm"] == "1755" and tuple(first) == FIELDS
    assert why_held_down(first) == "heat"


@pytest.mark.parametrize("body", ["exit 9", "echo 'No devices were found'", "exit 0"])
def test_one_that_says_nothing_is_no_gpu(body, tmp_path, monkeypatch):
    pretend(tmp_path, monkeypatch, body)
    assert all(not why_held_down(state) for state in gpu_states())


def refusing(*fields):
    """A program that knows all fields but these, and says so as nvidia-smi does."""
    cases = "".join(
        f"""case "$1" in *{field}*) echo 'Field "{field}" is not a valid field to query.'; exit 2;; esac\n"""
        for field in fields
    )
    names = 'IFS=,; row=; for field in ${1#--query-gpu=}; do row="$row, of $field"; done'
    return f'{cases}{names}; echo "${{row#, }}"'


def test_an_old_driver_is_asked_by_its_own_names(tmp_path, monkeypatch):
    pretend(tmp_path, monkeypatch, refusing("clocks_event_reasons.active"))
    (state,) = gpu_states()
    assert tuple(state) == FIELDS and state["driver_version"] == "of driver_version"
    assert state["clocks_event_reasons.active"] == "of clocks_throttle_reasons.active"


def test_a_field_that_a_driver_does_not_know_leaves_the_others(tmp_path, monkeypatch):
    unknown = ("clocks_event_reasons.active", "clocks_throttle_reasons.active", "power.limit")
    pretend(tmp_path, monkeypatch, refusing(*unknown))
    (state,) = gpu_states()
    assert set(FIELDS) - set(state) == {"clocks_event_reasons.active", "power.limit"}
    assert all(value == f"of {field}" for field, value in state.items()) and not why_held_down(state)


def test_without_nvidia_smi_nothing_is_known(tmp_path, monkeypatch):
    monkeypatch.setenv("PATH", str(tmp_path))
    assert gpu_states() == []


@pytest.mark.parametrize(
    ("active", "why"),
    [
        ("0x0000000000000000", ""),
        ("0x0000000000000001", ""),  # idle
        ("0x0000000000000004", ""),  # its power cap
        ("0x0000000000000060", "heat"),
        ("0x0000000000000088", "a slowdown by its hardware and its power brake"),
        ("[N/A]", ""),
        ("", ""),
    ],
)
def test_what_holds_a_clock_down(active, why):
    assert why_held_down({"clocks_event_reasons.active": active}) == why
