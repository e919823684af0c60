"""The names of traced operators: the paths of the modules that call them, as the model has them."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Mapping

import torch.fx

from qsync.records.precision import CONVOLUTIONS

# Kinds of which torch has a module.
_MODULES_OWN = ("linear", "addmm", *CONVOLUTIONS, "rnn")


def operator_name(path: str, kind: str) -> str:
    """Return an operator's module path, and its kind unless it is its module's own product."""
    own = kind in (*_MODULES_OWN, path.rpartition(".")[2])
    return path if own and path else f"{path}.{kind}" if path else kind


def roots_of(graph: torch.fx.Graph, value_of: Mapping[torch.fx.Node, str]) -> dict[str, str]:
    """Return the path of each module that the traced frame calls by a local name, `self` or another.

    Parameters show it: if module `self.fc` uses the one named `layers.0.fc.weight`, then `self` is
    `layers.0`. `value_of` has the names of the values that enter the graph.
    """
    votes: dict[str, list[str]] = {}
    for node in graph.nodes:
        base, path = module_place(node)
        for source in node.all_input_nodes if base else ():
            owner = value_of.get(source, "").partition("@")[0].rpartition(".")[0]
            if source.op != "placeholder" or not owner:
                continue
            # A frame's own `self` may use the weights of its children directly; other local names are of
            # layers.
            if path and (owner == path or owner.endswith("." + path)):
                votes.setdefault(base, []).append(owner.removesuffix(path).rstrip("."))
            elif not path and base.startswith("___stack"):
                votes.setdefault(base, []).append(owner)
    roots = {base: "" if "" in found else found[0] for base, found in votes.items()}
    # Calls in the frame itself have no module: theirs is `self`, which its children or its own weights show.
    own = [
        value_of[node].partition("@")[0].rpartition(".")[0]
        for node in graph.find_nodes(op="placeholder")
        if str(node.target).startswith("L_self_parameters_") and node in value_of
    ]
    return roots | {"": roots["self"] if "self" in roots else next(iter(own), "")}


def name_from_model(module: torch.fx.GraphModule, names: Mapping[int, str]) -> None:
    """Let a graph name its modules from the model, which an outer torch.compile reaches by a longer path.

    `names` maps the id of each parameter and buffer to its name, which shows the path to the model.
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
    """Return what leads to a node's module in its frame, and the path from there; empty for no module.

    It is a local name, `self`, or an item of one: `args[0]` in a decorator that takes `*args`.
    """
    stack = node.meta.get("nn_module_stack")
    text = next(reversed(stack.values()))[0] if stack else ""
    base = re.match(r"L\['([^']*)'\]((?:\[\d+\])*)", text)
    return ("".join(base.groups()), _module_path(text[base.end() :])) if base else ("", _module_path(text))


def argument_name(text: str) -> str:
    """Return an argument's name: `l_kwargs_input_ids_` -> `input_ids`."""
    return re.sub(r"^l_(?:args|kwargs)?_?", "", text.lower()).strip("_") or text


def _module_path(text: str) -> str:
    """Return a module's path from where its frame finds it: `.layers._modules['0'].fc` -> `layers.0.fc`."""
    text = re.sub(r"\.(?:__dict__\.)?_(?:modules|orig_mod)\b", "", text)
    text = re.sub(r"\.forward\.module\b", "", text)  # the module, as activation_recomputation calls it
    text = re.sub(r"\[['\"]?([^'\"\]]+)['\"]?\]", r".\1", text)
    # torch's checkpoint_wrapper leaves itself out of the names of parameters, too.
    text = re.sub(r"(?:\.__dict__)?(?:\._modules)?\._checkpoint_wrapped_module\b", "", text)
    return text.strip(".").removesuffix("._call_impl")
