"""`qsync checkpoint`: show and verify the contents of a checkpoint."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from qsync.commands.options import Json, print_json, print_lines, working


def checkpoint(
    folder: Annotated[Path, typer.Argument(help="A checkpoint, or a folder of several.", show_default=False)],
    as_json: Json = False,
) -> None:
    """Show the contents of a checkpoint, or of a folder's newest, and verify every file."""
    from qsync.checkpoints.contents import checkpoints_in, find_verified

    with working("verifying"):
        found, errors = find_verified(folder)
    others = {str(path): str(error) for path, error in errors.items()} | {
        str(each.path): f"step {each.step}, saved {each.saved}"
        for each in checkpoints_in(folder)[0]
        if each.path not in (found.path, *errors)
    }
    facts = {
        "path": str(found.path), "verified": True, "step": found.step, "saved": found.saved,
        "model": found.model, "parameters": found.num_parameters,
        "optimizer": found.state["optimizer"]["class"] if "optimizer" in found.state else None,
        "objects": [name for name in found.state if name not in ("model", "optimizer")],
        "plan": list(found.plan.classes) if found.plan else [], "profiles": list(found.profiles),
        "ranks": found.num_ranks, "versions": dict(found.versions), "files": list(found.files),
    }  # fmt: skip
    if as_json:
        print_json({**facts, "checkpoints": others})
        return
    lines = []
    for name, value in facts.items():
        items = [" ".join(pair) for pair in value.items()] if isinstance(value, dict) else value
        text = ", ".join(items) if isinstance(items, list) else items
        lines.append(f"{name:12}{'none' if text in ('', None) else text}")
    lines += [f"{path}: {what}" for path, what in others.items()]
    print_lines(*lines)
