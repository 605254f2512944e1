"""Exports ``forward`` where ``recorder.py`` cannot follow it: ``torch.export``, at the price of fixed sizes.

Its graph consists of operations instead of layers, and every size in it is a number, so it is only used to find out
which channels belong together: ``numbering.py`` walks it like a recorded one. Pieces of the model are always of the
user's own class.
"""

from __future__ import annotations

import warnings
from collections.abc import Mapping, Sequence
from operator import attrgetter
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, fx, nn
from torch._export.verifier import SpecViolationError
from torch.nn import functional as F

from fedtailor.elasticity.tracing.example import copied, on_meta
from fedtailor.elasticity.tracing.rules import FUNCTION_RULES, Rule, TraceError, rule_of_layer


def export(root: nn.Module, args: Sequence[Any], kwargs: Mapping[str, Any], problem: str) -> fx.Graph:
    """The graph of ``root`` on the example; ``problem`` is why ``torch.fx`` gave up."""
    name = type(root).__name__
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # about attributes that layers set in forward, on a copy
            program = torch.export.export(root, copied(tuple(args)), copied(dict(kwargs)), strict=False)
            network = program.module(check_guards=False)
            assert isinstance(network, fx.GraphModule)
            known = {path for path, layer in root.named_modules() if rule_of_layer(type(layer)) is not None}
            for node in network.graph.nodes:
                _prepare(node, network, root, known)
            return network.graph
    except (
        RuntimeError, ValueError, TypeError, AttributeError, AssertionError, LookupError, SpecViolationError,
    ) as error:  # fmt: skip
        first = str(error).strip().splitlines()
        raise TraceError(
            f"{name} can be traced neither with torch.fx ({problem}) nor with torch.export ({type(error).__name__}: "
            f"{first[0] if first else ''}). Move the code that needs the values of tensors into a layer of its own and "
            "register a rule for it with fedtailor.layer_rule"
        ) from error


def _prepare(node: fx.Node, network: fx.GraphModule, root: nn.Module, known: set[str]) -> None:
    """Give an exported node what a recorded node has: its value, its source line, its layer."""
    if node.op == "get_attr":
        value = attrgetter(str(node.target))(network)
        node.meta["value"] = on_meta(value)
        owner, _, name = str(node.target).rpartition(".")
        if not hasattr(root.get_submodule(owner), name):
            setattr(root.get_submodule(owner), name, value)  # a constant that export found in the code
    else:
        node.meta["value"] = on_meta(node.meta.get("val"))
    stack = [path for path, _ in node.meta.get("nn_module_stack", {}).values()]
    node.meta["layer"] = next((path for path in reversed(stack) if path in known), "")
    node.meta["source_line"] = _source_line(node.meta.get("stack_trace") or "")


def _source_line(stack: str) -> str:
    """The innermost line of a stack trace that is not PyTorch's own."""
    home = str(Path(torch.__file__).parent)
    lines = [line.strip() for line in stack.splitlines() if line.strip().startswith('File "')]
    own = [line for line in lines if home not in line]
    if not own:
        return ""
    file, _, rest = own[-1][len('File "') :].partition('", line ')
    return f"{Path(file).name}:{rest.split(',')[0]}"


def rule_of_operation(operation: torch._ops.OpOverload) -> Rule | None:
    """The rule of ``aten::conv2d`` is that of ``F.conv2d``; a few operations have rules of their own."""
    full = operation._schema.name
    name = full.partition("::")[2]
    homes = (torch._C._nn, F, torch)
    found = [
        FUNCTION_RULES.get(getattr(home, name, None)) for home in homes if callable(getattr(home, name, None))
    ]
    candidates = [FUNCTION_RULES.get(operation), FUNCTION_RULES.get(full), *found]
    if hasattr(Tensor, name):
        candidates.append(FUNCTION_RULES.get(name))
    rule = next((rule for rule in candidates if rule is not None), None)
    if rule is None and name.endswith("_"):  # in place: ``aten::hardswish_`` is no function of ``F``
        rule = FUNCTION_RULES.get(getattr(F, name.rstrip("_"), None))
    return rule
