"""``auto``: stands for the method that a run takes once it knows its model and its fleet (``fedtailor.run.auto``)."""

from __future__ import annotations

from dataclasses import dataclass

from fedtailor.errors import require
from fedtailor.method import Method
from fedtailor.methods.registry import stand_in


@stand_in("auto")
@dataclass(frozen=True)
class Auto(Method):
    """No method: what a config says of training, server and merging, until a method is taken that runs with it."""

    def __post_init__(self) -> None:
        super().__post_init__()
        for name in ("norm", "weighting"):
            value, usual = getattr(self, name), getattr(Method, name)
            expected = (
                "nothing with method.name = 'auto', which takes a method and its settings; name one to set it"
            )
            require(value == usual, f"method.{name}", value, expected)
