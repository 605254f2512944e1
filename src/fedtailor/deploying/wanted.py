"""What is to be deployed: which networks of a run, and in which form."""

from __future__ import annotations

import re
from dataclasses import dataclass

from fedtailor.deploying.formats import Format, format_named
from fedtailor.elasticity.costing.budget import Budget
from fedtailor.errors import FedtailorError, require, unknown

QUANTISATIONS = ("int8",)
SWITCHABLE = "switchable"  # the name of a network of several widths


@dataclass(frozen=True)
class Wanted:
    """Which networks of a run, in which formats; and what a manifest says that a run does not know."""

    budget: Budget | None = None
    all_tiers: bool = False
    client: int | None = None
    switchable: bool = False  # all tiers in one file, whose width is chosen when it runs
    formats: tuple[str, ...] = ("safetensors",)
    quantize: str | None = None
    licence: str = ""  # of the files, for the manifest and the card
    notes: str = ""  # where the data is from, what the network is not for

    def __post_init__(self) -> None:
        chosen = [self.budget is not None, self.all_tiers, self.client is not None, self.switchable]
        if sum(chosen) != 1:
            raise FedtailorError(
                "deploy: expected one of --budget, --all-tiers, --client or --switchable, or --pick to choose a file"
            )
        require(len(self.formats) > 0, "format", self.formats, "at least one")
        for name in self.formats:
            if self.switchable and not format_named(name).several_widths:
                raise format_named(name).one_width("--switchable")
            format_named(name)
        if self.quantize is not None and self.quantize not in QUANTISATIONS:
            raise unknown("quantisation", self.quantize, QUANTISATIONS)
        if self.quantize is not None and self.switchable:
            raise FedtailorError(
                "quantize: ranges of int8 belong to one width; expected it without switchable"
            )

    def file(self, name: str, form: Format) -> str:
        """What the file of a network is called."""
        stem = re.sub(r"[^\w.+-]+", "_", name)
        return f"{stem}{'.int8' if self.quantize else ''}{form.suffix}"
