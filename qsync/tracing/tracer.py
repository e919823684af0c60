"""Capture a model as segments and an OpGraph with torch.compile's tracer, without side effects."""

from __future__ import annotations

import logging
import re
import sys
import weakref
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import cache, partial
from types import CodeType
from typing import Any

import torch
import torch._dynamo
import torch.fx
from torch._C._dynamo.eval_frame import _debug_get_cache_entry_list
from torch._C._functorch import peek_interpreter_stack
from torch._dynamo import convert_frame, eval_frame, trace_rules
from torch._dynamo.utils import counters
from torch._subclasses.fake_tensor import fake_tensor_tls
from torch.nn import functional
from torch.utils._python_dispatch import (
    _get_current_dispatch_mode,
    is_in_any_mode_without_ignore_compile_internals,
)
from torch.utils._pytree import tree_leaves

from qsync.backend.devices.device_detection import device_of
from qsync.errors import CalibrationError, NothingToLowerError
from qsync.operators.declaration import Role
from qsync.records.graph import Op, OpGraph
from qsync.records.kernel_support import is_fixed_despite_kernels
from qsync.tracing.graph_sharing import SharedGraph
from qsync.tracing.held_state import first_call, undisturbed
from qsync.tracing.operator_table import DTYPES
from qsync.tracing.replaced_forward import LAYER_FILES, compiled_by, forward_codes, running_plain, untraced
from qsync.tracing.segments import Segment, join, read_segment

_CHECKS_MASK = "_check_key_padding_mask"  # function of torch.nn.functional in some releases
_ASKS = "it asks the tracer itself"  # reason for not tracing: some releases of torch cannot


def capture(model: torch.nn.Module, example_inputs: Any) -> OpGraph:
    """Capture the operators of `model` when it runs on these inputs.

    Runs the model twice, since its first call may initialize it, and restores it afterwards. On the meta
    device nothing is computed, so a model larger than memory can be captured.
    `example_inputs` is a tensor, a tuple (positional) or a dict (keywords). Raises TracingError when
    torch.compile finds no operator to trace, and CalibrationError for an empty batch.

    >>> graph = qsync.capture(torch.nn.Linear(4, 2), torch.randn(8, 4))
    """
    return join(trace(model, example_inputs), type(model).__name__)


def trace(model: torch.nn.Module, example_inputs: Any) -> list[Segment]:
    """Trace `model` on these inputs; return its segments in execution order."""
    args, kwargs = call_arguments(example_inputs)
    check_batch(args, kwargs)
    device, names = device_of(model), tensor_names(model)
    segments: list[Segment] = []

    def record(module: torch.fx.GraphModule, inputs: list[Any]) -> Any:
        shared = SharedGraph(
            module, inputs, lambda: names, partial(read_segment, names=names, earlier=segments)
        )

        def run(*args: Any) -> Any:
            segments.append(shared.of(args))
            return module.forward(*args)

        return run

    with undisturbed(model, args, kwargs), without_autocast(device):
        with running_plain(model):
            first_call(model, lambda: model(*args, **kwargs))
        breaks, num_skipped = graph_breaks(), num_skipped_frames()
        # A fresh callable, so that nothing compiled for the user's model is reused or evicted.
        with dynamo_settings(), _constants_of(device), compiled_by(model, record, dynamic=False):
            try:
                model(*args, **kwargs)
            except torch._dynamo.exc.BackendCompilerFailed as error:
                raise error.inner_exception from None
            except torch._dynamo.exc.TorchDynamoException as error:
                raise cannot_trace(model, error) from None
    why_skipped(model, breaks, num_skipped)
    ops = [op for segment in segments for op in segment.ops]
    if not any(op.role is Role.ADJUSTABLE for op in ops):
        raise nothing_to_lower(model, breaks, ops)
    return segments


@untraced(_ASKS)
def graph_breaks() -> dict[str, int]:
    """Return the tracer's number of stops so far, by reason: graph breaks, and skipped whole frames."""
    return {**counters["unimplemented"], **counters["graph_break"]}


@untraced(_ASKS)
def why_broken(breaks: dict[str, int]) -> str:
    """Return the reason of the tracer's stops since `breaks`; empty if it did not stop."""
    new = [reason for reason, count in graph_breaks().items() if count > breaks.get(reason, 0)]
    return _reason("\n".join(new)) if new else ""


@untraced(_ASKS)
def num_skipped_frames() -> int:
    """Return the number of frames that the tracer skipped so far, whose own code is not lowered."""
    return int(counters["frames"]["total"] - counters["frames"]["ok"])


@untraced(_ASKS)
def why_skipped(model: torch.nn.Module, breaks: dict[str, int], num_skipped: int) -> str:
    """Return why the tracer skipped a frame of a model; empty if it did not.

    `breaks` and `num_skipped` are from before the model ran. The tracer never retries a skipped frame, so the
    reason is stored with the frame's code, for later models that run it. Frames of torch's own layers are
    traced again for every model (`compile_forward`).
    """
    codes = [code for code in forward_codes(model) if _is_given_up(code)]
    if num_skipped_frames() > num_skipped:
        reason = why_broken(breaks) or "torch gives no reason"
        _SKIPPED.update(dict.fromkeys(codes, reason))
        return reason
    return next((_SKIPPED[code] for code in codes if code in _SKIPPED), "")


@untraced(_ASKS)
def met_recompile_limit(model: torch.nn.Module) -> bool:
    """Return whether code of a model has reached the recompile limit of the user's torch.compile.

    From then on torch runs this code untraced at every new shape, for every caller.
    """
    limit = torch._dynamo.config.recompile_limit
    own = (code for code in forward_codes(model) if code.co_filename not in LAYER_FILES)
    return any(len(_debug_get_cache_entry_list(code)) >= limit for code in own)


_HINTING = logging.getLogger("torch._dynamo.variables.tensor")
_SKIPPED: weakref.WeakKeyDictionary[CodeType, str] = weakref.WeakKeyDictionary()


def _is_given_up(code: CodeType) -> bool:
    """Return whether the tracer saw this code, outside torch's layers, but has no graph of it."""
    is_torch_s = code.co_filename in LAYER_FILES
    return not is_torch_s and code in convert_frame.input_codes and not _debug_get_cache_entry_list(code)


def why_untraced() -> str | None:
    """Return the present reason why torch.compile runs modules untraced; None without one."""
    if is_in_any_mode_without_ignore_compile_internals():
        return f"{type(_get_current_dispatch_mode()).__name__} is on, which torch.compile runs nothing under"
    transform = peek_interpreter_stack()
    if transform is not None:
        return f"torch.func.{transform.key().name.lower()} is around it, which torch.compile cannot trace in"
    if torch._dynamo.config.disable or eval_frame._stance.stance != "default":
        return "torch.compile is switched off (torch.compiler.set_stance, TORCH_COMPILE_DISABLE)"
    return None


def cannot_trace(model: object, error: Exception) -> NothingToLowerError:
    """Return a one-sentence error for a model that the tracer failed on."""
    return NothingToLowerError(f"torch.compile cannot trace {type(model).__name__}: {_reason(error)}")


def nothing_to_lower(
    model: torch.nn.Module, breaks: dict[str, int], ops: Sequence[Op] = ()
) -> NothingToLowerError:
    """Return the error for a model without an operator that can be lowered.

    It names the graph break since `breaks`, or the reason why the traced operators are fixed.
    """
    broken = why_broken(breaks)
    reason = broken or "no tensor operator was reached"
    fixed = [op for op in ops if is_fixed_despite_kernels(op)]
    instead = "train it as it is, or make its forward traceable"
    if fixed:
        reason = f"{fixed[0].name} stays as it is because {fixed[0].fixed_because}"
        if fixed[0].dtype in ("bf16", "fp16"):
            instead = f'model.float() with base="{fixed[0].dtype}" computes in it, with weights in FP32'
        elif fixed[0].dtype == "fp64":
            instead = "convert it with model.float(), or train it as it is"
    elif ops and not broken:
        reason = f"none of the {len(ops)} operators traced is a product in FP32 that there are kernels for"
    return NothingToLowerError(
        f"torch.compile found nothing to lower in {type(model).__name__}: {reason}; {instead}"
    )


def call_arguments(example_inputs: Any) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Return positional and keyword arguments from a tensor, a tuple or a dict."""
    if isinstance(example_inputs, dict):
        return (), example_inputs
    if hasattr(example_inputs, "keys"):  # Hugging Face's BatchEncoding and other mappings
        return (), dict(example_inputs)
    if isinstance(example_inputs, (tuple, list)):
        return tuple(example_inputs), {}
    return (example_inputs,), {}


def check_batch(args: tuple[Any, ...], kwargs: dict[str, Any], is_opaque: bool = False) -> None:
    """Raise CalibrationError unless the example batch has a tensor, and no empty tensor.

    Tensors in nested lists and dicts count. Tensors inside other objects are not visible; with `is_opaque`, a
    batch without visible tensors is valid.
    """
    tensors = [value for value in tree_leaves((args, kwargs)) if isinstance(value, torch.Tensor)]
    if not tensors and not is_opaque:
        raise CalibrationError(
            "the example batch holds no tensor; pass one real batch, as you would to the model"
        )
    for value in tensors:
        if value.numel() == 0:
            raise CalibrationError(
                f"the example batch has a tensor of shape {tuple(value.shape)}; pass one that is not empty"
            )


def tensor_names(model: torch.nn.Module) -> dict[int, str]:
    """Return id -> name of each parameter and buffer; a tied one has its first name."""
    names: dict[int, str] = {}
    for name, tensor in [*model.named_parameters(), *model.named_buffers()]:
        names.setdefault(id(tensor), name)
    return names


_has_autocast = cache(torch.amp.is_autocast_available)  # cached, as every call needs it


@untraced(_ASKS)
def autocast_type(device: torch.device) -> str | None:
    """Return the type of the active torch.autocast for a device; None without one."""
    if not _has_autocast(device.type) or not torch.is_autocast_enabled(device.type):
        return None
    return DTYPES[torch.get_autocast_dtype(device.type)]


@contextmanager
def without_autocast(device: torch.device) -> Iterator[None]:
    """Disable torch.autocast within the context, since lowering decides all casts."""
    if autocast_type(device) is None:
        yield
        return
    with torch.autocast(device.type, enabled=False):
        yield


@contextmanager
def dynamo_settings() -> Iterator[None]:
    """Configure the tracer for qsync's graphs within the context.

    DDP's graph splitting is off, since a plan covers the whole graph and DDP forms buckets at run time. There
    is no recompile limit, beyond which torch silently runs the plain model in FP32. An RNN is one operator in
    FP32; else torch would skip the whole frame that calls it. A counter on a module (`self.step += 1`) is not
    a constant of the graph, and a hook added later to an inner module is traced. nn.MultiheadAttention is
    traced into its products; torch would treat it, or in evaluation several layers, as one operator.
    If a forward cannot be traced (a loop over experts that reads their token counts), its layers are traced
    one by one; torch would skip its own modules there. qsync's check of a padding mask replaces torch's, at
    whose message the tracer stops. The tracer's hints, ten lines per break, are dropped: `qsync.coverage`
    reports breaks.
    """
    traced_files = trace_rules.get_legacy_mod_inlinelist()
    layers = LAYER_FILES - traced_files
    traced_files |= layers
    in_graph, fast = trace_rules.get_torch_obj_rule_map(), torch.backends.mha.get_fastpath_enabled()
    rule = in_graph.pop(
        functional.multi_head_attention_forward, None
    )  # None inside another context of this kind
    if rule is not None:  # under `with torch.device(...)` the tracer cannot trace into the method
        in_graph[torch.Tensor.unflatten] = rule
    torch.backends.mha.set_fastpath_enabled(False)
    check_mask = getattr(functional, _CHECKS_MASK, _check_mask)
    setattr(functional, _CHECKS_MASK, _check_mask)
    try:
        with (
            _without_hints(),
            torch._dynamo.config.patch(
                optimize_ddp=False,
                allow_rnn=True,
                recompile_limit=sys.maxsize,
                accumulated_recompile_limit=sys.maxsize,
                allow_unspec_int_on_nn_module=True,
                skip_nnmodule_hook_guards=False,
                use_numpy_random_stream=True,  # else torch's draws and seeds replace NumPy's
            ),
        ):
            yield
    finally:
        traced_files -= layers
        torch.backends.mha.set_fastpath_enabled(fast)
        setattr(functional, _CHECKS_MASK, check_mask)
        if rule is not None:
            del in_graph[torch.Tensor.unflatten]
            in_graph[functional.multi_head_attention_forward] = rule


@contextmanager
def _without_hints() -> Iterator[None]:
    """Drop the tracer's logged hints about graph breaks within the context."""
    _HINTING.addFilter(_is_no_hint)
    try:
        yield
    finally:
        _HINTING.removeFilter(_is_no_hint)


def _is_no_hint(record: logging.LogRecord) -> bool:
    return "Graph break from `Tensor.item()`" not in str(record.msg)


@contextmanager
def _constants_of(device: torch.device) -> Iterator[None]:
    """Allow constants that a model on the meta device creates, within the context.

    torch.tensor creates meta tensors without the tracer, which then rejects them as foreign. An example is
    `torch.tensor([], device="meta")`, the empty cache of a Hugging Face model.
    """
    before = fake_tensor_tls.allow_non_fake_inputs_override
    fake_tensor_tls.allow_non_fake_inputs_override = True if device.type == "meta" else before
    try:
        yield
    finally:
        fake_tensor_tls.allow_non_fake_inputs_override = before


def _check_mask(key_padding_mask: torch.Tensor, src_len: int, bsz: int) -> None:
    """Raise AssertionError for a padding mask of another shape than (samples, positions)."""
    if key_padding_mask.shape[0] != bsz or key_padding_mask.shape[1] != src_len:
        raise AssertionError(
            f"key_padding_mask has shape {tuple(key_padding_mask.shape)}; give one of ({bsz}, {src_len})"
        )


def _reason(error: object) -> str:
    """Return the tracer's message in one line: its first line, the model's error, and the place."""
    text = str(error)
    lines = [line.strip() for line in text.splitlines() if line.strip()]
    reason = lines[0].rstrip(".") if lines else type(error).__name__
    met = re.search(r"got (\w+Error\(.*\))", text)
    if met:
        reason += f": {met[1]}"
    place = re.search(r'File "([^"]+)", line (\d+)', text) or re.search(r"\((\S+) line (\d+)\)", text)
    return f"{reason} ({place[1]}, line {place[2]})" if place else reason
