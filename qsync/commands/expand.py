"""`qsync expand`: grow a saved model, and verify it before writing."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Annotated, Any

import typer

from qsync.commands.options import MAX_SEED, Json, pairs_of, print_json, print_lines, working
from qsync.errors import FormatError, QSyncError, UnsupportedError, shortened


@dataclass(frozen=True, slots=True)
class _Growth:
    """Options of a growth: model, sizes, method, and output folder (None: do not write)."""

    folder: Path
    out: Path | None
    sizes: dict[str, int | tuple[int, ...]]
    split: str | None
    depth: str
    seed: int
    inputs: Path | None


def expand(
    folder: Annotated[
        Path, typer.Argument(help="A saved model: config.json and model.safetensors.", show_default=False)
    ],
    to: Annotated[
        list[str] | None,
        typer.Option(
            help="What to grow to: width=768, layers=12, heads=, mlp= ... Repeatable.", show_default=False
        ),
    ] = None,
    out: Annotated[
        Path | None, typer.Option(help="Folder for the grown model; without it, only its plan is shown.")
    ] = None,
    split: Annotated[
        str | None,
        typer.Option(
            help="random, scalar or even: how weights are shared.",
            show_default="scalar with optimizer.pt, else random",
        ),
    ] = None,
    depth: Annotated[str, typer.Option(help="zero or cancel: how new blocks are silenced.")] = "zero",
    seed: Annotated[int, typer.Option(min=0, max=MAX_SEED, help="Says what is drawn.")] = 0,
    inputs: Annotated[
        Path | None,
        typer.Option(
            help="A safetensors file of inputs to verify on, by argument.", show_default="random ones"
        ),
    ] = None,
    as_json: Json = False,
) -> None:
    """Grow a trained model without changing what it computes, and verify that."""
    sizes = {name: _size(name, text) for name, text in pairs_of(to, "--to", "NAME=NUMBER").items()}
    if not sizes:
        raise QSyncError("the target size is missing; give it with --to, e.g. --to width=768 --to layers=12")
    with working("reading the model") as progress:
        text, found = _grow(_Growth(folder, out, sizes, split, depth, seed, inputs), progress)
    if as_json:
        print_json(found)
        return
    if out is None:
        print_lines(text, "nothing written: --out FOLDER grows it")
        return
    verdict = "not verified: what it takes is not known; give --inputs FILE.safetensors"
    if "verified" in found:
        verdict = f"verified: {found['verified']['words']}"
    print_lines(text, verdict, f"written to {out}")


def _grow(growth: _Growth, progress: Callable[[str], None]) -> tuple[str, dict[str, Any]]:
    """Plan the growth; if `out` is given, grow, verify and write. Return the plan as text and JSON."""
    from qsync.expansion.apply.verification import verify_expansion
    from qsync.expansion.io import save
    from qsync.expansion.io.load import load_expanded
    from qsync.expansion.maps.describe import as_json
    from qsync.expansion.plan.planner import plan_expansion
    from qsync.expansion.recipe.shipped_recipes import recipe_of

    if growth.out is not None:
        save.check_free(growth.out)
    model = load_expanded(growth.folder)
    has_state = (growth.folder / save.OPTIMIZER).is_file()
    split = growth.split or ("scalar" if has_state else "random")
    recipe = recipe_of(model).to(**growth.sizes)
    plan = plan_expansion(model, recipe, split=split, depth=growth.depth, seed=growth.seed)
    found: dict[str, Any] = as_json(plan)
    if growth.out is None:
        return str(plan), found
    progress("growing")
    big = plan.expand(model)
    progress("verifying")
    batch = _batch_to_verify_on(model, growth.inputs)
    if batch is not None:
        verified = verify_expansion(model, big, batch)
        if not verified.passed:
            raise UnsupportedError(
                f"the grown model is {verified}; nothing was written; correct the growth recipe"
            )
        found["verified"] = {**asdict(verified), "passed": True, "words": str(verified)}
    progress("writing")
    save.expand_folder(growth.folder, growth.out, plan, model, big)
    return str(plan), found


def _size(name: str, text: str) -> int | tuple[int, ...]:
    try:
        numbers = tuple(int(part) for part in text.split(","))
    except ValueError:
        raise QSyncError(
            f"--to {name}= takes a whole number, or one per group of blocks (3,4,6), found {text!r}"
        ) from None
    return numbers if len(numbers) > 1 else numbers[0]


def _batch_to_verify_on(model: Any, path: Path | None) -> Any:
    """Return a safetensors file's tensors, or random inputs that fit the model's config."""
    import torch

    if path is not None:
        from safetensors import SafetensorError
        from safetensors.torch import load_file

        if not path.is_file():
            raise QSyncError(f"{path} does not exist; give --inputs a safetensors file")
        try:
            found = load_file(path)
        except SafetensorError as error:
            raise FormatError(
                f"{path} is not a safetensors file ({shortened(error)}); write it with "
                "safetensors.torch.save_file"
            ) from error
        return next(iter(found.values())) if len(found) == 1 else found
    config: Any = getattr(model, "config", None)
    draw = torch.Generator().manual_seed(0)
    if hasattr(config, "vocab_size"):
        length = min(16, getattr(config, "max_position_embeddings", 16))
        return {"input_ids": torch.randint(config.vocab_size, (2, length), generator=draw)}
    if hasattr(config, "num_channels"):
        side = getattr(config, "image_size", 64)
        return {"pixel_values": torch.randn(2, config.num_channels, side, side, generator=draw)}
    return None
