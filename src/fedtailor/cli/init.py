"""``fedtailor init``: write a commented config that runs as it is."""

from __future__ import annotations

from importlib import resources
from pathlib import Path
from typing import Annotated

import typer

from fedtailor.cli.output import console
from fedtailor.errors import FedtailorError


def init(
    path: Annotated[Path, typer.Argument(help="The file to write.")] = Path("fedtailor.toml"),
) -> None:
    """Write a commented config file that runs as it is (digits, 20 clients in five tiers)."""
    text = (resources.files("fedtailor.cli") / "template.toml").read_text(encoding="utf-8")
    try:
        with path.open("x", encoding="utf-8") as file:
            file.write(text.replace("{path}", str(path)))
    except FileExistsError:
        raise FedtailorError(
            f"{path} exists already: choose another name, `fedtailor init other.toml`"
        ) from None
    except OSError as error:
        raise FedtailorError(f"{path} cannot be written: {error.strerror or error}") from error
    console.print(f"Wrote {path}. Next:  fedtailor run {path}", markup=False)
