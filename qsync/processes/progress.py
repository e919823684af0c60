"""Show the progress of long work on rank 0: a live line on a terminal, plain lines elsewhere."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager

_said: set[str] = set()  # titles already printed


def is_rank_zero() -> bool:
    """Return whether this process is rank 0 or alone, by its environment."""
    return os.environ.get("RANK", "0") == "0"


@contextmanager
def shown_on_rank_zero(title: str, once: bool = False) -> Iterator[Callable[[str], None]]:
    """Yield a function that shows the current work on rank 0.

    Without a terminal it prints the title as a line; with `once` only the first time in a process.

    >>> with shown_on_rank_zero("qsync: planning") as progress:
    ...     progress("profile bf16, round 1 of 3")
    """
    if not is_rank_zero():
        yield lambda text: None
        return
    if sys.stderr.isatty():
        from rich.console import Console  # takes 0.2 s

        with Console(stderr=True).status(title) as status:
            yield lambda text: status.update(f"{title}: {text}")
        return
    if not once or title not in _said:
        print(f"{title} ...", file=sys.stderr, flush=True)
        _said.add(title)
    yield lambda text: None
