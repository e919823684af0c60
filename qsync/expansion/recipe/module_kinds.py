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
    FP64: one may multiply by its weight, another by 1 + weight (`weight_offset`).

    Raises:
        UnsupportedError: The module is a norm of another kind.
    """
    if isinstance(module, (_BatchNorm, _InstanceNorm)):
        return BATCH
    weight = getattr(module, "weight", None)
    if isinstance(module, torch.nn.GroupNorm) and module.num_groups in (1, module.num_channels):
        return LAYER if module.num_groups == 1 else BATCH
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
    elif not isinstance(weight, torch.Tensor) or weight.ndim != 1 or eps_name(module) is None:
        return None
    kind, _ = _tried(module)
    if kind is None:
        raise UnsupportedError(
            f"{path} ({type(module).__name__}) computes neither a layer norm nor an RMS norm of its rows, "
            "times an affine function of its weight; replace it by one that does, or keep its input fixed "
            f"with the line `{path}  _ -> _`"
        )
    return kind


def weight_offset(module: torch.nn.Module) -> float:
    """Return c of a norm that multiplies by its weight plus c, up to a factor; 0 for most."""
    return _tried(module)[1]


def _tried(module: torch.nn.Module) -> tuple[str | None, float]:
    """Return the kind of norm that a module computes on random rows, and its `weight_offset`.

    The rows are as wide as the module's weight; a module may take channels in dimension 1. Weight and bias
    are random. With weight 0 and 1 the module shows the affine function of its weight.
    """
    if type(module) in (torch.nn.LayerNorm, torch.nn.RMSNorm, torch.nn.GroupNorm):
        return (RMS if type(module) is torch.nn.RMSNorm else LAYER), 0.0
    draws = torch.Generator().manual_seed(0)
    is_empty = any(value.is_meta for value in module.parameters())
    own = (copy.deepcopy(module).to_empty(device="cpu") if is_empty else copy.deepcopy(module).cpu()).double()
    for value in own.parameters():
        value.data = torch.randn(value.shape, generator=draws, dtype=torch.float64)
    weight, bias = own.get_parameter("weight"), getattr(own, "bias", None)
    drawn = weight.detach().clone()
    x = torch.randn(5, len(weight), generator=draws, dtype=torch.float64)
    added = bias if isinstance(bias, torch.Tensor) else 0.0

    def run(values: torch.Tensor | float) -> torch.Tensor:
        weight.data = torch.ones_like(weight) * values
        try:
            found: torch.Tensor = own(x)
        except Exception:  # a module that does not accept rows may raise anything
            found = own(x[:, :, None, None])[:, :, 0, 0]
        return found.double() - added

    try:
        with torch.no_grad():
            first, second, found = run(0.0), run(1.0), run(drawn)
    except Exception:
        return None, 0.0
    for kind, rows in ((RMS, x), (LAYER, x - x.mean(-1, keepdim=True))):
        normed = rows * (rows.square().mean(-1, keepdim=True) + eps_of(module)).rsqrt()
        at_zero, slope = (float((one / normed).median()) for one in (first, second - first))
        wanted = normed * (at_zero + slope * drawn)
        # Unknown classes may compute in FP32 inside.
        is_alike = slope and found.shape == wanted.shape
        if is_alike and torch.allclose(found, wanted, rtol=1e-5, atol=1e-5):
            return kind, round(at_zero / slope, 4)
    return None, 0.0
