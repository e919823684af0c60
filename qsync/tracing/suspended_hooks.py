"""Remove a model's hooks that step an optimizer inside backward, or wait for a gradient."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch.autograd.graph import get_gradient_edge

from qsync.tracing.reachable import reachable

_OF_MODULES = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks")
_Hooks = dict[int, Callable[..., Any]]


class SuspendedHooks:
    """The hooks of a model that are removed during planning.

    They are post-accumulate hooks of gradients (an optimizer step inside backward, an exchange), hooks of
    a parameter that can reach a weight or an optimizer, and hooks of a module that can reach an optimizer.
    Other hooks stay, as parts of a step.

    >>> hooks = SuspendedHooks(model); hooks.suspend(); loss().backward(); hooks.restore()
    """

    def __init__(self, model: torch.nn.Module) -> None:
        self._weights = {id(p) for p in model.parameters() if p.requires_grad}
        self._resting: list[tuple[_Hooks, list[int]]] = []
        self._before: list[tuple[_Hooks, _Hooks]] = []
        self._leaves: list[tuple[torch.Tensor, str]] = []  # (tensor, attribute) without hooks before
        self._ids: set[int] = set()
        self._harmless: dict[bool, set[int]] = {True: set(), False: set()}
        self._alive: list[object] = []  # keeps harmless objects alive, since ids identify them
        self.others: list[Callable[..., Any]] = []  # hooks of parameters that stay
        for module in model.modules():
            for name in _OF_MODULES:
                self._take(getattr(module, name), lambda hook: self._reaches(hook, weights=False))
        for parameter in model.parameters():
            self._take_of(parameter)

    def has(self, hook: object) -> bool:
        """Return whether planning removes this hook."""
        return id(hook) in self._ids

    def suspend(self) -> None:
        """Remove the selected hooks."""
        for hooks, keys in self._resting:
            for key in keys:
                hooks.pop(key, None)

    def suspend_of(self, leaf: torch.Tensor) -> None:
        """Select and remove the hooks of another tensor, too."""
        if id(leaf) not in self._weights:
            self._weights.add(id(leaf))
            self._take_of(leaf)
            self.suspend()

    def restore(self) -> None:
        """Restore all hooks in their order, and remove hooks that were added since."""
        for hooks, before in self._before:
            hooks.clear()
            hooks.update(before)
        for leaf, name in self._leaves:
            if (hooks := getattr(leaf, name)) is not None:
                hooks.clear()

    def _take_of(self, leaf: torch.Tensor) -> None:
        for name in ("_post_accumulate_grad_hooks", "_backward_hooks"):
            hooks = getattr(leaf, name)
            if hooks is None:
                self._leaves.append((leaf, name))
            elif name == "_backward_hooks":
                self._take(hooks, lambda hook: self._reaches(hook, weights=True))
                self.others += [hook for hook in hooks.values() if not self.has(hook)]
            else:
                self._take(hooks, lambda _: True)
        for hooks in _of_accumulation(leaf):
            self._take(hooks, lambda _: True)

    def _take(self, hooks: _Hooks, rests: Callable[[Callable[..., Any]], bool]) -> None:
        keys = [key for key, hook in hooks.items() if rests(hook)]
        self._ids |= {id(hooks[key]) for key in keys}
        self._resting.append((hooks, keys))
        self._before.append((hooks, dict(hooks)))

    def _reaches(self, hook: Callable[..., Any], weights: bool) -> bool:
        """Return whether a hook can reach an optimizer or, with `weights`, a trained weight."""
        harmless, passed = self._harmless[weights], []
        for found in reachable([hook], harmless, lambda _: False):
            passed.append(found)
            if _is_optimizer(found) or (weights and id(found) in self._weights):
                harmless.difference_update(map(id, passed))
                return True
        self._alive += passed
        return False


def _is_optimizer(found: object) -> bool:
    return all(callable(getattr(type(found), name, None)) for name in ("step", "zero_grad"))


def _of_accumulation(leaf: torch.Tensor) -> Iterator[_Hooks]:
    """Yield the hook dictionaries of the autograd node that accumulates the gradient of a tensor.

    A new hook's handle gives access to the dictionary, which torch shares among all hooks of the node.
    """
    if leaf.requires_grad and leaf.is_leaf:
        node = get_gradient_edge(leaf).node
        for register in (node.register_hook, node.register_prehook):
            handle = register(lambda *_: None)
            hooks = handle.hooks_dict_ref()
            handle.remove()
            if hooks:
                yield hooks
