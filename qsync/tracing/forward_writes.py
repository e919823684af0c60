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


class FrozenBefore:
    """The frozen parameters as they are now, which forward may write to, as that of MoCo's key encoder.

    Their numbers are copied where they are no more than those that train: of a large frozen model that
    adapters train on, only tensors that are put in a parameter's place (`p.data = ...`) are undone.
    """

    def __init__(self, model: torch.nn.Module) -> None:
        own = [parameter for parameter in model.parameters() if not parameter.is_meta]
        frozen = [parameter for parameter in own if not parameter.requires_grad]
        trained = sum(parameter.nbytes for parameter in own if parameter.requires_grad)
        copied = sum(parameter.nbytes for parameter in frozen) <= trained
        self._kept = [(p, p.data, p.data.clone() if copied else None) for p in frozen]

    def restore(self) -> None:
        """Put back the tensors, and their numbers into those that were copied."""
        with torch.no_grad():
            for parameter, data, numbers in self._kept:
                if parameter.data_ptr() != data.data_ptr():
                    parameter.data = data
                if numbers is not None and not torch.equal(data, numbers):
                    data.copy_(numbers)
