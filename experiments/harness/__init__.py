"""Shared by all experiments: the run loop, ranks, timing and tables.

`experiment` run an experiment: finished pieces, progress, figures.json `options` options of command lines
`provenance` machine, versions and commit of a result `processes` run a function in a fresh interpreter
`ranks` run a function on real ranks, one of them emulated `planned_steps` steps of a model under a plan,
timed, and their memory `offered_precisions` the precisions that this machine compares `emulated_profiles`
profiles as if a device were slower, a batch smaller, casts free `pairing` time variants in turns `intervals`
the 95 % confidence interval of a mean `peers` torch.autocast and Inductor, to compare with `cases` cases of
users' operations, and their outcomes `measured_memory` peak of one step, bytes saved for backward
`freed_memory` make glibc keep freed memory `tables` rows of text for the terminal and as Markdown

This folder's face has what nearly every experiment needs; modules with heavier imports are imported directly.
"""

from qsync.experiments.harness.experiment import Bar, Experiment, Page, bar, run_command, show
from qsync.experiments.harness.options import Beside, Fresh, Models, Out, Publish
from qsync.experiments.harness.tables import (
    as_markdown,
    grouped,
    markdown_table,
    milliseconds,
    table_of,
    write_between,
    yes,
)

__all__ = [
    "Bar", "Beside", "Experiment", "Fresh", "Models", "Out", "Page", "Publish", "as_markdown", "bar",
    "grouped", "markdown_table", "milliseconds", "run_command", "show", "table_of", "write_between", "yes",
]  # fmt: skip
