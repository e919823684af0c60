"""Losses, which reduce in their traced type."""

from __future__ import annotations

from qsync.operators.declaration import fixed

CROSS_ENTROPY = fixed("cross_entropy", is_loss=True, works_by_rule=True)

OPERATORS = (
    CROSS_ENTROPY,
    fixed(
        "loss", "mse_loss", "nll_loss", "l1_loss", "binary_cross_entropy_with_logits", "kl_div", is_loss=True
    ),
    fixed("log_softmax", passes_magnitude=True),
)
