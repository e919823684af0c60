"""`qsync checkpoint`: what a checkpoint holds, and whether it is whole."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from qsync.commands.options import Json, console, print_json, working


def checkpoint(
    folder: Annotated[Path, typer.Argument(help="A checkpoint, or a folder of several.", show_default=False)],
    as_json: Json = False,
) -> None:
    """Show what is in a checkpoint, or in the newest of a folder, and verify every file of it."""
    from qsync.checkpoints.contents import checkpoints_in, find_verified

    with working("verifying"):
        found, errors = find_verified(folder)
    others = {str(path): str(error) for path, error in errors.items()} | {
        str(each.path): f"step {each.step}, saved {each.saved}"
        for each in checkpoints_in(folder)[0]
        if each.path not in (found.path, *errors)
    }
    lists = {
        "objects": [name for name in found.state if name not in ("model", "optimizer")],
        "plan": list(found.plan.classes) if found.plan else [], "profiles": list(found.profiles),
    }  # fmt: skip
    facts = {
        "path": str(found.path), "verified": True, "step": found.step, "saved": found.saved,
        "model": found.model, "parameters": found.num_parameters,
        "optimizer": found.state["optimizer"]["class"] if "optimizer" in found.state else None,
        **lists, "ranks": found.num_ranks, "versions": dict(found.versions),
        "files": dict(found.files),
    }  # fmt: skip
    if as_json:
        print_json({**facts, "checkpoints": others})
        return
    shown = {
        **facts, "verified": "every file, by SHA-256",
        **{name: ", ".join(items) for name, items in lists.items()},
        "versions": ", ".join(f"{name} {version}" for name, version in found.versions.items()),
        "files": ", ".join(found.files),
    }  # fmt: skip
    lines = [f"{name:12}{'none' if value in ('', None) else value}" for name, value in shown.items()]
    lines += [f"{path}: {what}" for path, what in others.items()]
    console.print("\n".join(lines), highlight=False, soft_wrap=True, markup=False)
