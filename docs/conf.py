"""Configure Sphinx: pages in Markdown (MyST), the furo theme, reference from docstrings."""

from __future__ import annotations

import re
from typing import Any

project = "qsync"
author = "the qsync maintainers"
project_copyright = "the qsync maintainers"

extensions = ["myst_parser", "sphinx.ext.autodoc", "sphinx.ext.napoleon"]
source_suffix = {".md": "markdown"}
html_theme = "furo"
html_title = "qsync"
html_show_sphinx = False
pygments_style = "friendly"

myst_enable_extensions = ["colon_fence"]
myst_heading_anchors = 3

autodoc_default_options = {"members": True, "member-order": "bysource"}
autodoc_class_signature = "mixed"
autodoc_typehints = "description"
autodoc_typehints_description_target = "documented"
autodoc_preserve_defaults = True
napoleon_google_docstring = True
napoleon_numpy_docstring = False
napoleon_include_init_with_doc = False

_SECTION = re.compile(r"(Args|Attributes|Example|Examples|Note|Raises|Returns|Warns|Yields):$")
_CODE = re.compile(r"``[^`]+``|`[^`]+`")


def _to_rst(line: str) -> str:
    """Return a line of prose in reStructuredText: code spans in double backticks, signs escaped."""
    found: list[str] = []
    end = 0
    for match in _CODE.finditer(line):
        found += [_escaped(line[end : match.start()]), f"``{match.group().strip('`')}``"]
        end = match.end()
    return "".join([*found, _escaped(line[end:])])


def _escaped(text: str) -> str:
    return re.sub(r"(?<![\\\w])([*|])|([*|])|(?<=\w)_(?=\W|$)", lambda found: "\\" + found.group(), text)


def _adapt(app: Any, what: str, name: str, obj: Any, options: Any, lines: list[str]) -> None:
    """Turn a docstring as qsync writes it into reStructuredText: code spans, formulas and tables."""
    adapted: list[str] = []
    section = False  # inside "Args:" and the like, where indentation has a meaning for napoleon
    literal = False
    for line in lines:
        indent = len(line) - len(line.lstrip())
        blank = not line.strip()
        if not blank and indent == 0:
            section = bool(_SECTION.match(line))
            table = line.startswith("|")
            if literal and not table:
                literal = False
            if table and not literal:
                adapted += ["", "::", ""]
                literal = True
            adapted.append(f"    {line}" if table else line if line.startswith(">>>") else _to_rst(line))
            continue
        formula = indent >= 4 and not section and not literal and bool(adapted) and not adapted[-1].strip()
        if formula and not _in_list(adapted):
            adapted += ["::", ""]
            literal = True
        adapted.append(
            line if literal or blank or line.lstrip().startswith((">>>", "...")) else _to_rst(line)
        )
    lines[:] = adapted


def _in_list(lines: list[str]) -> bool:
    before = [line for line in lines if line.strip()]
    return bool(before) and before[-1].lstrip().startswith(("- ", "* "))


def setup(app: Any) -> None:
    """Adapt docstrings before napoleon (priority 500) reads them."""
    app.connect("autodoc-process-docstring", _adapt, priority=400)
