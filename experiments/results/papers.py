"""Compare papers' figures with ours, and state how the conditions differ.

The systems, data and machines differ, so a row shows whether the effect is reproduced, not which system is
better.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from rich.table import Table

from qsync.experiments.accuracy.report import fastest_uniform
from qsync.experiments.harness import table_of
from qsync.experiments.mixed.ways import QSYNC
from qsync.experiments.speedup.report import STEP_ERROR
from qsync.replayer.step_noise import percentile

Figures = Mapping[str, Any]
Row = Mapping[str, Any]  # our figure, with its commits and processor


@dataclass(frozen=True, slots=True)
class Claim:
    """A paper's figure, the experiment with ours, and its wording.

    `ours` formats that experiment's figures, or returns None if they lack it.
    """

    paper: str
    what: str
    theirs: str
    experiment: str
    ours: Callable[[Figures], str | None]
    conditions: str

    @property
    def name(self) -> str:
        """Return the claim's unique name."""
        return f"{self.paper}: {self.what}"


def _error_on_ranks(figures: Figures) -> str | None:
    families = [*figures["families"].values(), *figures["held_out"].values()]
    sizes = [abs(error) for one in families for error in one.get("ranks", {}).get("errors", ())]
    if not sizes:
        return None
    return f"median {statistics.median(sizes):.1%}, 95th percentile {percentile(sizes, 0.95):.1%}"


def _step_error(figures: Figures) -> str | None:
    found = next((one["measured"] for one in figures["bars"] if one["name"] == STEP_ERROR), None)
    return None if found is None else f"median {found:.1%}"


def _accuracy_gain(figures: Figures) -> str | None:
    """Format the gain in held-out accuracy over the fastest uniform choice, by task."""
    gains = []
    for task in figures["tasks"].values():
        uniform = fastest_uniform(task["methods"])
        runs = task["runs"]
        if uniform is None or QSYNC not in runs or uniform not in runs:
            continue
        pairs = [
            (runs[QSYNC][seed]["final_accuracy"], runs[uniform][seed]["final_accuracy"])
            for seed in runs[QSYNC]
            if seed in runs[uniform]
        ]
        if pairs and None not in pairs[0]:
            gains.append(100.0 * statistics.fmean(ours - other for ours, other in pairs))
    return f"{min(gains):+.2f} to {max(gains):+.2f} points over {len(gains)} tasks" if gains else None


def _saved(workload: str) -> Callable[[Figures], str | None]:
    def ours(figures: Figures) -> str | None:
        methods = figures["summary"].get(workload, {"methods": {}})["methods"].values()
        found = next((one for one in methods if one["start"] == "expanded" and one["items"]), None)
        if found is None:
            return None
        share = found["items"]
        return f"{share['mean']:.0%} ({share['least']:.0%} to {share['most']:.0%})"

    return ours


_QSYNC, _LEMON = "QSync (IPDPS 2024)", "LEMON (ICLR 2024)"
_OF_STEPS = "error of the predicted step"
CLAIMS = (
    Claim(
        _QSYNC, _OF_STEPS, "< 5 %", "unseen", _error_on_ranks,
        "theirs: V100 and T4; ours: random plans of the suite's families, held-out ones among them, on two "
        "equal CPU ranks",
    ),
    Claim(
        _QSYNC, "the same, of every way to train", "< 5 %", "speedup", _step_error,
        "ours: plain, by shares, uniform and planned steps of 3 models; two CPU ranks, the weak one emulated",
    ),
    Claim(
        _QSYNC, "final accuracy above uniform precision", "+0.27 to +1.03 %", "accuracy", _accuracy_gain,
        "theirs: training from scratch on ImageNet, V100 and T4; ours: small models on data that packages "
        "ship, against the fastest uniform choice that keeps up",
    ),
    Claim(
        _LEMON, "compute saved, Vision Transformer", "56.7 %", "growing", _saved("vit"),
        "theirs: ImageNet, 6 to 12 blocks, 384 to 768 wide; ours: digits, 3 to 4 blocks, 64 to 96 wide; "
        "neither counts the source's training",
    ),
    Claim(
        _LEMON, "compute saved, language model", "33.2 %", "growing", _saved("gpt"),
        "theirs: BERT on Wikipedia, 6 to 12 blocks; ours: a byte-level GPT, 2 to 3 blocks",
    ),
    Claim(
        "dPRO (MLSys 2022)", _OF_STEPS, "< 5 % in most cases", "unseen", _error_on_ranks,
        "theirs: GPU clusters in one precision; ours: as QSync's first row, in mixed precision",
    ),
)  # fmt: skip


def rows_of(found: Mapping[str, Figures]) -> dict[str, Row]:
    """Return our figures for each claim; `found` is by experiment."""
    rows: dict[str, Row] = {}
    for claim in CLAIMS:
        figures = found.get(claim.experiment)
        if figures and (ours := claim.ours(figures)):
            commits = figures.get("commits_of_pieces") or [figures["commit"]]
            rows[claim.name] = {
                "ours": ours,
                "commits": commits,
                "processor": figures["machine"]["processor"],
            }
    return rows


def papers_table(rows: Mapping[str, Row]) -> Table:
    """Return a table with a row per claim: processor and commits of ours; `-` without figures."""
    cells = []
    for claim in CLAIMS:
        row = rows.get(claim.name, {"ours": "-", "commits": (), "processor": ""})
        origin = ", ".join(filter(None, (row["processor"], *row["commits"]))) or "-"
        cells.append(
            [claim.paper, claim.what, claim.theirs, row["ours"], claim.experiment, origin, claim.conditions]
        )
    heads = ("paper", "what", "theirs", "ours", "experiment", "machine, commit", "conditions")
    return table_of("Theirs and ours", heads, cells, left=7)
