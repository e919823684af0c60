"""Command-line options shared by the experiments."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

Out = Annotated[
    Path, typer.Option("--out", help="Folder of the results; an interrupted run continues there.")
]
Publish = Annotated[
    bool, typer.Option("--publish", help="Write the tables into the page of the documentation.")
]
Beside = Annotated[
    bool, typer.Option("--beside", help="Publish below the page's tables: those of a second processor.")
]
Fresh = Annotated[bool, typer.Option("--fresh", help="Measure anew what the folder already holds.")]
Models = Annotated[list[str] | None, typer.Option("--model", help="Only this model; repeat for several.")]
