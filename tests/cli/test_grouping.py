"""Options that a command takes as one value."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated

import typer
from typer.testing import CliRunner

from fedtailor.cli.grouping import grouped


@dataclass(frozen=True)
class Place:
    """Where."""

    town: Annotated[str, typer.Argument()]
    number: Annotated[int, typer.Option("--house")] = 1
    names: Annotated[list[str] | None, typer.Option("--name")] = None


def called(*words: str) -> list[tuple[Place, bool]]:
    seen: list[tuple[Place, bool]] = []
    app = typer.Typer()

    @app.command()
    @grouped
    def visit(place: Place, loud: Annotated[bool, typer.Option("--loud")] = False) -> None:
        seen.append((place, loud))

    result = CliRunner().invoke(app, list(words))
    assert result.exit_code == 0, result.output
    return seen


def test_fields_are_options_and_arrive_as_one_value():
    assert called("Ulm") == [(Place("Ulm"), False)]
    words = ("Ulm", "--house", "7", "--name", "a", "--name", "b", "--loud")
    assert called(*words) == [(Place("Ulm", 7, ["a", "b"]), True)]
