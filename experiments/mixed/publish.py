"""Write the figures of a demo into the documentation.

    python -m qsync.experiments.mixed.publish demo-out

README.md gets the verdict and the measurements, docs/results/demo.md the table, docs/figures/ the pictures,
and docs/results/demo.json the figures. It needs a checkout of the source.
"""

from __future__ import annotations

import re
import shutil
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Annotated, Any

import typer

from qsync import QSyncError
from qsync.experiments.harness import as_markdown, markdown_table, run_command, write_between
from qsync.experiments.harness.experiment import bars_table
from qsync.experiments.mixed.report import HEADINGS, cells, samples_to_alone, shown
from qsync.experiments.mixed.ways import ALONE, DDP, LB_BSP, QSYNC_ALL, QSYNC_SHARE, WEAK_16
from qsync.records.json_files import read_json, write_json

ROOT = Path(__file__).resolve().parents[2]
README, PAGE = "README.md", "docs/results/demo.md"
# README's words for each way.
_MEASURED = {
    DDP: "in plain DDP", LB_BSP: "with shares by speed", WEAK_16: "with the weak rank in 16 bits",
    QSYNC_SHARE: "under qsync's plan", QSYNC_ALL: "with every card lowered by it",
}  # fmt: skip
FIGURES = Path("docs/results/demo.json")
PICTURES = ("allocation.png", "timeline.png")


def main(folder: Annotated[Path, typer.Argument(help="What `qsync demo --out` wrote.")]) -> None:
    """Copy verdict, table, figures and pictures of one demo into README and docs."""
    missing = [name for name in ("figures.json", *PICTURES) if not (folder / name).is_file()]
    if missing:
        raise QSyncError(f"{folder} has no {missing[0]}; give the output folder of a finished `qsync demo`")
    content = read_json(folder / "figures.json")
    kept = {
        **content,
        # Removes the path of this machine's text
        "description": re.sub(r" \(/[^)]*\)", "", content["description"]),
        "runs": {
            name: {key: value for key, value in run.items() if key != "training_losses"}
            for name, run in content["runs"].items()
        },
    }
    write_between({ROOT / README: verdict(kept), ROOT / PAGE: markdown(kept)}, "results")
    for name in PICTURES:
        shutil.copyfile(folder / name, ROOT / "docs" / "figures" / name)
    write_json(ROOT / FIGURES, kept)
    typer.echo(f"wrote {README}, {PAGE}, {FIGURES} and {len(PICTURES)} pictures")


def verdict(content: Mapping[str, Any]) -> str:
    """Return the verdict before the demo, and the measurements after it, in Markdown."""
    runs = content["runs"]
    rates = {name: samples_to_alone(run, runs[ALONE]) or 0.0 for name, run in runs.items()}
    measured = [(name, text) for name, text in _MEASURED.items() if name in rates]
    is_whole = runs[ALONE]["samples_a_step"] == runs[DDP]["samples_a_step"]
    batch = "the whole batch" if is_whole else "its part of the batch (in the verdict it has all)"
    lines = [
        "```",
        *content["verdict"],
        "```",
        "",
        f"({content['description'].split(',')[0]}, on two ranks of an {_where(content)}.",
        f"{_weak(content).strip()})",
        "",
        f"Measured then, against the fast rank alone with {batch}: "
        + ", ".join(f"{rates[name]:.2f}x {text}" for name, text in measured)
        + f" ([all of it]({PAGE})).",
    ]
    return "\n".join(lines)


def markdown(content: Mapping[str, Any]) -> str:
    """Return the demo's machine and table, in Markdown."""
    own = shown(content["runs"])
    rows = [
        [f"**{title}**" if name == own else title, *figures]
        for name, (title, *figures) in zip(content["runs"], cells(content), strict=True)
    ]
    same = "identical" if content["parameters_identical_across_ranks"] else "DIFFERENT"
    seeds = f"{content['seeds']} seed{'s' if content['seeds'] > 1 else ''}"
    lines = [
        f"The model: {content['description']}. It trains for {content['steps']} steps, {seeds},",
        f"on two ranks of an {_where(content)}. {_weak(content)}",
        "Steps are measured: medians of steps taken in turns within one run.",
        f"Parameters are bitwise {same} on both ranks at the end of every run. Commit {content['commit']}"
        f"{', with uncommitted changes' if content.get('uncommitted_changes') else ''}.",
        *_within_intervals(content["runs"].values()),
        "",
        *markdown_table(HEADINGS, rows),
        "",
        as_markdown(bars_table(content["bars"])),
    ]
    return "\n".join(lines)


def _where(content: Mapping[str, Any]) -> str:
    machine = content["machine"]
    return f"{machine['processor']} ({machine['cores']} cores), gloo, torch {machine['torch']}"


def _weak(content: Mapping[str, Any]) -> str:
    shares = [f"{share:.2g}" for share in content["emulated_share"].values()]
    return f"The weak rank is *emulated*: it gets {' / '.join(shares)} of a core. " if shares else ""


def _within_intervals(runs: Iterable[Mapping[str, Any]]) -> list[str]:
    """Format how many steps lie in their predicted interval; empty without stored intervals."""
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
