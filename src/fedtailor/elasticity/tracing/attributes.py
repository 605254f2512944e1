"""Sizes that are attributes of the user's layers: ``self.head_dim``, ``self.split_sizes``, ``self.config.hidden_size``.

In the copy that is recorded they know where they come from (``Counted``), and so does a number in the graph that one of
them became: ``rules.py`` sees which attribute counts which axis. Pieces of the user's own class then have that
attribute at the size of the cut, as they have ``out_features`` of a linear layer.
"""

from __future__ import annotations

from collections.abc import Iterator
from types import ModuleType
from typing import Any

from torch import Tensor, nn

from fedtailor.elasticity.tracing.rules import Counted, rule_of_layer

_PLAIN = (nn.Module, Tensor, ModuleType, type, dict, str)


def label_sizes(root: nn.Module) -> None:
    """Let every whole number that lies on a user's layer of this copy know its place."""
    seen: set[int] = set()
    for path, part in root.named_modules():
        if rule_of_layer(type(part)) is not None:
            continue
        for prefix, holder in _holders(part):
            if id(holder) in seen:  # a configuration that all layers share has one place
                continue
            seen.add(id(holder))
            for name, value in list(holder.items()):
                labelled = _labelled(value, path, prefix + name)
                if labelled is not value:
                    holder[name] = labelled


def _holders(part: nn.Module) -> Iterator[tuple[str, dict[str, Any]]]:
    """The layer's own attributes, and those of plain objects among them: a configuration."""
    own = vars(part)
    yield "", own
    for name, value in list(own.items()):
        attributes = getattr(value, "__dict__", None)
        if isinstance(attributes, dict) and not isinstance(value, _PLAIN) and not callable(value):
            yield f"{name}.", attributes


def _labelled(value: Any, path: str, attribute: str) -> Any:
    if type(value) is int and value > 1:
        return Counted.at(value, path, attribute)
    if type(value) in (tuple, list) and value and all(type(entry) is int for entry in value):
        entries = (
            Counted.at(entry, path, attribute, index) if entry > 1 else entry
            for index, entry in enumerate(value)
        )
        return type(value)(entries)
    return value
