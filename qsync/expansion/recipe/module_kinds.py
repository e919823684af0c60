"""The kind of norm that a module computes: by its class, or by running it on random rows."""

from __future__ import annotations

import copy

import torch
from torch.nn.modules.batchnorm import _BatchNorm
from torch.nn.modules.instancenorm import _InstanceNorm

from qsync.errors import UnsupportedError

LAYER, RMS, BATCH = "layer norm", "RMS norm", "batch norm"
_EPS = ("eps", "variance_epsilon")  # attributes that hold eps; the second is that of Llama in transformers


def eps_name(module: torch.nn.Module) -> str | None:
    """Return the attribute that holds a norm's eps, or None."""
    if isinstance(module, torch.nn.RMSNorm):
        return "eps"
    return next((name for name in _EPS if isinstance(getattr(module, name, None), float)), None)


def eps_of(module: torch.nn.Module) -> float:
    """Return the eps of a norm.

    Without a stated eps, torch's RMSNorm uses that of its compute type, FP32 or FP64.
    """
    eps = getattr(module, eps_name(module) or "eps", None)
    is_double = getattr(getattr(module, "weight", None), "dtype", None) is torch.float64
    return float(eps) if eps is not None else torch.finfo(torch.float64 if is_double else torch.float32).eps


def is_without_weight(module: torch.nn.Module) -> bool:
    """Return whether a module is a norm over several channels without a weight.

    No parameter shows that such a norm exists.
    """
    over = (torch.nn.LayerNorm, torch.nn.RMSNorm, torch.nn.GroupNorm, torch.nn.LocalResponseNorm)
    return isinstance(module, over) and getattr(module, "weight", None) is None


def norm_kind(module: torch.nn.Module, path: str) -> str | None:
    """Return LAYER, RMS or BATCH for a norm, None for another module.

    BATCH stands for every norm that acts on one channel at a time. An unknown class is run on random rows in
    FP64: the RMSNorm of one model family multiplies by its weight, that of another by 1 + weight.

    Raises:
        UnsupportedError: The module is a norm of another kind.
    """
    if isinstance(module, (_BatchNorm, _InstanceNorm)):
        return BATCH
    weight = getattr(module, "weight", None)
    if isinstance(module, torch.nn.GroupNorm):
        raise UnsupportedError(
            f"{path} is a GroupNorm, for which no lossless expansion is known; keep its input fixed with "
            f"the line `{path}  _ -> _`"
        )
    if isinstance(module, (torch.nn.LayerNorm, torch.nn.RMSNorm)):
        if isinstance(weight, torch.Tensor) and weight.ndim != 1:
            raise UnsupportedError(
                f"{path} normalizes over {weight.ndim} axes at once, for which no lossless expansion is "
                f"known; keep them fixed with the line `{path}  _ -> _`"
            )
        return LAYER if isinstance(module, torch.nn.LayerNorm) else RMS
    if not isinstance(weight, torch.Tensor) or weight.ndim != 1 or eps_name(module) is None:
        return None
    kind = _kind_by_trial(module, eps_of(module))
    if kind is None:
        raise UnsupportedError(
            f"{path} ({type(module).__name__}) computes neither a layer norm nor an RMS norm of its rows, "
            "times its weight; replace it by one that does (folding 1 + weight into its weight), or keep "
            f"its input fixed with the line `{path}  _ -> _`"
        )
    return kind


def _kind_by_trial(module: torch.nn.Module, eps: float) -> str | None:
    """Return the kind of norm that a module computes on random rows, or None.

    The rows are as wide as the module's weight. Weight and bias are random as well.
    """
    draws = torch.Generator().manual_seed(0)
    is_empty = any(value.is_meta for value in module.parameters())
    own = (copy.deepcopy(module).to_empty(device="cpu") if is_empty else copy.deepcopy(module).cpu()).double()
    for value in own.parameters():
        value.data = torch.randn(value.shape, generator=draws, dtype=torch.float64)
    weight, bias = own.get_parameter("weight"), getattr(own, "bias", None)
    x = torch.randn(5, len(weight), generator=draws, dtype=torch.float64)
    centred = x - x.mean(-1, keepdim=True)
    added = bias if isinstance(bias, torch.Tensor) else 0.0
    try:
        with torch.no_grad():
            found = own(x)
    except Exception:  # a module that does not accept rows may raise anything
        return None
    for kind, rows in ((RMS, x), (LAYER, centred)):
        wanted = rows * (rows.square().mean(-1, keepdim=True) + eps).rsqrt() * weight + added
        # Unknown classes may compute in FP32 inside.
        is_alike = isinstance(found, torch.Tensor) and found.shape == wanted.shape
        if is_alike and torch.allclose(found.double(), wanted, rtol=1e-5, atol=1e-5):
            return kind
    return None
