"""Write an HTML page about a plan: precisions with reasons, the step, and measurements.

It needs no other file and no network: plotly is embedded. Sections without data name the missing input.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from html import escape
from importlib.util import find_spec
from pathlib import Path
from statistics import fmean
from typing import TYPE_CHECKING, Any

from qsync.errors import FormatError, InfeasibleError, QSyncError, shortened
from qsync.figures import interactive
from qsync.records.json_files import write_text
from qsync.records.plan_folder import Basis
from qsync.records.plans import Plan

if TYPE_CHECKING:
    from plotly.graph_objects import Figure

_NUM_PLANS = 7  # Pareto-optimal plans in the trade-off figure
_TRADE = "Step time against variance"
_STYLE = """
:root { color-scheme: light dark; --ink: #222; --faint: #666; --back: #fff; --line: #e3e6ea; --link: #0b62a8 }
@media (prefers-color-scheme: dark) {
  :root { --ink: #e6e8eb; --faint: #9aa2ad; --back: #16191d; --line: #31363d; --link: #6cb2f0 } }
@media print { :root { --ink: #000; --faint: #444; --back: #fff; --line: #ccc }
  section { break-inside: avoid } }
body { font: 15px/1.5 system-ui, sans-serif; color: var(--ink); background: var(--back);
  max-width: 1150px; margin: 2rem auto; padding: 0 1rem }
h1 { font-size: 1.5rem; margin-bottom: 0 } h2 { font-size: 1.1rem; margin: 2.2rem 0 0 }
p { margin: .3rem 0; color: var(--faint) } a { color: var(--link) }
table { border-collapse: collapse; margin: 1rem 0 } td, th { padding: .25rem .9rem .25rem 0; text-align: left;
  border-bottom: 1px solid var(--line) } nav a { margin-right: 1rem }
.missing { border-left: 3px solid var(--line); padding-left: .7rem }
"""
# Text and grid of every plot follow the page's colours, also in print.
_SCRIPT = """
function recolour() {
  const css = getComputedStyle(document.documentElement);
  const ink = css.getPropertyValue('--ink').trim(), line = css.getPropertyValue('--line').trim();
  document.querySelectorAll('.js-plotly-plot').forEach(plot => {
    const change = {'font.color': ink};
    Object.keys(plot.layout).filter(key => /^[xy]axis\\d*$/.test(key)).forEach(key => {
      change[key + '.gridcolor'] = line; change[key + '.zerolinecolor'] = line; });
    Plotly.relayout(plot, change); });
}
matchMedia('(prefers-color-scheme: dark)').addEventListener('change', recolour);
matchMedia('print').addEventListener('change', recolour);
addEventListener('load', recolour);
"""


@dataclass(frozen=True, slots=True)
class Measured:
    """Optional measurements that a page shows beside the plan.

    `runs` come from the demo's figures.json. `ranks` holds measured and predicted phases of each rank.
    `losses` maps titles to curves (name -> points) with the label of x.
    """

    runs: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)
    ranks: Sequence[Mapping[str, Any]] = ()
    losses: Mapping[str, tuple[str, Mapping[str, Sequence[tuple[float, float]]]]] = field(
        default_factory=dict
    )

    @classmethod
    def of_demo(cls, content: Mapping[str, Any]) -> Measured:
        """Read the demo's measurements from its figures.json `content`; losses are averaged over seeds."""
        runs = content.get("runs", {})
        if not isinstance(runs, Mapping) or not all(isinstance(run, Mapping) for run in runs.values()):
            raise FormatError(
                "figures.json is not an output of qsync demo, because it has no runs by name; remove it"
            )
        curves = {
            run.get("title", name): list(enumerate(map(fmean, zip(*run["training_losses"], strict=True))))
            for name, run in runs.items() if run.get("training_losses")
        }  # fmt: skip
        return cls(runs, losses={"Training losses": ("step", curves)} if curves else {})


@dataclass(frozen=True, slots=True)
class _Section:
    """A section of the page: a figure, or a sentence about the missing data."""

    title: str
    text: str
    figure: Figure | None = None
    missing: str = ""


def check_available() -> None:
    """Raise QSyncError if plotly is missing."""
    if find_spec("plotly") is None:
        raise QSyncError("the page needs plotly, which is not installed; run pip install plotly")


def check_path(path: object, name: str) -> None:
    """Raise FormatError unless a path ends in .html."""
    if not isinstance(path, (str, Path)) or Path(path).suffix != ".html":
        raise FormatError(f"{name} must end in .html, found {shortened(str(path))}; rename it")


def write(path: str | Path, plan: Plan, basis: Basis, measured: Measured | None = None) -> Path:
    """Write the page about a plan and its basis atomically; return its path.

    A plan.json beside it is linked. Raises QSyncError if plotly is missing; MismatchError or UnsupportedError
    if plan and basis do not belong together.
    """
    check_available()
    path = Path(path)
    sections = list(_sections(plan, basis, measured or Measured()))
    linked = [name for name in ("plan.json", "figures.json", "trace.json") if (path.parent / name).is_file()]
    return write_text(path, _page(plan, basis, sections, linked))


def _sections(plan: Plan, basis: Basis, measured: Measured) -> Iterator[_Section]:
    from qsync.allocator import explain, frontier
    from qsync.replayer import find_critical_path, peaks, replay

    budgets = {c.name: plan.budgets[c.name] for c in basis.cluster.classes if c.name in plan.budgets}
    basis = replace(basis, cluster=basis.cluster.with_memory(budgets))
    at = (basis.graph, plan, basis.profiles)
    notes = {
        (
            one.device_class,
            one.op,
        ): f"saves {1e3 * one.time_saved_s:.3f} ms, adds {one.added_variance:.2e}<br>{escape(one.verdict)}"
        for one in explain(*at, basis.sensitivity, basis.cluster)
    }
    yield _Section(
        "Precision of every operator", "In model order. Point at one: what lowering it saves, adds, and why.",
        interactive.precision_map(plan, basis.graph, [c.name for c in basis.cluster.classes], notes),
    )  # fmt: skip
    yield _Section(
        "What each precision would cost",
        "The variance that it adds to the gradient, in squared gradient norms, estimated.",
        interactive.sensitivities(basis.sensitivity, basis.graph),
    )  # fmt: skip
    path = find_critical_path(*at, basis.cluster).events
    yield _Section(
        "One step", "Simulated. Drag to zoom in, double-click to zoom out.",
        interactive.timeline(replay(*at, basis.cluster), path),
    )  # fmt: skip
    less = {name: list(own.saving_less) for name, own in plan.classes.items() if own.saving_less}
    options: dict[str, Any] = {"base": plan.base, "saving_less": less or None}
    options["bucket_cap_bytes"] = plan.bucket_cap_bytes
    text = "Each point is a plan, with precisions alone. In squared gradient norms. Simulated."
    try:
        plans = frontier(basis.graph, basis.profiles, basis.sensitivity, basis.cluster, _NUM_PLANS, **options)
        yield _Section(_TRADE, text, interactive.trade(plans, plan))
    except InfeasibleError as error:  # e.g. a plan that fits only with its levers
        yield _Section(_TRADE, text, missing=f"No plan by precisions alone: {error}.")
    yield _Section(
        "Memory over a step", "Simulated, margin included. Dashed: the budget, where it is near.",
        interactive.memory(peaks(*at, basis.cluster), basis.graph),
    )  # fmt: skip
    yield from _measured(measured)


def _measured(measured: Measured) -> Iterator[_Section]:
    title, figure = "Predicted against measured", interactive.steps_of_runs
    if measured.runs:
        yield _Section(
            title, "Steps of every run of the demo; dashed: the fast rank alone.", figure(measured.runs)
        )
    if measured.ranks:
        text = "Medians of the phases of every rank's logged steps."
        yield _Section("Phases of every rank", text, interactive.phases_of_ranks(measured.ranks))
    if not measured.runs and not measured.ranks:
        yield _Section(
            title, "", missing="No measured steps: train with qsync.hybrid(..., log_steps=FOLDER), and give "
            "--measured FOLDER.",
        )  # fmt: skip
    for title, (x, curves) in measured.losses.items():
        yield _Section(title, "Measured.", interactive.losses(curves, x))
    if not measured.losses:
        missing = "No losses here: qsync demo and python -m qsync.experiments.accuracy write them."
        yield _Section("Accuracy", "", missing=missing)


def _page(plan: Plan, basis: Basis, sections: Sequence[_Section], linked: Sequence[str]) -> str:
    from plotly.offline import get_plotlyjs

    title = escape(f"qsync: {plan.model} on {' + '.join(c.name for c in basis.cluster.classes)}")
    links = " ".join(f'<a href="{name}">{name}</a>' for name in linked)
    body = "\n".join(_html(number, section) for number, section in enumerate(sections))
    return (
        f'<!doctype html>\n<html lang="en"><head><meta charset="utf-8"><title>{title}</title>\n'
        '<meta name="viewport" content="width=device-width, initial-scale=1">\n'
        f'<link rel="icon" href="data:,"><style>{_STYLE}</style>\n<script>{get_plotlyjs()}</script></head>\n'
        f"<body><h1>{title}</h1>\n{_facts(plan, basis)}\n<nav>{links}</nav>\n{body}\n"
        f"<script>{_SCRIPT}</script></body></html>\n"
    )


def _html(number: int, section: _Section) -> str:
    shown = f'<p class="missing">{escape(section.missing)}</p>'
    if section.figure is not None:
        to_html: Callable[..., str] = section.figure.to_html
        config = {"displaylogo": False, "responsive": True}
        shown = to_html(full_html=False, include_plotlyjs=False, div_id=f"plot-{number}", config=config)
    return f"<section><h2>{escape(section.title)}</h2><p>{section.text}</p>\n{shown}</section>"


def _facts(plan: Plan, basis: Basis) -> str:
    """Return the table of a plan's classes, and its predicted step."""
    from qsync.replayer import changed_since_planned

    rows = [
        (c.name, str(c.count), c.device, f"{len(plan[c.name].lowered)} of {len(plan[c.name].assignment)}",
         str(plan.levers[c.name]) if plan.levers else "-")
        for c in basis.cluster.classes
    ]  # fmt: skip
    headings = ("class", "ranks", "device", "operators lowered", "levers")
    lines = [
        "<tr>" + "".join(f"<{tag}>{escape(cell)}</{tag}>" for cell in row) + "</tr>"
        for tag, row in [("th", headings), *(("td", row) for row in rows)]
    ]
    step = f"{1e3 * plan.step_s:.1f} ms" if plan.step_s else "not predicted"
    doubt = changed_since_planned(basis.graph, plan, basis.profiles, basis.cluster)
    return (
        f"<p>Predicted step: {step} (simulated), base {escape(str(plan.base))}. "
        f"Added variance: {plan.added_variance or 0.0:.2e} of the squared gradient norm.</p>\n"
        + (f'<p class="missing">Below, {escape(doubt)}.</p>\n' if doubt else "")
        + f"<table>{''.join(lines)}</table>"
    )
