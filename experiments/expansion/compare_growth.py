"""What growing saves: `python -m qsync.experiments.expansion.compare_growth --out expansion`.

For each workload and seed a small model is trained, expanded and trained on: a byte-level GPT on the source
of Python's standard library, a ViT on digits. What counts is tokens (images) and CPU seconds until the
held-out loss that the large model ends with from scratch, without and with what the source took. Beside it:
the even split, whose copies stay copies; plain stacking and tiling, which is not lossless; and the expanded
model trained on under a hybrid precision plan.

A finished run is kept in `--out` and not run again. Models train on one thread each, `--processes` of them at
once; the plan's profile is measured in between, when nothing else of this runs.
"""

from __future__ import annotations

import os
import queue
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, ProcessPoolExecutor, wait
from contextlib import contextmanager
from dataclasses import asdict
from multiprocessing import get_context
from pathlib import Path
from typing import Annotated, Any

import torch
import typer
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

import qsync
from qsync.backend.device_detection import machine
from qsync.errors import QSyncError
from qsync.experiments.demo.rank import commit
from qsync.experiments.expansion.growth_report import markdown, picture, summary, table
from qsync.experiments.expansion.growth_subjects import SETTINGS, Setting, Sizes, setting
from qsync.experiments.expansion.hybrid_plans import make_plan, plan_path
from qsync.experiments.expansion.starts import source_path
from qsync.experiments.expansion.training_runs import Method, kept, run
from qsync.records.json_files import write_json, write_text

# The shares of the from-scratch steps that the expanded model is given, unless told otherwise.
RATIOS = (0.5, 0.3)

Task = tuple[Setting, Method, int]


def main(
    out: Annotated[Path, typer.Option(help="Folder for the runs, kept and skipped, and the report.")],
    workloads: Annotated[
        list[str], typer.Option("--workload", help="gpt, vit; repeat for both.")
    ] = list(SETTINGS),  # noqa: B006
    seeds: Annotated[int, typer.Option(help="How many seeds.")] = 3,
    ratios: Annotated[
        list[float], typer.Option("--ratio", help="Shares of the from-scratch steps.")
    ] = list(RATIOS),  # noqa: B006
    small: Annotated[str | None, typer.Option(help="WIDTH,LAYERS,HEADS of the source.")] = None,
    large: Annotated[str | None, typer.Option(help="WIDTH,LAYERS,HEADS of the large model.")] = None,
    steps: Annotated[int | None, typer.Option(help="From scratch.")] = None,
    source_steps: Annotated[int | None, typer.Option(help="Of the source.")] = None,
    batch: Annotated[int | None, typer.Option(help="Sequences or images a step.")] = None,
    processes: Annotated[int, typer.Option(help="Runs at a time, one thread each.")] = 2,
    with_plan: Annotated[bool, typer.Option("--plan/--no-plan", help="Also under a hybrid plan.")] = True,
) -> None:  # fmt: skip
    """Run what is not there yet, then write expansion.json, .md and .png and print the table."""
    if seeds < 1 or processes < 1:
        raise QSyncError("--seeds and --processes must be at least 1")
    if len(workloads) > 1 and (small or large):
        raise QSyncError("--small and --large are sizes of one model; name its --workload")
    settings = [
        setting(
            name, small=sizes_of(small), large=sizes_of(large), steps=steps, source_steps=source_steps,
            batch=batch,
        )
        for name in dict.fromkeys(workloads)
    ]  # fmt: skip
    out.mkdir(parents=True, exist_ok=True)
    torch.set_num_threads(1)
    first = [
        (of, Method(start), seed)
        for start in ("scratch", "source")
        for seed in range(seeds)
        for of in settings
    ]
    then = [
        (of, method, seed)
        for method in methods(ratios, with_plan)
        for seed in range(seeds)
        for of in settings
    ]
    with shown(first + then) as progress:
        rows = train_all(first, out, processes, progress)
        for of in settings if with_plan else ():
            if not plan_path(out, of).exists():
                make_plan(of, out)
        rows += train_all(then, out, processes, progress)
    content = {
        "measured": "held-out losses; CPU seconds of training steps on one thread",
        "emulated": "the weak device class of the plan is half of this machine", 
        "machine": machine(), "qsync": qsync.__version__, "commit": commit(), "seeds": list(range(seeds)),
        "settings": [asdict(of) for of in settings], "summary": summary(rows), "rows": rows,
    }  # fmt: skip
    write_json(out / "expansion.json", content)
    write_text(out / "expansion.md", markdown(content))
    picture(rows, out / "expansion.png")
    Console().print(table(content["summary"]))


def sizes_of(text: str | None) -> Sizes | None:
    """Sizes as they are given on the command line. Raises QSyncError for what are none.

    >>> sizes_of("192,4,6")
    Sizes(width=192, layers=4, heads=6)
    """
    if text is None:
        return None
    parts = text.split(",")
    if len(parts) != 3 or not all(part.strip().isdecimal() and int(part) > 0 for part in parts):
        raise QSyncError(
            f"sizes are WIDTH,LAYERS,HEADS, found {text!r}; give three whole numbers, 192,4,6 for one"
        )
    return Sizes(*map(int, parts))


def methods(ratios: Sequence[float], with_plan: bool) -> list[Method]:
    """What is run beside the source and from scratch: expanded at every ratio, the others at the first."""
    others = [Method(start, ratios[0]) for start in ("even", "stacked", *(["plan"] if with_plan else []))]
    return [*(Method("expanded", ratio) for ratio in ratios), *others]


def train_all(
    tasks: Sequence[Task], out: Path, processes: int, progress: Callable[[Task, int, float | None], None]
) -> list[dict[str, Any]]:
    """The rows of all tasks, in their order: those kept in `out`, and the others, `processes` at a time.

    `progress(task, step, heldout)` is called as they go on; the loss is None where a run was there already.
    """
    rows: dict[int, dict[str, Any]] = {}
    for number, (of, method, seed) in enumerate(tasks):
        found = kept(of, method, seed, out)
        if found is not None and (method.start != "source" or source_path(out, of, seed).exists()):
            rows[number] = found
            progress(tasks[number], found["steps"], None)
    missing = [number for number in range(len(tasks)) if number not in rows]
    for number in missing if processes == 1 else ():
        of, method, seed = task = tasks[number]
        rows[number] = run(of, method, seed, out, lambda step, loss, task=task: progress(task, step, loss))
    if len(rows) == len(tasks):
        return [rows[number] for number in range(len(tasks))]
    context = get_context("spawn")
    with context.Manager() as manager, ProcessPoolExecutor(processes, mp_context=context) as pool:
        said = manager.Queue()
        running = {pool.submit(_in_process, tasks[number], out, number, said): number for number in missing}
        for future in _finished(running, said, lambda number, *rest: progress(tasks[number], *rest)):
            rows[running[future]] = future.result()
    return [rows[number] for number in range(len(tasks))]


def _finished(
    running: Iterable[Future[Any]], said: Any, progress: Callable[..., None]
) -> Iterable[Future[Any]]:
    """Futures as they are done; what runs say meanwhile is passed on."""
    pending = set(running)
    while pending:
        done, pending = wait(pending, timeout=0.5, return_when=FIRST_COMPLETED)
        try:
            while True:
                progress(*said.get_nowait())
        except queue.Empty:
            pass
        yield from done


def _in_process(task: Task, out: Path, number: int, said: Any) -> dict[str, Any]:
    """One run in a process of its own."""
    torch.set_num_threads(1)
    torch._dynamo.reset()
    of, method, seed = task
    return run(of, method, seed, out, lambda step, loss: said.put((number, step, loss)))


@contextmanager
def shown(tasks: Sequence[Task]) -> Iterator[Callable[[Task, int, float | None], None]]:
    """A bar over the steps of all runs; where there is no terminal a line for each run that is done."""
    console = Console(stderr=True)
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
    total = {task: _steps(task) for task in tasks}
    done = dict.fromkeys(tasks, 0)
    with Progress(*columns, console=console, disable=not console.is_terminal) as bar:
        line = bar.add_task("growing", total=sum(total.values()))

        def progress(task: Task, step: int, loss: float | None) -> None:
            of, method, seed = task
            done[task] = step
            text = f"{of.workload}, seed {seed}, {method.name}"
            bar.update(line, completed=sum(done.values()), description=text)
            if step >= total[task]:
                console.print(f"{text}: " + ("kept" if loss is None else f"held-out {loss:.4f}"))

        yield progress


def _steps(task: Task) -> int:
    of, method, _ = task
    return max(1, round(method.ratio * (of.source_steps if method.start == "source" else of.steps)))


if __name__ == "__main__":
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    try:
        typer.run(main)
    except QSyncError as error:
        raise SystemExit(f"expansion: {error}") from error
