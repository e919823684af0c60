"""Which norm a module is: known classes by their class, others by trying what they compute."""

from __future__ import annotations

import copy

import torch
from torch.nn.modules.batchnorm import _BatchNorm

from qsync.errors import UnsupportedError

LAYER, RMS, BATCH = "layer norm", "RMS norm", "batch norm"
_EPS = ("eps", "variance_epsilon")  # where classes keep it: the second is Hugging Face's Llama


def eps_name(module: torch.nn.Module) -> str | None:
    """The attribute that holds a norm's eps; None where there is none to be changed."""
    if isinstance(module, torch.nn.RMSNorm):
        return "eps"
    return next((name for name in _EPS if isinstance(getattr(module, name, None), float)), None)


def eps_of(module: torch.nn.Module) -> float:
    """A norm's eps; torch's RMSNorm takes that of its type where none is given."""
    eps = getattr(module, eps_name(module) or "eps", None)
    weight = getattr(module, "weight", None)
    return float(eps) if eps is not None else torch.finfo(getattr(weight, "dtype", torch.float32)).eps


def norm_kind(module: torch.nn.Module, path: str) -> str | None:
    """LAYER, RMS or BATCH; None for what is no norm. Raises UnsupportedError for a norm that is none of
    these.

    A class that torch does not have is tried on random rows, in FP64: one family's RMSNorm multiplies by its
    weight, another's by one more than it.
    """
    if isinstance(module, _BatchNorm):
        return BATCH
    if isinstance(module, torch.nn.LayerNorm):
        return LAYER
    if isinstance(module, torch.nn.RMSNorm):
        return RMS
    weight = getattr(module, "weight", None)
    if not isinstance(weight, torch.Tensor) or weight.ndim != 1:
        return None
    if isinstance(module, torch.nn.GroupNorm):
        raise UnsupportedError(
            f"{path} is a GroupNorm, for which no lossless expansion is known; leave its space alone"
        )
    if eps_name(module) is None:
        return None
    kind = _tried(module, eps_of(module))
    if kind is None:
        raise UnsupportedError(
            f"{path} ({type(module).__name__}) computes neither a layer norm nor an RMS norm of its rows, "
            "times its weight; no lossless expansion is known for it"
        )
    return kind


def _tried(module: torch.nn.Module, eps: float) -> str | None:
    own = copy.deepcopy(module).double().cpu()
    weight = own.get_parameter("weight")
    x = torch.randn(5, len(weight), generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    centred = x - x.mean(-1, keepdim=True)
    bias = getattr(own, "bias", None)
    added = bias if isinstance(bias, torch.Tensor) else 0.0
    with torch.no_grad():
        found = own(x)
        for kind, rows in ((RMS, x), (LAYER, centred)):
            wanted = rows * (rows.square().mean(-1, keepdim=True) + eps).rsqrt() * weight + added
            # Classes of others may compute in FP32 inside.
            if found.shape == wanted.shape and torch.allclose(found.double(), wanted, rtol=1e-5, atol=1e-5):
                return kind
    return None
