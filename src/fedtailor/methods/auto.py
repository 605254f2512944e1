"""``auto``: stands for the method that a run takes once it knows its model and its fleet (``fedtailor.run.auto``)."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from fedtailor.errors import require
from fedtailor.method import Method
from fedtailor.methods.registry import stand_in


@stand_in("auto")
@dataclass(frozen=True)
class Auto(Method):
    """No method: what a config says of training, server and merging, until a method is taken that runs with it."""

    # What [server] says: all else is the default of the method that is taken
    said: tuple[str, ...] = field(default=(), metadata={"setting": False})

    def __post_init__(self) -> None:
        super().__post_init__()
        for name in ("norm", "weighting"):
            value, usual = getattr(self, name), getattr(Method, name)
            expected = (
                "nothing with method.name = 'auto', which takes a method and its settings; name one to set it"
            )
            require(value == usual, f"method.{name}", value, expected)

    @property
    def server_said(self) -> dict[str, Any]:
        """The entries of [server] that were said: also those of an object that was given for it."""
        usual = vars(Method.server)
        return {
            name: value
            for name, value in vars(self.server).items()
            if name in self.said or value != usual[name]
        }
