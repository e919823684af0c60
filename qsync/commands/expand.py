"""`qsync expand`: grow a saved model, and verify it before writing."""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import asdict, dataclass, replace
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
    sizes: dict[str, str]
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
            help="What to grow to, with commas or repeated: sizes of a recipe (width=768,layers=12), or "
            "fields of the config (hidden_size=1.5x,num_hidden_layers=+4).",
            show_default=False,
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
    each = [one for text in to or () for one in re.split(r",(?=[A-Za-z_.]\w*[\w.]*=)", text)]
    sizes = pairs_of(each, "--to", "NAME=NUMBER")
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

    if growth.out is not None:
        save.check_free(growth.out)
    model = load_expanded(growth.folder)
    has_state = (growth.folder / save.OPTIMIZER).is_file()
    split = growth.split or ("scalar" if has_state else "random")
    batch = _batch_to_verify_on(model, growth.inputs)
    plan = _plan(model, batch, growth.sizes, {"split": split, "depth": growth.depth, "seed": growth.seed})
    forecast = _forecast(model, plan, batch)
    found: dict[str, Any] = {**as_json(plan), "forecast": forecast}
    text = "\n".join([str(plan), "", *(f"{name}: {value}" for name, value in forecast.items())])
    if growth.out is None:
        return text, found
    progress("growing")
    big = plan.expand(model)
    progress("verifying")
    if batch is not None:
        verified = verify_expansion(model, big, batch)
        if not verified.passed:
            raise UnsupportedError(
                f"the grown model is {verified}; nothing was written; correct the growth recipe"
            )
        found["verified"] = {**asdict(verified), "passed": True, "words": str(verified)}
    progress("writing")
    save.expand_folder(growth.folder, growth.out, plan, model, big)
    return text, found


def _plan(model: Any, batch: Any, sizes: dict[str, str], options: dict[str, Any]) -> Any:
    """Plan by the fields of the config where it has all that are named, else by the model's recipe."""
    from qsync.expansion.derivation.growth_targets import plan_config_growth
    from qsync.expansion.plan.planner import plan_expansion
    from qsync.expansion.recipe.shipped_recipes import recipe_of

    config = getattr(model, "config", None)
    if config is None or not any(hasattr(config, name.partition(".")[0]) for name in sizes):
        recipe = recipe_of(model).to(**{name: _size(name, text) for name, text in sizes.items()})
        return plan_expansion(model, recipe, **options)
    if batch is None:
        raise QSyncError(
            f"the inputs of {type(model).__name__} are not known, by which its axes are traced; give "
            "--inputs FILE.safetensors"
        )
    plan = plan_config_growth(model, batch, sizes, **options)
    return replace(plan, recipe=replace(plan.recipe, inputs=None))  # verified once, before it is written


def _forecast(model: Any, plan: Any, batch: Any) -> dict[str, str]:
    """Say what the grown model has and costs, and what of a run from scratch growing saves."""
    import torch
    from torch.utils._pytree import tree_map_only

    from qsync.expansion.apply.grow import build_grown
    from qsync.expansion.apply.lr_schedule import RATIO
    from qsync.tracing.tracer import capture

    with torch.device("meta"):
        big = build_grown(model, plan).to("meta")
    numbers = [sum(value.numel() for value in one.parameters()) for one in (model, big)]
    found = {
        "parameters": f"{numbers[0]:,} -> {numbers[1]:,} ({numbers[1] / numbers[0]:.2f} x)",
        "exact": f"the function, up to rounding; eps of {len(plan.eps)} norms changes",
    }
    name = "FLOPs of a forward pass on the batch"
    on_meta = tree_map_only(torch.Tensor, lambda value: value.to("meta"), batch)
    try:
        counts = [sum(op.flops for op in capture(*one).ops) for one in ((model, batch), (big, on_meta))]
        found[name] = f"{counts[0]:,} -> {counts[1]:,} ({counts[1] / max(counts[0], 1):.2f} x)"
    except QSyncError as error:
        found[name] = f"not counted ({shortened(error)})"
    found["training"] = (
        f"{1 - RATIO:.0%} of the steps from scratch saved as published (LEMON, vision transformers); "
        "measured on small models: python -m qsync.experiments.expansion.compare_growth"
    )
    return found


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
        tokens = torch.randint(config.vocab_size, (2, length), generator=draw)
        is_pair = getattr(config, "is_encoder_decoder", False)
        return {"input_ids": tokens} | ({"decoder_input_ids": tokens} if is_pair else {})
    if hasattr(config, "num_channels"):
        side = getattr(config, "image_size", 64)
        return {"pixel_values": torch.randn(2, config.num_channels, side, side, generator=draw)}
    return None
