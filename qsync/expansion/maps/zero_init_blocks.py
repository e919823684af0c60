"""Initialize new blocks to add nothing to their residual stream (LEMON, section 3.4)."""

from __future__ import annotations

from collections.abc import Collection

from qsync.errors import MismatchError, UnsupportedError
from qsync.expansion.maps.depth import Depth
from qsync.expansion.maps.tensor_maps import TensorMap
from qsync.expansion.maps.tensor_roles import Tensor
from qsync.expansion.recipe import module_kinds
from qsync.expansion.recipe.recipe import FIXED, Recipe


def check_blocks(recipe: Recipe, tensors: Collection[Tensor], depth: Depth) -> None:
    """Reject new blocks that do more than add to a declared residual stream.

    Raises:
        MismatchError: A block writes a space that is read outside, and the recipe does not declare it
            residual.
        UnsupportedError: A norm acts on the residual stream itself.
    """
    if not depth.new_paths:
        return
    outside = {space for t in tensors if not depth.block_of(t.name) for space in t.line.reads}
    for t in tensors:
        written = {*t.line.writes} & outside - {*recipe.residual, FIXED}
        if written and depth.block_of(t.name):
            space = sorted(written)[0]
            raise MismatchError(
                f"{t.path} is in a block and writes {space}, which is read after the blocks, but the recipe "
                f"{recipe.name} does not declare it residual: give residual=({space!r},)"
            )
        norms_stream = (
            t.norm in (module_kinds.LAYER, module_kinds.RMS)
            and t.line.writes[0] in recipe.residual
            and t.line.reads[0] in recipe.residual
        )
        if norms_stream and depth.block_of(t.name):
            raise UnsupportedError(
                f"{t.path} normalizes the residual stream itself, so a new block of {recipe.name} cannot be "
                "an identity; grow the width, and leave out layers"
            )
    for block, copies in depth.grown_blocks.items():
        if any(copy.is_new for copy in copies):
            _check_block(recipe, block, [t for t in tensors if depth.block_of(t.name) == block])


def _check_block(recipe: Recipe, block: str, tensors: Collection[Tensor]) -> None:
    """Require that a copied block adds to a residual stream that it also reads."""
    written = {t.line.writes[0] for t in tensors if adds_to_residual(recipe, t)}
    read = {space for t in tensors if t.line.reads != t.line.writes for space in t.line.reads}
    if not written:
        raise MismatchError(
            f"nothing in {block} writes {' or '.join(recipe.residual)}, the residual stream of the recipe "
            f"{recipe.name}; name the space that blocks add to with residual="
        )
    if strange := sorted(written - read):
        raise UnsupportedError(
            f"{block} adds to {strange[0]} but reads another space, so it cannot be copied; do not change "
            "the layers there"
        )


def adds_to_residual(recipe: Recipe, t: Tensor) -> bool:
    """Return whether the output of a tensor's module is added to a residual stream."""
    if t.norm in (module_kinds.LAYER, module_kinds.RMS) and t.line.reads[0] in recipe.residual:
        return False
    is_each = t.norm is None and t.line.reads == t.line.writes  # one filter per channel
    return t.line.writes[0] in recipe.residual and not is_each


def output_init_of(recipe: Recipe, t: Tensor, made: TensorMap, beside: Collection[Tensor], how: str) -> str:
    """Return the initialization of a new block's tensor: "zero", "cancel", or "" for a copy.

    `beside` holds the tensors of the copied block. Either the output product itself is zero, or the batch
    norm after it, whose weight then learns first. "cancel" needs two copies of every coordinate that is
    read.

    Raises:
        UnsupportedError: The block cannot be initialized in this way.
    """
    if not adds_to_residual(recipe, t):
        return ""
    writing = [
        other for other in beside if other.line.writes == t.line.writes and adds_to_residual(recipe, other)
    ]
    batch_norms = [other for other in writing if other.norm]
    comes_first = writing[0] in batch_norms and writing[0].norm == module_kinds.BATCH
    if batch_norms and (comes_first or not any(b.kind == "weight" for b in batch_norms)):
        raise UnsupportedError(
            f"{batch_norms[0].path} cannot silence a new block, because it has no weight or comes "
            "before what the block adds; make it write another space "
            f"(`{batch_norms[0].line.pattern}  {t.line.writes[0]} -> normed`), or leave out layers"
        )
    if batch_norms and how == "cancel":
        raise UnsupportedError(
            f"{batch_norms[0].path} is a {batch_norms[0].norm}, which amplifies what cancels before it; use "
            'depth="zero"'
        )
    if batch_norms:
        return "zero" if t.norm and t.kind in ("weight", "bias") else ""
    if how == "zero" or "reads" not in t.roles:
        return "zero"
    axis = made.axes[t.roles.index("reads")]
    if axis is None or int(axis.growth.num_copies.min()) < 2:
        raise UnsupportedError(
            f"{t.name} of a new block has too few inputs for two copies of each, so nothing can cancel; "
            'use depth="zero"'
        )
    return "cancel"
