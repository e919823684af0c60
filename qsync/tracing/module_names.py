"""The names of traced operators: the model's paths of the modules that call them."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Mapping

import torch.fx

from qsync.operators.registry import has_module


def operator_name(path: str, kind: str) -> str:
    """Return an operator's name: its module's path, and its kind unless the module has that kind."""
    own = has_module(kind) or kind == path.rpartition(".")[2]
    return path if own and path else f"{path}.{kind}" if path else kind


def roots_of(graph: torch.fx.Graph, value_of: Mapping[torch.fx.Node, str]) -> dict[str, str]:
    """Return local name -> model path of the modules in a traced frame, `self` and others.

    Parameters show the path: if module `self.fc` uses the parameter `layers.0.fc.weight`, then `self` is
    `layers.0`. `value_of` has the names of the graph's inputs.
    """
    votes: dict[str, list[str]] = {}
    for node in graph.nodes:
        base, path = module_place(node)
        for source in node.all_input_nodes if base else ():
            owner = value_of.get(source, "").partition("@")[0].rpartition(".")[0]
            if source.op != "placeholder" or not owner:
                continue
            # The frame's `self` may use weights of its children directly, so its path is not taken from
            # these. Other local names (`___stack...`) are layers.
            if path and (owner == path or owner.endswith("." + path)):
                votes.setdefault(base, []).append(owner.removesuffix(path).rstrip("."))
            elif not path and base.startswith("___stack"):
                votes.setdefault(base, []).append(owner)
    roots = {base: "" if "" in found else found[0] for base, found in votes.items()}
    # Calls without a module belong to the frame's `self`, whose path follows from children or own weights.
    own = [
        value_of[node].partition("@")[0].rpartition(".")[0]
        for node in graph.find_nodes(op="placeholder")
        if str(node.target).startswith("L_self_parameters_") and node in value_of
    ]
    return roots | {"": roots["self"] if "self" in roots else next(iter(own), "")}


def name_from_model(module: torch.fx.GraphModule, names: Mapping[int, str]) -> None:
    """Shorten a graph's module paths to start at the model, if an outer torch.compile traced them.

    `names` maps the id of each parameter and buffer to its name, which reveals the prefix of the model.
    """
    votes: Counter[str] = Counter()
    for node in module.graph.nodes:
        path = ".".join(filter(None, module_place(node)))
        for source in node.all_input_nodes if path else ():
            owner = names.get(id(source.meta.get("example_value")), "").rpartition(".")[0]
            if owner and path.endswith("." + owner):
                votes[path.removesuffix("." + owner)] += 1
    longest = votes.most_common(1)[0][0] if votes else ""
    for node in module.graph.nodes:
        path = ".".join(filter(None, module_place(node)))
        if longest and f"{path}.".startswith(f"{longest}."):
            (*_, (key, (_, kind))) = node.meta["nn_module_stack"].items()
            node.meta["nn_module_stack"] = {key: (f"L['self']{path.removeprefix(longest)}", kind)}


def module_place(node: torch.fx.Node) -> tuple[str, str]:
    """Return (local name, path from it) of a node's module in its frame; empty without a module.

    The local name is `self` or another one, or an item: `args[0]` in a decorator that takes `*args`.
    """
    stack = node.meta.get("nn_module_stack")
    text = next(reversed(stack.values()))[0] if stack else ""
    base = re.match(r"L\['([^']*)'\]((?:\[\d+\])*)", text)
    return ("".join(base.groups()), _module_path(text[base.end() :])) if base else ("", _module_path(text))


def argument_name(text: str) -> str:
    """Return an argument's name: `l_kwargs_input_ids_` -> `input_ids`."""
    return re.sub(r"^l_(?:args|kwargs)?_?", "", text.lower()).strip("_") or text


def _module_path(text: str) -> str:
    """Return a module's path from the tracer's expression: `.layers._modules['0'].fc` -> `layers.0.fc`."""
    text = re.sub(r"\.(?:__dict__\.)?_(?:modules|orig_mod)\b", "", text)
    text = re.sub(r"\.forward\.module\b", "", text)  # the expression in activation_recomputation
    text = re.sub(r"\[['\"]?([^'\"\]]+)['\"]?\]", r".\1", text)
    # torch's checkpoint_wrapper also omits itself in names of parameters.
    text = re.sub(r"(?:\.__dict__)?(?:\._modules)?\._checkpoint_wrapped_module\b", "", text)
    return text.strip(".").removesuffix("._call_impl")
