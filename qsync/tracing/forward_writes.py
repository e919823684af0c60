"""Buffers that forward may write to, and their restoration after calls without side effects."""

from __future__ import annotations

import torch


class BuffersBefore:
    """A snapshot of a model's buffers: the tensors, and copies of their values (none on meta).

    Forward may write to a buffer, or replace it by another tensor (`self.mean = 0.9 * self.mean + ...`).

    >>> before = BuffersBefore(model); model(batch); before.restore()
    """

    def __init__(self, model: torch.nn.Module) -> None:
        self._places = [(module, dict(module._buffers)) for module in model.modules() if module._buffers]
        tensors = {buffer for _, own in self._places for buffer in own.values() if buffer is not None}
        self._numbers = [(buffer, buffer.detach().clone()) for buffer in tensors if not buffer.is_meta]

    def restore(self) -> None:
        """Restore the buffers' values, and the tensors that forward replaced."""
        with torch.no_grad():
            for buffer, numbers in self._numbers:
                buffer.copy_(numbers)
        for module, own in self._places:
            for name, before in own.items():
                if name in module._buffers and module._buffers[name] is not before:
                    module._buffers[name] = before
