"""What forward may write to, to be put back after calls that shall leave nothing behind."""

from __future__ import annotations

import torch


class BuffersBefore:
    """The buffers as they are now: which tensors they are, and their numbers. Those on meta have none.

    Forward may write to a buffer, or put another tensor in its place (`self.mean = 0.9 * self.mean + ...`).

    >>> before = BuffersBefore(model); model(batch); before.restore()
    """

    def __init__(self, model: torch.nn.Module) -> None:
        self._places = [(module, dict(module._buffers)) for module in model.modules() if module._buffers]
        tensors = {buffer for _, own in self._places for buffer in own.values() if buffer is not None}
        self._numbers = [(buffer, buffer.detach().clone()) for buffer in tensors if not buffer.is_meta]

    def restore(self) -> None:
        """Put back the tensors, and their numbers into them."""
        with torch.no_grad():
            for buffer, numbers in self._numbers:
                buffer.copy_(numbers)
        for module, own in self._places:
            for name, before in own.items():
                if name in module._buffers and module._buffers[name] is not before:
                    module._buffers[name] = before
