"""Write the figures of a demo into the documentation.

    python -m qsync.experiments.demo.publish demo-out

README.md and docs/results/demo.md get the table and say where it was measured, docs/figures/ gets the
pictures, and docs/results/demo.json keeps the figures. All of it belongs to a checkout of the source.
"""

from __future__ import annotations

import re
import shutil
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Annotated, Any

import typer

from qsync import QSyncError
from qsync.experiments.demo.report import HEADINGS, cells, is_own
from qsync.experiments.harness import markdown_table, run_command, write_between
from qsync.records.json_files import read_json, write_json

ROOT = Path(__file__).resolve().parents[2]
PAGES = ("README.md", "docs/results/demo.md")
FIGURES = Path("docs/results/demo.json")
PICTURES = ("allocation.png", "timeline.png")


def main(folder: Annotated[Path, typer.Argument(help="What `qsync demo --out` wrote.")]) -> None:
    """Copy table, figures and pictures of one demo into README and docs."""
    missing = [name for name in ("report.json", *PICTURES) if not (folder / name).is_file()]
    if missing:
        raise QSyncError(f"{folder} has no {missing[0]}; name the folder of a finished `qsync demo`")
    content = read_json(folder / "report.json")
    shown = {
        **content,
        "description": re.sub(r" \(/[^)]*\)", "", content["description"]),  # the path of this machine's text
        "runs": {
            name: {key: value for key, value in run.items() if key != "training_losses"}
            for name, run in content["runs"].items()
        },
    }
    write_between([ROOT / page for page in PAGES], "results", markdown(shown))
    for name in PICTURES:
        shutil.copyfile(folder / name, ROOT / "docs" / "figures" / name)
    write_json(ROOT / FIGURES, shown)
    typer.echo(f"wrote {', '.join(PAGES)}, {FIGURES} and {len(PICTURES)} pictures")


def markdown(content: Mapping[str, Any]) -> str:
    """Return where the demo was measured, and its table, in Markdown."""
    machine = content["machine"]
    rows = [
        [f"**{title}**" if is_own(name) else title, *figures]
        for name, (title, *figures) in zip(content["runs"], cells(content), strict=True)
    ]
    shares = [f"{share:g}" for share in content["emulated_share"].values()]
    weak = f" The weak rank is *emulated*: it gets {' / '.join(shares)} of a core." if shares else ""
    same = "identical" if content["parameters_identical_across_ranks"] else "DIFFERENT"
    seeds = f"{content['seeds']} seed{'s' if content['seeds'] > 1 else ''}"
    where = f"{machine['processor']} ({machine['cores']} cores), gloo, torch {machine['torch']}"
    lines = [
        f"The model: {content['description']}. It trains for {content['steps']} steps, {seeds},",
        f"on two ranks of an {where}.{weak}",
        "Steps are measured: medians of steps taken in turns within one run.",
        f"Parameters are bitwise {same} on both ranks at the end of every run. Commit {content['commit']}"
        f"{', with uncommitted changes' if content.get('uncommitted_changes') else ''}.",
        *_within_intervals(content["runs"].values()),
        "",
        *markdown_table(HEADINGS, rows),
    ]
    return "\n".join(lines)


def _within_intervals(runs: Iterable[Mapping[str, Any]]) -> list[str]:
    """Say how many steps lie in the interval of their prediction; nothing of a demo that kept none."""
    widths, found = [], []
    for run in runs:
        if run.get("planned_interval_s"):
            low, high = run["planned_interval_s"]
            widths.append((high - low) / (2 * run["planned_step_s"]))
            found.append(low <= run["measured_step_s"] <= high)
    if not found:
        return []
    return [
        f"{sum(found)} of {len(found)} steps lie in the 90 % interval predicted before training "
        f"(+-{min(widths):.0%} to +-{max(widths):.0%})."
    ]


if __name__ == "__main__":
    run_command(main)
