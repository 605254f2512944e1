"""Names of tensors that stand beside the model's: ``conv1.weight@1/4`` belongs to ``conv1.weight`` and to the tag 1/4.

They have the type of the tensor that they belong to, are trained where it is trained, and are merged by name. A method
may also send what belongs to no tensor (``trajectory@sketch``); such values do not come back.
"""

from __future__ import annotations

MARK = "@"


def tagged(name: str, tag: str) -> str:
    """The name of a tensor that belongs to one tag alone.

    >>> tagged("bn1.running_mean", "1/4")
    'bn1.running_mean@1/4'
    """
    return f"{name}{MARK}{tag}"


def plain(name: str) -> str:
    """The tensor of the model that a name belongs to.

    >>> plain("conv1.weight@coefficients@1/4"), plain("conv1.weight")
    ('conv1.weight', 'conv1.weight')
    """
    return name.partition(MARK)[0]


def tag_of(name: str) -> str:
    """The last tag of a name; empty for a tensor of the model.

    >>> tag_of("conv1.weight@base3"), tag_of("conv1.weight")
    ('base3', '')
    """
    return name.rpartition(MARK)[2] if is_tagged(name) else ""


def untagged(name: str) -> str:
    """The name without its last tag.

    >>> untagged("conv1.weight@coefficients@1/4")
    'conv1.weight@coefficients'
    """
    return name.rpartition(MARK)[0] or name


def is_tagged(name: str) -> bool:
    """Whether a tensor stands beside the model's."""
    return MARK in name
